/* SPDX-License-Identifier: Apache-2.0
 *
 * lora_matmul as two GEMMs of the module, for the calls that the fused kernel does not support. Kernel selection offers
 * both to cuBLASLt: call->library points to two rfi_head_library.
 */
#ifndef RFI_LORA_CUDA_H
#define RFI_LORA_CUDA_H

#include "ops/loss/head.h"

/* y = x op(w) + bias (+ acc), then y += u op(b). */
static inline void rfi_lora_gemms(const rfr_call *c, rfi_head_gemm out[2]) {
  const bool tb = c->attr[0].i != 0;
  rfi_head_gemm_init(&out[0], c, &c->in[0], false, &c->in[1], tb, &c->out[0], c->n_in > 5 && c->in[5].data);
  if (c->n_in > 4 && c->in[4].data) out[0].in[2] = c->in[4];
  rfi_head_gemm_init(&out[1], c, &c->in[2], false, &c->in[3], tb, &c->out[0], true);
}

/* Runs both GEMMs with the kernels that were selected. */
rfr_status rfi_lora_run_gemms(const rfr_call *c);

#endif
