/* SPDX-License-Identifier: Apache-2.0
 *
 * Internals of an adapter: the parameters of the model that it changes, and the recording of its layers.
 */
#ifndef RFI_ADAPTER_H
#define RFI_ADAPTER_H

#include <string.h>

#include "nn/nn.h"

enum { RFI_MOST_RANK = 1 << 16, RFI_MOST_SHARED = 3 };

/* The adapter of one parameter of the model. */
typedef struct rfi_adapter_target {
  int parameter; /* index in the model's list */
  int first;     /* index of A in that list; B follows, and with DoRA the magnitudes */
  int64_t rank;
  double alpha, scale;
} rfi_adapter_target;

struct rfr_adapter {
  rfr_ctx *ctx;
  int base_count; /* parameters of the model without the adapter */
  int count;      /* parameters of the adapter */
  int rslora, dora;
  double dropout;
  int n;
  rfi_adapter_target *targets; /* ascending by parameter */
  int *target_of;              /* per parameter of the model: index into targets, -1: none */
};

/* The kinds of a target's parameters, in the order of the list. */
typedef enum rfi_adapter_part { RFI_ADAPTER_A, RFI_ADAPTER_B, RFI_ADAPTER_MAGNITUDE } rfi_adapter_part;

/* Whether parameter i of the model's list is frozen because the model has an adapter. */
static inline bool rfi_adapter_freezes(const rfr_model_config *c, int i) {
  return c->adapter && i < c->adapter->base_count;
}
/* Whether a name is that of an adapter's parameter; no parameter of a model has such a name. */
static inline bool rfi_adapter_has_name(const char *name) { return strstr(name, ".lora_") != NULL; }
/* NULL if the adapter (NULL: none) does not change the parameter. */
const rfi_adapter_target *rfi_adapter_find(const rfr_adapter *a, int parameter);
/* The target to which parameter i of the model's list belongs, and its part; NULL for a parameter of the base. */
const rfi_adapter_target *rfi_adapter_owner(const rfr_model_config *c, int i, rfi_adapter_part *part);
/* The module of a parameter: its name without ".weight" or ".bias", as "model.layers.0.self_attn.q_proj";
 * for packed experts the name itself, as "model.layers.0.mlp.experts.down_proj". */
void rfi_module_name(const char *parameter, char out[96]);
/* Whether a parameter can have an adapter; if not, *reason is the reason. */
bool rfi_adapter_can(const rfr_model_config *c, int parameter, bool *in_block, const char **reason);
/* Creates an adapter with a copy of the targets (parameter, rank and alpha are set), ascending by parameter. */
rfr_status rfi_adapter_create(rfr_ctx *ctx, const rfr_model_config *c, const rfi_adapter_target *targets, int n,
                              int rslora, int dora, double dropout, rfr_adapter **out);
/* The i-th parameter of the model's list, i at least base_count. */
rfr_status rfi_adapter_parameter(const rfr_model_config *c, int i, rfr_parameter *out);

/* u[i] = x (scale A)T (T,r) for each of n weights that read x, at most RFI_MOST_SHARED, by one GEMM. RFR_NONE if that
 * is not possible, for example with dropout, whose masks differ. */
void rfi_adapter_project(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, const int *weights,
                         int n, rfr_value x, rfr_value step, rfr_value *u);
/* Records scale A of n weights that read the same x, before the ops of the first microbatch. */
void rfi_adapter_prepare(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, const int *weights,
                         int n, rfr_value step);
/* x W + b in the layout of the model's type, plus the adapter of the parameter `weight`. u: from rfi_adapter_project,
 * or RFR_NONE. `to`: the type of the result. `step`: the step block, which enables dropout; RFR_NONE disables it. */
rfr_value rfi_adapter_linear(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, int weight,
                             rfr_value x, rfr_value u, rfr_value bias, rfr_value step, rfr_dtype to);
/* y plus the adapter of a packed weight of experts; x, y: rows sorted by expert. */
rfr_value rfi_adapter_experts(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, int weight,
                              rfr_value x, rfr_value offsets, rfr_value y);
/* y plus the adapter of the embedding table. */
rfr_value rfi_adapter_embedding(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, rfr_value ids,
                                rfr_value y);

/* magnitude (out), f32: the norm of each row of W. w: the values of the target's parameter of the model, of type
 * `dtype`. */
void rfi_adapter_magnitude(const rfr_model_config *c, const rfi_adapter_target *target, rfr_dtype dtype, const void *w,
                           float *magnitude);
/* w (f32, the shape of the target's parameter) becomes W + scale B A, with DoRA each row scaled to its magnitude. All
 * are f32: a and b (r,in) and (out,r), for an embedding (r,V) and (C,r), for experts (E,r,in) and (E,out,r);
 * magnitude (out), NULL without DoRA. */
void rfi_adapter_merge(const rfr_model_config *c, const rfi_adapter_target *target, const float *a, const float *b,
                       const float *magnitude, int threads, float *w);

#endif
