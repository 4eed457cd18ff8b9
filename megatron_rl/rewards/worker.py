"""A process that runs rules: `python -m megatron_rl.rewards.worker FD`, started and killed by pool.py.

It is a fresh interpreter, not a fork of the trainer: no CUDA context, gloo thread or torch comes along.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from megatron_rl.rewards.rules import Rule, load_rule, warm_up


def apply_rule(rule: Rule, prompt: str, response: str, row: Mapping[str, Any]) -> tuple[bool, Any]:
    """(True, value) or (False, what went wrong)."""
    try:
        value = rule(prompt, response, row)
    except Exception as error:
        return False, f"raised {type(error).__name__}: {error}"
    try:
        if isinstance(value, str):
            raise TypeError("float() would read text")
        return True, float(value)  # numbers of numpy and torch become plain ones
    except (TypeError, ValueError):
        return False, f"returned {type(value).__name__} {str(value)[:60]!r}, not a number"


def _leave_with(parent: int) -> None:
    """Ends this process once the trainer is gone, even in the middle of a rule that never returns."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Receives the rules' specs, says it is ready, then answers jobs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which closes the pipe
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        rules = {spec: load_rule(spec) for spec in connection.recv()}
        for spec in rules:
            warm_up(spec)
        connection.send("ready")
        while True:
            spec, prompt, response, row = connection.recv()
            connection.send(apply_rule(rules[spec], prompt, response, row))
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    main()
