# SPDX-License-Identifier: Apache-2.0
"""Trains a PyTorch module whose forward and backward are captured graphs: torch_layer.py [cpu|cuda]

The trace has inputs of the names of the module's parameters. They stay in PyTorch's memory, gradients too, so any
optimizer of PyTorch works. On a GPU all work is in PyTorch's current stream.
"""
import sys

import torch

import refrain
import refrain.torch

TOKENS, WIDTH = 32, 16


def record(context):
    t = refrain.Trace(context)
    x = t.input("x", "input_grad", "f32", (TOKENS, WIDTH))
    up = t.input("0.weight", "trainable", "f32", (4 * WIDTH, WIDTH))
    down = t.input("2.weight", "trainable", "f32", (WIDTH, 4 * WIDTH))
    t.output("y", t.linear(t.gelu(t.linear(x, up)), down))
    return t


def main(device):
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False), torch.nn.GELU(),
                              torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)).to(device)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-2)
    x = torch.randn(TOKENS, WIDTH).to(device)
    target = x.flip(1)
    with refrain.Context(device) as context, refrain.Graphs(
            context, [refrain.Callable(record(context))], **refrain.torch.bind(mlp)) as graphs:
        layer = refrain.torch.Layer(graphs)
        for step in range(60):
            with graphs.step():
                loss = torch.nn.functional.mse_loss(layer(x), target)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if step % 20 == 0 or step == 59:
                print(f"step {step}: loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1] if len(sys.argv) > 1 else "cpu") < 0.1 else "the loss did not fall")
