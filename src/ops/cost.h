/* SPDX-License-Identifier: Apache-2.0
 *
 * What an op costs, from its types alone.
 */
#ifndef RFI_COST_H
#define RFI_COST_H

#include "trace/trace.h"

typedef struct rfi_cost {
  double flops; /* of matrix products and attention, a multiply-add as two; 0 for what memory bounds */
  double bytes; /* operands read once, results written once; 0 for views */
} rfi_cost;
rfi_cost rfi_op_cost(const rfr_trace *t, const rfi_opr *op);

#endif
