# SPDX-License-Identifier: Apache-2.0
"""Graphed callables and memory, with the standard library alone."""
import array
import ctypes
import gc
import os
import random
import sys
import unittest
import weakref

import refrain
from refrain import tensor

T, C, H = 5, 3, 4


def floats(n, seed):
    draw = random.Random(seed)
    return array.array("f", [draw.uniform(-1, 1) for _ in range(n)])


def shaped(values, *shape):
    """An array as a tensor of a shape."""
    return memoryview(values).cast("B").cast("f", shape)


def linear(context, name="w", role="input_grad"):
    t = refrain.Trace(context)
    x = t.input("x", role, "f32", (T, C))
    w = t.input(name, "trainable", "f32", (H, C))
    t.output("y", t.linear(x, w))
    return t.finish()


class Numbers(unittest.TestCase):
    def setUp(self):
        self.context = refrain.Context("cpu")
        self.x, self.w, self.dy = floats(T * C, 1), floats(H * C, 2), floats(T * H, 3)

    def graphs(self, **options):
        return refrain.Graphs(self.context, [refrain.Callable(linear(self.context), name="layer")], **options)

    def test_linear(self):
        """Against sums in double precision."""
        with self.graphs() as g:
            g.tensor("w").write(self.w)
            with g.step():
                (y,) = g.forward(0, 0, shaped(self.x, T, C))
                self.assertEqual((y.name, y.dtype, y.shape, y.nbytes), ("y", "f32", (T, H), 4 * T * H))
                got_y = y.tolist()
                (dx,) = g.backward(0, 0, shaped(self.dy, T, H))
                got_dx = dx.tolist()
            dw = g.gradient("w").tolist()
        x, w, dy = ([list(m[i * k : i * k + k]) for i in range(len(m) // k)]
                    for m, k in ((self.x, C), (self.w, C), (self.dy, H)))
        for i in range(T):
            for h in range(H):
                self.assertAlmostEqual(got_y[i][h], sum(x[i][c] * w[h][c] for c in range(C)), places=5)
            for c in range(C):
                self.assertAlmostEqual(got_dx[i][c], sum(dy[i][h] * w[h][c] for h in range(H)), places=5)
        for h in range(H):
            for c in range(C):
                self.assertAlmostEqual(dw[h][c], sum(dy[i][h] * x[i][c] for i in range(T)), places=5)

    def test_eager_has_the_same_bits(self):
        found = []
        for eager in (False, True):
            with self.graphs(eager=eager) as g:
                g.tensor("w").write(self.w)
                with g.step():
                    y = g.forward(0, 0, shaped(self.x, T, C))[0].read()
                    dx = g.backward(0, 0, shaped(self.dy, T, H))[0].read()
                found.append((y, dx, g.gradient("w").read()))
        self.assertEqual(found[0], found[1])

    def test_own_memory(self):
        """Parameters and main gradients in the caller's memory, two microbatches, accumulated over two steps."""
        memory = (ctypes.c_float * (H * C + 64))()
        start = -ctypes.addressof(memory) % 64 // 4
        dw = (ctypes.c_float * (H * C + 64))()
        first = -ctypes.addressof(dw) % 64 // 4
        w_view = memoryview(memory).cast("B")[4 * start : 4 * (start + H * C)].cast("f", (H, C))
        dw_view = memoryview(dw).cast("B")[4 * first : 4 * (first + H * C)].cast("f", (H, C))
        memoryview(memory).cast("B").cast("f")[start : start + H * C] = self.w
        with self.graphs(tensors={"w": w_view}, gradients={"w": refrain.Gradient(dw_view)}) as g:
            for _ in range(2):
                with g.step():
                    for m in range(2):
                        g.forward(0, m, shaped(self.x, T, C))
                        g.backward(0, m, shaped(self.dy, T, H))
        with self.graphs() as g:
            g.tensor("w").write(self.w)
            with g.step():
                g.forward(0, 0, shaped(self.x, T, C))
                g.backward(0, 0, shaped(self.dy, T, H))
            once = g.gradient("w").tolist()
        for h in range(H):
            for c in range(C):
                self.assertAlmostEqual(dw_view[h, c], 4 * once[h][c], places=4)

    def test_links_and_schedule(self):
        def square(name):
            t = refrain.Trace(self.context)
            x = t.input("x", "input_grad", "f32", (T, C))
            t.output("y", t.linear(x, t.input(name, "trainable", "f32", (C, C))))
            return t

        schedule = refrain.Schedule(self.context, "0F0 0F1 0B0 0B1", layers=2)
        self.assertEqual((schedule.slots(0), schedule.slot(0, 1)), (2, 1))
        layers = [refrain.Callable(square("a")), refrain.Callable(square("b"), links=[("x", 0, "y")])]
        calls = []
        with refrain.Graphs(self.context, layers, schedule=schedule) as g, g.step():
            g_memory = g.memory
            while True:
                call = g.expected()
                if call is None:
                    break
                op, stage, microbatch, layer = call
                calls.append(f"{layer}{op}{microbatch}")
                if op == "F":
                    (y,) = g.forward(layer, microbatch, *([shaped(self.x, T, C)] if layer == 0 else []))
                else:
                    dx = g.backward(layer, microbatch, *([y] if layer == 1 else []))
                    self.assertEqual(len(dx), 1 - layer)
        self.assertEqual(calls, ["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"])
        self.assertEqual(g_memory.slots, 2)
        self.assertGreater(g_memory.planned_bytes, 0)
        schedule.close()

    def test_input_without_gradient(self):
        callable_ = refrain.Callable(linear(self.context, role="input"))
        with refrain.Graphs(self.context, [callable_]) as g, g.step():
            g.forward(0, 0, shaped(self.x, T, C))
            self.assertEqual(g.backward(0, 0, shaped(self.dy, T, H)), (None,))

    def test_errors(self):
        with self.graphs() as g:
            with self.assertRaises(refrain.MismatchError) as caught:
                with g.step():
                    g.backward(0, 0, shaped(self.dy, T, H))
            self.assertEqual(caught.exception.slug, "graphs.order")
            with self.assertRaises(refrain.MismatchError) as caught, g.step():
                g.forward(0, 0, shaped(self.x, C, T))
            self.assertEqual(caught.exception.slug, "replay.signature")
            for wrong in (3, "text", shaped(self.x, T, C)[::2], array.array("h", [1])):
                with self.assertRaises((refrain.InvalidError, NotImplementedError)), g.step():
                    g.forward(0, 0, wrong)
            with self.assertRaises(refrain.InvalidError):
                g.forward(7, 0)
            with self.assertRaises(refrain.InvalidError):
                g.tensor("w").write(b"123")
            with self.assertRaises(refrain.RefrainError) as caught:
                g.tensor("v")
            self.assertEqual(caught.exception.slug, "program.name")
            with g.step():  # none of the errors has ended the graphs
                g.forward(0, 0, shaped(self.x, T, C))
                g.backward(0, 0, shaped(self.dy, T, H))

    def test_recording_error_names_the_line(self):
        t = refrain.Trace(self.context)
        x = t.input("x", "input", "f32", (T, C))
        w = t.input("w", "trainable", "f32", (H, C + 1))
        line = sys._getframe().f_lineno + 1
        t.output("y", t.linear(x, w))
        with self.assertRaises(refrain.InvalidError) as caught:
            t.finish()
        self.assertEqual(caught.exception.slug, "trace.shape")
        self.assertIn(f"{os.path.basename(__file__)}:{line}", str(caught.exception).replace(__file__, os.path.basename(
            __file__)))
        with self.assertRaises(refrain.InvalidError):
            t.input("z", "parameter", "f32", (1,))
        with self.assertRaises(refrain.InvalidError):
            t.input("z", "input", "float32", (1,))

    def test_ops(self):
        """Every recording method gives a value of the right shape, and the trace is printed."""
        t = refrain.Trace(self.context)
        x = t.input("x", "input_grad", "f32", (8, 6))
        w = t.input("w", "trainable", "f32", (6, 6))
        v = t.input("v", "trainable", "f32", (6,))
        ids = t.input("ids", "input", "i32", (8,))
        docs = t.input("docs", "input", "i32", (3,))
        heads = t.reshape(t.linear(x, w, v), (8, 1, 6))
        rope = t.rope(heads, t.positions(docs, 8), 10000.0)
        values = {
            "matmul": (t.matmul(x, w, ta=False, tb=True, to="f32"), (8, 6)),
            "embedding": (t.embedding(w, ids), (8, 6)),
            "attention": (t.attention(rope, rope, heads, docs, causal=True), (8, 1, 6)),
            "layernorm": (t.layernorm(x, v), (8, 6)), "rmsnorm": (t.rmsnorm(x, v), (8, 6)),
            "add": (t.add(x, v), (8, 6)), "mul": (t.mul(x, x), (8, 6)), "scale": (t.scale(x, 2.0), (8, 6)),
            "cast": (t.cast(x, "bf16"), (8, 6)), "copy": (t.copy(t.transpose(x, 0, 1)), (6, 8)),
            "fill": (t.fill(1.0, "f32", (2,)), (2,)), "gelu": (t.gelu(x), (8, 6)), "silu": (t.silu(x), (8, 6)),
            "swiglu": (t.swiglu(x, x), (8, 6)), "softcap": (t.softcap(x, 3.0), (8, 6)),
            "dropout": (t.dropout(x, t.rng_stream("mine"), 0.5), (8, 6)), "sum": (t.sum(x), (1,)),
            "mean": (t.mean(x, 0), (6,)), "slice": (t.slice(x, 1, 2, 3), (8, 3)),
            "expand": (t.expand(t.reshape(v, (1, 6)), 0, 4), (4, 6)), "concat": (t.concat([x, x], 0), (16, 6)),
            "detach": (t.detach(x), (8, 6)),
            "cross_entropy": (t.cross_entropy(x, ids, t.token_count(ids)), (1,)),
        }
        weights, index = t.moe_route(x, 2)
        splits, order, place = t.moe_sort(index, 6)
        rows = t.moe_permute(x, order, place)
        experts = t.input("experts", "trainable", "f32", (6, 6, 6))
        y = t.grouped_linear(rows, experts, t.splits_to_offsets(splits, 16))
        values["moe"] = (t.moe_unpermute(y, order, place, weights), (8, 6))
        for name, (value, shape) in values.items():
            self.assertEqual(t.shape(value), shape, name)
        self.assertEqual(t.sites, 1)
        t.scope("layer0")
        t.output("y", values["moe"][0])
        t.finish()
        self.assertIn("grouped_matmul", str(t))

    def test_rng(self):
        t = refrain.Trace(self.context)
        x = t.input("x", "input_grad", "f32", (T, C))
        t.output("y", t.dropout(x, t.rng_stream("mine"), 0.5))
        with refrain.Graphs(self.context, [refrain.Callable(t)]) as g:
            g.set_rng(7, 3, "mine")
            self.assertEqual(g.get_rng("mine"), (7, 3))
            found = []
            for step in (3, 3, 4):
                g.set_rng(7, step, "mine")
                with g.step():
                    found.append(g.forward(0, 0, shaped(self.x, T, C))[0].read())
                    g.backward(0, 0, shaped(self.x, T, C))
            self.assertEqual(found[0], found[1])
            self.assertNotEqual(found[0], found[2])


class Memory(unittest.TestCase):
    """Who keeps memory, and for how long."""

    def setUp(self):
        self.context = refrain.Context("cpu")
        self.graphs = refrain.Graphs(self.context, [refrain.Callable(linear(self.context))])

    def freed(self):
        return self.graphs._pointer is None

    def consume(self, capsule):
        """What a consumer does: it renames the capsule and calls the deleter in the end. Returns both."""
        managed = tensor._get(capsule, b"dltensor_versioned")
        rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_SetName", ctypes.pythonapi))
        name = b"used_dltensor_versioned"
        self._name = name
        rename(capsule, name)
        data = ctypes.c_void_p.from_address(managed + 32).value
        deleter = tensor._abi.DeleterFn(ctypes.c_void_p.from_address(managed + 16).value)
        return data, lambda: deleter(managed)

    def export(self, name="w"):
        return self.graphs.tensor(name).__dlpack__(max_version=(1, 0))

    def test_capsule_without_consumer(self):
        capsule = self.export()
        self.assertEqual(len(tensor._exports), 1)
        self.graphs.close()
        self.assertFalse(self.freed())
        del capsule
        self.assertEqual(len(tensor._exports), 0)
        self.assertTrue(self.freed())

    def test_capsule_with_consumer(self):
        w = self.graphs.tensor("w")
        w.write(floats(H * C, 9))
        data, delete = self.consume(w.__dlpack__(max_version=(1, 0)))
        gc.collect()
        self.assertEqual(len(tensor._exports), 1)  # the capsule is gone, its consumer is not
        expected = w.read()
        self.graphs.close()
        self.context.close()
        self.assertFalse(self.freed())
        self.assertEqual(ctypes.string_at(data, 4 * H * C), expected)  # the memory outlives its owner's close
        with self.assertRaises(refrain.ClosedError):
            w.read()
        with self.assertRaises(refrain.ClosedError):
            w.__dlpack__(max_version=(1, 0))
        delete()
        self.assertTrue(self.freed())

    def test_export_keeps_the_object(self):
        data, delete = self.consume(self.export())
        alive = weakref.ref(self.graphs)
        del self.graphs
        gc.collect()
        self.assertIsNotNone(alive())
        delete()
        gc.collect()
        self.assertIsNone(alive())

    def test_consumer_on_another_thread(self):
        import threading
        data, delete = self.consume(self.export())
        self.graphs.close()
        thread = threading.Thread(target=delete)
        thread.start()
        thread.join()
        self.assertTrue(self.freed())

    def test_refused_exports(self):
        w = self.graphs.tensor("w")
        self.assertEqual(w.__dlpack_device__(), (1, 0))
        for options in ({}, {"max_version": (0, 8)}, {"max_version": (1, 0), "copy": True},
                        {"max_version": (1, 0), "dl_device": (2, 0)}):
            with self.assertRaises(BufferError):
                w.__dlpack__(**options)
        self.assertEqual(len(tensor._exports), 0)

    def test_import_keeps_the_producer(self):
        """A producer's capsule is released after the call, or with the graphs that captured its address."""

        class Producer:
            def __init__(self, of):
                self.of = of

            def __dlpack_device__(self):
                return (1, 0)

            def __dlpack__(self, *, stream=None, max_version=None):
                return self.of.__dlpack__(max_version=max_version)

        other = refrain.Graphs(self.context, [refrain.Callable(linear(self.context))],
                               tensors={"w": Producer(self.graphs.tensor("w"))})
        self.assertEqual(len(tensor._exports), 1)
        self.graphs.close()
        self.assertFalse(self.freed())  # the other graphs use its weight
        other.tensor("w").write(floats(H * C, 4))
        other.close()
        del other
        gc.collect()
        self.assertTrue(self.freed())

    def test_old_producer(self):
        class Old:
            def __dlpack_device__(self):
                return (1, 0)

            def __dlpack__(self, *, stream=None, max_version=None):
                return tensor._new(16, b"dltensor", None)

        with self.assertRaisesRegex(refrain.InvalidError, "before 1.0"):
            self.graphs.forward(0, 0, Old())

    def test_memory_of_a_gpu(self):
        """Graphs on the CPU refuse it; they would read an address that is not theirs."""
        there = tensor.Memory(None, tensor.type_struct("f32", (T, C)), 1 << 40, False)
        with self.assertRaisesRegex(refrain.InvalidError, "memory of a GPU"), self.graphs.step():
            self.graphs.forward(0, 0, there)
        with self.assertRaisesRegex(refrain.InvalidError, "memory of a GPU"):
            refrain.Graphs(self.context, [refrain.Callable(linear(self.context))], tensors={"w": there})

    def test_close_in_a_step(self):
        with self.assertRaises(refrain.ClosedError):
            with self.graphs.step():
                self.graphs.close()
        with self.assertRaises(refrain.ClosedError):
            self.graphs.forward(0, 0, shaped(floats(T * C, 1), T, C))

    def test_many(self):
        for _ in range(200):
            capsule = self.export()
            del capsule
        self.assertEqual((len(tensor._exports), self.graphs._exports), (0, 0))


if __name__ == "__main__":
    unittest.main()
