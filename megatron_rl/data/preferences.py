"""Preference pairs: a prompt with a chosen and a rejected completion, as ids.

Ids are those of the prompt, then those of the completion: they are never tokenised together, so that the border is
the one that rollout and evaluation have. Rules, in this order:

1. The prompt is the row's own, or else what chosen and rejected share: their common messages, or their common text up
   to its last white space.
2. Chat: completion text is what the template writes after the prompt, up to its end-of-turn mark. Completions end with
   that mark, or with EOS where the template has none (and for text); it is trained on.
3. A prompt over max_prompt_length loses its left end (BOS kept), or the pair is left out ("filter").
4. A completion over what max_length leaves loses its right end, EOS with it, or the pair is left out ("filter").
5. Where not one token of a completion has room, or a completion is empty, the pair is dropped. So is one whose
   completions are equal, or became so by being cut: nothing can be preferred. All are counted.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.batch import PreferencePair
from megatron_rl.data.files import Row, read_sources
from megatron_rl.data.order import Ordered
from megatron_rl.data.text import Chat, TextFormat, as_prompt_chat, check_chat, check_text


@dataclass(frozen=True)
class PreferenceOptions:
    """What the data flags say."""

    files: tuple[str, ...]
    max_length: int  # tokens of prompt and completion together
    max_prompt_length: int | None = None  # None: as long as max_length lets it be
    prompt_key: str | None = None  # None: "prompt" where a row has it, else the prompt is what both completions share
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    apply_chat_template: bool = True
    system_prompt: str | None = None
    overlong: str = "truncate"  # or "filter"
    dataset_class: str | None = None  # file.py:Class, see files.CustomDataset
    weights: tuple[float, ...] = ()
    seed: int = 1234
    shuffle: bool = True
    drop_last: bool = True
    flag: str = "--train-data"

    def __post_init__(self) -> None:
        if self.overlong not in ("filter", "truncate"):
            raise ValueError(f"--overlong-prompts {self.overlong}: must be filter or truncate")
        if self.max_length < 2 or (self.max_prompt_length is not None and self.max_prompt_length < 1):
            raise ValueError(
                f"--max-length {self.max_length} and --max-prompt-length {self.max_prompt_length}: need room for a "
                "token of the prompt and one of the completion"
            )


@dataclass(frozen=True)
class PreferenceCounts:
    """What the truncation rules did."""

    filtered: int = 0  # pairs left out for their length
    dropped: int = 0  # pairs with an empty completion, or without room for a token of one
    equal: int = 0  # pairs of two equal completions
    truncated_prompts: int = 0
    truncated_completions: int = 0  # pairs in which one or both were cut

    def __add__(self, other: "PreferenceCounts") -> "PreferenceCounts":
        return PreferenceCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


PreferenceDataset = Ordered[PreferencePair]  # index is the row number over all files, rows left out counted


@dataclass(frozen=True)
class _Texts:
    prompt: str
    chosen: str
    rejected: str


def load_preferences(options: PreferenceOptions, tokenizer: Any) -> PreferenceDataset:
    """Reads, renders and tokenises every pair. ValueError for whatever is wrong with the files or their rows."""
    form = TextFormat(tokenizer, options.apply_chat_template, options.system_prompt)
    form.check()
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer of --hf-model has no EOS token: completions could not end")
    pairs, first, counts = [], 0, PreferenceCounts()
    for rows in read_sources(options.files, options.dataset_class, options.flag):
        kept = []
        for pair in _tokenise(rows, first, form, options):
            fitted, what = _fit(pair, form, options)
            counts += what
            kept += [fitted] if fitted is not None else []
        if not kept:
            raise ValueError(
                f"{rows[0].file}: none of the {len(rows)} pairs is left within --max-length {options.max_length} and "
                f"--max-prompt-length {options.max_prompt_length} (--overlong-prompts {options.overlong}): "
                + _summary(0, len(options.files), counts)
            )
        pairs.append(kept)
        first += len(rows)
    summary = _summary(sum(map(len, pairs)), len(options.files), counts)
    return Ordered(pairs, options.seed, options.weights, options.shuffle, options.drop_last, summary)


def _summary(pairs: int, files: int, counts: PreferenceCounts) -> str:
    parts = [f"{pairs:,} pairs from {files} file(s)"]
    for count, what in [
        (counts.filtered, "over-long left out"),
        (counts.dropped, "dropped without a response token"),
        (counts.equal, "dropped with two equal completions"),
        (counts.truncated_prompts, "with the prompt cut from the left"),
        (counts.truncated_completions, "with a completion cut from the right"),
    ]:
        parts += [f"{count:,} {what}"] if count else []
    return ", ".join(parts)


def _tokenise(rows: list[Row], first: int, form: TextFormat, options: PreferenceOptions) -> list[PreferencePair]:
    """Whole pairs, not yet cut; an empty completion has no ids."""
    texts = [_chat_texts(row, form, options) if form.apply_chat_template else _plain(row, options) for row in rows]
    prompts = form.encode_prompts([t.prompt for t in texts])
    chosen = form.encode_completions([t.chosen for t in texts])
    rejected = form.encode_completions([t.rejected for t in texts])
    for row, ids in zip(rows, prompts, strict=True):
        if not ids:
            raise row.error("the prompt has no tokens (mend the row or change --prompt-key)")
    numbered = enumerate(zip(prompts, chosen, rejected, strict=True), start=first)
    return [PreferencePair(index, *ids) for index, ids in numbered]


def _fit(
    pair: PreferencePair, form: TextFormat, options: PreferenceOptions
) -> tuple[PreferencePair | None, PreferenceCounts]:
    """The pair within the limits, or None; and which rule did what."""
    prompt, chosen, rejected = pair.prompt_ids, pair.chosen_ids, pair.rejected_ids
    if not chosen or not rejected:
        return None, PreferenceCounts(dropped=1)
    limit = options.max_prompt_length or options.max_length
    long_prompt = len(prompt) > limit
    if long_prompt:
        prompt = form.shorten(prompt, limit)
    room = options.max_length - len(prompt)
    long_completion = max(len(chosen), len(rejected)) > room
    if (long_prompt or long_completion) and options.overlong == "filter":
        return None, PreferenceCounts(filtered=1)
    if room < 1:
        return None, PreferenceCounts(dropped=1)
    fitted = PreferencePair(pair.index, prompt, chosen[:room], rejected[:room])
    if fitted.chosen_ids == fitted.rejected_ids:
        return None, PreferenceCounts(equal=1)
    return fitted, PreferenceCounts(truncated_prompts=int(long_prompt), truncated_completions=int(long_completion))


def _explicit_prompt(row: Row, options: PreferenceOptions) -> Any:
    """The row's prompt, or None where it has to be found."""
    if options.prompt_key is None:
        return row.values.get("prompt")
    return row.get(options.prompt_key, "--prompt-key")


def _plain(row: Row, options: PreferenceOptions) -> _Texts:
    chosen = check_text(row.get(options.chosen_key, "--chosen-key"), row, options.chosen_key, "--chosen-key")
    rejected = check_text(row.get(options.rejected_key, "--rejected-key"), row, options.rejected_key, "--rejected-key")
    prompt = _explicit_prompt(row, options)
    if prompt is None:
        prompt = shared_text(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        where = f"{options.chosen_key!r} and {options.rejected_key!r} share no beginning (give --prompt-key)"
    else:
        prompt = check_text(prompt, row, options.prompt_key or "prompt", "--prompt-key")
        where = "the prompt is empty (mend the row or change --prompt-key)"
    if not prompt.strip():
        raise row.error(where)
    return _Texts(prompt, chosen, rejected)


def shared_text(chosen: str, rejected: str) -> str:
    """What both begin with, up to the last white space in it: no word is split, spaces begin the completions."""
    found = re.match(r".*\s", os.path.commonprefix([chosen, rejected]), flags=re.DOTALL)
    return found.group().rstrip(" ") if found else ""


def _chat_texts(row: Row, form: TextFormat, options: PreferenceOptions) -> _Texts:
    prompt, chosen, rejected = _chats(row, options)
    start = form.render(prompt, row, answer=True)
    return _Texts(
        start, _completion(start, prompt, chosen, row, form), _completion(start, prompt, rejected, row, form)
    )


def _chats(row: Row, options: PreferenceOptions) -> tuple[Chat, Chat, Chat]:
    """Prompt, chosen and rejected as messages; the completions are one message of the assistant each."""
    chosen = _as_answer(row, options.chosen_key, "--chosen-key")
    rejected = _as_answer(row, options.rejected_key, "--rejected-key")
    value = _explicit_prompt(row, options)
    if value is None:
        limit = min(len(chosen), len(rejected)) - 1
        shared = next((i for i in range(limit) if chosen[i] != rejected[i]), max(limit, 0))
        if not shared:
            raise row.error(
                f"{options.chosen_key!r} and {options.rejected_key!r} share no message (give --prompt-key, or "
                "--no-apply-chat-template where they are texts that begin with the prompt)"
            )
        prompt = as_prompt_chat(chosen[:shared], row, options.chosen_key, "--chosen-key")
        chosen, rejected = chosen[shared:], rejected[shared:]
    else:
        prompt = as_prompt_chat(value, row, options.prompt_key or "prompt", "--prompt-key")
        chosen, rejected = (c[len(prompt) :] if c[: len(prompt)] == prompt else c for c in (chosen, rejected))
    for chat, flag in ((chosen, "--chosen-key"), (rejected, "--rejected-key")):
        roles = [message["role"] for message in chat]
        if roles != ["assistant"]:
            raise row.error(f"after the prompt there must be one message of the assistant, found {roles} ({flag})")
    return prompt, chosen, rejected


def _as_answer(row: Row, key: str, flag: str) -> Chat:
    value = row.get(key, flag)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    return check_chat(value, row, key, flag)


def _completion(start: str, prompt: Chat, answer: Chat, row: Row, form: TextFormat) -> str:
    """What the template writes after `start` for the answer; empty where the answer is."""
    if not answer[0]["content"].strip():
        return ""
    whole = form.render(prompt + answer, row, answer=False)
    if not whole.startswith(start):
        raise row.error(
            "the chat template writes the prompt otherwise when an answer follows: "
            f"{start[-60:]!r} does not begin the whole (give --no-apply-chat-template and text)"
        )
    return whole[len(start) :]
