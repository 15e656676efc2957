/* SPDX-License-Identifier: Apache-2.0
 *
 * The LM head and its loss on a GPU: per chunk the GEMMs of head.h and the rows of ce_rows.cu, as in
 * linear_cross_entropy_cpu.c.
 */
#include "ops/loss/ce_cuda.h"
#include "ops/loss/head.h"

static const rfi_head_library *library_of(const rfr_call *c, int kind, int gemm) {
  return (const rfi_head_library *)c->library + kind * RFI_HEAD_GEMMS + gemm;
}

static size_t workspace(const rfr_call *c) {
  const rfi_head h = rfi_head_make(c, RFI_HEAD_ALIGNED);
  size_t most = 0;
  for (int i = 0; i < RFI_HEAD_CHUNKS * RFI_HEAD_GEMMS; i++)
    if (library_of(c, 0, i)->workspace > most) most = library_of(c, 0, i)->workspace;
  return h.nll + h.logits + h.w + most;
}

static rfr_status run_gemm(const rfr_call *c, rfi_head_gemm *p, int kind, int gemm, void *scratch) {
  const rfi_head_library *library = library_of(c, kind, gemm);
  if (!p->wanted) return RFR_OK;
  p->call.workspace = scratch;
  p->call.stream = c->stream;
  p->call.library = library->handle;
  return library->run ? library->run(&p->call) : RFI_CUDA(matmul).run(&p->call);
}

static rfr_status run_chunk(const rfr_call *c, const rfi_head *h, int64_t t, char *logits, double *nll) {
  rfi_head_gemm gemms[RFI_HEAD_GEMMS];
  const int kind = rfi_head_kind(h, t);
  char *scratch = logits + h->logits + h->w;
  rfi_head_gemms(c, h, t, logits, gemms);
  const rfi_arg *dlogits = &gemms[RFI_HEAD_DX].in[0];
  const int backward = c->out[1].data || c->out[2].data, per_row = rfi_head_is_per_row(c);
  const float *dloss = rfi_head_dloss(c)->data;
  float *loss = c->out[0].data;
  const rfi_ce_rows rows = {.info = library_of(c, 0, 0)->device,
                            .rows = rfi_head_rows(h, t),
                            .V = h->V,
                            .logits = logits,
                            .logits_type = (rfr_dtype)c->attr[3].i,
                            .logits_ld = h->ld,
                            .cap = (float)c->attr[2].f,
                            .targets = (const int32_t *)c->in[RFI_HEAD_TARGETS].data + t,
                            .ignore = c->attr[0].i,
                            .inv_valid = per_row ? NULL : c->in[RFI_HEAD_INV_VALID].data,
                            .dloss = backward ? dloss + (per_row ? t : 0) : NULL,
                            .per_row = per_row,
                            .dlogits = backward ? dlogits->data : NULL,
                            .dlogits_type = dlogits->type.dtype,
                            .dlogits_ld = dlogits->stride[0],
                            .nll = per_row ? NULL : nll + t,
                            .loss = per_row && loss ? loss + t : NULL};
  rfr_status s = run_gemm(c, &gemms[RFI_HEAD_LOGITS], kind, RFI_HEAD_LOGITS, scratch);
  if (s == RFR_OK) s = rfi_ce_rows_cuda(&rows, c->stream);
  if (s == RFR_OK && backward) s = rfi_ce_tails_cuda(&rows, h->ld, c->stream);
  for (int i = RFI_HEAD_DX; s == RFR_OK && i < RFI_HEAD_GEMMS; i++) s = run_gemm(c, &gemms[i], kind, i, scratch);
  return s;
}

/* Pads w: with a vocabulary that is not a multiple of a few elements, the GEMMs would be several times slower. */
static rfr_status copy_w(const rfr_call *c, const rfi_head *h, char *to) {
  const size_t bytes = (size_t)(h->V * h->C) * (c->in[RFI_HEAD_W].type.dtype == RFR_F32 ? 4 : 2);
  cudaStream_t stream = (cudaStream_t)c->stream;
  cudaError_t e = cudaMemcpyAsync(to, c->in[RFI_HEAD_W].data, bytes, cudaMemcpyDeviceToDevice, stream);
  if (e == cudaSuccess) e = cudaMemsetAsync(to + bytes, 0, h->w - bytes, stream);
  return rfi_cuda_check(e, "copying the weights of the head");
}

static rfr_status run(const rfr_call *c) {
  const rfi_head h = rfi_head_make(c, RFI_HEAD_ALIGNED);
  double *nll = c->workspace;
  char *logits = (char *)c->workspace + h.nll;
  rfr_status s = RFR_OK;
  if (h.T == 0 && c->out[2].data && !rfi_head_acc(c)->data)
    s = rfi_cuda_check(cudaMemsetAsync(c->out[2].data, 0, (size_t)(h.V * h.C) * sizeof(float), (cudaStream_t)c->stream),
                       "clearing a gradient");
  if (s == RFR_OK && h.w) s = copy_w(c, &h, logits + h.logits);
  for (int64_t t = 0; s == RFR_OK && t < h.T; t += h.chunk) s = run_chunk(c, &h, t, logits, nll);
  if (s == RFR_OK && c->out[0].data && !rfi_head_is_per_row(c))
    s = rfi_ce_loss_cuda(nll, h.T, c->in[RFI_HEAD_INV_VALID].data, c->out[0].data, c->stream);
  return s;
}

const rfi_cuda_kernel RFI_CUDA(linear_cross_entropy) = {run, workspace};
const rfi_cuda_kernel RFI_CUDA(linear_token_loss) = {run, workspace};
