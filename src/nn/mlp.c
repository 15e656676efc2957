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
  rfr_value up = rfi_nn_linear(n, x, RFI_PARAM_UP), y;
  if (n->c->type == RFR_MODEL_GPT2) y = rfr_gelu(n->t, up, 1);
  else if (rfi_is_gemma(n->c)) y = rfr_mul(n->t, rfr_gelu(n->t, rfi_nn_linear(n, x, RFI_PARAM_GATE), 1), up);
  else y = rfr_swiglu(n->t, rfi_nn_linear(n, x, RFI_PARAM_GATE), up);
  return rfi_nn_linear(n, y, RFI_PARAM_DOWN);
}
