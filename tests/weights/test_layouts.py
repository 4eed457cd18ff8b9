import numpy as np
import pytest
import torch
from weights import reference as ref

from megatron_rl.weights.arch import Dims
from megatron_rl.weights.layouts import (
    Param,
    check_names,
    first_and_last_layers,
    hf_shapes,
    layers_of_stage,
    megatron_blocks,
    padded_vocab,
    train_layout,
)
from megatron_rl.weights.vllm_like import vllm_like_blocks

MODELS = [ref.LLAMA, ref.QWEN2, ref.QWEN3, ref.MIXTRAL, ref.QWEN3_MOE]


def filled(param: Param, hf: ref.Tensors) -> np.ndarray:
    """The tensor that the blocks describe."""
    flat, written = np.zeros(param.numel, np.int64), np.zeros(param.numel, np.int64)
    for b in param.blocks:
        matrix = hf[b.hf].reshape(1, -1) if hf[b.hf].ndim == 1 else hf[b.hf]
        at = b.offset + b.stride * np.arange(b.rows)[:, None] + np.arange(b.cols)
        flat[at] = matrix[b.row : b.row + b.rows, b.col : b.col + b.cols]
        written[at] += 1
        assert b.param == param.key
    assert written.max() <= 1, "no element lies in two blocks"
    return flat.reshape(param.shape)


def assert_same(params: tuple[Param, ...], hf: ref.Tensors, expected: ref.Tensors) -> None:
    assert len(params) == len({p.key for p in params})
    assert {p.key for p in params} == set(expected)
    for param in params:
        np.testing.assert_array_equal(filled(param, hf), expected[param.key], err_msg=param.key)


@pytest.mark.parametrize("dims", MODELS, ids=lambda d: d.family)
@pytest.mark.parametrize("cut", [(1, 1, 1), (2, 1, 1), (4, 3, 1), (1, 2, 2), (2, 2, 4)], ids=str)
def test_megatron_blocks_equal_slicing(dims: Dims, cut: tuple[int, int, int]):
    """A Megatron rank's tensors, filled block by block, are what slicing the whole HF tensors gives; padding is 0."""
    tp, pp, ep = cut
    if ep > 1 and not dims.experts:
        pytest.skip("expert parallelism needs experts")
    hf, layout = ref.hf_tensors(dims), train_layout(dims, tp, pp, 1, ep)
    for tp_rank, pp_rank, ep_rank in np.ndindex(tp, pp, ep):
        at = ref.Shard(tp_rank, tp, layout.stages[pp_rank], pp_rank == 0, pp_rank == pp - 1, ep_rank, ep)
        params = megatron_blocks(dims, layout, tp_rank, pp_rank, ep_rank)
        assert_same(params, hf, ref.megatron_tensors(dims, hf, at))


@pytest.mark.parametrize("dims", MODELS, ids=lambda d: d.family)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vllm_like_blocks_equal_slicing(dims: Dims, tp: int):
    """vLLM's known layout, filled block by block, is what slicing the whole HF tensors gives."""
    hf = ref.hf_tensors(dims)
    for rank in range(tp):
        assert_same(vllm_like_blocks(dims, rank, tp), hf, ref.vllm_tensors(dims, hf, rank, tp))


@pytest.mark.parametrize("dims", MODELS, ids=lambda d: d.family)
def test_hf_shapes(dims: Dims):
    """hf_shapes lists each tensor of the HF folder; a value model has score.weight of one row for a head."""
    assert hf_shapes(dims) == {name: x.shape for name, x in ref.hf_tensors(dims).items()}
    value = hf_shapes(dims, role="value")
    assert value["score.weight"] == (1, dims.hidden) and "lm_head.weight" not in value


def test_value_head_is_whole_on_every_rank():
    """The critic's head is [1, hidden] on every tensor-parallel rank of the last stage, tied embeddings or not."""
    layout = train_layout(ref.QWEN2, tp=4, pp=2)
    for tp_rank in range(4):
        (head,) = [p for p in megatron_blocks(ref.QWEN2, layout, tp_rank, 1, role="value") if "output" in p.key]
        assert head.shape == (1, 4) and [b.hf for b in head.blocks] == ["score.weight"]


def test_stages_equal_megatrons():
    """layers_of_stage gives each stage and chunk the layers that megatron-core's own two functions give it."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    compared = 0
    for layers, pp, vpp in [(3, 2, 1), (4, 3, 1), (5, 3, 1), (7, 3, 1), (6, 2, 2), (8, 2, 2), (14, 3, 2), (80, 3, 1)]:
        first, last = first_and_last_layers(layers, pp, vpp)
        stages = layers_of_stage(layers, pp, vpp, first, last)
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.float32,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        for stage, chunks in enumerate(stages):
            for chunk, numbers in enumerate(chunks):
                where = dict(vp_stage=chunk if vpp > 1 else None, pp_rank=stage)
                start, count = get_transformer_layer_offset(config, **where), get_num_layers_to_build(config, **where)
                assert numbers == tuple(range(start, start + count)), (layers, pp, vpp, stage, chunk)
                compared += 1
        assert sorted(n for chunks in stages for numbers in chunks for n in numbers) == list(range(layers))
    assert compared > 20


def test_uneven_layers():
    """3 layers on 2 stages are 2 + 1; what no split of megatron-core's can hold is refused with the numbers."""
    assert layers_of_stage(3, 2, 1, *first_and_last_layers(3, 2)) == (((0, 1),), ((2,),))
    with pytest.raises(ValueError, match=r"5 layers .* --pipeline-model-parallel-size 2 with 2 model chunks"):
        first_and_last_layers(5, 2, 2)
    with pytest.raises(ValueError, match="num_layers_in_first_pipeline_stage 4"):
        layers_of_stage(4, 2, 1, first=4)


def test_padded_vocab():
    """The padded vocabulary is the least multiple of 64 and TP, so that it is vLLM's where TP divides 64."""
    assert [padded_vocab(131, tp) for tp in (1, 2, 3, 8)] == [192, 192, 192, 192]
    assert padded_vocab(49152, 3) == 49152
    assert padded_vocab(64, 5) == 320


def test_impossible_cuts_are_refused():
    """A size that does not divide is an error that gives the size, the divisor and the flag."""
    with pytest.raises(ValueError, match="8 attention heads .* --tensor-model-parallel-size 3"):
        train_layout(ref.LLAMA, tp=3)
    with pytest.raises(ValueError, match="4 experts .* --expert-model-parallel-size 3"):
        train_layout(ref.MIXTRAL, ep=3)
    with pytest.raises(ValueError, match="needs a model with experts"):
        train_layout(ref.LLAMA, ep=2)
    with pytest.raises(ValueError, match="--pipeline-model-parallel-size over 1"):
        train_layout(ref.LLAMA, vpp=2)


def test_check_names_lists_both_sides():
    """A name on one side alone is an error that lists it; equal sets pass."""
    check_names(["a", "b"], ["b", "a"], "x")
    with pytest.raises(ValueError, match="model.safetensors lacks a and has the unknown c"):
        check_names(["a", "b"], ["b", "c"], "model.safetensors")
