/* SPDX-License-Identifier: Apache-2.0
 *
 * Recompute for all callables together, because they share one plan. Each callable has a recompute frontier
 * (pass/recompute.c): each level keeps fewer bytes in its slots after F and adds work to its backward. The levels above
 * the marked ops are merged into one list, ordered by bytes saved (times slots) per work. A prefix of this list is a
 * level for all callables together, and is planned with all of them (layout.c).
 */
#include "base/base.h"
#include "callable/graphed.h"
#include "exec/step_memory.h"

typedef struct search {
  rfr_graphs *g;
  rfi_frontier **frontier; /* per callable */
  int *from;               /* per step of the merged order: the callable that goes to its next level */
  int n, applied;
} search;

static const rfr_trace *fused(const rfi_callable *c) { return rfi_unit_stage(&c->u, "fuse")->trace; }

static bool is_marked(const rfi_callable *c) {
  const rfr_trace *t = fused(c);
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].policy == RFR_POLICY_RECOMPUTE) return true;
  return false;
}

static rfr_status apply_level(search *x, int callable, int level) {
  rfi_callable *c = &x->g->callable[callable];
  rfi_pass_options o = rfi_callable_options(x->g, c);
  if (c->level == level) return RFR_OK;
  c->level = level;
  o.frontier = x->frontier[callable];
  o.level = level;
  RFI_TRY(rfi_pipeline_redo(&c->u.pipeline, "recompute", &o));
  return rfi_callable_order(x->g, c);
}

static rfr_status select_and_place(rfr_graphs *g, bool side_stream) {
  rfi_arena_destroy(g->placed);
  g->placed = NULL;
  RFI_TRY(rfi_arena_create(g->m.ctx, &g->placed));
  for (int i = 0; i < g->n; i++)
    if (rfi_unit_select(&g->m, &g->callable[i].u, g->placed, NULL) != RFR_OK)
      return rfi_fail_prefix("callable %d: ", i);
  return rfi_graphs_place(g, side_stream);
}

/* Applies the first n steps of the merged order. */
static rfr_status apply_levels(void *user, int n, int64_t enough, int64_t *bytes) {
  search *x = user;
  (void)enough;
  for (int i = 0; i < x->g->n; i++) {
    int level = rfi_frontier_marked(x->frontier[i]);
    for (int k = 0; k < n; k++) level += x->from[k] == i;
    if (apply_level(x, i, level) != RFR_OK) return rfi_fail_prefix("callable %d: ", i);
  }
  x->applied = n;
  RFI_TRY(select_and_place(x->g, false));
  *bytes = x->g->memory.planned_bytes;
  return RFR_OK;
}

static double benefit(const search *x, int callable, int level) {
  return rfi_frontier_benefit(x->frontier[callable], level) * x->g->callable[callable].stage->slots;
}

static rfr_status merge(search *x) {
  int *next, n = 0;
  RFI_TRY(RFI_ALLOC(x->g->m.ctx, sizeof *next * (size_t)(x->g->n + 1), &next));
  for (int i = 0; i < x->g->n; i++) {
    next[i] = rfi_frontier_marked(x->frontier[i]) + 1;
    n += rfi_frontier_top(x->frontier[i]) - rfi_frontier_marked(x->frontier[i]);
  }
  const rfr_status s = RFI_ALLOC(x->g->m.ctx, sizeof *x->from * (size_t)(n + 1), &x->from);
  while (s == RFR_OK && x->n < n) {
    int best = -1;
    for (int i = 0; i < x->g->n; i++)
      if (next[i] <= rfi_frontier_top(x->frontier[i]) &&
          (best < 0 || benefit(x, i, next[i]) > benefit(x, best, next[best])))
        best = i;
    x->from[x->n++] = best;
    next[best]++;
  }
  rfi_free(x->g->m.ctx, next);
  return s;
}

static bool has_auto_budget(const rfr_graphs *g) {
  return g->options.recompute == RFR_RECOMPUTE_AUTO && g->options.budget > 0;
}

static rfr_status choose(search *x) {
  rfr_graphs *g = x->g;
  const bool all = g->options.recompute == RFR_RECOMPUTE_ALL, demand = has_auto_budget(g);
  RFI_TRY(RFI_ALLOC(g->m.ctx, sizeof *x->frontier * (size_t)(g->n + 1), &x->frontier));
  for (int i = 0; i < g->n; i++) {
    const rfi_pass_options o = rfi_callable_options(g, &g->callable[i]);
    RFI_TRY(rfi_frontier_create(fused(&g->callable[i]), &o, !all && !demand, &x->frontier[i]));
  }
  RFI_TRY(merge(x));
  const rfi_levels levels = {0, x->n, apply_levels, x};
  int64_t bytes;
  int level = 0;
  RFI_TRY(apply_levels(x, 0, 0, &bytes));
  if (all) RFI_TRY(rfi_find_smallest(&levels, bytes, &level));
  if (demand && bytes > g->options.budget) RFI_TRY(rfi_find_level(&levels, 1, g->options.budget, &level));
  return level == x->applied ? RFR_OK : apply_levels(x, level, 0, &bytes);
}

/* Plans with the levels that the budget requires. */
static rfr_status place_with_levels(rfr_graphs *g) {
  const rfr_graphs_options *o = &g->options;
  RFI_TRY(select_and_place(g, false));
  const int64_t before = g->memory.slot_bytes + g->memory.shared_bytes;
  bool any = o->recompute == RFR_RECOMPUTE_ALL || (has_auto_budget(g) && g->memory.planned_bytes > o->budget);
  search x = {.g = g};
  for (int i = 0; i < g->n; i++) any = any || is_marked(&g->callable[i]);
  if (!any || g->inference) return RFR_OK;
  const rfr_status s = choose(&x);
  for (int i = 0; i < g->n && x.frontier; i++) rfi_frontier_destroy(x.frontier[i]);
  rfi_free(g->m.ctx, x.frontier);
  rfi_free(g->m.ctx, x.from);
  RFI_TRY(s);
  g->memory.saved_bytes = before - g->memory.slot_bytes - g->memory.shared_bytes;
  return RFR_OK;
}

/* Whether the plan is within the budget and the step memory. */
static bool fits(const rfr_graphs *g) {
  const rfr_step_memory *step = g->m.layout.step;
  return (g->options.budget == 0 || g->memory.planned_bytes <= g->options.budget) &&
         (!step || !step->data || rfi_layout_step_bytes(&g->m.layout) <= step->bytes);
}

/* Levels are chosen as if all W's ran in order; then W's run on the side stream if that plan fits too. The side stream
 * saves less time than the recomputation that its memory could require. */
rfr_status rfi_graphs_lay_out(rfr_graphs *g) {
  RFI_TRY(place_with_levels(g));
  if (g->options.wgrad_side_stream && g->m.backend->launch_side) RFI_TRY(rfi_graphs_place(g, true));
  return fits(g) || !g->has_side_stream ? RFR_OK : rfi_graphs_place(g, false);
}
