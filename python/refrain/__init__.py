# SPDX-License-Identifier: Apache-2.0
"""Refrain: trains and fine-tunes transformers. This package calls the C library through ctypes.

    refrain.finetune("SmolLM2-135M-Instruct", "chat.jsonl", "runs/chat", on_event=print)
    print(refrain.generate("runs/chat", [{"role": "user", "content": "Hello"}]))

Every object is a context manager. Errors of the library are exceptions: RefrainError and its subclasses, with slug,
message, next step, file and line.
"""
from ._core import (ClosedError, Context, FileError, InternalError, InvalidError, MismatchError, NoFitError,
                    NoMemoryError, NumericError, ReentryError, RefrainError, Stopped, UnsupportedError, version)
from .graphs import NONE, Callable, Gradient, Graphs, GraphsMemory, Schedule, Trace
from .hooks import HookEvent, Hooks, HookTensor
from .programs import Programs
from .ranks import Communicator, Launch, launch
from .report import Report, diff, diff_text, inspect
from .sweep import Sweep, SweepRun
from .tensor import Tensor
from .text import ChatTemplate, Decoder, Tokenizer, TokenizerTraining, train_tokenizer
from .train import (NO_TARGET, Data, Evaluation, Event, Model, Phase, RunInfo, Trainer, Watched, Window, export,
                    finetune, generate)

__version__ = version()
__all__ = ["Callable", "ChatTemplate", "ClosedError", "Communicator", "Context", "Data", "Decoder", "Evaluation",
           "Event", "FileError", "Gradient", "Graphs", "GraphsMemory", "HookEvent", "HookTensor", "Hooks",
           "InternalError", "InvalidError", "Launch", "MismatchError", "Model", "NONE", "NO_TARGET", "NoFitError",
           "NoMemoryError", "NumericError", "Phase", "Programs", "ReentryError", "RefrainError", "Report", "RunInfo",
           "Schedule", "Stopped", "Sweep", "SweepRun", "Tensor", "Tokenizer", "TokenizerTraining", "Trace", "Trainer",
           "UnsupportedError", "Watched", "Window", "diff", "diff_text", "export", "finetune", "generate", "inspect",
           "launch", "train_tokenizer"]
