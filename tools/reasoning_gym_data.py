"""Writes prompts of reasoning-gym's tasks as jsonl for --train-data and --eval-data, scored by --reward reasoning_gym.

    python tools/reasoning_gym_data.py leg_counting countdown --rows 500 --seed 1 --out train.jsonl
    python tools/reasoning_gym_data.py ransom_note:max_note_length=4,max_magazine_length=6 --out easy.jsonl

A row: prompt (the question), answer and metadata as the task's verifier wants them, data_source (the task). The same
seed gives the same rows; take another one for held-out prompts.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows_of(task: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` rows of NAME or NAME:key=value,...; ValueError where there is no such task or setting."""
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of a package that reasoning-gym imports
    import reasoning_gym
    import yaml

    name, _, text = task.partition(":")
    settings = {
        key: yaml.safe_load(value) for key, _, value in (part.partition("=") for part in text.split(",") if part)
    }
    try:
        entries = reasoning_gym.create_dataset(name, size=count, seed=seed, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"{task}: {error}") from error
    for entry in entries:
        yield {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "data_source": name,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", metavar="TASK", help="NAME or NAME:key=value,... of reasoning-gym")
    parser.add_argument("--rows", type=int, default=200, help="of each task (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="file to write; an older one is replaced")
    args = parser.parse_args()
    if args.out.is_dir():
        raise ValueError(f"--out {args.out} is a folder")
    lines = [json.dumps(row) + "\n" for task in args.tasks for row in rows_of(task, args.rows, args.seed)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.rename(args.out)
    print(f"{args.out}: {len(lines)} rows of {', '.join(args.tasks)}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
