/* SPDX-License-Identifier: Apache-2.0
 *
 * Frozen inputs need no gradients and no saved activations. Each case is a small program with some inputs frozen. It
 * lists the remaining ops with their results, and gives a formula for the bytes that the forward saves for the
 * backward. Its gradients must be bitwise equal to those of the same program with everything trained. The savings that
 * autodiff reports must equal the difference between the two.
 *
 * Then come random subsets of two small transformers, and gradients that are always zero.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "core/convert.h"
#include "core/rng.h"
#include "refrain/nn.h"
#include "refrain/program.h"
#include "support/context.h"
#include "trace/trace.h"

/* ---- programs ---- */

enum { MOST = 64 };

typedef struct builder {
  rfr_trace *t;
  uint64_t train; /* bit i: the gradient of candidate i is requested */
  int n;
  rfr_value candidate[MOST];
} builder;

static rfr_value candidate(builder *b, const char *name, rfr_role yes, rfr_role no, int64_t m, int64_t n) {
  rfr_role role = b->train >> b->n & 1 ? yes : no;
  return b->candidate[b->n++] = rfr_input(b->t, name, role, RFR_F32, n ? 2 : 1, ((int64_t[]){m, n}));
}
static rfr_value weight(builder *b, const char *name, int64_t m, int64_t n) {
  return candidate(b, name, RFR_ROLE_TRAINABLE, RFR_ROLE_FROZEN, m, n);
}
static rfr_value input(builder *b, const char *name, int64_t m, int64_t n) {
  return rfr_input(b->t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){m, n}));
}
static void finish(builder *b, rfr_value loss) {
  rfr_output(b->t, "loss", loss);
  for (int i = 0; i < b->n; i++) {
    char name[128];
    if (!(b->train >> i & 1)) continue;
    snprintf(name, sizeof name, "d_%s", rfr_value_name(b->t, b->candidate[i]));
    rfr_output(b->t, name, rfr_gradient(b->t, loss, b->candidate[i], RFR_F32));
  }
}
/* y . r, with r random. */
static rfr_value dot(builder *b, rfr_value y) {
  rfr_type type = rfr_value_type(b->t, y);
  return rfr_sum(b->t, rfr_mul(b->t, y, input(b, "r", type.shape[0], type.shape[1])), -1);
}

/* Initial values depend only on the input's name, so that they agree between programs. */
static void fill_inputs(rfr_programs *p) {
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    uint64_t key = 14695981039346656037u;
    for (const char *s = x.name; *s; s++) key = (key ^ (unsigned char)*s) * 1099511628211u;
    if (x.type.dtype == RFR_I64) ((int64_t *)x.data)[2] = 77; /* the step block's seed */
    for (int64_t k = 0; k < rfi_count(&x.type) && rfr_dtype_is_float(x.type.dtype); k++) {
      const float value = (float)(rfi_draw4(key, (uint64_t)k, 0, 0, 0).v[0] >> 8) / 8388608.0f - 1.0f;
      rfi_convert(x.type.dtype, (char *)x.data + k * rfr_dtype_bits(x.type.dtype) / 8, RFR_F32, &value, 1);
    }
    for (int64_t k = 0; k < rfi_count(&x.type) && x.type.dtype == RFR_I32; k++)
      ((int32_t *)x.data)[k] = (int32_t)(strcmp(x.name, "offsets") ? k * 7 % 24 : k * k * 4); /* offsets are 0, 4, 16 */
  }
}

static rfr_programs *compile(const rfr_trace *t, bool fuse) {
  rfr_compile_options o = rfr_compile_options_default();
  o.fuse = fuse;
  o.loss_chunk = 5;
  rfr_programs *p = rft_compile(t, &o);
  fill_inputs(p);
  OK(rfr_programs_load(p));
  return p;
}

/* ---- the remaining ops ---- */

/* Text such as "forward: 2 matmul, gelu; dgrad: ...": the ops with a kernel by phase, in the order of ops.def. For an
 * op with a dead result, the live results follow in brackets. */
static void describe(const rfr_trace *t, char *text, size_t size) {
  static const char *const phases[] = {"load", "setup", "forward", "dgrad", "wgrad", "optim"};
  size_t n = 0;
  text[0] = 0;
  for (int phase = 0; phase <= RFR_PHASE_OPTIM; phase++) {
    bool any = false;
    for (int code = 0; code < RFI_OP_COUNT; code++)
      for (unsigned live = 0; live < 8; live++) {
        int count = 0;
        const rfi_op_def *def = rfi_op_def_get((rfi_opcode)code);
        for (int i = 0; i < t->n_ops; i++) {
          unsigned mask = 0;
          for (int j = 0; j < t->ops[i].n_out; j++) mask |= t->ops[i].out[j] >= 0 ? 1u << j : 0;
          count += t->ops[i].def == def && t->ops[i].phase == phase && mask == live && !(def->flags & RFI_VIEW);
        }
        if (!count) continue;
        n += (size_t)snprintf(text + n, size - n, "%s%s", any ? ", " : n ? "; " : "", any ? "" : phases[phase]);
        n += (size_t)snprintf(text + n, size - n, "%s", any ? "" : ": ");
        if (count > 1) n += (size_t)snprintf(text + n, size - n, "%d ", count);
        n += (size_t)snprintf(text + n, size - n, "%s", def->name);
        const char *separator = "[";
        int results = def->n_results;
        while (results > 0 && def->only_onto[results - 1]) results--; /* for recompute only */
        for (int j = 0; j < results && live != (1u << results) - 1; j++)
          if (live >> j & 1) {
            n += (size_t)snprintf(text + n, size - n, "%s%s", separator, def->result[j]);
            separator = " ";
          }
        if (*separator == ' ') n += (size_t)snprintf(text + n, size - n, "]");
        any = true;
        assert_true(n < size);
      }
  }
}

static bool is_frozen_in(const rfr_trace *t, const char *name) {
  for (int i = 0; i < t->n_inputs; i++)
    if (strcmp(t->values[t->inputs[i]].name, name) == 0) return t->values[t->inputs[i]].role == RFR_ROLE_FROZEN;
  return false;
}

/* Bytes that the forward computes and the backward reads. Values that depend only on inputs that are frozen in `like`
 * do not count. */
static int64_t saved_bytes(const rfr_trace *t, const rfr_trace *like) {
  int64_t bytes = 0;
  bool *changes = calloc((size_t)t->n_values + 1, 1), *saved = calloc((size_t)t->n_values + 1, 1);
  assert_true(changes && saved);
  for (int i = 0; i < t->n_inputs; i++) changes[t->inputs[i]] = !is_frozen_in(like, t->values[t->inputs[i]].name);
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    bool any = false, backward = op->phase > RFR_PHASE_FORWARD && !(op->def->flags & RFI_VIEW);
    for (int k = 0; k < op->n_in; k++) {
      if (op->in[k] < 0) continue;
      any |= changes[op->in[k]];
      saved[t->values[op->in[k]].base] |= backward;
    }
    for (int j = 0; j < op->n_out; j++)
      if (op->out[j] >= 0) changes[op->out[j]] = any;
  }
  for (rfr_value v = 0; v < t->n_values; v++)
    if (saved[v] && changes[v] && t->values[v].op >= 0 && t->ops[t->values[v].op].phase == RFR_PHASE_FORWARD)
      bytes += rfi_bytes(&t->values[v].type);
  free(changes);
  free(saved);
  return bytes;
}

static void assert_same_output(const rfr_programs *p, const rfr_programs *q, const char *name) {
  rfr_tensor a, b;
  OK(rfr_program_output(p, 0, name, &a));
  OK(rfr_program_output(q, 0, name, &b));
  assert_int_equal(a.bytes, b.bytes);
  bool nonzero = false;
  for (int64_t k = 0; k < a.bytes / 4; k++) nonzero |= ((const float *)a.data)[k] != 0;
  if (!nonzero) fail_msg("%s is zero", name);
  for (int64_t k = 0; k < a.bytes / 4; k++)
    if (memcmp((const float *)a.data + k, (const float *)b.data + k, 4) != 0)
      fail_msg("%s[%lld] is %.9g, everything trained it is %.9g", name, (long long)k, ((const float *)a.data)[k],
               ((const float *)b.data)[k]);
}

/* ---- the programs of the cases; all sizes are different ---- */

enum { T = 24, A = 20, B = 36, C = 28, R = 4, V = 40, F = 4 /* bytes of an f32 */ };

/* x 1, w0 2, b0 4, w1 8, b1 16 */
static void mlp(builder *b) {
  rfr_value x = candidate(b, "x", RFR_ROLE_INPUT_GRAD, RFR_ROLE_INPUT, T, A);
  rfr_value w0 = weight(b, "w0", B, A), b0 = weight(b, "b0", B, 0);
  rfr_value w1 = weight(b, "w1", C, B), b1 = weight(b, "b1", C, 0);
  rfr_value h = rfr_gelu(b->t, rfr_linear(b->t, x, w0, b0), 1);
  finish(b, dot(b, rfr_linear(b->t, h, w1, b1)));
}

/* bf16 GEMMs of f32 weights; w0 1, w1 2, b 4 */
static void casts(builder *b) {
  rfr_trace *t = b->t;
  rfr_value x = input(b, "x", T, A), w0 = weight(b, "w0", B, A), w1 = weight(b, "w1", C, B);
  rfr_value bias = weight(b, "b", C, 0);
  rfr_value h = rfr_linear(t, rfr_cast(t, x, RFR_BF16), rfr_cast(t, w0, RFR_BF16), RFR_NONE);
  h = rfr_linear(t, rfr_silu(t, h), rfr_cast(t, w1, RFR_BF16), bias);
  finish(b, dot(b, rfr_cast(t, h, RFR_F32)));
}

/* A table that is also the head, where it is detached; table 1, w 2 */
static void tied(builder *b) {
  rfr_trace *t = b->t;
  rfr_value ids = rfr_input(t, "ids", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){T}));
  rfr_value table = weight(b, "table", V, A), w = weight(b, "w", A, A);
  rfr_value h = rfr_linear(t, rfr_embedding(t, table, ids), w, RFR_NONE);
  finish(b, dot(b, rfr_linear(t, h, rfr_detach(t, table), RFR_NONE)));
}

/* w0 1, a0 2, b0 4, w1 8, a1 16, b1 32 */
static void lora(builder *b) {
  rfr_trace *t = b->t;
  rfr_value h = input(b, "x", T, A);
  const int64_t width[3] = {A, B, C};
  for (int i = 0; i < 2; i++) {
    char name[3][8];
    for (int k = 0; k < 3; k++) snprintf(name[k], sizeof name[k], "%c%d", "wab"[k], i);
    rfr_value w = weight(b, name[0], width[i + 1], width[i]), a = weight(b, name[1], R, width[i]);
    rfr_value up = weight(b, name[2], width[i + 1], R);
    rfr_value low = rfr_linear(t, rfr_linear(t, h, a, RFR_NONE), up, RFR_NONE);
    h = rfr_add(t, rfr_linear(t, h, w, RFR_NONE), rfr_scale(t, low, 2, RFR_NONE));
    if (i == 0) h = rfr_gelu(t, h, 0);
  }
  finish(b, dot(b, h));
}

/* x 1, scale 2, w 4, g 8, b 16 */
static void norms(builder *b) {
  rfr_value x = candidate(b, "x", RFR_ROLE_INPUT_GRAD, RFR_ROLE_INPUT, T, A);
  rfr_value scale = weight(b, "scale", A, 0), w = weight(b, "w", B, A);
  rfr_value g = weight(b, "g", B, 0), c = weight(b, "b", B, 0);
  rfr_value h = rfr_linear(b->t, rfr_rmsnorm(b->t, x, scale, 1e-5), w, RFR_NONE);
  finish(b, dot(b, rfr_layernorm(b->t, h, g, c, 1e-5)));
}

/* w0 1, w1 2 */
static void dropouts(builder *b) {
  rfr_trace *t = b->t;
  rfr_value step = rfr_step_block(t), x = input(b, "x", T, A), w0 = weight(b, "w0", B, A), w1 = weight(b, "w1", C, B);
  rfr_value h = rfr_dropout(t, rfr_linear(t, x, w0, RFR_NONE), step, 0.3, 0);
  finish(b, dot(b, rfr_dropout(t, rfr_linear(t, h, w1, RFR_NONE), step, 0.2, 0)));
}

/* Three microbatches; w0 1, w1 2 */
static void microbatches(builder *b) {
  rfr_trace *t = b->t;
  rfr_value x = input(b, "x", T, A), r = input(b, "r", T / 3, C);
  rfr_value w0 = weight(b, "w0", B, A), w1 = weight(b, "w1", C, B), loss = RFR_NONE;
  for (int m = 0; m < 3; m++) {
    rfr_microbatch(t, m);
    rfr_value h = rfr_gelu(t, rfr_linear(t, rfr_slice(t, x, 0, m * T / 3, T / 3), w0, RFR_NONE), 1);
    rfr_value part = rfr_sum(t, rfr_mul(t, rfr_linear(t, h, w1, RFR_NONE), r), -1);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  finish(b, loss);
}

/* Three weights packed in one, the third detached; packed 1, w 2 */
static void packed(builder *b) {
  rfr_trace *t = b->t;
  rfr_value x = input(b, "x", T, A), p = weight(b, "packed", 3 * B, A), w = weight(b, "w", C, B), y[3];
  for (int i = 0; i < 3; i++) {
    rfr_value part = rfr_slice(t, p, 0, i * B, B);
    y[i] = rfr_linear(t, x, i == 2 ? rfr_detach(t, part) : part, RFR_NONE);
  }
  finish(b, dot(b, rfr_linear(t, rfr_add(t, rfr_mul(t, y[0], y[1]), y[2]), w, RFR_NONE)));
}

/* Rows with weights, as for experts; gate 1, up 2, weight 4 */
static void weighted(builder *b) {
  rfr_value x = input(b, "x", T, A), gate = weight(b, "gate", B, A), up = weight(b, "up", B, A);
  rfr_value by = weight(b, "weight", T, 0);
  gate = rfr_linear(b->t, x, gate, RFR_NONE), up = rfr_linear(b->t, x, up, RFR_NONE);
  finish(b, dot(b, rfr_swiglu_weighted(b->t, gate, up, by)));
}

static const struct frozen_case {
  const char *name;
  void (*build)(builder *);
  uint64_t train, all;
  int64_t saved;
  const char *left;
  bool fuse, replay;
} cases[] = {
    {"input without gradient", mlp, 0x1e, 0x1f, 2 * T *B *F /* before and after gelu */,
     "forward: 2 matmul, mul, gelu, sum; dgrad: matmul, mul, fill, gelu_bwd; wgrad: 2 matmul, 2 sum"},
    {"frozen weights, trainable biases", mlp, 0x14, 0x1e, T *B *F,
     "forward: 2 matmul, mul, gelu, sum; dgrad: matmul, mul, fill, gelu_bwd; wgrad: 2 sum"},
    {"trainable weights, frozen biases", mlp, 0xa, 0x1e, 2 * T *B *F,
     "forward: 2 matmul, mul, gelu, sum; dgrad: matmul, mul, fill, gelu_bwd; wgrad: 2 matmul"},
    {"last bias alone", mlp, 0x10, 0x1e, 0, "forward: 2 matmul, mul, gelu, sum; dgrad: mul, fill; wgrad: sum"},
    {"first weight alone", mlp, 0x2, 0x1e, T *B *F,
     "forward: 2 matmul, mul, gelu, sum; dgrad: matmul, mul, fill, gelu_bwd; wgrad: matmul"},
    {"input alone", mlp, 0x1, 0x1f, T *B *F, "forward: 2 matmul, mul, gelu, sum; dgrad: 2 matmul, mul, fill, gelu_bwd"},
    {"cast before a trainable weight", casts, 0x1, 0x3, T *A * 2 + T *B * 2,
     "load: cast; forward: 2 matmul, mul, 3 cast, silu, sum; dgrad: matmul, mul, cast, fill, silu_bwd; "
     "wgrad: matmul"},
    {"cast before a frozen weight", casts, 0x2, 0x3, T *B * 2,
     "load: cast; forward: 2 matmul, mul, 3 cast, silu, sum; dgrad: mul, cast, fill; wgrad: matmul"},
    {"casts of frozen weights", casts, 0x4, 0x7, 0,
     "load: 2 cast; forward: 2 matmul, mul, 2 cast, silu, sum; dgrad: mul, cast, fill; wgrad: sum"},
    {"tied, one use detached", tied, 0x1, 0x3, 0,
     "forward: 2 matmul, embedding, mul, sum; dgrad: 2 matmul, mul, fill; wgrad: embedding_grad"},
    {"tied and frozen", tied, 0x2, 0x3, T *A *F,
     "forward: 2 matmul, embedding, mul, sum; dgrad: matmul, mul, fill; wgrad: matmul"},
    {"LoRA", lora, 0x36, 0x3f, 2 * T *R *F + 2 * T *B *F,
     "forward: 6 matmul, 2 add, mul, 2 scale, gelu, sum; dgrad: 4 matmul, add, mul, 2 scale, fill, "
     "gelu_bwd; wgrad: 4 matmul"},
    {"LoRA, first layer's A alone", lora, 0x2, 0x3f, T *B *F,
     "forward: 6 matmul, 2 add, mul, 2 scale, gelu, sum; dgrad: 4 matmul, add, mul, 2 scale, fill, "
     "gelu_bwd; wgrad: matmul"},
    {"frozen norm scales", norms, 0x5, 0x1f, T *F + T *A *F + T *B *F + 2 * T *F,
     "forward: matmul, layernorm, rmsnorm, mul, sum; dgrad: matmul, layernorm_dx, rmsnorm_dx, mul, fill; "
     "wgrad: matmul"},
    {"last norm's bias alone", norms, 0x10, 0x1e, 0,
     "forward: matmul, layernorm[y], rmsnorm[y], mul, sum; dgrad: mul, fill; wgrad: layernorm_db"},
    {"last norm's scale alone", norms, 0x8, 0x1e, T *B *F + 2 * T *F,
     "forward: matmul, layernorm, rmsnorm[y], mul, sum; dgrad: mul, fill; wgrad: layernorm_dw"},
    {"dropout before a frozen weight", dropouts, 0x2, 0x3, T *B *F,
     "forward: 2 matmul, mul, 2 dropout, sum; dgrad: mul, fill, dropout; wgrad: matmul", false, true},
    {"dropout, everything trained", dropouts, 0x3, 0x3, T *B *F,
     "forward: 2 matmul, mul, 2 dropout, sum; dgrad: matmul, mul, fill, 2 dropout; wgrad: 2 matmul", false, true},
    {"microbatches, first weight frozen", microbatches, 0x2, 0x3, 3 * (T / 3) * B *F,
     "setup: fill; forward: 6 matmul, 3 mul, 3 gelu, 3 sum; dgrad: mul; wgrad: 3 matmul", true, true},
    {"microbatches, second weight frozen", microbatches, 0x1, 0x3, 3 * (T / 3) * B *F,
     "setup: fill; forward: 6 matmul, 3 mul, 3 gelu, 3 sum; dgrad: matmul, mul, 3 gelu_bwd; "
     "wgrad: 3 matmul",
     true, true},
    {"packed weight", packed, 0x1, 0x3, 2 * T *B *F,
     "forward: 4 matmul, add, 2 mul, sum; dgrad: matmul, 3 mul, fill; wgrad: 2 matmul, add, 2 pad"},
    {"packed and frozen", packed, 0x2, 0x3, T *B *F,
     "forward: 4 matmul, add, 2 mul, sum; dgrad: mul, fill; wgrad: matmul"},
    {"weighted rows, trained: gate", weighted, 0x1, 0x7, 2 * T *B *F,
     "forward: 2 matmul, mul, swiglu_weighted, sum; dgrad: mul, fill, swiglu_weighted_bwd[dgate]; wgrad: matmul"},
    {"weighted rows, trained: up", weighted, 0x2, 0x7, 2 * T *B *F,
     "forward: 2 matmul, mul, swiglu_weighted, sum; dgrad: mul, fill, swiglu_weighted_bwd[dup]; wgrad: matmul"},
    {"weighted rows, trained: gate, up", weighted, 0x3, 0x7, 2 * T *B *F,
     "forward: 2 matmul, mul, swiglu_weighted, sum; dgrad: mul, fill, swiglu_weighted_bwd[dgate dup]; wgrad: 2 matmul"},
    {"weighted rows, trained: weight", weighted, 0x4, 0x7, 2 * T *B *F,
     "forward: 2 matmul, mul, swiglu_weighted, sum; dgrad: mul, fill, swiglu_weighted_bwd[dweight]"},
    {"weighted rows, trained: gate, weight", weighted, 0x5, 0x7, 2 * T *B *F,
     "forward: 2 matmul, mul, swiglu_weighted, sum; dgrad: mul, fill, swiglu_weighted_bwd[dweight dgate]; "
     "wgrad: matmul"},
    {"weighted rows, trained: up, weight", weighted, 0x6, 0x7, 2 * T *B *F,
     "forward: 2 matmul, mul, swiglu_weighted, sum; dgrad: mul, fill, swiglu_weighted_bwd[dweight dup]; wgrad: matmul"},
    {"weighted rows, trained: gate, up, weight", weighted, 0x7, 0x7, 2 * T *B *F,
     "forward: 2 matmul, mul, swiglu_weighted, sum; dgrad: mul, fill, swiglu_weighted_bwd; wgrad: 2 matmul"},
};

/* ---- the checks ---- */

static rfr_trace *record(const struct frozen_case *c, uint64_t train) {
  builder b = {.train = train};
  OK(rfr_trace_create(ctx, &b.t));
  c->build(&b);
  OK(rfr_trace_finish(b.t));
  return b.t;
}

/* The number of saved bytes, from the second line from the end of the report. */
static int64_t reported_bytes(const char *report, const char *what) {
  const char *s = strstr(report, "pruned: total ");
  if (!s) return 0;
  s = strstr(s, what);
  assert_non_null(s);
  s = strstr(s, "-");
  return strtoll(s + 1, NULL, 10);
}

static void check_case(const struct frozen_case *c) {
  rfr_trace *some = record(c, c->train), *all = record(c, c->all);
  rfr_programs *p = compile(some, c->fuse), *q = compile(all, c->fuse);
  const rfr_trace *left = rfr_program_trace(p, 0, "lower");
  char text[1000];
  describe(left, text, sizeof text);
  if (strcmp(text, c->left) != 0) fail_msg("%s: left is\n%s, not\n%s", c->name, text, c->left);
  int64_t saved = saved_bytes(left, some), whole = saved_bytes(rfr_program_trace(q, 0, "lower"), some);
  if (saved != c->saved) fail_msg("%s: saved %lld bytes, not %lld", c->name, (long long)saved, (long long)c->saved);
  int64_t gradients = 0;
  for (int i = 0; i < some->n_inputs; i++)
    if (some->values[some->inputs[i]].role == RFR_ROLE_FROZEN)
      gradients += rfi_bytes(&some->values[some->inputs[i]].type);
  const char *report = rfr_program_report(p, 0, "autodiff");
  bool same_inputs = true; /* the report compares with training the frozen weights; other inputs stay frozen */
  for (int i = 0; i < some->n_inputs; i++)
    same_inputs &=
        some->values[some->inputs[i]].role != RFR_ROLE_INPUT || all->values[all->inputs[i]].role == RFR_ROLE_INPUT;
  if (same_inputs &&
      (reported_bytes(report, "saved values") != whole - saved || reported_bytes(report, "gradients") != gradients))
    fail_msg("%s: pruned %lld bytes of saved values and %lld of gradients, the report says\n%s", c->name,
             (long long)(whole - saved), (long long)gradients, report);
  OK(rfr_program_run(p, 0));
  OK(rfr_program_run(q, 0));
  for (int round = 0; round < (c->replay ? 3 : 1); round++) {
    if (round == 1) OK(rfr_program_capture(p, 0));
    if (round > 0) OK(rfr_program_replay(p, 0, NULL, 0));
    assert_same_output(p, q, "loss");
    for (int i = 0; i < left->n_outputs; i++) assert_same_output(p, q, left->outputs[i].name);
  }
  rfr_programs_destroy(p);
  rfr_programs_destroy(q);
  rfr_trace_destroy(some);
  rfr_trace_destroy(all);
}

static void test_cases(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_case(&cases[i]);
}

/* Without a requested gradient there is no backward. A requested gradient of a frozen input is refused. */
static void test_all_frozen(void **state) {
  (void)state;
  builder b = {.train = 0};
  rfr_programs *p;
  char text[1000];
  OK(rfr_trace_create(ctx, &b.t));
  mlp(&b);
  p = compile(b.t, true);
  describe(rfr_program_trace(p, 0, "lower"), text, sizeof text);
  assert_string_equal(text, "forward: 2 matmul, mul, gelu, sum");
  assert_int_equal(saved_bytes(rfr_program_trace(p, 0, "lower"), b.t), 0);
  assert_non_null(strstr(rfr_program_report(p, 0, "autodiff"), "no backward"));
  rfr_programs_destroy(p);
  rfr_output(b.t, "g", rfr_gradient(b.t, b.t->outputs[0].value, b.candidate[1], RFR_F32));
  assert_int_not_equal(rfr_compile(ctx, 1, (const rfr_trace *const[]){b.t}, NULL, NULL, &p), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, "autodiff.role");
  assert_non_null(strstr(rfr_last_error()->message, "\"w0\""));
  rfr_trace_destroy(b.t);
}

/* A pruned gradient is reported with the size that it would have: two bytes per element if all gradients are requested
 * in bf16. */
static void test_reported_type(void **state) {
  (void)state;
  for (int narrow = 0; narrow < 2; narrow++) {
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    rfr_value w[2], x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_BF16, 2, ((int64_t[]){T, A}));
    w[0] = rfr_input(t, "w0", RFR_ROLE_FROZEN, RFR_BF16, 2, ((int64_t[]){B, A}));
    w[1] = rfr_input(t, "w1", RFR_ROLE_TRAINABLE, RFR_BF16, 2, ((int64_t[]){C, B}));
    rfr_value y = rfr_linear(t, rfr_linear(t, x, w[0], RFR_NONE), w[1], RFR_NONE);
    rfr_value loss = rfr_sum(t, rfr_cast(t, y, RFR_F32), -1);
    rfr_output(t, "g", rfr_gradient(t, loss, w[1], narrow ? RFR_BF16 : RFR_F32));
    rfr_programs *p = rft_compile(t, NULL);
    assert_int_equal(reported_bytes(rfr_program_report(p, 0, "autodiff"), "gradients"), A * B * (narrow ? 2 : 4));
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
}

/* ---- random subsets of two transformers ---- */

static rfr_trace *transformer(const rfr_model_config *c, uint64_t train) {
  enum { TOKENS = 16, MICROBATCHES = 2 };
  builder b = {.train = train, .n = rfr_model_parameter_count(c)};
  static rfr_parameter parameter[MOST];
  const char *frozen[MOST];
  rfr_value part[MICROBATCHES], tokens[MICROBATCHES], targets[MICROBATCHES], loss;
  int n_frozen = 0;
  assert_true(b.n <= MOST);
  OK(rfr_trace_create(ctx, &b.t));
  for (int i = 0; i < b.n; i++) {
    OK(rfr_model_parameter(c, i, &parameter[i]));
    if (!(train >> i & 1)) frozen[n_frozen++] = parameter[i].name;
  }
  for (int m = 0; m < MICROBATCHES; m++) {
    tokens[m] = rfr_input(b.t, m ? "tokens1" : "tokens0", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){TOKENS}));
    targets[m] = rfr_input(b.t, m ? "targets1" : "targets0", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){TOKENS}));
  }
  rfr_value offsets = rfr_input(b.t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){3}));
  rfr_value step = rfr_step_block(b.t), inv = rfr_token_count(b.t, MICROBATCHES, targets, -100, NULL);
  rfr_model_declare(b.t, c, frozen, n_frozen, b.candidate);
  for (int m = 0; m < MICROBATCHES; m++) {
    rfr_microbatch(b.t, m);
    rfr_value h = rfr_model_forward(b.t, c, b.candidate, tokens[m], offsets, step);
    part[m] = rfr_cross_entropy(b.t, rfr_model_logits(b.t, c, b.candidate, h, RFR_F32), targets[m], inv, -100);
  }
  rfr_microbatch(b.t, -1);
  loss = rfr_add(b.t, part[0], part[1]);
  finish(&b, loss);
  OK(rfr_trace_finish(b.t));
  return b.t;
}

static int backward_ops(const rfr_trace *t) {
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) n += t->ops[i].phase > RFR_PHASE_FORWARD && !(t->ops[i].def->flags & RFI_VIEW);
  return n;
}

/* Compares with `full`; returns the number of backward ops. */
static int check_subset(const rfr_model_config *c, uint64_t train, const rfr_programs *full, bool fuse) {
  rfr_trace *t = transformer(c, train);
  rfr_programs *p = compile(t, fuse);
  const rfr_trace *left = rfr_program_trace(p, 0, "lower");
  OK(rfr_program_run(p, 0));
  for (int i = 0; i < left->n_outputs; i++) assert_same_output(p, full, left->outputs[i].name);
  int n = backward_ops(left);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  return n;
}

static void check_subsets(rfr_model_type type, bool fuse, int rounds) {
  rfr_model_config c = rfr_model_config_default(type);
  c.vocab_size = 24;
  c.hidden_size = 32;
  c.intermediate_size = 44;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = type == RFR_MODEL_GPT2 ? 4 : 2;
  c.head_dim = 8;
  c.max_positions = 12;
  c.dropout = 0.1;
  if (c.window > 0) c.window = 5;
  const int n = rfr_model_parameter_count(&c);
  const uint64_t everything = ((uint64_t)1 << n) - 1;
  rfr_trace *t = transformer(&c, everything);
  rfr_programs *full = compile(t, fuse);
  OK(rfr_program_run(full, 0));
  const int most = backward_ops(rfr_program_trace(full, 0, "lower"));
  for (int i = 0; i < rounds; i++) {
    rfi_u32x4 r = rfi_draw4(rfi_stream_key(31, type), (uint64_t)i, 0, 0, 0);
    uint64_t random = (uint64_t)r.v[0] << 32 | r.v[1];
    if (i % 4 == 1) random &= (uint64_t)r.v[2] << 32 | r.v[3]; /* few inputs are trained */
    if (i % 4 == 2) random |= (uint64_t)r.v[2] << 32 | r.v[3]; /* most inputs are trained */
    if (i % 4 == 3) random = (uint64_t)1 << r.v[2] % (unsigned)n;
    uint64_t some = random & everything, more = some | (uint64_t)1 << r.v[3] % (unsigned)n;
    int a = check_subset(&c, some, full, fuse), b = check_subset(&c, more, full, fuse);
    if (a > b || b > most || (some == 0 && a > 0)) fail_msg("%d, %d, %d ops in the backward", a, b, most);
  }
  rfr_programs_destroy(full);
  rfr_trace_destroy(t);
}

static void test_llama_subsets(void **state) {
  (void)state;
  check_subsets(RFR_MODEL_LLAMA, false, 20);
  check_subsets(RFR_MODEL_LLAMA, true, 4);
}
static void test_gpt2_subsets(void **state) {
  (void)state;
  check_subsets(RFR_MODEL_GPT2, false, 20);
  check_subsets(RFR_MODEL_GPT2, true, 4);
}

static rfr_programs *compile_with(const rfr_trace *t, rfr_recompute recompute) {
  rfr_compile_options o = rfr_compile_options_default();
  o.recompute = recompute;
  rfr_programs *p = rft_compile(t, &o);
  fill_inputs(p);
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  return p;
}

static void assert_same_bits(const rfr_programs *p, const rfr_programs *q, const char *name, uint64_t train) {
  rfr_tensor a, b;
  OK(rfr_program_output(p, 0, name, &a));
  OK(rfr_program_output(q, 0, name, &b));
  assert_int_equal(a.bytes, b.bytes);
  if (memcmp(a.data, b.data, (size_t)a.bytes) != 0)
    fail_msg("%s differs from the program that trains everything; trained mask %llx", name, (unsigned long long)train);
}

/* With the default passes, fusions that change rounding are decided as if all inputs were trained. */
static void check_types(rfr_model_config c, int rounds) {
  const rfr_dtype types[] = {RFR_F32, RFR_BF16, RFR_F16};
  c.vocab_size = 24;
  c.hidden_size = 32;
  c.intermediate_size = 44;
  c.heads = 4;
  c.kv_heads = c.type == RFR_MODEL_GPT2 ? 4 : 2;
  c.head_dim = 8;
  c.max_positions = 12;
  c.dropout = 0; /* dropout would be between the GEMM and the residual addition */
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    c.dtype = types[i];
    const int n = rfr_model_parameter_count(&c);
    const uint64_t everything = n == 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1;
    rfr_trace *t = transformer(&c, everything);
    rfr_programs *full = compile_with(t, RFR_RECOMPUTE_KEEP);
    for (int k = 0; k < rounds; k++) {
      rfi_u32x4 r = rfi_draw4(rfi_stream_key(57, c.type), (uint64_t)k, i, 0, 0);
      uint64_t train = (uint64_t)r.v[0] << 32 | r.v[1];
      if (k % 4 == 1) train &= (uint64_t)r.v[2] << 32 | r.v[3];
      if (k % 4 == 2) train |= (uint64_t)r.v[2] << 32 | r.v[3];
      if (k % 4 == 3) train = everything << r.v[2] % (unsigned)n; /* the first parameters are frozen */
      train &= everything;
      if (train == 0) continue; /* inference */
      rfr_trace *some = transformer(&c, train);
      rfr_programs *p = compile_with(some, k % 3 ? RFR_RECOMPUTE_KEEP : RFR_RECOMPUTE_ALL);
      const rfr_trace *left = rfr_program_trace(p, 0, "lower");
      for (int j = 0; j < left->n_outputs; j++) assert_same_bits(p, full, left->outputs[j].name, train);
      rfr_programs_destroy(p);
      rfr_trace_destroy(some);
    }
    rfr_programs_destroy(full);
    rfr_trace_destroy(t);
  }
}

static void test_types_dense(void **state) {
  (void)state;
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  c.layers = 3;
  check_types(c, 24);
  c = rfr_model_config_default(RFR_MODEL_GPT2);
  c.layers = 2;
  check_types(c, 12);
}

static void test_types_experts(void **state) {
  (void)state;
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  c.layers = 2;
  c.experts = 4;
  c.experts_per_token = 2;
  c.expert_size = 20;
  check_types(c, 24);
  c.layers = 1;
  c.qkv_bias = 1, c.shared_size = 12, c.expert_norm = 0;
  check_types(c, 12);
}

/* The GEMM of w2 accumulates into a gradient that only the gradient of w1 reads later; w0 1, w1 2, w2 4 */
static void read_later(builder *b) {
  rfr_trace *t = b->t;
  rfr_value x0 = rfr_cast(t, input(b, "x", T, A), RFR_BF16), w[3];
  for (int i = 0; i < 3; i++) w[i] = rfr_cast(t, weight(b, (const char *[]){"w0", "w1", "w2"}[i], A, A), RFR_BF16);
  rfr_value x = rfr_linear(t, x0, w[0], RFR_NONE), u = rfr_linear(t, rfr_silu(t, x0), w[1], RFR_NONE);
  rfr_value branch = rfr_gelu(t, rfr_linear(t, x, w[2], RFR_NONE), 1);
  finish(b, dot(b, rfr_cast(t, rfr_add(t, rfr_add(t, x, u), branch), RFR_F32)));
}

/* The result of the accumulating GEMM is also read by the gradient of b; w0 1, b 2, w1 4 */
static void read_twice(builder *b) {
  rfr_trace *t = b->t;
  rfr_value x0 = rfr_cast(t, input(b, "x", T, A), RFR_BF16), w0 = rfr_cast(t, weight(b, "w0", A, A), RFR_BF16);
  rfr_value bias = rfr_cast(t, weight(b, "b", T, A), RFR_BF16), w1 = rfr_cast(t, weight(b, "w1", A, A), RFR_BF16);
  rfr_value a = rfr_linear(t, x0, w0, RFR_NONE), q = rfr_linear(t, rfr_add(t, a, bias), w1, RFR_NONE);
  finish(b, dot(b, rfr_cast(t, rfr_add(t, q, rfr_silu(t, a)), RFR_F32)));
}

/* Gradients that are read only if everything is trained: the fusion must be decided as if they were read. */
static void test_backward_sums(void **state) {
  (void)state;
  void (*const build[])(builder *) = {read_later, read_twice};
  for (int i = 0; i < 2; i++) {
    const struct frozen_case c = {.build = build[i]};
    rfr_trace *some = record(&c, 5), *all = record(&c, 7);
    rfr_programs *p = compile_with(some, RFR_RECOMPUTE_KEEP), *q = compile_with(all, RFR_RECOMPUTE_KEEP);
    const rfr_trace *left = rfr_program_trace(p, 0, "lower");
    for (int j = 0; j < left->n_outputs; j++) assert_same_bits(p, q, left->outputs[j].name, 5);
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
    rfr_trace_destroy(some);
    rfr_trace_destroy(all);
  }
}

static void test_gemma_subsets(void **state) {
  (void)state;
  check_subsets(RFR_MODEL_GEMMA2, false, 12);
  check_subsets(RFR_MODEL_GEMMA2, true, 4);
}

/* ---- gradients that are always zero ---- */

/* The second weight is multiplied by `gate`, which is zero, so its gradient exists but is zero in each step, eager and
 * replayed, until the gate is nonzero. */
static void test_zero_gradients(void **state) {
  (void)state;
  builder b = {.train = 3};
  rfr_value skip, g[2];
  rfr_tensor zeros, gate;
  OK(rfr_trace_create(ctx, &b.t));
  rfr_value w[2] = {weight(&b, "w0", 7, 300), weight(&b, "w1", 7, 300)};
  rfr_value y = rfr_add(b.t, rfr_mul(b.t, w[0], w[0]), rfr_mul(b.t, w[1], input(&b, "gate", 7, 300)));
  rfr_value loss = rfr_sum(b.t, y, -1);
  for (int i = 0; i < 2; i++) g[i] = rfr_gradient(b.t, loss, w[i], RFR_F32);
  rfr_value state_in = rfr_input(b.t, "zeros", RFR_ROLE_STATE, RFR_I32, 1, ((int64_t[]){2}));
  rfr_output(b.t, "norm", rfr_grad_norm_zeros(b.t, 2, g, state_in, &skip));
  rfr_programs *p = compile(b.t, true);
  OK(rfr_programs_tensor(p, "zeros", &zeros));
  OK(rfr_programs_tensor(p, "gate", &gate));
  memset(zeros.data, 0, (size_t)zeros.bytes);
  memset(gate.data, 0, (size_t)gate.bytes);
  OK(rfr_program_capture(p, 0));
  const int32_t *counts = zeros.data;
  for (int i = 1; i <= 10; i++) {
    if (i % 2) OK(rfr_program_run(p, 0));
    else OK(rfr_program_replay(p, 0, NULL, 0));
    assert_int_equal(counts[0], -1);
    assert_int_equal(counts[1], i);
  }
  ((float *)gate.data)[20] = 1e-30f;
  OK(rfr_program_run(p, 0));
  assert_int_equal(counts[1], -1);
  ((float *)gate.data)[20] = 0;
  OK(rfr_program_run(p, 0));
  assert_int_equal(counts[1], -1);
  rfr_programs_destroy(p);
  rfr_trace_destroy(b.t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_cases),         rft_context_test(test_all_frozen),    rft_context_test(test_llama_subsets),
      rft_context_test(test_gpt2_subsets),  rft_context_test(test_gemma_subsets), rft_context_test(test_zero_gradients),
      rft_context_test(test_types_dense),   rft_context_test(test_reported_type), rft_context_test(test_backward_sums),
      rft_context_test(test_types_experts),
  };
  return cmocka_run_group_tests_name("frozen", tests, NULL, NULL);
}
