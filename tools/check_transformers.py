#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads checkpoint folders that we saved in the transformers library and compares logits.

    tools/check_transformers.py BUILD

Trains every model of tests/models/ for three steps from its folder with BUILD/refrain,
loads the resulting checkpoint with AutoModelForCausalLM, and compares the logits of
24 tokens with those of BUILD/models_test --logits, in f32. The library must find every
weight and no unknown one. A model type that the installed version lacks is reported and
skipped. Needs torch and transformers.
"""
import os
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
TOLERANCE = 1e-5
CONFIG = """refrain: 1
model: %s
data: {root: %s, train: ["src/nn/*.c"], validation: "5%%", sequence: 24}
batch: {tokens: 48, microbatch: 1}
precision: {dtype: f32}
optimizer: {name: adamw, lr: 0.01}
run: {steps: 3}
"""


def check(build, name, work):
    config, run = os.path.join(work, name + ".yaml"), os.path.join(work, name)
    with open(config, "w") as f:
        f.write(CONFIG % (os.path.join(ROOT, "tests", "models", name), ROOT))
    subprocess.run([os.path.join(build, "refrain"), "train", config, "--out", run, "--quiet"], check=True)
    folder = os.path.join(run, "step-000003")
    ours = subprocess.run([os.path.join(build, "models_test"), "--logits", folder], check=True, capture_output=True)
    ours = torch.tensor([float(line) for line in ours.stdout.split()])
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, output_loading_info=True)
    except ValueError as e:
        print(f"{name:12}  left out: {str(e).splitlines()[0][:90]}")
        return True
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others require aligned sizes
    tokens = torch.tensor([[(3 + 7 * i) % model.config.vocab_size for i in range(24)]])
    with torch.no_grad():
        theirs = model.eval()(tokens).logits.flatten()
    worst = (ours - theirs).abs().max().item()
    odd = list(info["missing_keys"]) + list(info["unexpected_keys"]) + list(info["mismatched_keys"])
    print(f"{name:12}  {type(model).__name__}  logits within {worst:.1e}  {odd or ''}")
    return worst <= TOLERANCE and not odd


def main():
    folder = os.path.join(ROOT, "tests", "models")
    names = sorted(n for n in os.listdir(folder) if os.path.exists(os.path.join(folder, n, "config.json")))
    with tempfile.TemporaryDirectory() as work:
        return 0 if all([check(os.path.abspath(sys.argv[1]), name, work) for name in names]) else 1


if __name__ == "__main__":
    sys.exit(main())
