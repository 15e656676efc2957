#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of a training step of PyTorch on the GPUs of one host, to compare with `refrain profile --ranks`.

    torchrun --nproc-per-node N peers_ranks.py fsdp|ddp|one

The model is `llama` of peers_gpu.py with 4 x 4,096 tokens per GPU, each layer compiled, fused AdamW. fsdp: FSDP2 with a
group per layer, weights gathered in bf16 and gradients reduced in f32; ddp: DistributedDataParallel; one: each GPU by itself. The time is the
median of 5 means over 6 steps; rank 0 prints one JSON object.
"""
import contextlib
import os
import statistics
import sys
import time

import peers_gpu

WARM, MEANS, STEPS = 4, 5, 6


def main():
    import torch
    import torch.distributed as dist
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mode = sys.argv[1] if len(sys.argv) == 2 else ""
    if mode not in ("fsdp", "ddp", "one") or "RANK" not in os.environ:
        print(__doc__.split("\n")[2].strip(), file=sys.stderr)
        return 2
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    make, V, B, T, _ = peers_gpu.MODELS["llama"]
    with torch.device("cuda"):
        model = make()
    for layer in model.b:
        layer.compile()
    model.tail = torch.compile(model.tail)
    f = model
    if mode == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.b, model):
            fully_shard(part, mp_policy=policy)
    elif mode == "ddp":
        f = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids, targets = (torch.randint(0, V, (B, T), device="cuda") for _ in range(2))

    def step():
        with contextlib.nullcontext() if mode == "fsdp" else torch.autocast("cuda", torch.bfloat16):
            loss = f(ids, targets)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    times = []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for _ in range(WARM):
            step()
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(MEANS):
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / STEPS * 1e3)
    ms = statistics.median(times)
    if rank == 0:
        peers_gpu.out(fig=f"llama: {mode}, {ranks} GPUs", ms=round(ms, 1), tok_s=round(ranks * B * T / ms * 1e3),
                      peak_GB=round(torch.cuda.max_memory_allocated() / 1e9, 1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
