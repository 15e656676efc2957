/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of add, accumulate, mul and scale.
 */
#include "support/op_case.h"

RFT_REF(add) {
  const double *a = call->in[0].data, *b = call->in[1].data;
  double *y = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) y[i] = a[i] + b[i];
}
RFT_CASES(add) = {"add(f[7,13], f[7,13])",
                  "add(f[1,37]/2, f[1,37])",
                  "add(f[5,3]^T, f[5,3]^T)",
                  "add(f[2,3,17], f[2,3,17]/2)",
                  "add(f[0,4], f[0,4])",
                  "add(f[67,613], f[67,613])",
                  NULL};

RFT_REF(accumulate) {
  const double *x = call->in[0].data, *acc = call->in[1].data;
  double *y = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) y[i] = acc[i] + x[i];
}
RFT_CASES(accumulate) = {"accumulate(f[7,13], f[7,13])", "accumulate(f[5,3]^T, f[5,3])", "accumulate(f[0,4], f[0,4])",
                         "accumulate(f[67,613], f[67,613])", NULL};

RFT_REF(mul) {
  const double *a = call->in[0].data, *b = call->in[1].data;
  double *y = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) y[i] = a[i] * b[i];
}
RFT_CASES(mul) = {"mul(f[7,13], f[7,13]^T)", "mul(f[19,1], f[19,1])",     "mul(f[4,23]/2, f[4,23]/2)",
                  "mul(f[3,0], f[3,0])",     "mul(f[61,701], f[61,701])", NULL};

RFT_REF(scale) {
  const double *x = call->in[0].data, *s = call->n_in > 1 ? call->in[1].data : NULL;
  double *y = call->out[0].data, by = call->attr[0].f * (s ? s[0] : 1);
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) y[i] = x[i] * by;
}
RFT_CASES(scale) = {"scale(f[7,13]) by=0.5",
                    "scale(f[1,29], F[1]) by=-3",
                    "scale(f[11,5]^T, F[1]) by=1",
                    "scale(f[2,31]/2, _) by=1.7",
                    "scale(f[0], F[1]) by=2",
                    "scale(f[59,701], F[1]) by=0.25",
                    NULL};
