/* SPDX-License-Identifier: Apache-2.0
 *
 * rmsnorm on a GPU: norm.cuh without a mean.
 */
#include "ops/norm/norm.cuh"

static rfr_status run_dx(const rfr_call *c) {
  return rfi_norm_run_bwd<false>(c, {2, -1, 3, -1, {-1, -1, -1}, 0, {-1, -1, -1}});
}
static rfr_status run_dw(const rfr_call *c) {
  return rfi_norm_run_bwd<false>(c, {-1, -1, 2, -1, {3, -1, -1}, -1, {0, -1, -1}});
}
static rfr_status run_bwd(const rfr_call *c) {
  return rfi_norm_run_bwd<false>(c, {2, -1, 3, 4, {5, -1, -1}, 0, {1, -1, -1}});
}
static size_t workspace(const rfr_call *c) { return rfi_norm_workspace(c, &c->in[1], 1); }

extern "C" const rfi_cuda_kernel RFI_CUDA(rmsnorm) = {rfi_norm_run_fwd<false, false>, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(add_rmsnorm) = {rfi_norm_run_fwd<false, true>, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(rmsnorm_dx) = {run_dx, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(rmsnorm_dw) = {run_dw, workspace};
extern "C" const rfi_cuda_kernel RFI_CUDA(rmsnorm_bwd) = {run_bwd, workspace};
