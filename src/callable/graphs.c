/* SPDX-License-Identifier: Apache-2.0
 *
 * Creation and queries of graphed callables. Missing memory and missing kernels are found here; a step allocates
 * nothing.
 */
#include <stddef.h>
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "core/rng.h"
#include "exec/hook_lists.h"
#include "exec/step_memory.h"
#include "schedule/schedule.h"

rfr_callable rfr_callable_default(void) {
  return (rfr_callable){.size = sizeof(rfr_callable), .first_site = -1, .first_linear = -1};
}

rfr_graphs_options rfr_graphs_options_default(void) {
  return (rfr_graphs_options){.size = sizeof(rfr_graphs_options), .fuse = 1, .wgrad_side_stream = 1};
}

rfr_main_gradient rfr_main_gradient_default(void) { return (rfr_main_gradient){.size = sizeof(rfr_main_gradient)}; }

/* ---- arguments ---- */

static rfr_status check_options(const rfr_graphs_options *o, int n) {
  RFI_TRY(rfi_check_options("rfr_graphs_options", o, o->size, sizeof *o));
  if (o->warmup_iterations < 0) return rfi_fail(RFI_E_ARGUMENT, "%d warm-up iterations", o->warmup_iterations);
  if (o->first_microbatch < 0 || o->first_microbatch > RFI_MAX_MICROBATCH)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_graphs_options.first_microbatch is %d, allowed are 0 to %d",
                    o->first_microbatch, RFI_MAX_MICROBATCH);
  RFI_TRY(rfi_check_hooks(o->hooks, o->n_hooks, n, "rfr_graphs_options", "callables"));
  RFI_TRY(rfi_check_hook_list(&o->pre_warmup));
  RFI_TRY(rfi_check_hook_list(&o->post_warmup));
  if (!rfi_is_list(o->tensors, o->n_tensors) || !rfi_is_list(o->gradients, o->n_gradients) || o->budget < 0 ||
      (unsigned)o->recompute > RFR_RECOMPUTE_AUTO)
    return rfi_fail(RFI_E_ARGUMENT,
                    "rfr_graphs_options: a list is NULL with n > 0, or n_tensors %d, n_gradients %d, budget %lld or "
                    "recompute %d is out of range",
                    o->n_tensors, o->n_gradients, (long long)o->budget, (int)o->recompute);
  return rfi_graphs_check_gradient_list(o->gradients, o->n_gradients);
}

static bool is_first(int64_t number) { return number >= -1 && number <= RFI_MOST_SITES; }

static rfr_status check_arguments(rfr_ctx *ctx, const rfr_callable *callables, int n, const rfr_graphs_options *o) {
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (n < 1 || !callables)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_graphs_create: %d callables%s", n, callables ? "" : ", NULL");
  for (int i = 0; i < n; i++) {
    const rfr_callable *c = &callables[i];
    if (c->size != sizeof *c)
      return rfi_fail(RFI_E_ARGUMENT, "callable %d: size is %zu, but rfr_callable_default sets %zu", i, c->size,
                      sizeof *c);
    if (!c->trace || !rfi_is_list(c->links, c->n_links) || !rfi_is_list(c->fixed, c->n_fixed) ||
        !rfi_is_list(c->samples, c->n_samples) || !rfi_is_list(c->inputs, c->n_inputs) ||
        !rfi_is_list(c->outputs, c->n_outputs))
      return rfi_fail(RFI_E_ARGUMENT, "callable %d: trace is NULL, or a list is NULL with n > 0 or has n < 0", i);
    if (!is_first(c->first_site) || !is_first(c->first_linear))
      return rfi_fail(RFI_E_ARGUMENT, "callable %d: first_site is %lld, first_linear is %lld: allowed are -1 to %d", i,
                      (long long)c->first_site, (long long)c->first_linear, RFI_MOST_SITES);
    if (!c->inference != !callables[0].inference)
      return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                      "callable %d is for %s, but the callables before it are not: all callables of a set must agree",
                      i, c->inference ? "inference" : "training");
  }
  if (o) RFI_TRY(check_options(o, n));
  if (o && o->schedule && o->schedule->ctx != ctx)
    return rfi_fail(RFI_E_ARGUMENT,
                    "rfr_graphs_options.schedule belongs to another context: create it in the context of "
                    "the graphs");
  if (strcmp(rfi_ctx_device(ctx), "cuda:none") == 0 && (!o || !o->eager || o->warmup_iterations > 0))
    return rfi_fail(RFI_E_BACKEND_MISSING,
                    "device cuda:none cannot run or capture: to get only the plan, set rfr_graphs_options.eager and no "
                    "warm-up");
  return RFR_OK;
}

/* ---- hooks ---- */

static rfr_status check_hook_parts(const rfr_graphs *g) {
  for (int i = 0; i < g->options.n_hooks; i++) {
    const rfi_callable *c = &g->callable[i];
    const char *const lacks[] = {NULL, rfi_has_backward(c) ? NULL : "backward",
                                 rfi_has(&c->u, RFI_PART_W) ? NULL : "wgrad"};
    RFI_TRY(rfi_check_hook_parts(&g->options.hooks[i], lacks, RFI_E_GRAPHS_CALLABLE, "callable", c->u.name));
  }
  return RFR_OK;
}

/* ---- creation ---- */

static rfr_status make_room(rfr_graphs *g) {
  int most = 0;
  for (int i = 0; i < g->n; i++) {
    const rfi_callable *c = &g->callable[i];
    const int n = c->n_in + c->n_out + c->n_gradients + c->n_parameters;
    if (n > most) most = n;
  }
  g->event_tensors = rfi_arena_alloc(g->m.strings, sizeof *g->event_tensors * (size_t)(most + 1));
  g->from = rfi_arena_alloc(g->m.strings, sizeof *g->from * (size_t)(most + 1));
  g->given = rfi_arena_alloc(g->m.strings, sizeof *g->given * (size_t)(most + 1));
  return g->event_tensors && g->from && g->given ? RFR_OK : RFR_NO_MEMORY;
}

/* Adds the callable to errors of passes, which do not know it. */
static rfr_status name_callable(rfr_status s, const rfi_callable *c) {
  return !c->u.name || strncmp(rfr_last_error()->message, "callable \"", 10) == 0
             ? s
             : rfi_fail_prefix("callable \"%s\": ", c->u.name);
}

/* The slots of the caller's scales, which callables of other sets may share; 0: none. */
static int callers_slots(const rfr_graphs_options *o) {
  for (int i = 0; i < o->n_tensors; i++) {
    const rfr_binding *b = &o->tensors[i];
    if (b->name && strcmp(b->name, RFR_RECIPE_SCALE) == 0 && b->type.rank == 1 &&
        b->type.shape[0] <= RFI_OPERANDS * RFI_MOST_SITES)
      return (int)b->type.shape[0];
  }
  return 0;
}

/* Counts the slots of delayed scaling before any callable is compiled: the states that all callables share have one
 * shape. */
static rfr_status find_recipes(rfr_graphs *g, const rfr_callable *callables) {
  int64_t slot = 0;
  for (int i = 0; i < g->n; i++) {
    rfi_recipe_use *use = &g->callable[i].recipe;
    RFI_TRY(rfi_recipe_use_of(callables[i].trace, use));
    const int64_t linears = callables[i].first_linear;
    if (linears >= 0) slot = RFI_OPERANDS * linears;
    if (use->slots > 0) {
      if (g->recipe.slots > 0) RFI_TRY(rfi_recipes_agree(&g->recipe.delayed, use->delayed));
      g->recipe.delayed = *use->delayed;
      if (g->recipe.slots < slot + use->slots) g->recipe.slots = (int)slot + use->slots;
      g->callable[i].first_slot = (int)slot;
    }
    slot += RFI_OPERANDS * use->linears;
    use->delayed = NULL; /* it points into the caller's trace */
  }
  const int callers = callers_slots(&g->options);
  if (g->recipe.slots > 0 && callers > g->recipe.slots) g->recipe.slots = callers;
  return RFR_OK;
}

/* Everything that the plan needs, without memory. */
static rfr_status plan(rfr_graphs *g, const rfr_callable *callables) {
  rfi_next next = {0};
  RFI_TRY(rfi_graphs_list_gradients(g));
  RFI_TRY(rfi_graphs_make_stages(g));
  RFI_TRY(find_recipes(g, callables));
  for (int i = 0; i < g->n; i++) {
    rfr_status s = rfi_callable_compile(g, i, &callables[i], &next);
    if (s == RFR_OK) s = rfi_graphs_names(g, &g->callable[i]);
    if (s != RFR_OK) return name_callable(s, &g->callable[i]);
    RFI_TRY(rfi_graphs_links(g, i, &callables[i]));
  }
  RFI_TRY(rfi_graphs_check_names(g));
  RFI_TRY(rfi_graphs_counts_create(g));
  return rfi_graphs_lay_out(g);
}

/* If the device has too little memory, retries with the smaller plan in which all W's run in order. */
static rfr_status allocate(rfr_graphs *g) {
  rfr_step_memory *step = g->m.layout.step;
  const int64_t bytes = g->memory.planned_bytes, reserved = step ? step->bytes : 0;
  const rfr_status s = rfi_graphs_allocate(g);
  if (s != RFR_NO_MEMORY || !g->has_side_stream || (step && step->data)) return s;
  rfi_layout_free(&g->m.layout, g->m.backend, g->m.device);
  if (step) step->bytes = reserved;
  RFI_TRY(rfi_graphs_place(g, false));
  rfi_log(
      g->m.ctx, RFR_LOG_WARNING,
      "callables: all weight gradients run in order: the %lld bytes to run them on a side stream exceed the device's "
      "free memory",
      (long long)(bytes - g->memory.planned_bytes));
  return rfi_graphs_allocate(g);
}

static rfr_status build(rfr_graphs *g, const rfr_callable *callables) {
  RFI_TRY(plan(g, callables));
  RFI_TRY(allocate(g));
  for (rfi_callable *c = g->callable; c < g->callable + g->n; c++) {
    RFI_TRY(rfi_unit_instantiate(&g->m, &c->u, c->stage->slots));
    for (int slot = 0; slot < c->u.slots; slot++) c->u.instance[slot].block = c->stage->block[slot];
  }
  rfi_graphs_set_addresses(g);
  RFI_TRY(rfi_graphs_splits_create(g));
  RFI_TRY(check_hook_parts(g));
  RFI_TRY(rfi_graphs_make_calls(g, g->options.schedule, false, &g->calls));
  RFI_TRY(rfi_graphs_make_calls(g, NULL, true, &g->evaluation));
  RFI_TRY(rfi_graphs_check_overlap(g, &g->calls));
  rfi_graphs_count_live(g);
  RFI_TRY(make_room(g));
  if (g->options.warmup_iterations > 0) RFI_TRY(rfi_graphs_warm_up(g));
  return g->options.eager ? RFR_OK : rfi_graphs_capture(g);
}

static rfr_status create(rfr_ctx *ctx, const rfr_callable *callables, int n, const rfr_graphs_options *options,
                         rfr_status (*make)(rfr_graphs *, const rfr_callable *), rfr_graphs **out) {
  rfr_status s;
  rfr_graphs *g = NULL;
  RFI_TRY(RFI_CHECK_OUT(out, "out"));
  RFI_TRY(check_arguments(ctx, callables, n, options));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *g, &g));
  g->options = rfr_graphs_options_default();
  if (options) memcpy(&g->options, options, sizeof g->options);
  g->inference = callables[0].inference != 0;
  RFI_GOTO(rfi_executor_open(&g->m, ctx, g->options.comm, false, g->options.step_memory));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *g->callable * (size_t)n, &g->callable));
  g->n = n;
  RFI_GOTO(make(g, callables));
  *out = g;
  return RFR_OK;
fail:
  rfr_graphs_destroy(g);
  return s;
}

rfr_status rfr_graphs_create(rfr_ctx *ctx, const rfr_callable *callables, int n, const rfr_graphs_options *options,
                             rfr_graphs **out) {
  return create(ctx, callables, n, options, build, out);
}

rfr_status rfi_graphs_plan(rfr_ctx *ctx, const rfr_callable *callables, int n, const rfr_graphs_options *options,
                           rfr_graphs_memory *out) {
  rfr_graphs *g;
  RFI_TRY(create(ctx, callables, n, options, plan, &g));
  const rfr_status s = rfi_step_memory_reserve(&g->m);
  *out = g->memory;
  out->size = sizeof *out;
  rfr_graphs_destroy(g);
  return s;
}

void rfr_graphs_destroy(rfr_graphs *g) {
  if (!g) return;
  for (int i = 0; g->callable && i < g->n; i++) {
    rfi_callable *c = &g->callable[i];
    rfi_unit_deinit(&g->m, &c->u);
    rfr_trace_destroy(c->u.trace);
    if (c->report.text.ctx) rfi_string_deinit(&c->report.text);
  }
  rfi_free(g->m.ctx, g->callable);
  rfi_arena_destroy(g->calls.arena);
  rfi_arena_destroy(g->evaluation.arena);
  rfr_trace_destroy(g->counts.trace);
  if (g->m.device) g->m.backend->free(g->m.device, RFI_MEMORY_RING, g->splits.result);
  rfi_arena_destroy(g->placed);
  rfi_executor_close(&g->m);
  rfi_free(g->m.ctx, g);
}

/* ---- queries ---- */

rfr_status rfr_graphs_tensor(const rfr_graphs *g, const char *name, rfr_tensor *out) {
  RFI_TRY(RFI_CHECK_OUT(out, "out"));
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  rfi_named *x;
  RFI_TRY(rfi_graphs_get(g, name, &x));
  *out = x->tensor;
  return RFR_OK;
}

/* Orders later work of the main stream after all W's of the side stream. Their numbers stay, because the step
 * continues. */
static rfr_status wait_for_side_stream(const rfr_graphs *g) {
  return g->launched > g->waited ? g->m.backend->join_side(g->m.device, 0) : RFR_OK;
}

rfr_status rfr_graphs_gradient(const rfr_graphs *g, const char *parameter, rfr_tensor *out) {
  RFI_TRY(RFI_CHECK_OUT(out, "out"));
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  rfi_named *x;
  RFI_TRY(rfi_graphs_get_gradient(g, parameter, &x));
  RFI_TRY(rfi_graphs_check_gradient(g, (int)(x - g->m.store.named)));
  RFI_TRY(wait_for_side_stream(g)); /* without a schedule */
  *out = x->tensor;
  return RFR_OK;
}

/* Whether a W may write it: a main gradient or a state. */
static bool is_written(const rfr_graphs *g, const rfr_tensor *x) {
  for (const rfi_named *n = g->m.store.named; n < g->m.store.named + g->m.store.n; n++)
    if ((n->parameter >= 0 || n->written) && rfi_overlaps(x->data, x->bytes, n->tensor.data, n->tensor.bytes))
      return true;
  return false;
}

rfr_status rfr_graphs_write(rfr_graphs *g, const rfr_tensor *to, const void *from) {
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  RFI_TRY(rfi_check_handle(to, "to"));
  RFI_TRY(rfi_graphs_check_tensor(g, to));
  if (to->bytes > 0) RFI_TRY(rfi_check_handle(from, "from"));
  if (to->role == RFR_ROLE_FROZEN || to->role == RFR_ROLE_CONST) g->loaded = false;
  RFI_TRY(wait_for_side_stream(g)); /* a W may read `to` */
  return g->m.backend->copy(g->m.device, to->data, from, (size_t)to->bytes);
}

rfr_status rfr_graphs_read(rfr_graphs *g, const rfr_tensor *from, void *to) {
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  RFI_TRY(rfi_check_handle(from, "from"));
  RFI_TRY(rfi_graphs_check_tensor(g, from));
  if (from->bytes > 0) RFI_TRY(rfi_check_handle(to, "to"));
  if (is_written(g, from)) RFI_TRY(wait_for_side_stream(g));
  return g->m.backend->copy(g->m.device, to, from->data, (size_t)from->bytes);
}

rfr_status rfr_graphs_changed(rfr_graphs *g) {
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  if (g->state != RFI_STEP_NONE) return rfi_fail(RFI_E_GRAPHS_ORDER, "a step has begun: end or abort it first");
  g->loaded = false;
  return RFR_OK;
}

static const rfi_exec_unit *unit_of(const rfr_graphs *g, int callable) {
  const bool exists = rfi_check_handle(g, "rfr_graphs") == RFR_OK && callable >= 0 && callable < g->n;
  return exists ? &g->callable[callable].u : NULL;
}

int rfr_graphs_ops(const rfr_graphs *g, int callable, rfr_action_op part) {
  const rfi_exec_unit *u = unit_of(g, callable);
  const rfi_part at = part == RFR_ACTION_F ? RFI_PART_F : part == RFR_ACTION_I ? RFI_PART_I : RFI_PART_W;
  if (!u || (part != RFR_ACTION_F && part != RFR_ACTION_I && part != RFR_ACTION_W)) return -1;
  return u->first[at + 1] - u->first[at];
}

rfr_status rfr_graphs_get_memory(const rfr_graphs *g, rfr_graphs_memory *out) {
  RFI_TRY(rfi_check_handle(out, "out"));
  const size_t size = out->size, known = size < sizeof *out ? size : sizeof *out;
  if (size < offsetof(rfr_graphs_memory, persistent_bytes))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_graphs_memory.size is %zu: set it to sizeof(rfr_graphs_memory)", size);
  memset(&out->planned_bytes, 0, known - offsetof(rfr_graphs_memory, planned_bytes));
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  memcpy(&out->planned_bytes, &g->memory.planned_bytes, known - offsetof(rfr_graphs_memory, planned_bytes));
  return RFR_OK;
}

const rfr_trace *rfr_graphs_trace(const rfr_graphs *g, int callable) {
  const rfi_exec_unit *u = unit_of(g, callable);
  return u ? u->trace : NULL;
}

const char *rfr_graphs_report(const rfr_graphs *g, int callable, const char *pass) {
  const rfi_exec_unit *u = unit_of(g, callable);
  if (u && pass && strcmp(pass, "wgrad") == 0) return rfi_graphs_report_side_stream(g, callable);
  return u ? rfi_stage_report(rfi_unit_stage(u, pass)) : NULL;
}
