/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints: the full cycle, damage to every file, failure of every single system call, retention and cleanup.
 */
#include "data/checkpoint.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/json.h"
#include "support/folder.h"

/* A checkpoint of three files whose bytes depend on the step and the version. */
static rfr_status save(rft_folder *f, int step, const char *version) {
  rfi_checkpoint_writer *w;
  rfi_file *file;
  char text[64];
  rfr_status s = rfi_checkpoint_begin(f->ctx, NULL, rft_path(f, "run"), step, &w);
  if (s != RFR_OK) return s;
  int n = snprintf(text, sizeof text, "%s of step %d", version, step);
  s = rfi_checkpoint_file(w, "model.safetensors", &file);
  for (int i = 0; i < 3 && s == RFR_OK; i++) s = rfi_file_append(file, text, (size_t)n);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, "state.json", text, (size_t)n);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, "empty", "", 0);
  return rfi_checkpoint_finish(w, s);
}

/* Entries of the run's folder in one line. */
static const char *listing(rft_folder *f, const char *name) {
  static char line[1024];
  rfi_paths names = {.ctx = f->ctx};
  line[0] = 0;
  assert_int_equal(rfi_dir_list(rft_path(f, name), &names), RFR_OK);
  for (int i = 0; i < names.n; i++) {
    if (i) strcat(line, " ");
    strcat(line, names.items[i]);
  }
  rfi_paths_deinit(&names);
  return line;
}

/* Step of the newest complete checkpoint, -1 for none, -2 for an error. */
static int latest(rft_folder *f, int *skipped) {
  rfi_checkpoint *c;
  if (rfi_checkpoint_latest(f->ctx, NULL, rft_path(f, "run"), &c, skipped) != RFR_OK) return -2;
  int step = c ? (int)c->step : -1;
  rfi_checkpoint_close(c);
  return step;
}

static void test_cycle(void **state) {
  rft_folder *f = *state;
  int skipped;
  assert_int_equal(latest(f, &skipped), -1);
  assert_int_equal(save(f, 7, "first"), RFR_OK);
  assert_string_equal(listing(f, "run"), "step-000007");
  assert_string_equal(listing(f, "run/step-000007"), "MANIFEST.json empty model.safetensors state.json");
  assert_int_equal(save(f, 1000000, "first"), RFR_OK); /* as text it sorts before 999999 */
  assert_int_equal(save(f, 999999, "first"), RFR_OK);
  assert_int_equal(latest(f, &skipped), 1000000);
  assert_int_equal(skipped, 0);

  rfi_checkpoint *c;
  char *path, *text;
  size_t n;
  assert_int_equal(rfi_checkpoint_latest(f->ctx, NULL, rft_path(f, "run"), &c, NULL), RFR_OK);
  assert_int_equal(c->files.n, 3);
  assert_int_equal(rfi_checkpoint_path(c, "state.json", &path), RFR_OK);
  assert_int_equal(rfi_file_read(f->ctx, path, &text, &n), RFR_OK);
  assert_string_equal(text, "first of step 1000000");
  rfi_free(f->ctx, text);
  rfi_free(f->ctx, path);
  assert_int_equal(rfi_checkpoint_path(c, "other", &path), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "other"));
  rfi_checkpoint_close(c);

  /* A checkpoint whose writer was killed between manifest and rename does not count. */
  assert_int_equal(rename(rft_path(f, "run/step-1000000"), rft_path(f, "run/step-1000000.tmp-1")), 0);
  assert_int_equal(latest(f, NULL), 999999);
  assert_int_equal(rename(rft_path(f, "run/step-1000000.tmp-1"), rft_path(f, "run/step-1000000")), 0);

  /* A checkpoint of the same step replaces the old one. */
  assert_int_equal(save(f, 7, "second"), RFR_OK);
  text = rft_read(f, "run/step-000007/state.json", &n);
  assert_string_equal(text, "second of step 7");
  free(text);
  assert_string_equal(listing(f, "run"), "step-000007 step-1000000 step-999999");
}

static void test_writer(void **state) {
  rft_folder *f = *state;
  static const char *const bad[] = {"", "a/b", "..", ".", "MANIFEST.json", "/etc/x"};
  rfi_checkpoint_writer *w;
  rfi_file *file;
  assert_int_equal(rfi_checkpoint_begin(f->ctx, NULL, rft_path(f, "run"), 3, &w), RFR_OK);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    assert_int_equal(rfi_checkpoint_file(w, bad[i], &file), RFR_INVALID);
  assert_int_equal(rfi_checkpoint_add(w, "a", "1", 1), RFR_OK);
  assert_int_equal(rfi_checkpoint_add(w, "a", "1", 1), RFR_INVALID);
  assert_int_equal(rfi_checkpoint_file(w, "b", &file), RFR_OK);
  assert_int_equal(rfi_checkpoint_finish(w, rfi_fail(RFI_E_FILE_WRITE, "a test")), RFR_IO); /* with an open file */
  assert_string_equal(listing(f, "run"), "");
  assert_int_equal(rfi_checkpoint_begin(f->ctx, NULL, rft_path(f, "run"), -1, &w), RFR_INVALID);
}

static void expect_damaged(rft_folder *f, const char *named) {
  rfi_checkpoint *c;
  assert_int_equal(rfi_checkpoint_open(f->ctx, NULL, rft_path(f, "run/step-000002"), &c), RFR_INVALID);
  assert_null(c);
  assert_string_equal(rfr_last_error()->slug, "checkpoint");
  if (!strstr(rfr_last_error()->message, named)) fail_msg("\"%s\" does not name %s", rfr_last_error()->message, named);
  int skipped;
  assert_int_equal(latest(f, &skipped), 1); /* and the previous one is loaded */
  assert_int_equal(skipped, 1);
}

static void test_damage(void **state) {
  rft_folder *f = *state;
  static const char *const files[] = {"model.safetensors", "state.json", "empty", "MANIFEST.json"};
  assert_int_equal(save(f, 1, "good"), RFR_OK);
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    char name[64];
    size_t n;
    snprintf(name, sizeof name, "run/step-000002/%s", files[i]);
    assert_int_equal(save(f, 2, "bad"), RFR_OK);
    char *data = rft_read(f, name, &n);
    assert_int_equal(unlink(rft_path(f, name)), 0); /* missing */
    expect_damaged(f, files[i]);
    rft_write(f, name, "longer than before, whatever it was, by quite a lot of bytes", 60); /* another size */
    expect_damaged(f, files[i]);
    for (size_t at = 0; at < n && strcmp(files[i], "MANIFEST.json") != 0; at += 5) { /* one bit */
      data[at] ^= 4;
      rft_write(f, name, data, n);
      data[at] ^= 4;
      expect_damaged(f, files[i]);
    }
    if (n > 0) {
      rft_write(f, name, data, n - 1);                                         /* cut */
      if (strcmp(files[i], "MANIFEST.json") != 0) expect_damaged(f, files[i]); /* only its last line feed is missing */
      rft_write(f, name, data, n / 2);
      expect_damaged(f, files[i]);
    }
    rft_write(f, name, data, n);
    assert_int_equal(latest(f, NULL), 2);
    free(data);
  }
  static const char *const manifests[] = {
      "{}",
      "[]",
      "{\"format\":\"other\",\"version\":1,\"step\":2,\"files\":{}}",
      "{\"format\":\"refrain-checkpoint\",\"version\":2,\"step\":2,\"files\":{}}",
      "{\"format\":\"refrain-checkpoint\",\"version\":1,\"files\":{}}",
      "{\"format\":\"refrain-checkpoint\",\"version\":1,\"step\":2,\"files\":[]}",
      "{\"format\":\"refrain-checkpoint\",\"version\":1,\"step\":2,\"files\":{\"state.json\":{}}}",
      "{\"format\":\"refrain-checkpoint\",\"version\":1,\"step\":2,\"files\":{\"../x\":1}}"};
  for (size_t i = 0; i < sizeof manifests / sizeof *manifests; i++) {
    rft_write(f, "run/step-000002/MANIFEST.json", manifests[i], strlen(manifests[i]));
    expect_damaged(f, "step-000002");
  }
  rft_write(f, "run/step-000001/state.json", "x", 1); /* now none is complete */
  assert_int_equal(latest(f, NULL), -2);
  assert_string_equal(rfr_last_error()->slug, "checkpoint");
}

/* Every system call fails, once or permanently (a full disk). The last good checkpoint must load, every visible one
 * must be complete, and leftovers must not accumulate. */
static void test_every_fault(void **state) {
  rft_folder *f = *state;
  assert_int_equal(save(f, 1, "good"), RFR_OK);
  for (int sticky = 0; sticky < 2; sticky++) {
    bool done = false;
    for (int k = 1; !done; k++) {
      assert_true(k < 300);
      rfi_io_fault fault = {.fail_at = k, .error = ENOSPC, .sticky = sticky, .max_transfer = k % 3 ? 0 : 4};
      rfi_io_set_fault(&fault);
      rfr_status s = save(f, 2, "new");
      rfi_io_set_fault(NULL);
      done = fault.calls < k;
      if (!done && s != RFR_OK) {
        assert_int_equal(s, RFR_IO);
        assert_string_equal(rfr_last_error()->slug, "file.write");
        assert_non_null(strstr(rfr_last_error()->message, "No space left"));
      }
      int skipped, step = latest(f, &skipped);
      assert_int_equal(skipped, 0);
      assert_true(step == 2 || (step == 1 && s != RFR_OK));
      assert_null(strstr(listing(f, "run"), ".tmp"));
      assert_int_equal(rfi_tree_remove(f->ctx, rft_path(f, "run/step-000002")), RFR_OK);
    }
  }
}

static void test_every_fault_when_replacing(void **state) {
  rft_folder *f = *state;
  bool done = false;
  for (int k = 1; !done; k++) {
    assert_int_equal(save(f, 2, "old"), RFR_OK);
    rfi_io_fault fault = {.fail_at = k, .error = k % 2 ? EIO : EINVAL};
    rfi_io_set_fault(&fault);
    save(f, 2, "new");
    rfi_io_set_fault(NULL);
    done = fault.calls < k;
    int skipped;
    assert_int_equal(latest(f, &skipped), 2);
    assert_int_equal(skipped, 0);
  }
}

static void test_out_of_memory(void **state) {
  rft_folder *f = *state;
  assert_int_equal(save(f, 1, "good"), RFR_OK);
  for (int k = 1;; k++) {
    rfr_ctx_fail_alloc(f->ctx, k);
    rfr_status s = save(f, 2, "new");
    rfr_ctx_fail_alloc(f->ctx, 0);
    if (s == RFR_OK) break;
    assert_int_equal(s, RFR_NO_MEMORY);
    assert_int_equal(latest(f, NULL), 1);
    assert_true(k < 300);
  }
  for (int k = 1;; k++) { /* reading: a failed read is not reported as damage */
    rfi_checkpoint *c;
    rfr_ctx_fail_alloc(f->ctx, k);
    rfr_status s = rfi_checkpoint_latest(f->ctx, NULL, rft_path(f, "run"), &c, NULL);
    rfr_ctx_fail_alloc(f->ctx, 0);
    rfi_checkpoint_close(c);
    if (s == RFR_OK) break;
    assert_int_equal(s, RFR_NO_MEMORY);
    assert_true(k < 300);
  }
}

static void test_retain(void **state) {
  rft_folder *f = *state;
  char *run = rft_path(f, "run");
  assert_int_equal(rfi_checkpoint_retain(f->ctx, run, 1), RFR_OK);
  for (int step = 1; step <= 5; step++) assert_int_equal(save(f, step * 10, "x"), RFR_OK);
  rft_write(f, "run/step-000060.tmp-123/model.safetensors", "half", 4); /* left by a killed run */
  rft_write(f, "run/log.jsonl", "{}", 2);
  rft_write(f, "run/step-notes/a", "mine", 4);
  rft_write(f, "run/step-000050/state.json", "damaged", 7);
  assert_int_equal(rfi_checkpoint_retain(f->ctx, run, 0), RFR_INVALID);
  assert_int_equal(rfi_checkpoint_retain(f->ctx, run, 2), RFR_OK);
  /* 50 is damaged, so it does not count and is kept for the user; 40 and 30 are the newest complete ones. */
  assert_string_equal(listing(f, "run"), "log.jsonl step-000030 step-000040 step-000050 step-notes");
  assert_int_equal(latest(f, NULL), 40);
  assert_int_equal(rfi_checkpoint_retain(f->ctx, rft_path(f, "run"), 2), RFR_OK);
  assert_string_equal(listing(f, "run"), "log.jsonl step-000030 step-000040 step-000050 step-notes");
}

/* If any call fails during deletion, every folder with the name of a checkpoint must still be complete. */
static void test_retain_faults(void **state) {
  rft_folder *f = *state;
  bool done = false;
  for (int k = 1; !done; k++) {
    for (int step = 1; step <= 3; step++) assert_int_equal(save(f, step, "x"), RFR_OK);
    rfi_io_fault fault = {.fail_at = k, .error = EIO, .sticky = true};
    rfi_io_set_fault(&fault);
    rfi_checkpoint_retain(f->ctx, rft_path(f, "run"), 1);
    rfi_io_set_fault(NULL);
    done = fault.calls < k;
    for (int step = 1; step <= 3; step++) {
      char name[64];
      rfi_checkpoint *c;
      snprintf(name, sizeof name, "run/step-%06d", step);
      if (access(rft_path(f, name), F_OK) != 0) {
        assert_true(step < 3);
        continue;
      }
      assert_int_equal(rfi_checkpoint_open(f->ctx, NULL, rft_path(f, name), &c), RFR_OK);
      rfi_checkpoint_close(c);
    }
  }
}

/* A checkpoint is refused if a file that loading reads is not in the manifest, because it has no hash. */
static void test_unlisted(void **state) {
  rft_folder *f = *state;
  static const char *const names[] = {"optimizer.safetensors", "config.json", "model.safetensors.index.json"};
  rfi_checkpoint *c;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    char name[128];
    int skipped;
    assert_int_equal(save(f, 1, "first"), RFR_OK);
    assert_int_equal(save(f, 2, "first"), RFR_OK);
    snprintf(name, sizeof name, "run/step-000002/%s", names[i]);
    rft_write(f, name, "{}", 2);
    assert_int_equal(rfi_checkpoint_open(f->ctx, NULL, rft_path(f, "run/step-000002"), &c), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "checkpoint");
    assert_non_null(strstr(rfr_last_error()->message, names[i]));
    assert_int_equal(latest(f, &skipped), 1);
    assert_int_equal(skipped, 1);
  }
  assert_int_equal(save(f, 2, "first"), RFR_OK);
  rft_write(f, "run/step-000002/notes.txt", "mine", 4);
  assert_int_equal(rfi_checkpoint_open(f->ctx, NULL, rft_path(f, "run/step-000002"), &c), RFR_OK);
  rfi_checkpoint_close(c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_cycle),         rft_folder_test(test_writer),
      rft_folder_test(test_damage),        rft_folder_test(test_unlisted),
      rft_folder_test(test_every_fault),   rft_folder_test(test_every_fault_when_replacing),
      rft_folder_test(test_out_of_memory), rft_folder_test(test_retain),
      rft_folder_test(test_retain_faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
