"""train_dpo.py whole: what it writes, that it goes on where it stopped, and when it trusts what is on the disk."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import launch
import pytest
import torch
from models.tiny import tiny_model, tiny_tokenizer
from safetensors.torch import load_file

from megatron_rl.arguments import parse, validate_dpo
from megatron_rl.flags import DPO
from megatron_rl.models.config import read_hf_config

STEPS, SAVED_AT = 4, 2
TIMES = ("seconds", "per_second", "memory/", "step/")  # metrics that no two runs have alike


@dataclass(frozen=True)
class Run:
    out: str
    folder: Path

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return {row.pop("step"): {k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in rows}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "actor/model.safetensors")


def write_pairs(path: Path, seed: int, rows: int) -> Path:
    """Sums with a right and a wrong answer."""
    choose = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(rows):
            a, b = choose.randrange(10), choose.randrange(10)
            row = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + choose.randrange(1, 20))}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    folder = tmp_path_factory.mktemp("dpo")
    for name, seed in (("model", 0), ("other_model", 1)):
        tiny_tokenizer(tiny_model(folder / name, "qwen2", seed=seed, max_position_embeddings=64))
    for name, seed, rows in (("pairs", 1, 20), ("other_pairs", 2, 20), ("held_out", 3, 6)):
        write_pairs(folder / f"{name}.jsonl", seed, rows)

    def run(processes: int, name: str, *flags: object, data: str = "pairs", model: str = "model") -> Run:
        shared = ["--no-bf16", "--no-apply-chat-template", "--max-length", 24, "--max-prompt-length", 12]
        shared += ["--global-batch-size", 4, "--max-tokens-per-micro-batch", 48, "--lr", 1e-3, "--eval-interval", 2]
        out = launch.torchrun(
            *(processes, "train_dpo.py", "--hf-model", folder / model, "--train-data", folder / f"{data}.jsonl"),
            *("--eval-data", folder / "held_out.jsonl", "--train-iters", STEPS, "--output-dir", folder / name),
            *("--reference-cache", folder / "reference", *shared, *flags),
            timeout=250,
        )
        return Run(launch.check(out), folder / name)

    return run


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def whole(start: Callable[..., Run], checkpoints: Path) -> Run:
    """A run on two data-parallel ranks, saved on the way."""
    return start(2, "whole", "--save", checkpoints, "--save-interval", SAVED_AT)


def test_a_run_learns_evaluates_and_exports(whole: Run):
    """Every metric of the table is there at the steps it belongs to, the loss begins at log 2 and falls, and
    the export is a folder that transformers loads."""
    import transformers

    rows = whole.rows
    assert list(rows) == [0, 1, 2, 3, 4] and whole.out.count("[eval]") == 3
    assert {"eval/loss", "eval/accuracy", "eval/reward_margin"} <= rows[0].keys() & rows[2].keys() & rows[4].keys()
    assert rows[1]["dpo/loss"] == pytest.approx(0.6931472, abs=1e-6) and rows[0]["eval/accuracy"] == 0
    assert rows[4]["eval/loss"] < rows[0]["eval/loss"]
    for row in list(rows.values())[1:]:
        margin = row["dpo/reward_chosen"] - row["dpo/reward_rejected"]
        assert row["dpo/reward_margin"] == pytest.approx(margin, abs=1e-6) and row["dpo/pairs"] == 4
        assert {"dpo/kl", "dpo/tokens", "dpo/logprob_chosen", "dpo/grad_norm", "dpo/learning_rate"} <= row.keys()
    model = transformers.AutoModelForCausalLM.from_pretrained(whole.folder / "actor", dtype=torch.float32)
    assert torch.equal(model.model.norm.weight, whole.weights["model.norm.weight"])
    transformers.AutoTokenizer.from_pretrained(whole.folder / "actor")


def test_a_stopped_run_goes_on_bitwise(start: Callable[..., Run], whole: Run, checkpoints: Path):
    """From the checkpoint of step 2 the run ends with the same metrics and bytes, without a reference pass."""
    shutil.rmtree(checkpoints / f"iter_{STEPS:07d}")
    rest = start(2, "rest", "--load", checkpoints)
    assert rest.rows == {step: row for step, row in whole.rows.items() if step > SAVED_AT}
    assert all(torch.equal(tensor, rest.weights[name]) for name, tensor in whole.weights.items())
    assert rest.out.count("reused") == 2 and "pairs computed" not in rest.out


def test_a_resident_reference_gives_the_same_run(start: Callable[..., Run], whole: Run):
    """--reference each-step on one rank has the metrics of the precomputed one on two, to float32 rounding."""
    resident = start(1, "resident", "--reference", "each-step", "--no-save-hf")
    assert resident.rows.keys() == whole.rows.keys() and "pairs computed" not in resident.out
    for step, row in whole.rows.items():
        assert resident.rows[step] == pytest.approx(row, rel=1e-4, abs=1e-4), step


def test_without_a_reference_rewards_are_log_probabilities(start: Callable[..., Run], whole: Run):
    """--reference-free computes and keeps no reference: a reward is beta times the policy's own log-probability."""
    free = start(1, "free", "--reference-free", "--train-iters", 1, "--no-save-hf", "--reference-cache", "unused")
    first = free.rows[1]
    assert "no reference" in free.out and "pairs computed" not in free.out and not Path("unused").exists()
    assert "dpo/kl" not in first and first["dpo/logprob_chosen"] == pytest.approx(whole.rows[1]["dpo/logprob_chosen"])
    for half in ("chosen", "rejected"):
        assert first[f"dpo/reward_{half}"] == pytest.approx(0.1 * first[f"dpo/logprob_{half}"], rel=1e-5)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--reference-hf-model", "none"], ["--reference-hf-model none/config.json", "no such file"]),
        (["--reference-hf-model", "{}/small"], ["--reference-hf-model", "100", "131"]),
        (["--reference-hf-model", "{}/value"], ["--reference-hf-model", "value head"]),
        (["--reference-hf-model", "{}/model", "--reference-free"], ["--reference-hf-model", "--reference-free"]),
        (["--reference-cache", "{}/pairs.jsonl"], ["--reference-cache", "is a file"]),
        (["--eval-data", "none.jsonl"], ["--eval-data none.jsonl", "no such file"]),
        (["--max-prompt-length", 24], ["--max-prompt-length 24", "--max-length 24"]),
        (["--max-tokens-per-micro-batch", 40], ["--max-length 24", "--max-tokens-per-micro-batch 40"]),
        (["--max-length", 65, "--max-tokens-per-micro-batch", 130], ["--max-length 65", "64"]),
        (["--min-lr", 1], ["--min-lr 1.0", "--lr"]),
        (["--recompute-num-layers", 2], ["--recompute-num-layers 2", "--recompute-granularity full"]),
        (["--label-smoothing", 0.5], ["--label-smoothing is 0.5"]),
    ],
    ids=lambda value: "_".join(map(str, value)),
)
def test_what_cannot_work_is_refused(tmp_path: Path, more: list, words: list[str]):
    """A ValueError of one line with the flag to change and the numbers, before anything is built or written."""
    tiny_model(tmp_path / "model", "qwen2", max_position_embeddings=64)
    tiny_model(tmp_path / "small", "qwen2", vocab_size=100)
    tiny_model(tmp_path / "value", "qwen2", head="SequenceClassification")
    data = write_pairs(tmp_path / "pairs.jsonl", 1, 4)
    flags = ["--hf-model", tmp_path / "model", "--train-data", data, "--max-length", 24, "--max-prompt-length", 12]
    argv = [str(flag).format(tmp_path) for flag in (*flags, *more)]
    with pytest.raises(ValueError) as error:
        validate_dpo(args := parse("train_dpo.py", DPO, argv), read_hf_config(args.hf_model))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), error.value


def test_pairs_beyond_the_vocabulary_are_refused(tmp_path: Path):
    """A tokenizer of another model ends the run with both numbers before anything is built or written."""
    import train_dpo

    folder = tiny_tokenizer(tiny_model(tmp_path / "small", "qwen2", vocab_size=5))
    data, out = write_pairs(tmp_path / "pairs.jsonl", 1, 4), tmp_path / "out"
    argv = ["--hf-model", folder, "--train-data", data, "--output-dir", out, "--no-apply-chat-template"]
    argv += ["--max-length", 24, "--max-prompt-length", 12]
    with pytest.raises(ValueError, match="vocabulary of 5, but its tokenizer makes token [0-9]+ of the data"):
        train_dpo.train(parse("train_dpo.py", DPO, [str(word) for word in argv]))
    assert not out.exists()


def test_a_cache_of_other_data_or_model_is_refused(start: Callable[..., Run], whole: Run):
    """The file says what it was computed from; where pairs or reference are others it is named and replaced."""
    flags = ("--train-iters", 1, "--no-save-hf")
    other = start(1, "other", *flags, data="other_pairs", model="other_model")
    assert "train.safetensors: refused, it is of another data and another model" in other.out
    assert "eval.safetensors: refused, it is of another model" in other.out
    assert other.rows[1]["dpo/loss"] == pytest.approx(0.6931472, abs=1e-5)
