# SPDX-License-Identifier: Apache-2.0
"""Hooks: functions that run before and after the parts of a step. include/refrain/hooks.h has the rules."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple

from . import _abi
from ._core import ClosedError, Context, InvalidError, UnsupportedError, lib, text

_POINTS = ["pre_warmup", "post_warmup", "pre_forward", "post_forward", "pre_backward", "post_backward", "pre_wgrad",
           "post_wgrad"]
_FAILED = 1  # RFR_INVALID; the exception of the hook is raised instead


class HookTensor:
    """A tensor of a hook's event, valid during the hook.

    address  in the device's memory; 0: the part has no such tensor
    host     whether read() and write() work: the memory is that of the host
    """

    def __init__(self, struct: _abi.rfr_tensor) -> None:
        self.name = text(struct.name)
        self.dtype = text(lib.rfr_dtype_name(struct.type.dtype))
        self.shape: Tuple[int, ...] = tuple(struct.type.shape[: struct.type.rank])
        self.address, self.nbytes, self.host = struct.data or 0, int(struct.bytes), struct.host != 0
        self._valid = True

    def __repr__(self) -> str:
        return f"HookTensor({self.name!r}, {self.dtype}, {self.shape})"

    def _memory(self) -> int:
        if not self._valid:
            raise ClosedError("invalid", "python.closed", f"the hook that {self!r} belongs to has ended")
        if not self.address:
            raise InvalidError("invalid", "tensor", f"{self!r} has no memory")
        if not self.host:
            raise UnsupportedError("unsupported", "tensor", f"{self!r} is in the memory of a GPU", "use its address")
        return self.address

    def read(self) -> bytes:
        """A copy of the bytes."""
        return ctypes.string_at(self._memory(), self.nbytes)

    def write(self, data: Any) -> None:
        """Copies the bytes of an array, or of `bytes`, into the tensor."""
        view = memoryview(data)
        if view.nbytes != self.nbytes:
            raise InvalidError("invalid", "tensor", f"{view.nbytes} bytes for {self!r}, which has {self.nbytes}")
        ctypes.memmove(self._memory(), view.tobytes(), self.nbytes)


@dataclass(frozen=True)
class HookEvent:
    """Where a step is; the fields are those of rfr_hook_event.

    point       "pre_forward", ...
    callable    or the number of the program; -1 for the warm-up hooks
    microbatch  -1: the program has none
    failed      in post hooks: the work after their pre hooks failed
    """

    point: str
    callable: int
    microbatch: int
    capture: bool
    iteration: int
    failed: bool
    name: str
    inputs: Tuple[HookTensor, ...]
    outputs: Tuple[HookTensor, ...]
    parameters: Tuple[HookTensor, ...]
    has_wgrad: bool
    wgrad_reads: bool


HookFn = Callable[[HookEvent], object]


@dataclass(frozen=True)
class Hooks:
    """Functions that get a HookEvent, called in order. An exception ends the call of the library that runs them, and is
    raised from it. A hook must not call objects of its context."""

    pre_forward: Sequence[HookFn] = ()
    post_forward: Sequence[HookFn] = ()
    pre_backward: Sequence[HookFn] = ()
    post_backward: Sequence[HookFn] = ()
    pre_wgrad: Sequence[HookFn] = ()
    post_wgrad: Sequence[HookFn] = ()


def _tensors(array: Any, n: int) -> Tuple[HookTensor, ...]:
    return tuple(HookTensor(array[i]) for i in range(n))


def _run(address: int, function: HookFn) -> int:
    e = _abi.rfr_hook_event.from_address(address)
    event = HookEvent(_POINTS[e.point], e.callable, e.microbatch, e.capture != 0, e.iteration, e.failed != 0,
                      text(e.name), _tensors(e.inputs, e.n_inputs), _tensors(e.outputs, e.n_outputs),
                      _tensors(e.parameters, e.n_parameters), e.has_wgrad != 0, e.wgrad_reads != 0)
    try:
        function(event)
    finally:
        for tensor in event.inputs + event.outputs + event.parameters:
            tensor._valid = False
    return 0


class HookMemory:
    """The C structs of hooks; the object that uses them must keep them."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._kept: List[Any] = []

    def list(self, functions: Sequence[HookFn]) -> _abi.rfr_hook_list:
        rows = (_abi.rfr_hook * len(functions))()
        for row, function in zip(rows, functions):
            callback = self.context.callback(_abi.HookFn, lambda e, _, f=function: _run(e, f), _FAILED)
            self._kept.append(callback)
            row.fn = ctypes.cast(callback, ctypes.c_void_p).value
        self._kept.append(rows)
        return _abi.rfr_hook_list(ctypes.cast(rows, ctypes.c_void_p), len(functions))

    def rows(self, hooks: Sequence[Optional[Hooks]]) -> Any:
        """An array with an entry for each callable or program."""
        out = (_abi.rfr_hooks * len(hooks))()
        for row, given in zip(out, hooks):
            row.size = ctypes.sizeof(row)
            for name in Hooks.__dataclass_fields__:
                setattr(row, name, self.list(getattr(given, name) if given is not None else ()))
        self._kept.append(out)
        return out
