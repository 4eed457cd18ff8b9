"""What only CUDA runs: the Triton kernels, and transformer-engine's layers, against plain torch on the CPU."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from models.cases import micro_batch
from models.tiny import tiny_model

from megatron_rl import platform
from megatron_rl.batch import MicroBatch
from megatron_rl.initialize import Topology
from megatron_rl.models.attention import join, part, turn
from megatron_rl.models.config import ModelOptions, read_hf_config
from megatron_rl.models.gpt import build_model, forward
from megatron_rl.models.heads import full_logits
from megatron_rl.models.mlp import SwiGLU
from megatron_rl.models.optimizer import OptimizerOptions, wrap_ddp
from megatron_rl.weights.hf_io import load_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("half", [96, 1500])
def test_swiglu_kernel(half: int):
    """The kernels round once, as the torch code does: outputs and gradients are equal to one step of bfloat16."""
    x, up = torch.randn(7, 1, 2 * half).bfloat16(), torch.randn(7, 1, half).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        own = x.clone().to(device).requires_grad_()
        out = SwiGLU.apply(own)
        out.backward(up.to(device))
        found.append((out.cpu(), own.grad.cpu()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 3])
def test_rotation_kernel(heads: int):
    """Views with strides of their own are read where they are; the way back is the inverse."""
    whole, angles = torch.randn(9, 5, 3 * 64).bfloat16(), torch.randn(9, 32)
    x, angle = whole[:, 1 : 1 + heads, 64:128], (angles.cos(), angles.sin())
    ours = turn(whole.cuda()[:, 1 : 1 + heads, 64:128], *(a.cuda() for a in angle), 1.0)
    torch.testing.assert_close(ours.cpu(), turn(x, *angle, 1.0), rtol=1e-2, atol=1e-6)
    back = turn(ours, *(a.cuda() for a in angle), -1.0)
    torch.testing.assert_close(back.cpu(), x, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("groups", "ratio", "size"), [(2, 6, 128), (3, 1, 64), (1, 7, 80), (4, 7, 128)])
def test_parting_kernel(groups: int, ratio: int, size: int):
    """Queries, keys and values of one tensor, and the way back, are those of the CPU to one step of bfloat16."""
    mixed, angles = torch.randn(9, groups, ratio + 2, size).bfloat16(), torch.randn(9, size // 2)
    angle = angles.cos(), angles.sin()
    device = [a.cuda() for a in angle]
    found, wanted = part(mixed.cuda(), *device), part(mixed, *angle)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-6)
    assert torch.equal(found[2].cpu(), wanted[2])
    back = join(*(x.cuda() for x in wanted), *device)
    torch.testing.assert_close(back.cpu(), join(*wanted, *angle), rtol=1e-2, atol=1e-6)


def on_device(micro: MicroBatch) -> MicroBatch:
    tensors = {f.name: getattr(micro, f.name) for f in fields(micro)}
    return replace(micro, **{k: v.cuda() for k, v in tensors.items() if isinstance(v, torch.Tensor)})


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
def test_transformer_engine_equals_local(family: str, alone: Topology, tmp_path: Path):
    """Both layer kinds of one folder on packed sequences are equally near to float32, logits and gradients."""
    pytest.importorskip("transformer_engine")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tiny_model(tmp_path, family, dtype=torch.bfloat16, **sizes | {"head_dim": 64})
    hf, micro = read_hf_config(folder), micro_batch([33, 1, 90, 4], 131, seed=3)
    micro = on_device(micro)
    found = {}
    for impl, dtype in (("local", torch.float32), ("local", torch.bfloat16), ("transformer_engine", torch.bfloat16)):
        options = ModelOptions(dtype, transformer_impl=impl)
        chunks = build_model(hf, alone, options)
        load_model(folder, hf, chunks, alone, "lm", impl, cast=True)
        wrapped = wrap_ddp(list(chunks), alone, OptimizerOptions())[0]
        wrapped.zero_grad_buffer()
        logits = forward(wrapped, micro, full_logits(131))
        with platform.megatron():
            logits.float().log_softmax(-1)[:, 7].sum().backward()
        norms = sorted(float(p.main_grad.norm()) for p in wrapped.parameters())
        found[impl, dtype] = logits.detach().float(), torch.tensor(norms)
    exact, local, fused = found.values()
    assert (fused[0] - exact[0]).abs().mean() < 1.5 * (local[0] - exact[0]).abs().mean()
    torch.testing.assert_close(fused[1], exact[1], rtol=0.05, atol=1e-2)
