# SPDX-License-Identifier: Apache-2.0
"""Programs: traces that are compiled together, planned, captured and replayed. include/refrain/program.h has the rules.
"""
from __future__ import annotations

import ctypes
from typing import Any, Dict, Mapping, Optional, Sequence

from . import _abi
from ._core import Context, lib, text
from .graphs import _RECOMPUTE, Trace, _choice
from .hooks import HookMemory, Hooks
from .ranks import Communicator, UsesCommunicator
from .tensor import Borrowed, Tensor


def _shards() -> Dict[str, int]:
    out: Dict[str, int] = {}
    while (name := lib.rfr_shard_name(len(out))) is not None:
        out[text(name)] = len(out)
    return out


class Programs(UsesCommunicator):
    """Compiled traces over one arena. Inputs are written with tensor(name).write, results read with output(name).read.

    names    of the traces, for messages
    hooks    one for each trace, or None; they run in run(), before and after the forward and the backward of each
             microbatch
    comm     this rank's communicator, for collectives
    shard    "none", "optimizer" or "full", over the ranks of comm

        with refrain.Programs(context, [trace]) as programs:
            programs.tensor("x").write(x)
            programs.run()
            print(programs.output("y").tolist())
    """

    _destroy_name = "rfr_programs_destroy"
    _tensor_prefix = "rfr_programs"

    def __init__(self, context: Context, traces: Sequence[Trace], *, names: Optional[Sequence[str]] = None,
                 hooks: Optional[Sequence[Optional[Hooks]]] = None, comm: Optional[Communicator] = None,
                 shard: str = "none", budget: int = 0, recompute: str = "keep", fuse: bool = True,
                 debug: bool = False) -> None:
        options = lib.rfr_compile_options_default()
        options.budget, options.recompute = budget, _choice(_RECOMPUTE, recompute, "recompute")
        options.fuse, options.debug, options.shard = fuse, debug, _choice(_shards(), shard, "shard")
        self.context = context
        self._hooks = HookMemory(context)
        if hooks is not None:
            rows = self._hooks.rows(hooks)
            options.hooks, options.n_hooks = ctypes.cast(rows, ctypes.c_void_p), len(hooks)
        for trace in traces:
            trace.finish()
        named = [n.encode() for n in names] if names is not None else [b"program %d" % i for i in range(len(traces))]
        if len(named) != len(traces):
            raise ValueError(f"{len(named)} names for {len(traces)} traces")

        def run(pointer: int, *out: Any) -> Any:
            handles = (ctypes.c_void_p * len(traces))(*[t.pointer for t in traces])
            return lib.rfr_compile(pointer, len(traces), handles, (ctypes.c_char_p * len(named))(*named),
                                   ctypes.byref(options), *out)

        self._create(context, run, options, comm)

    def load(self) -> None:
        """Runs the ops that depend only on frozen inputs and constants; after writing these, before the first run."""
        self._call(lib.rfr_programs_load)

    def run(self, program: int = 0) -> None:
        """Runs a program op by op, with its hooks."""
        self._call(lib.rfr_program_run, program)

    def capture(self, program: int = 0) -> None:
        """Captures a program as a graph; computes nothing."""
        self._call(lib.rfr_program_capture, program)

    def replay(self, program: int = 0, inputs: Optional[Mapping[str, Any]] = None) -> None:
        """Launches the captured graph. `inputs` are tensors whose types and addresses are compared with the captured
        ones."""
        given = [(name, Borrowed(value, self.context.device)) for name, value in (inputs or {}).items()]
        rows = (_abi.rfr_binding * len(given))(*[b.binding(name) for name, b in given])
        self._call(lib.rfr_program_replay, program, rows, len(given))

    def wait(self) -> None:
        """Waits until all launched work has finished."""
        self._call(lib.rfr_programs_wait)

    def tensor(self, name: str) -> Tensor:
        """The memory of an input, parameter or state."""
        out = _abi.rfr_tensor()
        self._call(lib.rfr_programs_tensor, name.encode(), ctypes.byref(out))
        return Tensor(self, out)

    def output(self, name: str, program: int = 0) -> Tensor:
        """The memory of an output, valid until the next run of any of these programs."""
        out = _abi.rfr_tensor()
        self._call(lib.rfr_program_output, program, name.encode(), ctypes.byref(out))
        return Tensor(self, out)

    def report(self, name: str, program: int = 0) -> str:
        """The decisions of a pass ("fuse", "recompute", ...)."""
        found: str = self._call(lambda pointer: text(lib.rfr_program_report(pointer, program, name.encode())))
        return found
