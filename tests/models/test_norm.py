"""RMSNorm against torch in float64, and against itself compiled: trainer and engine run the same function."""

import torch

from megatron_rl.models.norm import _RMSNorm, rms_norm, rounded

EPS = 1e-5


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_norm_equals_torch_with_gradient():
    """x / rms(x) * weight and both gradients, as autograd has them in float64; bfloat16 is rounded once."""
    x, weight, pull = draw(3, 5, 48, seed=0), draw(48, seed=1), draw(3, 5, 48, seed=2)
    ours, exact = (
        [t.clone().to(dtype).requires_grad_() for t in (x, weight)] for dtype in (torch.float32, torch.float64)
    )
    got, wanted = _RMSNorm.apply(*ours, EPS), torch.nn.functional.rms_norm(exact[0], (48,), exact[1], EPS)
    got.backward(pull)
    wanted.backward(pull.double())
    for mine, theirs in zip([got, *(t.grad for t in ours)], [wanted, *(t.grad for t in exact)], strict=True):
        torch.testing.assert_close(mine, theirs.float())
    low = weight.bfloat16()
    wanted = torch.nn.functional.rms_norm(x.double(), (48,), low.double(), EPS)
    torch.testing.assert_close(rms_norm(x, low, EPS)[0], wanted.bfloat16(), rtol=2**-8, atol=0)
    assert (rms_norm(x, low, EPS)[0] != wanted.bfloat16()).float().mean() < 1e-2


def test_the_compiler_changes_no_bit():
    """Norm and residual come out of torch.compile, which the engine uses, as they come out of eager torch."""

    def residual_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = rounded(x.float() + residual.float(), torch.bfloat16)
        return rms_norm(total, weight, EPS)[0], total

    tensors = [draw(300, 576, seed=0).bfloat16(), 8 * draw(300, 576, seed=1).bfloat16(), draw(576, seed=2).bfloat16()]
    eager, compiled = residual_and_norm(*tensors), torch.compile(residual_and_norm)(*tensors)
    assert torch.equal(eager[1], (tensors[0].float() + tensors[1].float()).bfloat16().float())
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
