/* SPDX-License-Identifier: Apache-2.0
 *
 * The MLP: SwiGLU for Llama, tanh GELU for GPT-2, a tanh GELU gate for Gemma.
 *
 * Gate and up projection are separate GEMMs where their weights are separate tensors in the files: a packed copy would
 * need the memory of both. Phi-3's files have them packed.
 */
#include "nn/nn.h"

rfr_value rfi_nn_mlp(const rfi_nn *n, rfr_value x) {
  const int64_t I = n->c->intermediate_size;
  if (rfi_is_packed(n->c)) {
    x = rfi_nn_linear(n, x, RFI_PARAM_GATE_UP); /* (T,2I) */
    return rfi_nn_linear(n, rfr_swiglu(n->t, rfr_slice(n->t, x, 1, 0, I), rfr_slice(n->t, x, 1, I, I)), RFI_PARAM_DOWN);
  }
  if (n->c->type == RFR_MODEL_GPT2)
    return rfi_nn_linear(n, rfr_gelu(n->t, rfi_nn_linear(n, x, RFI_PARAM_UP), 1), RFI_PARAM_DOWN);
  static const rfi_param_kind weights[2] = {RFI_PARAM_UP, RFI_PARAM_GATE};
  rfr_value u[2];
  rfi_nn_project(n, x, weights, 2, u);
  const rfr_value up = rfi_nn_linear_with(n, x, RFI_PARAM_UP, u[0]);
  const rfr_value gate = rfi_nn_linear_with(n, x, RFI_PARAM_GATE, u[1]);
  const rfr_value y = rfi_is_gemma(n->c) ? rfr_mul(n->t, rfr_gelu(n->t, gate, 1), up) : rfr_swiglu(n->t, gate, up);
  return rfi_nn_linear(n, y, RFI_PARAM_DOWN);
}
