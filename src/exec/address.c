/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes the addresses that the plan gives into the arguments of bound ops.
 */
#include "exec/exec.h"

void rfi_set_op_addresses(const rfr_trace *t, rfi_bound *bound, int n,
                          unsigned char *(*address)(const void *user, rfr_value owner), const void *user) {
  for (int i = 0; i < n; i++) {
    const rfi_opr *op = &t->ops[bound[i].op];
    rfi_arg *args = (rfi_arg *)bound[i].call.in;
    for (int k = 0; k < op->n_in + op->n_out; k++) {
      rfr_value v = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
      if (v < 0) continue;
      const rfi_value *x = &t->values[v];
      args[k].data = address(user, x->base) + x->offset * rfr_dtype_bits(x->type.dtype) / 8;
    }
  }
}

typedef struct program_addresses {
  const rfr_programs *p;
  const rfi_program *program;
} program_addresses;

static unsigned char *address_of(const void *user, rfr_value owner) {
  const program_addresses *x = user;
  const rfi_location at = x->program->place[owner];
  return rfi_address(&x->p->layout, at.region, at.offset);
}

void rfi_set_program_addresses(rfr_programs *p, rfi_program *program) {
  rfi_set_op_addresses(program->trace, program->bound, program->n_bound, address_of, &(program_addresses){p, program});
  for (int i = 0, k = 0; i < program->plan.n; i++) {
    const rfi_buffer *w = &program->plan.buffer[i];
    if (w->value != RFR_NONE) continue;
    while (program->bound[k].op != w->first) k++; /* buffers and bound ops are both sorted by op */
    program->bound[k].call.workspace = rfi_address(&p->layout, RFI_REGION_SLOT, w->offset);
  }
}
