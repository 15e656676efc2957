/* SPDX-License-Identifier: Apache-2.0
 *
 * Records the Newton-Schulz iterations of Muon (Jordan et al. 2024) as GEMMs:
 *
 *   x = u / (|u| + 1e-7);  five times: g = x xT,  x = (a I + b g + c g g) x;  then x times a factor by shape
 *
 * |u| is the Frobenius norm, the root of g's trace: no pass over u computes it. The first polynomial divides by it, and
 * the last one has the factor, so an iteration is three GEMMs and one op over g. With more rows than columns g is xT x,
 * and x is multiplied from the right; so g has the smaller side, and nothing is transposed. The matrices of experts are
 * a batch. A weight that has several matrices is updated as these matrices: q, k and v, gate and up.
 */
#include "train/muon.h"

#include <math.h>

#include "base/base.h"
#include "nn/nn.h"
#include "trace/trace.h"

enum { ITERATIONS = 5, PARTS = 3 };
static const double coefficients[3] = {3.4445, -4.7750, 2.0315};

bool rfi_is_muon(const rfi_step_spec *s, int i) {
  rfi_adapter_part part;
  return s->muon && !rfi_adapter_owner(&s->model, i, &part) && rfi_is_linear(rfi_parameter_kind(&s->model, i));
}

/* Rows of a weight are outputs, except in GPT-2. */
static double factor_of(const rfi_step_spec *s, int64_t rows, int64_t columns) {
  const bool transposed = s->model.type == RFR_MODEL_GPT2;
  const double out = (double)(transposed ? columns : rows), in = (double)(transposed ? rows : columns);
  return s->muon_rms ? 0.2 * sqrt(fmax(out, in)) : sqrt(fmax(1.0, out / in));
}

static rfr_value orthogonal(rfr_trace *t, const rfi_step_spec *s, rfr_value x) {
  const rfr_type type = rfr_value_type(t, x);
  const int64_t rows = type.shape[type.rank - 2], columns = type.shape[type.rank - 1];
  const int wide = rows <= columns;
  for (int k = 0; k < ITERATIONS; k++) {
    const double f = k + 1 < ITERATIONS ? 1.0 : factor_of(s, rows, columns);
    const rfr_value gram = rfr_matmul(t, x, x, RFR_NONE, !wide, wide, type.dtype);
    const rfr_value in[2] = {gram, rfr_matmul(t, gram, gram, RFR_NONE, 0, 0, type.dtype)};
    const rfi_attr attr[4] = {rfi_f(f * coefficients[0]), rfi_f(f * coefficients[1]), rfi_f(f * coefficients[2]),
                              rfi_i(k == 0)};
    const rfr_value q = rfi_record(t, RFR_HERE, RFI_OP_muon_polynomial, 2, in, attr, NULL);
    x = wide ? rfr_matmul(t, q, x, RFR_NONE, 0, 0, type.dtype) : rfr_matmul(t, x, q, RFR_NONE, 0, 0, type.dtype);
  }
  return x;
}

/* u as a batch with n times as many matrices, each of adjacent rows. */
static rfr_value in_batch(rfr_trace *t, const rfi_step_spec *s, rfr_value u, int64_t n) {
  const rfr_type type = rfr_value_type(t, u);
  const int r = type.rank;
  const int64_t shape[3] = {(r == 3 ? type.shape[0] : 1) * n, type.shape[r - 2] / n, type.shape[r - 1]};
  return rfr_reshape(t, orthogonal(t, s, rfr_reshape(t, u, 3, shape)), r, type.shape);
}

static rfr_value in_parts(rfr_trace *t, const rfi_step_spec *s, rfr_value u, int axis, const int64_t size[PARTS]) {
  rfr_value part[PARTS];
  int64_t at = 0;
  for (int k = 0; k < PARTS; at += size[k++]) part[k] = orthogonal(t, s, rfr_slice(t, u, axis, at, size[k]));
  return rfr_concat(t, PARTS, part, axis);
}

rfr_value rfi_muon_direction(rfr_trace *t, const rfi_step_spec *s, int i, rfr_value u) {
  const rfr_model_config *m = &s->model;
  const int64_t q = m->heads * m->head_dim, k = m->kv_heads * m->head_dim;
  switch (rfi_parameter_kind(m, i)) {
    case RFI_PARAM_GATE_UP:
    case RFI_PARAM_EXPERT_UP: return in_batch(t, s, u, 2);
    case RFI_PARAM_QKV:
      if (m->type == RFR_MODEL_GPT2) return in_parts(t, s, u, 1, (int64_t[]){q, q, q});
      return q == k ? in_batch(t, s, u, 3) : in_parts(t, s, u, 0, (int64_t[]){q, k, k});
    default: return orthogonal(t, s, u);
  }
}
