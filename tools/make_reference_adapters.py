#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the adapters in tests/models/adapters/ with the PEFT library, and trains them with torch.

    tools/make_reference_adapters.py                       # all of tests/models/adapters
    tools/make_reference_adapters.py BASE FOLDER TEXT      # a LoRA of rank 16 on the model BASE

A folder has an adapter with random values in every tensor, as PEFT saves it, and reference.safetensors: tokens and
targets (i32, one document for each of 20 steps; random, or the first 20 x 65 tokens of the file TEXT), the logits of
the first rows of step 0, the loss of every step, the gradients of step 0 ("d_" before the name of the parameter), and
the values after 20 steps of AdamW ("after_" before it). Everything is computed in f32. For a model BASE the same
adapter is also trained in f64: reference.safetensors has its results, and the differences of torch's f32 are printed,
in the form of `adapters_test BASE FOLDER`. tests/models/adapters_test.c compares our reader, forward, backward and update
with these; `adapters_test BASE FOLDER` does the same for other folders. Needs torch, transformers, peft and
safetensors; the build and the tests do not run it.
"""
import json
import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, ROWS = 20, 6
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPT2 = ["c_attn", "c_proj", "c_fc"]
CASES = {
    "llama-lora": ("llama", dict(r=3, lora_alpha=6, target_modules=ALL)),
    "llama-rslora": ("llama", dict(r=2, lora_alpha=5, use_rslora=True, target_modules=r".*layers\.1\..*(q_proj|up_proj)",
                                   rank_pattern={"up_proj": 4}, alpha_pattern={"model.layers.1.self_attn.q_proj": 3})),
    "gpt2-lora": ("gpt2-untied", dict(r=2, lora_alpha=3, target_modules=GPT2 + ["wte", "lm_head"],
                                      fan_in_fan_out=True)),
    "qwen3-dora": ("qwen3", dict(r=2, lora_alpha=4, use_dora=True, target_modules=["q_proj", "v_proj", "down_proj"])),
    "gpt2-dora": ("gpt2", dict(r=2, lora_alpha=4, use_dora=True, target_modules=["c_attn", "c_fc"],
                               fan_in_fan_out=True)),
    "experts-lora": ("qwen3-moe", dict(r=2, lora_alpha=4, target_modules=["q_proj"],
                                       target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
}


def name_of(parameter):
    """The name that the checkpoint has: base_model.model.X.lora_A.default.weight is X.lora_A.weight."""
    name = parameter.removeprefix("base_model.model.").replace(".default", "")
    name = name.replace(".experts.base_layer.", ".experts.gate_up_proj.").replace(".experts.lora", ".experts.down_proj.lora")
    return name.removesuffix(".weight") if "magnitude" in name else name


def ordered(name, x, experts):
    """Experts as (E, r, in) and (E, out, r); PEFT has (E r, in) and (out, r E)."""
    if ".experts." not in name:
        return x.clone()
    if "lora_A" in name:
        return x.reshape(experts, -1, x.shape[1]).clone()
    return x.reshape(x.shape[0], -1, experts).permute(2, 0, 1).contiguous()


def train(model, trained, tokens, targets, lr, experts):
    """Losses of all steps; logits and gradients of step 0; values after the last step."""
    out, losses = {}, []
    optimizer = torch.optim.AdamW(trained.values(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for step in range(STEPS):
        logits = model(input_ids=tokens[step:step + 1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, targets[step])
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            out["logits"] = logits[:ROWS].detach().clone()
            out.update({"d_" + n: ordered(n, p.grad, experts) for n, p in trained.items()})
        optimizer.step()
        losses.append(loss.item())
    out.update({"after_" + n: ordered(n, p.detach(), experts) for n, p in trained.items()})
    out["losses"] = torch.tensor(losses, dtype=torch.float64)
    return out


def compute_in_f64(model):
    """transformers computes norms, softmax and RoPE in f32 whatever the model's type is: here they are f64 too."""
    to, softmax = torch.Tensor.to, torch.nn.functional.softmax
    torch.Tensor.float = torch.Tensor.double
    torch.Tensor.to = lambda x, *a, **k: to(x, *[torch.float64 if y is torch.float32 else y for y in a],
                                            **{n: torch.float64 if y is torch.float32 else y for n, y in k.items()})
    torch.nn.functional.softmax = lambda x, dim=None, dtype=None, **k: softmax(x, dim=dim, dtype=x.dtype)
    model.double()
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            half = module.inv_freq.numel()
            module.inv_freq = model.config.rope_parameters["rope_theta"] ** -(torch.arange(half).double() / half)


def print_differences(f32, f64):
    """Of each gradient: the largest difference, relative to its largest element."""
    for name, want in f64.items():
        if name.startswith("d_"):
            print(f"{name} {((f32[name].double() - want).abs().max() / want.abs().max()).item():.2e}")
    losses = (f32["losses"] / f64["losses"] - 1).abs().max().item()
    print(f"torch f32 to f64: losses of {STEPS} steps within {losses:.1e}")


def make(base, folder, length, text=None, spread=0.05, lr=1e-3, **config):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    vocab, experts = model.config.vocab_size, getattr(model.config, "num_experts", 1)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    trained = {name_of(n): p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in trained.items():
            if "lora_B" in name or "embedding" in name:
                p.normal_(0, spread)
    first = {n: p.detach().clone() for n, p in trained.items()}
    model.save_pretrained(folder, save_embedding_layers=False)
    os.remove(os.path.join(folder, "README.md"))
    path = os.path.join(folder, "adapter_config.json")
    with open(path) as f:
        config = json.load(f)
    config["base_model_name_or_path"] = os.path.basename(base)
    for key in ("target_modules", "target_parameters"):  # sets
        if isinstance(config[key], list):
            config[key].sort()
    with open(path, "w") as f:
        json.dump(config, f, indent=2)
    ids = torch.randint(0, vocab, (STEPS, length + 1))
    if text:
        with open(text) as f:
            all_ids = AutoTokenizer.from_pretrained(base)(f.read())["input_ids"]
        ids = torch.tensor(all_ids[:ids.numel()]).view(ids.shape)
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    out = train(model, trained, tokens, targets, lr, experts)
    if text:
        compute_in_f64(model)
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(first[name])
        exact = train(model, trained, tokens, targets, lr, experts)
        assert exact["logits"].dtype == torch.float64
        print_differences(out, exact)
        out = exact
    losses = out["losses"].tolist()
    out["lr"] = torch.tensor([lr])
    out["tokens"], out["targets"] = tokens.to(torch.int32), targets.to(torch.int32)
    save_file({n: x.to(torch.float32) if x.is_floating_point() else x for n, x in out.items()}, os.path.join(folder, "reference.safetensors"))
    print(f"{folder}: {len(trained)} tensors, loss {losses[0]:.6f} to {losses[-1]:.6f}")


def main():
    if len(sys.argv) > 3:
        torch.set_num_threads(2)
        make(sys.argv[1], sys.argv[2], 64, sys.argv[3], spread=0.002, lr=1e-4, r=16, lora_alpha=32,
             target_modules="all-linear")
        return
    torch.set_num_threads(1)
    models = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "models")
    for name, (base, config) in CASES.items():
        make(os.path.join(models, base), os.path.join(models, "adapters", name), 12, **config)


if __name__ == "__main__":
    main()
