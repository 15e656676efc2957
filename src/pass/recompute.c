/* SPDX-License-Identifier: Apache-2.0
 *
 * Recompute: decides which values the backward keeps and which it recomputes just before use (recompute_model.c has the
 * rules of recomputing).
 *
 * Ops at the same place of equal layers form a class, and the search chooses classes: their number does not grow with
 * the depth of the model, so the search is linear in the trace. It is greedy: it repeatedly takes the class that frees
 * the most memory near the peak per unit of extra work. The freed memory follows from the exact lifetimes after the
 * choice. So an operand that must live longer is counted, and a chain that would have to be recomputed all at once
 * (every residual of a deep model) frees nothing. The choices in their order form a frontier: each level needs less
 * memory and more work. `all` takes the last level. For a budget the caller chooses a level (exec/layout.c).
 */
#include <stdlib.h>
#include <string.h>

#include "pass/plan.h"
#include "pass/recompute_model.h"

/* FLOPs that take as long as moving one byte: a value between those of vector code on a CPU and of tensor cores.
 * Affects only the order of choices. */
static const double FLOPS_PER_BYTE = 32;
/* An op is near the peak if more than this fraction of the peak is live during it. Several microbatches, or forward and
 * backward, can have nearly equal peaks that no single class lowers together. */
static const double NEAR_PEAK = 0.9;

typedef struct member {
  uint64_t key;
  int op, microbatch, rank; /* rank: index among the members of its microbatch */
} member;

typedef struct class {
  int first, n; /* range of members */
  bool marked;  /* policy recompute */
  int taken;    /* position in the order in which classes were first chosen; -1: not chosen */
} class;

/* How a class is taken: all members; all members, their operands kept; all but every second or fourth member, which
 * stay as restart points; only for the later of two programs, with the operands that it does not read otherwise; or all
 * members for each of the two programs. */
typedef enum kind { ALL_MEMBERS, SHALLOW, KEEP_SECOND, KEEP_FOURTH, IN_LATER, IN_EACH, KINDS } kind;

typedef struct rfi_frontier {
  rfr_ctx *ctx;
  rfi_recompute_model m;
  rfr_trace *ordered; /* the model's trace, if the frontier owns it */
  rfi_pass_options own;
  const rfi_pass_options *o;
  member *member;
  class *class;
  double *score; /* per class and kind: the benefit when it was last evaluated */
  bool *stale;
  int n_members, n_classes, n_taken;
  int *op; /* chosen ops in order; op + n_ops: the op's clone for the later program */
  int n_ops;
  int *level; /* level[k]: number of chosen ops at level k; level 0 has 0 */
  bool *full; /* per level: the plan is smaller with the members that drop_unneeded would remove */
  double *benefit;
  int n_levels, n_marked; /* n_marked: the level with the marked ops */
  int evaluations;        /* number of evaluated choices: the cost of the search, in passes over the trace */
} frontier;

/* ---- classes ---- */

static uint64_t mix(uint64_t h, const void *data, size_t n) {
  const unsigned char *c = data;
  for (size_t i = 0; i < n; i++) h = (h ^ c[i]) * 0x100000001b3u;
  return h ^ h >> 29;
}

static uint64_t op_hash(const rfr_trace *t, const rfi_opr *op) {
  uint64_t h = mix(0xcbf29ce484222325u, &op->def->code, sizeof op->def->code);
  for (int k = 0; k < op->def->n_attrs; k++) /* ignore the sites of random ops, which always differ */
    if (strcmp(op->def->attr[k], "site") != 0) h = mix(h, &op->attr[k], sizeof op->attr[k]);
  for (int k = 0; k < op->n_in; k++)
    if (op->in[k] >= 0) h = mix(h, &t->values[op->in[k]].type, sizeof(rfr_type));
  for (int j = 0; j < op->n_out; j++)
    if (op->out[j] >= 0) h = mix(h, &t->values[op->out[j]].type, sizeof(rfr_type));
  for (const char *c = op->scope; *c; c++) /* treats "layer3.mlp" and "layer4.mlp" as equal */
    if (*c < '0' || *c > '9') h = mix(h, c, 1);
  return mix(h, &op->policy, sizeof op->policy);
}

/* Hashes of each op alone, and of each op with its producers and readers in the forward. */
static rfr_status hash_ops(const rfi_recompute_model *m, uint64_t **out) {
  const rfr_trace *t = m->t;
  uint64_t *own, *near;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(t->ctx, 2 * sizeof *own * (size_t)(t->n_ops + 1), &own));
  near = own + t->n_ops;
  for (int i = 0; i < t->n_ops; i++) own[i] = near[i] = op_hash(t, &t->ops[i]);
  for (int i = 0; i < t->n_ops; i++) {
    if (t->ops[i].phase != RFR_PHASE_FORWARD || (t->ops[i].def->flags & RFI_VIEW)) continue;
    for (int k = 0; k < t->ops[i].n_in; k++) {
      int p = t->ops[i].in[k] < 0 ? -1 : t->values[m->root[t->ops[i].in[k]]].op;
      if (p < 0) continue;
      near[i] += mix(own[p] + (uint64_t)k, "<", 1);
      near[p] += mix(own[i] + (uint64_t)k, ">", 1);
    }
  }
  *out = own;
  return RFR_OK;
}

static int by_place(const void *a, const void *b) {
  const member *x = a, *y = b;
  if (x->key != y->key) return x->key < y->key ? -1 : 1;
  if (x->microbatch != y->microbatch) return x->microbatch < y->microbatch ? -1 : 1;
  return x->op - y->op;
}
/* The first layers of all microbatches come first, because their values live longest. */
static int by_rank(const void *a, const void *b) {
  const member *x = a, *y = b;
  if (x->key != y->key) return x->key < y->key ? -1 : 1;
  if (x->rank != y->rank) return x->rank - y->rank;
  return x->microbatch - y->microbatch;
}
static int by_first_op(const void *a, const void *b) {
  const class *x = a, *y = b;
  return x->taken - y->taken;
}

static rfr_status find_classes(frontier *l) {
  const rfr_trace *t = l->m.t;
  uint64_t *hash;
  RFI_TRY(hash_ops(&l->m, &hash));
  for (int i = 0; i < t->n_ops; i++)
    if (l->m.can[i] && l->m.read_late[i])
      l->member[l->n_members++] = (member){hash[t->n_ops + i], i, t->ops[i].microbatch, 0};
  rfi_free(t->ctx, hash);
  qsort(l->member, (size_t)l->n_members, sizeof *l->member, by_place);
  for (int i = 1; i < l->n_members; i++)
    if (l->member[i].key == l->member[i - 1].key && l->member[i].microbatch == l->member[i - 1].microbatch)
      l->member[i].rank = l->member[i - 1].rank + 1;
  qsort(l->member, (size_t)l->n_members, sizeof *l->member, by_rank);
  for (int i = 0; i < l->n_members; i++) {
    if (i == 0 || l->member[i].key != l->member[i - 1].key)
      l->class[l->n_classes++] = (class){i, 0, t->ops[l->member[i].op].policy == RFR_POLICY_RECOMPUTE, l->member[i].op};
    l->class[l->n_classes - 1].n++;
  }
  /* sorted in trace order, so that ties do not depend on hashes */
  qsort(l->class, (size_t)l->n_classes, sizeof *l->class, by_first_op);
  for (int i = 0; i < l->n_classes; i++) l->class[i].taken = -1;
  return RFR_OK;
}

/* ---- levels ---- */

static void choose(frontier *l, int op) {
  if (l->m.chosen[op]) return;
  l->m.chosen[op] = true;
  l->op[l->n_ops++] = op;
}

/* Chooses one member. Unless shallow, also chooses, recursively, the producers of those operands that only the forward
 * reads. */
static void choose_member(frontier *l, int op, bool shallow) {
  const rfi_recompute_model *m = &l->m;
  int from = l->n_ops;
  choose(l, op);
  for (int i = from; i < l->n_ops && !shallow; i++) {
    const rfi_opr *o = &m->t->ops[l->op[i]];
    for (int k = 0; k < o->n_in; k++) {
      int p = o->in[k] < 0 ? -1 : m->t->values[m->root[o->in[k]]].op;
      if (p >= 0 && m->can[p] && !m->read_late[p]) choose(l, p);
    }
  }
}

/* The same for the later program, whose clones are separate. */
static void choose_later(frontier *l, int op) {
  const rfi_recompute_model *m = &l->m;
  const int n = m->t->n_ops;
  int from = l->n_ops;
  choose(l, op + n);
  for (int i = from; i < l->n_ops; i++) {
    const rfi_opr *o = &m->t->ops[l->op[i] - n];
    for (int k = 0; k < o->n_in; k++) {
      int p = o->in[k] < 0 ? -1 : m->t->values[m->root[o->in[k]]].op;
      if (p >= 0 && m->can[p] && !m->read_later[p]) choose(l, p + n);
    }
  }
}

/* Adds one level per newly chosen member. */
static void add_levels(frontier *l, const class *c, kind how) {
  for (int i = c->first; i < c->first + c->n; i++) {
    int every = how == KEEP_SECOND ? 2 : how == KEEP_FOURTH ? 4 : 0;
    if (every && l->member[i].rank % every == 0) continue;
    int before = l->n_ops;
    if (how != IN_LATER) choose_member(l, l->member[i].op, how == SHALLOW);
    if (how == IN_LATER || how == IN_EACH) choose_later(l, l->member[i].op);
    if (l->n_ops > before) l->level[l->n_levels++] = l->n_ops;
  }
}

static void remove_levels(frontier *l, int levels) {
  l->n_levels = levels;
  while (l->n_ops > l->level[levels - 1]) l->m.chosen[l->op[--l->n_ops]] = false;
}

/* Chooses exactly the ops of level k. */
static void set_level(frontier *l, int k) {
  memset(l->m.chosen, 0, sizeof *l->m.chosen * (size_t)(RFI_LATES * l->m.t->n_ops));
  for (int i = 0; i < l->level[k]; i++) l->m.chosen[l->op[i]] = true;
}

/* ---- the search ---- */

static double work(const rfi_choice_cost *c) { return c->bytes + c->flops / FLOPS_PER_BYTE; }

/* The benefit of a class: bytes freed near the peak per unit of work; 0 or less: no benefit. */
static double evaluate_move(frontier *l, int c, kind how, const rfi_choice_cost *now) {
  int levels = l->n_levels;
  const bool later = how == IN_LATER || how == IN_EACH;
  if (later && l->m.lates == 1) return 0;
  if (later && l->class[c].marked && !l->m.separate_wgrad)
    return 0; /* wgrad follows directly, so it reads dgrad's clones */
  add_levels(l, &l->class[c], how);
  if (l->n_levels == levels) return 0;
  rfi_choice_cost then = rfi_recompute_evaluate(&l->m);
  l->evaluations++;
  remove_levels(l, levels);
  if (!then.possible || then.peak > now->peak) return 0; /* no level has a higher peak than the one before */
  double more = work(&then) - work(now);
  return (now->near - then.near) / (more > 1 ? more : 1);
}

/* Earlier scores are nearly upper bounds of the current ones, so only the best are evaluated again. Scores of 0 are
 * evaluated again only if no other is left. */
static int best_move(frontier *l, bool marked, const rfi_choice_cost *now) {
  int n = l->n_classes * KINDS;
  for (int sweep = 0; sweep < 2; sweep++) {
    for (;;) {
      int best = -1;
      for (int i = 0; i < n; i++)
        if ((!marked || l->class[i / KINDS].marked) && l->score[i] > 0 && (best < 0 || l->score[i] > l->score[best]))
          best = i;
      if (best < 0) break;
      if (!l->stale[best]) return best;
      l->score[best] = evaluate_move(l, best / KINDS, (kind)(best % KINDS), now);
      l->stale[best] = false;
    }
    for (int i = 0; i < n; i++) {
      if ((marked && !l->class[i / KINDS].marked) || !l->stale[i]) continue;
      l->score[i] = evaluate_move(l, i / KINDS, (kind)(i % KINDS), now);
      l->stale[i] = false;
    }
  }
  return -1;
}

/* Adds levels, of marked classes only or of all classes, as long as they free memory near the peak. The frontier ends
 * at the level with the lowest peak. */
static void extend_frontier(frontier *l, bool marked) {
  int top = l->n_levels;
  set_level(l, top - 1);
  rfi_choice_cost now = rfi_recompute_evaluate(&l->m);
  int64_t lowest = now.peak;
  for (int i = 0; i < l->n_classes * KINDS; i++) {
    l->score[i] = 0;
    l->stale[i] = true;
  }
  for (;;) {
    rfi_recompute_mark_near(&l->m, NEAR_PEAK * (double)now.peak);
    now = rfi_recompute_evaluate(&l->m);
    int best = best_move(l, marked, &now);
    if (best < 0) break;
    class *c = &l->class[best / KINDS];
    const rfi_choice_cost before = now;
    const int level = l->n_levels;
    add_levels(l, c, (kind)(best % KINDS));
    if (c->taken < 0) c->taken = l->n_taken++;
    now = rfi_recompute_evaluate(&l->m);
    const double more = work(&now) - work(&before);
    for (int k = level; k < l->n_levels; k++) l->benefit[k] = (double)(before.peak - now.peak) / (more > 1 ? more : 1);
    if (now.peak < lowest || marked) {
      lowest = now.peak;
      top = l->n_levels;
    }
    for (int i = 0; i < l->n_classes * KINDS; i++) l->stale[i] = true;
  }
  remove_levels(l, top);
}

/* Removes chosen members that do not lower the peak, mostly those of the first microbatch, which has no gradients yet.
 * Starts with the class chosen last. */
static bool drop_unneeded(frontier *l) {
  bool dropped = false;
  rfi_choice_cost now = rfi_recompute_evaluate(&l->m);
  for (int taken = l->n_taken - 1; taken >= 0; taken--) {
    int c = 0;
    while (l->class[c].taken != taken) c++;
    const member *first = &l->member[l->class[c].first], *end = first + l->class[c].n;
    if (l->class[c].marked) continue;
    for (int microbatch = -1;;) {
      int next = INT_MAX, undo = l->n_ops;
      for (const member *x = first; x < end; x++)
        if (x->microbatch >= microbatch && x->microbatch < next) next = x->microbatch;
      if (next == INT_MAX) break;
      for (const member *x = first; x < end; x++)
        for (int op = x->op; op < l->m.lates * l->m.t->n_ops && x->microbatch == next; op += l->m.t->n_ops) {
          if (!l->m.chosen[op]) continue;
          l->m.chosen[op] = false;
          l->op[undo++] = op;
        }
      rfi_choice_cost without = rfi_recompute_evaluate(&l->m);
      l->evaluations++;
      bool good = without.possible && without.peak <= now.peak && work(&without) <= work(&now);
      for (int i = l->n_ops; i < undo && !good; i++) l->m.chosen[l->op[i]] = true;
      if (!good) break;
      dropped = dropped || undo > l->n_ops;
      now = without;
      microbatch = next + 1;
    }
  }
  return dropped;
}

/* ---- planning ---- */

/* Step-scoped bytes of the real plan of the current choice. */
static rfr_status plan_chosen(frontier *l, int64_t *bytes) {
  rfr_status s;
  rfr_ctx *ctx = l->m.t->ctx;
  rfr_trace *chosen = NULL, *sharded = NULL, *lowered = NULL;
  int64_t *workspace = NULL;
  rfi_report unread = {.text = {.ctx = ctx}};
  rfi_plan plan;
  RFI_GOTO(rfi_recompute_apply(&l->m, NULL, &chosen));
  RFI_GOTO(rfi_pass_shard(chosen, l->o, &unread, &sharded));
  RFI_GOTO(rfi_pass_lower(sharded, l->o, &unread, &lowered));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *workspace * (size_t)(lowered->n_ops + 1), &workspace));
  if (l->o->workspace) RFI_GOTO(l->o->workspace(l->o->user, lowered, workspace));
  RFI_GOTO(rfi_plan_make(lowered, workspace, NULL, &plan));
  *bytes = plan.bytes;
  rfi_plan_deinit(&plan);
fail:
  rfr_trace_destroy(chosen);
  rfr_trace_destroy(sharded);
  rfr_trace_destroy(lowered);
  rfi_free(ctx, workspace);
  rfi_string_deinit(&unread.text);
  return s;
}

static int64_t level_peak(frontier *l, int k) {
  set_level(l, k);
  rfi_choice_cost c = rfi_recompute_evaluate(&l->m);
  return c.possible ? c.peak : INT64_MAX;
}

/* The lowest level from `low` on whose live bytes are at most `bytes`, else the last level. */
static int find_level(frontier *l, int low, int64_t bytes) {
  int high = l->n_levels - 1;
  while (low < high) {
    int middle = low + (high - low) / 2;
    if (level_peak(l, middle) <= bytes) high = middle;
    else low = middle + 1;
  }
  return low;
}

/* Chooses level k, or the next level that is possible: the first member of a class may need another member. */
static int choose_level(frontier *l, int k) {
  while (k < l->n_levels - 1 && level_peak(l, k) == INT64_MAX) k++;
  set_level(l, k);
  return k;
}

rfr_status rfi_frontier_plan(frontier *l, int level, int64_t enough, rfr_frontier_point *out) {
  const int k = choose_level(l, level);
  const bool dropped = drop_unneeded(l);
  int64_t *planned = &out->planned_bytes, full;
  *out = (rfr_frontier_point){0};
  RFI_TRY(plan_chosen(l, planned));
  l->full[k] = false;
  if (dropped && *planned > enough) {
    set_level(l, k);
    RFI_TRY(plan_chosen(l, &full));
    l->full[k] = full < *planned;
    if (l->full[k]) *planned = full;
    else drop_unneeded(l);
  }
  const rfi_choice_cost c = rfi_recompute_evaluate(&l->m);
  out->extra_flops = c.flops;
  out->extra_bytes = c.bytes;
  out->recomputed = c.recomputed;
  return RFR_OK;
}

/* ---- the pass ---- */

static void frontier_deinit(frontier *l) {
  if (!l->m.t) return;
  rfr_ctx *ctx = l->m.t->ctx;
  rfi_free(ctx, l->member);
  rfi_free(ctx, l->class);
  rfi_free(ctx, l->score);
  rfi_free(ctx, l->stale);
  rfi_free(ctx, l->op);
  rfi_free(ctx, l->level);
  rfi_free(ctx, l->full);
  rfi_free(ctx, l->benefit);
  rfi_recompute_model_deinit(&l->m);
}

static rfr_status frontier_init(frontier *l, const rfr_trace *t, const rfi_pass_options *o) {
  rfr_status s;
  size_t n = (size_t)t->n_ops + 2;
  *l = (frontier){.ctx = t->ctx, .o = o, .n_levels = 1, .own = l->own, .ordered = l->ordered};
  RFI_TRY(rfi_recompute_model_init(&l->m, t, o));
  RFI_GOTO(RFI_ALLOC(t->ctx, n * sizeof *l->member, &l->member));
  RFI_GOTO(RFI_ALLOC(t->ctx, n * sizeof *l->class, &l->class));
  RFI_GOTO(RFI_ALLOC(t->ctx, n * KINDS * sizeof *l->score, &l->score));
  RFI_GOTO(RFI_ALLOC(t->ctx, n * KINDS * sizeof *l->stale, &l->stale));
  RFI_GOTO(
      /* the second half is the undo list of drop_unneeded */
      RFI_ALLOC(t->ctx, 2 * RFI_LATES * n * sizeof *l->op, &l->op));
  RFI_GOTO(RFI_ALLOC(t->ctx, RFI_LATES * n * sizeof *l->level, &l->level));
  RFI_GOTO(RFI_ALLOC(t->ctx, RFI_LATES * n * sizeof *l->full, &l->full));
  RFI_GOTO(RFI_ALLOC(t->ctx, RFI_LATES * n * sizeof *l->benefit, &l->benefit));
  RFI_GOTO(find_classes(l));
  return RFR_OK;
fail:
  frontier_deinit(l);
  return s;
}

static bool any_marked(const rfr_trace *t) {
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].policy == RFR_POLICY_RECOMPUTE) return true;
  return false;
}

static bool is_chosen(const frontier *l, int op) {
  return l->m.chosen[op] || (l->m.lates > 1 && l->m.chosen[op + l->m.t->n_ops]);
}

/* Reports marked values that are kept, with the reason. */
static rfr_status report_refused(const frontier *l, rfi_report *report) {
  const rfr_trace *t = l->m.t;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->policy != RFR_POLICY_RECOMPUTE || !l->m.read_late[i] || is_chosen(l, i)) continue;
    const char *why = l->m.can[i] ? "recomputing it does not lower the peak"
                                  : "it is shared by microbatches, written in place, or an output";
    RFI_TRY(rfi_report_line(report, "kept: %%%d %s%s%s, marked for recompute: %s", op->out[0], op->def->name,
                            op->scope[0] ? " in " : "", op->scope, why));
  }
  return RFR_OK;
}

static rfr_status report_choice(frontier *l, int64_t before, rfi_report *report) {
  rfi_choice_cost c = rfi_recompute_evaluate(&l->m);
  if (l->m.copies > 1)
    RFI_TRY(rfi_report_line(report, "live across programs: %lld bytes, in each of %d copies", (long long)c.across,
                            l->m.copies));
  return rfi_report_line(report,
                         "chosen: %d ops recomputed, +%.0f FLOPs, +%.0f bytes moved; peak of live bytes with "
                         "workspaces %lld before, %lld after; %d choices evaluated",
                         c.recomputed, c.flops, c.bytes, (long long)before, (long long)c.peak, l->evaluations);
}

/* Records the trace of the chosen ops. */
static rfr_status rewrite(frontier *l, int64_t before, rfi_report *report, rfr_trace **out) {
  RFI_TRY(rfi_recompute_apply(&l->m, report, out));
  rfr_status s = report_refused(l, report);
  if (s == RFR_OK) s = report_choice(l, before, report);
  if (s == RFR_OK) return RFR_OK;
  rfr_trace_destroy(*out);
  *out = NULL;
  return s;
}

static rfr_status rewrite_at_level(frontier *l, int level, rfi_report *report, rfr_trace **out) {
  const int64_t before = level_peak(l, 0);
  if (!l->full[choose_level(l, level)]) drop_unneeded(l);
  return rewrite(l, before, report, out);
}

rfr_status rfi_pass_recompute(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  frontier l = {0};
  const bool all = o->recompute == RFR_RECOMPUTE_ALL;
  *out = NULL;
  if (o->frontier) return rewrite_at_level(o->frontier, o->level, report, out);
  if (o->split_phases || (!all && !any_marked(in))) {
    RFI_TRY(rfi_report_line(report, "nothing: every value is kept"));
    return rfi_copy_trace(in, out);
  }
  RFI_TRY(frontier_init(&l, in, o));
  const int64_t before = level_peak(&l, 0);
  extend_frontier(&l, true);
  if (all) {
    extend_frontier(&l, false);
    set_level(&l, l.n_levels - 1);
    drop_unneeded(&l);
  }
  const rfr_status s = rewrite(&l, before, report, out);
  frontier_deinit(&l);
  return s;
}

/* ---- frontiers for callers ---- */

rfr_status rfi_frontier_create(const rfr_trace *in, const rfi_pass_options *o, bool marked_alone, rfi_frontier **out) {
  rfr_status s;
  uint8_t *phase = NULL;
  frontier *l = NULL;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(in->ctx, sizeof *l, &l));
  l->ctx = in->ctx;
  RFI_GOTO(RFI_ALLOC(in->ctx, (size_t)in->n_ops + 1, &phase));
  for (int i = 0; i < in->n_ops; i++) phase[i] = in->ops[i].phase;
  l->own = *o;
  if (o->split_phases) RFI_GOTO(rfi_order_phases(in, phase, &l->ordered));
  RFI_GOTO(frontier_init(l, l->ordered ? l->ordered : in, &l->own));
  extend_frontier(l, true);
  l->n_marked = l->n_levels - 1;
  if (!marked_alone) extend_frontier(l, false);
  *out = l;
  l = NULL;
fail:
  rfi_free(in->ctx, phase);
  rfi_frontier_destroy(l);
  return s;
}

void rfi_frontier_destroy(rfi_frontier *l) {
  if (!l) return;
  rfr_trace *ordered = l->ordered;
  rfr_ctx *ctx = l->ctx;
  frontier_deinit(l);
  rfr_trace_destroy(ordered);
  rfi_free(ctx, l);
}

int rfi_frontier_top(const rfi_frontier *l) { return l->n_levels - 1; }
int rfi_frontier_marked(const rfi_frontier *l) { return l->n_marked; }
int rfi_frontier_first(rfi_frontier *l, int64_t bytes) { return find_level(l, l->n_marked, bytes); }
double rfi_frontier_benefit(const rfi_frontier *l, int level) { return l->benefit[level]; }

/* ---- the frontier ---- */

static double point_work(const rfr_frontier_point *p) { return p->extra_bytes + p->extra_flops / FLOPS_PER_BYTE; }

/* Adds a point unless another point dominates it in bytes and work; removes the points that it dominates, except the
 * first. */
static void add_point(rfr_frontier_point *points, int *n, const rfr_frontier_point *p, const rfr_frontier_point *top) {
  if (top && p->planned_bytes <= top->planned_bytes) return;
  while (*n > 1 && points[*n - 1].planned_bytes >= p->planned_bytes && point_work(&points[*n - 1]) >= point_work(p))
    --*n;
  if (*n == 0 || p->planned_bytes < points[*n - 1].planned_bytes) points[(*n)++] = *p;
}

rfr_status rfi_frontier_points(rfi_frontier *l, int last, rfr_frontier_point *points, int max, int *n) {
  const int64_t high = level_peak(l, l->n_marked), low = level_peak(l, last);
  rfr_frontier_point top, p;
  *n = 0;
  /* the last level bounds the trade-off: only larger plans are points of it */
  RFI_TRY(rfi_frontier_plan(l, last, 0, &top));
  for (int i = 0, done = -1; i < max - 1; i++) {
    const int k = i == 0 ? l->n_marked : find_level(l, l->n_marked, high - (high - low) / (max - 1) * i);
    if (k <= done || k >= last) continue;
    RFI_TRY(rfi_frontier_plan(l, k, 0, &p));
    done = k;
    add_point(points, n, &p, &top);
  }
  add_point(points, n, &top, NULL);
  return RFR_OK;
}
