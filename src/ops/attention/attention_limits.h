/* SPDX-License-Identifier: Apache-2.0
 *
 * Limits of attention on a GPU: a block keeps a row of a head in registers, and heads are a dimension of the grid.
 */
#ifndef RFI_ATTENTION_LIMITS_H
#define RFI_ATTENTION_LIMITS_H

#include <stdio.h>

#include "refrain/op.h"

enum { RFI_ATTENTION_MOST_D = 256, RFI_ATTENTION_MOST_HEADS = 65535 };

/* Writes why a GPU has no kernel for this q; returns false if its size is supported. */
static inline bool rfi_attention_lacks(const rfr_type *q, char *text, size_t size) {
  if (q->shape[2] <= RFI_ATTENTION_MOST_D && q->shape[1] <= RFI_ATTENTION_MOST_HEADS) return false;
  snprintf(text, size, "%lld heads of size %lld; the kernels take at most %d heads of size %d", (long long)q->shape[1],
           (long long)q->shape[2], RFI_ATTENTION_MOST_HEADS, RFI_ATTENTION_MOST_D);
  return true;
}

#endif
