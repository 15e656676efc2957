/* SPDX-License-Identifier: Apache-2.0
 *
 * Published models: describes a file or folder, and exports a model in the format of another program.
 *
 *   rfr_export_options o = rfr_export_options_default();
 *   o.format = "gguf";
 *   o.dtype = "q8_0";
 *   rfr_export(ctx, "runs/chat", "chat.gguf", &o);
 *
 * A MODEL is the path of a Hugging Face folder, a GGUF file, a run, a checkpoint, or an adapter's folder that names its
 * base model. The calls may run on any thread, but only one at a time may write an output. None may run during capture.
 */
#ifndef REFRAIN_MODEL_H
#define REFRAIN_MODEL_H

#include <stddef.h>

#include "refrain/ctx.h"
#include "refrain/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_export_options {
  size_t size; /* sizeof (rfr_export_options) */
  /* "hf": a folder with config.json, safetensors files of at most 5 GB and the tokenizer's files. "gguf": one file with
   * vocabulary and chat template. "peft": the adapter alone, a folder that the PEFT library reads. "gguf-lora": the
   * adapter alone, a file for llama.cpp: LoRA on matrices of the blocks with one alpha. "hf" and "gguf" merge an
   * adapter into the weights: W + scale B A, computed in f32 and rounded once. */
  const char *format;
  /* Element type of the weights: "f32", "bf16", "f16"; for gguf also "q8_0" and "q4_0", with vectors as f32. NULL: that
   * of the model. Not for adapters. */
  const char *dtype;
  int ema; /* 1: the averaged weights of a checkpoint (optimizer.ema) instead of the trained ones */
} rfr_export_options;
/* format "hf", dtype NULL, ema 0 */
RFR_API rfr_export_options rfr_export_options_default(void);

/* Writes the model to `out`, which must not exist. Checks the free space, writes under a temporary name, syncs to disk
 * and renames, so a failed call leaves no incomplete output. Keeps the f32 values of one parameter in memory.
 * Errors: argument for an unknown format or dtype; export.exists; file.space; those of reading a model; model.config or
 * unsupported for a model or vocabulary that GGUF cannot describe; adapter; adapter.base if the base is not that of the
 * run; run.ema if the checkpoint has no averaged weights. A run's adapter is merged into the base as the run stores it
 * (adapter.base): quantized, then dequantized. */
RFR_API rfr_status rfr_export(rfr_ctx *ctx, const char *model, const char *out, const rfr_export_options *options);

/* Describes a Hugging Face folder, a safetensors or GGUF file, or an adapter's folder: its kind, the model, the tensors
 * with shapes and types, the vocabulary, unknown fields. Reads no weights. `json` 1: one JSON object; 0: text for a
 * terminal. An unsupported model is described as far as it can be read, with the reason why it is not supported.
 * Errors: those of reading the files. */
RFR_API rfr_status rfr_inspect(rfr_ctx *ctx, const char *path, int json, rfr_write_fn write, void *user);

#ifdef __cplusplus
}
#endif
#endif
