/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize and matmul_scaled as formulas, and their cases. The scale is an f32 quotient by definition, and so it is in
 * the reference; with it every E4M3 number is exactly determined.
 */
#include <float.h>
#include <math.h>

#include "support/op_case.h"

RFT_REF(quantize) {
  const double *x = call->in[0].data;
  double *row = call->out[0].data, *col = call->out[1].data, *scale_inv = call->out[2].data;
  int64_t M = call->in[0].type.shape[0], N = call->in[0].type.shape[1];
  float amax = 0, scale = 1;
  for (int64_t i = 0; i < M * N; i++)
    if (fabs(x[i]) > amax || isnan(x[i])) amax = isnan(amax) ? amax : (float)fabs(x[i]);
  if (amax > 0 && amax <= FLT_MAX) scale = fminf(448.0f / amax, FLT_MAX);
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      uint32_t bits = rfr_float_to_bits(RFR_E4M3, (float)x[i * N + j] * scale);
      if (row) row[i * N + j] = rfr_float_from_bits(RFR_E4M3, bits);
      if (col) col[j * M + i] = rfr_float_from_bits(RFR_E4M3, bits);
    }
  if (scale_inv) scale_inv[0] = 1.0f / scale;
}
RFT_CASES(quantize) = {
    "quantize(f[7,13])",      "quantize(f[1,17])",
    "quantize(f[19,1])",      "quantize(f[67,521])",
    "quantize(f[131,37]>0)",  "quantize(f[5,1031])",
    "quantize(f[3,5]=0)",     "quantize(f[3,4]=inf)",
    "quantize(f[4,3]=1e-37)", "quantize(f[2,9]=3e38)",
    "quantize(f[0,5])",       "quantize(f[5,0])",
    "quantize(f[23,11]^T)",   NULL,
};

RFT_REF(matmul_scaled) {
  const double *a = call->in[0].data, *b = call->in[1].data, *bias = call->in[4].data, *acc = call->in[5].data;
  const double scale_a = *(double *)call->in[2].data, scale_b = *(double *)call->in[3].data;
  double *y = call->out[0].data;
  int64_t M = call->in[0].type.shape[0], K = call->in[0].type.shape[1], N = call->in[1].type.shape[0];
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      double sum = 0;
      for (int64_t k = 0; k < K; k++) sum += a[i * K + k] * b[j * K + k];
      y[i * N + j] = sum * scale_a * scale_b + (bias ? bias[j] : 0) + (acc ? acc[i * N + j] : 0);
    }
}
RFT_CASES(matmul_scaled) = {
    "matmul_scaled(e[7,13], e[5,13], F[1]=0.01, F[1]=0.37) to=f",
    "matmul_scaled(e[1,17], e[31,17], F[1]=1, F[1]=0.5, f[31]) to=f",
    "matmul_scaled(e[19,1], e[3,1], F[1]=0.3, F[1]=7) to=f32",
    "matmul_scaled(e[23,11], e[1,11], F[1]=0.3, F[1]=0.7, _, F[23,1]) to=f32",
    "matmul_scaled(e[5,9], e[6,9], F[1]=0.2, F[1]=0.3, f[6], f[5,6]) to=f",
    "matmul_scaled(e[67,521], e[71,521], F[1]=0.02, F[1]=0.03, f[71]) to=f",
    "matmul_scaled(e[263,19], e[293,19], F[1]=0.1, F[1]=0.2) to=f",
    "matmul_scaled(e[7,5], e[3,5], F[1]=1e-30, F[1]=1e-30) to=f32",
    "matmul_scaled(e[0,4], e[3,4], F[1]=1, F[1]=1, f[3]) to=f",
    "matmul_scaled(e[5,4], e[0,4], F[1]=1, F[1]=1) to=f",
    "matmul_scaled(e[5,0], e[3,0], F[1]=1, F[1]=1, f[3]) to=f",
    NULL,
};
