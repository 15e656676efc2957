/* SPDX-License-Identifier: Apache-2.0
 *
 * permute_codes: rows of quantized tokens, sorted by expert. A token has k rows: quantizing it once and moving 8-bit
 * codes costs a fraction of moving 16 bits and quantizing each row. The lower pass inserts the op
 * (pass/fuse_permute.c), so it has neither a gradient nor a recording call.
 */
#include "base/base.h"
#include "ops/quant/scaled.h"
#include "ops/rule.h"

rfr_status rfi_infer_permute_codes(const rfi_infer *c) {
  const rfr_type *q = &c->in[RFI_IN_permute_codes_q], *place = &c->in[RFI_IN_permute_codes_place];
  RFI_TRY(rfi_rule_rank(c, RFI_IN_permute_codes_q, 2, 2));
  if (q->dtype != RFR_E4M3 && q->dtype != RFR_E5M2)
    return rfi_fail(RFI_E_TRACE_SHAPE, "q is %s, not e4m3 or e5m2", rfr_dtype_name(q->dtype));
  RFI_TRY(rfi_rule_dtype(c, RFI_IN_permute_codes_scale, RFR_F32));
  RFI_TRY(rfi_rule_vector(c, RFI_IN_permute_codes_scale, 1));
  for (int i = RFI_IN_permute_codes_order; i <= RFI_IN_permute_codes_offsets; i++) {
    const int rank = i == RFI_IN_permute_codes_place ? 2 : 1;
    RFI_TRY(rfi_rule_dtype(c, i, RFR_I32));
    RFI_TRY(rfi_rule_rank(c, i, rank, rank));
  }
  const int64_t R = c->in[RFI_IN_permute_codes_order].shape[0], C = q->shape[1];
  const int64_t groups = c->in[RFI_IN_permute_codes_offsets].shape[0] - 1;
  if (place->shape[0] != q->shape[0])
    return rfi_fail(RFI_E_TRACE_SHAPE, "q has %lld tokens, place has %lld", (long long)q->shape[0],
                    (long long)place->shape[0]);
  if (groups < 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "offsets are empty; they need one element more than there are groups");
  c->out[RFI_OUT_permute_codes_row] = c->out[RFI_OUT_permute_codes_col] = *q;
  c->out[RFI_OUT_permute_codes_row].shape[0] = R;
  c->out[RFI_OUT_permute_codes_col].shape[0] = C;
  c->out[RFI_OUT_permute_codes_col].shape[1] = rfi_group_columns(RFR_SCALING_TENSOR, R, groups);
  c->out[RFI_OUT_permute_codes_row_scale] = (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {groups}};
  c->out[RFI_OUT_permute_codes_col_scale] = c->out[RFI_OUT_permute_codes_row_scale];
  return RFR_OK;
}
