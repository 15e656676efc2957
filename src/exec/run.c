/* SPDX-License-Identifier: Apache-2.0
 *
 * Run, capture, replay. The backend runs bound ops one by one, or captures the same ops as a graph and launches the
 * graph, so eager and captured runs execute the same calls. A replay first compares the caller's bindings with the
 * captured inputs; if they differ, nothing runs. A profile is a third loop over the same calls; run and capture read no
 * clock.
 */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "exec/step_memory.h"

static rfr_status check_hook(const rfr_programs *p) {
  if (!p->in_hooked) return RFR_OK;
  return rfi_fail(RFI_E_PROGRAM_ORDER, "a hook of these programs cannot run or capture them");
}

/* Check before ops run. */
static rfr_status begin(rfr_programs *p) {
  RFI_TRY(check_hook(p));
  RFI_TRY(rfi_programs_attach(p));
  return rfi_step_memory_take(&p->m, false);
}

static rfr_status run_part(rfr_programs *p, rfi_program *g, rfi_part part, bool eager) {
  RFI_TRY(begin(p));
  const bool hooked = part == RFI_PART_F && eager && rfi_program_has_hooks(p, g);
  if (!p->options.debug && !hooked) return rfi_unit_run(&p->m, &g->u, 0, part, eager, NULL);
  RFI_TRY(rfi_unit_agree(&p->m, &g->u, part));
  if (p->options.debug) RFI_TRY(rfi_debug_begin(p, g));
  return hooked ? rfi_program_run_hooked(p, g) : rfi_debug_run(p, g, g->u.first[part], g->u.first[part + 1]);
}

rfr_status rfi_programs_agree(rfr_programs *p) {
  for (int i = 0; i < p->n; i++) RFI_TRY(rfi_unit_agree(&p->m, &p->program[i].u, RFI_PART_F));
  return RFR_OK;
}

rfr_status rfr_programs_load(rfr_programs *p) {
  RFI_TRY(rfi_check_allocated(p, "rfr_programs_load"));
  for (int i = 0; i < p->n; i++) RFI_TRY(run_part(p, &p->program[i], RFI_PART_LOAD, true));
  return RFR_OK;
}

rfr_status rfr_program_run(rfr_programs *p, int program) {
  rfi_program *g;
  RFI_TRY(rfi_program_get_allocated(p, program, "rfr_program_run", &g));
  return run_part(p, g, RFI_PART_F, true);
}

/* ---- profile ---- */

static rfr_dtype first_float(const rfi_call *call) {
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k].data && rfr_dtype_is_float(call->in[k].type.dtype)) return call->in[k].type.dtype;
  return call->out[0].type.dtype;
}

/* The fraction of an op's work, as counted from shapes, that is really done: it depends on the values of an operand,
 * which may be on a device. */
static rfr_status read_share(rfr_programs *p, const rfi_opr *op, const rfi_call *call, double *share) {
  const rfi_share *rule = op->def->share;
  if (!rule) return RFR_OK;
  const rfi_arg *x = &call->in[rule->operand];
  int64_t n = 1; /* elements from the first to the last */
  for (int d = 0; d < x->type.rank; d++) n += (x->type.shape[d] - 1) * x->stride[d];
  const size_t bytes = (size_t)n * (size_t)rfr_dtype_bits(x->type.dtype) / 8;
  void *values;
  RFI_TRY(rfi_alloc(p->m.ctx, bytes, &values));
  rfr_status s = p->m.backend->copy(p->m.device, values, x->data, bytes);
  if (s == RFR_OK) *share = rule->of(call, values);
  rfi_free(p->m.ctx, values);
  return s;
}

/* The time of a shared launch is divided among its ops in proportion to their bytes. */
static rfr_status run_timed(rfr_programs *p, const rfi_program *g, rfi_bound *bound, int n, rfr_op_time *times) {
  const double begin = rfi_now();
  for (int i = 0, many; i < n; i += many) {
    double seconds, bytes = 0;
    const double start = rfi_now();
    RFI_TRY(rfi_name_op(p->m.backend->run_timed(p->m.device, &bound[i], n - i, &many, &seconds), g->u.trace, g->u.name,
                        bound[i].op));
    for (int k = i; k < i + many; k++) bytes += g->u.trace->ops[bound[k].op].cost.bytes;
    for (int k = i; k < i + many; k++) {
      rfi_bound *b = &bound[k];
      const rfi_opr *op = &g->u.trace->ops[b->op];
      const rfi_cost cost = op->cost;
      double share = 1;
      RFI_TRY(read_share(p, op, &b->call, &share)); /* read before a later op overwrites the values */
      const double own = bytes > 0 ? seconds * cost.bytes / bytes : seconds / many;
      times[k] =
          (rfr_op_time){b->op, b->kernel, start - begin, own, cost.flops * share, cost.bytes, first_float(&b->call)};
    }
  }
  return RFR_OK;
}

rfr_status rfr_program_profile(rfr_programs *p, int program, rfr_op_time *times, int max, int *n) {
  rfi_program *g;
  RFI_TRY(RFI_CHECK_OUT(n, "int"));
  RFI_TRY(rfi_program_get(p, program, &g));
  *n = g->u.n_bound - g->u.first[RFI_PART_F];
  if (!times) return RFR_OK;
  RFI_TRY(rfi_check_allocated(p, "rfr_program_profile"));
  if (max < *n) return rfi_fail(RFI_E_ARGUMENT, "max is %d, but program \"%s\" has %d ops", max, g->u.name, *n);
  if (p->options.debug) return rfi_fail(RFI_E_ARGUMENT, "program \"%s\" was compiled for debugging", g->u.name);
  if (rfi_program_has_hooks(p, g))
    return rfi_fail(RFI_E_ARGUMENT, "program \"%s\" has hooks, which a profile does not run", g->u.name);
  RFI_TRY(begin(p));
  RFI_TRY(rfi_unit_agree(&p->m, &g->u, RFI_PART_F));
  return run_timed(p, g, g->u.bound + g->u.first[RFI_PART_F], *n, times);
}

rfr_status rfr_program_capture(rfr_programs *p, int program) {
  rfi_program *g;
  RFI_TRY(rfi_program_get_allocated(p, program, "rfr_program_capture", &g));
  RFI_TRY(check_hook(p));
  rfi_graph **graph = &g->u.instance->graph[RFI_PART_F];
  p->m.backend->graph_destroy(p->m.device, *graph);
  *graph = NULL;
  RFI_TRY(rfi_programs_attach(p));
  RFI_TRY(rfi_unit_agree(&p->m, &g->u, RFI_PART_F));
  if (rfi_program_has_hooks(p, g)) return rfi_program_capture_hooked(p, g);
  return rfi_unit_capture(&p->m, &g->u, 0, RFI_PART_F, NULL, 0, graph);
}

static rfr_status check_type(const char *name, const rfr_type *was, const rfr_type *now) {
  if (now->dtype != was->dtype)
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "\"%s\": captured with type %s, now %s", name, rfr_dtype_name(was->dtype),
                    (unsigned)now->dtype < RFR_DTYPE_COUNT ? rfr_dtype_name(now->dtype) : "unknown");
  if (now->rank != was->rank)
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "\"%s\": captured with rank %d, now %d", name, was->rank, now->rank);
  for (int d = 0; d < was->rank; d++)
    if (now->shape[d] != was->shape[d])
      return rfi_fail(RFI_E_REPLAY_SIGNATURE, "\"%s\": dimension %d was %lld, now %lld", name, d,
                      (long long)was->shape[d], (long long)now->shape[d]);
  return RFR_OK;
}

rfr_status rfi_check_captured(const char *name, const rfr_type *type, const void *at, const rfr_binding *now) {
  RFI_TRY(check_type(name, type, &now->type));
  if (at && now->data != at)
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "\"%s\": captured at %p, now at %p", name, at, now->data);
  if (!now->data && rfi_bytes(type) > 0) return rfi_fail(RFI_E_REPLAY_SIGNATURE, "\"%s\": no data", name);
  return RFR_OK;
}

static rfr_status check_binding(const rfr_programs *p, const rfi_program *g, const rfr_binding *b) {
  const rfi_named *input = rfi_storage_find(&p->m.store, b->name);
  if (!input)
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "program \"%s\" has no input \"%s\"", g->u.name, b->name ? b->name : "");
  const rfr_status s = rfi_check_captured(b->name, &input->tensor.type, input->tensor.data, b);
  return s == RFR_OK ? s : rfi_fail_prefix("program \"%s\", input ", g->u.name);
}

rfr_status rfr_program_replay(rfr_programs *p, int program, const rfr_binding *bindings, int n) {
  rfi_program *g;
  RFI_TRY(rfi_program_get_allocated(p, program, "rfr_program_replay", &g));
  if (!g->u.instance->graph[RFI_PART_F])
    return rfi_fail(RFI_E_PROGRAM_ORDER, "program \"%s\" is not captured: call rfr_program_capture first", g->u.name);
  if (!rfi_is_list(bindings, n))
    return rfi_fail(RFI_E_ARGUMENT, "n is %d; it must not be negative, and bindings not NULL", n);
  for (int i = 0; i < n; i++) RFI_TRY(check_binding(p, g, &bindings[i]));
  return run_part(p, g, RFI_PART_F, false);
}

rfr_status rfr_programs_wait(rfr_programs *p) {
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  return p->m.backend->wait(p->m.device);
}

void *rfi_programs_stream(const rfr_programs *p) { return rfi_executor_stream(&p->m); }

rfr_status rfr_programs_poll(rfr_programs *p, int *idle) {
  bool done = true;
  RFI_TRY(RFI_CHECK_OUT(idle, "int"));
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  RFI_TRY(p->m.backend->poll(p->m.device, &done));
  *idle = done;
  return RFR_OK;
}

/* ---- copies from and to the host ---- */

/* Whether x lies within `whole`, a tensor of these programs, and has its type. */
static bool is_part(const rfr_tensor *x, const rfr_tensor *whole) {
  return memcmp(&x->type, &whole->type, sizeof x->type) == 0 &&
         rfi_lies_in(x->data, x->bytes, whole->data, whole->bytes);
}

static bool is_output(const rfr_programs *p, const rfr_tensor *x) {
  rfr_tensor y;
  for (int i = 0; i < p->n; i++)
    for (int k = 0; k < p->program[i].u.trace->n_outputs; k++)
      if (rfi_program_output_at(p, i, k, &y) && is_part(x, &y)) return true;
  return false;
}

/* A copy must stay within one tensor of these programs. */
static rfr_status check_copy(const rfr_programs *p, const rfr_tensor *x, const void *host, const char *call) {
  RFI_TRY(rfi_check_allocated(p, call));
  RFI_TRY(rfi_check_handle(x, "rfr_tensor"));
  const char *name = x->name ? x->name : "";
  if (x->bytes < 0 || (x->bytes > 0 && !host))
    return rfi_fail(RFI_E_ARGUMENT, "%s of \"%s\": %lld bytes or host memory at %p is not valid", call, name,
                    (long long)x->bytes, host);
  const rfi_named *input = rfi_storage_find(&p->m.store, name);
  if (input && is_part(x, &input->tensor)) return RFR_OK;
  for (int i = 0; i < p->m.store.n; i++)
    if (is_part(x, &p->m.store.named[i].tensor)) return RFR_OK;
  const bool output = x->data && is_output(p, x), in_step = rfi_step_memory_has(p->m.layout.step, x->data, x->bytes);
  if (output && (!in_step || rfi_step_memory_holds(&p->m))) return RFR_OK;
  if (output)
    return rfi_fail(RFI_E_TENSOR,
                    "%s of \"%s\": it is an output in step memory, which has been used by others since the program "
                    "ran, or the program has not run",
                    call, name);
  if (input)
    return rfi_fail(RFI_E_TENSOR,
                    "%s of \"%s\": %lld bytes at %p; it has %lld bytes at %p, and its type must be unchanged", call,
                    name, (long long)x->bytes, x->data, (long long)input->tensor.bytes, input->tensor.data);
  return rfi_fail(RFI_E_TENSOR, "%s of \"%s\": its %lld bytes at %p are not within a tensor of these programs", call,
                  name, (long long)x->bytes, x->data);
}

rfr_status rfr_programs_write(rfr_programs *p, const rfr_tensor *to, const void *from) {
  RFI_TRY(check_copy(p, to, from, "rfr_programs_write"));
  return p->m.backend->copy(p->m.device, to->data, from, (size_t)to->bytes);
}

rfr_status rfi_programs_stage(rfr_programs *p, size_t bytes, void **out) {
  *out = NULL;
  RFI_TRY(rfi_check_allocated(p, "rfi_programs_stage"));
  return p->m.backend->alloc(p->m.device, RFI_MEMORY_RING, bytes, out);
}

void rfi_programs_unstage(rfr_programs *p, void *memory) {
  if (memory) p->m.backend->free(p->m.device, RFI_MEMORY_RING, memory);
}

rfr_status rfr_programs_read(rfr_programs *p, const rfr_tensor *from, void *to) {
  RFI_TRY(check_copy(p, from, to, "rfr_programs_read"));
  return p->m.backend->copy(p->m.device, to, from->data, (size_t)from->bytes);
}
