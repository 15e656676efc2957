/* SPDX-License-Identifier: Apache-2.0
 *
 * Equality and difference of two traces. The difference compares ops by their contents (op, result types, operand names
 * and types, scope, phase), not by ids, which every pass assigns again.
 */
#include <string.h>

#include "base/base.h"
#include "trace/print.h"
#include "trace/trace.h"

static bool sources_equal(rfr_source a, rfr_source b) {
  return a.line == b.line && strcmp(a.file ? a.file : "", b.file ? b.file : "") == 0;
}

static bool values_equal(const rfi_value *a, const rfi_value *b) {
  return memcmp(&a->type, &b->type, sizeof a->type) == 0 && a->base == b->base && a->offset == b->offset &&
         memcmp(a->stride, b->stride, sizeof *a->stride * (size_t)a->type.rank) == 0 && a->op == b->op &&
         a->result == b->result && a->role == b->role && strcmp(a->name, b->name) == 0 &&
         (a->op >= 0 || sources_equal(a->at, b->at));
}

static bool ops_equal(const rfr_trace *ta, const rfi_opr *a, const rfr_trace *tb, const rfi_opr *b) {
  if (a->def != b->def || a->n_in != b->n_in || a->n_out != b->n_out || a->phase != b->phase ||
      a->policy != b->policy || a->microbatch != b->microbatch || a->token_in != b->token_in ||
      a->clone_of != b->clone_of || strcmp(a->scope, b->scope) != 0 || !sources_equal(a->at, b->at) ||
      !rfi_labels_equal(ta, a->label, tb, b->label))
    return false;
  return memcmp(a->in, b->in, sizeof *a->in * (size_t)a->n_in) == 0 &&
         memcmp(a->out, b->out, sizeof *a->out * (size_t)a->n_out) == 0 && rfi_attrs_equal(a, b);
}

int rfr_trace_equal(const rfr_trace *a, const rfr_trace *b) {
  if (!a || !b) return a == b;
  if (a->n_values != b->n_values || a->n_ops != b->n_ops || a->n_inputs != b->n_inputs || a->n_outputs != b->n_outputs)
    return 0;
  for (int i = 0; i < a->n_values; i++)
    if (!values_equal(&a->values[i], &b->values[i])) return 0;
  for (int i = 0; i < a->n_ops; i++)
    if (!ops_equal(a, &a->ops[i], b, &b->ops[i])) return 0;
  for (int i = 0; i < a->n_outputs; i++)
    if (a->outputs[i].value != b->outputs[i].value || strcmp(a->outputs[i].name, b->outputs[i].name) != 0) return 0;
  return 1;
}

/* A hash of an op's contents without ids. */
static uint64_t fingerprint(const rfr_trace *t, const rfi_opr *op) {
  uint64_t h = 0xcbf29ce484222325u;
#define MIX(pointer, bytes) \
  for (size_t i_ = 0; i_ < (bytes); i_++) h = (h ^ ((const unsigned char *)(pointer))[i_]) * 0x100000001b3u
  MIX(op->def->name, strlen(op->def->name));
  h = rfi_attrs_hash(op, h);
  MIX(op->scope, strlen(op->scope));
  MIX(&op->phase, sizeof op->phase);
  MIX(&op->microbatch, sizeof op->microbatch);
  for (int k = 0; k < op->n_in; k++) {
    if (op->in[k] < 0) continue;
    const rfi_value *x = &t->values[op->in[k]];
    MIX(&k, sizeof k);
    MIX(&x->type, sizeof x->type);
    MIX(x->name, strlen(x->name));
  }
  for (int j = 0; j < op->n_out; j++)
    if (op->out[j] >= 0) {
      MIX(&j, sizeof j);
      MIX(&t->values[op->out[j]].type, sizeof(rfr_type));
    }
#undef MIX
  return h;
}

rfr_status rfr_trace_diff(const rfr_trace *a, const rfr_trace *b, rfr_write_fn write, void *user) {
  rfr_status s = RFR_OK;
  RFI_TRY(rfi_check_handle(a, "rfr_trace"));
  RFI_TRY(rfi_check_handle(b, "rfr_trace"));
  if (!write) return rfi_fail(RFI_E_ARGUMENT, "the write callback is NULL");
  rfi_string line = {.ctx = a->ctx};
  uint64_t *fa = NULL, *fb = NULL;
  RFI_GOTO(RFI_ALLOC(a->ctx, sizeof *fa * (size_t)(a->n_ops + 1), &fa));
  RFI_GOTO(RFI_ALLOC(a->ctx, sizeof *fb * (size_t)(b->n_ops + 1), &fb));
  for (int i = 0; i < a->n_ops; i++) fa[i] = fingerprint(a, &a->ops[i]);
  for (int i = 0; i < b->n_ops; i++) fb[i] = fingerprint(b, &b->ops[i]);
  int i = 0, j = 0;
  enum { WINDOW = 512 }; /* number of ops that are searched for a match, because passes move ops only a little */
  while (i < a->n_ops || j < b->n_ops) {
    if (i < a->n_ops && j < b->n_ops && fa[i] == fb[j]) {
      i++, j++;
      continue;
    }
    /* the nearest pair of equal ops, by total distance */
    int skip_a = a->n_ops - i, skip_b = b->n_ops - j;
    for (int d = 1; d < WINDOW && d < skip_a + skip_b; d++)
      for (int x = 0; x <= d; x++)
        if (x < a->n_ops - i && d - x < b->n_ops - j && fa[i + x] == fb[j + d - x]) {
          skip_a = x;
          skip_b = d - x;
          break;
        }
    for (int k = 0; k < skip_a + skip_b; k++) {
      bool removed = k < skip_a;
      line.n = 0;
      RFI_GOTO(rfi_string_append(&line, removed ? "- " : "+ ", 2));
      RFI_GOTO(rfi_put_op_line(&line, removed ? a : b, removed ? i + k : j + k - skip_a, -1));
      write(line.data, line.n, user);
    }
    i += skip_a;
    j += skip_b;
  }
fail:
  rfi_string_deinit(&line);
  rfi_free(a->ctx, fa);
  rfi_free(a->ctx, fb);
  return s;
}
