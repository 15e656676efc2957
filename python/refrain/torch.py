# SPDX-License-Identifier: Apache-2.0
"""Graphed callables inside a PyTorch program.

    graphs = refrain.Graphs(ctx, [refrain.Callable(trace)], **refrain.torch.bind(module))
    layer = refrain.torch.Layer(graphs)
    with graphs.step():
        loss = criterion(layer(x), target)
        loss.backward()            # runs the captured backward; gradients are in each parameter's .grad
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)

Work is enqueued into PyTorch's current stream. No data is copied between the two libraries: parameters and gradients
are PyTorch's memory, outputs are views of the graphs' memory and valid until the layer's backward has run.
"""
from __future__ import annotations

from typing import Any, Dict, Tuple, Union

import torch

from . import _abi
from .graphs import Gradient, Graphs
from .tensor import Memory, Tensor, type_struct

_NAMES = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
          torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "bool"}
_types: Dict[Tuple[torch.dtype, Tuple[int, ...]], _abi.rfr_type] = {}


def _memory(value: torch.Tensor) -> Union[Memory, torch.Tensor]:
    """The argument of a call in PyTorch's current stream. DLPack would take 5 times as long; it has the types that are
    not here."""
    value = value.contiguous()
    name = _NAMES.get(value.dtype)
    if name is None or value.dim() > 6 or value.device.type not in ("cpu", "cuda"):
        return value
    key = value.dtype, tuple(value.shape)
    found = _types.get(key)
    if found is None:
        found = _types[key] = type_struct(name, key[1])
    return Memory(value, found, value.data_ptr(), value.device.type == "cpu")


def bind(module: torch.nn.Module) -> Dict[str, Dict[str, Any]]:
    """The arguments `tensors` and `gradients` of Graphs: a module's parameters under their names, and their .grad,
    which is allocated here. Frozen parameters get no gradient. The trace's inputs have the same names."""
    tensors, gradients = {}, {}
    for name, parameter in module.named_parameters():
        tensors[name] = parameter.detach()
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients[name] = Gradient(parameter.grad)
    return {"tensors": tensors, "gradients": gradients}


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, anchor: torch.Tensor, *inputs: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        ctx.layer = layer
        layer.enter_stream()
        outputs = layer.graphs.forward(layer.callable, layer.microbatch, *[_memory(x) for x in inputs])
        return tuple(layer.view(y).detach() for y in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[Any, ...]:
        layer = ctx.layer
        layer.enter_stream()
        found = layer.graphs.backward(layer.callable, layer.microbatch, *[_memory(dy) for dy in gradients])
        # A copy, because PyTorch keeps a gradient of a leaf, and the slot's memory is written again.
        return (None, None, *[None if dx is None else layer.view(dx).clone() for dx in found])


class Layer:
    """A callable as a function of tensors that autograd differentiates. Call it within a step of its graphs."""

    def __init__(self, graphs: Graphs, callable: int = 0, microbatch: int = 0) -> None:
        self.graphs, self.callable, self.microbatch = graphs, callable, microbatch
        self._views: Dict[Tuple[int, str, Tuple[int, ...]], torch.Tensor] = {}
        self._on_gpu = graphs.context.device.startswith("cuda")
        self._anchor = torch.empty(0, requires_grad=True)  # the parameters are not arguments, but need a backward

    def enter_stream(self) -> None:
        if self._on_gpu:
            self.graphs.use_stream(torch.cuda.current_stream().cuda_stream)

    def view(self, tensor: Tensor) -> torch.Tensor:
        """The memory of a result as a tensor of PyTorch; each slot's is imported once. The graphs' memory stays as long
        as the layer."""
        key = tensor.struct.data or 0, tensor.dtype, tensor.shape
        if key not in self._views:
            self._views[key] = torch.from_dlpack(tensor)
        return self._views[key]

    def __call__(self, *inputs: torch.Tensor) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]:
        outputs = _Apply.apply(self, self._anchor, *inputs)
        return outputs[0] if len(outputs) == 1 else outputs
