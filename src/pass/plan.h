/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan: an offset for every storage and workspace of a program, in one arena.
 */
#ifndef RFI_PLAN_H
#define RFI_PLAN_H

#include "pass/branch.h"
#include "trace/live.h"
#include "trace/trace.h"

typedef struct rfi_buffer {
  int64_t bytes, offset; /* offset within the step-scoped part */
  int first, last;       /* op indices, inclusive */
  rfr_value value;       /* owner of the storage; RFR_NONE: workspace of op `first` */
} rfi_buffer;

typedef struct rfi_plan {
  rfr_ctx *ctx;
  rfi_buffer *buffer; /* step-scoped buffers, in the order of their first op */
  int n;
  int64_t bytes;       /* highest end */
  int64_t lower_bound; /* maximum of live bytes */
} rfi_plan;

/* workspace[i]: bytes of the workspace of op i's kernel; side: ops of the side stream (branch.h), NULL: none.
 * Deterministic: the same trace gives the same plan. */
rfr_status rfi_plan_make(const rfr_trace *t, const int64_t *workspace, const rfi_side_op *side, rfi_plan *out);
/* The same for given lifetimes. `out` has ctx, n and buffer; sorts the buffers and sets their offsets. Time counts from
 * 0 to `end`. */
rfr_status rfi_plan_place(rfi_plan *out, int end);
void rfi_plan_deinit(rfi_plan *plan);

#endif
