"""What a model may be written over."""

from pathlib import Path


def check_replaceable(folder: str | Path) -> None:
    """ValueError where writing a model to `folder` would remove something else than an older model."""
    folder = Path(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file, no folder that a model can be written to")
    entries = list(folder.iterdir())
    other = [path.name for path in entries if path.is_dir()]
    if other or (entries and not (folder / "config.json").is_file()):
        found = f"a folder {sorted(other)[0]}" if other else f"{entries[0].name} and no config.json"
        raise ValueError(f"{folder} holds {found}: only an older model is replaced; remove it, or name another folder")
