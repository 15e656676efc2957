/* SPDX-License-Identifier: Apache-2.0
 *
 * lora_matmul on a GPU: on sm_90 the kernel of grouped GEMMs, whose reduction continues over u and b, else two GEMMs.
 * The choice depends on types, shapes and addresses only.
 */
#include "ops/grouped/grouped_cuda.h"
#include "ops/matmul/lora_cuda.h"

static rfi_grouped grouped_of(const rfr_call *c) {
  const rfr_arg *x = &c->in[0], *w = &c->in[1], *u = &c->in[2], *b = &c->in[3], *y = &c->out[0];
  const rfr_arg *bias = c->n_in > 4 && c->in[4].data ? &c->in[4] : NULL;
  rfi_grouped g = {.kind = c->attr[0].i ? RFI_GROUPED_LORA_TN : RFI_GROUPED_LORA_NN, .groups = 1, .more = 1};
  g.rows = x->type.shape[0], g.N = w->type.shape[0], g.K = w->type.shape[1];
  g.a = x->data, g.b = w->data, g.y = y->data, g.taken = c->workspace;
  g.a_row = x->stride[0], g.b_row = w->stride[0], g.b_group = g.b_row * g.N;
  g.a2 = u->data, g.b2 = b->data, g.a2_row = u->stride[0], g.b2_row = b->stride[0], g.R = u->type.shape[1];
  g.a_dtype = x->type.dtype, g.b_dtype = w->type.dtype, g.y_dtype = y->type.dtype;
  if (bias) g.bias = bias->data, g.bias_dtype = bias->type.dtype;
  g.accumulate = c->n_in > 5 && c->in[5].data;
  return g;
}

static int takes(const rfr_call *c) {
  const rfi_cuda_info *info = rfi_cuda_info_of(c);
  const rfi_grouped g = grouped_of(c);
  if (info->major != 9 || info->portable) return 0;
  if (c->in[2].type.dtype != g.a_dtype || c->in[3].type.dtype != g.a_dtype) return 0;
  return rfi_grouped_sm90_lacks(&g) == NULL;
}

static rfr_status run(const rfr_call *c) {
  const rfi_grouped g = grouped_of(c);
  return rfi_grouped_sm90(&g, rfi_cuda_info_of(c)->sms, (cudaStream_t)c->stream);
}

rfr_status rfi_lora_run_gemms(const rfr_call *c) {
  const rfi_head_library *chosen = c->library;
  rfi_head_gemm gemms[2];
  rfr_status s = RFR_OK;
  rfi_lora_gemms(c, gemms);
  for (int i = 0; i < 2 && s == RFR_OK; i++) {
    rfr_call *call = &gemms[i].call;
    call->stream = c->stream;
    call->workspace = c->workspace;
    call->library = chosen[i].run ? chosen[i].handle : (void *)(uintptr_t)chosen[i].device;
    s = chosen[i].run ? chosen[i].run(call) : RFI_CUDA(matmul).run(call);
  }
  return s;
}

static size_t workspace(const rfr_call *c) {
  (void)c;
  return RFI_GROUPED_TAKEN;
}

static const char *needs(const rfr_call *c) {
  (void)c;
  return "sm90";
}

const rfi_cuda_kernel RFI_CUDA(lora_matmul) = {run, workspace, takes, NULL, needs};
