/* SPDX-License-Identifier: Apache-2.0
 *
 * The interpreter of interp.h. References require dense operands, so a strided view is gathered into a copy for the op
 * that reads it; a result that is the next version of an operand gets that operand's own storage, as a kernel would.
 */
#include "support/interp.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *must(void *memory) {
  if (memory) return memory;
  fputs("out of memory\n", stderr);
  exit(1);
}

void rft_interp_init(rft_interp *in, const rfr_trace *t) {
  in->trace = t;
  in->storage = must(calloc((size_t)t->n_values + 1, sizeof *in->storage));
  in->arg = must(calloc((size_t)t->n_values + 1, sizeof *in->arg));
  for (rfr_value v = 0; v < t->n_values; v++) {
    const rfi_value *x = &t->values[v];
    if (x->base == v) in->storage[v] = must(calloc((size_t)rfi_count(&x->type) + 1, sizeof(double)));
    rfi_arg *a = &in->arg[v];
    a->type = x->type;
    if (rfr_dtype_is_float(a->type.dtype)) a->type.dtype = RFR_F64;
    memcpy(a->stride, x->stride, sizeof a->stride);
    a->data = (char *)in->storage[x->base] + x->offset * (rfr_dtype_bits(a->type.dtype) / 8);
  }
}

void rft_interp_deinit(rft_interp *in) {
  for (rfr_value v = 0; v < in->trace->n_values; v++) free(in->storage[v]);
  free(in->storage);
  free(in->arg);
}

/* Makes a dense copy of a view; free *copy. */
static rfi_arg gathered(const rfi_arg *x, void **copy) {
  rfi_arg dense = *x;
  rfi_value shape = {.type = x->type};
  memcpy(shape.stride, x->stride, sizeof shape.stride);
  if (rfi_is_dense(&shape)) return dense;
  rfi_dense_strides(&shape);
  memcpy(dense.stride, shape.stride, sizeof dense.stride);
  dense.data = *copy = must(malloc(((size_t)rfi_count(&x->type) + 1) * sizeof(double)));
  for (int64_t i = 0; i < rfi_count(&x->type); i++) rft_set(&dense, i, rft_get(x, i));
  return dense;
}

const char *rft_interp_run(rft_interp *in) {
  const rfr_trace *t = in->trace;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    rft_op found = rft_op_get(op->def->code);
    if (op->def->flags & RFI_VIEW) continue;
    if (!found.ref || op->n_in > RFT_MAX_IN) return op->def->name;
    rfi_arg args[RFT_MAX_IN], out[RFI_MAX_NAMES];
    void *copies[RFT_MAX_IN] = {0};
    for (int k = 0; k < op->n_in; k++) {
      if (op->in[k] >= 0) args[k] = gathered(&in->arg[op->in[k]], &copies[k]);
      else args[k] = (rfi_arg){.type = {.rank = -1}};
    }
    for (int j = 0; j < op->n_out; j++) {
      if (op->out[j] >= 0) out[j] = in->arg[op->out[j]];
      else out[j] = (rfi_arg){.type = {.rank = -1}};
    }
    rfi_call call = {.n_in = op->n_in,
                     .n_out = op->n_out,
                     .in = args,
                     .out = out,
                     .attr = op->attr,
                     .microbatch = op->microbatch,
                     .threads = 1};
    found.ref(&call);
    for (int k = 0; k < op->n_in; k++) free(copies[k]);
  }
  return NULL;
}

rfr_value rft_input_of(const rfr_trace *t, const char *name) {
  for (int i = 0; i < t->n_inputs; i++)
    if (strcmp(t->values[t->inputs[i]].name, name) == 0) return t->inputs[i];
  return RFR_NONE;
}

rfr_value rft_output_of(const rfr_trace *t, const char *name) {
  for (int i = 0; i < t->n_outputs; i++)
    if (strcmp(t->outputs[i].name, name) == 0) return t->outputs[i].value;
  return RFR_NONE;
}
