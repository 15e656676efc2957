/* SPDX-License-Identifier: Apache-2.0
 *
 * permute_codes on the CPU, in bands of SIDE columns of q: in a band, a token has one cache line. Each row of a band is
 * copied to `row` and scattered over the lines of `col` of this band.
 */
#include "backend/cpu/cpu.h"
#include "ops/grouped/grouped.h"
#include "ops/quant/scaled.h"
#include "ops/walk.h"

enum { SIDE = 64 };

typedef struct maps {
  const uint8_t *q;
  const int32_t *order, *offsets;
  uint8_t *row, *col; /* NULL: not needed */
  int64_t R, C, k, slots, groups, pitch;
} maps;

static maps maps_of(const rfi_call *c) {
  const rfi_arg *place = &c->in[RFI_IN_permute_codes_place];
  return (maps){.q = c->in[RFI_IN_permute_codes_q].data,
                .order = c->in[RFI_IN_permute_codes_order].data,
                .offsets = c->in[RFI_IN_permute_codes_offsets].data,
                .row = c->out[RFI_OUT_permute_codes_row].data,
                .col = c->out[RFI_OUT_permute_codes_col].data,
                .R = c->in[RFI_IN_permute_codes_order].type.shape[0],
                .C = c->in[RFI_IN_permute_codes_q].type.shape[1],
                .k = place->type.shape[1],
                .slots = rfi_count(&place->type),
                .groups = c->in[RFI_IN_permute_codes_offsets].type.shape[0] - 1,
                .pitch = c->out[RFI_OUT_permute_codes_col].type.shape[1]};
}

static void move_bands(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const maps m = maps_of(c);
  for (int64_t band = begin; band < end; band++) {
    const int64_t first = band * SIDE, n = m.C - first < SIDE ? m.C - first : SIDE;
    for (int64_t r = 0; m.row && r < m.R; r++) memset(m.row + r * m.C + first, 0, (size_t)n);
    if (m.col) memset(m.col + first * m.pitch, 0, (size_t)(n * m.pitch));
    for (int64_t g = 0; g < m.groups; g++) {
      const int64_t from = rfi_group_begin(m.offsets, g, m.R), to = rfi_group_end(m.offsets, g, m.R);
      const int64_t at = rfi_group_start(from, g, RFI_TENSOR_BLOCK) * RFI_TENSOR_BLOCK - from;
      for (int64_t r = from; r < to; r++) {
        const int64_t slot = m.order[r];
        if (slot < 0 || slot >= m.slots) continue;
        const uint8_t *x = m.q + slot / m.k * m.C + first;
        if (m.row) memcpy(m.row + r * m.C + first, x, (size_t)n);
        for (int64_t j = 0; m.col && j < n; j++) m.col[(first + j) * m.pitch + at + r] = x[j];
      }
    }
  }
}

static rfr_status run(const rfi_call *call) {
  const maps m = maps_of(call);
  const float scale = *(const float *)call->in[RFI_IN_permute_codes_scale].data;
  for (int i = RFI_OUT_permute_codes_row_scale; i <= RFI_OUT_permute_codes_col_scale; i++)
    for (int64_t g = 0; call->out[i].data && g < m.groups; g++) ((float *)call->out[i].data)[g] = scale;
  rfi_parallel(call, (m.C + SIDE - 1) / SIDE, SIDE * (m.R + m.pitch), move_bands);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(permute_codes) = {run, NULL};
