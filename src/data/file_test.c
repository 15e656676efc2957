/* SPDX-License-Identifier: Apache-2.0
 *
 * Files: atomic replacement under every single fault, reading, folders, globs, matching.
 */
#include "data/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/folder.h"

static void test_write_and_read(void **state) {
  rft_folder *f = *state;
  char *path = rft_path(f, "a.txt"), *data;
  size_t n;
  assert_int_equal(rfi_file_write(f->ctx, path, "one", 3), RFR_OK);
  assert_int_equal(rfi_file_write(f->ctx, path, "second", 6), RFR_OK);
  assert_int_equal(rfi_file_read(f->ctx, path, &data, &n), RFR_OK);
  assert_int_equal(n, 6);
  assert_string_equal(data, "second");
  rfi_free(f->ctx, data);
  char name[64];
  snprintf(name, sizeof name, "a.txt.tmp-%ld-0", (long)getpid()); /* left by a dead process that had our process id */
  rft_write(f, name, "x", 1);
  assert_int_equal(rfi_file_write(f->ctx, path, "second", 6), RFR_OK);
  int64_t size;
  rfi_hash hash;
  char text[33];
  assert_int_equal(rfi_file_hash(f->ctx, path, &size, &hash), RFR_OK);
  assert_int_equal(size, 6);
  assert_true(rfi_hash_equal(hash, rfi_hash_bytes("second", 6)));
  /* The published value for the empty input with seed 0. */
  assert_string_equal(rfi_hash_format(text, rfi_hash_bytes("", 0)), "99aa06d3014798d86001c324468d497f");
}

static void test_open_refuses(void **state) {
  rft_folder *f = *state;
  char *pipe = rft_path(f, "pipe"), *data;
  size_t n;
  assert_int_equal(mkfifo(pipe, 0600), 0);
  assert_int_equal(rfi_file_read(f->ctx, pipe, &data, &n), RFR_IO);
  assert_non_null(strstr(rfr_last_error()->message, "not a regular file"));
  assert_int_equal(rfi_file_read(f->ctx, f->path, &data, &n), RFR_IO);
  assert_non_null(strstr(rfr_last_error()->message, "is a folder"));
  assert_int_equal(rfi_file_read(f->ctx, rft_path(f, "none"), &data, &n), RFR_IO);
  assert_string_equal(rfr_last_error()->slug, "file.open");
  assert_non_null(strstr(rfr_last_error()->message, "No such file"));
  assert_null(data);
}

/* A file that another process shortens while it is open. */
static void test_truncated_meanwhile(void **state) {
  rft_folder *f = *state;
  char *path = rft_path(f, "shrinks"), buffer[10];
  rft_write(f, "shrinks", "0123456789", 10);
  rfi_file *file;
  assert_int_equal(rfi_file_open(f->ctx, path, &file), RFR_OK);
  assert_int_equal(truncate(path, 4), 0);
  assert_int_equal(rfi_file_read_at(file, buffer, 10, 0), RFR_IO);
  assert_string_equal(rfr_last_error()->slug, "file.read");
  assert_non_null(strstr(rfr_last_error()->message, "byte 4"));
  rfi_file_close(file);
}

static void test_short_and_interrupted(void **state) {
  rft_folder *f = *state;
  char *path = rft_path(f, "slow"), *data;
  size_t n;
  rfi_io_fault fault = {.max_transfer = 3, .interrupt = true};
  rfi_io_set_fault(&fault);
  rfr_status wrote = rfi_file_write(f->ctx, path, "0123456789abcdef", 16);
  rfr_status read = rfi_file_read(f->ctx, path, &data, &n);
  rfi_io_set_fault(NULL);
  assert_int_equal(wrote, RFR_OK);
  assert_int_equal(read, RFR_OK);
  assert_int_equal(n, 16);
  assert_string_equal(data, "0123456789abcdef");
  assert_true(fault.calls > 12);
  rfi_free(f->ctx, data);
}

/* If any call fails, the file is the old one or, once renamed, the new one; never a mixture, and no temporary file is
 * left. */
static void test_every_fault(void **state) {
  rft_folder *f = *state;
  char *path = rft_path(f, "kept"), *data;
  size_t n;
  bool done = false;
  for (int k = 1; !done && k < 50; k++) {
    rft_write(f, "kept", "old", 3);
    rfi_io_fault fault = {.fail_at = k, .error = k % 2 ? ENOSPC : EIO};
    rfi_io_set_fault(&fault);
    rfr_status s = rfi_file_write(f->ctx, path, "newer", 5);
    rfi_io_set_fault(NULL);
    done = fault.calls < k;
    assert_int_equal(s, done ? RFR_OK : RFR_IO);
    if (!done) {
      assert_string_equal(rfr_last_error()->slug, "file.write");
      assert_non_null(strstr(rfr_last_error()->message, k % 2 ? "No space left" : "Input/output"));
    }
    assert_int_equal(rfi_file_read(f->ctx, path, &data, &n), RFR_OK);
    assert_true(strcmp(data, "old") == 0 || strcmp(data, "newer") == 0);
    rfi_free(f->ctx, data);
    rfi_paths names = {.ctx = f->ctx};
    assert_int_equal(rfi_dir_list(f->path, &names), RFR_OK);
    for (int i = 0; i < names.n; i++) assert_null(strstr(names.items[i], ".tmp"));
    rfi_paths_deinit(&names);
  }
  assert_true(done);
}

/* If a line cannot be written completely, no part of it remains, even if a part was written before. */
static void test_journal(void **state) {
  rft_folder *f = *state;
  char *path = rft_path(f, "log"), *data;
  size_t n;
  int fd;
  bool taken;
  assert_int_equal(rfi_journal_open(path, &fd, &taken), RFR_OK);
  assert_null(rfi_journal_append(fd, "first\n", 6));
  for (int k = 1; k <= 3; k++) {
    rfi_io_fault fault = {.fail_at = k, .error = ENOSPC, .max_transfer = 3};
    rfi_io_set_fault(&fault);
    const char *why = rfi_journal_append(fd, "second\n", 7);
    rfi_io_set_fault(NULL);
    assert_non_null(why);
    assert_non_null(strstr(why, "No space left"));
    assert_int_equal(rfi_file_read(f->ctx, path, &data, &n), RFR_OK);
    assert_string_equal(data, "first\n");
    rfi_free(f->ctx, data);
  }
  rfi_journal_close(fd);
}

static void test_folders(void **state) {
  rft_folder *f = *state;
  struct stat st;
  char *deep = rft_path(f, "x/y/z");
  assert_int_equal(rfi_dir_create(deep), RFR_OK);
  assert_int_equal(rfi_dir_create(deep), RFR_OK);
  assert_int_equal(stat(deep, &st), 0);
  rft_write(f, "x/y/z/file", "1", 1);
  rft_write(f, "outside", "1", 1);
  assert_int_equal(symlink(rft_path(f, "outside"), rft_path(f, "x/link")), 0);
  assert_int_equal(symlink(f->path, rft_path(f, "x/up")), 0);
  assert_int_equal(rfi_dir_create(rft_path(f, "x/y/z/file/inner")), RFR_IO);
  assert_int_equal(rfi_tree_remove(f->ctx, rft_path(f, "x")), RFR_OK);
  assert_int_not_equal(stat(rft_path(f, "x"), &st), 0);
  assert_int_equal(stat(rft_path(f, "outside"), &st), 0); /* the links were removed, not their targets */
  assert_int_equal(rfi_tree_remove(f->ctx, rft_path(f, "x")), RFR_OK);
}

static void test_match(void **state) {
  (void)state;
  static const struct {
    const char *pattern, *text;
    bool match;
  } cases[] = {
      {"", "", true},
      {"", "a", false},
      {"*", "", true},
      {"*", "abc", true},
      {"a*c", "abc", true},
      {"a*c", "abd", false},
      {"*a*b*", "xxaxxbxx", true},
      {"*a*b", "xxaxxbxx", false},
      {"?", "", false},
      {"??", "ab", true},
      {"[a-c]x", "bx", true},
      {"[a-c]x", "dx", false},
      {"[!a-c]x", "dx", true},
      {"[]]", "]", true},
      {"[a", "[a", true},
      {"\\*", "*", true},
      {"\\*", "a", false},
      {"*norm*", "model.layers.0.input_layernorm.weight", true},
      {"[a-]", "-", true},
      {"*.h", "a.hh", false},
      {"a**b", "ab", true},
      {"[\x80-\xff]", "\xc3", true},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (rfi_match(cases[i].pattern, cases[i].text) != cases[i].match)
      fail_msg("\"%s\" against \"%s\"", cases[i].pattern, cases[i].text);
  char text[2001], pattern[401]; /* takes exponential time in a matcher that tries every `*` again */
  memset(text, 'a', 2000);
  text[2000] = 0;
  for (int i = 0; i < 199; i++) memcpy(pattern + 2 * i, "*a", 2);
  memcpy(pattern + 398, "*b", 3);
  assert_false(rfi_match(pattern, text));
}

static void expect_glob(rft_folder *f, const char *pattern, const char *expected) {
  rfi_paths paths = {.ctx = f->ctx};
  char line[1024] = "";
  assert_int_equal(rfi_glob(f->path, pattern, &paths), RFR_OK);
  rfi_paths_sort(&paths);
  for (int i = 0; i < paths.n; i++) {
    if (i) strcat(line, " ");
    strcat(line, paths.items[i]);
  }
  rfi_paths_deinit(&paths);
  if (strcmp(line, expected) != 0) fail_msg("%s gave \"%s\", not \"%s\"", pattern, line, expected);
}

static void test_glob(void **state) {
  rft_folder *f = *state;
  static const char *const files[] = {
      "a.h", "b.c", "src/a.h", "src/B.h", "src/sub/deep/c.h", "src/sub/.hidden.h", ".git/d.h", "src.h/e.h"};
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) rft_write(f, files[i], files[i], strlen(files[i]));
  assert_int_equal(symlink(f->path, rft_path(f, "src/loop")), 0);
  assert_int_equal(symlink(rft_path(f, "b.c"), rft_path(f, "src/linked.c")), 0);
  expect_glob(f, "*.h", "a.h");
  expect_glob(f, "./a.h", "a.h");
  expect_glob(f, "src/*.h", "src/B.h src/a.h");
  expect_glob(f, "**/*.h", "a.h src.h/e.h src/B.h src/a.h src/sub/deep/c.h");
  expect_glob(f, "**/**/*.h", "a.h src.h/e.h src/B.h src/a.h src/sub/deep/c.h");
  expect_glob(f, "src/**/c.h", "src/sub/deep/c.h");
  expect_glob(f, "src/**/sub/**/*.h", "src/sub/deep/c.h");
  expect_glob(f, "src", "src/B.h src/a.h src/linked.c src/sub/deep/c.h");
  expect_glob(f, "src/**", "src/B.h src/a.h src/linked.c src/sub/deep/c.h");
  expect_glob(f, "src/*", "src/B.h src/a.h src/linked.c");
  expect_glob(f, ".git/*", ".git/d.h");
  expect_glob(f, "src/sub/.*", "src/sub/.hidden.h");
  expect_glob(f, "src/loop/b.c", "src/loop/b.c"); /* a link that is named is followed */
  expect_glob(f, "nothing/*.h", "");
  expect_glob(f, "a.h/x", "");
  expect_glob(f, ".", "a.h b.c src.h/e.h src/B.h src/a.h src/linked.c src/sub/deep/c.h");
  rfi_paths absolute = {.ctx = f->ctx};
  assert_int_equal(rfi_glob("elsewhere", rft_path(f, "s*/a.h"), &absolute), RFR_OK);
  assert_int_equal(absolute.n, 1);
  assert_string_equal(absolute.items[0], rft_path(f, "src/a.h"));
  rfi_paths_deinit(&absolute);
}

/* A file that the library opens never gets the descriptor of a standard stream. */
static void test_standard_streams(void **state) {
  rft_folder *f = *state;
  const char *path = rft_path(f, "log"), *data = rft_path(f, "data");
  int kept[3], journal = -1;
  bool taken;
  rfi_file *file = NULL;
  rfr_status opened, created;
  fflush(stdout);
  for (int i = 0; i < 3; i++) kept[i] = fcntl(i, F_DUPFD_CLOEXEC, 10);
  for (int i = 0; i < 3; i++) close(i);
  opened = rfi_journal_open(path, &journal, &taken);
  created = rfi_file_create(f->ctx, data, &file);
  const bool is_free = fcntl(0, F_GETFD) < 0 && fcntl(1, F_GETFD) < 0 && fcntl(2, F_GETFD) < 0;
  for (int i = 0; i < 3; i++) {
    if (kept[i] >= 0) dup2(kept[i], i), close(kept[i]);
  }
  assert_int_equal(opened, RFR_OK);
  assert_int_equal(created, RFR_OK);
  assert_true(is_free);
  assert_true(journal > 2);
  rfi_journal_close(journal);
  rfi_file_close(file);
}

static void test_journal_refuses(void **state) {
  rft_folder *f = *state;
  int fd;
  bool taken;
  char *pipe = rft_path(f, "pipe"), *link = rft_path(f, "link");
  rft_write(f, "target", "", 0);
  assert_int_equal(mkfifo(pipe, 0600), 0);
  assert_int_equal(symlink(rft_path(f, "target"), link), 0);
  const char *const paths[] = {pipe, link, f->path, "/dev/null"}, *const says[] = {"pipe", "link", "folder", "device"};
  for (int i = 0; i < 4; i++) {
    assert_int_equal(rfi_journal_open(paths[i], &fd, &taken), RFR_IO);
    assert_string_equal(rfr_last_error()->slug, "file.write");
    if (!strstr(rfr_last_error()->message, says[i])) fail_msg("%s", rfr_last_error()->message);
    assert_int_equal(fd, -1);
  }
  const int reader = open(pipe, O_RDONLY | O_NONBLOCK); /* a pipe with a reader can be opened */
  assert_int_equal(rfi_journal_open(pipe, &fd, &taken), RFR_IO);
  close(reader);
}

static void test_read_limited(void **state) {
  rft_folder *f = *state;
  char *data;
  size_t n;
  rft_write(f, "a", "12345", 5);
  assert_int_equal(rfi_file_read_limited(f->ctx, rft_path(f, "a"), 5, &data, &n), RFR_OK);
  rfi_free(f->ctx, data);
  assert_int_equal(rfi_file_read_limited(f->ctx, rft_path(f, "a"), 4, &data, &n), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "file.size");
  assert_null(data);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_write_and_read),
      rft_folder_test(test_open_refuses),
      rft_folder_test(test_truncated_meanwhile),
      rft_folder_test(test_short_and_interrupted),
      rft_folder_test(test_every_fault),
      rft_folder_test(test_journal),
      rft_folder_test(test_standard_streams),
      rft_folder_test(test_journal_refuses),
      rft_folder_test(test_read_limited),
      rft_folder_test(test_folders),
      rft_folder_test(test_match),
      rft_folder_test(test_glob),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
