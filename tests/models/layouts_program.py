"""Run by torchrun: outputs and one Adam step of tiny models in several layouts, saved for the test to compare.

Arguments: an output folder, then the layouts as "tp,pp,vpp,ep,sp", then "--", then model folders.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cases import CLIP, EPS, LOSSES, LR, micro_batches, padded
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl import platform
from megatron_rl.batch import MicroBatch
from megatron_rl.initialize import Topology, initialize
from megatron_rl.models.config import HFConfig, ModelOptions, read_hf_config
from megatron_rl.models.gpt import build_model, forward
from megatron_rl.models.heads import Head, all_values, full_logits
from megatron_rl.models.optimizer import OptimizerOptions, build_optimizer, wrap_ddp
from megatron_rl.weights.hf_io import export_model, load_model

LENGTH = 64  # of the longest micro-batch
OPTIMIZER = OptimizerOptions(lr=LR, adam_eps=EPS, clip_grad=CLIP)


def run_schedule(chunks: list[Any], micros: list[MicroBatch], head: Head, loss: Any, forward_only: bool) -> list[Any]:
    def forward_step(micro_batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        micro = next(micro_batches)

        def finish(out: Tensor, non_loss_data: bool = False) -> Any:
            if forward_only:
                return out.detach()
            return loss(out, micro), torch.zeros((), dtype=torch.int), {}

        return forward(chunk, micro, head), finish

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micros) for _ in chunks],
        model=chunks,
        num_microbatches=len(micros),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def step(hf: HFConfig, folder: Path, out: Path, topology: Topology, options: ModelOptions) -> None:
    """Saves `out`.pt with all outputs and the gradient norm, and the folder `out` with the updated weights."""
    chunks: list[Any] = list(build_model(hf, topology, options, hf.head))
    loaded = load_model(folder, hf, chunks, topology, hf.head)
    assert not loaded.new_head and not loaded.ignored
    export_model(chunks, hf, topology, out.with_name(out.name + "-same"), folder, hf.head, max_shard="300KB")
    micros = micro_batches(hf.vocab)
    if topology.vpp_size > 1:  # the interleaved schedule wants one length
        micros = [padded(micro, LENGTH) for micro in micros]
    head = full_logits(hf.vocab) if hf.head == "lm" else all_values
    chunks = wrap_ddp(chunks, topology, OPTIMIZER)
    optimizer, _ = build_optimizer(chunks, OPTIMIZER)
    chunks[0].config.finalize_model_grads_func = lambda model, *args, **kwargs: finalize_model_grads(model)
    with platform.megatron():
        with torch.no_grad():
            outputs = run_schedule(chunks, micros, head, None, forward_only=True)
        mine = micros[topology.at.dp :: topology.dp_size]
        run_schedule(chunks, mine, head, LOSSES[hf.head], forward_only=False)
        updated, norm, _ = optimizer.step()
    assert updated
    export_model(chunks, hf, topology, out, folder, hf.head)
    if topology.rank == topology.world_size - 1:
        torch.save({"outputs": outputs, "norm": float(norm)}, out.with_suffix(".pt"))


def main() -> None:
    out, split = Path(sys.argv[1]), sys.argv.index("--")
    for layout in sys.argv[2:split]:
        tp, pp, vpp, ep, sp = map(int, layout.split(","))
        topology = initialize(tp, pp, vpp, ep)
        for folder in map(Path, sys.argv[split + 1 :]):
            hf = read_hf_config(folder)
            if (ep > 1 and not hf.experts) or (hf.experts and tp > sp + 1) or (vpp > 1 and hf.layers % (pp * vpp)):
                continue
            options = ModelOptions(torch.float32, sequence_parallel=bool(sp))
            step(hf, folder, out / f"{folder.name}_{layout}", topology, options)
        with platform.megatron():
            parallel_state.destroy_model_parallel()


main()
