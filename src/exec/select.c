/* SPDX-License-Identifier: Apache-2.0
 *
 * Selects a kernel for every op and queries its workspace. There are no addresses yet, because workspaces are part of
 * the plan. So absent operands and dead results are NULL, and all others have a placeholder with the alignment of the
 * later address.
 */
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "ops/gemm.h"

static void fill_arg(const rfr_trace *t, rfr_value v, rfi_arg *arg) {
  static _Alignas(64) unsigned char placeholder[64];
  *arg = (rfi_arg){.data = NULL, .type = {.rank = -1}};
  if (v < 0) return;
  const rfi_value *x = &t->values[v];
  arg->data = placeholder + x->offset * rfr_dtype_bits(x->type.dtype) / 8 % (int64_t)sizeof placeholder;
  arg->type = x->type;
  memcpy(arg->stride, x->stride, sizeof arg->stride);
}

/* A dead result has no memory but still a type: kernels may read sizes from any result. */
static rfr_status type_dead_results(rfr_ctx *ctx, const rfi_opr *op, rfi_arg *args) {
  rfr_type *types, out[RFI_MAX_NAMES];
  bool any = false;
  for (int j = 0; j < op->n_out; j++) any = any || op->out[j] < 0;
  if (!any) return RFR_OK;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *types * (size_t)(op->n_in + 1), &types));
  memset(out, 0, sizeof out);
  for (int k = 0; k < op->n_in; k++) types[k] = args[k].type;
  rfi_infer c = {op->def, op->n_in, types, op->attr, out};
  rfr_status s = op->def->infer(&c);
  for (int j = 0; s == RFR_OK && j < op->n_out; j++) {
    rfi_value dense = {.type = out[j]};
    if (op->out[j] >= 0 || out[j].rank < 0) continue;
    rfi_dense_strides(&dense);
    args[op->n_in + j].type = out[j];
    memcpy(args[op->n_in + j].stride, dense.stride, sizeof dense.stride);
  }
  rfi_free(ctx, types);
  return s;
}

/* Sets the communicator of a collective op; its size must be the op's number of ranks. */
static rfr_status set_comm(const rfi_executor *m, const rfi_opr *op, rfi_bound *b) {
  const int64_t ranks = op->attr[0].i;
  const char *file = op->at.file ? op->at.file : "";
  if (ranks == 1) return RFR_OK;
  if (!m->comm)
    return rfi_fail_at(RFI_E_DIST_COMM, file, op->at.line, "%s over %lld ranks has no communicator", op->def->name,
                       (long long)ranks);
  if (m->comm->size != ranks)
    return rfi_fail_at(RFI_E_DIST_COMM, file, op->at.line, "%s over %lld ranks has a communicator of %d", op->def->name,
                       (long long)ranks, m->comm->size);
  /* On cuda:none nothing is sent, so any communicator can replace NCCL. */
  const bool planned = strcmp(rfi_ctx_device(m->ctx), "cuda:none") == 0;
  if (m->comm->table->host != m->backend->host && !planned)
    return rfi_fail_at(RFI_E_DIST_COMM, file, op->at.line, "%s on %s has a communicator of %s", op->def->name,
                       m->backend->name, m->comm->table->name);
  b->call.library = m->comm;
  return RFR_OK;
}

/* Fills the call of op i with its arguments, selects the kernel and queries its workspace. */
static rfr_status select_op(const rfi_executor *m, const rfr_trace *t, int i, rfi_arg *args, rfi_arena *memory,
                            rfi_bound *b) {
  const rfi_opr *op = &t->ops[i];
  for (int k = 0; k < op->n_in; k++) fill_arg(t, op->in[k], &args[k]);
  for (int j = 0; j < op->n_out; j++) fill_arg(t, op->out[j], &args[op->n_in + j]);
  RFI_TRY(type_dead_results(m->ctx, op, args));
  *b = (rfi_bound){.op = i,
                   .recorded = op,
                   .call = {.n_in = op->n_in,
                            .n_out = op->n_out,
                            .in = args,
                            .out = args + op->n_in,
                            .attr = op->attr,
                            .microbatch = op->microbatch,
                            .threads = rfi_ctx_threads(m->ctx),
                            .user = op->def->outside ? op->def->outside->user : NULL}};
  RFI_TRY(m->backend->select(m->device, op, memory, b));
  if (b->run) return op->def->flags & RFI_COLLECTIVE ? set_comm(m, op, b) : RFR_OK;
  return rfi_fail_at(RFI_E_BIND_NO_KERNEL, op->at.file ? op->at.file : "", op->at.line, "%s%s%s on %s%s%s",
                     op->def->name, op->scope[0] ? ", in " : "", op->scope, m->backend->name, b->why ? ": " : "",
                     b->why ? b->why : "");
}

/* Reports the kernel of a grouped GEMM and why it was chosen; for other ops, why there is no faster kernel. */
static rfr_status report_choice(const rfr_trace *t, const rfi_bound *b, rfi_report *report) {
  const rfi_opr *op = &t->ops[b->op];
  if (!b->why && !rfi_is_grouped_gemm(op->def, &b->call)) return RFR_OK;
  return rfi_report_line(report, "kernel: op %d %s%s%s on %s%s%s", b->op, op->def->name, op->scope[0] ? " in " : "",
                         op->scope, b->kernel, b->why ? ": " : "", b->why ? b->why : "");
}

static rfr_status select_bound(const rfi_executor *m, rfi_exec_unit *u, int i, rfi_arena *memory, rfi_report *report) {
  const rfi_opr *op = &u->trace->ops[i];
  rfi_bound *b = &u->bound[u->n_bound++];
  rfi_arg *args = rfi_arena_alloc(memory, sizeof *args * (size_t)(op->n_in + op->n_out + 1));
  if (!args) return RFR_NO_MEMORY;
  RFI_TRY(select_op(m, u->trace, i, args, memory, b));
  u->flops += op->cost.flops;
  if (op->clone_of >= 0) u->recomputed++, u->recomputed_flops += op->cost.flops;
  return report ? report_choice(u->trace, b, report) : RFR_OK;
}

rfr_status rfi_unit_select(const rfi_executor *m, rfi_exec_unit *u, rfi_arena *memory, rfi_report *report) {
  const size_t n = (size_t)u->trace->n_ops + 1;
  u->bound = rfi_arena_alloc(memory, sizeof *u->bound * n);
  u->workspace_at = rfi_arena_alloc(memory, sizeof *u->workspace_at * n);
  if (!u->bound || !u->workspace_at) return RFR_NO_MEMORY;
  u->n_bound = u->recomputed = 0;
  u->flops = u->recomputed_flops = 0;
  for (int part = 0, i = 0; part <= RFI_PARTS; part++) {
    for (; part > 0 && i < u->start[part]; i++)
      if (!(u->trace->ops[i].def->flags & RFI_VIEW)) RFI_TRY(select_bound(m, u, i, memory, report));
    u->first[part] = u->n_bound;
  }
  return RFR_OK;
}

rfr_status rfi_select_workspaces(void *executor, const rfr_trace *t, int64_t *bytes) {
  const rfi_executor *m = executor;
  rfi_arg *args;
  int most = 0;
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].n_in + t->ops[i].n_out > most) most = t->ops[i].n_in + t->ops[i].n_out;
  RFI_TRY(RFI_ALLOC(m->ctx, sizeof *args * (size_t)(most + 1), &args));
  rfr_status s = RFR_OK;
  for (int i = 0; i < t->n_ops && s == RFR_OK; i++) {
    rfi_bound b = {0};
    if (!(t->ops[i].def->flags & RFI_VIEW)) s = select_op(m, t, i, args, m->strings, &b);
    bytes[i] = b.workspace;
  }
  rfi_free(m->ctx, args);
  return s;
}
