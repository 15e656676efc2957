/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "callable/graphed.h"
#include "core/rng.h"
#include "support/graphs_scene.h"
#include "trace/trace.h"

/* ---- blocks ---- */

enum { T = RFT_T, C = RFT_C, H = 4, HIDDEN = 48, EXPERTS = 4, TOP = 2, STEPS = 10 };
static const int32_t documents[3] = {0, 10, T};

static rfr_value parameter(rft_recorder *r, const char *name, int rank, int64_t a, int64_t b, int64_t c) {
  char full[32];
  snprintf(full, sizeof full, "b%d.%s", r->block, name);
  return rfr_input(r->t, full, r->frozen >> r->block & 1 ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, r->dtype, rank,
                   ((int64_t[]){a, b, c}));
}

static rfr_value documents_of(rft_recorder *r) {
  if (r->offsets == RFR_NONE) r->offsets = rfr_input(r->t, "offsets", RFR_ROLE_CONST, RFR_I32, 1, ((int64_t[]){3}));
  return r->offsets;
}

static rfr_value dropped(rft_recorder *r, rfr_value x) {
  if (r->step == RFR_NONE) r->step = rfr_step_block(r->t);
  return rfr_dropout(r->t, x, r->step, 0.25, 0);
}

void rft_policy(rft_recorder *r, rfr_policy policy) {
  if (r->marks) rfr_set_recompute(r->t, policy);
}

rfr_value rft_block_linear(rft_recorder *r, rfr_value x) {
  return rfr_linear(r->t, x, parameter(r, "w", 2, C, C, 0), parameter(r, "bias", 1, C, 0, 0));
}

rfr_value rft_block_mlp(rft_recorder *r, rfr_value x) {
  rfr_value h = rfr_rmsnorm(r->t, x, parameter(r, "norm", 1, C, 0, 0), 1e-5);
  h = rfr_gelu(r->t, rfr_linear(r->t, h, parameter(r, "up", 2, HIDDEN, C, 0), RFR_NONE), 1);
  h = rfr_linear(r->t, h, parameter(r, "down", 2, C, HIDDEN, 0), RFR_NONE);
  return rfr_add(r->t, x, dropped(r, h));
}

rfr_value rft_block_attention(rft_recorder *r, rfr_value x) {
  const rfr_attention_options causal = {.causal = 1};
  const int64_t heads[3] = {T, H, C / H}, flat[2] = {T, C};
  rfr_value h = rfr_layernorm(r->t, x, parameter(r, "norm1", 1, C, 0, 0), parameter(r, "norm1b", 1, C, 0, 0), 1e-5),
            y[3];
  static const char *const names[3] = {"q", "k", "v"};
  for (int i = 0; i < 3; i++)
    y[i] = rfr_reshape(r->t, rfr_linear(r->t, h, parameter(r, names[i], 2, C, C, 0), RFR_NONE), 3, heads);
  h = rfr_reshape(r->t, rfr_attention(r->t, y[0], y[1], y[2], documents_of(r), &causal), 2, flat);
  return rfr_add(r->t, x, dropped(r, rfr_linear(r->t, h, parameter(r, "o", 2, C, C, 0), RFR_NONE)));
}

rfr_value rft_block_transformer(rft_recorder *r, rfr_value x) { return rft_block_mlp(r, rft_block_attention(r, x)); }

rfr_value rft_block_experts(rft_recorder *r, rfr_value x) {
  rfr_moe_options o = rfr_moe_options_default();
  o.k = TOP;
  rfr_value index, order, place;
  rfr_value h = rfr_rmsnorm(r->t, x, parameter(r, "norm", 1, C, 0, 0), 1e-5);
  rfr_value logits = rfr_linear(r->t, h, parameter(r, "router", 2, EXPERTS, C, 0), RFR_NONE);
  rfr_value weight = rfr_moe_route(r->t, logits, RFR_NONE, &o, &index);
  rfr_value splits = rfr_moe_sort(r->t, index, EXPERTS, &order, &place);
  rfr_value offsets = rfr_splits_to_offsets(r->t, splits, T * TOP, NULL);
  rfr_value rows = rfr_moe_permute(r->t, h, order, place, RFR_NONE);
  rows = rfr_grouped_linear(r->t, rows, parameter(r, "up", 3, EXPERTS, 2 * HIDDEN, C), offsets, RFR_NONE, RFR_NONE);
  rows = rfr_swiglu_weighted(r->t, rfr_slice(r->t, rows, 1, 0, HIDDEN), rfr_slice(r->t, rows, 1, HIDDEN, HIDDEN),
                             rfr_moe_row_weight(r->t, weight, order, place));
  rows = rfr_grouped_linear(r->t, rows, parameter(r, "down", 3, EXPERTS, C, HIDDEN), offsets, RFR_NONE, RFR_NONE);
  return rfr_add(r->t, x, rfr_moe_unpermute(r->t, rows, order, place, RFR_NONE));
}

/* ---- a case ---- */

rfr_trace *rft_block_trace(const rft_scene *s, int block) {
  rft_recorder r = {.dtype = s->dtype, .block = block, .frozen = s->frozen, .offsets = RFR_NONE, .step = RFR_NONE};
  r.marks = true;
  OK(rfr_trace_create(ctx, &r.t));
  rfr_value x = rfr_input(r.t, "x", RFR_ROLE_INPUT_GRAD, s->dtype, 2, ((int64_t[]){T, C}));
  rft_policy(&r, s->marked >> block & 1 ? RFR_POLICY_RECOMPUTE : RFR_POLICY_AUTO);
  rfr_output(r.t, "y", s->block(&r, x));
  OK(rfr_trace_finish(r.t));
  return r.t;
}

/* Records all blocks for microbatch m: the reference, whose main gradients are states too. */
static rfr_trace *whole_trace(const rft_scene *s, int m) {
  rft_recorder r = {.dtype = s->dtype, .frozen = s->frozen, .offsets = RFR_NONE, .step = RFR_NONE};
  OK(rfr_trace_create(ctx, &r.t));
  rfr_value x = rfr_input(r.t, "x", RFR_ROLE_INPUT_GRAD, s->dtype, 2, ((int64_t[]){T, C}));
  rfr_value dy = rfr_input(r.t, "dy", RFR_ROLE_INPUT, s->dtype, 2, ((int64_t[]){T, C})), y = x;
  rfr_microbatch(r.t, m);
  for (r.block = 0; r.block < s->blocks; r.block++) y = s->block(&r, y);
  rfr_output(r.t, "y", y);
  rfr_value loss = rfi_record(r.t, RFR_HERE, RFI_OP_cotangent, 2, (rfr_value[]){y, dy}, NULL, NULL);
  rfr_microbatch(r.t, -1);
  const int n = r.t->n_inputs;
  rfr_output(r.t, "dx", rfr_gradient(r.t, loss, x, s->dtype));
  for (int i = 0; i < n; i++) {
    const rfi_value w = r.t->values[r.t->inputs[i]];
    char name[48];
    if (w.role != RFR_ROLE_TRAINABLE) continue;
    snprintf(name, sizeof name, "grad.%s", w.name);
    rfr_value onto = rfr_input(r.t, name, RFR_ROLE_STATE, RFR_F32, w.type.rank, w.type.shape);
    rfr_output(r.t, name, rfr_gradient_onto(r.t, loss, r.t->inputs[i], onto));
  }
  OK(rfr_trace_finish(r.t));
  return r.t;
}

static float value_at(const rfr_tensor *x, int64_t i) {
  if (x->type.dtype == RFR_F32) return ((const float *)x->data)[i];
  const uint32_t bits = (uint32_t)((const uint16_t *)x->data)[i] << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static void set_value(const rfr_tensor *x, int64_t i, float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if (x->type.dtype == RFR_F32) ((float *)x->data)[i] = f;
  else ((uint16_t *)x->data)[i] = (uint16_t)(bits >> 16);
}

void rft_fill_by(const rfr_tensor *x, uint64_t seed, float by) {
  const int64_t n = rfi_count(&x->type);
  for (int64_t i = 0; i < n; i++)
    set_value(x, i,
              by * ((float)(rfi_draw4(rfi_stream_key(seed, 0), (uint64_t)i, 0, 0, 0).v[0] >> 8) / 8388608.0f - 1));
}

void rft_fill_named(rfr_graphs *g) {
  for (int i = 0; i < g->m.store.n; i++) {
    const rfi_named *x = &g->m.store.named[i];
    if (x->parameter < 0 && rfr_dtype_is_float(x->tensor.type.dtype))
      rft_fill_by(&x->tensor, 100 + (uint64_t)x->tensor.bytes, 0.3f);
  }
}

static uint64_t seed_of(const char *name) {
  uint64_t h = 5;
  for (; *name; name++) h = h * 131 + (unsigned char)*name;
  return h;
}

/* An initial value for tensors that both sides share by name. */
static void init(const rfr_tensor *x, int step) {
  if (strcmp(x->name, "offsets") == 0) memcpy(x->data, documents, sizeof documents);
  else if (x->type.dtype == RFR_I64) memcpy(x->data, (int64_t[4]){step, step, 77, 0}, 32);
  else rft_fill_by(x, seed_of(x->name), 0.4f);
}

/* Tensors may be on a device, so they are read and written through a copy. The caller frees it. */
static rfr_tensor room(const rfr_tensor *x) {
  rfr_tensor copy = *x;
  copy.data = calloc(1, (size_t)x->bytes + 1);
  assert_non_null(copy.data);
  return copy;
}
rfr_tensor rft_of_graphs(rfr_graphs *g, const rfr_tensor *x) {
  const rfr_tensor copy = room(x);
  OK(rfr_graphs_read(g, x, copy.data));
  return copy;
}
static rfr_tensor of_programs(rfr_programs *p, const rfr_tensor *x) {
  const rfr_tensor copy = room(x);
  OK(rfr_programs_read(p, x, copy.data));
  return copy;
}

rfr_main_gradient rft_main_gradient(const char *parameter, rfr_type type, void *data, int accumulate) {
  rfr_main_gradient m = rfr_main_gradient_default();
  m.parameter = parameter, m.type = type, m.data = data, m.accumulate = accumulate;
  if (data) m.bytes = rfi_bytes(&type);
  return m;
}

rfr_type rft_activation(const rft_scene *s) { return (rfr_type){.dtype = s->dtype, .rank = 2, .shape = {T, C}}; }

void rft_draw(const rft_scene *s, void *to, int step, int m, int what) {
  const rfr_tensor x = {.type = rft_activation(s), .data = to};
  rft_fill_by(&x, (uint64_t)(1000 * step + 10 * m + what), what == 1 ? 1 : 0.1f);
}

/* ---- the graphs' side ---- */

rfr_graphs *rft_make_graphs(const rft_scene *s, rfr_schedule **schedule) {
  rfr_callable c[RFT_BLOCKS];
  rfr_callable_link link[RFT_BLOCKS];
  rfr_trace *t[RFT_BLOCKS];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  *schedule = NULL;
  if (s->schedule) {
    OK(rfr_schedule_parse(ctx, "test", s->schedule, strlen(s->schedule), schedule));
    OK(rfr_schedule_set_layers(*schedule, &s->layers, 1));
  }
  for (int i = 0; i < s->blocks; i++) {
    t[i] = rft_block_trace(s, i);
    link[i] = (rfr_callable_link){"x", i - 1, "y"};
    c[i] = rfr_callable_default();
    c[i].trace = t[i];
    if (s->linked && i % (s->schedule ? s->layers : s->blocks) > 0) c[i].links = &link[i], c[i].n_links = 1;
  }
  o.schedule = *schedule;
  o.fuse = s->fuse;
  o.eager = s->eager;
  o.recompute = s->recompute;
  o.budget = s->budget;
  o.step_memory = s->step_memory;
  o.debug = s->debug;
  o.wgrad_side_stream = !s->in_order;
  o.warmup_iterations = s->linked ? 2 : 0;
  OK(rfr_graphs_create(ctx, c, s->blocks, &o, &g));
  for (int i = 0; i < s->blocks; i++) rfr_trace_destroy(t[i]);
  return g;
}

static bool is_linked(const rft_scene *s, int block) {
  return s->linked && block > 0 && block < s->blocks && block % (s->schedule ? s->layers : s->blocks) > 0;
}

void rft_forward(rfr_graphs *g, const rft_scene *s, rft_buffers *b, int block, int m) {
  const rfr_binding x = {NULL, rft_activation(s), b->x[m][block]};
  rfr_tensor y;
  OK(rfr_graphs_forward(g, block, m, &x, !is_linked(s, block), &y, 1));
  OK(rfr_graphs_read(g, &y, b->x[m][block + 1]));
}

void rft_backward(rfr_graphs *g, const rft_scene *s, rft_buffers *b, int block, int m) {
  const rfr_binding dy = {"y", rft_activation(s), b->dx[m][block + 1]};
  rfr_tensor dx;
  OK(rfr_graphs_backward(g, block, m, &dy, !is_linked(s, block + 1), &dx, !is_linked(s, block)));
  if (!is_linked(s, block)) OK(rfr_graphs_read(g, &dx, b->dx[m][block]));
}

static void run_calls(rfr_graphs *g, const rft_scene *s, const rfr_schedule *schedule, rft_buffers *b) {
  if (!schedule) {
    for (int m = 0; m < s->microbatches; m++) {
      for (int i = 0; i < s->blocks; i++) rft_forward(g, s, b, i, m);
      for (int i = s->blocks - 1; i >= 0; i--) rft_backward(g, s, b, i, m);
    }
    return;
  }
  int n;
  const rfr_action *a = rfr_schedule_actions(schedule, 0, &n);
  for (int i = 0; i < n; i++) {
    const int first = a[i].stage * s->layers, m = a[i].microbatch;
    if (a[i].op == RFR_ACTION_F)
      for (int k = 0; k < s->layers; k++) rft_forward(g, s, b, first + k, m);
    for (int k = s->layers - 1; k >= 0; k--) {
      if (a[i].op == RFR_ACTION_I || a[i].op == RFR_ACTION_B) rft_backward(g, s, b, first + k, m);
      if (a[i].op == RFR_ACTION_W && rfr_graphs_ops(g, first + k, RFR_ACTION_W) > 0)
        OK(rfr_graphs_wgrad(g, first + k, m));
    }
  }
}

/* ---- both sides ---- */

static const rft_scene *now; /* in messages */

static void same(const char *what, const char *name, const rfr_tensor *a, const void *b) {
  const rfr_tensor other = {.type = a->type, .data = (void *)b};
  int64_t differing = 0, first = 0;
  if (memcmp(a->data, b, (size_t)a->bytes) == 0) return;
  for (int64_t i = rfi_count(&a->type) - 1; i >= 0; i--)
    if (value_at(a, i) != value_at(&other, i)) differing++, first = i;
  fail_msg("schedule %s, %d blocks, %d microbatches, %s, fuse %d, linked %d: %s %s differs in %lld of %lld values; the "
           "first, [%lld], is %g of one program and %g of graphs",
           now->schedule ? now->schedule : "none", now->blocks, now->microbatches, rfr_dtype_name(now->dtype),
           now->fuse, now->linked, what, name, (long long)differing, (long long)rfi_count(&a->type), (long long)first,
           value_at(a, first), value_at(&other, first));
}

static void update(const rfr_tensor *w, const rfr_tensor *g) {
  const int64_t n = rfi_count(&w->type);
  for (int64_t i = 0; i < n; i++) set_value(w, i, value_at(w, i) - 0.004f * ((const float *)g->data)[i]);
}

/* Sets the values of step 0 on both sides. */
static void init_both(rfr_programs *p, rfr_graphs *g) {
  rfr_tensor a, b;
  for (int i = 0; rfr_programs_tensor_at(p, i, &a) == RFR_OK; i++) {
    rfr_tensor copy = room(&a);
    init(&copy, 0);
    OK(rfr_programs_write(p, &a, copy.data));
    if (rfr_graphs_tensor(g, a.name, &b) == RFR_OK) OK(rfr_graphs_write(g, &b, copy.data));
    free(copy.data);
  }
  OK(rfr_programs_load(p));
}

/* Begins the reference's step: clears main gradients and sets the step block. */
static void begin_oracle(rfr_programs *p, int step) {
  rfr_tensor a;
  for (int i = 0; rfr_programs_tensor_at(p, i, &a) == RFR_OK; i++) {
    const bool gradient = strncmp(a.name, "grad.", 5) == 0;
    if (!gradient && a.type.dtype != RFR_I64) continue;
    rfr_tensor copy = room(&a);
    if (!gradient) init(&copy, step);
    OK(rfr_programs_write(p, &a, copy.data));
    free(copy.data);
  }
}

static void run_oracle(rfr_programs *p, const rft_scene *s, int step, int m, const rft_buffers *ours) {
  static unsigned char drawn[T * C * 4];
  static const char *const in[2] = {"x", "dy"};
  rfr_tensor a;
  for (int i = 0; i < 2; i++) {
    OK(rfr_programs_tensor(p, in[i], &a));
    rft_draw(s, drawn, step, m, i + 1);
    OK(rfr_programs_write(p, &a, drawn));
  }
  OK(rfr_program_run(p, m));
  OK(rfr_program_output(p, m, "y", &a));
  rfr_tensor y = of_programs(p, &a);
  same("output", "y", &y, ours->x[m][s->blocks]);
  OK(rfr_program_output(p, m, "dx", &a));
  rfr_tensor dx = of_programs(p, &a);
  same("input gradient", "dx", &dx, ours->dx[m][0]);
  free(y.data);
  free(dx.data);
}

/* Uses the order in which the first stage sums its weights' gradients; all stages have the same order. */
static void run_oracles(rfr_programs *p, const rft_scene *s, const rfr_schedule *schedule, int step,
                        const rft_buffers *ours) {
  int n = 0;
  const rfr_action *a = schedule ? rfr_schedule_actions(schedule, 0, &n) : NULL;
  for (int m = 0; !schedule && m < s->microbatches; m++) run_oracle(p, s, step, m, ours);
  for (int i = 0; i < n; i++)
    if (a[i].stage == 0 && (a[i].op == RFR_ACTION_W || a[i].op == RFR_ACTION_B))
      run_oracle(p, s, step, a[i].microbatch, ours);
}

/* Checks that both have the same main gradients; then each makes a step of gradient descent, and weights must be
 * equal. */
static void descend(rfr_programs *p, rfr_graphs *g, int step) {
  rfr_tensor a, grad, w, v;
  for (int i = 0; rfr_programs_tensor_at(p, i, &a) == RFR_OK; i++) {
    if (strncmp(a.name, "grad.", 5) != 0) continue;
    const char *name = a.name + 5;
    OK(rfr_graphs_gradient(g, name, &grad));
    rfr_tensor da = of_programs(p, &a), db = rft_of_graphs(g, &grad);
    same("gradient", name, &da, db.data);
    double norm = 0;
    for (int64_t k = 0; k < a.bytes / 4; k++) norm += (double)((float *)da.data)[k] * ((float *)da.data)[k];
    if (!(norm > 0 && norm < 1e12)) fail_msg("step %d: the gradient of %s has norm %g", step, name, norm);
    OK(rfr_programs_tensor(p, name, &w));
    OK(rfr_graphs_tensor(g, name, &v));
    rfr_tensor wa = of_programs(p, &w), wb = rft_of_graphs(g, &v);
    update(&wa, &da);
    update(&wb, &db);
    same("weight", name, &wa, wb.data);
    OK(rfr_programs_write(p, &w, wa.data));
    OK(rfr_graphs_write(g, &v, wb.data));
    free(da.data);
    free(db.data);
    free(wa.data);
    free(wb.data);
  }
}

void rft_run_scene(const rft_scene *s) {
  now = s;
  rfr_trace *t[RFT_MICROBATCHES];
  static rft_buffers ours;
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(s, &schedule);
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p;
  rfr_tensor a;
  o.fuse = s->fuse;
  for (int m = 0; m < s->microbatches; m++) t[m] = whole_trace(s, m);
  OK(rfr_compile(ctx, s->microbatches, (const rfr_trace *const *)t, NULL, &o, &p));
  init_both(p, g);
  for (int step = 0; step < STEPS; step++) {
    const int64_t block[4] = {step, step, 77, 0};
    const rfr_binding now = {"step", {.dtype = RFR_I64, .rank = 1, .shape = {4}}, block};
    const bool random = rfr_graphs_tensor(g, "step", &a) == RFR_OK;
    OK(rfr_graphs_begin_step(g, &now, random));
    begin_oracle(p, step);
    for (int m = 0; m < s->microbatches; m++) {
      rft_draw(s, ours.x[m][0], step, m, 1);
      rft_draw(s, ours.dx[m][s->blocks], step, m, 2);
    }
    run_calls(g, s, schedule, &ours);
    OK(rfr_graphs_end_step(g));
    run_oracles(p, s, schedule, step, &ours);
    descend(p, g, step);
  }
  for (int m = 0; m < s->microbatches; m++) rfr_trace_destroy(t[m]);
  rfr_programs_destroy(p);
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

void rft_refused(rfr_status s, const char *slug, const char *text) {
  const rfr_error *e = rfr_last_error();
  if (s == RFR_OK) fail_msg("taken, but should be %s: %s", slug, text);
  if (strcmp(e->slug, slug) != 0 || !strstr(e->message, text)) fail_msg("%s: %s", e->slug, e->message);
}

rfr_schedule *rft_generate(rfr_schedule_kind kind, int ranks, int microbatches, int chunks) {
  rfr_schedule_options o = rfr_schedule_options_default();
  rfr_schedule *s;
  o.kind = kind, o.ranks = ranks, o.microbatches = microbatches, o.chunks = chunks;
  OK(rfr_schedule_generate(ctx, &o, &s));
  return s;
}

rfr_graphs *rft_create_after_faults(const rfr_callable *c, const rfr_graphs_options *o, int64_t least) {
  const int64_t live = rfr_ctx_get_stats(ctx).live_blocks;
  for (int64_t k = 1;; k++) {
    rfr_graphs *g;
    rfr_ctx_fail_alloc(ctx, k);
    const rfr_status st = rfr_graphs_create(ctx, c, 1, o, &g);
    rfr_ctx_fail_alloc(ctx, 0);
    if (st == RFR_OK) {
      assert_true(k > least);
      return g;
    }
    if (st != RFR_NO_MEMORY) fail_msg("allocation %lld: %s", (long long)k, rfr_last_error()->message);
    assert_null(g);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, live);
  }
}
