/* SPDX-License-Identifier: Apache-2.0
 *
 * Recording: every call appends one op, infers its result types, and stores the caller's source line. The first error
 * is latched: later calls return RFR_NONE, and rfr_trace_finish reports the error with its source line.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "trace/trace.h"

/* ---- errors ---- */

static rfr_status latch(rfr_trace *t) {
  const rfr_error *e = rfr_last_error();
  t->status = e->status;
  t->error = *e;
  const char *message = rfi_arena_strdup(t->arena, e->message), *file = rfi_arena_strdup(t->arena, e->file);
  t->error.message = message ? message : "out of memory";
  t->error.file = file ? file : "";
  return t->status;
}

bool rfi_trace_records(const rfr_trace *t) { return rfi_check_handle(t, "rfr_trace") == RFR_OK && t->status == RFR_OK; }

rfr_value rfi_trace_fail(rfr_trace *t, rfr_source at, const char *op, int error, const char *format, ...) {
  if (!rfi_trace_records(t)) return RFR_NONE;
  char text[400];
  va_list args;
  va_start(args, format);
  rfi_vsnprintf(text, sizeof text, format, args);
  va_end(args);
  rfi_fail_at((rfi_error)error, at.file ? at.file : "", at.line, "%s%s%s%s%s", op, op[0] ? ": " : "", text,
              t->scope[0] ? ", in " : "", t->scope);
  latch(t);
  return RFR_NONE;
}

static rfr_value no_memory(rfr_trace *t) {
  if (t->status == RFR_OK) latch(t);
  return RFR_NONE;
}

/* Makes the latched error the calling thread's last error again. */
rfr_status rfr_trace_status(const rfr_trace *t) {
  RFI_TRY(rfi_check_handle(t, "rfr_trace"));
  if (t->status == RFR_OK) return RFR_OK;
  rfr_error row;
  for (int i = 0; rfr_error_row(i, &row); i++)
    if (strcmp(row.slug, t->error.slug) == 0) return rfi_fail((rfi_error)i, "%s", t->error.message);
  return t->status;
}

/* ---- the trace ---- */

rfr_status rfr_trace_create(rfr_ctx *ctx, rfr_trace **out) {
  rfi_arena *arena;
  RFI_TRY(RFI_CHECK_OUT(out, "out"));
  RFI_TRY(rfi_arena_create(ctx, &arena));
  rfr_trace *t = rfi_arena_alloc(arena, sizeof *t);
  if (!t) {
    rfi_arena_destroy(arena);
    return RFR_NO_MEMORY;
  }
  t->ctx = ctx;
  t->arena = arena;
  t->scope = t->reason = "";
  t->microbatch = t->newest_microbatch = -1;
  t->phase = RFR_PHASE_FORWARD;
  for (int i = 0; i < RFI_CHAINS; i++) t->last_token[i] = -1;
  *out = t;
  return RFR_OK;
}

void rfr_trace_destroy(rfr_trace *t) {
  if (t) rfi_arena_destroy(t->arena);
}

rfr_status rfr_trace_finish(rfr_trace *t) {
  RFI_TRY(rfr_trace_status(t));
  RFI_TRY(rfr_trace_verify(t));
  t->finished_at = rfi_trace_size(t);
  return RFR_OK;
}

static const rfr_source nowhere = {NULL, 0};

void rfr_scope(rfr_trace *t, const char *scope) {
  if (!scope) scope = "";
  if (!rfi_trace_records(t) || strcmp(t->scope, scope) == 0) return;
  char *copy = rfi_arena_strdup(t->arena, scope);
  if (copy) t->scope = copy;
  else no_memory(t);
}
/* Random numbers are addressed by site and microbatch, so each microbatch numbers its sites from the same start. A
 * microbatch that is continued later gets sites that no other microbatch has. */
void rfr_microbatch(rfr_trace *t, int microbatch) {
  if (!rfi_trace_records(t)) return;
  if (microbatch < -1 || microbatch > RFI_MAX_MICROBATCH) {
    rfi_trace_fail(t, nowhere, "", RFI_E_ARGUMENT, "microbatch is %d; it must be -1 to %d", microbatch,
                   RFI_MAX_MICROBATCH);
    return;
  }
  if (microbatch > t->newest_microbatch) {
    if (t->newest_microbatch < 0) t->first_site = t->next_site;
    t->next_site = t->first_site;
    t->newest_microbatch = microbatch;
  } else if (microbatch != t->microbatch) {
    t->next_site = rfr_trace_sites(t);
  }
  t->microbatch = microbatch;
}
void rfr_set_phase(rfr_trace *t, rfr_phase phase) {
  if (!rfi_trace_records(t)) return;
  if ((unsigned)phase <= RFR_PHASE_OPTIM) t->phase = phase;
  else rfi_trace_fail(t, nowhere, "", RFI_E_ARGUMENT, "%d is not a phase", (int)phase);
}
void rfr_set_recompute(rfr_trace *t, rfr_policy policy) {
  if (!rfi_trace_records(t)) return;
  if ((unsigned)policy <= RFR_POLICY_RECOMPUTE) t->policy = policy;
  else rfi_trace_fail(t, nowhere, "", RFI_E_ARGUMENT, "%d is not a recompute policy", (int)policy);
}

static bool is_value(const rfr_trace *t, rfr_value v) { return t && v >= 0 && v < t->n_values; }

rfr_type rfr_value_type(const rfr_trace *t, rfr_value v) {
  return is_value(t, v) ? t->values[v].type : (rfr_type){.dtype = RFR_F32};
}
const char *rfr_value_name(const rfr_trace *t, rfr_value v) { return is_value(t, v) ? t->values[v].name : ""; }
int rfr_trace_op_count(const rfr_trace *t) { return t ? t->n_ops : 0; }

/* Computed from the ops, because a parsed trace has no recording state; backward ops repeat the sites of the
 * forward. */
int64_t rfr_trace_sites(const rfr_trace *t) {
  int64_t n = 0;
  for (int i = 0; t && i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    const int site = rfi_is_random(op) ? rfi_attr_find(op->def, "site") : -1;
    if (site >= 0 && op->attr[site].i >= n) n = op->attr[site].i + 1;
  }
  return n;
}

int64_t rfr_trace_linears(const rfr_trace *t) {
  int64_t n = 0;
  for (int i = 0; t && i < t->n_ops; i++)
    if (t->ops[i].label.recipe && t->ops[i].label.linear >= n) n = t->ops[i].label.linear + 1;
  return n;
}

void rfr_value_set_name(rfr_trace *t, rfr_value v, const char *name) {
  if (!is_value(t, v)) return;
  char *copy = rfi_arena_strdup(t->arena, name ? name : "");
  if (copy) t->values[v].name = copy;
  else no_memory(t);
}

bool rfi_type_fits(const rfr_type *type) {
  int64_t bits = rfr_dtype_bits(type->dtype);
  for (int d = 0; d < type->rank; d++)
    if (type->shape[d] < 0 || __builtin_mul_overflow(bits, type->shape[d] ? type->shape[d] : 1, &bits)) return false;
  return true;
}

static rfr_value new_value(rfr_trace *t, const rfr_type *type, rfr_source at) {
  if (!rfi_arena_grow(t->arena, (void **)&t->values, &t->cap_values, t->n_values + 1, sizeof *t->values))
    return no_memory(t);
  rfr_value id = t->n_values++;
  t->values[id] = (rfi_value){.type = *type, .base = id, .op = -1, .name = "", .at = at};
  rfi_dense_strides(&t->values[id]);
  return id;
}

rfr_value rfr_input_at(rfr_trace *t, rfr_source at, const char *name, rfr_role role, rfr_dtype dtype, int rank,
                       const int64_t *shape) {
  if (!rfi_trace_records(t)) return RFR_NONE;
  if (!name || !name[0]) return rfi_trace_fail(t, at, "input", RFI_E_TRACE_NAME, "an input needs a name");
  if (rfi_names_find(&t->input_names, name) >= 0)
    return rfi_trace_fail(t, at, "input", RFI_E_TRACE_NAME, "the name \"%s\" is taken", name);
  if (role <= RFR_ROLE_NONE || role > RFR_ROLE_CONST || (unsigned)dtype >= RFR_DTYPE_COUNT)
    return rfi_trace_fail(t, at, "input", RFI_E_ARGUMENT, "\"%s\": invalid role or element type", name);
  if (rank < 0 || rank > RFR_MAX_RANK)
    return rfi_trace_fail(t, at, "input", RFI_E_TRACE_SHAPE, "\"%s\": rank %d, at most %d", name, rank, RFR_MAX_RANK);
  if (rank > 0 && !shape) return rfi_trace_fail(t, at, "input", RFI_E_ARGUMENT, "\"%s\" has no shape", name);
  rfr_type type = {.dtype = dtype};
  for (int d = 0; d < rank; d++) {
    type.shape[d] = shape[d];
    type.rank = d + 1;
    if (!rfi_type_fits(&type))
      return rfi_trace_fail(t, at, "input", RFI_E_TRACE_SHAPE, "\"%s\": dimension %d is %lld, or the size overflows",
                            name, d, (long long)shape[d]);
  }
  if (!rfi_arena_grow(t->arena, (void **)&t->inputs, &t->cap_inputs, t->n_inputs + 1, sizeof *t->inputs))
    return no_memory(t);
  rfr_value v = new_value(t, &type, at);
  if (v == RFR_NONE) return v;
  t->values[v].role = (uint8_t)role;
  rfr_value_set_name(t, v, name);
  if (t->status == RFR_OK && !rfi_names_add(&t->input_names, t->arena, t->values[v].name, t->n_inputs))
    return no_memory(t);
  t->inputs[t->n_inputs++] = v;
  return t->status == RFR_OK ? v : RFR_NONE;
}

void rfr_output_at(rfr_trace *t, rfr_source at, const char *name, rfr_value v) {
  if (!rfi_trace_records(t)) return;
  if (!name || !name[0]) {
    rfi_trace_fail(t, at, "output", RFI_E_TRACE_NAME, "an output needs a name");
    return;
  }
  if (!is_value(t, v)) {
    rfi_trace_fail(t, at, "output", RFI_E_TRACE_VALUE, "\"%s\": %d is not a value of this trace", name, v);
    return;
  }
  if (rfi_names_find(&t->output_names, name) >= 0) {
    rfi_trace_fail(t, at, "output", RFI_E_TRACE_NAME, "the name \"%s\" is taken", name);
    return;
  }
  char *copy = rfi_arena_strdup(t->arena, name);
  if (!copy || !rfi_arena_grow(t->arena, (void **)&t->outputs, &t->cap_outputs, t->n_outputs + 1, sizeof *t->outputs) ||
      !rfi_names_add(&t->output_names, t->arena, copy, t->n_outputs)) {
    no_memory(t);
    return;
  }
  t->outputs[t->n_outputs++] = (rfi_output){copy, v};
}

/* Sets the storage of result j, whose type and operands are set. */
static rfr_status set_storage(rfr_trace *t, const rfi_opr *op, int j, rfr_value v) {
  const rfi_op_def *def = op->def;
  rfi_value *y = &t->values[v];
  if (def->flags & RFI_VIEW) {
    const rfi_value *x = &t->values[op->in[0]];
    if (!rfi_view(def, x, op->attr, y))
      return rfi_fail(RFI_E_TRACE_SHAPE, "no strides express this view of a strided value; copy it first");
    y->base = x->base;
  } else if (def->alias[j] >= 0 && def->alias[j] < op->n_in && op->in[def->alias[j]] >= 0) {
    const rfi_value *x = &t->values[op->in[def->alias[j]]];
    if (memcmp(&x->type, &y->type, sizeof x->type) != 0)
      return rfi_fail(RFI_E_TRACE_SHAPE, "result %s is stored in operand %s but has another type", def->result[j],
                      def->operand[def->alias[j]]);
    memcpy(y->stride, x->stride, sizeof y->stride);
    y->offset = x->offset;
    y->base = x->base;
  }
  return RFR_OK;
}

/* Compares a list by its numbers, other attributes as bytes. */
bool rfi_attr_equal(char type, const rfi_attr *a, const rfi_attr *b) {
  if (type != 'l') return memcmp(a, b, sizeof *a) == 0;
  return a->l.n == b->l.n && (a->l.n == 0 || memcmp(a->l.x, b->l.x, (size_t)a->l.n * sizeof *a->l.x) == 0);
}

bool rfi_attrs_equal(const rfi_opr *a, const rfi_opr *b) {
  for (int i = 0; i < a->def->n_attrs; i++)
    if (!rfi_attr_equal(a->def->attr_type[i], &a->attr[i], &b->attr[i])) return false;
  return true;
}

uint64_t rfi_attrs_hash(const rfi_opr *op, uint64_t hash) {
  for (int i = 0; i < op->def->n_attrs; i++) {
    const bool list = op->def->attr_type[i] == 'l';
    const unsigned char *bytes = list ? (const unsigned char *)op->attr[i].l.x : (const unsigned char *)&op->attr[i];
    const size_t n = list ? (size_t)op->attr[i].l.n * sizeof(double) : sizeof op->attr[i];
    for (size_t k = 0; k < n; k++) hash = (hash ^ bytes[k]) * 0x100000001b3u;
  }
  return hash;
}

/* `to` is zeroed; sets only the bytes that each type uses, because attributes are compared as bytes. */
static rfr_status copy_attrs(rfr_trace *t, const rfi_op_def *def, const rfi_attr *from, rfi_attr *to) {
  for (int i = 0; i < def->n_attrs; i++) {
    switch (def->attr_type[i]) {
      case 'f': to[i].f = from[i].f; break;
      case 's':
        to[i].s.rank = from[i].s.rank; /* also an invalid rank, which the op's rule then refuses */
        for (int d = 0; d < from[i].s.rank && d < RFR_MAX_RANK; d++) to[i].s.dim[d] = from[i].s.dim[d];
        break;
      case 'l': {
        if (from[i].l.n < 0 || from[i].l.n > RFR_MAX_LIST || (from[i].l.n > 0 && !from[i].l.x))
          return rfi_fail(RFI_E_TRACE_SHAPE, "%s has %lld numbers; at most %d are allowed", def->attr[i],
                          (long long)from[i].l.n, RFR_MAX_LIST);
        if (from[i].l.n == 0) break;
        double *x = rfi_arena_alloc(t->arena, (size_t)from[i].l.n * sizeof *x);
        if (!x) return RFR_NO_MEMORY;
        memcpy(x, from[i].l.x, (size_t)from[i].l.n * sizeof *x);
        to[i].l.x = x;
        to[i].l.n = from[i].l.n;
        break;
      }
      default: to[i].i = from[i].i;
    }
  }
  return RFR_OK;
}

rfr_status rfi_append(rfr_trace *t, const rfi_opr *proto, const bool *dead, rfr_value *out) {
  const rfi_op_def *def = proto->def;
  rfr_type stack_in[16], types[RFI_MAX_NAMES], *in = stack_in;
  memset(types, 0, sizeof types);
  if (!def->infer) return rfi_fail(RFI_E_UNSUPPORTED, "this build has no op %s", def->name);
  if (proto->n_in > 16 && !(in = rfi_arena_alloc(t->arena, sizeof *in * (size_t)proto->n_in))) return RFR_NO_MEMORY;
  int n_given = proto->n_in;
  for (int i = 0; i < n_given; i++) {
    if (proto->in[i] == RFR_NONE && i < def->n_operands && def->optional[i]) {
      in[i] = (rfr_type){.rank = -1};
      continue;
    }
    if (!is_value(t, proto->in[i]))
      return rfi_fail(RFI_E_TRACE_VALUE, "operand %s is not a value of this trace",
                      def->operand[i < def->n_operands ? i : def->n_operands - 1]);
    in[i] = t->values[proto->in[i]].type;
  }
  /* Shape rules may read every named operand; omitted ones are absent. */
  int named = def->n_operands - (def->variadic ? 1 : 0);
  if (n_given < def->n_required) return rfi_fail(RFI_E_TRACE_VALUE, "operand %s is missing", def->operand[n_given]);
  if (n_given > def->n_operands && !def->variadic) return rfi_fail(RFI_E_TRACE_VALUE, "too many operands");
  rfi_opr op = *proto;
  op.n_in = n_given > named ? n_given : named;
  op.n_out = def->n_results;
  rfi_attr *attr =
      rfi_arena_alloc(t->arena, sizeof *attr * (size_t)def->n_attrs + sizeof *op.in * (size_t)(op.n_in + op.n_out));
  if (!attr) return RFR_NO_MEMORY;
  if (proto->attr) RFI_TRY(copy_attrs(t, def, proto->attr, attr));
  op.attr = attr;
  op.in = (rfr_value *)(attr + def->n_attrs);
  op.out = op.in + op.n_in;
  for (int i = 0; i < op.n_in; i++) {
    op.in[i] = i < n_given ? proto->in[i] : RFR_NONE;
    if (i >= n_given) in[i] = (rfr_type){.rank = -1};
  }
  rfi_infer c = {def, op.n_in, in, op.attr, types};
  RFI_TRY(def->infer(&c));
  for (int j = 0; j < op.n_out; j++)
    if (types[j].rank >= 0 && !rfi_type_fits(&types[j]))
      return rfi_fail(RFI_E_OVERFLOW, "the size of result %s overflows", def->result[j]);
  if (!rfi_arena_grow(t->arena, (void **)&t->ops, &t->cap_ops, t->n_ops + 1, sizeof *t->ops)) return RFR_NO_MEMORY;
  int first = t->n_values;
  for (int j = 0; j < op.n_out; j++) {
    op.out[j] = RFR_NONE;
    bool absent =
        (def->flags & RFI_STATE || def->only_onto[j]) && def->alias[j] >= 0 && op.in[def->alias[j]] == RFR_NONE;
    if (absent || (dead && dead[j])) continue;
    op.out[j] = new_value(t, &types[j], op.at);
    rfr_status s = op.out[j] == RFR_NONE ? RFR_NO_MEMORY : set_storage(t, &op, j, op.out[j]);
    if (s != RFR_OK) {
      t->n_values = first;
      return s;
    }
    t->values[op.out[j]].op = t->n_ops;
    t->values[op.out[j]].result = (int16_t)j;
  }
  for (int j = 0; j < op.n_out; j++)
    if (op.out[j] == RFR_NONE) types[j].rank = -1;
  RFI_TRY(rfi_op_cost(&c, &op.cost));
  const int chain = rfi_chain(def);
  op.token_in = chain < 0 ? -1 : t->last_token[chain];
  if (chain >= 0) t->last_token[chain] = t->n_ops;
  t->ops[t->n_ops++] = op;
  if (out) memcpy(out, op.out, sizeof *out * (size_t)op.n_out);
  return RFR_OK;
}

static rfr_value record(rfr_trace *t, rfr_source at, const rfi_op_def *def, int n_in, const rfr_value *in,
                        const rfi_attr *attr, rfr_value *out) {
  rfr_value results[RFI_MAX_NAMES];
  if (out)
    for (int j = 0; j < def->n_results; j++) out[j] = RFR_NONE;
  if (!rfi_trace_records(t)) return RFR_NONE;
  if (n_in < 0 || (n_in > 0 && !in))
    return rfi_trace_fail(t, at, def->name, RFI_E_ARGUMENT, "%d operands, or no operand array", n_in);
  rfi_opr op = {.def = def,
                .n_in = n_in,
                .in = (rfr_value *)in,
                .attr = attr,
                .phase = (uint8_t)t->phase,
                .policy = (uint8_t)t->policy,
                .microbatch = t->microbatch,
                .clone_of = -1,
                .scope = t->scope,
                .reason = t->reason,
                .at = at};
  rfr_status s = rfi_label_now(t, def, n_in, in, attr, &op.label);
  if (s == RFR_OK) s = rfi_append(t, &op, NULL, results);
  if (s != RFR_OK) {
    rfr_error e = *rfr_last_error();
    char text[400];
    rfi_snprintf(text, sizeof text, "%s", e.message);
    int error = RFI_E_INTERNAL;
    rfr_error row;
    for (int i = 0; rfr_error_row(i, &row); i++)
      if (strcmp(row.slug, e.slug) == 0) error = i;
    return rfi_trace_fail(t, at, def->name, error, "%s", text);
  }
  if (out) memcpy(out, results, sizeof *out * (size_t)def->n_results);
  return results[0];
}

rfr_value rfi_record(rfr_trace *t, rfr_source at, rfi_opcode code, int n_in, const rfr_value *in, const rfi_attr *attr,
                     rfr_value *out) {
  return record(t, at, rfi_op_def_get(code), n_in, in, attr, out);
}

static bool attrs_valid(const rfi_op_def *def, const rfr_attr *attr) {
  for (int i = 0; i < def->n_attrs; i++) {
    const char type = def->attr_type[i];
    if (type == 's' && (attr[i].s.rank < 0 || attr[i].s.rank > RFR_MAX_RANK)) return false;
    if (type == 't' && (attr[i].i < 0 || attr[i].i >= RFR_DTYPE_COUNT)) return false;
    if (type == 'b' && attr[i].i >> 1 != 0) return false;
  }
  return true;
}

rfr_value rfr_record_at(rfr_trace *t, rfr_source at, const rfr_op *op, int n_in, const rfr_value *in,
                        const rfr_attr *attr, rfr_value *out) {
  if (!op || n_in < 0 || (n_in > 0 && !in) || (op->n_attrs > 0 && !attr))
    return rfi_trace_fail(t, at, op ? op->name : "record", RFI_E_ARGUMENT, "op, operands or attributes are missing");
  if (t && op->outside && op->outside->ctx != t->ctx)
    return rfi_trace_fail(t, at, op->name, RFI_E_ARGUMENT, "it is registered with another context");
  if (!attrs_valid(op, attr)) return rfi_trace_fail(t, at, op->name, RFI_E_ARGUMENT, "an attribute is out of range");
  return record(t, at, op, n_in, in, attr, out);
}
