#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/quantized/{fp8,nf4,fp4}: a tiny Llama with quantized linear layers, each with
expected.safetensors: the values that transformers (fp8) and bitsandbytes (nf4 with double quantization, fp4 without)
decode.

    tools/make_quantized_folders.py [FOLDER]

Needs torch, transformers, bitsandbytes and safetensors; the build and the tests do not run it.
"""
import json
import os
import sys

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))


def fp8(w):
    """Blocks of 128 x 128, as DeepSeek-V3's files."""
    rows, columns = w.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    codes = torch.empty_like(w, dtype=torch.float8_e4m3fn)
    decoded = torch.empty_like(w)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = w[part].abs().max() / 448
            codes[part] = (w[part] / scales[i, j]).to(torch.float8_e4m3fn)
            decoded[part] = codes[part].float() * scales[i, j]
    return {"": codes, "_scale_inv": scales}, decoded


def four_bit(w, kind):
    codes, state = bnb.quantize_4bit(w.bfloat16(), blocksize=64, quant_type=kind, compress_statistics=kind == "nf4")
    parts = {"." + k: v for k, v in state.as_dict(packed=True).items()}
    decoded = bnb.dequantize_4bit(codes, state).float() + 0.0  # fp4: -0 where the table of values has 0
    return {"": codes, **parts}, decoded


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "..", "tests", "data", "quantized")
    configs = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"},
        "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}}
    for name, config in configs.items():
        torch.manual_seed(5)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=8, hidden_size=24, intermediate_size=136, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True))
        folder = os.path.join(out, name)
        model.save_pretrained(folder)
        stored, expected = {}, {}
        for key, w in model.state_dict().items():
            w = w.detach() * torch.linspace(0.2, 3.0, w.shape[-1])
            if key == "lm_head.weight":
                continue
            if "proj" not in key:
                stored[key] = expected[key] = w.bfloat16()
                continue
            parts, expected[key] = fp8(w) if name == "fp8" else four_bit(w, name)
            stored.update({key + k: v.contiguous() for k, v in parts.items()})
        save_file(stored, os.path.join(folder, "model.safetensors"), {"format": "pt"})
        save_file({k: v.bfloat16() for k, v in expected.items()}, os.path.join(folder, "expected.safetensors"))
        path = os.path.join(folder, "config.json")
        with open(path) as f:
            described = json.load(f)
        described["quantization_config"] = config
        with open(path, "w") as f:
            json.dump(described, f, indent=2)
            f.write("\n")
        os.remove(os.path.join(folder, "generation_config.json"))


if __name__ == "__main__":
    main()
