/* SPDX-License-Identifier: Apache-2.0
 *
 * The configuration: every type and kind of error with its exact place, sources, the
 * round trip of the resolved form; all of it under a comma locale too.
 */
#include "train/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refrain/train.h"
#include "support/comma_locale.h"
#include "support/folder.h"
#include "train/config_value.h"

/* The shortest complete configuration; lines 1 to 5. */
#define MODEL "model: {hidden_size: 96, num_hidden_layers: 2, num_attention_heads: 4}\n"
#define MINIMAL "refrain: 1\n" MODEL "data: {train: [\"*.h\"]}\noptimizer: {lr: 1e-3}\nrun: {steps: 10}\n"

static rfr_status read_sets(rft_folder *f, const char *text, const char *const *sets, int n, rfi_config **out) {
  return rfi_config_read(f->ctx, "c.yaml", text, strlen(text), "/base", sets, n, out);
}

static rfi_config *must_read(rft_folder *f, const char *text, const char *const *sets, int n) {
  rfi_config *c;
  if (read_sets(f, text, sets, n, &c) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  return c;
}

static void test_minimal(void **state) {
  rft_folder *f = *state;
  rfi_config *c = must_read(f, MINIMAL, NULL, 0);
  assert_int_equal(c->refrain, 1);
  assert_string_equal(c->model, "");
  assert_int_equal(c->model_model_type, RFI_MODEL_TYPE_llama);
  assert_int_equal(c->model_head_dim, 24);
  assert_int_equal(c->model_num_key_value_heads, 4);
  assert_int_equal(c->model_intermediate_size, 256);
  assert_int_equal(c->model_max_position_embeddings, 512);
  assert_false(c->model_tie_word_embeddings);
  assert_int_equal(c->model_hidden_act, RFI_ACTIVATION_silu);
  assert_string_equal(c->data_root, "/base");
  assert_int_equal(c->batch_tokens, 32768);
  assert_true(c->optimizer_lr == 1e-3 && c->optimizer_betas.v[1] == 0.95);
  assert_true(c->schedule_decay.percent && c->schedule_decay.value == 20);
  assert_int_equal(c->optimizer_groups.n, 0);
  assert_int_equal(c->source[RFI_CFG_optimizer_lr].line, 4);
  assert_string_equal(c->source[RFI_CFG_optimizer_lr].from, "c.yaml");
  assert_string_equal(c->source[RFI_CFG_optimizer_eps].from, "default");
  assert_string_equal(c->source[RFI_CFG_model_head_dim].from, "derived");
  rfi_config_destroy(c);
  c = must_read(f, MINIMAL, (const char *[]){"model.model_type=gpt2"}, 1);
  assert_int_equal(c->model_intermediate_size, 384);
  assert_true(c->model_tie_word_embeddings && c->model_attention_bias && c->model_mlp_bias);
  assert_int_equal(c->model_hidden_act, RFI_ACTIVATION_gelu_new);
  rfi_config_destroy(c);
}

static const char full[] = "# a comment\n"
                           "refrain: 1\n"
                           "model:\n"
                           "  model_type: llama\n"
                           "  hidden_size: 512\n"
                           "  num_hidden_layers: 8\n"
                           "  num_attention_heads: 8\n"
                           "  num_key_value_heads: 2\n"
                           "  dropout: 0.125\n"
                           "  tie_word_embeddings: true\n"
                           "data: {train: [\"src/**/*.h\", \"a \\\"b\\\"\\t\\\\.c\"], validation: 5%, tokenizer: "
                           "bytes, sequence: 512, root: sub}\n"
                           "batch: {tokens: 64k, microbatch: 8}\n"
                           "optimizer:\n"
                           "  name: adamw\n"
                           "  lr: 6e-4\n"
                           "  weight_decay: 0.1\n"
                           "  betas: [0.8, 0.99]\n"
                           "  clip: 1.0\n"
                           "  groups:\n"
                           "    - {match: \"*norm*\", weight_decay: 0}\n"
                           "    - match: \"*embed*\"\n"
                           "      lr_scale: 0.5\n"
                           "schedule: {name: wsd, warmup: 2%, decay: 300}\n"
                           "memory: {budget: 1.5GiB}\n"
                           "run: {steps: 5000, evaluate_every: 250, seed: 1}\n";

static void test_full(void **state) {
  rft_folder *f = *state;
  rfi_config *c = must_read(f, full, NULL, 0);
  assert_int_equal(c->data_train.n, 2);
  assert_string_equal(c->data_train.items[1], "a \"b\"\t\\.c");
  assert_true(c->data_validation.percent == 5 && c->data_validation.patterns.n == 0);
  assert_string_equal(c->data_root, "/base/sub");
  assert_int_equal(c->batch_tokens, 65536);
  assert_int_equal(c->memory_budget, 1610612736);
  assert_int_equal(c->optimizer_groups.n, 2);
  assert_true(c->optimizer_groups.items[0].weight_decay == 0 && c->optimizer_groups.items[0].lr_scale == 1);
  assert_true(c->optimizer_groups.items[1].weight_decay == 0.1 && c->optimizer_groups.items[1].lr_scale == 0.5);
  assert_int_equal(rfi_config_steps(c->schedule_warmup, 5000), 100);
  assert_int_equal(rfi_config_steps(c->schedule_decay, 5000), 300);
  assert_int_equal(c->source[RFI_CFG_optimizer_groups].line, 19);
  rfi_config_destroy(c);
}

/* The printed form reads back as the same values, and prints as the same text. */
static void round_trip(rft_folder *f, const char *text, const char *const *sets, int n) {
  rfi_config *c = must_read(f, text, sets, n);
  rfi_string plain = {.ctx = f->ctx}, commented = {.ctx = f->ctx}, again = {.ctx = f->ctx};
  assert_int_equal(rfi_config_print(c, false, &plain), RFR_OK);
  assert_int_equal(rfi_config_print(c, true, &commented), RFR_OK);
  rfi_config_destroy(c);
  const char *const forms[] = {plain.data, commented.data};
  for (int i = 0; i < 2; i++) {
    if (rfi_config_read(f->ctx, "printed", forms[i], strlen(forms[i]), "/elsewhere", NULL, 0, &c) != RFR_OK)
      fail_msg("%s\n%s", rfr_last_error()->message, forms[i]);
    again.n = 0;
    assert_int_equal(rfi_config_print(c, false, &again), RFR_OK);
    assert_string_equal(again.data, plain.data);
    rfi_config_destroy(c);
  }
  rfi_string_deinit(&plain);
  rfi_string_deinit(&commented);
  rfi_string_deinit(&again);
}

static void test_round_trip(void **state) {
  rft_folder *f = *state;
  round_trip(f, MINIMAL, NULL, 0);
  round_trip(f, full, NULL, 0);
  round_trip(f, full, (const char *[]){"data.validation=[\"a/*\", b]", "run.time=2min", "optimizer.eps=3.3e-7"}, 3);
  round_trip(f, full, (const char *[]){"model=hf/llama", "data.root=/data"}, 2);
}

static void test_comments(void **state) {
  rft_folder *f = *state;
  rfi_string text = {.ctx = f->ctx};
  rfi_config *c = must_read(f, full, (const char *[]){"optimizer.lr=0.5"}, 1);
  assert_int_equal(rfi_config_print(c, true, &text), RFR_OK);
  static const char *const lines[] = {"refrain: 1 # c.yaml:2\n",
                                      "model:\n  model_type: llama # c.yaml:4\n",
                                      "  lr: 0.5 # --set\n",
                                      "  head_dim: 64 # derived\n",
                                      "  eps: 1e-08 # default\n",
                                      "  validation: 5% # c.yaml:11\n",
                                      "  budget: 1610612736 # c.yaml:24",
                                      "  root: \"/base/sub\" # c.yaml:11\n"};
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
    if (!strstr(text.data, lines[i])) fail_msg("no \"%s\" in\n%s", lines[i], text.data);
  rfi_config_destroy(c);
  rfi_string_deinit(&text);
}

static const struct {
  const char *text, *slug;
  int line;
  const char *says;
} wrong[] = {
    {"", "config.syntax", 0, "empty"},
    {"- a\n- b\n", "config.syntax", 1, "top"},
    {"just text", "config.syntax", 1, "top"},
    {"a: [1,\n", "config.syntax", 2, "column"},
    {"a: b: c\n", "config.syntax", 1, "column"},
    {"run:\n\tsteps: 1\n", "config.syntax", 2, "column"},
    {"refrain: 1\n---\nrefrain: 1\n", "config.syntax", 2, "second document"},
    {"refrain: &x 1\n", "config.syntax", 1, "anchor"},
    {"run: &x {steps: 1}\n", "config.syntax", 1, "anchor"},
    {"refrain: 1\nrun: *x\n", "config.syntax", 2, "alias"},
    {"data:\n  train: [*.h]\n", "config.syntax", 2, "quotes"},
    {"refrain: !!int 1\n", "config.syntax", 1, "tag"},
    {"run: !x {steps: 1}\n", "config.syntax", 1, "tag"},
    {"{[1, 2]: 3}\n", "config.syntax", 1, "key must be a text"},
    {"refrain: 1\nrefrain: 1\n", "config.key", 2, "first in line 1"},
    {"run:\n  seed: 1\n  steps: 5\n  seed: 2\n", "config.key", 4, "first in line 2"},
    {"refrain: 1\nmodle: {hidden_size: 3}\n", "config.key", 2, "did you mean \"model\"?"},
    {"model:\n  hiden_size: 3\n", "config.key", 2, "\"model.hiden_size\"; did you mean \"model.hidden_size\"?"},
    {"optimizer: {weight-decay: 1}\n", "config.key", 1, "did you mean \"optimizer.weight_decay\"?"},
    {"model: {lr: 1}\n", "config.key", 1, "did you mean \"optimizer.lr\"?"},
    {"steps: 1\n", "config.key", 1, "did you mean \"run.steps\"?"},
    {"run: {zzzzqqqq: 1}\n", "config.key", 1, "unknown key \"run.zzzzqqqq\""},
    {"learning_rate: 1e-3\n", "config.key", 1, "unknown key \"learning_rate\"; use \"optimizer.lr\""},
    {"optimizer: {Learning-Rate: 1}\n", "config.key", 1, "\"optimizer.Learning-Rate\"; use \"optimizer.lr\""},
    {"training_args:\n  x: 1\n", "config.key", 1, "refrain keys"},
    {"run: {num_train_epochs: 3}\n", "config.key", 1, "use \"run.epochs\": passes over the training data"},
    {"lora: {rank: 8}\n", "config.key", 1, "unknown key \"lora\"; use \"adapter.type\": lora or dora"},
    {"optimizer: {lora_alpha: 8}\n", "config.key", 1, "use \"adapter.alpha\""},
    {"batch_size: 8\n", "config.key", 1, "use \"batch.microbatch\""},
    {"weight_decay: 8\n", "config.key", 1, "\"optimizer.weight_decay\""},
    {"output_dir: x\n", "config.key", 1, "use \"--out\""},
    {"<<: {a: 1}\n", "config.key", 1, "<<"},
    {"optimizer:\n  groups:\n    - match: x\n      lr_scales: 1\n", "config.key", 4, "did you mean \"lr_scale\"?"},
    {"refrain: 2\n", "config.value", 1, "refrain: \"2\""},
    {"refrain: one\n", "config.value", 1, "refrain: \"one\""},
    {"run: 3\n", "config.value", 1, "run: this is a section"},
    {"run: [1]\n", "config.value", 1, "run: this is a section"},
    {"run:\n  steps:\n", "config.value", 2, "run.steps has no value"},
    {"run:\n  steps: ~\n", "config.value", 2, "no value"},
    {"run:\n  steps: [1]\n", "config.value", 2, "a list"},
    {"run:\n  steps: {a: 1}\n", "config.value", 2, "a map"},
    {"run:\n  steps: -1\n", "config.value", 2, "run.steps: \"-1\""},
    {"run:\n  steps: 1.5\n", "config.value", 2, "integer"},
    {"run:\n  steps: 0x10\n", "config.value", 2, "0x10"},
    {"run:\n  steps: 10 k\n", "config.value", 2, "10 k"},
    {"run:\n  steps: 10K\n", "config.value", 2, "10K"},
    {"run:\n  steps: 9223372036854775808\n", "config.value", 2, "run.steps"},
    {"run:\n  steps: 9223372036854775807k\n", "config.value", 2, "run.steps"},
    {"run:\n  keep: 0\n", "config.value", 2, "1..1000000"},
    {"run:\n  time: 120\n", "config.value", 2, "time, 120s"},
    {"run:\n  time: 2 weeks\n", "config.value", 2, "2 weeks"},
    {"run:\n  debug: yes\n", "config.value", 2, "true or false"},
    {"optimizer:\n  lr: nan\n", "config.value", 2, "nan"},
    {"optimizer:\n  lr: inf\n", "config.value", 2, "inf"},
    {"optimizer:\n  lr: 1e999\n", "config.value", 2, "1e999"},
    {"optimizer:\n  clip: 1e999\n", "config.value", 2, "1e999"},
    {"optimizer:\n  lr: 0x1p3\n", "config.value", 2, "0x1p3"},
    {"optimizer:\n  lr: 1,5\n", "config.value", 2, "1,5"},
    {"optimizer:\n  lr: .\n", "config.value", 2, "number"},
    {"optimizer:\n  eps: 0\n", "config.value", 2, ">0"},
    {"optimizer:\n  name: adam\n", "config.value", 2, "adamw|sgd"},
    {"optimizer:\n  name: adamw|sgd\n", "config.value", 2, "adamw|sgd"},
    {"optimizer:\n  name: ''\n", "config.value", 2, "adamw|sgd"},
    {"optimizer:\n  betas: [0.9]\n", "config.value", 2, "two numbers"},
    {"optimizer:\n  betas: [0.9, 1]\n", "config.value", 2, "\"1\""},
    {"optimizer:\n  groups: {match: a}\n", "config.value", 2, "a map"},
    {"optimizer:\n  groups:\n    - lr_scale: 1\n", "config.value", 3, "needs the key match"},
    {"optimizer:\n  groups:\n    - match: a\n      lr_scale: -1\n", "config.value", 4, "-1"},
    {"optimizer:\n  groups: [a]\n", "config.value", 2, "groups"},
    {"memory:\n  budget: 20GiBs\n", "config.value", 2, "20GiBs"},
    {"memory:\n  budget: 0.3B\n", "config.value", 2, "0.3B"},
    {"memory:\n  budget: 99999999TiB\n", "config.value", 2, "99999999TiB"},
    {"schedule:\n  warmup: 101%\n", "config.value", 2, "101%"},
    {"schedule:\n  warmup: 0.02\n", "config.value", 2, "0.02"},
    {"schedule:\n  warmup: 9223372036854775807\n", "config.value", 2, "9223372036854775807"}, /* 2^63 as a double */
    {"data:\n  validation: 0.05\n", "config.value", 2, "write a percentage"},
    {"data:\n  validation: 100%\n", "config.value", 2, "100%"},
    {"data:\n  train:\n    - a\n    - [b]\n", "config.value", 4, "list within a list"},
    {"data:\n  train:\n    - a\n    -\n", "config.value", 4, "nothing"},
    {"data:\n  train: {a: b}\n", "config.value", 2, "a map"},
    {"refrain: 1\n", "config.value", 0, "model.hidden_size is missing"},
    {MODEL, "config.value", 0, "the key refrain is missing"},
};

static void test_wrong(void **state) {
  rft_folder *f = *state;
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    rfi_config *c;
    rfr_status s = read_sets(f, wrong[i].text, NULL, 0, &c);
    const rfr_error *e = rfr_last_error();
    if (s != RFR_INVALID || c) fail_msg("accepted: %s", wrong[i].text);
    if (strcmp(e->slug, wrong[i].slug) != 0) fail_msg("%s, not %s: %s", e->slug, wrong[i].slug, e->message);
    if (e->line != wrong[i].line) fail_msg("line %lld, not %d: %s", (long long)e->line, wrong[i].line, e->message);
    if (!strstr(e->message, wrong[i].says)) fail_msg("\"%s\" does not say \"%s\"", e->message, wrong[i].says);
    assert_string_equal(e->file, "c.yaml");
  }
}

static void test_between_keys(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *set, *says;
  } cases[] = {
      {"model.num_attention_heads=5", "5 does not divide hidden_size 96"},
      {"model.num_key_value_heads=3", "3 does not divide num_attention_heads 4"},
      {"model.max_position_embeddings=100", "is less than data.sequence 512"},
      {"batch.tokens=40000", "the nearest is 40960"},
      {"batch.tokens=10", "the nearest is 4096"},
      {"run.steps=0", "run.steps, run.epochs or run.time is missing"},
      {"data.shares=[1, 0]", "data.shares: 2 numbers for 1 patterns"},
      {"data.shares=[0]", "data.shares: 0 is not a number greater than 0"},
      {"data.shares=[nan]", "data.shares: nan is not a number greater than 0"},
      {"data.max_epochs=[1]", "data.max_epochs: needs data.shares"},
      {"model.hiddensize=1", "did you mean \"model.hidden_size\"?"},
      {"mode.hidden_size=1", "did you mean \"model\"?"},
      {"lora.rank=8", "unknown key \"lora.rank\"; use \"adapter.type\": lora or dora"},
      {"training.learning_rate=1", "unknown key \"training.learning_rate\"; use \"optimizer.lr\""},
      {"gradient_accumulation_steps=4", "use \"batch.tokens\": tokens of a step ="},
      {"batch.gradient_accumulation_steps=4", "use \"batch.tokens\""},
      {"nothing", "--set section.key=value"},
      {"=1", "--set section.key=value"},
      {"run.steps=", "has no value"},
      {"run.steps=x", "--set run.steps=x: run.steps: \"x\""},
      {"data.train=[a", "--set data.train=[a"},
      {"run=3", "run: this is a section"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfi_config *c;
    if (read_sets(f, MINIMAL, &cases[i].set, 1, &c) != RFR_INVALID) fail_msg("accepted: %s", cases[i].set);
    if (!strstr(rfr_last_error()->message, cases[i].says))
      fail_msg("\"%s\" does not say \"%s\"", rfr_last_error()->message, cases[i].says);
  }
  rfi_config *c;
  assert_int_equal(read_sets(f, MINIMAL "memory:\n  recompute: full\n", NULL, 0, &c), RFR_INVALID);
  assert_int_equal(rfr_last_error()->line, 7);
  assert_int_equal(read_sets(f, MINIMAL, (const char *[]){"model.hidden_act=gelu_new"}, 1, &c), RFR_UNSUPPORTED);
  assert_int_equal(
      read_sets(f, "refrain: 1\nmodel: x\nrun:\n  steps: 1\n  time: 1s\ndata: {train: a}\noptimizer: {lr: 1}\n", NULL,
                0, &c),
      RFR_INVALID);
  assert_int_equal(rfr_last_error()->line, 5);
  /* A key of model.* together with a model folder. */
  const char *sets[] = {"model=x", "model.hidden_size=8"};
  assert_int_equal(read_sets(f, MINIMAL, sets, 2, &c), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "not allowed with a model folder"));
}

static void test_sets(void **state) {
  rft_folder *f = *state;
  const char *sets[] = {"run.steps=5",
                        "run.steps=2k",
                        "data.train=*.c",
                        "optimizer.groups=[{match: \"*.bias\", weight_decay: 0}]",
                        "data.validation=12.5%",
                        "model.init_std=.5",
                        "schedule={name: linear, warmup: 7}"};
  rfi_config *c = must_read(f, MINIMAL, sets, sizeof sets / sizeof *sets);
  assert_int_equal(c->run_steps, 2048); /* the last override wins */
  assert_string_equal(c->data_train.items[0], "*.c");
  assert_int_equal(c->data_train.n, 1);
  assert_true(c->data_validation.percent == 12.5);
  assert_string_equal(c->optimizer_groups.items[0].match, "*.bias");
  assert_int_equal(c->schedule_name, RFI_SCHEDULE_linear);
  assert_int_equal(c->source[RFI_CFG_schedule_name].line, 0);
  assert_true(c->model_init_std == 0.5);
  rfi_config_destroy(c);

  c = must_read(f, MINIMAL, (const char *[]){"run.time=1.5h"}, 1); /* replaces run.steps of the file */
  assert_true(c->run_time == 5400);
  assert_int_equal(c->run_steps, 0);
  assert_int_equal(rfi_config_set(c, RFI_CFG_run_steps, "321", "calibrated"), RFR_OK);
  assert_int_equal(rfi_config_set(c, RFI_CFG_run_time, NULL, NULL), RFR_OK);
  assert_int_equal(c->run_steps, 321);
  assert_true(c->run_time == 0);
  assert_int_equal(rfi_config_set(c, RFI_CFG_run_steps, "x", "calibrated"), RFR_INVALID);
  rfi_config_destroy(c);

  c = must_read(f, MINIMAL, (const char *[]){"run.steps=3M", "batch.tokens=1G", "memory.budget=2TB", "run.time=0ms"},
                4);
  assert_int_equal(c->run_steps, 3 * 1024 * 1024);
  assert_int_equal(c->batch_tokens, 1 << 30);
  assert_int_equal(c->memory_budget, 2000000000000);
  rfi_config_destroy(c);

  c = must_read(f, full, (const char *[]){"model.tie_word_embeddings=auto"}, 1);
  assert_false(c->model_tie_word_embeddings);
  assert_string_equal(c->source[RFI_CFG_model_tie_word_embeddings].from, "derived");
  rfi_config_destroy(c);

  c = must_read(f, MINIMAL, (const char *[]){"model=some/folder"}, 1); /* replaces the section of the file */
  assert_string_equal(c->model, "/base/some/folder");
  assert_int_equal(c->model_hidden_size, 0);
  rfi_config_destroy(c);
}

static void test_json_is_yaml(void **state) {
  rft_folder *f = *state;
  static const char json[] =
      "{\"refrain\": 1,\n  \"model\": {\"hidden_size\": 96, \"num_hidden_layers\": 2, "
      "\"num_attention_heads\": 4},\n \"data\": {\"train\": [\"*.h\"], \"validation\": \"5%\"}, "
      "\"batch\": {\"tokens\": \"64k\"},\n\t\"optimizer\": {\"lr\": 1E-3}, \"run\": {\"steps\": 10, "
      "\"debug\": true}}\n";
  rfi_config *c = must_read(f, json, NULL, 0);
  assert_int_equal(c->batch_tokens, 65536);
  assert_true(c->run_debug && c->data_validation.percent == 5);
  assert_int_equal(c->source[RFI_CFG_data_train].line, 3);
  rfi_config_destroy(c);
}

/* Strings are printed as JSON strings; a value that a configuration cannot contain is refused. */
static void test_any_bytes(void **state) {
  rft_folder *f = *state;
  rfi_string text = {.ctx = f->ctx};
  rfi_config *c = must_read(f, MINIMAL, (const char *[]){"run.sample_prompt=\"\\e\\n\\x7f\\\\\""}, 1);
  assert_string_equal(c->run_sample_prompt, "\033\n\177\\");
  assert_int_equal(rfi_config_print_value(c, RFI_CFG_run_sample_prompt, &text), RFR_OK);
  assert_string_equal(text.data, "\"\\u001b\\u000a\\u007f\\\\\"");
  rfi_config_destroy(c);
  c = must_read(f, MINIMAL, (const char *[]){"data.root=/\xff"}, 1);
  assert_int_equal(rfi_config_print(c, false, &text), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "data.root: \"/\xff\" is not valid UTF-8"));
  rfi_config_destroy(c);
  rfi_string_deinit(&text);
}

/* A truncated or corrupted file gives a status, never a crash or a leak. */
static void test_damaged(void **state) {
  rft_folder *f = *state;
  char text[sizeof full];
  for (size_t i = 0; i < sizeof full; i++) {
    rfi_config *c;
    if (rfi_config_read(f->ctx, "c", full, i, NULL, NULL, 0, &c) == RFR_OK) rfi_config_destroy(c);
    memcpy(text, full, sizeof full);
    text[i] ^= (char)(1 << i % 8);
    if (rfi_config_read(f->ctx, "c", text, sizeof full - 1, NULL, NULL, 0, &c) == RFR_OK) rfi_config_destroy(c);
  }
  size_t n = 100000; /* deeply nested brackets */
  char *tower = malloc(n);
  memset(tower, '[', n);
  rfi_config *c;
  assert_int_equal(rfi_config_read(f->ctx, "c", tower, n, NULL, NULL, 0, &c), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "config.syntax");
  free(tower);
}

/* Reading time is bounded: a map has at most 512 keys, a text at most 1 MiB. */
static void test_limits(void **state) {
  rft_folder *f = *state;
  rfi_string text = {.ctx = f->ctx};
  rfi_config *c;
  for (int i = 0; i < 80000; i++) assert_int_equal(rfi_string_printf(&text, "k%d: 1\n", i), RFR_OK);
  assert_int_equal(rfi_config_read(f->ctx, "c", text.data, text.n, NULL, NULL, 0, &c), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "config.syntax");
  assert_int_equal(rfr_last_error()->line, 513);
  while (text.n <= 1 << 20) assert_int_equal(rfi_string_printf(&text, "# a comment\n"), RFR_OK);
  assert_int_equal(rfi_config_read(f->ctx, "c", text.data, text.n, NULL, NULL, 0, &c), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "config.syntax");
  assert_non_null(strstr(rfr_last_error()->message, "at most 1048576"));
  rfi_string_deinit(&text);
}

/* Each key of another trainer is mapped to one of our keys, or to a text that there is none. No name is also a key of
 * ours. */
static void test_foreign_keys(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *names, *ours, *note;
  } table[] = {
#define RFI_FOREIGN(names, ours, note) {names, ours, note},
#include "train/config_foreign.def"
#undef RFI_FOREIGN
  };
  for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
    char name[64], text[100];
    bool known = strncmp(table[i].ours, "--", 2) == 0 || (!*table[i].ours && *table[i].note);
    for (int k = 0; k < RFI_CFG_COUNT; k++) known |= strcmp(rfi_config_path((rfi_config_id)k), table[i].ours) == 0;
    if (!known) fail_msg("%s is no key", table[i].ours);
    for (const char *at = table[i].names; sscanf(at, "%63s", name) == 1;
         at += strlen(name) + (at[strlen(name)] == ' ')) {
      rfi_config *c;
      snprintf(text, sizeof text, "%s: 1\n", name);
      assert_int_equal(rfi_config_read(f->ctx, "c", text, strlen(text), NULL, NULL, 0, &c), RFR_INVALID);
      assert_string_equal(rfr_last_error()->slug, "config.key");
      if (!strstr(rfr_last_error()->message, table[i].ours) || !strstr(rfr_last_error()->message, table[i].note))
        fail_msg("%s: %s", name, rfr_last_error()->message);
    }
  }
}

static void test_out_of_memory(void **state) {
  rft_folder *f = *state;
  for (int k = 1;; k++) {
    rfi_config *c;
    rfr_ctx_fail_alloc(f->ctx, k);
    rfr_status s = read_sets(f, full, NULL, 0, &c);
    rfr_ctx_fail_alloc(f->ctx, 0);
    rfi_config_destroy(c);
    if (s == RFR_OK) break;
    assert_int_equal(s, RFR_NO_MEMORY);
    assert_true(k < 1000);
  }
}

static void test_table(void **state) {
  rft_folder *f = *state;
  rfi_string text = {.ctx = f->ctx};
  assert_int_equal(rfi_config_table(&text), RFR_OK);
  for (int i = 0; i < RFI_CFG_COUNT; i++) {
    char cell[64];
    snprintf(cell, sizeof cell, "| `%s` | ", rfi_config_path((rfi_config_id)i));
    if (!strstr(text.data, cell)) fail_msg("no row for %s", cell);
  }
  for (const char *line = text.data; *line; line = strchr(line, '\n') + 1) { /* six cells in every row */
    int bars = 0;
    for (const char *p = line; *p != '\n'; p++) bars += *p == '|' && (p == line || p[-1] != '\\');
    assert_int_equal(bars, 7);
  }
  rfi_string_deinit(&text);
}

static void test_keys(void **state) {
  (void)state;
  rfr_config_key key;
  int n = 0, change = 0;
  for (; rfr_config_key_at(n, &key) == RFR_OK; n++) {
    assert_string_equal(key.name, rfi_config_path((rfi_config_id)n));
    assert_true(*key.type && (*key.initial || n == RFI_CFG_model || n == RFI_CFG_adapter_from) && *key.meaning);
    change += key.may_change;
  }
  assert_int_equal(n, RFI_CFG_COUNT);
  assert_string_equal(rfr_last_error()->slug, "argument");
  assert_null(key.name);
  assert_true(change > 0 && change < n);
  assert_int_equal(rfr_config_key_at(-1, &key), RFR_INVALID);
  assert_int_equal(rfr_config_key_at(RFI_CFG_run_keep, &key), RFR_OK);
  assert_string_equal(key.name, "run.keep");
  assert_string_equal(key.initial, "2");
  assert_string_equal(key.accepted, "1..1000000");
  assert_true(key.may_change);
  assert_int_equal(rfr_config_key_at(RFI_CFG_run_steps, &key), RFR_OK);
  assert_true(key.may_change);
  assert_int_equal(rfr_config_key_at(RFI_CFG_run_seed, &key), RFR_OK);
  assert_false(key.may_change);
}

static void test_comma_locale(void **state) {
  if (!rft_set_comma_locale(RFT_BINARY_DIR "/locale")) fail_msg("no comma locale");
  test_minimal(state);
  test_full(state);
  test_round_trip(state);
  test_comments(state);
  test_wrong(state);
  setlocale(LC_ALL, "C");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_minimal),      rft_folder_test(test_full),          rft_folder_test(test_round_trip),
      rft_folder_test(test_comments),     rft_folder_test(test_wrong),         rft_folder_test(test_between_keys),
      rft_folder_test(test_sets),         rft_folder_test(test_json_is_yaml),  rft_folder_test(test_any_bytes),
      rft_folder_test(test_damaged),      rft_folder_test(test_out_of_memory), rft_folder_test(test_table),
      rft_folder_test(test_comma_locale), cmocka_unit_test(test_keys),         rft_folder_test(test_limits),
      rft_folder_test(test_foreign_keys),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
