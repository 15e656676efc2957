/* SPDX-License-Identifier: Apache-2.0
 *
 * Folders with quantized weights: the bits that torch and bitsandbytes decode (tools/make_quantized_folders.py), and
 * folders with a part that is missing or does not fit.
 */
#include "model/quantized.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/hf.h"
#include "model/weights.h"
#include "support/folder.h"

#define FILES RFT_SOURCE_DIR "/tests/data/quantized/"
#define OK(call) assert_ok(call, #call, __LINE__)

static void assert_ok(rfr_status s, const char *call, int line) {
  if (s != RFR_OK) fail_msg("line %d: %s: %s", line, call, rfr_last_error()->message);
}

/* Reads all weights of a folder; *differ: the number of tensors that are not bitwise as expected. */
static rfr_status read_all(rfr_ctx *ctx, const char *folder, rfi_safetensors *expected, int *differ) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  rfi_weights *w;
  rfr_parameter p;
  const char *left = "";
  c.dtype = RFR_BF16;
  OK(rfi_hf_read(ctx, folder, false, &c));
  OK(rfi_weights_open(ctx, folder, &w));
  rfr_status s = RFR_OK;
  *differ = 0;
  for (int i = 0; s == RFR_OK && rfr_model_parameter(&c, i, &p) == RFR_OK; i++) {
    rfr_tensor x = {.name = p.name, .type = {.dtype = RFR_BF16, .rank = p.rank}, .bytes = 2};
    for (int d = 0; d < p.rank; d++) x.bytes *= x.type.shape[d] = p.shape[d];
    void *want = malloc((size_t)x.bytes);
    x.data = malloc((size_t)x.bytes);
    s = rfi_weights_read(w, &c, &x);
    OK(rfi_safetensors_read(expected, rfi_safetensors_find(expected, p.name), want, (size_t)x.bytes));
    *differ += s == RFR_OK && memcmp(want, x.data, (size_t)x.bytes) != 0;
    free(want);
    free(x.data);
  }
  if (s == RFR_OK) assert_int_equal(rfi_weights_left(w, &c, &left), 0);
  rfi_weights_close(w);
  return s;
}

static void bits(void **state) {
  static const char *const names[] = {"fp8", "nf4", "fp4"};
  rft_folder *f = *state;
  for (int i = 0; i < 3; i++) {
    char folder[512], path[600];
    rfi_safetensors *expected;
    int differ;
    snprintf(folder, sizeof folder, FILES "%s", names[i]);
    snprintf(path, sizeof path, "%s/expected.safetensors", folder);
    OK(rfi_safetensors_open(f->ctx, path, &expected));
    OK(read_all(f->ctx, folder, expected, &differ));
    if (differ) fail_msg("%s: %d tensors differ", names[i], differ);
    rfi_safetensors_close(expected);
  }
}

/* One byte sequence of a file of the folder is replaced by another of the same length. */
static void broken(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *folder, *from, *to, *says;
  } rows[] = {{"fp8", "q_proj.weight_scale_inv", "q_proj.weight_scale_in_", "there is no tensor"},
              {"nf4", "q_proj.weight.nested_absmax", "q_proj.weight.nested_absma_", "there is no tensor"},
              {"nf4", "q_proj.weight.absmax", "q_proj.weight.absma_", "there is no tensor"},
              {"fp4", "q_proj.weight.quant_map", "q_proj.weight.quant_ma_", "there is no tensor"},
              {"fp4", "\"blocksize\": 64", "\"blocksize\": 32", "elements of F32; 18 are needed"},
              {"fp4", "\"blocksize\": 64", "\"blocksize\":  0", "blocksize"},
              {"fp4", "\"shape\": [24, 24]", "\"shape\": [24, 25]", "another shape or dtype"},
              {"fp4", "\"dtype\": \"bfloat16\"", "\"dtype\": \"cfloat16\"", "another shape or dtype"}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    static const char *const files[] = {"config.json", "model.safetensors"};
    char folder[512];
    rfi_safetensors *expected;
    int differ, patched = 0;
    snprintf(folder, sizeof folder, FILES "%s", rows[i].folder);
    rft_folder from = {.ctx = f->ctx};
    snprintf(from.path, sizeof from.path, "%s", folder);
    for (int k = 0; k < 2; k++) {
      size_t n;
      char *data = rft_read(&from, files[k], &n);
      const size_t length = strlen(rows[i].from);
      for (size_t at = 0; at + length <= n; at++) {
        if (memcmp(data + at, rows[i].from, length) != 0) continue;
        memcpy(data + at, rows[i].to, length);
        patched++;
      }
      rft_write(f, files[k], data, n);
      free(data);
    }
    assert_true(patched > 0);
    OK(rfi_safetensors_open(f->ctx, strcat(folder, "/expected.safetensors"), &expected));
    const rfr_status s = read_all(f->ctx, f->path, expected, &differ);
    if (s == RFR_OK || !strstr(rfr_last_error()->message, rows[i].says))
      fail_msg("row %zu: %s", i, rfr_last_error()->message);
    rfi_safetensors_close(expected);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(bits), rft_folder_test(broken)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
