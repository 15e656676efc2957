# SPDX-License-Identifier: Apache-2.0
"""Runs of one configuration with a grid of values: docs/sweeps.md describes the grid."""
from __future__ import annotations

import ctypes
import pathlib
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Tuple

from . import _abi
from ._core import (Context, Handle, Overrides, Path, RefrainError, Stopped, copy_fields, create, lib, override_list,
                    path_bytes, text)
from .train import Event, Trainer

_STATES = ["waiting", "running", "stopped", "failed", "done"]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep; the fields are those of rfr_sweep_run."""

    name: str  # "run-001"
    folder: str
    overrides: Tuple[str, ...]  # "optimizer.lr=0.01"; the first n_common are those of all runs
    n_common: int
    state: str  # "waiting", "running", "stopped", "failed" or "done"
    started: bool  # the folder has a run, which is continued
    loss: float  # of the last evaluation, nats per token; NaN: none
    bits_per_byte: float  # NaN: none
    step: int  # the last one logged
    seconds: float  # of training
    error: str  # of a failed run


class Sweep(Handle):
    """A sweep: reads `grid` and checks the configuration of every run, creates `folder`, and locks it until close.

    grid       path of the grid's YAML file
    overrides  of all runs: {"run.steps": 100} or ["run.steps=100"]; a key of the grid may not be among them
    resume     continue the sweep in the folder, or start one

        with refrain.Sweep("lr.yaml", "sweeps/lr") as sweep:
            sweep.train()
            print(sweep.rank()[0])

    Raises InvalidError for a grid or a configuration, with file and line; RefrainError with the slugs "sweep.exists",
    "sweep.changed" and "run.busy". `refrain sweep --resume` continues a sweep of this class, and the other way round.
    One thread at a time uses a sweep.
    """

    _destroy_name = "rfr_sweep_close"

    def __init__(self, grid: Path, folder: Path, *, overrides: Overrides = (), resume: bool = False,
                 context: Optional[Context] = None) -> None:
        owner = context or Context("cpu")
        options = lib.rfr_sweep_options_default()
        settings = override_list(overrides)
        options.overrides, options.n_overrides = (ctypes.c_char_p * len(settings))(*settings), len(settings)
        options.resume = int(resume)
        super().__init__(owner, create(owner, lib.rfr_sweep_open, path_bytes(grid), path_bytes(folder),
                                       ctypes.byref(options)), None if context else owner)

    @property
    def config(self) -> str:
        """Path of the configuration that all runs start from."""
        return text(self._call(lib.rfr_sweep_config))

    def __len__(self) -> int:
        return int(self._call(lib.rfr_sweep_count))

    def __getitem__(self, run: int) -> SweepRun:
        """A run as it is now, from 0; negative numbers count from the last."""
        n = len(self)
        if not -n <= run < n:
            raise IndexError(f"the sweep has {n} runs, there is no run {run}")
        number = run % n

        def read(pointer: int) -> SweepRun:
            found = _abi.rfr_sweep_run()
            lib.rfr_sweep_get(pointer, number, ctypes.byref(found))
            values = {**copy_fields(found), "state": _STATES[found.state], "started": bool(found.started),
                      "overrides": tuple(text(o) for o in found.overrides[: found.n_overrides])}
            del values["n_overrides"]
            return SweepRun(**values)

        out: SweepRun = self._call(read)
        return out

    def record(self, run: int, state: str, error: str = "") -> None:
        """Records the state of a run that the caller trains, and what the run has logged. Raises ValueError for an
        unknown state, and RefrainError with the slug "sweep.changed" if the run is to start ("running") but its
        configuration has changed."""
        self._call(lib.rfr_sweep_set, run, _STATES.index(state), error.encode())

    def rank(self) -> List[SweepRun]:
        """The runs that are done and were evaluated, the best first: by bits per byte if all have those, else by
        held-out loss."""
        order = (ctypes.c_int * len(self))()
        n = self._call(lib.rfr_sweep_rank, order)
        return [self[i] for i in order[:n]]

    def trainer(self, run: int, **options: Any) -> Trainer:
        """Opens a run for training, or continues it; `options` are those of Trainer."""
        found = self[run]
        if found.started:
            return Trainer(None, found.folder, resume=True, **options)
        config = pathlib.Path(self.config)
        return Trainer(config.read_text(encoding="utf-8"), found.folder, overrides=found.overrides,
                       config_folder=config.parent, config_name=str(config), **options)

    def train(self, *, on_event: Optional[Callable[[SweepRun, Event], object]] = None, device: Optional[str] = None,
              threads: int = 0) -> None:
        """Trains all runs that are not done, one after another in this process. A run that fails is recorded with its
        error, and the next one starts. on_event(run, event) is called for each event; an exception that it raises,
        Ctrl-C too, stops the sweep, with a checkpoint of the run."""
        for i in range(len(self)):
            if self[i].state == "done":
                continue
            self.record(i, "running")
            run = self[i]
            report = (lambda event, run=run: on_event(run, event)) if on_event is not None else None
            try:
                with self.trainer(i, on_event=report, device=device, threads=threads) as trainer:
                    trainer.train()
            except Stopped:
                self.record(i, "stopped")
                raise
            except RefrainError as error:
                self.record(i, "failed", error.message)
            except BaseException:
                self.record(i, "stopped")
                raise
            else:
                self.record(i, "done")
