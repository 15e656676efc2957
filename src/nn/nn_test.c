/* SPDX-License-Identifier: Apache-2.0
 *
 * Models: names and shapes against the lists that Hugging Face's files have, written out
 * here by hand; recorded forward passes; first values.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "nn/nn.h"
#include "support/context.h"

typedef struct expected {
  const char *name;
  int64_t rows, cols; /* cols 0: rank 1 */
} expected;

static void check_list(const rfr_model_config *c, const expected *want, int n) {
  assert_int_equal(rfr_model_config_check(c), RFR_OK);
  assert_int_equal(rfr_model_parameter_count(c), n);
  for (int i = 0; i < n; i++) {
    rfr_parameter p;
    assert_int_equal(rfr_model_parameter(c, i, &p), RFR_OK);
    assert_string_equal(p.name, want[i].name);
    assert_int_equal(p.rank, want[i].cols ? 2 : 1);
    assert_int_equal(p.shape[0], want[i].rows);
    if (want[i].cols) assert_int_equal(p.shape[1], want[i].cols);
  }
  rfr_parameter past;
  assert_int_equal(rfr_model_parameter(c, n, &past), RFR_INVALID);
}

static rfr_model_config small_llama(void) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  c.vocab_size = 11;
  c.hidden_size = 12;
  c.intermediate_size = 20;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 6;
  c.max_positions = 32;
  return c;
}

static rfr_model_config small_gpt2(void) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_GPT2);
  c.vocab_size = 11;
  c.hidden_size = 12;
  c.intermediate_size = 20;
  c.layers = 2;
  c.heads = 3;
  c.kv_heads = 3;
  c.head_dim = 4;
  c.max_positions = 32;
  return c;
}

static void llama_names(void **state) {
  (void)state;
  const expected want[] = {
      {"model.embed_tokens.weight", 11, 12},
      {"model.layers.0.input_layernorm.weight", 12, 0},
      {"model.layers.0.self_attn.q_proj.weight", 24, 12},
      {"model.layers.0.self_attn.k_proj.weight", 12, 12},
      {"model.layers.0.self_attn.v_proj.weight", 12, 12},
      {"model.layers.0.self_attn.o_proj.weight", 12, 24},
      {"model.layers.0.post_attention_layernorm.weight", 12, 0},
      {"model.layers.0.mlp.gate_proj.weight", 20, 12},
      {"model.layers.0.mlp.up_proj.weight", 20, 12},
      {"model.layers.0.mlp.down_proj.weight", 12, 20},
      {"model.layers.1.input_layernorm.weight", 12, 0},
      {"model.layers.1.self_attn.q_proj.weight", 24, 12},
      {"model.layers.1.self_attn.k_proj.weight", 12, 12},
      {"model.layers.1.self_attn.v_proj.weight", 12, 12},
      {"model.layers.1.self_attn.o_proj.weight", 12, 24},
      {"model.layers.1.post_attention_layernorm.weight", 12, 0},
      {"model.layers.1.mlp.gate_proj.weight", 20, 12},
      {"model.layers.1.mlp.up_proj.weight", 20, 12},
      {"model.layers.1.mlp.down_proj.weight", 12, 20},
      {"model.norm.weight", 12, 0},
      {"lm_head.weight", 11, 12},
  };
  rfr_model_config c = small_llama();
  const int n = (int)(sizeof want / sizeof want[0]);
  check_list(&c, want, n);
  c.tie_embeddings = 1;
  check_list(&c, want, n - 1);
}

static void gpt2_names(void **state) {
  (void)state;
  const expected want[] = {
      {"transformer.wte.weight", 11, 12},
      {"transformer.wpe.weight", 32, 12},
      {"transformer.h.0.ln_1.weight", 12, 0},
      {"transformer.h.0.ln_1.bias", 12, 0},
      {"transformer.h.0.attn.c_attn.weight", 12, 36},
      {"transformer.h.0.attn.c_attn.bias", 36, 0},
      {"transformer.h.0.attn.c_proj.weight", 12, 12},
      {"transformer.h.0.attn.c_proj.bias", 12, 0},
      {"transformer.h.0.ln_2.weight", 12, 0},
      {"transformer.h.0.ln_2.bias", 12, 0},
      {"transformer.h.0.mlp.c_fc.weight", 12, 20},
      {"transformer.h.0.mlp.c_fc.bias", 20, 0},
      {"transformer.h.0.mlp.c_proj.weight", 20, 12},
      {"transformer.h.0.mlp.c_proj.bias", 12, 0},
      {"transformer.h.1.ln_1.weight", 12, 0},
      {"transformer.h.1.ln_1.bias", 12, 0},
      {"transformer.h.1.attn.c_attn.weight", 12, 36},
      {"transformer.h.1.attn.c_attn.bias", 36, 0},
      {"transformer.h.1.attn.c_proj.weight", 12, 12},
      {"transformer.h.1.attn.c_proj.bias", 12, 0},
      {"transformer.h.1.ln_2.weight", 12, 0},
      {"transformer.h.1.ln_2.bias", 12, 0},
      {"transformer.h.1.mlp.c_fc.weight", 12, 20},
      {"transformer.h.1.mlp.c_fc.bias", 20, 0},
      {"transformer.h.1.mlp.c_proj.weight", 20, 12},
      {"transformer.h.1.mlp.c_proj.bias", 12, 0},
      {"transformer.ln_f.weight", 12, 0},
      {"transformer.ln_f.bias", 12, 0},
  };
  rfr_model_config c = small_gpt2();
  check_list(&c, want, (int)(sizeof want / sizeof want[0]));
}

/* A bias directly follows its weight, in the list and in the lookup. */
static void llama_biases(void **state) {
  (void)state;
  rfr_model_config c = small_llama();
  c.attention_bias = c.mlp_bias = 1;
  assert_int_equal(rfr_model_parameter_count(&c), 21 + 2 * 7);
  rfr_parameter w, b;
  int i = rfi_parameter_index(&c, RFI_PARAM_GATE, 1), j = rfi_parameter_index(&c, RFI_PARAM_GATE_BIAS, 1);
  assert_int_equal(j, i + 1);
  assert_int_equal(rfr_model_parameter(&c, i, &w), RFR_OK);
  assert_int_equal(rfr_model_parameter(&c, j, &b), RFR_OK);
  assert_string_equal(w.name, "model.layers.1.mlp.gate_proj.weight");
  assert_string_equal(b.name, "model.layers.1.mlp.gate_proj.bias");
  c.mlp_bias = 0;
  assert_int_equal(rfi_parameter_index(&c, RFI_PARAM_GATE_BIAS, 1), -1);
}

static void refused(void **state) {
  (void)state;
  rfr_model_config c = small_llama();
  c.kv_heads = 3;
  assert_int_equal(rfr_model_config_check(&c), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "model.config");
  c = small_llama();
  c.head_dim = 5;
  assert_int_equal(rfr_model_config_check(&c), RFR_INVALID);
  c = small_gpt2();
  c.head_dim = 5;
  assert_int_equal(rfr_model_config_check(&c), RFR_INVALID);
  c = small_gpt2();
  c.dropout = 1.0;
  assert_int_equal(rfr_model_config_check(&c), RFR_INVALID);
}

static void first_values(void **state) {
  (void)state;
  rfr_model_config c = small_llama();
  c.hidden_size = 120;
  c.intermediate_size = 203;
  rfr_parameter up, down;
  assert_int_equal(rfr_model_parameter(&c, rfi_parameter_index(&c, RFI_PARAM_UP, 0), &up), RFR_OK);
  assert_int_equal(rfr_model_parameter(&c, rfi_parameter_index(&c, RFI_PARAM_DOWN, 0), &down), RFR_OK);
  assert_float_equal(up.std, 0.02, 1e-9);
  assert_float_equal(down.std, 0.01, 1e-9); /* 0.02 / sqrt(2 * 2 layers) */
  enum { N = 120 * 203 };
  float *a = malloc(N * sizeof *a), *b = malloc(N * sizeof *b);
  uint16_t *h = malloc(N * sizeof *h);
  assert_int_equal(rfr_parameter_fill(&up, 7, RFR_F32, 1, a), RFR_OK);
  assert_int_equal(rfr_parameter_fill(&down, 7, RFR_F32, 1, b), RFR_OK);
  assert_int_equal(rfr_parameter_fill(&up, 7, RFR_BF16, 2, h), RFR_OK);
  double sum = 0, squares = 0, cross = 0;
  for (int i = 0; i < N; i++) {
    sum += a[i];
    squares += (double)a[i] * a[i];
    cross += (double)a[i] * b[i];
    assert_int_equal(h[i], rfr_float_to_bits(RFR_BF16, a[i]));
  }
  assert_float_equal(sum / N, 0.0, 5 * 0.02 / sqrt(N));
  assert_float_equal(sqrt(squares / N), 0.02, 0.02 * 0.03);
  assert_float_equal(cross / N / (0.02 * 0.01), 0.0, 5 / sqrt(N)); /* the names give independent numbers */
  float again[N];
  assert_int_equal(rfr_parameter_fill(&up, 8, RFR_F32, 1, again), RFR_OK);
  assert_memory_not_equal(a, again, sizeof again);
  assert_int_equal(rfr_parameter_fill(&up, 7, RFR_F32, 2, again), RFR_OK);
  assert_memory_equal(a, again, sizeof again);
  const int none[] = {-1, 0, 4097};
  for (int i = 0; i < 3; i++) {
    assert_int_equal(rfr_parameter_fill(&up, 7, RFR_F32, none[i], again), RFR_INVALID);
    assert_non_null(strstr(rfr_last_error()->message, "threads, not 1 to 4096"));
  }
  free(a);
  free(b);
  free(h);
}

static void record(const rfr_model_config *c) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value p[64];
  assert_true(rfr_model_parameter_count(c) <= 64);
  rfr_model_declare(t, c, (const char *const[]){"*embed_tokens*", "*wte*"}, 2, p);
  rfr_value tokens = rfr_input(t, "tokens", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){7});
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){3});
  rfr_value step = rfr_step_block(t);
  rfr_value h = rfr_model_forward(t, c, p, tokens, offsets, step);
  rfr_value y = rfr_model_logits(t, c, p, h, RFR_F32);
  rfr_output(t, "logits", y);
  OK(rfr_trace_finish(t));
  rfr_type hidden = rfr_value_type(t, h), logits = rfr_value_type(t, y);
  assert_int_equal(hidden.dtype, c->dtype);
  assert_int_equal(hidden.rank, 2);
  assert_int_equal(hidden.shape[0], 7);
  assert_int_equal(hidden.shape[1], c->hidden_size);
  assert_int_equal(logits.dtype, RFR_F32);
  assert_int_equal(logits.shape[1], c->vocab_size);
  rfr_trace_destroy(t);
}

static void forward(void **state) {
  (void)state;
  rfr_model_config c = small_llama();
  record(&c);
  c.attention_bias = c.mlp_bias = c.tie_embeddings = 1;
  c.dtype = RFR_BF16;
  record(&c);
  c = small_gpt2();
  c.dropout = 0.1;
  record(&c);
}

/* The defaults of each type are a valid model. */
static void defaults(void **state) {
  (void)state;
  for (int type = 0; type <= RFR_MODEL_GRANITE; type++) {
    rfr_model_config c = rfr_model_config_default((rfr_model_type)type);
    rfr_parameter p;
    if (rfr_model_config_check(&c) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
    const int n = rfr_model_parameter_count(&c);
    for (int i = 0; i < n; i++) {
      assert_int_equal(rfr_model_parameter(&c, i, &p), RFR_OK);
      for (int k = 0; k < i; k++) {
        rfr_parameter other;
        assert_int_equal(rfr_model_parameter(&c, k, &other), RFR_OK);
        assert_string_not_equal(p.name, other.name);
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(llama_names), cmocka_unit_test(gpt2_names),   cmocka_unit_test(llama_biases),
      cmocka_unit_test(refused),     cmocka_unit_test(first_values), rft_context_test(forward),
      cmocka_unit_test(defaults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
