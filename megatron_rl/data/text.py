"""From text or chat lists to token ids with one BOS."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.files import Row

Chat = list[dict[str, Any]]  # [{"role": ..., "content": ...}, ...]


@dataclass(frozen=True)
class TextFormat:
    """How text becomes ids: the tokenizer, and whether its chat template is applied."""

    tokenizer: Any  # transformers' PreTrainedTokenizerFast
    apply_chat_template: bool
    system_prompt: str | None = None

    def check(self) -> None:
        if self.apply_chat_template and not self.tokenizer.chat_template:
            raise ValueError(
                "--apply-chat-template: the tokenizer of --hf-model has no chat template "
                "(give --no-apply-chat-template)"
            )
        if self.system_prompt is not None and not self.apply_chat_template:
            raise ValueError("--system-prompt needs --apply-chat-template")

    def render(self, chat: Chat, row: Row, answer: bool) -> str:
        """The chat as the template writes it. With `answer` it ends where the assistant's answer begins."""
        if self.system_prompt is not None and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": self.system_prompt}, *chat]
        try:
            return self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer)
        except Exception as error:  # templates raise whatever jinja2 and their authors like
            raise row.error(f"the chat template refused it: {error} (see --apply-chat-template)") from error

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each text, without anything added."""
        if not texts:
            return []
        return [tuple(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def encode_prompts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each text with one BOS in front, where the tokenizer itself puts one in front of text.

        A template that has written the BOS already gets no second one.
        """
        bos = self.tokenizer.bos_token_id
        encoded = self.encode(texts)
        if bos is None:
            return encoded
        adds = self.tokenizer("a")["input_ids"][:1] == [bos]
        return [_one_bos(ids, bos, adds) for ids in encoded]

    def encode_completions(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each completion, ending with the template's end-of-turn mark or else with EOS; none for no text.

        White space that a template writes behind the mark is left off: generation stops before it.
        """
        marks = tuple(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        cut = [text.rstrip() if text.rstrip().endswith(marks) else text for text in texts]
        encoded = self.encode(cut)
        ends = (
            ids if text.endswith(marks) else (*ids, self.tokenizer.eos_token_id)
            for text, ids in zip(cut, encoded, strict=True)
        )
        return [ids if text.strip() else () for text, ids in zip(texts, ends, strict=True)]

    def shorten(self, ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
        """The last `limit` ids of a prompt, its BOS kept in front."""
        if ids[:1] == (self.tokenizer.bos_token_id,) and limit > 1:
            return ids[:1] + ids[1:][-(limit - 1) :]
        return ids[-limit:]


def _one_bos(ids: tuple[int, ...], bos: int, adds: bool) -> tuple[int, ...]:
    leading = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return (bos,) * (1 if adds or leading else 0) + ids[leading:]


def is_chat(value: Any) -> bool:
    return isinstance(value, list)


def check_chat(value: Any, row: Row, key: str, flag: str) -> Chat:
    """The value as a chat list; ValueError where it is anything else than messages of text."""
    if not isinstance(value, list) or not value:
        raise row.error(f"{key!r} is {_found(value)}, not text or a list of messages (change {flag})")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise row.error(f"message {number} of {key!r} is {_found(message)}, without role and content ({flag})")
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise row.error(
                f"message {number} of {key!r} is {_found(message)}: role and content must be text ({flag})"
            )
    return [dict(message) for message in value]


def check_text(value: Any, row: Row, key: str, flag: str) -> str:
    if isinstance(value, list):
        raise row.error(f"{key!r} is a list of messages: give --apply-chat-template (or change {flag})")
    if not isinstance(value, str):
        raise row.error(f"{key!r} is {_found(value)}, not text (change {flag})")
    return value


def as_prompt_chat(value: Any, row: Row, key: str, flag: str) -> Chat:
    """A prompt as a chat: text is one user message. ValueError where there is nothing to answer."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    chat = check_chat(value, row, key, flag)
    if not chat[-1]["content"].strip():
        raise row.error(f"{key!r} is empty (mend the row or change {flag})")
    if chat[-1]["role"] == "assistant":
        raise row.error(f"{key!r} ends with a message of the assistant: nothing to answer (mend the row or {flag})")
    return chat


def _found(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
