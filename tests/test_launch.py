"""launch.py: what the other tests rely on when they start several processes."""

import sys
import time
from pathlib import Path

import launch
import psutil
import pytest

HANG = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__])
print("started", os.environ.get("RANK"), flush=True)
time.sleep(600)
"""


def running(marker: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if any(marker in word for word in p.info["cmdline"] or ())]


def test_output_and_status_come_back(tmp_path: Path):
    """Both streams and the exit status of a failed program are returned, and check() shows them."""
    script = tmp_path / "fails.py"
    script.write_text("import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(3)")
    result = launch.run(sys.executable, script)
    assert (result.returncode, result.stdout, result.stderr) == (3, "to stdout\n", "to stderr\n")
    with pytest.raises(AssertionError, match="exit status 3"):
        launch.check(result)


def test_torchrun_starts_ranks(torchrun, tmp_path: Path):
    """Every rank runs the script with the project importable."""
    script = tmp_path / "ranks.py"
    script.write_text("import os, megatron_rl\nprint('rank ' + os.environ['RANK'] + '\\n', end='')")
    assert sorted(torchrun(2, script).splitlines()) == ["rank 0", "rank 1"]


def test_timeout_leaves_no_process(tmp_path: Path):
    """A run that hangs fails with its output, and torchrun, its workers and their children are gone."""
    script = tmp_path / "hangs.py"
    script.write_text(HANG)
    start = time.monotonic()
    with pytest.raises(AssertionError, match="still running after 20 s(.|\n)*started 1"):
        launch.torchrun(2, script, timeout=20)
    assert time.monotonic() - start < 20 + 3 * launch.GRACE_SECONDS
    assert running(str(script)) == []
