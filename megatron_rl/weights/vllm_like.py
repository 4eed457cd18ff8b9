"""vLLM's layout as it is known to be, spelled by us: for planning without a vLLM.

tools/plan_reshard.py, the property tests and the choice of rollout groups read it. What a sync writes never depends on
it: there the layout is recorded from vLLM itself.
"""

from collections.abc import Iterable, Iterator

from megatron_rl.weights.arch import Dims
from megatron_rl.weights.layouts import Block, Param, padded_vocab

Part = tuple[str, int, int, int, int]  # (HF tensor, row, col, rows, cols)


def vllm_like_blocks(dims: Dims, rank: int, tp: int) -> tuple[Param, ...]:
    """Every parameter of rollout tensor-parallel rank `rank` of `tp`, a language model, expert parallelism 1.

    Raises ValueError where vLLM would refuse the division.
    """
    if dims.heads % tp or (dims.kv_heads % tp and tp % dims.kv_heads) or padded_vocab(dims.vocab, 1) % tp:
        raise ValueError(f"vLLM cannot divide {dims.heads} heads, {dims.kv_heads} KV heads by --rollout-tp {tp}")
    h, params = dims.hidden, []
    for i in range(dims.layers):
        params += _attention(dims, f"model.layers.{i}.", rank, tp)
        params += _mlp(dims, f"model.layers.{i}.", rank, tp)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{i}.{norm}.weight"
            params.append(_stack(name, (h,), [(name, 0, 0, 1, h)]))
    params.append(_stack("model.norm.weight", (h,), [("model.norm.weight", 0, 0, 1, h)]))
    rows = padded_vocab(dims.vocab, 1) // tp
    real = max(0, min(rows, dims.vocab - rank * rows))
    for name in ("model.embed_tokens.weight", "lm_head.weight")[: 1 if dims.tied else 2]:
        params.append(_stack(name, (rows, h), [(name, rank * rows, 0, real, h)] if real else []))
    return tuple(params)


def _attention(d: Dims, layer: str, rank: int, tp: int) -> Iterator[Param]:
    """[q | k | v] of this rank's heads; where TP is larger than the KV heads, ranks share one."""
    q, k = d.heads // tp * d.head_dim, max(1, d.kv_heads // tp) * d.head_dim
    kv_rank = rank // max(1, tp // d.kv_heads)
    cut = [("q", rank * q, q), ("k", kv_rank * k, k), ("v", kv_rank * k, k)]
    name, h = layer + "self_attn.", d.hidden
    weights = [(f"{name}{p}_proj.weight", start, 0, n, h) for p, start, n in cut]
    yield _stack(name + "qkv_proj.weight", (q + 2 * k, h), weights)
    if d.family == "qwen2":
        biases = [(f"{name}{p}_proj.bias", 0, start, 1, n) for p, start, n in cut]
        yield _stack(name + "qkv_proj.bias", (q + 2 * k,), biases)
    if d.family.startswith("qwen3"):
        for norm in ("q_norm.weight", "k_norm.weight"):
            yield _stack(name + norm, (d.head_dim,), [(name + norm, 0, 0, 1, d.head_dim)])
    yield _stack(name + "o_proj.weight", (h, q), [(name + "o_proj.weight", 0, rank * q, h, q)])


def _mlp(d: Dims, layer: str, rank: int, tp: int) -> Iterator[Param]:
    """gate_up and down; or of all experts in one tensor each."""
    h, n = d.hidden, (d.moe_ffn if d.experts else d.ffn) // tp
    if not d.experts:
        name = layer + "mlp."
        into = [(f"{name}{p}_proj.weight", rank * n, 0, n, h) for p in ("gate", "up")]
        yield _stack(name + "gate_up_proj.weight", (2 * n, h), into)
        yield _stack(name + "down_proj.weight", (h, n), [(name + "down_proj.weight", 0, rank * n, h, n)])
        return
    name = layer + ("block_sparse_moe." if d.family == "mixtral" else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if d.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    expert = name + "experts.{}.{}.weight"
    yield _stack(name + "gate.weight", (d.experts, h), [(name + "gate.weight", 0, 0, d.experts, h)])
    into = [(expert.format(e, p), rank * n, 0, n, h) for e in range(d.experts) for p in (gate, up)]
    yield _stack(name + "experts.w13_weight", (d.experts, 2 * n, h), into)
    out = [(expert.format(e, down), 0, rank * n, h, n) for e in range(d.experts)]
    yield _stack(name + "experts.w2_weight", (d.experts, h, n), out)


def _stack(key: str, shape: tuple[int, ...], parts: Iterable[Part]) -> Param:
    """The parts one after the other, each contiguous."""
    blocks, offset = [], 0
    for hf, row, col, rows, cols in parts:
        blocks.append(Block(hf, row, col, rows, cols, key, offset, cols))
        offset += rows * cols
    return Param(key, shape, tuple(blocks))
