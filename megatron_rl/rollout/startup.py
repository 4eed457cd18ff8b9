"""Starting vLLM in a training process: its environment, arguments and folder, and what LLM() disturbs."""

import contextlib
import dataclasses
import difflib
import hashlib
import inspect
import json
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl import platform
from megatron_rl.initialize import Topology

OURS = {  # engine arguments that follow from other flags
    "model": "--hf-model",
    "tokenizer": "--hf-model",
    "tensor_parallel_size": "--rollout-tensor-parallel-size",
    "kv_cache_memory_bytes": "--kv-cache-gb",
    "max_model_len": "--max-prompt-length and --max-response-length",
    "seed": "--seed",
    "quantization": "training, whose weights the engine follows at every step as they are",
    "additional_config": "",
    "load_format": "",
    "distributed_executor_backend": "",
    "pipeline_parallel_size": "",
    "data_parallel_size": "",
    "logprobs_mode": "",
    "enable_sleep_mode": "",
    "skip_tokenizer_init": "",
}


def prepare_environment(topology: Topology, sleeps: bool) -> None:
    """Sets what vLLM reads from the environment. Call it before vllm is imported.

    Raises ValueError where the allocator is set so that vLLM's sleep mode cannot work.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if sleeps and "expandable_segments:true" in value.replace(" ", "").lower():
            raise ValueError(f"{name}={value} cannot free the KV cache around training: leave expandable_segments out")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
    if not platform.is_verbose():
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    for name, value in (
        ("RANK", topology.rank),
        ("WORLD_SIZE", topology.world_size),
        ("LOCAL_RANK", topology.local_rank),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", 29500),
    ):
        os.environ.setdefault(name, str(value))


def check_early(vllm_args: Mapping[str, Any], topology: Topology) -> None:
    """What the engine's start would refuse later, before models are loaded: ValueError."""
    prepare_environment(topology, platform.device_type() == "cuda")
    if vllm_args:
        check_vllm_args(vllm_args)


def check_vllm_args(vllm_args: Mapping[str, Any]) -> None:
    """Raises ValueError for keys that vLLM's engine does not have, or that other flags decide."""
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for key in vllm_args:
        if key in OURS:
            raise ValueError(f"--vllm-args {key} is decided by {OURS[key] or 'how the engine is built into training'}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ValueError(f"--vllm-args {key} is no argument of vLLM" + (f"; nearest: {near[0]}" if near else ""))


def config_folder(hf_folder: str | Path) -> Path:
    """A folder with the model's config.json and nothing else, the same one for the same config.

    vLLM would look into weight files that lie beside it (to untie embeddings, say), and its compilation cache is keyed
    by the path.
    """
    config = (Path(hf_folder) / "config.json").read_bytes()
    name = f"megatron_rl-{os.getuid()}-{hashlib.sha256(config).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    if not (folder / "config.json").exists():
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(config)
        os.replace(file.name, folder / "config.json")  # ranks of one machine do this at the same time
    return folder


def eos_token_ids(hf_folder: str | Path) -> tuple[int, ...]:
    """Every end-of-sequence token that generation_config.json and config.json name."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(hf_folder) / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found += [ids] if isinstance(ids, int) else ids or []
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """What Python and C++ write to standard error inside is shown only if the block fails, or with --verbose.

    vLLM's start has bars and warnings of extensions that no logging level reaches.
    """
    if platform.is_verbose():
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


@contextlib.contextmanager
def own_rng(seed: int) -> Iterator[None]:
    """vLLM seeds and draws from the global generators: inside they start from `seed`, then they are as they were."""
    before = platform.rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        platform.set_rng_state(before)


@contextlib.contextmanager
def groups_of(placement: Sequence[Sequence[int]]) -> Iterator[None]:
    """vLLM's groups, by default consecutive ranks, are made of the ranks of `placement` instead, a replica each."""
    from vllm.distributed import parallel_state

    order = [rank for replica in placement for rank in replica]
    make, new_group = parallel_state.init_model_parallel_group, dist.new_group

    def make_placed(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return make([[order[rank] for rank in ranks] for ranks in group_ranks], *args, **kwargs)

    def new_group_in_order(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, *args, sort_ranks=False, **kwargs)

    parallel_state.init_model_parallel_group = make_placed
    if not is_ascending(placement):
        dist.new_group = new_group_in_order  # vLLM's collectives expect group ranks in the order of the list
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group, dist.new_group = make, new_group


def is_ascending(placement: Sequence[Sequence[int]]) -> bool:
    """Within each replica, ranks come in the order of their numbers."""
    return all(list(ranks) == sorted(ranks) for ranks in placement)


def can_place(placement: Sequence[Sequence[int]]) -> bool:
    """Whether the installed torch can make these groups: those out of order need new_group(sort_ranks=False)."""
    return is_ascending(placement) or "sort_ranks" in inspect.signature(dist.new_group).parameters


@contextlib.contextmanager
def unique_shared_memory() -> Iterator[None]:
    """On the CPU two jobs of a host would meet under one shared-memory name: ours carries torchrun's run and port."""
    if platform.device_type() != "cpu":
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    make = Shared.make_group_name
    job = f"{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}-{os.environ['MASTER_PORT']}"
    Shared.make_group_name = staticmethod(lambda comm: f"/megatron_rl-{job}-" + make(comm).replace("/", "_"))
    try:
        yield
    finally:
        Shared.make_group_name = staticmethod(make)
