/* SPDX-License-Identifier: Apache-2.0
 *
 * The aux losses of routing and their gradient on a GPU.
 *
 *   loss = balance E / N^2 sum over e of n_e P_e + z / N sum over t of lse_t^2
 *
 * Valid tokens and how often each expert was chosen are counted first, as integers. The sum over experts of n_e P_e
 * then becomes a sum over tokens of n . p_t: one warp per token, added in f64, without a sum over tokens for each
 * expert. Blocks' sums are added in order.
 */
#include "ops/elementwise/map.cuh"
#include "ops/moe/route_rows.cuh"

enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES, MOST_PARTS = 1024, MOST_SHARED = 8192 };
enum { SIGMOID, BALANCE, Z, IGNORE };

typedef unsigned long long counter;

struct loss_args {
  const void *logits;
  const int32_t *index, *targets;
  counter *chosen; /* per expert, then the number of valid tokens */
  double *part;    /* per block: n . p, lse^2 */
  int64_t tokens;
  int experts, k, parts;
  bool sigmoid;
  int64_t ignore;
  double balance, z;
  const float *dloss;
  void *to;
};

/* ---- counts ---- */

/* Integer counts, so the order does not matter. With few experts, a block first counts in shared memory. */
static __global__ void __launch_bounds__(THREADS) count_chosen(const __grid_constant__ loss_args a, bool shared) {
  extern __shared__ unsigned own[];
  const int64_t slots = a.tokens * a.k, step = (int64_t)gridDim.x * THREADS;
  unsigned valid = 0;
  for (int e = threadIdx.x; shared && e < a.experts; e += THREADS) own[e] = 0;
  __syncthreads();
  for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < a.tokens; t += step)
    valid += a.targets[t] != a.ignore;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < slots; i += step) {
    const int e = a.index[i];
    if (e < 0 || e >= a.experts || a.targets[i / a.k] == a.ignore) continue;
    if (shared) atomicAdd(&own[e], 1u);
    else atomicAdd(&a.chosen[e], (counter)1);
  }
  valid = __reduce_add_sync(0xffffffffu, valid);
  if (threadIdx.x % LANES == 0 && valid) atomicAdd(&a.chosen[a.experts], (counter)valid);
  __syncthreads();
  for (int e = threadIdx.x; shared && e < a.experts; e += THREADS)
    if (own[e]) atomicAdd(&a.chosen[e], (counter)own[e]);
}

static rfr_status enqueue_counts(const rfr_call *c, const loss_args &a, const char *name) {
  const bool shared = a.experts <= MOST_SHARED;
  const int64_t blocks = rfi_blocks(a.tokens * a.k, THREADS * 4), most = 264;
  const unsigned grid = (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
  const rfr_status s =
      rfi_cuda_check(cudaMemsetAsync(a.chosen, 0, ((size_t)a.experts + 1) * sizeof(counter), rfi_stream(c)), name);
  if (s != RFR_OK) return s;
  count_chosen<<<grid, THREADS, shared ? (size_t)a.experts * 4 : 0, rfi_stream(c)>>>(a, shared);
  return RFR_OK;
}

/* ---- a token's probabilities ---- */

/* Called by the full warp. */
template <typename X> struct token {
  rfi_route<X> all;
  float lse, over; /* over: the divisor of the probabilities */
  bool sigmoid;

  __device__ __forceinline__ token(const loss_args &a, int64_t t)
      : all((const X *)a.logits + t * a.experts, a.experts, RFR_MOE_SOFTMAX), sigmoid(a.sigmoid) {
    all.softmax();
    lse = all.max + logf(all.sum);
    over = all.sum;
    if (!sigmoid) return;
    float sum = 0;
    for (int e = threadIdx.x % LANES; e < a.experts; e += LANES) sum += rfi_route_sigmoid(all.logit(e));
    over = RFI_ROUTE_TINY + rfi_warp_sum(sum);
  }
  __device__ __forceinline__ float p(float logit) const {
    return (sigmoid ? rfi_route_sigmoid(logit) : expf(logit - all.max)) / over;
  }
};

static __device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
template <typename X> static __device__ __forceinline__ double times_chosen(const loss_args &a, const token<X> &x) {
  double sum = 0;
  for (int e = threadIdx.x % LANES; e < a.experts; e += LANES) sum += (double)a.chosen[e] * x.p(x.all.logit(e));
  return warp_sum(sum);
}

/* ---- moe_loss ---- */

template <typename X> static __global__ void __launch_bounds__(THREADS) add_parts(const __grid_constant__ loss_args a) {
  __shared__ double sums[WARPS][2];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  double balance = 0, z = 0;
  for (int64_t t = (int64_t)blockIdx.x * WARPS + warp; t < a.tokens; t += (int64_t)gridDim.x * WARPS) {
    if (a.targets[t] == a.ignore) continue;
    const token<X> x(a, t);
    balance += times_chosen(a, x);
    z += (double)x.lse * x.lse;
  }
  if (lane == 0) sums[warp][0] = balance, sums[warp][1] = z;
  __syncthreads();
  if (threadIdx.x >= 2) return;
  double sum = 0;
  for (int w = 0; w < WARPS; w++) sum += sums[w][threadIdx.x];
  a.part[blockIdx.x * 2 + threadIdx.x] = sum;
}

static __global__ void __launch_bounds__(LANES) end_loss(const __grid_constant__ loss_args a) {
  const double valid = (double)a.chosen[a.experts];
  double balance = 0, z = 0;
  for (int p = threadIdx.x; p < a.parts; p += LANES) {
    balance += a.part[p * 2];
    z += a.part[p * 2 + 1];
  }
  balance = warp_sum(balance);
  z = warp_sum(z);
  const double loss = a.balance * (double)a.experts / (valid * valid) * balance + a.z * z / valid;
  if (threadIdx.x == 0) *(float *)a.to = valid > 0 ? (float)loss : 0.0f;
}

/* ---- moe_loss_bwd ---- */

template <typename X> static __global__ void __launch_bounds__(THREADS) loss_bwd(const __grid_constant__ loss_args a) {
  const int lane = threadIdx.x % LANES;
  const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
  if (t >= a.tokens) return;
  X *to = (X *)a.to + t * a.experts;
  if (a.targets[t] == a.ignore) {
    for (int e = lane; e < a.experts; e += LANES) to[e] = rfi_narrow<X>(0.0f);
    return;
  }
  const double valid = (double)a.chosen[a.experts], dloss = *a.dloss;
  const float by = (float)(dloss * a.balance * (double)a.experts / (valid * valid));
  const float z_by = (float)(dloss * 2 * a.z / valid);
  const token<X> x(a, t);
  const float dot = (float)times_chosen(a, x);
  for (int e = lane; e < a.experts; e += LANES) {
    const float logit = x.all.logit(e), p = x.p(logit), n = (float)a.chosen[e];
    float d;
    if (!x.sigmoid) {
      d = p * (by * (n - dot) + z_by * x.lse);
    } else {
      const float s = rfi_route_sigmoid(logit);
      d = by * (n - dot) / x.over * s * (1 - s);
      if (z_by != 0) d += z_by * x.lse * expf(logit - x.lse);
    }
    to[e] = rfi_narrow<X>(d);
  }
}

/* ---- launches ---- */

static loss_args args_of(const rfr_call *c, int first) {
  const rfr_arg *logits = &c->in[first];
  loss_args a;
  a.logits = logits->data;
  a.index = (const int32_t *)c->in[first + 1].data;
  a.targets = (const int32_t *)c->in[first + 2].data;
  a.tokens = logits->type.shape[0];
  a.experts = (int)logits->type.shape[1];
  a.k = (int)c->in[first + 1].type.shape[1];
  const int64_t parts = rfi_blocks(a.tokens, WARPS);
  a.parts = (int)(parts < MOST_PARTS ? parts : MOST_PARTS);
  a.sigmoid = c->attr[SIGMOID].i != 0;
  a.ignore = c->attr[IGNORE].i;
  a.balance = c->attr[BALANCE].f, a.z = c->attr[Z].f;
  a.part = (double *)c->workspace;
  a.chosen = (counter *)(a.part + 2 * a.parts);
  a.dloss = first ? (const float *)c->in[0].data : NULL;
  a.to = c->out[0].data;
  return a;
}
static size_t workspace_of(const rfr_call *c, int first) {
  const loss_args a = args_of(c, first);
  return (size_t)a.parts * 2 * sizeof(double) + ((size_t)a.experts + 1) * sizeof(counter);
}
static size_t loss_workspace(const rfr_call *c) { return workspace_of(c, 0); }
static size_t loss_bwd_workspace(const rfr_call *c) { return workspace_of(c, 1); }

static rfr_status run_loss(const rfr_call *c) {
  const loss_args a = args_of(c, 0);
  const rfr_status s = enqueue_counts(c, a, "moe_loss");
  if (s != RFR_OK) return s;
  if (a.parts)
    RFI_WITH_FLOAT(c->in[0].type.dtype, X, add_parts<X><<<(unsigned)a.parts, THREADS, 0, rfi_stream(c)>>>(a));
  end_loss<<<1, LANES, 0, rfi_stream(c)>>>(a);
  return rfi_cuda_launched("moe_loss");
}

static rfr_status run_loss_bwd(const rfr_call *c) {
  const loss_args a = args_of(c, 1);
  if (rfi_elements(&c->in[1]) == 0) return RFR_OK;
  const rfr_status s = enqueue_counts(c, a, "moe_loss_bwd");
  if (s != RFR_OK) return s;
  RFI_WITH_FLOAT(c->in[1].type.dtype, X,
                 loss_bwd<X><<<(unsigned)rfi_blocks(a.tokens, WARPS), THREADS, 0, rfi_stream(c)>>>(a));
  return rfi_cuda_launched("moe_loss_bwd");
}

/* Expert counts and a block's counts are 32-bit. */
static int takes(const rfr_call *c, int first) {
  return rfi_takes_floats(c) && c->in[first].type.shape[1] < INT32_MAX / 2 &&
         rfi_elements(&c->in[first + 1]) < INT32_MAX;
}
static int loss_takes(const rfr_call *c) { return takes(c, 0); }
static int loss_bwd_takes(const rfr_call *c) { return takes(c, 1); }

extern "C" const rfi_cuda_kernel RFI_CUDA(moe_loss) = {run_loss, loss_workspace, loss_takes};
extern "C" const rfi_cuda_kernel RFI_CUDA(moe_loss_bwd) = {run_loss_bwd, loss_bwd_workspace, loss_bwd_takes};
