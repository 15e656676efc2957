/* SPDX-License-Identifier: Apache-2.0
 *
 * permute_codes as loops, and its cases. Maps as in moe_ref.c: three tokens with two slots each, all or some of them
 * with a row.
 */
#include "support/op_case.h"

RFT_REF(permute_codes) {
  const double *q = call->in[0].data, *scale = call->in[1].data;
  const int32_t *order = call->in[2].data, *offsets = call->in[4].data;
  double *row = call->out[0].data, *col = call->out[1].data;
  const int64_t C = call->in[0].type.shape[1], R = call->in[2].type.shape[0], k = call->in[3].type.shape[1];
  const int64_t G = call->in[4].type.shape[0] - 1, pitch = call->out[1].type.shape[1];
  for (int64_t i = 0; row && i < R * C; i++) row[i] = 0;
  for (int64_t i = 0; col && i < C * pitch; i++) col[i] = 0;
  for (int64_t g = 0; g < G; g++) {
    for (int i = 2; i < 4; i++)
      if (call->out[i].data) ((double *)call->out[i].data)[g] = scale[0];
    for (int64_t r = offsets[g]; r < offsets[g + 1]; r++)
      for (int64_t j = 0; j < C; j++) {
        const double x = order[r] < 0 ? 0 : q[order[r] / k * C + j];
        if (row) row[r * C + j] = x;
        if (col) col[j * pitch + (offsets[g] / 128 + g) * 128 + r - offsets[g]] = x;
      }
  }
}

#define MAPS "i[6]=3,0,4,1,2,5, i[3,2]=1,3,4,0,2,5"
#define HOLES "i[6]=3,0,2,-1,-1,-1, i[3,2]=1,-1,2,0,-1,-1"

/* 300 rows of 150 tokens: slot 7 r mod 300 is in row r */
RFT_OPERANDS(permute_codes) {
  int32_t *order = call->in[2].data, *place = call->in[3].data;
  const int64_t R = call->in[2].type.shape[0];
  for (int64_t r = 0; R == 300 && r < R; r++) order[r] = (int32_t)(7 * r % R), place[7 * r % R] = (int32_t)r;
}

RFT_CASES(permute_codes) = {
    "permute_codes(e[3,13], F[1]=0.5, " MAPS ", i[4]=0,4,4,6)",
    "permute_codes(g[3,128], F[1]=3, " MAPS ", i[3]=0,1,6)",
    "permute_codes(e[3,37], F[1]=0.25, " HOLES ", i[3]=0,2,5)",
    "permute_codes(e[3,256], F[1]=2, " HOLES ", i[4]=1,2,2,4)",
    "permute_codes(e[150,256], F[1]=0.1, i[300]=0, i[150,2]=0, i[4]=0,131,131,290)",
    "permute_codes(g[150,384], F[1]=0.1, i[300]=0, i[150,2]=0, i[6]=3,140,140,268,269,300)",
    "permute_codes(e[150,129], F[1]=0.1, i[300]=0, i[150,2]=0, i[4]=0,128,256,300)",
    "permute_codes(e[0,5], F[1]=1, i[0]<1, i[0,2]<1, i[3]=0)",
    "permute_codes(e[3,7], F[1]=1, " MAPS ", i[1]=0)",
    NULL,
};
