import json
import re
import sys
import time
from pathlib import Path

import launch
import pytest

from tools.plan_reshard import main

QWEN_72B = launch.ROOT / "benchmarks" / "models" / "Qwen2.5-72B"


def number(output: str, line: str, column: int = -1) -> float:
    (row,) = re.findall(rf"^ *{re.escape(line)} +(.*)$", output, re.MULTILINE)
    return float(row.split()[column])


def test_72b_at_1024_ranks_in_five_seconds(capsys: pytest.CaptureFixture):
    """Planning Qwen2.5-72B for 1,024 ranks takes under 5 s of one core; the mean rank receives the bound."""
    start = time.process_time()
    main(f"--hf-model {QWEN_72B} --train-tp 8 --train-pp 4 --train-dp 32 --rollout-tp 8".split())
    assert time.process_time() - start < 5
    output = capsys.readouterr().out
    model = 2 * (2 * 152064 * 8192 + 8192 + 80 * (2 * 8192 + 10240 + 8192 * (10240 + 8192 + 3 * 29568)))  # bytes
    bound = number(output, "least possible received (HybridFlow)")
    assert bound == pytest.approx((model / 8 - model / 32) / 1e9, abs=1e-3)
    assert number(output, "received", 0) == pytest.approx(bound, rel=1e-3)
    assert number(output, "vLLM's weights") == pytest.approx(model / 8e9, rel=1e-3)
    # A stage of four lies on a node of its own: three quarters come from other nodes, at 50 GB/s.
    assert number(output, "from the same node") == 0
    assert number(output, "estimated time of a sync, ms") == pytest.approx(number(output, "sent") / 50 * 1e3, abs=0.1)


def test_equal_layouts_receive_nothing(capsys: pytest.CaptureFixture):
    """At equal TP and PP 1 nothing is received, the bound is 0; with --rollout-weights copy all is stored twice."""
    main(f"--hf-model {QWEN_72B} --train-tp 8 --rollout-tp 8".split())
    output = capsys.readouterr().out
    assert number(output, "received") == number(output, "least possible received (HybridFlow)") == 0
    assert number(output, "memory beside Megatron's weights") == 0  # one KV head a rank: even QKV is an alias
    main(f"--hf-model {QWEN_72B} --train-tp 8 --rollout-tp 8 --rollout-weights copy".split())
    copied = capsys.readouterr().out
    assert number(copied, "permuted on the rank (stored twice)") == number(output, "vLLM's weights")


def test_overlapping_groups_are_shown(capsys: pytest.CaptureFixture):
    """Where another grouping lowers the traffic it is printed beside the usual one, with its ranks."""
    main(f"--hf-model {QWEN_72B} --train-tp 8 --train-dp 2 --rollout-tp 4".split())
    usual, best = capsys.readouterr().out.split("Replicas of ranks that overlap most")
    assert "the first is 0, 1, 2, 3" in usual and "the first is 0, 2, 4, 6" in best
    assert number(best, "received", 0) < number(usual, "received", 0)
    assert number(best, "received", 0) == pytest.approx(number(best, "least possible received (HybridFlow)"), rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train-tp", "7"], "64 attention heads cannot be divided by --tensor-model-parallel-size 7"),
        (["--rollout-tp", "2"], "1 ranks cannot be divided into replicas of --rollout-tp 2"),
        (["--train-ep", "2", "--train-dp", "2"], "needs a model with experts"),
    ],
)
def test_impossible_layouts(flags: list[str], message: str):
    """A layout that cannot be is a ValueError with the numbers and the flag."""
    with pytest.raises(ValueError, match=re.escape(message)):
        main(["--hf-model", str(QWEN_72B), *flags])


def test_errors_are_one_line(tmp_path: Path):
    """From the shell an error is one line on stderr, exit status 2, nothing on stdout."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    done = launch.run(sys.executable, "tools/plan_reshard.py", "--hf-model", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "GPT2LMHeadModel" in done.stderr
