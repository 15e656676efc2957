/* SPDX-License-Identifier: Apache-2.0
 *
 * lora_matmul in double, plain loops, and its cases.
 */
#include "support/op_case.h"

RFT_REF(lora_matmul) {
  const double *x = call->in[0].data, *w = call->in[1].data, *u = call->in[2].data, *b = call->in[3].data;
  const double *bias = call->n_in > 4 ? call->in[4].data : NULL, *acc = call->n_in > 5 ? call->in[5].data : NULL;
  double *y = call->out[0].data;
  const int tb = (int)call->attr[0].i;
  const int64_t M = call->out[0].type.shape[0], N = call->out[0].type.shape[1], K = call->in[0].type.shape[1],
                R = call->in[2].type.shape[1];
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      double sum = bias ? bias[j] : 0;
      for (int64_t k = 0; k < K; k++) sum += x[i * K + k] * (tb ? w[j * K + k] : w[k * N + j]);
      for (int64_t k = 0; k < R; k++) sum += u[i * R + k] * (tb ? b[j * R + k] : b[k * N + j]);
      y[i * N + j] = sum + (acc ? acc[i * N + j] : 0);
    }
}

RFT_CASES(lora_matmul) = {
    "lora_matmul(f[7,13], f[5,13], f[7,3], f[5,3]) tb=1 to=f",
    "lora_matmul(f[7,13], f[13,5], f[7,3], f[3,5]) tb=0 to=f",
    "lora_matmul(f[19,17], f[31,17], f[19,4], f[31,4], f[31]) tb=1 to=f",
    "lora_matmul(f[23,11], f[11,6], f[23,2], f[2,6], f[6], f[23,6]) tb=0 to=f",
    "lora_matmul(f[1,17], f[9,17], f[1,1], f[9,1]) tb=1 to=f32",
    "lora_matmul(f[67,509], f[73,509], f[67,16], f[73,16]) tb=1 to=f",
    "lora_matmul(f[131,200], f[296,200], f[131,16], f[296,16], f[296]) tb=1 to=f",
    "lora_matmul(f[300,328], f[328,264], f[300,16], f[16,264]) tb=0 to=f",
    "lora_matmul(f[265,136], f[136,520], f[265,72], f[72,520], _, f[265,520]) tb=0 to=f",
    "lora_matmul(f[137,72], f[256,72], f[137,8], f[256,8], _, f[137,256]) tb=1 to=f",
    "lora_matmul(f[0,4], f[3,4], f[0,2], f[3,2], f[3]) tb=1 to=f",
    "lora_matmul(f[5,0], f[3,0], f[5,2], f[3,2]) tb=1 to=f",
    "lora_matmul(f[5,7], f[3,7], f[5,0], f[3,0]) tb=1 to=f",
    NULL,
};
