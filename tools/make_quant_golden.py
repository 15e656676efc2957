#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/quant/bitsandbytes.safetensors: codes and scales that bitsandbytes computes for weights that
src/ops/quant/dequantize_test.c generates by the same formula. Needs torch, bitsandbytes and safetensors."""

import sys

import bitsandbytes.functional as F
import numpy
import torch
from safetensors.torch import save_file


def weights(rows, columns, seed):
    """Sums of three uniform 10-bit integers, exact in bf16 after the rounding; one block of zeros, one outlier."""
    n = rows * columns
    i = numpy.arange(n, dtype=numpy.uint64)
    h = (i + numpy.uint64(seed)) * numpy.uint64(0x9E3779B97F4A7C15)
    h ^= h >> numpy.uint64(29)
    h *= numpy.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> numpy.uint64(32)
    parts = [((h >> numpy.uint64(k)) & numpy.uint64(1023)).astype(numpy.int64) for k in (0, 10, 20)]
    x = (sum(parts) - 1534) / 32768.0
    x[64:128] = 0
    x[777 % n] = 2.5
    return torch.from_numpy(x.astype(numpy.float32)).bfloat16().reshape(rows, columns)


def quantize_blockwise(x, code, block=256):
    """The formula of bitsandbytes' default backend and CUDA kernel; its CPU library finds only nearly the nearest code."""
    flat = x.reshape(-1).float()
    codes, scales = [], []
    bounds = (code[:-1] + code[1:]) / 2
    for part in flat.split(block):
        most = part.abs().max()
        scaled = torch.clamp(part * (1.0 / most.clamp(min=1e-38)), -1, 1)
        codes.append(torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8))
        scales.append(most)
    return torch.cat(codes), torch.stack(scales)


def fnv(x):
    h = 0xCBF29CE484222325
    for byte in x.contiguous().view(torch.uint8).reshape(-1).tolist():
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return torch.tensor([h - (1 << 64) if h >> 63 else h], dtype=torch.int64)


def main():
    out = {}
    w = weights(48, 384, 1)
    codes, state = F.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
    _, absmax = torch.ops.bitsandbytes.quantize_4bit.default(w, 64, "nf4", torch.uint8)
    state.absmax, state.state2.absmax = quantize_blockwise(absmax - state.offset, F.create_dynamic_map(True))
    out["nf4.codes"] = codes.reshape(-1)
    out["nf4.scales"] = state.absmax
    out["nf4.factors"] = state.state2.absmax
    out["nf4.offset"] = state.offset.reshape(1)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")):
        state.dtype = dtype
        out[f"nf4.{name}"] = fnv(F.dequantize_4bit(codes, state))
    w = weights(7, 96, 2)
    codes, scales, _ = F.int8_vectorwise_quant(w.half())
    out["int8.codes"] = codes.reshape(-1).view(torch.uint8)
    out["int8.scales"] = scales
    out["int8.f32"] = fnv(torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales))
    for signed in (True, False):
        name = "dynamic8" if signed else "dynamic8u"
        x = weights(3, 301, 3).float()
        x = x if signed else x.abs()
        code = F.create_dynamic_map(signed)
        codes, scales = quantize_blockwise(x, code)
        out[f"{name}.codes"] = codes
        out[f"{name}.scales"] = scales
        out[f"{name}.f32"] = fnv(F.dequantize_blockwise(codes, absmax=scales, code=code, blocksize=256))
    save_file(out, sys.argv[1] if len(sys.argv) > 1 else "tests/data/quant/bitsandbytes.safetensors")


main()
