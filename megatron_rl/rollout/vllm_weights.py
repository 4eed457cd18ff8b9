"""A vLLM model loader that reads no files: parameters become views of memory that somebody else owns.

Importing this imports vLLM: set its environment first (engine.py does).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.model_loader import base_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "megatron_rl"
Bind = Callable[[nn.Module], Mapping[str, Tensor]]  # vLLM model -> the memory of each named parameter


@dataclass(frozen=True)
class Slot:
    """A place in the model's module tree that holds a parameter; tied parameters have several."""

    module: nn.Module
    leaf: str
    param: nn.Parameter
    name: str
    memory: Tensor

    def fill(self) -> None:
        self.param.data = self.memory
        self.module._parameters[self.leaf] = self.param

    @property
    def is_live(self) -> bool:
        return self.module._parameters.get(self.leaf) is self.param and self.param.data_ptr() == self.memory.data_ptr()


class LiveModel:
    """The model that the loader makes when vLLM calls it, inside LLM()."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.memory: dict[str, Tensor] = {}  # vLLM parameter -> its memory, in the layout vLLM's load_weights fills
        self._slots: list[Slot] = []
        self._packed: dict[nn.Module, list[Slot]] = {}

    def attach(self, model: nn.Module, memory: Mapping[str, Tensor]) -> None:
        """Puts every parameter onto its memory. ValueError where shape, dtype or device differ."""
        params = dict(model.named_parameters())
        for name, param in params.items():
            _check(name, param, memory)
        self.model, self.memory = (
            model,
            {name: memory[name].detach() for name in params},
        )
        names = {id(param): name for name, param in params.items()}
        self._slots = [
            Slot(module, leaf, param, names[id(param)], self.memory[names[id(param)]])
            for module in model.modules()
            for leaf, param in module._parameters.items()
            if param is not None
        ]
        for slot in self._slots:
            slot.fill()
            slot.param.requires_grad_(False)

    def undo_packing(self, on_cpu: bool) -> None:
        """Checks that vLLM's post-processing left every parameter in its place; on the CPU puts back what it packed.

        The CPU's packed linear layers would ignore every later change of the weights, so they get the plain product,
        which compiles to the same speed. Expert layers run only packed: `repack` renews them.
        """
        for slot in self._slots:
            if on_cpu and hasattr(slot.module, "cpu_linear"):
                slot.fill()
                slot.module.cpu_linear = F.linear
            elif on_cpu and not slot.is_live:
                self._packed.setdefault(slot.module, []).append(slot)
            elif not slot.is_live:
                raise RuntimeError(
                    f"vLLM laid {slot.name} out anew after loading, so it would not follow the training weights; for "
                    "mixture-of-experts models pass --vllm-args moe_backend=triton"
                )

    def repack(self) -> None:
        """Renews the packed copies of expert layers from their memory; there are none on CUDA."""
        for module, slots in self._packed.items():
            for slot in slots:
                slot.fill()
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)

    @contextmanager
    def on(self, memory: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """vLLM's model with every parameter on other memory inside; for loading beside the live weights."""
        try:
            for slot in self._slots:
                slot.fill()
                slot.param.data = memory[slot.name]
            yield self.model
        finally:
            for slot in self._slots:
                slot.fill()
            self.repack()


def register_live_loader(bind: Bind) -> LiveModel:
    """Makes load_format=LOAD_FORMAT build the model around what `bind` returns, for the next LLM() of this process."""
    live = LiveModel()

    class LiveLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            live.attach(model, bind(model))

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
            with _parameters_without_memory():
                model = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            live.undo_packing(on_cpu=vllm_config.device_config.device_type == "cpu")
            return model

    register_model_loader(LOAD_FORMAT)(LiveLoader)
    return live


def _check(name: str, param: nn.Parameter, tensors: Mapping[str, Tensor]) -> None:
    if name not in tensors:
        raise ValueError(f"no memory is given for vLLM's parameter {name} {list(param.shape)}")
    ours, theirs = tensors[name], (tuple(param.shape), param.dtype, param.device)
    if (tuple(ours.shape), ours.dtype, ours.device) != theirs:
        raise ValueError(f"{name} is {theirs} in vLLM but {(tuple(ours.shape), ours.dtype, ours.device)} in training")


@contextmanager
def _parameters_without_memory(smallest: int = 4096) -> Iterator[None]:
    """While vLLM builds its model, the memory of a parameter is freed as soon as it is registered.

    So construction needs one parameter's memory, not a second copy of the weights. Ends when the model stands.
    """
    register, initialize = nn.Module.register_parameter, base_loader.initialize_model

    def register_and_free(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta and param.ndim >= 2 and param.numel() >= smallest:
            param.untyped_storage().resize_(0)

    def initialize_without_memory(*args: Any, **kwargs: Any) -> nn.Module:
        nn.Module.register_parameter = register_and_free
        try:
            return initialize(*args, **kwargs)
        finally:
            nn.Module.register_parameter = register

    base_loader.initialize_model = initialize_without_memory
    try:
        yield
    finally:
        base_loader.initialize_model = initialize
