"""Time and peak memory of log-probabilities (and entropies) from hidden states: in chunks as logprobs.py does, and the
plain way through float32 logits of all tokens; prints a table and how far the two are apart.

    python tools/bench_logprobs.py --tokens 16384 --vocab 151936 --hidden 1536

The rows "products" are the matrix products alone, without a softmax: what no way can be faster than. The plain way has
one forward and two backward, the chunks two more kernels over the logits and the forward product once again.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl import platform  # noqa: E402
from megatron_rl.flag_types import amount, count  # noqa: E402
from megatron_rl.logprobs import LogprobOptions, VocabShard, chunked_logprobs  # noqa: E402

Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden_TH, weight_VH, labels_T) -> something of every token


def plain(temperature: float, entropy: bool) -> Way:
    def run(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
        logprobs_TV = ((hidden_TH @ weight_VH.t()).float() / temperature).log_softmax(-1)
        rows = [logprobs_TV.gather(1, labels_T[:, None])[:, 0]]
        if entropy:
            rows.append(-(logprobs_TV.exp() * logprobs_TV).sum(1))
        return torch.stack(rows)

    return run


def chunked(options: LogprobOptions, vocab: int) -> Way:
    def run(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
        out_2T = chunked_logprobs(hidden_TH, weight_VH, labels_T, options, VocabShard(0, vocab, None))
        return out_2T if options.entropy else out_2T[:1]

    return run


def products(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    return hidden_TH @ weight_VH.t()


def measured(way: Way, inputs: tuple[Tensor, Tensor, Tensor], backward: bool, repeats: int) -> tuple[float, float]:
    """(milliseconds of the fastest run, peak gigabytes beyond the inputs)."""
    hidden_TH, weight_VH, _ = inputs
    best, most = float("inf"), 0
    for turn in range(repeats + 1):
        hidden_TH.grad = weight_VH.grad = None
        platform.synchronize()
        platform.reset_peak_memory()
        before, started = platform.memory_allocated(), time.perf_counter()
        with torch.set_grad_enabled(backward):
            out = way(*inputs)
        if backward:
            out.backward(torch.ones((), dtype=out.dtype, device=out.device).expand_as(out))
        platform.synchronize()
        if turn:  # the first compiles
            best = min(best, time.perf_counter() - started)
            most = max(most, platform.max_memory_allocated() - before)
        del out
    return 1e3 * best, most / 1e9


def differences(ours: Way, theirs: Way, inputs: tuple[Tensor, Tensor, Tensor]) -> str:
    """Largest absolute difference of the rows; of the gradients, norm of the difference over the norm."""
    hidden_TH, weight_VH, _ = inputs
    seen = []
    for way in (ours, theirs):
        hidden_TH.grad = weight_VH.grad = None
        out = way(*inputs)
        out.mean().backward()
        seen.append((out.detach(), hidden_TH.grad, weight_VH.grad))
        del out
    (a, *a_grads), (b, *b_grads) = seen
    apart = [
        f"{float((x.float() - y.float()).norm() / y.float().norm()):.1e}"
        for x, y in zip(a_grads, b_grads, strict=True)
    ]
    rows = [f"{float(d):.1e}" for d in (a - b).abs().amax(1)]
    return (
        f"rows differ by at most {', '.join(rows)}; gradients of hidden and weight, relatively, by {', '.join(apart)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=count, default=16384, help="tokens whose log-probabilities are asked")
    parser.add_argument("--vocab", type=count, default=151936, help="rows of the output weight")
    parser.add_argument("--hidden", type=count, default=1536, help="its columns")
    parser.add_argument("--temperature", type=amount, default=1.0)
    parser.add_argument("--chunk-tokens", type=count, nargs="+", default=[512, 1024, 2048, 4096], help="sizes to try")
    parser.add_argument("--repeats", type=count, default=3, help="measured runs, after one that is not")
    args = parser.parse_args()
    device, dtype = platform.device_type(), torch.bfloat16
    drawn = torch.Generator(device).manual_seed(0)
    hidden_TH = torch.randn(args.tokens, args.hidden, device=device, dtype=dtype, generator=drawn).requires_grad_()
    weight_VH = 0.05 * torch.randn(args.vocab, args.hidden, device=device, dtype=dtype, generator=drawn)
    inputs = hidden_TH, weight_VH.requires_grad_(), torch.randint(args.vocab, (args.tokens,), device=device)
    print(f"{args.tokens} tokens x {args.vocab} x {args.hidden}, bfloat16, temperature {args.temperature}, {device}")
    print(f"{'way':<28}{'forward ms':>12}{'peak GB':>9}{'with backward ms':>18}{'peak GB':>9}")
    for entropy in (True, False):
        name = "with entropy" if entropy else "log-probs alone"
        ways = [(f"plain, {name}", plain(args.temperature, entropy))]
        for size in args.chunk_tokens:
            way = chunked(LogprobOptions(args.temperature, size, entropy), args.vocab)
            ways.append((f"{size}, {name}", way))
        for label, way in [*ways, *([] if entropy else [("products", products)])]:
            forward, both = (measured(way, inputs, backward, args.repeats) for backward in (False, True))
            print(f"{label:<28}{forward[0]:>12.2f}{forward[1]:>9.2f}{both[0]:>18.2f}{both[1]:>9.2f}", flush=True)
        print(f"{'':<28}{differences(ways[1][1], ways[0][1], inputs)}")


if __name__ == "__main__":
    main()
