/* SPDX-License-Identifier: Apache-2.0
 *
 * Expert parallelism: the maps between sorted rows and the parts of a fixed size that ranks exchange, one for each pair
 * of ranks. Shapes and recording.
 *
 * The number of rows in a part is known only on the device, so each part has room for `capacity` rows. Rows over
 * capacity are left out of the maps and counted in `need`: the step that has them must be skipped.
 */
#include "ops/rule.h"

enum { MOST_RANKS = 1024 }; /* the GPU's kernel has a table of them in shared memory */

static rfr_status check_parts(const rfi_infer *c) {
  const int64_t ranks = c->attr[0].i, capacity = c->attr[1].i;
  if (ranks < 1 || ranks > MOST_RANKS)
    return rfi_fail(RFI_E_TRACE_SHAPE, "ranks is %lld; it must be 1 to %d", (long long)ranks, (int)MOST_RANKS);
  if (capacity < 0 || capacity > INT32_MAX / ranks)
    return rfi_fail(RFI_E_TRACE_SHAPE, "%lld parts of %lld rows; all of them must fit in 32 bits", (long long)ranks,
                    (long long)capacity);
  RFI_TRY(rfi_rule_dtype(c, 0, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, 0, 1, 1));
  if (c->in[0].shape[0] > 0 && c->in[0].shape[0] % ranks == 0) return RFR_OK;
  return rfi_fail(RFI_E_TRACE_SHAPE, "%lld experts cannot be spread evenly over %lld ranks",
                  (long long)c->in[0].shape[0], (long long)ranks);
}

rfr_status rfi_infer_moe_parts(const rfi_infer *c) {
  RFI_TRY(check_parts(c));
  RFI_TRY(rfi_rule_dtype(c, 1, RFR_I32));
  RFI_TRY(rfi_rule_dtype(c, 2, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, 2, 2, 2));
  RFI_TRY(rfi_rule_vector(c, 1, rfi_count(&c->in[2])));
  c->out[0] = (rfr_type){.dtype = RFR_I32, .rank = 1, .shape = {c->attr[0].i * c->attr[1].i}};
  c->out[1] = c->in[2];
  c->out[2] = (rfr_type){.dtype = RFR_I32, .rank = 1, .shape = {1}};
  return RFR_OK;
}

rfr_status rfi_infer_moe_part_experts(const rfi_infer *c) {
  RFI_TRY(check_parts(c));
  c->out[0] = (rfr_type){.dtype = RFR_I32, .rank = 2, .shape = {c->attr[0].i * c->attr[1].i, 1}};
  return RFR_OK;
}

rfr_value rfr_moe_parts_at(rfr_trace *t, rfr_source at, rfr_value splits, rfr_value order, rfr_value place, int ranks,
                           int64_t capacity, rfr_value *part_place, rfr_value *need) {
  const rfi_attr attr[2] = {rfi_i(ranks), rfi_i(capacity)};
  rfr_value out[3] = {RFR_NONE, RFR_NONE, RFR_NONE};
  rfi_record(t, at, RFI_OP_moe_parts, 3, (rfr_value[]){splits, order, place}, attr, out);
  if (part_place) *part_place = out[1];
  if (need) *need = out[2];
  return out[0];
}

rfr_value rfr_moe_part_experts_at(rfr_trace *t, rfr_source at, rfr_value counts, int ranks, int64_t capacity) {
  const rfi_attr attr[2] = {rfi_i(ranks), rfi_i(capacity)};
  return rfi_record(t, at, RFI_OP_moe_part_experts, 1, &counts, attr, NULL);
}
