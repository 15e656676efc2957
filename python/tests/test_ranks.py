# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads or processes, programs, and hooks, with the standard library alone."""
import array
import ctypes
import gc
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import unittest

import refrain
from refrain import tensor as tensors
from support import SMALL, FolderTest

BUILD = pathlib.Path(os.environ.get("REFRAIN_BUILD", "."))


def on_ranks(work, ranks=2, timeout=30.0):
    """work(rank, communicator, context) on a thread for each rank; the results, or the first exception."""
    ends = refrain.Communicator.threads(refrain.Context("cpu"), ranks, timeout=timeout)
    results, errors = [None] * ranks, []

    def run(rank):
        try:
            with refrain.Context("cpu", threads=1) as context, ends[rank] as comm:
                results[rank] = work(rank, comm, context)
        except BaseException as error:  # the others end too: the handle is closed
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


class Collectives(unittest.TestCase):
    def test_values(self):
        def work(rank, comm, context):
            self.assertEqual((comm.rank, comm.size), (rank, 3))
            mine = array.array("f", [10 * rank + i for i in range(6)])
            every, part, total, moved = (array.array("f", [0] * n) for n in (18, 2, 6, 6))
            comm.all_gather(mine, every)
            comm.reduce_scatter(mine, part)
            comm.all_reduce(mine, total)
            comm.all_to_all(mine, moved)
            ids = array.array("i", [rank])
            found = array.array("i", [0] * 3)
            comm.all_gather(ids, found)
            self.assertEqual(list(found), [0, 1, 2])
            return list(every), list(part), list(total), list(moved)

        terms = [[10 * r + i for i in range(6)] for r in range(3)]
        sums = [30 + 3 * i for i in range(6)]
        for rank, (every, part, total, moved) in enumerate(on_ranks(work, 3)):
            self.assertEqual(every, sum(terms, []))
            self.assertEqual(part, sums[2 * rank : 2 * rank + 2])
            self.assertEqual(total, sums)
            self.assertEqual(moved, sum((terms[r][2 * rank : 2 * rank + 2] for r in range(3)), []))

    def test_arguments(self):
        (comm,) = refrain.Communicator.threads(refrain.Context("cpu"), 1)
        with comm:
            for source, to in ((array.array("f", [1]), array.array("i", [0])),
                               (array.array("f", [1]), array.array("f", [0, 0])),
                               (array.array("f", [1]), b"1234"), (3, array.array("f", [0]))):
                with self.assertRaises(refrain.InvalidError):
                    comm.all_reduce(source, to)
            with self.assertRaises(refrain.InvalidError) as caught:
                comm.all_reduce(array.array("b", [1]), array.array("b", [0]))
        with self.assertRaises(refrain.ClosedError):
            comm.rank
        comm.abort()  # no effect
        with self.assertRaises(refrain.InvalidError) as caught:
            refrain.Communicator.threads(refrain.Context("cpu"), 0)
        self.assertEqual(caught.exception.slug, "argument")
        with self.assertRaises(refrain.InvalidError):
            refrain.Communicator.nccl(refrain.Context("cpu"), b"short", 2, 0)

    def test_memory(self):
        """Memory that is read-only, of the wrong device, or freed is refused."""

        class ReadOnly:
            """As arrays that are mapped read-only: the flag of DLPack, and no buffer protocol."""

            def __init__(self, tensor):
                self.__dlpack_device__ = tensor.__dlpack_device__
                self.tensor = tensor

            def __dlpack__(self, **kwargs):
                capsule = self.tensor.__dlpack__(**kwargs)
                at = tensors._get(capsule, b"dltensor_versioned") + 24
                ctypes.c_uint64.from_address(at).value |= 1
                return capsule

        context = refrain.Context("cpu", threads=1)
        (comm,) = refrain.Communicator.threads(context, 1)
        with comm, refrain.Programs(context, [record(context, 0)]) as programs:
            fill(programs)
            x, out = programs.tensor("x"), array.array("f", [0] * ROWS * WIDTH)
            comm.all_reduce(ReadOnly(x), out)
            self.assertEqual(out.tobytes(), x.read())
            with self.assertRaisesRegex(refrain.InvalidError, "ReadOnly cannot be written"):
                comm.all_reduce(out, ReadOnly(x))
            context.device = "cuda"
            far = tensors.Memory(None, x.struct.type, x.struct.data, False)
            with self.assertRaisesRegex(refrain.InvalidError, "memory of a GPU"):
                comm.all_reduce(far, out)
            programs.close()
            with self.assertRaises(refrain.ClosedError):
                comm.all_reduce(x, out)

    def test_leave(self):
        """Ranks that are threads wait for each other in leave, too, though their handles are of one context."""
        context = refrain.Context("cpu")
        ends = refrain.Communicator.threads(context, 3, timeout=20.0)
        failed = []

        def leave(comm):
            try:
                comm.leave()
            except refrain.RefrainError as error:
                failed.append(error)

        threads = [threading.Thread(target=leave, args=(comm,)) for comm in ends]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failed, [])
        self.assertTrue(all(comm.closed for comm in ends))
        (comm,) = refrain.Communicator.threads(context, 1)
        context.close()
        with self.assertRaises(refrain.ClosedError):
            comm.leave()
        self.assertEqual(comm.size, 1)  # it is still open
        comm.close()

    def test_timeout_and_abort(self):
        def late(rank, comm, context):
            if rank == 0:
                comm.set_timeout(0.2)
                with self.assertRaises(refrain.RefrainError) as caught:
                    comm.all_reduce(array.array("f", [1]), array.array("f", [0]))
                self.assertEqual(caught.exception.slug, "dist.peer")
                self.assertIn("1", caught.exception.message)

        on_ranks(late)
        ends = refrain.Communicator.threads(refrain.Context("cpu"), 2)
        timer = threading.Timer(0.2, ends[1].abort)
        timer.start()
        with self.assertRaises(refrain.RefrainError) as caught:
            ends[0].all_reduce(array.array("f", [1]), array.array("f", [0]))
        self.assertEqual(caught.exception.slug, "dist.peer")
        timer.join()


class Launcher(unittest.TestCase):
    def run_python(self, code, *before, **variables):
        cleared = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        env = {k: v for k, v in os.environ.items()
               if k not in cleared and not k.startswith(("OMPI_", "PMI_", "SLURM_"))}
        return subprocess.run([*before, sys.executable, "-c", code], env={**env, **variables}, capture_output=True,
                              text=True)

    def test_environment(self):
        show = "import refrain; print(refrain.launch())"
        alone = self.run_python(show)
        self.assertIn("launcher='', rank=0, ranks=1", alone.stdout, alone.stderr)
        one = self.run_python(show, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", MASTER_ADDR="host", MASTER_PORT="2000")
        self.assertIn("rank=3, ranks=4, local_rank=1, address='host', port=2000", one.stdout, one.stderr)
        self.assertIn("dist.launch", self.run_python(show, RANK="4", WORLD_SIZE="4").stderr)

    def test_mpi(self):
        if not shutil.which("mpirun") or not (BUILD / "librefrain_mpi.so").exists():
            self.skipTest("there is no MPI")
        code = """if True:
            import array, os, refrain
            with refrain.Context("cpu", threads=1) as context, refrain.Communicator.join(context, timeout=60) as comm:
                out = array.array("f", [0])
                comm.all_reduce(array.array("f", [comm.rank + 1]), out)
                os.write(1, f"rank {comm.rank} of {comm.size} sum {out[0]}\\n".encode())  # in one piece
                comm.leave()
                assert comm.closed
        """
        done = self.run_python(code, "mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2",
                               OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.split("\n"))[1:], [f"rank {r} of 2 sum 3.0" for r in range(2)])


class Runs(FolderTest):
    def setUp(self):
        super().setUp()
        (self.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        self.config = {**SMALL, "precision": {"dtype": "f32"},
                       "data": {"root": str(self.folder), "train": ["text.txt"], "sequence": 16}}

    def losses(self, folder, context, comm):
        found = []
        with refrain.Trainer(self.config, folder, on_event=found.append, context=context, comm=comm) as run:
            if comm is not None:
                with self.assertRaises(refrain.InvalidError):
                    comm.leave()
                self.assertEqual(run.info.ranks, 2)
            run.train()
        return [e.loss for e in found if e.kind == "metrics"]

    def test_two_ranks(self):
        one = self.losses(self.folder / "one", refrain.Context("cpu", threads=1), None)
        two = on_ranks(lambda rank, comm, context: self.losses(self.folder / "two", context, comm))
        self.assertEqual(two[0], two[1])
        self.assertEqual(len(two[0]), 6)
        for a, b in zip(one, two[0]):
            self.assertAlmostEqual(a / b, 1, delta=1e-6)

    def test_closed_too_early(self):
        """The communicator stays as long as what uses it."""

        def work(rank, comm, context):
            run = refrain.Trainer(self.config, None, context=context, comm=comm)
            comm.close()
            run.step()
            run.close()
            gc.collect()
            with self.assertRaises(refrain.ClosedError):
                comm.rank

        on_ranks(work)


ROWS, WIDTH = 3, 4


def record(context, microbatches, ranks=1):
    """The mean of x @ w over microbatches, trained by SGD; without microbatches one forward."""
    t = refrain.Trace(context)
    parts = max(microbatches, 1)
    x = t.input("x", "input", "f32", (ROWS * parts, WIDTH))
    w = t.input("w", "trainable", "f32", (WIDTH, WIDTH))
    loss = None
    for m in range(parts):
        t.microbatch(m if microbatches else -1)
        y = t.mean(t.reshape(t.linear(t.slice(x, 0, m * ROWS, ROWS), w), (ROWS * WIDTH,)))
        loss = y if loss is None else t.add(loss, y)
    t.microbatch(-1)
    if microbatches:
        g = t.gradient(loss, w)
        t.phase("optim")
        if ranks > 1:
            g = t.all_reduce(g, ranks)
        t.sgd(w, g, t.fill(0.5, "f32", (1,)))
    t.output("loss", loss)
    return t.finish()


def fill(programs, seed=0.0):
    n = len(programs.tensor("x").read()) // 4
    programs.tensor("x").write(array.array("f", [seed + (i % 7) / 4 for i in range(n)]))
    programs.tensor("w").write(array.array("f", [i / 8 for i in range(WIDTH * WIDTH)]))


class Programs(unittest.TestCase):
    def setUp(self):
        self.context = refrain.Context("cpu", threads=1)

    def hooks(self, calls, points, fails=None):
        def note(e):
            calls.append((e.point, e.microbatch, e.capture, e.failed))
            self.assertEqual((e.callable, e.name), (0, "step"))
            self.assertEqual([t.name for t in e.parameters], ["w"])
            self.assertEqual(([t.name for t in e.inputs], [t.name for t in e.outputs]), (["x"], ["loss"]))
            self.assertEqual(len(e.parameters[0].read()), 4 * WIDTH * WIDTH)
            self.kept = e.inputs[0]
            if fails is not None and (e.point, e.microbatch) == fails:
                raise KeyError("of the hook")

        return refrain.Hooks(**{p: [note] for p in points})

    def test_order(self):
        """Around the forward and backward of each microbatch; the bits are those without hooks, and of a replay."""
        found, calls = [], []
        points = ("pre_forward", "post_forward", "pre_backward", "post_backward")
        for way in ("run", "hooks", "replay"):
            hooks = [self.hooks(calls, points)] if way == "hooks" else None
            with refrain.Programs(self.context, [record(self.context, 2)], names=["step"], hooks=hooks) as p:
                fill(p)
                if way == "replay":
                    p.capture()
                for _ in range(2):
                    p.replay() if way == "replay" else p.run()
                p.wait()
                found.append((p.tensor("w").read(), p.output("loss").read()))
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[0], found[2])
        self.assertEqual(calls, 2 * [(p, m, False, False) for m in range(2) for p in points])
        with self.assertRaises(refrain.ClosedError):
            self.kept.read()

    def test_numbers(self):
        """dloss/dw is the mean row of x for each output, over all microbatches."""
        with refrain.Programs(self.context, [record(self.context, 2)]) as p:
            fill(p)
            x, w = p.tensor("x").tolist(), p.tensor("w").tolist()
            p.run()
            after = p.tensor("w").tolist()
        for i in range(WIDTH):
            for k in range(WIDTH):
                self.assertAlmostEqual(after[i][k], w[i][k] - 0.5 * sum(r[k] for r in x) / (ROWS * WIDTH), places=5)

    def test_failure(self):
        """Its exception is raised; the post hooks have `failed`, and the weights stay."""
        calls = []
        hooks = self.hooks(calls, ("pre_forward", "pre_backward", "post_backward"), fails=("post_backward", 0))
        with refrain.Programs(self.context, [record(self.context, 2)], names=["step"], hooks=[hooks]) as p:
            fill(p)
            before = p.tensor("w").read()
            with self.assertRaises(KeyError):
                p.run()
            self.assertEqual(p.tensor("w").read(), before)
        self.assertEqual(calls[-1][:2], ("post_backward", 0))

    def test_writes(self):
        """A hook before the forward gives the weights; the run computes with them."""
        ones = array.array("f", [1] * WIDTH * WIDTH)
        hooks = refrain.Hooks(pre_forward=[lambda e: e.parameters[0].write(ones)])
        with refrain.Programs(self.context, [record(self.context, 0)], hooks=[hooks]) as p:
            fill(p)
            p.run()
            rows = p.tensor("x").tolist()
            self.assertAlmostEqual(p.output("loss").tolist()[0], sum(map(sum, rows)) / ROWS, places=5)
            with self.assertRaises(refrain.InvalidError):
                p.output("nothing")

    def test_capture(self):
        """Of one forward; with a backward it is refused."""
        calls = []
        with refrain.Programs(self.context, [record(self.context, 0)], names=["step"],
                              hooks=[self.hooks(calls, ("pre_forward", "post_forward"))]) as p:
            fill(p)
            p.capture()
            p.replay(inputs={"x": p.tensor("x")})
            with self.assertRaises(refrain.MismatchError):
                p.replay(inputs={"x": array.array("f", [0])})
        self.assertEqual(calls, [("pre_forward", -1, True, False), ("post_forward", -1, True, False)])
        with refrain.Programs(self.context, [record(self.context, 1)], names=["step"],
                              hooks=[self.hooks(calls, ("pre_forward",))]) as p:
            with self.assertRaises(refrain.InvalidError):
                p.capture()

    def test_refused(self):
        t = record(self.context, 1)
        with self.assertRaises(refrain.InvalidError):
            refrain.Programs(self.context, [t], hooks=[refrain.Hooks(pre_wgrad=[print])])
        with self.assertRaises(refrain.InvalidError):
            refrain.Programs(self.context, [t], shard="quarter")
        with self.assertRaises(ValueError):
            refrain.Programs(self.context, [t], names=["a", "b"])
        with refrain.Programs(self.context, [t], hooks=[refrain.Hooks(pre_forward=[lambda e: p.run()])]) as p:
            with self.assertRaises(refrain.ReentryError):
                p.run()

    def test_ranks(self):
        """Gradients summed over two ranks: the weights are those of one rank with both inputs."""

        def work(rank, comm, context):
            with refrain.Programs(context, [record(context, 1, 2)], comm=comm) as p:
                fill(p, seed=float(rank))
                p.capture()
                p.replay()
                p.wait()
                return p.tensor("w").tolist(), p.tensor("x").tolist()

        (w, x0), (other, x1) = on_ranks(work)
        self.assertEqual(w, other)
        for k in range(WIDTH):
            self.assertAlmostEqual(w[0][k], k / 8 - 0.5 * sum(r[k] for r in x0 + x1) / (ROWS * WIDTH), places=5)


class GraphHooks(unittest.TestCase):
    def test_events(self):
        context = refrain.Context("cpu", threads=1)
        t = refrain.Trace(context)
        x = t.input("x", "input_grad", "f32", (ROWS, WIDTH))
        t.output("y", t.linear(x, t.input("w", "trainable", "f32", (WIDTH, WIDTH))))
        calls = []

        def note(e):
            calls.append((e.point, e.capture, e.iteration))

        points = ("pre_forward", "post_forward", "pre_backward", "post_backward", "pre_wgrad", "post_wgrad")
        with refrain.Graphs(context, [refrain.Callable(t, name="layer")], warmup_iterations=1, pre_warmup=[note],
                            post_warmup=[note], hooks=[refrain.Hooks(**{p: [note] for p in points})]) as g:
            made = len(calls)
            g.tensor("w").write(array.array("f", [1] * WIDTH * WIDTH))
            with g.step():
                g.forward(0, 0, memoryview(array.array("f", [1] * ROWS * WIDTH)).cast("B").cast("f", (ROWS, WIDTH)))
                g.backward(0, 0, memoryview(array.array("f", [1] * ROWS * WIDTH)).cast("B").cast("f", (ROWS, WIDTH)))
            self.assertEqual(len(calls), made)  # none at replay
        self.assertEqual(calls[0], ("pre_warmup", False, 0))
        self.assertEqual(calls[1:7], [(p, False, 0) for p in points])
        self.assertEqual(calls[7], ("post_warmup", False, 0))
        self.assertEqual([c for c in calls[8:] if c[0] == "pre_forward"], [("pre_forward", True, 0)])

        def fails(e):
            raise KeyError("of the hook")

        with self.assertRaises(KeyError):
            refrain.Graphs(context, [refrain.Callable(t)], hooks=[refrain.Hooks(pre_forward=[fails])])


if __name__ == "__main__":
    unittest.main()
