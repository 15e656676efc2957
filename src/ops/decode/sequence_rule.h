/* SPDX-License-Identifier: Apache-2.0
 *
 * Shape rules of ops that take several texts, see sequences.h.
 */
#ifndef RFI_SEQUENCE_RULE_H
#define RFI_SEQUENCE_RULE_H

#include "ops/decode/sequences.h"
#include "ops/rule.h"

/* The types of one text's n operands, in `in`, for the checks of *one. */
rfr_status rfi_infer_text(const rfi_infer *c, const rfi_split *split, int n, rfr_type *in, rfi_infer *one);

#endif
