"""A role's weights in megatron-core's distributed format: a folder that any layout reads.

ROLE/*.distcp, .metadata, metadata.json   tensors under Megatron's names, layers counted over the whole model
ROLE/hf/                                  config.json, tokenizer and what else belongs to the Hugging Face folder
"""

from pathlib import Path
from typing import Any

import torch

from megatron_rl import platform
from megatron_rl.models.config import HFConfig
from megatron_rl.weights.arch import VALUE_HEAD, Role
from megatron_rl.weights.hf_io import Loaded, named_tensors
from megatron_rl.weights.layouts import check_names

HF = "hf"  # the subfolder
OPTIMIZER = "optimizer."  # names of its tensors begin so
METADATA = {
    "non_homogeneous_layers": True,  # each layer is a tensor of its own
    "distrib_optim_sharding_type": "fully_reshardable",  # optimizer state that another TP, PP or DP can read
    "distrib_optim_fully_reshardable_mem_efficient": True,  # gathered on the host of one data-parallel rank
    "chained_optim_avoid_prefix": True,
}


def is_dist_folder(folder: str | Path) -> bool:
    """Whether it is a role's folder of a checkpoint."""
    return (Path(folder) / ".metadata").is_file() and (Path(folder) / HF / "config.json").is_file()


def hf_folder(folder: str | Path) -> Path:
    """Where the config.json of an HF folder, or of a role's folder of a checkpoint, is."""
    return Path(folder) / HF if is_dist_folder(folder) else Path(folder)


def model_state(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    """megatron-core's sharded state of this rank's chunks; call it inside platform.megatron()."""
    from megatron.core.utils import unwrap_model

    states = [model.sharded_state_dict(metadata=dict(METADATA)) for model in unwrap_model(chunks)]
    return {
        f"model{i}": {name: value for name, value in state.items() if not name.endswith("_extra_state")}
        for i, state in enumerate(states)
    }


def fill_model(chunks: list[torch.nn.Module], loaded: dict[str, Any]) -> None:
    """Puts what load_sharded gave for model_state into the chunks: names were compared there."""
    from megatron.core.utils import unwrap_model

    for i, model in enumerate(unwrap_model(chunks)):
        model.load_state_dict(loaded[f"model{i}"], strict=False)


def load_sharded(state: dict[str, Any], folder: str | Path, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads `state` from the role's folder. ValueError that names what one side has and the other has not.

    Names in the folder that begin with one of `without` are not asked for.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import StrictHandling

    try:
        loaded, missing, unexpected = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
    except CheckpointingException as error:
        raise ValueError(f"{folder}: {error}") from error
    missing = {name for name in missing if not name.startswith(without)} if without else missing
    shared = {"a tensor that both have"}
    check_names(shared | unexpected, shared | missing, f"{folder}, against this run's model,")
    return loaded


def load_weights(folder: str | Path, hf: HFConfig, chunks: list[torch.nn.Module], role: Role = "lm") -> Loaded:
    """Fills this rank's chunks from a role's folder of a checkpoint; call it on every rank, before the optimizer is
    built. A value model takes its head from a value model's checkpoint, or keeps the fresh one.
    """
    if role == "lm" and hf.head == "value":
        raise ValueError(f"{folder} is a value or reward model: it has no language-model head")
    new_head = role == "value" and hf.head == "lm"
    with platform.megatron():
        state = model_state(chunks)
        for part in state.values() if new_head else ():
            part.pop(VALUE_HEAD.megatron, None)
        without = (OPTIMIZER, VALUE_HEAD.megatron) if new_head else (OPTIMIZER,)
        fill_model(chunks, load_sharded(state, folder, without))
    tensors = named_tensors(chunks).values()
    return Loaded(len(tensors), sum(t.nbytes for t in tensors), new_head, ())
