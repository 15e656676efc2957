#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps of GPT-2 124M on a CPU: PyTorch's and ours, alternating.

    peers_cpu.py --refrain PROGRAM [--threads 2] [--rounds 5] [--seconds 6] [--only WORD]

The shapes are those of `refrain bench gpt2-124m`: B 4 x T 64, bf16, AdamW, gradients clipped to a norm of 1. Variants of PyTorch:
weights in f32 with autocast, or all in bf16 (less work than ours, which keeps master weights and moments in f32); eager or
torch.compile. A round runs each variant once in its own process. Prints a JSON object per run, then the medians over rounds.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from peers_gpu import gpt

B, T, V = 4, 64, 50257
VARIANTS = ["autocast", "autocast compile", "bf16", "bf16 compile"]


def measure(variant, threads, seconds):
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = gpt(V, 1024, 768, 12, 12)
    if variant.startswith("bf16"):
        model = model.bfloat16()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    forward = torch.compile(model) if variant.endswith("compile") else model
    ids = torch.randint(0, V, (B, T + 1))

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant.startswith("autocast")):
            loss = forward(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def ours(program, threads):
    command = [program, "bench", "gpt2-124m", "--dtype", "bf16", "--threads", str(threads), "--json"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(text)["ms_per_step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refrain")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--only", default="")
    parser.add_argument("--variant", help="measure one variant in this process")
    a = parser.parse_args()
    if a.variant:
        print(json.dumps({"ms": measure(a.variant, a.threads, a.seconds)}))
        return
    times = {}
    for _ in range(a.rounds):
        for variant in [v for v in VARIANTS if a.only in v]:
            command = [sys.executable, os.path.abspath(__file__), "--variant", variant, "--threads", str(a.threads)]
            run = subprocess.run(command + ["--seconds", str(a.seconds)], capture_output=True, text=True)
            if run.returncode:
                print(json.dumps({"variant": variant, "failed": run.stderr[-400:]}), flush=True)
                continue
            times.setdefault("PyTorch, " + variant, []).append(json.loads(run.stdout.splitlines()[-1])["ms"])
            print(json.dumps({"variant": variant, "ms": times["PyTorch, " + variant][-1]}), flush=True)
        if a.refrain:
            times.setdefault("Refrain", []).append(ours(a.refrain, a.threads))
            print(json.dumps({"variant": "Refrain", "ms": times["Refrain"][-1]}), flush=True)
    for name, all_times in times.items():
        print(f"{name:26} {statistics.median(all_times):9.1f} ms, median of {len(all_times)}: "
              + " ".join(f"{t:.0f}" for t in all_times))


if __name__ == "__main__":
    main()
