import json
from collections.abc import Callable
from pathlib import Path

import pytest
from models.tiny import tiny_model

from megatron_rl.models.config import dims, read_hf_config
from megatron_rl.weights.arch import FAMILIES, table
from megatron_rl.weights.layouts import LAYOUTS, hf_shapes

FOLDERS = ("llama", "llama3", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")
LAYERS = {"llama3": 3, "qwen2": 4, "qwen3_moe": 3}  # tied; tied with biases; untied with q/k norms and experts


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a folder's safetensors, read from the file's header."""
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


@pytest.mark.parametrize("family", FOLDERS)
@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification"])
def test_hf_names_equal_transformers(family: str, head: str, tmp_path: Path):
    """The table's HF names and shapes are those of the folder that transformers saves, for either head."""
    folder = tiny_model(tmp_path, family, head)
    role = "lm" if head == "CausalLM" else "value"
    assert hf_shapes(dims(read_hf_config(folder)), role) == saved_shapes(folder)


def test_megatron_names_equal_megatrons(tmp_path: Path, torchrun: Callable[..., str]):
    """The table's Megatron names and local shapes are named_parameters() of real models, in four parallel layouts."""
    folders = [tiny_model(tmp_path / name, name, num_hidden_layers=layers) for name, layers in LAYERS.items()]
    output = torchrun(4, Path(__file__).with_name("names_program.py"), *folders, timeout=240)
    models = 3 + 3 + 1 + 1  # virtual pipelining wants an even number of layers, expert parallelism wants experts
    assert output.count(f"{2 * models} models are the same") == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_in_transformer_engine(family: str):
    """transformer-engine's fused layers hold the norm before them; a router is not one, so its norm stays apart."""
    local, fused = table(family), table(family, "transformer_engine")
    moved = {new.megatron for old, new in zip(local, fused, strict=True) if old != new}
    expected = {"decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight"}
    if family not in ("mixtral", "qwen3_moe"):
        expected.add("decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight")
    assert moved == expected
    assert [row.hf for row in local] == [row.hf for row in fused]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_has_a_layout(family: str):
    """Each row's layout exists, names are unique, and a tied head is the embedding's HF tensor."""
    for role in ("lm", "value"):
        for tied in (False, True):
            rows = table(family, role=role, tied=tied)
            assert {row.layout for row in rows} <= LAYOUTS.keys()
            assert len({row.megatron for row in rows}) == len(rows)
            assert rows[-1].hf == {
                ("lm", False): ("lm_head.weight",),
                ("lm", True): ("model.embed_tokens.weight",),
            }.get((role, tied), ("score.weight",))


def test_unknown_family():
    """A family without a table is refused with the list of those that have one."""
    with pytest.raises(ValueError, match="'gpt2'; there are llama, qwen2"):
        table("gpt2")
