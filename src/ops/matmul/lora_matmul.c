/* SPDX-License-Identifier: Apache-2.0
 *
 * lora_matmul: y = x op(w) + u op(b) + bias (+ acc): a GEMM and a narrow GEMM with one accumulator and one rounding.
 * The fuse pass creates it after autodiff (pass/fuse_lora.c), so it has neither a gradient nor a recording call.
 */
#include "base/base.h"
#include "ops/op_index.h"
#include "ops/rule.h"

rfr_status rfi_infer_lora_matmul(const rfi_infer *c) {
  const rfr_dtype to = (rfr_dtype)c->attr[1].i;
  const int tb = (int)c->attr[0].i;
  for (int i = 0; i < 4; i++) {
    RFI_TRY(rfi_rule_rank(c, i, 2, 2));
    RFI_TRY(rfi_rule_float(c, i));
    if (c->in[i].dtype == RFR_F64) return rfi_fail(RFI_E_TRACE_SHAPE, "types must be f32, bf16 or f16");
  }
  if (to != RFR_F32 && to != RFR_BF16 && to != RFR_F16)
    return rfi_fail(RFI_E_TRACE_SHAPE, "to must be f32, bf16 or f16");
  const int64_t M = c->in[0].shape[0], K = c->in[0].shape[1], R = c->in[2].shape[1];
  const int64_t N = c->in[1].shape[tb ? 0 : 1];
  if (c->in[1].shape[tb ? 1 : 0] != K || c->in[2].shape[0] != M || c->in[3].shape[tb ? 0 : 1] != N ||
      c->in[3].shape[tb ? 1 : 0] != R)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x (M,K), w, u (M,R) and b do not match: M %lld, K %lld, N %lld, R %lld",
                    (long long)M, (long long)K, (long long)N, (long long)R);
  c->out[0] = (rfr_type){.dtype = to, .rank = 2, .shape = {M, N}};
  if (rfi_present(c, 4)) RFI_TRY(rfi_rule_vector(c, 4, N));
  return rfi_present(c, 5) ? rfi_rule_type(c, 5, &c->out[0]) : RFR_OK;
}

/* Both GEMMs. */
double rfi_flops_lora_matmul(const rfi_infer *c) {
  const int64_t K = c->in[RFI_IN_lora_matmul_x].shape[1] + c->in[RFI_IN_lora_matmul_u].shape[1];
  return c->out[0].rank < 0 ? 0 : 2 * (double)K * (double)rfi_count(&c->out[0]);
}
