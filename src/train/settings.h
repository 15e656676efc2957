/* SPDX-License-Identifier: Apache-2.0
 *
 * The resolved configuration of a run: numbers, names, and the spec of its programs. Percentages, defaults and "auto"
 * are resolved here; code that uses this struct does not read the configuration.
 */
#ifndef RFI_SETTINGS_H
#define RFI_SETTINGS_H

#include <jansson.h>

#include "base/arena.h"
#include "base/base.h"
#include "model/hf.h"
#include "refrain/chat.h"
#include "refrain/text.h"
#include "refrain/train.h"
#include "train/config.h"
#include "train/parallel.h"
#include "train/step_trace.h"

/* A phase of batch.ramp: the steps before step `until`, counted from 0; see ramp.h. */
typedef struct rfi_ramp_size {
  int64_t until, microbatches, sequence; /* microbatches: per rank */
} rfi_ramp_size;

typedef struct rfi_settings {
  rfr_ctx *ctx;
  rfi_config *config;
  rfi_step_spec spec;
  rfi_parallel parallel;
  rfr_adapter *adapter;     /* spec.model references it; NULL: none */
  const char *adapter_from; /* folder of the adapter to start from, or NULL */
  const char *weights;      /* folder with model.safetensors to start from, or NULL */
  rfi_hf_notes notes;       /* notes on reading that folder */
  int64_t sequence;         /* S, tokens of a window */
  int64_t rows;             /* windows per microbatch */
  int64_t eval_rows;
  /* all phases but the last; `sequence`, `rows` and spec have the sizes of the last phase */
  rfi_ramp_size ramp[RFI_RAMP_MOST];
  int n_ramp;
  int64_t steps;                            /* 0: determined by `time`, or by `epochs` and the data */
  double time;                              /* seconds of training, or 0 */
  double epochs;                            /* passes over the data, or 0; rfi_settings_set_steps derives `steps` */
  rfr_tokenizer *tokenizer;                 /* set by rfi_settings_open_text; NULL: tokens are bytes */
  rfr_chat_template *chat;                  /* NULL: none */
  int64_t evaluate_every, checkpoint_every; /* steps between two; 0: only at the end */
  int64_t evaluate_windows;                 /* windows of an evaluation; 0: all; -1: auto */
  int64_t log_every;                        /* steps between two metrics in the log */
  int64_t sample_every;                     /* steps between two samples of text; 0: no samples */
  bool tensorboard;                         /* also write an event file */
  int keep;
  uint64_t seed;
  int64_t budget;
  rfr_recompute recompute;
  bool debug, tune;
} rfi_settings;

/* `bf16_fast`: precision.dtype auto means bf16, unless a model folder has another dtype. Errors: config.*,
 * model.config, run.folder, json, file.*. */
rfr_status rfi_settings_read(rfr_ctx *ctx, const char *text, const rfr_run_options *options, bool bf16_fast,
                             rfi_settings **out);
void rfi_settings_destroy(rfi_settings *s); /* accepts NULL */
/* Whether the model's tokens are bytes; false for a model folder with another vocabulary. */
bool rfi_settings_has_byte_tokens(const rfi_settings *s);
/* Opens the tokenizer and the chat template. Errors: data.tokenizer (data.tokenizer does not fit the model),
 * tokenizer.*, template.*, chat.*, file.*. */
rfr_status rfi_settings_open_text(rfi_settings *s);
/* Opens the files that the configuration names; call it after rfi_settings_open_text. `warn` gets a line if tokens
 * cannot be cached. `evaluates`: opens only the rows that data.validation names. Errors: data.*. */
struct rfi_dataset;
rfr_status rfi_settings_open_data(const rfi_settings *s, bool evaluates, void (*warn)(void *user, const char *line),
                                  void *user, struct rfi_dataset **out);
/* Marks the parameters that a pattern of the key `key` matches; at least one must. */
rfr_status rfi_settings_match(const rfi_settings *s, rfi_config_id key, const char *pattern, bool *matched);
/* Reads precision.recipe and its keys into spec.recipe. */
rfr_status rfi_settings_recipe(rfi_settings *s);
/* Derives the steps of a run with run.epochs from its data. Errors: config.value (the schedule does not fit). */
rfr_status rfi_settings_set_steps(rfi_settings *s, int64_t steps);
/* Calls `warn` with a line for each ignored field of the model folder, up to a few. */
void rfi_settings_warn(const rfi_settings *s, void (*warn)(void *user, const char *line), void *user);
rfr_status rfi_settings_print(const rfi_settings *s, bool sources, rfi_string *out);
/* The configuration that a checkpoint must agree with, as a flat object of keys and values. */
rfr_status rfi_settings_signature(const rfi_settings *s, json_t **out);

/* Windows per step, over all ranks; with a ramp those of the last phase. */
static inline int64_t rfi_step_windows(const rfi_settings *s) { return s->spec.microbatches * s->spec.ranks * s->rows; }

#endif
