"""Folders of checkpoints on the disk: which are whole, which are broken, how one becomes whole at a stroke.

    DIR/iter_0000010/policy/            megatron-core's distributed checkpoint of a role, and hf/ beside it
    DIR/iter_0000010/critic/
    DIR/iter_0000010/rng/rank_00003.pt  generators of each rank
    DIR/iter_0000010/state.json         step, schedules, data position, arguments
    DIR/iter_0000010/integrity.json     size and digest (XXH3, 128 bits) of every other file; written last
    DIR/iter_0000012.partial/           being written, or left by a run that was killed meanwhile
    DIR/latest_checkpointed_iteration.txt

A folder gets its name once its manifest is on the disk, so that one without ".partial" was whole when it was written.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

Digest = tuple[int, str]  # size and XXH3 of 128 bits: against accidents, and faster than any disk

PARTIAL, REMOVED = ".partial", ".removed"
ALGORITHM = "xxh3_128"
READERS = 4  # threads of a process that take digests
MANIFEST, STATE = "integrity.json", "state.json"
LATEST = "latest_checkpointed_iteration.txt"  # Megatron's name
_NAME = re.compile(r"iter_(\d{7,})")


def folder_name(step: int) -> str:
    return f"iter_{step:07d}"


def step_of(folder: Path) -> int | None:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in `folder`, newest first. `folder` may be a checkpoint itself."""
    if (folder / MANIFEST).is_file() and step_of(folder) is not None:
        return [folder]
    found = [path for path in folder.glob("iter_*") if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def unfinished(folder: Path) -> list[Path]:
    """What a killed run was writing."""
    return sorted(folder.glob(f"iter_*{PARTIAL}"))


def contents(folder: Path) -> list[str]:
    """Every file below `folder` but the manifest, as relative names."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in paths if path != folder / MANIFEST)


def digest(path: Path) -> Digest:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        return file.tell(), found


def write_text(path: Path, text: str) -> None:
    """Puts a small file in place at a stroke, on the disk."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` lasting."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, digests: dict[str, Digest]) -> None:
    missing = set(contents(folder)) ^ digests.keys()
    assert not missing, f"the manifest and {folder} differ in {sorted(missing)}"
    files = {name: {"bytes": size, ALGORITHM: value} for name, (size, value) in sorted(digests.items())}
    write_text(folder / MANIFEST, json.dumps({"algorithm": ALGORITHM, "files": files}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Digest]:
    """By name. ValueError where there is none that can be read."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {name: (entry["bytes"], entry[ALGORITHM]) for name, entry in files.items()}
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} cannot be read: {error}") from error


def problem_of(folder: Path, name: str, expected: Digest) -> str | None:
    """What is wrong with one file of the manifest."""
    path, (size, value) = folder / name, expected
    try:
        found = path.stat().st_size
        if found != size:
            return f"{path} has {found:,} bytes instead of {size:,}"
        return None if digest(path)[1] == value else f"{path} is corrupted: its digest is not that of the manifest"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def latest_whole(
    folder: str | Path, show: Callable[[str], None] = print, check: Callable[[Path], list[str]] | None = None
) -> Path | None:
    """The newest checkpoint in `folder` whose files all have their digests; warns of each broken one that is newer.

    None where no checkpoint was ever finished. ValueError where there are some and all are broken. Checkpoints with
    more steps than the last one written belong to a run that was gone back on: they are left aside, too.
    `check`: in place of check_files.
    """
    folder = Path(folder)
    broken: list[str] = []
    for path in unfinished(folder):
        show(f"warning: {path} was never finished and is left aside")
    for path in candidates(folder, show):
        problems = (check or check_files)(path)
        if not problems:
            return path
        broken.append(f"{path.name} is broken: {'; '.join(problems[:5])}")
        show(f"warning: {broken[-1]}")
    if broken:
        raise ValueError(f"no whole checkpoint in {folder}: {'. '.join(broken)}. Remove it to start fresh")
    return None


def candidates(folder: Path, show: Callable[[str], None]) -> list[Path]:
    """checkpoints() without those that are newer than the last one written, where that one is there."""
    found, latest = checkpoints(folder), folder / LATEST
    last = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    if not last.isdigit() or not any(step_of(path) == int(last) for path in found):
        return found
    for path in found:
        if (step_of(path) or 0) > int(last):
            show(f"warning: {path} is left aside: the last one written is {folder_name(int(last))} ({LATEST})")
    return [path for path in found if (step_of(path) or 0) <= int(last)]


def check_files(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, each by name; empty where it is whole.

    `part` of `parts`: only a share of the files, so that several processes check all in that much less time.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    names = sorted(manifest, key=manifest.get)[part::parts]  # by size
    with ThreadPoolExecutor(READERS) as threads:
        return list(filter(None, threads.map(lambda name: problem_of(folder, name, manifest[name]), names)))


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write checkpoint `step` into."""
    partial = folder / (folder_name(step) + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path) -> Path:
    """Gives a written folder its name, in place of an older one, and marks it as the latest."""
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    if final.exists():
        remove(final)
    sync_folder(partial)
    partial.rename(final)
    sync_folder(final.parent)
    write_text(final.parent / LATEST, f"{step_of(final)}\n")
    return final


def remove(folder: Path) -> None:
    """Takes the name away first: a deletion that is cut short leaves nothing that looks whole."""
    gone = folder.with_name(folder.name + REMOVED)
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def retain(folder: Path, newest: int, keep_last: int | None) -> None:
    """Keeps the last K checkpoints up to step `newest`, and clears what killed runs left."""
    for path in (*unfinished(folder), *folder.glob(f"iter_*{REMOVED}")):
        shutil.rmtree(path, ignore_errors=True)
    older = [path for path in checkpoints(folder) if (step_of(path) or 0) <= newest]
    for path in older[keep_last:] if keep_last is not None else []:
        remove(path)
