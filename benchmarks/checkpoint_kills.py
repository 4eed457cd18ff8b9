"""Kills a training run again and again with SIGKILL, resumes it, and compares its end with that of an unbroken run.

    python benchmarks/checkpoint_kills.py --kills 20 --out benchmarks/checkpoint_kills.txt

A tiny random Llama on PPO with critic and adaptive KL, a checkpoint every step, every other life with --async-save.
Each life is killed within `--within` seconds after its first finished step, some while they start.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

STAGES = tuple(f"[{name}]" for name in "load sync rollout reward logprobs advantage critic policy step save".split())
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]


def prepare(folder: Path) -> None:
    from tiny import tiny_model, tiny_tokenizer

    tiny_tokenizer(tiny_model(folder / "model", "llama3"))
    rows = [json.dumps({"prompt": f"say {i} "}) + "\n" for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(rows))


def start(folder: Path, name: str, ranks: int, iters: int, *extra: str) -> subprocess.Popen:
    """A run that loads from and saves to folder/name; its output goes to folder/name.log."""
    save = folder / name
    flags = f"""--hf-model {folder}/model --train-data {folder}/prompts.jsonl --no-apply-chat-template --reward length
        --max-prompt-length 16 --max-response-length 16 --rollout-batch-size 4 --n-samples-per-prompt 2
        --global-batch-size 4 --kl-coef 0.05 --kl-target 0.1 --kl-horizon 100 --lr 1e-3 --train-iters {iters}
        --no-progress --no-save-hf --output-dir {save}.out
        --save {save} --load {save} --save-interval 1 --keep-last 2"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    log = open(f"{save}.log", "w")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, str(ROOT / "train_ppo.py"), *flags.split(), *extra]
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)


def kill(process: subprocess.Popen, only_one: bool, dice: random.Random) -> None:
    """SIGKILL for one rank (torchrun ends the rest), or for all and torchrun at once."""
    root = psutil.Process(process.pid)
    everyone = [root, *root.children(recursive=True)]
    ranks = [p for p in everyone[1:] if "train_ppo.py" in " ".join(p.cmdline())]
    for victim in dice.sample(ranks, 1) if only_one and ranks else everyone:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(everyone, timeout=40)
    process.wait(timeout=40)


def live_and_die(process: subprocess.Popen, log: Path, dice: random.Random, within: float) -> str | None:
    """What it was doing when it was killed; None where it came to its end first."""
    begun, early = time.monotonic(), dice.random() < 0.15
    delay = dice.uniform(2, 15) if early else dice.uniform(0, within)
    while process.poll() is None:
        running = early or "[step]" in log.read_text()
        if running:
            time.sleep(delay)
            break
        time.sleep(0.05)
        assert time.monotonic() - begun < 300, log.read_text()[-3000:]
    if process.poll() is not None:
        return None
    one = dice.random() < 0.5
    kill(process, one, dice)
    said = [line for line in log.read_text().splitlines() if line.startswith(STAGES)]
    return f"{'one rank' if one else 'all'} {'while starting' if early else 'after'} {said[-1][:40] if said else ''}"


def end_of(save: Path) -> dict[str, object]:
    """Digests of all tensors and generators of the last checkpoint, and the script's state in it."""
    last = sorted(save.glob("iter_" + "[0-9]" * 7))[-1]
    files = json.loads((last / "integrity.json").read_text())["files"]
    kept = {name: entry["xxh3_128"] for name, entry in files.items() if name.endswith((".distcp", ".pt"))}
    return {"name": last.name, "state": json.loads((last / "state.json").read_text())["state"], **kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--iters", type=int, default=60, help="steps of the whole run")
    parser.add_argument("--within", type=float, default=1.5, help="seconds after the first step of a life")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which nothing is killed any more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("vllm", "hf"), default="vllm", help="of the rollout; hf starts faster")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    engine = ["--rollout-backend", "hf"] if args.backend == "hf" else ["--vllm-args", "enforce_eager=true"]
    dice, lines, kills, life = random.Random(args.seed), [], 0, 0
    until = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        while True:
            asynchronous = ["--async-save"] if life % 2 else []
            process = start(folder, "killed", args.ranks, args.iters, *engine, *asynchronous)
            log = folder / "killed.log"
            if kills < args.kills and time.monotonic() < until:
                how = live_and_die(process, log, dice, args.within)
            else:
                how = None
                process.wait()
            text = log.read_text()
            loaded = next((line.split(";")[0] for line in text.splitlines() if line.startswith("[load]")), "")
            loaded = loaded.split(": ", 1)[-1].split(",")[0]
            warned = sum("never finished" in line for line in text.splitlines())
            if how is None:
                assert process.returncode == 0, text[-3000:]
                lines.append(f"life {life}: from {loaded or 'the start'}, to the end")
                break
            kills, life = kills + 1, life + 1
            how = f"{'async ' if asynchronous else ''}{how}; unfinished checkpoints met at its start: {warned}"
            lines.append(f"life {life - 1}: from {loaded or 'the start'}, killed ({how})")
            print(lines[-1], flush=True)
        unbroken = start(folder, "unbroken", args.ranks, args.iters, *engine)
        assert unbroken.wait() == 0, (folder / "unbroken.log").read_text()[-3000:]
        same = end_of(folder / "killed") == end_of(folder / "unbroken")
        verdict = f"{kills} kills, {args.ranks} ranks, {args.iters} steps: the end is"
        lines.append(f"{verdict} {'bitwise that of an unbroken run' if same else 'NOT that of an unbroken run'}")
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
