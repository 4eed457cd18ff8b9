"""KL estimators, penalties and controllers against hand-worked numbers and exact divergences."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKL,
    FixedKL,
    kl_in_reward,
    kl_loss,
    kl_per_token,
    update_kl,
)

FAST = settings(max_examples=30, deadline=None)


def test_estimators_by_hand():
    """d = log 2: the policy is twice as likely as the reference."""
    d = math.log(2)
    policy, ref = torch.tensor([-1.0]), torch.tensor([-1.0 - d])
    got = {name: kl_per_token(name, policy, ref).item() for name in KL_ESTIMATORS}
    assert got == pytest.approx({"k1": d, "k2": d * d / 2, "k3": 0.5 - 1 + d, "abs": d}, abs=1e-6)
    assert kl_per_token("k1", ref, policy).item() == pytest.approx(-d)
    assert kl_per_token("abs", ref, policy).item() == pytest.approx(d)


def test_k1_and_k3_are_unbiased():
    """Their expectation under the policy is the divergence, by summing over a vocabulary of 50."""
    g = torch.Generator().manual_seed(0)
    policy, ref = (torch.randn(50, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (policy.exp() * (policy - ref)).sum()
    for name in ("k1", "k3"):
        assert torch.allclose((policy.exp() * kl_per_token(name, policy, ref)).sum(), exact)


def test_k2_has_the_gradient_of_the_kl():
    """The expected gradient of k2 under the policy is the gradient of the divergence; that of k1 is 0."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(20, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(20, generator=g, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)
    for name, expected in (("k2", exact), ("k1", torch.zeros_like(exact))):
        sampled = (policy.exp().detach() * kl_per_token(name, policy, ref)).sum()
        (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        assert torch.allclose(gradient, expected, atol=1e-12)


def test_k3_is_careful_in_float32():
    """Small differences keep their digits, huge ones stay finite, with finite gradients."""
    d = torch.tensor([1e-3, -1e-3, 1e-2])
    exact = torch.expm1(-d.double()) + d.double()
    assert torch.allclose(kl_per_token("k3", d, torch.zeros(3)).double(), exact, rtol=1e-3)
    logprobs = torch.tensor([-500.0, 0.0], requires_grad=True)
    kl = kl_per_token("k3", logprobs, torch.tensor([0.0, -500.0]))
    kl.sum().backward()
    assert kl.isfinite().all() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
@FAST
@given(seed=st.integers(0, 10**6), shift=st.floats(-3, 3), cut=st.integers(1, 9))
def test_properties(name, seed, shift, cut):
    """0 where equal, blind to a common shift, and chunks of the loss add up to the whole."""
    g = torch.Generator().manual_seed(seed)
    policy_K, ref_K = (-3 * torch.rand(10, generator=g, dtype=torch.float64) for _ in range(2))
    weights_K = torch.rand(10, generator=g, dtype=torch.float64)
    assert not kl_per_token(name, policy_K, policy_K).any()
    kl_K = kl_per_token(name, policy_K, ref_K)
    assert torch.allclose(kl_per_token(name, policy_K + shift, ref_K + shift), kl_K)
    assert name == "k1" or bool((kl_K >= 0).all())
    whole, metrics = kl_loss(policy_K, ref_K, weights_K, 0.1, name)
    assert torch.allclose(whole, 0.1 * (kl_K * weights_K).sum()) and torch.allclose(metrics["kl"] * 0.1, whole)
    parts = [kl_loss(policy_K[s], ref_K[s], weights_K[s], 0.1, name)[0] for s in (slice(cut), slice(cut, None))]
    assert torch.allclose(parts[0] + parts[1], whole)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_masked_tokens_never_matter(junk):
    """Neither in the loss and its gradient nor in the reward."""
    logprobs_K = torch.tensor([-1.0, junk], requires_grad=True)
    loss, _ = kl_loss(logprobs_K, torch.tensor([-2.0, junk]), torch.tensor([0.5, 0.0]), 2.0, "k3")
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(-1)) and logprobs_K.grad[1] == 0
    mask_BR = torch.tensor([[True, False]])
    spoiled_BR = torch.tensor([[1.0, junk]])
    got = kl_in_reward(spoiled_BR, spoiled_BR, torch.tensor([[0.5, junk]]), mask_BR, 0.2)
    assert got.rewards_BR.tolist() == [pytest.approx([0.9, 0.0])]


def test_kl_in_reward_by_hand():
    """Every token pays; the outcome stays on the last; means are over sequences and over tokens."""
    mask_BR = torch.tensor([[True, True], [True, False]])
    rewards_BR = torch.tensor([[0.0, 1.0], [0.5, 0.0]])
    logprobs_BR, ref_BR = torch.tensor([[-1.0, -2.0], [-1.0, 0.0]]), torch.tensor([[-1.5, -1.0], [-3.0, 0.0]])
    got = kl_in_reward(rewards_BR, logprobs_BR, ref_BR, mask_BR, coefficient=0.1, estimator="k1")
    assert got.rewards_BR.tolist() == [pytest.approx([-0.05, 1.1]), pytest.approx([0.3, 0.0])]
    assert got.kl == pytest.approx((0.5 - 1.0 + 2.0) / 2) and got.kl_token == pytest.approx(1.5 / 3)


def test_controllers_by_hand():
    """Fixed stays; adaptive moves by the clipped error; the state survives a dict."""
    assert update_kl(FixedKL(0.1), 99.0, 64) == FixedKL(0.1)
    start = AdaptiveKL(coefficient=0.2, target=6.0, horizon=1000)
    assert update_kl(start, 6.0, 100).coefficient == pytest.approx(0.2)
    assert update_kl(start, 6.6, 100).coefficient == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert update_kl(start, 60.0, 100).coefficient == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    assert update_kl(start, 0.0, 100).coefficient == pytest.approx(0.2 * (1 - 0.2 * 0.1))
    assert update_kl(start, 0.0, 100_000).coefficient == pytest.approx(0.2 * 0.8)
    assert AdaptiveKL(**asdict(start)) == start
    with pytest.raises(ValueError, match="measured KL is nan"):
        update_kl(start, float("nan"), 1)
    with pytest.raises(ValueError, match="--kl-target"):
        AdaptiveKL(0.1, 0.0, 10)


def test_adaptive_control_reaches_its_target():
    """Where KL falls as the coefficient rises, repeated updates settle at the target."""
    controller = AdaptiveKL(0.01, target=2.0, horizon=500)
    for _ in range(400):
        controller = update_kl(controller, kl=0.4 / controller.coefficient, num_samples=64)
    assert controller.coefficient == pytest.approx(0.2, rel=1e-2)
