/* SPDX-License-Identifier: Apache-2.0
 *
 * Lines of plain, gzip and zstd files are the same; damaged and growing files are refused.
 */
#include "data/lines.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>
#include <zstd.h>

#include "support/folder.h"

enum { LINES = 3000 };

/* Lines of 0 to a few hundred bytes, one of 3 MB, and no line feed at the end. */
static char *make_text(size_t *n) {
  char *text = malloc(8 << 20);
  size_t at = 0;
  for (int i = 0; i < LINES; i++) {
    const int length = i == 17 ? 3000000 : i * 37 % 300;
    for (int j = 0; j < length; j++) text[at++] = (char)('a' + (i + j % 26 * (j % 26)) % 26);
    if (i + 1 < LINES) text[at++] = '\n';
  }
  *n = at;
  return text;
}

static size_t gzip(const char *text, size_t n, char *out, size_t capacity) {
  z_stream z = {.next_in = (Bytef *)text, .avail_in = (uInt)n, .next_out = (Bytef *)out, .avail_out = (uInt)capacity};
  assert_int_equal(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
  const size_t size = capacity - z.avail_out;
  deflateEnd(&z);
  return size;
}

static void check_lines(rft_folder *f, const char *name, const char *text, size_t n) {
  rfi_lines *lines;
  const char *line;
  size_t length;
  int64_t number, count = 0;
  const char *at = text;
  assert_int_equal(rfi_lines_open(f->ctx, rft_path(f, name), &lines), RFR_OK);
  for (;;) {
    assert_int_equal(rfi_lines_next(lines, &line, &length, &number), RFR_OK);
    if (!line) break;
    count++;
    assert_int_equal(number, count);
    assert_true(at + length <= text + n);
    assert_memory_equal(line, at, length);
    at += length + 1;
  }
  assert_int_equal(at, text + n + 1);
  assert_int_equal(count, LINES);
  rfi_lines_close(lines);
}

static void test_formats(void **state) {
  rft_folder *f = *state;
  size_t n;
  char *text = make_text(&n), *packed = malloc(8 << 20);
  rft_write(f, "a.jsonl", text, n);
  check_lines(f, "a.jsonl", text, n);
  size_t m = gzip(text, n, packed, 8 << 20);
  rft_write(f, "a.jsonl.gz", packed, m);
  check_lines(f, "a.jsonl.gz", text, n);
  m = gzip(text, n / 3, packed, 8 << 20); /* two members */
  m += gzip(text + n / 3, n - n / 3, packed + m, (8 << 20) - m);
  rft_write(f, "b.gz", packed, m);
  check_lines(f, "b.gz", text, n);
  m = ZSTD_compress(packed, 8 << 20, text, n / 5, 3); /* two frames */
  m += ZSTD_compress(packed + m, (8 << 20) - m, text + n / 5, n - n / 5, 3);
  rft_write(f, "a.zst", packed, m);
  check_lines(f, "a.zst", text, n);
  free(text);
  free(packed);
}

static rfr_status read_all(rft_folder *f, const char *name, const void *data, size_t n, int64_t limit) {
  rfi_lines *lines;
  const char *line;
  size_t length;
  int64_t number;
  RFI_TRY(rfi_lines_open_bytes(f->ctx, name, data, n, limit, &lines));
  rfr_status s;
  do s = rfi_lines_next(lines, &line, &length, &number);
  while (s == RFR_OK && line);
  rfi_lines_close(lines);
  return s;
}

static void expect(rfr_status s, const char *slug, const char *message) {
  assert_int_not_equal(s, RFR_OK);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, message)) fail_msg("%s: not \"%s\"", rfr_last_error()->message, message);
}

static void test_damage(void **state) {
  rft_folder *f = *state;
  size_t n;
  char *text = make_text(&n), *packed = malloc(8 << 20);
  const int64_t limit = 1 << 30;
  for (int form = 0; form < 2; form++) {
    const size_t m = form ? ZSTD_compress(packed, 8 << 20, text, n, 3) : gzip(text, n, packed, 8 << 20);
    const char *name = form ? "a.zst" : "a.gz";
    assert_int_equal(read_all(f, name, packed, m, limit), RFR_OK);
    expect(read_all(f, name, packed, m - 9, limit), "data.compressed", "ends too early");
    expect(read_all(f, name, packed, m, 5000), "data.compressed", "the text has more than 5000 bytes");
    packed[m / 2] ^= 0x55;
    packed[m / 2 + 1] ^= 0x55;
    expect(read_all(f, name, packed, m, limit), "data.compressed", "is not valid");
    expect(read_all(f, name, "{}", 2, limit), "data.compressed", "the name ends in");
  }
  assert_int_equal(read_all(f, "a", "", 0, limit), RFR_OK);
  free(text);
  free(packed);
}

/* A file that decompresses to many more bytes than text would is refused before it is read to its end. */
static void test_bomb(void **state) {
  rft_folder *f = *state;
  const size_t block = 1 << 20;
  char *zeros = malloc(block), *packed = malloc(1 << 20);
  memset(zeros, '\n', block);
  size_t m = 0;
  for (int i = 0; i < 200; i++) m += ZSTD_compress(packed + m, (1 << 20) - m, zeros, block, 3);
  expect(read_all(f, "a.zst", packed, m, RFI_LINES_LIMIT), "data.compressed", "a ratio above 1000 is refused");
  free(zeros);
  free(packed);
}

static void test_long_line(void **state) {
  rft_folder *f = *state;
  const size_t n = (size_t)RFI_LINE_LIMIT * 2 + 1;
  char *text = malloc(n);
  memset(text, 'x', n);
  expect(read_all(f, "a", text, n, RFI_LINES_LIMIT), "data.row", "a:1: the line has more than 67108864 bytes");
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_formats),
      rft_folder_test(test_damage),
      rft_folder_test(test_bomb),
      rft_folder_test(test_long_line),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
