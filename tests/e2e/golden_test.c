/* SPDX-License-Identifier: Apache-2.0
 *
 * Golden traces: two small programs after each pass, and a step over two ranks after `shard`, as text in tests/golden/.
 * A changed pass shows up as a text diff. After an intended change, write the files with
 *
 *   build/release/golden_test --write
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "pass/pass.h"
#include "refrain/nn.h"
#include "support/text.h"

static int writing;

static void compare(const char *name, const rft_text *got) {
  char path[512];
  snprintf(path, sizeof path, "%s/tests/golden/%s.txt", RFT_SOURCE_DIR, name);
  FILE *f = fopen(path, writing ? "wb" : "rb");
  if (!f) fail_msg("cannot open %s", path);
  if (writing) {
    fwrite(got->data, 1, got->n, f);
  } else {
    char *want = calloc(1, got->n + 2);
    size_t n = fread(want, 1, got->n + 1, f);
    size_t at = 0, line = 1;
    while (at < n && at < got->n && want[at] == got->data[at]) line += want[at++] == '\n';
    if (n != got->n || at != n) fail_msg("%s:%zu differs from what the pass makes now", path, line);
    free(want);
  }
  fclose(f);
}

/* With several ranks only the trace after `shard`; with one rank `shard` does nothing. */
static void check(const char *name, const rfr_trace *t, int flat, int ranks) {
  rfi_pipeline p;
  rfi_pass_options o = {.fuse = true, .prune = true, .loss_chunk = 8, .shard = RFR_SHARD_FULL, .ranks = ranks};
  o.sharded = ranks > 1;
  if (rfi_pipeline_run(t, &o, &p) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  for (int i = 0; i < p.n; i++) {
    char file[64];
    if ((strcmp(p.stage[i].pass, "shard") == 0) != (ranks > 1)) continue;
    rft_text out = {0};
    rfr_print_options print = rfr_print_options_default();
    print.flat = flat;
    assert_int_equal(rfr_trace_print(p.stage[i].trace, &print, rft_text_add, &out), RFR_OK);
    if (i > 0) {
      rft_text_add("\n", 1, &out);
      rft_text_add(p.stage[i].report.text.data, p.stage[i].report.text.n, &out);
    }
    snprintf(file, sizeof file, "%s.%d-%s", name, i, p.stage[i].pass);
    compare(file, &out);
    free(out.data);
  }
  rfi_pipeline_deinit(&p);
}

/* Two linears, the second frozen: its gradient and saved input are absent. */
static void test_frozen(void **state) {
  rfr_ctx *ctx;
  rfr_trace *t;
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){24, 32}));
  rfr_value w0 = rfr_input(t, "w0", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){64, 32}));
  rfr_value w1 = rfr_input(t, "w1", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){16, 64}));
  rfr_value y = rfr_linear(t, rfr_linear(t, x, w0, RFR_NONE), w1, RFR_NONE);
  rfr_output(t, "g0", rfr_gradient(t, rfr_mean(t, rfr_mul(t, y, y), -1), w0, RFR_F32));
  check("frozen", t, 1, 1);
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
}

/* Two layers with one weight each, of which the second is padded, and their updates. */
static void test_sharded(void **state) {
  enum { RANKS = 2 };
  rfr_ctx *ctx;
  rfr_trace *t;
  rfr_value w[2], g[2], skip;
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value h = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){24, 128}));
  w[0] = rfr_input(t, "w0", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){7, 128}));
  w[1] = rfr_input(t, "w1", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){17, 7}));
  rfr_value m0 = rfr_input(t, "w0.momentum", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){7, 128}));
  for (int l = 0; l < 2; l++) {
    rfr_scope(t, l ? "layer1" : "layer0");
    h = rfr_linear(t, h, w[l], RFR_NONE);
  }
  rfr_value loss = rfr_mean(t, rfr_mul(t, h, h), -1);
  for (int l = 0; l < 2; l++) g[l] = rfr_all_reduce(t, rfr_gradient(t, loss, w[l], RFR_F32), RANKS);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_scope(t, "optimizer");
  rfr_value norm = rfr_grad_norm(t, 2, g, &skip), clip = rfr_clip_scale(t, norm, 1);
  rfr_value lr = rfr_fill(t, 0.1, RFR_F32, 1, ((int64_t[]){1}));
  for (int l = 0; l < 2; l++) rfr_sgd(t, w[l], g[l], l ? RFR_NONE : m0, RFR_NONE, lr, clip, skip, l ? 0 : 0.9, 0, 1);
  rfr_output(t, "norm", norm);
  check("sharded", t, 1, RANKS);
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
}

/* A Llama with two layers over two microbatches, with gradients of all weights. */
static void test_llama(void **state) {
  enum { TOKENS = 16, MOST = 64 };
  rfr_ctx *ctx;
  rfr_trace *t;
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  c.hidden_size = 32;
  c.intermediate_size = 80;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 8;
  c.dtype = RFR_BF16;
  rfr_value parameter[MOST], tokens[2], targets[2], offsets = RFR_NONE, loss = RFR_NONE;
  for (int m = 0; m < 2; m++) {
    char name[2][24];
    snprintf(name[0], sizeof name[0], "tokens%d", m);
    snprintf(name[1], sizeof name[1], "targets%d", m);
    tokens[m] = rfr_input(t, name[0], RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){TOKENS}));
    targets[m] = rfr_input(t, name[1], RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){TOKENS}));
  }
  offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){3}));
  rfr_model_declare(t, &c, NULL, 0, parameter);
  rfr_value inv = rfr_token_count(t, 2, targets, -100, NULL);
  for (int m = 0; m < 2; m++) {
    rfr_microbatch(t, m);
    rfr_value h = rfr_model_forward(t, &c, parameter, tokens[m], offsets, RFR_NONE);
    rfr_value part = rfr_cross_entropy(t, rfr_model_logits(t, &c, parameter, h, RFR_BF16), targets[m], inv, -100);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  rfr_output(t, "loss", loss);
  for (int i = 0; i < rfr_model_parameter_count(&c); i++) {
    char name[128];
    snprintf(name, sizeof name, "d_%s", rfr_value_name(t, parameter[i]));
    rfr_output(t, name, rfr_gradient(t, loss, parameter[i], RFR_F32));
  }
  check("llama", t, 0, 1);
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
}

int main(int argc, char **argv) {
  writing = argc > 1 && strcmp(argv[1], "--write") == 0;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_frozen),
      cmocka_unit_test(test_sharded),
      cmocka_unit_test(test_llama),
  };
  return cmocka_run_group_tests_name("golden", tests, NULL, NULL);
}
