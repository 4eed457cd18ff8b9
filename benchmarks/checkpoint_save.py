"""Saves and loads a model with its optimizer, at once and in the background, and reports sizes and times.

    python benchmarks/checkpoint_save.py models/SmolLM2-135M-Instruct

One process and no training: the moments are those of a fresh optimizer, which take as much room as any. Seconds of the
clock and of the processor: the second do not count what other programs took.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl import platform  # noqa: E402
from megatron_rl.arguments import layout_sizes, parse  # noqa: E402
from megatron_rl.checkpoint import files  # noqa: E402
from megatron_rl.checkpoint.load import load  # noqa: E402
from megatron_rl.checkpoint.save import open_checkpoints  # noqa: E402
from megatron_rl.flags import PPO  # noqa: E402
from megatron_rl.initialize import initialize  # noqa: E402
from megatron_rl.roles import build_policy  # noqa: E402


def measured(name: str, action: Callable[[], object]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    print(
        f"{name}: {time.perf_counter() - wall:.2f} s, {time.process_time() - cpu:.2f} s of the processor", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    platform.quiet()
    folder = tempfile.mkdtemp()
    flags = f"--hf-model {given.model} --train-data none --lr 1e-4 --save {folder} --load {folder} --keep-last 1"
    args = parse("train_ppo.py", PPO, flags.split())
    sizes = layout_sizes(args)
    topology = initialize(sizes.tp, sizes.pp, sizes.vpp, sizes.ep, args.seed)
    role = build_policy(args, topology)

    def quiet(text: str) -> None:
        pass

    step = 0
    for name in ("save", "async-save"):
        args.async_save = name == "async-save"
        checkpoints = open_checkpoints(args, topology, quiet)
        for _ in range(given.repeats):  # the first finds no moments: they are made for it
            step += 1
            measured(f"{name} {step}", lambda step=step, it=checkpoints: it.save(step, [role], {}))
            if args.async_save:
                measured(f"  {step} until it is whole", checkpoints.close)
    measured("  of it, checking the digests", lambda: files.check_files(Path(folder) / files.folder_name(step)))
    for _ in range(given.repeats):
        measured("load", lambda: load(args, [role], topology, quiet))
    written = files.read_manifest(Path(folder) / files.folder_name(step))
    total = sum(size for size, _ in written.values())
    print(
        f"{given.model.name}: {total / 1e9:.3f} GB in {len(written)} files: bfloat16 weights, float32 main and moments"
    )
    shutil.rmtree(folder)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
