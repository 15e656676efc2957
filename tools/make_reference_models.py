#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tiny model folders in tests/models/ with the transformers library.

    tools/make_reference_models.py [FOLDER [NAME...]]

Each folder is what save_pretrained writes, with random weights, and
reference.safetensors: tokens and targets (i32) of one document, its logits, the mean
cross-entropy and that loss's gradient of every parameter ("d_" before the name), and the
text of a greedy generation from its first tokens (prompt included). Models with experts also
have the aux loss, by the library's function, for each layer and averaged; the gradients then
include it. Everything is computed in f32 on one thread. tests/models/models_test.c compares
our loader, forward and backward with these. Needs torch, transformers and safetensors; the
build and the tests do not run it.
"""
import json
import os
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import (Gemma2Config, Gemma2ForCausalLM, GemmaConfig, GemmaForCausalLM, GPT2Config, GPT2LMHeadModel,
                          LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, MixtralConfig,
                          MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

VOCAB, LENGTH, PROMPT = 256, 24, 8
GPT2 = dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, attn_pdrop=0.0, bos_token_id=0,
            eos_token_id=0)
LLAMA = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=64, bos_token_id=0)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)


def models():
    yield "gpt2", lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), {}
    yield "gpt2-untied", lambda: GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False, n_inner=40, **GPT2)), {}
    # Half of the dimensions have less than one period in the original length, so all three branches of the scaling occur.
    yield "llama", lambda: LlamaForCausalLM(LlamaConfig(
        rope_scaling=LLAMA3, eos_token_id=[0, 1], attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5,
        rope_theta=1000.0, **LLAMA)), {}
    # The linear scaling and heads wider than hidden / heads; in shards.
    yield "llama-shards", lambda: LlamaForCausalLM(LlamaConfig(
        rope_scaling=dict(rope_type="linear", factor=2.5), head_dim=10, tie_word_embeddings=True, **LLAMA)), dict(
            max_shard_size="16KB")
    yield "qwen2", lambda: Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **LLAMA)), {}
    yield "qwen3", qwen3, {}
    # Windows shorter than the document; Qwen's only in the second layer.
    yield "mistral", lambda: MistralForCausalLM(MistralConfig(sliding_window=7, eos_token_id=1, **LLAMA)), {}
    yield "qwen2-window", lambda: Qwen2ForCausalLM(Qwen2Config(
        use_sliding_window=True, sliding_window=5, max_window_layers=1, **LLAMA)), {}
    # With a padding id, its row of the embedding would have no gradient.
    yield "gemma", lambda: GemmaForCausalLM(GemmaConfig(head_dim=10, pad_token_id=None, **LLAMA)), {}
    # Caps of about the size of the logits; a window in the first and the third layer.
    yield "gemma2", lambda: Gemma2ForCausalLM(Gemma2Config(**dict(
        LLAMA, num_hidden_layers=3, head_dim=10, query_pre_attn_scalar=12, sliding_window=7, pad_token_id=None,
        attn_logit_softcapping=1.5, final_logit_softcapping=2.0))), {}
    # Experts, by version 5: one packed weight in the library, one tensor per expert in the folder.
    yield "mixtral", lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=5, num_experts_per_tok=2, **LLAMA)), {}
    yield "qwen2-moe", lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(
        num_experts=4, num_experts_per_tok=3, moe_intermediate_size=10, shared_expert_intermediate_size=14,
        norm_topk_prob=False, **LLAMA)), {}
    yield "qwen3-moe", lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        head_dim=10, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True, **LLAMA)), {}
    # Layers without experts among those that have them, by both ways to say so.
    yield "qwen2-mixed", lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10, shared_expert_intermediate_size=14,
        norm_topk_prob=True, decoder_sparse_step=2, **dict(LLAMA, num_hidden_layers=4))), {}
    yield "qwen3-mixed", lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        head_dim=10, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=False,
        mlp_only_layers=[1], **dict(LLAMA, num_hidden_layers=3))), {}
    # Windows in the first and the third layer, with their own RoPE base; the second has the scaling.
    yield "gemma3", lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**dict(
        LLAMA, num_hidden_layers=3, head_dim=10, query_pre_attn_scalar=12, sliding_window=7, pad_token_id=None,
        final_logit_softcapping=2.0, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=4.0, rope_theta=5000.0),
                             sliding_attention=dict(rope_type="default", rope_theta=300.0))))), {}
    yield "olmo2", lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(
        attention_bias=True, pad_token_id=None, **LLAMA)), {}
    # The second layer without RoPE; in the other folder the first, with a window. A bias of k
    # has no gradient without RoPE.
    yield "smollm3", lambda: transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(
        no_rope_layer_interval=2, pad_token_id=None, rope_parameters=dict(rope_theta=700.0), **LLAMA)), {}
    yield "smollm3-window", lambda: transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(
        no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=6, mlp_bias=True,
        tie_word_embeddings=False, pad_token_id=None, **LLAMA)), {}
    # A window as in Phi-3-mini; the short factors of LongRoPE with a part of each head rotated, as in Phi-4-mini; and the
    # long ones, because the original length is below that of the text.
    yield "phi3", lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(
        sliding_window=7, pad_token_id=None, eos_token_id=1, **LLAMA)), {}
    yield "phi3-short", lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(
        pad_token_id=None, eos_token_id=1, original_max_position_embeddings=40, rope_parameters=dict(
            rope_type="longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.25, 2.0],
            long_factor=[1.5, 4.0, 9.0]), tie_word_embeddings=True, **LLAMA)), {}
    yield "phi3-long", lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(
        pad_token_id=None, eos_token_id=1, original_max_position_embeddings=12, rope_parameters=dict(
            rope_type="longrope", short_factor=[1.0, 1.25, 2.0, 2.5], long_factor=[1.5, 4.0, 9.0, 11.0]), **LLAMA)), {}
    yield "qwen3-yarn", lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=16, rope_parameters=dict(
        rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0), **LLAMA)), {}
    yield "granite", lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(
        attention_multiplier=0.9, embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=0.6,
        attention_bias=True, mlp_bias=True, **LLAMA)), {}


def qwen3():
    """The library's class where it has it (4.51 on), else Llama with norms hooked in after q_proj and k_proj."""
    own = dict(LLAMA, head_dim=10)
    if hasattr(transformers, "Qwen3ForCausalLM"):
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**own))
    model = LlamaForCausalLM(LlamaConfig(**own))
    for layer in model.model.layers:
        for part in "qk":
            norm = LlamaRMSNorm(own["head_dim"], eps=model.config.rms_norm_eps)
            layer.self_attn.add_module(part + "_norm", norm)
            layer.self_attn.get_submodule(part + "_proj").register_forward_hook(
                lambda _, __, y, norm=norm: norm(y.unflatten(-1, (-1, own["head_dim"]))).flatten(-2))
    return model


def greedy(model, tokens):
    """As many positions as all models have, by the library's own generation with its cache."""
    model.generation_config.eos_token_id = None
    text = model.generate(tokens[:, :PROMPT], attention_mask=torch.ones(1, PROMPT), do_sample=False,
                          max_new_tokens=GPT2["n_positions"] - PROMPT, pad_token_id=0)
    return text[0].int()


def balance_of(model, router_logits):
    """The mean over layers of what the library makes of all layers at once."""
    config, k = model.config, model.config.num_experts_per_tok
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    each = [load_balancing_loss_func((logits,), experts, k) for logits in router_logits if logits is not None]
    return sum(each) / len(each)


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..", "tests", "models")
    only = sys.argv[2:]
    torch.set_num_threads(1)
    for name, make, options in models():
        if only and name not in only:
            continue
        torch.manual_seed(1234)
        transformers.set_seed(1234)
        model = make().float().eval()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the others require aligned sizes
        with torch.no_grad():  # norms and biases away from 1 and 0, weights large enough to matter
            for key, p in model.named_parameters():
                p.add_(torch.randn_like(p) * (0.1 if p.dim() == 1 else 0.08))
        folder = os.path.join(out, name)
        model.save_pretrained(folder, **options)
        tokens = torch.randint(0, VOCAB, (1, LENGTH))
        targets = torch.randint(0, VOCAB, (1, LENGTH))
        experts = hasattr(model.config, "output_router_logits")
        result = model(tokens, output_router_logits=True) if experts else model(tokens)
        logits = result.logits
        loss = torch.nn.functional.cross_entropy(logits[0], targets[0])
        balance = balance_of(model, result.router_logits) if experts else 0
        (loss + balance).backward()
        reference = {"tokens": tokens[0].int(), "targets": targets[0].int(), "logits": logits[0].detach().contiguous(),
                     "loss": loss.detach().reshape(1), "greedy": greedy(model, tokens)}
        if experts:
            reference["balance"] = balance.detach().reshape(1)
        for key, p in model.named_parameters():
            reference["d_" + key] = p.grad.contiguous()
        save_file(reference, os.path.join(folder, "reference.safetensors"))
        left = os.path.join(folder, "generation_config.json")
        if os.path.exists(left):
            os.remove(left)
        path = os.path.join(folder, "config.json")
        with open(path) as f:
            config = json.load(f)
        if name == "qwen3" and config["model_type"] != "qwen3":
            config.update(model_type="qwen3", architectures=["Qwen3ForCausalLM"])
            with open(path, "w") as f:
                json.dump(config, f, indent=2)
        print(name, f"loss {loss.item():.6f}", config.get("transformers_version"))


if __name__ == "__main__":
    main()
