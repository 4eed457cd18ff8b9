"""Converts a model both ways, each in a process of its own, and reports size, time and peak memory.

    python benchmarks/checkpoint_convert.py models/SmolLM2-135M-Instruct --max-shard-size 100MB

Peak memory is the most anonymous memory that the process held, over what it held after its imports: pages of the
memory-mapped input, which the kernel takes back as it needs them, are counted apart.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from megatron_rl.checkpoint.convert import Workers, hf_to_megatron, megatron_to_hf
def held(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(kind))
def watch():
    while not done:
        for kind in peak:
            peak[kind] = max(peak[kind], held(kind))
        time.sleep(0.001)
done, before = False, {kind: held(kind) for kind in ("RssAnon", "RssFile")}
peak = dict(before)
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
start = time.perf_counter()
way, source, target, shard = sys.argv[2:]
if way == "to_megatron":
    hf_to_megatron(source, target, Workers(0, 1))
else:
    megatron_to_hf(source, target, "policy", shard, None, Workers(0, 1))
took = time.perf_counter() - start
done = True
watcher.join()
print(took, *(peak[kind] - before[kind] for kind in peak))
"""


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--max-shard-size", default="100MB")
    args = parser.parse_args()
    largest, total = 0, 0
    for file in args.model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                nbytes = tensors.get_tensor(name).nbytes
                largest, total = max(largest, nbytes), total + nbytes
    print(f"{args.model.name}: {total / 1e6:.1f} MB of weights, the largest tensor {largest / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as temporary:
        megatron, back = Path(temporary) / "megatron", Path(temporary) / "hf"
        for way, source, target in (("to_megatron", args.model, megatron), ("to_hf", megatron, back)):
            start = time.perf_counter()
            command = [sys.executable, "-c", CODE, ROOT, way, source, target, args.max_shard_size]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            seconds, anonymous, mapped = map(float, done.stdout.split())
            shard = "" if way == "to_megatron" else f", in shards of {args.max_shard_size}"
            print(
                f"{way}: {size(target) / 1e6:.1f} MB in {seconds:.1f} s ({time.perf_counter() - start:.1f} s with "
                f"imports){shard}; peak memory +{anonymous / 1e6:.1f} MB, mapped files +{mapped / 1e6:.1f} MB"
            )


if __name__ == "__main__":
    main()
