# SPDX-License-Identifier: Apache-2.0
"""Errors, handles, threads and callbacks."""
import gc
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import refrain
from refrain import _core
from support import SMALL, FolderTest


class Errors(unittest.TestCase):
    def test_fields(self):
        with self.assertRaises(refrain.InvalidError) as caught:
            refrain.Trainer("refrain: 1\nbatch: {tokns: 4}\n", None, config_name="run.yaml")
        error = caught.exception
        self.assertIsInstance(error, refrain.RefrainError)
        self.assertIsInstance(error, ValueError)
        self.assertEqual((error.status, error.slug), ("invalid", "config.key"))
        self.assertEqual((error.file, error.line), ("run.yaml", 2))
        self.assertIn("tokns", error.message)
        self.assertTrue(error.next)
        self.assertIn("[config.key]", str(error))

    def test_kinds(self):
        """The classes are in the order of rfr_status."""
        names = [_core.text(_core.lib.rfr_status_name(i + 1)) for i in range(len(_core._KINDS))]
        self.assertEqual(names, ["invalid", "no memory", "does not fit", "input or output", "unsupported",
                                 "mismatch", "numeric", "stopped", "internal"])
        self.assertIs(_core._KINDS[names.index("stopped")], refrain.Stopped)

    def test_no_gpu(self):
        """The module is loaded when a context asks for it; the error names the part that is missing."""
        try:
            refrain.Context("cuda").close()
        except refrain.UnsupportedError as error:
            self.assertEqual(error.slug, "backend.missing")
            self.assertRegex(error.message, "librefrain_cuda.so.*refrain-cuda|NVIDIA|compute capability")

    def test_file(self):
        with self.assertRaises(refrain.FileError) as caught:
            refrain.Tokenizer("/nowhere/tokenizer.json")
        self.assertEqual(caught.exception.slug, "file.open")

    def test_memory(self):
        with refrain.Context("cpu", byte_limit=4096) as context, self.assertRaises(MemoryError):
            trace = refrain.Trace(context)
            for i in range(100):
                trace.input(f"x{i}", "input", "f32", (4, 4))
            trace.finish()

    def test_bad_paths_and_texts(self):
        for path in ("a\0b", b"a\0b"):
            with self.assertRaises(ValueError):
                refrain.Tokenizer(path)
        with self.assertRaises(refrain.InvalidError):
            refrain.Context("gpu")


class Handles(unittest.TestCase):
    def test_closed(self):
        context = refrain.Context("cpu")
        trace = refrain.Trace(context)
        trace.close()
        trace.close()
        self.assertTrue(trace.closed)
        with self.assertRaises(refrain.ClosedError):
            trace.finish()
        with refrain.Trace(context) as other:
            pass
        with self.assertRaises(refrain.ClosedError):
            other.input("x", "input", "f32", (1,))
        context.close()
        context.close()
        with self.assertRaises(refrain.ClosedError):
            refrain.Trace(context)

    def test_order(self):
        """A context may be closed before what was made with it."""
        context = refrain.Context("cpu")
        trace = refrain.Trace(context)
        context.close()
        trace.input("x", "input", "f32", (2, 3))
        trace.finish()
        trace.close()
        traces = [refrain.Trace(refrain.Context("cpu")) for _ in range(10)]
        del traces
        gc.collect()

    def test_uninitialized(self):
        """A constructor that fails leaves nothing that the collector cannot free."""
        for make in (lambda: refrain.Tokenizer("/nowhere"), lambda: refrain.Trainer("", None),
                     lambda: refrain.Model("/nowhere"), lambda: refrain.ChatTemplate("/nowhere")):
            with self.assertRaises(refrain.RefrainError):
                make()
        gc.collect()


class Threads(FolderTest):
    def run_of(self, **options):
        def fill(window):
            for i in range(window.sequence):
                window.tokens[i], window.targets[i] = i % 7, (i + 1) % 7

        return refrain.Trainer(SMALL, None, data=refrain.Data(fill, train_windows=64), **options)

    def test_gil(self):
        """Another thread runs Python while a call of the library computes."""
        counted = [0]
        done = threading.Event()

        def count():
            while not done.is_set():
                counted[0] += 1

        with self.run_of(overrides={"run.steps": 60, "run.checkpoint_every": 0}) as run:
            thread = threading.Thread(target=count)
            thread.start()
            run.train()
            done.set()
            thread.join()
        self.assertGreater(counted[0], 1000)

    def test_one_at_a_time(self):
        """Threads that share a context take turns."""
        with refrain.Context("cpu") as context:
            errors = []

            def record():
                try:
                    for _ in range(50):
                        with refrain.Trace(context) as t:
                            x = t.input("x", "input", "f32", (4, 4))
                            t.output("y", t.add(x, x))
                            t.finish()
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=record) for _ in range(4)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            self.assertEqual(errors, [])

    def test_exception_of_a_callback(self):
        class Mine(Exception):
            pass

        def on_event(event):
            if event.kind == "metrics" and event.step == 2:
                raise Mine("at step 2")

        with self.run_of(on_event=on_event) as run:
            with self.assertRaisesRegex(Mine, "at step 2"):
                run.train()
            self.assertLess(run.info.step, 6)  # the exception ended the run
            run.step()

    def test_exception_while_opening(self):
        def on_event(event):
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            self.run_of(on_event=on_event)

    def test_call_from_a_callback(self):
        run = None

        def on_event(event):
            if event.kind == "metrics":
                run.step()

        with self.run_of(on_event=on_event) as run:
            with self.assertRaises(refrain.ReentryError):
                run.train()

    def test_garbage_in_a_callback(self):
        """A handle that is dropped in a callback of its context is freed after the call."""
        context = refrain.Context("cpu")
        traces = []

        def on_event(event):
            if traces:
                traces.pop()
                gc.collect()

        with self.run_of(on_event=on_event, context=context) as run:
            traces += [refrain.Trace(context) for _ in range(3)]
            run.train()
        self.assertEqual(context._later, [])
        context.close()

    def test_stop(self):
        stopper = []

        def on_event(event):
            if event.kind == "metrics" and event.step == 2:
                stopper.append(threading.Thread(target=run.stop))
                stopper[0].start()
                stopper[0].join()

        with self.run_of(on_event=on_event, overrides=["run.steps=1000"]) as run:
            with self.assertRaises(refrain.Stopped) as caught:
                run.train()
            self.assertEqual(caught.exception.slug, "run.stopped")
            self.assertLess(run.info.step, 20)
        run.stop()  # of a closed run: nothing

    def test_close_while_another_thread_trains(self):
        """close() waits for the call that runs."""
        run = self.run_of(overrides={"run.steps": 40})
        thread = threading.Thread(target=run.train)
        thread.start()
        time.sleep(0.02)
        run.close()
        thread.join()
        with self.assertRaises(refrain.ClosedError):
            run.info


class Exit(unittest.TestCase):
    def test_open_handles(self):
        """The interpreter ends with everything open, exported memory and a running thread too."""
        program = """
import threading, refrain
from refrain import tensor
context = refrain.Context("cpu", log=lambda level, line: None)
trace = refrain.Trace(context)
x = trace.input("x", "input_grad", "f32", (4, 4))
trace.output("y", trace.mul(x, trace.input("w", "trainable", "f32", (4, 4))))
graphs = refrain.Graphs(context, [refrain.Callable(trace)])
graphs.begin_step()
capsules = [graphs.tensor("w").__dlpack__(max_version=(1, 0)) for _ in range(3)]
cycle = [graphs, capsules]
cycle.append(cycle)

def count(window):
    pass

config = {"refrain": 1, "data": {"train": [], "sequence": 16}, "batch": {"tokens": 64, "microbatch": 4},
          "model": {"model_type": "llama", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 64,
                    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16},
          "optimizer": {"lr": 1e-2}, "run": {"steps": 100000000}}
run = refrain.Trainer(config, None, data=refrain.Data(count, train_windows=64), context=refrain.Context("cpu"))
threading.Thread(target=lambda: [run.step() for _ in range(100000000)], daemon=True).start()
print("end")
"""
        for _ in range(3):
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "end\n", ""))

    def test_thread_in_callback(self):
        """A daemon thread is in a callback when the program ends: the call ends first."""
        program = """
import sys, threading, time, refrain
began = threading.Event()
def fill(window):
    began.set()
    time.sleep(0.3)
    print("filled", flush=True)
config = %r
run = refrain.Trainer(config, None, data=refrain.Data(fill, train_windows=64))
threading.Thread(target=lambda: [run.step() for _ in range(1000)], daemon=True).start()
began.wait()
""" % (SMALL,)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, set(done.stdout.split()), done.stderr), (0, {"filled"}, ""))

    def test_joined_at_exit(self):
        """An exit function of the program joins a daemon thread that still makes calls."""
        program = """
import atexit, threading, time
ended = threading.Event()
def join():
    ended.set()
    thread.join()
    print("joined", flush=True)
atexit.register(join)
import refrain
config = %r
run = refrain.Trainer(config, None, data=refrain.Data(lambda window: None, train_windows=64))
def work():
    while not ended.is_set():
        time.sleep(0.01)
    run.step()
thread = threading.Thread(target=work, daemon=True)
thread.start()
""" % (SMALL,)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "joined\n", ""))

    def test_interrupt(self):
        """Ctrl-C between two steps ends train(), which saves; the exception is KeyboardInterrupt."""
        program = """
import os, signal, sys, refrain
def fill(window):
    pass
def on_event(event):
    if event.kind == "metrics" and event.step == 3:
        os.kill(os.getpid(), signal.SIGINT)
config = %r
config["run"]["steps"] = 1000000
with refrain.Trainer(config, sys.argv[1], data=refrain.Data(fill, train_windows=64), on_event=on_event) as run:
    try:
        run.train()
    except KeyboardInterrupt:
        print("interrupted", run.info.step < 10, os.path.basename(run.info.checkpoint)[:5])
""" % (SMALL,)
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, "-c", program, folder + "/run"], capture_output=True, text=True,
                                  timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "interrupted True step-\n", ""))


if __name__ == "__main__":
    unittest.main()
