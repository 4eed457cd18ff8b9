"""Megatron's and vLLM's tensors made by slicing whole HF tensors with numpy, without the package's layouts.

Every HF element is a number of its own, from 1 on; 0 is padding.
"""

from dataclasses import dataclass

import numpy as np

from megatron_rl.weights.arch import Dims

Tensors = dict[str, np.ndarray]

# vocab 70 is padded to 128; KV heads are fewer than some TPs; heads * head_dim is not hidden.
LLAMA = Dims("llama", layers=5, hidden=6, ffn=24, heads=8, kv_heads=2, head_dim=2, vocab=70, tied=False)
QWEN2 = Dims("qwen2", layers=5, hidden=4, ffn=16, heads=8, kv_heads=4, head_dim=3, vocab=130, tied=True)
QWEN3 = Dims("qwen3", layers=5, hidden=4, ffn=8, heads=8, kv_heads=8, head_dim=2, vocab=64, tied=True)
THREE = Dims("llama", layers=5, hidden=4, ffn=12, heads=12, kv_heads=6, head_dim=2, vocab=65, tied=False)
MIXTRAL = Dims("mixtral", 3, 4, 8, 4, 2, 2, 70, False, experts=4, moe_ffn=8)
QWEN3_MOE = Dims("qwen3_moe", 3, 4, 4, 4, 4, 2, 64, True, experts=8, moe_ffn=4)


def hf_tensors(d: Dims) -> Tensors:
    """The whole model; names as transformers saves them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (d.vocab, d.hidden)}
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    for i in range(d.layers):
        p = f"model.layers.{i}."
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (d.hidden,)
        for name, n in (("q", q), ("k", kv), ("v", kv)):
            shapes[p + f"self_attn.{name}_proj.weight"] = (n, d.hidden)
            if d.family == "qwen2":
                shapes[p + f"self_attn.{name}_proj.bias"] = (n,)
        shapes[p + "self_attn.o_proj.weight"] = (d.hidden, q)
        if d.family.startswith("qwen3"):
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (d.head_dim,)
        if d.experts:
            shapes[p + moe_folder(d) + "gate.weight"] = (d.experts, d.hidden)
        for expert in range(d.experts) or (None,):
            gate, up, down = mlp_names(d, i, expert)
            n = d.ffn if expert is None else d.moe_ffn
            shapes[gate] = shapes[up] = (n, d.hidden)
            shapes[down] = (d.hidden, n)
    shapes["model.norm.weight"] = (d.hidden,)
    if not d.tied:
        shapes["lm_head.weight"] = (d.vocab, d.hidden)
    tensors, start = {}, 1
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        tensors[name] = np.arange(start, start + n, dtype=np.int64).reshape(shape)
        start += n
    return tensors


def moe_folder(d: Dims) -> str:
    return "block_sparse_moe." if d.family == "mixtral" else "mlp."


def mlp_names(d: Dims, layer: int, expert: int | None) -> tuple[str, str, str]:
    """gate, up, down."""
    if expert is None:
        return tuple(f"model.layers.{layer}.mlp.{n}_proj.weight" for n in ("gate", "up", "down"))
    parts = ("w1", "w3", "w2") if d.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    return tuple(f"model.layers.{layer}.{moe_folder(d)}experts.{expert}.{n}.weight" for n in parts)


def rows(x: np.ndarray, rank: int, size: int) -> np.ndarray:
    return np.split(x, size, axis=0)[rank]


def columns(x: np.ndarray, rank: int, size: int) -> np.ndarray:
    return np.split(x, size, axis=1)[rank]


def padded(x: np.ndarray, multiple: int) -> np.ndarray:
    return np.concatenate([x, np.zeros((-len(x) % multiple, *x.shape[1:]), x.dtype)])


def interleaved(d: Dims, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[q..q k v] of each KV head."""
    tail = q.shape[1:]
    groups = [x.reshape(d.kv_heads, -1, *tail) for x in (q, k, v)]
    return np.concatenate(groups, axis=1).reshape(-1, *tail)


@dataclass(frozen=True)
class Shard:
    """Where a rank stands, and the layers of each of its model chunks."""

    tp_rank: int
    tp: int
    chunks: tuple[tuple[int, ...], ...]
    first: bool
    last: bool
    ep_rank: int = 0
    ep: int = 1


def megatron_tensors(d: Dims, hf: Tensors, at: Shard) -> Tensors:
    """What a Megatron rank (local layer spec) holds, by "{chunk}:{name}"."""
    out: Tensors = {}
    multiple = int(np.lcm(64, at.tp))
    embedding = rows(padded(hf["model.embed_tokens.weight"], multiple), at.tp_rank, at.tp)
    if at.first:
        out["0:embedding.word_embeddings.weight"] = embedding
    for chunk, layers in enumerate(at.chunks):
        for local, layer in enumerate(layers):
            tensors = megatron_layer(d, hf, at, f"model.layers.{layer}.", layer)
            out |= {f"{chunk}:decoder.layers.{local}.{name}": x for name, x in tensors.items()}
    if at.last:
        chunk = len(at.chunks) - 1
        out[f"{chunk}:decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not d.tied:
            head = rows(padded(hf["lm_head.weight"], multiple), at.tp_rank, at.tp)
            out[f"{chunk}:output_layer.weight"] = head
        elif not at.first:
            out[f"{chunk}:output_layer.weight"] = embedding
    return out


def megatron_layer(d: Dims, hf: Tensors, at: Shard, p: str, layer: int) -> Tensors:
    out = {
        "input_layernorm.weight": hf[p + "input_layernorm.weight"],
        "pre_mlp_layernorm.weight": hf[p + "post_attention_layernorm.weight"],
        "self_attention.linear_proj.weight": columns(hf[p + "self_attn.o_proj.weight"], at.tp_rank, at.tp),
    }
    for kind in ("weight", "bias") if d.family == "qwen2" else ("weight",):
        whole = interleaved(d, *(hf[p + f"self_attn.{n}_proj.{kind}"] for n in "qkv"))
        out[f"self_attention.linear_qkv.{kind}"] = rows(whole, at.tp_rank, at.tp)
    if d.family.startswith("qwen3"):
        out["self_attention.q_layernorm.weight"] = hf[p + "self_attn.q_norm.weight"]
        out["self_attention.k_layernorm.weight"] = hf[p + "self_attn.k_norm.weight"]
    if not d.experts:
        gate, up, down = (hf[name] for name in mlp_names(d, layer, None))
        both = [rows(gate, at.tp_rank, at.tp), rows(up, at.tp_rank, at.tp)]
        out["mlp.linear_fc1.weight"] = np.concatenate(both)
        out["mlp.linear_fc2.weight"] = columns(down, at.tp_rank, at.tp)
        return out
    out["mlp.router.weight"] = hf[p + moe_folder(d) + "gate.weight"]
    rank, size = (0, 1) if at.ep > 1 else (at.tp_rank, at.tp)
    n = d.experts // at.ep
    for local in range(n):
        gate, up, down = (hf[name] for name in mlp_names(d, layer, at.ep_rank * n + local))
        name = f"mlp.experts.local_experts.{local}."
        out[name + "linear_fc1.weight"] = np.concatenate([rows(gate, rank, size), rows(up, rank, size)])
        out[name + "linear_fc2.weight"] = columns(down, rank, size)
    return out


def vllm_tensors(d: Dims, hf: Tensors, rank: int, tp: int) -> Tensors:
    """What a vLLM rank holds after loading the HF folder."""
    out: Tensors = {"model.norm.weight": hf["model.norm.weight"]}
    for name in ("model.embed_tokens.weight",) if d.tied else ("model.embed_tokens.weight", "lm_head.weight"):
        out[name] = rows(padded(hf[name], 64), rank, tp)
    for i in range(d.layers):
        p = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            if p + norm + ".weight" in hf:
                out[p + norm + ".weight"] = hf[p + norm + ".weight"]
        for kind in ("weight", "bias") if d.family == "qwen2" else ("weight",):
            q, k, v = (hf[p + f"self_attn.{n}_proj.{kind}"] for n in "qkv")
            copies = max(1, tp // d.kv_heads)
            k, v = (rows(x, rank // copies, tp // copies) for x in (k, v))
            out[p + f"self_attn.qkv_proj.{kind}"] = np.concatenate([rows(q, rank, tp), k, v])
        out[p + "self_attn.o_proj.weight"] = columns(hf[p + "self_attn.o_proj.weight"], rank, tp)
        w13, w2 = [], []
        for expert in range(d.experts) or (None,):
            gate, up, down = (hf[name] for name in mlp_names(d, i, expert))
            w13.append(np.concatenate([rows(gate, rank, tp), rows(up, rank, tp)]))
            w2.append(columns(down, rank, tp))
        if d.experts:
            out[p + moe_folder(d) + "gate.weight"] = hf[p + moe_folder(d) + "gate.weight"]
            out[p + moe_folder(d) + "experts.w13_weight"] = np.stack(w13)
            out[p + moe_folder(d) + "experts.w2_weight"] = np.stack(w2)
        else:
            out[p + "mlp.gate_up_proj.weight"], out[p + "mlp.down_proj.weight"] = w13[0], w2[0]
    return out
