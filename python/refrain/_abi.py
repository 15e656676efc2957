# SPDX-License-Identifier: Apache-2.0
"""The C interface: structs and functions of include/refrain, for ctypes.

A struct's fields are its annotations, in the order of the header: the Python type for mypy, the C type for ctypes.
tests/test_abi.py compares size, offsets and number of fields with the headers, and the number of arguments of every
function. Functions that return an rfr_status raise: see _core.py.
"""
from __future__ import annotations

import ctypes
import os
import pathlib
from ctypes import (CFUNCTYPE, POINTER, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t,
                    c_uint32, c_uint64, c_void_p)
from typing import Annotated, Any, Dict, List, Optional, Tuple, Type, TypeVar, get_type_hints

VERSION = "0.1"  # of the interface: major.minor of the library

Size = Annotated[int, c_size_t]
Int = Annotated[int, c_int]
Int32 = Annotated[int, c_int32]
Int64 = Annotated[int, c_int64]
UInt64 = Annotated[int, c_uint64]
Real = Annotated[float, c_double]
Text = Annotated[Optional[bytes], c_char_p]
Pointer = Annotated[Optional[int], c_void_p]
Function = Annotated[Any, c_void_p]
Dims = Annotated[Any, c_int64 * 6]
Message = Annotated[bytes, c_char * 256]
Texts = Annotated[Any, POINTER(c_char_p)]
Ids = Annotated[Any, POINTER(c_int32)]
Offsets = Annotated[Any, POINTER(c_uint32)]


class Record(ctypes.Structure):
    """A struct whose integers are checked, because ctypes cuts off those that do not fit."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, int) and isinstance(getattr(self, name), int) and getattr(self, name) != value:
            raise OverflowError(f"{name} is {value}, which is out of range")


Struct = TypeVar("Struct", bound=ctypes.Structure)
STRUCTS: List[Type[ctypes.Structure]] = []


def struct(cls: Type[Struct]) -> Type[Struct]:
    """Lays a class out as its annotations say."""
    hints = get_type_hints(cls, include_extras=True)
    names = list(cls.__dict__["__annotations__"]) if "__annotations__" in cls.__dict__ else list(hints)
    cls._fields_ = [(n, hints[n].__metadata__[0] if hasattr(hints[n], "__metadata__") else hints[n]) for n in names]
    STRUCTS.append(cls)
    return cls


# ---- callbacks ----

LogFn = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
WriteFn = CFUNCTYPE(None, POINTER(c_char), c_size_t, c_void_p)
ReleaseFn = CFUNCTYPE(None, c_void_p)
EventFn = CFUNCTYPE(None, c_void_p, c_void_p)
WindowFn = CFUNCTYPE(c_int, c_void_p, c_void_p)
TokenFn = CFUNCTYPE(c_int, c_int32, c_void_p)
SampleFn = CFUNCTYPE(None, POINTER(c_char), c_size_t, c_int, c_void_p)
CapsuleFn = ctypes.PYFUNCTYPE(None, c_void_p)
DeleterFn = CFUNCTYPE(None, c_void_p)
HookFn = CFUNCTYPE(c_int, c_void_p, c_void_p)

# ---- status.h, ctx.h ----


@struct
class rfr_error(Record):
    status: Int
    slug: Text
    message: Text
    next: Text
    file: Text
    line: Int64


@struct
class rfr_ctx_options(Record):
    size: Size
    alloc: Function
    free: Function
    alloc_user: Pointer
    log: Function
    log_user: Pointer
    threads: Int
    isa: Text
    module_path: Text
    use_onednn: Int
    device: Text
    cuda_portable: Int
    byte_limit: Size


# ---- trace.h, tensor.h, program.h ----


@struct
class rfr_source(Record):
    file: Text
    line: Int


@struct
class rfr_type(Record):
    dtype: Int
    rank: Int
    shape: Dims


@struct
class rfr_tensor(Record):
    name: Text
    role: Int
    type: rfr_type
    data: Pointer
    bytes: Int64
    host: Int


@struct
class rfr_binding(Record):
    name: Text
    type: rfr_type
    data: Pointer


@struct
class rfr_rng(Record):
    seed: UInt64
    step: Int64


@struct
class rfr_rope_scaling(Record):
    factor: Real
    low: Real
    high: Real
    original: Int64


@struct
class rfr_attention_options(Record):
    scale: Real
    causal: Int
    window: Int64
    cap: Real
    longest: Int64


@struct
class rfr_moe_options(Record):
    size: Size
    k: Int64
    score: Int
    norm: Int
    groups: Int64
    group_k: Int64
    scale: Real


@struct
class rfr_recipe(Record):
    size: Size
    kind: Int
    format: Int
    margin: Int
    history: Int
    rule: Int
    powers_of_two: Int
    high_backward: Int
    keep: Texts
    n_keep: Int


# ---- schedule.h, graphs.h ----


@struct
class rfr_action(Record):
    op: Int32
    stage: Int32
    microbatch: Int32


@struct
class rfr_schedule_options(Record):
    size: Size
    kind: Int
    ranks: Int
    microbatches: Int
    chunks: Int
    group: Int


@struct
class rfr_callable_link(Record):
    input: Text
    callable: Int
    output: Text


@struct
class rfr_callable_fixed(Record):
    port: Text
    gradient: Int
    data: Annotated[Any, POINTER(c_void_p)]
    n_data: Int


@struct
class rfr_callable(Record):
    size: Size
    name: Text
    trace: Pointer
    links: Annotated[Any, POINTER(rfr_callable_link)]
    fixed: Annotated[Any, POINTER(rfr_callable_fixed)]
    n_links: Int
    n_fixed: Int
    inputs: Texts
    outputs: Texts
    n_inputs: Int
    n_outputs: Int
    samples: Annotated[Any, POINTER(rfr_binding)]
    n_samples: Int
    inference: Int
    sharded: Int
    gathered: Int
    first_site: Int64
    first_linear: Int64


@struct
class rfr_hook(Record):
    fn: Function
    user: Pointer


@struct
class rfr_hook_list(Record):
    hooks: Pointer
    n: Int


@struct
class rfr_hooks(Record):
    size: Size
    pre_forward: rfr_hook_list
    post_forward: rfr_hook_list
    pre_backward: rfr_hook_list
    post_backward: rfr_hook_list
    pre_wgrad: rfr_hook_list
    post_wgrad: rfr_hook_list


@struct
class rfr_hook_event(Record):
    size: Size
    point: Int
    callable: Int
    microbatch: Int
    capture: Int
    iteration: Int
    failed: Int
    inputs: Annotated[Any, POINTER(rfr_tensor)]
    outputs: Annotated[Any, POINTER(rfr_tensor)]
    n_inputs: Int
    n_outputs: Int
    name: Text
    parameters: Annotated[Any, POINTER(rfr_tensor)]
    n_parameters: Int
    has_wgrad: Int
    wgrad_reads: Int


@struct
class rfr_compile_options(Record):
    size: Size
    budget: Int64
    fuse: Int
    prune: Int
    loss_chunk: Int64
    debug: Int
    keep_traces: Int
    recompute: Int
    tune: Int
    choices: Pointer
    n_choices: Int
    comm: Pointer
    plan_only: Int
    shard: Int
    step_memory: Pointer
    watch: Pointer
    hooks: Pointer
    n_hooks: Int


@struct
class rfr_main_gradient(Record):
    size: Size
    parameter: Text
    type: rfr_type
    data: Pointer
    bytes: Int64
    strides: Annotated[Any, POINTER(c_int64)]
    n_strides: Int
    accumulate: Int


@struct
class rfr_graphs_options(Record):
    size: Size
    schedule: Pointer
    rank: Int
    first_microbatch: Int
    allow_unused_input: Int
    eager: Int
    debug: Int
    fuse: Int
    budget: Int64
    recompute: Int
    tensors: Annotated[Any, POINTER(rfr_binding)]
    n_tensors: Int
    gradients: Annotated[Any, POINTER(rfr_main_gradient)]
    n_gradients: Int
    warmup_iterations: Int
    hooks: Pointer
    n_hooks: Int
    pre_warmup: rfr_hook_list
    post_warmup: rfr_hook_list
    comm: Pointer
    step_memory: Pointer
    wgrad_side_stream: Int


@struct
class rfr_graphs_memory(Record):
    size: Size
    planned_bytes: Int64
    persistent_bytes: Int64
    slot_bytes: Int64
    shared_bytes: Int64
    window_bytes: Int64
    scratch_bytes: Int64
    lower_bound_bytes: Int64
    live_bytes: Int64
    slots: Int
    live: Int
    graphs: Int
    saved_bytes: Int64
    recomputed: Int
    recomputed_flops: Real
    step_memory_bytes: Int64


# ---- dist.h ----


@struct
class rfr_launch(Record):
    size: Size
    launcher: Text
    rank: Int
    ranks: Int
    local_rank: Int
    address: Message
    port: Int


# ---- text.h, chat.h ----


@struct
class rfr_span(Record):
    begin: Size
    end: Size


@struct
class rfr_encode_options(Record):
    size: Size
    add_special: Int
    foreign: Annotated[Any, POINTER(rfr_span)]
    n_foreign: Size
    parallel: Int


@struct
class rfr_tokens(Record):
    ids: Ids
    begins: Offsets
    n: Int64
    capacity: Int64
    scratch: Pointer


@struct
class rfr_chat_options(Record):
    size: Size
    tools: Text
    variables: Text
    add_generation_prompt: Int
    date: Int64


@struct
class rfr_rendered(Record):
    text: Pointer
    n: Size
    foreign: Annotated[Any, POINTER(rfr_span)]
    n_foreign: Size
    trained: Annotated[Any, POINTER(rfr_span)]
    n_trained: Size
    ctx: Pointer


@struct
class rfr_tokenizer_train_options(Record):
    size: Size
    vocab_size: Int64
    pattern: Int
    special: Texts
    n_special: Int64
    min_frequency: Int64
    max_bytes: Int64
    chat_template: Text


@struct
class rfr_tokenizer_training(Record):
    vocab_size: Int64
    merges: Int64
    least: Int64
    files: Int64
    bytes: Int64
    words: Int64


# ---- train.h, model.h ----


@struct
class rfr_watched(Record):
    name: Text
    elements: Int64
    nans: Int64
    infs: Int64
    mean: Real
    rms: Real
    largest: Real
    smallest: Real
    zeros: Real


@struct
class rfr_event(Record):
    size: Size
    kind: Int
    message: Text
    step: Int64
    steps: Int64
    loss: Real
    bits_per_byte: Real
    grad_norm: Real
    lr: Real
    tokens: Int64
    skipped: Int
    seconds: Real
    most_load: Real
    least_load: Real
    seconds_left: Real
    windows: Int64
    windows_planned: Int64
    windows_held_out: Int64
    margin: Real
    accuracy: Real
    layer_loads: Annotated[Any, POINTER(c_double)]
    layers: Int64
    rank: Int
    watched: Annotated[Any, POINTER(rfr_watched)]
    values: Int64


@struct
class rfr_window(Record):
    size: Size
    validation: Int
    index: Int64
    sequence: Int64
    tokens: Ids
    targets: Ids
    documents: Ids
    n_documents: Int64
    position: Int64
    message: Message


@struct
class rfr_data_source(Record):
    size: Size
    fill: Function
    user: Pointer
    name: Text
    train_windows: Int64
    validation_windows: Int64


@struct
class rfr_run_options(Record):
    size: Size
    config_name: Text
    config_folder: Text
    overrides: Texts
    n_overrides: Int
    programs: Int
    resume: Int
    strict: Int
    debug: Int
    eager: Int
    keep_traces: Int
    no_data: Int
    on_event: Function
    event_user: Pointer
    plan_only: Int
    data: Annotated[Any, POINTER(rfr_data_source)]
    texts: Int64
    comm: Pointer
    ema: Int


@struct
class rfr_run_info(Record):
    size: Size
    step: Int64
    steps: Int64
    skipped: Int64
    tokens_per_step: Int64
    parameters: Int64
    adapter_parameters: Int64
    trainable_parameters: Int64
    train_files: Int64
    train_bytes: Int64
    validation_files: Int64
    validation_bytes: Int64
    experts: Int64
    expert_rows: Int64
    expert_layers: Int64
    expert_bytes: Int64
    flops_per_step: Real
    dtype: Int
    byte_tokens: Int
    data_hash: Text
    checkpoint: Text
    train_tokens: Int64
    validation_tokens: Int64
    epochs: Real
    duplicate_files: Int64
    empty_files: Int64
    checkpoint_bytes: Int64
    time: Real
    steps_estimated: Int
    train_rows: Int64
    validation_rows: Int64
    train_windows: Int64
    trained_tokens: Int64
    truncated_rows: Int64
    cut_tokens: Int64
    dropped_rows: Int64
    untrained_rows: Int64
    equal_rows: Int64
    cached_files: Int64
    max_positions: Int64
    window: Int64
    vocab_size: Int64
    model: Text
    preference: Int
    layers: Int64
    ranks: Int
    shard: Int


@struct
class rfr_evaluation(Record):
    loss: Real
    bits_per_byte: Real
    tokens: Int64
    bytes: Int64
    seconds: Real
    windows: Int64
    windows_held_out: Int64
    pairs: Int64
    margin: Real
    accuracy: Real


@struct
class rfr_generate_options(Record):
    size: Size
    tokens: Int64
    temperature: Real
    top_k: Int64
    top_p: Real
    seed: UInt64
    min_p: Real
    repetition_penalty: Real
    stop: Ids
    n_stop: Int64


@struct
class rfr_prompt(Record):
    tokens: Ids
    n: Int64
    seed: UInt64
    take: Function
    user: Pointer


@struct
class rfr_run_phase(Record):
    size: Size
    until: Int64
    tokens: Int64
    sequence: Int64
    program: Int


@struct
class rfr_export_options(Record):
    size: Size
    format: Text
    dtype: Text
    ema: Int


# ---- sweep.h ----


@struct
class rfr_sweep_options(Record):
    size: Size
    overrides: Texts
    n_overrides: Int
    resume: Int


@struct
class rfr_sweep_run(Record):
    name: Text
    folder: Text
    overrides: Texts
    n_overrides: Int
    n_common: Int
    state: Int
    started: Int
    loss: Real
    bits_per_byte: Real
    step: Int64
    seconds: Real
    error: Text


# ---- functions ----

class Status(c_int):
    """The result of a call that raises where it is not 0."""


class _Whole:
    """An argument of a C integer type; refuses numbers that do not fit."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def from_param(self, value: Any) -> Any:
        out = self.kind(value)
        if out.value != value:
            raise OverflowError(f"the number {value} is out of range")
        return out


_WHOLE = {kind: _Whole(kind) for kind in (c_int, c_int32, c_int64, c_size_t)}
P = c_void_p  # a handle, or memory
OUT = POINTER(c_void_p)
VALUES = POINTER(c_int32)
AT = (P, rfr_source)  # a recording call: the trace and the line of the caller

FUNCTIONS: Dict[str, Tuple[Any, ...]] = {  # name: result, arguments
    "rfr_version": (c_char_p,),
    "rfr_last_error": (POINTER(rfr_error),),
    "rfr_status_name": (c_char_p, c_int),
    "rfr_dtype_name": (c_char_p, c_int),
    "rfr_dtype_parse": (c_int, c_char_p),
    "rfr_ctx_options_default": (rfr_ctx_options,),
    "rfr_ctx_create": (Status, POINTER(rfr_ctx_options), OUT),
    "rfr_ctx_destroy": (None, P),
    "rfr_tokenizer_open": (Status, P, c_char_p, OUT),
    "rfr_tokenizer_destroy": (None, P),
    "rfr_encode_options_default": (rfr_encode_options,),
    "rfr_tokens_deinit": (None, POINTER(rfr_tokens)),
    "rfr_tokenizer_encode": (Status, P, c_char_p, c_size_t, POINTER(rfr_encode_options), POINTER(rfr_tokens)),
    "rfr_tokenizer_vocab_size": (c_int64, P),
    "rfr_tokenizer_token": (P, P, c_int32, POINTER(c_size_t)),
    "rfr_tokenizer_id": (c_int32, P, c_char_p, c_size_t),
    "rfr_tokenizer_is_special": (c_int, P, c_int32),
    "rfr_tokenizer_bos": (c_int32, P),
    "rfr_tokenizer_eos": (c_int32, P),
    "rfr_tokenizer_stop": (c_int32, P, c_int),
    "rfr_decoder_create": (Status, P, c_int, OUT),
    "rfr_decoder_destroy": (None, P),
    "rfr_decoder_add": (Status, P, c_int32, WriteFn, P),
    "rfr_decoder_end": (Status, P, WriteFn, P),
    "rfr_tokenizer_write_files": (Status, P, POINTER(c_char_p), c_int64, c_int, c_char_p, POINTER(c_int64),
                                  POINTER(c_int64)),
    "rfr_tokenizer_train_options_default": (rfr_tokenizer_train_options,),
    "rfr_tokenizer_train": (Status, P, POINTER(c_char_p), c_int64, POINTER(rfr_tokenizer_train_options), c_char_p,
                            POINTER(rfr_tokenizer_training)),
    "rfr_chat_template_open": (Status, P, c_char_p, c_char_p, OUT),
    "rfr_chat_template_destroy": (None, P),
    "rfr_chat_options_default": (rfr_chat_options,),
    "rfr_chat_render": (Status, P, c_char_p, c_size_t, POINTER(rfr_chat_options), POINTER(rfr_rendered)),
    "rfr_rendered_deinit": (None, POINTER(rfr_rendered)),
    "rfr_chat_encode": (Status, P, P, c_char_p, c_size_t, POINTER(rfr_chat_options), POINTER(rfr_tokens)),
    "rfr_chat_stops": (Status, P, P, POINTER(c_int32), c_int, POINTER(c_int)),
    "rfr_event_name": (c_char_p, c_int),
    "rfr_data_source_default": (rfr_data_source,),
    "rfr_run_options_default": (rfr_run_options,),
    "rfr_run_open": (Status, P, c_char_p, c_char_p, POINTER(rfr_run_options), OUT),
    "rfr_run_close": (None, P),
    "rfr_run_step": (Status, P),
    "rfr_run_train": (Status, P),
    "rfr_run_request_stop": (None, P),
    "rfr_run_evaluate": (Status, P, POINTER(rfr_evaluation)),
    "rfr_run_save": (Status, P),
    "rfr_run_get_info": (None, P, POINTER(rfr_run_info)),
    "rfr_run_tokenizer": (P, P),
    "rfr_run_template": (P, P),
    "rfr_generate_options_default": (rfr_generate_options,),
    "rfr_run_generate_tokens": (Status, P, POINTER(c_int32), c_int64, POINTER(rfr_generate_options), TokenFn, P),
    "rfr_run_generate_batch": (Status, P, POINTER(rfr_prompt), c_int64, POINTER(rfr_generate_options)),
    "rfr_run_phase_at": (Status, P, c_int, POINTER(rfr_run_phase)),
    "rfr_run_data_row": (Status, P, c_int64, SampleFn, P),
    "rfr_run_score": (Status, P, POINTER(c_int32), c_int64, POINTER(c_float)),
    "rfr_finetune_config": (Status, P, c_char_p, POINTER(c_char_p), c_int, POINTER(rfr_run_options), WriteFn, P),
    "rfr_model_run_config": (Status, P, c_char_p, c_int64, POINTER(rfr_run_options), WriteFn, P),
    "rfr_export_options_default": (rfr_export_options,),
    "rfr_export": (Status, P, c_char_p, c_char_p, POINTER(rfr_export_options)),
    "rfr_inspect": (Status, P, c_char_p, c_int, WriteFn, P),
    "rfr_report_open": (Status, P, POINTER(c_char_p), c_int, OUT),
    "rfr_report_read": (Status, P, POINTER(c_int)),
    "rfr_report_bytes": (c_int64, P),
    "rfr_report_close": (None, P),
    "rfr_report_page": (Status, P, c_int, WriteFn, P),
    "rfr_report_data": (Status, P, WriteFn, P),
    "rfr_report_screen": (Status, P, c_int, c_int, c_int, c_double, WriteFn, P),
    "rfr_report_wandb": (Status, P, c_int, c_char_p),
    "rfr_report_diff": (Status, P, c_char_p, c_char_p, c_int, c_int64, WriteFn, P, POINTER(c_int)),
    "rfr_sweep_options_default": (rfr_sweep_options,),
    "rfr_sweep_open": (Status, P, c_char_p, c_char_p, POINTER(rfr_sweep_options), OUT),
    "rfr_sweep_close": (None, P),
    "rfr_sweep_count": (c_int, P),
    "rfr_sweep_config": (c_char_p, P),
    "rfr_sweep_get": (Status, P, c_int, POINTER(rfr_sweep_run)),
    "rfr_sweep_set": (Status, P, c_int, c_int, c_char_p),
    "rfr_sweep_rank": (c_int, P, POINTER(c_int)),
    "rfr_tensor_to_dlpack": (Status, P, POINTER(rfr_tensor), ReleaseFn, P, OUT),
    "rfr_tensor_from_dlpack": (Status, P, POINTER(rfr_tensor)),
    "rfr_trace_create": (Status, P, OUT),
    "rfr_trace_destroy": (None, P),
    "rfr_trace_finish": (Status, P),
    "rfr_trace_print": (Status, P, P, WriteFn, P),
    "rfr_trace_sites": (c_int64, P),
    "rfr_trace_linears": (c_int64, P),
    "rfr_value_type": (rfr_type, P, c_int32),
    "rfr_scope": (None, P, c_char_p),
    "rfr_recipe_name": (c_char_p, c_int),
    "rfr_recipe_default": (rfr_recipe, c_int),
    "rfr_recipe_begin": (None, P, POINTER(rfr_recipe)),
    "rfr_recipe_end": (None, P),
    "rfr_input_at": (c_int32, *AT, c_char_p, c_int, c_int, c_int, POINTER(c_int64)),
    "rfr_output_at": (None, *AT, c_char_p, c_int32),
    "rfr_matmul_at": (c_int32, *AT, c_int32, c_int32, c_int32, c_int, c_int, c_int),
    "rfr_linear_at": (c_int32, *AT, c_int32, c_int32, c_int32),
    "rfr_embedding_at": (c_int32, *AT, c_int32, c_int32),
    "rfr_positions_at": (c_int32, *AT, c_int32, c_int64),
    "rfr_rope_at": (c_int32, *AT, c_int32, c_int32, c_double, POINTER(rfr_rope_scaling)),
    "rfr_layernorm_at": (c_int32, *AT, c_int32, c_int32, c_int32, c_double),
    "rfr_rmsnorm_at": (c_int32, *AT, c_int32, c_int32, c_double),
    "rfr_attention_at": (c_int32, *AT, c_int32, c_int32, c_int32, c_int32, POINTER(rfr_attention_options)),
    "rfr_add_at": (c_int32, *AT, c_int32, c_int32),
    "rfr_mul_at": (c_int32, *AT, c_int32, c_int32),
    "rfr_scale_at": (c_int32, *AT, c_int32, c_double, c_int32),
    "rfr_cast_at": (c_int32, *AT, c_int32, c_int),
    "rfr_copy_at": (c_int32, *AT, c_int32),
    "rfr_fill_at": (c_int32, *AT, c_double, c_int, c_int, POINTER(c_int64)),
    "rfr_gelu_at": (c_int32, *AT, c_int32, c_int),
    "rfr_silu_at": (c_int32, *AT, c_int32),
    "rfr_swiglu_at": (c_int32, *AT, c_int32, c_int32),
    "rfr_softcap_at": (c_int32, *AT, c_int32, c_double),
    "rfr_rng_stream_at": (c_int32, *AT, c_char_p),
    "rfr_dropout_at": (c_int32, *AT, c_int32, c_int32, c_double, c_int),
    "rfr_sum_at": (c_int32, *AT, c_int32, c_int),
    "rfr_mean_at": (c_int32, *AT, c_int32, c_int),
    "rfr_reshape_at": (c_int32, *AT, c_int32, c_int, POINTER(c_int64)),
    "rfr_transpose_at": (c_int32, *AT, c_int32, c_int, c_int),
    "rfr_slice_at": (c_int32, *AT, c_int32, c_int, c_int64, c_int64),
    "rfr_expand_at": (c_int32, *AT, c_int32, c_int, c_int64),
    "rfr_concat_at": (c_int32, *AT, c_int, VALUES, c_int),
    "rfr_detach_at": (c_int32, *AT, c_int32),
    "rfr_token_count_at": (c_int32, *AT, c_int, VALUES, c_int, VALUES),
    "rfr_cross_entropy_at": (c_int32, *AT, c_int32, c_int32, c_int32, c_int),
    "rfr_splits_to_offsets_at": (c_int32, *AT, c_int32, c_int64, VALUES),
    "rfr_grouped_linear_at": (c_int32, *AT, c_int32, c_int32, c_int32, c_int32, c_int32),
    "rfr_moe_options_default": (rfr_moe_options,),
    "rfr_moe_route_at": (c_int32, *AT, c_int32, c_int32, POINTER(rfr_moe_options), VALUES),
    "rfr_moe_sort_at": (c_int32, *AT, c_int32, c_int64, VALUES, VALUES),
    "rfr_moe_permute_at": (c_int32, *AT, c_int32, c_int32, c_int32, c_int32),
    "rfr_moe_unpermute_at": (c_int32, *AT, c_int32, c_int32, c_int32, c_int32),
    "rfr_microbatch": (None, P, c_int),
    "rfr_set_phase": (None, P, c_int),
    "rfr_gradient_at": (c_int32, *AT, c_int32, c_int32, c_int),
    "rfr_sgd_at": (c_int32, *AT, c_int32, c_int32, c_int32, c_int32, c_int32, c_int32, c_int32, c_double, c_double,
                   c_double),
    "rfr_all_gather_at": (c_int32, *AT, c_int32, c_int),
    "rfr_reduce_scatter_at": (c_int32, *AT, c_int32, c_int),
    "rfr_all_reduce_at": (c_int32, *AT, c_int32, c_int),
    "rfr_all_to_all_at": (c_int32, *AT, c_int32, c_int),
    "rfr_schedule_parse": (Status, P, c_char_p, c_char_p, c_size_t, OUT),
    "rfr_schedule_options_default": (rfr_schedule_options,),
    "rfr_schedule_kind_name": (c_char_p, c_int),
    "rfr_schedule_generate": (Status, P, POINTER(rfr_schedule_options), OUT),
    "rfr_schedule_destroy": (None, P),
    "rfr_schedule_set_layers": (Status, P, POINTER(c_int), c_int),
    "rfr_schedule_print": (Status, P, WriteFn, P),
    "rfr_schedule_slots": (c_int, P, c_int),
    "rfr_schedule_slot": (c_int, P, c_int, c_int),
    "rfr_callable_default": (rfr_callable,),
    "rfr_main_gradient_default": (rfr_main_gradient,),
    "rfr_graphs_options_default": (rfr_graphs_options,),
    "rfr_graphs_create": (Status, P, POINTER(rfr_callable), c_int, POINTER(rfr_graphs_options), OUT),
    "rfr_graphs_destroy": (None, P),
    "rfr_graphs_begin_step": (Status, P, POINTER(rfr_binding), c_int),
    "rfr_graphs_begin_evaluation": (Status, P, POINTER(rfr_binding), c_int),
    "rfr_graphs_forward": (Status, P, c_int, c_int, POINTER(rfr_binding), c_int, POINTER(rfr_tensor), c_int),
    "rfr_graphs_backward": (Status, P, c_int, c_int, POINTER(rfr_binding), c_int, POINTER(rfr_tensor), c_int),
    "rfr_graphs_wgrad": (Status, P, c_int, c_int),
    "rfr_graphs_expected": (Status, P, POINTER(rfr_action), POINTER(c_int)),
    "rfr_graphs_end_step": (Status, P),
    "rfr_graphs_abort_step": (Status, P),
    "rfr_graphs_changed": (Status, P),
    "rfr_graphs_wait": (Status, P),
    "rfr_graphs_set_stream": (Status, P, P),
    "rfr_graphs_tensor": (Status, P, c_char_p, POINTER(rfr_tensor)),
    "rfr_graphs_gradient": (Status, P, c_char_p, POINTER(rfr_tensor)),
    "rfr_graphs_write": (Status, P, POINTER(rfr_tensor), P),
    "rfr_graphs_read": (Status, P, POINTER(rfr_tensor), P),
    "rfr_graphs_get_rng": (Status, P, c_char_p, POINTER(rfr_rng)),
    "rfr_graphs_set_rng": (Status, P, c_char_p, POINTER(rfr_rng)),
    "rfr_graphs_get_memory": (Status, P, POINTER(rfr_graphs_memory)),
    "rfr_graphs_report": (c_char_p, P, c_int, c_char_p),
    "rfr_shard_name": (c_char_p, c_int),
    "rfr_compile_options_default": (rfr_compile_options,),
    "rfr_compile": (Status, P, c_int, POINTER(c_void_p), POINTER(c_char_p), POINTER(rfr_compile_options), OUT),
    "rfr_programs_destroy": (None, P),
    "rfr_programs_load": (Status, P),
    "rfr_programs_wait": (Status, P),
    "rfr_programs_tensor": (Status, P, c_char_p, POINTER(rfr_tensor)),
    "rfr_programs_read": (Status, P, POINTER(rfr_tensor), P),
    "rfr_programs_write": (Status, P, POINTER(rfr_tensor), P),
    "rfr_program_output": (Status, P, c_int, c_char_p, POINTER(rfr_tensor)),
    "rfr_program_run": (Status, P, c_int),
    "rfr_program_capture": (Status, P, c_int),
    "rfr_program_replay": (Status, P, c_int, POINTER(rfr_binding), c_int),
    "rfr_program_report": (c_char_p, P, c_int, c_char_p),
    "rfr_comm_threads_create": (Status, P, c_int, c_double, OUT),
    "rfr_comm_nccl_id": (Status, P, P),
    "rfr_comm_nccl_create": (Status, P, P, c_int, c_int, c_double, OUT),
    "rfr_comm_mpi_create": (Status, P, c_double, OUT),
    "rfr_comm_destroy": (None, P),
    "rfr_comm_abort": (None, P),
    "rfr_comm_set_timeout": (Status, P, c_double),
    "rfr_comm_size": (c_int, P),
    "rfr_comm_rank": (c_int, P),
    "rfr_comm_all_gather": (Status, P, P, P, c_int64, c_int),
    "rfr_comm_reduce_scatter": (Status, P, P, P, c_int64, c_int),
    "rfr_comm_all_reduce": (Status, P, P, P, c_int64, c_int),
    "rfr_comm_all_to_all": (Status, P, P, P, c_int64, c_int),
    "rfr_launch_read": (Status, POINTER(rfr_launch)),
    "rfr_launch_join": (Status, P, POINTER(rfr_launch), c_double, OUT),
    "rfr_launch_leave": (Status, P, P),
}


def _find() -> str:
    """The library of the wheel; REFRAIN_LIBRARY names another one."""
    named = os.environ.get("REFRAIN_LIBRARY")
    path = pathlib.Path(named) if named else pathlib.Path(__file__).parent / "lib" / ("librefrain.so." + VERSION)
    if not path.is_file():
        raise ImportError(f"{path} does not exist: set REFRAIN_LIBRARY to librefrain.so, or install the wheel and "
                          "import refrain outside of its source folder")
    return str(path)


def load() -> ctypes.CDLL:
    """Opens the library and declares its functions."""
    library = ctypes.CDLL(_find())
    library.rfr_version.restype = c_char_p
    found = library.rfr_version().decode()
    if not found.startswith(VERSION + "."):
        raise ImportError(f"librefrain has version {found}, this package needs {VERSION}")
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = [_WHOLE.get(a, a) for a in arguments]
    return library
