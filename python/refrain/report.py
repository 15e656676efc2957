# SPDX-License-Identifier: Apache-2.0
"""Pages, screens and differences of runs, from the files in their folders. docs/report.md describes what they show."""
from __future__ import annotations

import ctypes
import json
import time
from typing import Any, Dict, List, Optional, Sequence, Union

from . import _abi
from ._core import Context, Handle, Path, collect, create, lib, path_bytes, path_list, text


class Report(Handle):
    """The logs of 1 to 16 run folders. It only reads, so the runs may be in progress.

        with refrain.Report(["runs/first", "runs/second"]) as report:
            report.save("report.html")

    Raises RefrainError with the slug "run.folder" for a folder without a log, FileError, and InvalidError with file and
    line for a damaged log. One thread at a time uses a report; others wait.
    """

    _destroy_name = "rfr_report_close"

    def __init__(self, runs: Union[Path, Sequence[Path]], *, context: Optional[Context] = None) -> None:
        paths = path_list(runs)
        self.runs = len(paths)
        owner = context or Context("cpu")
        super().__init__(owner, create(owner, lib.rfr_report_open, (ctypes.c_char_p * len(paths))(*paths), len(paths)),
                         None if context else owner)

    def read(self) -> bool:
        """Reads what the runs have logged since; True if that is anything."""
        changed = ctypes.c_int()
        self._call(lib.rfr_report_read, ctypes.byref(changed))
        return changed.value != 0

    def _written(self, function: Any, *arguments: Any) -> bytes:
        pieces: List[bytes] = []
        writer = self.context.callback(_abi.WriteFn, lambda data, n, _: pieces.append(data[:n]), None)
        self._call(function, *arguments, writer, None)
        return b"".join(pieces)

    def page(self) -> str:
        """The page of `refrain report`: HTML that contains everything it needs and loads nothing."""
        return text(self._written(lib.rfr_report_page, 0))

    def save(self, path: Path) -> None:
        """Writes the page to a file, which is replaced."""
        page = self._written(lib.rfr_report_page, 0)
        with open(path, "wb") as file:
            file.write(page)

    def data(self) -> Dict[str, Any]:
        """The data of the page: configurations, curves, experts, memory, samples of each run. Its keys may change from
        version to version; the log itself is FOLDER/log.jsonl."""
        found: Dict[str, Any] = json.loads(self._written(lib.rfr_report_data))
        return found

    def screen(self, run: int = 0, *, columns: int = 80, colour: bool = False) -> str:
        """The screen of `refrain top` about a run, from 0: lines of at most `columns` characters, 40 to 400."""
        return text(self._written(lib.rfr_report_screen, run, columns, colour, time.time()))

    def wandb(self, folder: Path, run: int = 0) -> None:
        """Writes a run, from 0, as an offline run of Weights & Biases: FOLDER/offline-run-TIME-ID, for `wandb sync`.
        Raises RefrainError with the slug "export.exists" if it is there already."""
        self._call(lib.rfr_report_wandb, run, path_bytes(folder))


def _compare(first: Path, second: Path, as_json: bool, tensors: int) -> bytes:
    different = ctypes.c_int()
    with Context("cpu") as context:
        pieces: List[bytes] = []
        writer = context.callback(_abi.WriteFn, lambda data, n, _: pieces.append(data[:n]), None)
        context.call(lambda: lib.rfr_report_diff(context.pointer, path_bytes(first), path_bytes(second), as_json,
                                                 tensors, writer, None, ctypes.byref(different)))
    return b"".join(pieces)


def diff(first: Path, second: Path) -> Dict[str, Any]:
    """The differences of two runs, as `refrain diff --json` prints them: "equal", "config" with the source of each
    value, "curves" with the first step that differs, "weights" of the newest checkpoints by tensor. "equal" is True if
    configuration, curves and weights are; speed and machine do not count.

    Raises the errors of Report, and RefrainError with the slug "checkpoint" if a run has only damaged checkpoints."""
    found: Dict[str, Any] = json.loads(_compare(first, second, True, 0))
    return found


def diff_text(first: Path, second: Path, *, tensors: int = 20) -> str:
    """The same as the text of `refrain diff`, with at most `tensors` tensors."""
    return text(_compare(first, second, False, tensors))


def inspect(path: Path) -> Dict[str, Any]:
    """Describes a Hugging Face folder, a safetensors or GGUF file, or an adapter's folder, as `refrain inspect --json`
    does: kind, model, tensors with shapes and types. Reads no weights."""
    with Context("cpu") as context:
        found: Dict[str, Any] = json.loads(collect(context, lib.rfr_inspect, path_bytes(path), 1))
    return found
