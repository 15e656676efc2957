/* SPDX-License-Identifier: Apache-2.0
 *
 * The programs that make text against the full forward pass: the same logits within f32's rounding wherever a text
 * ends, in whatever chunks it was read, and the same greedy text. Replay is compared with eager, and one chunking with
 * another, bit by bit where the same kernels run.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "ops/decode/cursor.h"
#include "refrain/program.h"
#include "support/context.h"
#include "train/step_trace.h"

enum { WINDOW = 150, MOST = 64, FULL = 0, PREFILL = 1, DECODE = 2 };

typedef struct models {
  rfr_ctx *ctx;
  rfr_programs *p;
  int64_t vocab;
  bool replay;
} models;

static rfr_trace *full(rfr_ctx *ctx, const rfr_model_config *c) {
  rfr_trace *t;
  rfr_value w[MOST];
  const int64_t tokens = WINDOW, two = 2;
  OK(rfr_trace_create(ctx, &t));
  rfr_model_declare(t, c, NULL, 0, w);
  rfr_value ids = rfr_input(t, "ids", RFR_ROLE_INPUT, RFR_I32, 1, &tokens);
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, &two);
  rfr_output(t, "logits",
             rfr_model_logits(t, c, w, rfr_model_forward(t, c, w, ids, offsets, RFR_NONE), RFR_F32)); /* (WINDOW,V) */
  OK(rfr_trace_finish(t));
  return t;
}

static void *tensor(const models *m, const char *name) {
  rfr_tensor x;
  OK(rfr_programs_tensor(m->p, name, &x));
  return x.data;
}

static const float *logits(const models *m, int program) {
  rfr_tensor x;
  OK(rfr_program_output(m->p, program, "logits", &x));
  return x.data;
}

static models open_models(rfr_model_type type, rfr_dtype dtype, bool replay) {
  models m = {.replay = replay};
  rfi_step_spec spec = {.model = rfr_model_config_default(type), .window = WINDOW, .microbatches = 1};
  rfr_model_config *c = &spec.model;
  rfr_trace *t[3];
  rfr_parameter p;
  c->hidden_size = 48;
  c->intermediate_size = 80;
  c->layers = 2;
  c->heads = 6;
  c->kv_heads = type == RFR_MODEL_LLAMA ? 2 : 6;
  c->head_dim = 8;
  c->vocab_size = 61;
  c->max_positions = WINDOW;
  c->init_std = 0.2;
  c->dtype = dtype;
  m.vocab = c->vocab_size;
  OK(rfr_ctx_create(NULL, &m.ctx));
  t[FULL] = full(m.ctx, c);
  OK(rfi_trace_prefill(m.ctx, &spec, &t[PREFILL]));
  OK(rfi_trace_decode(m.ctx, &spec, &t[DECODE]));
  OK(rfr_compile(m.ctx, 3, (const rfr_trace *const *)t, NULL, NULL, &m.p));
  for (int i = 0; i < 3; i++) rfr_trace_destroy(t[i]);
  for (int i = 0; rfr_model_parameter(c, i, &p) == RFR_OK; i++)
    OK(rfr_parameter_fill(&p, 5, dtype, 1, tensor(&m, p.name)));
  OK(rfr_programs_load(m.p));
  for (int i = 0; i < 3; i++) OK(rfr_program_capture(m.p, i));
  ((double *)tensor(&m, RFI_NAME_SAMPLING))[RFI_SAMPLING_TOP_P] = 1.0;
  return m;
}

static void close_models(models *m) {
  rfr_programs_destroy(m->p);
  rfr_ctx_destroy(m->ctx);
}

static void launch(const models *m, int program) {
  OK(m->replay ? rfr_program_replay(m->p, program, NULL, 0) : rfr_program_run(m->p, program));
}

static void write_text(const models *m, int n) {
  int32_t *text = tensor(m, RFI_NAME_TEXT);
  for (int i = 0; i < n; i++) text[i] = (i * i * 7 + i * 3 + 11) % (int32_t)m->vocab;
}
static void set_cursor(const models *m, int64_t cached, int64_t known) {
  memcpy(tensor(m, RFI_NAME_CURSOR), (int64_t[RFI_CURSOR_N]){cached, known, 0, 9}, RFI_CURSOR_N * sizeof(int64_t));
}

/* The full forward over the first n tokens of the text. */
static const float *run_full(const models *m, int n) {
  int32_t *ids = tensor(m, "ids");
  memset(ids, 0, WINDOW * sizeof *ids);
  memcpy(ids, tensor(m, RFI_NAME_TEXT), (size_t)n * sizeof *ids);
  memcpy(tensor(m, "offsets"), (int32_t[]){0, n}, 2 * sizeof *ids);
  launch(m, FULL);
  return logits(m, FULL);
}

static double difference(const float *a, const float *b, int64_t n) {
  double worst = 0, largest = 0;
  for (int64_t i = 0; i < n; i++) {
    double d = fabs((double)a[i] - (double)b[i]);
    if (!(d <= worst)) worst = d; /* also fails for NaN */
    largest = fmax(largest, fabs((double)b[i]));
  }
  return worst / largest;
}

static int32_t argmax(const float *x, int64_t n) {
  int32_t best = 0;
  for (int64_t i = 1; i < n; i++)
    if (x[i] > x[best]) best = (int32_t)i;
  return best;
}

/* Compares every position of a text, read token by token and in chunks with arbitrary ends. */
static void one_model(rfr_model_type type, rfr_dtype dtype, double tolerance) {
  models m = open_models(type, dtype, true);
  double worst = 0;
  write_text(&m, WINDOW);
  const size_t bytes = (size_t)(WINDOW * m.vocab) * sizeof(float);
  float *expected = malloc(bytes); /* the programs share the memory of their outputs */
  assert_non_null(expected);
  memcpy(expected, run_full(&m, WINDOW), bytes);
  for (int i = 0; i < WINDOW; i++) {
    set_cursor(&m, i, i + 1);
    launch(&m, DECODE);
    worst = fmax(worst, difference(logits(&m, DECODE), expected + i * m.vocab, m.vocab));
    assert_int_equal(((int32_t *)tensor(&m, RFI_NAME_TEXT))[i + 1], argmax(logits(&m, DECODE), m.vocab));
    write_text(&m, WINDOW);
  }
  for (int n = 1; n <= WINDOW; n += 17) {
    const size_t row = 48 / 6 * (type == RFR_MODEL_LLAMA ? 2 : 6) * (dtype == RFR_F32 ? 4 : 2);
    /* the tokens after the text must not be read */
    if (n < WINDOW) memset((char *)tensor(&m, "cache.0.k") + n * row, 0xFF, row);
    write_text(&m, WINDOW);
    set_cursor(&m, 0, n);
    const int64_t *cursor = tensor(&m, RFI_NAME_CURSOR);
    for (int launches = 1; cursor[RFI_CURSOR_KNOWN] == n; launches++) {
      launch(&m, PREFILL);
      assert_int_equal(cursor[RFI_CURSOR_CACHED], launches * RFI_PREFILL_ROWS < n ? launches * RFI_PREFILL_ROWS : n);
    }
    assert_int_equal(cursor[RFI_CURSOR_KNOWN], n + 1);
    worst = fmax(worst, difference(logits(&m, PREFILL), expected + (n - 1) * m.vocab, m.vocab));
  }
  print_message("%s %s: logits within %.1e of the largest\n", rfr_model_type_name(type), rfr_dtype_name(dtype), worst);
  if (!(worst <= tolerance)) fail_msg("%s differs by %g", rfr_model_type_name(type), worst);
  free(expected);
  close_models(&m);
}

static void logits_of_every_position(void **state) {
  (void)state;
  one_model(RFR_MODEL_LLAMA, RFR_F32, 1e-5);
  one_model(RFR_MODEL_GPT2, RFR_F32, 1e-5);
  one_model(RFR_MODEL_LLAMA, RFR_BF16, 1e-2); /* activations are rounded to 8 bits in different groups */
}

/* Generates from a prompt until the caches are full. */
static void make_text(const models *m, int prompt, int32_t text[WINDOW + 1], double temperature) {
  write_text(m, prompt);
  set_cursor(m, 0, prompt);
  ((double *)tensor(m, RFI_NAME_SAMPLING))[RFI_SAMPLING_TEMPERATURE] = temperature;
  const int64_t *cursor = tensor(m, RFI_NAME_CURSOR);
  while (cursor[RFI_CURSOR_KNOWN] == prompt) launch(m, PREFILL);
  while (cursor[RFI_CURSOR_KNOWN] <= WINDOW) launch(m, DECODE);
  memcpy(text, tensor(m, RFI_NAME_TEXT), (WINDOW + 1) * sizeof *text);
}

static void greedy_text(void **state) {
  int32_t text[WINDOW + 1];
  int found[61] = {0}, kinds = 0;
  (void)state;
  models m = open_models(RFR_MODEL_GPT2, RFR_F32, true);
  make_text(&m, 70, text, 0.0);
  for (int n = 70; n <= WINDOW; n++) {
    const float *x = run_full(&m, n) + (n - 1) * m.vocab;
    if (text[n] != argmax(x, m.vocab)) fail_msg("token %d is %d, not %d", n, text[n], argmax(x, m.vocab));
    kinds += found[text[n]]++ == 0;
  }
  assert_true(kinds > 3); /* the text is long enough to compare */
  close_models(&m);
}

static void bits(void **state) {
  static const char *const names[] = {"cache.0.k", "cache.0.v", "cache.1.k", "cache.1.v"};
  int32_t text[3][WINDOW + 1];
  (void)state;
  for (int type = 0; type < 2; type++) {
    models a = open_models((rfr_model_type)type, RFR_BF16, false);
    models b = open_models((rfr_model_type)type, RFR_BF16, true);
    make_text(&a, 71, text[0], 1.0);
    make_text(&b, 71, text[1], 1.0);
    assert_memory_equal(text[0], text[1], sizeof text[0]);
    for (int i = 0; i < 4; i++) {
      rfr_tensor x, y;
      OK(rfr_programs_tensor(a.p, names[i], &x));
      OK(rfr_programs_tensor(b.p, names[i], &y));
      assert_memory_equal(x.data, y.data, (size_t)x.bytes);
    }
    assert_memory_equal(logits(&a, DECODE), logits(&b, DECODE), (size_t)a.vocab * sizeof(float));
    make_text(&b, 71, text[2], 1.0); /* a second text in the memory of the first */
    assert_memory_equal(text[1], text[2], sizeof text[1]);
    make_text(&b, 71, text[2], 3.0);
    assert_memory_not_equal(text[1], text[2], sizeof text[1]);
    close_models(&a);
    close_models(&b);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(logits_of_every_position), cmocka_unit_test(greedy_text),
                                     cmocka_unit_test(bits)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
