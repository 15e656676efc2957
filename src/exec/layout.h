/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of programs and of callables: one range of bytes, in regions.
 *
 *   [ rings | persistent | slots | shared | windows | scratch ]
 *
 * A slot holds what lives from one part to another; programs have one in common, for the step. The shared bytes hold
 * what lives within one part; windows hold gathered parameters and unreduced gradients; scratch takes the writes of
 * warm-up. The host fills and reads the rings while kernels run, so they are a separate allocation; all other regions
 * are the arena, followed by a guard. The regions from slots on may instead be in memory that several layouts use in
 * turn (step_memory.h), which has the bytes of the largest.
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
  RFI_REGIONS, /* the end of the range; of a place: nowhere */
  RFI_NAMED,   /* of a place: that of a name (storage.h); */
  RFI_FIXED    /* the caller's memory, one address per slot */
} rfi_region;

typedef struct rfi_location {
  rfi_region region;
  int64_t offset;
} rfi_location;

typedef struct rfi_layout {
  int64_t bytes[RFI_REGIONS];
  int slots; /* of callables; 0: programs */
  unsigned char *ring, *arena;
  rfr_step_memory *step; /* NULL: the regions from slots on are in the arena */
} rfi_layout;

/* Whether bytes lie in a range, which NULL is not, or share some with it. */
static inline bool rfi_lies_in(const void *data, int64_t bytes, const void *range, int64_t range_bytes) {
  const uintptr_t at = (uintptr_t)data, first = (uintptr_t)range;
  return range && at >= first && bytes <= range_bytes && at - first <= (uintptr_t)(range_bytes - bytes);
}
static inline bool rfi_overlaps(const void *data, int64_t bytes, const void *range, int64_t range_bytes) {
  const uintptr_t at = (uintptr_t)data, first = (uintptr_t)range;
  return range && at + (uintptr_t)bytes > first && at < first + (uintptr_t)range_bytes;
}

/* Forgets the bytes of all regions. */
void rfi_layout_clear(rfi_layout *l);
/* The offset of a region in the range; of RFI_REGIONS: the bytes of all, with what step memory has beyond them. */
int64_t rfi_layout_at(const rfi_layout *l, rfi_region region);
/* The bytes of the layout's own regions from slots on. */
int64_t rfi_layout_step_bytes(const rfi_layout *l);
/* Appends bytes to a region. */
rfi_location rfi_layout_add(rfi_layout *l, rfi_region region, int64_t bytes);
unsigned char *rfi_address(const rfi_layout *l, rfi_region region, int64_t offset);

/* plan.over_budget if the regions exceed a budget (0: none), with the bytes of each. `fixed`: no recompute can lower
 * them. */
rfr_status rfi_layout_check_budget(const rfi_layout *l, int64_t budget, rfr_recompute recompute, bool fixed);

/* Recompute levels that `plan` can plan, each with less memory than the one before. As plans are packed, one more level
 * can need a little more. */
typedef struct rfi_levels {
  int first, last;
  rfr_status (*plan)(void *user, int level, int64_t enough, int64_t *bytes); /* more than `enough` is too much */
  void *user;
} rfi_levels;

/* The first level from `low` on that fits in the budget, by bisection. If the last one does not: rfi_find_smallest. */
rfr_status rfi_find_level(const rfi_levels *l, int low, int64_t budget, int *level);
/* Of evenly spaced levels, from the last down, the first that needs at most `enough` bytes, else the smallest. Which
 * levels are tried does not depend on the budget, so a budget that a refusal names works. */
rfr_status rfi_find_smallest(const rfi_levels *l, int64_t enough, int *level);

/* Allocates what is not allocated yet, without step memory. Rings and persistent bytes become zeros, all others and the
 * guard `byte`. */
rfr_status rfi_layout_allocate(rfi_layout *l, const rfi_backend *b, rfi_device *d, unsigned char byte);
void rfi_layout_free(rfi_layout *l, const rfi_backend *b, rfi_device *d);

#endif
