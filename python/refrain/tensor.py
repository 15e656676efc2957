# SPDX-License-Identifier: Apache-2.0
"""Memory in and out: DLPack, and objects with the buffer protocol.

A tensor that is passed in is borrowed: a Borrowed keeps its owner. A Tensor that is handed out keeps the object that
owns its memory until the last consumer has released it, also after that object was closed.
"""
from __future__ import annotations

import ctypes
import struct
from ctypes import c_char_p, c_void_p, py_object
from typing import Any, Dict, Optional, Protocol, Sequence, Tuple

from . import _abi
from ._core import ClosedError, Handle, InvalidError, lib, text

_CUDA = 2  # kDLCUDA
_NAME = b"dltensor_versioned"
_FLAGS, _READ_ONLY = 24, 1  # of DLManagedTensorVersioned: offset of its flags; DLPACK_FLAG_BITMASK_READ_ONLY
_FORMATS = {"f": "f32", "d": "f64", "i": "i32", "q": "i64", "l": "i64", "B": "u8", "?": "bool", "e": "f16"}

_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", _api))
_get = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, py_object, c_char_p)(("PyCapsule_IsValid", _api))
# In a destructor the capsule has no references left: it is passed as an address.
_is_unused = ctypes.PYFUNCTYPE(ctypes.c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", _api))
_address = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", _api))


class SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: Optional[int] = ..., max_version: Optional[Tuple[int, int]] = ...) -> Any: ...

    def __dlpack_device__(self) -> Tuple[int, int]: ...


def dtype_number(name: str) -> int:
    number = int(lib.rfr_dtype_parse(name.encode()))
    if text(lib.rfr_dtype_name(number)) != name:
        raise InvalidError("invalid", "argument", f"there is no type {name!r}", "f32, bf16, f16, i32, ...")
    return number


def type_struct(dtype: str, shape: Sequence[int]) -> _abi.rfr_type:
    if len(shape) > 6:
        raise InvalidError("invalid", "tensor", f"a shape of {len(shape)} dimensions; at most 6")
    out = _abi.rfr_type()
    out.dtype, out.rank = dtype_number(dtype), len(shape)
    out.shape[: len(shape)] = list(shape)
    return out


# ---- in ----


class Memory:
    """An argument whose address is known, without DLPack: its `owner` keeps the memory."""

    def __init__(self, owner: Any, type: _abi.rfr_type, address: int, host: bool) -> None:
        self.owner = owner
        self.struct = _abi.rfr_tensor()
        self.struct.type, self.struct.data, self.struct.host = type, address, host


class Borrowed:
    """Memory of an argument, with its owner."""

    def __init__(self, value: Any, device: str, stream: Optional[int] = None, *, writable: bool = False) -> None:
        self.tensor = _abi.rfr_tensor()
        self._writable = writable
        self.owner: Any = None
        if isinstance(value, Tensor):
            value._require_open()
            self.owner, self.tensor = value, value.struct
        elif isinstance(value, Memory):
            self.owner, self.tensor = value.owner, value.struct
        elif hasattr(value, "__dlpack__"):
            self._from_dlpack(value, stream)
        else:
            self._from_buffer(value)
        if not self.tensor.host and not device.startswith("cuda"):
            raise InvalidError("invalid", "tensor", f"memory of a GPU for graphs on the device {device}",
                               "move the tensor, or make the graphs with Context(\"cuda\")")

    def _from_dlpack(self, value: Any, stream: Optional[int]) -> None:
        if hasattr(value, "detach"):
            value = value.detach()  # a tensor that requires a gradient refuses to be exported
        if value.__dlpack_device__()[0] != _CUDA:
            stream = None  # of the CPU: there is none
        capsule = value.__dlpack__(stream=stream, max_version=(1, 1))
        if not _is_valid(capsule, _NAME):
            raise InvalidError("invalid", "tensor", f"{type(value).__name__} exports DLPack of a version before 1.0",
                               "use a newer version of the library that it is from")
        self.owner = capsule  # not consumed: its destructor releases the memory
        managed = _get(capsule, _NAME)
        lib.rfr_tensor_from_dlpack(managed, ctypes.byref(self.tensor))
        if self._writable and ctypes.c_uint64.from_address(managed + _FLAGS).value & _READ_ONLY:
            raise InvalidError("invalid", "tensor", f"{type(value).__name__} cannot be written")

    def _from_buffer(self, value: Any) -> None:
        try:
            view = memoryview(value)
        except TypeError:
            raise InvalidError("invalid", "tensor", f"{type(value).__name__} is no tensor",
                               "pass an object with __dlpack__, or an array") from None
        if not view.c_contiguous or view.format not in _FORMATS:
            raise InvalidError("invalid", "tensor", f"a buffer of format {view.format!r} that has no equal here, or "
                               "is not contiguous")
        if self._writable and view.readonly:
            raise InvalidError("invalid", "tensor", f"{type(value).__name__} cannot be written")
        count = view.nbytes
        memory = (ctypes.c_char * count).from_buffer(view) if not view.readonly else ctypes.create_string_buffer(
            view.tobytes(), count)
        self.owner = (view, memory)
        self.tensor.type = type_struct(_FORMATS[view.format], view.shape or ())
        self.tensor.bytes, self.tensor.host = count, 1
        self.tensor.data = ctypes.addressof(memory) if count else None

    def binding(self, name: Optional[str] = None) -> _abi.rfr_binding:
        out = _abi.rfr_binding()
        out.name = name.encode() if name is not None else None
        out.type, out.data = self.tensor.type, self.tensor.data
        return out


# ---- out ----

_exports: Dict[int, Handle] = {}  # consumers that hold memory, by the address that their deleter passes back
_next = 0


def _release(user: Optional[int], exports: Dict[int, Handle] = _exports) -> None:
    owner = exports.pop(user or 0, None)
    if owner is not None:
        owner._release()


def _destroy_capsule(capsule: int, is_unused: Any = _is_unused, address: Any = _address,
                     name: bytes = _NAME, deleter: Any = _abi.DeleterFn) -> None:
    if is_unused(capsule, name):  # a consumer renames the capsule, and calls the deleter itself
        managed = address(capsule, name)
        deleter(c_void_p.from_address(managed + 16).value)(managed)


_release_fn = _abi.ReleaseFn(_release)
_destroy_fn = _abi.CapsuleFn(_destroy_capsule)
for _forever in (_release_fn, _destroy_fn):  # a consumer may outlive this module
    _api.Py_IncRef(py_object(_forever))


class Tensor:
    """Memory of graphs or programs: a parameter, a gradient, an output. torch.from_dlpack and others read it without a
    copy.

    docs/graphs.md says how long its values are valid; the memory stays as long as a consumer has it."""

    def __init__(self, owner: Handle, struct: _abi.rfr_tensor, stream: Optional[int] = None) -> None:
        self.owner, self.struct, self._stream = owner, struct, stream
        self.name = text(struct.name)
        self.dtype = text(lib.rfr_dtype_name(struct.type.dtype))
        self.shape: Tuple[int, ...] = tuple(struct.type.shape[: struct.type.rank])
        self.nbytes = int(struct.bytes)

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {self.shape})"

    def _require_open(self) -> None:
        if self.owner.closed:
            raise ClosedError("invalid", "python.closed", f"the memory of {self!r} is closed")

    def _function(self, name: str) -> Any:
        """The owner's function: rfr_graphs_read, ..."""
        return getattr(lib, f"{self.owner._tensor_prefix}_{name}")

    def read(self) -> bytes:
        """A copy of the bytes, from any device."""
        out = ctypes.create_string_buffer(self.nbytes)
        self.owner._call(self._function("read"), ctypes.byref(self.struct), out)
        return out.raw

    def write(self, data: Any) -> None:
        """Copies the bytes of an array, or of `bytes`, into the tensor."""
        view = memoryview(data)
        if view.nbytes != self.nbytes:
            raise InvalidError("invalid", "tensor", f"{view.nbytes} bytes for {self!r}, which has {self.nbytes}")
        self.owner._call(self._function("write"), ctypes.byref(self.struct), view.tobytes())

    def tolist(self) -> Any:
        """The elements as nested lists; for f64, f32, f16 and the integers."""
        formats = {dtype: code for code, dtype in _FORMATS.items() if code != "l"}
        if self.dtype not in formats:
            raise InvalidError("invalid", "tensor", f"{self.dtype} has no Python form", "use torch.from_dlpack")
        code = formats[self.dtype]
        flat = list(struct.unpack(f"={self.nbytes // struct.calcsize(code)}{code}", self.read()))
        for n in reversed(self.shape[1:]):
            flat = [flat[i : i + n] for i in range(0, len(flat), n)] if n else []
        return flat

    def __dlpack_device__(self) -> Tuple[int, int]:
        if self.struct.host:
            return (1, 0)
        number = self.owner.context.device.partition(":")[2]
        return (_CUDA, int(number or 0))

    def __dlpack__(self, *, stream: Optional[int] = None, max_version: Optional[Tuple[int, int]] = None,
                   dl_device: Optional[Tuple[int, int]] = None, copy: Optional[bool] = None) -> Any:
        """A capsule for a consumer. The work that writes the tensor precedes the consumer's in its stream."""
        global _next
        if max_version is None or max_version[0] < 1:
            raise BufferError("a consumer of DLPack before 1.0; use a newer version of it")
        if copy or (dl_device is not None and dl_device != self.__dlpack_device__()):
            raise BufferError("a view only: copy it, or move it, after the import")
        if not self.struct.host and stream != -1 and (self._stream is None or stream != self._stream):
            self.owner._call(self._function("wait"))
        out = ctypes.c_void_p()
        with self.owner.context._lock:
            self._require_open()
            _next += 1
            _exports[_next] = self.owner
            self.owner._retain()
            try:
                lib.rfr_tensor_to_dlpack(self.owner.context.pointer, ctypes.byref(self.struct), _release_fn, _next,
                                         ctypes.byref(out))
            except BaseException:
                _release(_next)
                raise
        return _new(out.value, _NAME, ctypes.cast(_destroy_fn, c_void_p))
