/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads the flat form that print.c writes. The text is untrusted: the length of the text bounds every count, and memory
 * is linear in it. Each op is appended like a recorded op (rfi_append). This infers its types and storage, which must
 * equal the printed ones. Errors name file:line.
 */
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "trace/print.h"
#include "trace/trace.h"

typedef struct parser {
  const char *name;
  const char *p, *end; /* rest of the current line, without comment */
  int line;
  rfr_trace *t;
  double list[RFR_MAX_LIST]; /* of the current op; an op has at most one */
} parser;

static rfr_status bad(const parser *q, const char *what) {
  int n = (int)(q->end - q->p);
  return rfi_fail_at(RFI_E_TRACE_PARSE, q->name, q->line, "%s at \"%.*s\"", what, n > 24 ? 24 : n, q->p);
}

static void skip_space(parser *q) {
  while (q->p < q->end && *q->p == ' ') q->p++;
}

static bool take(parser *q, const char *word) {
  size_t n = strlen(word);
  if ((size_t)(q->end - q->p) < n || memcmp(q->p, word, n) != 0) return false;
  q->p += n;
  return true;
}

static rfr_status take_int(parser *q, int64_t *out) {
  char digits[24], *end;
  size_t n = 0;
  while (q->p + n < q->end && n < sizeof digits - 1 && (isdigit((unsigned char)q->p[n]) || (n == 0 && q->p[n] == '-')))
    n++;
  memcpy(digits, q->p, n);
  digits[n] = 0;
  errno = 0;
  *out = strtoll(digits, &end, 10);
  if (n == 0 || *end || errno) return bad(q, "expected an integer");
  q->p += n;
  return RFR_OK;
}

static rfr_status take_int32(parser *q, int32_t *out) {
  int64_t i;
  RFI_TRY(take_int(q, &i));
  if (i < INT32_MIN || i > INT32_MAX) return bad(q, "number out of range before");
  *out = (int32_t)i;
  return RFR_OK;
}

static size_t word_length(const parser *q) {
  size_t n = 0;
  while (q->p + n < q->end && (isalnum((unsigned char)q->p[n]) || q->p[n] == '_')) n++;
  return n;
}

static int hex_digit(int c) { return isdigit(c) ? c - '0' : isxdigit(c) ? tolower(c) - 'a' + 10 : -1; }

static rfr_status take_quoted(parser *q, const char **out) {
  if (!take(q, "\"")) return bad(q, "expected a quoted text");
  size_t n = 0; /* up to the closing quote, so that many texts on one line take linear memory */
  while (q->p + n < q->end && q->p[n] != '"') n += q->p[n] == '\\' ? 2 : 1;
  char *text = rfi_arena_alloc(q->t->arena, n + 1);
  if (!text) return RFR_NO_MEMORY;
  char *w = text;
  for (; q->p < q->end && *q->p != '"'; q->p++) {
    if (*q->p != '\\') {
      *w++ = *q->p;
    } else if (q->end - q->p > 1 && (q->p[1] == '"' || q->p[1] == '\\')) {
      *w++ = *++q->p;
    } else if (q->end - q->p > 3 && q->p[1] == 'x' && hex_digit(q->p[2]) >= 0 && hex_digit(q->p[3]) >= 0 &&
               (q->p[2] != '0' || q->p[3] != '0')) {
      *w++ = (char)(hex_digit(q->p[2]) * 16 + hex_digit(q->p[3]));
      q->p += 3;
    } else {
      return bad(q, "bad escape");
    }
  }
  if (!take(q, "\"")) return bad(q, "missing closing quote");
  *out = text;
  return RFR_OK;
}

/* The index in a table of names of the word at the cursor. */
static int take_name(parser *q, const char *(*name)(int), int count) {
  size_t n = word_length(q);
  for (int i = 0; i < count; i++)
    if (strlen(name(i)) == n && memcmp(name(i), q->p, n) == 0) {
      q->p += n;
      return i;
    }
  return -1;
}
static const char *dtype_name(int i) { return rfr_dtype_name((rfr_dtype)i); }

static rfr_status take_dims(parser *q, char open, char close, int64_t *dim, int *rank) {
  const char brackets[] = {open, 0, close, 0};
  *rank = 0;
  if (!take(q, brackets)) return bad(q, "expected a shape");
  while (!take(q, brackets + 2)) {
    if (*rank == RFR_MAX_RANK) return bad(q, "too many dimensions");
    if (*rank && !take(q, ",")) return bad(q, "expected , between dimensions");
    RFI_TRY(take_int(q, &dim[(*rank)++]));
  }
  return RFR_OK;
}

static rfr_status take_type(parser *q, rfr_type *type) {
  memset(type, 0, sizeof *type);
  int dtype = take_name(q, dtype_name, RFR_DTYPE_COUNT);
  if (dtype < 0) return bad(q, "unknown element type");
  type->dtype = (rfr_dtype)dtype;
  return take_dims(q, '[', ']', type->shape, &type->rank);
}

static rfr_status take_id(parser *q, rfr_value *v) {
  if (!take(q, "%")) return bad(q, "expected a value");
  RFI_TRY(take_int32(q, v));
  return *v >= 0 ? RFR_OK : bad(q, "bad value id before");
}

static rfr_status take_source(parser *q, rfr_source *at) {
  skip_space(q);
  *at = (rfr_source){NULL, 0};
  if (!take(q, "at ")) return RFR_OK;
  RFI_TRY(take_quoted(q, &at->file));
  if (!take(q, ":")) return bad(q, "expected :line");
  int32_t line;
  RFI_TRY(take_int32(q, &line));
  at->line = line;
  if (!*at->file) *at = (rfr_source){NULL, 0}; /* without a file there is no source, and print.c writes none */
  return RFR_OK;
}

static rfr_status at_end(parser *q) {
  skip_space(q);
  return q->p == q->end ? RFR_OK : bad(q, "unexpected text");
}

static rfr_status parse_input(parser *q) {
  rfr_value id;
  const char *name;
  rfr_type type;
  rfr_source at;
  RFI_TRY(take_id(q, &id));
  skip_space(q);
  RFI_TRY(take_quoted(q, &name));
  skip_space(q);
  int role = take_name(q, rfi_role_name, RFR_ROLE_CONST + 1);
  if (role < 0) return bad(q, "unknown role");
  skip_space(q);
  RFI_TRY(take_type(q, &type));
  RFI_TRY(take_source(q, &at));
  RFI_TRY(at_end(q));
  if (id != q->t->n_values) return bad(q, "values must be numbered in order; before");
  rfr_input_at(q->t, at, name, (rfr_role)role, type.dtype, type.rank, type.shape);
  return rfr_trace_status(q->t);
}

/* A printed result, to be compared with the inferred one. */
typedef struct claim {
  rfr_value id;
  const char *name;
  rfr_type type;
  rfr_value base;
  bool strided;
  int64_t offset;
  int64_t stride[RFR_MAX_RANK];
} claim;

static rfr_status parse_claim(parser *q, claim *c) {
  *c = (claim){.id = RFR_NONE, .name = ""};
  if (take(q, "_")) return RFR_OK;
  RFI_TRY(take_id(q, &c->id));
  skip_space(q);
  if (q->p < q->end && *q->p == '"') RFI_TRY(take_quoted(q, &c->name));
  skip_space(q);
  RFI_TRY(take_type(q, &c->type));
  c->base = c->id;
  if (!take(q, "@")) return RFR_OK;
  RFI_TRY(take_id(q, &c->base));
  if (!take(q, "+")) return RFR_OK;
  int rank;
  c->strided = true;
  RFI_TRY(take_int(q, &c->offset));
  RFI_TRY(take_dims(q, '{', '}', c->stride, &rank));
  return rank == c->type.rank ? RFR_OK : bad(q, "expected one stride per dimension before");
}

static rfr_status take_double(parser *q, double *x) {
  char number[40], *end;
  size_t n = 0; /* the text has no terminating NUL */
  while (q->p + n < q->end && !strchr(" ,]", q->p[n])) n++;
  if (n >= sizeof number) return bad(q, "expected a number");
  memcpy(number, q->p, n);
  number[n] = 0;
  *x = rfi_strtod(number, &end);
  if (n == 0 || *end) return bad(q, "expected a number");
  q->p += n;
  return RFR_OK;
}

static rfr_status take_list(parser *q, int64_t *n) {
  *n = 0;
  if (!take(q, "[")) return bad(q, "expected a list");
  while (!take(q, "]")) {
    if (*n == RFR_MAX_LIST) return bad(q, "too many numbers");
    if (*n && !take(q, ",")) return bad(q, "expected , between numbers");
    RFI_TRY(take_double(q, &q->list[(*n)++]));
  }
  return RFR_OK;
}

static rfr_status parse_attr(parser *q, char type, rfi_attr *a) {
  memset(a, 0, sizeof *a);
  if (type == 's') return take_dims(q, '[', ']', a->s.dim, &a->s.rank);
  if (type == 't') {
    int dtype = take_name(q, dtype_name, RFR_DTYPE_COUNT);
    a->i = dtype;
    return dtype < 0 ? bad(q, "unknown element type") : RFR_OK;
  }
  if (type == 'l') {
    a->l.x = q->list;
    return take_list(q, &a->l.n);
  }
  return type == 'f' ? take_double(q, &a->f) : take_int(q, &a->i);
}

static rfr_status parse_recipe(parser *q, uint8_t *recipe) {
  const char *text;
  RFI_TRY(take_quoted(q, &text));
  const rfr_status s = rfi_recipe_parse(q->t, text, recipe);
  return s == RFR_OK || s == RFR_NO_MEMORY ? s : bad(q, "unknown recipe before");
}

/* key=value pairs after the operands */
static rfr_status parse_pairs(parser *q, rfi_opr *op, rfi_attr *attr, int32_t *token) {
  enum { PHASE, MB, TOKEN, CLONE_OF, POLICY, SCOPE, LINEAR, RECIPE, EFFECTS, LABELS };
  static const char *const labels[LABELS] = {"phase", "mb",     "token",  "clone_of", "policy",
                                             "scope", "linear", "recipe", "effects"};
  unsigned seen = 0;
  op->phase = 255;
  op->microbatch = op->clone_of = *token = -1;
  op->scope = op->reason = "";
  for (;;) {
    skip_space(q);
    size_t n = word_length(q);
    if (n == 0 || q->p + n >= q->end || q->p[n] != '=') break;
    const char *key = q->p;
    int a = 0, label = 0;
    while (a < op->def->n_attrs && !(strlen(op->def->attr[a]) == n && memcmp(op->def->attr[a], key, n) == 0)) a++;
    while (label < LABELS && !(strlen(labels[label]) == n && memcmp(labels[label], key, n) == 0)) label++;
    if (a == op->def->n_attrs && label == LABELS) return bad(q, "unknown attribute");
    const unsigned bit = 1u << (a < op->def->n_attrs ? a : RFI_MAX_ATTR + label);
    if (seen & bit) return bad(q, "attribute or label given twice");
    seen |= bit;
    q->p += n + 1;
    if (a < op->def->n_attrs) {
      RFI_TRY(parse_attr(q, op->def->attr_type[a], &attr[a]));
    } else if (label == PHASE) {
      int phase = take_name(q, rfi_phase_name, RFR_PHASE_OPTIM + 1);
      if (phase < 0) return bad(q, "unknown phase");
      op->phase = (uint8_t)phase;
    } else if (label == MB) {
      RFI_TRY(take_int32(q, &op->microbatch));
      if (op->microbatch < -1 || op->microbatch > RFI_MAX_MICROBATCH) return bad(q, "microbatch out of range before");
    } else if (label == TOKEN) {
      RFI_TRY(take_int32(q, token));
    } else if (label == CLONE_OF) {
      RFI_TRY(take_int32(q, &op->clone_of));
    } else if (label == POLICY) {
      int policy = take_name(q, rfi_policy_name, RFR_POLICY_RECOMPUTE + 1);
      if (policy < 0) return bad(q, "unknown policy");
      op->policy = (uint8_t)policy;
    } else if (label == SCOPE) {
      RFI_TRY(take_quoted(q, &op->scope));
    } else if (label == LINEAR) {
      RFI_TRY(take_int32(q, &op->label.linear));
      if (op->label.linear < 0) return bad(q, "a linear's number is 0 or more, before");
    } else if (label == RECIPE) {
      RFI_TRY(parse_recipe(q, &op->label.recipe));
    } else {
      const bool collective = take(q, "collective");
      bool state = take(q, "state"), host = state ? take(q, ",host") : take(q, "host");
      if (state != !!(op->def->flags & RFI_STATE) || host != !!(op->def->flags & RFI_HOST) ||
          collective != !!(op->def->flags & RFI_COLLECTIVE))
        return bad(q, "effects differ from those of the op, before");
    }
  }
  const unsigned attributes = (1u << op->def->n_attrs) - 1;
  if ((seen & attributes) != attributes) return bad(q, "an attribute is missing before");
  const unsigned both = 1u << (RFI_MAX_ATTR + LINEAR) | 1u << (RFI_MAX_ATTR + RECIPE);
  if ((seen & both) != 0 && ((seen & both) != both || !rfi_takes_recipe(op->def)))
    return bad(q, "linear and recipe are labels of GEMMs and come together, before");
  return op->phase == 255 ? bad(q, "phase is missing before") : RFR_OK;
}

static rfr_status check_claim(parser *q, const claim *c, rfr_value v) {
  if ((v < 0) != (c->id < 0)) return bad(q, "a result is _ but should have a value, or vice versa");
  if (v < 0) return RFR_OK;
  rfi_value *y = &q->t->values[v];
  if (c->id != v) return bad(q, "values must be numbered in order");
  if (memcmp(&c->type, &y->type, sizeof c->type) != 0) return bad(q, "the result type differs from the inferred one");
  bool strided = y->base != v && (y->offset || !rfi_is_dense(y));
  if (c->base != y->base || c->strided != strided || (strided && c->offset != y->offset) ||
      (strided && memcmp(c->stride, y->stride, sizeof *c->stride * (size_t)y->type.rank) != 0))
    return bad(q, "the result's storage differs from the inferred one");
  y->name = c->name;
  return RFR_OK;
}

static rfr_status parse_op(parser *q) {
  claim claims[RFI_MAX_NAMES];
  bool dead[RFI_MAX_NAMES] = {false};
  int n_claims = 0;
  do {
    skip_space(q);
    if (n_claims == RFI_MAX_NAMES) return bad(q, "too many results");
    RFI_TRY(parse_claim(q, &claims[n_claims]));
    dead[n_claims] = claims[n_claims].id < 0;
    n_claims++;
  } while (take(q, ","));
  skip_space(q);
  if (!take(q, "= ")) return bad(q, "expected =");
  size_t n = (size_t)(q->end - q->p);
  const char *open = memchr(q->p, '(', n); /* names of registered ops have dots */
  if (open) n = (size_t)(open - q->p);
  rfi_opr op = {.def = rfi_op_def_find(q->t->ctx, q->p, n)};
  if (!op.def) return bad(q, "unknown op");
  q->p += n;
  if (n_claims != op.def->n_results) return bad(q, "wrong number of results before");
  if (!take(q, "(")) return bad(q, "expected (");
  /* an operand has at least two characters */
  op.in = rfi_arena_alloc(q->t->arena, sizeof *op.in * (size_t)(q->end - q->p + 1));
  if (!op.in) return RFR_NO_MEMORY;
  while (!take(q, ")")) {
    if (op.n_in && !take(q, ", ")) return bad(q, "expected , between operands");
    if (take(q, "_")) op.in[op.n_in++] = RFR_NONE;
    else RFI_TRY(take_id(q, &op.in[op.n_in++]));
  }
  int32_t token;
  rfi_attr attr[RFI_MAX_ATTR];
  op.attr = attr;
  RFI_TRY(parse_pairs(q, &op, attr, &token));
  RFI_TRY(take_source(q, &op.at));
  RFI_TRY(at_end(q));
  if (op.clone_of >= q->t->n_ops || op.clone_of < -1) return bad(q, "clone_of must name an earlier op");
  rfr_value out[RFI_MAX_NAMES];
  rfr_status s = rfi_append(q->t, &op, dead, out);
  if (s == RFR_NO_MEMORY) return s;
  if (s != RFR_OK) {
    rfr_error e = *rfr_last_error();
    char text[300];
    rfi_snprintf(text, sizeof text, "%s", e.message);
    return rfi_fail_at(RFI_E_TRACE_PARSE, q->name, q->line, "%s: %s", op.def->name, text);
  }
  if (q->t->ops[q->t->n_ops - 1].token_in != token) return bad(q, "token must name the previous op of its chain");
  for (int j = 0; j < n_claims; j++) RFI_TRY(check_claim(q, &claims[j], out[j]));
  return RFR_OK;
}

static rfr_status parse_output(parser *q) {
  const char *name;
  rfr_value v;
  RFI_TRY(take_quoted(q, &name));
  skip_space(q);
  RFI_TRY(take_id(q, &v));
  RFI_TRY(at_end(q));
  rfr_output_at(q->t, (rfr_source){q->name, q->line}, name, v);
  return rfr_trace_status(q->t);
}

static rfr_status parse_line(parser *q) {
  skip_space(q);
  if (q->p == q->end) return RFR_OK;
  if (take(q, "input ")) return parse_input(q);
  if (take(q, "output ")) return parse_output(q);
  return parse_op(q);
}

/* A ';' outside quotes starts a comment. */
static const char *code_end(const char *p, const char *end) {
  bool quoted = false;
  for (; p < end; p++) {
    if (quoted && *p == '\\' && p + 1 < end) p++;
    else if (*p == '"') quoted = !quoted;
    else if (*p == ';' && !quoted) break;
  }
  return p;
}

rfr_status rfr_trace_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, rfr_trace **out) {
  static const char header[] = "refrain-trace 1";
  rfr_status s;
  parser q = {.name = name ? name : "trace"};
  RFI_TRY(RFI_CHECK_OUT(out, "out"));
  if (n > 0) RFI_TRY(rfi_check_handle(text, "text"));
  RFI_TRY(rfr_trace_create(ctx, &q.t));
  const char *p = text, *end = text + n;
  for (q.line = 1; p < end; q.line++) {
    const char *newline = memchr(p, '\n', (size_t)(end - p));
    if (!newline) newline = end;
    q.p = p;
    q.end = code_end(p, newline);
    while (q.end > q.p && q.end[-1] == ' ') q.end--;
    if (memchr(q.p, 0, (size_t)(q.end - q.p))) RFI_GOTO(bad(&q, "a NUL byte"));
    if (q.line == 1) {
      if (!take(&q, header) || q.p != q.end) RFI_GOTO(bad(&q, "expected \"refrain-trace 1\""));
    } else {
      RFI_GOTO(parse_line(&q));
    }
    p = newline < end ? newline + 1 : end;
  }
  if (q.line == 1) RFI_GOTO(rfi_fail_at(RFI_E_TRACE_PARSE, q.name, 1, "the text is empty"));
  RFI_GOTO(rfr_trace_finish(q.t));
  *out = q.t;
  return RFR_OK;
fail:
  rfr_trace_destroy(q.t);
  return s;
}
