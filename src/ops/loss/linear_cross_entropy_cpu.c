/* SPDX-License-Identifier: Apache-2.0
 *
 * The LM head and its loss in one op, forward and backward, without a buffer for all logits:
 *
 *   for each chunk of rows:  logits  = x wT                      f32 or x's type, in the workspace
 *                            logits  = cap tanh(logits / cap)    if there is a cap
 *                            lse, loss                           as in cross_entropy
 *                            dlogits = (softmax - onehot) scale  in x's type, over the logits; with a cap
 *                                                                times 1 - (logits / cap)^2
 *                            dx      = dlogits w
 *                            dw     += dlogitsT x                f32
 *
 * linear_token_loss is the same with a loss and a cotangent for each row: these depend on the losses of other rows, so
 * its backward is another call, which computes the logits again.
 *
 * The backward can run in the same op because d loss is an operand. A library runs the GEMMs (head.h) if it supports
 * them, else the matmul kernel does. Chunks run in order, so dw is summed in row order for any number of threads.
 * With a cap, logits are always f32, so they are not rounded between the GEMM and the cap.
 */
#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "ops/loss/ce_row.h"
#include "ops/loss/head.h"

static const rfi_head_library *library_of(const rfi_call *c, int kind, int gemm) {
  const rfi_head_library *entry = c->library;
  return entry ? &entry[kind * RFI_HEAD_GEMMS + gemm] : NULL;
}

static size_t workspace(const rfi_call *c) {
  rfi_head h = rfi_head_make(c, 1);
  size_t most = 0;
  for (int kind = 0; kind < RFI_HEAD_CHUNKS; kind++) {
    rfi_head_gemm gemms[RFI_HEAD_GEMMS];
    int64_t t = rfi_head_start(&h, kind);
    if (t < 0) continue;
    rfi_head_gemms(c, &h, t, &h, gemms);
    for (int i = 0; i < RFI_HEAD_GEMMS; i++) {
      const rfi_head_library *library = library_of(c, kind, i);
      size_t bytes = 0;
      if (!gemms[i].wanted) continue;
      if (library && library->run) bytes = library->workspace;
      else if (RFI_CPU(matmul).workspace) bytes = RFI_CPU(matmul).workspace(&gemms[i].call);
      if (bytes > most) most = bytes;
    }
  }
  return h.nll + h.logits + most;
}

static rfr_status run_gemm(const rfi_call *c, rfi_head_gemm *p, int kind, int gemm, void *scratch) {
  const rfi_head_library *library = library_of(c, kind, gemm);
  if (!p->wanted) return RFR_OK;
  p->call.workspace = scratch;
  if (!library || !library->run) return RFI_CPU(matmul).run(&p->call);
  p->call.library = library->handle;
  return library->run(&p->call);
}

/* One chunk, as rfi_parallel passes it to its parts; the call must be the first field. */
typedef struct chunk {
  rfi_call call;
  int64_t t; /* its first row */
  rfi_arg logits, dlogits;
} chunk;

static void rows(const rfi_call *call, int64_t begin, int64_t end, int part) {
  (void)part;
  const chunk *k = (const chunk *)call;
  int64_t V = k->logits.type.shape[1];
  bool backward = call->out[1].data || call->out[2].data;
  const float *dloss = rfi_head_dloss(call)->data;
  const bool per_row = rfi_head_is_per_row(call);
  float scale = backward && !per_row ? *dloss * *(const float *)call->in[RFI_HEAD_INV_VALID].data : 0;
  double *nll = call->workspace;
  const float cap = (float)call->attr[2].f;
  for (int64_t i = begin; i < end; i++) {
    int64_t row = i * k->logits.stride[0];
    int32_t target = ((const int32_t *)call->in[RFI_HEAD_TARGETS].data)[k->t + i];
    bool valid = rfi_ce_valid(target, call->attr[0].i, V);
    if (cap > 0) rfi_ce_softcap((float *)k->logits.data + row, V, cap);
    double lse = rfi_ce_lse(&k->logits, row, V);
    nll[k->t + i] = valid ? lse - rfi_read1(&k->logits, row + target) : 0;
    if (!backward) continue;
    if (per_row) scale = dloss[k->t + i];
    rfi_ce_backward(&k->logits, row, &k->dlogits, i * k->dlogits.stride[0], V, valid, target, lse, scale, cap);
  }
}

static rfr_status run(const rfi_call *c) {
  const rfi_head h = rfi_head_make(c, 1);
  if ((c->out[1].data || c->out[2].data) && !rfi_head_dloss(c)->data)
    return rfi_fail(RFI_E_INTERNAL, "a fused head: gradients need the cotangent of the loss");
  if (h.T == 0 && c->out[2].data && !rfi_head_acc(c)->data)
    memset(c->out[2].data, 0, (size_t)(h.V * h.C) * sizeof(float));
  char *logits = (char *)c->workspace + h.nll, *scratch = logits + h.logits;
  for (int64_t t = 0; t < h.T; t += h.chunk) {
    rfi_head_gemm gemms[RFI_HEAD_GEMMS];
    int kind = rfi_head_kind(&h, t);
    rfi_head_gemms(c, &h, t, logits, gemms);
    RFI_TRY(run_gemm(c, &gemms[RFI_HEAD_LOGITS], kind, RFI_HEAD_LOGITS, scratch));
    chunk k = {*c, t, gemms[RFI_HEAD_LOGITS].out[0], gemms[RFI_HEAD_DX].in[0]};
    rfi_parallel(&k.call, rfi_head_rows(&h, t), 8 * h.V, rows);
    for (int i = RFI_HEAD_DX; i < RFI_HEAD_GEMMS; i++) RFI_TRY(run_gemm(c, &gemms[i], kind, i, scratch));
  }
  const double *nll = c->workspace;
  const bool per_row = rfi_head_is_per_row(c);
  float *loss = c->out[0].data;
  double sum = 0;
  for (int64_t t = 0; loss && t < h.T; t++) {
    if (per_row) loss[t] = (float)nll[t];
    else sum += nll[t];
  }
  if (loss && !per_row) *loss = (float)(sum * *(const float *)c->in[RFI_HEAD_INV_VALID].data);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(linear_cross_entropy) = {run, workspace};
const rfi_kernel RFI_CPU(linear_token_loss) = {run, workspace};
