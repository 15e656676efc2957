/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear, norm and dropout in the forms of the model types.
 *
 * Llama stores a linear weight as (out, in), GPT-2 as (in, out). The parameter keeps the layout of the file and the
 * GEMM reads it so: loading and saving never transpose.
 *
 * Gemma stores the scale of a norm minus one. The one is added in f32, because the sum in bf16 would lose bits.
 */
#include "nn/adapter.h"

rfr_value rfi_nn_parameter(const rfi_nn *n, rfi_param_kind kind) {
  const int i = rfi_parameter_index(n->c, kind, n->layer);
  return i < 0 ? RFR_NONE : rfi_parameter_values(n->t, n->c, n->parameters, i);
}

rfr_value rfi_nn_linear(const rfi_nn *n, rfr_value x, rfi_param_kind weight) {
  return rfi_nn_linear_with(n, x, weight, RFR_NONE);
}

rfr_value rfi_nn_linear_with(const rfi_nn *n, rfr_value x, rfi_param_kind weight, rfr_value u) {
  const rfr_value b = rfi_nn_parameter(n, (rfi_param_kind)(weight + 1));
  const int w = rfi_parameter_index(n->c, weight, n->layer);
  return rfi_adapter_linear(n->t, n->c, n->parameters, w, x, u, b, n->step, n->c->dtype);
}

void rfi_nn_project(const rfi_nn *n, rfr_value x, const rfi_param_kind *weights, int count, rfr_value *u) {
  int w[RFI_MOST_SHARED];
  for (int i = 0; i < count; i++) w[i] = rfi_parameter_index(n->c, weights[i], n->layer);
  rfi_adapter_project(n->t, n->c, n->parameters, w, count, x, n->step, u);
}

void rfi_nn_prepare(rfi_nn *n, int64_t first, int64_t end) {
  static const rfi_param_kind shared[][RFI_MOST_SHARED] = {{RFI_PARAM_Q, RFI_PARAM_K, RFI_PARAM_V},
                                                           {RFI_PARAM_UP, RFI_PARAM_GATE}};
  static const rfi_param_kind single[] = {RFI_PARAM_QKV,  RFI_PARAM_O,         RFI_PARAM_GATE_UP,
                                          RFI_PARAM_DOWN, RFI_PARAM_EXPERT_UP, RFI_PARAM_EXPERT_DOWN};
  for (n->layer = first; n->c->adapter && n->layer < end; n->layer++) {
    int w[RFI_MOST_SHARED];
    for (int g = 0; g < 2; g++) {
      const int count = 3 - g;
      for (int i = 0; i < count; i++) w[i] = rfi_parameter_index(n->c, shared[g][i], n->layer);
      rfi_adapter_prepare(n->t, n->c, n->parameters, w, count, n->step);
    }
    for (size_t i = 0; i < sizeof single / sizeof *single; i++) {
      w[0] = rfi_parameter_index(n->c, single[i], n->layer);
      rfi_adapter_prepare(n->t, n->c, n->parameters, w, 1, n->step);
    }
  }
}

rfr_value rfi_nn_norm(const rfi_nn *n, rfr_value x, rfi_param_kind weight) {
  rfr_value w = rfi_nn_parameter(n, weight);
  if (n->c->type == RFR_MODEL_GPT2)
    return rfr_layernorm(n->t, x, w, rfi_nn_parameter(n, (rfi_param_kind)(weight + 1)), n->c->norm_eps);
  if (rfi_is_gemma(n->c)) {
    const rfr_type type = rfr_value_type(n->t, w);
    if (type.dtype != RFR_F32) w = rfr_cast(n->t, w, RFR_F32);
    w = rfr_add(n->t, w, rfr_fill(n->t, 1.0, RFR_F32, type.rank, type.shape));
  }
  return rfr_rmsnorm(n->t, x, w, n->c->norm_eps);
}

rfr_value rfi_nn_scale(const rfi_nn *n, rfr_value x, double by) {
  return by == 0.0 || by == 1.0 ? x : rfr_scale(n->t, x, by, RFR_NONE);
}

rfr_value rfi_nn_dropout(const rfi_nn *n, rfr_value x) {
  if (n->c->dropout == 0.0 || n->step == RFR_NONE) return x;
  return rfr_dropout(n->t, x, n->step, n->c->dropout, RFI_DROPOUT_STREAM);
}
