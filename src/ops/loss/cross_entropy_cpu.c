/* SPDX-License-Identifier: Apache-2.0
 *
 * token_count, softmax cross-entropy and the loss of each row on the CPU.
 *
 *   lse[t] = log sum_v e^logits[t,v]
 *   loss   = inv_valid * sum over valid t of (lse[t] - logits[t, target[t]])
 *
 * Rows run in parallel, each on one thread; their losses are in the workspace and are added in row order in double, so
 * that results do not depend on the split.
 */
#include "backend/cpu/cpu.h"
#include "ops/loss/ce_row.h"

static rfr_status count_run(const rfi_call *c) {
  int64_t count = 0;
  for (int i = 0; i < c->n_in; i++) {
    const int32_t *targets = c->in[i].data;
    int64_t n = rfi_count(&c->in[i].type);
    for (int64_t k = 0; k < n; k++) count += targets[k] != (int32_t)c->attr[0].i && targets[k] >= 0;
  }
  if (c->out[0].data) *(float *)c->out[0].data = count ? (float)(1.0 / (double)count) : 0.0f;
  if (c->out[1].data) *(float *)c->out[1].data = (float)count;
  return RFR_OK;
}

/* Of cross_entropy into the workspace, of token_loss into the result. */
static void forward_rows(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *logits = &c->in[0];
  const int32_t *targets = c->in[1].data;
  float *lse = c->out[1].data;
  double *sums = c->n_in > 2 ? c->workspace : NULL;
  float *losses = c->n_in > 2 ? NULL : c->out[0].data;
  int64_t V = logits->type.shape[1];
  for (int64_t t = begin; t < end; t++) {
    int64_t row = t * logits->stride[0];
    double l = rfi_ce_lse(logits, row, V);
    bool valid = rfi_ce_valid(targets[t], c->attr[0].i, V);
    const double nll = valid ? l - rfi_read1(logits, row + targets[t]) : 0;
    if (sums) sums[t] = nll;
    if (losses) losses[t] = (float)nll;
    if (lse) lse[t] = (float)l;
  }
}

static rfr_status forward_run(const rfi_call *c) {
  int64_t T = c->in[0].type.shape[0];
  rfi_parallel(c, T, 4 * c->in[0].type.shape[1], forward_rows);
  const double *nll = c->workspace;
  double sum = 0;
  for (int64_t t = 0; t < T; t++) sum += nll[t];
  if (c->out[0].data) *(float *)c->out[0].data = (float)(sum * *(const float *)c->in[2].data);
  return RFR_OK;
}

static rfr_status token_loss_run(const rfi_call *c) {
  rfi_parallel(c, c->in[0].type.shape[0], 4 * c->in[0].type.shape[1], forward_rows);
  return RFR_OK;
}

static size_t forward_workspace(const rfi_call *c) { return (size_t)c->in[0].type.shape[0] * sizeof(double); }

static void backward_rows(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *logits = &c->in[1], *dlogits = &c->out[0];
  const int32_t *targets = c->in[2].data;
  const float *lse = c->in[3].data;
  const float *dloss = c->in[0].data, *inv_valid = c->n_in > 4 ? c->in[4].data : NULL;
  int64_t V = logits->type.shape[1];
  for (int64_t t = begin; t < end; t++)
    rfi_ce_backward(logits, t * logits->stride[0], dlogits, t * V, V, rfi_ce_valid(targets[t], c->attr[0].i, V),
                    targets[t], lse[t], inv_valid ? *dloss * *inv_valid : dloss[t], 0);
}

static rfr_status backward_run(const rfi_call *c) {
  if (c->out[0].data) rfi_parallel(c, c->in[1].type.shape[0], 4 * c->in[1].type.shape[1], backward_rows);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(token_count) = {count_run, NULL};
const rfi_kernel RFI_CPU(cross_entropy) = {forward_run, forward_workspace};
const rfi_kernel RFI_CPU(cross_entropy_bwd) = {backward_run, NULL};
const rfi_kernel RFI_CPU(token_loss) = {token_loss_run, NULL};
const rfi_kernel RFI_CPU(token_loss_bwd) = {backward_run, NULL};
