"""HFConfig and Topology -> this rank's megatron-core GPTModel chunks, and their forward pass.

Shape suffixes: T tokens of the packed micro-batch, t this TP rank's slice of them (sequence parallelism), H hidden.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatron_rl import platform
from megatron_rl.batch import MicroBatch
from megatron_rl.initialize import Topology
from megatron_rl.models.config import HFConfig, ModelOptions, Sizes, transformer_config
from megatron_rl.models.heads import Head, ValueHead
from megatron_rl.models.norm import RMSNorm
from megatron_rl.weights.layouts import padded_vocab

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

Role = Literal["lm", "value"]


def sizes_of(topology: Topology) -> Sizes:
    return Sizes(topology.tp_size, topology.pp_size, topology.vpp_size, topology.ep_size)


def build_model(hf: HFConfig, topology: Topology, options: ModelOptions, role: Role = "lm") -> list["GPTModel"]:
    """The chunks of the model that this rank holds, one for each virtual stage, in options.params_dtype.

    Weights are unset unless options.random_init; weights/hf_io.py fills them. role "value" has a head [1, H] of zeros.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    config = transformer_config(hf, sizes_of(topology), options)
    chunks = []
    with platform.megatron():
        layer, norm = _layer_spec(config)
        for index in range(topology.vpp_size):
            stage = index if topology.vpp_size > 1 else None
            count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=topology.at.pp)
            block = TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)
            chunks.append(_build_chunk(hf, config, block, topology, role, index))
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            param.data = param.data.to(topology.device, options.params_dtype)
            assert param.dtype == options.params_dtype, name
    return chunks


def _build_chunk(
    hf: HFConfig, config: "TransformerConfig", block: Any, topology: Topology, role: Role, index: int
) -> "GPTModel":
    from megatron.core.models.gpt import GPTModel

    from megatron_rl.models.attention import inverse_frequencies

    chunk = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocab(hf.vocab, topology.tp_size),
        max_sequence_length=hf.max_position,
        pre_process=topology.is_first_stage and index == 0,
        post_process=topology.is_last_stage and index == topology.vpp_size - 1,
        share_embeddings_and_output_weights=hf.tied and role == "lm",
        position_embedding_type="none",
        pg_collection=topology.groups,
        vp_stage=index if topology.vpp_size > 1 else None,
    )
    # position_embedding_type "none": our attention rotates by each token's position. Not a buffer: stays float32
    chunk.frequencies_D = inverse_frequencies(hf.rope_theta, hf.head_dim, hf.rope).to(topology.device)
    if config.transformer_impl == "transformer_engine":
        # its products add straight to the float32 gradients; as a field of config the output layer would want apex
        for module in chunk.decoder.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
    if role == "value" and chunk.post_process:
        chunk.output_layer = ValueHead(hf.hidden, config.params_dtype, topology.device)
    return chunk


def _layer_spec(config: "TransformerConfig") -> tuple["ModuleSpec", type]:
    """(layer, final norm): megatron-core's layer with our attention, and our norm unless transformer-engine has it."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from megatron_rl.models.attention import FusedPackedAttention, MixedSelfAttention, PackedAttention
    from megatron_rl.models.mlp import GatedMLP

    options = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
    if config.transformer_impl == "transformer_engine":
        if not specs.HAVE_TE:
            raise ValueError("--transformer-impl transformer_engine needs the package transformer-engine")
        layer = specs.get_gpt_layer_with_transformer_engine_spec(**options)
        own, own_qk, final, core = {}, {}, specs.TENorm, FusedPackedAttention
    else:
        layer = specs.get_gpt_layer_local_spec(**options, normalization="RMSNorm")
        own, final, core = {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm}, RMSNorm, PackedAttention
        own_qk = {"q_layernorm": RMSNorm, "k_layernorm": RMSNorm} if config.qk_layernorm else {}
    if not config.num_moe_experts:
        own["mlp"] = partial(GatedMLP.as_mlp_submodule, **layer.submodules.mlp.keywords)
    attention = layer.submodules.self_attention
    inner = replace(attention.submodules, core_attention=core, **own_qk)
    attention = replace(attention, module=MixedSelfAttention, submodules=inner)
    submodules = replace(layer.submodules, self_attention=attention, **own)
    return replace(layer, submodules=submodules), final


def forward(chunk: torch.nn.Module, micro: MicroBatch, head: Head) -> Tensor:
    """One chunk's forward pass: hidden states for the next stage, or on the last chunk what `head` returns.

    The head gets (hidden_TH, weight, micro). Of a language model it works on this rank's slice of the vocabulary, so
    the gradient that it sends into hidden_TH is partial and is summed over TP here, on the way back. Of a value model
    every TP rank computes the whole of it, and nothing is summed. With virtual stages all micro-batches of a schedule
    have one length, the schedule's seq_length.
    """
    from megatron.core.utils import unwrap_model

    from megatron_rl.models.attention import packed_sequences

    model = unwrap_model(chunk)
    parallel = model.config.sequence_parallel
    tp = model.pg_collection.tp
    if parallel and micro.tokens_1T.shape[1] % tp.size():
        raise ValueError(
            f"{micro.tokens_1T.shape[1]} packed tokens are not a multiple of tensor parallelism {tp.size()}: pack() "
            "them with multiple="
        )

    def on_last_chunk(hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
        weight = output_layer.weight if output_weight is None else output_weight
        is_value = isinstance(output_layer, ValueHead)
        hidden_TH = gather_hidden(hidden_states.squeeze(1), tp, parallel, partial_gradient=not is_value)
        return head(hidden_TH, weight, micro)

    with platform.megatron():
        return chunk(
            input_ids=micro.tokens_1T,
            position_ids=micro.positions_1T,
            attention_mask=None,
            packed_seq_params=packed_sequences(micro, model.frequencies_D, model.config.params_dtype),
            output_processor=on_last_chunk,
        )


def gather_hidden(
    hidden: Tensor, tp: torch.distributed.ProcessGroup, parallel: bool, partial_gradient: bool
) -> Tensor:
    """hidden_tH (sequence-parallel) or hidden_TH -> hidden_TH; partial gradients are summed over TP going back."""
    from megatron.core import tensor_parallel

    if parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=partial_gradient, group=tp
        )
    if partial_gradient:
        return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=tp)
    return hidden
