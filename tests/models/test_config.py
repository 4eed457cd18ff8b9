import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import FAMILIES, tiny_model

from megatron_rl.models.config import (
    ModelOptions,
    RopeScaling,
    Sizes,
    attention_cost,
    read_hf_config,
    transformer_config,
)

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **changes}))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "has 2"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 2048}, "sliding window of 2048"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 99},
            "sliding window of 99",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict, words: str, tmp_path: Path):
    """A ValueError names the key and the value, with nothing but config.json in the folder."""
    with pytest.raises(ValueError, match=words):
        read_hf_config(folder(tmp_path, **changes))


def test_missing_and_broken_config_are_named(tmp_path: Path):
    """A folder without config.json and one whose config.json is not JSON give its path."""
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json does not exist: --hf-model"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        read_hf_config(tmp_path)


def test_sliding_window_out_of_use_is_accepted(tmp_path: Path):
    """A window that no sequence of the run outgrows, or that Qwen2 does not switch on, changes nothing."""
    mistral = folder(tmp_path, architectures=["MistralForCausalLM"], sliding_window=2048)
    assert read_hf_config(mistral, max_length=2048).family == "mistral"
    with pytest.raises(ValueError, match="2049 tokens"):
        read_hf_config(mistral, max_length=2049)
    qwen = folder(tmp_path, architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=99)
    assert read_hf_config(qwen).qkv_bias


def test_sequences_longer_than_the_model_are_refused(tmp_path: Path):
    """max_length above max_position_embeddings gives both numbers."""
    with pytest.raises(ValueError, match="5000 tokens are longer than max_position_embeddings 4096"):
        read_hf_config(folder(tmp_path), max_length=5000)


def test_both_spellings_of_rope_are_read(tmp_path: Path):
    """rope_theta with rope_scaling, and transformers 5's rope_parameters, give the same numbers."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    new = read_hf_config(folder(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}))
    old = read_hf_config(folder(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}))
    older = read_hf_config(folder(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}))
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 512)
    assert {(c.rope_theta, c.rope) for c in (new, old, older)} == {(5e5, expected)}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_config_has_the_models_numbers(family: str, tmp_path: Path):
    """What transformers saved is what megatron-core is told."""
    hf = read_hf_config(tiny_model(tmp_path, family))
    config = transformer_config(hf, Sizes(pp=2), ModelOptions(torch.float32))
    assert (config.num_layers, config.hidden_size, config.num_attention_heads) == (hf.layers, hf.hidden, hf.heads)
    assert config.kv_channels == 32 and config.num_query_groups == hf.kv_heads
    assert config.add_qkv_bias == (family == "qwen2") and config.qk_layernorm == family.startswith("qwen3")
    assert (config.num_moe_experts or 0) == hf.experts
    assert config.calculate_per_token_loss and config.params_dtype == torch.float32


def test_overrides_reach_the_config(tmp_path: Path):
    """--transformer-config texts become the field's own type, and win over our choices."""
    overrides = {"hidden_dropout": "0.5", "recompute_modules": "['mlp']", "apply_rope_fusion": "false"}
    hf = read_hf_config(folder(tmp_path))
    config = transformer_config(hf, Sizes(), ModelOptions(overrides=overrides))
    assert (config.hidden_dropout, config.recompute_modules, config.apply_rope_fusion) == (0.5, ["mlp"], False)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("hidden_dropuot", "0.1", "did you mean hidden_dropout"),
        ("hidden_dropout", "much", "hidden_dropout=much: not a value of"),
        ("hidden_size", "128", "contradicts 64"),
        ("tensor_model_parallel_size", "2", "contradicts 1"),
        ("init_method", "x", "not a value of"),
    ],
)
def test_bad_overrides_are_refused(key: str, text: str, words: str, tmp_path: Path):
    """Unknown fields get the nearest known one; wrong types and contradictions of config.json are named."""
    with pytest.raises(ValueError, match=words):
        transformer_config(read_hf_config(folder(tmp_path)), Sizes(), ModelOptions(overrides={key: text}))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Sizes(tp=3), "4 attention heads cannot be divided by --tensor-model-parallel-size 3"),
        (Sizes(pp=5), "--pipeline-model-parallel-size 5"),
        (Sizes(vpp=2), "--pipeline-model-parallel-size over 1"),
        (Sizes(ep=2), "--expert-model-parallel-size 2"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(sizes: Sizes, words: str, tmp_path: Path):
    """The numbers and the flag to change are given."""
    with pytest.raises(ValueError, match=words):
        transformer_config(read_hf_config(folder(tmp_path)), sizes, ModelOptions())


def test_attention_cost_is_that_of_the_flops(tmp_path: Path):
    """By hand: 4 layers of 64 hidden, 4 heads of 16, 96 in the MLP, a vocabulary of 100; causal, so half of n^2."""
    linear = 4 * (4 * 64 * 64 + 3 * 64 * 96) + 100 * 64  # multiply-adds of a token
    assert attention_cost(read_hf_config(folder(tmp_path))) == pytest.approx(4 * 2 * 64 / 2 / linear)
