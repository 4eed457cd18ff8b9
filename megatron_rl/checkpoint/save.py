"""Writes checkpoints, at once or while training goes on, through megatron-core's dist_checkpointing."""

import argparse
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_rl import platform
from megatron_rl.checkpoint import files, write
from megatron_rl.checkpoint.state import optimizer_step, plain, role_state, save_rng, trained
from megatron_rl.initialize import Topology
from megatron_rl.metrics import bytes_text, timed
from megatron_rl.offload import ALL_STAY
from megatron_rl.roles import Role
from megatron_rl.weights.dist_io import HF
from megatron_rl.weights.hf_io import write_beside

Digests = dict[str, files.Digest]


@dataclass
class _Job:
    """A checkpoint on its way to the disk."""

    partial: Path
    step: int
    requests: list[Any]  # megatron-core's, one a role
    names: list[str] = field(default_factory=list)  # small files that this rank has written already
    digests: Digests = field(default_factory=dict)
    error: str | None = None
    thread: threading.Thread | None = None

    def write(self) -> None:
        """Writes this rank's tensors and takes the digests of its files. Keeps an error for the next meeting."""
        try:
            for request in self.requests:
                written = write.write(request)
                self.digests |= {str(path.relative_to(self.partial)): digest for path, digest in written.items()}
            self.digests |= {name: files.digest(self.partial / name) for name in self.names}
        except OSError as error:
            self.error = f"{error.filename or self.partial}: {error.strerror or error}"
        except Exception as error:  # of a thread, it would come out nowhere
            self.error = f"{type(error).__name__}: {error}"


class Checkpoints:
    """Saves every `interval` steps; a call that every rank makes. OSError with the reason where a disk refuses.

    With `asynchronous` the tensors are copied to the host and written by a thread; the checkpoint is finished, and
    its errors come out, at the next after_step() or close() after the thread has ended.
    """

    def __init__(
        self,
        folder: str | Path | None,
        interval: int | None,
        keep_last: int | None,
        asynchronous: bool,
        arguments: Mapping[str, Any],
        topology: Topology,
        show: Callable[[str], None] = print,
    ) -> None:
        self.folder = Path(folder) if folder is not None else None
        self._interval, self._keep_last, self._asynchronous = interval, keep_last, asynchronous
        self._arguments, self._topology, self._show = arguments, topology, show
        self._job: _Job | None = None

    def after_step(
        self, step: int, roles: list[Role | None], state: Mapping[str, Any], last: bool = False, stop: bool = False
    ) -> bool:
        """Saves where it is due, at the last step, and where any rank wants to stop; True: stop now."""
        stop = _any(stop, self._topology)
        if self.folder is None:
            return stop
        due = self._interval is not None and step % self._interval == 0
        if due or last or stop:
            self.save(step, roles, state)
        elif self._job and not _any(self._job.thread is not None and self._job.thread.is_alive(), self._topology):
            self._finish()
        if last or stop:
            self._finish()
        return stop

    def save(self, step: int, roles: list[Role | None], state: Mapping[str, Any]) -> None:
        """Writes checkpoint `step`: weights, optimizers, schedules and generators, and `state` (JSON values)."""
        assert self.folder is not None, "there is a folder to save to"
        self._finish()
        with timed() as seconds:
            job = self._begin(step, trained(roles), state)
            if self._asynchronous:
                job.thread = threading.Thread(target=job.write, name="checkpoint", daemon=True)
                job.thread.start()
            else:
                job.write()
            self._job = job
            if not self._asynchronous:
                self._finish()
        if self._asynchronous:
            self._show(f"[save] step {step}: copied in {seconds[0]:.1f} s, written in the background")
        else:
            self._show(f"[save] step {step}: {self._size} in {seconds[0]:.1f} s to {self.folder}")

    def close(self) -> None:
        """Waits for what is still being written."""
        self._finish()

    def _begin(self, step: int, roles: list[Role], state: Mapping[str, Any]) -> _Job:
        """Plans the checkpoint and writes its small files."""
        topology, folder = self._topology, self.folder
        assert folder is not None
        partial = folder / (files.folder_name(step) + files.PARTIAL)
        error, names = None, []
        try:
            if topology.is_main:
                names = self._small_files(files.begin(folder, step), step, roles, state)
        except OSError as refusal:
            error = f"{refusal.filename or partial}: {refusal.strerror}"
        self._agree(error, partial)
        job = _Job(partial, step, [], names)
        try:
            job.names.append(save_rng(partial, topology))
        except OSError as refusal:
            error = f"{refusal.filename or partial}: {refusal.strerror}"
        with platform.megatron():
            for role in roles:
                with role.memory.for_forward(), role.memory.for_update():
                    request = write.request(role_state(role, loading=False), partial / role.name)
                    apart = self._asynchronous or role.memory.options != ALL_STAY  # it leaves before writing
                    job.requests.append(write.snapshot(request, apart))
        self._agree(error, partial)
        return job

    def _small_files(self, partial: Path, step: int, roles: list[Role], state: Mapping[str, Any]) -> list[str]:
        topology = self._topology
        text = {
            "step": step,
            "state": plain(state),
            "roles": {
                role.name: {"kind": role.kind, "schedule": role.schedule.num_steps}
                | {"updates": optimizer_step(role.optimizer)}
                for role in roles
            },
            "layout": {"tp": topology.tp_size, "pp": topology.pp_size, "vpp": topology.vpp_size}
            | {"ep": topology.ep_size, "dp": topology.dp_size, "ranks": topology.world_size},
            "arguments": plain(self._arguments),
        }
        files.write_text(partial / files.STATE, json.dumps(text, indent=1) + "\n")
        for role in roles:
            (partial / role.name / HF).mkdir(parents=True)
            write_beside(role.folder, partial / role.name / HF, role.hf, role.kind, role.options.params_dtype)
        return files.contents(partial)

    def _finish(self) -> None:
        """Meets the other ranks when all have written, and makes the checkpoint whole."""
        job, self._job = self._job, None
        if job is None:
            return
        if job.thread is not None:
            job.thread.join()
        self._agree(job.error, job.partial)
        before = set(files.contents(job.partial)) if self._topology.is_main else set()
        try:
            with platform.megatron():
                for request in job.requests:
                    for finalize in request.finalize_fns:
                        finalize()
        except OSError as refusal:  # the others wait for this rank in megatron-core's barrier: they end with it
            self._give_up(f"{refusal.filename or job.partial}: {refusal.strerror}", job.partial)
        error = None
        try:
            gathered: list[Digests | None] = [None] * self._topology.world_size
            dist.all_gather_object(gathered, job.digests, group=self._topology.cpu_group)
            if self._topology.is_main:
                digests = {name: value for one in gathered if one for name, value in one.items()}
                added = set(files.contents(job.partial)) - before
                digests |= {name: files.digest(job.partial / name) for name in added}
                files.write_manifest(job.partial, digests)
                files.commit(job.partial)
                files.retain(job.partial.parent, job.step, self._keep_last)
                self._size = bytes_text(sum(size for size, _ in digests.values()))
                if self._asynchronous:
                    self._show(f"[save] step {job.step}: {self._size} are whole in {job.partial.parent}")
        except OSError as refusal:
            error = f"{refusal.filename or job.partial}: {refusal.strerror}"
        self._agree(error, job.partial)

    _size = ""

    def _agree(self, error: str | None, partial: Path) -> None:
        """Raises on every rank what one of them met; what was written of the checkpoint goes away."""
        errors: list[str | None] = [None] * self._topology.world_size
        dist.all_gather_object(errors, error, group=self._topology.cpu_group)
        if first := next(filter(None, errors), None):
            self._give_up(first, partial)

    def _give_up(self, error: str, partial: Path) -> NoReturn:
        if self._topology.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"the checkpoint could not be written: {error}; earlier ones in {self.folder} are whole")


def open_checkpoints(args: argparse.Namespace, topology: Topology, show: Callable[[str], None]) -> Checkpoints:
    """The flags of group checkpoints."""
    return Checkpoints(args.save, args.save_interval, args.keep_last, args.async_save, vars(args), topology, show)


def _any(value: bool, topology: Topology) -> bool:
    import torch

    flag = torch.tensor([int(value)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=topology.cpu_group)
    return bool(flag)
