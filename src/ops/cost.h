/* SPDX-License-Identifier: Apache-2.0
 *
 * The cost of an op from its types, and the share of it that the documents of one call leave.
 */
#ifndef RFI_COST_H
#define RFI_COST_H

#include "ops/call.h"
#include "trace/trace.h"

typedef struct rfi_cost {
  double flops; /* of GEMMs and attention, a multiply-add counts 2; 0 for memory-bound ops */
  double bytes; /* operands read once, results written once; 0 for views */
} rfi_cost;
rfi_cost rfi_op_cost(const rfr_trace *t, const rfi_opr *op);
/* The operand of an attention whose values decide how much of the counted work there is: document offsets or a cursor;
 * -1 for other ops. */
int rfi_pairs_operand(const rfi_opr *op);
/* The share of an attention's cost that remains for these values of that operand, read by the host. */
double rfi_share_of_pairs(const rfi_opr *op, const rfi_call *call, const void *values);

#endif
