# SPDX-License-Identifier: Apache-2.0
"""Times a layer's forward and backward: captured graphs, PyTorch's module and its graphed callable.

    python3 python/bench_layer.py [TOKENS WIDTH]
"""
import statistics
import sys

import torch

import refrain
import refrain.torch


def record(context, tokens, width):
    t = refrain.Trace(context)
    x = t.input("x", "input_grad", "bf16", (tokens, width))
    norm = t.input("norm.weight", "trainable", "bf16", (width,))
    gate, up = (t.input(f"{n}.weight", "trainable", "bf16", (4 * width, width)) for n in ("gate", "up"))
    down = t.input("down.weight", "trainable", "bf16", (width, 4 * width))
    h = t.rmsnorm(x, norm, eps=1e-5)
    t.output("y", t.add(x, t.linear(t.swiglu(t.linear(h, gate), t.linear(h, up)), down)))
    return t


class Mlp(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.RMSNorm(width, eps=1e-5)
        self.gate = torch.nn.Linear(width, 4 * width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


def microseconds(step, times=30, rounds=5):
    """Median over rounds of the time of a step, measured with events."""
    for _ in range(5):
        step()
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            step()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / times)
    return statistics.median(found)


def main(tokens, width):
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    theirs, graphed, mine = (Mlp(width).to("cuda", torch.bfloat16) for _ in range(3))
    capture = torch.cuda.make_graphed_callables(graphed, (x,))
    context = refrain.Context("cuda")
    graphs = refrain.Graphs(context, [refrain.Callable(record(context, tokens, width))], **refrain.torch.bind(mine))
    layer = refrain.torch.Layer(graphs)

    def ours():
        with graphs.step():
            layer(x).backward(dy)

    def direct():
        graphs.use_stream(torch.cuda.current_stream().cuda_stream)
        with graphs.step():
            graphs.forward(0, 0, x)
            graphs.backward(0, 0, dy)

    rows = {"torch module": lambda: theirs(x).backward(dy), "torch graphed callable": lambda: capture(x).backward(dy),
            "refrain.torch.Layer": ours, "refrain.Graphs": direct}
    for name, step in rows.items():
        print(f"{tokens} x {width}: {name:24} {microseconds(step):9.1f} us")


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:3])) if len(sys.argv) == 3 else [main(*s) for s in ((64, 256), (4096, 2048))]
