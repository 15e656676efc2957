/* SPDX-License-Identifier: Apache-2.0
 *
 * One transformer block: x + attention(x), then x + mlp(x). A norm is before each branch, after it, or both; Granite
 * multiplies the result of a branch. Scopes name the layer and the branch for errors, NaN reports and the collapsed
 * print.
 */
#include <stdio.h>

#include "nn/nn.h"
#include "trace/trace.h"

static void enter(const rfi_nn *n, const char *branch) {
  char scope[64];
  snprintf(scope, sizeof scope, "layer%lld.%s", (long long)n->layer, branch);
  rfr_scope(n->t, scope);
}

static rfr_value add_branch(const rfi_nn *n, rfr_value x, rfr_value y, rfi_param_kind norm) {
  if (rfi_has_post_norms(n->c)) y = rfi_nn_norm(n, y, norm);
  return rfr_add(n->t, x, rfi_nn_scale(n, rfi_nn_dropout(n, y), n->c->residual_multiplier));
}

rfr_value rfi_nn_block(const rfi_nn *n, rfr_value x) {
  const bool norms = rfi_has_pre_norms(n->c);
  enter(n, "attention");
  x = add_branch(n, x, rfi_nn_attention(n, norms ? rfi_nn_norm(n, x, RFI_PARAM_NORM1) : x), RFI_PARAM_POST1);
  enter(n, "mlp");
  rfr_value y = norms ? rfi_nn_norm(n, x, RFI_PARAM_NORM2) : x;
  y = (rfr_model_has_experts(n->c, n->layer) ? rfi_nn_moe : rfi_nn_mlp)(n, y);
  if (rfi_has_post_norms(n->c)) y = rfi_nn_norm(n, y, RFI_PARAM_POST2);
  y = rfi_nn_scale(n, rfi_nn_dropout(n, y), n->c->residual_multiplier);
  /* the layers whose activations are all recomputed, from the input of each block */
  const rfr_policy policy = rfi_trace_records(n->t) ? (rfr_policy)n->t->policy : RFR_POLICY_AUTO;
  if (policy == RFR_POLICY_RECOMPUTE) rfr_set_recompute(n->t, RFR_POLICY_KEEP);
  x = rfr_add(n->t, x, y);
  rfr_set_recompute(n->t, policy);
  return x;
}
