/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of programs and of callables: one range of bytes, in regions.
 *
 *   [ rings | persistent | slots | shared | windows | scratch ]
 *
 * A slot has the values that live from one part to another; all programs together have one slot, for the step. The
 * shared bytes have the values that live within one part, windows the gathered parameters and unreduced gradients, and
 * scratch the results that warm-up writes. The host fills and reads the rings while kernels run, so they are a separate
 * allocation. All other regions are the arena, which a guard follows. The regions from slots on may instead be in
 * memory that several layouts use one at a time (step_memory.h); it has the bytes of the largest layout.
 */
#ifndef RFI_LAYOUT_H
#define RFI_LAYOUT_H

#include "backend/backend.h"

typedef enum rfi_region {
  RFI_REGION_RING,
  RFI_REGION_PERSISTENT,
  RFI_REGION_SLOT,
  RFI_REGION_SHARED,
  RFI_REGION_WINDOW,
  RFI_REGION_SCRATCH,
  RFI_REGIONS, /* as an offset: the end of the range; as a location: not placed */
  RFI_BLOCK,   /* as a location: in the block of a slot, in RFI_REGION_SLOT */
  RFI_NAMED,   /* as a location: stored under a name (storage.h) */
  RFI_FIXED    /* as a location: the caller's memory, one address per slot */
} rfi_region;

typedef struct rfi_layout {
  int64_t bytes[RFI_REGIONS];
  int slots; /* slots of callables; 0 for programs */
  unsigned char *ring, *arena;
  rfr_step_memory *step; /* NULL: the regions from RFI_REGION_SLOT on are in the arena */
} rfi_layout;

/* Whether the bytes lie within the range; whether they overlap it. Both are false if range is NULL. */
static inline bool rfi_lies_in(const void *data, int64_t bytes, const void *range, int64_t range_bytes) {
  const uintptr_t at = (uintptr_t)data, first = (uintptr_t)range;
  return range && at >= first && bytes <= range_bytes && at - first <= (uintptr_t)(range_bytes - bytes);
}
static inline bool rfi_overlaps(const void *data, int64_t bytes, const void *range, int64_t range_bytes) {
  const uintptr_t at = (uintptr_t)data, first = (uintptr_t)range;
  return range && at + (uintptr_t)bytes > first && at < first + (uintptr_t)range_bytes;
}

/* Sets the size of every region to 0. */
void rfi_layout_clear(rfi_layout *l);
/* The offset of a region in the range. RFI_REGIONS: the total size; if there is step memory and it is larger than the
 * layout's own regions from RFI_REGION_SLOT on, its size counts in their place. */
int64_t rfi_layout_at(const rfi_layout *l, rfi_region region);
/* The total size of the layout's own regions from RFI_REGION_SLOT on. */
int64_t rfi_layout_step_bytes(const rfi_layout *l);
/* Appends bytes to a region; returns their offset in it. */
int64_t rfi_layout_add(rfi_layout *l, rfi_region region, int64_t bytes);
unsigned char *rfi_address(const rfi_layout *l, rfi_region region, int64_t offset);

/* plan.over_budget if the regions exceed a budget (0: none), with the size of each. `fixed`: recompute cannot lower
 * them. */
rfr_status rfi_layout_check_budget(const rfi_layout *l, int64_t budget, rfr_recompute recompute, bool fixed);

/* The recompute levels that `plan` can plan, in order of descending live bytes. Packing is not perfect, so the plan of
 * one more level can be slightly larger. */
typedef struct rfi_levels {
  int first, last;
  rfr_status (*plan)(void *user, int level, int64_t enough, int64_t *bytes); /* a plan above `enough` does not fit */
  void *user;
} rfi_levels;

/* Finds the first level from `low` on that fits in the budget, by bisection. If the last level does not fit, calls
 * rfi_find_smallest. */
rfr_status rfi_find_level(const rfi_levels *l, int low, int64_t budget, int *level);
/* Among evenly spaced levels, from the last down: the first that needs at most `enough` bytes, else the smallest. The
 * set of tried levels does not depend on the budget, so the budget that an error suggests works. */
rfr_status rfi_find_smallest(const rfi_levels *l, int64_t enough, int *level);

/* Allocates memory that is not allocated yet, except step memory. Rings and persistent bytes are zeroed; all others and
 * the guard are filled with `byte`. */
rfr_status rfi_layout_allocate(rfi_layout *l, const rfi_backend *b, rfi_device *d, unsigned char byte);
void rfi_layout_free(rfi_layout *l, const rfi_backend *b, rfi_device *d);

#endif
