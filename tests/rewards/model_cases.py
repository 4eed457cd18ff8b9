"""Samples that a policy might have drawn, for the program and the test that compare reward models."""

from typing import Any

from megatron_rl.batch import Prompt, Response, Sample

TEXTS = (
    ("say one ", "no", False),
    ("add 2 and 3: ", "five, I think", False),
    ("x", "y" * 40, True),
    ("a b", "", False),
)


def samples(tokenizer: Any) -> list[Sample]:
    """Of plain text prompts; a response that the length limit did not end closes with EOS."""
    taken = []
    for index, (prompt, text, truncated) in enumerate(TEXTS):
        ids = [tuple(tokenizer(piece, add_special_tokens=False)["input_ids"]) for piece in (prompt, text)]
        response = ids[1] + (() if truncated else (tokenizer.eos_token_id,))
        given = Prompt(index, ids[0], prompt, {"prompt": prompt})
        taken.append(Sample(given, Response(response, (), truncated, 1), index))
    return taken
