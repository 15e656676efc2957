#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the GGUF files in tests/data/gguf/ with the Python package gguf.

    tools/make_gguf_files.py [FOLDER]

types.gguf has one tensor of each type that the library decodes, with random blocks, and keys of all value types;
types.safetensors has the f32 values that the package decodes. The others are the models of tests/models as
llama.cpp's convert_hf_to_gguf.py writes them, with the package's own table of names: GEMM weights as BF16, vectors as
F32. Values are rounded to bf16 first, so that a folder and its file have equal bf16 weights. bytes.gguf and
pieces.gguf are vocabularies, trained on the pages in docs; ids.json has the ids of a text by the packages that trained
them. Needs gguf, numpy, torch, safetensors, tokenizers and sentencepiece; the build and the tests do not run it.
"""
import glob
import json
import math
import os
import sys

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(HERE, "..", "tests", "models")


def types(out):
    rng = np.random.default_rng(7)
    w = gguf.GGUFWriter(os.path.join(out, "types.gguf"), "test")
    for i, (name, value) in enumerate([("uint8", 200), ("int8", -100), ("uint16", 60000), ("int16", -30000),
                                       ("uint32", 4000000000), ("int32", -2000000000), ("float32", 0.1),
                                       ("uint64", 1 << 62), ("int64", -(1 << 62)), ("float64", 0.1), ("bool", True)]):
        getattr(w, "add_" + name)("test." + name, value)
    w.add_string("test.string", "a\0b\u00e9")
    w.add_array("test.strings", ["one", "", "three"])
    w.add_array("test.integers", [1, -2, 3])
    w.add_array("test.reals", [0.5, -1.5])
    values = {}
    scales = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2],
              T.Q6_K: [208]}
    for t in (T.F32, T.F16, T.BF16, *scales):
        elements, size = gguf.GGML_QUANT_SIZES[t]
        rows, blocks = 3, 256 // elements if t in scales else 5
        data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
        if t in scales:  # finite scales of all signs and sizes, a subnormal one
            for at in scales[t]:
                s = (rng.standard_normal((rows, blocks, 1)) * 0.1).astype(np.float16)
                s[0, 0] = 3e-7
                data[:, :, at:at + 2] = s.view(np.uint8)
        else:
            x = rng.standard_normal((rows, blocks)).astype(np.float32)
            data = gguf.quantize(x, t).view(np.uint8).reshape(rows, blocks, size)
        data = data.reshape(rows, blocks * size)
        decoded = gguf.dequantize(data, t)
        values[t.name] = torch.from_numpy(np.ascontiguousarray(decoded, dtype=np.float32).reshape(rows, -1))
        w.add_tensor(t.name, data, raw_dtype=t)
        # what the package makes of f32 values
    x = (rng.standard_normal((4, 64)) * 0.3).astype(np.float32)
    x[1, :32] = 0
    values["plain"] = torch.from_numpy(x)
    for t in (T.Q8_0, T.Q4_0, T.BF16, T.F16):
        q = gguf.quantize(x, t)
        values["encoded_" + t.name] = torch.from_numpy(np.ascontiguousarray(q).view(np.uint8).reshape(-1).copy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    save_file(values, os.path.join(out, "types.safetensors"))


def permute(x, heads):
    """llama.cpp's LlamaModel.permute."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def rope_factors(r, head_dim):
    low, high, original = r["low_freq_factor"], r["high_freq_factor"], r["original_max_position_embeddings"]
    factors = []
    for i in range(head_dim // 2):
        wave = 2 * math.pi * r["rope_theta"] ** (2 * i / head_dim)
        if wave < original / high:
            factors.append(1)
        elif wave > original / low:
            factors.append(r["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / r["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2_moe": "qwen2moe",
                 "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2", "gpt2": "gpt2"}


def model(name, out):
    folder = os.path.join(MODELS, name)
    with open(os.path.join(folder, "config.json")) as f:
        c = json.load(f)
    arch = ARCHITECTURES[c["model_type"]]
    weights = {}
    for path in glob.glob(os.path.join(folder, "model*.safetensors")):
        weights.update(load_file(path))
    w = gguf.GGUFWriter(os.path.join(out, name + ".gguf"), arch)
    w.add_type("model")
    w.add_name(name)
    heads, hidden = c.get("num_attention_heads", c.get("n_head")), c.get("hidden_size", c.get("n_embd"))
    kv, head_dim = c.get("num_key_value_heads", heads), c.get("head_dim") or hidden // heads
    layers = c.get("num_hidden_layers", c.get("n_layer"))
    rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
    rope.setdefault("rope_theta", c.get("rope_theta", 10000.0))
    w.add_block_count(layers)
    w.add_context_length(c.get("max_position_embeddings", c.get("n_positions")))
    w.add_embedding_length(hidden)
    w.add_feed_forward_length(c.get("intermediate_size") or c.get("n_inner") or 4 * hidden)
    w.add_head_count(heads)
    if arch == "gpt2":
        w.add_layer_norm_eps(c["layer_norm_epsilon"])
    else:
        w.add_head_count_kv(kv)
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
        w.add_rope_freq_base(rope["rope_theta"])
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    if arch in ("llama", "qwen3moe"):
        w.add_rope_dimension_count(head_dim)
        w.add_vocab_size(c["vocab_size"])
    if rope.get("rope_type") == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(rope["factor"])
    if arch == "gemma2":
        w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        w.add_final_logit_softcapping(c["final_logit_softcapping"])
        w.add_sliding_window(c["sliding_window"])
    experts = c.get("num_local_experts") or c.get("num_experts")
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(c["num_experts_per_tok"])
        if arch != "llama":
            w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        if arch == "qwen2moe":
            w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    for i, key in enumerate(("bos", "eos")):
        ids = c.get(key + "_token_id")
        ids = ids[0] if isinstance(ids, list) else ids
        if ids is not None:
            getattr(w, f"add_{key}_token_id")(ids)
    architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(architecture, layers)
    if rope.get("rope_type") == "llama3":
        w.add_tensor("rope_freqs.weight", rope_factors(rope, head_dim))
    packed = {}
    for key, x in weights.items():
        if key == "lm_head.weight" and c.get("tie_word_embeddings"):
            continue
        x = x.to(torch.bfloat16).float().numpy()
        if arch == "llama" and key.rsplit(".", 1)[0].endswith(("q_proj", "k_proj")):
            x = permute(x, heads if "q_proj" in key else kv)
        if arch.startswith("gemma") and key.endswith("norm.weight"):
            x = x + np.float32(1)
        if arch == "gpt2" and key.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            x = x.T
        part = key.split(".experts.")
        if len(part) == 2:  # one tensor for all experts
            number, what = part[1].split(".", 1)
            packed.setdefault(f"{part[0]}.experts.{what}", {})[int(number)] = x
            continue
        add(w, names.get_name(key, (".weight", ".bias")), x)
    for key, each in packed.items():
        add(w, names.get_name(key, (".weight",)), np.stack([each[i] for i in range(len(each))]))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def add(w, name, x):
    x = np.ascontiguousarray(x.squeeze())
    if x.ndim == 1 or name.startswith("position_embd"):
        w.add_tensor(name, x.astype(np.float32))
    else:
        w.add_tensor(name, gguf.quantize(x, T.BF16), raw_dtype=T.BF16)


TEXT = "The quick brown fox jumps over 13 lazy dogs.\nCaf\u00e9 \u4e2d\u6587 \U0001f600  two  spaces\n"


def corpus():
    """Our own pages."""
    pages = sorted(glob.glob(os.path.join(HERE, "..", "docs", "*.md")))
    return TEXT + "".join(open(p, encoding="utf-8").read() for p in pages)


def pieces(out):
    """A vocabulary of sentencepiece and the ids of a text, which ids.json keeps."""
    import io

    import sentencepiece
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus().splitlines()), model_writer=model, model_type="bpe", vocab_size=600,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=["<sep>"], control_symbols=["<end>"])
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    w = gguf.GGUFWriter(os.path.join(out, "pieces.gguf"), "llama")
    w.add_tokenizer_model("llama")
    n = sp.get_piece_size()
    kinds = [gguf.TokenType.UNKNOWN if sp.is_unknown(i) else gguf.TokenType.BYTE if sp.is_byte(i) else
             gguf.TokenType.CONTROL if sp.is_control(i) else
             gguf.TokenType.USER_DEFINED if sp.id_to_piece(i) == "<sep>" else gguf.TokenType.NORMAL for i in range(n)]
    w.add_token_list([sp.id_to_piece(i).encode() for i in range(n)])
    w.add_token_scores([sp.get_score(i) for i in range(n)])
    w.add_token_types(kinds)
    w.add_unk_token_id(0)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_eot_token_id(sp.piece_to_id("<end>"))
    w.add_chat_template([{"name": "default", "template": "{{ messages }}"}, {"name": "rag", "template": "{{ x }}"}])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return sp


def byte_level(out):
    """A vocabulary of the package tokenizers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator([corpus()], trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>", "<|start|>"]))
    t.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    model = json.loads(t.to_str())["model"]
    w = gguf.GGUFWriter(os.path.join(out, "bytes.gguf"), "llama")
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    n = t.get_vocab_size()
    names = [t.id_to_token(i) for i in range(n)]
    w.add_token_list(names)
    w.add_token_types([gguf.TokenType.CONTROL if x in ("<|end|>", "<|start|>") else
                       gguf.TokenType.USER_DEFINED if x == "<tool>" else gguf.TokenType.NORMAL for x in names])
    w.add_token_merges([" ".join(m) for m in model["merges"]])
    w.add_bos_token_id(1)
    w.add_eos_token_id(0)
    w.add_add_bos_token(True)
    w.add_chat_template("{{ messages }}")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return t


def vocabularies(out):
    """The ids of TEXT by the packages that made the vocabularies."""
    ids = {"text": TEXT, "pieces": pieces(out).encode(TEXT), "bytes": byte_level(out).encode(TEXT).ids}
    with open(os.path.join(out, "ids.json"), "w", encoding="ascii") as f:
        json.dump(ids, f)
        f.write("\n")


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "..", "tests", "data", "gguf")
    os.makedirs(out, exist_ok=True)
    types(out)
    vocabularies(out)
    for name in ("llama", "llama-shards", "mixtral", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "gemma", "gemma2",
                 "gpt2"):
        model(name, out)


if __name__ == "__main__":
    main()
