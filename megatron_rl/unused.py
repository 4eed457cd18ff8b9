"""Flags that were given a value although nothing in this run reads it: told when it starts, and nothing is refused.

A configuration that several runs share may hold such a flag on purpose; a flag typed for its effect should not go
unnoticed.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_rl.algorithms.advantages import NEEDS_CRITIC
from megatron_rl.algorithms.preference import NO_REFERENCE
from megatron_rl.arguments import build_parser


class Rule(NamedTuple):
    """Where `unread` holds, nothing reads `flags`, because of `why` (a format of the arguments)."""

    unread: Callable[[argparse.Namespace], bool]
    why: str
    flags: tuple[str, ...]  # names without the dashes


SHARED = (
    Rule(lambda a: a.lr_decay_style == "constant", "--lr-decay-style is constant", ("min-lr", "lr-decay-iters")),
    Rule(lambda a: a.save is None, "there is no --save", ("async-save",)),
    Rule(lambda a: a.load is None, "there is no --load", ("exit-on-missing-checkpoint",)),
    Rule(lambda a: len(a.train_data) < 2, "--train-data is one file", ("data-weights",)),
    Rule(lambda a: not a.apply_chat_template, "--no-apply-chat-template takes none", ("system-prompt",)),
)
PPO = (
    *SHARED,
    Rule(
        lambda a: a.advantage_estimator not in NEEDS_CRITIC,
        "--advantage-estimator {advantage_estimator} has no critic",
        ("gae-lambda", "critic-lr", "value-clip", "critic-hf-model", "offload-critic"),
    ),
    Rule(lambda a: not a.kl_coef, "--kl-coef is 0", ("kl-in", "kl-estimator", "kl-horizon", "reference-hf-model")),
    Rule(lambda a: a.kl_coef and a.kl_target is None, "there is no --kl-target", ("kl-horizon",)),
    Rule(
        lambda a: not a.kl_coef and not a.reward_model and not a.reward_config,
        "there is no reference or reward model",
        ("offload-reference",),
    ),
    Rule(lambda a: a.policy_loss == "reinforce", "--policy-loss reinforce clips nothing", ("clip-low", "clip-high")),
    Rule(lambda a: a.policy_loss != "ppo", "--policy-loss is {policy_loss}", ("dual-clip",)),
    Rule(
        lambda a: a.loss_aggregation != "seq-mean-token-sum-norm",
        "--loss-aggregation is {loss_aggregation}",
        ("loss-fixed-length",),
    ),
    Rule(
        lambda a: a.rollout_correction == "none",
        "--rollout-correction is none",
        ("rollout-correction-threshold", "rollout-correction-normalize"),
    ),
    Rule(
        lambda a: a.rollout_backend == "hf",
        "--rollout-backend is hf",
        ("kv-cache-gb", "rollout-weights", "rollout-placement", "reshard-bucket-mb"),
    ),
    Rule(lambda a: not a.dynamic_sampling, "there is no --dynamic-sampling", ("max-sampling-rounds",)),
    Rule(lambda a: a.overlong_buffer is None, "there is no --overlong-buffer", ("overlong-penalty",)),
    Rule(lambda a: a.reward_workers == 0, "--reward-workers is 0", ("reward-timeout",)),
    Rule(
        lambda a: not a.eval_data,
        "there is no --eval-data",
        ("eval-interval", "eval-samples-per-prompt", "eval-temperature", "eval-pass-reward"),
    ),
    Rule(
        lambda a: a.eval_data and a.eval_samples_per_prompt == 1,
        "--eval-samples-per-prompt 1 is greedy",
        ("eval-temperature",),
    ),
)
DPO = (
    *SHARED,
    Rule(lambda a: not a.eval_data, "there is no --eval-data", ("eval-interval",)),
    Rule(lambda a: a.dpo_loss != "simpo", "--dpo-loss is {dpo_loss}", ("simpo-gamma",)),
    Rule(lambda a: a.f_divergence != "alpha_divergence", "--f-divergence is {f_divergence}", ("f-alpha",)),
    Rule(
        lambda a: a.dpo_loss in ("ipo", "simpo", "orpo"),
        "--dpo-loss {dpo_loss} always divides by the tokens",
        ("length-normalize",),
    ),
    Rule(
        lambda a: a.reference_free or a.dpo_loss in NO_REFERENCE,
        "there is no reference",
        ("reference", "reference-cache"),
    ),
    Rule(lambda a: a.reference == "each-step", "--reference is each-step", ("reference-cache",)),
    Rule(lambda a: a.train_iters is not None, "--train-iters ends the run", ("epochs",)),
)


def unused_flags(args: argparse.Namespace, groups: dict[str, Any], rules: tuple[Rule, ...]) -> list[str]:
    """A text for each reason, with the flags that have another value than their default and no reader.

    groups: those of the script, PPO or DPO of flags.py, whose defaults count.
    """
    parser, texts = build_parser("", groups), []
    for rule in rules:
        if not rule.unread(args):
            continue
        dests = {flag: flag.replace("-", "_") for flag in rule.flags}
        given = [f"--{flag}" for flag, dest in dests.items() if getattr(args, dest) != parser.get_default(dest)]
        if given:
            texts.append(f"nothing reads {', '.join(given)}: {rule.why.format(**vars(args))}")
    return texts
