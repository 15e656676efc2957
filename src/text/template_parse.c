/* SPDX-License-Identifier: Apache-2.0
 *
 * Parses tokens into a syntax tree, by recursive descent with jinja2's grammar and operator precedence.
 *
 * The depth of the tree is limited, because the evaluator recurses over it.
 */
#include <string.h>

#include "text/template_node.h"
#include "text/template_value.h"

enum { MAX_NESTING = 100, MAX_DEPTH = 400, MAX_SYMBOLS = 1024 };

typedef struct parser {
  rfi_template *t;
  const rfi_ttoken *token; /* the current token; the last one has type RFI_TOKEN_EOF */
  rfr_status status;
  int nesting;
  bool uses_varargs, uses_kwargs, uses_caller;
  int loops; /* number of loops around the statement, within this function */
} parser;

static rfi_tnode *expression(parser *p);
static rfi_tnode *condition(parser *p, bool with_else);
static rfi_tnode *unary(parser *p, bool with_filter);
static rfi_tnode *body_until(parser *p, const char *ends);

/* Latches the first error. */
static void *fail(parser *p, uint32_t at, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void *fail(parser *p, uint32_t at, const char *format, ...) {
  char text[512];
  if (p->status != RFR_OK) return NULL;
  va_list args;
  va_start(args, format);
  rfi_vsnprintf(text, sizeof text, format, args);
  va_end(args);
  p->status = rfi_template_fail(p->t, RFI_E_TEMPLATE_SYNTAX, at, "%s", text);
  return NULL;
}

static void *no_memory(parser *p) {
  if (p->status == RFR_OK) p->status = rfr_last_error()->status;
  return NULL;
}

static const char *describe(const rfi_ttoken *k, char buffer[64]) {
  switch (k->type) {
    case RFI_TOKEN_EOF: return "the end of the template";
    case RFI_TOKEN_DATA: return "text";
    case RFI_TOKEN_BLOCK_BEGIN: return "\"{%\"";
    case RFI_TOKEN_BLOCK_END: return "\"%}\"";
    case RFI_TOKEN_VARIABLE_BEGIN: return "\"{{\"";
    case RFI_TOKEN_VARIABLE_END: return "\"}}\"";
    case RFI_TOKEN_NAME: rfi_snprintf(buffer, 64, "\"%s\"", k->text); return buffer;
    case RFI_TOKEN_STRING: return "a string";
    case RFI_TOKEN_INTEGER:
    case RFI_TOKEN_FLOAT: return "a number";
    case RFI_TOKEN_FLOORDIV: return "\"//\"";
    case RFI_TOKEN_POW: return "\"**\"";
    case RFI_TOKEN_EQ: return "\"==\"";
    case RFI_TOKEN_NE: return "\"!=\"";
    case RFI_TOKEN_GE: return "\">=\"";
    case RFI_TOKEN_LE: return "\"<=\"";
    default: rfi_snprintf(buffer, 64, "\"%c\"", k->type); return buffer;
  }
}

static rfi_tnode *node(parser *p, rfi_tnode_type type, uint32_t at) {
  rfi_tnode *n = rfi_arena_alloc(p->t->arena, sizeof *n);
  if (!n) return no_memory(p);
  n->type = type;
  n->at = at;
  n->depth = 1;
  return n;
}

/* Appends a kid; NULL is an omitted one. */
static void add(parser *p, rfi_tnode *parent, rfi_tnode *kid) {
  if (!parent || p->status != RFR_OK) return;
  if (!rfi_arena_grow(p->t->arena, (void **)&parent->kids, &parent->capacity, parent->n_kids + 1, sizeof kid)) {
    no_memory(p);
    return;
  }
  parent->kids[parent->n_kids++] = kid;
  if (!kid || kid->depth < parent->depth) return;
  parent->depth = kid->depth + 1;
  if (parent->depth > MAX_DEPTH) fail(p, parent->at, "the expression or block is nested too deeply");
}

static rfi_tnode *node_of(parser *p, rfi_tnode_type type, uint32_t at, rfi_tnode *a, rfi_tnode *b) {
  rfi_tnode *n = node(p, type, at);
  add(p, n, a);
  if (b) add(p, n, b);
  return n;
}

static bool is(const parser *p, int type) { return p->status == RFR_OK && p->token->type == type; }

static bool is_name(const parser *p, const char *name) {
  return is(p, RFI_TOKEN_NAME) && strcmp(p->token->text, name) == 0;
}

static const rfi_ttoken *next(parser *p) {
  const rfi_ttoken *k = p->token;
  if (k->type != RFI_TOKEN_EOF) p->token++;
  return k;
}

static bool skip(parser *p, int type) {
  if (!is(p, type)) return false;
  next(p);
  return true;
}

static bool skip_name(parser *p, const char *name) {
  if (!is_name(p, name)) return false;
  next(p);
  return true;
}

static const rfi_ttoken *expect(parser *p, int type, const char *what) {
  char buffer[64];
  if (p->status != RFR_OK) return NULL;
  if (p->token->type == type) return next(p);
  return fail(p, p->token->at, "expected %s, found %s", what, describe(p->token, buffer));
}

static void expect_name(parser *p, const char *name) {
  char buffer[64];
  if (!skip_name(p, name)) fail(p, p->token->at, "expected \"%s\", found %s", name, describe(p->token, buffer));
}

int rfi_template_symbol(const rfi_template *t, const char *name) {
  for (int i = 0; i < t->symbols.n; i++)
    if (strcmp(t->symbols.names[i], name) == 0) return i;
  return -1;
}

static int symbol_of(parser *p, const char *name) {
  rfi_tsymbols *s = &p->t->symbols;
  const int known = rfi_template_symbol(p->t, name);
  if (known >= 0) return known;
  if (s->n == MAX_SYMBOLS) {
    fail(p, p->token->at, "the template uses more than %d names", MAX_SYMBOLS);
    return 0;
  }
  if (!rfi_arena_grow(p->t->arena, (void **)&s->names, &s->capacity, s->n + 1, sizeof *s->names)) {
    no_memory(p);
    return 0;
  }
  s->names[s->n] = name;
  return s->n++;
}

static rfi_tnode *name_node(parser *p, const rfi_ttoken *k) {
  if (!k) return NULL;
  rfi_tnode *n = node(p, RFI_NODE_NAME, k->at);
  if (!n) return NULL;
  n->symbol = symbol_of(p, k->text);
  n->text = k->text;
  p->uses_varargs |= n->symbol == RFI_SYMBOL_VARARGS;
  p->uses_kwargs |= n->symbol == RFI_SYMBOL_KWARGS;
  p->uses_caller |= n->symbol == RFI_SYMBOL_CALLER;
  return n;
}

static rfi_tnode *text_node(parser *p, rfi_tnode_type type, uint32_t at, const char *text, uint32_t n) {
  rfi_tnode *result = node(p, type, at);
  if (!result) return NULL;
  result->op = RFI_CONST_TEXT;
  result->text = text;
  result->n = n;
  result->cached = rfi_text_constant(p->t->arena, text, n);
  return result->cached ? result : no_memory(p);
}

static bool enter(parser *p) {
  if (p->status != RFR_OK) return false;
  if (++p->nesting > MAX_NESTING) {
    fail(p, p->token->at, "expressions or blocks are nested too deeply");
    return false;
  }
  return true;
}

/* Parses a tuple without brackets, or a single expression; `end` is a name that ends it, or NULL. */
static rfi_tnode *tuple(parser *p, bool simple, bool with_else, const char *end, bool in_brackets);

static rfi_tnode *list_or_dict(parser *p, bool is_dict) {
  const char *what = is_dict ? "\"}\"" : "\"]\"";
  const int close = is_dict ? '}' : ']';
  rfi_tnode *n = node(p, is_dict ? RFI_NODE_DICT : RFI_NODE_LIST, next(p)->at);
  while (p->status == RFR_OK && !is(p, close)) {
    if (n->n_kids > 0) {
      expect(p, ',', "\",\"");
      if (is(p, close)) break;
    }
    add(p, n, expression(p));
    if (!is_dict) continue;
    expect(p, ':', "\":\"");
    add(p, n, expression(p));
  }
  expect(p, close, what);
  return n;
}

static rfi_tnode *string_node(parser *p) {
  const rfi_ttoken *first = next(p);
  if (!is(p, RFI_TOKEN_STRING)) return text_node(p, RFI_NODE_CONST, first->at, first->text, first->n);
  size_t n = first->n;
  for (const rfi_ttoken *k = p->token; k->type == RFI_TOKEN_STRING; k++) n += k->n;
  char *text = rfi_arena_alloc(p->t->arena, n + 1);
  if (!text) return no_memory(p);
  memcpy(text, first->text, first->n);
  n = first->n;
  for (; p->token->type == RFI_TOKEN_STRING; p->token++) {
    memcpy(text + n, p->token->text, p->token->n);
    n += p->token->n;
  }
  return text_node(p, RFI_NODE_CONST, first->at, text, (uint32_t)n);
}

static rfi_tnode *constant(parser *p, rfi_tconst kind, const rfi_ttoken *k, int64_t i) {
  rfi_tnode *n = node(p, RFI_NODE_CONST, k->at);
  if (!n) return NULL;
  n->op = kind;
  n->i = i;
  n->f = k->f;
  return n;
}

/* `target`: "name.attribute" is an attribute of a namespace. */
static rfi_tnode *primary(parser *p, bool target) {
  char buffer[64];
  const rfi_ttoken *k = p->token;
  if (p->status != RFR_OK) return NULL;
  switch (k->type) {
    case RFI_TOKEN_NAME:
      next(p);
      if (strcmp(k->text, "true") == 0 || strcmp(k->text, "True") == 0) return constant(p, RFI_CONST_BOOL, k, 1);
      if (strcmp(k->text, "false") == 0 || strcmp(k->text, "False") == 0) return constant(p, RFI_CONST_BOOL, k, 0);
      if (strcmp(k->text, "none") == 0 || strcmp(k->text, "None") == 0) return constant(p, RFI_CONST_NONE, k, 0);
      if (target && skip(p, '.')) {
        const rfi_ttoken *attribute = expect(p, RFI_TOKEN_NAME, "a name");
        rfi_tnode *n = name_node(p, k);
        if (!n || !attribute) return NULL;
        n->type = RFI_NODE_NAMESPACE_SET;
        n->text = attribute->text;
        return n;
      }
      return name_node(p, k);
    case RFI_TOKEN_STRING: return string_node(p);
    case RFI_TOKEN_INTEGER: next(p); return constant(p, RFI_CONST_INT, k, k->i);
    case RFI_TOKEN_FLOAT: next(p); return constant(p, RFI_CONST_FLOAT, k, 0);
    case '(': {
      next(p);
      rfi_tnode *n = tuple(p, false, true, NULL, true);
      expect(p, ')', "\")\"");
      return n;
    }
    case '[': return list_or_dict(p, false);
    case '{': return list_or_dict(p, true);
    default: return fail(p, k->at, "unexpected %s", describe(k, buffer));
  }
}

static void add_name(parser *p, rfi_tnode *call, const char *name) {
  /* names[i] belongs to the last kid; its capacity follows that of the kids */
  const char **names = call->names;
  const int i = call->n_kids - 1;
  if (p->status != RFR_OK) return;
  if (call->op <= i) {
    const int capacity = 2 * i + 8;
    names = rfi_arena_alloc(p->t->arena, (size_t)capacity * sizeof *names);
    if (!names) {
      no_memory(p);
      return;
    }
    if (call->op > 0) memcpy(names, call->names, (size_t)call->op * sizeof *names);
    call->names = names;
    call->op = capacity;
  }
  names[i] = name;
}

/* Parses arguments in brackets, after the kids that the node already has. */
static void arguments(parser *p, rfi_tnode *call) {
  const rfi_ttoken *open = expect(p, '(', "\"(\"");
  bool comma = false, named = false, splat = false, double_splat = false;
  if (!open || !call) return;
  while (p->status == RFR_OK && !is(p, ')')) {
    if (comma) {
      expect(p, ',', "\",\"");
      if (is(p, ')')) break;
    }
    const char *name = NULL;
    bool valid = true;
    if (skip(p, '*')) {
      valid = !splat && !double_splat;
      splat = true;
      name = "*";
    } else if (skip(p, RFI_TOKEN_POW)) {
      valid = !double_splat;
      double_splat = true;
      name = "**";
    } else if (is(p, RFI_TOKEN_NAME) && p->token[1].type == '=') {
      valid = !double_splat;
      named = true;
      name = next(p)->text;
      next(p);
    } else {
      valid = !named && !splat && !double_splat;
    }
    if (!valid) {
      fail(p, open->at, "invalid order of arguments in a call");
      return;
    }
    add(p, call, expression(p));
    add_name(p, call, name);
    comma = true;
  }
  expect(p, ')', "\")\"");
}

static rfi_tnode *subscript(parser *p, rfi_tnode *object) {
  const rfi_ttoken *k = next(p);
  if (k->type == '.') {
    const rfi_ttoken *name = p->token;
    if (name->type == RFI_TOKEN_INTEGER) {
      next(p);
      return node_of(p, RFI_NODE_ITEM, k->at, object, constant(p, RFI_CONST_INT, name, name->i));
    }
    if (!expect(p, RFI_TOKEN_NAME, "a name or number after \".\"")) return NULL;
    rfi_tnode *n = node_of(p, RFI_NODE_ATTR, k->at, object, NULL);
    if (!n) return NULL;
    n->text = name->text;
    n->n = name->n;
    n->cached = rfi_text_constant(p->t->arena, name->text, name->n);
    return n->cached ? n : no_memory(p);
  }
  rfi_tnode *parts[3] = {NULL, NULL, NULL};
  bool slice = false;
  if (!is(p, ':')) parts[0] = expression(p);
  for (int i = 1; i < 3 && is(p, ':'); i++) {
    next(p);
    slice = true;
    if (!is(p, ':') && !is(p, ']')) parts[i] = expression(p);
  }
  if (is(p, ',')) return fail(p, p->token->at, "a subscript with a comma is not supported");
  expect(p, ']', "\"]\"");
  if (!slice) return node_of(p, RFI_NODE_ITEM, k->at, object, parts[0]);
  rfi_tnode *n = node_of(p, RFI_NODE_SLICE, k->at, object, NULL);
  for (int i = 0; i < 3; i++) add(p, n, parts[i]);
  return n;
}

static rfi_tnode *call_of(parser *p, rfi_tnode *function) {
  rfi_tnode *n = node_of(p, RFI_NODE_CALL, p->token->at, function, NULL);
  arguments(p, n);
  return n;
}

static rfi_tnode *postfix(parser *p, rfi_tnode *n) {
  for (;;) {
    if (is(p, '.') || is(p, '[')) n = subscript(p, n);
    else if (is(p, '(')) n = call_of(p, n);
    else return n;
  }
}

static rfi_tnode *filter(parser *p, rfi_tnode *value) {
  const rfi_ttoken *k = expect(p, RFI_TOKEN_NAME, "the name of a filter");
  if (!k) return NULL;
  rfi_tnode *n = node(p, RFI_NODE_FILTER, k->at);
  add(p, n, value);
  if (!n) return NULL;
  n->text = k->text;
  if (is(p, '.')) return fail(p, k->at, "unknown filter \"%s.\"", k->text);
  if (is(p, '(')) arguments(p, n);
  return n;
}

static rfi_tnode *test(parser *p, rfi_tnode *value) {
  next(p);
  const bool negated = skip_name(p, "not");
  const rfi_ttoken *k = expect(p, RFI_TOKEN_NAME, "the name of a test");
  if (!k) return NULL;
  rfi_tnode *n = node(p, RFI_NODE_TEST, k->at);
  add(p, n, value);
  if (!n) return NULL;
  n->text = k->text;
  if (is(p, '(')) {
    arguments(p, n);
  } else if ((is(p, RFI_TOKEN_NAME) && !is_name(p, "else") && !is_name(p, "or") && !is_name(p, "and")) ||
             is(p, RFI_TOKEN_STRING) || is(p, RFI_TOKEN_INTEGER) || is(p, RFI_TOKEN_FLOAT) || is(p, '[') ||
             is(p, '{')) {
    if (is_name(p, "is")) return fail(p, p->token->at, "tests with \"is\" cannot be chained");
    add(p, n, postfix(p, primary(p, false)));
    add_name(p, n, NULL);
  }
  return negated ? node_of(p, RFI_NODE_NOT, k->at, n, NULL) : n;
}

static rfi_tnode *unary(parser *p, bool with_filter) {
  rfi_tnode *n;
  if (!enter(p)) return NULL;
  const uint32_t at = p->token->at;
  if (is(p, '-') || is(p, '+')) {
    const rfi_tnode_type type = next(p)->type == '-' ? RFI_NODE_NEG : RFI_NODE_POS;
    n = node_of(p, type, at, unary(p, false), NULL);
  } else {
    n = primary(p, false);
  }
  n = postfix(p, n);
  while (with_filter && p->status == RFR_OK) {
    if (skip(p, '|')) n = filter(p, n);
    else if (is_name(p, "is")) n = test(p, n);
    else if (is(p, '(')) n = call_of(p, n);
    else break;
  }
  p->nesting--;
  return n;
}

/* Left-associative operators; level 0 has the lowest precedence: + -, then ~, then * / // %, then **. */
static rfi_tnode *arithmetic(parser *p, int level) {
  if (level == 4) return unary(p, true);
  rfi_tnode *left = arithmetic(p, level + 1);
  for (;;) {
    const int type = p->token->type;
    const bool here = level == 0   ? type == '+' || type == '-'
                      : level == 1 ? type == '~'
                      : level == 2 ? type == '*' || type == '/' || type == '%' || type == RFI_TOKEN_FLOORDIV
                                   : type == RFI_TOKEN_POW;
    if (!here || p->status != RFR_OK) return left;
    const uint32_t at = next(p)->at;
    rfi_tnode *right = arithmetic(p, level + 1);
    if (level == 1 && left && left->type == RFI_NODE_CONCAT && left->op == 1) {
      add(p, left, right);
      continue;
    }
    left = node_of(p, level == 1 ? RFI_NODE_CONCAT : RFI_NODE_BINARY, at, left, right);
    if (left) left->op = level == 1 ? 1 : type;
  }
}

static rfi_tnode *compare(parser *p) {
  rfi_tnode *first = arithmetic(p, 0), *n = NULL;
  enum { MAX_CHAIN = 16 };
  for (;;) {
    const int type = p->token->type;
    int op = 0;
    if (p->status != RFR_OK) return NULL;
    if (type == RFI_TOKEN_EQ || type == RFI_TOKEN_NE || type == '<' || type == '>' || type == RFI_TOKEN_LE ||
        type == RFI_TOKEN_GE)
      op = type;
    else if (is_name(p, "in")) op = 'i';
    else if (is_name(p, "not") && p->token[1].type == RFI_TOKEN_NAME && strcmp(p->token[1].text, "in") == 0) op = 'n';
    if (op == 0) return n ? n : first;
    const uint32_t at = next(p)->at;
    if (op == 'n') next(p);
    if (!n) {
      n = node_of(p, RFI_NODE_COMPARE, at, first, NULL);
      if (n && !(n->ops = rfi_arena_alloc(p->t->arena, MAX_CHAIN * sizeof *n->ops))) return no_memory(p);
    }
    if (!n) return NULL;
    if (n->n_kids > MAX_CHAIN) return fail(p, at, "too many comparisons in one chain");
    n->ops[n->n_kids - 1] = op;
    add(p, n, arithmetic(p, 0));
  }
}

static rfi_tnode *negation(parser *p) {
  if (!is_name(p, "not")) return compare(p);
  if (!enter(p)) return NULL;
  const uint32_t at = next(p)->at;
  rfi_tnode *n = node_of(p, RFI_NODE_NOT, at, negation(p), NULL);
  p->nesting--;
  return n;
}

/* and, or: kids from the left. */
static rfi_tnode *logical(parser *p, bool is_or) {
  rfi_tnode *first = is_or ? logical(p, false) : negation(p), *n = NULL;
  while (is_name(p, is_or ? "or" : "and")) {
    const uint32_t at = next(p)->at;
    if (!n) n = node_of(p, is_or ? RFI_NODE_OR : RFI_NODE_AND, at, first, NULL);
    add(p, n, is_or ? logical(p, false) : negation(p));
  }
  return n ? n : first;
}

static rfi_tnode *condition(parser *p, bool with_if) {
  if (!with_if) return logical(p, true);
  if (!enter(p)) return NULL;
  rfi_tnode *value = logical(p, true);
  while (is_name(p, "if")) {
    const uint32_t at = next(p)->at;
    rfi_tnode *test_node = logical(p, true), *other = NULL;
    if (skip_name(p, "else")) other = condition(p, true);
    rfi_tnode *n = node_of(p, RFI_NODE_COND, at, test_node, value);
    add(p, n, other);
    value = n;
  }
  p->nesting--;
  return value;
}

static rfi_tnode *expression(parser *p) { return condition(p, true); }

static rfi_tnode *tuple(parser *p, bool simple, bool with_if, const char *end, bool in_brackets) {
  rfi_tnode *first = NULL, *n = NULL;
  const uint32_t at = p->token->at;
  char buffer[64];
  if (!enter(p)) return NULL;
  for (bool more = true; more && p->status == RFR_OK;) {
    if (is(p, RFI_TOKEN_VARIABLE_END) || is(p, RFI_TOKEN_BLOCK_END) || is(p, ')') || (end && is_name(p, end))) break;
    rfi_tnode *item = simple ? primary(p, true) : condition(p, with_if);
    more = is(p, ',');
    if (!first) first = item;
    if (more && !n) n = node_of(p, RFI_NODE_TUPLE, at, first, NULL);
    else if (n) add(p, n, item);
    if (more) next(p);
  }
  p->nesting--;
  if (n) return n;
  if (first || p->status != RFR_OK) return first;
  if (!in_brackets) return fail(p, at, "expected an expression, found %s", describe(p->token, buffer));
  return node(p, RFI_NODE_TUPLE, at);
}

/* Whether values can be assigned to a target. */
static bool check_target(parser *p, const rfi_tnode *n) {
  if (!n || p->status != RFR_OK) return false;
  if (n->type == RFI_NODE_NAME || n->type == RFI_NODE_NAMESPACE_SET) return true;
  if (n->type != RFI_NODE_TUPLE) {
    fail(p, n->at, "this expression cannot be assigned to");
    return false;
  }
  for (int i = 0; i < n->n_kids; i++)
    if (!check_target(p, n->kids[i])) return false;
  return true;
}

static rfi_tnode *target(parser *p, const char *end, bool with_namespace) {
  rfi_tnode *n = tuple(p, true, false, end, false);
  check_target(p, n);
  if (n && n->type == RFI_NODE_NAMESPACE_SET && !with_namespace)
    return fail(p, n->at, "an attribute cannot be assigned to here");
  return n;
}

static rfi_tnode *set_statement(parser *p, uint32_t at) {
  rfi_tnode *to = target(p, NULL, true);
  if (skip(p, '=')) return node_of(p, RFI_NODE_SET, at, to, tuple(p, false, true, NULL, false));
  rfi_tnode *n = node_of(p, RFI_NODE_SET_BLOCK, at, to, NULL), *with = NULL;
  while (skip(p, '|')) with = filter(p, with);
  add(p, n, with);
  add(p, n, body_until(p, "endset"));
  next(p);
  return n;
}

static rfi_tnode *for_statement(parser *p, uint32_t at) {
  rfi_tnode *n = node_of(p, RFI_NODE_FOR, at, target(p, "in", false), NULL), *only = NULL, *other = NULL;
  expect_name(p, "in");
  add(p, n, tuple(p, false, false, "recursive", false));
  if (skip_name(p, "if")) only = expression(p);
  add(p, n, only);
  if (is_name(p, "recursive")) return fail(p, p->token->at, "recursive loops are not supported");
  p->loops++;
  add(p, n, body_until(p, "endfor else"));
  p->loops--;
  if (skip_name(p, "else")) other = body_until(p, "endfor");
  expect_name(p, "endfor");
  add(p, n, other);
  return n;
}

static rfi_tnode *if_statement(parser *p, uint32_t at) {
  rfi_tnode *n = node(p, RFI_NODE_IF, at);
  do {
    add(p, n, tuple(p, false, false, NULL, false));
    add(p, n, body_until(p, "elif else endif"));
  } while (skip_name(p, "elif"));
  if (skip_name(p, "else")) add(p, n, body_until(p, "endif"));
  expect_name(p, "endif");
  return n;
}

static rfi_tnode *with_statement(parser *p, uint32_t at) {
  rfi_tnode *n = node(p, RFI_NODE_WITH, at);
  while (p->status == RFR_OK && !is(p, RFI_TOKEN_BLOCK_END)) {
    if (n->n_kids > 0) expect(p, ',', "\",\"");
    rfi_tnode *to = primary(p, false);
    if (to && to->type != RFI_NODE_NAME) return fail(p, to->at, "expected a name");
    add(p, n, to);
    expect(p, '=', "\"=\"");
    add(p, n, expression(p));
  }
  add(p, n, body_until(p, "endwith"));
  expect_name(p, "endwith");
  return n;
}

/* The body of a macro is a separate function: break and continue cannot leave loops around it. */
static rfi_tnode *macro_body(parser *p, rfi_tnode *macro, const char *end) {
  const bool varargs = p->uses_varargs, kwargs = p->uses_kwargs, caller = p->uses_caller;
  const int loops = p->loops;
  p->uses_varargs = p->uses_kwargs = p->uses_caller = false;
  p->loops = 0;
  rfi_tnode *body = body_until(p, end);
  if (macro) {
    macro->uses_varargs = p->uses_varargs;
    macro->uses_kwargs = p->uses_kwargs;
    macro->uses_caller = p->uses_caller;
  }
  p->uses_varargs = varargs;
  p->uses_kwargs = kwargs;
  p->uses_caller = caller;
  p->loops = loops;
  expect_name(p, end);
  return body;
}

enum { MAX_PARAMETERS = 64 };

/* The parameters of a macro; their defaults go to `defaults`. */
static int parameters(parser *p, rfi_tnode *macro, rfi_tnode *defaults[MAX_PARAMETERS]) {
  int n = 0;
  expect(p, '(', "\"(\"");
  if (p->status != RFR_OK || !(macro->params = rfi_arena_alloc(p->t->arena, MAX_PARAMETERS * sizeof *macro->params)))
    return no_memory(p), 0;
  while (p->status == RFR_OK && !is(p, ')')) {
    if (n > 0) expect(p, ',', "\",\"");
    const rfi_ttoken *k = expect(p, RFI_TOKEN_NAME, "the name of a parameter");
    if (!k) return 0;
    if (n == MAX_PARAMETERS) return fail(p, k->at, "more than %d parameters", MAX_PARAMETERS), 0;
    macro->params[n] = symbol_of(p, k->text);
    defaults[n] = skip(p, '=') ? expression(p) : NULL;
    if (n > 0 && defaults[n - 1] && !defaults[n])
      return fail(p, k->at, "a parameter without default follows one with default"), 0;
    n++;
  }
  expect(p, ')', "\")\"");
  return macro->n_params = n;
}

static rfi_tnode *macro_statement(parser *p, uint32_t at) {
  rfi_tnode *defaults[MAX_PARAMETERS];
  const rfi_ttoken *k = expect(p, RFI_TOKEN_NAME, "the name of a macro");
  rfi_tnode *n = node(p, RFI_NODE_MACRO, at);
  if (!k || !n) return NULL;
  n->symbol = symbol_of(p, k->text);
  n->text = k->text;
  const int count = parameters(p, n, defaults);
  add(p, n, macro_body(p, n, "endmacro"));
  for (int i = 0; i < count; i++) add(p, n, defaults[i]);
  return n;
}

static rfi_tnode *call_statement(parser *p, uint32_t at) {
  rfi_tnode *defaults[MAX_PARAMETERS];
  int count = 0;
  rfi_tnode *caller = node(p, RFI_NODE_MACRO, at);
  if (!caller) return NULL;
  caller->text = "caller";
  if (is(p, '(')) count = parameters(p, caller, defaults);
  rfi_tnode *call = expression(p);
  if (call && call->type != RFI_NODE_CALL) return fail(p, call->at, "expected a call");
  add(p, caller, macro_body(p, caller, "endcall"));
  for (int i = 0; i < count; i++) add(p, caller, defaults[i]);
  return node_of(p, RFI_NODE_CALL_BLOCK, at, call, caller);
}

static rfi_tnode *statement(parser *p) {
  const rfi_ttoken *k = expect(p, RFI_TOKEN_NAME, "the name of a statement");
  if (!k) return NULL;
  const char *s = k->text;
  if (strcmp(s, "set") == 0) return set_statement(p, k->at);
  if (strcmp(s, "for") == 0) return for_statement(p, k->at);
  if (strcmp(s, "if") == 0) return if_statement(p, k->at);
  if (strcmp(s, "macro") == 0) return macro_statement(p, k->at);
  if (strcmp(s, "call") == 0) return call_statement(p, k->at);
  if (strcmp(s, "with") == 0) return with_statement(p, k->at);
  if (strcmp(s, "generation") == 0) {
    p->t->has_generation = true;
    return node_of(p, RFI_NODE_GENERATION, k->at, macro_body(p, NULL, "endgeneration"), NULL);
  }
  if (strcmp(s, "filter") == 0) {
    rfi_tnode *with = filter(p, NULL);
    while (skip(p, '|')) with = filter(p, with);
    rfi_tnode *n = node_of(p, RFI_NODE_FILTER_BLOCK, k->at, with, body_until(p, "endfilter"));
    expect_name(p, "endfilter");
    return n;
  }
  if (strcmp(s, "print") == 0) {
    rfi_tnode *n = node(p, RFI_NODE_OUTPUT, k->at);
    while (p->status == RFR_OK && !is(p, RFI_TOKEN_BLOCK_END)) {
      if (n->n_kids > 0) expect(p, ',', "\",\"");
      add(p, n, expression(p));
    }
    return n;
  }
  if (strcmp(s, "break") == 0 || strcmp(s, "continue") == 0) {
    if (p->loops == 0) return fail(p, k->at, "\"%s\" is outside a loop", s);
    return node(p, *s == 'b' ? RFI_NODE_BREAK : RFI_NODE_CONTINUE, k->at);
  }
  static const char refused[] = "block extends include import from autoescape do trans";
  if (rfi_has_word(refused, s)) return fail(p, k->at, "the statement \"%s\" is not supported", s);
  return fail(p, k->at, "unknown statement \"%s\"", s);
}

/* Parses statements up to one of the words in `ends`, which stays the current token; NULL: up to the end of the
 * template. The start of a block has been parsed up to its "%}". */
static rfi_tnode *body_until(parser *p, const char *ends) {
  if (ends) {
    skip(p, ':');
    expect(p, RFI_TOKEN_BLOCK_END, "\"%}\"");
  }
  if (!enter(p)) return NULL;
  const uint32_t begin = p->token->at;
  rfi_tnode *n = node(p, RFI_NODE_BODY, begin);
  while (p->status == RFR_OK) {
    const rfi_ttoken *k = p->token;
    if (k->type == RFI_TOKEN_EOF) {
      if (ends) fail(p, k->at, "the template ends inside a block; expected one of: %s", ends);
      break;
    }
    next(p);
    if (k->type == RFI_TOKEN_DATA) {
      add(p, n, text_node(p, RFI_NODE_DATA, k->at, k->text, k->n));
    } else if (k->type == RFI_TOKEN_VARIABLE_BEGIN) {
      add(p, n, node_of(p, RFI_NODE_OUTPUT, k->at, tuple(p, false, true, NULL, false), NULL));
      expect(p, RFI_TOKEN_VARIABLE_END, "\"}}\"");
    } else {
      if (ends && p->token->type == RFI_TOKEN_NAME && rfi_has_word(ends, p->token->text)) break;
      add(p, n, statement(p));
      expect(p, RFI_TOKEN_BLOCK_END, "\"%}\"");
    }
  }
  p->nesting--;
  return n;
}

/* Copies the source with "\n" as line ends and without the last one, as jinja2 does. */
static rfr_status copy_source(rfi_template *t, const char *text, size_t n) {
  char *copy = rfi_arena_alloc(t->arena, n + 1);
  if (!copy) return rfr_last_error()->status;
  for (size_t i = 0; i < n; i++) {
    if (text[i] == '\r' && i + 1 < n && text[i + 1] == '\n') continue;
    copy[t->n++] = text[i] == '\r' ? '\n' : text[i];
  }
  if (t->n > 0 && copy[t->n - 1] == '\n') t->n--;
  copy[t->n] = 0;
  t->source = copy;
  const size_t bad = rfi_utf8_valid(copy, t->n);
  if (bad < t->n) return rfi_template_fail(t, RFI_E_TEMPLATE_SYNTAX, (uint32_t)bad, "the template is not UTF-8");
  return RFR_OK;
}

rfr_status rfi_template_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, rfi_template **out) {
  rfr_status s;
  rfi_template *t = NULL;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *t, &t));
  t->ctx = ctx;
  RFI_GOTO(rfi_arena_create(ctx, &t->arena));
  if (!(t->name = rfi_arena_strdup(t->arena, name))) RFI_GOTO(rfr_last_error()->status);
  if (n > RFI_TEMPLATE_BYTES)
    RFI_GOTO(
        rfi_fail_at(RFI_E_TEMPLATE_SYNTAX, name, 0, "a template of %zu bytes; the limit is %d", n, RFI_TEMPLATE_BYTES));
  RFI_GOTO(copy_source(t, text, n));
  RFI_GOTO(rfi_template_lex(t));
  if (!rfi_arena_grow(t->arena, (void **)&t->tokens, &t->capacity, t->n_tokens + 2, sizeof *t->tokens))
    RFI_GOTO(rfr_last_error()->status);
  /* two end tokens, so that every other token has a successor */
  for (int i = 0; i < 2; i++) t->tokens[t->n_tokens + i] = (rfi_ttoken){.type = RFI_TOKEN_EOF, .at = (uint32_t)t->n};
  parser p = {.t = t, .token = t->tokens, .status = RFR_OK};
  static const char *const first[] = {"varargs", "kwargs", "caller", "loop"};
  for (int i = 0; i < 4; i++) symbol_of(&p, first[i]);
  t->root = body_until(&p, NULL);
  RFI_GOTO(p.status);
  RFI_GOTO(rfi_template_scopes(t));
  *out = t;
  return RFR_OK;
fail:
  rfi_template_destroy(t);
  return s;
}

void rfi_template_destroy(rfi_template *t) {
  if (!t) return;
  rfr_ctx *ctx = t->ctx;
  rfi_arena_destroy(t->arena);
  rfi_free(ctx, t);
}
