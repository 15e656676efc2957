/* SPDX-License-Identifier: Apache-2.0
 *
 * The side stream: small ops or collectives of a step that run concurrently with the main stream, in their order.
 */
#ifndef RFI_BRANCH_H
#define RFI_BRANCH_H

#include "trace/trace.h"

/* A side op may start when the main stream reaches op `from`, itself or an earlier op. It must be done before op
 * `until`, the first that waits for it (n_ops: the end of the step). until 0: the op runs on the main stream. */
typedef struct rfi_side_op {
  int from, until;
} rfi_side_op;

/* One entry per op, freed with rfi_free; *out is NULL if there is no side op. workspace[i]: bytes of op i's kernel. */
rfr_status rfi_branch(const rfr_trace *t, const int64_t *workspace, rfi_side_op **out);

/* Whether the ops touch one storage and one of them writes. */
bool rfi_ops_conflict(const rfr_trace *t, const rfi_opr *a, const rfi_opr *b);

#endif
