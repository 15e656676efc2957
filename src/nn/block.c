/* SPDX-License-Identifier: Apache-2.0
 *
 * One transformer block with norms before the branches: x + attention(norm(x)), then x + mlp(norm(x)). Gemma 2 also has
 * a norm after each branch. Scopes name the layer and the branch for errors, NaN reports and the collapsed print.
 */
#include <stdio.h>

#include "nn/nn.h"

static void enter(const rfi_nn *n, const char *branch) {
  char scope[64];
  snprintf(scope, sizeof scope, "layer%lld.%s", (long long)n->layer, branch);
  rfr_scope(n->t, scope);
}

rfr_value rfi_nn_block(const rfi_nn *n, rfr_value x) {
  enter(n, "attention");
  rfr_value a = rfi_nn_attention(n, rfi_nn_norm(n, x, RFI_PARAM_NORM1));
  if (n->c->type == RFR_MODEL_GEMMA2) a = rfi_nn_norm(n, a, RFI_PARAM_POST1);
  x = rfr_add(n->t, x, rfi_nn_dropout(n, a));
  enter(n, "mlp");
  rfr_value m =
      (rfr_model_has_experts(n->c, n->layer) ? rfi_nn_moe : rfi_nn_mlp)(n, rfi_nn_norm(n, x, RFI_PARAM_NORM2));
  if (n->c->type == RFR_MODEL_GEMMA2) m = rfi_nn_norm(n, m, RFI_PARAM_POST2);
  return rfr_add(n->t, x, rfi_nn_dropout(n, m));
}
