"""Programs that measure in turns, so that what else the machine does slows all alike: child's and parent's side."""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

TURNS = "MEASURE_IN_TURNS"  # set in a child's environment
MARK, ASKS = "measured result: ", "waits for its turn\n"  # what a child says


def wait_for_turn() -> None:
    """In a child, before each measured run."""
    if TURNS in os.environ:
        print(ASKS, end="", flush=True)
        sys.stdin.readline()


def give(result: dict[str, Any]) -> None:
    """In a child, at its end; without a parent it is read by a person."""
    print(MARK + json.dumps(result), flush=True)


def _follow(child: subprocess.Popen) -> dict[str, Any] | None:
    """Passes on what it prints until it ends, with its result, or waits for its turn: None."""
    assert child.stdout is not None, "it was asked for"
    result: dict[str, Any] = {}
    for line in child.stdout:
        if line == ASKS:
            return None
        if line.startswith(MARK):
            result = json.loads(line.removeprefix(MARK))
        else:
            print(line, end="", flush=True)
    return result if child.wait() == 0 else {"failed": child.returncode}


def run_together(program: Sequence[str], parts: Sequence[str], argv: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The results of `program part *argv`. All start at the same time; measured runs take turns once all are ready.

    Who waits is stopped, for its threads would take the CPU from the other.
    """
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    how["env"] = os.environ | {TURNS: "1"}
    children, results = {part: subprocess.Popen([*program, part, *argv], **how) for part in parts}, {}
    queue, ready = deque(parts), set()
    try:
        while queue:
            part = queue.popleft()
            child = children[part]
            if part in ready:
                child.send_signal(signal.SIGCONT)
                child.stdin.write("\n")
                child.stdin.flush()
            ready.add(part)
            if (result := _follow(child)) is None:
                child.send_signal(signal.SIGSTOP)
                queue.append(part)
            else:
                results[part] = result
    finally:
        for child in children.values():
            child.kill()  # who has ended does not mind
    return results
