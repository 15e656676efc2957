/* SPDX-License-Identifier: Apache-2.0
 *
 * Sizes and memory of the regions. Only this file compares planned bytes with a budget, searches for a recompute level
 * that fits, and allocates.
 */
#include "exec/layout.h"

#include "base/base.h"
#include "exec/step_memory.h"

void rfi_layout_clear(rfi_layout *l) { *l = (rfi_layout){.step = l->step}; }

static int64_t sum(const rfi_layout *l, int first, int end) {
  int64_t bytes = 0;
  for (int r = first; r < end; r++) bytes += l->bytes[r];
  return bytes;
}

int64_t rfi_layout_step_bytes(const rfi_layout *l) { return sum(l, RFI_REGION_SLOT, RFI_REGIONS); }

int64_t rfi_layout_at(const rfi_layout *l, rfi_region region) {
  const int64_t at = sum(l, 0, (int)region), others = l->step ? l->step->bytes - rfi_layout_step_bytes(l) : 0;
  return region == RFI_REGIONS && others > 0 ? at + others : at;
}

int64_t rfi_layout_add(rfi_layout *l, rfi_region region, int64_t bytes) {
  l->bytes[region] += bytes;
  return l->bytes[region] - bytes;
}

unsigned char *rfi_address(const rfi_layout *l, rfi_region region, int64_t offset) {
  const bool in_step = l->step && region >= RFI_REGION_SLOT;
  const int64_t at = rfi_layout_at(l, region) - rfi_layout_at(l, in_step ? RFI_REGION_SLOT : RFI_REGION_PERSISTENT);
  return region == RFI_REGION_RING ? l->ring + offset : (in_step ? l->step->data : l->arena) + at + offset;
}

enum { TEXT = 256 };

/* Text: the size of each region that is not empty. */
static const char *describe(const rfi_layout *l, char text[TEXT]) {
  static const char *const names[RFI_REGIONS] = {"", "", "for the step", "shared", "gathered", "for warm-up"};
  char slots[32];
  size_t n = (size_t)rfi_snprintf(text, TEXT, "%lld persistent", (long long)rfi_layout_at(l, RFI_REGION_SLOT));
  rfi_snprintf(slots, sizeof slots, "in %d slots", l->slots);
  for (int r = RFI_REGION_SLOT; r < RFI_REGIONS; r++)
    if (l->bytes[r] > 0)
      n += (size_t)rfi_snprintf(text + n, TEXT - n, ", %lld %s", (long long)l->bytes[r],
                                l->slots > 0 && r == RFI_REGION_SLOT ? slots : names[r]);
  if (l->step && l->step->bytes > rfi_layout_step_bytes(l))
    rfi_snprintf(text + n, TEXT - n, ", %lld more for others that use the step memory",
                 (long long)(l->step->bytes - rfi_layout_step_bytes(l)));
  return text;
}

rfr_status rfi_layout_check_budget(const rfi_layout *l, int64_t budget, rfr_recompute recompute, bool fixed) {
  char text[TEXT];
  const int64_t bytes = rfi_layout_at(l, RFI_REGIONS);
  if (budget <= 0 || bytes <= budget) return RFR_OK;
  const char *how = fixed ? "which recompute cannot lower in inference"
                    : recompute == RFR_RECOMPUTE_AUTO
                        ? "the smallest budget that works: every op that lowers the peak is recomputed"
                    : recompute == RFR_RECOMPUTE_ALL ? "although every op that lowers the peak is recomputed"
                                                     : "because nothing is recomputed: recompute auto may need less";
  return rfi_fail(RFI_E_PLAN_OVER_BUDGET, "the plan needs %lld bytes, %s (%s); the budget is %lld", (long long)bytes,
                  how, describe(l, text), (long long)budget);
}

rfr_status rfi_find_smallest(const rfi_levels *l, int64_t enough, int *level) {
  enum { TRIALS = 16 };
  int64_t bytes, least = INT64_MAX;
  const int all = l->last - l->first, n = all < TRIALS ? all : TRIALS;
  for (int i = n; i >= 0 && least > enough; i--) {
    const int now = l->first + (n > 0 ? (int)((int64_t)all * i / n) : 0);
    RFI_TRY(l->plan(l->user, now, enough, &bytes));
    if (bytes < least) least = bytes, *level = now;
  }
  return RFR_OK;
}

rfr_status rfi_find_level(const rfi_levels *l, int low, int64_t budget, int *level) {
  int64_t bytes;
  RFI_TRY(l->plan(l->user, l->last, budget, &bytes));
  if (bytes > budget) return rfi_find_smallest(l, budget, level);
  *level = l->last;
  while (low < *level) { /* levels below `low` do not fit; level *level does */
    const int now = low + (*level - low) / 2;
    RFI_TRY(l->plan(l->user, now, budget, &bytes));
    if (bytes <= budget) *level = now;
    else low = now + 1;
  }
  return RFR_OK;
}

rfr_status rfi_layout_allocate(rfi_layout *l, const rfi_backend *b, rfi_device *d, unsigned char byte) {
  char text[TEXT];
  const int64_t all = rfi_layout_at(l, RFI_REGIONS), rings = l->bytes[RFI_REGION_RING];
  const int64_t zeros = l->bytes[RFI_REGION_PERSISTENT], rest = (l->step ? 0 : rfi_layout_step_bytes(l)) + b->guard;
  if (!l->ring) RFI_TRY(b->alloc(d, RFI_MEMORY_RING, (size_t)rings, (void **)&l->ring));
  const rfr_status s = b->alloc(d, RFI_MEMORY_ARENA, (size_t)(zeros + rest), (void **)&l->arena);
  if (s == RFR_NO_MEMORY) rfi_fail_prefix("the plan needs %lld bytes (%s): ", (long long)all, describe(l, text));
  RFI_TRY(s);
  RFI_TRY(b->fill(d, l->arena, 0, (size_t)zeros));
  return b->fill(d, l->arena + zeros, byte, (size_t)rest);
}

void rfi_layout_free(rfi_layout *l, const rfi_backend *b, rfi_device *d) {
  b->free(d, RFI_MEMORY_ARENA, l->arena);
  b->free(d, RFI_MEMORY_RING, l->ring);
}
