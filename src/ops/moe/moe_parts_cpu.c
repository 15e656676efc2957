/* SPDX-License-Identifier: Apache-2.0
 *
 * The maps of parts on the CPU: one pass over the parts, one over the slots.
 */
#include "backend/cpu/cpu.h"

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* start[r]: the first sorted row of rank r's experts; start[ranks]: their end. Negative splits count as 0. */
static void find_starts(const rfi_call *c, int64_t *start) {
  const int32_t *splits = c->in[0].data;
  const int64_t ranks = c->attr[0].i, each = rfi_count(&c->in[0].type) / ranks, rows = rfi_count(&c->in[2].type);
  int64_t at = 0;
  for (int64_t r = 0; r < ranks; r++) {
    start[r] = least(at, rows);
    for (int64_t e = r * each; e < (r + 1) * each; e++) at += splits[e] > 0 ? splits[e] : 0;
  }
  start[ranks] = least(at, rows);
}

static size_t parts_workspace(const rfi_call *c) { return sizeof(int64_t) * (size_t)(c->attr[0].i + 1); }

static rfr_status run_parts(const rfi_call *c) {
  const int64_t ranks = c->attr[0].i, capacity = c->attr[1].i, slots = rfi_count(&c->in[2].type);
  const int32_t *order = c->in[1].data, *place = c->in[2].data;
  int32_t *part_order = c->out[0].data, *part_place = c->out[1].data, *need = c->out[2].data;
  int64_t *start = c->workspace, most = 0;
  find_starts(c, start);
  for (int64_t r = 0; r < ranks; r++) {
    const int64_t rows = start[r + 1] - start[r];
    most = rows > most ? rows : most;
    for (int64_t i = 0; part_order && i < capacity; i++)
      part_order[r * capacity + i] = i < rows ? order[start[r] + i] : -1;
  }
  for (int64_t s = 0; part_place && s < slots; s++) {
    int64_t r = 0;
    while (r < ranks && place[s] >= start[r + 1]) r++;
    const int64_t i = r < ranks ? place[s] - start[r] : -1;
    part_place[s] = i >= 0 && i < capacity ? (int32_t)(r * capacity + i) : -1;
  }
  if (need) *need = most > capacity ? (int32_t)most : 0;
  return RFR_OK;
}

static rfr_status run_part_experts(const rfi_call *c) {
  const int64_t ranks = c->attr[0].i, capacity = c->attr[1].i, experts = rfi_count(&c->in[0].type) / ranks;
  int32_t *index = c->out[0].data;
  for (int64_t r = 0; index && r < ranks; r++) {
    const int32_t *counts = (const int32_t *)c->in[0].data + r * experts;
    int64_t i = 0;
    for (int64_t e = 0; e < experts; e++)
      for (int64_t n = 0; n < counts[e] && i < capacity; n++) index[r * capacity + i++] = (int32_t)e;
    while (i < capacity) index[r * capacity + i++] = -1;
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(moe_parts) = {run_parts, parts_workspace};
const rfi_kernel RFI_CPU(moe_part_experts) = {run_part_experts, NULL};
