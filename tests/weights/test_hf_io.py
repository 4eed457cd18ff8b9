import json
from pathlib import Path

import pytest
import torch
from models.tiny import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file

from megatron_rl.models.config import HFConfig, dims, read_hf_config
from megatron_rl.weights.hf_io import (
    HFFolder,
    HFWriter,
    check_folder,
    export_config,
    export_shapes,
    fill,
    shard_bytes,
    write_beside,
)
from megatron_rl.weights.layouts import Param, megatron_blocks, train_layout


def params_of(hf: HFConfig, tp: int = 1, pp: int = 1, rank: int = 0, stage: int = 0) -> tuple[Param, ...]:
    return megatron_blocks(dims(hf), train_layout(dims(hf), tp, pp), rank, stage)


def empty(params: tuple[Param, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {p.key: torch.full(p.shape, torch.nan, dtype=dtype) for p in params}


def rewrite(folder: Path, drop: str = "", **add: torch.Tensor) -> None:
    """Saves the folder's tensors again, without one and with others."""
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in {**tensors, **add}.items() if n != drop}, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "mixtral"])
def test_fill_writes_every_element(family: str, tmp_path: Path):
    """On two TP ranks and two stages nothing is left unset, padding of the vocabulary is zero, q rows are q's."""
    hf = read_hf_config(tiny_model(tmp_path, family))
    source, whole = HFFolder(tmp_path), load_file(tmp_path / "model.safetensors")
    for rank in range(2):
        for stage in range(2):
            params = params_of(hf, 2, 2, rank, stage)
            tensors = empty(params)
            assert fill(source, params, tensors) > 0
            assert not any(t.isnan().any() for t in tensors.values())
            if stage == 0 and rank == 1:
                table = tensors["0:embedding.word_embeddings.weight"]
                real = hf.vocab - len(table)
                assert torch.equal(table[:real], whole["model.embed_tokens.weight"][len(table) :])
                assert not table[real:].any()
            if stage == 0:
                qkv = tensors["0:decoder.layers.0.self_attention.linear_qkv.weight"]
                q = whole["model.layers.0.self_attn.q_proj.weight"]
                assert torch.equal(qkv[:32], q[rank * len(q) // 2 :][:32])


def test_missing_and_unknown_tensors_are_listed(tmp_path: Path):
    """A tensor too few and one too many, in one message with both names."""
    hf = read_hf_config(tiny_model(tmp_path, "llama"))
    rewrite(tmp_path, "model.norm.weight", **{"model.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match="lacks model.norm.weight and has the unknown model.extra"):
        check_folder(HFFolder(tmp_path), hf, "lm")


def test_wrong_shape_is_named(tmp_path: Path):
    """A value head of two rows is an error that gives both shapes."""
    hf = read_hf_config(tiny_model(tmp_path, "llama", "SequenceClassification"))
    rewrite(tmp_path, **{"score.weight": torch.zeros(2, 128)})
    with pytest.raises(ValueError, match=r"score.weight is \(2, 128\), not \(1, 128\)"):
        check_folder(HFFolder(tmp_path), hf, "value")


def test_heads_of_value_models(tmp_path: Path):
    """From a language model the head is new, from score.weight the folder's; no language model comes from a value
    model; old buffers and a tied head's copy are ignored."""
    lm = tiny_model(tmp_path / "lm", "llama")
    assert check_folder(HFFolder(lm), read_hf_config(lm), "value") == (True, ("lm_head.weight",))
    value = tiny_model(tmp_path / "value", "llama", "SequenceClassification")
    assert check_folder(HFFolder(value), read_hf_config(value), "value") == (False, ())
    with pytest.raises(ValueError, match="no language-model head"):
        check_folder(HFFolder(value), read_hf_config(value), "lm")
    tied = tiny_model(tmp_path / "tied", "llama3")
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tied, **{"lm_head.weight": torch.zeros(131, 128), buffer: torch.zeros(16)})
    assert check_folder(HFFolder(tied), read_hf_config(tied), "lm") == (False, ("lm_head.weight", buffer))


def test_types_are_converted_only_when_asked(tmp_path: Path):
    """float32 into bfloat16 is refused by name, and done with cast."""
    hf = read_hf_config(tiny_model(tmp_path, "llama"))
    params = params_of(hf)
    tensors = empty(params, torch.bfloat16)
    with pytest.raises(ValueError, match="is stored as torch.float32, the model has torch.bfloat16"):
        fill(HFFolder(tmp_path), params, tensors)
    fill(HFFolder(tmp_path), params, tensors, cast=True)
    expected = load_file(tmp_path / "model.safetensors")["model.norm.weight"].bfloat16()
    assert torch.equal(tensors["0:decoder.final_layernorm.weight"], expected)


def test_broken_folders_are_named(tmp_path: Path):
    """No safetensors, a shard that the index names and is not there, and a truncated file."""
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        HFFolder(tmp_path)
    tiny_model(tmp_path, "llama")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        HFFolder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ValueError, match="gone.safetensors cannot be read"):
        HFFolder(tmp_path)


def test_written_folder_is_transformers(tmp_path: Path):
    """Shards, index, config and tokenizer: transformers loads it to the same weights, and its own sharding of the same
    size has the same file names and index totals."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_tokenizer(tiny_model(tmp_path / "source", "llama3"))
    hf, tensors = read_hf_config(source), load_file(source / "model.safetensors")
    with HFWriter(tmp_path / "out", export_shapes(hf, "lm"), torch.float32, "400KB") as writer:
        for name in writer.shapes:
            writer.write(name, tensors[name])
        write_beside(source, writer.partial, hf, "lm", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="400KB")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items() if name in tensors)
    ours, theirs = (json.loads((tmp_path / d / "model.safetensors.index.json").read_text()) for d in ("out", "theirs"))
    assert ours["metadata"] == theirs["metadata"] and ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.old"))


def test_failed_write_leaves_nothing(tmp_path: Path):
    """An error midway leaves an older folder as it was and no half-written one."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("")
    with (
        pytest.raises(RuntimeError),
        HFWriter(tmp_path / "out", {"a": (2,), "b": (2,)}, torch.float32, "1KB") as writer,
    ):
        writer.write("a", torch.zeros(2))
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("there", ["a file", "something else", "a folder beside config.json"])
def test_only_an_older_model_is_replaced(tmp_path: Path, there: str):
    """What is no model stays as it was: the writer refuses before it makes anything, with the folder's name."""
    out = tmp_path / "out"
    if there == "a file":
        out.write_text("kept")
    else:
        (out / "kept").mkdir(parents=True) if "folder" in there else out.mkdir()
        (out / ("config.json" if "config" in there else "notes.txt")).write_text("kept")
    with pytest.raises(ValueError, match=f"{out} (is a file|holds (notes.txt|a folder kept))"):
        HFWriter(out, {"a": (2,)}, torch.float32)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert out.is_file() or any(out.iterdir())


def test_value_models_are_sequence_classifiers(tmp_path: Path):
    """The config of a critic built from a language model loads as a sequence classifier of one label."""
    from transformers import AutoConfig

    hf = read_hf_config(tiny_model(tmp_path, "qwen2"))
    (tmp_path / "config.json").write_text(json.dumps(export_config(hf, "value", torch.bfloat16)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["Qwen2ForSequenceClassification"] and config.num_labels == 1
    assert config.dtype == torch.bfloat16
    assert read_hf_config(tmp_path).head == "value"


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "5TB"])
def test_shard_sizes(text: str):
    """Sizes are a number and KB, MB or GB, in powers of ten as transformers has them."""
    assert shard_bytes("1.5MB") == 1_500_000 and shard_bytes(7) == 7
    with pytest.raises(ValueError, match="--max-shard-size"):
        shard_bytes(text)
