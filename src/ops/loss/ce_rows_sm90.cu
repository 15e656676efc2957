/* SPDX-License-Identifier: Apache-2.0
 *
 * The rows of ce_rows.cu on Hopper, for a 16-bit gradient of logits in f32 or in the gradient's type: a cluster of
 * blocks processes a row, so that its logits fit into registers as f32. Once they are there, the block's part of the
 * next row is loaded into the freed shared memory, while this row is computed and written.
 *
 * e^x is computed once: a thread's sum and gradients are relative to its own maximum m; when the row's maximum M and
 * sum S are known, each gradient is one multiplication, by e^(m - M) / S. By then all of the row has been read, so the
 * gradient may overlap the logits.
 */
#include "ops/loss/ce_cuda.h"

#include "backend/cuda/kernels.cuh"

enum { THREADS = 1024, LOGITS = 32 }; /* of a thread */
enum { MOST_BLOCKS = 8 };             /* blocks of a cluster */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static __device__ __forceinline__ uint32_t address_of(const void *x) { return (uint32_t)__cvta_generic_to_shared(x); }
static __device__ __forceinline__ unsigned block_of_cluster(void) {
  unsigned x;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}
static __device__ __forceinline__ void cluster_barrier(void) {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Sends values to all blocks of a cluster; each block counts the bytes at its barrier. */
typedef struct exchange {
  uint64_t barrier;
  float2 from[MOST_BLOCKS];
} exchange;

static __device__ __forceinline__ void exchange_init(exchange *m) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address_of(&m->barrier)) : "memory");
}
static __device__ __forceinline__ void exchange_expect(exchange *m, unsigned blocks) {
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;\n}" ::"r"(address_of(&m->barrier)),
               "r"(blocks * 8)
               : "memory");
}
static __device__ __forceinline__ void exchange_send(exchange *m, unsigned to, float2 x) {
  asm volatile("{\n.reg .u32 at, bar;\nmapa.shared::cluster.u32 at, %0, %2;\nmapa.shared::cluster.u32 bar, %1, %2;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [at], {%3, %4}, [bar];\n}" ::"r"(
                   address_of(&m->from[block_of_cluster()])),
               "r"(address_of(&m->barrier)), "r"(to), "f"(x.x), "f"(x.y)
               : "memory");
}
static __device__ __forceinline__ void exchange_wait(exchange *m, int parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
               "@!p bra again;\n}" ::"r"(address_of(&m->barrier)),
               "r"(parity)
               : "memory");
}

/* Merges (maximum m, sum of 2^(logit log2 e - base(m))) over 32 lanes; every lane gets the result. */
static __device__ __forceinline__ float2 merge_lanes(float2 x) {
  /* integers that are ordered as the floats are */
  const int bits = __float_as_int(x.x), order = bits ^ (bits >> 31 & 0x7fffffff);
  const int top = __reduce_max_sync(0xffffffffu, order);
  const float most = __int_as_float(top ^ (top >> 31 & 0x7fffffff));
  float sum = most == -INFINITY ? x.y : x.y * rfi_exp2(rfi_ce_base(x.x) - rfi_ce_base(most));
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return make_float2(most, sum);
}

/* Merges over a cluster, in a fixed order. `part` and `peer` may be reused after another merge; `turn` counts the
 * merges before. */
static __device__ __forceinline__ float2 cluster_merge(float2 x, float2 *part, exchange *peer, unsigned blocks,
                                                       int turn) {
  const int lane = threadIdx.x & 31;
  x = merge_lanes(x);
  if (lane == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  x = merge_lanes(part[lane]);
  if (blocks == 1) return x;
  if (threadIdx.x == 0) exchange_expect(peer, blocks);
  if (threadIdx.x < blocks) exchange_send(peer, threadIdx.x, x);
  exchange_wait(peer, turn & 1);
  return merge_lanes(lane < (int)blocks ? peer->from[lane] : make_float2(-INFINITY, 0.0f));
}

#endif

/* A block's part of a row: per_block pieces of 16 bytes, fewer at the end; piece j of thread k is k + 1024 j. */
template <typename X, typename D>
static __global__ void __launch_bounds__(THREADS, 1)
    ce_rows_sm90(const __grid_constant__ rfi_ce_rows r, const int per_block, const unsigned blocks) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int P = 16 / (int)sizeof(X), PIECES = LOGITS / P, STRIDE = THREADS * P;
  typedef rfi_pack<X, P> piece;
  extern __shared__ __align__(16) uint4 memory[];
  piece *const kept = (piece *)memory;
  __shared__ float2 part[2][32];
  __shared__ exchange peer[2];
  const int me = (int)threadIdx.x, begin = (int)block_of_cluster() * per_block * P, first = begin + me * P;
  const int mine = min((int)r.V - begin, per_block * P), left = mine - me * P, full_strides = mine / STRIDE;
  const int64_t step = gridDim.x / blocks;
  const uint32_t place = address_of(&kept[me]);
  const X *from = (const X *)r.logits + blockIdx.x / blocks * r.logits_ld + first;
  const auto request = [&](int j, float before) { /* reads a piece, then loads another one into its place */
                                                  if (j < full_strides || j * STRIDE < left)
                                                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                                                     place + (uint32_t)(j * THREADS * 16)),
                                                                 "l"(from + j * STRIDE), "f"(before)
                                                                 : "memory");
  };
  if (blocks > 1) {
    if (me == 0)
      for (int i = 0; i < 2; i++) exchange_init(&peer[i]);
    cluster_barrier();
  }
  int turn = 0;
#pragma unroll
  for (int j = 0; j < PIECES; j++) request(j, 0);
  for (int64_t t = blockIdx.x / blocks; t < r.rows; t += step, turn++) {
    const int32_t wanted = r.targets[t];
    const bool valid = wanted != r.ignore && wanted >= 0 && wanted < r.V, more = t + step < r.rows;
    const float scale = rfi_ce_scale(r, t);
    /* read before it is overwritten */
    const float hit = valid ? rfi_widen(((const X *)r.logits)[t * r.logits_ld + wanted]) : 0.0f;
    float v[PIECES][P], top = -INFINITY, sum = 0;
    from += step * r.logits_ld;
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
      piece x;
      const bool any = j < full_strides || j * STRIDE < left;
      if (any) x = kept[me + j * THREADS];
#pragma unroll
      for (int i = 0; i < P; i++) v[j][i] = any ? rfi_widen(x.x[i]) : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
      if (more) request(j, v[j][0]);
      if (j >= full_strides)
#pragma unroll
        for (int i = 1; i < P; i++)
          if (j * STRIDE + i >= left) v[j][i] = -INFINITY;
#pragma unroll
      for (int i = 0; i < P; i++) top = fmaxf(top, v[j][i]);
    }
    const float base = top == -INFINITY ? 0.0f : rfi_ce_base(top);
#pragma unroll
    for (int j = 0; j < PIECES; j++)
#pragma unroll
      for (int i = 0; i < P; i++) {
        v[j][i] = rfi_exp2(fmaf(v[j][i], RFI_LOG2E, -base));
        sum += v[j][i];
      }
    const float2 all = cluster_merge(make_float2(top, sum), part[turn & 1], &peer[turn & 1], blocks, turn / 2);
    if (first == 0) {
      const double lse = rfi_ce_lse(all);
      if (r.lse) r.lse[t] = (float)lse;
      if (r.nll) r.nll[t] = valid ? lse - (double)hit : 0.0;
      if (r.loss) r.loss[t] = valid ? (float)(lse - (double)hit) : 0.0f;
    }
    const float share = __fdividef(scale, all.y), row_base = rfi_ce_base(all.x);
    const float by = rfi_exp2(base - row_base) * share;
    D *const to = (D *)r.dlogits + t * r.dlogits_ld + first;
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
      rfi_pack<D, P> y;
#pragma unroll
      for (int i = 0; i < P; i++) y.x[i] = rfi_narrow<D>(valid ? v[j][i] * by : 0.0f);
      if (j < full_strides || j * STRIDE < left) *(rfi_pack<D, P> *)(to + j * STRIDE) = y;
    }
    const int at = wanted - first; /* may be outside the thread's elements */
    if (valid && at >= 0 && at < left && at % STRIDE < P)
      to[at] = rfi_narrow<D>(rfi_exp2(fmaf(hit, RFI_LOG2E, -row_base)) * share - scale);
  }
  if (blocks > 1) cluster_barrier(); /* a block's shared memory must stay valid until all sends to it have finished */
#endif
}

template <typename X, typename D> static rfr_status launch(const rfi_ce_rows *r, cudaStream_t stream) {
  const int64_t pieces = rfi_blocks(r->V, 16 / (int64_t)sizeof(X));
  unsigned blocks = 1;
  while (r->V > (int64_t)blocks * LOGITS * THREADS) blocks *= 2;
  const int per_block = (int)rfi_blocks(pieces, blocks), bytes = per_block * 16;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)r->info->sms / blocks * blocks);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = (size_t)bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  cudaError_t e = cudaFuncSetAttribute(ce_rows_sm90<X, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e == cudaSuccess) e = cudaOccupancyMaxActiveClusters(&clusters, ce_rows_sm90<X, D>, &config);
  if (e != cudaSuccess) return rfi_cuda_check(e, "enabling clusters");
  if (clusters > r->rows) clusters = (int)r->rows;
  if (clusters < 1) clusters = 1;
  config.gridDim = dim3((unsigned)clusters * blocks);
  return rfi_cuda_check(cudaLaunchKernelEx(&config, ce_rows_sm90<X, D>, *r, per_block, blocks), "cross_entropy");
}

int rfi_ce_rows_sm90_takes(const rfi_ce_rows *r) {
  const int64_t P = r->logits_type == RFR_F32 ? 4 : 8, read = rfi_blocks(r->V, P) * P;
  return r->dlogits && r->info->major == 9 && !r->info->portable &&
         (r->logits_type == RFR_F32 || r->logits_type == r->dlogits_type) && r->dlogits_type != RFR_F32 &&
         r->cap == 0 && r->V <= (int64_t)MOST_BLOCKS * LOGITS * THREADS && (uintptr_t)r->logits % 16 == 0 &&
         (uintptr_t)r->dlogits % (2 * (uintptr_t)P) == 0 && r->logits_ld % P == 0 && r->dlogits_ld % P == 0 &&
         r->logits_ld >= read && r->dlogits_ld >= read;
}

rfr_status rfi_ce_rows_sm90_cuda(const rfi_ce_rows *r, void *stream) {
  const bool wide = r->logits_type == RFR_F32;
  if (r->dlogits_type == RFR_BF16)
    return wide ? launch<float, rfi_bf16>(r, (cudaStream_t)stream)
                : launch<rfi_bf16, rfi_bf16>(r, (cudaStream_t)stream);
  return wide ? launch<float, rfi_f16>(r, (cudaStream_t)stream) : launch<rfi_f16, rfi_f16>(r, (cudaStream_t)stream);
}
