/* SPDX-License-Identifier: Apache-2.0
 *
 * Printing. The flat form is a file format: one line per input, op and output, with
 * everything that parse.c reads back; text after ';' is comment. The form for humans uses names, omits redundant
 * fields, and shows consecutive layers that differ only in their number as one.
 *
 *   refrain-trace 1
 *   input %0 "x" input f32[8,64] at "model.c":12
 *   %2 f32[8,64], %3 f32[8] = rmsnorm(%0, %1) eps=1e-05 phase=forward at "model.c":14 ; live 2.0 KiB
 *   output "y" %2
 */
#include "trace/print.h"

#include <ctype.h>
#include <inttypes.h>
#include <string.h>

#include "base/base.h"
#include "trace/live.h"

static const char *const role_names[] = {
#define X(e, name) name,
    RFR_ROLES(X)
#undef X
};
static const char *const phase_names[] = {
#define X(e, name) name,
    RFR_PHASES(X)
#undef X
};
static const char *const policy_names[] = {
#define X(e, name) name,
    RFR_POLICIES(X)
#undef X
};
const char *rfi_policy_name(int policy) { return policy_names[policy]; }
const char *rfi_role_name(int role) { return role_names[role]; }
const char *rfi_phase_name(int phase) { return phase_names[phase]; }

static rfr_status put_quoted(rfi_string *s, const char *text) {
  RFI_TRY(rfi_string_append(s, "\"", 1));
  for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
    if (*c == '"' || *c == '\\') RFI_TRY(rfi_string_printf(s, "\\%c", *c));
    else if (*c < 0x20 || *c == 0x7f) RFI_TRY(rfi_string_printf(s, "\\x%02x", *c));
    else RFI_TRY(rfi_string_append(s, (const char *)c, 1));
  }
  return rfi_string_append(s, "\"", 1);
}

static rfr_status put_type(rfi_string *s, const rfr_type *t) {
  RFI_TRY(rfi_string_printf(s, "%s[", rfr_dtype_name(t->dtype)));
  for (int d = 0; d < t->rank; d++) RFI_TRY(rfi_string_printf(s, d ? ",%" PRId64 : "%" PRId64, t->shape[d]));
  return rfi_string_append(s, "]", 1);
}

rfr_status rfi_put_bytes(rfi_string *s, int64_t bytes) {
  static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int64_t magnitude = bytes < 0 ? -bytes : bytes, tenths = magnitude * 10;
  int u = 0;
  while (tenths >= 10240 && u < 4) tenths = (tenths + 512) / 1024, u++;
  if (u == 0) return rfi_string_printf(s, "%" PRId64 " B", bytes);
  return rfi_string_printf(s, "%s%" PRId64 ".%" PRId64 " %s", bytes < 0 ? "-" : "", tenths / 10, tenths % 10, unit[u]);
}

static rfr_status put_attrs(rfi_string *s, const rfi_opr *op) {
  char number[32];
  for (int i = 0; i < op->def->n_attrs; i++) {
    RFI_TRY(rfi_string_printf(s, " %s=", op->def->attr[i]));
    switch (op->def->attr_type[i]) {
      case 'f': RFI_TRY(rfi_string_printf(s, "%s", rfi_format_double(number, op->attr[i].f))); break;
      case 't': RFI_TRY(rfi_string_printf(s, "%s", rfr_dtype_name((rfr_dtype)op->attr[i].i))); break;
      case 's':
        RFI_TRY(rfi_string_append(s, "[", 1));
        for (int d = 0; d < op->attr[i].s.rank; d++)
          RFI_TRY(rfi_string_printf(s, d ? ",%" PRId64 : "%" PRId64, op->attr[i].s.dim[d]));
        RFI_TRY(rfi_string_append(s, "]", 1));
        break;
      case 'l':
        for (int64_t k = 0; k < op->attr[i].l.n; k++)
          RFI_TRY(rfi_string_printf(s, "%c%s", k ? ',' : '[', rfi_format_double(number, op->attr[i].l.x[k])));
        RFI_TRY(rfi_string_printf(s, op->attr[i].l.n ? "]" : "[]"));
        break;
      default: RFI_TRY(rfi_string_printf(s, "%" PRId64, op->attr[i].i));
    }
  }
  return RFR_OK;
}

/* The value that a clone recomputes. Ids change from pass to pass, so this text is not stored. */
static rfr_status put_origin(rfi_string *s, const rfr_trace *t, const rfi_opr *op, const char *before) {
  if (op->clone_of < 0) return RFR_OK;
  const rfi_opr *original = &t->ops[op->clone_of];
  for (int j = 0; j < op->n_out && j < original->n_out; j++)
    if (op->out[j] >= 0 && original->out[j] >= 0)
      return rfi_string_printf(s, "%srecompute of %%%d", before, original->out[j]);
  return rfi_string_printf(s, "%srecompute of op %d", before, op->clone_of);
}

/* ---- the flat form ---- */

static rfr_status put_at(rfi_string *s, rfr_source at) {
  if (!at.file || !at.file[0]) return RFR_OK;
  RFI_TRY(rfi_string_printf(s, " at "));
  RFI_TRY(put_quoted(s, at.file));
  return rfi_string_printf(s, ":%d", at.line);
}

static rfr_status put_result(rfi_string *s, const rfr_trace *t, rfr_value v) {
  const rfi_value *x = &t->values[v];
  RFI_TRY(rfi_string_printf(s, "%%%d", v));
  if (x->name[0]) {
    RFI_TRY(rfi_string_append(s, " ", 1));
    RFI_TRY(put_quoted(s, x->name));
  }
  RFI_TRY(rfi_string_append(s, " ", 1));
  RFI_TRY(put_type(s, &x->type));
  if (x->base == v) return RFR_OK;
  RFI_TRY(rfi_string_printf(s, "@%%%d", x->base));
  if (x->offset || !rfi_is_dense(x)) {
    RFI_TRY(rfi_string_printf(s, "+%" PRId64 "{", x->offset));
    for (int d = 0; d < x->type.rank; d++) RFI_TRY(rfi_string_printf(s, d ? ",%" PRId64 : "%" PRId64, x->stride[d]));
    RFI_TRY(rfi_string_append(s, "}", 1));
  }
  return RFR_OK;
}

static rfr_status put_input(rfi_string *s, const rfr_trace *t, rfr_value v) {
  const rfi_value *x = &t->values[v];
  RFI_TRY(rfi_string_printf(s, "input %%%d ", v));
  RFI_TRY(put_quoted(s, x->name));
  RFI_TRY(rfi_string_printf(s, " %s ", role_names[x->role]));
  RFI_TRY(put_type(s, &x->type));
  RFI_TRY(put_at(s, x->at));
  return rfi_string_append(s, "\n", 1);
}

static rfr_status put_op(rfi_string *s, const rfr_trace *t, int i, int64_t live) {
  const rfi_opr *op = &t->ops[i];
  for (int j = 0; j < op->n_out; j++) {
    if (j) RFI_TRY(rfi_string_append(s, ", ", 2));
    if (op->out[j] < 0) RFI_TRY(rfi_string_append(s, "_", 1));
    else RFI_TRY(put_result(s, t, op->out[j]));
  }
  RFI_TRY(rfi_string_printf(s, " = %s(", op->def->name));
  for (int k = 0; k < op->n_in; k++) {
    if (k) RFI_TRY(rfi_string_append(s, ", ", 2));
    if (op->in[k] < 0) RFI_TRY(rfi_string_append(s, "_", 1));
    else RFI_TRY(rfi_string_printf(s, "%%%d", op->in[k]));
  }
  RFI_TRY(rfi_string_append(s, ")", 1));
  RFI_TRY(put_attrs(s, op));
  RFI_TRY(rfi_string_printf(s, " phase=%s", phase_names[op->phase]));
  if (op->microbatch >= 0) RFI_TRY(rfi_string_printf(s, " mb=%d", op->microbatch));
  if (op->def->flags & (RFI_STATE | RFI_HOST | RFI_COLLECTIVE))
    RFI_TRY(rfi_string_printf(s, " effects=%s",
                              op->def->flags & RFI_COLLECTIVE ? "collective"
                              : !(op->def->flags & RFI_HOST)  ? "state"
                              : op->def->flags & RFI_STATE    ? "state,host"
                                                              : "host"));
  if (op->token_in >= 0) RFI_TRY(rfi_string_printf(s, " token=%d", op->token_in));
  if (op->clone_of >= 0) RFI_TRY(rfi_string_printf(s, " clone_of=%d", op->clone_of));
  if (op->policy != RFR_POLICY_AUTO) RFI_TRY(rfi_string_printf(s, " policy=%s", policy_names[op->policy]));
  if (op->label.recipe) {
    char recipe[RFI_RECIPE_TEXT];
    RFI_TRY(rfi_string_printf(s, " linear=%d recipe=\"%s\"", op->label.linear, rfi_recipe_text(t, op->label, recipe)));
  }
  if (op->scope[0]) {
    RFI_TRY(rfi_string_printf(s, " scope="));
    RFI_TRY(put_quoted(s, op->scope));
  }
  RFI_TRY(put_at(s, op->at));
  if (live >= 0 || op->reason[0] || op->clone_of >= 0) {
    RFI_TRY(rfi_string_append(s, " ;", 2));
    if (live >= 0) {
      RFI_TRY(rfi_string_append(s, " live ", 6));
      RFI_TRY(rfi_put_bytes(s, live));
    }
    RFI_TRY(put_origin(s, t, op, live >= 0 ? ", " : " "));
    if (op->reason[0]) {
      /* a comment is one line, also if a reason has line breaks */
      RFI_TRY(rfi_string_printf(s, "%s ", live >= 0 || op->clone_of >= 0 ? "," : ""));
      for (const char *c = op->reason; *c; c++) RFI_TRY(rfi_string_append(s, *c == '\n' ? " " : c, 1));
    }
  }
  return rfi_string_append(s, "\n", 1);
}

static rfr_status put_flat(rfi_string *s, const rfr_trace *t, const int64_t *live, int phase) {
  RFI_TRY(rfi_string_printf(s, "refrain-trace 1\n"));
  int next_input = 0; /* inputs are printed where they were declared, so that ids ascend */
  for (int i = 0; i <= t->n_ops; i++) {
    rfr_value first = t->n_values;
    if (i < t->n_ops)
      for (int j = t->ops[i].n_out - 1; j >= 0; j--)
        if (t->ops[i].out[j] >= 0) first = t->ops[i].out[j];
    while (next_input < t->n_inputs && t->inputs[next_input] < first) RFI_TRY(put_input(s, t, t->inputs[next_input++]));
    if (i < t->n_ops && (phase < 0 || t->ops[i].phase == phase)) RFI_TRY(put_op(s, t, i, live ? live[i] : -1));
  }
  for (int i = 0; i < t->n_outputs; i++) {
    RFI_TRY(rfi_string_printf(s, "output "));
    RFI_TRY(put_quoted(s, t->outputs[i].name));
    RFI_TRY(rfi_string_printf(s, " %%%d\n", t->outputs[i].value));
  }
  return RFR_OK;
}

/* ---- the form for people ---- */

static rfr_status put_name(rfi_string *s, const rfr_trace *t, rfr_value v) {
  if (v < 0) return rfi_string_append(s, "_", 1);
  const char *name = t->values[v].name;
  if (!name[0]) return rfi_string_printf(s, "%%%d", v);
  for (const char *c = name; *c; c++)
    if ((unsigned char)*c <= ' ' || *c == '"') return put_quoted(s, name); /* keeps the line from being split */
  return rfi_string_printf(s, "%s", name);
}

rfr_status rfi_put_op_line(rfi_string *s, const rfr_trace *t, int i, int64_t live) {
  const rfi_opr *op = &t->ops[i];
  int results = op->n_out;
  while (results > 0 && op->out[results - 1] < 0 && op->def->only_onto[results - 1]) results--;
  for (int j = 0; j < results; j++) {
    if (j) RFI_TRY(rfi_string_append(s, ", ", 2));
    RFI_TRY(put_name(s, t, op->out[j]));
    if (op->out[j] < 0) continue;
    RFI_TRY(rfi_string_append(s, ": ", 2));
    RFI_TRY(put_type(s, &t->values[op->out[j]].type));
  }
  RFI_TRY(rfi_string_printf(s, " = %s(", op->def->name));
  int n = op->n_in;
  while (n > 0 && op->in[n - 1] < 0) n--;
  for (int k = 0; k < n; k++) {
    if (k) RFI_TRY(rfi_string_append(s, ", ", 2));
    RFI_TRY(put_name(s, t, op->in[k]));
  }
  RFI_TRY(rfi_string_append(s, ")", 1));
  RFI_TRY(put_attrs(s, op));
  RFI_TRY(rfi_string_printf(s, "  ; %s", phase_names[op->phase]));
  if (live >= 0) {
    RFI_TRY(rfi_string_append(s, ", live ", 7));
    RFI_TRY(rfi_put_bytes(s, live));
  }
  RFI_TRY(put_origin(s, t, op, ", "));
  if (op->label.recipe) {
    char recipe[RFI_RECIPE_TEXT];
    rfi_recipe_text(t, op->label, recipe);
    RFI_TRY(rfi_string_printf(s, ", recipe %.*s", (int)strcspn(recipe, " "), recipe));
  }
  if (op->reason[0]) RFI_TRY(rfi_string_printf(s, ", %s", op->reason));
  return rfi_string_append(s, "\n", 1);
}

/* The length of a leading "layerN" in a scope, 0 if there is none; *number gets N. */
static size_t layer_prefix(const char *scope, int *number) {
  static const char word[] = "layer";
  size_t n = sizeof word - 1;
  if (strncmp(scope, word, n) != 0 || !isdigit((unsigned char)scope[n])) return 0;
  for (*number = 0; isdigit((unsigned char)scope[n]); n++) *number = *number * 10 + (scope[n] - '0');
  return scope[n] == 0 || scope[n] == '.' ? n : 0;
}

/* The end of the sequence of ops that share op i's layer, phase and microbatch. */
static int group_end(const rfr_trace *t, int i) {
  int layer = 0, other = 0;
  bool in_layer = layer_prefix(t->ops[i].scope, &layer) > 0;
  int j = i + 1;
  for (; j < t->n_ops && t->ops[j].microbatch == t->ops[i].microbatch; j++) {
    bool also = layer_prefix(t->ops[j].scope, &other) > 0;
    if (also != in_layer || (also && other != layer)) break;
  }
  return j;
}

/* Whether the ops of two groups have the same definitions, attributes, types and phases. */
static bool groups_alike(const rfr_trace *t, int a, int b, int n) {
  for (int i = 0; i < n; i++) {
    const rfi_opr *x = &t->ops[a + i], *y = &t->ops[b + i];
    if (x->def != y->def || x->phase != y->phase || x->n_in != y->n_in) return false;
    /* Ignores the sites of random ops, which always differ. */
    for (int k = 0; k < x->def->n_attrs; k++)
      if (strcmp(x->def->attr[k], "site") != 0 && !rfi_attr_equal(x->def->attr_type[k], &x->attr[k], &y->attr[k]))
        return false;
    for (int j = 0; j < x->n_out; j++) {
      if ((x->out[j] < 0) != (y->out[j] < 0)) return false;
      if (x->out[j] >= 0 && memcmp(&t->values[x->out[j]].type, &t->values[y->out[j]].type, sizeof(rfr_type)) != 0)
        return false;
    }
  }
  return true;
}

static rfr_status put_pretty(rfi_string *s, const rfr_trace *t, const int64_t *live, int phase) {
  for (int i = 0; i < t->n_inputs; i++) {
    const rfi_value *x = &t->values[t->inputs[i]];
    RFI_TRY(put_name(s, t, t->inputs[i]));
    RFI_TRY(rfi_string_printf(s, ": %s ", role_names[x->role]));
    RFI_TRY(put_type(s, &x->type));
    RFI_TRY(rfi_string_append(s, "\n", 1));
  }
  for (int i = 0; i < t->n_ops;) {
    int layer = 0, other = 0, end = group_end(t, i), n = end - i, last = -1, next = end, count = 1;
    bool in_layer = layer_prefix(t->ops[i].scope, &layer) > 0;
    if (in_layer)
      while (next < t->n_ops && layer_prefix(t->ops[next].scope, &other) > 0 && other != layer &&
             t->ops[next].microbatch == t->ops[i].microbatch && group_end(t, next) - next == n &&
             groups_alike(t, i, next, n)) {
        last = other;
        next += n;
        count++;
      }
    bool any = false;
    for (int k = i; k < end; k++) any = any || phase < 0 || t->ops[k].phase == phase;
    if (any && in_layer) {
      if (count > 1) RFI_TRY(rfi_string_printf(s, "layer[%d..%d] {", layer, last));
      else RFI_TRY(rfi_string_printf(s, "layer[%d] {", layer));
      if (t->ops[i].microbatch >= 0) RFI_TRY(rfi_string_printf(s, "  ; microbatch %d", t->ops[i].microbatch));
      RFI_TRY(rfi_string_append(s, "\n", 1));
    }
    for (int k = i; k < end; k++) {
      if (phase >= 0 && t->ops[k].phase != phase) continue;
      if (in_layer) RFI_TRY(rfi_string_append(s, "  ", 2));
      RFI_TRY(rfi_put_op_line(s, t, k, live ? live[k] : -1));
    }
    if (any && in_layer) RFI_TRY(rfi_string_append(s, "}\n", 2));
    i = next;
  }
  for (int i = 0; i < t->n_outputs; i++) {
    RFI_TRY(rfi_string_printf(s, "output %s = ", t->outputs[i].name));
    RFI_TRY(put_name(s, t, t->outputs[i].value));
    RFI_TRY(rfi_string_append(s, "\n", 1));
  }
  return RFR_OK;
}

rfr_print_options rfr_print_options_default(void) {
  return (rfr_print_options){.size = sizeof(rfr_print_options), .flat = 0, .phase = -1, .live_bytes = 1};
}

rfr_status rfr_trace_print(const rfr_trace *t, const rfr_print_options *options, rfr_write_fn write, void *user) {
  RFI_TRY(rfi_check_handle(t, "rfr_trace"));
  if (!write) return rfi_fail(RFI_E_ARGUMENT, "the write callback is NULL");
  rfr_print_options o = options ? *options : rfr_print_options_default();
  rfi_string s = {.ctx = t->ctx};
  int64_t *live = NULL;
  rfr_status status = o.live_bytes ? rfi_live_bytes(t, &live) : RFR_OK;
  if (status == RFR_OK) status = o.flat ? put_flat(&s, t, live, o.phase) : put_pretty(&s, t, live, o.phase);
  if (status == RFR_OK && s.n) write(s.data, s.n, user);
  rfi_free(t->ctx, live);
  rfi_string_deinit(&s);
  return status;
}
