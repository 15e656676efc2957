/* SPDX-License-Identifier: Apache-2.0
 *
 * States of delayed scaling, for the pass quantize (quantize_delayed.c).
 */
#ifndef RFI_QUANTIZE_H
#define RFI_QUANTIZE_H

#include "pass/pass.h"

typedef struct rfi_amax {
  rfr_value value; /* f32 (n), in the new trace; all belong to one slot */
  int slot;
  rfr_dtype format;
  uint8_t phase; /* phase of the op that computes it */
} rfi_amax;

typedef struct rfi_delayed {
  const rfr_recipe *recipe; /* NULL: the trace has no such recipe */
  /* the callable belongs to a set that trains: amaxes are stored in a state, and the set updates at the end of the
   * step */
  bool collects;
  rfr_value history, scale; /* in the new trace: f32 (H,S) and (S) */
  rfr_value amax_state;     /* f32 (2,S); only if it collects */
  rfi_arena *arena;
  rfi_amax *list;
  int n, cap;
} rfi_delayed;

/* Declares the states. */
rfr_status rfi_delayed_begin(rfi_delayed *d, rfi_rewrite *r, rfi_arena *arena, int slots);
/* The scale of a slot as f32 (slices), for an op with the labels of `like`. */
rfr_status rfi_delayed_scale(const rfi_delayed *d, rfi_rewrite *r, const rfi_opr *like, int slot, int64_t slices,
                             rfr_value *out);
/* Adds the amaxes of a slot, f32 (n). */
rfr_status rfi_delayed_note(rfi_delayed *d, rfi_amax amax);
/* Updates the states at the end of the step, or stores the amaxes for the update. */
rfr_status rfi_delayed_end(const rfi_delayed *d, rfi_rewrite *r);

#endif
