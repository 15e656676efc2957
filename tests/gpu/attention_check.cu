/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention on tensor cores against f64 and against attention in f32 arithmetic, on a GPU, without the library:
 *
 *   cmake --build build/release --target attention_check && build/release/attention_check [check|delays|time]
 *
 * check: random shapes, documents, windows, caps: relative L2 errors, no write outside the results and the workspace,
 * bitwise equal in 20 runs, non-finite values affect only the rows that attend to them. delays: Hopper's kernels with
 * random delays before barriers and copies, in all warp roles: 1,000 runs are bitwise equal to one without delays.
 * time: TFLOP/s (4 GEMMs of 2 FLOP per head, row and visible key, and 10 in the backward). One line per case; the exit
 * code is 1 if any line says BAD.
 */
#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "check.cuh"
#include "ops/attention/attention_cuda.h"

/* The tested kernels; those of sm_90 only on such a device. */
struct variant {
  const char *name;
  int major;
  const rfi_cuda_kernel *forward, *backward;
  int most_d;
};
static const variant variants[] = {{"sm80", 8, &rfi_attention_sm80, &rfi_attention_sm80_bwd, 256},
                                   {"sm90", 9, &rfi_attention_sm90, &rfi_attention_sm90_bwd, 128}};
static rfi_cuda_info info;

/* ---- small kernels ---- */

static __device__ float uniform(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7fb5d329728ea185ull;
  x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44dull;
  return (float)((x ^ (x >> 33)) >> 40) * 0x1p-24f - 0.5f;
}

__global__ void fill_random(void *x, int64_t n, rfr_dtype dtype, uint64_t seed) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    const uint64_t at = (seed << 40) + (uint64_t)i * 3 + 1;
    const float y = 2 * (uniform(at) + uniform(at + 1) + uniform(at + 2)); /* variance 1 */
    if (dtype == RFR_BF16) ((__nv_bfloat16 *)x)[i] = __float2bfloat16_rn(y);
    else ((__half *)x)[i] = __float2half_rn(y);
  }
}

static __device__ double value(const void *x, int64_t i, rfr_dtype dtype) {
  return dtype == RFR_F32    ? ((const float *)x)[i]
         : dtype == RFR_BF16 ? __bfloat162float(((const __nv_bfloat16 *)x)[i])
                             : __half2float(((const __half *)x)[i]);
}

/* sums[0]: squared differences; [1]: squares of y; [2]: number of elements that differ and are not both finite. */
__global__ void compare(const void *x, const void *y, int64_t n, rfr_dtype dtype, double *sums) {
  double error = 0, size = 0, wrong = 0;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    const double a = value(x, i, dtype), b = value(y, i, dtype);
    if (a == b) {
      if (isfinite(b)) size += b * b;
    } else if (isfinite(a) && isfinite(b)) {
      error += (a - b) * (a - b);
      size += b * b;
    } else {
      wrong++;
    }
  }
  atomicAdd(&sums[0], error);
  atomicAdd(&sums[1], size);
  atomicAdd(&sums[2], wrong);
}

__global__ void count_different(const uint16_t *x, const uint16_t *y, int64_t n, unsigned long long *count) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    if (x[i] != y[i]) atomicAdd(count, 1ull);
}

/* ---- a case ---- */

struct shape {
  int T, H, Hk, D, causal, window;
  float cap;
  rfr_dtype dtype;
  std::vector<int32_t> offsets;
};

static rfr_arg arg_of(void *data, rfr_dtype dtype, std::vector<int64_t> dims, int64_t row) {
  rfr_arg a;
  memset(&a, 0, sizeof a);
  a.data = data;
  a.type.dtype = dtype;
  a.type.rank = (int)dims.size();
  int64_t stride = 1;
  for (int d = a.type.rank - 1; d >= 0; d--) {
    a.type.shape[d] = dims[(size_t)d];
    a.stride[d] = stride;
    stride *= dims[(size_t)d];
  }
  if (row) a.stride[0] = row;
  return a;
}

struct results {
  buffer o, lse, dq, dk, dv;
  explicit results(const shape &s)
      : o((size_t)s.T * s.H * s.D * 2), lse((size_t)s.T * s.H * 4), dq((size_t)s.T * s.H * s.D * 2),
        dk((size_t)s.T * s.Hk * s.D * 2), dv((size_t)s.T * s.Hk * s.D * 2) {}
  std::vector<buffer *> all() { return {&o, &lse, &dq, &dk, &dv}; }
};

struct test {
  shape s;
  int64_t row; /* index in the packed qkv */
  buffer qkv, dy, offsets;
  rfr_arg q, k, v, documents;
  rfr_attr attr[5];

  test(const shape &s_, uint64_t seed)
      : s(s_), row((int64_t)(s.H + 2 * s.Hk) * s.D), qkv((size_t)(s.T * row * 2)), dy((size_t)s.T * s.H * s.D * 2),
        offsets(s.offsets.size() * 4) {
    fill_random<<<1024, 256>>>(qkv.data, s.T * row, s.dtype, seed);
    fill_random<<<1024, 256>>>(dy.data, (int64_t)s.T * s.H * s.D, s.dtype, seed + 1);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpy(offsets.data, s.offsets.data(), s.offsets.size() * 4, cudaMemcpyHostToDevice));
    q = arg_of(qkv.data, s.dtype, {s.T, s.H, s.D}, row);
    k = arg_of(qkv.data + (int64_t)s.H * s.D * 2, s.dtype, {s.T, s.Hk, s.D}, row);
    v = arg_of(qkv.data + (int64_t)(s.H + s.Hk) * s.D * 2, s.dtype, {s.T, s.Hk, s.D}, row);
    documents = arg_of(offsets.data, RFR_I32, {(int64_t)s.offsets.size()}, 0);
    attr[0] = rfr_attr_float((s.cap > 0 ? 2 : 1) / sqrt((double)s.D));
    attr[1] = rfr_attr_int(s.causal);
    attr[2] = rfr_attr_int(s.window);
    attr[3] = rfr_attr_float(s.cap);
    int longest = 0;
    for (size_t d = 0; d + 1 < s.offsets.size(); d++) longest = std::max(longest, s.offsets[d + 1] - s.offsets[d]);
    attr[4] = rfr_attr_int(longest);
  }

  rfr_arg o_arg(buffer &b) const { return arg_of(b.data, s.dtype, {s.T, s.H, s.D}, 0); }
  rfr_arg kv_arg(buffer &b) const { return arg_of(b.data, s.dtype, {s.T, s.Hk, s.D}, 0); }
  rfr_arg lse_arg(buffer &b) const { return arg_of(b.data, RFR_F32, {s.H, s.T}, 0); }

  /* Fills the workspace with NaN, then calls `run` n times; returns milliseconds per call. */
  float call(const rfi_cuda_kernel &kernel, int n_in, const rfr_arg *in, int n_out, const rfr_arg *out, int n) {
    rfr_call c;
    memset(&c, 0, sizeof c);
    c.n_in = n_in;
    c.n_out = n_out;
    c.in = in;
    c.out = out;
    c.attr = attr;
    c.library = &info;
    buffer workspace(kernel.workspace(&c));
    c.workspace = workspace.data;
    expect(kernel.takes(&c), "not taken");
    cudaEvent_t a, b;
    float ms = 0;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    CUDA(cudaEventRecord(a));
    for (int i = 0; i < n; i++) expect(kernel.run(&c) == RFR_OK, "status");
    CUDA(cudaEventRecord(b));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaEventElapsedTime(&ms, a, b));
    CUDA(cudaEventDestroy(a));
    CUDA(cudaEventDestroy(b));
    expect(workspace.guard_intact(), "wrote past the workspace");
    return ms / (float)n;
  }
  float forward(const rfi_cuda_kernel &kernel, results &r, int n = 1) {
    const rfr_arg in[4] = {q, k, v, documents}, out[2] = {o_arg(r.o), lse_arg(r.lse)};
    return call(kernel, 4, in, 2, out, n);
  }
  /* The backward from the o and lse of `f`; `wanted` has a bit for each of dq, dk, dv. */
  float backward(const rfi_cuda_kernel &kernel, results &f, results &r, int n = 1, int wanted = 7) {
    const rfr_arg in[7] = {o_arg(dy), q, k, v, o_arg(f.o), lse_arg(f.lse), documents};
    rfr_arg out[3] = {o_arg(r.dq), kv_arg(r.dk), kv_arg(r.dv)};
    for (int i = 0; i < 3; i++)
      if (!(wanted >> i & 1)) out[i].data = NULL;
    return call(kernel, 7, in, 3, out, n);
  }
};

static void print_shape(const variant &x, const shape &s) {
  printf("%s %s T %d H %d/%d D %d documents %zu%s", x.name, s.dtype == RFR_BF16 ? "bf16" : "f16 ", s.T, s.H, s.Hk, s.D,
         s.offsets.size() - 1, s.causal ? " causal" : "");
  if (s.window) printf(" window %d", s.window);
  if (s.cap > 0) printf(" cap %g", (double)s.cap);
  printf(":");
}

/* ‖x - y‖ / ‖y‖, where y counts as at least 0.001 per element: a gradient that cancels consists of rounding errors. */
static void show_error(const char *name, const buffer &x, const buffer &y, int64_t n, rfr_dtype dtype, double bar) {
  buffer sums(3 * sizeof(double));
  double host[3];
  CUDA(cudaMemset(sums.data, 0, sizeof host));
  compare<<<1024, 256>>>(x.data, y.data, n, dtype, (double *)sums.data);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(host, sums.data, sizeof host, cudaMemcpyDeviceToHost));
  const double error = sqrt(host[0] / std::max(host[1], 1e-6 * (double)n));
  printf(" %s %.1e", name, error);
  expect(host[2] == 0, "not finite");
  expect(error <= bar, "error");
}

static int64_t different(const buffer &x, const buffer &y) {
  buffer count(8);
  unsigned long long host;
  CUDA(cudaMemset(count.data, 0, 8));
  count_different<<<1024, 256>>>((const uint16_t *)x.data, (const uint16_t *)y.data, (int64_t)(x.bytes / 2),
                                 (unsigned long long *)count.data);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(&host, count.data, 8, cudaMemcpyDeviceToHost));
  return (int64_t)host;
}

static void show_errors(const shape &s, results &fast, results &any) {
  const double bar = s.dtype == RFR_BF16 ? 6e-3 : 1e-3;
  const int64_t n = (int64_t)s.T * s.H * s.D, m = (int64_t)s.T * s.Hk * s.D;
  show_error("o", fast.o, any.o, n, s.dtype, bar);
  show_error("lse", fast.lse, any.lse, (int64_t)s.T * s.H, RFR_F32, 1e-5);
  show_error("dq", fast.dq, any.dq, n, s.dtype, bar);
  show_error("dk", fast.dk, any.dk, m, s.dtype, bar);
  show_error("dv", fast.dv, any.dv, m, s.dtype, bar);
  for (buffer *b : fast.all()) expect(b->guard_intact(), "wrote past a result");
}

/* ---- reference in f64 on the host, for small shapes ---- */

static std::vector<double> on_host(const void *from, int64_t n, rfr_dtype dtype) {
  std::vector<uint16_t> bits((size_t)n);
  std::vector<double> y((size_t)n);
  CUDA(cudaMemcpy(bits.data(), from, (size_t)n * 2, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < y.size(); i++)
    y[i] = dtype == RFR_BF16 ? __bfloat162float(((const __nv_bfloat16 *)bits.data())[i])
                             : __half2float(((const __half *)bits.data())[i]);
  return y;
}

static void to_device(buffer &to, const std::vector<double> &x, rfr_dtype dtype) {
  std::vector<uint16_t> bits(x.size());
  for (size_t i = 0; i < x.size(); i++)
    if (dtype == RFR_BF16) ((__nv_bfloat16 *)bits.data())[i] = __double2bfloat16(x[i]);
    else ((__half *)bits.data())[i] = __double2half(x[i]);
  CUDA(cudaMemcpy(to.data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice));
}

/* The keys that row t attends to: those of its document, the first document that ends after t. */
static void keys_of(const shape &s, int t, int *first, int *end) {
  int before = 0;
  *first = *end = 0;
  for (size_t d = 0; d + 1 < s.offsets.size(); d++) {
    const int ends = std::max(before, std::min(s.offsets[d + 1], s.T)), from = std::max(s.offsets[d], before);
    if (ends > t) {
      if (t < from) return;
      *end = s.causal ? t + 1 : ends;
      *first = s.window > 0 ? std::max(from, *end - s.window) : from;
      return;
    }
    before = ends;
  }
}

/* One head of r, from rows of q, k, v (packed) and dy. */
static void reference_head(const test &t, const std::vector<double> &qkv, const std::vector<double> &dy, int h,
                           std::vector<double> (&r)[5]) {
  const shape &s = t.s;
  const int D = s.D, kv = h / (s.H / s.Hk);
  const double scale = (float)t.attr[0].f;
  std::vector<double> p((size_t)s.T), slope((size_t)s.T);
  for (int i = 0; i < s.T; i++) {
    int first, end;
    keys_of(s, i, &first, &end);
    const double *q = &qkv[(size_t)(i * t.row + h * D)], *d_o = &dy[((size_t)i * s.H + h) * D];
    double top = -INFINITY, sum = 0, delta = 0;
    for (int j = first; j < end; j++) {
      const double *k = &qkv[(size_t)(j * t.row + (s.H + kv) * D)];
      double x = 0;
      for (int d = 0; d < D; d++) x += q[d] * k[d];
      const double bent = s.cap > 0 ? tanh(scale * x / s.cap) : 0;
      p[j] = s.cap > 0 ? s.cap * bent : scale * x;
      slope[j] = s.cap > 0 ? 1 - bent * bent : 1;
      top = std::max(top, p[j]);
    }
    for (int j = first; j < end; j++) sum += p[j] = exp(p[j] - top);
    r[1][(size_t)h * s.T + i] = end > first ? top + log(sum) : -INFINITY;
    double *o = &r[0][((size_t)i * s.H + h) * D], *dq = &r[2][((size_t)i * s.H + h) * D];
    for (int j = first; j < end; j++) {
      const double *v = &qkv[(size_t)(j * t.row + (s.H + s.Hk + kv) * D)];
      p[j] /= sum;
      for (int d = 0; d < D; d++) o[d] += p[j] * v[d];
    }
    for (int d = 0; d < D; d++) delta += o[d] * d_o[d];
    for (int j = first; j < end; j++) {
      const double *k = &qkv[(size_t)(j * t.row + (s.H + kv) * D)], *v = k + s.Hk * D;
      double *dk = &r[3][((size_t)j * s.Hk + kv) * D], *dv = &r[4][((size_t)j * s.Hk + kv) * D], ds = -delta;
      for (int d = 0; d < D; d++) ds += v[d] * d_o[d];
      ds *= p[j] * slope[j] * scale;
      for (int d = 0; d < D; d++) {
        dq[d] += ds * k[d];
        dk[d] += ds * q[d];
        dv[d] += p[j] * d_o[d];
      }
    }
  }
}

static void reference(const test &t, results &to) {
  const shape &s = t.s;
  const size_t n = (size_t)s.T * s.H * s.D, m = (size_t)s.T * s.Hk * s.D;
  std::vector<double> r[5] = {std::vector<double>(n), std::vector<double>((size_t)s.T * s.H), std::vector<double>(n),
                              std::vector<double>(m), std::vector<double>(m)};
  const std::vector<double> qkv = on_host(t.qkv.data, s.T * t.row, s.dtype),
                            dy = on_host(t.dy.data, (int64_t)n, s.dtype);
  for (int h = 0; h < s.H; h++) reference_head(t, qkv, dy, h, r);
  const std::vector<float> lse(r[1].begin(), r[1].end());
  CUDA(cudaMemcpy(to.lse.data, lse.data(), lse.size() * 4, cudaMemcpyHostToDevice));
  to_device(to.o, r[0], s.dtype);
  to_device(to.dq, r[2], s.dtype);
  to_device(to.dk, r[3], s.dtype);
  to_device(to.dv, r[4], s.dtype);
}

/* ---- checks ---- */

/* Small shapes against f64 on the host; larger ones against attention in f32. */
static void check_case(const variant &x, const shape &s, uint64_t seed, int repeats) {
  test t(s, seed);
  results any(s), fast(s), again(s);
  print_shape(x, s);
  if (s.T <= 300) {
    reference(t, any);
  } else {
    t.forward(rfi_attention_any, any);
    t.backward(rfi_attention_any_bwd, any, any);
  }
  t.forward(*x.forward, fast);
  t.backward(*x.backward, any, fast);
  show_errors(s, fast, any);
  int64_t changed = 0;
  for (int i = 0; i < repeats; i++) {
    for (buffer *b : again.all()) b->poison();
    t.forward(*x.forward, again);
    t.backward(*x.backward, any, again);
    for (size_t j = 0; j < 5; j++) changed += different(*again.all()[j], *fast.all()[j]);
  }
  printf(", %d times: %lld elements changed\n", repeats, (long long)changed);
  expect(changed == 0, "bits");
  fflush(stdout);
}

/* A NaN in v affects only the rows that attend to its key; o of other rows stays bitwise equal, and in the backward the
 * gradients of other documents. */
static void check_not_finite(const variant &which, int D, rfr_dtype dtype) {
  shape s = {400, 4, 2, D, 1, 0, 0, dtype, {0, 170, 400}};
  enum { AT = 190 };
  test t(s, 77);
  results clean(s), dirty(s);
  print_shape(which, s);
  t.forward(*which.forward, clean);
  t.backward(*which.backward, clean, clean);
  const uint16_t nan = 0x7fff;
  CUDA(cudaMemcpy((uint16_t *)t.v.data + AT * t.row + 3, &nan, 2, cudaMemcpyHostToDevice));
  t.forward(*which.forward, dirty);
  t.backward(*which.backward, dirty, dirty);
  const size_t o_row = (size_t)s.H * D, kv_row = (size_t)s.Hk * D;
  std::vector<uint16_t> x(s.T * o_row), y(x.size());
  CUDA(cudaMemcpy(x.data(), clean.o.data, x.size() * 2, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(y.data(), dirty.o.data, y.size() * 2, cudaMemcpyDeviceToHost));
  int leaked_rows = 0, missed = 0;
  for (int r = 0; r < s.T; r++)
    for (int h = 0; h < s.H; h++) {
      const size_t at = r * o_row + (size_t)h * D;
      const bool sees = h < 2 && r >= AT;
      const uint16_t exponent = dtype == RFR_BF16 ? 0x7f80 : 0x7c00;
      if (sees) missed += (y[at + 3] & exponent) != exponent;
      else leaked_rows += memcmp(&x[at], &y[at], (size_t)D * 2) != 0;
    }
  printf(" NaN in v: reached %d rows that do not see it, missed in %d that do", leaked_rows, missed);
  expect(leaked_rows == 0 && missed == 0, "NaN");
  int leaked = 0;
  for (int i = 0; i < 3; i++) {
    const size_t n = 170 * (i == 0 ? o_row : kv_row);
    CUDA(cudaMemcpy(x.data(), clean.all()[2 + (size_t)i]->data, n * 2, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(y.data(), dirty.all()[2 + (size_t)i]->data, n * 2, cudaMemcpyDeviceToHost));
    for (size_t j = 0; j < n; j++) leaked += x[j] != y[j];
  }
  printf(", gradients of the other document changed: %d\n", leaked);
  expect(leaked == 0, "NaN in gradients");
}

static void check(const variant &x) {
  static const int sizes[] = {64, 128, 8, 40, 96, 256, 200, 120};
  srand(5);
  uint64_t seed = 10;
  for (int round = 0; round < 6; round++)
    for (int D : sizes) {
      shape s;
      s.dtype = (round + D / 8) % 3 == 0 ? RFR_F16 : RFR_BF16;
      s.T = 1 + rand() % 700;
      s.Hk = 1 + rand() % 3;
      s.H = s.Hk * (1 + rand() % 4);
      s.D = D;
      s.causal = round % 3 != 1;
      s.window = s.causal && rand() % 3 == 0 ? 2 + rand() % 300 : 0;
      s.cap = rand() % 4 == 0 ? 1.0f + (float)(rand() % 30) : 0.0f;
      s.offsets.push_back(rand() % 4 == 0 ? rand() % 20 : 0);
      for (int i = rand() % 6; i > 0; i--) s.offsets.push_back(rand() % (s.T + 10)); /* offsets may descend */
      if (round % 2) std::sort(s.offsets.begin(), s.offsets.end());
      s.offsets.push_back(s.T - (rand() % 4 == 0 ? rand() % s.T : 0));
      if (D <= x.most_d) check_case(x, s, seed += 2, 20);
    }
  /* as many heads of k and v as of q: on Hopper the last block that adds to a tile of dq stores it */
  for (int round = 0; round < 10; round++) {
    shape s = {
        100 + rand() % 1500, 1 + rand() % 3, 0, round % 3 ? 64 : 40, 1, 0, 0, round % 4 ? RFR_BF16 : RFR_F16, {}};
    s.Hk = s.H;
    s.window = round % 2 ? 2 + rand() % 500 : 0;
    s.cap = round % 5 == 4 ? 20.0f : 0.0f;
    s.offsets.push_back(round % 3 == 1 ? 150 : rand() % 20);
    for (int i = rand() % 4; i > 0; i--) s.offsets.push_back(rand() % (s.T + 10));
    std::sort(s.offsets.begin(), s.offsets.end());
    s.offsets.push_back(s.T - (round % 4 == 2 ? rand() % s.T : 0));
    check_case(x, s, seed += 2, 20);
  }
  for (int D : {64, 128, 256})
    for (rfr_dtype dtype : {RFR_BF16, RFR_F16})
      if (D <= x.most_d) check_not_finite(x, D, dtype);
}

/* ---- delays ---- */

/* The library's kernels with random delays, compiled by cmake/cuda.cmake. */
extern "C" const rfi_cuda_kernel rfi_attention_delayed, rfi_attention_delayed_bwd;

/* More items than blocks, in documents of various lengths. */
static void delay_one(const variant &x, int heads_of_k, int D, int causal, int window) {
  enum { RUNS = 1000 };
  shape s = {6000, 8, heads_of_k, D, causal, window, 0, RFR_BF16, {0, 170, 3500, 5990}};
  test t(s, 9);
  results plain(s), delayed(s);
  int64_t changed = 0;
  print_shape(x, s);
  t.forward(*x.forward, plain);
  t.backward(*x.backward, plain, plain);
  for (int run = 0; run < RUNS; run++) {
    for (buffer *b : delayed.all()) b->poison();
    t.forward(rfi_attention_delayed, delayed);
    t.backward(rfi_attention_delayed_bwd, plain, delayed);
    for (size_t i = 0; i < 5; i++) changed += different(*delayed.all()[i], *plain.all()[i]);
  }
  printf(" %d runs with delays: %lld elements changed\n", RUNS, (long long)changed);
  expect(changed == 0, "bits");
  for (buffer *b : delayed.all()) expect(b->guard_intact(), "wrote past a result");
  fflush(stdout);
}

static void check_delays(const variant &x) {
  if (x.major != 9) return;
  delay_one(x, 4, 64, 1, 0);
  delay_one(x, 8, 64, 1, 0);
  delay_one(x, 4, 128, 1, 0);
  delay_one(x, 4, 64, 1, 700);
  delay_one(x, 8, 64, 1, 700);
  delay_one(x, 4, 128, 0, 0);
}

/* ---- time ---- */

static float median(std::vector<float> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

static void time_case(const variant &x, int B, int T, int H, int Hk, int D, int causal, bool compare_too) {
  shape s = {B * T, H, Hk, D, causal, 0, 0, RFR_BF16, {}};
  for (int i = 0; i <= B; i++) s.offsets.push_back(i * T);
  test t(s, 1);
  results fast(s);
  print_shape(x, s);
  t.forward(*x.forward, fast, 3);
  t.backward(*x.backward, fast, fast, 3);
  if (compare_too) {
    results any(s);
    t.forward(rfi_attention_any, any);
    t.backward(rfi_attention_any_bwd, fast, any);
    show_errors(s, fast, any);
  }
  const double products = 2.0 * B * H * D * (causal ? T * (T + 1.0) / 2 : (double)T * T);
  std::vector<float> forward, backward, dq, dkv;
  for (int i = 0; i < 7; i++) {
    forward.push_back(t.forward(*x.forward, fast, 10));
    backward.push_back(t.backward(*x.backward, fast, fast, 10));
    dq.push_back(t.backward(*x.backward, fast, fast, 10, 1));
    dkv.push_back(t.backward(*x.backward, fast, fast, 10, 6));
  }
  const double f = median(forward) * 1e-3, b = median(backward) * 1e-3;
  printf(
      "\n  forward %.3f ms, %.0f TFLOP/s; backward %.3f ms, %.0f TFLOP/s (dq alone %.3f ms, dk and dv alone %.3f ms, "
      "delta in each)\n",
      f * 1e3, 2 * products / f * 1e-12, b * 1e3, 5 * products / b * 1e-12, (double)median(dq), (double)median(dkv));
  fflush(stdout);
}

static void time_all(const variant &x) {
  time_case(x, 64, 1024, 12, 12, 64, 1, true);
  time_case(x, 4, 4096, 32, 8, 64, 1, true);
  if (x.most_d >= 128) time_case(x, 4, 4096, 32, 8, 128, 1, true);
  if (x.most_d >= 128) time_case(x, 4, 4096, 32, 4, 128, 1, false);
  time_case(x, 16, 2048, 16, 16, 64, 1, false);
  time_case(x, 4, 4096, 16, 16, 64, 1, false);
  time_case(x, 8, 2048, 16, 16, 64, 0, false);
  if (x.most_d >= 128) time_case(x, 16, 1024, 16, 16, 128, 1, false);
  if (x.most_d >= 128) time_case(x, 8, 2048, 16, 16, 128, 0, false);
  if (x.most_d >= 256) time_case(x, 2, 4096, 8, 4, 256, 1, false);
}

int main(int argc, char **argv) {
  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  info.sms = device.multiProcessorCount;
  printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
  for (const variant &x : variants) {
    if (argc > 2 && strcmp(argv[2], x.name) != 0) continue;
    if (device.major < x.major || (x.major == 9 && device.major != 9)) continue;
    if (argc < 2 || strcmp(argv[1], "check") == 0) check(x);
    if (argc < 2 || strcmp(argv[1], "delays") == 0) check_delays(x);
    if (argc < 2 || strcmp(argv[1], "time") == 0) time_all(x);
  }
  printf(failures ? "attention: %d checks BAD\n" : "attention: all fine\n", failures);
  return failures != 0;
}
