"""Preference losses against TRL's own code (value and gradient), hand-worked numbers, and their properties."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.preference import (
    F_DIVERGENCE_LOSSES,
    F_DIVERGENCES,
    NO_REFERENCE,
    PREFERENCE_LOSSES,
    SMOOTHED_LOSSES,
    PairLogprobs,
    PreferenceOptions,
    check_preference_options,
    preference_loss,
)

FAST = settings(max_examples=25, deadline=None)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def options_for(name, **more):
    return PreferenceOptions(label_smoothing=0.1 if name in SMOOTHED_LOSSES else 0.0, **more)


def random_pairs(seed, pairs=6, width=9, dtype=torch.float64):
    """Token log-probabilities [2P, width] (chosen, then rejected), their mask, and the reference's sums [2P]."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(width)[None] < torch.randint(1, width + 1, (2 * pairs, 1), generator=g)
    tokens = torch.where(mask, -1.5 * torch.rand(2 * pairs, width, generator=g, dtype=dtype) - 0.01, 0.0)
    ref = tokens.sum(1) + 2 * torch.randn(2 * pairs, generator=g, dtype=dtype)
    return tokens.to(dtype), mask, ref.to(dtype)


def pairs_of(tokens, mask, ref=None):
    chosen, rejected = tokens.sum(1).chunk(2)
    counts = mask.sum(1).chunk(2)
    return PairLogprobs(chosen, rejected, *counts, *(ref.chunk(2) if ref is not None else ()))


def ours(name, tokens, mask, ref, options):
    leaf = tokens.clone().requires_grad_()
    losses_P, _ = preference_loss(name, pairs_of(leaf, mask, ref), options)
    losses_P.mean().backward()
    return losses_P.detach().mean(), torch.where(mask, leaf.grad, 0.0)


def trl_dpo(names, weights, tokens, mask, ref, options):
    """Value and gradient of DPOTrainer's own _compute_loss on given token log-probabilities."""
    pytest.importorskip("trl")
    from trl import DPOTrainer

    leaf = tokens.clone().requires_grad_()
    zeros = torch.zeros_like(tokens)
    state = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
        f_divergence_type=options.f_divergence,
        f_alpha_divergence_coef=options.f_alpha,
        loss_types=names,
        loss_weights=weights,
        beta=options.beta,
        label_smoothing=options.label_smoothing,
    )
    outputs = SimpleNamespace(log_probs=leaf, entropy=zeros, mean_logits=zeros, is_top1=torch.zeros_like(mask))
    completion = torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1).long()  # after a prompt of one token
    inputs = {
        "input_ids": torch.zeros_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "ref_chosen_logps": ref.chunk(2)[0],
        "ref_rejected_logps": ref.chunk(2)[1],
    }
    loss = DPOTrainer._compute_loss(state, lambda **kwargs: outputs, inputs, False)
    loss.backward()
    return loss.detach(), torch.where(mask, leaf.grad, 0.0)


def assert_same(got, expected):
    assert torch.allclose(got[0], expected[0], **CLOSE), (got[0], expected[0])
    assert torch.allclose(got[1], expected[1], **CLOSE)


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "apo_zero", "apo_down"])
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_value_and_gradient_are_those_of_trl(name, beta):
    """DPOTrainer on random pairs; its sigmoid has no label smoothing."""
    smoothing = 0.1 if name in ("robust", "exo_pair") else 0.0
    options = PreferenceOptions(beta=beta, label_smoothing=smoothing)
    for seed in range(5):
        case = random_pairs(seed)
        assert_same(ours(name, *case, options), trl_dpo([name], [1.0], *case, options))


@pytest.mark.parametrize("name", sorted(F_DIVERGENCE_LOSSES))
@pytest.mark.parametrize("divergence", sorted(F_DIVERGENCES))
def test_f_divergences_are_those_of_trl(name, divergence):
    """Every loss that takes one with every divergence, and alpha at its limit 1."""
    smoothing = 0.1 if name in ("robust", "exo_pair") else 0.0
    for alpha in (0.5, 2.0, 1.0) if divergence == "alpha_divergence" else (0.5,):
        options = PreferenceOptions(label_smoothing=smoothing, f_divergence=divergence, f_alpha=alpha)
        case = random_pairs(3, dtype=torch.float32)  # TRL's alpha-divergence knows no float64
        got, expected = ours(name, *case, options), trl_dpo([name], [1.0], *case, options)
        assert torch.allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
        assert torch.allclose(got[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js_divergence"])
def test_length_normalised_sigmoid_is_that_of_trl(divergence):
    """sigmoid with length_normalize is TRL's sigmoid_norm."""
    options = PreferenceOptions(beta=2.0, f_divergence=divergence)
    for seed in range(5):
        case = random_pairs(seed)
        got = ours("sigmoid", *case, replace(options, length_normalize=True))
        assert_same(got, trl_dpo(["sigmoid_norm"], [1.0], *case, options))


def test_rpo_term_is_that_of_trl():
    """TRL's sft term averages over the tokens of the batch: equal where the chosen have the same length."""
    tokens, mask, ref = random_pairs(0)
    mask[:6] = torch.arange(9) < 4
    tokens = torch.where(mask, tokens.clamp(max=-0.01), 0.0)
    options = PreferenceOptions(rpo_alpha=0.3)
    assert_same(
        ours("sigmoid", tokens, mask, ref, options), trl_dpo(["sigmoid", "sft"], [1, 0.3], tokens, mask, ref, options)
    )


def trl_cpo(loss_type, chosen_P, rejected_P, options):
    """CPOTrainer's own cpo_loss on what it is given as log-probabilities."""
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer

    state = SimpleNamespace(
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type=loss_type,
        beta=options.beta,
        simpo_gamma=options.simpo_gamma,
        label_smoothing=options.label_smoothing,
    )
    return CPOTrainer.cpo_loss(state, chosen_P, rejected_P)[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo_and_smoothed_sigmoid_are_those_of_trl(smoothing):
    """CPOTrainer has SimPO on mean log-probabilities, and the smoothed sigmoid when it is given the ratios."""
    options = PreferenceOptions(beta=2.0, label_smoothing=smoothing, simpo_gamma=0.6)
    for seed in range(5):
        tokens, mask, ref = random_pairs(seed)
        leaf = tokens.clone().requires_grad_()
        losses_P = trl_cpo("simpo", *(leaf.sum(1) / mask.sum(1)).chunk(2), options)
        losses_P.mean().backward()
        expected = losses_P.detach().mean(), torch.where(mask, leaf.grad, 0.0)
        assert_same(ours("simpo", tokens, mask, None, options), expected)
        leaf = tokens.clone().requires_grad_()
        losses_P = trl_cpo("sigmoid", *(leaf.sum(1) - ref).chunk(2), options)
        losses_P.mean().backward()
        assert_same(
            ours("sigmoid", tokens, mask, ref, options),
            (losses_P.detach().mean(), torch.where(mask, leaf.grad, 0.0)),
        )


def test_orpo_is_that_of_trl():
    """The odds-ratio term is ORPOTrainer's; TRL computes it in float32."""
    pytest.importorskip("trl")
    from trl.experimental.orpo import ORPOTrainer

    options = PreferenceOptions(beta=0.25)
    state = SimpleNamespace(beta=0.25, accelerator=SimpleNamespace(device="cpu"))
    for seed in range(5):
        tokens, mask, _ = random_pairs(seed, dtype=torch.float32)
        leaf = tokens.clone().requires_grad_()
        chosen_P, rejected_P = (leaf.sum(1) / mask.sum(1)).chunk(2)
        ratio_P = ORPOTrainer.odds_ratio_loss(state, chosen_P, rejected_P)[0]
        loss = (-chosen_P - ratio_P).mean()
        loss.backward()
        assert_same(ours("orpo", tokens, mask, None, options), (loss.detach(), torch.where(mask, leaf.grad, 0.0)))


def one_pair(chosen=-4.0, rejected=-6.0, ref_chosen=-5.0, ref_rejected=-5.0):
    """d is +1 and -1; 2 and 3 tokens."""
    return PairLogprobs(
        *(torch.tensor([float(x)]) for x in (chosen, rejected)),
        torch.tensor([2]),
        torch.tensor([3]),
        *(torch.tensor([float(x)]) for x in (ref_chosen, ref_rejected)),
    )


def s(x):
    return 1 / (1 + math.exp(-x))


def odds(mean):
    return math.exp(mean) / (1 - math.exp(mean))


# beta 0.5, eps 0.1: h = 0.5 * 2 = 1
BY_HAND = {
    "sigmoid": -0.9 * math.log(s(1)) - 0.1 * math.log(s(-1)),
    "hinge": 0.0,
    "ipo": (1 / 2 + 1 / 3 - 1) ** 2,
    "robust": (-0.9 * math.log(s(1)) + 0.1 * math.log(s(-1))) / 0.8,
    "exo_pair": s(1) * math.log(s(1) / 0.9) + s(-1) * math.log(s(-1) / 0.1),
    "nca_pair": -math.log(s(0.5)) - 0.5 * math.log(s(-0.5)) - 0.5 * math.log(s(0.5)),
    "apo_zero": 1 - s(0.5) + s(-0.5),
    "apo_down": s(0.5) + 1 - s(1),
    "simpo": -0.9 * math.log(s(0 - 0.5)) - 0.1 * math.log(s(0.5)),
    "orpo": 2.0 - 0.5 * math.log(s(0.0)),
}


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_by_hand(name):
    """d = +1 and -1 at beta 0.5; both mean log-probabilities are -2."""
    options = options_for(name, beta=0.5)
    losses_P, _ = preference_loss(name, one_pair(), options)
    assert losses_P.tolist() == pytest.approx([BY_HAND[name]], abs=1e-6)
    with_nll, _ = preference_loss(name, one_pair(), replace(options, rpo_alpha=0.25))
    assert with_nll.item() == pytest.approx(BY_HAND[name] + 0.25 * 2.0, abs=1e-6)


def test_more_by_hand():
    """The open side of the hinge, unequal odds, a length-normalised hinge, and no reference."""
    assert preference_loss("hinge", one_pair(), PreferenceOptions(beta=0.2))[0].item() == pytest.approx(0.6)
    pair = one_pair(chosen=-1.0, rejected=-6.0)
    expected = 0.5 - 0.5 * math.log(s(math.log(odds(-0.5)) - math.log(odds(-2.0))))
    assert preference_loss("orpo", pair, PreferenceOptions(beta=0.5))[0].item() == pytest.approx(expected, abs=1e-6)
    options = PreferenceOptions(beta=0.3, length_normalize=True)
    expected = 1 - 0.3 * (1 / 2 + 1 / 3)
    assert preference_loss("hinge", one_pair(), options)[0].item() == pytest.approx(expected)
    free = replace(one_pair(), ref_chosen_P=None, ref_rejected_P=None)
    losses_P, metrics = preference_loss("sigmoid", free, PreferenceOptions(beta=0.5))
    assert losses_P.item() == pytest.approx(-math.log(s(0.5 * 2))) and "kl" not in metrics


def test_metrics_by_hand():
    """Rewards, margin, accuracy, log-probabilities and drift; rewards of simpo are of the mean."""
    _, metrics = preference_loss("sigmoid", one_pair(chosen=-3.0), PreferenceOptions(beta=0.5))
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(
        {
            "reward_chosen": 1.0,
            "reward_rejected": -0.5,
            "reward_margin": 1.5,
            "accuracy": 1.0,
            "logprob_chosen": -3.0,
            "logprob_rejected": -6.0,
            "nll_chosen": 1.5,
            "kl": 0.5,
        }
    )
    _, metrics = preference_loss("simpo", one_pair(chosen=-5.0), PreferenceOptions(beta=2.0))
    assert metrics["reward_chosen"].item() == -5.0 and metrics["accuracy"].item() == 0.0


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
@FAST
@given(seed=st.integers(0, 10**6), shift=st.floats(-3, 3), cut=st.integers(1, 5), normalize=st.booleans())
def test_properties(name, seed, shift, cut, normalize):
    """Pairs are independent (chunk = whole); with a reference only differences to it count; masked tokens do not."""
    tokens, mask, ref = random_pairs(seed)
    options = options_for(name, length_normalize=normalize, rpo_alpha=0.0)
    whole_P, metrics = preference_loss(name, pairs_of(tokens, mask, ref), options)
    for part in (slice(cut), slice(cut, None)):
        rows = torch.arange(12).reshape(2, 6)[:, part].flatten()
        losses_P, part_metrics = preference_loss(name, pairs_of(tokens[rows], mask[rows], ref[rows]), options)
        assert torch.allclose(losses_P, whole_P[part])
        for key, value in part_metrics.items():
            assert torch.allclose(value, metrics[key][part])
    if name not in NO_REFERENCE:
        moved = pairs_of(tokens, mask, ref + shift)
        moved = replace(moved, chosen_P=moved.chosen_P + shift, rejected_P=moved.rejected_P + shift)
        assert torch.allclose(preference_loss(name, moved, options)[0], whole_P)


PLAIN = [(name, "reverse_kl") for name in sorted(PREFERENCE_LOSSES)]
OTHERS = [(n, kind) for n in sorted(F_DIVERGENCE_LOSSES) for kind in sorted(F_DIVERGENCES) if kind != "reverse_kl"]


@pytest.mark.parametrize("name, divergence", PLAIN + OTHERS)
def test_extremes_are_finite_in_float32(name, divergence):
    """Log-ratios of +-500 and a certain completion: finite loss and gradient."""
    leaf = torch.tensor([-1.0, -500.0, 0.0, -1e-9], requires_grad=True)
    counts_P = torch.tensor([5, 5, 5, 5])
    pairs = PairLogprobs(leaf, leaf.flip(0), counts_P, counts_P, torch.full((4,), -250.0), torch.zeros(4) - 250)
    options = options_for(name, f_divergence=divergence)
    losses_P, _ = preference_loss(name, pairs, options)
    losses_P.sum().backward()
    assert losses_P.isfinite().all() and leaf.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_the_gradient_widens_the_margin(name):
    """A step against the gradient raises chosen over rejected, from the reference's own log-probabilities."""
    leaf = torch.tensor([-4.0, -6.0], requires_grad=True)
    pair = replace(one_pair(), chosen_P=leaf[:1], rejected_P=leaf[1:])
    pair = replace(pair, ref_chosen_P=leaf[:1].detach(), ref_rejected_P=leaf[1:].detach())
    preference_loss(name, pair, options_for(name))[0].sum().backward()
    assert -leaf.grad[0] + leaf.grad[1] > 0


@pytest.mark.parametrize(
    "name, options, free, message",
    [
        ("exo_pair", PreferenceOptions(), False, "--label-smoothing above 0"),
        ("robust", PreferenceOptions(label_smoothing=0.5), False, r"in \[0, 0.5\)"),
        ("hinge", PreferenceOptions(label_smoothing=0.1), False, "has none"),
        ("sigmoid", PreferenceOptions(beta=0.0), False, "--beta"),
        ("apo_zero", PreferenceOptions(f_divergence="forward_kl"), False, "--f-divergence forward_kl"),
        ("sigmoid", PreferenceOptions(f_divergence="forward_kl"), True, "--reference-free"),
    ],
)
def test_options_that_do_not_go_together_are_refused(name, options, free, message):
    """At launch, naming the flag."""
    with pytest.raises(ValueError, match=message):
        check_preference_options(name, options, free)
    check_preference_options(name, options_for(name))
