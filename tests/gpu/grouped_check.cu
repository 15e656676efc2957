/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped GEMMs of sm_90 against f64, on a GPU, without the library:
 *
 *   cmake --build build/release --target grouped_check && build/release/grouped_check [check|delays|swiglu|time]
 *
 * check: random group sizes, empty groups, all rows in one group, rows after the last group (NaN in the operands):
 * relative L2 errors, zeros after the last group, no write outside the result, bitwise equal in 20 runs. Separate
 * weights, more than fit into one launch too, and one GEMM per group are bitwise equal to one call with all groups,
 * also when added to subnormal numbers. Large ones, 200 times, are bitwise equal to the first run. swiglu: GEMMs with a
 * fused SwiGLU are bitwise equal to the two ops, in 300 runs with delays; and times of both. delays: the same kernels
 * with random delays before barriers and copies, in all warp roles: 1,000 runs are bitwise equal to the one without
 * delays. time: TFLOP/s of forward, dgrad, wgrad and wgrad added to f32, with even groups; skewed groups that begin at
 * multiples of 8 rows; the same beginning at any row, and how much longer that takes; every second group empty; all
 * rows in one group. One line per case; the exit code is 1 if any line says BAD.
 */
#include <algorithm>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "backend/cuda/kernels.cuh"
#include "check.cuh"
#include "ops/grouped/grouped_cuda.h"
#include "refrain/ops.h"

static int sms;

static uint64_t state = 1;
static double uniform() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return ((state >> 11) + 0.5) / 9007199254740992.0;
}
static int64_t below(int64_t n) { return (int64_t)(uniform() * (double)n); }

enum { THREADS = 256 };

/* Normal numbers that depend on the index; NaN from index `from` on. */
template <typename T> static __global__ void draw(T *x, int64_t n, int64_t from, uint32_t seed) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    uint64_t h = ((uint64_t)i + 1) * 0x9E3779B97F4A7C15ull ^ seed * 0xD1B54A32D192ED03ull;
    h = (h ^ h >> 32) * 0xD6E8FEB86659FD93ull;
    h = (h ^ h >> 32) * 0xD6E8FEB86659FD93ull;
    const float u = ((h >> 40) + 0.5f) / 16777216.0f, v = (uint32_t)(h & 0xffffff) / 16777216.0f;
    x[i] = i < from ? rfi_narrow<T>(sqrtf(-2 * logf(u)) * cosf(6.2831853f * v)) : rfi_narrow<T>(NAN);
  }
}

struct reference_args {
  rfi_grouped p;
  double *y;
};
template <typename T, typename O> static __global__ void reference(reference_args r) {
  const rfi_grouped &p = r.p;
  const bool wgrad = p.kind == RFI_GROUPED_NT;
  const T *a = (const T *)p.a, *b = (const T *)p.b;
  const int64_t columns = p.kind == RFI_GROUPED_TN ? p.N : p.K, n = (wgrad ? p.groups * p.N : p.rows) * columns;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    const int64_t row = i / columns, c = i % columns;
    double sum = 0;
    if (wgrad) {
      const int64_t g = row / p.N, m = row % p.N;
      for (int64_t k = p.offsets[g]; k < p.offsets[g + 1]; k++)
        sum += (double)rfi_widen(a[k * p.N + m]) * (double)rfi_widen(b[k * p.K + c]);
      if (p.accumulate) sum += 1;
    } else {
      int64_t g = 0;
      while (g < p.groups && row >= p.offsets[g + 1]) g++;
      if (g < p.groups) {
        const int64_t depth = p.kind == RFI_GROUPED_TN ? p.K : p.N;
        for (int64_t k = 0; k < depth; k++)
          sum += (double)rfi_widen(a[row * depth + k]) *
                 (double)rfi_widen(p.kind == RFI_GROUPED_TN ? b[(g * p.N + c) * p.K + k] : b[(g * p.N + k) * p.K + c]);
        if (p.bias)
          sum +=
              (double)((const float *)p.bias)[g * columns + c] * (p.scale ? (double)((const float *)p.scale)[row] : 1);
      }
    }
    r.y[i] = sum;
  }
}
template <typename O> static __global__ void ones(O *y, int64_t n) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    y[i] = rfi_narrow<O>(1);
}

static std::vector<int32_t> offsets_of(const std::vector<int64_t> &sizes) {
  std::vector<int32_t> o(1, 0);
  for (int64_t s : sizes) o.push_back(o.back() + (int32_t)s);
  return o;
}

static const char *const kinds[] = {"forward", "dgrad", "wgrad", "onto f32"};

template <typename T, typename O>
static void check_one(const std::vector<int64_t> &sizes, int64_t unused, int64_t N, int64_t K, bool accumulate,
                      int bias) {
  const std::vector<int32_t> host = offsets_of(sizes);
  const int64_t G = (int64_t)sizes.size(), used = host.back(), rows = used + unused;
  buffer x(rows * K * 2 + 16), dy(rows * N * 2 + 16), w(G * N * K * 2), offsets((G + 1) * 4), b(G * N * 4),
      s(rows * 4 + 4);
  draw<T><<<1024, THREADS>>>((T *)x.data, rows * K, used * K, 1);
  draw<T><<<1024, THREADS>>>((T *)dy.data, rows * N, used * N, 2);
  draw<T><<<1024, THREADS>>>((T *)w.data, G * N * K, G * N * K, 3);
  draw<float><<<1024, THREADS>>>((float *)b.data, G * N, G * N, 4);
  draw<float><<<1024, THREADS>>>((float *)s.data, rows, used, 5);
  CUDA(cudaMemcpy(offsets.data, host.data(), (G + 1) * 4, cudaMemcpyHostToDevice));
  buffer taken(RFI_GROUPED_TAKEN);
  for (int kind = 0; kind < 3; kind++) {
    const int64_t n = kind == 0 ? rows * N : kind == 1 ? rows * K : G * N * K;
    if (n == 0) continue;
    buffer y(n * sizeof(O)), want(n * 8);
    rfi_grouped p = {};
    p.kind = (rfi_grouped_kind)kind;
    p.taken = (int32_t *)taken.data;
    p.groups = p.of = G, p.rows = rows, p.N = N, p.K = K, p.offsets = (const int32_t *)offsets.data;
    p.a = kind == 0 ? x.data : dy.data, p.b = kind == 2 ? x.data : w.data, p.y = y.data;
    p.a_row = kind == 0 ? K : N, p.b_row = K, p.b_group = N * K;
    p.a_dtype = p.b_dtype = __is_same(T, rfi_bf16) ? RFR_BF16 : RFR_F16;
    p.y_dtype = sizeof(O) == 4 ? RFR_F32 : p.a_dtype;
    if (kind == 0 && bias) p.bias = b.data, p.bias_dtype = RFR_F32, p.bias_group = N;
    if (kind == 0 && bias > 1) p.scale = s.data, p.scale_dtype = RFR_F32;
    p.accumulate = kind == 2 && accumulate;
    reference<T, O><<<2048, THREADS>>>({p, (double *)want.data});
    std::vector<O> got(n), again(n);
    std::vector<double> exact(n);
    int changed = 0;
    for (int time = 0; time < 20; time++) {
      if (p.accumulate) ones<O><<<1024, THREADS>>>((O *)y.data, n);
      else CUDA(cudaMemset(y.data, 0xff, n * sizeof(O)));
      if (rfi_grouped_sm90(&p, sms, 0) != RFR_OK) exit(1);
      CUDA(cudaMemcpy(again.data(), y.data, n * sizeof(O), cudaMemcpyDeviceToHost));
      if (time == 0) got = again;
      changed += memcmp(got.data(), again.data(), n * sizeof(O)) != 0;
    }
    CUDA(cudaMemcpy(exact.data(), want.data, n * 8, cudaMemcpyDeviceToHost));
    double error = 0, norm = 0;
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) {
      const double e = (double)(float)got[i] - exact[i];
      if (!(fabs(e) < 1e30)) wrong++;
      if (exact[i] == 0 && (float)got[i] != 0) wrong++;
      error += e * e, norm += exact[i] * exact[i];
    }
    error = norm > 0 ? sqrt(error / norm) : sqrt(error);
    const bool bad = wrong || changed || !y.guard_intact() ||
                     !(error < (sizeof(O) == 4          ? 2e-5
                                : p.a_dtype == RFR_BF16 ? 4e-3
                                                        : 5e-4));
    failures += bad;
    printf("%s %s to %s, %lld groups, %lld of %lld rows, N %lld K %lld%s%s: %.1e%s\n", kinds[kind],
           p.a_dtype == RFR_BF16 ? "bf16" : "f16", sizeof(O) == 4 ? "f32" : "same", (long long)G, (long long)used,
           (long long)rows, (long long)N, (long long)K, p.accumulate ? ", onto" : "",
           p.scale  ? ", bias and scale"
           : p.bias ? ", bias"
                    : "",
           error, bad ? " BAD" : "");
    if (bad) printf("  wrong %lld, changed %d, outside %d\n", (long long)wrong, changed, !y.guard_intact());
  }
}

static void check(void) {
  static const int64_t widths[] = {8, 24, 104, 128, 136, 256, 264, 512, 1000};
  static const int64_t counts[] = {1, 2, 3, 8, 65, 256};
  for (int i = 0; i < 40; i++) {
    const int64_t G = counts[below(6)], N = widths[below(9)], K = widths[below(9)];
    std::vector<int64_t> sizes(G, 0);
    const int form = (int)below(4);
    for (int64_t &s : sizes) s = form == 0 ? 64 * below(5) : below(2000 / G + 20);
    if (form == 1)
      for (int64_t &s : sizes) s = uniform() < 0.5 ? 0 : s;
    if (form == 2) {
      std::fill(sizes.begin(), sizes.end(), 0);
      sizes[below(G)] = below(1500);
    }
    const int64_t unused = below(3) * below(200);
    const bool onto = below(2) != 0;
    const int bias = (int)below(3);
    if (i % 3 == 0) check_one<rfi_f16, rfi_f16>(sizes, unused, N, K, onto, bias);
    else if (i % 3 == 1) check_one<rfi_bf16, rfi_bf16>(sizes, unused, N, K, onto, bias);
    else check_one<rfi_bf16, float>(sizes, unused, N, K, onto, bias);
  }
}

/* ---- one GEMM per group, and separate weights ---- */

template <typename O> static __global__ void tiny(O *y, int64_t n) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    y[i] = rfi_narrow<O>(i % 3 == 0 ? 1e-40f : i % 3 == 1 ? 1e-3f : 0.0f); /* a third of them are subnormal */
}

static void same(const char *what, int64_t G, const char *a, const char *b, int64_t bytes) {
  std::vector<char> x(bytes), y(bytes);
  CUDA(cudaMemcpy(x.data(), a, bytes, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(y.data(), b, bytes, cudaMemcpyDeviceToHost));
  const bool bad = memcmp(x.data(), y.data(), bytes) != 0;
  failures += bad;
  printf("%s, %lld groups: %s\n", what, (long long)G, bad ? "other bits BAD" : "the same bits");
}

/* Groups of `each` rows on average, some of them empty. */
static void check_separate(int64_t G, int64_t each, int64_t N, int64_t K) {
  std::vector<int64_t> sizes(G);
  for (int64_t g = 0; g < G; g++) sizes[g] = g % 4 == 3 ? 0 : each * 4 / 3;
  const std::vector<int32_t> host = offsets_of(sizes);
  const int64_t rows = host.back() + 40;
  buffer x(rows * K * 2), dy(rows * N * 2), w(G * N * K * 2), offsets((G + 1) * 4), b(G * N * 4), s(rows * 4);
  buffer y(rows * std::max(N, K) * 2), y2(rows * std::max(N, K) * 2), dw(G * N * K * 4), dw2(G * N * K * 4);
  buffer taken(RFI_GROUPED_TAKEN);
  draw<rfi_bf16><<<1024, THREADS>>>((rfi_bf16 *)x.data, rows * K, host.back() * K, 1);
  draw<rfi_bf16><<<1024, THREADS>>>((rfi_bf16 *)dy.data, rows * N, host.back() * N, 2);
  draw<rfi_bf16><<<1024, THREADS>>>((rfi_bf16 *)w.data, G * N * K, G * N * K, 3);
  draw<float><<<1024, THREADS>>>((float *)b.data, G * N, G * N, 4);
  draw<float><<<1024, THREADS>>>((float *)s.data, rows, host.back(), 5);
  CUDA(cudaMemcpy(offsets.data, host.data(), (G + 1) * 4, cudaMemcpyHostToDevice));
  std::vector<rfr_arg> ws(G);
  for (int64_t g = 0; g < G; g++) ws[g].data = w.data + g * N * K * 2;
  rfi_grouped p = {};
  p.taken = (int32_t *)taken.data;
  p.groups = p.of = G, p.rows = rows, p.N = N, p.K = K, p.offsets = (const int32_t *)offsets.data;
  p.b_row = K, p.b_group = N * K, p.a_dtype = p.b_dtype = p.y_dtype = RFR_BF16;
  for (int kind = 0; kind < 2; kind++) {
    p.kind = kind == 0 ? RFI_GROUPED_TN : RFI_GROUPED_NN, p.a = kind == 0 ? x.data : dy.data, p.a_row = kind ? N : K;
    p.bias = kind == 0 ? b.data : NULL, p.scale = kind == 0 ? s.data : NULL;
    p.bias_dtype = p.scale_dtype = RFR_F32, p.bias_group = N;
    rfi_grouped q = p;
    p.b = w.data, p.y = y.data, q.b = NULL, q.ws = ws.data(), q.y = y2.data;
    y.poison(), y2.poison();
    if (rfi_grouped_sm90(&p, sms, 0) != RFR_OK || rfi_grouped_sm90(&q, sms, 0) != RFR_OK) exit(1);
    same(kind == 0 ? "forward of separate weights" : "dgrad of separate weights", G, y.data, y2.data,
         rows * (kind == 0 ? N : K) * 2);
    failures += !y2.guard_intact();
  }
  p.kind = RFI_GROUPED_NT, p.a = dy.data, p.b = x.data, p.a_row = N, p.y_dtype = RFR_F32, p.accumulate = 1;
  p.bias = p.scale = NULL, p.y = dw.data;
  tiny<float><<<1024, THREADS>>>((float *)dw.data, G * N * K);
  tiny<float><<<1024, THREADS>>>((float *)dw2.data, G * N * K);
  if (rfi_grouped_sm90(&p, sms, 0) != RFR_OK) exit(1);
  for (int64_t g = 0; g < G; g++) {
    rfi_grouped q = p;
    q.groups = 1, q.offsets += g, q.y = dw2.data + g * N * K * 4;
    if (rfi_grouped_sm90(&q, sms, 0) != RFR_OK) exit(1);
  }
  same("wgrad group by group", G, dw.data, dw2.data, G * N * K * 4);
}

static void check_all_separate(void) {
  check_separate(3, 300, 264, 136); /* accumulated in registers, although one group has 1,200 rows */
  check_separate(4, 600, 136, 264); /* accumulated by TMA */
  check_separate(241, 20, 40, 72);
  check_separate(700, 9, 72, 136);
}

/* ---- repeated runs ---- */

static __global__ void count_different(const uint32_t *x, const uint32_t *y, int64_t n, unsigned long long *count) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    if (x[i] != y[i]) atomicAdd(count, 1ull);
}

typedef rfr_status product(const rfi_grouped *p, int sms, cudaStream_t stream);

/* Runs of `product` must be bitwise equal to one run of the library's kernel. */
template <typename O>
static void repeat(product *product, int runs, const char *what, const std::vector<int64_t> &sizes, int64_t unused,
                   int64_t N, int64_t K, rfi_grouped_kind kind, bool accumulate, bool separate) {
  const std::vector<int32_t> host = offsets_of(sizes);
  const int64_t G = (int64_t)sizes.size(), rows = host.back() + unused;
  const int64_t n = kind == RFI_GROUPED_TN ? rows * N : kind == RFI_GROUPED_NN ? rows * K : G * N * K;
  buffer x(rows * K * 2), dy(rows * N * 2), w(G * N * K * 2), offsets((G + 1) * 4), count(8);
  buffer first(n * sizeof(O)), y(n * sizeof(O));
  draw<rfi_bf16><<<1024, THREADS>>>((rfi_bf16 *)x.data, rows * K, host.back() * K, 1);
  draw<rfi_bf16><<<1024, THREADS>>>((rfi_bf16 *)dy.data, rows * N, host.back() * N, 2);
  draw<rfi_bf16><<<1024, THREADS>>>((rfi_bf16 *)w.data, G * N * K, G * N * K, 3);
  CUDA(cudaMemcpy(offsets.data, host.data(), (G + 1) * 4, cudaMemcpyHostToDevice));
  CUDA(cudaMemset(count.data, 0, 8));
  std::vector<rfr_arg> ws(G);
  for (int64_t g = 0; g < G; g++) ws[g].data = w.data + g * N * K * 2;
  buffer taken(RFI_GROUPED_TAKEN);
  rfi_grouped p = {};
  p.taken = (int32_t *)taken.data;
  p.kind = kind, p.groups = p.of = G, p.rows = rows, p.N = N, p.K = K, p.offsets = (const int32_t *)offsets.data;
  p.a = kind == RFI_GROUPED_TN ? x.data : dy.data, p.b = kind == RFI_GROUPED_NT ? x.data : w.data;
  if (separate) p.b = NULL, p.ws = ws.data();
  p.a_row = kind == RFI_GROUPED_TN ? K : N, p.b_row = K, p.b_group = N * K;
  p.a_dtype = p.b_dtype = RFR_BF16, p.y_dtype = sizeof(O) == 4 ? RFR_F32 : RFR_BF16;
  p.accumulate = accumulate;
  for (int run = -1; run < runs; run++) {
    buffer &to = run < 0 ? first : y;
    p.y = to.data;
    if (accumulate) ones<O><<<1024, THREADS>>>((O *)to.data, n);
    else CUDA(cudaMemsetAsync(to.data, 0xff, to.bytes));
    if ((run < 0 ? rfi_grouped_sm90 : product)(&p, sms, 0) != RFR_OK) exit(1);
    if (run >= 0)
      count_different<<<256, THREADS>>>((const uint32_t *)y.data, (const uint32_t *)first.data, (int64_t)y.bytes / 4,
                                        (unsigned long long *)count.data);
  }
  unsigned long long different;
  CUDA(cudaMemcpy(&different, count.data, 8, cudaMemcpyDeviceToHost));
  const bool bad = different || !y.guard_intact() || !first.guard_intact();
  failures += bad;
  printf("%s: %d runs, %llu other words%s\n", what, runs, different, bad ? " BAD" : "");
  fflush(stdout);
}

/* As many tiles as in real layers, accumulated in registers: the blocks of a cluster often work on distant tiles. */
static void check_many(void) {
  const std::vector<int64_t> even(256, 256), odd(256, 200);
  repeat<float>(rfi_grouped_sm90, 200, "wgrad onto f32", even, 0, 512, 2048, RFI_GROUPED_NT, true, false);
  repeat<rfi_bf16>(rfi_grouped_sm90, 200, "wgrad onto bf16", even, 0, 512, 2048, RFI_GROUPED_NT, true, false);
  repeat<rfi_bf16>(rfi_grouped_sm90, 200, "forward", odd, 0, 2048, 512, RFI_GROUPED_TN, false, false);
}

/* The library's kernel with random delays, compiled by cmake/cuda.cmake. */
extern "C" product rfi_grouped_delayed;

static void check_delays(void) {
  const std::vector<int64_t> uneven = {200, 0, 7, 131, 64, 385}, even = {256, 256, 256, 256};
  const auto delays = [](const char *what, const std::vector<int64_t> &sizes, int64_t unused, int64_t N, int64_t K,
                         rfi_grouped_kind kind, bool accumulate, bool separate) {
    printf("delays, ");
    repeat<rfi_bf16>(rfi_grouped_delayed, 1000, what, sizes, unused, N, K, kind, accumulate, separate);
  };
  delays("forward", uneven, 30, 520, 712, RFI_GROUPED_TN, false, false);
  delays("forward, separate weights", uneven, 30, 520, 712, RFI_GROUPED_TN, false, true);
  delays("dgrad", uneven, 30, 520, 712, RFI_GROUPED_NN, false, false);
  delays("wgrad", uneven, 30, 520, 712, RFI_GROUPED_NT, false, false);
  delays("wgrad onto", uneven, 30, 520, 712, RFI_GROUPED_NT, true, false);
  delays("forward, even", even, 0, 512, 512, RFI_GROUPED_TN, false, false);
  printf("delays, ");
  repeat<float>(rfi_grouped_delayed, 1000, "wgrad in f32", even, 0, 256, 512, RFI_GROUPED_NT, true, false);
}

/* ---- times ---- */

enum form { EVEN, AT_8S, ANYWHERE, HALF_EMPTY, ALL_IN_ONE, FORMS };
static const char *const forms[] = {"even", "skewed, at 8s", "the same, anywhere", "half empty", "all in one"};

/* How groups begin; the two skewed forms differ by less than 8 rows. */
static std::vector<int32_t> offsets_of(int64_t rows, int64_t G, int form, const std::vector<double> &weight) {
  std::vector<int32_t> o(1, 0);
  double sum = 0, before = 0;
  for (double w : weight) sum += w;
  for (int64_t g = 1; g < G; g++) {
    before += weight[g - 1];
    const int64_t skewed = (int64_t)(before / sum * (double)rows);
    o.push_back((int32_t)(form == EVEN         ? g * (rows / G)
                          : form == HALF_EMPTY ? g / 2 * (rows / (G / 2))
                          : form == ALL_IN_ONE ? (g > G / 2) * rows
                          : form == AT_8S      ? skewed / 8 * 8
                                               : skewed | 1));
  }
  o.push_back((int32_t)rows);
  return o;
}

/* Milliseconds of n GEMMs. */
static float time_of(const rfi_grouped &p, int n) {
  static cudaEvent_t begin, end;
  float ms;
  if (!begin) {
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
  }
  CUDA(cudaEventRecord(begin));
  for (int i = 0; i < n; i++)
    if (rfi_grouped_sm90(&p, sms, 0) != RFR_OK) exit(1);
  CUDA(cudaEventRecord(end));
  CUDA(cudaEventSynchronize(end));
  CUDA(cudaEventElapsedTime(&ms, begin, end));
  return ms;
}

static float median(std::vector<float> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

/* Forms alternate, forward and backward, so that changes of the device's temperature and clock affect all of them. */
static void time_shape(int64_t G, int64_t rows, int64_t K, int64_t N) {
  enum { KINDS = 4, ROUNDS = 10, EACH = 4 };
  buffer x(rows * K * 2), dy(rows * N * 2), w(G * N * K * 2), y(rows * std::max(N, K) * 2), dw(G * N * K * 4);
  buffer offsets((G + 1) * 4 * FORMS), taken(RFI_GROUPED_TAKEN);
  draw<rfi_bf16><<<4096, THREADS>>>((rfi_bf16 *)x.data, rows * K, rows * K, 1);
  draw<rfi_bf16><<<4096, THREADS>>>((rfi_bf16 *)dy.data, rows * N, rows * N, 2);
  draw<rfi_bf16><<<4096, THREADS>>>((rfi_bf16 *)w.data, G * N * K, G * N * K, 3);
  std::vector<double> weight(G);
  for (double &each : weight) each = -log(uniform() * uniform());
  for (int form = 0; form < FORMS; form++)
    CUDA(cudaMemcpy(offsets.data + form * (G + 1) * 4, offsets_of(rows, G, form, weight).data(), (G + 1) * 4,
                    cudaMemcpyHostToDevice));
  float ms[FORMS][KINDS];
  for (int kind = 0; kind < KINDS; kind++) {
    std::vector<float> times[FORMS];
    rfi_grouped p = {};
    p.kind = (rfi_grouped_kind)std::min(kind, 2);
    p.groups = p.of = G, p.rows = rows, p.N = N, p.K = K;
    p.a = kind == 0 ? x.data : dy.data, p.b = kind >= 2 ? x.data : w.data, p.y = kind >= 2 ? dw.data : y.data;
    p.a_row = kind == 0 ? K : N, p.b_row = K, p.b_group = N * K;
    p.a_dtype = p.b_dtype = p.y_dtype = RFR_BF16;
    p.taken = (int32_t *)taken.data;
    if (kind == 3) {
      CUDA(cudaMemset(dw.data, 0, dw.bytes));
      p.y_dtype = RFR_F32, p.accumulate = 1;
    }
    float warm = 0;
    for (int round = 0; round < ROUNDS; round += warm >= 300)
      for (int i = 0; i < FORMS; i++) {
        const int form = round % 2 ? FORMS - 1 - i : i;
        p.offsets = (const int32_t *)offsets.data + form * (G + 1);
        const float t = time_of(p, EACH);
        if (warm < 300) warm += t;
        else times[form].push_back(t / EACH);
      }
    for (int form = 0; form < FORMS; form++) ms[form][kind] = median(times[form]);
  }
  printf("%lld groups, %lld rows, K %lld, N %lld\n", (long long)G, (long long)rows, (long long)K, (long long)N);
  for (int form = 0; form < FORMS; form++) {
    printf("  %-20s", forms[form]);
    for (int kind = 0; kind < KINDS; kind++) {
      printf(" %s %.0f", kinds[kind], 2.0 * (double)rows * (double)N * (double)K / ms[form][kind] / 1e9);
      if (form == ANYWHERE) printf(" (%+.1f %%)", 100 * (ms[form][kind] / ms[AT_8S][kind] - 1));
    }
    printf("\n");
  }
  fflush(stdout);
}

static void time_all(void) {
  static const int64_t shapes[][4] = {{4, 32768, 7168, 4096},  {4, 32768, 2048, 7168},    {8, 16384, 4096, 14336},
                                      {8, 16384, 14336, 4096}, {128, 131072, 2048, 1536}, {128, 131072, 768, 2048},
                                      {64, 49152, 2048, 2816}, {64, 49152, 1408, 2048},   {256, 65536, 7168, 512}};
  for (const auto &s : shapes) time_shape(s[0], s[1], s[2], s[3]);
}

/* ---- SwiGLU ---- */

extern "C" const rfi_cuda_kernel RFI_CUDA(swiglu_weighted);

/* Experts up to the second GEMM, in bf16; two sets of all buffers. */
struct experts {
  int64_t G, rows, C, I;
  buffer x[2], y[2], h[2], weight, w, offsets, taken;
  experts(const std::vector<int64_t> &sizes, int64_t unused, int64_t C, int64_t I)
      : G((int64_t)sizes.size()), rows(offsets_of(sizes).back() + unused), C(C),
        I(I), x{buffer(rows * C * 2), buffer(rows * C * 2)}, y{buffer(rows * I * 4), buffer(rows * I * 4)},
        h{buffer(rows * I * 2), buffer(rows * I * 2)}, weight(rows * 4), w(G * 2 * I * C * 2), offsets((G + 1) * 4),
        taken(RFI_GROUPED_TAKEN) {
    const std::vector<int32_t> host = offsets_of(sizes);
    CUDA(cudaMemcpy(offsets.data, host.data(), offsets.bytes, cudaMemcpyHostToDevice));
    for (int i = 0; i < 2; i++) draw<rfi_bf16><<<4096, THREADS>>>((rfi_bf16 *)x[i].data, rows * C, host.back() * C, 1);
    draw<rfi_bf16><<<4096, THREADS>>>((rfi_bf16 *)w.data, G * 2 * I * C, G * 2 * I * C, 2);
    draw<float><<<1024, THREADS>>>((float *)weight.data, rows, rows, 3);
  }
  rfi_grouped of(rfi_grouped_kind kind, int i) const {
    rfi_grouped p = {};
    p.kind = kind, p.taken = (int32_t *)taken.data, p.groups = p.of = G, p.rows = rows, p.N = 2 * I, p.K = C;
    p.offsets = (const int32_t *)offsets.data, p.a = x[i].data, p.b = w.data, p.y = y[i].data;
    p.a_row = p.b_row = C, p.b_group = 2 * I * C;
    p.a_dtype = p.b_dtype = p.y_dtype = RFR_BF16;
    if (kind == RFI_GROUPED_SWIGLU) p.act = h[i].data, p.weight = weight.data, p.weight_dtype = RFR_F32;
    return p;
  }
  void multiply(rfi_grouped_kind kind, int i, bool delayed = false) const {
    const rfi_grouped p = of(kind, i);
    if ((delayed ? rfi_grouped_delayed : rfi_grouped_sm90)(&p, sms, 0) != RFR_OK) exit(1);
  }
  /* The separate op. */
  void activate(int i) const {
    rfr_arg in[3] = {}, out = {};
    for (int k = 0; k < 2; k++) {
      in[k].type.dtype = RFR_BF16, in[k].type.rank = 2, in[k].type.shape[0] = rows, in[k].type.shape[1] = I;
      in[k].stride[0] = 2 * I, in[k].stride[1] = 1, in[k].data = y[i].data + 2 * k * I;
    }
    out = in[0], out.stride[0] = I, out.data = h[i].data;
    in[2].type.dtype = RFR_F32, in[2].type.rank = 1, in[2].type.shape[0] = rows, in[2].stride[0] = 1;
    in[2].data = weight.data;
    rfr_call call = {};
    call.n_in = 3, call.n_out = 1, call.in = in, call.out = &out;
    if (RFI_CUDA(swiglu_weighted).run(&call) != RFR_OK) exit(1);
  }
};

static unsigned long long different(const buffer &a, const buffer &b) {
  static buffer count(8);
  unsigned long long n;
  CUDA(cudaMemset(count.data, 0, 8));
  count_different<<<1024, THREADS>>>((const uint32_t *)a.data, (const uint32_t *)b.data, (int64_t)a.bytes / 4,
                                     (unsigned long long *)count.data);
  CUDA(cudaMemcpy(&n, count.data, 8, cudaMemcpyDeviceToHost));
  return n;
}

static void swiglu_bits(const std::vector<int64_t> &sizes, int64_t unused, int64_t C, int64_t I, int runs,
                        bool delayed) {
  const experts e(sizes, unused, C, I);
  unsigned long long n[3] = {0, 0, 0};
  if (e.rows == 0) return;
  e.multiply(RFI_GROUPED_TN, 0), e.activate(0);
  for (int run = 0; run < runs; run++) {
    CUDA(cudaMemset(e.y[1].data, 0xff, e.y[1].bytes));
    CUDA(cudaMemset(e.h[1].data, 0xff, e.h[1].bytes));
    e.multiply(RFI_GROUPED_SWIGLU, 1, delayed);
    n[0] += different(e.y[0], e.y[1]), n[1] += different(e.h[0], e.h[1]);
    rfi_grouped p = e.of(RFI_GROUPED_SWIGLU, 1);
    p.y = NULL; /* gate and up are unused */
    CUDA(cudaMemset(e.h[1].data, 0xff, e.h[1].bytes));
    if ((delayed ? rfi_grouped_delayed : rfi_grouped_sm90)(&p, sms, 0) != RFR_OK) exit(1);
    n[2] += different(e.h[0], e.h[1]);
  }
  const bool bad = n[0] || n[1] || n[2] || !e.y[1].guard_intact() || !e.h[1].guard_intact();
  failures += bad;
  printf("swiglu, %lld groups, %lld rows, C %lld, I %lld, %d runs%s: others than of two ops are %llu words of gate and "
         "up, %llu of h, %llu of h alone%s\n",
         (long long)e.G, (long long)e.rows, (long long)C, (long long)I, runs, delayed ? " with delays" : "", n[0], n[1],
         n[2], bad ? " BAD" : "");
  fflush(stdout);
}

/* Runs the forms alternately. */
static void swiglu_time(const std::vector<int64_t> &sizes, int64_t C, int64_t I, const char *form) {
  enum { KINDS = 3, CALLS = 8, ROUNDS = 25 };
  static const char *const what[KINDS] = {"product", "product and swiglu", "one op"};
  const experts e(sizes, 0, C, I);
  cudaEvent_t begin, end;
  CUDA(cudaEventCreate(&begin));
  CUDA(cudaEventCreate(&end));
  std::vector<float> times[KINDS];
  float warm = 0;
  for (int round = 0; round < ROUNDS; round += warm >= 1000)
    for (int k = 0; k < KINDS; k++) {
      float ms;
      CUDA(cudaEventRecord(begin));
      for (int i = 0; i < CALLS; i++) {
        e.multiply(k == 2 ? RFI_GROUPED_SWIGLU : RFI_GROUPED_TN, i % 2);
        if (k == 1) e.activate(i % 2);
      }
      CUDA(cudaEventRecord(end));
      CUDA(cudaEventSynchronize(end));
      CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (warm < 1000) warm += ms;
      else times[k].push_back(ms / CALLS);
    }
  printf("swiglu, %lld groups, %lld rows, C %lld, I %lld, %s, ms:", (long long)e.G, (long long)e.rows, (long long)C,
         (long long)I, form);
  for (int k = 0; k < KINDS; k++) printf("%s %s %.4f", k ? "," : "", what[k], median(times[k]));
  printf("\n");
  fflush(stdout);
  CUDA(cudaEventDestroy(begin));
  CUDA(cudaEventDestroy(end));
}

static void check_swiglu(void) {
  static const int64_t widths[] = {8, 24, 64, 72, 128, 136, 200, 256, 264, 520, 768},
                       depths[] = {8, 64, 136, 520, 1032};
  static const int64_t counts[] = {1, 2, 3, 8, 65};
  for (int i = 0; i < 24; i++) {
    std::vector<int64_t> sizes(counts[below(5)]);
    for (int64_t &s : sizes)
      s = i % 3 == 0 ? 64 * below(5) : uniform() < 0.2 ? 0 : below(2000 / (int64_t)sizes.size() + 20);
    swiglu_bits(sizes, below(3) * below(200), depths[below(5)], widths[below(11)], 3, false);
  }
  for (int64_t I : {200, 520}) swiglu_bits({200, 0, 7, 131, 64, 385}, 30, 1160, I, 300, true);
  static const int64_t shapes[][4] = {{128, 131072, 2048, 768}, {8, 16384, 4096, 14336}};
  for (const auto &s : shapes) {
    std::vector<double> weight(s[0]);
    for (double &each : weight) each = -log(uniform() * uniform());
    for (int form : {EVEN, ANYWHERE}) {
      const std::vector<int32_t> offsets = offsets_of(s[1], s[0], form, weight);
      std::vector<int64_t> sizes;
      for (int64_t g = 0; g < s[0]; g++) sizes.push_back(offsets[g + 1] - offsets[g]);
      swiglu_bits(sizes, 0, s[2], s[3], 1, false);
      swiglu_time(sizes, s[2], s[3], form == EVEN ? "even" : "skewed");
    }
  }
}

int main(int argc, char **argv) {
  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  sms = device.multiProcessorCount;
  printf("%s, %d multiprocessors\n", device.name, sms);
  if (argc < 2 || strcmp(argv[1], "check") == 0) check(), check_all_separate(), check_many();
  if (argc < 2 || strcmp(argv[1], "delays") == 0) check_delays();
  if (argc < 2 || strcmp(argv[1], "swiglu") == 0) check_swiglu();
  if (argc < 2 || strcmp(argv[1], "time") == 0) time_all();
  printf("grouped: %s", failures ? "" : "all fine\n");
  if (failures) printf("%d checks BAD\n", failures);
  return failures != 0;
}
