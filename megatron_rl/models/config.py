"""A model's own config.json -> HFConfig -> megatron-core's TransformerConfig.

What we cannot represent is refused here by name, before any weight is read.
"""

import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron_rl import platform
from megatron_rl.models.overrides import parse_overrides
from megatron_rl.weights.arch import Dims
from megatron_rl.weights.layouts import TrainLayout, first_and_last_layers, train_layout

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

FAMILIES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Mixtral": "mixtral",
    "Qwen3Moe": "qwen3_moe",
}
HEADS = {"ForCausalLM": "lm", "ForSequenceClassification": "value"}


@dataclass(frozen=True)
class RopeScaling:
    """How the inverse frequencies are changed; "default" leaves them as they are."""

    kind: str = "default"  # default, linear or llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class HFConfig:
    """The numbers of config.json that we use; `raw` is the whole of it."""

    family: str  # llama, mistral, qwen2, qwen3, mixtral or qwen3_moe
    head: str  # "lm" or "value", by the architecture's name
    hidden: int
    ffn: int  # of an expert where there are experts
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    eps: float
    max_position: int
    rope_theta: float
    rope: RopeScaling
    qkv_bias: bool
    qk_norm: bool
    experts: int  # 0 for a dense model
    experts_per_token: int
    norm_topk: bool  # the chosen experts' probabilities are made to sum to 1
    dtype: torch.dtype
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The parallel layout's sizes."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class ModelOptions:
    """How a model is built, apart from what it is."""

    params_dtype: torch.dtype = torch.bfloat16
    sequence_parallel: bool = False
    transformer_impl: str = "local"  # or "transformer_engine", where it is installed
    recompute_granularity: str | None = None  # None, "selective" or "full"
    recompute_method: str | None = None  # of full: "uniform" or "block"
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()  # of selective; empty is megatron-core's default
    random_init: bool = False  # draw random weights; else they are left unset for a loader to fill
    overrides: Mapping[str, str] = field(default_factory=dict)  # --transformer-config key=value


def read_hf_config(folder: str | Path, max_length: int | None = None) -> HFConfig:
    """Reads `folder`/config.json. `max_length` is the longest sequence of the run, in tokens.

    Raises ValueError naming what is missing or not supported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: --hf-model and other flags of models want a Hugging Face folder")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold the fields of a model, it is a JSON {type(raw).__name__}")
    family, head = _architecture(path, raw)
    _refuse_unsupported(path, family, head, raw)
    sizes = {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "vocab": "vocab_size",
        "max_position": "max_position_embeddings",
    }
    is_moe = family in ("mixtral", "qwen3_moe")
    sizes["ffn"] = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    numbers = {name: _number(path, raw, key) for name, key in sizes.items()}
    if not raw.get("head_dim") and numbers["hidden"] % numbers["heads"]:
        raise ValueError(
            f"{path}: hidden_size {numbers['hidden']} is not a multiple of num_attention_heads {numbers['heads']}"
        )
    theta, rope = _rope(path, raw, numbers["max_position"])
    config = HFConfig(
        family=family,
        head=head,
        **numbers,
        kv_heads=raw.get("num_key_value_heads") or numbers["heads"],
        head_dim=raw.get("head_dim") or numbers["hidden"] // numbers["heads"],
        tied=bool(raw.get("tie_word_embeddings", False)),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope=rope,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        experts=int(raw.get("num_local_experts") or _number(path, raw, "num_experts")) if is_moe else 0,
        experts_per_token=_number(path, raw, "num_experts_per_tok") if is_moe else 0,
        norm_topk=family == "mixtral" or bool(raw.get("norm_topk_prob", False)),
        dtype=_dtype(path, raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        raw=types.MappingProxyType(raw),
    )
    if config.heads % config.kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads {config.heads} is not a multiple of num_key_value_heads {config.kv_heads}"
        )
    check_length(config, max_length, path)
    return config


def check_length(config: HFConfig, max_length: int | None, where: str | Path = "config.json") -> None:
    """Refuses sequences longer than the model's positions, and a sliding window that sequences would outgrow."""
    window = _sliding_window(config)
    longest = config.max_position if max_length is None else max_length
    if longest > config.max_position:
        raise ValueError(
            f"{where}: sequences of {longest} tokens are longer than max_position_embeddings {config.max_position}: "
            "lower the prompt or response length"
        )
    if window is not None and longest > window:
        raise ValueError(
            f"{where}: the sliding window of {window} tokens is not supported; it would be in use with sequences of "
            f"{longest} tokens: keep prompt + response within {window}"
        )


def longest_sequence(config: HFConfig) -> int:
    """Tokens of the longest sequence that check_length lets through."""
    window = _sliding_window(config)
    return config.max_position if window is None else min(config.max_position, window)


def _sliding_window(config: HFConfig) -> int | None:
    window = config.raw.get("sliding_window")
    if config.family in ("qwen2", "qwen3", "qwen3_moe"):
        kinds = config.raw.get("layer_types")
        windowed = "sliding_attention" in kinds if kinds else config.raw.get("max_window_layers", 0) < config.layers
        if not (config.raw.get("use_sliding_window", False) and windowed):
            return None
    return window


def _architecture(path: Path, raw: Mapping[str, Any]) -> tuple[str, str]:
    names = raw.get("architectures") or []
    for prefix, family in FAMILIES.items():
        for suffix, head in HEADS.items():
            if names == [prefix + suffix]:
                return family, head
    known = ", ".join(prefix + "ForCausalLM" for prefix in FAMILIES)
    raise ValueError(
        f"{path}: architectures {names} (model_type {raw.get('model_type')!r}) is not supported; {known} "
        "are, and their ForSequenceClassification with one label"
    )


def _refuse_unsupported(path: Path, family: str, head: str, raw: Mapping[str, Any]) -> None:
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1, None),
    }
    if family == "qwen2":
        del wanted["attention_bias"]  # Qwen2 always has a bias on QKV and none on the output, whatever this says
    for key, allowed in wanted.items():
        if raw.get(key) not in allowed:
            raise ValueError(f"{path}: {key} = {raw[key]!r} is not supported (only {allowed[0]!r} is)")
    labels = raw.get("num_labels") or len(raw.get("id2label") or {0: "", 1: ""})
    if head == "value" and labels != 1:
        raise ValueError(f"{path}: a value or reward model has one label, this one has {labels}")


def _number(path: Path, raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{path}: {key} must be a positive whole number, it is {value!r}")
    return value


def _dtype(path: Path, name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{path}: dtype {name!r} is not supported (float32, bfloat16 and float16 are)")
    return dtype


def _rope(path: Path, raw: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling]:
    """(theta, scaling) from transformers 5's rope_parameters or the older rope_theta and rope_scaling."""
    own = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = own.get("rope_theta", raw.get("rope_theta", 1e6 if raw.get("model_type") == "mixtral" else 10000.0))
    kind = own.get("rope_type", own.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"{path}: rope type {kind!r} is not supported (default, linear and llama3 are)")
    if own.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path}: partial_rotary_factor {own['partial_rotary_factor']} is not supported")
    if any(isinstance(value, Mapping) for value in own.values()):
        raise ValueError(f"{path}: rope parameters that differ between layers are not supported: {sorted(own)}")
    if kind == "default":
        return float(theta), RopeScaling()
    try:
        if kind == "linear":
            return float(theta), RopeScaling(kind, float(own["factor"]))
        return float(theta), RopeScaling(
            kind,
            float(own["factor"]),
            float(own["low_freq_factor"]),
            float(own["high_freq_factor"]),
            int(own.get("original_max_position_embeddings") or max_position),
        )
    except KeyError as error:
        raise ValueError(f"{path}: rope type {kind!r} needs {error.args[0]!r}") from error


def transformer_config(hf: HFConfig, sizes: Sizes, options: ModelOptions) -> "TransformerConfig":
    """megatron-core's configuration of the model in this layout.

    Raises ValueError where the heads do not divide, and for overrides that are unknown or contradict config.json.
    """
    with platform.megatron():
        from megatron.core.transformer import TransformerConfig

        check_layout(hf, sizes, options.sequence_parallel)
        fixed = _model_fields(hf) | _layout_fields(hf, sizes, options)
        chosen = _chosen_fields(options)
        overrides = parse_overrides(TransformerConfig, options.overrides)
        for key in overrides.keys() & fixed.keys():
            if fixed[key] != overrides[key]:
                raise ValueError(
                    f"--transformer-config {key}={options.overrides[key]} contradicts {fixed[key]!r}, which comes "
                    "from the model's config.json and the parallel layout"
                )
        chosen |= overrides
        return TransformerConfig(**{**fixed, **chosen})


def attention_cost(hf: HFConfig) -> float:
    """c such that a sequence of n tokens costs n + c n^2: causal attention's FLOPs over those of the weights' products."""
    attention = 2 * hf.hidden * hf.head_dim * (hf.heads + hf.kv_heads)
    mlp = 3 * hf.hidden * hf.ffn * max(hf.experts_per_token, 1)
    return hf.layers * hf.heads * hf.head_dim / (hf.layers * (attention + mlp) + hf.vocab * hf.hidden)


def dims(hf: HFConfig) -> Dims:
    """The sizes that parameter shapes depend on."""
    return Dims(
        family="llama" if hf.family == "mistral" else hf.family,
        layers=hf.layers,
        hidden=hf.hidden,
        ffn=hf.ffn,
        heads=hf.heads,
        kv_heads=hf.kv_heads,
        head_dim=hf.head_dim,
        vocab=hf.vocab,
        tied=hf.tied,
        experts=hf.experts,
        moe_ffn=hf.ffn if hf.experts else 0,
    )


def check_layout(hf: HFConfig, sizes: Sizes, sequence_parallel: bool = False) -> TrainLayout:
    """How the model is cut. ValueError with the numbers and the flag where it cannot be cut this way."""
    if sequence_parallel and sizes.tp == 1:
        raise ValueError("--sequence-parallel needs --tensor-model-parallel-size above 1")
    if hf.experts and sizes.tp > 1 and not sequence_parallel:
        raise ValueError(
            f"a mixture of experts with --tensor-model-parallel-size {sizes.tp} needs --sequence-parallel"
        )
    return train_layout(dims(hf), sizes.tp, sizes.pp, sizes.vpp, sizes.ep)


def _model_fields(hf: HFConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_layers": hf.layers,
        "hidden_size": hf.hidden,
        "num_attention_heads": hf.heads,
        "num_query_groups": hf.kv_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.qkv_bias,
        "qk_layernorm": hf.qk_norm,
    }
    if hf.experts:
        values |= {
            "num_moe_experts": hf.experts,
            "moe_ffn_hidden_size": hf.ffn,
            "moe_router_topk": hf.experts_per_token,
            "moe_router_pre_softmax": not hf.norm_topk,
        }
    return values


def _layout_fields(hf: HFConfig, sizes: Sizes, options: ModelOptions) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "sequence_parallel": options.sequence_parallel,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.tp if sizes.ep == 1 else 1,
        "params_dtype": options.params_dtype,
        "bf16": options.params_dtype == torch.bfloat16,
        "fp16": options.params_dtype == torch.float16,
        "calculate_per_token_loss": True,  # gradients are plain sums: loss weights carry every division
        "transformer_impl": options.transformer_impl,
    }
    if sizes.pp > 1:
        first, last = first_and_last_layers(hf.layers, sizes.pp, sizes.vpp)
        values |= {
            "pipeline_dtype": options.params_dtype,
            "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
            "num_layers_in_first_pipeline_stage": first,
            "num_layers_in_last_pipeline_stage": last,
        }
        # Packed micro-batches differ in length. Under the interleaved schedule they must not: where the stages before
        # and after are one process (PP 2), megatron-core mixes up the shapes that it exchanges with both.
        interleaved = sizes.vpp > 1
        values |= {
            "variable_seq_lengths": not interleaved,
            "overlap_p2p_comm": interleaved,  # batched sends mix up the two directions likewise
            "batch_p2p_comm": not interleaved,
        }
    return values


def _chosen_fields(options: ModelOptions) -> dict[str, Any]:
    """What --transformer-config may change."""
    return {
        "perform_initialization": options.random_init,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "recompute_granularity": options.recompute_granularity,
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
        "recompute_modules": list(options.recompute_modules) or None,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "gradient_accumulation_fusion": False,
    }
