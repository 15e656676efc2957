/* SPDX-License-Identifier: Apache-2.0
 *
 * The parser of cases; op_case.h describes them. Each piece is parsed where it occurs, and a comma after a list of
 * integers belongs to the list if and only if a number follows.
 */
#include "support/op_case.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

typedef struct reader {
  const char *s;
  rfr_dtype under_test;
  rft_case *c;
  const char *error;
} reader;

static void skip(reader *r) {
  while (*r->s == ' ') r->s++;
}
static bool take(reader *r, char want) {
  skip(r);
  if (*r->s != want) return false;
  r->s++;
  return true;
}
static bool fail(reader *r, const char *error) {
  if (!r->error) r->error = error;
  return false;
}
static int64_t integer(reader *r) {
  char *end;
  int64_t x = strtoll(r->s, &end, 10);
  if (end == r->s) fail(r, "expected an integer");
  r->s = end;
  return x;
}
static double number(reader *r) {
  char *end;
  double x = rfi_strtod(r->s, &end);
  if (end == r->s) fail(r, "expected a number");
  r->s = end;
  return x;
}

static bool dims(reader *r, int *rank, int64_t *dim) {
  if (!take(r, '[')) return fail(r, "expected [");
  *rank = 0;
  for (skip(r); *r->s != ']' && !r->error; skip(r)) {
    if (*rank == RFR_MAX_RANK) return fail(r, "too many dimensions");
    dim[(*rank)++] = integer(r);
    if (!take(r, ',')) break;
  }
  return take(r, ']') || fail(r, "expected ]");
}

static bool list(reader *r, rft_operand *o) {
  do {
    skip(r);
    if (o->n_list == RFT_MAX_LIST) return fail(r, "too many given values");
    o->list[o->n_list++] = o->kind == 'D' ? number(r) : (double)integer(r);
    if (*r->s != ',') break;
    const char *after = r->s + 1 + strspn(r->s + 1, " ");
    if (!isdigit((unsigned char)*after) && *after != '-') break;
    r->s = after;
  } while (!r->error);
  if (o->n_list != 1 && o->n_list != rfi_count(&o->type)) return fail(r, "as many values as elements, or one");
  return !r->error;
}

static bool operand(reader *r, rft_operand *o) {
  *o = (rft_operand){.kind = *r->s++, .type = {.rank = -1}};
  if (o->kind == '_') return true;
  switch (o->kind) {
    case 'f':
      o->type.dtype = r->under_test;
      r->c->varies = true;
      break;
    case 'F': o->type.dtype = RFR_F32; break;
    case 'h': o->type.dtype = RFR_BF16; break;
    case 'e': o->type.dtype = RFR_E4M3; break;
    case 'g': o->type.dtype = RFR_E5M2; break;
    case 'p': o->type.dtype = RFR_E8M0; break;
    case 'b': o->type.dtype = RFR_U8; break;
    case 'D': o->type.dtype = RFR_F64; break;
    case 'i': o->type.dtype = RFR_I32; break;
    case 'I': o->type.dtype = RFR_I64; break;
    default: return fail(r, "an operand starts with one of f F h e g p D i I b _");
  }
  if (!dims(r, &o->type.rank, o->type.shape)) return false;
  bool is_float = strchr("fFhegpD", o->kind);
  for (;;) {
    if (*r->s == '<') {
      r->s++;
      o->below = integer(r);
    } else if (*r->s == '>') {
      r->s++;
      if (integer(r) != 0) return fail(r, "only >0 is known");
      o->positive = true;
    } else if (*r->s == '=' && is_float && o->kind != 'D') {
      r->s++;
      o->constant = true;
      o->value = number(r);
    } else if (*r->s == '=') {
      r->s++;
      if (!list(r, o)) return false;
    } else if (*r->s == '@' && is_float) {
      r->s++;
      o->has_row = true;
      o->row = integer(r);
      if (!take(r, '=')) return fail(r, "expected =");
      o->row_value = strncmp(r->s, "inf", 3) == 0 ? (double)INFINITY : (double)NAN;
      if (strncmp(r->s, "inf", 3) != 0 && strncmp(r->s, "nan", 3) != 0) return fail(r, "a row is nan or inf");
      r->s += 3;
    } else if (strncmp(r->s, "^T", 2) == 0) {
      r->s += 2;
      o->layout = RFT_TRANSPOSED;
    } else if (strncmp(r->s, "/2", 2) == 0) {
      r->s += 2;
      o->layout = RFT_EVERY2;
    } else {
      break;
    }
  }
  if (!is_float && o->below < 1 && o->n_list == 0) return fail(r, "integers need <N or a list");
  return !r->error;
}

static bool attribute(reader *r) {
  const rfi_op_def *def = r->c->def;
  size_t n = strcspn(r->s, "= ");
  int a = 0;
  while (a < def->n_attrs && !(strlen(def->attr[a]) == n && memcmp(def->attr[a], r->s, n) == 0)) a++;
  if (a == def->n_attrs || r->s[n] != '=') return fail(r, "unknown attribute");
  r->s += n + 1;
  rfi_attr *v = &r->c->attr[a];
  if (def->attr_type[a] == 'f') {
    v->f = number(r);
  } else if (def->attr_type[a] == 'l') {
    v->l = (rfr_list){0, r->c->numbers};
    if (!take(r, '[')) return fail(r, "expected a list");
    do r->c->numbers[v->l.n++] = number(r);
    while (!r->error && v->l.n < (int64_t)(sizeof r->c->numbers / sizeof *r->c->numbers) && take(r, ','));
    if (!take(r, ']')) return fail(r, "expected ]");
  } else if (def->attr_type[a] == 's') {
    return dims(r, &v->s.rank, v->s.dim);
  } else if (def->attr_type[a] == 't') {
    char name[16] = "";
    n = strcspn(r->s, " ");
    if (n < sizeof name) memcpy(name, r->s, n);
    r->s += n;
    bool tested = strcmp(name, "f") == 0;
    r->c->varies |= tested;
    v->i = tested ? r->under_test : rfr_dtype_parse(name);
    if (v->i == RFR_DTYPE_COUNT) return fail(r, "unknown type");
  } else {
    v->i = integer(r);
  }
  return !r->error;
}

static bool read_case(reader *r) {
  rft_case *c = r->c;
  size_t n = strcspn(r->s, "(");
  c->def = rfi_op_def_find(NULL, r->s, n);
  if (!c->def) return fail(r, "no such op");
  r->s += n;
  if (!take(r, '(')) return fail(r, "expected (");
  for (skip(r); *r->s != ')'; skip(r)) {
    if (c->n_in == RFT_MAX_IN) return fail(r, "too many operands");
    if (!operand(r, &c->in[c->n_in++])) return false;
    if (!take(r, ',')) break;
  }
  if (!take(r, ')')) return fail(r, "expected )");
  for (skip(r); *r->s; skip(r)) {
    if (strncmp(r->s, "@mb=", 4) == 0) {
      r->s += 4;
      c->microbatch = (int32_t)integer(r);
      if (r->error) return false;
    } else if (!attribute(r)) {
      return false;
    }
  }
  return true;
}

const char *rft_case_parse(const char *text, rfr_dtype under_test, rft_case *out) {
  *out = (rft_case){.text = text, .key = 14695981039346656037u, .microbatch = -1};
  for (const char *s = text; *s; s++) out->key = (out->key ^ (unsigned char)*s) * 1099511628211u;
  reader r = {.s = text, .under_test = under_test, .c = out};
  if (!read_case(&r)) return r.error;
  const rfi_op_def *def = out->def;
  if (!def->infer) return "the op has no shape rule";
  int named = def->n_operands - def->variadic;
  if (out->n_in < def->n_required || (out->n_in > def->n_operands && !def->variadic)) return "wrong number of operands";
  for (; out->n_in < named; out->n_in++) out->in[out->n_in] = (rft_operand){.kind = '_', .type = {.rank = -1}};
  rfr_type in[RFT_MAX_IN];
  for (int i = 0; i < out->n_in; i++) {
    in[i] = out->in[i].type;
    if (in[i].rank < 0 && !(i < named && def->optional[i])) return "an operand that must be there is absent";
  }
  rfi_infer infer = {def, out->n_in, in, out->attr, out->out};
  if (def->infer(&infer) != RFR_OK) return rfr_last_error()->message;
  return NULL;
}
