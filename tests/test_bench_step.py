"""tools/bench_step.py on the CPU: its arithmetic, and a short run of the parts that need no GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from models.tiny import tiny_model, tiny_tokenizer

from megatron_rl.models.config import read_hf_config
from tools.bench_step import forward_flops, lengths_of, parameters

ROOT = Path(__file__).resolve().parents[1]


def test_model_flops(tmp_path: Path):
    """Counted from the tensors that transformers saved; attention by hand: 2 products of 2 n^2 D / 2 a head."""
    from safetensors import safe_open

    folder = tiny_model(tmp_path, "llama")
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys() if "norm" not in name}  # noqa: SIM118
    hf = read_hf_config(folder)
    assert parameters(hf) == sum(n for name, n in sizes.items() if "embed_tokens" not in name)
    attention = hf.layers * hf.heads * 2 * 2 * hf.head_dim * (10 * 10 + 4 * 4) / 2
    assert forward_flops(hf, [10, 4]) == pytest.approx(2 * parameters(hf) * 14 + attention)


def test_lengths_are_spread_and_fixed():
    """From a tenth to the whole, evenly, in one order; without a spread all are the longest."""
    lengths = lengths_of(500, 10, 10)
    assert sorted(lengths) == list(range(50, 501, 50)) and lengths == lengths_of(500, 10, 10) != sorted(lengths)
    assert lengths_of(7, 3, 1) == [7, 7, 7]


@pytest.mark.parametrize(("parts", "tokens"), [(("update", "whole"), (60, 20)), (("bare", "rollout"), (20, 20))])
def test_short_run(tmp_path: Path, parts: tuple[str, str], tokens: tuple[int, int]):
    """One command measures parts, one after the other or in turns, in processes of their own and prints a row each."""
    folder = tiny_model(tmp_path, "llama")
    tiny_tokenizer(folder)
    flags = "--sequences 3 --length 32 --repeats 1 --rollout-batch-size 2 --n-samples-per-prompt 2 --spread 4"
    flags += " --max-prompt-length 16 --max-response-length 8 --max-tokens-per-micro-batch 128 --kv-cache-gb 0.1"
    command = [sys.executable, ROOT / "tools/bench_step.py", *parts, "--hf-model", folder, *flags.split()]
    command += ["--vllm-args", "enforce_eager=true", "--output-dir", tmp_path / "out"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if re.match(rf"({'|'.join(parts)}) ", line)]
    assert len(rows) == 2, done.stdout
    for row, part, count in zip(rows, parts, tokens, strict=True):
        assert row.startswith(part) and f"tokens {count}," in row, done.stdout
