/* SPDX-License-Identifier: Apache-2.0
 *
 * X_quantize as the references of X and of quantize, and its cases: full tiles of 128, and other shapes.
 */
#include <stdlib.h>

#include "ops/quant/fused.h"
#include "support/op_case.h"

RFT_REF(swiglu);
RFT_REF(swiglu_bwd);
RFT_REF(rmsnorm);
RFT_REF(add_rmsnorm);
RFT_REF(layernorm);
RFT_REF(add_layernorm);
RFT_REF(quantize);

/* References take f64, so the results of X get separate memory. X's result is rounded as X rounds it. */
static void both(const rfi_call *call, rfi_opcode code, void (*op)(const rfi_call *)) {
  rfi_fused f;
  double *own[RFI_FUSED_MOST];
  rfi_fused_of(call, code, &f);
  for (int j = 0; j < f.form.n_out; j++) {
    own[j] = call->out[j].data ? NULL : calloc((size_t)rfi_count(&call->out[j].type) + 1, sizeof(double));
    f.made[j].data = own[j] ? own[j] : call->out[j].data;
  }
  op(&f.op);
  for (int p = 0; p < f.form.parts; p++) {
    const rfi_arg *x = &f.made[f.form.first + p];
    double *value = x->data;
    for (int64_t i = 0; i < rfi_count(&x->type); i++) value[i] = rft_round(value[i]);
    f.in[p][RFI_IN_quantize_x].data = value;
    RFT_NAME(quantize)(&f.quantize[p]);
  }
  for (int j = 0; j < f.form.n_out; j++) free(own[j]);
}

RFT_REF(swiglu_quantize) { both(call, RFI_OP_swiglu_quantize, RFT_NAME(swiglu)); }
RFT_REF(swiglu_bwd_quantize) { both(call, RFI_OP_swiglu_bwd_quantize, RFT_NAME(swiglu_bwd)); }
RFT_REF(rmsnorm_quantize) { both(call, RFI_OP_rmsnorm_quantize, RFT_NAME(rmsnorm)); }
RFT_REF(add_rmsnorm_quantize) { both(call, RFI_OP_add_rmsnorm_quantize, RFT_NAME(add_rmsnorm)); }
RFT_REF(layernorm_quantize) { both(call, RFI_OP_layernorm_quantize, RFT_NAME(layernorm)); }
RFT_REF(add_layernorm_quantize) { both(call, RFI_OP_add_layernorm_quantize, RFT_NAME(add_layernorm)); }

RFT_CASES(swiglu_quantize) = {"swiglu_quantize(f[7,13], f[7,13]) format=e4m3",
                              "swiglu_quantize(f[1,37], f[1,37], F[1]=37.5) format=e4m3",
                              "swiglu_quantize(f[0,5], f[0,5]) format=e5m2",
                              "swiglu_quantize(f[17,1], f[17,1]) format=e4m3 options=1",
                              "swiglu_quantize(f[128,256], f[128,256], F[1]=3) format=e4m3",
                              "swiglu_quantize(f[256,128], f[256,128]) format=e5m2",
                              NULL};
RFT_CASES(swiglu_bwd_quantize) = {
    "swiglu_bwd_quantize(f[7,13], f[7,13], f[7,13]) format=e5m2",
    "swiglu_bwd_quantize(f[1,37], f[1,37], f[1,37], F[1]=30, F[1]=7) format=e4m3",
    "swiglu_bwd_quantize(f[0,5], f[0,5], f[0,5]) format=e5m2",
    "swiglu_bwd_quantize(f[17,1], f[17,1], f[17,1]) format=e5m2 options=1",
    "swiglu_bwd_quantize(f[128,256], f[128,256], f[128,256], F[1]=300, F[1]=70) format=e5m2",
    "swiglu_bwd_quantize(f[256,128], f[256,128], f[256,128]) format=e4m3",
    NULL};
RFT_CASES(rmsnorm_quantize) = {"rmsnorm_quantize(f[7,13], f[13]) eps=1e-5 format=e4m3",
                               "rmsnorm_quantize(f[1,37], F[37], F[1]=37.5) eps=1e-5 format=e4m3",
                               "rmsnorm_quantize(f[0,5], f[5]) eps=1e-5 format=e5m2",
                               "rmsnorm_quantize(f[256,384], f[384], F[1]=3) eps=1e-5 format=e4m3",
                               "rmsnorm_quantize(f[128,1024], F[1024]) eps=1e-5 format=e5m2 options=1",
                               NULL};
RFT_CASES(add_rmsnorm_quantize) = {
    "add_rmsnorm_quantize(f[7,13], f[7,13], f[13]) eps=1e-5 format=e4m3",
    "add_rmsnorm_quantize(f[1,37], f[1,37], F[37], F[1]=37.5) eps=1e-5 format=e4m3",
    "add_rmsnorm_quantize(f[0,5], f[0,5], f[5]) eps=1e-5 format=e5m2",
    "add_rmsnorm_quantize(f[256,384], f[256,384], f[384], F[1]=3) eps=1e-5 format=e4m3",
    "add_rmsnorm_quantize(f[128,1024], f[128,1024], F[1024]) eps=1e-5 format=e5m2 options=1",
    NULL};
RFT_CASES(layernorm_quantize) = {"layernorm_quantize(f[7,13], f[13], f[13]) eps=1e-5 format=e4m3",
                                 "layernorm_quantize(f[1,37], F[37], _, F[1]=37.5) eps=1e-5 format=e4m3",
                                 "layernorm_quantize(f[0,5], f[5], f[5]) eps=1e-5 format=e5m2",
                                 "layernorm_quantize(f[256,384], f[384], f[384], F[1]=3) eps=1e-5 format=e4m3",
                                 "layernorm_quantize(f[128,1024], F[1024], _) eps=1e-5 format=e5m2 options=1",
                                 NULL};
RFT_CASES(add_layernorm_quantize) = {
    "add_layernorm_quantize(f[7,13], f[7,13], f[13], f[13]) eps=1e-5 format=e4m3",
    "add_layernorm_quantize(f[1,37], f[1,37], F[37], _, F[1]=37.5) eps=1e-5 format=e4m3",
    "add_layernorm_quantize(f[0,5], f[0,5], f[5], f[5]) eps=1e-5 format=e5m2",
    "add_layernorm_quantize(f[256,384], f[256,384], f[384], f[384], F[1]=3) eps=1e-5 format=e4m3",
    "add_layernorm_quantize(f[128,1024], f[128,1024], F[1024], _) eps=1e-5 format=e5m2 options=1",
    NULL};
