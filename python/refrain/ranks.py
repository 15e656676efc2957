# SPDX-License-Identifier: Apache-2.0
"""Ranks: communicators of threads, MPI processes and GPUs, and the ranks of a launcher. include/refrain/dist.h has the
rules.

A call waits for the other ranks. It does not hold the lock of a context, so ranks that are threads of one process wait
for each other without the GIL.
"""
from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any, List, Optional

from . import _abi
from ._core import Context, Handle, InvalidError, create, lib, text
from .tensor import Borrowed

_NCCL_ID_BYTES = 128


@dataclass(frozen=True)
class Launch:
    """This process as its launcher describes it (mpirun, srun, torchrun): rank 0 of 1 without one."""

    launcher: str
    rank: int
    ranks: int
    local_rank: int
    address: str
    port: int


def _read_launch() -> _abi.rfr_launch:
    out = _abi.rfr_launch()
    out.size = ctypes.sizeof(out)
    lib.rfr_launch_read(ctypes.byref(out))
    return out


def launch() -> Launch:
    """Reads the environment. Raises RefrainError with the slug "dist.launch", which names the variable."""
    found = _read_launch()
    return Launch(text(found.launcher), found.rank, found.ranks, found.local_rank, text(found.address), found.port)


class Communicator(Handle):
    """The handle of one rank, for Trainer, Graphs and Programs, and for collectives between their calls. One thread at
    a time uses it, except abort.

    timeout  seconds that a call waits for another rank; 0: no limit. Then the error is "dist.peer" and names the rank

    On GPUs, collectives run in a stream of their own: first wait for the work that writes or reads their memory.

        ends = refrain.Communicator.threads(context, 2)    # thread r uses ends[r], and a context of its own
        with refrain.Communicator.join(context) as comm:   # a process of mpirun or torchrun
            refrain.Trainer(config, "run", context=context, comm=comm).train()
            comm.leave()
    """

    _destroy_name = "rfr_comm_destroy"

    def __init__(self, context: Context, pointer: int, host: bool = True) -> None:
        self._busy = threading.RLock()
        self._abort_lock = threading.RLock()  # not _busy: the call that is to end has it
        self._host = host  # whether collectives are for host memory, or else for that of the GPU
        super().__init__(context, pointer)

    def _call(self, function: Any, *arguments: Any) -> Any:
        with self._busy:  # not the context's: the call waits for ranks that may use the same context
            return function(self.pointer, *arguments)

    @classmethod
    def threads(cls, context: Context, ranks: int, *, timeout: float = 0.0) -> List[Communicator]:
        """The handles of ranks that are threads of this process, for host memory. `context` owns their memory."""
        out = (ctypes.c_void_p * max(ranks, 0))()
        context.call(lambda: lib.rfr_comm_threads_create(context.pointer, ranks, timeout, out))
        return [cls(context, pointer) for pointer in out if pointer]

    @classmethod
    def mpi(cls, context: Context, *, timeout: float = 0.0) -> Communicator:
        """This rank of all processes of an MPI job, for host memory."""
        return cls(context, create(context, lib.rfr_comm_mpi_create, timeout))

    @staticmethod
    def nccl_id(context: Context) -> bytes:
        """The id of a new communicator of GPUs: one rank creates it and sends it to the others."""
        out = ctypes.create_string_buffer(_NCCL_ID_BYTES)
        context.call(lambda: lib.rfr_comm_nccl_id(context.pointer, out))
        return out.raw

    @classmethod
    def nccl(cls, context: Context, id: bytes, ranks: int, rank: int, *, timeout: float = 0.0) -> Communicator:
        """This rank of GPUs, on the context's GPU. All ranks call it at the same time."""
        if len(id) != _NCCL_ID_BYTES:
            raise InvalidError("invalid", "argument", f"an NCCL id of {len(id)} bytes, not {_NCCL_ID_BYTES}",
                               "pass the result of Communicator.nccl_id")
        return cls(context, create(context, lib.rfr_comm_nccl_create, id, ranks, rank, timeout), host=False)

    @classmethod
    def join(cls, context: Context, *, timeout: float = 0.0) -> Communicator:
        """This rank of all processes that the launcher started: over MPI on the CPU, over NCCL on GPUs."""
        found = _read_launch()
        return cls(context, create(context, lib.rfr_launch_join, ctypes.byref(found), timeout),
                   host=not context.device.startswith("cuda"))

    def leave(self) -> None:
        """Ends the work of a rank: waits until all ranks have called it, and closes the handle. Close what
        uses it first."""
        with self._busy:
            if self._exports > 0:
                raise InvalidError("invalid", "argument", f"{self._exports} open objects use the communicator",
                                   "close runs, graphs and programs before leave()")
            context, pointer = self.context.pointer, self.pointer
            with self._abort_lock:
                self._pointer = None
            self.close()
            lib.rfr_launch_leave(context, pointer)  # without the context's lock, see _call; it only allocates there

    def abort(self) -> None:
        """Ends all current and later calls with "dist.peer", with thread ranks those of all ranks. From any thread."""
        with self._abort_lock:
            if self._pointer is not None:
                lib.rfr_comm_abort(self._pointer)

    def _free(self) -> None:
        with self._abort_lock:
            super()._free()

    def set_timeout(self, timeout: float) -> None:
        self._call(lib.rfr_comm_set_timeout, timeout)

    @property
    def size(self) -> int:
        return int(self._call(lib.rfr_comm_size))

    @property
    def rank(self) -> int:
        return int(self._call(lib.rfr_comm_rank))

    # ---- collectives ----

    def all_gather(self, source: Any, to: Any) -> None:
        """`to` gets every rank's `source`, that of rank 0 first."""
        self._collective(lib.rfr_comm_all_gather, source, to, to_parts=True)

    def reduce_scatter(self, source: Any, to: Any) -> None:
        """`to` gets this rank's part of the sum of every rank's `source`."""
        self._collective(lib.rfr_comm_reduce_scatter, source, to, source_parts=True)

    def all_reduce(self, source: Any, to: Any) -> None:
        """`to` gets the sum of every rank's `source`; both may be the same memory."""
        self._collective(lib.rfr_comm_all_reduce, source, to)

    def all_to_all(self, source: Any, to: Any) -> None:
        """Part r of `to` gets this rank's part of the `source` of rank r."""
        self._collective(lib.rfr_comm_all_to_all, source, to, source_parts=True, to_parts=True)

    def _collective(self, function: Any, source: Any, to: Any, *, source_parts: bool = False,
                    to_parts: bool = False) -> None:
        """`source` and `to` are tensors or arrays of one type; one with parts has one for each rank."""
        a, b = Borrowed(source, self.context.device), Borrowed(to, self.context.device, writable=True)
        if a.tensor.host != b.tensor.host or (a.tensor.host != 0) != self._host:
            raise InvalidError("invalid", "tensor", "memory of a GPU for ranks over the host's memory" if self._host
                               else "host memory for ranks over the memory of GPUs", "copy the tensors")
        n, ranks = _count(a), self.size
        if source_parts and n % ranks:
            raise InvalidError("invalid", "argument", f"{n} elements for {ranks} ranks")
        n = n // ranks if source_parts else n
        wanted = n * ranks if to_parts else n
        if _count(b) != wanted or a.tensor.type.dtype != b.tensor.type.dtype:
            kinds = [text(lib.rfr_dtype_name(t.tensor.type.dtype)) for t in (a, b)]
            raise InvalidError("invalid", "argument", f"the result has {_count(b)} elements of {kinds[1]}, not "
                               f"{wanted} of {kinds[0]}")
        self._call(function, a.tensor.data, b.tensor.data, n, a.tensor.type.dtype)


def _count(value: Borrowed) -> int:
    n = 1
    for d in value.tensor.type.shape[: value.tensor.type.rank]:
        n *= d
    return n


class UsesCommunicator(Handle):
    """An object of a rank: its communicator stays until the object is freed."""

    _comm: Optional[Communicator] = None

    def _use(self, comm: Optional[Communicator]) -> Optional[int]:
        """Keeps the communicator; its handle, for the options."""
        if comm is None:
            return None
        pointer = comm.pointer
        comm._retain()
        self._comm = comm
        return pointer

    def _create(self, context: Context, run: Any, options: Any, comm: Optional[Communicator]) -> None:
        """Creates the object: `run` takes the context first and an `out` pointer last, and passes the options."""
        options.comm = self._use(comm)
        try:
            Handle.__init__(self, context, create(context, run))
        except BaseException:
            self._release_comm()
            raise

    def _release_comm(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            self.context.later(comm._release)  # after the object that uses it

    def _free(self) -> None:
        super()._free()
        if self._pointer is None:
            self._release_comm()
