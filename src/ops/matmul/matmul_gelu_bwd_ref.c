/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul_gelu_bwd in double, plain loops, and its cases: transpositions, primes, a dimension of size 1, empty M and K,
 * and sizes that cuBLASLt supports.
 */
#include <math.h>

#include "support/op_case.h"

static double gemm_at(const rfi_call *call, int64_t i, int64_t j) {
  const double *a = call->in[0].data, *b = call->in[1].data;
  const bool ta = call->attr[0].i != 0, tb = call->attr[1].i != 0;
  const int64_t M = call->out[0].type.shape[0], N = call->out[0].type.shape[1], K = call->in[0].type.shape[ta ? 0 : 1];
  double sum = 0;
  for (int64_t k = 0; k < K; k++) sum += (ta ? a[k * M + i] : a[i * K + k]) * (tb ? b[j * K + k] : b[k * N + j]);
  return sum;
}

static double inner(double x) { return 0.7978845608028654 * (x + 0.044715 * x * x * x); }

RFT_REF(matmul_gelu_bwd) {
  const double *x = call->in[2].data;
  double *dx = call->out[0].data;
  const int64_t M = call->out[0].type.shape[0], N = call->out[0].type.shape[1];
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      const double at = x[i * N + j], t = tanh(inner(at)), slope = 0.7978845608028654 * (1 + 3 * 0.044715 * at * at);
      dx[i * N + j] = gemm_at(call, i, j) * (0.5 * (1 + t) + 0.5 * at * (1 - t * t) * slope);
    }
}
RFT_CASES(matmul_gelu_bwd) = {
    "matmul_gelu_bwd(f[7,13], f[13,5], f[7,5]) ta=0 tb=0 to=f",
    "matmul_gelu_bwd(f[7,13], f[5,13], f[7,5]) ta=0 tb=1 to=f",
    "matmul_gelu_bwd(f[13,7], f[5,13], f[7,5]) ta=1 tb=1 to=f",
    "matmul_gelu_bwd(f[13,7], f[13,5], F[7,5]) ta=1 tb=0 to=f32",
    "matmul_gelu_bwd(f[1,17], f[17,31], f[1,31]) ta=0 tb=0 to=f",
    "matmul_gelu_bwd(f[136,72], f[72,264], f[136,264]) ta=0 tb=0 to=f",
    "matmul_gelu_bwd(f[200,136], f[328,136], f[200,328]) ta=0 tb=1 to=f",
    "matmul_gelu_bwd(f[0,4], f[4,3], f[0,3]) ta=0 tb=0 to=f",
    "matmul_gelu_bwd(f[5,0], f[3,0], f[5,3]) ta=0 tb=1 to=f",
    NULL,
};
