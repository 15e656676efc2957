/* SPDX-License-Identifier: Apache-2.0
 *
 * X_quantize: an op X whose result, a matrix, is quantized with one scale for the tensor. It has the operands, results
 * and attributes of X, then a scale and five results for each quantized matrix, then `format` and `options`. It is
 * bitwise equal to two calls, X and then quantize. rfi_fused_of returns these two calls, for kernels that do not fuse
 * them.
 */
#ifndef RFI_FUSED_H
#define RFI_FUSED_H

#include <string.h>

#include "ops/call.h"
#include "ops/quant/scaled.h"

/* Op, number of operands, results and attributes, first quantized result, number of quantized results. */
#define RFI_FUSED_OPS(X)        \
  X(swiglu, 2, 1, 0, 0, 1)      \
  X(swiglu_bwd, 3, 2, 0, 0, 2)  \
  X(rmsnorm, 2, 2, 1, 0, 1)     \
  X(add_rmsnorm, 3, 3, 1, 1, 1) \
  X(layernorm, 3, 3, 1, 0, 1)   \
  X(add_layernorm, 4, 4, 1, 1, 1)

enum { RFI_FUSED_MOST = 4, RFI_FUSED_PARTS = 2, RFI_FUSED_RESULTS = 5 /* per quantized result */ };

typedef struct rfi_fused_form {
  rfi_opcode op, fused;
  int n_in, n_out, n_attrs, first, parts;
} rfi_fused_form;

/* The form whose separate or fused op has this code; false: there is none. */
static inline bool rfi_fused_find(rfi_opcode code, bool fused, rfi_fused_form *form) {
#define RFI_FUSED_ROW(name, n_in, n_out, n_attrs, first, parts) \
  {RFI_OP_##name, RFI_OP_##name##_quantize, n_in, n_out, n_attrs, first, parts},
  static const rfi_fused_form forms[] = {RFI_FUSED_OPS(RFI_FUSED_ROW)};
#undef RFI_FUSED_ROW
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
    if ((fused ? forms[i].fused : forms[i].op) == code) {
      *form = forms[i];
      return true;
    }
  return false;
}

/* Results of quantize in the order of X_quantize. */
static inline int rfi_fused_result(int k) {
  static const int of[RFI_FUSED_RESULTS] = {RFI_OUT_quantize_row, RFI_OUT_quantize_col, RFI_OUT_quantize_row_scale,
                                            RFI_OUT_quantize_col_scale, RFI_OUT_quantize_amax};
  return of[k];
}

typedef struct rfi_fused {
  rfi_fused_form form;
  rfi_arg made[RFI_FUSED_MOST]; /* results of X */
  rfi_arg in[RFI_FUSED_PARTS][2], out[RFI_FUSED_PARTS][RFI_Q_RESULTS];
  rfi_attr attr[5];
  rfi_call op, quantize[RFI_FUSED_PARTS];
  size_t scratch; /* size of the workspace before that of the calls, for unused results of X that are quantized */
} rfi_fused;

static inline size_t rfi_fused_bytes(const rfr_type *t) {
  const size_t bytes = (size_t)(t->shape[0] * t->shape[1]) * (t->dtype == RFR_F32 ? 4 : 2);
  return (bytes + 255) / 256 * 256;
}

/* The calls reference `f` and share the workspace after `scratch`. */
static inline void rfi_fused_of(const rfi_call *call, rfi_opcode code, rfi_fused *f) {
  memset(f, 0, sizeof *f);
  rfi_fused_find(code, true, &f->form);
  const rfi_fused_form *form = &f->form;
  char *own = (char *)call->workspace;
  for (int j = 0; j < form->n_out; j++) f->made[j] = call->out[j];
  for (int p = 0; p < form->parts; p++) {
    rfi_arg *x = &f->made[form->first + p];
    x->stride[0] = x->type.shape[1], x->stride[1] = 1;
    if (x->data) continue;
    x->data = own ? own + f->scratch : NULL;
    f->scratch += rfi_fused_bytes(&x->type);
  }
  f->op = *call;
  f->op.n_in = form->n_in, f->op.n_out = form->n_out, f->op.out = f->made;
  f->op.workspace = own ? own + f->scratch : NULL;
  f->attr[RFI_AT_quantize_format] = call->attr[form->n_attrs];
  f->attr[RFI_AT_quantize_options] = call->attr[form->n_attrs + 1];
  f->attr[RFI_AT_quantize_scaling].i = RFR_SCALING_TENSOR;
  for (int p = 0; p < form->parts; p++) {
    f->in[p][RFI_IN_quantize_x] = f->made[form->first + p];
    if (form->n_in + p < call->n_in) f->in[p][RFI_IN_quantize_scale] = call->in[form->n_in + p];
    else f->in[p][RFI_IN_quantize_scale].type.rank = -1;
    for (int k = 0; k < RFI_FUSED_RESULTS; k++)
      f->out[p][rfi_fused_result(k)] = call->out[form->n_out + p * RFI_FUSED_RESULTS + k];
    f->quantize[p] = f->op;
    f->quantize[p].n_in = 2, f->quantize[p].in = f->in[p];
    f->quantize[p].n_out = RFI_Q_RESULTS, f->quantize[p].out = f->out[p];
    f->quantize[p].attr = f->attr;
  }
}

#endif
