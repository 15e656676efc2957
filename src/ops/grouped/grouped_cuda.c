/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped GEMMs on a GPU: tensor cores for the calls that they support, f32 arithmetic for the rest, where SwiGLU is a
 * separate kernel. The choice depends on types, shapes and addresses only.
 */
#include "ops/grouped/grouped_cuda.h"

#include <stdio.h>

#include "ops/grouped/grouped.h"
#include "ops/grouped/pair.h"
#include "ops/op_index.h"

static int has_sm90(const rfr_call *call) {
  const rfi_cuda_info *info = rfi_cuda_info_of(call);
  return info->major == 9 && !info->portable;
}

static rfr_status launch(const rfr_call *call, const rfi_grouped *g) {
  const rfi_cuda_info *info = rfi_cuda_info_of(call);
  cudaStream_t stream = (cudaStream_t)call->stream;
  if (has_sm90(call) && !rfi_grouped_sm90_lacks(g)) return rfi_grouped_sm90(g, info->sms, stream);
  return rfi_grouped_any(g, info->sms, stream);
}

enum { SEPARATE = RFI_IN_grouped_matmul_ws };

/* Separate weights must have equal types and row strides. */
static int takes_matmul(const rfr_call *call) {
  for (int i = SEPARATE + 1; i < call->n_in; i++)
    if (call->in[i].stride[0] != call->in[SEPARATE].stride[0] ||
        call->in[i].type.dtype != call->in[SEPARATE].type.dtype)
      return 0;
  return 1;
}

static rfi_grouped matmul_of(const rfr_call *call) {
  const bool packed = call->n_in <= SEPARATE;
  const rfr_arg *x = &call->in[0], *w = &call->in[packed ? 1 : SEPARATE], *y = &call->out[0];
  const rfr_arg *bias = call->n_in > 3 && call->in[3].data ? &call->in[3] : NULL;
  const rfr_arg *scale = call->n_in > 4 && call->in[4].data ? &call->in[4] : NULL;
  const int last = w->type.rank - 1;
  rfi_grouped g = {.kind = call->attr[0].i ? RFI_GROUPED_TN : RFI_GROUPED_NN};
  g.groups = packed ? w->type.shape[0] : call->n_in - SEPARATE;
  g.rows = x->type.shape[0], g.N = w->type.shape[last - 1], g.K = w->type.shape[last];
  g.offsets = call->in[2].data, g.a = x->data, g.y = y->data, g.taken = call->workspace;
  g.a_row = x->stride[0], g.b_row = w->stride[last - 1];
  if (packed) g.b = w->data, g.b_group = w->stride[0];
  else g.ws = &call->in[SEPARATE];
  g.a_dtype = x->type.dtype, g.b_dtype = w->type.dtype, g.y_dtype = y->type.dtype;
  if (bias) g.bias = bias->data, g.bias_dtype = bias->type.dtype, g.bias_group = bias->stride[0];
  if (scale) g.scale = scale->data, g.scale_dtype = scale->type.dtype;
  return g;
}

static rfi_grouped wgrad_of(const rfr_call *call) {
  const rfr_arg *dy = &call->in[0], *x = &call->in[1], *dw = &call->out[0];
  rfi_grouped g = {.kind = RFI_GROUPED_NT};
  g.groups = dw->type.shape[0], g.rows = x->type.shape[0], g.N = dw->type.shape[1], g.K = dw->type.shape[2];
  g.offsets = call->in[2].data, g.a = dy->data, g.b = x->data, g.y = dw->data;
  g.a_row = dy->stride[0], g.b_row = x->stride[0];
  g.a_dtype = dy->type.dtype, g.b_dtype = x->type.dtype, g.y_dtype = dw->type.dtype;
  g.accumulate = call->n_in > 3 && call->in[3].data;
  g.of = call->attr[1].i;
  g.taken = call->workspace;
  return g;
}

/* The GEMM followed by SwiGLU; only the GEMM if h is unused. */
static rfi_grouped swiglu_of(const rfr_call *call, rfi_pair *p) {
  rfi_pair_of(call, p);
  rfi_grouped g = matmul_of(&p->gemm);
  if (!p->act.out->data) return g;
  g.kind = RFI_GROUPED_SWIGLU, g.y = call->out[0].data, g.act = call->out[1].data, g.taken = call->workspace;
  g.weight = call->in[3].data, g.weight_dtype = call->in[3].type.dtype;
  return g;
}
static const char *swiglu_lacks(const rfr_call *call) {
  rfi_pair p;
  const rfi_grouped g = swiglu_of(call, &p);
  return call->attr[0].i ? rfi_grouped_sm90_lacks(&g) : "gate and up are columns of w";
}
static rfr_status run_swiglu(const rfr_call *call) {
  rfi_pair p;
  const rfi_grouped g = swiglu_of(call, &p), gemm = matmul_of(&p.gemm);
  if (has_sm90(call) && !swiglu_lacks(call)) return launch(call, &g);
  const rfr_status s = launch(&p.gemm, &gemm);
  return s == RFR_OK && p.act.out->data ? RFI_CUDA(swiglu_weighted).run(&p.act) : s;
}

static rfr_status run_matmul(const rfr_call *call) {
  const rfi_grouped g = matmul_of(call);
  return launch(call, &g);
}
static rfr_status run_wgrad(const rfr_call *call) {
  const rfi_grouped g = wgrad_of(call);
  return launch(call, &g);
}

static const char *matmul_lacks(const rfr_call *call) {
  const rfi_grouped g = matmul_of(call);
  return rfi_grouped_sm90_lacks(&g);
}
static const char *wgrad_lacks(const rfr_call *call) {
  const rfi_grouped g = wgrad_of(call);
  return rfi_grouped_sm90_lacks(&g);
}

/* Writes why the fastest kernel does not support a call. */
static bool append_reason(const rfr_call *call, const char *lacks, char *text, size_t size) {
  if (!has_sm90(call) || !lacks) return false;
  snprintf(text, size, "%s", lacks);
  return true;
}
static bool append_matmul_reason(const rfr_call *c, char *text, size_t size) {
  return append_reason(c, matmul_lacks(c), text, size);
}
static bool append_wgrad_reason(const rfr_call *c, char *text, size_t size) {
  return append_reason(c, wgrad_lacks(c), text, size);
}
static bool append_swiglu_reason(const rfr_call *c, char *text, size_t size) {
  return append_reason(c, swiglu_lacks(c), text, size);
}

static const char *name_of(const rfr_call *call, const char *lacks) {
  return has_sm90(call) && !lacks ? "sm90" : "sm80";
}
static const char *matmul_needs(const rfr_call *call) { return name_of(call, matmul_lacks(call)); }
static const char *wgrad_needs(const rfr_call *call) { return name_of(call, wgrad_lacks(call)); }
static const char *swiglu_needs(const rfr_call *call) { return name_of(call, swiglu_lacks(call)); }

static size_t workspace(const rfr_call *call) {
  (void)call;
  return RFI_GROUPED_TAKEN;
}

/* Counts the GEMM's result even if it is not a result of the op. */
static size_t swiglu_workspace(const rfr_call *call) {
  rfi_pair p;
  rfi_pair_of(call, &p);
  return RFI_GROUPED_TAKEN + (has_sm90(call) && !swiglu_lacks(call) ? 0 : p.scratch);
}

const rfi_cuda_kernel RFI_CUDA(grouped_swiglu) = {run_swiglu, swiglu_workspace, NULL,
                                                  NULL,       swiglu_needs,     append_swiglu_reason};
const rfi_cuda_kernel RFI_CUDA(grouped_matmul) = {run_matmul, workspace,    takes_matmul,
                                                  NULL,       matmul_needs, append_matmul_reason};
const rfi_cuda_kernel RFI_CUDA(grouped_wgrad) = {run_wgrad, workspace, NULL, NULL, wgrad_needs, append_wgrad_reason};
