/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of gelu, silu, swiglu (weighted or not), softcap and their gradients, with libm's functions and
 * the textbook formulas.
 */
#include <math.h>

#include "support/op_case.h"

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static double gelu(double x, bool tanh_form) {
  if (tanh_form) return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  return 0.5 * x * erfc(-x / sqrt(2));
}
static double gelu_slope(double x, bool tanh_form) {
  if (!tanh_form) return 0.5 * erfc(-x / sqrt(2)) + x * exp(-0.5 * x * x) / sqrt(2 * M_PI);
  double u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), du = sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
  return 0.5 * (1 + tanh(u)) + 0.5 * x * du / (cosh(u) * cosh(u));
}
static double silu_slope(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }

RFT_REF(gelu) {
  const double *x = call->in[0].data;
  double *y = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) y[i] = gelu(x[i], call->attr[0].i != 0);
}
RFT_CASES(gelu) = {"gelu(f[7,13]) tanh=0",   "gelu(f[7,19]) tanh=1",   "gelu(f[1,37]) tanh=1",
                   "gelu(f[0,3]) tanh=0",    "gelu(f[3,5,1]) tanh=0",  "gelu(f[2,0]) tanh=1",
                   "gelu(f[31,521]) tanh=1", "gelu(f[29,521]) tanh=0", NULL};

RFT_REF(gelu_bwd) {
  const double *dy = call->in[0].data, *x = call->in[1].data;
  double *dx = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) dx[i] = dy[i] * gelu_slope(x[i], call->attr[0].i != 0);
}
RFT_CASES(gelu_bwd) = {"gelu_bwd(f[7,13], f[7,13]) tanh=0",     "gelu_bwd(f[5,19], f[5,19]) tanh=1",
                       "gelu_bwd(f[1,37], f[1,37]) tanh=1",     "gelu_bwd(f[0,3], f[0,3]) tanh=0",
                       "gelu_bwd(f[31,521], f[31,521]) tanh=1", NULL};

RFT_REF(silu) {
  const double *x = call->in[0].data;
  double *y = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) y[i] = x[i] * sigmoid(x[i]);
}
RFT_CASES(silu) = {"silu(f[7,13])", "silu(f[1,37])", "silu(f[0,5])", "silu(f[3,17,1])", "silu(f[31,523])", NULL};

RFT_REF(silu_bwd) {
  const double *dy = call->in[0].data, *x = call->in[1].data;
  double *dx = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) dx[i] = dy[i] * silu_slope(x[i]);
}
RFT_CASES(silu_bwd) = {"silu_bwd(f[7,13], f[7,13])",     "silu_bwd(f[1,37], f[1,37])",     "silu_bwd(f[3,0], f[3,0])",
                       "silu_bwd(f[2,19,1], f[2,19,1])", "silu_bwd(f[31,523], f[31,523])", NULL};

RFT_REF(swiglu) {
  const double *gate = call->in[0].data, *up = call->in[1].data;
  double *y = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) y[i] = gate[i] * sigmoid(gate[i]) * up[i];
}
RFT_CASES(swiglu) = {"swiglu(f[7,13], f[7,13])", "swiglu(f[1,37], f[1,37])",     "swiglu(f[0,5], f[0,5])",
                     "swiglu(f[17,1], f[17,1])", "swiglu(f[31,547], f[31,547])", NULL};

/* The last of the op's n results; NULL if the call does not have it. */
static double *h_of(const rfi_call *call, int n) { return call->n_out == n ? call->out[n - 1].data : NULL; }

RFT_REF(swiglu_bwd) {
  const double *dy = call->in[0].data, *gate = call->in[1].data, *up = call->in[2].data;
  double *dgate = call->out[0].data, *dup = call->out[1].data, *h = h_of(call, 3);
  for (int64_t i = 0; i < rfi_count(&call->in[0].type); i++) {
    if (dgate) dgate[i] = dy[i] * up[i] * silu_slope(gate[i]);
    if (dup) dup[i] = dy[i] * gate[i] * sigmoid(gate[i]);
    if (h) h[i] = gate[i] * sigmoid(gate[i]) * up[i];
  }
}
RFT_CASES(swiglu_bwd) = {"swiglu_bwd(f[7,13], f[7,13], f[7,13])",
                         "swiglu_bwd(f[1,37], f[1,37], f[1,37])",
                         "swiglu_bwd(f[0,5], f[0,5], f[0,5])",
                         "swiglu_bwd(f[17,1], f[17,1], f[17,1])",
                         "swiglu_bwd(f[31,547], f[31,547], f[31,547])",
                         "swiglu_bwd(f[7,13], f[7,13], f[7,13], f[7,13])",
                         "swiglu_bwd(f[1,37], f[1,37]/2, f[1,37], f[1,37])",
                         "swiglu_bwd(f[0,5], f[0,5], f[0,5], f[0,5])",
                         "swiglu_bwd(f[29,547], f[29,547], f[29,547], f[29,547])",
                         NULL};

RFT_REF(swiglu_bwd_packed) {
  const double *dy = call->in[0].data, *gate = call->in[1].data, *up = call->in[2].data;
  double *d = call->out[0].data, *h = h_of(call, 2);
  const int64_t columns = call->in[0].type.shape[call->in[0].type.rank - 1];
  for (int64_t i = 0; i < rfi_count(&call->in[0].type); i++) {
    double *row = d + i / columns * 2 * columns;
    row[i % columns] = dy[i] * up[i] * silu_slope(gate[i]);
    row[columns + i % columns] = dy[i] * gate[i] * sigmoid(gate[i]);
    if (h) h[i] = gate[i] * sigmoid(gate[i]) * up[i];
  }
}
RFT_CASES(swiglu_bwd_packed) = {"swiglu_bwd_packed(f[7,13], f[7,13], f[7,13])",
                                "swiglu_bwd_packed(f[1,40], f[1,40]/2, f[1,40]/2)",
                                "swiglu_bwd_packed(f[0,5], f[0,5], f[0,5])",
                                "swiglu_bwd_packed(f[3,17,1], f[3,17,1], f[3,17,1])",
                                "swiglu_bwd_packed(f[33,544], f[33,544]/2, f[33,544]/2)",
                                "swiglu_bwd_packed(f[31,547], f[31,547]/2, f[31,547])",
                                "swiglu_bwd_packed(f[7,13], f[7,13], f[7,13], f[7,13])",
                                "swiglu_bwd_packed(f[3,17,1], f[3,17,1], f[3,17,1], f[3,17,1])",
                                "swiglu_bwd_packed(f[33,544], f[33,544]/2, f[33,544]/2, f[33,544])",
                                NULL};

/* Computes all results of the op that are not NULL. */
static void weighted_bwd(const rfi_call *call, double *dweight, double *dgate, double *dup, int64_t row, double *h) {
  const double *dy = call->in[0].data, *gate = call->in[1].data, *up = call->in[2].data, *weight = call->in[3].data;
  const int64_t columns = call->in[0].type.shape[1];
  for (int64_t r = 0; r < call->in[0].type.shape[0]; r++) {
    if (dweight) dweight[r] = 0;
    for (int64_t j = 0; j < columns; j++) {
      const int64_t i = r * columns + j;
      if (dweight) dweight[r] += dy[i] * gate[i] * sigmoid(gate[i]) * up[i];
      if (dgate) dgate[r * row + j] = dy[i] * weight[r] * up[i] * silu_slope(gate[i]);
      if (dup) dup[r * row + j] = dy[i] * weight[r] * gate[i] * sigmoid(gate[i]);
      if (h) h[i] = gate[i] * sigmoid(gate[i]) * up[i] * weight[r];
    }
  }
}

RFT_REF(swiglu_weighted) {
  const double *gate = call->in[0].data, *up = call->in[1].data, *weight = call->in[2].data;
  const int64_t columns = call->in[0].type.shape[1];
  double *y = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++)
    y[i] = gate[i] * sigmoid(gate[i]) * up[i] * weight[i / columns];
}
RFT_CASES(swiglu_weighted) = {
    "swiglu_weighted(f[7,13], f[7,13], f[7])",      "swiglu_weighted(f[1,37], f[1,37], F[1])",
    "swiglu_weighted(f[0,5], f[0,5], f[0])",        "swiglu_weighted(f[4,0], f[4,0], f[4])",
    "swiglu_weighted(f[17,1], f[17,1], F[17])",     "swiglu_weighted(f[33,544], f[33,544], F[33])",
    "swiglu_weighted(f[31,547], f[31,547], f[31])", NULL};

RFT_REF(swiglu_weighted_bwd) {
  weighted_bwd(call, call->out[0].data, call->out[1].data, call->out[2].data, call->in[0].type.shape[1], h_of(call, 4));
}
RFT_CASES(swiglu_weighted_bwd) = {"swiglu_weighted_bwd(f[7,13], f[7,13], f[7,13], f[7])",
                                  "swiglu_weighted_bwd(f[1,37], f[1,37], f[1,37], F[1])",
                                  "swiglu_weighted_bwd(f[0,5], f[0,5], f[0,5], f[0])",
                                  "swiglu_weighted_bwd(f[4,0], f[4,0], f[4,0], F[4])",
                                  "swiglu_weighted_bwd(f[17,1], f[17,1], f[17,1], F[17])",
                                  "swiglu_weighted_bwd(f[33,544], f[33,544], f[33,544], F[33])",
                                  "swiglu_weighted_bwd(f[31,1547], f[31,1547], f[31,1547], f[31])",
                                  "swiglu_weighted_bwd(f[7,13], f[7,13], f[7,13], F[7], f[7,13])",
                                  "swiglu_weighted_bwd(f[33,544], f[33,544], f[33,544], f[33], f[33,544])",
                                  "swiglu_weighted_bwd(f[29,1547], f[29,1547], f[29,1547], F[29], f[29,1547])",
                                  NULL};

RFT_REF(swiglu_weighted_bwd_packed) {
  const int64_t columns = call->in[0].type.shape[1];
  double *d = call->out[1].data;
  weighted_bwd(call, call->out[0].data, d, d ? d + columns : NULL, 2 * columns, h_of(call, 3));
}
RFT_CASES(swiglu_weighted_bwd_packed) = {
    "swiglu_weighted_bwd_packed(f[7,13], f[7,13], f[7,13], f[7])",
    "swiglu_weighted_bwd_packed(f[1,40], f[1,40], f[1,40], F[1])",
    "swiglu_weighted_bwd_packed(f[0,5], f[0,5], f[0,5], f[0])",
    "swiglu_weighted_bwd_packed(f[4,0], f[4,0], f[4,0], F[4])",
    "swiglu_weighted_bwd_packed(f[33,544], f[33,544], f[33,544], F[33])",
    "swiglu_weighted_bwd_packed(f[31,1547], f[31,1547], f[31,1547], f[31])",
    "swiglu_weighted_bwd_packed(f[7,13], f[7,13], f[7,13], f[7], f[7,13])",
    "swiglu_weighted_bwd_packed(f[33,544], f[33,544], f[33,544], F[33], f[33,544])",
    NULL};

RFT_REF(softcap) {
  const double *x = call->in[0].data, cap = call->attr[0].f;
  double *y = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) y[i] = cap * tanh(x[i] / cap);
}
RFT_CASES(softcap) = {"softcap(f[7,13]) cap=30",  "softcap(f[1,37]) cap=0.5",   "softcap(f[0,5]) cap=1",
                      "softcap(f[2,19,1]) cap=2", "softcap(f[31,523]) cap=1.5", NULL};

RFT_REF(softcap_bwd) {
  const double *dy = call->in[0].data, *y = call->in[1].data, cap = call->attr[0].f;
  double *dx = call->out[0].data;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) dx[i] = dy[i] * (1 - y[i] / cap * (y[i] / cap));
}
RFT_CASES(softcap_bwd) = {"softcap_bwd(f[7,13], f[7,13]) cap=30",    "softcap_bwd(f[1,37], f[1,37]) cap=4",
                          "softcap_bwd(f[3,0], f[3,0]) cap=1",       "softcap_bwd(f[2,19,1], f[2,19,1]) cap=50",
                          "softcap_bwd(f[31,523], f[31,523]) cap=8", NULL};
