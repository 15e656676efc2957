/* SPDX-License-Identifier: Apache-2.0
 *
 * A range of bytes of a text.
 */
#ifndef REFRAIN_SPAN_H
#define REFRAIN_SPAN_H

#include <stddef.h>

/* Bytes [begin, end). Lists of spans are sorted and disjoint. */
typedef struct rfr_span {
  size_t begin, end;
} rfr_span;

#endif
