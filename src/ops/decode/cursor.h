/* SPDX-License-Identifier: Apache-2.0
 *
 * The cursor of a text during generation, the tokens that a program reads next, and the operand `sampling`. All decode
 * ops use these functions, so they agree. The cursor is data and may have any value; the tokens read always fit into
 * the caches.
 */
#ifndef RFI_CURSOR_H
#define RFI_CURSOR_H

#include "core/rng.h"
#include "refrain/op.h"

enum { RFI_CURSOR_CACHED, RFI_CURSOR_KNOWN, RFI_CURSOR_DROPPED, RFI_CURSOR_SEED, RFI_CURSOR_N };

/* The random stream of the draws. */
enum { RFI_DRAW_STREAM = 3 };

typedef struct rfi_take {
  int64_t first, count; /* positions first .. first + count - 1 */
  bool all;             /* the last known token is included, so the next one can be drawn */
} rfi_take;

RFI_BOTH_SIDES static inline int64_t rfi_cursor_get(const rfr_arg *cursor, int i) {
  return ((const int64_t *)cursor->data)[i * cursor->stride[0]];
}

RFI_BOTH_SIDES static inline rfi_take rfi_take_next(const rfr_arg *cursor, int64_t rows, int64_t capacity) {
  const int64_t known = rfi_cursor_get(cursor, RFI_CURSOR_KNOWN);
  int64_t first = rfi_cursor_get(cursor, RFI_CURSOR_CACHED), end = known;
  if (first < 0 || first > capacity) first = capacity;
  if (end > capacity) end = capacity;
  int64_t count = end > first ? end - first : 0;
  if (count > rows) count = rows;
  const rfi_take take = {first, count, count > 0 && first + count == known};
  return take;
}

/* The elements of `sampling`. */
enum {
  RFI_SAMPLING_TEMPERATURE,
  RFI_SAMPLING_TOP_K,
  RFI_SAMPLING_TOP_P,
  RFI_SAMPLING_MIN_P,
  RFI_SAMPLING_PENALTY,
  RFI_SAMPLING_N
};

/* top_k of V candidates; V if it is out of range. */
RFI_BOTH_SIDES static inline int64_t rfi_sampling_top_k(const double *sampling, int64_t V) {
  const double k = sampling[RFI_SAMPLING_TOP_K];
  return k >= 1.0 && k < (double)V ? (int64_t)k : V;
}
RFI_BOTH_SIDES static inline bool rfi_sampling_penalizes(const double *sampling) {
  return sampling[RFI_SAMPLING_PENALTY] > 0.0 && sampling[RFI_SAMPLING_PENALTY] != 1.0;
}
/* The logit of a token that occurs in the text. */
RFI_BOTH_SIDES static inline float rfi_sampling_penalize(const double *sampling, float x) {
  const float penalty = (float)sampling[RFI_SAMPLING_PENALTY];
  return x > 0.0f ? x / penalty : x * penalty;
}

/* The draw in [0, 1) for the next position of the full text, from 53 bits. It is a pure function of the seed and of
 * that position, which counts the dropped tokens too. */
RFI_BOTH_SIDES static inline double rfi_cursor_draw(const rfr_arg *cursor) {
  const uint64_t seed = (uint64_t)rfi_cursor_get(cursor, RFI_CURSOR_SEED);
  const uint64_t position =
      (uint64_t)rfi_cursor_get(cursor, RFI_CURSOR_DROPPED) + (uint64_t)rfi_cursor_get(cursor, RFI_CURSOR_KNOWN);
  const rfi_u32x4 r = rfi_draw4(rfi_stream_key(seed, RFI_DRAW_STREAM), 0, 0, 0, position);
  return (double)(((uint64_t)r.v[0] << 32 | r.v[1]) >> 11) * 0x1p-53;
}

#endif
