/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of a text's next rows to its cached keys, on a GPU: row t of q is at the position that the cursor gives it
 * and attends to the keys up to its own, within the window.
 *
 *   o = sum p v / sum p,  p = e^(s - max s),  s = scale q k, capped if the call has a cap
 *
 * A block computes one row of one head. Its warps take the keys in turn, KEYS at a time, with D spread over the lanes;
 * their maxima and sums are combined in the order of the warps, so the result for a text is bitwise reproducible. The
 * grid depends on shapes only; the cursor decides how many keys a block reads. Rows past the cursor's count give 0. All
 * arithmetic is f32.
 */
#include "backend/cuda/kernels.cuh"
#include "ops/attention/attention_limits.h"
#include "ops/decode/cursor.h"
#include "ops/decode/sequences.h"
#include "ops/op_index.h"

enum { WARPS = 8, THREADS = 32 * WARPS, KEYS = 4, MOST_D = RFI_ATTENTION_MOST_D, PER_LANE = MOST_D / 32 };

template <typename T> struct operand { /* (rows, heads, D) */
  const T *data;
  int64_t row, head, col;
};

template <typename T> struct problem {
  operand<T> q, k, v;
  T *o; /* dense */
  int64_t rows, H, capacity, window;
  int group, D; /* heads of q per head of k */
  float scale, cap;
  rfr_arg cursor;
};

template <typename T>
static __device__ __forceinline__ void load_row(const operand<T> &x, int64_t row, int64_t head, int D, float *to) {
  const T *from = x.data + row * x.row + head * x.head;
#pragma unroll
  for (int c = 0; c < PER_LANE; c++) {
    const int d = (int)(threadIdx.x & 31) + 32 * c;
    to[c] = d < D ? rfi_widen(from[d * x.col]) : 0.0f;
  }
}

template <typename T> static __global__ void __launch_bounds__(THREADS) attend(const __grid_constant__ problem<T> p) {
  __shared__ float tops[WARPS], sums[WARPS], parts[WARPS][MOST_D];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t t = blockIdx.x, h = blockIdx.y, g = h / p.group;
  const rfi_take take = rfi_take_next(&p.cursor, p.rows, p.capacity);
  const int64_t position = take.first + t, end = t < take.count ? position + 1 : 0;
  const int64_t first = p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
  float q[PER_LANE], acc[PER_LANE] = {}, top = -INFINITY, sum = 0;
  load_row(p.q, t, h, p.D, q);
  for (int64_t s = first + warp * KEYS; s < end; s += WARPS * KEYS) {
    float score[KEYS], next = top;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      float k[PER_LANE];
      load_row(p.k, s + i < end ? s + i : s, g, p.D, k);
      score[i] = 0;
#pragma unroll
      for (int c = 0; c < PER_LANE; c++) score[i] = fmaf(q[c], k[c], score[i]);
    }
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      score[i] = p.scale * rfi_warp_sum(score[i]);
      if (p.cap > 0) score[i] = p.cap * tanhf(score[i] / p.cap);
      if (s + i >= end) score[i] = -INFINITY;
      next = fmaxf(next, score[i]);
    }
    const float shrink = top == -INFINITY ? 0.0f : expf(top - next);
    top = next;
    sum *= shrink;
#pragma unroll
    for (int c = 0; c < PER_LANE; c++) acc[c] *= shrink;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      if (s + i >= end) continue;
      const float weight = score[i] == -INFINITY ? 0.0f : expf(score[i] - top);
      float v[PER_LANE];
      load_row(p.v, s + i, g, p.D, v);
      sum += weight;
#pragma unroll
      for (int c = 0; c < PER_LANE; c++) acc[c] = fmaf(weight, v[c], acc[c]);
    }
  }
  if (lane == 0) tops[warp] = top, sums[warp] = sum;
#pragma unroll
  for (int c = 0; c < PER_LANE; c++) parts[warp][lane + 32 * c] = acc[c];
  __syncthreads();
  float most = -INFINITY, total = 0;
  for (int w = 0; w < WARPS; w++) most = fmaxf(most, tops[w]);
  for (int d = threadIdx.x; d < p.D; d += THREADS) {
    float y = 0;
    total = 0;
    for (int w = 0; w < WARPS; w++) {
      /* either the warp had no key, or a score was NaN: then there is no maximum, but the sum is NaN */
      if (sums[w] == 0) continue;
      const float share = expf(tops[w] - most);
      total = fmaf(sums[w], share, total);
      y = fmaf(parts[w][d], share, y);
    }
    p.o[(t * p.H + h) * p.D + d] = rfi_narrow<T>(total == 0 ? 0.0f : y / total);
  }
}

template <typename T> static operand<T> operand_of(const rfr_arg *x) {
  return operand<T>{(const T *)x->data, x->stride[0], x->stride[1], x->stride[2]};
}

template <typename T> static void launch(const rfr_call *call) {
  const rfr_arg *q = &call->in[0], *k = &call->in[1];
  problem<T> p = {};
  p.q = operand_of<T>(q);
  p.k = operand_of<T>(k);
  p.v = operand_of<T>(&call->in[2]);
  p.o = (T *)call->out[0].data;
  p.rows = q->type.shape[0];
  p.H = q->type.shape[1];
  p.D = (int)q->type.shape[2];
  p.capacity = k->type.shape[0];
  p.group = (int)(p.H / k->type.shape[1]);
  p.scale = (float)call->attr[0].f;
  p.window = call->attr[2].i;
  p.cap = (float)call->attr[3].f;
  p.cursor = call->in[3];
  attend<T><<<dim3((unsigned)p.rows, (unsigned)p.H), THREADS, 0, rfi_stream(call)>>>(p);
}

static rfr_status run(const rfr_call *call) {
  const rfr_arg *o = &call->out[0];
  if (rfi_elements(o) == 0 || !o->data) return RFR_OK;
  rfi_text_call of;
  for (int64_t b = 0; b < rfi_texts(&call->in[3].type); b++) {
    const rfr_call one = rfi_call_of_text(call, &rfi_split_attention_cached, b, &of);
    RFI_WITH_FLOAT(o->type.dtype, T, launch<T>(&one));
  }
  return rfi_cuda_launched("attention_cached");
}

static int takes(const rfr_call *call) {
  const rfr_type *q = &call->in[0].type;
  for (int i = 0; i < 3; i++)
    if (call->in[i].type.dtype != call->out[0].type.dtype || q->dtype == RFR_F64) return 0;
  return q->shape[2] <= MOST_D && q->shape[1] <= RFI_ATTENTION_MOST_HEADS && q->shape[0] <= INT32_MAX;
}

static bool lacks(const rfr_call *call, char *text, size_t size) {
  return rfi_attention_lacks(&call->in[RFI_IN_attention_cached_q].type, text, size);
}

extern "C" const rfi_cuda_kernel RFI_CUDA(attention_cached) = {run, NULL, takes, NULL, NULL, lacks};
