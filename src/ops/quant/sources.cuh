/* SPDX-License-Identifier: Apache-2.0
 *
 * Sources of codes.cuh: elements that an op computes, in the arithmetic of that op, so that they are bitwise equal to
 * its results.
 */
#ifndef RFI_SOURCES_CUH
#define RFI_SOURCES_CUH

#include "ops/elementwise/logistic.cuh"
#include "ops/norm/norm.cuh"
#include "ops/quant/codes.cuh"

template <typename T> struct rfi_source_swiglu {
  enum { PARTS = 1, FLIGHT = 2, STORED = false };
  const T *gate, *up;
  int64_t gate_down, up_down; /* strides */
  typedef rfi_no_column column;
  struct raw {
    rfi_pack<T, RFI_CODES_EACH> gate, up;
  };
  __device__ column at(int64_t) const { return column(); }
  __device__ raw fetch(int64_t, int64_t i, int64_t j) const {
    return {rfi_load8(gate + i * gate_down + j), rfi_load8(up + i * up_down + j)};
  }
  __device__ void give(const raw &r, const column &, float (&y)[1][RFI_CODES_EACH]) const {
#pragma unroll
    for (int k = 0; k < RFI_CODES_EACH; k++) y[0][k] = rfi_swiglu<T>(rfi_widen(r.gate.x[k]), rfi_widen(r.up.x[k]));
  }
};

/* The gradients of gate and up. */
template <typename T> struct rfi_source_swiglu_bwd {
  enum { PARTS = 2, FLIGHT = 2, STORED = false };
  const T *dy, *gate, *up;
  int64_t dy_down, gate_down, up_down;
  typedef rfi_no_column column;
  struct raw {
    rfi_pack<T, RFI_CODES_EACH> dy, gate, up;
  };
  __device__ column at(int64_t) const { return column(); }
  __device__ raw fetch(int64_t, int64_t i, int64_t j) const {
    return {rfi_load8(dy + i * dy_down + j), rfi_load8(gate + i * gate_down + j), rfi_load8(up + i * up_down + j)};
  }
  __device__ void give(const raw &r, const column &, float (&y)[2][RFI_CODES_EACH]) const {
#pragma unroll
    for (int k = 0; k < RFI_CODES_EACH; k++)
      rfi_swiglu_bwd<T>(rfi_widen(r.dy.x[k]), rfi_widen(r.gate.x[k]), rfi_widen(r.up.x[k]), &y[0][k], &y[1][k]);
  }
};

/* A norm whose statistics are known. */
template <typename T, bool MEAN> struct rfi_source_norm {
  enum { PARTS = 1, FLIGHT = 4, STORED = false };
  const T *x;
  const void *w, *b; /* b NULL: none */
  const float *mean, *rstd;
  int64_t down;
  rfr_dtype w_type, b_type;
  struct column {
    float w[RFI_CODES_EACH], b[RFI_CODES_EACH];
  };
  struct raw {
    rfi_pack<T, RFI_CODES_EACH> x;
    float mean, rstd;
  };
  __device__ column at(int64_t j) const {
    column c = {};
#pragma unroll
    for (int k = 0; k < RFI_CODES_EACH; k++) {
      c.w[k] = rfi_norm_load(w, w_type, j + k);
      if (MEAN && b) c.b[k] = rfi_norm_load(b, b_type, j + k);
    }
    return c;
  }
  __device__ raw fetch(int64_t, int64_t i, int64_t j) const {
    return {rfi_load8(x + i * down + j), MEAN ? __ldg(mean + i) : 0.0f, __ldg(rstd + i)};
  }
  __device__ void give(const raw &r, const column &c, float (&y)[1][RFI_CODES_EACH]) const {
#pragma unroll
    for (int k = 0; k < RFI_CODES_EACH; k++) y[0][k] = (rfi_widen(r.x.x[k]) - r.mean) * r.rstd * c.w[k] + c.b[k];
  }
};

#endif
