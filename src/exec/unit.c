/* SPDX-License-Identifier: Apache-2.0
 *
 * Units: kernels selected once for all slots, arguments per slot, and running, capturing and launching a part.
 */
#include "exec/unit.h"

#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "exec/step_memory.h"

rfr_status rfi_executor_open(rfi_executor *m, rfr_ctx *ctx, rfr_comm *comm, bool shares, rfr_step_memory *step) {
  m->ctx = ctx;
  m->comm = comm;
  m->shares = shares;
  m->workspaces = RFI_REGION_SLOT;
  RFI_TRY(rfi_arena_create(ctx, &m->strings));
  if (comm && comm->size > 1 && !(m->sequences = rfi_arena_alloc(m->strings, RFI_SEQUENCE_BYTES * (size_t)comm->size)))
    return RFR_NO_MEMORY;
  RFI_TRY(rfi_backend_find(ctx, &m->backend));
  RFI_TRY(m->backend->open(ctx, &m->device));
  RFI_TRY(rfi_step_memory_enter(step, m));
  const bool joins = comm && comm->table->host == m->backend->host && m->backend->join;
  return joins ? m->backend->join(m->device, comm, shares) : RFR_OK;
}

void rfi_executor_close(rfi_executor *m) {
  if (m->device) {
    rfi_step_memory_leave(m);
    rfi_layout_free(&m->layout, m->backend, m->device);
    m->backend->close(m->device);
  }
  rfi_arena_destroy(m->strings);
}

rfi_pass_options rfi_executor_pass_options(rfi_executor *m) {
  return (rfi_pass_options){.lora = m->backend->lora,
                            .gelu_bwd = m->backend->gelu_bwd,
                            .dx_sum = m->backend->dx_sum,
                            .loss_chunk = m->backend->loss_chunk,
                            .loss_rows = m->backend->loss_rows,
                            .workspace = rfi_select_workspaces,
                            .user = m};
}

void rfi_unit_set_step(rfi_exec_unit *u) {
  int load = 0;
  while (load < u->trace->n_ops && u->trace->ops[load].phase == RFR_PHASE_LOAD) load++;
  for (int part = RFI_PART_LOAD; part <= RFI_PARTS; part++)
    u->start[part] = part == RFI_PART_LOAD ? 0 : part <= RFI_PART_F ? load : u->trace->n_ops;
}

/* Copies the kernels; each copy has its own arguments. */
static rfr_status copy_bound(const rfi_executor *m, const rfi_exec_unit *u, rfi_bound **out) {
  rfi_bound *to = *out = rfi_arena_alloc(m->strings, sizeof *to * (size_t)(u->n_bound + 1));
  if (!to) return RFR_NO_MEMORY;
  for (int i = 0; i < u->n_bound; i++) {
    const size_t n = (size_t)(u->bound[i].call.n_in + u->bound[i].call.n_out);
    rfi_arg *args = rfi_arena_alloc(m->strings, sizeof *args * (n + 1));
    if (!args) return RFR_NO_MEMORY;
    memcpy(args, u->bound[i].call.in, sizeof *args * n);
    to[i] = u->bound[i];
    to[i].call.in = args;
    to[i].call.out = args + to[i].call.n_in;
  }
  return RFR_OK;
}

rfr_status rfi_unit_instantiate(const rfi_executor *m, rfi_exec_unit *u, int slots) {
  if (!(u->instance = rfi_arena_alloc(m->strings, sizeof *u->instance * (size_t)(slots + 1)))) return RFR_NO_MEMORY;
  u->slots = slots;
  u->instance[0].bound = u->bound;
  for (int k = 1; k < slots; k++) RFI_TRY(copy_bound(m, u, &u->instance[k].bound));
  return RFR_OK;
}

/* Adds the failed op of the backend's last run, capture or launch to the error, if the backend knows it. */
static rfr_status name_failed(rfr_status s, const rfi_executor *m, const rfi_exec_unit *u, const rfi_bound *bound) {
  const int i = s == RFR_OK ? -1 : m->backend->failed(m->device);
  return i < 0 ? s : rfi_name_op(s, u->trace, u->name, bound[i].op);
}

rfr_status rfi_unit_run_ops(const rfi_executor *m, const rfi_exec_unit *u, int slot, int from, int end) {
  const rfi_bound *bound = u->instance[slot].bound + from;
  return name_failed(m->backend->run(m->device, bound, end - from), m, u, bound);
}

rfr_status rfi_unit_run(const rfi_executor *m, const rfi_exec_unit *u, int slot, rfi_part part, bool eager,
                        const void **from) {
  const rfi_instance *x = &u->instance[slot];
  if (!rfi_has(u, part)) return RFR_OK;
  RFI_TRY(rfi_unit_agree(m, u, part));
  if (eager || !x->graph[part]) return rfi_unit_run_ops(m, u, slot, u->first[part], u->first[part + 1]);
  return name_failed(m->backend->launch(m->device, x->graph[part], from), m, u, x->bound + u->first[part]);
}

rfr_status rfi_unit_capture(const rfi_executor *m, const rfi_exec_unit *u, int slot, rfi_part part,
                            const rfi_copy *copies, int n, rfi_graph **out) {
  const rfi_bound *bound = u->instance[slot].bound + u->first[part];
  const int n_bound = u->first[part + 1] - u->first[part];
  return name_failed(m->backend->capture(m->device, copies, n, bound, n_bound, out), m, u, bound);
}

const rfi_stage *rfi_unit_stage(const rfi_exec_unit *u, const char *pass) {
  for (int k = 0; k < RFI_STAGES && pass; k++)
    if (strcmp(u->pipeline.stage[k].pass, pass) == 0) return &u->pipeline.stage[k];
  return NULL;
}

const char *rfi_stage_report(const rfi_stage *s) { return s ? s->report.text.data ? s->report.text.data : "" : NULL; }

void rfi_unit_deinit(const rfi_executor *m, rfi_exec_unit *u) {
  for (int k = 0; k < u->slots; k++)
    for (int part = 0; part < RFI_PARTS; part++) m->backend->graph_destroy(m->device, u->instance[k].graph[part]);
  rfi_pipeline_deinit(&u->pipeline);
}
