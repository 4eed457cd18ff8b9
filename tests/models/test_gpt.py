from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models.cases import LOSSES, micro_batch
from models.tiny import tiny_model
from torch import Tensor

from megatron_rl import platform
from megatron_rl.batch import MicroBatch
from megatron_rl.initialize import Topology
from megatron_rl.models.attention import inverse_frequencies
from megatron_rl.models.config import ModelOptions, read_hf_config
from megatron_rl.models.gpt import build_model, forward
from megatron_rl.models.heads import all_values, full_logits, value_head
from megatron_rl.weights.hf_io import load_model

FLOAT32 = ModelOptions(torch.float32)
LENGTHS = [25, 1, 9, 14]


def built(folder: Path, topology: Topology, options: ModelOptions = FLOAT32, role: str = "lm") -> torch.nn.Module:
    hf = read_hf_config(folder)
    chunks = build_model(hf, topology, options, role)
    load_model(folder, hf, chunks, topology, role, cast=True)
    return chunks[0]


def gradients(model: torch.nn.Module, micros: list[MicroBatch], role: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of each micro-batch, and gradients of the summed losses."""
    model.zero_grad()
    head = full_logits(131) if role == "lm" else all_values
    outputs = []
    for micro in micros:
        outputs.append(forward(model, micro, head))
        with platform.megatron():
            LOSSES[role](outputs[-1], micro).backward()
    return [o.detach() for o in outputs], {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("role", ["lm", "value"])
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_packed_equals_unpacked(family: str, role: str, alone: Topology, tmp_path: Path):
    """Sequences packed end to end give the outputs and gradients that they give one by one, to 1e-5."""
    model = built(tiny_model(tmp_path, family), alone, role=role)
    packed = micro_batch(LENGTHS, 131, seed=5)
    apart = []
    for tokens in packed.tokens_1T[0].split(LENGTHS):
        n = len(tokens)
        single = micro_batch([n], 131, seed=0)
        apart.append(replace(single, tokens_1T=tokens[None], labels_K=tokens[1:]))
    whole, grads = gradients(model, [packed], role)
    pieces, grads_apart = gradients(model, apart, role)
    torch.testing.assert_close(whole[0], torch.cat(pieces), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads, grads_apart, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        ("qwen2", {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}),
        ("qwen2", {"recompute_granularity": "selective"}),
        ("qwen2", {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}),
        ("qwen3", {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}),
        ("mixtral", {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe")}),
    ],
)
def test_recomputation_changes_nothing(family: str, changes: dict, alone: Topology, tmp_path: Path):
    """Activation recomputation, full or selective, leaves outputs and gradients as they are."""
    folder = tiny_model(tmp_path, family)
    micros = [micro_batch(LENGTHS, 131, seed=6)]
    plain = gradients(built(folder, alone), micros, "lm")
    again = gradients(built(folder, alone, replace(FLOAT32, **changes)), micros, "lm")
    torch.testing.assert_close(again, plain, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_every_parameter_is_bfloat16(family: str, alone: Topology, tmp_path: Path):
    """Norms and routers too, so that vLLM can alias them; angles stay float32; the logits are near float32's."""
    folder = tiny_model(tmp_path, family, dtype=torch.bfloat16)
    model = built(folder, alone, ModelOptions())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.frequencies_D.dtype == torch.float32
    micro = micro_batch([30], 131, seed=7)
    with torch.no_grad():
        low, high = (forward(m, micro, full_logits(131)) for m in (model, built(folder, alone)))
    assert (low - high).abs().max() < 0.3 and (low - high).abs().mean() < 0.03


def test_random_init_draws_weights(alone: Topology, tmp_path: Path):
    """With random_init a model is usable without a folder of weights: finite, and no parameter is constant."""
    hf = read_hf_config(tiny_model(tmp_path, "llama"))
    model = build_model(hf, alone, replace(FLOAT32, random_init=True))[0]
    assert all(p.isfinite().all() and (p.ndim == 1 or p.std() > 0) for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "llama3", "llama_linear"])
def test_rotary_frequencies_equal_transformers(family: str, tmp_path: Path):
    """Bitwise: default, llama3 and linear scaling."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = tiny_model(tmp_path, family)
    hf = read_hf_config(folder)
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    assert torch.equal(inverse_frequencies(hf.rope_theta, hf.head_dim, hf.rope), expected)


def test_value_head_reads_the_places_that_predict(alone: Topology, tmp_path: Path):
    """value_head gives all_values at predict_K, in float32; a fresh head is zero."""
    model = built(tiny_model(tmp_path, "llama"), alone, ModelOptions(), role="value")
    micro = micro_batch(LENGTHS, 131, seed=8)
    assert not model.output_layer.weight.any()
    torch.nn.init.normal_(model.output_layer.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        some, every = forward(model, micro, value_head), forward(model, micro, all_values)
    assert some.dtype == torch.float32 and some.std() > 0
    torch.testing.assert_close(some, every[micro.predict_K])


def test_smollm2_equals_transformers(alone: Topology, smollm2: Path):
    """SmolLM2-135M itself, float32: logits of a packed pair of sequences are transformers' to 1e-4."""
    from transformers import AutoModelForCausalLM

    hf = read_hf_config(smollm2)
    model = built(smollm2, alone)
    micro = micro_batch([48, 21], hf.vocab, seed=9)
    with torch.no_grad():
        ours = forward(model, micro, full_logits(hf.vocab))
        theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        expected = [theirs(tokens[None]).logits[0] for tokens in micro.tokens_1T[0].split([48, 21])]
    torch.testing.assert_close(ours, torch.cat(expected), atol=1e-4, rtol=0)
