/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul in double, plain loops, and its cases: the four transpositions, bias, acc,
 * batches, primes, a dimension of size 1, empty M, N and K (an empty sum is zero, to
 * which bias and acc still add), more than one block of K, more than one tile.
 */
#include "support/op_case.h"

RFT_REF(matmul) {
  const rfr_type *ya = &call->out[0].type, *aa = &call->in[0].type;
  int r = ya->rank, ta = (int)call->attr[0].i, tb = (int)call->attr[1].i;
  int64_t batch = r == 3 ? ya->shape[0] : 1, M = ya->shape[r - 2], N = ya->shape[r - 1],
          K = aa->shape[ta ? r - 2 : r - 1];
  const double *a = call->in[0].data, *b = call->in[1].data;
  const double *bias = call->n_in > 2 ? call->in[2].data : NULL, *acc = call->n_in > 3 ? call->in[3].data : NULL;
  double *y = call->out[0].data;
  for (int64_t z = 0; z < batch; z++, a += M * K, b += K * N)
    for (int64_t i = 0; i < M; i++)
      for (int64_t j = 0; j < N; j++) {
        int64_t e = (z * M + i) * N + j;
        double sum = bias ? bias[j] : 0;
        for (int64_t k = 0; k < K; k++) sum += (ta ? a[k * M + i] : a[i * K + k]) * (tb ? b[j * K + k] : b[k * N + j]);
        y[e] = (acc ? acc[e] : 0) + sum;
      }
}

RFT_CASES(matmul) = {
    "matmul(f[7,13], f[13,5]) ta=0 tb=0 to=f",
    "matmul(f[7,13], f[5,13], f[5]) ta=0 tb=1 to=f",
    "matmul(f[13,7], f[13,5]) ta=1 tb=0 to=f32",
    "matmul(f[13,7], f[5,13], f[5]) ta=1 tb=1 to=f",
    "matmul(f[1,17], f[17,31], f[31]) ta=0 tb=0 to=f",
    "matmul(f[19,1], f[1,3]) ta=0 tb=0 to=f",
    "matmul(f[23,11], f[11,1]) ta=0 tb=0 to=f",
    "matmul(f[37,29], f[37,41], _, F[29,41]) ta=1 tb=0 to=f32",
    "matmul(f[5,9], f[9,6], f[6], f[5,6]) ta=0 tb=0 to=f",
    "matmul(f[3,7,11], f[3,5,11], f[5]) ta=0 tb=1 to=f",
    "matmul(f[2,11,7], f[2,11,5]) ta=1 tb=0 to=f32",
    "matmul(f[4,7,3], f[4,3,9], _, f[4,7,9]) ta=0 tb=0 to=f",
    "matmul(f[67,521], f[71,521], f[71]) ta=0 tb=1 to=f",
    "matmul(f[263,19], f[19,293]) ta=0 tb=0 to=f",
    "matmul(f[300,33]^T, f[47,33]) ta=0 tb=1 to=f",
    "matmul(f[6,10]/2, f[10,14]) ta=0 tb=0 to=f",
    "matmul(f[0,4], f[4,3], f[3]) ta=0 tb=0 to=f",
    "matmul(f[5,4], f[4,0]) ta=0 tb=0 to=f",
    "matmul(f[5,0], f[0,3], f[3]) ta=0 tb=0 to=f",
    "matmul(f[5,0], f[3,0], _, f[5,3]) ta=0 tb=1 to=f",
    "matmul(f[0,5,4], f[0,4,3]) ta=0 tb=0 to=f",
    NULL,
};
