/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs of small models on ten small files in their own folder, and helpers of these tests: events kept by step,
 * states and losses compared bit for bit.
 */
#ifndef RFT_RUN_H
#define RFT_RUN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "data/hash.h"
#include "train/run.h"

#define LLAMA                                                                                  \
  "model: {model_type: llama, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2,\n" \
  "        num_attention_heads: 4, num_key_value_heads: 2}\n"
#define GPT2                                                                            \
  "model: {model_type: gpt2, vocab_size: 256, hidden_size: 24, num_hidden_layers: 2,\n" \
  "        num_attention_heads: 3, max_position_embeddings: 64, dropout: 0.1}\n"        \
  "precision: {dtype: bf16}\n"
#define EXPERTS                                                                                                     \
  "model: {model_type: qwen3_moe, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 4, num_experts: 5,\n" \
  "        moe_intermediate_size: 20}\n"
#define MIXTRAL                                                                                                  \
  "model: {model_type: mixtral, hidden_size: 24, intermediate_size: 20, num_hidden_layers: 2, num_experts: 4,\n" \
  "        num_attention_heads: 4, dropout: 0.05}\nprecision: {dtype: bf16, router_dtype: model}\n"
#define SINGLE "precision: {dtype: f32}\n"
#define HALF "precision: {dtype: f16}\n"
#define DATA "data: {train: [\"*.txt\"], validation: 30%, tokenizer: bytes, sequence: 16}\n"
#define ADAM "optimizer: {name: adamw, lr: 3e-3, weight_decay: 0.1, clip: 1.0}\n"
#define NARROW "optimizer: {name: adamw, lr: 3e-3, clip: 1.0, gradient_dtype: model, state_dtype: bf16}\n"
#define BALANCED "optimizer: {name: adamw, lr: 3e-3, weight_decay: 0.1, clip: 1.0, router_z_loss_coef: 0.001}\n"
#define TWO_BATCHES "batch: {tokens: 128, microbatch: 4}\n"
#define RUN "run: {steps: 50, seed: 3, log_every: 1, evaluate_windows: 0}\n"

enum { RFT_STEPS = 50 };

/* Losses by step, and other numbers of the events. */
typedef struct rft_record {
  double loss[RFT_STEPS + 1], norm[RFT_STEPS + 1];
  double most_load, least_load; /* in the last step */
  int64_t last;
  int skipped, warnings, checkpoints, evaluations, progress, schedules, compiles;
  double last_loss, last_lr;
  int64_t windows, windows_held_out; /* in the last evaluation */
  double bits;
  rfr_run *stop_at_5;
  char warning[256];
} rft_record;

/* The folder of the files and runs; group fixtures create and remove it. */
extern char rft_run_root[64];
int rft_run_setup(void **state);
int rft_run_teardown(void **state);
void rft_write_text(const char *name, const char *text);
const char *rft_run_folder(const char *name); /* valid until the next call */

rfr_ctx *rft_run_ctx(int threads);
/* Options whose events go to `r`. */
rfr_run_options rft_run_options(rft_record *r);
/* Each call must succeed; `name` NULL: a run without a folder. */
rfr_run *rft_run_open(rfr_ctx *ctx, const char *config, const char *name, const rfr_run_options *o);
void rft_run_steps(rfr_run *run, int n);

/* A hash of all tensors in a checkpoint, independent of the number of ranks; all ranks call it together. */
rfr_status rft_hash_state(rfr_run *run, rfi_hash *out);
void rft_assert_same_state(rfr_run *a, rfr_run *b); /* every tensor that outlives a step */
/* An eager run, and a run in folder `name` that is saved at step 6 and resumed there, must end in the state of `a`
 * after `steps` steps. */
void rft_assert_eager_and_resumed(rfr_run *a, const char *config, const char *name, int steps);
/* The same, with `a` a new run of `config`; returns its record. */
rft_record rft_assert_same_bits(const char *config, const char *name, int steps);
void rft_assert_same_losses(const rft_record *a, const rft_record *b);

bool rft_run_has(const char *folder, const char *name); /* file or folder `name` in a run's folder */

/* A run over ranks: after `steps` steps one bit of a tensor changes on one rank. The following checkpoint must fail
 * with dist.diverged on each rank, with a message that contains `says`, and leave no files. */
typedef struct rft_flip {
  const char *config, *set; /* set: KEY=VALUE */
  const char *tensor;
  int ranks, rank, steps;
  const char *says;
} rft_flip;
void rft_assert_flip_is_found(const rft_flip *f, const char *name);

#endif
