/* SPDX-License-Identifier: Apache-2.0
 *
 * Records the programs of a run as traces. A spec is plain numbers and does not refer to files or configuration text.
 */
#ifndef RFI_STEP_TRACE_H
#define RFI_STEP_TRACE_H

#include <stdbool.h>

#include "model/averages.h"
#include "nn/adapter.h"
#include "refrain/recipe.h"
#include "refrain/schedule.h"

/* Targets with this value are ignored, as in the transformers library. */
enum { RFI_IGNORE = -100 };

/* The columns of the metrics ring after the sequence number. A step without experts lacks the columns from MOST_LOAD to
 * BAD_GROUP, one without preferences lacks MARGIN and ACCURACY, one rank lacks STOP. */
#define RFI_METRICS(X) \
  X(LOSS)              \
  X(NORM) X(LR) X(COUNT) X(SKIP) X(MOST_LOAD) X(LEAST_LOAD) X(BAD_ROUTING) X(BAD_GROUP) X(MARGIN) X(ACCURACY) X(STOP)
typedef enum rfi_metric {
#define RFI_METRIC_ENUM(name) RFI_METRIC_##name,
  RFI_METRICS(RFI_METRIC_ENUM)
#undef RFI_METRIC_ENUM
      RFI_METRIC_N
} rfi_metric;

/* How one parameter is trained. */
typedef struct rfi_param_rule {
  bool frozen;
  double lr_scale, weight_decay;
} rfi_param_rule;

/* The moving average of the trained weights: rfr_ema_at. Evaluations and samples use the averages. */
typedef struct rfi_ema {
  double decay; /* 0: no averages */
  int64_t start;
  bool warmup;
} rfi_ema;

/* A pipeline, and this rank of it; see stage_trace.h. With several data-parallel ranks, each has a pipeline, and ranks
 * with the same stages are adjacent. */
typedef struct rfi_pipeline_part {
  int ranks, rank; /* ranks 0 or 1: no pipeline */
  rfr_schedule_kind schedule;
  int64_t last_layers;        /* layers of the last stage; 0: rfi_stage_layers computes them at each call */
  int activations, gradients; /* number of slots of received tensors, set by rfi_trace_train */
  int scales;                 /* number of fp8_delayed slots over all ranks, set by rfi_trace_train; 0: none */
} rfi_pipeline_part;

typedef struct rfi_step_spec {
  rfr_model_config model;
  const rfi_param_rule
      *rules;    /* one per parameter; NULL: all are trained, or all of an adapter, with adamw.decay and scale 1 */
  int64_t slots; /* R, number of steps in the rings */
  int64_t microbatches; /* k, per rank */
  /* K, microbatches in a slot of the rings: k, or with a ramp the maximum over its phases; 0: k */
  int64_t ring_microbatches;
  int rank, ranks; /* this rank has microbatches [rank k, (rank + 1) k) of the step; ranks 0 counts as 1 */
  int64_t tokens;  /* T, per microbatch; also the maximum number of documents */
  int64_t eval_tokens;
  int64_t window; /* rows of the generation caches: the number of tokens to which generation attends */
  int64_t texts;  /* number of texts that generation continues concurrently; 0 counts as 1 */
  bool sgd;
  double momentum; /* SGD */
  bool muon;       /* Muon for linear layers and experts, AdamW for the other parameters */
  double muon_momentum;
  bool muon_rms; /* the scale by shape is 0.2 sqrt(max(rows, columns)), else sqrt(max(1, outputs / inputs)) */
  rfr_adamw_options adamw;
  rfr_dtype gradient_dtype; /* RFR_F32, or the dtype of the weights */
  rfr_dtype logits_dtype;   /* of training: RFR_F32, or the dtype of the weights */
  rfr_dtype state_dtype;    /* dtype of the moments; RFR_U8: 8 bits in blocks, AdamW only */
  bool master;              /* f32 master weights, for 16-bit weights */
  bool stochastic; /* bf16 weights are rounded stochastically; the number of a parameter's draws is its index + 1 */
  rfi_ema ema;
  double clip; /* global norm, 0: none */
  rfr_lr_options lr;
  bool preference; /* DPO: documents 2p and 2p + 1 of a microbatch are the chosen and the rejected answer of pair p */
  double beta, smoothing;
  rfr_recipe recipe; /* of the training step; all zeros: none */
  bool timed;        /* the state lr_steps has the steps at which the schedule changes; see rfr_lr_schedule_steps_at */
  rfi_pipeline_part pipeline;
  int expert_ranks; /* ranks over which the experts are distributed; 0 and 1: one rank. `model` has all experts */
  int64_t expert_capacity; /* in a training step; evaluation and generation have capacity for all rows */
  bool checkpoint;         /* blocks are recomputed from their inputs, regardless of the plan */
} rfi_step_spec;

static inline int64_t rfi_ring_microbatches(const rfi_step_spec *s) {
  return s->ring_microbatches > s->microbatches ? s->ring_microbatches : s->microbatches;
}

static inline rfi_param_rule rfi_step_rule(const rfi_step_spec *s, int parameter) {
  return s->rules ? s->rules[parameter]
                  : (rfi_param_rule){.frozen = rfi_adapter_freezes(&s->model, parameter),
                                     .lr_scale = 1.0,
                                     .weight_decay = s->adamw.decay};
}

static inline bool rfi_metric_exists(const rfi_step_spec *s, rfi_metric m) {
  if (m == RFI_METRIC_STOP) return s->ranks > 1 || s->pipeline.ranks > 1;
  if (m >= RFI_METRIC_MARGIN) return s->preference;
  return m < RFI_METRIC_MOST_LOAD || s->model.experts > 0;
}
static inline int rfi_metric_count(const rfi_step_spec *s) {
  int n = 0;
  for (int m = 0; m < RFI_METRIC_N; m++) n += rfi_metric_exists(s, (rfi_metric)m);
  return n;
}

/* With experts, these columns follow: the most_load of each layer with experts. */
static inline int64_t rfi_metric_layers(const rfi_step_spec *s) {
  return s->model.experts > 0 ? rfr_model_expert_layers(&s->model) : 0;
}
/* The number of columns, including the sequence number. */
static inline int64_t rfi_metric_width(const rfi_step_spec *s) {
  return 1 + rfi_metric_count(s) + rfi_metric_layers(s);
}

/* The maximum number of pairs in `tokens` tokens: an answer has at least two tokens, of which the first has no loss. */
enum { RFI_PAIR_TOKENS = 4 };
static inline int64_t rfi_most_pairs(int64_t tokens) { return tokens / RFI_PAIR_TOKENS; }

/* Names of the tensors that the host writes and reads. */
#define RFI_NAME_TOKENS "tokens"             /* i32 (R,K,T) */
#define RFI_NAME_TARGETS "targets"           /* i32 (R,K,T) */
#define RFI_NAME_OFFSETS "offsets"           /* i32 (R,K,T+1) */
#define RFI_NAME_PAIRS "pairs"               /* i32 (R,K,P) row of each pair, RFI_IGNORE: none */
#define RFI_NAME_REFERENCE "reference"       /* f32 (R,K,P), see rfr_dpo_loss_at */
#define RFI_NAME_STOP "stop"                 /* f32 (R,1), over several ranks: 1 asks for the end of the run */
#define RFI_NAME_METRICS "metrics"           /* f64 (R,rfi_metric_width) */
#define RFI_NAME_ZERO_STEPS "zero_steps"     /* i32 (trainable), see rfr_grad_norm_zeros */
#define RFI_NAME_LR_STEPS "lr_steps"         /* i64 (3), see rfr_lr_schedule_steps_at */
#define RFI_NAME_LOSS_SCALE "loss_scale"     /* i32 (2), of f16 training, see rfr_loss_scale */
#define RFI_NAME_EVAL_TOKENS "eval.tokens"   /* i32 (eval_tokens) */
#define RFI_NAME_EVAL_TARGETS "eval.targets" /* i32 (eval_tokens) */
#define RFI_NAME_EVAL_OFFSETS "eval.offsets" /* i32 (eval_tokens+1) */
#define RFI_NAME_NLL "nll"                /* output f32 (1), a sum in nats; with preferences f32 (2P), one per answer */
#define RFI_NAME_TEXT "text"              /* i32 (window+1), or (texts,window+1); see rfr_text_read */
#define RFI_NAME_CURSOR "text.cursor"     /* i64 (4), or (texts,4) */
#define RFI_NAME_SAMPLING "text.sampling" /* f64 (5), see rfr_text_append_at */
#define RFI_NAME_LOGITS "logits"          /* output f32 (texts,V), of the last token taken */

static inline int64_t rfi_step_texts(const rfi_step_spec *s) { return s->texts > 1 ? s->texts : 1; }

/* Tokens of each prompt per prefill, at most the window: enough, over all texts, to amortize reading the weights. */
enum { RFI_PREFILL_ROWS = 64 };
static inline int64_t rfi_prefill_rows(const rfi_step_spec *s) {
  const int64_t rows = rfi_step_texts(s) < RFI_PREFILL_ROWS ? RFI_PREFILL_ROWS / rfi_step_texts(s) : 1;
  return s->window < rows ? s->window : rows;
}

/* Suffixes of the optimizer states of a parameter. */
#define RFI_SUFFIX_M ".exp_avg"
#define RFI_SUFFIX_V ".exp_avg_sq"
#define RFI_SUFFIX_MOMENTUM ".momentum"
#define RFI_SUFFIX_MASTER ".master"
/* RFI_SUFFIX_EMA: the average of a trained parameter, f32, with the role of a weight, so that it is sharded like a
 * weight. */
/* For a rank of a pipeline. A tied head has separate gradients: the ranks of the first and the last stage have both. */
#define RFI_SUFFIX_GRADIENT ".gradient"
#define RFI_SUFFIX_HEAD ".head"
/* f32 (ranks k): losses of all microbatches, on the rank that has them; else 0 */
#define RFI_NAME_LOSSES "pipeline.losses"
#define RFI_NAME_ACTIVATIONS "pipeline.activations" /* (slots,T,C), received; absent without slots */
#define RFI_NAME_OUT_GRADIENTS "pipeline.gradients" /* the same for gradients of outputs */
#define RFI_NAME_SENT_GRADIENTS "pipeline.sent"     /* (RFI_SENT_COPIES,T,C) of inputs; present with activations */
enum { RFI_SENT_COPIES = 2 };
#define RFI_NAME_EVAL_X "pipeline.eval.x" /* (eval_tokens,C): input of a stage in evaluation */
#define RFI_NAME_EVAL_Y "pipeline.eval.y" /* output, the same */

/* For one rank of a pipeline: everything after the gradients, which are inputs. */
rfr_status rfi_trace_train(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_trace **out);
rfr_status rfi_trace_evaluate(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_trace **out);
/* For one stage of a pipeline: the output is RFI_NAME_EVAL_Y, of the last stage RFI_NAME_NLL. */
rfr_status rfi_trace_stage_evaluate(rfr_ctx *ctx, const rfi_step_spec *spec, int stage, rfr_trace **out);
/* Both process the next tokens of a text (prefill a chunk of them, decode one) and append a token after the last. */
rfr_status rfi_trace_prefill(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_trace **out);
rfr_status rfi_trace_decode(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_trace **out);

#endif
