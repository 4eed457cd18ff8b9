"""Flags that nothing reads are named at launch, and those that something reads are not."""

import pytest

from megatron_rl import flags, unused
from megatron_rl.arguments import build_parser, parse
from megatron_rl.unused import unused_flags

PPO = ["--hf-model", "m", "--train-data", "d", "--reward", "length"]
DPO = ["--hf-model", "m", "--train-data", "d"]


def texts(groups: dict, rules: tuple, *argv: str) -> list[str]:
    return unused_flags(parse("prog", groups, argv), groups, rules)


@pytest.mark.parametrize(("groups", "rules"), [(flags.PPO, unused.PPO), (flags.DPO, unused.DPO)], ids=["ppo", "dpo"])
def test_the_table_names_flags_of_its_script(groups: dict, rules: tuple):
    """Every flag of a rule is one that the script's parser knows."""
    known = {option for action in build_parser("prog", groups)._actions for option in action.option_strings}
    assert [flag for rule in rules for flag in rule.flags if f"--{flag}" not in known] == []


@pytest.mark.parametrize(
    ("given", "read_with"),
    [
        ("--gae-lambda 0.9", "--advantage-estimator gae"),
        ("--critic-lr 1e-5 --value-clip 0.1 --critic-hf-model c --offload-critic", "--advantage-estimator gae"),
        ("--kl-in loss --kl-estimator k3 --reference-hf-model r --offload-reference", "--kl-coef 0.1"),
        ("--kl-horizon 7", "--kl-coef 0.1 --kl-target 1"),
        ("--offload-reference", "--reward-model r"),
        ("--clip-low 0.1 --clip-high 0.3 --policy-loss reinforce", "--policy-loss cispo"),
        ("--dual-clip 3 --policy-loss gspo", "--policy-loss ppo"),
        ("--loss-fixed-length 9", "--loss-aggregation seq-mean-token-sum-norm"),
        ("--rollout-correction-threshold 3 --rollout-correction-normalize", "--rollout-correction token"),
        (
            "--kv-cache-gb 1 --rollout-weights copy --reshard-bucket-mb 1 --rollout-backend hf",
            "--rollout-backend vllm",
        ),
        ("--max-sampling-rounds 3", "--dynamic-sampling"),
        ("--overlong-penalty 2", "--overlong-buffer 4"),
        ("--reward-timeout 3 --reward-workers 0", "--reward-workers 1"),
        (
            "--eval-interval 3 --eval-temperature 0.5 --eval-samples-per-prompt 2 --eval-pass-reward 0.5",
            "--eval-data e",
        ),
        ("--eval-data e --eval-temperature 0.5", "--eval-samples-per-prompt 2"),
        ("--min-lr 1e-9 --lr-decay-iters 5", "--lr-decay-style cosine"),
        ("--async-save", "--save s"),
        ("--exit-on-missing-checkpoint", "--load l"),
        ("--data-weights 1 2", "--train-data d e"),
        ("--system-prompt text --no-apply-chat-template", "--apply-chat-template"),
    ],
)
def test_ppo_flags_without_a_reader(given: str, read_with: str):
    """All the flags are named where nothing reads them, and none with the flag that gives them a reader."""
    base = [*PPO, "--advantage-estimator", "grpo"]
    found = texts(flags.PPO, unused.PPO, *base, *given.split())
    names = {word for word in given.split() if word.startswith("--")}
    causes = {"--policy-loss", "--rollout-backend", "--reward-workers", "--no-apply-chat-template", "--eval-data"}
    assert {flag for flag in names - causes if not any(flag in text for text in found)} == set()
    assert texts(flags.PPO, unused.PPO, *base, *given.split(), *read_with.split()) == []


@pytest.mark.parametrize(
    ("given", "read_with"),
    [
        ("--eval-interval 3", "--eval-data e"),
        ("--simpo-gamma 1", "--dpo-loss simpo"),
        ("--f-alpha 0.3", "--f-divergence alpha_divergence"),
        ("--length-normalize --dpo-loss ipo", "--dpo-loss sigmoid"),
        ("--reference each-step --dpo-loss orpo", "--dpo-loss sigmoid"),
        ("--reference-cache c --reference-free", "--no-reference-free"),
        ("--reference-cache c --reference each-step", "--reference precomputed"),
    ],
)
def test_dpo_flags_without_a_reader(given: str, read_with: str):
    """The first flag is named where nothing reads it, and no more with the flag that gives it a reader."""
    found = texts(flags.DPO, unused.DPO, *DPO, *given.split())
    assert given.split()[0] in " ".join(found)
    assert texts(flags.DPO, unused.DPO, *DPO, *given.split(), *read_with.split()) == []


def test_the_reason_is_told():
    """Each text has the flags and why nothing reads them, with the value that is the cause."""
    (text,) = texts(flags.PPO, unused.PPO, *PPO, "--advantage-estimator", "rloo", "--gae-lambda", "0.9")
    assert text == "nothing reads --gae-lambda: --advantage-estimator rloo has no critic"
    (text,) = texts(flags.DPO, unused.DPO, *DPO, "--epochs", "3", "--train-iters", "2")
    assert text == "nothing reads --epochs: --train-iters ends the run"
