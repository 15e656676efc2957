/* SPDX-License-Identifier: Apache-2.0
 *
 * Chooses the attention kernel on a GPU from the device, types, shapes, strides, and whether the addresses are
 * multiples of 16 bytes. Addresses are not known when the workspace is sized, so the workspace is large enough for
 * either kernel.
 */
#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_limits.h"
#include "ops/attention/packed.h"
#include "ops/op_index.h"

static bool is_aligned(const rfr_call *call) {
  for (int i = 0; i < call->n_in + call->n_out; i++) {
    const rfr_arg *x = i < call->n_in ? &call->in[i] : &call->out[i - call->n_in];
    if (x->type.rank == 3 && ((uintptr_t)x->data % 16 != 0 || x->stride[0] % 8 != 0)) return false;
  }
  return true;
}

/* The fastest kernel for the call if its addresses are aligned; NULL: only rfi_attention_any supports it. */
static const rfi_cuda_kernel *fastest(const rfr_call *call, const rfi_cuda_kernel *few, const rfi_cuda_kernel *sm80,
                                      const rfi_cuda_kernel *sm90) {
  const rfi_cuda_info *info = rfi_cuda_info_of(call);
  if (few->takes(call)) return few;
  if (info->major == 9 && !info->portable && sm90->takes(call)) return sm90;
  return sm80->takes(call) ? sm80 : NULL;
}
static const rfi_cuda_kernel *forward_of(const rfr_call *call) {
  return fastest(call, &rfi_attention_few, &rfi_attention_sm80, &rfi_attention_sm90);
}
static const rfi_cuda_kernel *backward_of(const rfr_call *call) {
  return fastest(call, &rfi_attention_few_bwd, &rfi_attention_sm80_bwd, &rfi_attention_sm90_bwd);
}

static rfr_status run(const rfr_call *call, const rfi_cuda_kernel *fast, const rfi_cuda_kernel *any) {
  return fast && is_aligned(call) ? fast->run(call) : any->run(call);
}

static size_t workspace(const rfr_call *call, const rfi_cuda_kernel *fast, const rfi_cuda_kernel *any) {
  const size_t a = any->workspace(call), b = fast && fast->workspace ? fast->workspace(call) : 0;
  return a > b ? a : b;
}

static rfr_status forward(const rfr_call *call) { return run(call, forward_of(call), &rfi_attention_any); }
static rfr_status backward(const rfr_call *call) { return run(call, backward_of(call), &rfi_attention_any_bwd); }

static size_t forward_workspace(const rfr_call *call) { return workspace(call, forward_of(call), &rfi_attention_any); }
static size_t backward_workspace(const rfr_call *call) {
  return workspace(call, backward_of(call), &rfi_attention_any_bwd);
}

static const char *name_of(const rfi_cuda_kernel *fast) {
  return fast == &rfi_attention_sm90 || fast == &rfi_attention_sm90_bwd ? "sm90" : "sm80";
}
static const char *forward_needs(const rfr_call *call) { return name_of(forward_of(call)); }
static const char *backward_needs(const rfr_call *call) { return name_of(backward_of(call)); }

static rfr_status backward_packed(const rfr_call *call) {
  rfr_arg out[3];
  const rfr_call parts = rfi_attention_parts(call, out);
  return backward(&parts);
}

static int takes(const rfr_call *call) { return rfi_attention_any.takes(call); }
static int takes_bwd(const rfr_call *call) { return rfi_attention_any_bwd.takes(call); }

static bool lacks(const rfr_call *call, char *text, size_t size) {
  return rfi_attention_lacks(&call->in[RFI_IN_attention_q].type, text, size);
}
static bool lacks_bwd(const rfr_call *call, char *text, size_t size) {
  return rfi_attention_lacks(&call->in[RFI_IN_attention_bwd_q].type, text, size);
}

const rfi_cuda_kernel RFI_CUDA(attention) = {forward, forward_workspace, takes, NULL, forward_needs, lacks};
const rfi_cuda_kernel RFI_CUDA(attention_bwd) = {backward, backward_workspace, takes_bwd,
                                                 NULL,     backward_needs,     lacks_bwd};
const rfi_cuda_kernel RFI_CUDA(attention_bwd_packed) = {backward_packed, backward_workspace, takes_bwd, NULL,
                                                        backward_needs,  lacks_bwd};
