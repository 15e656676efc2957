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
  const rfr_value b = rfi_nn_parameter(n, (rfi_param_kind)(weight + 1));
  const int w = rfi_parameter_index(n->c, weight, n->layer);
  return rfi_adapter_linear(n->t, n->c, n->parameters, w, x, b, n->step, n->c->dtype);
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
