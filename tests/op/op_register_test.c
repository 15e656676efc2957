/* SPDX-License-Identifier: Apache-2.0
 *
 * Registered ops, with public headers only: they are recorded, printed, differentiated, compiled and replayed like the
 * library's own ops, and an invalid description is refused by the name of its field.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "refrain/refrain.h"
#include "support/context.h"
#include "support/text.h"

/* ---- mine.softcap: y = cap tanh(x / cap) ---- */

static const char *same_as_operand(const rfr_infer *c) {
  if (c->in[0].dtype != RFR_F32 || c->in[0].rank != 2) return "x must be f32 of rank 2";
  c->out[0] = c->in[0];
  return NULL;
}

static rfr_status softcap_cpu(const rfr_call *c) {
  const rfr_arg *x = &c->in[0];
  const float cap = (float)c->attr[0].f;
  for (int64_t i = 0; i < x->type.shape[0]; i++)
    for (int64_t j = 0; j < x->type.shape[1]; j++)
      ((float *)c->out[0].data)[i * x->type.shape[1] + j] =
          cap * tanhf(((const float *)x->data)[i * x->stride[0] + j] / cap);
  return RFR_OK;
}

/* dx = dy (1 - (y / cap)^2) */
static void softcap_gradient(rfr_grad *g) {
  const double cap = g->attr[0].f;
  if (!g->need[0]) return;
  rfr_value y2 = rfr_mul_at(g->t, g->at, g->out[0], g->out[0]);
  rfr_value minus = rfr_scale_at(g->t, g->at, rfr_mul_at(g->t, g->at, g->dy[0], y2), -1 / (cap * cap), RFR_NONE);
  g->dx[0] = rfr_add_at(g->t, g->at, g->dy[0], minus);
}

/* ---- mine.gain: y (T,C) = x (T,C) times g (C); its user data is the op's own definition ---- */

static const char *gain_shape(const rfr_infer *c) {
  const char *wrong = same_as_operand(c);
  if (wrong) return wrong;
  return c->in[1].dtype == RFR_F32 && c->in[1].rank == 1 && c->in[1].shape[0] == c->in[0].shape[1]
             ? NULL
             : "g must be f32 with one entry per column of x";
}

static size_t gain_workspace(const rfr_call *c) { return (size_t)c->in[1].type.shape[0] * sizeof(float); }

static rfr_status gain_cpu(const rfr_call *c) {
  const int64_t rows = c->in[0].type.shape[0], columns = c->in[0].type.shape[1];
  float *g = c->workspace;
  if (!c->user || c->library) return RFR_INTERNAL;
  memcpy(g, c->in[1].data, (size_t)columns * sizeof *g);
  for (int64_t i = 0; i < rows * columns; i++)
    ((float *)c->out[0].data)[i] = ((const float *)c->in[0].data)[i] * g[i % columns];
  return RFR_OK;
}

static void gain_gradient(rfr_grad *g) {
  const rfr_op *gain = *(const rfr_op **)g->user;
  if (g->need[0]) g->dx[0] = rfr_record_at(g->t, g->at, gain, 2, ((rfr_value[]){g->dy[0], g->in[1]}), NULL, NULL);
  if (!g->need[1]) return;
  rfr_set_phase(g->t, g->is_weight[1] ? RFR_PHASE_WGRAD : RFR_PHASE_DGRAD);
  g->dx[1] = rfr_sum_at(g->t, g->at, rfr_mul_at(g->t, g->at, g->dy[0], g->in[0]), 0);
}

/* ---- mine.count: a state that is incremented, and that the host sees ---- */

static const char *count_shape(const rfr_infer *c) {
  if (c->in[0].dtype != RFR_I64 || c->in[0].rank != 1) return "n must be i64 of rank 1";
  c->out[0] = c->in[0];
  return NULL;
}
static rfr_status count_cpu(const rfr_call *c) {
  if (c->out[0].data != c->in[0].data) return RFR_INTERNAL;
  ++*(int64_t *)c->out[0].data;
  return RFR_OK;
}

/* ---- mine.evens: a view of every second row; mine.weigh: half of its counted work is done, and `by` has no gradient
 * ---- */

static const char *evens_shape(const rfr_infer *c) {
  const char *wrong = same_as_operand(c);
  c->out[0].shape[0] /= 2;
  return wrong;
}

static bool every_second(const rfr_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset) {
  (void)c;
  y_stride[0] = 2 * stride[0];
  y_stride[1] = stride[1];
  *offset += stride[0]; /* view: starts at the second row */
  return true;
}

static double half(const rfr_call *call, const void *values) {
  return ((const float *)values)[0] == 2.0f && call->n_in == 2 ? 0.5 : 0;
}

static double hundred(const rfr_infer *c) { return c->out[0].rank == 2 ? 100 : 0; }

static rfr_status weigh_cpu(const rfr_call *c) {
  const rfr_arg *x = &c->in[0], *y = &c->out[0];
  for (int64_t i = 0; i < y->type.shape[0]; i++)
    for (int64_t j = 0; j < y->type.shape[1]; j++)
      ((float *)y->data)[i * y->type.shape[1] + j] =
          ((const float *)x->data)[i * x->stride[0] + j * x->stride[1]] / (((const float *)c->in[1].data)[0] - 2.0f);
  return RFR_OK;
}

static void weigh_gradient(rfr_grad *g) { g->dx[0] = g->dy[0]; }

/* ---- a context with these ops ---- */

typedef struct world {
  rfr_ctx *ctx;
  const rfr_op *softcap, *gain, *count;
} world;

static rfr_op_desc softcap_desc(void) {
  rfr_op_desc d = rfr_op_desc_default();
  d.name = "mine.softcap";
  d.operands = "x";
  d.attributes = "cap:f";
  d.flags = RFR_OP_ROWS;
  d.shape = same_as_operand;
  d.gradient = softcap_gradient;
  d.cpu = softcap_cpu;
  return d;
}

static rfr_status register_ops(world *w) {
  rfr_op_desc d = softcap_desc();
  rfr_status s = rfr_op_register(w->ctx, &d, &w->softcap);
  if (s != RFR_OK) return s;
  d = rfr_op_desc_default();
  d.name = "mine.gain";
  d.operands = "x g";
  d.shape = gain_shape;
  d.gradient = gain_gradient;
  d.cpu = gain_cpu;
  d.cpu_workspace = gain_workspace;
  d.user = &w->gain;
  s = rfr_op_register(w->ctx, &d, &w->gain);
  if (s != RFR_OK) return s;
  d = rfr_op_desc_default();
  d.name = "mine.count";
  d.operands = "n";
  d.results = "n1@n";
  d.flags = RFR_OP_STATE | RFR_OP_HOST;
  d.shape = count_shape;
  d.cpu = count_cpu;
  return rfr_op_register(w->ctx, &d, &w->count);
}

static world begin(void) {
  world w = {NULL, NULL, NULL, NULL};
  OK(rfr_ctx_create(NULL, &w.ctx));
  return w;
}

static void end(world *w, int64_t live) {
  assert_int_equal(rfr_ctx_get_stats(w->ctx).live_blocks, live);
  rfr_ctx_destroy(w->ctx);
}

enum { T = 5, K = 7, C = 3, OPS = 3 };

/* loss = sum(softcap(gain(x wT, g))) r): weights w and g, of which g may be frozen. */
static rfr_status record(world *w, bool frozen, bool train, rfr_trace **out) {
  rfr_trace *t;
  rfr_status s = rfr_trace_create(w->ctx, &t);
  *out = NULL;
  if (s != RFR_OK) return s;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, K}));
  rfr_value r = rfr_input(t, "r", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  rfr_value weight = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){C, K}));
  rfr_value g = rfr_input(t, "g", frozen ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){C}));
  rfr_value n = rfr_input(t, "n", RFR_ROLE_STATE, RFR_I64, 1, ((int64_t[]){1}));
  rfr_attr cap = rfr_attr_float(1.5);
  rfr_scope(t, "layer0.mlp");
  rfr_value h = rfr_record(t, w->gain, 2, ((rfr_value[]){rfr_linear(t, x, weight, RFR_NONE), g}), NULL, NULL);
  rfr_value y = rfr_record(t, w->softcap, 1, &h, &cap, NULL);
  rfr_scope(t, "");
  rfr_value loss = rfr_sum(t, rfr_mul(t, y, r), -1), grads[2];
  grads[0] = rfr_gradient(t, loss, weight, RFR_F32);
  grads[1] = frozen ? RFR_NONE : rfr_gradient(t, loss, g, RFR_F32);
  rfr_output(t, "dw", grads[0]);
  if (!frozen) rfr_output(t, "dg", grads[1]);
  rfr_output(t, "loss", loss);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_record(t, w->count, 1, &n, NULL, NULL);
  rfr_value lr = rfr_fill(t, 0.05, RFR_F32, 1, ((int64_t[]){1}));
  if (train) {
    rfr_sgd(t, weight, grads[0], RFR_NONE, RFR_NONE, lr, RFR_NONE, RFR_NONE, 0, 0, 1);
    if (!frozen) rfr_sgd(t, g, grads[1], RFR_NONE, RFR_NONE, lr, RFR_NONE, RFR_NONE, 0, 0, 1);
  }
  s = rfr_trace_finish(t);
  if (s != RFR_OK) rfr_trace_destroy(t);
  else *out = t;
  return s;
}

static float *data_of(rfr_programs *p, const char *name) {
  rfr_tensor x;
  OK(rfr_programs_tensor(p, name, &x));
  return x.data;
}
static float *result_of(rfr_programs *p, const char *name) {
  rfr_tensor x;
  OK(rfr_program_output(p, 0, name, &x));
  return x.data;
}

static rfr_status compile(world *w, const rfr_trace *t, const rfr_compile_options *o, rfr_programs **p) {
  rfr_tensor x;
  rfr_status s = rfr_compile(w->ctx, 1, &t, NULL, o, p);
  for (int i = 0; s == RFR_OK && rfr_programs_tensor_at(*p, i, &x) == RFR_OK; i++)
    for (int64_t k = 0; x.type.dtype == RFR_F32 && k < x.bytes / 4; k++)
      ((float *)x.data)[k] = (float)((k * 7 + i * 5 + 3) % 13) / 6.5f - 0.95f;
  return s == RFR_OK ? rfr_programs_load(*p) : s;
}

static void test_round_trip(void **state) {
  (void)state;
  world w = begin(), other = begin();
  rfr_trace *t, *back;
  rft_text first = {0}, second = {0};
  rfr_print_options o = rfr_print_options_default();
  OK(register_ops(&w));
  assert_ptr_equal(rfr_op_find(w.ctx, "mine.gain"), w.gain);
  assert_non_null(rfr_op_find(w.ctx, "matmul"));
  assert_null(rfr_op_find(other.ctx, "mine.gain"));
  OK(record(&w, false, true, &t));
  o.flat = 1;
  OK(rfr_trace_print(t, &o, rft_text_add, &first));
  assert_non_null(strstr(first.data, "= mine.softcap("));
  assert_non_null(strstr(first.data, "cap=1.5 phase=forward scope=\"layer0.mlp\""));
  assert_non_null(strstr(first.data, "effects=state,host"));
  OK(rfr_trace_parse(w.ctx, "text", first.data, first.n, &back));
  assert_true(rfr_trace_equal(t, back));
  OK(rfr_trace_print(back, &o, rft_text_add, &second));
  assert_string_equal(first.data, second.data);
  rfr_trace_destroy(back);
  /* a context without the ops cannot parse it */
  assert_int_equal(rfr_trace_parse(other.ctx, "text", first.data, first.n, &back), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "trace.parse");
  free(first.data), free(second.data);
  rfr_trace_destroy(t);
  end(&w, OPS);
  end(&other, 0);
}

static void test_gradient(void **state) {
  (void)state;
  world w = begin();
  OK(register_ops(&w));
  for (int frozen = 0; frozen < 2; frozen++) {
    rfr_trace *t;
    rfr_programs *p;
    OK(record(&w, frozen, false, &t));
    OK(compile(&w, t, NULL, &p));
    OK(rfr_program_run(p, 0));
    float dw[C * K], dg[C];
    memcpy(dw, result_of(p, "dw"), sizeof dw);
    if (!frozen) memcpy(dg, result_of(p, "dg"), sizeof dg);
    for (int i = 0; i < (frozen ? C * K : C * K + C); i++) {
      float *v = i < C * K ? data_of(p, "w") + i : data_of(p, "g") + i - C * K, was = *v, loss[2];
      for (int side = 0; side < 2; side++) {
        *v = side ? was - 0.01f : was + 0.01f;
        OK(rfr_program_run(p, 0));
        loss[side] = *result_of(p, "loss");
      }
      *v = was;
      double numeric = ((double)loss[0] - (double)loss[1]) / 0.02;
      assert_true(fabs(numeric - (double)(i < C * K ? dw[i] : dg[i - C * K])) < 2e-3);
    }
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
  end(&w, OPS);
}

/* Eager, captured, debugged and recomputed programs are bitwise equal after every step. */
static void test_replay(void **state) {
  (void)state;
  enum { WAYS = 4 };
  world w = begin();
  OK(register_ops(&w));
  rfr_trace *t;
  rfr_programs *p[WAYS];
  OK(record(&w, false, true, &t));
  for (int i = 0; i < WAYS; i++) {
    rfr_compile_options o = rfr_compile_options_default();
    o.debug = i == 2;
    o.recompute = i == 3 ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP;
    OK(compile(&w, t, &o, &p[i]));
  }
  OK(rfr_program_capture(p[1], 0));
  float first = 0;
  int64_t calls = rfr_ctx_get_stats(w.ctx).alloc_calls;
  for (int step = 0; step < 20; step++) {
    for (int i = 0; i < WAYS; i++) {
      OK(i == 1 ? rfr_program_replay(p[i], 0, NULL, 0) : rfr_program_run(p[i], 0));
      assert_memory_equal(result_of(p[i], "loss"), result_of(p[0], "loss"), sizeof(float));
      assert_memory_equal(data_of(p[i], "w"), data_of(p[0], "w"), C * K * sizeof(float));
      assert_memory_equal(data_of(p[i], "g"), data_of(p[0], "g"), C * sizeof(float));
      assert_int_equal(*(int64_t *)data_of(p[i], "n"), step + 1);
    }
    if (step == 0) first = *result_of(p[0], "loss");
  }
  assert_int_equal(rfr_ctx_get_stats(w.ctx).alloc_calls, calls);
  assert_true(*result_of(p[0], "loss") < first);
  for (int i = 0; i < WAYS; i++) {
    OK(rfr_programs_check(p[i]));
    rfr_programs_destroy(p[i]);
  }
  rfr_trace_destroy(t);
  end(&w, OPS);
}

static void refused(world *w, rfr_op_desc d, const char *field) {
  const rfr_op *op;
  assert_int_equal(rfr_op_register(w->ctx, &d, &op), RFR_INVALID);
  assert_null(op);
  if (!strstr(rfr_last_error()->message, field)) fail_msg("no %s in: %s", field, rfr_last_error()->message);
}

static void test_descriptions(void **state) {
  (void)state;
  world w = begin();
  const rfr_op *op;
  rfr_op_desc good = softcap_desc(), d;
  OK(rfr_op_register(w.ctx, &good, &op));
  refused(&w, good, "taken");
  good.name = "mine.other";
#define WITH(change, field) (d = good, change, refused(&w, d, field))
  WITH(d.size = 8, "size");
  const char *const names[] = {NULL, "", "swish", "matmul", ".a", "a.", "a..b", "a b.c", "1a.b", "a.b(c"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) WITH(d.name = names[i], "name");
  char longest[65] = "a.";
  memset(longest + 2, 'b', 62);
  WITH(d.name = longest, "name");
  WITH(d.flags |= RFR_OP_VIEW, "view");
  WITH(d.view = every_second, "view");
  WITH((d.flags |= RFR_OP_VIEW, d.view = every_second), "flags"); /* a view has no kernel */
  WITH(d.flags |= RFR_OP_STOP, "gradient");
  WITH((d.share.of = half, d.share.operand = 1), "share");
  WITH(d.operands = "x~?", "operands");
  WITH(d.flags = 1u << 31, "flags");
  WITH(d.flags = RFR_OP_ROWS | RFR_OP_ANY, "flags");
  WITH(d.shape = NULL, "shape");
  WITH((d.flags = RFR_OP_HOST), "gradient");
  WITH((d.flags = RFR_OP_STATE, d.gradient = NULL), "flags");
  WITH(d.results = "y@x", "flags");
  WITH(d.results = "", "results");
  WITH(d.results = "y y", "results");
  WITH(d.results = "y@z", "results");
  WITH((d.operands = "x acc?", d.results = "y@acc z@acc"), "results");
  WITH(d.operands = "x x", "operands");
  WITH(d.operands = "x? x", "operands");
  WITH(d.operands = "xs* y", "operands");
  WITH(d.operands = "acc? xs*", "operands");
  WITH(d.operands = "x?*", "operands");
  WITH(d.operands = "a_name_of_16_byt", "operands");
  WITH(d.operands = "a b c d e f g h i j k l m", "operands");
  WITH(d.attributes = "cap", "attributes");
  WITH(d.attributes = "cap:x", "attributes");
  WITH(d.attributes = "cap:ff", "attributes");
  WITH(d.attributes = "phase:i", "attributes");
  WITH(d.attributes = "a:i b:i c:i d:i e:i f:i g:i h:i j:i", "attributes");
  end(&w, 1);
}

/* Recording refuses operands that the shape rule rejects, attributes out of range, and an op of another context. */
static const char *nonsense_shape(const rfr_infer *c) {
  c->out[0].rank = 99;
  return NULL;
}
static void test_recording(void **state) {
  (void)state;
  world w = begin(), other = begin();
  const rfr_op *nonsense;
  OK(register_ops(&w));
  OK(register_ops(&other));
  rfr_op_desc d = softcap_desc();
  d.name = "mine.nonsense";
  d.attributes = "to:t";
  d.gradient = NULL;
  d.shape = nonsense_shape;
  OK(rfr_op_register(w.ctx, &d, &nonsense));
  rfr_attr one = rfr_attr_int(1), far = rfr_attr_int(99);
  const struct {
    const rfr_op *op;
    const rfr_attr *attr;
    int rank;
    const char *slug, *says;
  } rows[] = {{w.softcap, &one, 1, "trace.shape", "mine.softcap: x must be f32 of rank 2"},
              {other.softcap, &one, 2, "argument", "another context"},
              {w.softcap, NULL, 2, "argument", "missing"},
              {NULL, &one, 2, "argument", "missing"},
              {nonsense, &far, 2, "argument", "out of range"},
              {nonsense, &one, 2, "trace.shape", "no valid type"}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_trace *t;
    OK(rfr_trace_create(w.ctx, &t));
    rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, rows[i].rank, ((int64_t[]){2, 3}));
    assert_int_equal(rfr_record(t, rows[i].op, 1, &x, rows[i].attr, NULL), RFR_NONE);
    assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, rows[i].slug);
    if (!strstr(rfr_last_error()->message, rows[i].says)) fail_msg("%s", rfr_last_error()->message);
    rfr_trace_destroy(t);
  }
  end(&w, OPS + 1);
  end(&other, OPS);
}

static void test_no_kernel(void **state) {
  (void)state;
  world w = begin();
  rfr_op_desc d = softcap_desc();
  d.cpu = NULL;
  OK(rfr_op_register(w.ctx, &d, &w.softcap));
  rfr_trace *t;
  rfr_programs *p;
  OK(rfr_trace_create(w.ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){2, 3}));
  rfr_attr cap = rfr_attr_float(2);
  rfr_output(t, "y", rfr_record(t, w.softcap, 1, &x, &cap, NULL));
  OK(rfr_trace_finish(t));
  const rfr_trace *traces[] = {t};
  assert_int_equal(rfr_compile(w.ctx, 1, traces, NULL, NULL, &p), RFR_UNSUPPORTED);
  assert_string_equal(rfr_last_error()->slug, "bind.no_kernel");
  assert_non_null(strstr(rfr_last_error()->message, "mine.softcap"));
  rfr_trace_destroy(t);
  end(&w, 1);
}

static double softcap_flops(const rfr_infer *c) {
  return c->attr[0].f * (double)(c->in[0].shape[0] * c->out[0].shape[1]) + (c->user == NULL);
}

static rfr_status failing_cpu(const rfr_call *c) { return c->library ? RFR_OK : RFR_NUMERIC; }

static void put(rfr_programs *p, const char *name, const void *values) {
  rfr_tensor to;
  OK(rfr_programs_tensor(p, name, &to));
  OK(rfr_programs_write(p, &to, values));
}

static void get(rfr_programs *p, const char *name, void *values) {
  rfr_tensor from;
  OK(rfr_program_output(p, 0, name, &from));
  OK(rfr_programs_read(p, &from, values));
}

/* A view has no kernel, and the strides of its rule. Costs and shares come from callbacks. An operand marked ~ passes
 * no gradient; a result marked ! may be infinite. */
static void test_rules(void **state) {
  (void)state;
  world w = begin();
  const rfr_op *evens, *weigh;
  rfr_op_desc d = rfr_op_desc_default();
  d.name = "mine.evens";
  d.operands = "x";
  d.flags = RFR_OP_VIEW;
  d.shape = evens_shape;
  d.view = every_second;
  OK(rfr_op_register(w.ctx, &d, &evens));
  d = rfr_op_desc_default();
  d.name = "mine.weigh";
  d.operands = "x by~";
  d.results = "y!";
  d.flags = RFR_OP_ANY;
  d.shape = same_as_operand;
  d.gradient = weigh_gradient;
  d.cpu = weigh_cpu;
  d.flops = d.bytes = hundred;
  d.share = (rfr_share){1, half};
  OK(rfr_op_register(w.ctx, &d, &weigh));
  rfr_trace *t;
  rfr_programs *p;
  OK(rfr_trace_create(w.ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){6, 2}));
  rfr_value by = rfr_input(t, "by", RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){1}));
  rfr_value seen = rfr_record(t, evens, 1, &x, NULL, NULL);
  rfr_output(t, "y", rfr_record(t, weigh, 2, ((rfr_value[]){seen, by}), NULL, NULL));
  OK(rfr_trace_finish(t));
  const rfr_trace *traces[] = {t};
  rfr_compile_options o = rfr_compile_options_default();
  o.debug = 1; /* a result that is not finite is an error, unless it is marked */
  for (int debug = 0; debug < 2; debug++) {
    const float values[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, two = 2;
    float y[6];
    rfr_op_time time;
    int n;
    OK(rfr_compile(w.ctx, 1, traces, NULL, debug ? &o : NULL, &p));
    put(p, "x", values);
    put(p, "by", &two);
    OK(rfr_program_run(p, 0));
    get(p, "y", y);
    for (int i = 0; i < 6; i++) assert_true(isinf(y[i]));
    const float three = 3;
    if (!debug) {
      OK(rfr_program_profile(p, 0, &time, 1, &n));
      assert_int_equal(n, 1); /* the view costs nothing */
      assert_true(time.flops == 50 && time.bytes == 100);
    }
    put(p, "by", &three);
    OK(rfr_program_run(p, 0));
    get(p, "y", y);
    for (int i = 0; i < 6; i++) assert_true(y[i] == values[2 + 4 * (i / 2) + i % 2]);
    rfr_programs_destroy(p);
  }
  rfr_trace_destroy(t);
  OK(rfr_trace_create(w.ctx, &t));
  x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){6, 2}));
  by = rfr_input(t, "by", RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){1}));
  rfr_value loss = rfr_sum(t, rfr_record(t, weigh, 2, ((rfr_value[]){x, by}), NULL, NULL), -1);
  rfr_output(t, "g", rfr_gradient(t, loss, by, RFR_F32));
  OK(rfr_trace_finish(t));
  traces[0] = t;
  assert_int_equal(rfr_compile(w.ctx, 1, traces, NULL, NULL, &p), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "autodiff.unreached");
  rfr_trace_destroy(t);
  end(&w, 2);
}

/* Its cost is the result of its callback. An error of the callback has the op's name and place, whatever the previous
 * error was. */
static void test_cost_and_failure(void **state) {
  (void)state;
  world w = begin();
  rfr_op_desc d = softcap_desc();
  d.cpu = failing_cpu;
  d.flops = softcap_flops;
  OK(rfr_op_register(w.ctx, &d, &w.softcap));
  rfr_trace *t;
  rfr_programs *p;
  OK(rfr_trace_create(w.ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){2, 3}));
  rfr_attr cap = rfr_attr_float(2);
  rfr_scope(t, "layer7");
  x = rfr_copy(t, x); /* has no FLOPs */
  rfr_output(t, "y", rfr_record(t, w.softcap, 1, &x, &cap, NULL));
  const int line = __LINE__ - 1;
  OK(rfr_trace_finish(t));
  const rfr_trace *traces[] = {t};
  OK(rfr_compile(w.ctx, 1, traces, NULL, NULL, &p));
  assert_true(rfr_program_flops(p, 0) == 2 * 6 + 1);
  OK(rfr_program_capture(p, 0));
  for (int replayed = 0; replayed < 2; replayed++) {
    assert_int_equal(rfr_program_op(p, 0, 99, &(rfr_plan_op){0}), RFR_INVALID); /* the previous error */
    assert_int_equal(replayed ? rfr_program_replay(p, 0, NULL, 0) : rfr_program_run(p, 0), RFR_NUMERIC);
    const rfr_error *e = rfr_last_error();
    assert_string_equal(e->slug, "op.kernel");
    assert_int_equal(e->status, RFR_NUMERIC);
    assert_int_equal(e->line, line);
    assert_int_equal(strncmp(e->message, "op 1 mine.softcap in layer7 (program): ", 39), 0);
    assert_non_null(strstr(e->message, ": its kernel returned \"numeric\""));
  }
  rfr_programs_destroy(p);
  for (int eager = 0; eager < 2; eager++) { /* the same in a callable: in warm-up, or at the call */
    rfr_callable c = rfr_callable_default();
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_graphs *g;
    rfr_tensor y;
    const float values[6] = {0};
    const rfr_binding in = {NULL, {.dtype = RFR_F32, .rank = 2, .shape = {2, 3}}, values};
    c.trace = t, c.inference = 1;
    o.warmup_iterations = 1 - eager, o.eager = eager;
    rfr_status s = rfr_graphs_create(w.ctx, &c, 1, &o, &g);
    if (eager) {
      OK(s);
      OK(rfr_graphs_begin_step(g, NULL, 0));
      s = rfr_graphs_forward(g, 0, 0, &in, 1, &y, 1);
    }
    assert_int_equal(s, RFR_NUMERIC);
    assert_non_null(strstr(rfr_last_error()->message, "op 1 mine.softcap in layer7 (0): "));
    rfr_graphs_destroy(g);
  }
  rfr_trace_destroy(t);
  /* an error without a file has no place before its message */
  OK(rfr_trace_create(w.ctx, &t));
  rfr_microbatch(t, -2);
  assert_int_equal(rfr_trace_status(t), RFR_INVALID);
  assert_true(strncmp(rfr_last_error()->message, "microbatch is -2", 16) == 0);
  rfr_trace_destroy(t);
  end(&w, 1);
}

/* Each allocation from registration to compile fails once: each failure is a status, no memory leaks, and the context
 * stays usable. */
static void test_allocation_faults(void **state) {
  (void)state;
  int failures = 0;
  for (int64_t k = 1;; k++) {
    world w = begin();
    rfr_trace *t = NULL;
    rfr_programs *p = NULL;
    rfr_ctx_fail_alloc(w.ctx, k);
    rfr_status s = register_ops(&w);
    if (s == RFR_OK) s = record(&w, false, true, &t);
    if (s == RFR_OK) s = compile(&w, t, NULL, &p);
    rfr_ctx_fail_alloc(w.ctx, 0);
    assert_true(s == RFR_OK || s == RFR_NO_MEMORY);
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
    if (k <= OPS) {
      assert_int_equal(s, RFR_NO_MEMORY);
      end(&w, k - 1);
      failures++;
      continue;
    }
    end(&w, OPS);
    if (s == RFR_OK) break;
    failures++;
  }
  assert_true(failures > 50);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_round_trip),
      cmocka_unit_test(test_gradient),
      cmocka_unit_test(test_replay),
      cmocka_unit_test(test_descriptions),
      cmocka_unit_test(test_recording),
      cmocka_unit_test(test_no_kernel),
      cmocka_unit_test(test_cost_and_failure),
      cmocka_unit_test(test_allocation_faults),
      cmocka_unit_test(test_rules),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
