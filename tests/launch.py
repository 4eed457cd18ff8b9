"""Starts programs in subprocesses for tests, gives their output and leaves no process behind."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 5  # torchrun passes SIGTERM on to its workers, which lie in sessions of their own


@dataclass(frozen=True)
class Result:
    """What a program left behind."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def tail(self) -> str:
        """The last lines of both streams, for messages."""
        return f"--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-6000:]}"


def kill_tree(process: subprocess.Popen) -> None:
    """Ends a program and every process that it started: politely, then by SIGKILL."""
    try:
        tree = [root := psutil.Process(process.pid), *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=GRACE_SECONDS)
    for survivor in alive:
        try:
            survivor.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=GRACE_SECONDS)
    process.wait()


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without torchrun's variables, one thread a rank, no model hub."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    fixed = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return inherited | fixed | dict(extra)


def run(*command: object, timeout: float = 120, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Result:
    """Runs a command; fails the test with the tail of its output where it takes longer than `timeout` seconds.

    The output goes through files: a pipe would stay open as long as any process that inherited it lives.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        words = [str(word) for word in command]
        process = subprocess.Popen(words, stdout=out, stderr=err, cwd=cwd, env=environment(env or {}))
        expired = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            expired = True
        finally:
            kill_tree(process)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    result = Result(process.returncode, texts[0], texts[1], time.monotonic() - start)
    assert not expired, f"still running after {timeout} s: {' '.join(words)}\n{result.tail}"
    return result


def torchrun(
    nproc: int, script: str | Path, *args: object, timeout: float = 120, env: Mapping[str, str] | None = None
) -> Result:
    """Runs a script (a path relative to the project root, or absolute) on `nproc` processes of this machine."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}")
    return run(*launcher, ROOT / script, *args, timeout=timeout, env=env)


def check(result: Result) -> str:
    """The standard output of a program that succeeded; otherwise fails with the tail of its output."""
    assert result.returncode == 0, f"exit status {result.returncode} after {result.seconds:.1f} s\n{result.tail}"
    return result.stdout
