/* SPDX-License-Identifier: Apache-2.0
 *
 * token_count, softmax cross-entropy and the loss of each row on a GPU; ce_rows.cu computes the rows. The rows'
 * losses are in the workspace, and one block adds them in f64, in a fixed order.
 */
#include "backend/cuda/kernels.cuh"
#include "ops/loss/ce_cuda.h"

/* ---- token_count ---- */

enum { MOST = 256, THREADS = 1024 };

typedef struct target_list {
  const int32_t *targets[MOST];
  int64_t n[MOST];
  int lists;
} target_list;

/* so_far: the sum over the previous launches. */
static __global__ void __launch_bounds__(THREADS)
    token_count(const __grid_constant__ target_list all, int32_t ignore, bool first, bool last, int64_t *so_far,
                float *inv_valid, float *count) {
  __shared__ unsigned long long sum;
  long long mine = 0;
  if (threadIdx.x == 0) sum = first ? 0 : (unsigned long long)*so_far;
  __syncthreads();
  for (int i = 0; i < all.lists; i++)
#pragma unroll 16 /* several loads in flight, because there is only one block */
    for (int64_t k = threadIdx.x; k < all.n[i]; k += THREADS) {
      const int32_t target = all.targets[i][k];
      mine += target != ignore && target >= 0;
    }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) mine += __shfl_down_sync(0xffffffffu, mine, half);
  if (threadIdx.x % 32 == 0) atomicAdd(&sum, (unsigned long long)mine); /* integers, so the order does not matter */
  __syncthreads();
  if (threadIdx.x > 0) return;
  *so_far = (int64_t)sum;
  if (last && inv_valid) *inv_valid = sum ? (float)(1.0 / (double)sum) : 0.0f;
  if (last && count) *count = (float)sum;
}

static size_t count_workspace(const rfr_call *c) {
  (void)c;
  return sizeof(int64_t);
}

static rfr_status count_run(const rfr_call *c) {
  int i = 0;
  do {
    const bool first = i == 0;
    target_list all;
    for (all.lists = 0; i < c->n_in && all.lists < MOST; i++, all.lists++) {
      all.targets[all.lists] = (const int32_t *)c->in[i].data;
      all.n[all.lists] = rfi_elements(&c->in[i]);
    }
    token_count<<<1, THREADS, 0, rfi_stream(c)>>>(all, (int32_t)c->attr[0].i, first, i == c->n_in,
                                                  (int64_t *)c->workspace, (float *)c->out[0].data,
                                                  (float *)c->out[1].data);
  } while (i < c->n_in);
  return rfi_cuda_launched("token_count");
}

/* ---- cross_entropy ---- */

static rfi_ce_rows rows_of(const rfr_call *c, const rfr_arg *logits, const rfr_arg *targets) {
  rfi_ce_rows r = {};
  r.rows = logits->type.shape[0];
  r.V = logits->type.shape[1];
  r.logits = logits->data;
  r.logits_type = logits->type.dtype;
  r.logits_ld = logits->stride[0];
  r.targets = (const int32_t *)targets->data;
  r.ignore = c->attr[0].i;
  return r;
}

static size_t forward_workspace(const rfr_call *c) { return (size_t)c->in[0].type.shape[0] * sizeof(double); }

static rfr_status forward_run(const rfr_call *c) {
  rfi_ce_rows r = rows_of(c, &c->in[0], &c->in[1]);
  const float *inv_valid = (const float *)c->in[2].data;
  r.inv_valid = inv_valid;
  r.lse = (float *)c->out[1].data;
  r.nll = (double *)c->workspace;
  const rfr_status s = rfi_ce_rows_cuda(&r, c->stream);
  if (s != RFR_OK || !c->out[0].data) return s;
  return rfi_ce_loss_cuda(r.nll, r.rows, inv_valid, (float *)c->out[0].data, c->stream);
}

static rfr_status token_loss_run(const rfr_call *c) {
  rfi_ce_rows r = rows_of(c, &c->in[0], &c->in[1]);
  r.loss = (float *)c->out[0].data;
  r.lse = (float *)c->out[1].data;
  return rfi_ce_rows_cuda(&r, c->stream);
}

/* Of cross_entropy, and without inv_valid of token_loss. */
static rfr_status backward_run(const rfr_call *c) {
  rfi_ce_rows r = rows_of(c, &c->in[1], &c->in[2]);
  if (!c->out[0].data) return RFR_OK;
  r.dloss = (const float *)c->in[0].data;
  r.per_row = c->n_in == 4;
  r.lse = (float *)c->in[3].data;
  r.inv_valid = r.per_row ? NULL : (const float *)c->in[4].data;
  r.dlogits = c->out[0].data;
  r.dlogits_type = c->out[0].type.dtype;
  r.dlogits_ld = r.V;
  return rfi_ce_dlogits_cuda(&r, c->stream);
}

extern "C" const rfi_cuda_kernel RFI_CUDA(token_count) = {count_run, count_workspace};
extern "C" const rfi_cuda_kernel RFI_CUDA(cross_entropy) = {forward_run, forward_workspace};
extern "C" const rfi_cuda_kernel RFI_CUDA(cross_entropy_bwd) = {backward_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(token_loss) = {token_loss_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(token_loss_bwd) = {backward_run, NULL};
