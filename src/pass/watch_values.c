/* SPDX-License-Identifier: Apache-2.0
 *
 * Values are named after autodiff, and the passes keep the names, so that the meaning of a name does not depend on
 * fusion. The watching ops are added after all passes: they change no fusion, placement or rounding. A row sums up all
 * values of one name: those of all microbatches.
 *
 * Weights and optimizer states are summed up as the step leaves them, gradients as the optimizer reads them, all other
 * values right after the op that computes them.
 */
#include "pass/watch_values.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "ops/ring/watch_sums.h"
#include "refrain/nn.h"

enum { NAME = 256 };

/* ---- names ---- */

static bool is_summed(rfr_dtype dtype) { return dtype == RFR_F32 || dtype == RFR_BF16 || dtype == RFR_F16; }

static bool is_parameter(const rfi_value *x) { return x && x->op < 0 && rfi_is_parameter(x->role); }

/* The first parameter that an op reads; *length: length of its name without ".weight". */
static const char *module_of(const rfr_trace *t, const rfi_opr *op, int *length) {
  static const char suffix[] = ".weight";
  for (int k = 0; k < op->n_in; k++) {
    const rfi_value *x = op->in[k] < 0 ? NULL : rfi_input_of(t, op->in[k]);
    if (!is_parameter(x)) continue;
    const size_t n = strlen(x->name), cut = sizeof suffix - 1;
    *length = (int)(n > cut && strcmp(x->name + n - cut, suffix) == 0 ? n - cut : n);
    return x->name;
  }
  return NULL;
}

/* Names: the result of a module is "MODULE.output", the gradient of its input "grad:MODULE.input"; the result of an op
 * without a parameter is "SCOPE.OP". Further results have the name of ops.def. */
static void describe(const rfr_trace *t, const rfi_opr *op, int j, char name[NAME]) {
  int length = 0;
  const char *module = module_of(t, op, &length);
  const bool backward = op->phase == RFR_PHASE_DGRAD, first = j == 0;
  char own[2 * RFI_OP_NAME] = "";
  if (module && first) snprintf(own, sizeof own, "%s", backward ? "input" : "output");
  else if (module) snprintf(own, sizeof own, "%s", op->def->result[j]);
  else snprintf(own, sizeof own, "%s%s%s", op->def->name, first ? "" : ".", first ? "" : op->def->result[j]);
  rfi_snprintf(name, NAME, "%s%.*s%s%s", backward ? "grad:" : "", module ? length : (int)strlen(op->scope),
               module ? module : op->scope, module || op->scope[0] ? "." : "", own);
}

/* Whether results of the op can be watched directly after it. */
static bool is_of_step(const rfi_opr *op) {
  return (op->phase == RFR_PHASE_FORWARD || op->phase == RFR_PHASE_DGRAD) && op->clone_of < 0 &&
         !(op->def->flags & (RFI_STATE | RFI_HOST));
}

/* Values of one microbatch with the same name are numbered from 1 on, so that the names agree between microbatches. */
typedef struct counts {
  rfi_names names;
  int *count, n, capacity;
} counts;

static rfr_status number_name(rfr_trace *t, counts *c, int microbatch, char name[NAME]) {
  char key[NAME + 16];
  snprintf(key, sizeof key, "%d %s", microbatch, name);
  int i = rfi_names_find(&c->names, key);
  if (i < 0) {
    const char *own = rfi_arena_strdup(t->arena, key);
    if (!rfi_arena_grow(t->arena, (void **)&c->count, &c->capacity, c->n + 1, sizeof *c->count) || !own ||
        !rfi_names_add(&c->names, t->arena, own, c->n))
      return RFR_NO_MEMORY;
    c->count[c->n++] = 1;
    return RFR_OK;
  }
  const size_t n = strlen(name);
  snprintf(name + n, NAME - n, ".%d", c->count[i]++);
  return RFR_OK;
}

rfr_status rfi_watch_name(rfr_trace *t) {
  char name[NAME];
  counts c = {.names = {0}};
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (!is_of_step(op) || (op->def->flags & RFI_VIEW)) continue;
    for (int j = 0; j < op->n_out; j++) {
      const rfr_value v = op->out[j];
      if (v < 0 || t->values[v].name[0] || !is_summed(t->values[v].type.dtype)) continue;
      if (is_parameter(rfi_input_of(t, v))) continue; /* a cast or a gathered copy of a weight */
      describe(t, op, j, name);
      RFI_TRY(number_name(t, &c, op->microbatch, name));
      rfr_value_set_name(t, v, name);
    }
  }
  return rfr_trace_status(t);
}

/* ---- what can be watched ---- */

/* A value of the last trace with its name. `at`: the op after which its sums are computed; for a gradient, the op
 * before which; -1: the end of the step. */
typedef struct candidate {
  const char *name;
  rfr_value value;
  int at, row;
  bool gradient;
} candidate;

typedef struct list {
  const rfr_trace *t;
  rfr_trace *to; /* the names are in its arena */
  int end;       /* the op that ends the step: later ops are ignored */
  candidate *item;
  int n, capacity;
  rfi_names gradients; /* names that are already used */
} list;

static rfr_status add(list *l, const char *name, rfr_value v, int at, bool gradient) {
  if (!name) return RFR_NO_MEMORY;
  if (!rfi_arena_grow(l->to->arena, (void **)&l->item, &l->capacity, l->n + 1, sizeof *l->item)) return RFR_NO_MEMORY;
  l->item[l->n++] = (candidate){name, v, at, 0, gradient};
  return RFR_OK;
}

/* Adds the gradients that optimizer ops read, under the names of their parameters: the operand `w`, or the owner of a
 * momentum `b`. */
static rfr_status add_gradients(list *l) {
  for (int i = 0; i < l->end; i++) {
    const rfi_opr *op = &l->t->ops[i];
    const int g = rfi_operand_index(op->def, "g");
    int of = rfi_operand_index(op->def, "w");
    if (op->phase != RFR_PHASE_OPTIM || !(op->def->flags & RFI_STATE) || g < 0) continue;
    if (of < 0) of = rfi_operand_index(op->def, "b");
    const rfr_value v = op->in[g];
    if (of < 0 || v < 0 || op->in[of] < 0 || !is_summed(l->t->values[v].type.dtype)) continue;
    const char *owner = l->t->values[l->t->values[op->in[of]].base].name, *dot = strrchr(owner, '.');
    const int length = (int)(strcmp(op->def->operand[of], "b") == 0 && dot ? dot - owner : (long)strlen(owner));
    const char *name = rfi_arena_printf(l->to->arena, "grad:%.*s", length, owner);
    if (!name || !rfi_names_add(&l->gradients, l->to->arena, name, 1)) return RFR_NO_MEMORY;
    RFI_TRY(add(l, name, v, i, true));
  }
  return RFR_OK;
}

static rfr_status add_inputs(list *l) {
  for (int i = 0; i < l->t->n_inputs; i++) {
    const rfi_value *x = &l->t->values[l->t->inputs[i]];
    if ((is_parameter(x) || x->role == RFR_ROLE_STATE) && is_summed(x->type.dtype))
      RFI_TRY(add(l, x->name, l->t->inputs[i], -1, false));
  }
  return RFR_OK;
}

static rfr_status add_results(list *l) {
  for (int i = 0; i < l->end; i++) {
    const rfi_opr *op = &l->t->ops[i];
    for (int j = 0; j < op->n_out; j++) {
      const rfi_value *x = op->out[j] < 0 ? NULL : &l->t->values[op->out[j]];
      if (!x || !x->name[0] || op->clone_of >= 0 || op->phase == RFR_PHASE_LOAD || !is_summed(x->type.dtype)) continue;
      const char *name = x->name;
      if (strncmp(name, "d_", 2) == 0 && rfi_names_find(&l->t->input_names, name + 2) >= 0) {
        name = rfi_arena_printf(l->to->arena, "grad:%s", name + 2);
        if (!name) return RFR_NO_MEMORY;
        if (rfi_names_find(&l->gradients, name) >= 0) continue;
      }
      RFI_TRY(add(l, name, op->out[j], i, false));
    }
  }
  return RFR_OK;
}

/* Removes values that some microbatches lack because they are recomputed there: the sums would not cover all
 * microbatches. */
static rfr_status drop_partial(list *l, const rfr_trace *named) {
  rfi_names names = {0};
  int *missing = NULL, n = 0, capacity = 0, kept = 0;
  for (int i = 0; i < named->n_ops; i++)
    for (int j = 0; j < named->ops[i].n_out; j++) {
      const char *name = named->ops[i].out[j] < 0 ? "" : named->values[named->ops[i].out[j]].name;
      if (!name[0]) continue;
      int k = rfi_names_find(&names, name);
      if (k < 0) {
        if (!rfi_arena_grow(l->to->arena, (void **)&missing, &capacity, n + 1, sizeof *missing) ||
            !rfi_names_add(&names, l->to->arena, name, n))
          return RFR_NO_MEMORY;
        missing[k = n++] = 0;
      }
      missing[k]++;
    }
  for (int k = 0; k < l->n; k++) {
    const int of = l->item[k].at < 0 || l->item[k].gradient ? -1 : rfi_names_find(&names, l->item[k].name);
    if (of >= 0) missing[of]--;
  }
  for (int k = 0; k < l->n; k++) {
    const int of = l->item[k].at < 0 || l->item[k].gradient ? -1 : rfi_names_find(&names, l->item[k].name);
    if (of < 0 || missing[of] == 0) l->item[kept++] = l->item[k];
  }
  l->n = kept;
  return RFR_OK;
}

/* ---- patterns ---- */

/* The values of the scope of op `i` that can be watched, as ": A, B, C" or "". */
static void list_scope(const list *l, const rfi_opr *of, char *text, size_t size) {
  enum { MOST = 4 };
  size_t n = 0;
  int found = 0;
  text[0] = '\0';
  for (int k = 0; k < l->n && found < MOST && n < size - 1; k++) {
    const candidate *c = &l->item[k];
    const rfi_opr *op = c->at < 0 || c->gradient ? NULL : &l->t->ops[c->at];
    if (!op || strcmp(op->scope, of->scope) != 0 || op->phase != of->phase) continue;
    bool twice = false;
    for (int m = 0; m < k && !twice; m++) twice = strcmp(l->item[m].name, c->name) == 0;
    if (twice) continue;
    n += (size_t)snprintf(text + n, size - n, "%s%s", found++ ? ", " : "; of the same layer there are ", c->name);
  }
}

static rfr_status miss(const list *l, const rfr_trace *named, const char *pattern) {
  char others[512];
  int nearest = INT_MAX;
  const char *name = NULL;
  for (int i = 0; i < named->n_ops; i++)
    for (int j = 0; j < named->ops[i].n_out; j++) {
      const rfr_value v = named->ops[i].out[j];
      if (v < 0 || !named->values[v].name[0] || !rfr_name_matches(pattern, named->values[v].name)) continue;
      list_scope(l, &named->ops[i], others, sizeof others);
      return rfi_fail(RFI_E_WATCH_NAME, "the pattern \"%.100s\" matches only values that fusion removes, such as %s%s",
                      pattern, named->values[v].name, others);
    }
  for (int i = 0; i < l->t->n_inputs; i++) {
    const rfi_value *x = &l->t->values[l->t->inputs[i]];
    if (rfr_name_matches(pattern, x->name))
      return rfi_fail(RFI_E_WATCH_NAME,
                      "the pattern \"%.100s\" matches only the input %s (%s); weights and states of f32, bf16 and f16 "
                      "can be watched",
                      pattern, x->name, rfr_dtype_name(x->type.dtype));
  }
  for (int k = 0; k < l->n; k++) {
    const int d = rfi_glob_distance(pattern, l->item[k].name);
    if (d < nearest) nearest = d, name = l->item[k].name;
  }
  return rfi_fail(RFI_E_WATCH_NAME, "the pattern \"%.100s\" matches no value%s%s", pattern,
                  name ? "; the nearest is " : "", name ? name : "");
}

/* Values of the pattern that fusion has removed: a line of the report. */
static rfr_status report_removed(const list *l, const rfr_trace *named, const char *pattern, int rows,
                                 rfi_report *report) {
  rfi_names kept = {0};
  const char *first = NULL;
  int removed = 0;
  for (int k = 0; k < l->n; k++)
    if (rfi_names_find(&kept, l->item[k].name) < 0 && !rfi_names_add(&kept, l->to->arena, l->item[k].name, k))
      return RFR_NO_MEMORY;
  for (int i = 0; i < named->n_ops; i++)
    for (int j = 0; j < named->ops[i].n_out; j++) {
      const rfr_value v = named->ops[i].out[j];
      const char *name = v < 0 ? "" : named->values[v].name;
      if (!name[0] || strncmp(name, "d_", 2) == 0 || !rfr_name_matches(pattern, name)) continue;
      if (!is_summed(named->values[v].type.dtype) || rfi_names_find(&kept, name) >= 0) continue;
      if (!first) first = name;
      removed++;
    }
  return rfi_report_line(report, "watched: \"%s\": %d values%s%s", pattern, rows,
                         removed ? "; without those that fusion removes, such as " : "", removed ? first : "");
}

/* Assigns rows, from 1 on, to the candidates that match a pattern. */
static rfr_status match(list *l, const rfr_trace *named, const rfi_watch *w, rfi_report *report, int *rows) {
  rfi_names row_of = {0};
  *rows = 0;
  for (int p = 0; p < w->n; p++) {
    int before = *rows, found = 0;
    for (int k = 0; k < l->n; k++) {
      candidate *c = &l->item[k];
      if (!rfr_name_matches(w->patterns[p], c->name)) continue;
      found++;
      if (c->row > 0) continue;
      const int row = rfi_names_find(&row_of, c->name);
      c->row = row > 0 ? row : ++*rows;
      if (row <= 0 && !rfi_names_add(&row_of, l->to->arena, c->name, c->row)) return RFR_NO_MEMORY;
    }
    if (found == 0) return miss(l, named, w->patterns[p]);
    RFI_TRY(report_removed(l, named, w->patterns[p], *rows - before, report));
  }
  return RFR_OK;
}

/* ---- ops ---- */

typedef struct adder {
  rfi_rewrite r;
  const list *l;
  rfr_value ring, step; /* their newest versions in the new trace */
  bool *filled;         /* per row */
  int *first, *next;    /* lists of candidates, per op */
} adder;

static rfr_status sum_up(adder *a, const candidate *c, rfr_value v, const rfi_opr *of) {
  const rfr_value in[3] = {a->ring, a->step, v};
  const rfi_attr attr[2] = {rfi_i(c->row), rfi_i(a->filled[c->row])};
  const rfi_opr op = {.def = rfi_op_def_get(RFI_OP_watch_row),
                      .n_in = 3,
                      .in = (rfr_value *)in,
                      .attr = attr,
                      .phase = of ? of->phase : RFR_PHASE_OPTIM,
                      .microbatch = of ? of->microbatch : -1,
                      .clone_of = -1,
                      .scope = of ? of->scope : "watch",
                      .reason = c->name};
  a->filled[c->row] = true;
  return rfi_rewrite_new(&a->r, &op, NULL, &a->ring);
}

/* The newest version of an input in the new trace. */
static rfr_value newest(const rfr_trace *t, rfr_value input) {
  for (int i = t->n_ops - 1; i >= 0; i--)
    for (int j = 0; j < t->ops[i].n_out; j++) {
      const rfr_value v = t->ops[i].out[j];
      if (v >= 0 && t->ops[i].def->alias[j] >= 0 && t->values[v].base == input) return v;
    }
  return input;
}

/* Records the ops at the end of the step: weights and states, then the sequence number. */
static rfr_status end_step(adder *a) {
  for (int k = 0; k < a->l->n; k++) {
    const candidate *c = &a->l->item[k];
    if (c->row > 0 && c->at < 0) RFI_TRY(sum_up(a, c, newest(a->r.to, a->r.map[c->value]), NULL));
  }
  const rfr_value in[2] = {a->ring, a->step};
  const rfi_opr op = {.def = rfi_op_def_get(RFI_OP_watch_end),
                      .n_in = 2,
                      .in = (rfr_value *)in,
                      .phase = RFR_PHASE_OPTIM,
                      .microbatch = -1,
                      .clone_of = -1,
                      .scope = "watch",
                      .reason = ""};
  return rfi_rewrite_new(&a->r, &op, NULL, &a->ring);
}

/* The first op that writes an input; n_ops if no op does. */
static int first_writer(const rfr_trace *t, rfr_value input) {
  for (int i = 0; i < t->n_ops; i++)
    for (int j = 0; j < t->ops[i].n_out; j++) {
      const rfr_value v = t->ops[i].out[j];
      if (v >= 0 && t->ops[i].def->alias[j] >= 0 && t->values[v].base == input) return i;
    }
  return t->n_ops;
}

static rfr_status copy_ops(adder *a) {
  const rfr_trace *t = a->l->t;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (i == a->l->end) RFI_TRY(end_step(a));
    for (int k = a->first[i]; k >= 0; k = a->next[k])
      if (a->l->item[k].gradient) RFI_TRY(sum_up(a, &a->l->item[k], a->r.map[a->l->item[k].value], op));
    RFI_TRY(rfi_rewrite_op(&a->r, i, NULL));
    for (int k = a->first[i]; k >= 0; k = a->next[k])
      if (!a->l->item[k].gradient) RFI_TRY(sum_up(a, &a->l->item[k], a->r.map[a->l->item[k].value], op));
  }
  return a->l->end < t->n_ops ? RFR_OK : end_step(a);
}

/* Builds a list per op of the candidates with a row, in the order of the results. */
static rfr_status index_candidates(adder *a, int rows) {
  const list *l = a->l;
  a->first = rfi_arena_alloc(a->r.to->arena, sizeof *a->first * (size_t)(l->t->n_ops + 1));
  a->next = rfi_arena_alloc(a->r.to->arena, sizeof *a->next * (size_t)(l->n + 1));
  a->filled = rfi_arena_alloc(a->r.to->arena, sizeof *a->filled * (size_t)(rows + 1));
  if (!a->first || !a->next || !a->filled) return RFR_NO_MEMORY;
  for (int i = 0; i < l->t->n_ops; i++) a->first[i] = -1;
  for (int r = 0; r <= rows; r++) a->filled[r] = false;
  for (int k = l->n - 1; k >= 0; k--) {
    const candidate *c = &l->item[k];
    if (c->row == 0 || c->at < 0) continue;
    a->next[k] = a->first[c->at];
    a->first[c->at] = k;
  }
  return RFR_OK;
}

static rfr_value step_block(const rfr_trace *t) {
  const int i = rfi_names_find(&t->input_names, "step");
  const rfi_value *x = i < 0 ? NULL : &t->values[t->inputs[i]];
  return x && x->type.dtype == RFR_I64 && x->type.rank == 1 && x->type.shape[0] == 4 ? t->inputs[i] : RFR_NONE;
}

static rfr_status name_rows(const list *l, int rows, const char *const **names) {
  const char **own = rfi_arena_alloc(l->to->arena, sizeof *own * (size_t)(rows + 1));
  if (!own) return RFR_NO_MEMORY;
  for (int k = l->n - 1; k >= 0; k--)
    if (l->item[k].row > 0 && !(own[l->item[k].row - 1] = rfi_arena_strdup(l->to->arena, l->item[k].name)))
      return RFR_NO_MEMORY;
  *names = own;
  return RFR_OK;
}

rfr_status rfi_watch_values(const rfr_trace *named, const rfr_trace *last, const rfi_watch *w, rfi_report *report,
                            rfr_trace **out, const char *const **names, int *n) {
  rfr_status s;
  list l = {.t = last};
  adder a = {.l = &l};
  const rfr_value step = step_block(last);
  *out = NULL;
  if (step == RFR_NONE)
    return rfi_fail(RFI_E_ARGUMENT, "a watched program needs the step block: record rfr_step_block and rfr_step_end");
  RFI_TRY(rfi_rewrite_begin(last, &a.r));
  l.to = a.r.to;
  l.end = first_writer(last, step);
  RFI_GOTO(add_gradients(&l));
  RFI_GOTO(add_inputs(&l));
  RFI_GOTO(add_results(&l));
  RFI_GOTO(drop_partial(&l, named));
  RFI_GOTO(match(&l, named, w, report, n));
  RFI_GOTO(index_candidates(&a, *n));
  const int64_t shape[3] = {w->slots, 1 + *n, RFI_WATCH_SUMS};
  a.step = a.r.map[step];
  a.ring = rfr_input_at(a.r.to, (rfr_source){NULL, 0}, RFI_WATCH_NAME, RFR_ROLE_STATE, RFR_F64, 3, shape);
  RFI_GOTO(rfr_trace_status(a.r.to));
  RFI_GOTO(copy_ops(&a));
  RFI_GOTO(name_rows(&l, *n, names));
  return rfi_rewrite_end(&a.r, out);
fail:
  rfi_rewrite_abort(&a.r);
  return s;
}
