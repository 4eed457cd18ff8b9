"""The converters, run as a user runs them: Hugging Face folder -> distributed checkpoint -> Hugging Face folder."""

import json
import shutil
import sys
from pathlib import Path

import launch
import pytest
import torch
from models.tiny import FAMILIES, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file

TO_MEGATRON, TO_HF = "tools/convert_hf_to_megatron.py", "tools/convert_megatron_to_hf.py"
MIXED = {"llama3": torch.bfloat16, "qwen3": torch.float16}  # the others are float32


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_identical(a: Path, b: Path) -> None:
    """Same names, shapes, types and bytes, and the files beside the weights."""
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        other = second[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name
    assert json.loads((a / "config.json").read_text()) == json.loads((b / "config.json").read_text())
    beside = {path.name for path in a.iterdir()} - {"model.safetensors", "model.safetensors.index.json", "config.json"}
    for name in (name for name in beside if not name.endswith(".safetensors")):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def convert(tool: str, *args: object, ranks: int = 1, timeout: float = 120) -> launch.Result:
    if ranks > 1:
        return launch.torchrun(ranks, tool, *args, timeout=timeout)
    return launch.run(sys.executable, launch.ROOT / tool, *args, timeout=timeout)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bitwise(tmp_path, family):
    """Every family comes back with the names, shapes, types and bytes it had, in shards with an index."""
    source = tiny_model(tmp_path / "source", family, dtype=MIXED.get(family, torch.float32))
    tiny_tokenizer(source)
    launch.check(convert(TO_MEGATRON, "--hf-model", source, "--save", tmp_path / "megatron"))
    out = launch.check(
        convert(TO_HF, "--load", tmp_path / "megatron", "--save", tmp_path / "back", "--max-shard-size", "200KB")
    )
    assert "wrote" in out
    assert_identical(source, tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == tensors(source).keys()
    assert (tmp_path / "back" / "chat_template.jinja").is_file()


@pytest.mark.slow
def test_value_model_by_two_processes(tmp_path):
    """A folder with score.weight becomes a critic, and two processes write what one writes."""
    source = tiny_tokenizer(tiny_model(tmp_path / "source", "qwen2", head="SequenceClassification"))
    launch.check(convert(TO_MEGATRON, "--hf-model", source, "--save", tmp_path / "megatron", ranks=2))
    assert (tmp_path / "megatron" / "iter_0000000" / "critic" / "__1_0.distcp").is_file()
    back = ("--load", tmp_path / "megatron", "--save", tmp_path / "back", "--role", "critic")
    launch.check(convert(TO_HF, *back, "--max-shard-size", "200KB", ranks=2))
    assert_identical(source, tmp_path / "back")


@pytest.mark.slow
def test_wrong_tensors_are_named_and_leave_nothing(tmp_path):
    """A tensor too many, too few or misshapen ends the conversion with its name; no folder is left."""
    source = tiny_model(tmp_path / "source", "llama")
    good = load_file(source / "model.safetensors")

    def refused(tool: str, *args: object) -> str:
        result = convert(tool, *args)
        assert result.returncode == 2, result.tail
        return result.stderr

    few = {name: t for name, t in good.items() if "1.mlp.up_proj" not in name}
    cases = {
        "lacks model.layers.1.mlp.up_proj.weight": few,
        "has the unknown model.layers.0.extra": good | {"model.layers.0.extra": torch.zeros(1)},
        "model.norm.weight is (64,), not (128,)": good | {"model.norm.weight": torch.zeros(64)},
    }
    for text, wrong in cases.items():
        save_file(wrong, source / "model.safetensors", metadata={"format": "pt"})
        assert text in refused(TO_MEGATRON, "--hf-model", source, "--save", tmp_path / "megatron")
        assert not list((tmp_path / "megatron").glob("*"))
    save_file(good, source / "model.safetensors", metadata={"format": "pt"})
    launch.check(convert(TO_MEGATRON, "--hf-model", source, "--save", tmp_path / "megatron"))
    other = tiny_model(tmp_path / "other", "llama", num_hidden_layers=2)
    shutil.copy(other / "config.json", tmp_path / "megatron" / "iter_0000000" / "policy" / "hf" / "config.json")
    role = tmp_path / "megatron" / "iter_0000000" / "policy"
    text = refused(TO_HF, "--load", role, "--save", tmp_path / "back")
    assert "has the unknown decoder.layers.2." in text and "decoder.layers.2.mlp.linear_fc2.weight" in text
    text = refused(TO_HF, "--load", tmp_path / "megatron", "--save", tmp_path / "back")
    assert "policy/hf/config.json" in text and "no whole checkpoint" in text  # its digest differs
    assert not list(tmp_path.glob("back*"))
