/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs the syntax tree of a template.
 *
 * Scopes are jinja2's: the body of a loop, a macro, a block and `with` have their own, `if` has none. A name that a
 * scope does not set is looked up in the scopes around it when it is read. The scope of a loop's body is new in each
 * iteration. Loops are lazy like jinja2's: the condition of `for x in y if c` is evaluated when its item is needed,
 * since the body may change a namespace that the condition reads.
 */
#include <string.h>

#include "text/template_value.h"

typedef struct variable {
  int symbol;
  rfi_tval value;
} variable;

typedef struct rfi_tscope {
  struct rfi_tscope *parent;
  variable *items;
  int n, capacity;
} scope;

typedef struct rfi_tmacro {
  const rfi_tnode *node;
  scope *scope;
} macro;

typedef struct rfi_tloop {
  rfi_tlist *items;
  int64_t next, index0, length; /* number of items; -1: not known yet */
  rfi_titerator *iterator;      /* the iterator that provides the items, or NULL */
  const rfi_tnode *target, *test;
  scope *scope; /* the enclosing loop */
  rfi_tval current, previous, after, changed;
} loop;

typedef enum flow { NEXT, BREAK, CONTINUE } flow;

#define NONE rfi_tval_none()

static rfi_tval eval(rfi_render *r, const rfi_tnode *n);
static flow run(rfi_render *r, const rfi_tnode *n);

static bool enter(rfi_render *r) {
  if (!rfi_render_step(r, 1)) return false;
  if (++r->depth <= RFI_RENDER_DEPTH) return true;
  rfi_render_limit(r, "the template nests calls and blocks more than %d levels deep", RFI_RENDER_DEPTH);
  return false;
}

/* ---- scopes ---- */

static scope *scope_new(rfi_render *r, scope *parent) {
  scope *s = rfi_render_alloc(r, sizeof *s);
  if (s) s->parent = parent;
  return s;
}

static void scope_set(rfi_render *r, scope *s, int symbol, rfi_tval v) {
  if (!s || r->status != RFR_OK) return;
  for (int i = 0; i < s->n; i++) {
    if (s->items[i].symbol != symbol) continue;
    s->items[i].value = v;
    return;
  }
  if (s->n == s->capacity) {
    const int capacity = s->capacity == 0 ? 8 : 2 * s->capacity;
    variable *items = rfi_render_alloc(r, (size_t)capacity * sizeof *items);
    if (!items) return;
    if (s->n > 0) memcpy(items, s->items, (size_t)s->n * sizeof *items);
    s->items = items;
    s->capacity = capacity;
  }
  s->items[s->n++] = (variable){symbol, v};
}

static rfi_tval lookup(rfi_render *r, int symbol) {
  for (const scope *s = r->scope; s; s = s->parent) {
    r->steps += s->n / 16;
    for (int i = 0; i < s->n; i++)
      if (s->items[i].symbol == symbol) return s->items[i].value;
  }
  const char *name = r->t->symbols.names[symbol];
  const rfi_tfunction global = rfi_global_find(name);
  if (global) return (rfi_tval){.kind = RFI_T_FUNCTION, .as.function = global};
  return rfi_tval_undefined(name);
}

static void assign(rfi_render *r, const rfi_tnode *target, rfi_tval v) {
  if (r->status != RFR_OK) return;
  r->at = target->at;
  if (target->type == RFI_NODE_NAME) {
    scope_set(r, r->scope, target->symbol, v);
  } else if (target->type == RFI_NODE_NAMESPACE_SET) {
    const rfi_tval space = lookup(r, target->symbol);
    if (space.kind != RFI_T_NAMESPACE) {
      rfi_render_fail(r, "\"%s\" is not a namespace; only attributes of a namespace can be set",
                      r->t->symbols.names[target->symbol]);
    } else if (target->text[0] == '_') {
      rfi_render_fail(r, "a namespace cannot have an attribute that begins with \"_\"");
    } else {
      rfi_tdict_set(r, space.as.dict, rfi_text_new(r, target->text, strlen(target->text), 0), v);
      space.as.dict->depth = 1; /* an object, not a nested value */
    }
  } else {
    const rfi_tlist *items = rfi_tval_items(r, &v);
    if (!items) return;
    if (items->n != target->n_kids) {
      rfi_render_fail(r, "%lld values for %d names", (long long)items->n, target->n_kids);
      return;
    }
    for (int i = 0; i < target->n_kids; i++) assign(r, target->kids[i], items->items[i]);
  }
}

/* ---- output ---- */

static void note_part(rfi_render *r) {
  if (r->out != r->root || r->status != RFR_OK) return;
  struct rfi_tpart *last = r->n_parts > 0 ? &r->parts[r->n_parts - 1] : NULL;
  if (last ? last->end == r->root->n : r->root->n == 0) return;
  if (r->n_pieces == r->capacity_pieces) {
    const int capacity = r->capacity_pieces == 0 ? 64 : 2 * r->capacity_pieces;
    size_t *pieces = rfi_render_alloc(r, (size_t)capacity * sizeof *pieces);
    if (!pieces) return;
    if (r->n_pieces > 0) memcpy(pieces, r->pieces, (size_t)r->n_pieces * sizeof *pieces);
    r->pieces = pieces;
    r->capacity_pieces = capacity;
  }
  r->pieces[r->n_pieces++] = r->root->n;
  if (!last || last->message != r->message) {
    if (r->n_parts == r->capacity_parts) {
      const int capacity = r->capacity_parts == 0 ? 16 : 2 * r->capacity_parts;
      struct rfi_tpart *parts = rfi_render_alloc(r, (size_t)capacity * sizeof *parts);
      if (!parts) return;
      if (r->n_parts > 0) memcpy(parts, r->parts, (size_t)r->n_parts * sizeof *parts);
      r->parts = parts;
      r->capacity_parts = capacity;
    }
    last = &r->parts[r->n_parts++];
    last->message = r->message;
  }
  last->end = r->root->n;
}

static void emit(rfi_render *r, const rfi_tval *v) {
  rfi_tval_print(r->out, v);
  note_part(r);
}

/* The text that a body writes, in a new scope. */
static rfi_tval capture(rfi_render *r, const rfi_tnode *body, scope *s, uint32_t flags) {
  rfi_tbuilder b = {.r = r}, *const out = r->out;
  scope *const before = r->scope;
  r->out = &b;
  r->scope = s;
  if (s) run(r, body);
  r->out = out;
  r->scope = before;
  for (int i = 0; i < b.n_runs; i++) b.runs[i].flags |= flags;
  return rfi_tbuilder_finish(&b);
}

/* ---- calls ---- */

/* The arguments of a call, filter or test: kids from `first` on. */
static bool arguments(rfi_render *r, const rfi_tnode *n, int first, rfi_targs *out) {
  *out = (rfi_targs){0};
  if (n->n_kids <= first) return r->status == RFR_OK;
  rfi_tlist *items = rfi_tlist_new(r), *named = rfi_tlist_new(r);
  const char **names = NULL;
  int capacity = 0;
  for (int i = first; i < n->n_kids && r->status == RFR_OK; i++) {
    const char *name = n->names ? n->names[i] : NULL;
    const rfi_tval v = eval(r, n->kids[i]);
    if (!name) {
      rfi_tlist_add(r, items, v);
    } else if (strcmp(name, "*") == 0) {
      const rfi_tlist *more = rfi_tval_items(r, &v);
      for (int64_t k = 0; more && k < more->n && r->status == RFR_OK; k++) rfi_tlist_add(r, items, more->items[k]);
    } else {
      const bool splat = strcmp(name, "**") == 0;
      if (splat && v.kind != RFI_T_DICT) {
        rfi_render_fail(r, "\"**\" needs a dictionary, not %s", rfi_tval_type(&v));
        return false;
      }
      const int64_t count = splat ? v.as.dict->n : 1;
      for (int64_t k = 0; k < count && r->status == RFR_OK; k++) {
        if (named && named->n >= capacity) {
          const int wanted = capacity == 0 ? 8 : 2 * capacity;
          const char **grown = rfi_render_alloc(r, (size_t)wanted * sizeof *grown);
          if (!grown) return false;
          if (capacity > 0) memcpy(grown, names, (size_t)capacity * sizeof *grown);
          names = grown;
          capacity = wanted;
        }
        if (splat && v.as.dict->items[2 * k].kind != RFI_T_TEXT) {
          rfi_render_fail(r, "\"**\" needs keys that are strings");
          return false;
        }
        if (!named || !names) return false;
        names[named->n] = splat ? rfi_text_string(r, v.as.dict->items[2 * k].as.text) : name;
        rfi_tlist_add(r, named, splat ? v.as.dict->items[2 * k + 1] : v);
      }
    }
  }
  if (r->status != RFR_OK) return false;
  *out = (rfi_targs){items->items, (int)items->n, names, named->items, (int)named->n};
  return true;
}

static int named_index(const rfi_targs *args, const char *name) {
  for (int i = 0; i < args->n_named; i++)
    if (strcmp(args->names[i], name) == 0) return i;
  return -1;
}

static rfi_tval call_macro(rfi_render *r, const macro *m, const rfi_targs *args) {
  const rfi_tnode *n = m->node;
  scope *s = scope_new(r, m->scope), *const before = r->scope;
  bool used[64] = {false};
  if (args->n_named > 64) return rfi_render_fail(r, "macro \"%s\": more than 64 named arguments", n->text), NONE;
  if (!s || !enter(r)) return NONE;
  for (int i = 0; i < n->n_params && r->status == RFR_OK; i++) {
    const char *name = r->t->symbols.names[n->params[i]];
    const int named = i < args->n ? -1 : named_index(args, name);
    rfi_tval v = rfi_tval_undefined(name);
    if (i < args->n) {
      v = args->items[i];
    } else if (named >= 0) {
      v = args->named[named];
      used[named] = true;
    } else if (n->kids[1 + i]) {
      r->scope = s;
      v = eval(r, n->kids[1 + i]);
      r->scope = before;
    }
    scope_set(r, s, n->params[i], v);
  }
  const int caller = named_index(args, "caller");
  if (n->uses_caller && (caller < 0 || !used[caller])) {
    scope_set(r, s, RFI_SYMBOL_CALLER, caller >= 0 ? args->named[caller] : rfi_tval_undefined("caller"));
    if (caller >= 0) used[caller] = true;
  }
  if (n->uses_varargs) {
    rfi_tlist *rest = rfi_tlist_new(r);
    for (int i = n->n_params; i < args->n; i++) rfi_tlist_add(r, rest, args->items[i]);
    scope_set(r, s, RFI_SYMBOL_VARARGS, rfi_tlist_value(rest, RFI_T_TUPLE));
  } else if (args->n > n->n_params) {
    rfi_render_fail(r, "macro \"%s\" takes at most %d arguments, not %d", n->text, n->n_params, args->n);
  }
  rfi_tdict *kwargs = n->uses_kwargs ? rfi_tdict_new(r) : NULL;
  for (int i = 0; i < args->n_named && r->status == RFR_OK; i++) {
    if (used[i]) continue;
    if (kwargs) rfi_tdict_set(r, kwargs, rfi_text_new(r, args->names[i], strlen(args->names[i]), 0), args->named[i]);
    else rfi_render_fail(r, "macro \"%s\" has no parameter \"%s\"", n->text, args->names[i]);
  }
  if (kwargs) scope_set(r, s, RFI_SYMBOL_KWARGS, (rfi_tval){.kind = RFI_T_DICT, .as.dict = kwargs});
  const rfi_tval v = r->status == RFR_OK ? capture(r, n->kids[0], s, 0) : NONE;
  r->depth--;
  return v;
}

rfi_tval rfi_tval_call(rfi_render *r, const rfi_tval *f, const rfi_targs *args) {
  if (!rfi_render_step(r, 1)) return NONE;
  switch (f->kind) {
    case RFI_T_FUNCTION: return f->as.function(r, NULL, args);
    case RFI_T_METHOD: {
      const rfi_tval *self = &f->as.method->self;
      const rfi_tval v = f->as.method->call(r, self, args);
      return self->kind == RFI_T_TEXT && self->as.text->safe && v.kind == RFI_T_TEXT ? rfi_text_mark_safe(r, v.as.text)
                                                                                     : v;
    }
    case RFI_T_MACRO: return call_macro(r, f->as.macro, args);
    case RFI_T_JOINER: {
      rfi_tcycle *c = (rfi_tcycle *)f->as.cycle;
      return c->position++ == 0 ? rfi_text_new(r, "", 0, 0) : c->items[0];
    }
    case RFI_T_UNDEFINED: rfi_render_fail(r, "\"%s\" is undefined", f->as.hint ? f->as.hint : "the value"); return NONE;
    default: rfi_render_fail(r, "%s cannot be called", rfi_tval_type(f)); return NONE;
  }
}

/* ---- loops ---- */

/* Gets the next item that passes the condition; false at the end. */
static bool take(rfi_render *r, loop *l, rfi_tval *out) {
  while (rfi_render_step(r, 1)) {
    if (l->iterator) {
      if (l->iterator->next >= l->iterator->list->n) return false;
      *out = l->iterator->list->items[l->iterator->next++];
    } else {
      if (l->next >= l->items->n) return false;
      *out = l->items->items[l->next++];
    }
    if (!l->test) return true;
    scope *s = scope_new(r, l->scope), *const before = r->scope;
    if (!s) return false;
    r->scope = s;
    assign(r, l->target, *out);
    const rfi_tval v = eval(r, l->test);
    r->scope = before;
    if (r->status == RFR_OK && rfi_tval_truth(&v)) return true;
  }
  return false;
}

static const rfi_tval *peek(rfi_render *r, loop *l) {
  if (l->after.kind == RFI_T_ABSENT && !take(r, l, &l->after)) l->after.kind = RFI_T_ABSENT;
  return l->after.kind == RFI_T_ABSENT ? NULL : &l->after;
}

static int64_t length_of(rfi_render *r, loop *l) {
  if (l->length >= 0) return l->length;
  rfi_tlist *rest = rfi_tlist_new(r);
  for (rfi_tval v; rest && take(r, l, &v);) rfi_tlist_add(r, rest, v);
  if (!rest) return 0;
  l->items = rest;
  l->next = 0;
  l->iterator = NULL;
  l->test = NULL;
  return l->length = rest->n + l->index0 + 1 + (l->after.kind != RFI_T_ABSENT);
}

static rfi_tval loop_cycle(rfi_render *r, const rfi_tval *self, const rfi_targs *args) {
  if (args->n == 0 || args->n_named > 0) return rfi_render_fail(r, "loop.cycle needs items"), NONE;
  return args->items[self->as.loop->index0 % args->n];
}

static rfi_tval loop_changed(rfi_render *r, const rfi_tval *self, const rfi_targs *args) {
  loop *l = self->as.loop;
  rfi_tlist *values = rfi_tlist_new(r);
  for (int i = 0; i < args->n; i++) rfi_tlist_add(r, values, args->items[i]);
  const rfi_tval now = rfi_tlist_value(values, RFI_T_TUPLE);
  if (l->changed.kind != RFI_T_ABSENT && rfi_tval_equal(r, &l->changed, &now)) return rfi_tval_bool(false);
  l->changed = now;
  return rfi_tval_bool(true);
}

rfi_tval rfi_tloop_attribute(rfi_render *r, const rfi_tval *v, const rfi_text *name) {
  loop *l = v->as.loop;
  const rfi_tval *next;
  if (rfi_text_is(name, "index")) return rfi_tval_int(l->index0 + 1);
  if (rfi_text_is(name, "index0")) return rfi_tval_int(l->index0);
  if (rfi_text_is(name, "first")) return rfi_tval_bool(l->index0 == 0);
  if (rfi_text_is(name, "last")) return rfi_tval_bool(!peek(r, l));
  if (rfi_text_is(name, "length")) return rfi_tval_int(length_of(r, l));
  if (rfi_text_is(name, "revindex")) return rfi_tval_int(length_of(r, l) - l->index0);
  if (rfi_text_is(name, "revindex0")) return rfi_tval_int(length_of(r, l) - l->index0 - 1);
  if (rfi_text_is(name, "depth")) return rfi_tval_int(1);
  if (rfi_text_is(name, "depth0")) return rfi_tval_int(0);
  if (rfi_text_is(name, "previtem")) return l->index0 == 0 ? rfi_tval_undefined("loop.previtem") : l->previous;
  if (rfi_text_is(name, "nextitem")) return (next = peek(r, l)) ? *next : rfi_tval_undefined("loop.nextitem");
  if (rfi_text_is(name, "cycle")) return rfi_tmethod_new(r, v, loop_cycle);
  if (rfi_text_is(name, "changed")) return rfi_tmethod_new(r, v, loop_changed);
  return (rfi_tval){.kind = RFI_T_ABSENT};
}

static flow run_for(rfi_render *r, const rfi_tnode *n) {
  enum { TARGET, ITERABLE, TEST, BODY, ELSE };
  const rfi_tval over = eval(r, n->kids[ITERABLE]);
  loop *l = rfi_render_alloc(r, sizeof *l);
  scope *const before = r->scope, *s = scope_new(r, before);
  const int message = r->message;
  if (!l || !s) return NEXT;
  *l = (loop){.index0 = -1, .length = -1, .target = n->kids[TARGET], .test = n->kids[TEST], .scope = before};
  if (over.kind == RFI_T_ITERATOR) l->iterator = over.as.iterator;
  else if (!(l->items = rfi_tval_items(r, &over))) return NEXT;
  else if (!l->test) l->length = l->items->n;
  const rfi_tval self = {.kind = RFI_T_LOOP, .as.loop = l};
  for (rfi_tval v; rfi_render_step(r, 1);) {
    if (l->after.kind != RFI_T_ABSENT) {
      v = l->after;
      l->after.kind = RFI_T_ABSENT;
    } else if (!take(r, l, &v)) {
      break;
    }
    l->index0++;
    l->previous = l->current;
    l->current = v;
    s->n = 0;
    r->scope = s;
    scope_set(r, s, RFI_SYMBOL_LOOP, self);
    assign(r, n->kids[TARGET], v);
    if (v.kind == RFI_T_DICT && v.as.dict->message > 0) r->message = v.as.dict->message;
    const flow f = run(r, n->kids[BODY]);
    r->message = message;
    r->scope = before;
    if (f == BREAK) break;
  }
  if (l->index0 >= 0 || !n->kids[ELSE] || r->status != RFR_OK) return NEXT;
  r->scope = scope_new(r, before);
  const flow f = r->scope ? run(r, n->kids[ELSE]) : NEXT;
  r->scope = before;
  return f;
}

/* ---- expressions ---- */

/* `block`: the value of the innermost filter of a block, or NULL. */
static rfi_tval eval_filter(rfi_render *r, const rfi_tnode *n, const rfi_tval *block) {
  rfi_targs args;
  const rfi_tnode *inner = n->n_kids > 0 ? n->kids[0] : NULL;
  rfi_tval v = !inner                                    ? *block
               : block && inner->type == RFI_NODE_FILTER ? eval_filter(r, inner, block)
                                                         : eval(r, inner);
  if (!arguments(r, n, 1, &args)) return NONE;
  r->at = n->at;
  return rfi_filter_call(r, n->text, &v, &args);
}

static bool compare(rfi_render *r, int op, const rfi_tval *a, const rfi_tval *b) {
  if (op == RFI_TOKEN_EQ) return rfi_tval_equal(r, a, b);
  if (op == RFI_TOKEN_NE) return !rfi_tval_equal(r, a, b);
  if (op == 'i') return rfi_tval_contains(r, b, a);
  if (op == 'n') return !rfi_tval_contains(r, b, a);
  const int order = rfi_tval_order(r, a, b);
  if (order == 2) return false;
  return op == '<' ? order < 0 : op == '>' ? order > 0 : op == RFI_TOKEN_LE ? order <= 0 : order >= 0;
}

static rfi_tval eval_compare(rfi_render *r, const rfi_tnode *n) {
  rfi_tval left = eval(r, n->kids[0]);
  for (int i = 1; i < n->n_kids; i++) {
    const rfi_tval right = eval(r, n->kids[i]);
    r->at = n->at;
    if (r->status != RFR_OK || !compare(r, n->ops[i - 1], &left, &right)) return rfi_tval_bool(false);
    left = right;
  }
  return rfi_tval_bool(true);
}

static rfi_tval eval_list(rfi_render *r, const rfi_tnode *n) {
  rfi_tlist *list = rfi_tlist_new(r);
  for (int i = 0; i < n->n_kids && r->status == RFR_OK; i++) rfi_tlist_add(r, list, eval(r, n->kids[i]));
  return rfi_tlist_value(list, n->type == RFI_NODE_LIST ? RFI_T_LIST : RFI_T_TUPLE);
}

static rfi_tval eval_dict(rfi_render *r, const rfi_tnode *n) {
  rfi_tdict *d = rfi_tdict_new(r);
  for (int i = 0; i + 1 < n->n_kids && r->status == RFR_OK; i += 2) {
    const rfi_tval key = eval(r, n->kids[i]);
    rfi_tdict_set(r, d, key, eval(r, n->kids[i + 1]));
  }
  return d ? (rfi_tval){.kind = RFI_T_DICT, .as.dict = d} : NONE;
}

static rfi_tval eval_concat(rfi_render *r, const rfi_tnode *n) {
  rfi_tbuilder b = {.r = r};
  for (int i = 0; i < n->n_kids && r->status == RFR_OK; i++) {
    const rfi_tval v = eval(r, n->kids[i]);
    rfi_tval_print(&b, &v);
  }
  return rfi_tbuilder_finish(&b);
}

static rfi_tval eval_slice(rfi_render *r, const rfi_tnode *n) {
  const rfi_tval object = eval(r, n->kids[0]);
  rfi_tval bounds[3];
  for (int i = 0; i < 3; i++) bounds[i] = n->kids[1 + i] ? eval(r, n->kids[1 + i]) : NONE;
  r->at = n->at;
  return rfi_tval_slice(r, &object, bounds);
}

static rfi_tval eval_constant(const rfi_tnode *n) {
  switch (n->op) {
    case RFI_CONST_BOOL: return rfi_tval_bool(n->i != 0);
    case RFI_CONST_INT: return rfi_tval_int(n->i);
    case RFI_CONST_FLOAT: return rfi_tval_float(n->f);
    case RFI_CONST_TEXT: return (rfi_tval){.kind = RFI_T_TEXT, .as.text = (rfi_text *)n->cached};
    default: return NONE;
  }
}

static rfi_tval eval_here(rfi_render *r, const rfi_tnode *n) {
  rfi_targs args;
  rfi_tval a, b;
  switch (n->type) {
    case RFI_NODE_CONST: return eval_constant(n);
    case RFI_NODE_NAME: return lookup(r, n->symbol);
    case RFI_NODE_LIST:
    case RFI_NODE_TUPLE: return eval_list(r, n);
    case RFI_NODE_DICT: return eval_dict(r, n);
    case RFI_NODE_NOT: a = eval(r, n->kids[0]); return rfi_tval_bool(!rfi_tval_truth(&a));
    case RFI_NODE_NEG:
    case RFI_NODE_POS:
      a = eval(r, n->kids[0]);
      if (n->type == RFI_NODE_NEG || !rfi_tval_is_number(&a)) b = rfi_tval_negate(r, &a);
      else b = a.kind == RFI_T_BOOL ? rfi_tval_int(a.as.b) : a;
      return b;
    case RFI_NODE_AND:
    case RFI_NODE_OR:
      a = eval(r, n->kids[0]);
      for (int i = 1; i < n->n_kids && rfi_tval_truth(&a) == (n->type == RFI_NODE_AND); i++) a = eval(r, n->kids[i]);
      return a;
    case RFI_NODE_BINARY:
      a = eval(r, n->kids[0]);
      b = eval(r, n->kids[1]);
      return rfi_tval_binary(r, n->op, &a, &b);
    case RFI_NODE_COMPARE: return eval_compare(r, n);
    case RFI_NODE_CONCAT: return eval_concat(r, n);
    case RFI_NODE_COND:
      a = eval(r, n->kids[0]);
      if (rfi_tval_truth(&a)) return eval(r, n->kids[1]);
      return n->kids[2] ? eval(r, n->kids[2]) : rfi_tval_undefined("value of an if without else");
    case RFI_NODE_ATTR: a = eval(r, n->kids[0]); return rfi_tval_attribute(r, &a, n->cached);
    case RFI_NODE_ITEM:
      a = eval(r, n->kids[0]);
      b = eval(r, n->kids[1]);
      return rfi_tval_item(r, &a, &b);
    case RFI_NODE_SLICE: return eval_slice(r, n);
    case RFI_NODE_CALL: a = eval(r, n->kids[0]); return arguments(r, n, 1, &args) ? rfi_tval_call(r, &a, &args) : NONE;
    case RFI_NODE_FILTER: return eval_filter(r, n, NULL);
    case RFI_NODE_TEST:
      a = eval(r, n->kids[0]);
      return arguments(r, n, 1, &args) ? rfi_tval_bool(rfi_test_call(r, n->text, &a, &args)) : NONE;
    default: return rfi_render_fail(r, "an expression of an unknown kind"), NONE;
  }
}

static rfi_tval eval(rfi_render *r, const rfi_tnode *n) {
  if (!enter(r)) return NONE;
  const uint32_t at = r->at;
  r->at = n->at;
  const rfi_tval v = eval_here(r, n);
  r->at = at;
  r->depth--;
  return r->status == RFR_OK ? v : NONE;
}

/* ---- statements ---- */

static void define_macro(rfi_render *r, const rfi_tnode *n, rfi_tval *out) {
  macro *m = rfi_render_alloc(r, sizeof *m);
  *out = NONE;
  if (!m) return;
  *m = (macro){n, r->scope};
  *out = (rfi_tval){.kind = RFI_T_MACRO, .as.macro = m};
}

/* Calls a macro with the block as its caller. */
static void run_call_block(rfi_render *r, const rfi_tnode *n) {
  const rfi_tnode *call = n->kids[0];
  rfi_targs args;
  rfi_tval caller;
  define_macro(r, n->kids[1], &caller);
  const rfi_tval f = eval(r, call->kids[0]);
  if (!arguments(r, call, 1, &args)) return;
  const char **names = rfi_render_alloc(r, (size_t)(args.n_named + 1) * sizeof *names);
  rfi_tval *named = rfi_render_alloc(r, (size_t)(args.n_named + 1) * sizeof *named);
  if (!names || !named) return;
  for (int i = 0; i < args.n_named; i++) {
    names[i] = args.names[i];
    named[i] = args.named[i];
  }
  names[args.n_named] = "caller";
  named[args.n_named++] = caller;
  args.names = names;
  args.named = named;
  const rfi_tval v = rfi_tval_call(r, &f, &args);
  emit(r, &v);
}

static flow run_here(rfi_render *r, const rfi_tnode *n) {
  rfi_tval v;
  scope *const before = r->scope;
  int i = 0;
  flow f = NEXT;
  switch (n->type) {
    case RFI_NODE_BODY:
      for (int k = 0; k < n->n_params; k++)
        scope_set(r, r->scope, n->params[k], rfi_tval_undefined(r->t->symbols.names[n->params[k]]));
      for (; i < n->n_kids && f == NEXT && r->status == RFR_OK; i++) f = run(r, n->kids[i]);
      return f;
    case RFI_NODE_DATA:
      v = eval_constant(n);
      emit(r, &v);
      return NEXT;
    case RFI_NODE_OUTPUT:
      for (; i < n->n_kids && r->status == RFR_OK; i++) {
        v = eval(r, n->kids[i]);
        emit(r, &v);
      }
      return NEXT;
    case RFI_NODE_IF:
      for (; i + 1 < n->n_kids; i += 2) {
        v = eval(r, n->kids[i]);
        if (r->status != RFR_OK) return NEXT;
        if (rfi_tval_truth(&v)) return run(r, n->kids[i + 1]);
      }
      return i < n->n_kids ? run(r, n->kids[i]) : NEXT;
    case RFI_NODE_FOR: return run_for(r, n);
    case RFI_NODE_SET:
      v = eval(r, n->kids[1]);
      assign(r, n->kids[0], v);
      return NEXT;
    case RFI_NODE_SET_BLOCK:
      v = capture(r, n->kids[2], scope_new(r, r->scope), 0);
      if (n->kids[1]) v = eval_filter(r, n->kids[1], &v);
      assign(r, n->kids[0], v);
      return NEXT;
    case RFI_NODE_MACRO:
      define_macro(r, n, &v);
      scope_set(r, r->scope, n->symbol, v);
      return NEXT;
    case RFI_NODE_CALL_BLOCK: run_call_block(r, n); return NEXT;
    case RFI_NODE_FILTER_BLOCK:
      v = capture(r, n->kids[1], scope_new(r, r->scope), 0);
      v = eval_filter(r, n->kids[0], &v);
      emit(r, &v);
      return NEXT;
    case RFI_NODE_GENERATION:
      v = capture(r, n->kids[0], scope_new(r, r->scope), RFI_TEXT_GENERATED);
      emit(r, &v);
      return NEXT;
    case RFI_NODE_WITH: {
      scope *s = scope_new(r, before);
      for (; s && i + 1 < n->n_kids; i += 2) {
        v = eval(r, n->kids[i + 1]);
        scope_set(r, s, n->kids[i]->symbol, v);
      }
      r->scope = s;
      if (s) f = run(r, n->kids[n->n_kids - 1]);
      r->scope = before;
      return f;
    }
    case RFI_NODE_BREAK: return BREAK;
    case RFI_NODE_CONTINUE: return CONTINUE;
    default: rfi_render_fail(r, "a statement of an unknown kind"); return NEXT;
  }
}

static flow run(rfi_render *r, const rfi_tnode *n) {
  if (!enter(r)) return NEXT;
  const uint32_t at = r->at;
  r->at = n->at;
  const flow f = run_here(r, n);
  r->at = at;
  r->depth--;
  return f;
}

rfr_status rfi_render_run(rfi_render *r, const rfi_tvariable *variables, int n, rfi_text **out) {
  rfi_tbuilder root = {.r = r};
  r->out = r->root = &root;
  r->scope = scope_new(r, NULL);
  r->depth = 0;
  r->message = 0;
  r->parts = NULL;
  r->n_parts = r->capacity_parts = 0;
  r->pieces = NULL;
  r->n_pieces = r->capacity_pieces = 0;
  for (int i = 0; i < n; i++) {
    const int symbol = rfi_template_symbol(r->t, variables[i].name);
    if (symbol >= 0) scope_set(r, r->scope, symbol, variables[i].value);
  }
  if (r->status == RFR_OK) run(r, r->t->root);
  *out = rfi_tbuilder_finish(&root).as.text;
  r->out = r->root = NULL;
  r->scope = NULL;
  return r->status;
}
