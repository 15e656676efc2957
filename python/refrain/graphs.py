# SPDX-License-Identifier: Apache-2.0
"""Graphed callables in a training loop of your own: docs/graphs.md.

A Trace records the forward of a layer. Graphs captures forward and backward of each layer and replays them.
"""
from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from . import _abi
from ._core import Context, Handle, InvalidError, collect, copy_fields, create, lib, text
from .hooks import HookFn, HookMemory, Hooks
from .ranks import Communicator, UsesCommunicator
from .tensor import Borrowed, Tensor, dtype_number, type_struct

NONE = -1  # an operand that is not there
_ROLES = {"trainable": 1, "frozen": 2, "state": 3, "input": 4, "input_grad": 5, "const": 6}
_RECOMPUTE = {"keep": 0, "all": 1, "auto": 2}
_ACTIONS = "F I W B OPT UNSHARD RESHARD REDUCE SEND_F RECV_F SEND_B RECV_B".split()
_SCORES = {"softmax": 0, "softmax_chosen": 1, "sigmoid": 2}
_PHASES = {"load": 0, "setup": 1, "forward": 2, "dgrad": 3, "wgrad": 4, "optim": 5}
_RECIPES = 6  # kinds of recipes
_MINE = os.path.dirname(os.path.abspath(__file__))
_files: Dict[str, bytes] = {}  # names of sources, which traces refer to


def _here() -> _abi.rfr_source:
    """The line of the caller's code that records an op."""
    frame = sys._getframe(2)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _MINE:
        frame = frame.f_back
    name = frame.f_code.co_filename
    out = _abi.rfr_source()
    out.file, out.line = _files.setdefault(name, os.fsencode(name)), frame.f_lineno
    return out


def _choice(table: Mapping[str, int], name: str, what: str) -> int:
    if name not in table:
        raise InvalidError("invalid", "argument", f"there is no {what} {name!r}", "one of " + ", ".join(table))
    return table[name]


class Trace(Handle):
    """Records the ops of a forward. Recording calls return values, which later calls take; they compute nothing.

    A wrong operand is reported by finish(), or when the trace is used, with the line of the call. Shapes and formulas
    are in include/refrain/ops.h, under the same names. NONE is an operand that is not there.

        t = refrain.Trace(ctx)
        x = t.input("x", "input_grad", "bf16", (tokens, width))
        w = t.input("w", "trainable", "bf16", (width, width))
        t.output("y", t.gelu(t.linear(x, w)))
    """

    _destroy_name = "rfr_trace_destroy"

    def __init__(self, context: Context) -> None:
        super().__init__(context, create(context, lib.rfr_trace_create))
        self.inputs: List[Tuple[str, str]] = []  # name and role, in order
        self.outputs: List[str] = []

    def finish(self) -> Trace:
        """Raises the first error of recording."""
        self._call(lib.rfr_trace_finish)
        return self

    def __str__(self) -> str:
        return collect_trace(self)

    @property
    def sites(self) -> int:
        """The number of random ops, for Callable.first_site of a later layer."""
        return int(self._call(lib.rfr_trace_sites))

    @property
    def linears(self) -> int:
        """The number of linear layers under a recipe, for Callable.first_linear of a later layer."""
        return int(self._call(lib.rfr_trace_linears))

    def shape(self, value: int) -> Tuple[int, ...]:
        """The shape of a value."""
        found = self._call(lib.rfr_value_type, value)
        return tuple(found.shape[: found.rank])

    def scope(self, name: str) -> None:
        """Names the layer of the ops that follow."""
        self._call(lib.rfr_scope, name.encode())

    def microbatch(self, number: int) -> None:
        """The microbatch of the ops that follow; -1, initially: once per step."""
        self._call(lib.rfr_microbatch, number)

    def phase(self, name: str) -> None:
        """The phase of the ops that follow, initially "forward"; "optim" for the ops that update parameters."""
        self._call(lib.rfr_set_phase, _choice(_PHASES, name, "phase"))

    @contextmanager
    def recipe(self, name: str, *, keep: Sequence[str] = (), high_backward: bool = False) -> Iterator[None]:
        """Quantizes the GEMMs of the linear layers that are recorded within: "fp8_current", "nvfp4", ..., or
        "none", with the usual settings (docs/recipes.md). keep: patterns of weights that are not quantized."""
        kinds = {text(lib.rfr_recipe_name(i)): i for i in range(_RECIPES)}
        options: _abi.rfr_recipe = lib.rfr_recipe_default(_choice(kinds, name, "recipe"))
        patterns = (ctypes.c_char_p * len(keep))(*[k.encode() for k in keep])
        options.keep, options.n_keep, options.high_backward = patterns, len(keep), high_backward
        self._call(lib.rfr_recipe_begin, ctypes.byref(options))
        try:
            yield
        finally:
            self._call(lib.rfr_recipe_end)

    def input(self, name: str, role: str, dtype: str, shape: Sequence[int]) -> int:
        """role: "input" and "input_grad" are passed at each call; "trainable" and "frozen" are parameters; "state",
        "const"."""
        number = _choice(_ROLES, role, "role")
        dims = (ctypes.c_int64 * len(shape))(*shape)
        value = self._record(lib.rfr_input_at, name.encode(), number, dtype_number(dtype), len(shape), dims)
        self.inputs.append((name, role))
        return value

    def output(self, name: str, value: int) -> None:
        self._call(lib.rfr_output_at, _here(), name.encode(), value)
        self.outputs.append(name)

    def _record(self, function: Any, *arguments: Any) -> int:
        return int(self._call(function, _here(), *arguments))

    # ---- ops ----

    def matmul(self, a: int, b: int, bias: int = NONE, *, ta: bool = False, tb: bool = False, to: str) -> int:
        return self._record(lib.rfr_matmul_at, a, b, bias, ta, tb, dtype_number(to))

    def linear(self, x: int, w: int, b: int = NONE) -> int:
        return self._record(lib.rfr_linear_at, x, w, b)

    def embedding(self, table: int, ids: int) -> int:
        return self._record(lib.rfr_embedding_at, table, ids)

    def positions(self, offsets: int, tokens: int) -> int:
        return self._record(lib.rfr_positions_at, offsets, tokens)

    def rope(self, x: int, positions: int, theta: float, *, factor: float = 1.0, low: float = 0.0, high: float = 0.0,
             original: int = 0) -> int:
        scaling = _abi.rfr_rope_scaling(factor, low, high, original)
        return self._record(lib.rfr_rope_at, x, positions, theta, ctypes.byref(scaling))

    def layernorm(self, x: int, w: int, b: int = NONE, *, eps: float = 1e-5) -> int:
        return self._record(lib.rfr_layernorm_at, x, w, b, eps)

    def rmsnorm(self, x: int, w: int, *, eps: float = 1e-6) -> int:
        return self._record(lib.rfr_rmsnorm_at, x, w, eps)

    def attention(self, q: int, k: int, v: int, offsets: int, *, causal: bool = False, scale: float = 0.0,
                  window: int = 0, cap: float = 0.0, longest: int = 0) -> int:
        options = _abi.rfr_attention_options(scale, causal, window, cap, longest)
        return self._record(lib.rfr_attention_at, q, k, v, offsets, ctypes.byref(options))

    def add(self, a: int, b: int) -> int:
        return self._record(lib.rfr_add_at, a, b)

    def mul(self, a: int, b: int) -> int:
        return self._record(lib.rfr_mul_at, a, b)

    def scale(self, x: int, by: float, s: int = NONE) -> int:
        return self._record(lib.rfr_scale_at, x, by, s)

    def cast(self, x: int, to: str) -> int:
        return self._record(lib.rfr_cast_at, x, dtype_number(to))

    def copy(self, x: int) -> int:
        return self._record(lib.rfr_copy_at, x)

    def fill(self, value: float, dtype: str, shape: Sequence[int]) -> int:
        dims = (ctypes.c_int64 * len(shape))(*shape)
        return self._record(lib.rfr_fill_at, value, dtype_number(dtype), len(shape), dims)

    def gelu(self, x: int, *, tanh: bool = False) -> int:
        return self._record(lib.rfr_gelu_at, x, tanh)

    def silu(self, x: int) -> int:
        return self._record(lib.rfr_silu_at, x)

    def swiglu(self, gate: int, up: int) -> int:
        return self._record(lib.rfr_swiglu_at, gate, up)

    def softcap(self, x: int, cap: float) -> int:
        return self._record(lib.rfr_softcap_at, x, cap)

    def rng_stream(self, name: str) -> int:
        return self._record(lib.rfr_rng_stream_at, name.encode())

    def dropout(self, x: int, stream: int, p: float) -> int:
        return self._record(lib.rfr_dropout_at, x, stream, p, 0)

    def sum(self, x: int, axis: int = -1) -> int:
        return self._record(lib.rfr_sum_at, x, axis)

    def mean(self, x: int, axis: int = -1) -> int:
        return self._record(lib.rfr_mean_at, x, axis)

    def reshape(self, x: int, shape: Sequence[int]) -> int:
        return self._record(lib.rfr_reshape_at, x, len(shape), (ctypes.c_int64 * len(shape))(*shape))

    def transpose(self, x: int, a: int, b: int) -> int:
        return self._record(lib.rfr_transpose_at, x, a, b)

    def slice(self, x: int, axis: int, start: int, count: int) -> int:
        return self._record(lib.rfr_slice_at, x, axis, start, count)

    def expand(self, x: int, axis: int, count: int) -> int:
        return self._record(lib.rfr_expand_at, x, axis, count)

    def concat(self, xs: Sequence[int], axis: int) -> int:
        return self._record(lib.rfr_concat_at, len(xs), (ctypes.c_int32 * len(xs))(*xs), axis)

    def detach(self, x: int) -> int:
        return self._record(lib.rfr_detach_at, x)

    def gradient(self, loss: int, w: int, to: str = "f32") -> int:
        """d loss / d w, for a program that is compiled alone (Programs)."""
        return self._record(lib.rfr_gradient_at, loss, w, dtype_number(to))

    def sgd(self, w: int, g: int, lr: int, *, momentum: int = NONE, master: int = NONE, clip: int = NONE,
            skip: int = NONE, momentum_factor: float = 0.0, decay: float = 0.0, lr_scale: float = 1.0) -> int:
        return self._record(lib.rfr_sgd_at, w, g, momentum, master, lr, clip, skip, momentum_factor, decay, lr_scale)

    def all_gather(self, x: int, ranks: int) -> int:
        return self._record(lib.rfr_all_gather_at, x, ranks)

    def reduce_scatter(self, x: int, ranks: int) -> int:
        return self._record(lib.rfr_reduce_scatter_at, x, ranks)

    def all_reduce(self, x: int, ranks: int) -> int:
        return self._record(lib.rfr_all_reduce_at, x, ranks)

    def all_to_all(self, x: int, ranks: int) -> int:
        return self._record(lib.rfr_all_to_all_at, x, ranks)

    def token_count(self, targets: int, *, ignore: int = -100) -> int:
        """1 / number of targets that are not `ignore`, for cross_entropy."""
        return self._record(lib.rfr_token_count_at, 1, (ctypes.c_int32 * 1)(targets), ignore, None)

    def cross_entropy(self, logits: int, targets: int, inv_valid: int, *, ignore: int = -100) -> int:
        return self._record(lib.rfr_cross_entropy_at, logits, targets, inv_valid, ignore)

    def splits_to_offsets(self, splits: int, rows: int) -> int:
        return self._record(lib.rfr_splits_to_offsets_at, splits, rows, None)

    def grouped_linear(self, x: int, w: int, offsets: int, bias: int = NONE, scale: int = NONE) -> int:
        return self._record(lib.rfr_grouped_linear_at, x, w, offsets, bias, scale)

    def moe_route(self, logits: int, k: int, *, bias: int = NONE, score: str = "softmax", norm: bool = True,
                  groups: int = 1, group_k: int = 1, scale: float = 1.0) -> Tuple[int, int]:
        """The weights of each token's experts, and the experts."""
        options = lib.rfr_moe_options_default()
        options.k, options.norm, options.groups, options.group_k, options.scale = k, norm, groups, group_k, scale
        options.score = _choice(_SCORES, score, "score")
        index = ctypes.c_int32()
        weights = self._record(lib.rfr_moe_route_at, logits, bias, ctypes.byref(options), ctypes.byref(index))
        return weights, index.value

    def moe_sort(self, index: int, experts: int) -> Tuple[int, int, int]:
        """The rows of each expert, the slot of each sorted row, the row of each slot."""
        order, place = ctypes.c_int32(), ctypes.c_int32()
        splits = self._record(lib.rfr_moe_sort_at, index, experts, ctypes.byref(order), ctypes.byref(place))
        return splits, order.value, place.value

    def moe_permute(self, x: int, order: int, place: int, weight: int = NONE) -> int:
        return self._record(lib.rfr_moe_permute_at, x, order, place, weight)

    def moe_unpermute(self, y: int, order: int, place: int, weight: int = NONE) -> int:
        return self._record(lib.rfr_moe_unpermute_at, y, order, place, weight)


def collect_trace(trace: Trace) -> str:
    """The trace as text."""
    return text(collect(trace.context, lambda _, *rest: lib.rfr_trace_print(trace.pointer, None, *rest)))


class Schedule(Handle):
    """A pipeline schedule: docs/schedules.md. `order` is text, one line for each rank: "0F0 0F1 0B0 0B1"."""

    _destroy_name = "rfr_schedule_destroy"

    def __init__(self, context: Context, order: str, *, layers: Union[int, Sequence[int]] = 1) -> None:
        raw = order.encode()
        super().__init__(context, create(context, lib.rfr_schedule_parse, b"order", raw, len(raw)))
        counts = [layers] if isinstance(layers, int) else list(layers)
        self._call(lib.rfr_schedule_set_layers, (ctypes.c_int * len(counts))(*counts), len(counts))

    def slots(self, stage: int) -> int:
        """Microbatches in flight in a stage."""
        return int(self._call(lib.rfr_schedule_slots, stage))

    def slot(self, stage: int, microbatch: int) -> int:
        return int(self._call(lib.rfr_schedule_slot, stage, microbatch))


@dataclass
class Callable:
    """A recorded forward, usually a layer.

    links  (input, callable, output): the input is the output of an earlier callable of the stage, in the same memory
    fixed  {"x": [tensor of each slot]} instead of slot memory for an input or output; ("y", "grad") for its gradient
    """

    trace: Trace
    name: Optional[str] = None
    links: Sequence[Tuple[str, int, str]] = ()
    fixed: Mapping[Union[str, Tuple[str, str]], Sequence[Any]] = field(default_factory=dict)
    inference: bool = False
    gathered: bool = False
    first_site: int = -1
    first_linear: int = -1


@dataclass
class Gradient:
    """The memory that a parameter's gradient is accumulated in; accumulate: not zeroed when a step begins."""

    tensor: Any
    accumulate: bool = True


@dataclass(frozen=True)
class GraphsMemory:
    """Planned bytes; the fields are those of rfr_graphs_memory."""

    planned_bytes: int
    persistent_bytes: int
    slot_bytes: int
    shared_bytes: int
    live_bytes: int
    slots: int
    graphs: int
    saved_bytes: int
    recomputed: int


class Graphs(UsesCommunicator):
    """Callables, compiled and captured. Inputs are tensors with __dlpack__ or arrays; results are Tensors.

    tensors    {"layer0.w": parameter}: your memory for parameters, states and constants, used in place
    gradients  {"layer0.w": tensor or Gradient}: your memory for main gradients
    schedule   None: one microbatch at a time
    hooks      one Hooks for each callable, or None; they run at creation, around each warm-up and capture of a part
    comm       this rank's communicator, for collectives

    On a GPU, set_stream(torch.cuda.current_stream().cuda_stream) puts all work into PyTorch's stream: nothing waits,
    and inputs only have to precede the call there. Without a stream, inputs must be ready, and results need wait().
    """

    _destroy_name = "rfr_graphs_destroy"
    _tensor_prefix = "rfr_graphs"

    def __init__(self, context: Context, callables: Sequence[Callable], *, schedule: Optional[Schedule] = None,
                 rank: int = 0, tensors: Optional[Mapping[str, Any]] = None,
                 gradients: Optional[Mapping[str, Any]] = None, allow_unused_input: bool = False, eager: bool = False,
                 debug: bool = False, budget: int = 0, recompute: str = "keep", first_microbatch: int = 0,
                 warmup_iterations: int = 0, hooks: Optional[Sequence[Optional[Hooks]]] = None,
                 pre_warmup: Sequence[HookFn] = (), post_warmup: Sequence[HookFn] = (),
                 comm: Optional[Communicator] = None) -> None:
        options = lib.rfr_graphs_options_default()
        options.rank, options.first_microbatch = rank, first_microbatch
        options.allow_unused_input, options.eager, options.debug = allow_unused_input, eager, debug
        options.budget, options.recompute = budget, _choice(_RECOMPUTE, recompute, "recompute")
        options.warmup_iterations = warmup_iterations
        self._kept: List[Any] = []  # memory of the caller, captured by address
        self.context = context
        bindings = [self._keep(t).binding(name) for name, t in (tensors or {}).items()]
        options.tensors, options.n_tensors = (_abi.rfr_binding * len(bindings))(*bindings), len(bindings)
        mains = [self._main_gradient(name, g) for name, g in (gradients or {}).items()]
        options.gradients, options.n_gradients = (_abi.rfr_main_gradient * len(mains))(*mains), len(mains)
        self._hooks = HookMemory(context)
        if hooks is not None:
            options.hooks, options.n_hooks = ctypes.cast(self._hooks.rows(hooks), ctypes.c_void_p), len(hooks)
        options.pre_warmup, options.post_warmup = self._hooks.list(pre_warmup), self._hooks.list(post_warmup)
        for c in callables:
            c.trace.finish()
        self._ports = [_Ports(c) for c in callables]
        keep: List[Any] = []  # until the call returns

        def run(pointer: int, *out: Any) -> Any:
            if schedule is not None:
                options.schedule = schedule.pointer
            rows = (_abi.rfr_callable * len(callables))(*[self._callable(c, keep) for c in callables])
            return lib.rfr_graphs_create(pointer, rows, len(callables), ctypes.byref(options), *out)

        self._create(context, run, options, comm)
        self._stream: Optional[int] = None
        self._inputs: List[Borrowed] = []  # until the work that reads them is done

    def _keep(self, value: Any) -> Borrowed:
        out = Borrowed(value, self.context.device)
        self._kept.append(out)
        return out

    def _main_gradient(self, name: str, value: Any) -> _abi.rfr_main_gradient:
        gradient = value if isinstance(value, Gradient) else Gradient(value)
        memory = self._keep(gradient.tensor).tensor
        out: _abi.rfr_main_gradient = lib.rfr_main_gradient_default()
        out.parameter, out.type, out.data, out.bytes = name.encode(), memory.type, memory.data, memory.bytes
        out.accumulate = gradient.accumulate
        return out

    def _callable(self, c: Callable, keep: List[Any]) -> _abi.rfr_callable:
        out: _abi.rfr_callable = lib.rfr_callable_default()
        out.name = c.name.encode() if c.name is not None else None
        out.trace = c.trace.pointer
        out.inference, out.gathered = c.inference, c.gathered
        out.first_site, out.first_linear = c.first_site, c.first_linear
        links = [_abi.rfr_callable_link(i.encode(), n, o.encode()) for i, n, o in c.links]
        out.links, out.n_links = (_abi.rfr_callable_link * len(links))(*links), len(links)
        ports = []
        for port, slots in c.fixed.items():
            name, gradient = (port, False) if isinstance(port, str) else (port[0], True)
            addresses = (ctypes.c_void_p * len(slots))(*[self._keep(s).tensor.data for s in slots])
            keep.append(addresses)
            ports.append(_abi.rfr_callable_fixed(name.encode(), gradient, addresses, len(slots)))
        out.fixed, out.n_fixed = (_abi.rfr_callable_fixed * len(ports))(*ports), len(ports)
        return out

    # ---- a step ----

    def set_stream(self, stream: Optional[int]) -> None:
        """The CUDA stream of later calls, as an address; 0 and 1: the legacy default stream; None: one of the graphs'
        own."""
        value = 1 if stream == 0 else stream
        self._call(lib.rfr_graphs_set_stream, value)
        self._stream = value

    def use_stream(self, stream: int) -> None:
        """set_stream, unless it is the stream already."""
        if self._stream != (stream or 1):
            self.set_stream(stream)

    def _borrow(self, values: Sequence[Any]) -> Any:
        stream = self._stream if self._stream is not None else -1  # -1: the caller has seen to it
        borrowed = [Borrowed(v, self.context.device, stream) for v in values]
        self._inputs += borrowed
        return (_abi.rfr_binding * len(values))(*[b.binding() for b in borrowed])

    def _enqueued(self) -> None:
        """A stream's allocator orders what comes after; otherwise inputs are kept until the work is done."""
        if self._stream is not None or not self.context.device.startswith("cuda"):
            self._inputs.clear()

    def begin_step(self, inputs: Optional[Mapping[str, Any]] = None) -> None:
        """`inputs` are copied into states and constants; if an input names a parameter, its address is compared."""
        self._begin(lib.rfr_graphs_begin_step, inputs or {})

    def begin_evaluation(self, inputs: Optional[Mapping[str, Any]] = None) -> None:
        """A step of forwards alone."""
        self._begin(lib.rfr_graphs_begin_evaluation, inputs or {})

    def _begin(self, function: Any, inputs: Mapping[str, Any]) -> None:
        if self._inputs:  # without the caller's stream a step waits for the one before, and its inputs are released
            self.wait()
        bindings = self._borrow(list(inputs.values()))
        for binding, name in zip(bindings, inputs):
            binding.name = name.encode()
        self._call(function, bindings, len(inputs))
        self._enqueued()

    @contextmanager
    def step(self, inputs: Optional[Mapping[str, Any]] = None) -> Iterator[Graphs]:
        """begin_step, and at the end end_step; abort_step after an exception."""
        self.begin_step(inputs)
        try:
            yield self
        except BaseException:
            if not self.closed:
                self.abort_step()
            raise
        self.end_step()

    def forward(self, callable: int, microbatch: int, *inputs: Any) -> Tuple[Tensor, ...]:
        """The outputs, valid until the slot's last gradient has run. `inputs` are those that are not linked."""
        return tuple(self._run(lib.rfr_graphs_forward, callable, microbatch, inputs, self._count(callable).outputs))

    def backward(self, callable: int, microbatch: int, *output_grads: Any) -> Tuple[Optional[Tensor], ...]:
        """The gradient of each input that is not linked, or None; weight gradients too, unless the schedule has W."""
        found = self._run(lib.rfr_graphs_backward, callable, microbatch, output_grads, self._count(callable).inputs)
        return tuple(t if t.struct.data else None for t in found)

    def _count(self, callable: int) -> _Ports:
        if not 0 <= callable < len(self._ports):
            raise InvalidError("invalid", "argument", f"there is no callable {callable}, only {len(self._ports)}")
        return self._ports[callable]

    def _run(self, function: Any, callable: int, microbatch: int, inputs: Sequence[Any], n: int) -> List[Tensor]:
        bindings, out = self._borrow(inputs), (_abi.rfr_tensor * n)()
        self._call(function, callable, microbatch, bindings, len(inputs), out, n)
        self._enqueued()
        return [self._tensor(out[i]) for i in range(n)]

    def _tensor(self, struct: _abi.rfr_tensor) -> Tensor:
        mine = _abi.rfr_tensor.from_buffer_copy(struct)
        return Tensor(self, mine, self._stream)

    def wgrad(self, callable: int, microbatch: int) -> None:
        """The weight gradients of a callable, in a schedule with separate W actions."""
        self._call(lib.rfr_graphs_wgrad, callable, microbatch)

    def expected(self) -> Optional[Tuple[str, int, int, int]]:
        """The call that the schedule expects now: ("F", stage, microbatch, callable); None: the step has to end."""
        action, number = _abi.rfr_action(), ctypes.c_int()
        self._call(lib.rfr_graphs_expected, ctypes.byref(action), ctypes.byref(number))
        return (_ACTIONS[action.op], action.stage, action.microbatch, number.value) if action.op >= 0 else None

    def end_step(self) -> None:
        self._call(lib.rfr_graphs_end_step)

    def abort_step(self) -> None:
        self._call(lib.rfr_graphs_abort_step)

    def wait(self) -> None:
        """Waits until all launched work has finished."""
        self._call(lib.rfr_graphs_wait)
        self._inputs.clear()

    def changed(self) -> None:
        """Call it after writing frozen parameters or constants by other means than Tensor.write and step inputs."""
        self._call(lib.rfr_graphs_changed)

    # ---- queries ----

    def tensor(self, name: str) -> Tensor:
        """The memory of a parameter, state or constant."""
        return self._named(lib.rfr_graphs_tensor, name)

    def gradient(self, parameter: str) -> Tensor:
        """The main gradient of a parameter, after its last W of the step."""
        return self._named(lib.rfr_graphs_gradient, parameter)

    def _named(self, function: Any, name: str) -> Tensor:
        out = _abi.rfr_tensor()
        self._call(function, name.encode(), ctypes.byref(out))
        return self._tensor(out)

    def get_rng(self, stream: Optional[str] = None) -> Tuple[int, int]:
        """Seed and step of a stream of random numbers; None: the step block."""
        out = _abi.rfr_rng()
        self._call(lib.rfr_graphs_get_rng, stream.encode() if stream is not None else None, ctypes.byref(out))
        return out.seed, out.step

    def set_rng(self, seed: int, step: int, stream: Optional[str] = None) -> None:
        value = _abi.rfr_rng(seed, step)
        self._call(lib.rfr_graphs_set_rng, stream.encode() if stream is not None else None, ctypes.byref(value))

    @property
    def memory(self) -> GraphsMemory:
        out = _abi.rfr_graphs_memory()
        out.size = ctypes.sizeof(out)
        self._call(lib.rfr_graphs_get_memory, ctypes.byref(out))
        values = copy_fields(out)
        return GraphsMemory(**{name: values[name] for name in GraphsMemory.__dataclass_fields__})

    def report(self, callable: int, name: str) -> str:
        """The decisions of a pass ("fuse", "recompute", ...) for a callable."""
        found: str = self._call(lambda pointer: text(lib.rfr_graphs_report(pointer, callable, name.encode())))
        return found


class _Ports:
    """Numbers of a callable's results."""

    def __init__(self, c: Callable) -> None:
        linked = {name for name, _, _ in c.links}
        self.inputs = sum(role in ("input", "input_grad") and name not in linked for name, role in c.trace.inputs)
        self.outputs = len(c.trace.outputs)
