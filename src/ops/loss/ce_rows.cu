/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of softmax cross-entropy: log sum exp with a running maximum per thread, merged in a fixed order, then
 *
 *   nll = lse - logit[target]        dlogits = (e^(logit - lse) - onehot) dloss inv_valid
 *
 * With a cap a logit is cap tanh(logit / cap) wherever it is read, and dlogits has the factor 1 - (capped / cap)^2. An
 * invalid target (ignored, or outside the vocabulary) gives 0 and a row of zeros.
 *
 * A block processes a full row, in aligned pieces of 16 bytes; piece k belongs to thread k mod threads throughout. With
 * a gradient the row is read once and kept in shared memory: when a piece has become its gradient, the same piece of
 * the block's next row is loaded into its place, so the next row arrives while this one is written. 227 KiB are enough
 * for 58,000 logits of f32; the rest of a longer row is read again, and 132 such rests fit into the L2 cache up to
 * 150,000 logits.
 *
 * dlogits of a narrower type may overlap the logits that they come from. The part in shared memory is complete before
 * the first gradient is written. The rest is read stretch by stretch before it is written, and writes never reach the
 * part that is still to be read.
 */
#include "ops/loss/ce_cuda.h"

#include "backend/cuda/kernels.cuh"

enum { MOST_THREADS = 1024, LEAST_THREADS = 64, DLOGITS_THREADS = 256, AT_ONCE = 4 };
enum { FORWARD_THREADS = 256, FORWARD_BLOCKS = 6, FORWARD_AT_ONCE = 2 };

/* ---- 16-byte pieces of a row ---- */

/* A row in memory: piece k has the elements k P - shift ... k P - shift + P - 1 that lie in [0, V). */
template <typename X> struct row_of {
  static constexpr int P = 16 / (int)sizeof(X);
  const X *x;
  int64_t V, pieces;
  int shift;
  __device__ row_of(const X *x, int64_t V) : x(x), V(V), shift((int)((uintptr_t)x % 16 / sizeof(X))) {
    pieces = (V + shift + P - 1) / P;
  }
  __device__ int64_t first(int64_t k) const { return k * P - shift; }
  __device__ bool complete(int64_t k) const { return first(k) >= 0 && first(k) + P <= V; }
};

static __device__ __forceinline__ float softcap(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

template <typename X, int P>
static __device__ __forceinline__ void widen(float (&v)[P], const rfi_pack<X, P> &piece, float cap) {
#pragma unroll
  for (int i = 0; i < P; i++) v[i] = rfi_widen(piece.x[i]);
  if (cap > 0.0f)
#pragma unroll
    for (int i = 0; i < P; i++) v[i] = softcap(v[i], cap);
}
/* Elements outside the row count as -inf: they change neither maximum nor sum. */
template <typename X, int P>
static __device__ __forceinline__ void widen(float (&v)[P], const rfi_pack<X, P> &piece, const row_of<X> &row,
                                             int64_t k, float cap) {
  widen(v, piece, cap);
  if (row.complete(k)) return;
#pragma unroll
  for (int i = 0; i < P; i++)
    if (row.first(k) + i < 0 || row.first(k) + i >= row.V) v[i] = -INFINITY;
}

template <typename X>
static __device__ __forceinline__ rfi_pack<X, 16 / sizeof(X)> load(const row_of<X> &row, int64_t k) {
  constexpr int P = 16 / (int)sizeof(X);
  const int64_t at = row.first(k);
  rfi_pack<X, P> piece = {};
  if (row.complete(k)) return *(const rfi_pack<X, P> *)(row.x + at);
  for (int i = 0; i < P; i++)
    if (at + i >= 0 && at + i < row.V) piece.x[i] = row.x[at + i];
  return piece;
}

/* Starts an asynchronous load into shared memory; bytes after the row's end are filled with zeros. */
template <typename X>
static __device__ __forceinline__ void request(rfi_pack<X, 16 / sizeof(X)> *to, const row_of<X> &row, int64_t k) {
  const int64_t at = row.first(k), left = (row.V - at) * (int64_t)sizeof(X);
  if (at < 0) {
    *to = load(row, k);
    return;
  }
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
               "l"(row.x + at), "r"((int)(left < 16 ? left : 16))
               : "memory");
}
static __device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <typename D, int P> static __device__ __forceinline__ void store(D *to, const float (&v)[P]) {
  constexpr int N = P * (int)sizeof(D) > 16 ? 16 / (int)sizeof(D) : P; /* elements per store */
#pragma unroll
  for (int i = 0; i < P; i += N) {
    rfi_pack<D, N> part;
#pragma unroll
    for (int j = 0; j < N; j++) part.x[j] = rfi_narrow<D>(v[i + j]);
    rfi_put((rfi_pack<D, N> *)(to + i), part);
  }
}
template <typename X, typename D, int P>
static __device__ __forceinline__ void store(D *d, const float (&v)[P], const row_of<X> &row, int64_t k) {
  const int64_t at = row.first(k);
  if (row.complete(k) && (uintptr_t)(d + at) % (P * sizeof(D) < 16 ? P * sizeof(D) : 16) == 0) {
    store(d + at, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < P; i++)
    if (at + i >= 0 && at + i < row.V) d[at + i] = rfi_narrow<D>(v[i]);
}

/* ---- log sum exp ---- */

/* Merges pairs (maximum m, sum of 2^(logit log2 e - base(m))). A sum without a maximum is 0, or NaN if there was a
 * NaN. */
static __device__ __forceinline__ float2 merge(float2 a, float2 b) {
  const float top = fmaxf(a.x, b.x), base = rfi_ce_base(top);
  if (top == -INFINITY) return make_float2(top, a.y + b.y);
  return make_float2(top, a.y * rfi_exp2(rfi_ce_base(a.x) - base) + b.y * rfi_exp2(rfi_ce_base(b.x) - base));
}

template <int P> static __device__ __forceinline__ void add(float2 *sum, const float (&v)[P]) {
  float top = v[0], more[2] = {};
#pragma unroll
  for (int i = 1; i < P; i++) top = fmaxf(top, v[i]);
  if (top > sum->x) {
    sum->y *= rfi_exp2(rfi_ce_base(sum->x) - rfi_ce_base(top));
    sum->x = top;
  }
  const float base = sum->x == -INFINITY ? 0.0f : rfi_ce_base(sum->x);
#pragma unroll
  for (int i = 0; i < P; i++) more[i % 2] += rfi_exp2(fmaf(v[i], RFI_LOG2E, -base));
  sum->y += more[0] + more[1];
}

/* Every thread gets the result. `part` may be reused after another merge. */
static __device__ float2 block_merge(float2 x, float2 *part) {
  for (int step = 16; step > 0; step >>= 1)
    x = merge(x, make_float2(__shfl_xor_sync(0xffffffffu, x.x, step), __shfl_xor_sync(0xffffffffu, x.y, step)));
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  x = (threadIdx.x & 31) < blockDim.x >> 5 ? part[threadIdx.x & 31] : make_float2(-INFINITY, 0.0f);
  for (int step = 16; step > 0; step >>= 1)
    x = merge(x, make_float2(__shfl_xor_sync(0xffffffffu, x.x, step), __shfl_xor_sync(0xffffffffu, x.y, step)));
  return x;
}

/* ---- gradient ---- */

typedef struct gradient {
  float high, low, high2, scale, cap; /* lse in two parts; lse log2 e */
  int64_t target;                     /* -1: the row does not count */
} gradient;

static __device__ __forceinline__ gradient gradient_of(const rfi_ce_rows &r, int64_t t, double lse, int64_t target) {
  const float high = (float)lse;
  return {high, (float)(lse - (double)high), high * RFI_LOG2E, rfi_ce_scale(r, t), r.cap, target};
}

/* Replaces v by the gradient of the elements from `first` on. If the gradient is rounded to 16 bits, a less accurate
 * e^x suffices. */
template <typename D, int P>
static __device__ __forceinline__ void turn(float (&v)[P], const gradient &g, int64_t first) {
  const int64_t at = g.target - first;
  float by[P];
#pragma unroll
  for (int i = 0; i < P; i++) by[i] = g.scale;
  if (g.cap > 0.0f)
#pragma unroll
    for (int i = 0; i < P; i++) by[i] *= (1.0f - v[i] / g.cap) * (1.0f + v[i] / g.cap);
#pragma unroll
  for (int i = 0; i < P; i++)
    v[i] = sizeof(D) == 2 ? rfi_exp2(fmaf(v[i], RFI_LOG2E, -g.high2)) : expf(v[i] - g.high - g.low);
  if (at >= 0 && at < P)
#pragma unroll
    for (int i = 0; i < P; i++) v[i] = i == (int)at ? v[i] - 1.0f : v[i];
#pragma unroll
  for (int i = 0; i < P; i++) v[i] = g.target < 0 ? 0.0f : v[i] * by[i];
}

static __device__ __forceinline__ int64_t target_of(const rfi_ce_rows &r, int64_t row) {
  const int32_t target = r.targets[row];
  return target != r.ignore && target >= 0 && target < r.V ? target : -1;
}

/* `keep` pieces of a row are in shared memory. */
template <typename X, typename D>
static __global__ void __launch_bounds__(MOST_THREADS) ce_rows(const rfi_ce_rows r, const int64_t keep) {
  constexpr int P = 16 / (int)sizeof(X);
  typedef rfi_pack<X, P> pack;
  extern __shared__ uint4 shared[];
  __shared__ float2 part[2][MOST_THREADS / 32];
  pack *kept = (pack *)shared;
  const int threads = blockDim.x, me = threadIdx.x;
  int odd = 0;
  const row_of<X> begin((const X *)r.logits + blockIdx.x * r.logits_ld, r.V);
  for (int64_t k = me; k < keep && k < begin.pieces; k += threads) request(&kept[k], begin, k);
  for (int64_t t = blockIdx.x; t < r.rows; t += gridDim.x, odd ^= 1) {
    const row_of<X> row((const X *)r.logits + t * r.logits_ld, r.V);
    const int64_t target = target_of(r, t);
    /* read before anything is written */
    const float hit = target >= 0 ? softcap(rfi_widen(row.x[target]), r.cap) : 0.0f;
    float2 sum = make_float2(-INFINITY, 0.0f);
    float v[P];
    int64_t k = me;
    arrived();
    for (; k < keep && k < row.pieces; k += threads) {
      widen(v, kept[k], row, k, r.cap);
      add(&sum, v);
    }
    for (; k + (AT_ONCE - 1) * threads < row.pieces; k += AT_ONCE * threads) {
      pack piece[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) piece[j] = load(row, k + j * threads);
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        widen(v, piece[j], row, k + j * threads, r.cap);
        add(&sum, v);
      }
    }
    for (; k < row.pieces; k += threads) {
      widen(v, load(row, k), row, k, r.cap);
      add(&sum, v);
    }
    sum = block_merge(sum, part[odd]);
    const double lse = rfi_ce_lse(sum);
    if (me == 0) {
      if (r.lse) r.lse[t] = (float)lse;
      if (r.nll) r.nll[t] = target >= 0 ? lse - (double)hit : 0.0;
      if (r.loss) r.loss[t] = target >= 0 ? (float)(lse - (double)hit) : 0.0f;
    }
    const gradient g = gradient_of(r, t, lse, target);
    const row_of<X> next((const X *)r.logits + (t + gridDim.x) * r.logits_ld, r.V);
    const bool more = t + gridDim.x < r.rows;
    D *d = (D *)r.dlogits + t * r.dlogits_ld;
    for (k = me; k < keep; k += threads) {
      if (k < row.pieces) {
        widen(v, kept[k], row, k, r.cap);
        turn<D>(v, g, row.first(k));
        store(d, v, row, k);
      }
      if (more && k < next.pieces) request(&kept[k], next, k);
    }
    for (int64_t stretch = keep; stretch < row.pieces; stretch += threads) {
      k = stretch + me;
      if (k < row.pieces) widen(v, load(row, k), row, k, r.cap);
      __syncthreads();
      if (k >= row.pieces) continue;
      turn<D>(v, g, row.first(k));
      store(d, v, row, k);
    }
  }
}

/* The forward without a gradient. While a thread adds its current pieces, the next ones load; at the end of a row these
 * belong to the block's next row. EVEN: rows begin and end at multiples of 16 bytes. */
template <typename X, bool EVEN>
static __global__ void __launch_bounds__(FORWARD_THREADS, FORWARD_BLOCKS) ce_forward(const rfi_ce_rows r) {
  constexpr int P = 16 / (int)sizeof(X), N = EVEN ? FORWARD_AT_ONCE : 1;
  typedef rfi_pack<X, P> pack;
  __shared__ float2 part[2][FORWARD_THREADS / 32];
  const int threads = blockDim.x, me = threadIdx.x, even = (int)(r.V / P);
  pack next[N];
  const auto fetch = [&](const row_of<X> &row, int k) {
#pragma unroll
    for (int j = 0; j < N; j++)
      if (k + j * threads < (EVEN ? even : (int)row.pieces))
        next[j] = EVEN ? ((const pack *)row.x)[k + j * threads] : load(row, k + j * threads);
  };
  int odd = 0;
  fetch(row_of<X>((const X *)r.logits + blockIdx.x * r.logits_ld, r.V), me);
  for (int64_t t = blockIdx.x; t < r.rows; t += gridDim.x, odd ^= 1) {
    const row_of<X> row((const X *)r.logits + t * r.logits_ld, r.V), after(row.x + gridDim.x * r.logits_ld, r.V);
    const int pieces = EVEN ? even : (int)row.pieces;
    float2 sum = make_float2(-INFINITY, 0.0f);
    for (int first = 0; first < pieces; first += N * threads) {
      const int k = first + me;
      pack now[N];
#pragma unroll
      for (int j = 0; j < N; j++) now[j] = next[j];
      if (first + N * threads < pieces) fetch(row, k + N * threads);
      else if (t + gridDim.x < r.rows) fetch(after, me);
#pragma unroll
      for (int j = 0; j < N; j++) {
        float v[P];
        if (k + j * threads >= pieces) break;
        if (EVEN) widen(v, now[j], r.cap);
        else widen(v, now[j], row, k + j * threads, r.cap);
        add(&sum, v);
      }
    }
    sum = block_merge(sum, part[odd]);
    if (me > 0) continue;
    const int64_t target = target_of(r, t);
    const double lse = rfi_ce_lse(sum);
    if (r.lse) r.lse[t] = (float)lse;
    const double nll = target >= 0 ? lse - (double)softcap(rfi_widen(row.x[target]), r.cap) : 0.0;
    if (r.nll) r.nll[t] = nll;
    if (r.loss) r.loss[t] = (float)nll;
  }
}

/* EVEN: rows of logits and dlogits begin and end at multiples of 16 bytes. */
template <typename X, typename D, bool EVEN>
static __global__ void __launch_bounds__(DLOGITS_THREADS) ce_dlogits(const rfi_ce_rows r, const unsigned blocks) {
  constexpr int P = 16 / (int)sizeof(X);
  typedef rfi_pack<X, P> pack;
  const unsigned t = blockIdx.x / blocks;
  const int64_t k0 = blockIdx.x % blocks * (DLOGITS_THREADS * AT_ONCE) + threadIdx.x;
  const row_of<X> row((const X *)r.logits + t * r.logits_ld, r.V);
  D *const d = (D *)r.dlogits + t * r.dlogits_ld;
  pack piece[AT_ONCE];
#pragma unroll
  for (int j = 0; j < AT_ONCE; j++) {
    const int64_t k = k0 + j * DLOGITS_THREADS;
    if (k < row.pieces) piece[j] = EVEN ? ((const pack *)row.x)[k] : load(row, k);
  }
  const gradient g = gradient_of(r, t, r.lse[t], target_of(r, t));
#pragma unroll
  for (int j = 0; j < AT_ONCE; j++) {
    const int64_t k = k0 + j * DLOGITS_THREADS;
    float v[P];
    if (k >= row.pieces) break;
    if (EVEN) widen(v, piece[j], r.cap);
    else widen(v, piece[j], row, k, r.cap);
    turn<D>(v, g, row.first(k));
    if (EVEN) store(d + k * P, v);
    else store(d, v, row, k);
  }
}

static __global__ void __launch_bounds__(1024)
    ce_loss(const double *nll, int64_t T, const float *inv_valid, float *loss) {
  __shared__ double part[1024];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < T; i += 1024) sum += nll[i];
  part[threadIdx.x] = sum;
  for (int half = 512; half > 0; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *loss = (float)(part[0] * (double)*inv_valid);
}

/* ---- launches ---- */

typedef struct machine {
  int sms, shared; /* shared: bytes available to one block */
} machine;

static rfr_status find_machine(machine *m) {
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&m->sms, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&m->shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return rfi_cuda_check(e, "reading the device");
}

/* As many blocks as run at the same time; each continues with further rows. `own`: shared memory of a block besides the
 * row. */
template <typename X, typename D>
static rfr_status launch(const rfi_ce_rows *r, const machine *m, cudaStream_t stream) {
  const int64_t width = 16 / (int64_t)sizeof(X), pieces = rfi_blocks(r->V, width) + 1, own = 2048, resident = 1024;
  int64_t threads = rfi_blocks(pieces, AT_ONCE * 32) * 32, keep = (m->shared - own) / 16;
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  if (threads < LEAST_THREADS) threads = LEAST_THREADS;
  if (keep > pieces) keep = pieces;
  int64_t blocks = resident / threads;
  if (blocks > m->shared / (16 * keep + own)) blocks = m->shared / (16 * keep + own);
  blocks = (blocks < 1 ? 1 : blocks) * m->sms;
  if (blocks > r->rows) blocks = r->rows;
  if (16 * keep > 32768) {
    const cudaError_t e =
        cudaFuncSetAttribute(ce_rows<X, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(16 * keep));
    if (e != cudaSuccess) return rfi_cuda_check(e, "raising the shared memory limit");
  }
  ce_rows<X, D><<<(unsigned)blocks, (unsigned)threads, (size_t)(16 * keep), stream>>>(*r, keep);
  return RFR_OK;
}

/* Whether rows of V elements begin and end at multiples of 16 bytes of T, and of X if that is wider. */
template <typename T, typename X> static bool is_even(const void *rows, int64_t ld, int64_t V) {
  const int64_t width = 16 / (int64_t)(sizeof(T) < sizeof(X) ? sizeof(T) : sizeof(X));
  return (uintptr_t)rows % 16 == 0 && ld % width == 0 && V % width == 0;
}

template <typename X> static void launch_forward(const rfi_ce_rows *r, const machine *m, cudaStream_t stream) {
  const int64_t pieces = rfi_blocks(r->V, 16 / (int64_t)sizeof(X)) + 1;
  int64_t threads = rfi_blocks(pieces, FORWARD_AT_ONCE * 32) * 32;
  if (threads > FORWARD_THREADS) threads = FORWARD_THREADS;
  if (threads < LEAST_THREADS) threads = LEAST_THREADS;
  int64_t blocks = FORWARD_BLOCKS * FORWARD_THREADS / threads * m->sms;
  if (blocks > r->rows) blocks = r->rows;
  if (is_even<X, X>(r->logits, r->logits_ld, r->V))
    ce_forward<X, true><<<(unsigned)blocks, (unsigned)threads, 0, stream>>>(*r);
  else ce_forward<X, false><<<(unsigned)blocks, (unsigned)threads, 0, stream>>>(*r);
}

template <typename X> static rfr_status choose(const rfi_ce_rows *r, const machine *m, cudaStream_t stream) {
  if (!r->dlogits) launch_forward<X>(r, m, stream);
  else RFI_WITH_FLOAT(r->dlogits_type, D, return (launch<X, D>(r, m, stream)))
  return RFR_OK;
}

extern "C" rfr_status rfi_ce_rows_cuda(const rfi_ce_rows *r, void *stream) {
  machine m;
  if (r->rows == 0) return RFR_OK;
  if (rfi_ce_rows_sm90_takes(r)) return rfi_ce_rows_sm90_cuda(r, stream);
  rfr_status s = find_machine(&m);
  if (s == RFR_OK) RFI_WITH_FLOAT(r->logits_type, X, s = choose<X>(r, &m, (cudaStream_t)stream))
  return s == RFR_OK ? rfi_cuda_launched("cross_entropy") : s;
}

template <typename X, typename D> static void launch_dlogits(const rfi_ce_rows *r, cudaStream_t stream) {
  const int64_t pieces = rfi_blocks(r->V, 16 / (int64_t)sizeof(X)) + 1;
  const unsigned blocks = (unsigned)rfi_blocks(pieces, DLOGITS_THREADS * AT_ONCE), grid = (unsigned)r->rows * blocks;
  if (is_even<X, D>(r->logits, r->logits_ld, r->V) && is_even<D, X>(r->dlogits, r->dlogits_ld, r->V))
    ce_dlogits<X, D, true><<<grid, DLOGITS_THREADS, 0, stream>>>(*r, blocks);
  else ce_dlogits<X, D, false><<<grid, DLOGITS_THREADS, 0, stream>>>(*r, blocks);
}

extern "C" rfr_status rfi_ce_dlogits_cuda(const rfi_ce_rows *r, void *stream) {
  if (r->rows == 0 || r->V == 0) return RFR_OK;
  RFI_WITH_FLOAT(r->logits_type, X, RFI_WITH_FLOAT(r->dlogits_type, D, (launch_dlogits<X, D>(r, (cudaStream_t)stream))))
  return rfi_cuda_launched("cross_entropy_bwd");
}

extern "C" rfr_status rfi_ce_loss_cuda(const double *nll, int64_t T, const float *inv_valid, float *loss,
                                       void *stream) {
  ce_loss<<<1, 1024, 0, (cudaStream_t)stream>>>(nll, T, inv_valid, loss);
  return rfi_cuda_launched("cross_entropy's sum");
}

template <typename D> static __global__ void ce_tails(D *d, int64_t ld, int64_t rows, int64_t V, int tail) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows * tail) d[i / tail * ld + V + i % tail] = rfi_narrow<D>(0.0f);
}

extern "C" rfr_status rfi_ce_tails_cuda(const rfi_ce_rows *r, int64_t width, void *stream) {
  const int tail = (int)(width - r->V);
  if (tail == 0 || r->rows == 0) return RFR_OK;
  RFI_WITH_FLOAT(r->dlogits_type, D,
                 (ce_tails<D><<<(unsigned)rfi_blocks(r->rows * tail, 256), 256, 0, (cudaStream_t)stream>>>(
                     (D *)r->dlogits, r->dlogits_ld, r->rows, r->V, tail)))
  return rfi_cuda_launched("padding rows of logits");
}
