"""Tiny real tokenizers: one id a character, BOS, EOS and chat marks as special tokens."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% if bos_in_template %}{{ bos_token }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def build(adds_bos: bool = True, template_has_bos: bool = True, eos: str = "<|end|>", pad: str | None = None):
    specials = ["<s>", "</s>", "<|start|>", "<|end|>"]
    letters = [chr(c) for c in [10, *range(32, 127)]]
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(specials + letters)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(specials)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token=eos, pad_token=pad)
    tokenizer.chat_template = TEMPLATE.replace("bos_in_template", "true" if template_has_bos else "false")
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer():
    return build


@pytest.fixture(scope="session")
def tokenizer():
    return build()
