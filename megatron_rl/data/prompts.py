"""Prompts for rollout: rows of text or chat lists, tokenised, over-long ones filtered or truncated at load."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.batch import Prompt
from megatron_rl.data.files import Row, read_sources
from megatron_rl.data.order import Ordered
from megatron_rl.data.text import TextFormat, as_prompt_chat, check_text


@dataclass(frozen=True)
class PromptOptions:
    """What the data flags say."""

    files: tuple[str, ...]
    max_prompt_length: int  # tokens, BOS and chat template included
    prompt_key: str = "prompt"
    label_key: str = "label"  # rules find its value under "label"; another key must be in every row
    apply_chat_template: bool = True
    system_prompt: str | None = None
    overlong: str = "filter"  # or "truncate": from the left, BOS kept
    dataset_class: str | None = None  # file.py:Class, see files.CustomDataset
    weights: tuple[float, ...] = ()  # one a file; empty: every row once an epoch
    seed: int = 1234
    shuffle: bool = True
    drop_last: bool = True  # the last, smaller batch of an epoch
    flag: str = "--train-data"  # the one that named the files, for messages

    def __post_init__(self) -> None:
        if self.overlong not in ("filter", "truncate"):
            raise ValueError(f"--overlong-prompts {self.overlong}: must be filter or truncate")
        if self.max_prompt_length < 1:
            raise ValueError(f"--max-prompt-length {self.max_prompt_length}: must be at least 1")


PromptDataset = Ordered[Prompt]  # Prompt.index is the row number over all files, filtered rows counted


def load_prompts(options: PromptOptions, tokenizer: Any) -> PromptDataset:
    """Reads, renders and tokenises every row. ValueError for whatever is wrong with the files or their rows."""
    form = TextFormat(tokenizer, options.apply_chat_template, options.system_prompt)
    form.check()
    prompts, first, filtered, truncated = [], 0, 0, 0
    for rows in read_sources(options.files, options.dataset_class, options.flag):
        loaded = _file_prompts(rows, first, form, options)
        kept = [_fit(p, form, options) for p in loaded]
        over = sum(len(p.token_ids) > options.max_prompt_length for p in loaded)
        filtered += over if options.overlong == "filter" else 0
        truncated += over if options.overlong == "truncate" else 0
        prompts.append([p for p in kept if p is not None])
        if not prompts[-1]:
            raise ValueError(
                f"{rows[0].file}: all {len(rows)} prompts are longer than --max-prompt-length "
                f"{options.max_prompt_length} (the shortest has {min(len(p.token_ids) for p in loaded)} tokens)"
            )
        first += len(rows)
    summary = _summary([len(p.token_ids) for file in prompts for p in file], options, filtered, truncated)
    return Ordered(prompts, options.seed, options.weights, options.shuffle, options.drop_last, summary)


def _summary(lengths: list[int], options: PromptOptions, filtered: int, truncated: int) -> str:
    longer = f"longer than {options.max_prompt_length} tokens (--max-prompt-length)"
    parts = [f"{len(lengths):,} prompts of {min(lengths)} to {max(lengths)} tokens from {len(options.files)} file(s)"]
    parts += [f"{filtered:,} {longer} left out"] if filtered else []
    parts += [f"{truncated:,} {longer} cut from the left"] if truncated else []
    return ", ".join(parts)


def _file_prompts(rows: list[Row], first: int, form: TextFormat, options: PromptOptions) -> list[Prompt]:
    texts = [_prompt_text(row, form, options) for row in rows]
    prompts = []
    for number, (row, text, ids) in enumerate(zip(rows, texts, form.encode_prompts(texts), strict=True)):
        if not ids:
            raise row.error(
                f"{options.prompt_key!r} has no tokens: {text[:60]!r} (mend the row or change --prompt-key)"
            )
        prompts.append(Prompt(first + number, ids, text, _with_label(row, options.label_key)))
    return prompts


def _prompt_text(row: Row, form: TextFormat, options: PromptOptions) -> str:
    key = options.prompt_key
    value = row.get(key, "--prompt-key")
    if form.apply_chat_template:
        return form.render(as_prompt_chat(value, row, key, "--prompt-key"), row, answer=True)
    text = check_text(value, row, key, "--prompt-key")
    if not text.strip():
        raise row.error(f"{key!r} is empty (mend the row or change --prompt-key)")
    return text


def _with_label(row: Row, label_key: str) -> Mapping[str, Any]:
    """The row; the label stands under "label" too. Rows without one are an error once a rule asks for it."""
    return row.values if label_key == "label" else {**row.values, "label": row.get(label_key, "--label-key")}


def _fit(prompt: Prompt, form: TextFormat, options: PromptOptions) -> Prompt | None:
    """The prompt within the limit, or None where it is to be left out."""
    if len(prompt.token_ids) <= options.max_prompt_length:
        return prompt
    if options.overlong == "filter":
        return None
    ids = form.shorten(prompt.token_ids, options.max_prompt_length)
    return Prompt(prompt.index, ids, form.tokenizer.decode(ids), prompt.row)
