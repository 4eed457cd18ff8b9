"""Whole models against transformers: outputs, gradients and the weights after a step, in every parallel layout."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.cases import CLIP, EPS, LOSSES, LR, micro_batches
from models.tiny import tiny_model
from safetensors.torch import load_file
from torch import Tensor

LAYOUTS = {  # processes -> "tp,pp,vpp,ep,sequence parallel"
    1: ("1,1,1,1,0",),
    2: ("2,1,1,1,0", "2,1,1,1,1", "1,2,1,1,0", "1,2,2,1,0", "1,1,1,2,0", "1,1,1,1,0"),
}
MODELS = {
    "llama": {},
    "llama3": {},  # tied
    "llama_linear": {"num_hidden_layers": 4, "num_key_value_heads": 1},  # fewer KV heads than TP; even on two chunks
    "qwen2": {"num_hidden_layers": 4},  # tied
    "qwen3": {},
    "mistral": {},
    "mixtral": {},
    "qwen3_moe": {"norm_topk_prob": False},
}


def reference(folder: Path, out: Path, head: str) -> tuple[list[Tensor], float]:
    """transformers' outputs of each micro-batch and the gradient norm; its weights after the same step go to `out`."""
    import transformers

    auto = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32)
    model.model.embed_tokens.padding_idx = None  # else the pad token's embedding has no gradient
    outputs, loss = [], torch.zeros(())
    for micro in micro_batches(model.config.vocab_size):
        pieces = []
        for tokens in micro.tokens_1T[0].split(micro.cu_seqlens.diff().tolist()):
            hidden = model.model(tokens[None]).last_hidden_state[0]
            pieces.append(model.lm_head(hidden) if head == "lm" else model.score(hidden)[:, 0])
        outputs.append(torch.cat(pieces))
        loss = loss + LOSSES[head](outputs[-1], micro)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    torch.optim.AdamW(model.parameters(), LR, eps=EPS, weight_decay=0.0).step()
    model.save_pretrained(out)
    return [o.detach() for o in outputs], float(norm)


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", LAYOUTS)
def test_every_layout_equals_transformers(processes: int, tmp_path: Path, torchrun: Callable[..., str]):
    """Outputs are transformers' to 1e-4, gradient norm and weights after a step to 1e-5, float32, in every layout; and
    a folder loaded and exported again has the same names and bytes."""
    kinds = [(f, "CausalLM") for f in MODELS] + [(f, "SequenceClassification") for f in ("llama", "qwen2", "qwen3")]
    folders = [tiny_model(tmp_path / f"{f}-{head}", f, head, **MODELS[f]) for f, head in kinds]
    program = Path(__file__).with_name("layouts_program.py")
    torchrun(processes, program, tmp_path, *LAYOUTS[processes], "--", *folders, timeout=540)
    compared = 0
    for folder in folders:
        head = "lm" if "CausalLM" in folder.name else "value"
        outputs, norm = reference(folder, tmp_path / "stepped", head)
        before, after = weights(folder), weights(tmp_path / "stepped")
        for saved in sorted(tmp_path.glob(f"{folder.name}_*.pt")):
            ours = torch.load(saved)
            real = [ours_T[: len(theirs_T)] for ours_T, theirs_T in zip(ours["outputs"], outputs, strict=True)]
            torch.testing.assert_close(real, outputs, atol=1e-4, rtol=0)
            assert ours["norm"] == pytest.approx(norm, rel=1e-5), saved.name
            same, stepped = weights(saved.with_name(saved.stem + "-same")), weights(saved.with_suffix(""))
            assert same.keys() == before.keys() and all(torch.equal(same[n], before[n]) for n in before), saved.name
            torch.testing.assert_close(stepped, after, atol=1e-5, rtol=0, msg=lambda m, s=saved: f"{s.name}: {m}")
            compared += 1
    assert compared == {1: 11, 2: 9 + 11 + 11 + 3 + 2 + 11}[processes]
