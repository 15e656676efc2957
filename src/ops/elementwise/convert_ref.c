/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of cast, copy and fill. In f64 a cast between floats changes nothing: the kernel's rounding is
 * within the tolerance of its result type.
 */
#include <math.h>

#include "support/op_case.h"

static double get(const rfi_arg *a, int64_t i) {
  if (a->type.dtype == RFR_I32) return ((const int32_t *)a->data)[i];
  if (a->type.dtype == RFR_I64) return (double)((const int64_t *)a->data)[i];
  return ((const double *)a->data)[i];
}
static void put(const rfi_arg *a, int64_t i, double x) {
  if (a->type.dtype == RFR_I32) ((int32_t *)a->data)[i] = (int32_t)trunc(x);
  else if (a->type.dtype == RFR_I64) ((int64_t *)a->data)[i] = (int64_t)trunc(x);
  else ((double *)a->data)[i] = x;
}

RFT_REF(cast) {
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) put(&call->out[0], i, get(&call->in[0], i));
}
RFT_CASES(cast) = {"cast(f[7,13]) to=bf16",  "cast(f[1,37]) to=f32",     "cast(f[5,3]^T) to=f16",
                   "cast(f[11,5]/2) to=i32", "cast(i[2,9]<50) to=f",     "cast(f[3,19]) to=i64",
                   "cast(f[0,5]) to=bf16",   "cast(I[3]=-7,0,9) to=f32", "cast(i[17]<9) to=i64",
                   "cast(f[6,7]) to=f64",    "cast(f[53,701]) to=bf16",  NULL};

RFT_REF(copy) {
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) put(&call->out[0], i, get(&call->in[0], i));
}
RFT_CASES(copy) = {"copy(f[7,13]^T)",
                   "copy(f[1,37]/2)",
                   "copy(f[2,3,17])",
                   "copy(f[0,5])",
                   "copy(i[19]<50)",
                   "copy(f[211,173]^T)",
                   NULL};

RFT_REF(fill) {
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) put(&call->out[0], i, call->attr[0].f);
}
RFT_CASES(fill) = {"fill() value=1.5 to=f shape=[7,13]",       "fill() value=-3 to=i32 shape=[1,37]",
                   "fill() value=0 to=f32 shape=[0,5]",        "fill() value=7 to=i64 shape=[11]",
                   "fill() value=0.25 to=bf16 shape=[37,911]", NULL};
