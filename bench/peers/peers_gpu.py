#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times of PyTorch, the transformers library and peft on one GPU, with ours next to them.

    peers_gpu.py [SECTION...] [--refrain PROGRAM] [--limit SECONDS] [--only WORD] [--out FILE]

Sections: env small gpt2 llama llama-fp8 kernels grouped moe muon lora lora-32 moe-lora; default: the first four. Each
variant of a section is a separate process, so that it does not inherit another's caches, allocator or compiler state.
No variant starts after --limit seconds (280), and the table reports those left out; --only selects variants whose name
contains WORD.

Every time is the median over event pairs around 20 calls each, after at least a second of warm-up. Memory-bound
variants rotate over buffers that do not fit into the caches. Prints one JSON object per line, and the table last.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

CALLS, WARM_SECONDS = 20, 1.0


def out(**figure):
    print(json.dumps(figure), flush=True)


# ---- measuring, in the process of a variant ----


def bench(fn, pairs=5, most_seconds=8.0):
    """Milliseconds per call: the median over event pairs with CALLS calls between them."""
    import torch

    start = time.time()
    while time.time() - start < WARM_SECONDS:
        fn()
        torch.cuda.synchronize()
    times, start = [], time.time()
    while len(times) < pairs and (not times or time.time() - start < most_seconds):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(CALLS):
            fn()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / CALLS)
    return sorted(times)[len(times) // 2]


def rotating(fns):
    """A function that uses the next of several buffers at each call."""
    state = [0]

    def call():
        fns[state[0] % len(fns)]()
        state[0] += 1

    return call


def step_as_graph(step):
    """The step as one CUDA graph, warmed up on a side stream, as capture requires."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the side stream's blocks are unusable elsewhere, and a capture cannot free them
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def env(_):
    import torch

    p = torch.cuda.get_device_properties(0)
    out(fig="env", torch=torch.__version__, gpu=p.name, sms=p.multi_processor_count)
    n = 8192
    sides = [[torch.randn(n, n, device="cuda").bfloat16() for _ in range(2)] for _ in range(3)]
    ms = bench(rotating([lambda a=a, b=b: a @ b for a, b in sides]))
    out(fig="product, bf16, 8192 cubed", ms=ms, tflops=2 * n**3 / ms / 1e9)
    buffers = [[torch.empty(1 << 30, device="cuda", dtype=torch.uint8) for _ in range(2)] for _ in range(3)]
    ms = bench(rotating([lambda x=x, y=y: y.copy_(x) for x, y in buffers]))
    out(fig="copy of 1 GiB", ms=ms, TBps=2 * (1 << 30) / ms / 1e9)


# ---- models ----


def gpt(V, T, d, L, h):
    import torch.nn as nn
    import torch.nn.functional as F

    class GPT(nn.Module):
        def __init__(s):
            super().__init__()
            s.e, s.p = nn.Embedding(V, d), nn.Embedding(T, d)
            s.b, s.n = nn.ModuleList(block(d, h) for _ in range(L)), nn.LayerNorm(d)
            s.head = nn.Linear(d, V, bias=False)
            s.head.weight = s.e.weight

        def forward(s, ids, targets):
            x = s.e(ids) + s.p.weight[: ids.shape[1]]
            for b in s.b:
                x = b(x)
            return s.tail(x, targets)

        def tail(s, x, targets):
            return F.cross_entropy(s.head(s.n(x)).reshape(-1, V).float(), targets.reshape(-1))

    return GPT()


def block(d, h):
    import torch.nn as nn
    import torch.nn.functional as F

    class Block(nn.Module):
        def __init__(s):
            super().__init__()
            s.n1, s.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
            s.qkv, s.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
            s.f1, s.f2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

        def forward(s, x):
            B, T, C = x.shape
            q, k, v = s.qkv(s.n1(x)).view(B, T, 3, h, C // h).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
            x = x + s.o(y)
            return x + s.f2(F.gelu(s.f1(s.n2(x)), approximate="tanh"))

    return Block()


def llama(V, T, d, L, h, kv, ff, theta=500000.0):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    def rotate(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    class Layer(nn.Module):
        def __init__(s):
            super().__init__()
            D = d // h
            s.n1, s.n2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
            s.q, s.k, s.v = (nn.Linear(d, n * D, bias=False) for n in (h, kv, kv))
            s.o = nn.Linear(d, d, bias=False)
            s.gate, s.up = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
            s.down = nn.Linear(ff, d, bias=False)

        def forward(s, x, cos, sin):
            B, T, _ = x.shape
            y = s.n1(x)
            q, k, v = (f(y).view(B, T, n, d // h).transpose(1, 2) for f, n in ((s.q, h), (s.k, kv), (s.v, kv)))
            q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv != h)
            x = x + s.o(y.transpose(1, 2).reshape(B, T, d))
            y = s.n2(x)
            return x + s.down(F.silu(s.gate(y)) * s.up(y))

    class Llama(nn.Module):
        def __init__(s):
            super().__init__()
            s.e, s.n = nn.Embedding(V, d), nn.RMSNorm(d, eps=1e-5)
            s.b = nn.ModuleList(Layer() for _ in range(L))
            s.head = nn.Linear(d, V, bias=False)
            s.head.weight = s.e.weight
            D = d // h
            angle = torch.outer(torch.arange(T).float(), theta ** (-torch.arange(0, D, 2).float() / D))
            s.register_buffer("cos", angle.cos(), persistent=False)
            s.register_buffer("sin", angle.sin(), persistent=False)

        def forward(s, ids, targets):
            x = s.e(ids)
            for b in s.b:
                x = b(x, s.cos, s.sin)
            return s.tail(x, targets)

        def tail(s, x, targets):
            return F.cross_entropy(s.head(s.n(x)).reshape(-1, V).float(), targets.reshape(-1))

    return Llama()


MODELS = {  # name: model, vocabulary, batch, tokens, our benchmark
    "gpt2": (lambda: gpt(50304, 1024, 768, 12, 12), 50304, 64, 1024, "gpt2-124m-64k"),
    "llama": (lambda: llama(128256, 4096, 2048, 16, 32, 8, 8192), 128256, 4, 4096, "llama-1b"),
}


def step_of(f, opt, ids, targets):
    """Autocast to bf16 over f32 weights."""
    import torch

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = f(ids, targets)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    return step


def training_step(section, variant):
    """A full step, plain and as one graph: autocast to bf16 over f32 weights, fused AdamW."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mode, attention = variant.split("+")
    make, V, B, T, _ = MODELS[section]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    kernel = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[attention]
    with torch.device("cuda"):
        model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    ids, targets = (torch.randint(0, V, (B, T), device="cuda") for _ in range(2))
    f = model
    if mode == "default":
        f = torch.compile(model)
    elif mode == "autotune":
        f = torch.compile(model, mode="max-autotune-no-cudagraphs")
    elif mode == "layers":  # tuning one program for all layers takes a fraction of the time
        for layer in model.b:
            layer.compile(mode="max-autotune-no-cudagraphs")
        model.tail = torch.compile(model.tail, mode="max-autotune-no-cudagraphs")

    step = step_of(f, opt, ids, targets)
    with sdpa_kernel(kernel):
        for form in ("plain", "one graph"):
            torch.cuda.empty_cache()  # a graph has its own memory: two large models do not fit
            torch.cuda.reset_peak_memory_stats()
            try:
                fn = step if form == "plain" else step_as_graph(step)
                ms = bench(fn, pairs=3)
                out(fig=f"{section}: {mode}, {attention}, {form}", ms=ms, tok_s=round(B * T / ms * 1e3),
                    peak_GB=round(torch.cuda.max_memory_allocated() / 1e9, 1))
            except Exception as e:  # a failure of one form must not drop the other's time
                out(fig=f"{section}: {mode}, {attention}, {form}", error=str(e)[:300])


def training_step_fp8(recipe):
    """The step of `llama` with torchao's float8 training: all linear layers but the head, each layer compiled."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    make, V, B, T, _ = MODELS["llama"]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = make()
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe),
                               module_filter_fn=lambda module, name: name != "head")
    for layer in model.b:
        layer.compile()
    model.tail = torch.compile(model.tail)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    ids, targets = (torch.randint(0, V, (B, T), device="cuda") for _ in range(2))

    step = step_of(model, opt, ids, targets)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        ms = bench(step, pairs=3)
    out(fig=f"llama-fp8: torchao, {recipe}", ms=ms, tok_s=round(B * T / ms * 1e3),
        peak_GB=round(torch.cuda.max_memory_allocated() / 1e9, 1))


def small(variant):
    """One small layer, forward and backward: launch overhead. `refrain bench small` has the same layer."""
    import torch

    d = 256
    with torch.device("cuda"):
        m = block(d, 4).bfloat16()
    x = torch.randn(2, 64, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.ones_like(x)

    def clear():
        x.grad = None
        m.zero_grad(set_to_none=True)

    f = m
    if variant == "graphed callables":
        f = torch.cuda.make_graphed_callables(m, (torch.randn_like(x, requires_grad=True),))
    elif variant == "reduce-overhead":
        f = torch.compile(m, mode="reduce-overhead")

    def step():
        clear()
        f(x).backward(dy)

    fn = step_as_graph(step) if variant == "one graph" else step
    start = time.time()
    while time.time() - start < WARM_SECONDS:
        fn()
        torch.cuda.synchronize()

    def wall(n):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            fn()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / n * 1e6

    one, many = sorted(wall(1) for _ in range(200)), sorted(wall(300) for _ in range(9))
    out(fig=f"small: {variant}", one_us=round(one[100], 1), in_a_row_us=round(many[4], 1))


def kernels(variant):
    """Memory-bound ops with torch.compile; each input and output counts once."""
    import torch
    import torch.nn.functional as F

    T, C, SETS = 32768, 4096, 3
    bf = dict(device="cuda", dtype=torch.bfloat16)

    def timed(name, moved, make):
        calls = [make() for _ in range(SETS)]
        ms = bench(rotating(calls))
        out(fig=f"kernels: {name}", ms=ms, TBps=round(moved / ms / 1e9, 2))

    tensor = T * C * 2
    if variant in ("layer_norm", "rms_norm"):
        w = torch.ones(C, **bf).requires_grad_()
        b = torch.zeros(C, **bf).requires_grad_()
        if variant == "layer_norm":
            f = torch.compile(lambda x: F.layer_norm(x, (C,), w, b))
        else:
            f = torch.compile(lambda x: F.rms_norm(x, (C,), w))

        def forward():
            x = torch.randn(T, C, **bf)
            return lambda: f(x)

        def backward():
            x, dy = torch.randn(T, C, **bf).requires_grad_(), torch.randn(T, C, **bf)
            y = f(x)
            leaves = [x, w, b] if variant == "layer_norm" else [x, w]
            return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

        with torch.no_grad():
            timed(variant, 2 * tensor, forward)
        timed(variant + " backward", 3 * tensor, backward)
    elif variant == "swiglu":
        f = torch.compile(lambda a, b: F.silu(a) * b)

        def forward():
            a, b = torch.randn(T, C, **bf), torch.randn(T, C, **bf)
            return lambda: f(a, b)

        def backward():
            a, b = (torch.randn(T, C, **bf).requires_grad_() for _ in range(2))
            dy, y = torch.randn(T, C, **bf), f(a, b)
            return lambda: torch.autograd.grad(y, [a, b], dy, retain_graph=True)

        with torch.no_grad():
            timed("swiglu", 3 * tensor, forward)
        timed("swiglu backward", 5 * tensor, backward)
    elif variant == "cross_entropy":
        rows, V = 8192, 50304
        f = torch.compile(lambda x, t: F.cross_entropy(x.float(), t))

        def both():
            x = torch.randn(rows, V, **bf).requires_grad_()
            t = torch.randint(0, V, (rows,), device="cuda")

            def call():
                torch.autograd.grad(f(x, t), x)

            return call

        timed("cross_entropy forward and backward", 2 * rows * V * 2, both)
    else:
        n = 64 << 20
        w = [torch.randn(n, device="cuda", requires_grad=True) for _ in range(SETS)]
        for p in w:
            p.grad = torch.randn_like(p)
        opt = torch.optim.AdamW(w, lr=1e-4, fused=True, capturable=True)
        ms = bench(opt.step)
        out(fig="kernels: adamw, f32", ms=ms, TBps=round(SETS * n * 4 * 7 / ms / 1e9, 2))


def grouped(_):
    """Grouped GEMMs of an expert layer, with group sizes on the device."""
    import torch
    import torch.nn.functional as F

    gm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    shapes = [(4, 32768, 7168, 4096), (4, 32768, 2048, 7168), (8, 16384, 4096, 14336), (8, 16384, 14336, 4096),
              (128, 131072, 2048, 1536), (128, 131072, 768, 2048), (64, 49152, 2048, 2816), (64, 49152, 1408, 2048),
              (256, 65536, 7168, 512)]  # experts, tokens, in, out: those of grouped_check
    for E, T, K, N in shapes:
        for split in ("even", "skewed", "half empty", "all in one"):
            torch.manual_seed(1)
            sizes = torch.full((E,), T // E)
            if split == "skewed":
                sizes = (torch.distributions.Dirichlet(torch.full((E,), 2.0)).sample() * T).long() // 8 * 8
                sizes[-1] = T - sizes[:-1].sum()
            elif split == "half empty":
                sizes = torch.tensor([2 * T // E, 0] * (E // 2))
            elif split == "all in one":
                sizes = torch.tensor([0] * (E // 2) + [T] + [0] * (E - E // 2 - 1))
            ends = torch.cumsum(sizes, 0).to(torch.int32).cuda()
            x, w, dy = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((T, K), (E, N, K), (T, N)))
            name = f"grouped: {E} experts, {T} x {K} to {N}, {split}"
            try:
                calls = (lambda: gm(x, w.transpose(1, 2), offs=ends), lambda: gm(dy, w, offs=ends),
                         lambda: gm(dy.t(), x, offs=ends))
                ms = [bench(f, 3, 2.0) for f in calls]
                out(fig=name, ms=sum(ms), tflops=[round(2 * T * K * N / m / 1e9) for m in ms])
            except Exception as e:
                out(fig=name, error=str(e)[:200])


def made(name, config):
    """A model of the transformers library in bf16, on the GPU."""
    import torch
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        m = getattr(transformers, name)(config)
    torch.set_default_dtype(torch.float32)
    return m


def compiled_loss(m, config, ids):
    """Each layer compiled, and the head with the loss: a fraction of the time that the whole model takes."""
    import torch

    for layer in m.model.layers:
        layer.compile()
    head = torch.compile(lambda h: m.loss_function(logits=m.lm_head(h), labels=ids, vocab_size=config.vocab_size))
    return lambda: head(m.model(input_ids=ids).last_hidden_state)


def of_transformers(name, config, fig, B, T, compiled, prepare=lambda m: m, master=False):
    """The step of a model of the transformers library in bf16, which `prepare` may change. compiled: "whole" for the
    model, or "layers" for each layer and the head with the loss. master: weights, gradients and moments of the
    optimizer are f32, copied to and from those in bf16 with one call for all tensors."""
    import torch

    m = prepare(made(name, config))
    narrow = [p for p in m.parameters() if p.requires_grad]
    weights = [p.detach().float() for p in narrow] if master else narrow
    opt = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (B, T), device="cuda")
    if compiled == "layers":
        loss = compiled_loss(m, config, ids)
    else:
        f = torch.compile(m) if compiled else m
        loss = lambda: f(input_ids=ids, labels=ids).loss

    def step():
        loss().backward()
        if master:
            for w, p in zip(weights, narrow):
                w.grad = p.grad.float()
                p.grad = None
        opt.step()
        if master:
            with torch.no_grad():
                torch._foreach_copy_(narrow, weights)
        opt.zero_grad(set_to_none=True)

    ms = bench(step, pairs=3)
    out(fig=fig, ms=ms, tok_s=round(B * T / ms * 1e3), peak_GB=round(torch.cuda.max_memory_allocated() / 1e9, 1))


def lora(variant):
    """transformers and peft: Llama 3 8B's shapes, 8 layers or 32, rank 16 on all GEMMs, bf16. liger: with the fused
    kernels of the package liger-kernel, each layer compiled."""
    from peft import LoraConfig, get_peft_model
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import LlamaConfig

    liger = "liger" in variant
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    c = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336,
                    num_hidden_layers=32 if "32 layers" in variant else 8, num_attention_heads=32,
                    num_key_value_heads=8, max_position_embeddings=8192, attn_implementation="sdpa")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

    def prepare(m):
        m = get_peft_model(m, LoraConfig(r=16, lora_alpha=32, target_modules=names))
        if "recompute" in variant:
            m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            m.enable_input_require_grads()
        if liger:
            for layer in m.base_model.model.model.layers:
                layer.compile()
        return m.train()

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        of_transformers("LlamaForCausalLM", c, f"lora: {variant}", 4, 2048, "whole" if variant == "compile" else "",
                        prepare)


def moe_lora(variant):
    """transformers and peft: the model of `moe` with LoRA of rank 16 on attention and, by target_parameters, experts."""
    from peft import LoraConfig, get_peft_model

    def prepare(m):
        m = get_peft_model(m, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                                         target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
        if "layers" in variant:
            for layer in m.base_model.model.model.layers:
                layer.compile()
        return m.train()

    of_transformers("Qwen3MoeForCausalLM", qwen3_moe(), f"moe-lora: {variant}", 4, 4096, "", prepare)


def qwen3_moe(experts=128):
    """4 layers of Qwen3 30B-A3B's shapes."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(vocab_size=32000, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                          num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                          num_experts=experts, num_experts_per_tok=8, norm_topk_prob=True, attn_implementation="sdpa",
                          experts_implementation="grouped_mm")


def moe(variant):
    """transformers: the model of qwen3_moe in bf16; optimizer in bf16 or f32."""
    compiled = "layers" if "layers" in variant else "whole" if "compiled" in variant else ""
    of_transformers("Qwen3MoeForCausalLM", qwen3_moe(), f"moe: {variant}", 4, 4096, compiled,
                    master="f32 optimizer" in variant)


MUON_EXPERTS, MUON_TOKENS = 48, [16384, 65536, 262144]  # 1.1 billion parameters
MUON_OPTIMIZERS = ["adamw", "muon"]


def muon_update(w, g, m, lr, decay):
    """Muon for a batch of matrices in place, the update of docs/optimizers.md with muon_scale rms."""
    m.lerp_(g, 0.05)
    x = g.lerp(m, 0.95)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    x = x.mT if tall else x
    w.mul_(1 - lr * decay).sub_(x, alpha=lr * 0.2 * max(w.shape[-2:]) ** 0.5)


def muon(_):
    """transformers: a step of qwen3_moe(48) in bf16, all weights trained, layers compiled; microbatches of 4 x 4,096
    tokens. torch.optim.Muon takes no batch of matrices, which experts are, so Muon is muon_update, compiled: one call
    for the experts of a layer, whose gate and up are matrices of their own, and one for each matrix of attention."""
    import torch

    c, B, T = qwen3_moe(MUON_EXPERTS), 4, 4096
    m = made("Qwen3MoeForCausalLM", c)
    ids = torch.randint(0, c.vocab_size, (B, T), device="cuda")
    loss = compiled_loss(m, c, ids)
    update = torch.compile(muon_update, dynamic=False)

    def batch(name, p):
        if "gate_up" in name:
            return p.view(-1, p.shape[-2] // 2, p.shape[-1])
        return p if p.dim() == 3 else p[None]

    def timed(optimizer, tokens, matrices, adamw):
        def step():
            for _ in range(tokens // (B * T)):
                (loss() * (B * T / tokens)).backward()
            adamw.step()
            with torch.no_grad():
                for name, p, moment in matrices:
                    update(batch(name, p), batch(name, p.grad), batch(name, moment), 1e-4, 0.0)
            m.zero_grad(set_to_none=True)

        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(2 + max(3, 262144 // tokens)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        ms = statistics.median(times[2:])
        out(fig=f"muon: {optimizer}, {tokens} tokens", ms=ms, tok_s=round(tokens / ms * 1e3),
            peak_GB=round(torch.cuda.max_memory_allocated() / 1e9, 1))

    for optimizer in MUON_OPTIMIZERS:
        matrices, rest = [], []
        for name, p in m.named_parameters():
            if optimizer == "muon" and (name.endswith("_proj.weight") or ".mlp.experts." in name):
                matrices.append((name, p, torch.zeros_like(p)))
            else:
                rest.append(p)
        adamw = torch.optim.AdamW(rest, lr=1e-4, fused=True)
        for tokens in MUON_TOKENS:
            timed(optimizer, tokens, matrices, adamw)
        del adamw, matrices
        torch.cuda.empty_cache()


# ---- ours ----


def ours(program, name, row, *options):
    """A time of `refrain bench`, whose libraries may be in the same folder."""
    path = [os.path.dirname(os.path.abspath(program)), os.environ.get("LD_LIBRARY_PATH", "")]
    command = [program, "bench", name, "--device", "cuda", "--dtype", "bf16", "--json", *options]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=300,
                             env=dict(os.environ, LD_LIBRARY_PATH=":".join(x for x in path if x)))
    except subprocess.TimeoutExpired:
        return dict(fig=row, error="out of time")
    if run.returncode != 0:
        return dict(fig=row, error=run.stderr.strip()[-300:])
    x = json.loads(run.stdout)
    if name == "kernels":
        return [dict(fig=f"{row}, {k['name']}", ms=k["ms"], TBps=round(k["bytes_per_second"] / 1e12, 2))
                for k in x["kernels"]]
    if name == "small":
        return dict(fig=row, one_us=round(x["one_us"], 1), in_a_row_us=round(x["in_a_row_us"], 1), ops=x["ops"])
    return dict(fig=row, ms=x["ms_per_step"], tok_s=round(x["tokens_per_second"]),
                peak_GB=round(x["planned_bytes"] / 1e9, 1))


def rows_of_ours(program, section):
    """Our step includes the gradient norm, the skip flag and the upload of tokens."""
    if section == "small":
        yield ours(program, "small", "small: ours")
    if section == "llama-fp8":
        for recipe in ("fp8_delayed", "fp8_current"):  # keep=[]: as the peer, all linear layers but the head
            yield ours(program, "llama-1b", f"llama-fp8: ours, {recipe}", "--set", "schedule.name=constant", "--set",
                       f"precision.recipe={recipe}", "--set", "precision.keep=[]")
    if section == "kernels":
        rows = ours(program, "kernels", "kernels: ours")
        yield from rows if isinstance(rows, list) else [rows]
    if section == "moe":
        f32 = ["--set", "optimizer.master_weights=true", "--set", "optimizer.state_dtype=f32"]
        yield ours(program, "qwen3-moe", "moe: ours, the peer's work", "--set", "schedule.name=constant")
        yield ours(program, "qwen3-moe", "moe: ours, with clipping and schedule", "--set", "optimizer.clip=1")
        yield ours(program, "qwen3-moe", "moe: ours, optimizer in f32", "--set", "schedule.name=constant", *f32)
    if section == "muon":
        for tokens in MUON_TOKENS:
            for optimizer in MUON_OPTIMIZERS:
                sets = [f"model.num_experts={MUON_EXPERTS}", f"batch.tokens={tokens}", f"optimizer.name={optimizer}"]
                yield ours(program, "qwen3-moe", f"muon: ours, {optimizer}, {tokens} tokens", "--steps",
                           str(max(3, 262144 // tokens)), *[x for s in sets for x in ("--set", s)],
                           "--set", "schedule.name=constant")
    if section in MODELS:
        name = MODELS[section][4]
        yield ours(program, name, f"{section}: ours, the peer's work", "--set", "schedule.name=constant")
        yield ours(program, name, f"{section}: ours, with clipping and schedule", "--set", "optimizer.clip=1")
        tuned = ["--set", "schedule.name=constant", "--set", "run.tune=true"]
        yield ours(program, name, f"{section}: ours, the peer's work, GEMMs tuned", *tuned)


# ---- sections ----

# default: torch.compile; autotune: its max-autotune of the whole model, which for many layers exceeds the limit unless
# `layers`, the same layer by layer, has stored its choices in the cache before.
STEPS = ["default+cudnn", "default+flash", "layers+cudnn", "autotune+cudnn", "autotune+flash", "eager+cudnn"]
SECTIONS = {
    "env": (env, ["env"]),
    "small": (small, ["one graph", "graphed callables", "reduce-overhead", "eager"]),
    "gpt2": (lambda v: training_step("gpt2", v), STEPS),
    "llama": (lambda v: training_step("llama", v), STEPS),
    "llama-fp8": (training_step_fp8, ["tensorwise", "rowwise"]),  # needs the package torchao
    "kernels": (kernels, ["layer_norm", "rms_norm", "swiglu", "cross_entropy", "adamw"]),
    "grouped": (grouped, ["grouped"]),
    "moe": (moe, ["grouped_mm", "grouped_mm, layers compiled", "grouped_mm, layers compiled, f32 optimizer",
                  "grouped_mm, compiled", "grouped_mm, compiled, f32 optimizer"]),
    "muon": (muon, ["layers compiled"]),
    "lora": (lora, ["liger, layers compiled", "liger, layers compiled, recompute", "compile", "eager"]),
    "lora-32": (lora, ["liger, layers compiled, 32 layers"]),
    "moe-lora": (moe_lora, ["grouped_mm, layers compiled", "grouped_mm"]),
}


def run_variant(section, variant, seconds, keep):
    """Runs a variant as a process; its lines are printed and appended to `keep`. Its child processes end with it, and
    write to files: a surviving compiler worker would keep a pipe open."""
    command = [sys.executable, os.path.abspath(__file__), "--section", section, "--variant", variant]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        run = subprocess.Popen(command, stdout=said, stderr=errors, start_new_session=True)
        try:
            wrong = run.wait(timeout=max(seconds, 1)) != 0 and "failed"
        except subprocess.TimeoutExpired:
            wrong = "out of time"
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        run.wait()
        said.seek(0)
        errors.seek(0)
        figures = [json.loads(line) for line in said if line.startswith("{")]
        if wrong == "failed":
            wrong = errors.read().strip()[-300:]
    if wrong:
        figures.append(dict(fig=f"{section}: {variant}", error=wrong))
    for figure in figures:
        out(**figure)
    keep += figures


def show(figures):
    for f in figures:
        if "error" in f:
            what = "error: " + " ".join(f["error"].split())[-120:]
        else:
            what = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in f.items() if k != "fig")
        print(f"{f['fig']:<52} {what}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sections", nargs="*")
    p.add_argument("--refrain", help="our program, for rows of ours")
    p.add_argument("--limit", type=float, default=280.0)
    p.add_argument("--only", default="")
    p.add_argument("--out")
    p.add_argument("--section", help=argparse.SUPPRESS)
    p.add_argument("--variant", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.section:
        SECTIONS[a.section][0](a.variant)
        return 0
    unknown = [s for s in a.sections if s not in SECTIONS]
    if unknown:
        p.error(f"there is no section {unknown[0]}; there are {' '.join(SECTIONS)}")
    start, figures = time.time(), []
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "inductor-peers"))
    for section in a.sections or ["env", "small", "gpt2", "llama"]:
        for figure in rows_of_ours(a.refrain, section) if a.refrain else ():
            out(**figure)
            figures.append(figure)
        for variant in SECTIONS[section][1]:
            if a.only not in variant:
                continue
            left = a.limit - (time.time() - start)
            if left < 15:
                figures.append(dict(fig=f"{section}: {variant}", error="not begun: out of time"))
                continue
            run_variant(section, variant, left, figures)
    if a.out:
        with open(a.out, "a", encoding="utf-8") as f:
            f.writelines(json.dumps(x) + "\n" for x in figures)
    show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
