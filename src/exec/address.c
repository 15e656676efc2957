/* SPDX-License-Identifier: Apache-2.0
 *
 * The address of a value in a slot, from its location. Locations are offsets until memory is allocated.
 */
#include "base/base.h"
#include "exec/unit.h"
#include "trace/live.h"

rfr_status rfi_unit_place(rfi_executor *m, rfi_exec_unit *u, rfi_arena *memory, int n) {
  const rfr_trace *t = u->trace;
  if (!(u->place = rfi_arena_alloc(memory, sizeof *u->place * (size_t)(t->n_values + 1)))) return RFR_NO_MEMORY;
  for (rfr_value v = 0; v < t->n_values; v++) {
    const rfi_value *x = &t->values[v];
    const int name = x->op < 0 ? rfi_names_find(&m->store.names, x->name) : -1;
    u->place[v].region = name >= 0 ? RFI_NAMED : RFI_REGIONS;
    u->place[v].offset = name;
    if (x->base != v || x->op < 0 || x->op >= n) continue;
    u->place[v].region = RFI_REGION_PERSISTENT;
    u->place[v].offset = rfi_layout_add(&m->layout, RFI_REGION_PERSISTENT, rfi_storage_bytes(&x->type));
  }
  return RFR_OK;
}

unsigned char *rfi_named_data(const rfi_executor *m, const rfi_named *x) {
  return m->in_warmup && x->written ? rfi_address(&m->layout, RFI_REGION_SCRATCH, x->scratch) : x->tensor.data;
}

static unsigned char *address_of_owner(const rfi_executor *m, const rfi_exec_unit *u, int slot, rfr_value owner) {
  const rfi_location *x = &u->place[owner];
  if (x->unit) return address_of_owner(m, x->unit, slot, x->owner) + x->offset;
  switch (x->region) {
    case RFI_NAMED: return rfi_named_data(m, &m->store.named[x->offset]);
    case RFI_FIXED: return m->in_warmup ? rfi_address(&m->layout, RFI_REGION_SCRATCH, x->offset) : x->fixed[slot];
    case RFI_BLOCK: return rfi_address(&m->layout, RFI_REGION_SLOT, x->offset + u->instance[slot].block * x->stride);
    default: return rfi_address(&m->layout, x->region, x->offset + slot * x->stride);
  }
}

unsigned char *rfi_unit_address(const rfi_executor *m, const rfi_exec_unit *u, int slot, rfr_value v) {
  const rfi_value *x = &u->trace->values[v];
  return address_of_owner(m, u, slot, x->base) + rfi_bytes_into(x);
}

void rfi_unit_set_addresses(const rfi_executor *m, const rfi_exec_unit *u) {
  unsigned char *workspaces = rfi_address(&m->layout, m->workspaces, 0);
  for (int slot = 0; slot < u->slots; slot++)
    for (int i = 0; i < u->n_bound; i++) {
      rfi_bound *b = &u->instance[slot].bound[i];
      const rfi_opr *op = &u->trace->ops[b->op];
      rfi_arg *args = (rfi_arg *)b->call.in;
      for (int k = 0; k < op->n_in + op->n_out; k++) {
        const rfr_value v = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
        if (v >= 0) args[k].data = rfi_unit_address(m, u, slot, v);
      }
      if (b->workspace > 0) b->call.workspace = workspaces + u->workspace_at[i];
    }
}
