"""What autograd keeps of a training step, and what its backward pass works with, in bytes: from sizes alone.

The tensors are counted layer by layer as models/attention.py, mlp.py and gpt.py make them; tests/test_memory.py counts
the real ones on the CPU.
"""

from dataclasses import dataclass

from megatron_rl.models.config import HFConfig, Sizes, dims
from megatron_rl.weights.arch import Role as Kind
from megatron_rl.weights.layouts import padded_vocab, train_layout


@dataclass(frozen=True)
class Recompute:
    """The flags of that name."""

    granularity: str | None = None
    method: str = "uniform"
    layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)


@dataclass(frozen=True)
class Training:
    """What all roles share."""

    sizes: Sizes = Sizes()
    dp: int = 1
    sequence_parallel: bool = False
    bf16: bool = True
    fp32_residual: bool = False
    distributed_optimizer: bool = True
    tokens: int = 4096  # of a micro-batch at most
    micro_batches: int = 1  # of an optimizer step on one rank: no more are in flight in a pipeline
    chunk_tokens: int = 1024
    recompute: Recompute = Recompute()
    cuda: bool = True  # CUDA's kernels keep less than the CPU's

    @property
    def element(self) -> int:
        return 2 if self.bf16 else 4


@dataclass(frozen=True)
class Widths:
    """Columns that one rank holds of a token, and bytes of an element."""

    hidden: int  # between the layers, over TP with sequence parallelism
    full: int  # the whole hidden size
    ffn: int
    query: int
    key: int
    heads: int
    key_heads: int
    element: int
    residual: int


def widths(hf: HFConfig, training: Training) -> Widths:
    tp = training.sizes.tp
    heads, key_heads = hf.heads // tp, max(1, hf.kv_heads // tp)
    return Widths(
        hidden=hf.hidden // (tp if training.sequence_parallel else 1),
        full=hf.hidden,
        ffn=hf.ffn // (tp if not hf.experts or training.sizes.ep == 1 else 1),
        query=heads * hf.head_dim,
        key=key_heads * hf.head_dim,
        heads=heads,
        key_heads=key_heads,
        element=training.element,
        residual=4 if training.fp32_residual else training.element,
    )


def _keeps_unit(w: Widths, cuda: bool) -> bool:
    """In float32 on the CPU torch's norm keeps x and x / rms."""
    return not cuda and w.element == 4


def norm_saved(w: Widths, cuda: bool) -> int:
    """Input, 1 / root mean square, and the output, which the next product keeps."""
    kept = 8 * w.hidden if _keeps_unit(w, cuda) else w.residual * w.hidden
    return kept + 4 + w.element * w.hidden


def attention_saved(hf: HFConfig, w: Widths, cuda: bool, recomputed: bool) -> int:
    """Rotated queries and keys, values, the output (kept by the projection too) and each row's log-sum."""
    out, mixed = w.element * w.query, w.query + 2 * w.key
    norms = queries = 0
    if hf.qk_norm:  # keys and values are views of the product's output
        queries = w.query if w.heads > w.key_heads else 0  # a copy, where several share a key head
        norms = w.element * (queries + mixed) + 4 * (w.heads + w.key_heads)
        norms += 4 * (w.query + w.key) if _keeps_unit(w, cuda) else 0
    if recomputed:
        return norms + w.element * (queries + mixed) + out
    log_sums = 4 * w.heads
    if cuda:
        return norms + w.element * (w.query + 2 * w.key) + out + log_sums
    return norms + 4 * mixed + 4 * w.query + out + log_sums  # and each sequence's own output


def mlp_saved(hf: HFConfig, w: Widths, recomputed: bool) -> int:
    """fc1's output and the activation; of experts: of every token's copies, with megatron-core's own activation."""
    if recomputed:
        return 0
    if not hf.experts:
        return 3 * w.element * w.ffn
    return hf.experts_per_token * (w.element * (w.full + 6 * w.ffn) + 40)


def layer_saved(hf: HFConfig, training: Training, recompute: Recompute) -> int:
    """Bytes that one token of one layer keeps for the backward pass, where the layer is not recomputed as a whole."""
    w = widths(hf, training)
    modules = recompute.modules if recompute.granularity == "selective" else ()
    attention = attention_saved(hf, w, training.cuda, "core_attn" in modules)
    mlp = mlp_saved(hf, w, ("moe" if hf.experts else "mlp") in modules)
    return 2 * norm_saved(w, training.cuda) + attention + mlp


def saved(hf: HFConfig, training: Training, layers: int, recompute: Recompute | None = None) -> int:
    """Bytes a token keeps in `layers` layers of one chunk."""
    recompute = recompute or training.recompute
    each, w = layer_saved(hf, training, recompute), widths(hf, training)
    if recompute.granularity != "full":
        return layers * each
    unit = w.residual * w.hidden  # only the input of what is recomputed
    if recompute.method == "uniform":
        return -(-layers // recompute.layers) * unit
    recomputed = min(recompute.layers, layers)
    return recomputed * unit + (layers - recomputed) * each


def recomputed_at_once(hf: HFConfig, training: Training, layers: int) -> int:
    """Bytes a token needs while one unit is computed again."""
    plain, r = layer_saved(hf, training, Recompute()), training.recompute
    if r.granularity == "full":
        return plain * (min(r.layers, layers) if r.method == "uniform" else 1)
    return max(0, plain - layer_saved(hf, training, r)) if r.granularity == "selective" else 0


def ends_saved(hf: HFConfig, training: Training, kind: Kind, is_last: bool, predicted: int) -> int:
    """Bytes of all tokens outside the layers: angles, ids, the final norm, and the rows that the head reads."""
    w = widths(hf, training)
    size = training.tokens * (4 * hf.head_dim + 24)
    if not is_last:
        return size
    size += training.tokens * (norm_saved(w, training.cuda) - w.element * w.hidden)  # its output goes
    return size + predicted * w.full * (w.element if kind == "lm" else 4) + predicted * 24


def in_flight(training: Training, stage: int) -> int:
    """Chunks' forward passes that a stage holds at a time (one forward, one backward; interleaved with chunks)."""
    pp, vpp = training.sizes.pp, training.sizes.vpp
    most = pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(most, training.micro_batches * vpp)


def head_work(hf: HFConfig, training: Training, kind: Kind) -> int:
    """Peak of the head's backward pass beside what is kept: a chunk's logits and their gradient, that of the hidden
    states, and one in the weight's shape that nobody reads."""
    tokens, e = training.tokens, training.element
    if kind == "value":
        return 2 * 4 * tokens * hf.hidden
    rows = padded_vocab(hf.vocab, training.sizes.tp) // training.sizes.tp
    chunk, weight = min(training.chunk_tokens, tokens) * rows, rows * hf.hidden
    gradient = e * tokens * hf.hidden
    if training.cuda:
        return gradient + max((4 + e) * chunk, e * weight)
    return gradient + max(16 * chunk + (6 * weight if training.bf16 else 0), e * weight)


def layer_work(hf: HFConfig, training: Training) -> int:
    """Peak of one layer's backward pass beside what is kept: gradients of the MLP's tensors and of one weight."""
    w = widths(hf, training)
    columns = w.ffn * (hf.experts_per_token if hf.experts else 1)
    return training.element * (training.tokens * (3 * columns + 2 * w.full) + 2 * w.ffn * w.full)


def activations(hf: HFConfig, kind: Kind, training: Training, stage: int) -> dict[str, int]:
    """What a training step of a model takes beside its weights: kept tensors, and the work at the peak."""
    sizes = training.sizes
    chunks = train_layout(dims(hf), sizes.tp, sizes.pp, sizes.vpp, sizes.ep).stages[stage]
    layers, is_last = max(map(len, chunks)), stage == sizes.pp - 1
    kept = in_flight(training, stage) * training.tokens * saved(hf, training, layers)
    work = layer_work(hf, training) + training.tokens * recomputed_at_once(hf, training, layers)
    if is_last:
        work = max(work, head_work(hf, training, kind))
        if hf.tied and kind == "lm" and sizes.pp == 1:  # waits for the embedding's gradient until the end
            rows = padded_vocab(hf.vocab, sizes.tp) // sizes.tp
            work += training.element * rows * hf.hidden
    ends = ends_saved(hf, training, kind, is_last, training.tokens)
    return {"activations": kept, "embedding and head": ends, "work of the backward pass": work}


def forward_work(hf: HFConfig, kind: Kind, training: Training) -> int:
    """A pass without gradients."""
    tokens, w = training.tokens, widths(hf, training)
    rows = padded_vocab(hf.vocab, training.sizes.tp) // training.sizes.tp
    logits = 4 * min(training.chunk_tokens, tokens) * rows if kind == "lm" else 0
    return max(logits, training.element * tokens * 3 * w.ffn) + 3 * training.element * tokens * w.full
