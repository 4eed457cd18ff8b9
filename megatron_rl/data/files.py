"""Rows from parquet, json, jsonl and arrow files, and from a user's own dataset class.

Nothing is dropped here: whatever is not a row of the asked form is a ValueError that names file, row and key.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol


@dataclass(frozen=True)
class Row:
    """One row and where it came from, for messages."""

    file: str
    number: int  # from 1; the line number in a jsonl file
    values: Mapping[str, Any]

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.file}, row {self.number}: {message}")

    def get(self, key: str, flag: str) -> Any:
        """The value under `key`; a ValueError that names `flag` where the row has none."""
        if key not in self.values:
            keys = ", ".join(map(repr, self.values)) or "none"
            raise self.error(f"no key {key!r}; its keys are {keys} (change {flag})")
        return self.values[key]


class CustomDataset(Protocol):
    """What the class of --dataset-class provides."""

    def __init__(self, files: list[str]) -> None:
        """`files` is what --train-data names."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`, the same one at every call and in every run."""
        ...


def read_sources(files: Sequence[str], dataset_class: str | None, flag: str) -> list[list[Row]]:
    """The rows of each file; those of a dataset class (file.py:Class) stand as if they were one file."""
    if dataset_class is not None:
        return [_custom_rows(dataset_class, list(files))]
    return [read_rows(file, flag) for file in files]


def read_rows(file: str, flag: str = "--train-data") -> list[Row]:
    """All rows of a file, in order."""
    path = Path(file)
    reader = _READERS.get(path.suffix)
    if reader is None:
        found = f"{path.suffix} file" if path.suffix else "file without a suffix"
        raise ValueError(f"{file}: cannot read a {found}; known are {', '.join(_READERS)} (change {flag})")
    if not path.is_file():
        raise ValueError(f"{file}: no such file (change {flag})")
    rows = reader(file, flag)
    if not rows:
        raise ValueError(f"{file}: holds no rows (change {flag})")
    return rows


def load_object(spec: str, flag: str) -> Any:
    """The object that `file.py:name` names; the file is run once per process, under a name of its own."""
    file, _, name = spec.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"{spec}: no such file {file!r} (change {flag})")
    module = _load_module(path, spec, flag)
    if name not in vars(module):
        public = ", ".join(n for n in vars(module) if not n.startswith("_")) or "nothing"
        raise ValueError(f"{spec}: {file} has no {name!r}; it has {public} (change {flag})")
    return vars(module)[name]


def _load_module(path: Path, spec: str, flag: str) -> ModuleType:
    name = f"user_file_{abs(hash(str(path)))}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None, "a .py path always has a loader"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{spec}: running {path} raised {type(error).__name__}: {error} (change {flag})") from error
    return module


def _custom_rows(spec: str, files: list[str]) -> list[Row]:
    flag = "--dataset-class"
    dataset = load_object(spec, flag)(files)
    rows = []
    for index in range(len(dataset)):
        values = dataset[index]
        if not isinstance(values, Mapping):
            raise ValueError(f"{spec}, row {index + 1}: is a {type(values).__name__}, not a dict (change {flag})")
        rows.append(Row(spec, index + 1, values))
    if not rows:
        raise ValueError(f"{spec}: holds no rows (change {flag})")
    return rows


def _parse(text: str, place: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        start = text[:60] + ("..." if len(text) > 60 else "")
        raise ValueError(f"{place}: not JSON ({error}): {start!r} (mend the file or change {flag})") from error


def _text(source: str, flag: str) -> str:
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 text ({error}) (change {flag})") from error


def _objects(source: str, numbered: list[tuple[int, Any]], flag: str) -> list[Row]:
    for number, values in numbered:
        if not isinstance(values, dict):
            found = f"{type(values).__name__} {str(values)[:60]!r}"
            raise ValueError(f"{source}, row {number}: found {found}, not an object (mend the file or change {flag})")
    return [Row(source, number, values) for number, values in numbered]


def _read_jsonl(source: str, flag: str) -> list[Row]:
    lines = _text(source, flag).rstrip().split("\n")  # not splitlines(): U+2028 may stand inside a JSON string
    if lines == [""]:
        return []
    numbered = [(n, _parse(line, f"{source}, row {n}", flag)) for n, line in enumerate(lines, start=1)]
    return _objects(source, numbered, flag)


def _read_json(source: str, flag: str) -> list[Row]:
    text = _text(source, flag)
    if not text.strip():
        return []
    values = _parse(text, source, flag)
    if not isinstance(values, list):
        raise ValueError(
            f"{source}: holds a {type(values).__name__}, not a list of objects; name it .jsonl if it has one "
            f"object a line (change {flag})"
        )
    return _objects(source, list(enumerate(values, start=1)), flag)


def _read_parquet(source: str, flag: str) -> list[Row]:
    import pyarrow.parquet

    return _table_rows(source, flag, lambda: pyarrow.parquet.read_table(source))


def _read_arrow(source: str, flag: str) -> list[Row]:
    """Arrow's file format, or its stream format (what the datasets library writes)."""
    import pyarrow as pa

    def read() -> Any:
        with pa.memory_map(source) as stream:
            try:
                return pa.ipc.open_file(stream).read_all()
            except pa.ArrowInvalid:
                stream.seek(0)
                return pa.ipc.open_stream(stream).read_all()

    return _table_rows(source, flag, read)


def _table_rows(source: str, flag: str, read: Any) -> list[Row]:
    import pyarrow as pa

    if Path(source).stat().st_size == 0:
        return []
    try:
        values = read().to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{source}: not a {Path(source).suffix[1:]} file ({error}) (change {flag})") from error
    return [Row(source, number, row) for number, row in enumerate(values, start=1)]


_READERS = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_jsonl, ".arrow": _read_arrow}
