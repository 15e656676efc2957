/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of embedding, embedding_grad, rope, rope_table and positions.
 */
#include <math.h>

#include "support/op_case.h"

RFT_REF(embedding) {
  const double *table = call->in[0].data;
  const int32_t *ids = call->in[1].data;
  double *y = call->out[0].data;
  int64_t V = call->in[0].type.shape[0], C = call->in[0].type.shape[1];
  for (int64_t t = 0; t < call->in[1].type.shape[0]; t++)
    for (int64_t j = 0; j < C; j++) y[t * C + j] = ids[t] >= 0 && ids[t] < V ? table[ids[t] * C + j] : 0;
}
RFT_CASES(embedding) = {"embedding(f[11,13], i[7]<11)",       "embedding(f[5,37], i[1]<5)",
                        "embedding(f[3,8], i[5]=2,-1,0,3,1)", "embedding(f[7,9], i[0]<7)",
                        "embedding(f[257,31], i[1103]<300)",  NULL};

RFT_REF(embedding_grad) {
  const double *dy = call->in[0].data;
  const int32_t *ids = call->in[1].data;
  bool accumulate = call->n_in > 2 && call->in[2].data;
  double *table = call->out[0].data;
  int64_t V = call->attr[0].i, C = call->in[0].type.shape[1];
  for (int64_t i = 0; !accumulate && i < V * C; i++) table[i] = 0;
  for (int64_t t = 0; t < call->in[0].type.shape[0]; t++)
    for (int64_t j = 0; ids[t] >= 0 && ids[t] < V && j < C; j++) table[ids[t] * C + j] += dy[t * C + j];
}
RFT_CASES(embedding_grad) = {"embedding_grad(f[7,13], i[7]<11, _) rows=11",
                             "embedding_grad(f[1,37], i[1]<5, F[5,37]) rows=5",
                             "embedding_grad(f[5,8], i[5]=2,-1,0,3,2, F[3,8]) rows=3",
                             "embedding_grad(f[0,9], i[0]<7, _) rows=7",
                             "embedding_grad(f[401,131], i[401]<29, _) rows=31",
                             NULL};

/* As in the papers' code: by wavelength. */
static double rope_frequency(const rfi_attr *a, double plain) {
  double factor = a[2].f, low = a[3].f, high = a[4].f, original = (double)a[5].i, wavelength = 2 * M_PI / plain;
  if (original == 0) return plain / factor;
  if (wavelength < original / high) return plain;
  if (wavelength > original / low) return plain / factor;
  double smooth = (original / wavelength - low) / (high - low);
  return (1 - smooth) * plain / factor + smooth * plain;
}

RFT_REF(rope) {
  const double *x = call->in[0].data;
  const int32_t *positions = call->in[1].data;
  double *y = call->out[0].data;
  int64_t T = call->in[0].type.shape[0], H = call->in[0].type.shape[1], D = call->in[0].type.shape[2];
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t d = 0; d < D / 2; d++) {
        double angle = positions[t] * rope_frequency(call->attr, pow(call->attr[0].f, -2.0 * (double)d / (double)D));
        double s = call->attr[1].i ? -sin(angle) : sin(angle), a = cos(angle);
        int64_t i = (t * H + h) * D + d, k = i + D / 2;
        y[i] = x[i] * a - x[k] * s;
        y[k] = x[k] * a + x[i] * s;
      }
}
#define ROPE_PLAIN " factor=1 low=0 high=0 original=0"
RFT_CASES(rope) = {"rope(f[7,3,10], i[7]<50) theta=10000 inverse=0" ROPE_PLAIN,
                   "rope(f[1,5,34], i[1]=999983) theta=500000 inverse=0" ROPE_PLAIN,
                   "rope(f[11,1,6]/2, i[11]<1000000) theta=10000 inverse=1" ROPE_PLAIN,
                   "rope(f[0,3,8], i[0]<5) theta=10000 inverse=0" ROPE_PLAIN,
                   "rope(f[4,3,2]^T, i[4]=0,1,0,-3) theta=100 inverse=1" ROPE_PLAIN,
                   "rope(f[211,3,64], i[211]<4096) theta=10000 inverse=0" ROPE_PLAIN,
                   "rope(f[31,2,64], i[31]<131072) theta=500000 inverse=0 factor=8 low=1 high=4 original=8192",
                   "rope(f[9,2,22], i[9]<512) theta=10000 inverse=1 factor=4 low=0.5 high=3.5 original=64",
                   "rope(f[9,3,12], i[9]<4096) theta=10000 inverse=0 factor=2.5 low=0 high=0 original=0",
                   NULL};

RFT_REF(rope_table) {
  const double *x = call->in[0].data;
  const int32_t *positions = call->in[1].data;
  double *y = call->out[0].data;
  int64_t T = call->in[0].type.shape[0], H = call->in[0].type.shape[1], D = call->in[0].type.shape[2];
  int64_t F = call->attr[2].l.n;
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t d = 0; d < D; d++) {
        int64_t i = (t * H + h) * D + d;
        double angle = positions[t] * call->attr[2].l.x[d % F] * (call->attr[0].i ? -1 : 1);
        if (d >= 2 * F) y[i] = x[i];
        else y[i] = call->attr[1].f * (x[i] * cos(angle) + (d < F ? -x[i + F] : x[i - F]) * sin(angle));
      }
}
RFT_CASES(rope_table) = {
    "rope_table(f[7,3,10], i[7]<50) inverse=0 scale=1 frequency=[1,0.1,0.25,0.01,0.001]",
    "rope_table(f[1,5,34], i[1]=999983) inverse=1 scale=1.25 frequency=[0.5,0.125,1e-05]",
    "rope_table(f[11,1,6]/2, i[11]<1000000) inverse=1 scale=0.75 frequency=[1,0.003]",
    "rope_table(f[0,3,8], i[0]<5) inverse=0 scale=2 frequency=[1]",
    "rope_table(f[4,3,2]^T, i[4]=0,1,0,-3) inverse=0 scale=1.5 frequency=[0.7]",
    "rope_table(f[211,3,64], i[211]<4096) inverse=0 scale=1.19 "
    "frequency=[1,0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1,0.05,0.03,0.02,0.01,0.006,0.005,0.004,0.003,0.002,0.001,1e-04,"
    "5e-05,1e-05,1e-06]",
    "rope_table(f[29,2,48], i[29]<4096) inverse=1 scale=1 frequency=[1,0.5,0.25,0.125,0.1,0.05,0.02,0.01]",
    NULL};

/* For each row: the last document that begins at or before it, if another one begins after it. */
RFT_REF(positions) {
  const int32_t *offsets = call->in[0].data;
  int32_t *y = call->out[0].data;
  int64_t documents = call->in[0].type.shape[0] - 1;
  for (int64_t t = 0; t < call->out[0].type.shape[0]; t++) {
    int64_t begin = 0;
    y[t] = 0;
    for (int64_t d = 0; d <= documents; d++) {
      int64_t end = offsets[d] > begin ? offsets[d] : begin;
      if (d > 0 && t >= begin && t < end) y[t] = (int32_t)(t - begin);
      begin = end;
    }
  }
}
RFT_CASES(positions) = {"positions(i[4]=0,3,7,12) tokens=12",
                        "positions(i[2]=0,37) tokens=37",
                        "positions(i[5]=0,9,4,40,11) tokens=23",
                        "positions(i[3]=0,0,0) tokens=0",
                        "positions(i[3]=2,2,5) tokens=7",
                        "positions(i[1]=0) tokens=1",
                        NULL};
