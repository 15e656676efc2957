# SPDX-License-Identifier: Apache-2.0
"""Graphed callables compared with a module of PyTorch. Skipped without PyTorch; REFRAIN_TEST_DEVICE=cuda uses a GPU."""
import gc
import os
import unittest

try:
    import torch
except ImportError:
    torch = None

import refrain

DEVICE = os.environ.get("REFRAIN_TEST_DEVICE", "cpu")
T, C, I = 64, 48, 96


def record(context, dtype="f32"):
    """An MLP of a transformer with its norm: x + down(silu(gate(n)) * up(n))."""
    t = refrain.Trace(context)
    x = t.input("x", "input_grad", dtype, (T, C))
    norm = t.input("norm.weight", "trainable", dtype, (C,))
    gate, up = (t.input(f"{name}.weight", "trainable", dtype, (I, C)) for name in ("gate", "up"))
    down = t.input("down.weight", "trainable", dtype, (C, I))
    h = t.rmsnorm(x, norm, eps=1e-5)
    t.output("y", t.add(x, t.linear(t.swiglu(t.linear(h, gate), t.linear(h, up)), down)))
    return t


def module(dtype):
    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.RMSNorm(C, eps=1e-5)
            self.gate = torch.nn.Linear(C, I, bias=False)
            self.up = torch.nn.Linear(C, I, bias=False)
            self.down = torch.nn.Linear(I, C, bias=False)

        def forward(self, x):
            h = self.norm(x)
            return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))

    torch.manual_seed(1)
    return Mlp().to(DEVICE, dtype)


@unittest.skipIf(torch is None, "PyTorch is not installed")
@unittest.skipIf(torch is not None and DEVICE == "cuda" and not torch.cuda.is_available(), "there is no GPU")
class Compared(unittest.TestCase):
    def layer(self, mine, dtype, **options):
        import refrain.torch
        context = refrain.Context(DEVICE)
        graphs = refrain.Graphs(context, [refrain.Callable(record(context, dtype))], **refrain.torch.bind(mine),
                                **options)
        return graphs, refrain.torch.Layer(graphs)

    def data(self, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(T, C, generator=generator).to(DEVICE, dtype)

    def compare(self, dtype, name, tolerance):
        theirs, mine, exact = module(dtype), module(dtype), module(dtype).double()
        graphs, layer = self.layer(mine, name)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (theirs, mine, exact)]
        with graphs:
            for step in range(5):
                x, target = self.data(dtype, step), self.data(dtype, 100 + step)
                found = []
                for which, m in enumerate((theirs, mine, exact)):
                    optimizers[which].zero_grad(set_to_none=False)
                    leaf = (x.double() if which == 2 else x).clone().requires_grad_()
                    if which == 1:
                        graphs.begin_step()
                    y = layer(leaf) if which == 1 else m(leaf)
                    value = y.detach().double().clone()
                    ((y.double() - target.double()) ** 2).mean().mul(10).backward()
                    if which == 1:
                        graphs.end_step()
                    optimizers[which].step()
                    found.append([value, leaf.grad.double()] + [p.grad.double().clone() for p in m.parameters()])
                for other, own, true in zip(*found):
                    scale = true.abs().max().item() + 1e-12
                    error = (own - true).abs().max().item() / scale
                    allowed = 2 * (other - true).abs().max().item() / scale + tolerance
                    self.assertLessEqual(error, allowed, f"step {step}, shape {tuple(true.shape)}")
            for p, q in zip(mine.parameters(), theirs.parameters()):
                torch.testing.assert_close(p.float(), q.float(), rtol=0.02, atol=0.02)

    def test_f32(self):
        self.compare(torch.float32, "f32", 1e-5)

    def test_bf16(self):
        self.compare(torch.bfloat16, "bf16", 8e-3)

    def test_views(self):
        """No copies: a view reads what the library writes, and writes what it reads."""
        mine = module(torch.float32)
        graphs, layer = self.layer(mine, "f32")
        view = torch.from_dlpack(graphs.tensor("down.weight"))
        self.assertEqual(view.data_ptr(), mine.down.weight.data_ptr())
        self.assertEqual(view.device.type, DEVICE)
        with graphs.step():
            y = layer(self.data(torch.float32, 3))
            y.sum().backward()
        gradient = torch.from_dlpack(graphs.gradient("down.weight"))
        self.assertEqual(gradient.data_ptr(), mine.down.weight.grad.data_ptr())
        self.assertGreater(gradient.abs().sum().item(), 0)

    def test_lifetimes(self):
        """A tensor of PyTorch may outlive the graphs and the context that it is from."""
        context = refrain.Context(DEVICE)
        graphs = refrain.Graphs(context, [refrain.Callable(record(context))])
        values = torch.arange(C, dtype=torch.float32)
        graphs.tensor("norm.weight").write(values.numpy() if DEVICE == "cpu" else bytes(values.numpy()))
        view = torch.from_dlpack(graphs.tensor("norm.weight"))
        graphs.close()
        context.close()
        gc.collect()
        self.assertTrue(torch.equal(view.cpu(), values))
        self.assertIsNotNone(graphs._pointer)
        del view
        self.assertIsNone(graphs._pointer)

    def test_frozen(self):
        mine = module(torch.float32)
        mine.gate.weight.requires_grad_(False)
        import refrain.torch
        bound = refrain.torch.bind(mine)
        self.assertEqual(sorted(bound["gradients"]), ["down.weight", "norm.weight", "up.weight"])

    def test_refused(self):
        mine = module(torch.float32)
        graphs, layer = self.layer(mine, "f32")
        with self.assertRaises(refrain.MismatchError), graphs.step():
            layer(self.data(torch.float32, 1)[: T // 2])
        with self.assertRaises(refrain.MismatchError), graphs.step():
            layer(self.data(torch.float64, 1))
        with self.assertRaises(refrain.InvalidError), graphs.step():
            graphs.forward(0, 0, self.data(torch.float32, 1).t())
        with graphs.step():
            layer(self.data(torch.float32, 1)).sum().backward()


@unittest.skipIf(torch is None or DEVICE != "cuda" or not torch.cuda.is_available(), "there is no GPU")
class Streams(unittest.TestCase):
    """All work is in PyTorch's stream: without a wait, each library sees what the other has written."""

    def train(self, stream, steps=20):
        import refrain.torch
        mine = module(torch.bfloat16)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.05)
        target = torch.randn(T, C, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
        torch.cuda.synchronize()
        losses = []
        with torch.cuda.stream(stream), refrain.Context(DEVICE) as context:
            graphs = refrain.Graphs(context, [refrain.Callable(record(context, "bf16"))], **refrain.torch.bind(mine))
            layer = refrain.torch.Layer(graphs)
            for step in range(steps):
                # Work that takes long is in front of the step, so that a missing order would show.
                x = torch.randn(T, C, generator=torch.Generator().manual_seed(step)).to(DEVICE, torch.bfloat16)
                busy = torch.ones(2048, 2048, device=DEVICE)
                for _ in range(10):
                    busy = busy @ busy * 1e-6
                x = x + busy.mean().clamp(0, 0).to(x.dtype)
                with graphs.step():
                    loss = ((layer(x) - target).float() ** 2).mean()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                losses.append(loss.detach())
        torch.cuda.synchronize()
        return [value.item() for value in losses]

    def test_streams(self):
        losses = self.train(torch.cuda.default_stream())
        self.assertLess(losses[-1], losses[0])
        self.assertEqual(self.train(torch.cuda.Stream()), losses)

    def test_another_consumer_waits(self):
        """A consumer on a separate stream gets a finished tensor."""
        import refrain.torch
        mine = module(torch.float32)
        context = refrain.Context(DEVICE)
        with refrain.Graphs(context, [refrain.Callable(record(context))], **refrain.torch.bind(mine)) as graphs:
            x = torch.randn(T, C, device=DEVICE)
            torch.cuda.synchronize()
            graphs.begin_step()
            (y,) = graphs.forward(0, 0, x)
            with torch.cuda.stream(torch.cuda.Stream()):
                got = torch.from_dlpack(y).clone()
            torch.cuda.synchronize()
            torch.testing.assert_close(got, mine(x).detach(), rtol=1e-2, atol=1e-2)
            graphs.abort_step()


if __name__ == "__main__":
    unittest.main()
