/* SPDX-License-Identifier: Apache-2.0
 *
 * Internals of nn: indices of parameters in the flat list, and the parts of a block. Only params.c defines the order of
 * the list; other files get an index from it.
 */
#ifndef RFI_NN_H
#define RFI_NN_H

#include <stdbool.h>

#include "refrain/nn.h"
#include "refrain/op.h"

/* Limits of a description; checked by rfr_model_config_check, and by readers before a value is used. */
enum {
  RFI_MOST_WIDTH = 1 << 20, /* maximum hidden_size */
  RFI_MOST_INNER = 1 << 24, /* maximum intermediate_size, also of an expert; maximum heads x head_dim */
  RFI_MOST_HEADS = 1 << 16, /* maximum num_attention_heads; maximum head_dim */
  RFI_MOST_EXPERTS = 1 << 16,
  RFI_MOST_EXPERTS_IN_ALL = 1 << 20 /* maximum layers x experts */
};
enum { RFI_DROPOUT_STREAM = 1 }; /* random stream of all dropout of a model; the ops differ by site */
/* maximum elements of all parameters: byte counts of weights and states stay far below 2^63 */
#define RFI_MOST_ELEMENTS 0x1p50

/* The parameters of a model or layer by purpose. The bias of a weight is the next enumerator. */
typedef enum rfi_param_kind {
  RFI_PARAM_TOKENS,    /* embedding table (V,C) */
  RFI_PARAM_POSITIONS, /* learned positions (P,C), GPT-2 */
  RFI_PARAM_NORM1,
  RFI_PARAM_NORM1_BIAS,
  RFI_PARAM_QKV,
  RFI_PARAM_QKV_BIAS, /* packed, GPT-2 and Phi-3 (without bias) */
  RFI_PARAM_Q_NORM,   /* (D), the same for all heads; OLMo 2: (H*D) */
  RFI_PARAM_K_NORM,
  RFI_PARAM_Q,
  RFI_PARAM_Q_BIAS,
  RFI_PARAM_K,
  RFI_PARAM_K_BIAS,
  RFI_PARAM_V,
  RFI_PARAM_V_BIAS,
  RFI_PARAM_O,
  RFI_PARAM_O_BIAS,
  RFI_PARAM_POST1, /* norm after the attention */
  RFI_PARAM_NORM2,
  RFI_PARAM_NORM2_BIAS,
  RFI_PARAM_GATE_UP, /* packed, Phi-3 */
  RFI_PARAM_GATE_UP_BIAS,
  RFI_PARAM_GATE,
  RFI_PARAM_GATE_BIAS,
  RFI_PARAM_UP,
  RFI_PARAM_UP_BIAS,
  RFI_PARAM_DOWN,
  RFI_PARAM_DOWN_BIAS,
  RFI_PARAM_ROUTER,      /* (experts,C) */
  RFI_PARAM_EXPERT_UP,   /* (experts,2I,C): for each expert the rows of gate, then of up */
  RFI_PARAM_EXPERT_DOWN, /* (experts,C,I) */
  RFI_PARAM_SHARED_GATE, /* (1,C); the shared expert uses the parameters of an MLP */
  RFI_PARAM_POST2,       /* norm after the MLP */
  RFI_PARAM_NORM,
  RFI_PARAM_NORM_BIAS, /* after the last layer */
  RFI_PARAM_HEAD,
} rfi_param_kind;

static inline bool rfi_is_gemma(const rfr_model_config *c) {
  return c->type == RFR_MODEL_GEMMA || c->type == RFR_MODEL_GEMMA2 || c->type == RFR_MODEL_GEMMA3;
}
/* One weight for q, k and v, and one for gate and up. */
static inline bool rfi_is_packed(const rfr_model_config *c) { return c->type == RFR_MODEL_PHI3; }
/* Norms over all columns of q and of k instead of each head. */
static inline bool rfi_has_row_norms(const rfr_model_config *c) { return c->qk_norm && c->type == RFR_MODEL_OLMO2; }
/* Norms before and after the attention and the MLP. */
static inline bool rfi_has_pre_norms(const rfr_model_config *c) { return c->type != RFR_MODEL_OLMO2; }
static inline bool rfi_has_post_norms(const rfr_model_config *c) {
  return c->type == RFR_MODEL_GEMMA2 || c->type == RFR_MODEL_GEMMA3 || c->type == RFR_MODEL_OLMO2;
}

/* Index of a parameter in the model's list; -1 if the model does not have it. `layer` is used for parameters of a
 * layer. */
int rfi_parameter_index(const rfr_model_config *c, rfi_param_kind kind, int64_t layer);

/* The layer of the i-th parameter, that of an adapter included: -1 before the layers, c->layers after them. */
int64_t rfi_parameter_layer(const rfr_model_config *c, int i);
/* The layers from `first` to `end` - 1, as a stage of a pipeline. x is i32 (T) tokens for the first layer, otherwise
 * (T,C) from the previous layer. The result is (T,C), for the last layer that of the final norm. The routing of a model
 * with experts is not returned. */
rfr_value rfi_model_layers(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, rfr_value x,
                           rfr_value offsets, rfr_value step, int64_t first, int64_t end);

/* The purpose of the i-th parameter of the model, without those of the adapter. */
rfi_param_kind rfi_parameter_kind(const rfr_model_config *c, int i);
/* Whether a tensor is a weight of experts, or its gradient or state. */
bool rfi_is_of_experts(const char *name);
/* The number of elements of all parameters. The sizes must be within their own limits. */
double rfi_model_elements(const rfr_model_config *c);

/* Computes the frequencies, in radians per position, of a model with rope_extension or rotary_dim, for programs with
 * documents of at most `longest` rows, and the factor by which rotated columns are multiplied. Returns their number, at
 * most RFR_MAX_LIST. */
int rfi_rope_frequencies(const rfr_model_config *c, int64_t longest, double *frequency, double *scale);

/* Declares the i-th parameter as an input of the trace; a quantized one is frozen. */
rfr_value rfi_declare_parameter(rfr_trace *t, const rfr_model_config *c, int i, rfr_role role);
/* The values of the i-th parameter: the parameter, or its dequantized values. */
rfr_value rfi_parameter_values(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, int i);
/* A linear weight of a block, including those of experts. */
bool rfi_is_linear(rfi_param_kind kind);

/* The state of recording one forward pass. */
typedef struct rfi_nn {
  rfr_trace *t;
  const rfr_model_config *c;
  const rfr_value *parameters;
  rfr_value offsets;   /* i32 (documents+1); RFR_NONE with a cursor */
  rfr_value cursor;    /* of a text with cached keys and values; otherwise RFR_NONE */
  int64_t capacity;    /* rows of the caches */
  rfr_value positions; /* i32 (T): row within its document */
  rfr_value step;      /* RFR_NONE: no dropout */
  rfr_experts experts; /* members are NULL if the caller does not need them */
  int64_t tokens;      /* T */
  int64_t layer;
  int64_t routers; /* number of layers with experts before this layer */
} rfi_nn;

rfr_value rfi_nn_parameter(const rfi_nn *n, rfi_param_kind kind); /* RFR_NONE if the model does not have it */
/* x W (+ b), with W in the layout of the model type. */
rfr_value rfi_nn_linear(const rfi_nn *n, rfr_value x, rfi_param_kind weight);
/* The same with the adapter's part that several linear layers of x share: u[i] of rfi_nn_project, for at most 3
 * weights. */
rfr_value rfi_nn_linear_with(const rfi_nn *n, rfr_value x, rfi_param_kind weight, rfr_value u);
void rfi_nn_project(const rfi_nn *n, rfr_value x, const rfi_param_kind *weights, int count, rfr_value *u);
/* Records the ops on adapters of layers `first` to `end` - 1 that depend only on weights; must precede everything
 * else. */
void rfi_nn_prepare(rfi_nn *n, int64_t first, int64_t end);
rfr_value rfi_nn_norm(const rfi_nn *n, rfr_value x, rfi_param_kind weight);
rfr_value rfi_nn_dropout(const rfi_nn *n, rfr_value x);
rfr_value rfi_nn_scale(const rfi_nn *n, rfr_value x, double by); /* x times `by`; 0: x */
rfr_value rfi_nn_attention(const rfi_nn *n, rfr_value x);        /* (T,C) -> (T,C) */
rfr_value rfi_nn_mlp(const rfi_nn *n, rfr_value x);              /* (T,C) -> (T,C) */
rfr_value rfi_nn_moe(const rfi_nn *n, rfr_value x);              /* the same, in a layer with experts */
rfr_value rfi_nn_block(const rfi_nn *n, rfr_value x);            /* both, with norms and residuals */

#endif
