/* SPDX-License-Identifier: Apache-2.0
 *
 * The step's scalars on a GPU, as in schedule_cpu.c: learning rate, gradient norm, clip factor, loss scale, step block.
 * All kernels read the step block, the norm and the flag on the device.
 *
 * The squares of the norm are summed in f64 over chunks, one block each, for all gradients in one launch: the
 * gradients' addresses are launch arguments, up to MOST per launch. A second launch adds the chunks in a fixed order
 * and checks each gradient's own sum for the count of zeros.
 */
#include <climits>

#include "backend/cuda/kernels.cuh"
#include "ops/optim/loss_scale.h"
#include "refrain/ops.h"

enum { ATTEMPTED, APPLIED, SEED, SKIPPED };

/* ---- scalars ---- */

typedef struct schedule {
  int64_t kind;
  double base, min, warmup, total, decay;
} schedule;

static __global__ void lr_schedule(schedule s, const int64_t *step, const int64_t *steps, float *lr) {
  if (steps) s.warmup = (double)steps[0], s.total = (double)steps[2], s.decay = s.total - (double)steps[1];
  const double n = (double)step[steps ? ATTEMPTED : APPLIED], done = (n - s.warmup) / (s.total - s.warmup);
  double rate;
  if (n < s.warmup) rate = s.base * (n + 1) / s.warmup;
  else if (s.kind == RFR_LR_CONSTANT) rate = s.base;
  else if (n >= s.total) rate = s.min;
  else if (s.kind == RFR_LR_LINEAR) rate = s.base + (s.min - s.base) * done;
  else if (s.kind == RFR_LR_COSINE) rate = s.min + (s.base - s.min) * 0.5 * (1 + cos(3.14159265358979323846 * done));
  else if (n < s.total - s.decay) rate = s.base;
  else rate = s.base + (s.min - s.base) * (n - (s.total - s.decay)) / s.decay;
  *lr = (float)rate;
}

static rfr_status lr_run(const rfr_call *c) {
  const rfr_attr *a = c->attr;
  const schedule s = {a[0].i, a[1].f, a[2].f, (double)a[3].i, (double)a[4].i, (double)a[5].i};
  if (c->out[0].data)
    lr_schedule<<<1, 1, 0, rfi_stream(c)>>>(s, (const int64_t *)c->in[0].data, (const int64_t *)c->in[1].data,
                                            (float *)c->out[0].data);
  return rfi_cuda_launched("lr_schedule");
}

static __global__ void clip_scale(double max, const float *norm, float *clip) {
  const double scale = max / ((double)*norm + 1e-6);
  *clip = max == 0 || !(scale < 1) ? 1.0f : (float)scale;
}

static rfr_status clip_run(const rfr_call *c) {
  if (c->out[0].data)
    clip_scale<<<1, 1, 0, rfi_stream(c)>>>(c->attr[0].f, (const float *)c->in[0].data, (float *)c->out[0].data);
  return rfi_cuda_launched("clip_scale");
}

static __global__ void loss_scale(const int32_t *state, float *scale, float *inverse) {
  const int exponent = rfi_scale_exponent(state);
  if (scale) *scale = ldexpf(1.0f, exponent);
  if (inverse) *inverse = ldexpf(1.0f, -exponent);
}

static rfr_status scale_run(const rfr_call *c) {
  loss_scale<<<1, 1, 0, rfi_stream(c)>>>((const int32_t *)c->in[0].data, (float *)c->out[0].data,
                                         (float *)c->out[1].data);
  return rfi_cuda_launched("loss_scale");
}

static __global__ void loss_scale_end(int32_t *state, const int32_t *skip, int64_t every) {
  rfi_scale_step(state, *skip != 0, every);
}

static rfr_status scale_end_run(const rfr_call *c) {
  loss_scale_end<<<1, 1, 0, rfi_stream(c)>>>((int32_t *)c->out[0].data, (const int32_t *)c->in[1].data, c->attr[0].i);
  return rfi_cuda_launched("loss_scale_end");
}

static __global__ void step_end(int64_t *step, const int32_t *skip) {
  const int64_t skipped = *skip != 0;
  step[ATTEMPTED] += 1;
  step[APPLIED] += 1 - skipped;
  step[SKIPPED] += skipped;
}

static rfr_status step_end_run(const rfr_call *c) {
  step_end<<<1, 1, 0, rfi_stream(c)>>>((int64_t *)c->in[0].data, (const int32_t *)c->in[1].data);
  return rfi_cuda_launched("step_end");
}

/* ---- flags ---- */

enum { MOST_FLAGS = 256 };

typedef struct flag_list {
  const int32_t *flag[MOST_FLAGS];
  int count[MOST_FLAGS]; /* index into flag[] of each list of flags */
  int n, before;         /* before: the number of flags in previous launches */
} flag_list;

/* One warp. found: the number, from 1, and the value of the first flag that is not 0; kept between launches. */
static __global__ void __launch_bounds__(32)
    skip_bad(const __grid_constant__ flag_list all, bool last, const int32_t *skip, int32_t *found, int32_t *skip1,
             int32_t *which, int32_t *group) {
  int first = INT_MAX, value = 0;
  for (int k = 0, before = 0; k < all.n; before += all.count[k++])
    for (int i = threadIdx.x; i < all.count[k] && first == INT_MAX; i += 32)
      if (all.flag[k][i]) first = before + i, value = all.flag[k][i];
  const int mine = first;
  first = __reduce_min_sync(0xffffffffu, mine);
  value = __shfl_sync(0xffffffffu, value, __ffs(__ballot_sync(0xffffffffu, mine == first)) - 1);
  if (threadIdx.x > 0) return;
  int number = all.before ? found[0] : 0, flag = all.before ? found[1] : 1;
  if (number == 0 && first < INT_MAX) number = all.before + first + 1, flag = value;
  found[0] = number, found[1] = flag;
  if (!last) return;
  if (skip1) *skip1 = number ? 1 : *skip;
  if (which) *which = number;
  if (group) *group = flag - 1;
}

static size_t skip_bad_workspace(const rfr_call *c) {
  (void)c;
  return 2 * sizeof(int32_t);
}

static rfr_status skip_bad_run(const rfr_call *c) {
  flag_list all;
  int k = 1;
  all.before = 0;
  do {
    int flags = 0;
    for (all.n = 0; all.n < MOST_FLAGS && k < c->n_in; all.n++, k++) {
      all.flag[all.n] = (const int32_t *)c->in[k].data;
      flags += all.count[all.n] = (int)rfi_elements(&c->in[k]);
    }
    const bool last = k >= c->n_in;
    skip_bad<<<1, 32, 0, rfi_stream(c)>>>(all, last, (const int32_t *)c->in[0].data, (int32_t *)c->workspace,
                                          (int32_t *)c->out[0].data, (int32_t *)c->out[1].data,
                                          (int32_t *)c->out[2].data);
    all.before += flags;
  } while (k < c->n_in);
  return rfi_cuda_launched("skip_bad");
}

/* ---- the gradients' norm ---- */

enum { MOST = 1024, FEW = 128, CHUNK = 16384, THREADS = 256, WIDTH = 8, FINISH = 1024 };

typedef struct gradient {
  const void *data;
  int64_t n;
  int64_t first; /* first chunk, numbered over all gradients */
} gradient;

/* N gradients; launch arguments have at most 32,764 bytes. */
template <int N> struct gradients {
  gradient g[N];
  uint8_t dtype[N];
  int n;
  int64_t end; /* end of the last gradient's chunks */
};

/* The gradient of a chunk: the last non-empty one that begins at it or before. */
template <int N> static __device__ int gradient_of(const gradients<N> &all, int64_t chunk) {
  int low = 0, high = all.n; /* g[low].first <= chunk < g[high].first */
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (all.g[middle].first <= chunk) low = middle;
    else high = middle;
  }
  return low;
}

static __device__ __forceinline__ double square(float x) { return (double)x * (double)x; }

/* The thread's share of a chunk; 8 adjacent elements at a time if they are aligned. */
template <typename T> static __device__ double squares(const T *x, int64_t n) {
  double sum = 0;
  int64_t i = 0;
  if ((uintptr_t)x % 16 == 0) {
    typedef rfi_pack<T, 16 / sizeof(T)> pack;
    constexpr int P = 16 / sizeof(T), UNROLL = WIDTH * 2 / P;
    const pack *p = (const pack *)x;
    const int64_t packs = n / P;
    double part[P] = {};
    int64_t k = threadIdx.x;
    for (; k + (UNROLL - 1) * THREADS < packs; k += UNROLL * THREADS) {
      pack v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) v[u] = p[k + u * THREADS];
#pragma unroll
      for (int u = 0; u < UNROLL; u++)
        for (int j = 0; j < P; j++) part[j] += square(rfi_widen(v[u].x[j]));
    }
    for (; k < packs; k += THREADS)
      for (int j = 0; j < P; j++) part[j] += square(rfi_widen(p[k].x[j]));
    for (int j = 0; j < P; j++) sum += part[j];
    i = packs * P;
  }
  for (i += threadIdx.x; i < n; i += THREADS) sum += square(rfi_widen(x[i]));
  return sum;
}

/* Sum over a block of up to 1024 threads, in a fixed order; each thread gets it. */
static __device__ double block_sum(double x) {
  __shared__ double part[32];
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < (int)blockDim.x / 32; w++) x += part[w];
  return x;
}

template <int N>
static __global__ void __launch_bounds__(THREADS) norm_chunks(const __grid_constant__ gradients<N> all, double *sums) {
  const int64_t chunk = all.g[0].first + blockIdx.x;
  const int k = gradient_of(all, chunk);
  const gradient g = all.g[k];
  const int64_t begin = (chunk - g.first) * CHUNK, n = g.n - begin < CHUNK ? g.n - begin : CHUNK;
  double sum;
  switch (all.dtype[k]) {
    case RFR_BF16: sum = squares((const rfi_bf16 *)g.data + begin, n); break;
    case RFR_F16: sum = squares((const rfi_f16 *)g.data + begin, n); break;
    default: sum = squares((const float *)g.data + begin, n);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[chunk] = sum;
}

static __device__ void total(const double *sums, int64_t chunks, float *norm, int32_t *skip) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < chunks; i += FINISH) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x > 0) return;
  const float root = (float)sqrt(sum);
  if (norm) *norm = root;
  if (skip) *skip = !isfinite(root);
}

/* Block 0 computes the norm in the last launch. In the other blocks each warp checks one gradient. The f64 square of a
 * nonzero f32 is not zero, so a sum is zero only if all elements are zero. */
template <int N>
static __global__ void __launch_bounds__(FINISH)
    norm_finish(const __grid_constant__ gradients<N> all, const double *sums, bool last, float *norm, int32_t *skip,
                int32_t *zeros) {
  if (blockIdx.x == 0) {
    if (last) total(sums, all.end, norm, skip);
    return;
  }
  const int k = ((int)blockIdx.x - 1) * (FINISH / 32) + (int)threadIdx.x / 32;
  if (k >= all.n) return;
  const int64_t end = k + 1 < all.n ? all.g[k + 1].first : all.end;
  bool zero = true;
  for (int64_t i = all.g[k].first + (threadIdx.x & 31); i < end; i += 32) zero = sums[i] == 0 && zero;
  zero = __all_sync(0xffffffffu, zero);
  if ((threadIdx.x & 31) == 0 && zeros[k] >= 0 && zeros[k] < INT32_MAX) zeros[k] = zero ? zeros[k] + 1 : -1;
}

/* One warp per gradient adds its chunks in a fixed order. */
template <int N>
static __global__ void __launch_bounds__(FINISH)
    squares_finish(const __grid_constant__ gradients<N> all, const double *sums, double *squares) {
  const int k = (int)blockIdx.x * (FINISH / 32) + (int)threadIdx.x / 32;
  if (k >= all.n) return;
  const int64_t end = k + 1 < all.n ? all.g[k + 1].first : all.end;
  double sum = 0;
  for (int64_t i = all.g[k].first + (threadIdx.x & 31); i < end; i += 32) sum += sums[i];
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if ((threadIdx.x & 31) == 0) squares[k] = sum;
}

/* One block. A gradient's parts are added in rank order. */
static __global__ void __launch_bounds__(FINISH)
    norm_of_squares(const double *squares, int64_t ranks, int64_t n, float *norm, int32_t *skip, int32_t *zeros) {
  double sum = 0;
  for (int64_t k = threadIdx.x; k < n; k += FINISH) {
    double own = 0;
    for (int64_t r = 0; r < ranks; r++) own += squares[r * n + k];
    if (zeros && zeros[k] >= 0 && zeros[k] < INT32_MAX) zeros[k] = own == 0 ? zeros[k] + 1 : -1;
    sum += own;
  }
  sum = block_sum(sum);
  if (threadIdx.x > 0) return;
  const float root = (float)sqrt(sum);
  if (norm) *norm = root;
  if (skip) *skip = !isfinite(root);
}

/* The first gradient among the operands: grad_norm has `zeros` before it, grad_squares nothing. */
static int first_gradient(const rfr_call *c) { return c->n_out > 1; }

static int64_t all_chunks(const rfr_call *c) {
  int64_t chunks = 0;
  for (int i = first_gradient(c); i < c->n_in; i++) chunks += rfi_blocks(rfi_elements(&c->in[i]), CHUNK);
  return chunks;
}

static size_t norm_workspace(const rfr_call *c) { return (size_t)all_chunks(c) * sizeof(double); }

/* Lists operands from `begin` on, at most N, with chunks numbered from `first` on. */
template <int N> static gradients<N> gather(const rfr_call *c, int begin, int64_t first) {
  gradients<N> all;
  all.n = 0;
  all.g[0].first = all.end = first;
  for (int i = begin; i < c->n_in && all.n < N; i++, all.n++) {
    const int64_t n = rfi_elements(&c->in[i]);
    all.g[all.n] = gradient{c->in[i].data, n, all.end};
    all.dtype[all.n] = (uint8_t)c->in[i].type.dtype;
    all.end += rfi_blocks(n, CHUNK);
  }
  return all;
}

/* Launches kernels for up to N gradients each; returns the first chunk after them. */
template <int N> static int64_t norm_launch(const rfr_call *c, int begin, int64_t first) {
  const gradients<N> all = gather<N>(c, begin, first);
  const bool last = begin + all.n >= c->n_in;
  double *sums = (double *)c->workspace;
  int32_t *zeros = c->out[2].data ? (int32_t *)c->out[2].data + (begin - 1) : NULL;
  const unsigned blocks = 1 + (zeros ? (unsigned)rfi_blocks(all.n, FINISH / 32) : 0);
  if (all.end > first) norm_chunks<N><<<(unsigned)(all.end - first), THREADS, 0, rfi_stream(c)>>>(all, sums);
  if (zeros || last)
    norm_finish<N><<<blocks, FINISH, 0, rfi_stream(c)>>>(all, sums, last, (float *)c->out[0].data,
                                                         (int32_t *)c->out[1].data, zeros);
  return all.end;
}

static rfr_status norm_run(const rfr_call *c) {
  int begin = 1;
  int64_t first = 0;
  do {
    const bool few = c->n_in - begin <= FEW;
    first = few ? norm_launch<FEW>(c, begin, first) : norm_launch<MOST>(c, begin, first);
    begin += few ? FEW : MOST;
  } while (begin < c->n_in);
  return rfi_cuda_launched("grad_norm");
}

template <int N> static int64_t squares_launch(const rfr_call *c, int begin, int64_t first) {
  const gradients<N> all = gather<N>(c, begin, first);
  double *sums = (double *)c->workspace;
  if (all.end > first) norm_chunks<N><<<(unsigned)(all.end - first), THREADS, 0, rfi_stream(c)>>>(all, sums);
  squares_finish<N><<<(unsigned)rfi_blocks(all.n, FINISH / 32), FINISH, 0, rfi_stream(c)>>>(
      all, sums, (double *)c->out[0].data + begin);
  return all.end;
}

static rfr_status squares_run(const rfr_call *c) {
  int64_t first = 0;
  for (int begin = 0; begin < c->n_in;) {
    const bool few = c->n_in - begin <= FEW;
    first = few ? squares_launch<FEW>(c, begin, first) : squares_launch<MOST>(c, begin, first);
    begin += few ? FEW : MOST;
  }
  return rfi_cuda_launched("grad_squares");
}

static rfr_status norm_of_squares_run(const rfr_call *c) {
  const int64_t ranks = c->attr[0].i;
  norm_of_squares<<<1, FINISH, 0, rfi_stream(c)>>>((const double *)c->in[1].data, ranks,
                                                   c->in[1].type.shape[0] / ranks, (float *)c->out[0].data,
                                                   (int32_t *)c->out[1].data, (int32_t *)c->out[2].data);
  return rfi_cuda_launched("norm_of_squares");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(lr_schedule) = {lr_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(grad_norm) = {norm_run, norm_workspace};
extern "C" const rfi_cuda_kernel RFI_CUDA(grad_squares) = {squares_run, norm_workspace};
extern "C" const rfi_cuda_kernel RFI_CUDA(norm_of_squares) = {norm_of_squares_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(clip_scale) = {clip_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(loss_scale) = {scale_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(loss_scale_end) = {scale_end_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(skip_bad) = {skip_bad_run, skip_bad_workspace};
extern "C" const rfi_cuda_kernel RFI_CUDA(step_end) = {step_end_run, NULL};
