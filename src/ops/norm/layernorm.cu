/* SPDX-License-Identifier: Apache-2.0
 *
 * layernorm on a GPU: norm.cuh with a mean.
 */
#include "ops/norm/norm.cuh"

static rfr_status run_dx(const rfr_call *c) {
  return rfi_norm_run_bwd<true>(c, {2, 3, 4, -1, {-1, -1, -1}, 0, {-1, -1, -1}});
}
static rfr_status run_dw(const rfr_call *c) {
  return rfi_norm_run_bwd<true>(c, {-1, 2, 3, -1, {4, -1, -1}, -1, {0, -1, -1}});
}
static rfr_status run_db(const rfr_call *c) {
  return rfi_norm_run_bwd<true>(c, {-1, -1, -1, -1, {-1, 1, -1}, -1, {-1, 0, -1}});
}
static rfr_status run_bwd(const rfr_call *c) {
  return rfi_norm_run_bwd<true>(c, {2, 3, 4, 5, {6, 7, 8}, 0, {1, 2, 3}});
}
static size_t of_dy(const rfr_call *c) { return rfi_norm_workspace(c, &c->in[0], 1); }
static size_t one(const rfr_call *c) { return rfi_norm_workspace(c, &c->in[1], 1); }
static size_t all(const rfr_call *c) { return rfi_norm_workspace(c, &c->in[1], RFI_NORM_TOTALS); }

extern "C" const rfi_cuda_kernel RFI_CUDA(layernorm) = {rfi_norm_run_fwd<true, false>, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(add_layernorm) = {rfi_norm_run_fwd<true, true>, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(layernorm_dx) = {run_dx, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(layernorm_dw) = {run_dw, one};
extern "C" const rfi_cuda_kernel RFI_CUDA(layernorm_db) = {run_db, of_dy};
extern "C" const rfi_cuda_kernel RFI_CUDA(layernorm_bwd) = {run_bwd, all};
