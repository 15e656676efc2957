/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds the names that are undefined at the start of a scope.
 *
 * jinja2 resolves the names of a scope before it runs a template. A name is local to a scope if the scope sets it
 * before reading it and no enclosing scope uses it. Until it is set, a local name is undefined, also in inner scopes,
 * even if the caller passed a variable of that name. The rules are those of jinja2's idtracking.Symbols.
 */
#include <string.h>

#include "text/template_node.h"

enum { KNOWN = 1, STORED = 2, UNSET = 4 };

typedef struct symbols {
  const struct symbols *parent;
  uint8_t *state; /* per symbol */
} symbols;

typedef struct analysis {
  rfi_template *t;
  rfr_status status;
} analysis;

static void visit(analysis *a, symbols *s, const rfi_tnode *n);

static bool is_known(const symbols *s, int symbol) {
  for (; s; s = s->parent)
    if (s->state[symbol] & KNOWN) return true;
  return false;
}

static void store(symbols *s, int symbol) {
  if (!(s->state[symbol] & KNOWN) && !is_known(s->parent, symbol)) s->state[symbol] |= UNSET;
  s->state[symbol] |= KNOWN | STORED;
}

static void store_target(symbols *s, const rfi_tnode *n) {
  if (n->type == RFI_NODE_NAME) store(s, n->symbol);
  else if (n->type == RFI_NODE_NAMESPACE_SET && !is_known(s, n->symbol)) s->state[n->symbol] |= KNOWN;
  for (int i = 0; n->type == RFI_NODE_TUPLE && i < n->n_kids; i++) store_target(s, n->kids[i]);
}

/* A copy, to be freed with release; without states after an error. */
static symbols branch(analysis *a, const symbols *from, const symbols *parent) {
  symbols s = {.parent = parent};
  if (a->status == RFR_OK) a->status = RFI_ALLOC(a->t->ctx, (size_t)a->t->symbols.n, &s.state);
  if (s.state && from) memcpy(s.state, from->state, (size_t)a->t->symbols.n);
  return s;
}

static void release(analysis *a, symbols *s) { rfi_free(a->t->ctx, s->state); }

/* A name that only some branches set keeps the value from outside the scope. */
static void merge(const analysis *a, symbols *s, const symbols *branches, int n) {
  for (int i = 0; i < a->t->symbols.n; i++) {
    uint8_t all = 0;
    for (int k = 0; k < n; k++) all |= branches[k].state[i];
    if ((all & STORED) && !(s->state[i] & STORED)) s->state[i] &= (uint8_t)~UNSET;
    s->state[i] |= all & (KNOWN | STORED);
  }
}

static void visit_if(analysis *a, symbols *s, const rfi_tnode *n) {
  visit(a, s, n->kids[0]);
  symbols b[3] = {branch(a, s, s->parent), branch(a, s, s->parent), branch(a, s, s->parent)};
  if (a->status == RFR_OK) visit(a, &b[0], n->kids[1]);
  int i = 2;
  for (; i + 1 < n->n_kids && a->status == RFR_OK; i += 2) {
    visit(a, &b[1], n->kids[i]);
    symbols inner = branch(a, &b[1], s->parent);
    if (a->status == RFR_OK) {
      visit(a, &inner, n->kids[i + 1]);
      merge(a, &b[1], &inner, 1);
    }
    release(a, &inner);
  }
  if (i < n->n_kids && a->status == RFR_OK) visit(a, &b[2], n->kids[i]);
  if (a->status == RFR_OK) merge(a, s, b, 3);
  for (int k = 0; k < 3; k++) release(a, &b[k]);
}

/* Reads and writes of one scope; the bodies of inner scopes are not visited. */
static void visit(analysis *a, symbols *s, const rfi_tnode *n) {
  if (!n || a->status != RFR_OK) return;
  switch (n->type) {
    case RFI_NODE_NAME:
      if (!is_known(s, n->symbol)) s->state[n->symbol] |= KNOWN;
      return;
    case RFI_NODE_SET:
      visit(a, s, n->kids[1]);
      store_target(s, n->kids[0]);
      return;
    case RFI_NODE_SET_BLOCK: store_target(s, n->kids[0]); return;
    case RFI_NODE_MACRO: store(s, n->symbol); return;
    case RFI_NODE_FOR: visit(a, s, n->kids[1]); return;
    case RFI_NODE_IF: visit_if(a, s, n); return;
    case RFI_NODE_CALL_BLOCK:
    case RFI_NODE_FILTER_BLOCK: visit(a, s, n->kids[0]); return;
    case RFI_NODE_GENERATION: return;
    case RFI_NODE_WITH:
      for (int i = 1; i < n->n_kids; i += 2) visit(a, s, n->kids[i]);
      return;
    default:
      for (int i = 0; i < n->n_kids; i++) visit(a, s, n->kids[i]);
  }
}

static void scopes_of(analysis *a, const symbols *s, const rfi_tnode *n);

static void declare(symbols *s, const rfi_tnode *target) {
  if (target->type == RFI_NODE_NAME) s->state[target->symbol] |= KNOWN | STORED;
  for (int i = 0; target->type == RFI_NODE_TUPLE && i < target->n_kids; i++) declare(s, target->kids[i]);
}

/* Finds the undefined names of a body and of its inner scopes. `owner` has the parameters of the body. */
static void analyze(analysis *a, const symbols *parent, const rfi_tnode *owner, rfi_tnode *body) {
  symbols s = branch(a, NULL, parent);
  if (a->status == RFR_OK && owner) {
    if (owner->type == RFI_NODE_FOR && body == owner->kids[3]) {
      declare(&s, owner->kids[0]);
      s.state[RFI_SYMBOL_LOOP] |= KNOWN | STORED;
    }
    for (int i = 0; i < owner->n_params; i++) s.state[owner->params[i]] |= KNOWN | STORED;
    if (owner->type == RFI_NODE_MACRO) {
      for (int i = RFI_SYMBOL_VARARGS; i <= RFI_SYMBOL_CALLER; i++) s.state[i] |= KNOWN | STORED;
      for (int i = 1; i < owner->n_kids; i++) visit(a, &s, owner->kids[i]);
    }
    for (int i = 0; owner->type == RFI_NODE_WITH && i + 1 < owner->n_kids; i += 2) declare(&s, owner->kids[i]);
  }
  visit(a, &s, body);
  int count = 0;
  for (int i = 0; a->status == RFR_OK && i < a->t->symbols.n; i++) count += (s.state[i] & UNSET) != 0;
  if (count > 0 && a->status == RFR_OK) {
    body->params = rfi_arena_alloc(a->t->arena, (size_t)count * sizeof *body->params);
    if (!body->params) a->status = rfr_last_error()->status;
    for (int i = 0; body->params && i < a->t->symbols.n; i++)
      if (s.state[i] & UNSET) body->params[body->n_params++] = i;
  }
  if (a->status == RFR_OK) scopes_of(a, &s, body);
  release(a, &s);
}

/* The scopes directly inside the statements of a scope. */
static void scopes_of(analysis *a, const symbols *s, const rfi_tnode *n) {
  for (int i = 0; i < n->n_kids && a->status == RFR_OK; i++) {
    const rfi_tnode *k = n->kids[i];
    if (!k) continue;
    switch (k->type) {
      case RFI_NODE_BODY:
      case RFI_NODE_IF: scopes_of(a, s, k); break;
      case RFI_NODE_FOR:
        analyze(a, s, k, k->kids[3]);
        if (k->kids[4]) analyze(a, s, k, k->kids[4]);
        break;
      case RFI_NODE_MACRO: analyze(a, s, k, k->kids[0]); break;
      case RFI_NODE_CALL_BLOCK: analyze(a, s, k->kids[1], k->kids[1]->kids[0]); break;
      case RFI_NODE_SET_BLOCK: analyze(a, s, k, k->kids[2]); break;
      case RFI_NODE_FILTER_BLOCK: analyze(a, s, k, k->kids[1]); break;
      case RFI_NODE_GENERATION: analyze(a, s, k, k->kids[0]); break;
      case RFI_NODE_WITH: analyze(a, s, k, k->kids[k->n_kids - 1]); break;
      default: break;
    }
  }
}

rfr_status rfi_template_scopes(rfi_template *t) {
  analysis a = {.t = t, .status = RFR_OK};
  analyze(&a, NULL, NULL, t->root);
  return a.status;
}
