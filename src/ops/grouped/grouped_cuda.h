/* SPDX-License-Identifier: Apache-2.0
 *
 * The grouped GEMMs of a GPU. Group g has rows offsets[g] ... offsets[g + 1] - 1; the offsets are on the device.
 *
 *   RFI_GROUPED_TN  y[row] = x[row] w[g]T (+ bias[g] scale[row])      a = x (rows,K)   b = w (G,N,K)   y (rows,N)
 *   RFI_GROUPED_NN  y[row] = x[row] w[g] (+ bias[g] scale[row])       a = x (rows,N)   b = w (G,N,K)   y (rows,K)
 *   RFI_GROUPED_NT  dw[g] (+)= dy[rows of g]T x[rows of g]            a = dy (rows,N)  b = x (rows,K)  y (G,N,K)
 *   RFI_GROUPED_SWIGLU  TN, y may be NULL, and act (rows,N/2) = silu(left half of y) * right half * weight[row]
 * RFI_GROUPED_LORA_TN, RFI_GROUPED_LORA_NN  one group of all rows (offsets NULL), TN or NN + u b2, with b2 laid out
 * as
 *                       w; (+)= y, and one bias for all rows
 *
 * Rows after the last group become zero. y and act are dense; the other operands have dense rows. Only rfi_grouped_sm90
 * supports RFI_GROUPED_SWIGLU and the LoRA kinds.
 */
#ifndef RFI_GROUPED_CUDA_H
#define RFI_GROUPED_CUDA_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum rfi_grouped_kind {
  RFI_GROUPED_TN,
  RFI_GROUPED_NN,
  RFI_GROUPED_NT,
  RFI_GROUPED_SWIGLU,
  RFI_GROUPED_LORA_TN,
  RFI_GROUPED_LORA_NN
} rfi_grouped_kind;

typedef struct rfi_grouped {
  rfi_grouped_kind kind;
  int64_t groups, rows, N, K;
  const int32_t *offsets; /* groups + 1; whatever the values, nothing outside the rows is accessed; NULL: one group */
  const void *a, *b;
  const rfr_arg *ws;                         /* separate weights, in host memory; then b is NULL; NULL: w is packed */
  int64_t a_row, b_row, b_group, bias_group; /* strides in elements; b_group: of w */
  const void *bias, *scale;                  /* NULL: none */
  void *y, *act;
  const void *weight; /* per row */
  rfr_dtype a_dtype, b_dtype, y_dtype, bias_dtype, scale_dtype, weight_dtype;
  const void *a2, *b2; /* the LoRA kinds: u (rows,R), and (N,R) or (R,K) */
  int64_t a2_row, b2_row, R;
  int accumulate; /* add to y; NT and the LoRA kinds only */
  /* NT: number of groups that share the rows; choices that depend on it are the same for every part of them */
  int64_t of;
  int more;       /* later groups, and the rows after them, belong to another call; not in NT */
  int32_t *taken; /* RFI_GROUPED_TAKEN bytes for the counters of rfi_grouped_sm90 */
} rfi_grouped;

enum { RFI_GROUPED_TAKEN = sizeof(int32_t) };

/* The part of the call for at most `most` groups from `first` on: the addresses of separate weights are launch
 * arguments, which have limited space. A row is written by the launch that has its group. */
static inline rfi_grouped rfi_grouped_part(const rfi_grouped *g, int64_t first, int64_t most) {
  rfi_grouped part = *g;
  part.groups = g->groups - first < most ? g->groups - first : most;
  part.more = first + part.groups < g->groups;
  part.offsets += first;
  part.ws += first;
  if (part.bias) part.bias = (const char *)part.bias + first * part.bias_group * (part.bias_dtype == RFR_F32 ? 4 : 2);
  return part;
}

/* Any types, any strides; f32 arithmetic. */
rfr_status rfi_grouped_any(const rfi_grouped *p, int sms, cudaStream_t stream);

/* Needs sm_90 and 16-bit operands of one type, whose rows and groups begin at multiples of 16 bytes.
 * rfi_grouped_sm90_lacks: why this kernel does not support a call; NULL: it does. */
const char *rfi_grouped_sm90_lacks(const rfi_grouped *p);
rfr_status rfi_grouped_sm90(const rfi_grouped *p, int sms, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
