/* SPDX-License-Identifier: Apache-2.0
 *
 * Offline runs of Weights & Biases: the bytes that the client's own protocol buffers give for the same records, records
 * over the ends of blocks, and the records of a run's log.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "refrain/report.h"
#include "report/wandb_file.h"
#include "support/folder.h"

static void expect(rfr_status s, const char *what) {
  if (s != RFR_OK) fail_msg("%s: %s [%s]", what, rfr_last_error()->message, rfr_last_error()->slug);
}

/* Written with wandb 0.31's messages and zlib's CRC-32. */
static const char golden[] =
    "3a572642e1be00b5446bc01e00010801aa01190a170a0d7265667261696e20302e312e301206302e31322e300ace76a15a000108"
    "028a01550a0861626364313233341a077265667261696e222a0a160a0c6f7074696d697a65722e6c72820105302e3030310a100a"
    "046e616d65820107225c22785c2222420566697273748a010c0880e2cfaa061080cab5ee01e845807a2c0001080312280a0d0a05"
    "5f737465708201033330300a120a0a747261696e2f6c6f7373820103322e35120308ac0256e030b118000108041a140a120a0a74"
    "7261696e2f6c6f7373820103322e35e0d0223f09000108059201040801104d";

static void test_golden(void **state) {
  rft_folder *f = *state;
  static const rfi_wandb_value config[] = {{"optimizer.lr", "0.001"}, {"name", "\"\\\"x\\\"\""}},
                               values[] = {{"_step", "300"}, {"train/loss", "2.5"}};
  rfi_wandb w = {.text = {.ctx = f->ctx}};
  char hex[2 * 1024] = "";
  rfi_wandb_begin(&w, "abcd1234", "refrain", "first", 1700000000.5, config, 2);
  rfi_wandb_history(&w, 300, values, 2);
  rfi_wandb_end(&w, values + 1, 1, 77.9, 1);
  expect(w.status, "write");
  assert_true(w.text.n < 1024);
  for (size_t i = 0; i < w.text.n; i++) sprintf(hex + 2 * i, "%02x", (unsigned char)w.text.data[i]);
  assert_string_equal(hex, golden);
  rfi_wandb_deinit(&w);
}

/* ---- a plain reader ---- */

/* Joins the parts of record `want` (0 based) into `out`; returns the number of records. */
static int read_records(const unsigned char *s, size_t n, int want, char *out, size_t size, size_t *got) {
  int records = 0;
  *got = 0;
  for (size_t at = 7; at < n;) {
    const size_t left = 32768 - at % 32768;
    if (left < 7) {
      for (size_t i = 0; i < left && at + i < n; i++) assert_int_equal(s[at + i], 0);
      at += left;
      continue;
    }
    const size_t length = s[at + 4] | (size_t)s[at + 5] << 8;
    const int type = s[at + 6];
    assert_true(type >= 1 && type <= 4 && length + 7 <= left);
    if (records == want) {
      assert_true(*got + length <= size);
      memcpy(out + *got, s + at + 7, length);
      *got += length;
    }
    records += type == 1 || type == 4;
    at += 7 + length;
  }
  return records;
}

/* Values of all lengths, so that records end at every distance from the end of a block. */
static void test_blocks(void **state) {
  rft_folder *f = *state;
  enum { STEPS = 400 };
  static char long_value[80000], record[90000];
  rfi_wandb w = {.text = {.ctx = f->ctx}};
  size_t got;
  rfi_wandb_begin(&w, "abcd1234", "refrain", "first", 0, NULL, 0);
  for (int i = 0; i < STEPS; i++) {
    const size_t n = i == 200 ? sizeof long_value - 1 : 300 + (size_t)i;
    const rfi_wandb_value value = {"text", long_value};
    memset(long_value, 'a' + i % 26, n);
    long_value[n] = 0;
    rfi_wandb_history(&w, i, &value, 1);
  }
  rfi_wandb_end(&w, NULL, 0, 0, 0);
  expect(w.status, "write");
  for (int i = 0; i < STEPS; i++) {
    const size_t n = i == 200 ? sizeof long_value - 1 : 300 + (size_t)i;
    assert_int_equal(read_records((const unsigned char *)w.text.data, w.text.n, 2 + i, record, sizeof record, &got),
                     STEPS + 4);
    memset(long_value, 'a' + i % 26, n);
    assert_non_null(memmem(record, got, long_value, n));
  }
  rfi_wandb_deinit(&w);
}

/* Writes a first record of a step with a value of n bytes; returns the bytes of the file. */
static size_t begin_with(rfi_wandb *w, rft_folder *f, char *text, size_t n) {
  const rfi_wandb_value value = {"text", text};
  *w = (rfi_wandb){.text = {.ctx = f->ctx}};
  memset(text, 'x', n);
  text[n] = 0;
  rfi_wandb_begin(w, "abcd1234", "refrain", "first", 0, NULL, 0);
  rfi_wandb_history(w, 0, &value, 1);
  expect(w->status, "write");
  return w->text.n;
}

/* A record that ends 0 to 8 bytes before the end of a block, and the record after it. */
static void test_ends(void **state) {
  rft_folder *f = *state;
  static char text[40000], record[40000];
  static const rfi_wandb_value next = {"text", "next"};
  rfi_wandb w;
  const size_t other = begin_with(&w, f, text, 30000) - 30000;
  rfi_wandb_deinit(&w);
  for (size_t k = 0; k <= 8; k++) {
    size_t got;
    assert_int_equal(begin_with(&w, f, text, 32768 - other - k), 32768 - k);
    rfi_wandb_history(&w, 1, &next, 1);
    assert_int_equal(read_records((const unsigned char *)w.text.data, w.text.n, 3, record, sizeof record, &got), 4);
    assert_non_null(memmem(record, got, "next", 4));
    rfi_wandb_deinit(&w);
  }
}

/* ---- a run ---- */

static void write_text(rft_folder *f, const char *name, const char *text) { rft_write(f, name, text, strlen(text)); }

static void test_run(void **state) {
  rft_folder *f = *state;
  /* of the records after the first: the run, steps 1, 2 and 4, the summary */
  static const char *const wanted[] = {"optimizer.lr",
                                       "train/loss\x82\x01\x03"
                                       "3.5",
                                       "train/loss\x82\x01\x03"
                                       "2.5",
                                       "train/loss\x82\x01\x04"
                                       "1.25",
                                       "evaluation/loss\x82\x01\x04"
                                       "2.75"};
  rfi_paths names = {.ctx = f->ctx};
  char name[256], record[4096];
  size_t n, got;
  rfr_report *r;
  write_text(f, "run/config.yaml", "refrain: 1\noptimizer:\n  lr: 0.001\n");
  write_text(f, "run/log.jsonl",
             "{\"event\": \"start\", \"step\": 0, \"steps\": 4, \"time\": 1700000000.5}\n"
             "{\"event\": \"metrics\", \"step\": 1, \"time\": 1700000001, \"loss\": 3.5}\n"
             "{\"event\": \"metrics\", \"step\": 2, \"time\": 1700000002, \"loss\": 9}\n"
             "{\"event\": \"start\", \"step\": 1, \"steps\": 4, \"time\": 1700000010}\n"
             "{\"event\": \"metrics\", \"step\": 2, \"time\": 1700000011, \"loss\": 2.5}\n"
             "{\"event\": \"evaluation\", \"step\": 2, \"time\": 1700000011, \"loss\": 2.75}\n"
             "{\"event\": \"metrics\", \"step\": 4, \"time\": 1700000012, \"loss\": 1.25}\n"
             "{\"event\": \"end\", \"step\": 4, \"time\": 1700000012, \"message\": \"done\"}\n");
  const char *run = rft_path(f, "run");
  expect(rfr_report_open(f->ctx, &run, 1, &r), "open");
  expect(rfr_report_wandb(r, 0, rft_path(f, "out")), "write");
  assert_int_equal(rfr_report_wandb(r, 0, rft_path(f, "out")), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "export.exists");
  /* earlier runs of the report were already written */
  assert_null(strstr(rfr_last_error()->message, "nothing was written"));
  rfr_report_close(r);
  expect(rfi_dir_list(rft_path(f, "out"), &names), "list");
  assert_int_equal(names.n, 1);
  assert_int_equal(strncmp(names.items[0], "offline-run-20231114_22132", 26), 0);
  const char *id = strrchr(names.items[0], '-') + 1;
  snprintf(name, sizeof name, "out/%s/run-%s.wandb", names.items[0], id);
  unsigned char *s = (unsigned char *)rft_read(f, name, &n);
  for (int i = 0; i < 5; i++) {
    assert_int_equal(read_records(s, n, i + 1, record, sizeof record, &got), 7);
    if (!memmem(record, got, wanted[i], strlen(wanted[i]))) fail_msg("record %d has no %s", i, wanted[i]);
    if (i == 2) assert_non_null(memmem(record, got, wanted[4], strlen(wanted[4])));
  }
  free(s);
  rfi_paths_deinit(&names);
}

/* Readers refuse text that is not UTF-8. */
static void test_name(void **state) {
  rft_folder *f = *state;
  rfi_wandb w = {.text = {.ctx = f->ctx}};
  rfi_wandb_begin(&w, "id", "project", "run\xffname", 1.0, NULL, 0);
  expect(w.status, "begin");
  assert_null(memmem(w.text.data, w.text.n, "run\xffname", 8));
  assert_non_null(memmem(w.text.data, w.text.n, "run\xef\xbf\xbdname", 10));
  rfi_wandb_deinit(&w);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(test_golden), rft_folder_test(test_blocks),
                                     rft_folder_test(test_ends), rft_folder_test(test_run), rft_folder_test(test_name)};
  return cmocka_run_group_tests_name("wandb", tests, NULL, NULL);
}
