/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of layernorm and rmsnorm. The backward references use the statistics that they are given: in a
 * case these are any positive numbers, not those of x.
 */
#include <math.h>

#include "support/op_case.h"

static int64_t width(const rfi_arg *x) { return x->type.shape[x->type.rank - 1]; }
static int64_t height(const rfi_arg *x) {
  rfr_type rows = x->type;
  rows.rank--;
  return rfi_count(&rows);
}

RFT_REF(layernorm) {
  const double *w = call->in[1].data, *b = call->n_in > 2 ? call->in[2].data : NULL;
  double *mean = call->out[1].data, *rstd = call->out[2].data;
  int64_t C = width(&call->in[0]);
  for (int64_t r = 0; r < height(&call->in[0]); r++) {
    const double *x = (const double *)call->in[0].data + r * C;
    double *y = call->out[0].data, m = 0, v = 0;
    for (int64_t j = 0; j < C; j++) m += x[j] / (double)C;
    for (int64_t j = 0; j < C; j++) v += (x[j] - m) * (x[j] - m) / (double)C;
    double s = 1 / sqrt(v + call->attr[0].f);
    for (int64_t j = 0; y && j < C; j++) y[r * C + j] = (x[j] - m) * s * w[j] + (b ? b[j] : 0);
    if (mean) mean[r] = m;
    if (rstd) rstd[r] = s;
  }
}
RFT_CASES(layernorm) = {"layernorm(f[7,13], f[13], f[13]) eps=1e-5",        "layernorm(f[1,37], f[37], _) eps=1e-6",
                        "layernorm(f[3,5,17], F[17], F[17]) eps=1e-5",      "layernorm(f[0,19], f[19], f[19]) eps=1e-5",
                        "layernorm(f[5,0], f[0], f[0]) eps=1e-2",           "layernorm(f[11,1], f[1], f[1]) eps=1e-2",
                        "layernorm(f[43,1031], f[1031], f[1031]) eps=1e-5", NULL};

/* The operands and results of the norm after the sum. */
static rfi_call norm_of_sum(const rfi_call *call, rfi_arg *in) {
  const rfi_arg *sum = &call->out[0];
  const double *x = call->in[0].data, *other = call->in[1].data;
  double *s = sum->data ? sum->data : call->out[1].data; /* y holds the sum if the sum is unused */
  for (int64_t i = 0; i < rfi_count(&sum->type); i++) s[i] = rft_round(x[i] + other[i]);
  in[0] = (rfi_arg){.type = sum->type, .data = s};
  for (int k = 2; k < call->n_in; k++) in[k - 1] = call->in[k];
  return (rfi_call){
      .n_in = call->n_in - 1, .n_out = call->n_out - 1, .in = in, .out = call->out + 1, .attr = call->attr};
}

RFT_REF(add_layernorm) {
  rfi_arg in[3];
  const rfi_call norm = norm_of_sum(call, in);
  RFT_NAME(layernorm)(&norm);
}
RFT_CASES(add_layernorm) = {"add_layernorm(f[7,13], f[7,13], f[13], f[13]) eps=1e-5",
                            "add_layernorm(f[1,37], f[1,37], f[37], _) eps=1e-6",
                            "add_layernorm(f[3,5,16], f[3,5,16], F[16], F[16]) eps=1e-5",
                            "add_layernorm(f[0,19], f[0,19], f[19], f[19]) eps=1e-5",
                            "add_layernorm(f[5,0], f[5,0], f[0], f[0]) eps=1e-2",
                            "add_layernorm(f[43,1031], f[43,1031], f[1031], f[1031]) eps=1e-5",
                            "add_layernorm(f[9,1040], f[9,1040], f[1040], f[1040]) eps=1e-5",
                            NULL};

RFT_REF(layernorm_dx) {
  const double *w = call->in[2].data, *mean = call->in[3].data, *rstd = call->in[4].data;
  int64_t C = width(&call->in[1]);
  for (int64_t r = 0; r < height(&call->in[1]); r++) {
    const double *dy = (const double *)call->in[0].data + r * C, *x = (const double *)call->in[1].data + r * C;
    double *dx = (double *)call->out[0].data + r * C, g = 0, gh = 0;
    for (int64_t j = 0; j < C; j++) {
      g += dy[j] * w[j] / (double)C;
      gh += dy[j] * w[j] * (x[j] - mean[r]) * rstd[r] / (double)C;
    }
    for (int64_t j = 0; j < C; j++) dx[j] = rstd[r] * (dy[j] * w[j] - g - (x[j] - mean[r]) * rstd[r] * gh);
  }
}
RFT_CASES(layernorm_dx) = {"layernorm_dx(f[7,13], f[7,13], f[13], F[7], F[7]>0)",
                           "layernorm_dx(f[1,37], f[1,37], f[37], F[1], F[1]>0)",
                           "layernorm_dx(f[3,5,17], f[3,5,17], F[17], F[3,5], F[3,5]>0)",
                           "layernorm_dx(f[0,19], f[0,19], f[19], F[0], F[0]>0)",
                           "layernorm_dx(f[43,1031], f[43,1031], f[1031], F[43], F[43]>0)",
                           NULL};

RFT_REF(layernorm_dw) {
  const double *dy = call->in[0].data, *x = call->in[1].data, *mean = call->in[2].data, *rstd = call->in[3].data;
  const double *acc = call->n_in > 4 ? call->in[4].data : NULL;
  double *dw = call->out[0].data;
  int64_t C = width(&call->in[1]);
  for (int64_t j = 0; j < C; j++) {
    double s = acc ? acc[j] : 0;
    for (int64_t r = 0; r < height(&call->in[1]); r++) s += dy[r * C + j] * (x[r * C + j] - mean[r]) * rstd[r];
    dw[j] = s;
  }
}
RFT_CASES(layernorm_dw) = {"layernorm_dw(f[7,13], f[7,13], F[7], F[7]>0, _)",
                           "layernorm_dw(f[1,37], f[1,37], F[1], F[1]>0, F[37])",
                           "layernorm_dw(f[3,5,17], f[3,5,17], F[3,5], F[3,5]>0, F[17])",
                           "layernorm_dw(f[0,19], f[0,19], F[0], F[0]>0, _)",
                           "layernorm_dw(f[151,521], f[151,521], F[151], F[151]>0, _)",
                           NULL};

RFT_REF(layernorm_db) {
  const double *dy = call->in[0].data, *acc = call->n_in > 1 ? call->in[1].data : NULL;
  double *db = call->out[0].data;
  int64_t C = width(&call->in[0]);
  for (int64_t j = 0; j < C; j++) {
    double s = acc ? acc[j] : 0;
    for (int64_t r = 0; r < height(&call->in[0]); r++) s += dy[r * C + j];
    db[j] = s;
  }
}
RFT_CASES(layernorm_db) = {"layernorm_db(f[7,13], _)", "layernorm_db(f[1,37], F[37])", "layernorm_db(f[3,5,17], F[17])",
                           "layernorm_db(f[0,19], _)", "layernorm_db(f[151,521], _)",  NULL};

/* Adds the residual to dx. */
static void add_residual(const rfi_arg *residual, const rfi_arg *dx) {
  const double *r = residual->data;
  double *o = dx->data;
  for (int64_t i = 0; r && o && i < rfi_count(&dx->type); i++) o[i] += r[i];
}

RFT_REF(layernorm_bwd) {
  const rfi_arg db_in[] = {call->in[0], call->in[7]},
                dw_in[] = {call->in[0], call->in[1], call->in[3], call->in[4], call->in[6]};
  const rfi_call dw = {.n_in = 5, .n_out = 1, .in = dw_in, .out = &call->out[1]};
  const rfi_call db = {.n_in = 2, .n_out = 1, .in = db_in, .out = &call->out[2]};
  if (call->out[0].data) RFT_NAME(layernorm_dx)(call);
  if (call->out[1].data) RFT_NAME(layernorm_dw)(&dw);
  if (call->out[2].data) RFT_NAME(layernorm_db)(&db);
  add_residual(&call->in[5], &call->out[0]);
  const rfi_arg sum_in[] = {call->out[0], call->in[8]};
  const rfi_call sum = {.n_in = 2, .n_out = 1, .in = sum_in, .out = &call->out[3]};
  if (call->out[3].data) RFT_NAME(layernorm_db)(&sum);
}
RFT_CASES(layernorm_bwd) = {"layernorm_bwd(f[7,13], f[7,13], f[13], F[7], F[7]>0, f[7,13], _, _, _)",
                            "layernorm_bwd(f[1,37], f[1,37], f[37], F[1], F[1]>0, _, F[37], F[37], F[37])",
                            "layernorm_bwd(f[3,5,17], f[3,5,17], F[17], F[3,5], F[3,5]>0, f[3,5,17], F[17], _, F[17])",
                            "layernorm_bwd(f[0,19], f[0,19], f[19], F[0], F[0]>0, f[0,19], _, F[19], _)",
                            "layernorm_bwd(f[151,521], f[151,521], f[521], F[151], F[151]>0, f[151,521], _, _, _)",
                            "layernorm_bwd(f[43,1031], f[43,1031], f[1031], F[43], F[43]>0, _, _, _, _)",
                            "layernorm_bwd(f[41,40], f[41,40], f[40], F[41], F[41]>0, f[41,40], _, F[40], F[40])",
                            "layernorm_bwd(f[37,96], f[37,96], f[96], F[37], F[37]>0, _, _, _, _)",
                            "layernorm_bwd(f[29,768], f[29,768], F[768], F[29], F[29]>0, f[29,768], _, _, F[768])",
                            "layernorm_bwd(f[23,1040], f[23,1040], f[1040], F[23], F[23]>0, f[23,1040], _, _, _)",
                            "layernorm_bwd(f[3,6400], f[3,6400], f[6400], F[3], F[3]>0, f[3,6400], _, _, _)",
                            NULL};

RFT_REF(rmsnorm) {
  const double *w = call->in[1].data;
  double *rstd = call->out[1].data;
  int64_t C = width(&call->in[0]);
  for (int64_t r = 0; r < height(&call->in[0]); r++) {
    const double *x = (const double *)call->in[0].data + r * C;
    double *y = call->out[0].data, v = 0;
    for (int64_t j = 0; j < C; j++) v += x[j] * x[j] / (double)C;
    double s = 1 / sqrt(v + call->attr[0].f);
    for (int64_t j = 0; y && j < C; j++) y[r * C + j] = x[j] * s * w[j];
    if (rstd) rstd[r] = s;
  }
}
RFT_CASES(rmsnorm) = {"rmsnorm(f[7,13], f[13]) eps=1e-5",      "rmsnorm(f[1,37], F[37]) eps=1e-6",
                      "rmsnorm(f[3,5,17], f[17]) eps=1e-5",    "rmsnorm(f[0,19], f[19]) eps=1e-5",
                      "rmsnorm(f[5,0], f[0]) eps=1e-2",        "rmsnorm(f[11,1], f[1]) eps=1e-2",
                      "rmsnorm(f[43,1031], f[1031]) eps=1e-5", NULL};

RFT_REF(add_rmsnorm) {
  rfi_arg in[2];
  const rfi_call norm = norm_of_sum(call, in);
  RFT_NAME(rmsnorm)(&norm);
}
RFT_CASES(add_rmsnorm) = {"add_rmsnorm(f[7,13], f[7,13], f[13]) eps=1e-5",
                          "add_rmsnorm(f[3,5,16], f[3,5,16], F[16]) eps=1e-5",
                          "add_rmsnorm(f[0,19], f[0,19], f[19]) eps=1e-5",
                          "add_rmsnorm(f[5,0], f[5,0], f[0]) eps=1e-2",
                          "add_rmsnorm(f[43,1031], f[43,1031], f[1031]) eps=1e-5",
                          "add_rmsnorm(f[9,1040], f[9,1040], f[1040]) eps=1e-5",
                          NULL};

RFT_REF(rmsnorm_dx) {
  const double *w = call->in[2].data, *rstd = call->in[3].data;
  int64_t C = width(&call->in[1]);
  for (int64_t r = 0; r < height(&call->in[1]); r++) {
    const double *dy = (const double *)call->in[0].data + r * C, *x = (const double *)call->in[1].data + r * C;
    double *dx = (double *)call->out[0].data + r * C, s = 0;
    for (int64_t j = 0; j < C; j++) s += dy[j] * w[j] * x[j] / (double)C;
    for (int64_t j = 0; j < C; j++) dx[j] = rstd[r] * (dy[j] * w[j] - x[j] * rstd[r] * rstd[r] * s);
  }
}
RFT_CASES(rmsnorm_dx) = {
    "rmsnorm_dx(f[7,13], f[7,13], f[13], F[7]>0)",          "rmsnorm_dx(f[1,37], f[1,37], f[37], F[1]>0)",
    "rmsnorm_dx(f[3,5,17], f[3,5,17], F[17], F[3,5]>0)",    "rmsnorm_dx(f[0,19], f[0,19], f[19], F[0]>0)",
    "rmsnorm_dx(f[43,1031], f[43,1031], f[1031], F[43]>0)", NULL};

RFT_REF(rmsnorm_dw) {
  const double *dy = call->in[0].data, *x = call->in[1].data, *rstd = call->in[2].data;
  const double *acc = call->n_in > 3 ? call->in[3].data : NULL;
  double *dw = call->out[0].data;
  int64_t C = width(&call->in[1]);
  for (int64_t j = 0; j < C; j++) {
    double s = acc ? acc[j] : 0;
    for (int64_t r = 0; r < height(&call->in[1]); r++) s += dy[r * C + j] * x[r * C + j] * rstd[r];
    dw[j] = s;
  }
}
RFT_CASES(rmsnorm_dw) = {
    "rmsnorm_dw(f[7,13], f[7,13], F[7]>0, _)",           "rmsnorm_dw(f[1,37], f[1,37], F[1]>0, F[37])",
    "rmsnorm_dw(f[3,5,17], f[3,5,17], F[3,5]>0, F[17])", "rmsnorm_dw(f[0,19], f[0,19], F[0]>0, _)",
    "rmsnorm_dw(f[151,521], f[151,521], F[151]>0, _)",   NULL};

RFT_REF(rmsnorm_bwd) {
  const rfi_arg dw_in[] = {call->in[0], call->in[1], call->in[3], call->in[5]};
  const rfi_call dw = {.n_in = 4, .n_out = 1, .in = dw_in, .out = &call->out[1]};
  if (call->out[0].data) RFT_NAME(rmsnorm_dx)(call);
  if (call->out[1].data) RFT_NAME(rmsnorm_dw)(&dw);
  add_residual(&call->in[4], &call->out[0]);
}
RFT_CASES(rmsnorm_bwd) = {"rmsnorm_bwd(f[7,13], f[7,13], f[13], F[7]>0, f[7,13], _)",
                          "rmsnorm_bwd(f[1,37], f[1,37], f[37], F[1]>0, _, F[37])",
                          "rmsnorm_bwd(f[3,5,17], f[3,5,17], F[17], F[3,5]>0, f[3,5,17], F[17])",
                          "rmsnorm_bwd(f[0,19], f[0,19], f[19], F[0]>0, f[0,19], _)",
                          "rmsnorm_bwd(f[151,521], f[151,521], f[521], F[151]>0, f[151,521], _)",
                          "rmsnorm_bwd(f[43,1031], f[43,1031], f[1031], F[43]>0, _, _)",
                          NULL};
