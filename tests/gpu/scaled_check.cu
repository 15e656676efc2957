/* SPDX-License-Identifier: Apache-2.0
 *
 * Scaled FP8 GEMMs of sm_90 against f64 and cuBLASLt, on a GPU, without the library:
 *
 *   cmake --build build/release --target scaled_check && build/release/scaled_check [check|time|peer]
 *
 * check: with and without groups, along them too, every way of scaling, both formats, results in f32 and bf16, added to
 * f32, biases: relative L2 error, zeros after the last group, no write outside the result, bitwise equal in 20 runs.
 * time: TFLOP/s of forward, dgrad and wgrad. peer: TFLOP/s next to those of a GEMM of cuBLASLt with the same recipe,
 * result type, FLOPs and, with groups, the rows of all of them, both run alternately; geometric means of the ratios.
 * One line per case; the exit code is 1 if any line says BAD.
 */
#include <math.h>
#include <string.h>

#include "backend/cuda/kernels.cuh"
#include "check.cuh"
#include "ops/quant/scaled_gemm.cuh"
#include "scaled_peer.cuh"

static int sms;
static uint64_t state = 1;
static int64_t below(int64_t n) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (int64_t)((state >> 33) % (uint64_t)n);
}

static __device__ __host__ uint32_t hash(uint64_t i, uint32_t seed) {
  uint64_t h = (i + 1) * 0x9E3779B97F4A7C15ull ^ seed * 0xD1B54A32D192ED03ull;
  h = (h ^ h >> 32) * 0xD6E8FEB86659FD93ull;
  return (uint32_t)(h >> 32);
}
/* Codes of magnitudes up to about 8, with signs. */
static __global__ void draw(uint8_t *q, int64_t n, uint32_t seed, int wide) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    const uint32_t h = hash((uint64_t)i, seed);
    q[i] = (uint8_t)((h & 0x80u) | ((h >> 8) % (wide ? 0x48u : 0x50u)));
  }
}
static __global__ void draw_scales(float *s, int64_t n, uint32_t seed) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    s[i] = 0.25f + (float)(hash((uint64_t)i, seed) % 1024) / 512.0f;
}
/* Zeroes elements of a line that belong to no group. */
static __global__ void zero_rest(uint8_t *q, rfi_scaled_gemm p, int64_t rows) {
  for (int64_t k = blockIdx.x; k < p.a.row; k += gridDim.x) {
    bool in = false;
    for (int g = 0; g < p.groups.n; g++) {
      const int64_t begin = p.groups.offset[g], start = rfi_group_start(begin, p.first + g, 128) * 128;
      in = in || (k >= start && k < start + p.groups.offset[g + 1] - begin);
    }
    for (int64_t r = threadIdx.x; r < rows && !in; r += blockDim.x) q[r * p.a.row + k] = 0;
  }
}

static __device__ double scale_at(const rfi_factor &f, int64_t g, int64_t i, int64_t k) {
  const float *s = (const float *)f.scale;
  if (f.scaling == RFR_SCALING_TENSOR) return s[g];
  if (f.scaling == RFR_SCALING_ROW128) return s[i * f.scale_row + k / 128];
  return s[(g * rfi_blocks_of(f.rows, 128) + i / 128) * f.scale_row + k / 128];
}
static __device__ double value(const rfi_factor &f, uint8_t q) {
  return f.dtype == RFR_E4M3 ? rfi_e4m3_widen(q) : rfi_e5m2_widen(q);
}
static __global__ void reference(rfi_scaled_gemm p, double *y, double *size, const float *old) {
  const int64_t N = p.b.rows, total = (p.along ? p.slices : 1) * p.a.rows * N;
  for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (int64_t)gridDim.x * blockDim.x) {
    const int64_t i = at / N % p.a.rows, j = at % N;
    int64_t g = p.along ? at / N / p.a.rows : 0, start = 0, n = p.a.row;
    if (p.along && p.groups.offset) {
      start = rfi_group_start(p.groups.offset[g], p.first + g, 128) * 128;
      n = p.groups.offset[g + 1] - p.groups.offset[g];
    }
    while (!p.along && p.groups.offset && g < p.groups.n && i >= p.groups.offset[g + 1]) g++;
    double sum = 0;
    if (g < p.groups.n) {
      const uint8_t *a = p.a.q + i * p.a.row + start, *b = p.b.q + ((p.along ? 0 : g * N) + j) * p.b.row + start;
      for (int64_t k = 0; k < n; k++)
        sum += value(p.a, a[k]) * scale_at(p.a, g, i, start + k) * value(p.b, b[k]) *
               scale_at(p.b, p.along && p.b.scaling != RFR_SCALING_TENSOR ? 0 : g, j, start + k);
      if (p.bias)
        sum += (double)((const float *)p.bias)[(p.along ? 0 : g * N) + j] *
               (p.bias_scale ? ((const float *)p.bias_scale)[i] : 1.0f);
    }
    if (p.accumulate) sum += old[at];
    y[at] = sum;
  }
}
template <typename O> static __global__ void compare(const O *y, const double *want, int64_t n, double *sums) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    const double d = (double)rfi_widen(y[i]) - want[i];
    atomicAdd(&sums[0], isnan(d) ? 1e30 : d * d), atomicAdd(&sums[1], want[i] * want[i]);
  }
}

struct shape {
  const char *name;
  bool along;
  int64_t scaling_b; /* that of a follows */
  rfr_dtype a, y;
  int groups;      /* 0: no groups */
  int64_t M, N, K; /* rows of a, of b; elements of a row (along: of all groups before they are aligned) */
  int bias, accumulate, even;
};

enum mode { CHECK, TIME, PEER };

/* Prints both rates; returns the ratio of ours to cuBLASLt's. */
static double compare_with_peer(const shape &s, const rfi_scaled_gemm &p, int32_t *taken) {
  const peer_scales scales = s.scaling_b == RFR_SCALING_TENSOR     ? PEER_TENSOR
                             : s.scaling_b == RFR_SCALING_BLOCK128 ? PEER_BLOCK
                                                                   : PEER_LINES;
  const peer other(s.M, s.N, s.K, s.a == RFR_E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2,
                   s.y == RFR_F32 ? CUDA_R_32F : CUDA_R_16BF, scales, p.narrow && !s.along && scales == PEER_TENSOR,
                   p.a.scale, p.b.scale);
  const std::function<void()> both[2] = {[&] { rfi_scaled_sm90(p, taken, sms, 0); },
                                         [&] { other.run(p.a.q, p.b.q, p.y); }};
  const double flops = 2.0 * (double)s.M * (double)s.N * (double)s.K;
  double ms[2];
  race(both, ms);
  printf(" %.0f TFLOP/s, cuBLASLt %.0f, ratio %.3f\n", flops / ms[0] / 1e9, flops / ms[1] / 1e9, ms[1] / ms[0]);
  fflush(stdout);
  return ms[1] / ms[0];
}

/* The ratio to cuBLASLt, or 0. */
static double run(const shape &s, mode how) {
  const int G = s.groups > 0 ? s.groups : 1;
  const int64_t total = s.along ? s.K : s.M, row = s.along && s.groups ? rfi_group_columns(s.scaling_b, s.K, G) : s.K;
  const int64_t blocks = rfi_blocks_of(row, 128), slices = s.along ? 1 : G;
  std::vector<int32_t> offsets(G + 1, 0);
  for (int g = 1; g < G; g++) offsets[g] = (int32_t)(s.even ? total * g / G : below(total));
  offsets[G] = (int32_t)(s.even ? total : total - total / 16);
  std::sort(offsets.begin(), offsets.end());
  buffer a((size_t)(s.M * row)), b((size_t)(slices * s.N * row)), sa((size_t)(4 * (s.M * blocks + G))),
      sb((size_t)(4 * (slices * s.N * blocks + G))), off(4 * (size_t)(G + 1)), taken(16);
  const int64_t out = (s.along ? G : 1) * s.M * s.N;
  const size_t size = s.y == RFR_F32 ? 4 : 2;
  buffer y((size_t)out * size), old((size_t)out * 4), bias((size_t)(4 * G * s.N)), weight((size_t)(4 * s.M));
  rfi_scaled_gemm p = {};
  const int64_t sca = s.scaling_b == RFR_SCALING_TENSOR ? RFR_SCALING_TENSOR : RFR_SCALING_ROW128;
  p.a = {(const uint8_t *)a.data, sa.data, NULL, s.a, sca, s.M, row, blocks};
  p.b = {(const uint8_t *)b.data, sb.data, NULL, RFR_E4M3, s.scaling_b, s.N, row, blocks};
  p.along = s.along, p.narrow = s.a == RFR_E4M3, p.slices = G, p.block = 128;
  p.groups.offset = s.groups ? (const int32_t *)off.data : NULL;
  p.groups.n = G, p.groups.last = s.along || !s.groups ? G - 1 : G;
  p.groups.rows = (int)(s.along ? row : s.M), p.groups.high = s.along ? (int)s.M : 0;
  p.y = y.data, p.y_type = s.y, p.accumulate = s.accumulate;
  if (s.bias) p.bias = bias.data, p.bias_type = RFR_F32;
  if (s.bias && !s.along) p.bias_scale = weight.data, p.bias_scale_type = RFR_F32;
  CUDA(cudaMemcpy(off.data, offsets.data(), off.bytes, cudaMemcpyHostToDevice));
  draw<<<512, 256>>>((uint8_t *)a.data, (int64_t)a.bytes, 1, s.a == RFR_E4M3);
  draw<<<512, 256>>>((uint8_t *)b.data, (int64_t)b.bytes, 2, 1);
  draw_scales<<<512, 256>>>((float *)sa.data, (int64_t)sa.bytes / 4, 3);
  draw_scales<<<512, 256>>>((float *)sb.data, (int64_t)sb.bytes / 4, 4);
  draw_scales<<<512, 256>>>((float *)bias.data, (int64_t)bias.bytes / 4, 5);
  draw_scales<<<512, 256>>>((float *)weight.data, (int64_t)weight.bytes / 4, 6);
  draw_scales<<<512, 256>>>((float *)old.data, out, 7);
  if (s.along && s.groups) {
    zero_rest<<<512, 256>>>((uint8_t *)a.data, p, s.M);
    zero_rest<<<512, 256>>>((uint8_t *)b.data, p, s.N);
  }
  const char *why = rfi_scaled_sm90_lacks(p);
  printf("%-22s %d groups %lld x %lld x %lld:", s.name, s.groups, (long long)s.M, (long long)s.N, (long long)s.K);
  if (why) {
    printf(" BAD(%s)\n", why);
    failures++;
    return 0;
  }
  if (how == PEER) return compare_with_peer(s, p, (int32_t *)taken.data);
  if (how == TIME) {
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin)), CUDA(cudaEventCreate(&end));
    float best = 1e9f;
    CUDA(cudaMemset(y.data, 0, y.bytes));
    for (int i = 0; i < 8; i++) {
      float ms;
      CUDA(cudaEventRecord(begin));
      for (int r = 0; r < 5; r++) rfi_scaled_sm90(p, (int32_t *)taken.data, sms, 0);
      CUDA(cudaEventRecord(end)), CUDA(cudaEventSynchronize(end));
      CUDA(cudaEventElapsedTime(&ms, begin, end));
      best = std::min(best, ms / 5);
    }
    const double flops = 2.0 * (double)s.M * (double)s.N * (double)s.K;
    printf(" %.3f ms %.0f TFLOP/s\n", best, flops / best / 1e9);
    return 0;
  }
  std::vector<char> first(y.bytes), again(y.bytes);
  bool same = true, guarded = true;
  for (int i = 0; i < 20; i++) {
    if (s.accumulate) CUDA(cudaMemcpy(y.data, old.data, y.bytes, cudaMemcpyDeviceToDevice));
    else y.poison();
    rfi_scaled_sm90(p, (int32_t *)taken.data, sms, 0);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemcpy(i ? again.data() : first.data(), y.data, y.bytes, cudaMemcpyDeviceToHost));
    same = same && (!i || !memcmp(first.data(), again.data(), y.bytes));
    guarded = guarded && y.guard_intact();
  }
  buffer want((size_t)out * 8), sums(16);
  double e[2];
  CUDA(cudaMemset(sums.data, 0, 16));
  reference<<<512, 256>>>(p, (double *)want.data, NULL, (const float *)old.data);
  if (s.y == RFR_F32) compare<<<256, 256>>>((float *)y.data, (double *)want.data, out, (double *)sums.data);
  else compare<<<256, 256>>>((rfi_bf16 *)y.data, (double *)want.data, out, (double *)sums.data);
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaMemcpy(e, sums.data, 16, cudaMemcpyDeviceToHost));
  const double error = sqrt(e[0] / (e[1] + 1e-300));
  printf(" relative error %.2e", error);
  const bool narrow = !s.along && s.scaling_b == RFR_SCALING_TENSOR && s.a == RFR_E4M3;
  expect(error < (narrow ? 1e-2 : s.y == RFR_BF16 ? 4e-3 : 2e-3), "error");
  expect(same, "other bits"), expect(guarded, "wrote outside");
  printf("\n"), fflush(stdout);
  return 0;
}

/* The even groups of grouped_check's table with block scales: forward, and wgrad in bf16. */
static void compare_groups(void) {
  static const int64_t table[][4] = {{4, 32768, 7168, 4096},  {4, 32768, 2048, 7168},    {8, 16384, 4096, 14336},
                                     {8, 16384, 14336, 4096}, {128, 131072, 2048, 1536}, {128, 131072, 768, 2048},
                                     {64, 49152, 2048, 2816}, {64, 49152, 1408, 2048},   {256, 65536, 7168, 512}};
  double sum[2] = {0, 0};
  int n[2] = {0, 0};
  for (const int64_t(&x)[4] : table) {
    const int64_t R = x[1], K = x[2], N = x[3];
    const shape both[2] = {{"forward", false, RFR_SCALING_BLOCK128, RFR_E4M3, RFR_BF16, (int)x[0], R, N, K, 0, 0, 1},
                           {"wgrad", true, RFR_SCALING_ROW128, RFR_E4M3, RFR_BF16, (int)x[0], N, K, R, 0, 0, 1}};
    for (int i = 0; i < 2; i++) {
      const double ratio = run(both[i], PEER);
      if (ratio > 0) sum[i] += log(ratio), n[i]++;
    }
  }
  printf("geometric mean of the ratios: forward %.3f of %d, wgrad %.3f of %d\n", exp(sum[0] / std::max(n[0], 1)), n[0],
         exp(sum[1] / std::max(n[1], 1)), n[1]);
}

enum { T = RFR_SCALING_TENSOR, R = RFR_SCALING_ROW128, B = RFR_SCALING_BLOCK128 };

int main(int argc, char **argv) {
  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  sms = device.multiProcessorCount;
  const rfr_dtype e4 = RFR_E4M3, e5 = RFR_E5M2, f = RFR_F32, h = RFR_BF16;
  const bool all = argc < 2;
  const shape small[] = {
      {"tensor narrow", false, T, e4, h, 5, 777, 328, 272, 0, 0, 0},
      {"tensor narrow bias", false, T, e4, f, 3, 515, 264, 1040, 1, 0, 0},
      {"tensor e5m2", false, T, e5, h, 7, 1021, 776, 528, 1, 0, 0},
      {"block", false, B, e4, h, 5, 777, 328, 272, 0, 0, 0},
      {"block e5m2 bias", false, B, e5, f, 9, 1300, 520, 784, 1, 0, 0},
      {"along tensor", true, T, e5, h, 5, 264, 328, 1000, 0, 0, 0},
      {"along tensor +=", true, T, e4, f, 3, 130, 264, 7000, 0, 1, 0},
      {"along lines", true, R, e4, f, 5, 264, 328, 1000, 0, 0, 0},
      {"along lines +=", true, R, e5, f, 4, 392, 520, 900, 0, 1, 0},
      {"along lines += long", true, R, e4, f, 2, 392, 520, 9000, 0, 1, 0},
      {"along lines bf16", true, R, e4, h, 40, 200, 136, 3000, 0, 0, 0},
      {"dense tensor", true, T, e5, h, 0, 333, 264, 400, 1, 0, 0},
      {"dense block", true, B, e4, h, 0, 333, 520, 400, 1, 0, 0},
      {"dense lines +=", true, R, e4, f, 0, 333, 520, 2064, 0, 1, 0},
      {"forward", false, T, e4, h, 0, 777, 328, 272, 0, 0, 0},
      {"forward bias", false, T, e4, f, 0, 1300, 264, 1040, 1, 0, 0},
      {"forward, few rows", false, T, e4, h, 0, 16, 2048, 2048, 0, 0, 0},
      {"dgrad", false, T, e5, h, 0, 333, 776, 528, 0, 0, 0},
      {"dgrad", false, T, e5, f, 0, 2047, 1032, 784, 0, 0, 0},
      {"dense block", false, B, e4, h, 0, 777, 520, 784, 0, 0, 0},
      {"one group", false, B, e4, f, 1, 1000, 1000, 1024, 0, 0, 1},
      {"many groups", false, B, e4, h, 128, 4000, 264, 256, 0, 0, 0},
  };
  const shape large[] = {
      {"dense tensor", true, T, e4, h, 0, 8192, 8192, 8192, 0, 0, 1},
      {"dense block", true, B, e4, h, 0, 8192, 8192, 8192, 0, 0, 1},
      {"dense lines", true, R, e4, f, 0, 8192, 8192, 8192, 0, 0, 1},
      {"one group narrow", false, T, e4, h, 1, 8192, 8192, 8192, 0, 0, 1},
      {"fwd narrow", false, T, e4, h, 8, 16384, 4096, 2048, 0, 0, 1},
      {"fwd narrow", false, T, e4, h, 64, 32768, 1536, 2048, 0, 0, 1},
      {"fwd narrow", false, T, e4, h, 128, 65536, 1536, 2048, 0, 0, 1},
      {"fwd e5m2 promoted", false, T, e5, h, 8, 16384, 4096, 2048, 0, 0, 1},
      {"fwd block", false, B, e4, h, 8, 16384, 4096, 2048, 0, 0, 1},
      {"fwd block", false, B, e4, h, 64, 32768, 1536, 2048, 0, 0, 1},
      {"fwd block", false, B, e4, h, 128, 65536, 1536, 2048, 0, 0, 1},
      {"wgrad tensor f32", true, T, e5, f, 8, 4096, 2048, 16384, 0, 0, 1},
      {"wgrad tensor f32 +=", true, T, e5, f, 8, 4096, 2048, 16384, 0, 1, 1},
      {"wgrad tensor f32", true, T, e5, f, 64, 1536, 2048, 32768, 0, 0, 1},
      {"wgrad lines f32", true, R, e4, f, 8, 4096, 2048, 16384, 0, 0, 1},
      {"wgrad lines f32 +=", true, R, e4, f, 8, 4096, 2048, 16384, 0, 1, 1},
      {"wgrad lines f32", true, R, e4, f, 64, 1536, 2048, 32768, 0, 0, 1},
      {"wgrad lines f32 +=", true, R, e4, f, 64, 1536, 2048, 32768, 0, 1, 1},
  };
  const shape dense[] = {
      {"forward", false, T, e4, h, 0, 8192, 8192, 8192, 0, 0, 1},
      {"dgrad", false, T, e5, h, 0, 8192, 8192, 8192, 0, 0, 1},
      {"blocks", false, B, e4, h, 0, 8192, 8192, 8192, 0, 0, 1},
      {"lines, along", true, R, e4, f, 0, 8192, 8192, 8192, 0, 0, 1},
      {"forward, q o", false, T, e4, h, 0, 16384, 2048, 2048, 0, 0, 1},
      {"forward, k v", false, T, e4, h, 0, 16384, 512, 2048, 0, 0, 1},
      {"forward, gate up", false, T, e4, h, 0, 16384, 8192, 2048, 0, 0, 1},
      {"forward, down", false, T, e4, h, 0, 16384, 2048, 8192, 0, 0, 1},
      {"dgrad, gate up", false, T, e5, h, 0, 16384, 2048, 8192, 0, 0, 1},
      {"dgrad, down", false, T, e5, h, 0, 16384, 8192, 2048, 0, 0, 1},
      {"wgrad, q o", false, T, e5, f, 0, 2048, 2048, 16384, 0, 0, 1},
      {"wgrad, gate up", false, T, e5, f, 0, 8192, 2048, 16384, 0, 0, 1},
      {"wgrad, down", false, T, e5, f, 0, 2048, 8192, 16384, 0, 0, 1},
  };
  if (all || !strcmp(argv[1], "check"))
    for (const shape &s : small) run(s, CHECK);
  if (all || !strcmp(argv[1], "time"))
    for (const shape &s : large) run(s, TIME);
  if (all || !strcmp(argv[1], "peer")) {
    for (const shape &s : dense) run(s, PEER);
    compare_groups();
  }
  printf("%d failures\n", failures);
  return failures > 0;
}
