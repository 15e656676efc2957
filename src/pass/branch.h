/* SPDX-License-Identifier: Apache-2.0
 *
 * The side branch: small ops of a step that run beside the others.
 */
#ifndef RFI_BRANCH_H
#define RFI_BRANCH_H

#include "trace/trace.h"

/* Where an op may run: beside those of the line from op `from` on, which is itself or listed before it, to op `until`,
 * which is the first that waits for it (n_ops: the end does). until 0: the op is one of the line. */
typedef struct rfi_side_op {
  int from, until;
} rfi_side_op;

/* One for each op; *out is NULL when none goes aside; from the context. workspace[i]: bytes that op i's kernel asks
 * for. */
rfr_status rfi_branch(const rfr_trace *t, const int64_t *workspace, rfi_side_op **out);

#endif
