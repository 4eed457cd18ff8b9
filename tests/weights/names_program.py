"""Run by torchrun on 4 ranks: the names and shapes of real megatron-core models against the parameter table."""

import sys
from pathlib import Path

from megatron.core import parallel_state

from megatron_rl import platform
from megatron_rl.initialize import initialize
from megatron_rl.models.config import ModelOptions, dims, read_hf_config
from megatron_rl.models.gpt import build_model
from megatron_rl.weights.layouts import megatron_blocks, train_layout

CUTS = ((2, 2, 1, 1), (4, 1, 1, 1), (1, 2, 2, 1), (2, 1, 1, 2))  # TP, PP, VPP, EP


def main() -> None:
    folders, same = [Path(word) for word in sys.argv[1:]], 0
    for tp, pp, vpp, ep in CUTS:
        topology = initialize(tp, pp, vpp, ep)
        for folder in folders:
            hf = read_hf_config(folder)
            if (ep > 1 and not hf.experts) or (vpp > 1 and hf.layers % vpp):
                continue
            layout = train_layout(dims(hf), tp, pp, vpp, ep)
            options = ModelOptions(sequence_parallel=bool(tp > 1 and hf.experts))
            for role in ("lm", "value"):
                chunks = build_model(hf, topology, options, role)
                found = {
                    f"{index}:{name}": tuple(param.shape)
                    for index, chunk in enumerate(chunks)
                    for name, param in chunk.named_parameters()
                }
                at = topology.at
                assert at.ep == parallel_state.get_expert_model_parallel_rank()
                params = megatron_blocks(dims(hf), layout, at.tp, at.pp, at.ep, role)
                expected = {param.key: param.shape for param in params}
                assert found == expected, (
                    f"{folder.name} {role} {(tp, pp, vpp, ep)}: {found.items() ^ expected.items()}"
                )
                same += 1
        with platform.megatron():
            parallel_state.destroy_model_parallel()
    sys.stdout.write(f"{same} models are the same\n")


main()
