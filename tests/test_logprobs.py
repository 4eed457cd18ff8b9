import os
import sys

import launch
import torch
from pytest import importorskip, mark

from megatron_rl import logprobs
from megatron_rl.logprobs import LogprobOptions, VocabShard, chunked_logprobs


def _reference(hidden, weight, labels, temperature, real):
    logits = (hidden @ weight.t())[:, :real] / temperature
    logp = logits.log_softmax(-1)
    return torch.stack((logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(1)))


@mark.parametrize("chunk", [1, 7, 64])
@mark.parametrize("temperature", [1.0, 0.6])
def test_equal_the_plain_formula_with_gradients(chunk, temperature):
    """Values and gradients equal torch's log_softmax in float64, whatever the chunk; padding columns have no mass."""
    torch.manual_seed(0)
    hidden = torch.randn(29, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 12, dtype=torch.float64, requires_grad=True)
    labels, real = torch.randint(0, 33, (29,)), 33
    want = _reference(hidden, weight, labels, temperature, real)
    got = chunked_logprobs(
        hidden.float(), weight.float(), labels, LogprobOptions(temperature, chunk), VocabShard(0, real, None)
    )
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    pull = torch.randn(2, 29, dtype=torch.float64)
    want_grads = torch.autograd.grad((want * pull).sum(), (hidden, weight))
    for got_grad, want_grad in zip(torch.autograd.grad((got * pull).sum(), (hidden, weight)), want_grads, strict=True):
        torch.testing.assert_close(got_grad, want_grad, atol=2e-5, rtol=1e-5)
    assert (
        float(got[0].exp().max()) <= 1
        and (
            torch.autograd.grad(
                chunked_logprobs(
                    hidden.float(),
                    weight.float(),
                    labels,
                    LogprobOptions(temperature, chunk),
                    VocabShard(0, real, None),
                ).sum(),
                weight,
            )[0][real:]
            == 0
        ).all()
    )


@mark.parametrize("tied", [False, True])
def test_the_weights_gradient_stays_in_float32(tied):
    """With DDP's float32 gradient it is added there without being rounded, and what autograd adds to it is 0."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(29, 12).bfloat16(), torch.randint(0, 40, (29,))
    weight = torch.nn.Parameter(torch.randn(40, 12).bfloat16())
    exact = weight.detach().float().requires_grad_()
    weight.main_grad, weight.zero_out_wgrad = torch.ones(40, 12), tied
    shard, options = VocabShard(0, 40, None), LogprobOptions(1.0, 7)
    for _ in range(2):  # micro-batches
        chunked_logprobs(hidden, weight, labels, options, shard)[0].sum().backward()
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        assert not tied or not weight.grad.any()
        weight.grad = None  # as DDP does
    chunked_logprobs(hidden.float(), exact, labels, options, shard)[0].sum().backward()
    torch.testing.assert_close(weight.main_grad, 1 + 2 * exact.grad, rtol=2e-2, atol=2e-2)
    assert not torch.equal(weight.main_grad, weight.main_grad.bfloat16().float())


def test_large_logits_stay_finite():
    """Logits of +-1e4 give finite log-probabilities, entropies and gradients."""
    hidden = torch.full((3, 4), 50.0, requires_grad=True)
    weight = torch.stack((torch.full((4,), 50.0), torch.full((4,), -50.0), torch.zeros(4)))
    out = chunked_logprobs(hidden, weight, torch.tensor([0, 1, 2]), LogprobOptions(), VocabShard(0, 3, None))
    out.sum().backward()
    assert out.isfinite().all() and hidden.grad.isfinite().all()
    torch.testing.assert_close(out[0], torch.tensor([0.0, -20000.0, -10000.0]))


def test_without_entropy_the_row_is_zero_and_logprobs_are_the_same():
    """entropy=False changes nothing but the entropy row."""
    torch.manual_seed(1)
    hidden, weight, labels = torch.randn(9, 8), torch.randn(20, 8), torch.randint(0, 20, (9,))
    shard = VocabShard(0, 20, None)
    full = chunked_logprobs(hidden, weight, labels, LogprobOptions(), shard)
    bare = chunked_logprobs(hidden, weight, labels, LogprobOptions(entropy=False), shard)
    assert torch.equal(full[0], bare[0]) and not bare[1].any() and full[1].all()


def compare_kernels(device: str, vocab: int, chunk: int) -> None:
    """The Triton kernels against torch's operations: values and gradients, float32."""
    torch.manual_seed(2)
    hidden = torch.randn(5, 12, device=device, requires_grad=True)
    weight = torch.randn(vocab, 12, device=device, requires_grad=True)
    for real, temperature, entropy in ((vocab - 7, 0.6, True), (vocab, 1.0, False)):
        labels, seen = torch.randint(0, real, (5,), device=device), []
        options, pull = LogprobOptions(temperature, chunk, entropy), torch.randn(2, 5, device=device)
        for with_kernels in (True, False):
            logprobs.use_kernels = lambda tensor, answer=with_kernels: answer
            out = chunked_logprobs(hidden, weight, labels, options, VocabShard(0, real, None))
            seen.append([out.detach(), *torch.autograd.grad((out * pull).sum(), (hidden, weight))])
        torch.testing.assert_close(*seen, atol=2e-5, rtol=1e-5)


def test_kernels_equal_torch():
    """The kernels, by Triton's interpreter, give what torch's operations give, over several blocks of columns."""
    importorskip("triton")
    code = "import test_logprobs as t; t.logprobs.FORWARD_BLOCK, t.logprobs.BACKWARD_BLOCK = 16, 8\n"
    code += "t.compare_kernels('cpu', 30, 3); print('compared')"
    out = launch.check(launch.run(sys.executable, "-c", code, env={"TRITON_INTERPRET": "1"}))
    assert out == "compared\n"


@mark.gpu
def test_kernels_equal_torch_on_cuda(monkeypatch):
    """The compiled kernels give what torch's operations give."""
    assert "TRITON_INTERPRET" not in os.environ
    monkeypatch.setattr(logprobs, "use_kernels", logprobs.use_kernels)
    compare_kernels("cuda", 20_000, 4)


@mark.gpu
def test_no_logits_of_all_tokens_live():
    """16k tokens x 152k vocabulary, forward and backward: less than a quarter of the memory of float32 logits."""
    tokens, vocab = 16384, 151936
    hidden = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.05 * torch.randn(vocab, 512, device="cuda", dtype=torch.bfloat16)).requires_grad_()
    labels = torch.randint(vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chunked_logprobs(hidden, weight, labels, LogprobOptions(), VocabShard(0, vocab, None)).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < tokens * vocab * 4 / 4
