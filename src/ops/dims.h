/* SPDX-License-Identifier: Apache-2.0
 *
 * The loop over the dimensions of several arguments at once, in the flat order of a dense result, on the CPU and on a
 * GPU. Dimensions of size 1 are dropped, and adjacent dimensions are merged if the strides of every argument allow it,
 * so that dense operands are one long row.
 */
#ifndef RFI_DIMS_H
#define RFI_DIMS_H

#include "refrain/op.h"

enum { RFI_STRIDED_LOOP_ARGS = 6 };

typedef struct rfi_strided_loop {
  int n, rank;
  int64_t dim[RFR_MAX_RANK], stride[RFI_STRIDED_LOOP_ARGS][RFR_MAX_RANK];
} rfi_strided_loop;

static inline void rfi_strided_loop_start(rfi_strided_loop *w, int n) {
  w->n = n;
  w->rank = 0;
}
/* Adds the next inner dimension; stride[k] belongs to argument k. */
static inline void rfi_strided_loop_dim(rfi_strided_loop *w, int64_t dim, const int64_t *stride) {
  if (dim == 1) return;
  bool merge = w->rank > 0;
  for (int k = 0; merge && k < w->n; k++) merge = w->stride[k][w->rank - 1] == stride[k] * dim;
  int d = merge ? w->rank - 1 : w->rank++;
  w->dim[d] = merge ? w->dim[d] * dim : dim;
  for (int k = 0; k < w->n; k++) w->stride[k][d] = stride[k];
}
/* Call it after the last dimension: it makes sure that there is at least one. */
static inline void rfi_strided_loop_end(rfi_strided_loop *w) {
  if (w->rank) return;
  w->rank = 1;
  w->dim[0] = 1;
  for (int k = 0; k < w->n; k++) w->stride[k][0] = 1;
}
/* Initializes the loop over n arguments; the first one's shape applies to all. */
static inline void rfi_strided_loop_init(rfi_strided_loop *w, int n, const rfr_arg *const *args) {
  int64_t stride[RFI_STRIDED_LOOP_ARGS];
  rfi_strided_loop_start(w, n);
  for (int d = 0; d < args[0]->type.rank; d++) {
    for (int k = 0; k < n; k++) stride[k] = args[k]->stride[d];
    rfi_strided_loop_dim(w, args[0]->type.shape[d], stride);
  }
  rfi_strided_loop_end(w);
}

#endif
