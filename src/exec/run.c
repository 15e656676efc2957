/* SPDX-License-Identifier: Apache-2.0
 *
 * Run, capture, replay. On the CPU a graph is the recorded list of calls: eager and
 * captured walk the same bound ops, so they cannot drift apart. A replay first compares
 * what the caller says about the inputs with what was captured, and runs nothing on a
 * mismatch. A profile is a third walk over the same calls, so that the others know no clock.
 */
#include <fenv.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/base.h"
#include "exec/exec.h"
#include "ops/cost.h"

static rfr_status run_calls(rfi_bound *const *nodes, rfi_bound *bound, int n) {
  fenv_t env;
  /* the caller's rounding mode must not decide our bits, nor ours the caller's */
  fegetenv(&env);
  fesetenv(FE_DFL_ENV);
  rfr_status s = RFR_OK;
  for (int i = 0; i < n && s == RFR_OK; i++) {
    rfi_bound *b = nodes ? nodes[i] : &bound[i];
    s = b->run(&b->call);
  }
  fesetenv(&env);
  return s;
}

static rfr_status get_program(const rfr_programs *p, int i, rfi_program **out) {
  if (i < 0 || i >= p->n) return rfi_fail(RFI_E_ARGUMENT, "program %d of %d", i, p->n);
  *out = &p->program[i];
  return RFR_OK;
}

rfr_status rfr_programs_load(rfr_programs *p) {
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    if (p->options.debug) RFI_TRY(rfi_debug_run(p, g, 0, g->n_load));
    else RFI_TRY(run_calls(NULL, g->bound, g->n_load));
  }
  return RFR_OK;
}

rfr_status rfr_program_run(rfr_programs *p, int program) {
  rfi_program *g;
  RFI_TRY(get_program(p, program, &g));
  if (p->options.debug) return rfi_debug_run(p, g, g->n_load, g->n_bound);
  return run_calls(NULL, g->bound + g->n_load, g->n_bound - g->n_load);
}

/* ---- with a clock ---- */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static rfr_dtype first_float(const rfi_call *call) {
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k].data && rfr_dtype_is_float(call->in[k].type.dtype)) return call->in[k].type.dtype;
  return call->out[0].type.dtype;
}

static rfr_status run_timed(const rfi_program *g, rfi_bound *bound, int n, rfr_op_time *times) {
  fenv_t env;
  rfr_status s = RFR_OK;
  fegetenv(&env);
  fesetenv(FE_DFL_ENV);
  const double begin = now();
  for (int i = 0; i < n && s == RFR_OK; i++) {
    rfi_bound *b = &bound[i];
    const rfi_opr *op = &g->trace->ops[b->op];
    const double start = now();
    s = b->run(&b->call);
    const double seconds = now() - start;
    const rfi_cost cost = rfi_op_cost(g->trace, op);
    const double share =
        rfi_pairs_in_documents(op, &b->call); /* now: another value may take the place of the offsets */
    times[i] =
        (rfr_op_time){b->op, b->kernel, start - begin, seconds, cost.flops * share, cost.bytes, first_float(&b->call)};
  }
  fesetenv(&env);
  return s;
}

rfr_status rfr_program_profile(rfr_programs *p, int program, rfr_op_time *times, int max, int *n) {
  rfi_program *g;
  *n = 0;
  RFI_TRY(get_program(p, program, &g));
  *n = g->n_bound - g->n_load;
  if (!times) return RFR_OK;
  if (max < *n) return rfi_fail(RFI_E_ARGUMENT, "room for %d times, program \"%s\" has %d ops", max, g->name, *n);
  if (p->options.debug) return rfi_fail(RFI_E_ARGUMENT, "program \"%s\" was compiled for debugging", g->name);
  return run_timed(g, g->bound + g->n_load, *n, times);
}

rfr_status rfr_program_capture(rfr_programs *p, int program) {
  rfi_program *g;
  RFI_TRY(get_program(p, program, &g));
  g->graph.n = 0;
  for (int i = g->n_load; i < g->n_bound; i++) g->graph.node[g->graph.n++] = &g->bound[i];
  g->graph.captured = true;
  return RFR_OK;
}

static rfr_status check_binding(const rfr_programs *p, const rfi_program *g, const rfr_binding *b) {
  int found = b->name ? rfi_names_find(&p->names, b->name) : -1;
  const rfi_slot *slot = found < 0 ? NULL : &p->slot[found];
  if (!slot)
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "program \"%s\" has no input \"%s\"", g->name, b->name ? b->name : "");
  const rfr_type *want = &slot->tensor.type;
  if (b->type.dtype != want->dtype)
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "program \"%s\", input \"%s\": captured with type %s, replayed with %s",
                    g->name, b->name, rfr_dtype_name(want->dtype), rfr_dtype_name(b->type.dtype));
  if (b->type.rank != want->rank)
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "program \"%s\", input \"%s\": captured with rank %d, replayed with %d",
                    g->name, b->name, want->rank, b->type.rank);
  for (int d = 0; d < want->rank; d++)
    if (b->type.shape[d] != want->shape[d])
      return rfi_fail(RFI_E_REPLAY_SIGNATURE, "program \"%s\", input \"%s\": dimension %d was %lld, now %lld", g->name,
                      b->name, d, (long long)want->shape[d], (long long)b->type.shape[d]);
  if (b->data != slot->tensor.data)
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "program \"%s\", input \"%s\": captured at %p, replayed at %p", g->name,
                    b->name, slot->tensor.data, b->data);
  return RFR_OK;
}

rfr_status rfr_program_replay(rfr_programs *p, int program, const rfr_binding *bindings, int n) {
  rfi_program *g;
  RFI_TRY(get_program(p, program, &g));
  if (!g->graph.captured) return rfi_fail(RFI_E_REPLAY_SIGNATURE, "program \"%s\" was not captured", g->name);
  for (int i = 0; i < n; i++) RFI_TRY(check_binding(p, g, &bindings[i]));
  if (p->options.debug) return rfi_debug_run(p, g, g->n_load, g->n_bound);
  return run_calls(g->graph.node, NULL, g->graph.n);
}
