"""Learns vLLM's layout from vLLM itself: its own load_weights runs once on tensors without data.

Every Hugging Face tensor and every parameter becomes a meta tensor; whatever view the loaders take of one, torch knows
its offset and strides. What is written down is each copy: this rectangle of that HF tensor lands there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.weights.layouts import Block, Param

FILLS = (
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)
COPY, CAST = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default


@dataclass
class Recording:
    """Where each HF rectangle lands in this rank's vLLM parameters, and which parameters the loader pads by itself."""

    blocks: list[Block] = field(default_factory=list)
    padded: set[str] = field(default_factory=set)  # parameters of which the loader filled a part with a constant


class _Recorder(TorchDispatchMode):
    """Writes every copy from an HF tensor into a parameter down; lets views through; refuses what it cannot follow."""

    def __init__(self, sources: Mapping[int, tuple[str, Tensor]], params: Mapping[int, str]) -> None:
        super().__init__()
        self.sources, self.params, self.recording = sources, params, Recording()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is CAST and _storage(args[0]) in self.sources:
            return args[0]  # to another device or dtype: the rectangle stays the same
        if func is COPY:
            self._copied(args[0], args[1])
            return args[0]
        if func in FILLS and _storage(args[0]) in self.params:
            self.recording.padded.add(self.params[_storage(args[0])])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _copied(self, into: Tensor, of: Tensor) -> None:
        param, source = self.params.get(_storage(into)), self.sources.get(_storage(of))
        if param is None and source is None:
            return  # a loader's own scratch tensor
        if param is None or source is None:
            raise NotImplementedError(
                f"vLLM's loader computes with weights instead of copying them ({param or 'a temporary tensor'} from "
                f"{source[0] if source else 'a temporary tensor'}): its layout cannot be learned"
            )
        self.recording.blocks.extend(_blocks(source[0], source[1], of, param, into))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _blocks(hf: str, whole: Tensor, of: Tensor, param: str, into: Tensor) -> Iterator[Block]:
    """The copy `into[...] = of[...]` as blocks, both views seen as stacks of matrices."""
    if of.numel() != into.numel():
        raise NotImplementedError(f"{hf} is broadcast from {list(of.shape)} into {list(into.shape)} of {param}")
    if of.numel() == 0:  # a rank that holds nothing but vocabulary padding
        return
    of = of.reshape(into.shape)
    width = whole.shape[-1] if whole.ndim else 1
    axes = [(n, s, d) for n, s, d in zip(of.shape, of.stride(), into.stride(), strict=True) if n > 1]
    if not axes or axes[-1][1:] != (1, 1):
        axes.append((1, 1, 1))
    inner, _, _ = axes.pop()
    if inner > width:  # a flat run over several rows of the HF tensor
        assert inner % width == 0 and of.storage_offset() % width == 0, f"{hf} is cut in the middle of a row"
        axes.append((inner // width, width, width))
        inner = width
    rows, step, stride = axes.pop() if axes and axes[-1][1] == width else (1, width, inner)
    for index in product(*(range(n) for n, _, _ in axes)):
        start = of.storage_offset() + sum(i * s for i, (_, s, _) in zip(index, axes, strict=True))
        offset = into.storage_offset() + sum(i * d for i, (_, _, d) in zip(index, axes, strict=True))
        row, col = divmod(start, width)
        assert col + inner <= width and step == width, f"{hf} is not cut into rectangles"
        yield Block(hf, row, col, rows, inner, param, offset, stride)


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Every parameter is a meta twin with the same loader attributes inside; afterwards the model is as it was."""
    owners = [(m, leaf, p) for m in model.modules() for leaf, p in m._parameters.items() if p is not None]
    twins: dict[int, nn.Parameter] = {}
    try:
        for module, leaf, param in owners:
            if id(param) not in twins:
                twin = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
                twin.__class__, twin.__dict__ = type(param), dict(vars(param))
                twins[id(param)] = twin
            module._parameters[leaf] = twins[id(param)]
        yield dict(model.named_parameters())
    finally:
        for module, leaf, param in owners:
            module._parameters[leaf] = param


@torch.no_grad()
def record(model: nn.Module, hf_shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[Param, ...]:
    """Runs vLLM's loader on `hf_shapes` (HF name -> shape) without data -> every parameter of this TP rank.

    Raises ValueError that names the parameters of which no HF tensor covers every element, vocabulary padding aside.
    """
    fakes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in hf_shapes.items()}
    with _on_meta(model) as params:
        by_storage = {_storage(p): name for name, p in params.items()}
        with _Recorder({_storage(t): (name, t) for name, t in fakes.items()}, by_storage) as recorder:
            model.load_weights(iter(fakes.items()))
        blocks: dict[str, list[Block]] = {name: [] for name in params}
        for block in recorder.recording.blocks:
            blocks[block.param].append(block)
        recorded = tuple(Param(name, tuple(p.shape), tuple(blocks[name])) for name, p in params.items())
    _check_coverage(recorded, recorder.recording.padded)
    return recorded


def _check_coverage(params: tuple[Param, ...], padded: set[str]) -> None:
    bad = []
    for param in params:
        covered = sum(block.rows * block.cols for block in param.blocks)
        if covered > param.numel or (covered < param.numel and param.key not in padded):
            bad.append(f"{param.key} ({covered:,} of {param.numel:,} elements)")
    if bad:
        raise ValueError(f"vLLM parameters that the model's tensors do not fill exactly once: {', '.join(bad)}")
