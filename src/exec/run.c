/* SPDX-License-Identifier: Apache-2.0
 *
 * Run, capture, replay. On the CPU a graph is the recorded list of calls: eager and
 * captured walk the same bound ops, so they cannot drift apart. A replay first compares
 * what the caller says about the inputs with what was captured, and runs nothing on a
 * mismatch.
 */
#include <fenv.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"

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
