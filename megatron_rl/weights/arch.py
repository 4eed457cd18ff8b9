"""THE table of parameter names: one frozen row per logical parameter of a family of models.

HF import and export, checkpoint conversion and resharding read it; nothing else spells a parameter name.
A new family is one entry of FAMILIES.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["lm", "value"]  # a language model; or a critic or reward model, whose head gives one number a token
TransformerImpl = Literal["local", "transformer_engine"]


@dataclass(frozen=True)
class Dims:
    """The sizes of a model that parameter shapes depend on: all that this package of pure functions knows of it."""

    family: str  # key of FAMILIES
    layers: int
    hidden: int
    ffn: int  # of a dense MLP; unused in families with experts
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int  # real rows of the embedding, before padding
    tied: bool  # the head is the embedding
    experts: int = 0
    moe_ffn: int = 0  # of one expert


@dataclass(frozen=True)
class Row:
    """One Megatron parameter, the HF tensors it is made of, and the layout (layouts.LAYOUTS) that says how.

    {i} is the layer and {e} the expert. In HF names they count over the model; Megatron counts them from 0 within a
    model chunk and within an expert-parallel rank.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: str

    @property
    def place(self) -> Literal["first", "layer", "last"]:
        """Which pipeline chunk holds it: the first one, the one with the layer, the last one."""
        if self.megatron.startswith("embedding."):
            return "first"
        return "layer" if "{i}" in self.megatron else "last"


M, H = "decoder.layers.{i}.", "model.layers.{i}."
M_EXPERT = M + "mlp.experts.local_experts.{e}."

EMBEDDING = Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")
FINAL_NORM = Row("decoder.final_layernorm.weight", ("model.norm.weight",), "norm")
LM_HEAD = Row("output_layer.weight", ("lm_head.weight",), "vocabulary")
# The last pipeline stage has its own copy of a tied embedding; a stage that is first and last has one parameter.
TIED_HEAD = Row("output_layer.weight", ("model.embed_tokens.weight",), "vocabulary")
VALUE_HEAD = Row("output_layer.weight", ("score.weight",), "value_head")  # whole on every tensor-parallel rank

ATTENTION = (
    Row(M + "self_attention.linear_qkv.weight", tuple(H + f"self_attn.{p}_proj.weight" for p in "qkv"), "qkv"),
    Row(M + "self_attention.linear_proj.weight", (H + "self_attn.o_proj.weight",), "attention_out"),
)
QKV_BIAS = (
    Row(M + "self_attention.linear_qkv.bias", tuple(H + f"self_attn.{p}_proj.bias" for p in "qkv"), "qkv_bias"),
)
QK_NORM = (
    Row(M + "self_attention.q_layernorm.weight", (H + "self_attn.q_norm.weight",), "head_norm"),
    Row(M + "self_attention.k_layernorm.weight", (H + "self_attn.k_norm.weight",), "head_norm"),
)
DENSE_MLP = (
    Row(M + "mlp.linear_fc1.weight", (H + "mlp.gate_proj.weight", H + "mlp.up_proj.weight"), "mlp_in"),
    Row(M + "mlp.linear_fc2.weight", (H + "mlp.down_proj.weight",), "mlp_out"),
)
MIXTRAL_MOE = (
    Row(M + "mlp.router.weight", (H + "block_sparse_moe.gate.weight",), "router"),
    Row(
        M_EXPERT + "linear_fc1.weight",
        (H + "block_sparse_moe.experts.{e}.w1.weight", H + "block_sparse_moe.experts.{e}.w3.weight"),
        "expert_in",
    ),
    Row(M_EXPERT + "linear_fc2.weight", (H + "block_sparse_moe.experts.{e}.w2.weight",), "expert_out"),
)
QWEN_MOE = (
    Row(M + "mlp.router.weight", (H + "mlp.gate.weight",), "router"),
    Row(
        M_EXPERT + "linear_fc1.weight",
        (H + "mlp.experts.{e}.gate_proj.weight", H + "mlp.experts.{e}.up_proj.weight"),
        "expert_in",
    ),
    Row(M_EXPERT + "linear_fc2.weight", (H + "mlp.experts.{e}.down_proj.weight",), "expert_out"),
)

FAMILIES: dict[str, tuple[Row, ...]] = {
    "llama": ATTENTION + DENSE_MLP,  # Llama 2 and 3, Mistral
    "qwen2": ATTENTION + QKV_BIAS + DENSE_MLP,
    "qwen3": ATTENTION + QK_NORM + DENSE_MLP,
    "mixtral": ATTENTION + MIXTRAL_MOE,
    "qwen3_moe": ATTENTION + QK_NORM + QWEN_MOE,
}


def norms(family: str, transformer_impl: TransformerImpl) -> tuple[Row, ...]:
    """The two layer norms: transformer-engine keeps each in the linear layer after it, where that is not a router."""
    fused = transformer_impl == "transformer_engine"
    dense = FAMILIES[family][-1].layout == "mlp_out"
    before_attention = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    before_mlp = "mlp.linear_fc1.layer_norm_weight" if fused and dense else "pre_mlp_layernorm.weight"
    return (
        Row(M + before_attention, (H + "input_layernorm.weight",), "norm"),
        Row(M + before_mlp, (H + "post_attention_layernorm.weight",), "norm"),
    )


def table(
    family: str, transformer_impl: TransformerImpl = "local", role: Role = "lm", tied: bool = False
) -> tuple[Row, ...]:
    """Every parameter of a family. Raises ValueError for a family that has no table."""
    if family not in FAMILIES:
        raise ValueError(f"no parameter table for the family {family!r}; there are {', '.join(FAMILIES)}")
    head = VALUE_HEAD if role == "value" else TIED_HEAD if tied else LM_HEAD
    return (EMBEDDING, *norms(family, transformer_impl), *FAMILIES[family], FINAL_NORM, head)
