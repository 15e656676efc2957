# SPDX-License-Identifier: Apache-2.0
"""Training, fine-tuning and generation: docs/runs.md describes runs, docs/config.md the keys."""
from __future__ import annotations

import array
import codecs
import contextlib
import ctypes
import json
import threading
from dataclasses import dataclass, fields
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar, Union

from . import _abi
from ._core import (Context, Handle, InvalidError, Overrides, Path, RefrainError, add_run, collect, copy_fields,
                    create, lib, override_list, path_bytes, path_list, text)
from .ranks import Communicator, UsesCommunicator
from .text import ChatTemplate, Decoder, Messages, Tokenizer, ids_array, text_bytes

Config = Union[str, Mapping[str, Any]]
NO_TARGET = -100  # a target that gets no loss
_TRAIN, _EVALUATE, _GENERATE = 1, 2, 12  # RFR_RUN_...
_CONTEXT = 2048  # tokens of text that a model's folder is opened for


@dataclass(frozen=True)
class Watched:
    """Statistics of one value of run.watch in one step; the fields are those of rfr_watched."""

    name: str  # as `refrain plan --values` prints it
    elements: int
    nans: int
    infs: int
    mean: float  # of the finite elements, as those below
    rms: float
    largest: float  # magnitude
    smallest: float  # magnitude of those that are not 0
    zeros: float  # share of the elements


@dataclass(frozen=True)
class Event:
    """What a run reports; numbers that the kind does not have are 0. The fields are those of rfr_event."""

    kind: str  # "start", "metrics", "evaluation", "checkpoint", "watch", "warning", "end", ...
    message: str
    step: int  # attempted so far; metrics: the step's own number, from 1
    steps: int  # of the run
    loss: float  # nats per token; with preferences per pair
    bits_per_byte: float
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # of the step or the evaluation that have a loss
    skipped: int  # 1: no weight was updated
    seconds: float  # of the step, the evaluation or the checkpoint
    most_load: float  # tokens of the fullest expert, over the mean
    least_load: float
    seconds_left: float
    windows: int  # evaluated
    windows_planned: int
    windows_held_out: int
    margin: float  # mean reward margin of the pairs
    accuracy: float  # share of the pairs with a margin over 0
    layer_loads: Tuple[float, ...]  # most_load of each layer with experts
    rank: int
    watched: Tuple[Watched, ...]

    def __str__(self) -> str:
        """One line with the numbers that are not 0."""
        numbers = [f"{f.name} {value:.6g}" for f in fields(self)
                   if isinstance(value := getattr(self, f.name), (int, float)) and value != 0]
        return " ".join([self.kind] + [self.message] * bool(self.message) + numbers + [
            f"{w.name} rms {w.rms:.4g}" for w in self.watched])


@dataclass(frozen=True)
class RunInfo:
    """Sizes and counts of a run; the fields are those of rfr_run_info."""

    step: int  # attempted so far
    steps: int
    skipped: int  # attempted steps that updated no weight
    tokens_per_step: int
    parameters: int  # elements of the model, without those of an adapter
    adapter_parameters: int
    trainable_parameters: int  # of both
    experts: int  # of a layer; 0: none
    flops_per_step: float  # a multiply-add counts as two
    dtype: str  # of weights and activations: "f32", "bf16"
    train_tokens: int
    validation_tokens: int
    train_rows: int  # 0: the data is text
    validation_rows: int
    trained_tokens: int  # of train_tokens: those that get a loss
    train_windows: int  # of an epoch
    epochs: float
    window: int  # data.sequence, tokens
    vocab_size: int
    max_positions: int  # longest sequence of the model, tokens
    layers: int
    ranks: int
    model: str  # the configuration's, or ""
    data_hash: str
    checkpoint: str  # folder last written or loaded, or ""


@dataclass(frozen=True)
class Phase:
    """Steps of one size (batch.ramp); the fields are those of rfr_run_phase."""

    until: int  # the last step; 0: the last phase
    tokens: int  # of a step, over all ranks
    sequence: int  # tokens of a sequence


@dataclass(frozen=True)
class Evaluation:
    """The loss over all held-out data; the fields are those of rfr_evaluation."""

    loss: float  # nats per token; with preferences per pair
    bits_per_byte: float
    tokens: int  # that have a loss
    bytes: int  # of their text
    seconds: float
    windows: int  # evaluated, of windows_held_out
    windows_held_out: int
    pairs: int
    margin: float
    accuracy: float


@dataclass
class Window:
    """One window of a program's own data, to be filled. `tokens` and `targets` have `sequence` elements; NO_TARGET
    gets no loss. `documents` lists where documents begin. `position` is kept from window to window and across a
    resume."""

    validation: bool
    index: int
    sequence: int
    tokens: array.array[int]
    targets: array.array[int]
    documents: List[int]
    position: int


@dataclass
class Data:
    """Data that a program gives instead of files. fill(window) is called once per window, in order; a window must
    depend on its index or position alone. See rfr_data_source."""

    fill: Callable[[Window], object]
    name: Optional[str] = None
    train_windows: int = 0
    validation_windows: int = 0


EventFn = Callable[[Event], object]
Record = TypeVar("Record", Event, RunInfo, Evaluation, Phase, Watched)


def _record(cls: Type[Record], struct: ctypes.Structure, **given: object) -> Record:
    values = {**copy_fields(struct), **given}
    return cls(**{f.name: values[f.name] for f in fields(cls)})


def _fill(window: Any, fill: Callable[[Window], object]) -> int:
    """Gives the caller copies: nothing of the run's memory can be kept."""
    n, bytes_ = window.sequence, 4 * window.sequence
    tokens, targets = (array.array("i", ctypes.string_at(p, bytes_)) for p in (window.tokens, window.targets))
    documents = list(window.documents[: window.n_documents])
    view = Window(bool(window.validation), window.index, n, tokens, targets, documents, window.position)
    fill(view)
    for given, to in ((view.tokens, window.tokens), (view.targets, window.targets)):
        values = ids_array(given)
        if len(values) != n:
            raise InvalidError("invalid", "data.source", f"a window has {len(values)} tokens or targets, not {n}")
        ctypes.memmove(to, values, bytes_)
    if not 1 <= len(view.documents) <= n:
        raise InvalidError("invalid", "data.source", f"a window has {len(view.documents)} documents, not 1 to {n}")
    ctypes.memmove(window.documents, ids_array(view.documents), 4 * len(view.documents))
    window.n_documents = len(view.documents)
    window.position = view.position
    return 0


class _Options:
    """rfr_run_options with everything that it points to."""

    def __init__(self, context: Context, programs: int, overrides: Overrides, on_event: Optional[EventFn],
                 stop: Callable[[], None]) -> None:
        self.value = lib.rfr_run_options_default()
        self.value.programs = programs
        settings = override_list(overrides)
        self._settings = (ctypes.c_char_p * len(settings))(*settings)
        self.value.overrides, self.value.n_overrides = self._settings, len(settings)
        self._on_event = context.callback(_abi.EventFn, lambda e, _: self._report(e, on_event), None, stop)
        self.value.on_event = ctypes.cast(self._on_event, ctypes.c_void_p)

    @staticmethod
    def _report(address: int, on_event: Optional[EventFn]) -> None:
        # Without a function of the caller this still lets Python raise KeyboardInterrupt between steps.
        if on_event is not None:
            event = _abi.rfr_event.from_address(address)
            loads = tuple(event.layer_loads[: event.layers]) if event.layers else ()  # memory of the run
            watched = tuple(_record(Watched, event.watched[i]) for i in range(event.values))
            on_event(_record(Event, event, kind=text(lib.rfr_event_name(event.kind)), layer_loads=loads,
                             watched=watched))

    def set_data(self, context: Context, data: Data) -> None:
        fill = data.fill
        self._source = lib.rfr_data_source_default()
        self._fill = context.callback(
            _abi.WindowFn, lambda w, _: _fill(_abi.rfr_window.from_address(w), fill), 1)
        self._source.fill = ctypes.cast(self._fill, ctypes.c_void_p)
        self._source.name = data.name.encode() if data.name is not None else None
        self._source.train_windows = data.train_windows
        self._source.validation_windows = data.validation_windows
        self.value.data = ctypes.pointer(self._source)


class _Run(UsesCommunicator):
    """An open run."""

    _destroy_name = "rfr_run_close"

    def __init__(self, context: Optional[Context], device: Optional[str], threads: int) -> None:
        self._stop_lock = threading.RLock()
        super().__init__(context or Context(device, threads=threads), None)
        self._owned = None if context else self.context
        self._tokenizer: Optional[Tokenizer] = None
        self._template: Optional[ChatTemplate] = None
        add_run(self)

    def _start(self, config: Optional[bytes], folder: Optional[bytes], options: _Options) -> None:
        self._options = options
        try:
            self._pointer = create(self.context, lib.rfr_run_open, config, folder, ctypes.byref(options.value))
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Asks a train, evaluate or generate that runs now to end. From any thread, also from a callback."""
        self.stop_within(-1)

    def stop_within(self, seconds: float) -> None:
        """The same; does nothing if the run is being closed for so long. -1: waits."""
        if not self._stop_lock.acquire(timeout=seconds):  # not the context's: a call is running
            return
        try:
            if self._open and self._pointer is not None:
                lib.rfr_run_request_stop(self._pointer)
        finally:
            self._stop_lock.release()

    def _free(self) -> None:
        with self._stop_lock:
            super()._free()

    @property
    def info(self) -> RunInfo:
        """Sizes and counts of the run, as they are now."""
        info = _abi.rfr_run_info()
        info.size = ctypes.sizeof(info)

        def read(pointer: int) -> RunInfo:
            lib.rfr_run_get_info(pointer, ctypes.byref(info))
            return _record(RunInfo, info, dtype=text(lib.rfr_dtype_name(info.dtype)))

        found: RunInfo = self._call(read)
        return found

    @property
    def tokenizer(self) -> Optional[Tokenizer]:
        """The run's tokenizer, valid as long as the run; None: tokens are bytes."""
        if self._tokenizer is None:
            self._tokenizer = self._borrow(Tokenizer, lib.rfr_run_tokenizer)
        return self._tokenizer

    @property
    def template(self) -> Optional[ChatTemplate]:
        """The chat template, valid as long as the run."""
        if self._template is None:
            self._template = self._borrow(ChatTemplate, lib.rfr_run_template)
        return self._template

    def _borrow(self, cls: Type[Borrowed], function: Any) -> Optional[Borrowed]:
        pointer = self._call(function)
        if not pointer:
            return None
        handle = cls.__new__(cls)
        Handle.__init__(handle, self.context, pointer)
        handle._destroy_name = ""  # the run frees it
        return handle

    def close(self) -> None:
        for borrowed in (self._tokenizer, self._template):
            if borrowed is not None:
                borrowed.close()
        super().close()


Borrowed = TypeVar("Borrowed", Tokenizer, ChatTemplate)


class Trainer(_Run):
    """A training run: a configuration and a folder in, events and checkpoints out.

    config         text in YAML, or a mapping with the same keys; None with resume: that of the folder
    folder         of the run, created; None: nothing is written
    overrides      {"optimizer.lr": 1e-3} or ["optimizer.lr=1e-3"]
    resume         continue from the folder's newest checkpoint, or start
    strict         a resume on another machine, library or number of threads is an error
    eager          launch op by op instead of replay; bitwise equal
    debug          check every op for NaN and for writes past its buffers; slow
    on_event       called with each Event, on the thread that trains; its exception ends the run's call
    data           a program's own windows instead of files
    config_folder  where relative paths of `config` start; None: the working folder
    config_name    of the configuration in errors
    device         "cpu", "cuda", ...; None: REFRAIN_DEVICE, else the CPU; or a `context`
    threads        of a parallel op; 0: the cores that this process may use
    comm           this rank's communicator: every rank opens the same run, and makes the same calls in the same order

    Opening reads the data, plans and compiles. Raises InvalidError for the configuration or the data, with file and
    line; NoFitError if the plan exceeds memory.budget; RefrainError with the slugs "run.exists" and "run.busy" for a
    folder that has a run, or that another process trains in. One thread at a time uses a run, except stop.

        with refrain.Trainer(open("small.yaml").read(), "runs/first", on_event=print) as run:
            run.train()
    """

    def __init__(self, config: Optional[Config], folder: Optional[Path], *, overrides: Overrides = (),
                 resume: bool = False, strict: bool = False, eager: bool = False, debug: bool = False,
                 on_event: Optional[EventFn] = None, data: Optional[Data] = None, config_folder: Optional[Path] = None,
                 config_name: Optional[str] = None, device: Optional[str] = None, threads: int = 0,
                 context: Optional[Context] = None, comm: Optional[Communicator] = None) -> None:
        super().__init__(context, device, threads)
        options = _Options(self.context, _TRAIN | _EVALUATE, overrides, on_event, self.stop)
        options.value.resume, options.value.strict = resume, strict
        options.value.eager, options.value.debug = eager, debug
        options.value.config_folder = path_bytes(config_folder) if config_folder is not None else None
        options.value.config_name = config_name.encode() if config_name is not None else None
        if data is not None:
            options.set_data(self.context, data)
        options.value.comm = self._use(comm)
        self._start(_config_bytes(config), path_bytes(folder) if folder is not None else None, options)

    def step(self) -> None:
        """One step; its metrics come as an event."""
        self._call(lib.rfr_run_step)

    def train(self) -> None:
        """Steps until the run's end, with evaluations and checkpoints as configured. Raises Stopped after stop()."""
        self._call(lib.rfr_run_train)

    def evaluate(self) -> Evaluation:
        """The loss over all held-out data. Raises RefrainError with the slug "data.held_out" if there are none."""
        out = _abi.rfr_evaluation()
        self._call(lib.rfr_run_evaluate, ctypes.byref(out))
        return _record(Evaluation, out)

    @property
    def phases(self) -> List[Phase]:
        """The phases of the run in the order of their steps; without batch.ramp there is one."""
        found: List[Phase] = []
        phase = _abi.rfr_run_phase()
        phase.size = ctypes.sizeof(phase)
        while not found or found[-1].until > 0:
            self._call(lib.rfr_run_phase_at, len(found), ctypes.byref(phase))
            found.append(_record(Phase, phase))
        return found

    def row(self, row: int) -> List[Tuple[str, bool]]:
        """The text of a training row, from 0 to info.train_rows - 1, in pieces: each with True if its tokens have a
        loss. Special tokens are included, as in `refrain check`. Raises InvalidError without such a row, and for data
        that is text."""
        pieces: List[Tuple[bytes, bool]] = []
        take = self.context.callback(_abi.SampleFn, lambda data, n, trained, _: pieces.append((data[:n], trained != 0)),
                                     None)
        self._call(lib.rfr_run_data_row, row, take, None)
        return [(text(piece), trained) for piece, trained in pieces]

    def save(self) -> str:
        """Writes a checkpoint now and returns its folder."""
        self._call(lib.rfr_run_save)
        return self.info.checkpoint


def _config_bytes(config: Optional[Config]) -> Optional[bytes]:
    if config is None or isinstance(config, str):
        return None if config is None else text_bytes(config)
    return json.dumps(dict(config)).encode()  # YAML reads JSON


def finetune(model: Path, data: Union[Path, Sequence[Path]], folder: Path, *, overrides: Overrides = (),
             on_event: Optional[EventFn] = None, device: Optional[str] = None, threads: int = 0) -> RunInfo:
    """Trains an adapter of a model on rows, as `refrain finetune` does, and returns the finished run's numbers.

    model      a Hugging Face folder or a GGUF file
    data       JSONL files or patterns of them
    folder     of the run; pass it to Model, export, or Trainer(None, folder, resume=True)
    overrides  {"run.epochs": 1, "adapter.rank": 8}
    on_event   print prints a line for each step, evaluation and checkpoint

    Raises the errors of Trainer.
    """
    raw = path_list(data)
    with Context(device, threads=threads) as context:
        options = _Options(context, _TRAIN | _EVALUATE, overrides, on_event, lambda: None)
        config = collect(context, lib.rfr_finetune_config, path_bytes(model), (ctypes.c_char_p * len(raw))(*raw),
                         len(raw), ctypes.byref(options.value))
        with Trainer(config.decode(), folder, overrides=overrides, on_event=on_event, config_name="finetune",
                     context=context) as run:
            run.train()
            return run.info


class Model(_Run):
    """A model that writes text: `path` is a run, a checkpoint, a Hugging Face folder or a GGUF file.

    sequence  limits the context in tokens; None: 2048, or less if the model has less
    ema       the averaged weights of a checkpoint (optimizer.ema) instead of the trained ones
    texts     that generate_batch continues at once, 1 to 64; each has its own caches

        with refrain.Model("runs/chat") as model:
            print(model.generate([{"role": "user", "content": "Hello"}]))
    """

    def __init__(self, path: Path, *, sequence: Optional[int] = None, overrides: Overrides = (),
                 on_event: Optional[EventFn] = None, device: Optional[str] = None, threads: int = 0,
                 context: Optional[Context] = None, ema: bool = False, texts: int = 1) -> None:
        super().__init__(context, device, threads)
        settings = [s.decode() for s in override_list(overrides)]
        if sequence is not None:
            settings += [f"data.sequence={sequence}", f"batch.tokens={sequence}", "batch.microbatch=1"]
        options = _Options(self.context, _GENERATE, settings, on_event, self.stop)
        options.value.ema, options.value.texts = int(ema), texts
        raw = path_bytes(path)
        try:
            self._start_run(raw, options)
        except BaseException:
            self.close()
            raise

    def _start_run(self, raw: bytes, options: _Options) -> None:
        self._options = options
        value = ctypes.byref(options.value)
        config: Optional[bytes] = None
        try:
            self._pointer = create(self.context, lib.rfr_run_open, None, raw, value)
            return
        except RefrainError as error:
            # The folder of a model, or a GGUF file.
            if error.slug not in ("run.folder", "file.open", "file.read"):
                raise
            try:
                config = collect(self.context, lib.rfr_model_run_config, raw, _CONTEXT, value)
            except RefrainError:
                raise error from None
        self._pointer = create(self.context, lib.rfr_run_open, config, None, value)

    def generate(self, prompt: Union[str, Sequence[int], Messages], *, tokens: int = 256, temperature: float = 0.8,
                 top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int = 0,
                 stop: Optional[Sequence[int]] = None, on_text: Optional[Callable[[str], object]] = None) -> str:
        """Continues a text, or answers a conversation, and returns the new text.

        prompt       text, token ids, or messages, which go through the model's chat template
        tokens       at most
        temperature  0 takes the most probable token
        top_k        sample from the k most probable tokens; 0: all
        top_p        sample from the smallest set of most probable tokens that sums to top_p; 1: all
        min_p        sample from tokens with at least min_p times the probability of the most probable one
        repetition_penalty  divides the positive logits of tokens in the text, multiplies the negative ones; 1: none
        seed         of the draws: the same seed, weights and machine give the same text
        stop         token ids that end the text; None: those of the model
        on_text      called with each piece of text as soon as it is complete; True ends the text

        A text longer than the context continues from its second half. Raises InvalidError for an empty prompt or a
        token that is not in the vocabulary.
        """
        messages = _is_messages(prompt)
        ids = self._ids(prompt, messages)
        options = self._draws(messages, tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop)
        options.seed = seed
        with _Writer(self.tokenizer, on_text) as writer:
            take = self.context.callback(_abi.TokenFn, lambda token, _: writer.take(token), 1)
            self._call(lib.rfr_run_generate_tokens, ids_array(ids), len(ids), ctypes.byref(options), take, None)
            return writer.end()

    def generate_batch(self, prompts: Sequence[Union[str, Sequence[int], Messages]], *, tokens: int = 256,
                       temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
                       repetition_penalty: float = 1.0, seed: int = 0, stop: Optional[Sequence[int]] = None
                       ) -> List[str]:
        """Continues many prompts, `texts` of the Model at a time, and returns their texts in order. Prompt i draws with
        the seed `seed` + i, so that its text is that of generate with this seed, within rounding."""
        if not prompts:
            return []
        ids = [ids_array(self._ids(p, _is_messages(p))) for p in prompts]
        options = self._draws(any(map(_is_messages, prompts)), tokens, temperature, top_k, top_p, min_p,
                              repetition_penalty, stop)
        batch = (_abi.rfr_prompt * len(ids))()
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(_Writer(self.tokenizer, None)) for _ in ids]
            take = self.context.callback(_abi.TokenFn, lambda token, i: writers[i or 0].take(token), 1)
            for i, prompt in enumerate(batch):
                prompt.tokens, prompt.n, prompt.seed, prompt.user = ids[i], len(ids[i]), seed + i, i
                prompt.take = ctypes.cast(take, ctypes.c_void_p)
            self._call(lib.rfr_run_generate_batch, batch, len(ids), ctypes.byref(options))
            return [writer.end() for writer in writers]

    def _draws(self, messages: bool, tokens: int, temperature: float, top_k: int, top_p: float, min_p: float,
               repetition_penalty: float, stop: Optional[Sequence[int]]) -> Any:
        if stop is None:
            stop = self.tokenizer.stops(self.template if messages else None) if self.tokenizer else []
        options = lib.rfr_generate_options_default()
        options.tokens, options.temperature, options.top_k, options.top_p = tokens, temperature, top_k, top_p
        options.min_p, options.repetition_penalty = min_p, repetition_penalty
        stops = ids_array(stop)
        options.stop, options.n_stop = stops, len(stops)
        return options

    def _ids(self, prompt: Any, messages: bool) -> List[int]:
        tokenizer = self.tokenizer
        if messages:
            template = self.template
            if tokenizer is None or template is None:
                raise InvalidError("invalid", "chat.template", "the model has no tokenizer or no chat template",
                                   "pass text, or render the messages with ChatTemplate(\"chatml\")")
            return template.encode(tokenizer, prompt, add_generation_prompt=True)
        if not isinstance(prompt, str):
            return list(prompt)
        return tokenizer.encode(prompt, add_special=True) if tokenizer else list(text_bytes(prompt))

    def score(self, ids: Sequence[int]) -> array.array[float]:
        """The logits after each of the tokens, vocab_size numbers for each: those of row i predict the token after
        ids[0..i]."""
        logits = array.array("f", bytes(4 * len(ids) * self.info.vocab_size))
        memory = (ctypes.c_float * len(logits)).from_buffer(logits) if logits else None
        self._call(lib.rfr_run_score, ids_array(ids), len(ids), memory)
        return logits


def _is_messages(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


class _Bytes:
    """A Decoder for a model whose tokens are bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes((token,)))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)

    def close(self) -> None:
        pass


class _Writer:
    """The text of the tokens that a model draws."""

    def __init__(self, tokenizer: Optional[Tokenizer], on_text: Optional[Callable[[str], object]]) -> None:
        self._decoder: Union[Decoder, _Bytes] = Decoder(tokenizer) if tokenizer else _Bytes()
        self._pieces: List[str] = []
        self._on_text = on_text

    def _put(self, piece: str) -> int:
        self._pieces.append(piece)
        return 1 if piece and self._on_text is not None and self._on_text(piece) is True else 0

    def take(self, token: int) -> int:
        return self._put(self._decoder.add(token))

    def end(self) -> str:
        self._put(self._decoder.end())
        return "".join(self._pieces)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._decoder.close()


def generate(path: Path, prompt: Union[str, Sequence[int], Messages], *, device: Optional[str] = None,
             ema: bool = False, **options: Any) -> str:
    """Opens a model, writes one text and closes it; `options` are those of Model.generate, `ema` is that of Model."""
    with Model(path, device=device, ema=ema) as model:
        return model.generate(prompt, **options)


def export(model: Path, out: Path, *, format: str = "hf", dtype: Optional[str] = None, ema: bool = False) -> None:
    """Writes a model for another program: "hf", "gguf", or an adapter alone as "peft" or "gguf-lora". With `ema` the
    averaged weights of a checkpoint."""
    options = lib.rfr_export_options_default()
    options.format = format.encode()
    options.dtype = dtype.encode() if dtype is not None else None
    options.ema = int(ema)
    with Context("cpu") as context:
        context.call(lambda: lib.rfr_export(context.pointer, path_bytes(model), path_bytes(out),
                                            ctypes.byref(options)))
