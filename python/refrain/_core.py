# SPDX-License-Identifier: Apache-2.0
"""Errors, handles and the context.

Every call into the library goes through Context.call, which keeps three promises: one thread at a time uses a context
(others wait, without the GIL), a callback cannot enter the context that called it, and an exception of a callback is
raised from the call that ran it.
"""
from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
import time
import weakref
from types import TracebackType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Type, TypeVar, Union

from . import _abi

lib = _abi.load()
Path = Union[str, "os.PathLike[str]"]
Overrides = Union[Mapping[str, object], Sequence[str]]


# ---- errors ----


class RefrainError(Exception):
    """A call of the library failed.

    status   the kind: "invalid", "no fit", ...
    slug     stable, for programs: "plan.over_budget"; docs/errors.md lists all
    message  place, what, numbers
    next     one next step
    file     the file that the error is about, or ""
    line     the line in it, from 1, or 0
    """

    def __init__(self, status: str, slug: str, message: str, next: str = "", file: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.status, self.slug, self.message, self.next, self.file, self.line = status, slug, message, next, file, line

    def __str__(self) -> str:
        return f"{self.message} [{self.slug}]" + (f"\n{self.next}" if self.next else "")


class InvalidError(RefrainError, ValueError):
    """An argument, a configuration or a file is wrong."""


class NoMemoryError(RefrainError, MemoryError):
    """An allocation failed, or a limit of bytes was reached."""


class NoFitError(RefrainError):
    """The planned memory exceeds the budget."""


class FileError(RefrainError):
    """The operating system refused a read or a write."""


class UnsupportedError(RefrainError):
    """Valid, but this build or device cannot do it."""


class MismatchError(RefrainError):
    """A call does not match the compiled state, or a resume the stored one."""


class NumericError(RefrainError, ArithmeticError):
    """A value that must be finite is not."""


class Stopped(RefrainError):
    """A stop was requested; the work so far is saved and resumable."""


class InternalError(RefrainError):
    """A defect of the library."""


class ClosedError(RefrainError, ValueError):
    """A handle was used after it was closed."""


class ReentryError(RefrainError, RuntimeError):
    """A callback called the context that runs it."""


_KINDS: List[Type[RefrainError]] = [InvalidError, NoMemoryError, NoFitError, FileError, UnsupportedError, MismatchError,
                                    NumericError, Stopped, InternalError]  # in the order of rfr_status, from 1


def text(raw: Optional[bytes]) -> str:
    return raw.decode("utf-8", "replace") if raw else ""


def last_error() -> RefrainError:
    """The thread's last error of the library as an exception."""
    e: _abi.rfr_error = lib.rfr_last_error().contents
    return _KINDS[e.status - 1](text(lib.rfr_status_name(e.status)), text(e.slug), text(e.message), text(e.next),
                                os.fsdecode(e.file or b""), e.line)


def _check(result: Any, function: Any, arguments: Any) -> None:
    if result.value != 0:
        raise last_error()


for _name, (_result, *_) in _abi.FUNCTIONS.items():
    if _result is _abi.Status:
        getattr(lib, _name).errcheck = _check


# ---- the context ----


class Context:
    """Threads, device and log of everything that is made with it.

    device   "cpu", "cuda" (the first GPU), "cuda:1"; None: REFRAIN_DEVICE, else the CPU
    threads  of a parallel op; 0: the cores that this process may use
    log      called with a level (0 debug, 1 info, 2 warning) and a line

    One thread at a time uses a context; calls of other threads wait. Contexts are independent.
    """

    def __init__(self, device: Optional[str] = None, *, threads: int = 0, byte_limit: int = 0,
                 log: Optional[Callable[[int, str], object]] = None) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._pending: Optional[BaseException] = None
        self._later: List[Callable[[], None]] = []  # destroyed in a callback, to be freed after the call
        self._pointer: Optional[int] = None
        options = lib.rfr_ctx_options_default()
        if device is not None:
            options.device = device.encode()
        if threads:
            options.threads = threads
        options.byte_limit = byte_limit
        if log is not None:
            sink = log
            self._log = self.callback(_abi.LogFn, lambda level, line, _: sink(level, text(line)), None)
            options.log = ctypes.cast(self._log, ctypes.c_void_p)
        out = ctypes.c_void_p()
        with _exit_lock:
            _contexts.add(self)
        with self._lock:
            _check_end()
            lib.rfr_ctx_create(ctypes.byref(options), ctypes.byref(out))
        self._pointer = out.value
        self.device: str = text(options.device) or "cpu"

    @property
    def pointer(self) -> int:
        if self._pointer is None:
            raise ClosedError("invalid", "python.closed", "the context is closed")
        return self._pointer

    def call(self, function: Any, *arguments: Any) -> Any:
        """Calls the library with the context to itself."""
        with self._lock:
            _check_end()
            if self._depth > 0:
                raise ReentryError("invalid", "python.callback", "a callback called the context that runs it",
                                   "return from the callback first, or use another context")
            self._depth += 1
            try:
                return function(*arguments)
            finally:
                self._depth -= 1
                self._free_later()
                if self._pending is not None:
                    pending, self._pending = self._pending, None
                    raise pending

    def callback(self, kind: Any, function: Callable[..., Any], failed: Any,
                 on_error: Optional[Callable[[], None]] = None) -> Any:
        """A C function that calls `function`. Its exception is raised by the call of the library that runs it, which
        gets `failed` as the result."""

        def run(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except BaseException as error:  # also KeyboardInterrupt: nothing may pass through C
                if self._pending is None:
                    self._pending = error
                if on_error is not None:
                    on_error()
                return failed

        return kind(run)

    def later(self, function: Callable[[], None]) -> None:
        """Runs a function that frees: now, or after the call that uses the context. Never waits, so that the garbage
        collector may run on any thread."""
        if not self._lock.acquire(blocking=False):
            self._later.append(function)
            return
        try:
            self._later.append(function)
            if self._depth == 0 and not _is_late():
                self._free_later()
        finally:
            self._lock.release()

    def _free_later(self) -> None:
        while self._later:
            self._later.pop(0)()

    def close(self) -> None:
        """Ends the use of the context. Objects that were made with it stay open."""
        with self._lock:
            pointer, self._pointer = self._pointer, None
            if pointer is not None:
                self.later(lambda: lib.rfr_ctx_destroy(pointer))

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:  # no handle and no call refers to it any more
        if not sys.is_finalizing() and getattr(self, "_pointer", None) is not None:
            lib.rfr_ctx_destroy(self._pointer)


# ---- the end of the interpreter ----

_EXIT_SECONDS = 10.0
_contexts: "weakref.WeakSet[Context]" = weakref.WeakSet()
_runs: "weakref.WeakSet[Any]" = weakref.WeakSet()  # calls of a run may take long, but `stop_within` ends them
_exit_lock = threading.Lock()  # of the two sets
_ended = False


def add_run(run: Any) -> None:
    with _exit_lock:
        _runs.add(run)


def _is_late() -> bool:
    return _ended and threading.current_thread() is not threading.main_thread()


def _check_end() -> None:
    """A call of another thread while the interpreter ends: ends the thread, silently."""
    if _is_late():
        raise SystemExit


def _end_calls() -> None:
    """Waits for the calls of daemon threads, because a callback after the end of the interpreter would crash the
    process. Threads that begin a call later end."""
    global _ended
    end = time.monotonic() + _EXIT_SECONDS
    with _exit_lock:
        _ended = True
        runs, contexts = list(_runs), list(_contexts)
    for run in runs:
        run.stop_within(max(0.0, end - time.monotonic()))
    for context in contexts:
        if context._lock.acquire(timeout=max(0.0, end - time.monotonic())):
            context._lock.release()


atexit.register(_end_calls)


# ---- handles ----

Self = TypeVar("Self", bound="Handle")


class Handle:
    """An object of the library. Close it, or use it in a `with` statement; a closed handle refuses every call.

    Memory that was handed out (DLPack) keeps the object: it is freed after the last consumer has released it."""

    _destroy_name = ""
    _tensor_prefix = ""  # of the functions that read and write its tensors

    def __init__(self, context: Context, pointer: Optional[int], owned: Optional[Context] = None) -> None:
        self.context = context
        self._pointer = pointer
        self._owned = owned  # a context of this handle alone
        self._exports = 0
        self._open = True

    @property
    def pointer(self) -> int:
        if not self._open or self._pointer is None:
            raise ClosedError("invalid", "python.closed", f"the {type(self).__name__} is closed")
        return self._pointer

    @property
    def closed(self) -> bool:
        return not self._open

    def _call(self, function: Any, *arguments: Any) -> Any:
        """function(handle, *arguments), refused after close."""

        def run() -> Any:
            return function(self.pointer, *arguments)

        return self.context.call(run)

    def _retain(self) -> None:
        self._exports += 1

    def _release(self) -> None:
        self.context.later(self._drop)

    def _drop(self) -> None:
        self._exports -= 1
        self._free()

    def _free(self) -> None:
        if self._open or self._exports > 0 or self._pointer is None:
            return
        pointer, self._pointer = self._pointer, None
        if self._destroy_name:
            destroy = getattr(lib, self._destroy_name)
            self.context.later(lambda: destroy(pointer))
        if self._owned is not None:
            self._owned.close()

    def close(self) -> None:
        """Frees the object. Twice is allowed."""
        with self.context._lock:
            self._open = False
            self._free()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_open", False):
            self._open = False
            self.context.later(self._free)


# ---- arguments ----


def create(context: Context, function: Any, *arguments: Any) -> int:
    """Calls a function that takes the context first and an `out` pointer last."""
    out = ctypes.c_void_p()
    context.call(lambda: function(context.pointer, *arguments, ctypes.byref(out)))
    if out.value is None:
        raise InternalError("internal", "python.handle", "the library returned no handle")
    return out.value


def collect(context: Context, function: Any, *arguments: Any) -> bytes:
    """Calls a function that takes the context first, and a writer and its user last."""
    pieces: List[bytes] = []
    writer = context.callback(_abi.WriteFn, lambda data, n, _: pieces.append(data[:n]), None)
    context.call(lambda: function(context.pointer, *arguments, writer, None))
    return b"".join(pieces)


def path_bytes(path: Path) -> bytes:
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise InvalidError("invalid", "argument", f"the path {path!r} has a NUL character")
    return raw


def path_list(paths: Union[Path, Sequence[Path]]) -> List[bytes]:
    """One path or several."""
    return [path_bytes(p) for p in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]


def _setting(value: object, inside: bool = False) -> str:
    """A value as YAML. A text stays as it is, as with --set; `inside` a list or a map it is quoted: "*" starts no text
    in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_setting(v, True) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_setting(k, True)}: {_setting(v, True)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if inside and isinstance(value, str) else str(value)


def override_list(overrides: Overrides) -> List[bytes]:
    """The settings as KEY=VALUE."""
    if isinstance(overrides, Mapping):
        return [f"{key}={_setting(value)}".encode() for key, value in overrides.items()]
    return [s.encode() for s in overrides]


def copy_fields(struct: ctypes.Structure) -> Dict[str, Any]:
    """A struct's fields as Python values: text decoded, without `size`."""
    names = [field[0] for field in struct._fields_ if field[0] != "size"]
    values = {name: getattr(struct, name) for name in names}
    return {n: text(v) if v is None or isinstance(v, bytes) else v for n, v in values.items()}


def version() -> str:
    """The library's version, "major.minor.patch"."""
    return text(lib.rfr_version())
