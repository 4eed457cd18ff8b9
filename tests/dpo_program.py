"""Run by torchrun: loss, metrics and the whole gradient of one DPO batch in several layouts and packings.

Arguments: an output folder, a model folder, then cases as "tp,pp,vpp,sp,max tokens,pairs of a micro-batch (0: any)".
Gradients are written as a Hugging Face folder, so that every layout gives the same names and shapes.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from dpo_cases import LOSS_FLAGS, pairs_and_reference
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron_rl import builders, platform
from megatron_rl.arguments import parse
from megatron_rl.batch import batch_of_pairs
from megatron_rl.flags import DPO
from megatron_rl.initialize import initialize
from megatron_rl.reference_cache import KnownLogprobs
from megatron_rl.roles import build_preference_policy, export_role
from megatron_rl.step import train_step


def run_case(out: Path, folder: str, case: str, loss: str) -> None:
    tp, pp, vpp, sp, tokens, limit = map(int, case.split(","))
    flags = ["--hf-model", folder, "--train-data", "none", "--no-bf16", "--no-use-distributed-optimizer"]
    flags += ["--lr", "0", "--clip-grad", "0", "--max-tokens-per-micro-batch", str(tokens)]
    flags += ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    flags += ["--num-virtual-stages-per-pipeline-rank", str(vpp), *(["--sequence-parallel"] if sp else [])]
    flags += ["--micro-batch-size", str(limit)] if limit else []
    args = parse("train_dpo.py", DPO, [*flags, *LOSS_FLAGS[loss]])
    topology = initialize(tp, pp, vpp)
    policy = build_preference_policy(args, topology, 1)
    pairs, reference_N = pairs_and_reference()
    batch = replace(batch_of_pairs(pairs), ref_logprobs_BR=KnownLogprobs(pairs, reference_N).of(pairs))
    if not builders.needs_reference(args):
        batch = replace(batch, ref_logprobs_BR=None)
    plan = builders.plan_pairs(args, batch, topology)
    done = train_step(policy, batch, plan, builders.preference_loss_of(args), topology)
    for chunk in unwrap_model(policy.chunks):
        for param in chunk.parameters():
            param.data.copy_(param.main_grad)
    name = f"{loss}_{topology.world_size}_{case}"
    export_role(policy, out / name, topology)
    if topology.is_main:
        seen = done.metrics | {"grad_norm": done.grad_norm, "micro_batches": sum(len(m) for m in plan)}
        (out / f"{name}.json").write_text(json.dumps(seen))
    with platform.megatron():
        parallel_state.destroy_model_parallel()


def main() -> None:
    torch.manual_seed(0)
    for case in sys.argv[3:]:
        for loss in LOSS_FLAGS:
            run_case(Path(sys.argv[1]), sys.argv[2], case, loss)


main()
