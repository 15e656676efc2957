/* SPDX-License-Identifier: Apache-2.0
 *
 * What an op costs, from its types; and what the documents of one call spare.
 */
#ifndef RFI_COST_H
#define RFI_COST_H

#include "ops/call.h"
#include "trace/trace.h"

typedef struct rfi_cost {
  double flops; /* of matrix products and attention, a multiply-add as two; 0 for what memory bounds */
  double bytes; /* operands read once, results written once; 0 for views */
} rfi_cost;
rfi_cost rfi_op_cost(const rfr_trace *t, const rfi_opr *op);
/* The operand of an attention whose values say how much of the counted work there is: the offsets of documents or a
 * cursor; -1 for other ops. */
int rfi_pairs_operand(const rfi_opr *op);
/* The share of an attention's cost that they leave; `values` as they lie in that operand, where the host can read
 * them. */
double rfi_share_of_pairs(const rfi_opr *op, const rfi_call *call, const void *values);

#endif
