"""Loss and gradient of DPO against transformers, in every packing and parallel layout."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dpo_cases import LOSS_FLAGS, pairs_and_reference
from models.tiny import tiny_model
from safetensors.torch import load_file
from torch import Tensor

CASES = {  # processes -> "tp,pp,vpp,sp,max tokens,pairs of a micro-batch"; 0: as many as fit
    1: ("1,1,1,0,4096,0", "1,1,1,0,90,0", "1,1,1,0,4096,1"),
    2: ("2,1,1,0,90,0", "2,1,1,1,90,0", "1,2,1,0,90,0", "1,2,2,0,90,0", "1,1,1,0,4096,1", "1,1,1,0,4096,0"),
    4: ("2,2,1,0,90,0", "2,1,1,0,90,0", "1,2,1,0,90,2"),
}


def by_hand(folder: Path) -> dict[str, tuple[dict[str, float], dict[str, Tensor]]]:
    """Of each loss: its value and accuracy, and transformers' gradients, one sequence at a time, in plain formulas."""
    import transformers

    pairs, reference_N = pairs_and_reference()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    found = {}
    for name in LOSS_FLAGS:
        model.zero_grad()
        total, right, at = torch.zeros(()), 0.0, 0
        for pair in pairs:
            policy, reference, sizes = [], [], []
            for ids in (pair.chosen_ids, pair.rejected_ids):
                tokens = torch.tensor(pair.prompt_ids + ids)
                logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
                policy.append(logprobs[-len(ids) :].sum())
                reference.append(reference_N[at : at + len(ids)].sum())
                sizes.append(len(ids))
                at += len(ids)
            (c, r), (ref_c, ref_r), (n_c, n_r) = policy, reference, sizes
            h = (c - ref_c) - (r - ref_r)
            losses = {
                "sigmoid": -0.9 * F.logsigmoid(0.3 * h) - 0.1 * F.logsigmoid(-0.3 * h) - 0.2 * c / n_c,
                "ipo": ((c - ref_c) / n_c - (r - ref_r) / n_r - 1.0) ** 2,
                "simpo": -F.logsigmoid(2.0 * (c / n_c - r / n_r) - 0.3),
            }
            total = total + losses[name] / len(pairs)
            right += float((c / n_c > r / n_r) if name == "simpo" else h > 0) / len(pairs)
        total.backward()
        gradients = {key: param.grad.clone() for key, param in model.named_parameters()}
        found[name] = ({"loss": float(total.detach()), "accuracy": right}, gradients)
    return found


@pytest.mark.parametrize("processes", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_and_packing_gives_the_same_loss_and_gradient(
    processes: int, tmp_path: Path, torchrun: Callable[..., str]
):
    """Loss and every gradient element are transformers' own to 1e-5, float32, however the pairs are packed and cut
    over ranks, a data-parallel rank without a pair of its own included."""
    folder = tiny_model(tmp_path / "model", "llama3", num_hidden_layers=4)
    program = Path(__file__).with_name("dpo_program.py")
    torchrun(processes, program, tmp_path, folder, *CASES[processes], timeout=280)
    expected = by_hand(folder)
    micro_batches = set()
    for case in CASES[processes]:
        for name, (values, gradients) in expected.items():
            out = tmp_path / f"{name}_{processes}_{case}"
            seen = json.loads(out.with_name(out.name + ".json").read_text())
            for key, value in values.items():
                assert seen[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (out.name, key)
            norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
            assert seen["grad_norm"] == pytest.approx(float(norm), rel=1e-5), out.name
            ours = {k: v for path in out.glob("*.safetensors") for k, v in load_file(path).items()}
            assert ours.keys() == gradients.keys()
            for key, gradient in gradients.items():
                torch.testing.assert_close(ours[key], gradient, atol=1e-5, rtol=1e-5, msg=f"{out.name} {key}")
            micro_batches.add(seen["micro_batches"])
    assert processes > 1 or micro_batches == {1, 2, 5}, micro_batches
