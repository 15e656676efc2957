/* SPDX-License-Identifier: Apache-2.0
 *
 * Shape rules of ops that take several texts, see sequences.h.
 */
#ifndef RFI_SEQUENCE_RULE_H
#define RFI_SEQUENCE_RULE_H

#include "ops/decode/sequences.h"
#include "ops/rule.h"

/* Writes the types of n operands for one text to `in`, which *one then has for its checks. */
rfr_status rfi_infer_text(const rfi_infer *c, const rfi_split *split, int n, rfr_type *in, rfi_infer *one);

#endif
