import json
import re

import pyarrow as pa
import pyarrow.parquet
import pytest

from megatron_rl.data.files import read_rows, read_sources

ROWS = [{"prompt": "one", "n": 1}, {"prompt": "two \u2028 lines", "n": 2}]


def write(path, rows=ROWS):
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        options = pa.ipc.new_stream if "stream" in path.stem else pa.ipc.new_file
        with options(str(path), table.schema) as writer:
            writer.write_table(table)
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "stream.arrow"])
def test_every_form_gives_the_same_rows(tmp_path, name):
    """A file of any known form gives the rows that were written, in order, numbered from 1."""
    rows = read_rows(write(tmp_path / name))
    assert [dict(r.values) for r in rows] == ROWS
    assert [r.number for r in rows] == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.jsonl", None, ["gone.jsonl", "no such file", "--train-data"]),
        ("a.csv", "x", ["a.csv", ".csv", ".jsonl", "--train-data"]),
        ("a.jsonl", "", ["a.jsonl", "no rows"]),
        ("a.parquet", "", ["a.parquet", "no rows"]),
        ("a.json", "[]", ["a.json", "no rows"]),
        ("a.jsonl", '{"a": 1}\n{"a": \n', ["a.jsonl, row 2", "not JSON", "--train-data"]),
        ("a.jsonl", '{"a": 1}\n\n{"a": 2}\n', ["a.jsonl, row 2", "not JSON"]),
        ("a.jsonl", '{"a": 1}\n[3]\n', ["a.jsonl, row 2", "list", "not an object"]),
        ("a.json", '[{"a": 1}, 7]', ["a.json, row 2", "int '7'", "not an object"]),
        ("a.json", '{"a": 1}', ["a.json", "dict", "not a list"]),
        ("a.parquet", "PAR0 nonsense", ["a.parquet", "not a parquet file"]),
        ("a.arrow", "nonsense", ["a.arrow", "not a arrow file"]),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, words):
    """Whatever is wrong with a file is a ValueError that names it, the row, what was found and the flag."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        read_rows(str(tmp_path / name))
    for word in words:
        assert word in str(error.value)


def test_custom_dataset(tmp_path):
    """A dataset class is made with the files and gives its rows; a missing class or a row that is no dict is named."""
    file = tmp_path / "mine.py"
    file.write_text(
        "class Good:\n    def __init__(self, files): self.files = files\n    def __len__(self): return 2\n"
        "    def __getitem__(self, i): return {'prompt': self.files[i]}\n"
        "class Bad(Good):\n    def __getitem__(self, i): return 'text'\n"
    )
    (rows,) = read_sources(["a", "b"], f"{file}:Good", "--train-data")
    assert [r.values["prompt"] for r in rows] == ["a", "b"]
    with pytest.raises(ValueError, match=re.escape("Bad, row 1: is a str, not a dict (change --dataset-class)")):
        read_sources(["a", "b"], f"{file}:Bad", "--train-data")
    with pytest.raises(ValueError, match="has no 'Nothing'; it has Good, Bad"):
        read_sources([], f"{file}:Nothing", "--train-data")
