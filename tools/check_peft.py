#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads adapters that refrain trained with the PEFT library and compares logits.

    tools/check_peft.py [BUILD]

Trains adapters of several kinds on models of tests/models/ for three steps with BUILD/refrain (build/release), loads
each checkpoint with PEFT, and compares the logits of 24 tokens with those of BUILD/adapters_test --logits, in f32.
Prints the largest difference for each; fails above 1e-5. Needs torch, transformers and peft.
"""
import os
import subprocess
import sys
import tempfile

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

CASES = [
    ("llama", "{type: lora, rank: 4}"),
    ("llama", '{type: lora, rank: 4, rslora: true, targets: ["*.q_proj", "*.1.*.up_proj"], ranks: {"*.1.*": 2}}'),
    ("llama", '{type: lora, rank: 2, targets: ["*.embed_tokens", lm_head], alphas: {"lm_head": 3}}'),
    ("qwen3", "{type: dora, rank: 3}"),
    ("gpt2", "{type: dora, rank: 3}"),
    ("gpt2-untied", "{type: lora, rank: 3, targets: [all-linear, transformer.wte]}"),
    ("qwen3-moe", '{type: lora, rank: 2, targets: [all-linear, "*.mlp.experts.*"], ranks: {"*experts*": 3}}'),
    ("mixtral", '{type: lora, rank: 2, targets: ["*.mlp.experts.down_proj"]}'),
]
RUN = """refrain: 1
model: %s
data: {train: ["*.py"], sequence: 32}
batch: {tokens: 128, microbatch: 2}
optimizer: {lr: 5e-2}
precision: {dtype: f32}
adapter: %s
run: {steps: 3}
"""


def main():
    build = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "build/release")
    here = os.path.dirname(os.path.abspath(__file__))
    ids = torch.tensor([[(3 + 7 * i) % 256 for i in range(24)]])
    worst = 0.0
    for model, adapter in CASES:
        base = os.path.join(here, "..", "tests", "models", model)
        with tempfile.TemporaryDirectory() as folder:
            config, run = os.path.join(folder, "a.yaml"), os.path.join(folder, "run")
            with open(config, "w") as f:
                f.write(RUN % (os.path.abspath(base), adapter))
            subprocess.run([os.path.join(build, "refrain"), "train", config, "--out", run, "--set", "data.root=" + here],
                           check=True, capture_output=True)
            step = os.path.join(run, "step-000003")
            ours = subprocess.run([os.path.join(build, "adapters_test"), "--logits", base, step], check=True,
                                  capture_output=True, text=True).stdout.split()
            plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
            with torch.no_grad():
                before = plain(input_ids=ids).logits.flatten()
                theirs = PeftModel.from_pretrained(plain, step).eval()(input_ids=ids).logits.flatten()
        got = torch.tensor([float(x) for x in ours])
        difference, effect = (got - theirs).abs().max().item(), (theirs - before).abs().max().item()
        worst = max(worst, difference)
        print(f"{model:12} {adapter}: logits within {difference:.1e}; the adapter changes them by {effect:.1e}")
    sys.exit(worst > 1e-5)


if __name__ == "__main__":
    main()
