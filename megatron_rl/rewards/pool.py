"""Processes that run rules, one sample at a time each, killed where a sample takes too long."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_SECONDS = 300.0  # for a worker to import what its rules need


@dataclass(frozen=True)
class Job:
    """One rule on one sample."""

    rule: str  # its spec
    prompt: str
    response: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """A number, or what went wrong."""

    value: float = 0.0
    fault: str | None = None


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection


class RulePool:
    """`workers` processes, started at the first call and again after a worker was killed."""

    def __init__(self, rules: Sequence[str], workers: int, timeout: float) -> None:
        self._rules, self._count, self._timeout = list(rules), workers, timeout
        self._workers: list[_Worker] = []

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Outcomes in the order of jobs. Stops at the first fault: jobs not yet done then have none of their own."""
        self._start(min(self._count, len(jobs)))
        outcomes = [Outcome() for _ in jobs]
        waiting = list(range(len(jobs)))[::-1]
        running: dict[Connection, tuple[_Worker, int, float]] = {}
        idle = list(self._workers)
        while waiting or running:
            while waiting and idle:
                worker, number = idle.pop(), waiting.pop()
                job = jobs[number]
                self._send(worker, (job.rule, job.prompt, job.response, dict(job.row)))
                running[worker.connection] = (worker, number, time.monotonic() + self._timeout)
            first_deadline = min(deadline for _, _, deadline in running.values())
            ready = wait(list(running), max(0.0, first_deadline - time.monotonic()))
            late = [c for c, (_, _, deadline) in running.items() if deadline <= time.monotonic()]
            for connection in ready or late:
                worker, number, _ = running.pop(connection)
                outcomes[number] = self._outcome(worker) if ready else self._late()
                if outcomes[number].fault:
                    self.close()
                    return outcomes
                idle.append(worker)
        return outcomes

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
        self._workers = []

    def _late(self) -> Outcome:
        return Outcome(fault=f"took longer than {self._timeout:g} s and was stopped (--reward-timeout)")

    def _outcome(self, worker: _Worker) -> Outcome:
        try:
            good, value = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            return Outcome(fault=f"ended its process (exit code {worker.process.wait()})")
        return Outcome(value=value) if good else Outcome(fault=value)

    def _send(self, worker: _Worker, message: Any) -> None:
        try:
            worker.connection.send(message)
        except BrokenPipeError:
            pass  # the process is gone; receiving says so, with its exit code

    def _start(self, count: int) -> None:
        new = [_start_worker() for _ in range(count - len(self._workers))]
        self._workers += new
        for worker in new:
            self._send(worker, self._rules)
        if not all(_is_ready(worker) for worker in new):
            self.close()
            raise ValueError(
                f"a process of --reward-workers did not start within {START_SECONDS:g} s with the rules "
                f"{', '.join(self._rules)}; what it said stands above"
            )


def _is_ready(worker: _Worker) -> bool:
    try:
        return worker.connection.poll(START_SECONDS) and worker.connection.recv() == "ready"
    except (EOFError, ConnectionResetError):
        return False


def _start_worker() -> _Worker:
    here, there = Pipe()
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.rewards.worker", str(there.fileno())],
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    there.close()
    return _Worker(process, here)
