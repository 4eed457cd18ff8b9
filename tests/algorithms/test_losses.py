"""Policy and value losses against hand-worked numbers and TRL's own code, and the properties that packing needs."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    PolicyLossOptions,
    entropy_loss,
    explained_variance,
    loss_weights,
    policy_loss,
    value_loss,
)

FAST = settings(max_examples=20, deadline=None)
OPTIONS = PolicyLossOptions(clip_low=0.1, clip_high=0.2, dual_clip=3.0)


def mask_of(lengths, width=None):
    return torch.arange(width or max(lengths))[None] < torch.tensor(lengths)[:, None]


def one_sequence(name, ratios, advantages, options=OPTIONS, weights=None, correction=None, logprob=-1.0):
    """Loss, metrics and gradient of one sequence whose old log-probabilities give these ratios."""
    logprobs_K = torch.full((len(ratios),), logprob, requires_grad=True)
    old_K = logprobs_K.detach() - torch.tensor(ratios).log()
    weights_K = torch.tensor(weights) if weights else torch.ones(len(ratios))
    correction_K = torch.tensor(correction) if correction else None
    sequence_K = torch.zeros(len(ratios), dtype=torch.int64)
    advantages_K = torch.tensor(advantages)
    loss, metrics = policy_loss(name, logprobs_K, old_K, advantages_K, weights_K, sequence_K, 1, options, correction_K)
    loss.backward()
    return loss.item(), {k: v.item() for k, v in metrics.items()}, logprobs_K.grad.tolist()


def random_batch(seed, size=5, width=6):
    """lengths, and padded log-probabilities, old ones and advantages (one per sequence)."""
    g = torch.Generator().manual_seed(seed)
    mask_BR = mask_of(torch.randint(1, width + 1, (size,), generator=g).tolist(), width)
    logprobs_BR = -torch.rand(size, width, generator=g, dtype=torch.float64) * 3
    old_BR = logprobs_BR + 0.4 * torch.randn(size, width, generator=g, dtype=torch.float64)
    advantages_BR = torch.randn(size, 1, generator=g, dtype=torch.float64).expand(size, width)
    return mask_BR, logprobs_BR, old_BR, advantages_BR


def packed_loss(name, batch, weights_BR, rows, options=OPTIONS):
    """Loss, metrics and gradient by row when the given rows are packed into one micro-batch."""
    mask_BR, logprobs_BR, old_BR, advantages_BR = (x[rows] for x in batch)
    leaf_BR = logprobs_BR.clone().requires_grad_()
    sequence_BR = torch.arange(len(rows))[:, None].expand(mask_BR.shape)
    columns = (x[mask_BR] for x in (leaf_BR, old_BR, advantages_BR, weights_BR[rows].double(), sequence_BR))
    loss, metrics = policy_loss(name, *columns, len(rows), options)
    loss.backward()
    return loss.detach(), metrics, leaf_BR.grad


def test_ppo_by_hand():
    """Both clips, and the dual clip, on the side where each bites."""
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 4.0, 1.0], [2.0, -2.0, 2.0, -2.0, -1.0, 1.0]
    loss, metrics, gradient = one_sequence("ppo", ratios, advantages)
    # A > 0: r is clipped from above at 1.2; A < 0: from below at 0.9; A < 0 and r > 3: bounded by 3
    assert loss == pytest.approx(-2.4 + 3.0 - 1.0 + 1.8 + 3.0 - 1.0, abs=1e-5)
    assert gradient == pytest.approx([0.0, 3.0, -1.0, 0.0, 0.0, -1.0], abs=1e-5)
    assert (metrics["clip_fraction_high"], metrics["clip_fraction_low"], metrics["dual_clip_fraction"]) == (1, 1, 1)
    assert metrics["clip_fraction"] == 2
    loss, metrics, _ = one_sequence("ppo", [4.0], [-1.0], PolicyLossOptions())
    assert loss == pytest.approx(4.0, abs=1e-5) and "dual_clip_fraction" not in metrics


def test_gspo_by_hand():
    """The sequence's ratio is the geometric mean; every token's gradient is -A s."""
    loss, metrics, gradient = one_sequence("gspo", [1.21, 1.0], [2.0, 2.0], weights=[0.5, 0.5])
    assert loss == pytest.approx(-2.2, abs=1e-5) and gradient == pytest.approx([-1.1, -1.1], abs=1e-5)
    loss, metrics, gradient = one_sequence("gspo", [4.0, 1.0], [2.0, 2.0], weights=[0.5, 0.5])
    assert loss == pytest.approx(-2.4, abs=1e-5) and gradient == [0.0, 0.0] and metrics["clip_fraction"] == 1


def test_cispo_by_hand():
    """The clipped ratio is a constant: a clipped token keeps its gradient."""
    loss, metrics, gradient = one_sequence("cispo", [1.5, 0.5, 1.0], [2.0, 2.0, -1.0], logprob=-0.5)
    assert gradient == pytest.approx([-2.4, -1.8, 1.0], abs=1e-5)
    assert loss == pytest.approx(0.5 * (2.4 + 1.8 - 1.0), abs=1e-5)
    assert (metrics["clip_fraction_high"], metrics["clip_fraction_low"]) == (1, 1)


def test_gmpo_by_hand():
    """Log-ratios are clipped to [-0.1, 0.2] on the pessimistic side, then averaged over the sequence."""
    e = math.exp
    loss, metrics, gradient = one_sequence("gmpo", [e(0.5), e(-0.3)], [2.0, 2.0], weights=[0.5, 0.5])
    ratio = e((0.2 - 0.3) / 2)
    assert loss == pytest.approx(-2 * ratio, abs=1e-5) and gradient == pytest.approx([0.0, -ratio], abs=1e-5)
    assert metrics["clip_fraction_high"] == 0.5 and metrics["clip_fraction_low"] == 0
    loss, metrics, gradient = one_sequence("gmpo", [e(0.5), e(-0.3)], [-2.0, -2.0], weights=[0.5, 0.5])
    ratio = e((0.5 - 0.1) / 2)
    assert loss == pytest.approx(2 * ratio, abs=1e-5) and gradient == pytest.approx([ratio, 0.0], abs=1e-5)


def test_reinforce_by_hand():
    """-A log pi, times the correction."""
    loss, _, gradient = one_sequence("reinforce", [1.5, 0.5], [2.0, -1.0], correction=[0.5, 2.0], logprob=-0.5)
    assert loss == pytest.approx(0.5 * 2 * 0.5 - 0.5 * 1 * 2.0)
    assert gradient == pytest.approx([-1.0, 2.0])


def test_metrics_by_hand():
    """ratio, k1 and k3 of KL(old || new) are weighted sums."""
    _, metrics, _ = one_sequence("ppo", [2.0, 0.5], [1.0, 1.0], weights=[0.25, 0.75])
    assert metrics["ratio"] == pytest.approx(0.25 * 2 + 0.75 * 0.5)
    assert metrics["approx_kl"] == pytest.approx(-0.25 * math.log(2) + 0.75 * math.log(2))
    assert metrics["approx_kl_k3"] == pytest.approx(0.25 * (1 - math.log(2)) + 0.75 * (-0.5 + math.log(2)), abs=1e-6)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    """Ratio exactly 1, nothing clipped, gradient -A."""
    _, metrics, gradient = one_sequence(name, [1.0, 1.0, 1.0], [0.7, 0.7, 0.7], weights=[1 / 3] * 3)
    assert gradient == pytest.approx([-0.7 / 3] * 3, abs=1e-6)
    assert metrics["ratio"] == 1.0 and metrics["approx_kl_k3"] == 0.0 and metrics.get("clip_fraction", 0.0) == 0.0


def trl_loss(loss_type, level, batch, epsilon_low, epsilon_high, trainer, delta=None):
    """Value and gradient of TRL's own _compute_loss on given log-probabilities."""
    mask_BR, logprobs_BR, old_BR, advantages_BR = batch
    leaf_BR = logprobs_BR.clone().requires_grad_()
    state = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *a, **k: (leaf_BR, torch.zeros_like(leaf_BR), None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=6,
        _entropy_bonus_enabled=False,
    )
    ids = torch.zeros(mask_BR.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask_BR.double(),
        "advantages": advantages_BR[:, 0],
        "old_per_token_logps": old_BR,
        "num_items_in_batch": mask_BR.sum(),
    }
    loss = trainer._compute_loss(state, None, inputs)
    loss.backward()
    return loss.detach(), leaf_BR.grad


@pytest.mark.parametrize(
    "name, mode, loss_type, level",
    [
        ("ppo", "token-mean", "dapo", "token"),
        ("ppo", "seq-mean-token-mean", "grpo", "token"),
        ("ppo", "seq-mean-token-sum-norm", "dr_grpo", "token"),
        ("gspo", "seq-mean-token-mean", "grpo", "sequence"),
        ("cispo", "token-mean", "cispo", "token"),
        ("gmpo", "seq-mean-token-mean", "gmpo", None),
    ],
)
def test_value_and_gradient_are_those_of_trl(name, mode, loss_type, level):
    """The same numbers as GRPOTrainer and GMPOTrainer on random inputs."""
    pytest.importorskip("trl")
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    for seed in range(5):
        batch = random_batch(seed)
        low, high = (1.0, 0.3) if name == "cispo" else (0.1, 0.2)
        trl_high = 1.3 if name == "cispo" else 0.2  # TRL's cispo bound is the ratio itself
        trainer = GMPOTrainer if name == "gmpo" else GRPOTrainer
        expected, expected_BR = trl_loss(loss_type, level, batch, low, trl_high, trainer)
        weights_BR = loss_weights(batch[0], mode, fixed_length=6)
        loss, _, gradient_BR = packed_loss(name, batch, weights_BR, [0, 1, 2, 3, 4], PolicyLossOptions(low, high))
        assert torch.allclose(loss, expected, rtol=1e-6, atol=1e-6)
        assert torch.allclose(gradient_BR, expected_BR, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
@FAST
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 4))
def test_micro_batches_add_up_to_the_whole(name, mode, seed, cut):
    """Loss, gradient and every metric of two micro-batches sum to those of one."""
    batch = random_batch(seed)
    weights_BR = loss_weights(batch[0], mode, fixed_length=8)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).tolist()
    whole, metrics, gradient_BR = packed_loss(name, batch, weights_BR, list(range(5)))
    parts = [packed_loss(name, batch, weights_BR, rows) for rows in (order[:cut], order[cut:])]
    assert torch.allclose(parts[0][0] + parts[1][0], whole)
    assert torch.allclose(torch.cat([parts[0][2], parts[1][2]]), gradient_BR[order])
    for key, value in metrics.items():
        assert torch.allclose(parts[0][1][key] + parts[1][1][key], value)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@FAST
@given(seed=st.integers(0, 10**6), junk=st.sampled_from([float("nan"), float("inf"), -float("inf"), 50.0]))
def test_tokens_of_weight_zero_never_matter(name, seed, junk):
    """A masked token may hold anything: no loss, no gradient, no part in its sequence's mean."""
    mask_BR, logprobs_BR, old_BR, advantages_BR = random_batch(seed)
    hidden_BR = torch.rand(mask_BR.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    kept_BR = mask_BR & ~hidden_BR
    weights_BR = loss_weights(kept_BR, "seq-mean-token-mean")
    spoiled = [torch.where(hidden_BR, junk, x) for x in (logprobs_BR, old_BR, advantages_BR)]
    spoiled_loss, metrics, gradient_BR = packed_loss(name, (mask_BR, *spoiled), weights_BR, list(range(5)))
    without, plain, expected_BR = packed_loss(
        name, (kept_BR, logprobs_BR, old_BR, advantages_BR), weights_BR, list(range(5))
    )
    assert torch.allclose(spoiled_loss, without) and torch.allclose(gradient_BR, expected_BR)
    assert not gradient_BR[hidden_BR].any()
    for key, value in plain.items():
        assert torch.allclose(metrics[key], value)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@FAST
@given(seed=st.integers(0, 10**6), shift=st.floats(-3, 3), scale=st.floats(0.1, 10))
def test_shift_of_log_probabilities_and_scale_of_advantages(name, seed, shift, scale):
    """The gradient sees only differences of log-probabilities, and is linear in positive scaling of advantages."""
    mask_BR, logprobs_BR, old_BR, advantages_BR = random_batch(seed)
    weights_BR = loss_weights(mask_BR, "token-mean")
    rows = list(range(5))
    _, _, gradient_BR = packed_loss(name, (mask_BR, logprobs_BR, old_BR, advantages_BR), weights_BR, rows)
    moved = (mask_BR, logprobs_BR + shift, old_BR + shift, advantages_BR * scale)
    assert torch.allclose(packed_loss(name, moved, weights_BR, rows)[2], scale * gradient_BR, atol=1e-9)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_huge_log_ratio_stays_finite(name):
    """Log-ratios are clamped at 20: loss and gradient are finite in float32."""
    logprobs_K = torch.tensor([-0.1, -300.0], requires_grad=True)
    old_K = torch.tensor([-300.0, -0.1])
    for advantage in (1.0, -1.0):
        advantages_K = torch.full((2,), advantage)
        arguments = (old_K, advantages_K, torch.ones(2), torch.tensor([0, 1]), 2, PolicyLossOptions())
        loss, metrics = policy_loss(name, logprobs_K, *arguments)
        (gradient,) = torch.autograd.grad(loss, logprobs_K)
        assert loss.isfinite() and gradient.isfinite().all()
        assert all(value.isfinite() for value in metrics.values())


def test_loss_weights_by_hand():
    """The four aggregations of responses of 1 and 3 tokens."""
    mask_BR = mask_of([1, 3])
    weights = {mode: loss_weights(mask_BR, mode, fixed_length=4).tolist() for mode in AGGREGATIONS}
    assert weights["token-mean"] == [[0.25, 0, 0], [0.25] * 3]
    assert weights["seq-mean-token-sum"] == [[0.5, 0, 0], [0.5] * 3]
    assert weights["seq-mean-token-mean"] == [pytest.approx([0.5, 0, 0]), pytest.approx([1 / 6] * 3)]
    assert weights["seq-mean-token-sum-norm"] == [[0.125, 0, 0], [0.125] * 3]
    with pytest.raises(ValueError, match="--loss-fixed-length"):
        loss_weights(mask_BR, "seq-mean-token-sum-norm")


def test_token_mean_weighs_tokens_and_not_micro_batches():
    """Responses of 10 and 500 tokens: every token weighs 1/510, in micro-batches of 1 and of 2."""
    mask_BR = mask_of([10, 500])
    weights_BR = loss_weights(mask_BR, "token-mean")
    assert torch.allclose(weights_BR[mask_BR], torch.tensor(1 / 510))
    batch = (mask_BR, -torch.ones(2, 500).double(), -torch.ones(2, 500).double(), torch.ones(2, 500).double())
    batch[3][1] = -0.5
    whole = packed_loss("ppo", batch, weights_BR, [0, 1])[0].item()
    halves = [packed_loss("ppo", batch, weights_BR, [row])[0].item() for row in (0, 1)]
    assert whole == pytest.approx((-10 + 0.5 * 500) / 510) and sum(halves) == pytest.approx(whole)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_dummy_and_empty_sequences_do_not_count(mode):
    """Weights with a dummy sequence left out, or one without tokens, are those without it."""
    mask_BR = mask_of([2, 3, 3])
    expected = loss_weights(mask_BR[:2], mode, 4)
    kept = loss_weights(mask_BR, mode, 4, keep_B=torch.tensor([True, True, False]))
    assert torch.equal(kept[:2], expected) and not kept[2].any()
    mask_BR[2] = False
    assert torch.equal(loss_weights(mask_BR, mode, 4)[:2], expected)
    assert not loss_weights(torch.zeros(2, 3, dtype=torch.bool), mode, 4).any()


def test_entropy_loss_by_hand():
    """-coefficient times the weighted entropy; masked entropies may be anything."""
    loss, metrics = entropy_loss(torch.tensor([2.0, float("nan"), 1.0]), torch.tensor([0.5, 0.0, 0.25]), 0.01)
    assert loss.item() == pytest.approx(-0.0125) and metrics["entropy"].item() == pytest.approx(1.25)


def test_value_loss_by_hand():
    """The larger of both squares, and no gradient through a clipped value."""
    values_K = torch.tensor([1.0, 1.0, 0.3, float("nan")], requires_grad=True)
    old_K = torch.tensor([0.0, 0.0, 0.0, 0.0])
    returns_K = torch.tensor([2.0, 0.0, 1.0, 0.0])
    weights_K = torch.tensor([0.5, 0.25, 0.25, 0.0])
    loss, metrics = value_loss(values_K, old_K, returns_K, weights_K, clip=0.5)
    # max(1, 2.25), max(1, 0.25), max(0.49, 0.49)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 2.25 + 0.25 * 1.0 + 0.25 * 0.49))
    loss.backward()
    assert values_K.grad.tolist() == pytest.approx([0.0, 0.25, -0.175, 0.0])
    assert metrics["value_clip_fraction"].item() == 0.5
    assert metrics["value"].item() == pytest.approx(0.5 + 0.25 + 0.075)
    loss, metrics = value_loss(values_K, old_K, returns_K, weights_K, clip=None)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 1 + 0.25 * 1 + 0.25 * 0.49))
    assert metrics["value_clip_fraction"].item() == 0


@FAST
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 9), shift=st.floats(-5, 5), clip=st.sampled_from([None, 0.2]))
def test_value_loss_adds_up_and_does_not_see_a_shift(seed, cut, shift, clip):
    """Chunks sum to the whole; a constant added to values and returns changes nothing."""
    g = torch.Generator().manual_seed(seed)
    columns = [torch.randn(10, generator=g, dtype=torch.float64) for _ in range(3)]
    weights_K = torch.rand(10, generator=g, dtype=torch.float64)
    whole, metrics = value_loss(*columns, weights_K, clip)
    parts = [value_loss(*(c[s] for c in columns), weights_K[s], clip) for s in (slice(cut), slice(cut, None))]
    assert torch.allclose(parts[0][0] + parts[1][0], whole)
    for key, value in metrics.items():
        assert torch.allclose(parts[0][1][key] + parts[1][1][key], value)
    assert torch.allclose(value_loss(*(c + shift for c in columns), weights_K, clip)[0], whole)


def test_explained_variance():
    """1 for the returns themselves, 0 for their mean, 0 where returns do not vary; the mask hides."""
    mask_BR = mask_of([2, 3])
    returns_BR = torch.tensor([[1.0, 2.0, float("nan")], [3.0, 4.0, 5.0]])
    assert explained_variance(returns_BR, returns_BR, mask_BR).item() == 1.0
    assert explained_variance(torch.full((2, 3), 3.0), returns_BR, mask_BR).item() == pytest.approx(0.0)
    assert explained_variance(-returns_BR, returns_BR, mask_BR).item() == pytest.approx(-3.0)
    assert explained_variance(returns_BR, torch.ones(2, 3), mask_BR).item() == 0.0
