/* SPDX-License-Identifier: Apache-2.0
 *
 * Several texts in one call. A cursor (4) is for one text, a cursor (B,4) for B texts. Then text and caches have a
 * leading dimension B, and other operands have the rows of text 0, then those of text 1, and so on. An op is defined
 * for one text and runs once per text, so no text depends on another.
 */
#ifndef RFI_SEQUENCES_H
#define RFI_SEQUENCES_H

#include "refrain/op.h"

/* Bit masks of operands and results: those with a leading dimension B (_front), and those with the rows of all texts
 * (_rows). */
typedef struct rfi_split {
  unsigned in_front, in_rows, out_front, out_rows;
  int cursor; /* operand index */
} rfi_split;

static const rfi_split rfi_split_text_read = {3, 0, 0, 7, 1}, rfi_split_cache_write = {5, 2, 1, 0, 2},
                       rfi_split_text_append = {5, 2, 1, 0, 2}, rfi_split_text_end = {3, 0, 1, 0, 0},
                       rfi_split_attention_cached = {14, 1, 0, 1, 3};

/* Bits of an element; the CUDA module cannot call the library's functions. */
static inline int64_t rfi_element_bits(rfr_dtype dtype) {
  static const int bits[] = {
#define RFI_ELEMENT_BITS(e, name, n, st) n,
      RFR_DTYPES(RFI_ELEMENT_BITS)
#undef RFI_ELEMENT_BITS
  };
  return bits[dtype];
}

static inline int64_t rfi_texts(const rfr_type *cursor) { return cursor->rank == 2 ? cursor->shape[0] : 1; }

static inline rfr_arg rfi_text_of(rfr_arg x, unsigned bit, unsigned front, unsigned rows, int64_t b, int64_t texts) {
  int64_t step = 0;
  if (front & bit) {
    step = x.stride[0];
    x.type.rank--;
    for (int d = 0; d < x.type.rank; d++) {
      x.type.shape[d] = x.type.shape[d + 1];
      x.stride[d] = x.stride[d + 1];
    }
  } else if (rows & bit && x.type.rank > 0) {
    x.type.shape[0] /= texts;
    step = x.type.shape[0] * x.stride[0];
  }
  if (x.data) x.data = (char *)x.data + b * step * (rfi_element_bits(x.type.dtype) / 8);
  return x;
}

/* The operands and the results of a call for one text. */
typedef struct rfi_text_call {
  rfr_arg in[4], out[3];
} rfi_text_call;

/* The call for text b; `of` must outlive it. */
static inline rfr_call rfi_call_of_text(const rfr_call *c, const rfi_split *s, int64_t b, rfi_text_call *of) {
  rfr_call one = *c;
  if (c->in[s->cursor].type.rank != 2) return one;
  const int64_t texts = c->in[s->cursor].type.shape[0];
  for (int i = 0; i < c->n_in; i++) of->in[i] = rfi_text_of(c->in[i], 1u << i, s->in_front, s->in_rows, b, texts);
  for (int i = 0; i < c->n_out; i++) of->out[i] = rfi_text_of(c->out[i], 1u << i, s->out_front, s->out_rows, b, texts);
  one.in = of->in;
  one.out = of->out;
  return one;
}

#endif
