"""train_step and forward_only on fixed rollouts: the same numbers however the batch is cut, and transformers' own."""

import math
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from models.tiny import tiny_model
from ppo_cases import CLIP, ENTROPY, KL, VALUE_CLIP, fixed_batch, per_token, save_outputs, values_per_token

Seen = dict[str, dict[str, Any]]
# "tp,pp,sp,dtype,micro-batch size,max tokens,scene" and what is recomputed; the first of a dtype and scene is what the
# others must equal
SINGLE = (
    "1,1,0,fp32,1,4096,spread",
    "1,1,0,fp32,8,4096,spread",
    "1,1,0,fp32,0,120,spread",
    "1,1,0,bf16,1,4096,wide",
    "1,1,0,bf16,8,4096,wide",
    "1,1,0,fp32,1,4096,long",
    "1,1,0,fp32,2,4096,long",
    "1,1,0,fp32,1,4096,one",
    "1,1,0,fp32,8,4096,ratio",
    "1,1,0,bf16,8,4096,ratio",
    "1,1,0,bf16,8,4096,still",
)
DOUBLE = (
    "2,1,0,fp32,0,120,spread",
    "2,1,1,fp32,8,4096,spread",
    "2,1,1,fp32,0,120,spread,core_attn,mlp",
    "1,2,0,fp32,1,4096,spread",
    "1,2,0,fp32,0,120,spread",
    "1,2,0,fp32,0,120,spread,full",
    "1,2x2,0,fp32,0,120,spread",
    "1,1,0,fp32,0,120,spread",
    "1,1,0,fp32,1,4096,spread",
    "1,1,0,fp32,2,512,long",
    "1,1,0,fp32,0,512,long",
    "1,1,0,fp32,0,4096,one",
    "2,1,0,bf16,0,500,wide",
    "1,2,0,bf16,8,4096,wide",
    "1,1,0,bf16,1,4096,wide",
    "1,1,0,bf16,0,4096,ratio",
    "1,1,0,bf16,8,4096,still",
)
FOUR = (
    "2,2,0,fp32,1,4096,spread",
    "2,2,1,fp32,0,120,spread",
    "2,1,0,fp32,0,120,spread",
    "1,2,0,fp32,0,120,spread",
    "2,1,0,fp32,0,4096,one",
    "2,2,0,bf16,0,500,wide",
)
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"max_position_embeddings": 1024, "num_hidden_layers": 4}
    critic = tiny_model(folder / "critic", "llama3", head="SequenceClassification", seed=1, **sizes)
    policy = tiny_model(folder / "policy", "llama3", **sizes)
    save_outputs(policy, critic)
    return policy, critic


def seen_by(processes: int, folders: tuple[Path, Path], cases: tuple[str, ...], out: Path) -> Seen:
    launch.check(launch.torchrun(processes, "tests/ppo_program.py", out, *folders, *cases, timeout=280))
    return torch.load(out / f"{processes}.pt", weights_only=False)


@pytest.fixture(scope="module")
def single(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return seen_by(1, folders, SINGLE, tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def double(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return seen_by(2, folders, DOUBLE, tmp_path_factory.mktemp("double"))


def kind(case: str) -> tuple[str, str]:
    words = case.split(",")
    return words[3], words[6]


def check_equal(single: Seen, seen: Seen) -> None:
    """Every pass, metric and gradient norm of both roles is that of one rank with micro-batches of one."""
    compared = 0
    for case, found in seen.items():
        dtype, scene = kind(case)
        if scene in ("ratio", "still"):
            continue
        expected = next(value for base, value in single.items() if kind(base) == (dtype, scene))
        for role in ("policy", "critic"):
            at = TOLERANCE[dtype] if dtype == "fp32" else 0.06  # of a single token: 2 to 3 roundings of a logit
            torch.testing.assert_close(found[f"{role}_forward"], expected[f"{role}_forward"], atol=at, rtol=0)
            mean = (found[f"{role}_forward"] - expected[f"{role}_forward"]).mean((1, 2)).abs()
            assert float(mean.max()) < TOLERANCE[dtype], (case, role)
            close = TOLERANCE[dtype]
            for number in (1, 2) if dtype == "fp32" else (1,):  # in bf16 weights round to either side after a step
                report, wanted = (seen_in[f"{role}_{number}"] for seen_in in (found, expected))
                assert report["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=close), (case, role)
                means = {name: value for name, value in report.items() if name != "grad_norm"}
                assert means == {name: pytest.approx(wanted[name], rel=close, abs=close) for name in means}, case
                compared += len(report)
    assert compared > 50


def test_micro_batches_do_not_matter(single: Seen):
    """Lengths 10:1 in micro-batches of 1, of 8, or by tokens: loss, metrics, gradient norms, log-probs are equal."""
    assert [single[case]["micro_batches"] for case in SINGLE[:3]] == [[8], [1], [3]]
    check_equal(single, single)


def test_layout_does_not_matter(single: Seen, double: Seen):
    """TP 2, sequence parallel, PP 2, virtual stages and DP 2 give the numbers of one rank, in float32 and bf16, for
    both roles; so they do with recomputation of attention and MLP, or of whole layers."""
    check_equal(single, double)


@pytest.mark.slow
def test_layouts_of_four_ranks_do_not_matter(single: Seen, folders: tuple[Path, Path], tmp_path: Path):
    """TP2 PP2, TP2 DP2 and PP2 DP2 give the numbers of one rank."""
    check_equal(single, seen_by(4, folders, FOUR, tmp_path))


def test_uneven_ranks_finish(single: Seen, double: Seen):
    """DP 2 with 500 tokens on one rank and eight times 20 on the other, or with one sample for two ranks, finishes."""
    assert double["1,1,0,fp32,0,512,long"]["micro_batches"] == [1, 1]
    assert double["1,1,0,fp32,2,512,long"]["micro_batches"] == [3, 3]  # five hold a sample: one is a dummy
    assert double["1,1,0,fp32,0,4096,one"]["micro_batches"] == [1, 1]  # one has no sample at all


def norm_of(model: Any) -> float:
    return float(torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt())


def test_policy_equals_plain_formulas(single: Seen, folders: tuple[Path, Path]):
    """Loss and gradient norm are those of transformers and the published formulas, summed over all tokens and divided
    once by their number: a token weighs the same in a response of 6 and of 60."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    batch, total = fixed_batch("spread", folders[0]), torch.zeros(())
    for b, sequence in enumerate(batch.sequences):
        length = int(batch.response_lengths_B[b])
        logprobs, entropy = per_token(model, sequence, int(batch.prompt_lengths_B[b]))
        old, advantage = batch.old_logprobs_BR[b, :length], batch.advantages_BR[b, :length]
        ratio = (logprobs - old).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        difference = batch.ref_logprobs_BR[b, :length] - logprobs
        kl = difference.exp() - 1 - difference
        total = total + (-surrogate - ENTROPY * entropy + KL * kl).sum()
    loss = total / int(batch.response_lengths_B.sum())
    loss.backward()
    for case in SINGLE[:3]:
        report = single[case]["policy_1"]
        assert report["loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-5), case
        assert report["grad_norm"] == pytest.approx(norm_of(model), rel=1e-5), case


def test_critic_equals_plain_formulas(single: Seen, folders: tuple[Path, Path]):
    """Values, clipped value loss and gradient norm are those of transformers' token scores."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folders[1], dtype=torch.float32)
    batch, total = fixed_batch("spread", folders[0]), torch.zeros(())
    for b, sequence in enumerate(batch.sequences):
        prompt, length = int(batch.prompt_lengths_B[b]), int(batch.response_lengths_B[b])
        values = values_per_token(model, sequence, prompt)
        found = single[SINGLE[0]]["critic_forward"][0, b, :length]
        torch.testing.assert_close(found, values.detach(), atol=1e-5, rtol=1e-5)
        old, target = batch.values_BR[b, :length], batch.returns_BR[b, :length]
        clipped = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
        total = total + 0.5 * torch.max((values - target) ** 2, (clipped - target) ** 2).sum()
    loss = total / int(batch.response_lengths_B.sum())
    loss.backward()
    report = single[SINGLE[0]]["critic_1"]
    assert report["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report["grad_norm"] == pytest.approx(norm_of(model), rel=1e-5)


def test_first_ratio_is_one(single: Seen, double: Seen):
    """After a log-prob pass in other micro-batches the first optimizer step has ratio 1 and clips nothing."""
    cases = [(case, seen[case]["first"]) for seen in (single, double) for case in seen if case.endswith("ratio")]
    assert len(cases) == 3
    for case, first in cases:
        assert first["ratio"] == pytest.approx(1, abs=1e-6 if "fp32" in case else 1e-3), case
        assert first["clip_fraction"] == 0 and first["approx_kl"] == pytest.approx(0, abs=1e-3), case


def test_learning_rate_0_changes_nothing(single: Seen, double: Seen):
    """A bf16 step at lr 0 leaves every weight bitwise: the float32 masters are the weights that were loaded."""
    for seen in (single["1,1,0,bf16,8,4096,still"], double["1,1,0,bf16,8,4096,still"]):
        for role in ("policy", "critic"):
            assert seen[f"{role}_lr0"] == (True, True)
            assert seen[f"{role}_after"] == (True, False)  # and one at the flag's lr changes some


def test_not_finite_steps(single: Seen, double: Seen):
    """NaN or infinity in an advantage or return raises FloatingPointError, or skips the step; no weight changes. An
    infinite old log-probability is a bounded ratio, with a finite gradient."""
    for seen in (single["1,1,0,bf16,8,4096,still"], double["1,1,0,bf16,8,4096,still"]):
        for role in ("policy", "critic"):
            for value in ("nan", "inf"):
                assert "--skip-non-finite-steps" in seen[f"{role}_{value}_raised"]
                assert seen[f"{role}_{value}"] == (False, True)
        assert math.isfinite(seen["old_logprob"]) and seen["old_logprob"] > 0
