"""Command line, --config files, and what is refused at launch: one line, before anything is written."""

import json
import sys
from pathlib import Path

import launch
import pytest
from models.tiny import tiny_model, tiny_tokenizer

import megatron_rl
from megatron_rl.arguments import parse, sampling_warnings, validate_dpo, validate_ppo
from megatron_rl.flags import DPO, PPO
from megatron_rl.models.config import read_hf_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_model(tmp_path_factory.mktemp("model"), "qwen2"))  # 4 heads, 2 key-value, 256 positions


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "say a"}\n')
    return path


def flags(model: Path, data: Path, *more: object) -> list[str]:
    fixed = ["--hf-model", model, "--train-data", data, "--reward", "length", "--no-apply-chat-template"]
    fixed += ["--max-prompt-length", 16, "--max-response-length", 16]
    return [str(word) for word in (*fixed, *more)]


def refused(capsys: pytest.CaptureFixture, *argv: object) -> str:
    """The last line of an ending at parsing, which has exit code 2."""
    with pytest.raises(SystemExit) as ending:
        parse("train_ppo.py", PPO, [str(word) for word in argv])
    assert ending.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# --- parsing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--micro-batchsize", 4], ["--micro-batchsize", "did you mean --micro-batch-size?"]),
        (["--tensor-model-parallel-sise", 4], ["did you mean --tensor-model-parallel-size?"]),
        (["--qqqq"], ["unknown: --qqqq"]),
        (["--advantage-estimator", "gea"], ["--advantage-estimator", "'gea'", "gae", "grpo"]),
        (["--policy-loss", "pppo"], ["--policy-loss", "'pppo'", "gspo"]),
        (["--lr", "fast"], ["--lr", "'fast'"]),
        (["--rollout-batch-size", 0], ["--rollout-batch-size", "0 is not above 0"]),
        (["--gamma", 1.5], ["--gamma", "1.5 is not between 0 and 1"]),
        (["--temperature", -1], ["--temperature", "-1"]),
        (["--kv-cache-gb", "1e400"], ["--kv-cache-gb", "1e400 is not finite"]),
        (["--vllm-args", "enforce_eager"], ["--vllm-args wants key=value", "'enforce_eager'"]),
        (["--roll", 4], ["unknown: --roll"]),  # no abbreviations: a later flag may make them mean another
        (["--seed", 1, "stray"], ["unknown: stray"]),
        (["--recompute-modules", "layernorm"], ["--recompute-modules", "'layernorm'", "core_attn"]),
    ],
)
def test_unknown_flags_and_values(capsys: pytest.CaptureFixture, more: list, words: list[str]):
    """A misspelt flag is named with the nearest one, a bad value with its flag and what is allowed."""
    line = refused(capsys, "--hf-model", "x", "--train-data", "y", *more)
    assert all(word in line for word in words), line


def test_missing_required_flags(capsys: pytest.CaptureFixture):
    """Both are named."""
    assert "--hf-model, --train-data" in refused(capsys)


@pytest.mark.parametrize("groups", [PPO, DPO], ids=["ppo", "dpo"])
def test_help_is_grouped_and_says_defaults(capsys: pytest.CaptureFixture, groups: dict):
    """Every group has its heading, every flag a meaning; lines fit 119 columns, and defaults are shown."""
    with pytest.raises(SystemExit) as ending:
        parse("train.py", groups, ["--help"])
    text = capsys.readouterr().out
    assert ending.value.code == 0 and max(map(len, text.splitlines())) <= 119
    assert all(f"\n{name}:\n" in text for name in groups)
    assert "(default: 1e-06)" in text and "None)" not in text
    from megatron_rl.arguments import build_parser

    for action in build_parser("train.py", groups)._actions:
        assert action.help and len(action.help) > 8, action.option_strings


def test_version(capsys: pytest.CaptureFixture):
    """--version prints megatron_rl.__version__ and needs no other flag."""
    with pytest.raises(SystemExit) as ending:
        parse("train_ppo.py", PPO, ["--version"])
    assert ending.value.code == 0 and capsys.readouterr().out == f"megatron_rl {megatron_rl.__version__}\n"


# --- --config -------------------------------------------------------------------------------------------------------


def test_config_gives_defaults(tmp_path: Path):
    """Numbers, lists, mappings, true and false, with - or _; the command line wins, a list is replaced whole."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "hf-model: M\ntrain_data: [a.jsonl, b.jsonl]\nlr: 1e-5\nbf16: false\nsequence-parallel: true\ndry-run: true\n"
        "reward: length\nvllm-args: {max_num_seqs: 8}\ntransformer-config: [layernorm_epsilon=0.1]\nseed: 7\nsave:\n"
    )
    args = parse("train_ppo.py", PPO, ["--config", str(file), "--seed", "9", "--vllm-args", "enforce_eager=true"])
    assert (args.hf_model, args.train_data, args.lr, args.reward) == ("M", ["a.jsonl", "b.jsonl"], 1e-5, ["length"])
    assert (args.bf16, args.sequence_parallel, args.dry_run, args.save) == (False, True, True, None)
    assert args.vllm_args == {"max_num_seqs": 8, "enforce_eager": True} and args.seed == 9
    assert args.transformer_config == {"layernorm_epsilon": 0.1}
    args = parse("train_ppo.py", PPO, [f"--config={file}", "--train-data", "c.jsonl", "--bf16"])
    assert args.train_data == ["c.jsonl"] and args.bf16 and args.seed == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("micro-batchsize: 4\n", ["unknown key micro-batchsize", "did you mean micro-batch-size?"]),
        ("config: other.yaml\n", ["unknown key config"]),
        ("lr: fast\n", ["--lr", "'fast'"]),
        ("- lr\n", ["wants 'flag-name: value' lines", "list"]),
        ("lr: [1\n", ["not YAML"]),
        (None, ["no such file"]),
    ],
)
def test_bad_config_is_named(capsys: pytest.CaptureFixture, tmp_path: Path, text: str | None, words: list[str]):
    """The file, and the key with the nearest flag."""
    file = tmp_path / "c.yaml"
    if text is not None:
        file.write_text(text)
    line = refused(capsys, "--config", file, "--hf-model", "x", "--train-data", "y")
    assert all(word in line for word in words), line
    assert str(file) in line or "--lr" in line


# --- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "more", "words"),
    [
        (1, ["--tensor-model-parallel-size", 2], ["1 ranks", "--tensor-model-parallel-size 2", "--nproc_per_node"]),
        (6, ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2], ["6 ranks", "size 2 x"]),
        (3, ["--tensor-model-parallel-size", 3], ["3", "4 attention heads"]),
        (4, ["--pipeline-model-parallel-size", 4], ["4", "3 layers"]),
        (2, ["--rollout-tensor-parallel-size", 3], ["--rollout-tensor-parallel-size 3", "2 ranks"]),
        (8, ["--rollout-tensor-parallel-size", 8], ["--rollout-tensor-parallel-size 8", "4 attention heads"]),
        (2, ["--rollout-backend", "hf", "--rollout-tensor-parallel-size", 2], ["hf", "parallel-size 2"]),
        (1, ["--rollout-backend", "hf", "--vllm-args", "max_num_seqs=4"], ["--vllm-args max_num_seqs", "hf"]),
        (2, ["--expert-model-parallel-size", 3], ["--expert-model-parallel-size 3", "2 data-parallel"]),
        (1, ["--rollout-batch-size", 6, "--global-batch-size", 4], ["6 samples", "--global-batch-size 4"]),
        (1, ["--max-prompt-length", 200, "--max-response-length", 100], ["200", "100", "256"]),
        (1, ["--max-tokens-per-micro-batch", 20], ["32 tokens", "--max-tokens-per-micro-batch 20"]),
        (1, ["--min-response-length", 17], ["--min-response-length 17", "--max-response-length 16"]),
        (1, ["--advantage-estimator", "grpo"], ["grpo", "--n-samples-per-prompt 1", "at least 2"]),
        (1, ["--reward-config", "none.yaml"], ["--reward", "--reward-config", "not both"]),
        (1, ["--dynamic-sampling"], ["--dynamic-sampling", "--n-samples-per-prompt 1", "at least 2"]),
        (1, ["--overlong-buffer", 20], ["--overlong-buffer 20", "--max-response-length 16"]),
        (1, ["--dual-clip", 0.5], ["--dual-clip 0.5", "above 1"]),
        (1, ["--kl-in", "loss", "--kl-coef", 0.1], ["--kl-estimator k1", "k2 or k3"]),
        (1, ["--kl-target", 0.1], ["--kl-target 0.1", "--kl-coef"]),
        (1, ["--data-weights", 1, 2], ["2 --data-weights", "1 --train-data"]),
        (1, ["--save-interval", 5], ["--save-interval 5", "--save DIR"]),
        (1, ["--world-size", 8], ["--world-size 8", "--dry-run"]),
        (1, ["--recompute-method", "block"], ["--recompute-method block", "--recompute-granularity full"]),
        (1, ["--recompute-modules", "mlp"], ["--recompute-modules mlp", "--recompute-granularity selective"]),
        (
            1,
            ["--recompute-granularity", "selective", "--recompute-modules", "mlp", "moe"],
            ["--recompute-modules moe", "has none"],
        ),
        (1, ["--transformer-config", "layernorm_epsilom=1"], ["layernorm_epsilom", "layernorm_epsilon"]),
        (1, ["--output-dir", "/dev/null/x"], ["--output-dir /dev/null/x", "/dev/null is a file"]),
        (1, ["--train-data", "none.jsonl"], ["--train-data none.jsonl", "no such file"]),
        (
            1,
            ["--lr-warmup-iters", 5, "--lr-decay-iters", 5, "--lr-decay-style", "linear"],
            ["--lr-warmup-iters 5", "--lr-decay-iters 5"],
        ),
        (
            1,
            ["--critic-warmup-iters", 9, "--advantage-estimator", "rloo", "--n-samples-per-prompt", 2],
            ["--critic-warmup-iters 9", "rloo"],
        ),
        (1, ["--rollout-reject", "nonsense:1"], ["--rollout-reject", "nonsense"]),
        (1, ["--vllm-args", "dtype=float32"], ["dtype=float32", "bfloat16", "--rollout-weights copy"]),
        (1, ["--vllm-args", "dtype=fp8", "--rollout-weights", "copy"], ["dtype=fp8", "none of bfloat16"]),
    ],
    ids=lambda value: "_".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_what_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: Path, data: Path, ranks: int, more: list, words: list[str]
):
    """A ValueError of one line with the flag to change and the numbers that do not fit."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    args = parse("train_ppo.py", PPO, flags(model, data, *more))
    with pytest.raises(ValueError) as error:
        validate_ppo(args, read_hf_config(args.hf_model))
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_what_changes_the_sampling_distribution_is_said_once(model: Path, data: Path):
    """One warning names --top-p, --top-k and --min-response-length with their values; without them there is none."""
    more = ["--top-p", 0.9, "--top-k", 20, "--min-response-length", 2]
    (warning,) = sampling_warnings(parse("train_ppo.py", PPO, flags(model, data, *more)))
    assert "--top-p 0.9 and --top-k 20 and --min-response-length 2" in warning and "importance ratio" in warning
    assert sampling_warnings(parse("train_ppo.py", PPO, flags(model, data, "--temperature", 0.6))) == []


def test_what_works_is_let_through(monkeypatch: pytest.MonkeyPatch, model: Path, data: Path):
    """TP 2 PP 2 on four ranks with rollout TP 4, two optimizer steps an epoch."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    layout = ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2]
    more = [*layout, "--rollout-tensor-parallel-size", 4, "--rollout-batch-size", 6, "--global-batch-size", 3]
    args = parse("train_ppo.py", PPO, flags(model, data, *more))
    validate_ppo(args, read_hf_config(args.hf_model))


def test_a_policy_is_no_value_model(tmp_path: Path, data: Path):
    """A folder with a value head is refused as policy, by PPO and DPO."""
    folder = tiny_model(tmp_path / "value", "qwen2", head="SequenceClassification")
    for groups, validate in ((PPO, validate_ppo), (DPO, validate_dpo)):
        args = parse("train.py", groups, ["--hf-model", str(folder), "--train-data", str(data)])
        with pytest.raises(ValueError, match="causal language model"):
            validate(args, read_hf_config(args.hf_model))


# --- the program itself ---------------------------------------------------------------------------------------------


def test_dry_run_prints_layout_and_budget(model: Path, data: Path, tmp_path: Path):
    """--dry-run --world-size 8 in one plain process prints model, layout and batches; nothing is written."""
    more = ["--tensor-model-parallel-size", 2, "--rollout-tensor-parallel-size", 1, "--dry-run", "--world-size", 8]
    argv = flags(model, data, *more, "--output-dir", tmp_path / "out", "--rollout-batch-size", 16)
    text = launch.check(launch.run(sys.executable, "train_ppo.py", *argv))
    assert "8 ranks = TP 2 x PP 1 (layers 3) x DP 4" in text and "8 vLLM engines of TP 1" in text
    assert "16 prompts x 1 samples = 16" in text and "weights" in text and "optimizer" in text
    assert not (tmp_path / "out").exists()


def rows(path: Path, *values: object) -> Path:
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
    return path


BAD_RUNS = {
    "no such file": ({}, lambda tmp: ["--train-data", tmp / "none.jsonl"], ["none.jsonl", "no such file"]),
    "no key": (
        {"bad.jsonl": [{"prompt": "a"}, {"question": "b"}]},
        lambda tmp: ["--train-data", tmp / "bad.jsonl"],
        ["bad.jsonl, row 2", "'prompt'", "'question'", "--prompt-key"],
    ),
    "not JSON": (
        {"bad.jsonl": [{"prompt": "a"}, "{prompt"]},
        lambda tmp: ["--train-data", tmp / "bad.jsonl"],
        ["bad.jsonl, row 2", "not JSON"],
    ),
    "no config.json": ({}, lambda tmp: ["--hf-model", tmp], ["config.json"]),
    "empty prompt": (
        {"bad.jsonl": [{"prompt": "a"}, {"prompt": " "}]},
        lambda tmp: ["--train-data", tmp / "bad.jsonl"],
        ["bad.jsonl, row 2", "empty", "--prompt-key"],
    ),
    "all over-long": (
        {"bad.jsonl": [{"prompt": "a" * 50}]},
        lambda tmp: ["--train-data", tmp / "bad.jsonl"],
        ["bad.jsonl", "all 1 prompts", "--max-prompt-length 16"],
    ),
    "no such rule in the file": (
        {"rule.py": ["def good(prompt, response, row): return 1.0"]},
        lambda tmp: ["--reward", f"{tmp}/rule.py:better"],
        ["rule.py", "'better'", "good", "--reward"],
    ),
    "no tokenizer": ({}, lambda tmp: ["--hf-model", tiny_model(tmp / "bare", "llama")], ["bare", "no tokenizer"]),
    "a tokenizer of another model": (
        {},
        lambda tmp: ["--hf-model", tiny_tokenizer(tiny_model(tmp / "small", "llama", vocab_size=5))],
        ["small", "vocabulary of 5", "--hf-model", "token "],
    ),
    "an end outside of the vocabulary": (
        {},
        lambda tmp: ["--hf-model", tiny_tokenizer(tiny_model(tmp / "ends", "llama", eos_token_id=600))],
        ["ends", "eos_token_id 600", "--hf-model"],
    ),
    "architecture": (
        {"config.json": [{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}]},
        lambda tmp: ["--hf-model", tmp],
        ["GPT2LMHeadModel"],
    ),
    "rule": ({}, lambda tmp: ["--reward", "lenght"], ["lenght", "length"]),
    "reward model without a head": (
        {},
        lambda tmp: ["--reward-model", tiny_tokenizer(tiny_model(tmp / "base", "qwen2"))],
        ["base", "without score.weight", "--reward-model"],
    ),
    "reward model without a tokenizer": (
        {},
        lambda tmp: ["--reward-model", tiny_model(tmp / "bare", "qwen2", head="SequenceClassification")],
        ["reward model", "bare", "no tokenizer"],
    ),
    "no held-out data": ({}, lambda tmp: ["--eval-data", tmp / "e.jsonl"], ["--eval-data", "e.jsonl", "no such file"]),
    "held-out data without the key": (
        {"e.jsonl": [{"question": "b"}]},
        lambda tmp: ["--eval-data", tmp / "e.jsonl"],
        ["e.jsonl, row 1", "'prompt'", "--prompt-key"],
    ),
    "no reward model": ({}, lambda tmp: ["--reward-model", tmp], ["reward model", "no config.json"]),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_input_in_one_line(
    case: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """train() ends before a model is built with one line of file, row and flag; the output folder is absent."""
    import train_ppo
    from megatron_rl.failure import ending_together

    files, more, words = BAD_RUNS[case]
    for name, values in files.items():
        rows(tmp_path / name, *values)
    argv = flags(model, data, "--output-dir", tmp_path / "out", *more(tmp_path))
    monkeypatch.setattr(train_ppo, "build_policy", lambda *_: pytest.fail("no model may be built"))
    with pytest.raises(SystemExit) as ending, ending_together():
        train_ppo.train(parse("train_ppo.py", PPO, argv))
    lines = capsys.readouterr().err.splitlines()
    assert ending.value.code == 2 and lines[-1].startswith("error: ")
    assert all(word in lines[-1] for word in words), lines
    assert not (tmp_path / "out").exists()
