/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs from model folders: the files of a checkpoint, foreign tokenizers, tensors that config.json does not describe,
 * and folders of runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/safetensors.h"
#include "refrain/train.h"
#include "support/model_folder.h"

/* A checkpoint of a run from a folder has the folder's files byte for byte, listed in the manifest, and its dtype. */
static void carried_files(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *name, *text;
  } files[] = {{"generation_config.json", "{ \"eos_token_id\" : [5,6],\"temperature\":1}"},
               {"tokenizer_config.json", "{\"model_max_length\": 64}\n\n"},
               {"special_tokens_map.json", "{}"},
               {"added_tokens.json", "not JSON"},
               {"chat_template.jinja", ""}};
  enum { N = sizeof files / sizeof files[0] };
  static const char *const dtypes[][2] = {{"float32", "F32"}, {"bfloat16", "BF16"}, {"float16", "F16"}};
  for (int k = 0; k < 3; k++) {
    rfr_run *run;
    char fields[100], out[16], name[100], *text;
    size_t n;
    rfi_safetensors *weights;
    snprintf(fields, sizeof fields, "{\"dtype\": \"%s\", \"torch_dtype\": \"%s\"}", dtypes[k][0], dtypes[k][0]);
    rft_model_folder(f, "llama", fields);
    for (int i = 0; i < N; i++) rft_write(f, files[i].name, files[i].text, strlen(files[i].text));
    snprintf(out, sizeof out, "out%d", k);
    OK(rfr_run_open(f->ctx, rft_model_run(f->path), rft_path(f, out), NULL, &run));
    for (int i = 0; i < N; i++) remove(rft_path(f, files[i].name)); /* the run no longer needs the folder */
    OK(rfr_run_train(run));
    rfr_run_close(run);
    snprintf(name, sizeof name, "%s/step-000001/MANIFEST.json", out);
    char *manifest = rft_read(f, name, &n);
    for (int i = 0; i < N; i++) {
      snprintf(name, sizeof name, "%s/step-000001/%s", out, files[i].name);
      text = rft_read(f, name, &n);
      assert_int_equal(n, strlen(files[i].text));
      assert_memory_equal(text, files[i].text, n);
      assert_non_null(strstr(manifest, files[i].name));
      free(text);
    }
    free(manifest);
    snprintf(name, sizeof name, "%s/step-000001/config.json", out);
    text = rft_read(f, name, &n);
    assert_non_null(strstr(text, dtypes[k][0]));
    free(text);
    snprintf(name, sizeof name, "%s/step-000001/model.safetensors", out);
    OK(rfi_safetensors_open(f->ctx, rft_path(f, name), &weights));
    assert_string_equal(rfr_dtype_safetensors_name(rfi_safetensors_at(weights, 0)->dtype), dtypes[k][1]);
    rfi_safetensors_close(weights);
    snprintf(name, sizeof name, "%s/step-000001/state.json", out);
    text = rft_read(f, name, &n);
    assert_null(strstr(text, "(null)"));
    assert_null(strstr(text, "model.hidden_act")); /* config.json decides */
    free(text);
  }
}

/* A model with a vocabulary other than bytes cannot be trained on bytes, evaluated on them or asked to continue them.
 * It needs a tokenizer.json that can be read. */
static void foreign_tokenizers(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *fields, *file, *want;
  } cases[] = {{NULL, NULL, NULL},
               {"{\"vocab_size\": 257}", NULL, "vocab_size 257"},
               {NULL, "tokenizer.json", "tokenizer.json"},
               {NULL, "tokenizer.model", "tokenizer.model"},
               {NULL, "vocab.json", "vocab.json"},
               {NULL, "merges.txt", "merges.txt"}};
  static const int programs[] = {RFR_RUN_TRAIN, RFR_RUN_EVALUATE, RFR_RUN_GENERATE};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfr_run *run;
    rfr_run_info info;
    rfr_run_options o = rfr_run_options_default();
    rft_model_folder(f, "llama", cases[i].fields);
    if (cases[i].file) rft_write(f, cases[i].file, "{}", 2);
    for (size_t k = 0; k < sizeof programs / sizeof programs[0]; k++) {
      o = rfr_run_options_default();
      o.programs = programs[k];
      rfr_status s = rfr_run_open(f->ctx, rft_model_run(f->path), NULL, &o, &run);
      if (cases[i].want) {
        assert_int_not_equal(s, RFR_OK);
        assert_non_null(strstr(rfr_last_error()->message, "/tokenizer.json"));
        o.overrides = (const char *const[]){"data.tokenizer=bytes"};
        o.n_overrides = 1;
        s = rfr_run_open(f->ctx, rft_model_run(f->path), NULL, &o, &run);
        assert_int_equal(s, RFR_UNSUPPORTED);
        assert_string_equal(rfr_last_error()->slug, "data.tokenizer");
        assert_non_null(strstr(rfr_last_error()->message, cases[i].want));
      } else if (programs[k] == RFR_RUN_TRAIN) {
        OK(s);
        rfr_run_get_info(run, &info);
        assert_true(info.byte_tokens);
      }
      rfr_run_close(run);
    }
    o = rfr_run_options_default();
    o.no_data = 1; /* a plan or a trace needs no tokenizer */
    OK(rfr_run_open(f->ctx, rft_model_run(f->path), NULL, &o, &run));
    rfr_run_get_info(run, &info);
    assert_int_equal(info.byte_tokens, cases[i].want == NULL);
    rfr_run_close(run);
    if (cases[i].file) remove(rft_path(f, cases[i].file));
  }
}

/* `model: RUN` is refused, and the error names the checkpoint to use. */
static void run_folders(void **state) {
  rft_folder *f = *state;
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  o.no_data = 1;
  rft_write(f, "step-000009/x", "", 0);
  rft_write(f, "step-000010/x", "", 0);
  rft_write(f, "step-000011.tmp-7/x", "", 0);
  assert_int_equal(rfr_run_open(f->ctx, rft_model_run(f->path), NULL, &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "run.folder");
  assert_non_null(strstr(rfr_last_error()->message, "/step-000010"));
}

static void keep_warning(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_WARNING) snprintf(user, 512, "%s", e->message);
}

/* config.json describes more or fewer tensors than the folder has. */
static void other_tensors(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *key, *value, *warning, *error;
  } cases[] = {
      {"attention_dropout", "0.0", "", NULL},
      {"num_hidden_layers", "1", "16 tensors do not belong to the model and are ignored, as model.layers.1.", NULL},
      {"num_hidden_layers", "3", "", "there is no tensor model.layers.2.input_layernorm.weight"},
      {"tie_word_embeddings", "true", "", NULL}, /* the head exists nevertheless */
      {"intermediate_size", "48", "", "has shape [24, 16]; config.json describes [48, 16]"},
  };
  size_t n;
  char *data = rft_model_file("llama", "model.safetensors", &n), config[1024];
  rft_write(f, "model.safetensors", data, n);
  rft_model_text(f);
  free(data);
  snprintf(config, sizeof config,
           "refrain: 1\nmodel: %s\ndata: {train: [text], root: %s, sequence: 16}\nbatch: {tokens: 32, microbatch: 2}\n"
           "optimizer: {lr: 1e-3}\nprecision: {dtype: f32}\nrun: {steps: 1}\n",
           f->path, f->path);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char warning[512] = "";
    rfr_model_config c;
    rfr_run *run;
    rfr_run_options o = rfr_run_options_default();
    json_t *config_json = rft_model_config("llama");
    json_object_set_new(config_json, cases[i].key, json_loads(cases[i].value, JSON_DECODE_ANY, NULL));
    OK(rft_model_read(f, config_json, &c));
    o.on_event = keep_warning, o.event_user = warning;
    const rfr_status s = rfr_run_open(f->ctx, config, NULL, &o, &run);
    rft_expect(s, cases[i].error, cases[i].key, cases[i].value);
    if (s != RFR_OK) assert_string_equal(rfr_last_error()->slug, "model.weights");
    if (!strstr(warning, cases[i].warning) || !*cases[i].warning != !*warning) fail_msg("%s", warning);
    rfr_run_close(run);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(carried_files),
      rft_folder_test(foreign_tokenizers),
      rft_folder_test(run_folders),
      rft_folder_test(other_tensors),
  };
  return cmocka_run_group_tests_name("model_run", tests, NULL, NULL);
}
