/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of the grouped ops: group by group, plain loops. Rows outside all groups are NaN, so that
 * reading them shows. Groups of uneven size, empty ones, one with all rows, no groups at all; one row more than a tile.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/op_case.h"

/* Writes NaN to the rows after the last group of a rank-1 or rank-2 operand. */
static void fill_with_nan(const rfi_call *call, int i, const int32_t *offsets, int64_t groups) {
  if (i >= call->n_in || !call->in[i].data) return;
  const rfr_type *type = &call->in[i].type;
  const int64_t columns = type->rank == 2 ? type->shape[1] : 1;
  for (int64_t k = offsets[groups] * columns; k < type->shape[0] * columns; k++) ((double *)call->in[i].data)[k] = NAN;
}

RFT_REF(splits_to_offsets) {
  const bool wide = call->in[0].type.dtype == RFR_I64;
  int32_t *offsets = call->out[0].data, *bad = call->out[1].data, first = 0;
  int64_t at = 0, rows = call->attr[0].i;
  if (offsets) offsets[0] = 0;
  for (int64_t g = 0; g < call->in[0].type.shape[0]; g++) {
    int64_t n = wide ? ((const int64_t *)call->in[0].data)[g] : ((const int32_t *)call->in[0].data)[g];
    if ((n < 0 || n > rows - at) && first == 0) first = (int32_t)g + 1;
    at = n < 0 ? at : n > rows - at ? rows : at + n;
    if (offsets) offsets[g + 1] = (int32_t)at;
  }
  if (bad) *bad = first;
}
RFT_CASES(splits_to_offsets) = {"splits_to_offsets(i[4]=3,0,5,2) rows=10",
                                "splits_to_offsets(I[3]=7,1,2) rows=13",
                                "splits_to_offsets(i[5]=2,-1,3,-4,1) rows=7",
                                "splits_to_offsets(I[4]=5,9223372036854775807,1,0) rows=11",
                                "splits_to_offsets(i[3]=4,2,2147483647) rows=6",
                                "splits_to_offsets(i[1]=0) rows=0",
                                "splits_to_offsets(i[0]<3) rows=5",
                                "splits_to_offsets(I[1]=-9223372036854775807) rows=3",
                                NULL};

RFT_REF(grouped_matmul) {
  const double *x = call->in[0].data;
  const double *bias = call->n_in > 3 ? call->in[3].data : NULL, *scale = call->n_in > 4 ? call->in[4].data : NULL;
  const int32_t *offsets = call->in[2].data;
  double *y = call->out[0].data;
  int64_t R = call->in[0].type.shape[0], K = call->in[0].type.shape[1], N = call->out[0].type.shape[1];
  for (int64_t i = 0; i < R * N; i++) y[i] = 0;
  for (int64_t g = 0; g < call->in[2].type.shape[0] - 1; g++) {
    const double *w = call->n_in > 5 ? call->in[5 + g].data : (double *)call->in[1].data + g * N * K;
    for (int64_t r = offsets[g]; r < offsets[g + 1]; r++)
      for (int64_t j = 0; j < N; j++) {
        double sum = bias ? bias[g * N + j] * (scale ? scale[r] : 1) : 0;
        for (int64_t k = 0; k < K; k++) sum += x[r * K + k] * (call->attr[0].i ? w[j * K + k] : w[k * N + j]);
        y[r * N + j] = sum;
      }
  }
}
RFT_OPERANDS(grouped_matmul) {
  fill_with_nan(call, 0, call->in[2].data, call->in[2].type.shape[0] - 1);
  fill_with_nan(call, 4, call->in[2].data, call->in[2].type.shape[0] - 1);
}
RFT_CASES(grouped_matmul) = {
    "grouped_matmul(f[11,7], f[3,5,7], i[4]=0,4,4,9) tb=1 to=f",
    "grouped_matmul(f[11,7], f[3,7,5], i[4]=0,4,4,11) tb=0 to=f",
    "grouped_matmul(f[13,9], f[4,6,9], i[5]=0,1,7,7,12, f[4,6]) tb=1 to=f",
    "grouped_matmul(f[13,9], f[4,6,9], i[5]=0,1,7,7,12, f[4,6], f[13]) tb=1 to=f",
    "grouped_matmul(f[13,9], f[2,9,6], i[3]=0,0,13, f[2,6], F[13]) tb=0 to=f32",
    "grouped_matmul(f[1,17], f[1,1,17], i[2]=0,1) tb=1 to=f",
    "grouped_matmul(f[8,5], f[3,4,5], i[4]=0,0,0,0, f[3,4]) tb=1 to=f",
    "grouped_matmul(f[67,521], f[2,71,521], i[3]=0,33,65) tb=1 to=f",
    "grouped_matmul(f[300,33], f[3,293,33], i[4]=0,3,299,300) tb=1 to=f",
    "grouped_matmul(f[301,127], f[5,100,127], i[6]=0,64,129,129,257,290, f[5,100]) tb=1 to=f",
    "grouped_matmul(f[11,7], _, i[4]=0,4,4,9, _, _, f[5,7], f[5,7], f[5,7]) tb=1 to=f",
    "grouped_matmul(f[13,9], _, i[3]=0,7,12, f[2,6], f[13], f[9,6], f[9,6]) tb=0 to=f",
    "grouped_matmul(f[70,33], _, i[2]=0,69, f[1,293], _, f[293,33]) tb=1 to=f",
    "grouped_matmul(f[0,4], f[2,3,4], i[3]=0,0,0) tb=1 to=f",
    "grouped_matmul(f[5,4], f[0,3,4], i[1]=0) tb=1 to=f",
    "grouped_matmul(f[5,0], f[2,3,0], i[3]=0,2,4, f[2,3]) tb=1 to=f",
    "grouped_matmul(f[6,4], f[2,4,0], i[3]=0,2,4) tb=0 to=f",
    NULL,
};

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* The GEMM alone, into y. */
static void multiply(const rfi_call *call, double *y, int64_t columns) {
  const rfi_arg made = {y, {.dtype = RFR_F64, .rank = 2, .shape = {call->in[0].type.shape[0], columns}}, {columns, 1}};
  rfi_call gemm = *call;
  gemm.n_in = 3, gemm.n_out = 1, gemm.out = &made;
  RFT_NAME(grouped_matmul)(&gemm);
}

RFT_REF(grouped_swiglu) {
  const int64_t R = call->in[0].type.shape[0], N = call->in[1].type.shape[call->attr[0].i ? 1 : 2], I = N / 2;
  const double *weight = call->in[3].data;
  double *h = call->out[1].data, *y = calloc((size_t)(R * N) + 1, sizeof *y);
  if (!y) abort();
  multiply(call, y, N);
  for (int64_t i = 0; i < R; i++)
    for (int64_t j = 0; h && j < I; j++)
      h[i * I + j] = y[i * N + j] * sigmoid(y[i * N + j]) * y[i * N + I + j] * weight[i];
  if (call->out[0].data) memcpy(call->out[0].data, y, sizeof *y * (size_t)(R * N));
  free(y);
}
RFT_OPERANDS(grouped_swiglu) { fill_with_nan(call, 0, call->in[2].data, call->in[2].type.shape[0] - 1); }
RFT_CASES(grouped_swiglu) = {
    "grouped_swiglu(f[11,7], f[3,6,7], i[4]=0,4,4,9, F[11]) tb=1 to=f",
    "grouped_swiglu(f[11,7], f[3,7,6], i[4]=0,4,4,11, F[11]) tb=0 to=f",
    "grouped_swiglu(f[9,8], f[2,16,8], i[3]=0,3,8, F[9]) tb=1 to=f32",
    "grouped_swiglu(f[67,72], f[2,272,72], i[3]=0,33,65, F[67]) tb=1 to=f",
    "grouped_swiglu(f[300,40], f[3,144,40], i[4]=0,3,299,300, f[300]) tb=1 to=f",
    "grouped_swiglu(f[301,520], f[5,80,520], i[6]=0,64,129,129,257,290, F[301]) tb=1 to=f",
    "grouped_swiglu(f[0,4], f[2,6,4], i[3]=0,0,0, f[0]) tb=1 to=f",
    "grouped_swiglu(f[5,4], f[0,6,4], i[1]=0, F[5]) tb=1 to=f",
    "grouped_swiglu(f[5,0], f[2,6,0], i[3]=0,2,4, F[5]) tb=1 to=f",
    "grouped_swiglu(f[5,4], f[2,0,4], i[3]=0,2,4, F[5]) tb=1 to=f",
    NULL,
};

RFT_REF(grouped_wgrad) {
  const double *dy = call->in[0].data, *x = call->in[1].data;
  const int32_t *offsets = call->in[2].data;
  double *dw = call->out[0].data;
  int64_t G = call->out[0].type.shape[0], N = call->out[0].type.shape[1], K = call->out[0].type.shape[2];
  bool accumulate = call->n_in > 3 && call->in[3].data;
  for (int64_t g = 0; g < G; g++)
    for (int64_t n = 0; n < N; n++)
      for (int64_t k = 0; k < K; k++) {
        double sum = 0, *to = &dw[(g * N + n) * K + k];
        for (int64_t r = offsets[g]; r < offsets[g + 1]; r++) sum += dy[r * N + n] * x[r * K + k];
        *to = accumulate ? *to + sum : sum;
      }
}
RFT_OPERANDS(grouped_wgrad) {
  fill_with_nan(call, 0, call->in[2].data, call->in[2].type.shape[0] - 1);
  fill_with_nan(call, 1, call->in[2].data, call->in[2].type.shape[0] - 1);
}
RFT_CASES(grouped_wgrad) = {
    "grouped_wgrad(f[11,7], f[11,5], i[4]=0,4,4,9) to=f32 of=3",
    "grouped_wgrad(f[11,7], f[11,5], i[4]=0,4,4,9, F[3,7,5]) to=f32 of=3",
    "grouped_wgrad(f[13,6], f[13,9], i[3]=0,0,13) to=f of=2",
    "grouped_wgrad(f[13,6], f[13,9], i[3]=0,5,12, f[2,6,9]) to=f of=2",
    "grouped_wgrad(f[1,17], f[1,1], i[2]=0,1) to=f32 of=1",
    "grouped_wgrad(f[600,37], f[600,41], i[4]=0,590,590,597) to=f32 of=3",
    "grouped_wgrad(f[300,293], f[300,33], i[3]=0,270,300, F[2,293,33]) to=f32 of=2",
    "grouped_wgrad(f[0,4], f[0,3], i[3]=0,0,0) to=f32 of=2",
    "grouped_wgrad(f[7,4], f[7,3], i[3]=0,0,0) to=f of=2",
    "grouped_wgrad(f[7,4], f[7,3], i[1]=0) to=f32 of=0",
    "grouped_wgrad(f[7,0], f[7,3], i[3]=0,3,7) to=f32 of=2",
    NULL,
};

RFT_REF(grouped_dbias) {
  const double *dy = call->in[0].data, *scale = call->n_in > 2 ? call->in[2].data : NULL;
  const int32_t *offsets = call->in[1].data;
  double *db = call->out[0].data;
  int64_t G = call->out[0].type.shape[0], N = call->out[0].type.shape[1];
  bool accumulate = call->n_in > 3 && call->in[3].data;
  for (int64_t g = 0; g < G; g++)
    for (int64_t j = 0; j < N; j++) {
      double sum = 0;
      for (int64_t r = offsets[g]; r < offsets[g + 1]; r++) sum += dy[r * N + j] * (scale ? scale[r] : 1);
      db[g * N + j] = accumulate ? db[g * N + j] + sum : sum;
    }
}
RFT_OPERANDS(grouped_dbias) {
  fill_with_nan(call, 0, call->in[1].data, call->in[1].type.shape[0] - 1);
  fill_with_nan(call, 2, call->in[1].data, call->in[1].type.shape[0] - 1);
}
RFT_CASES(grouped_dbias) = {
    "grouped_dbias(f[11,7], i[4]=0,4,4,9) to=f32",
    "grouped_dbias(f[11,7], i[4]=0,4,4,9, f[11]) to=f32",
    "grouped_dbias(f[13,5], i[3]=0,6,12, F[13], f[2,5]) to=f",
    "grouped_dbias(f[611,3], i[4]=0,1,600,611, _, F[3,3]) to=f32",
    "grouped_dbias(f[37,1100], i[5]=0,33,33,36,37) to=f",
    "grouped_dbias(f[0,4], i[3]=0,0,0) to=f32",
    "grouped_dbias(f[6,4], i[1]=0) to=f32",
    NULL,
};

RFT_REF(grouped_dscale) {
  const double *dy = call->in[0].data, *bias = call->in[1].data;
  const int32_t *offsets = call->in[2].data;
  double *ds = call->out[0].data;
  int64_t R = call->in[0].type.shape[0], N = call->in[0].type.shape[1];
  for (int64_t r = 0; r < R; r++) ds[r] = 0;
  for (int64_t g = 0; g < call->in[1].type.shape[0]; g++)
    for (int64_t r = offsets[g]; r < offsets[g + 1]; r++)
      for (int64_t j = 0; j < N; j++) ds[r] += dy[r * N + j] * bias[g * N + j];
}
RFT_OPERANDS(grouped_dscale) { fill_with_nan(call, 0, call->in[2].data, call->in[2].type.shape[0] - 1); }
RFT_CASES(grouped_dscale) = {
    "grouped_dscale(f[11,7], f[3,7], i[4]=0,4,4,9) to=f",
    "grouped_dscale(f[5,613], f[2,613], i[3]=0,1,5) to=f32",
    "grouped_dscale(f[9,1], f[4,1], i[5]=0,0,3,3,3) to=f",
    "grouped_dscale(f[0,3], f[2,3], i[3]=0,0,0) to=f32",
    "grouped_dscale(f[6,3], f[0,3], i[1]=0) to=f32",
    "grouped_dscale(f[6,0], f[2,0], i[3]=0,2,6) to=f",
    NULL,
};
