/* SPDX-License-Identifier: Apache-2.0
 *
 * safetensors: valid files, a list of hostile ones, every truncation, the round trip.
 */
#include "data/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/json_file.h"
#include "support/folder.h"

/* A file from a header's text and `data` bytes 0, 1, 2, ... */
static size_t build(char *file, const char *header, size_t header_bytes, size_t data) {
  for (int i = 0; i < 8; i++) file[i] = (char)((uint64_t)header_bytes >> (8 * i));
  memcpy(file + 8, header, header_bytes);
  for (size_t i = 0; i < data; i++) file[8 + header_bytes + i] = (char)i;
  return 8 + header_bytes + data;
}

static void put(rft_folder *f, const char *header, size_t data) {
  char file[4096];
  rft_write(f, "t.safetensors", file, build(file, header, strlen(header), data));
}

static rfr_status open_it(rft_folder *f, rfi_safetensors **st) {
  return rfi_safetensors_open(f->ctx, rft_path(f, "t.safetensors"), st);
}

#define ENTRY(dtype, shape, b, e) "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #b "," #e "]}"
#define GOOD                                                                                  \
  "{\"__metadata__\":{\"format\":\"pt\"},\"b\":" ENTRY("U8", "[2,2]", 8, 12) ",\"a\":" ENTRY( \
      "F32", "[2]", 0, 8) ",\"scalar\":" ENTRY("I32", "[]", 12, 16) ",\"none\":" ENTRY("F32", "[3,0]", 8, 8) "}  "

static void test_good(void **state) {
  rft_folder *f = *state;
  rfi_safetensors *st;
  put(f, GOOD, 16);
  assert_int_equal(open_it(f, &st), RFR_OK);
  assert_int_equal(rfi_safetensors_count(st), 4);
  assert_string_equal(rfi_safetensors_at(st, 0)->name, "a");
  assert_string_equal(rfi_safetensors_metadata(st, "format"), "pt");
  assert_null(rfi_safetensors_metadata(st, "other"));
  assert_null(rfi_safetensors_find(st, "c"));
  assert_null(rfi_safetensors_find(st, "__metadata__"));
  const rfi_stored *b = rfi_safetensors_find(st, "b"), *none = rfi_safetensors_find(st, "none");
  assert_non_null(b);
  assert_int_equal(b->rank, 2);
  assert_int_equal(b->bytes, 4);
  uint8_t bytes[4];
  assert_int_equal(rfi_safetensors_read(st, b, bytes, 4), RFR_OK);
  assert_memory_equal(bytes, "\x08\x09\x0a\x0b", 4);
  assert_int_equal(rfi_safetensors_read(st, b, bytes, 3), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "\"b\""));
  assert_int_equal(rfi_safetensors_find(st, "scalar")->elements, 1);
  assert_int_equal(none->elements, 0);
  assert_int_equal(rfi_safetensors_read(st, none, bytes, 0), RFR_OK);
  float x;
  assert_int_equal(rfi_safetensors_read_as(st, rfi_safetensors_find(st, "scalar"), RFR_F32, &x, 1), RFR_UNSUPPORTED);
  rfi_safetensors_close(st);
  put(f, "{}", 0); /* a file without tensors is legal */
  assert_int_equal(open_it(f, &st), RFR_OK);
  assert_int_equal(rfi_safetensors_count(st), 0);
  rfi_safetensors_close(st);
}

/* Tensors up to byte 2^63 - 1, then an empty one. */
#define EIGHTH(name, begin, end) "\"" name "\":" ENTRY("U8", "[1152921504606846976]", begin, end) ","
#define EIGHTHS                                                                                                       \
  "{" EIGHTH("a", 0, 1152921504606846976) EIGHTH("b", 1152921504606846976, 2305843009213693952)                       \
      EIGHTH("c", 2305843009213693952, 3458764513820540928) EIGHTH("d", 3458764513820540928, 4611686018427387904)     \
          EIGHTH("e", 4611686018427387904, 5764607523034234880) EIGHTH("f", 5764607523034234880, 6917529027641081856) \
              EIGHTH("g", 6917529027641081856, 8070450532247928832) "\"h\":" ENTRY(                                   \
                  "U8", "[1152921504606846975]", 8070450532247928832,                                                 \
                  9223372036854775807) ",\"i\":" ENTRY("U8", "[0]", 9223372036854775807, 9223372036854775807) "}"

static const struct {
  const char *what, *header;
  size_t data;
} hostile[] = {
    {"no brace", " {}", 0},
    {"empty header", "", 0},
    {"array", "[]", 0},
    {"text after the header", "{}x", 0},
    {"two values", "{}{}", 0},
    {"cut JSON", "{\"a\":", 0},
    {"bad UTF-8", "{\"\xff\":" ENTRY("U8", "[1]", 0, 1) "}", 1},
    {"lone surrogate", "{\"\\ud800\":" ENTRY("U8", "[1]", 0, 1) "}", 1},
    {"NUL in a name", "{\"a\\u0000b\":" ENTRY("U8", "[1]", 0, 1) "}", 1},
    {"duplicate name", "{\"a\":" ENTRY("U8", "[1]", 0, 1) ",\"a\":" ENTRY("U8", "[1]", 0, 1) "}", 1},
    {"duplicate field", "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1},
    {"entry no object", "{\"a\":1}", 0},
    {"entry null", "{\"a\":null}", 0},
    {"no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1},
    {"no shape", "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1},
    {"no offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1},
    {"another field", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", 1},
    {"dtype a number", "{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1},
    {"unknown dtype", "{\"a\":" ENTRY("F31", "[1]", 0, 1) "}", 1},
    {"lower-case dtype", "{\"a\":" ENTRY("f32", "[1]", 0, 4) "}", 4},
    {"shape no list", "{\"a\":" ENTRY("U8", "1", 0, 1) "}", 1},
    {"negative size", "{\"a\":" ENTRY("U8", "[-1]", 0, 1) "}", 1},
    {"two negative sizes", "{\"a\":" ENTRY("U8", "[-1,-1]", 0, 1) "}", 1},
    {"real size", "{\"a\":" ENTRY("U8", "[1.0]", 0, 1) "}", 1},
    {"true as size", "{\"a\":" ENTRY("U8", "[true]", 0, 1) "}", 1},
    {"size over int64", "{\"a\":" ENTRY("U8", "[9223372036854775808]", 0, 1) "}", 1},
    {"product wraps to 0", "{\"a\":" ENTRY("U8", "[4294967296,4294967296]", 0, 0) "}", 0},
    {"product wraps to 1", "{\"a\":" ENTRY("U8", "[3,6148914691236517207]", 0, 1) "}", 1},
    {"bits wrap", "{\"a\":" ENTRY("F64", "[4611686018427387904]", 0, 0) "}", 0},
    {"wrap hidden by a zero", "{\"a\":" ENTRY("U8", "[4294967296,4294967296,0]", 0, 0) "}", 0},
    {"rank 9", "{\"a\":" ENTRY("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1) "}", 1},
    {"half a byte", "{\"a\":" ENTRY("F4", "[1]", 0, 1) "}", 1},
    {"six bits", "{\"a\":" ENTRY("F6_E2M3", "[2]", 0, 2) "}", 2},
    {"begin > end", "{\"a\":" ENTRY("U8", "[1]", 1, 0) "}", 1},
    {"negative begin", "{\"a\":" ENTRY("U8", "[1]", -1, 0) "}", 1},
    {"three offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1},
    {"one offset", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1},
    {"real offset", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1e0]}}", 1},
    {"offset of 2^63 - 1", "{\"a\":" ENTRY("U8", "[1]", 0, 9223372036854775807) "}", 1},
    {"too short for the shape", "{\"a\":" ENTRY("F32", "[2]", 0, 4) "}", 4},
    {"too long for the shape", "{\"a\":" ENTRY("U8", "[2]", 0, 4) "}", 4},
    {"hole at the start", "{\"a\":" ENTRY("U8", "[1]", 1, 2) "}", 2},
    {"hole between", "{\"a\":" ENTRY("U8", "[1]", 0, 1) ",\"b\":" ENTRY("U8", "[1]", 2, 3) "}", 3},
    {"overlap", "{\"a\":" ENTRY("U8", "[2]", 0, 2) ",\"b\":" ENTRY("U8", "[2]", 1, 3) "}", 3},
    {"same bytes twice", "{\"a\":" ENTRY("U8", "[2]", 0, 2) ",\"b\":" ENTRY("U8", "[2]", 0, 2) "}", 2},
    {"empty tensor inside", "{\"a\":" ENTRY("U8", "[2]", 0, 2) ",\"b\":" ENTRY("U8", "[0]", 1, 1) "}", 2},
    {"bytes after the tensors", "{\"a\":" ENTRY("U8", "[1]", 0, 1) "}", 2},
    {"bytes missing", "{\"a\":" ENTRY("U8", "[4]", 0, 4) "}", 3},
    {"bytes without tensors", "{}", 1},
    {"huge tensor", "{\"a\":" ENTRY("U8", "[1152921504606846976]", 0, 1152921504606846976) "}", 1},
    {"offset that overflows with the header", EIGHTHS, 1},
    {"metadata no object", "{\"__metadata__\":[]}", 0},
    {"metadata number", "{\"__metadata__\":{\"a\":1}}", 0},
};

static void expect_refused(rft_folder *f, const char *what) {
  rfi_safetensors *st;
  if (open_it(f, &st) != RFR_INVALID) fail_msg("%s: not refused as invalid", what);
  assert_null(st);
  const rfr_error *e = rfr_last_error();
  if (strcmp(e->slug, "safetensors") != 0 && strcmp(e->slug, "json") != 0) fail_msg("%s: slug %s", what, e->slug);
  if (!strstr(e->message, "t.safetensors")) fail_msg("%s: \"%s\" names no file", what, e->message);
}

static void test_hostile(void **state) {
  rft_folder *f = *state;
  for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
    put(f, hostile[i].header, hostile[i].data);
    expect_refused(f, hostile[i].what);
  }
  /* False lengths. */
  static const uint64_t lengths[] = {3,         100000000,     100000001,  UINT32_MAX,
                                     INT64_MAX, INT64_MAX - 7, UINT64_MAX, UINT64_MAX - 7};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    char file[16];
    for (int b = 0; b < 8; b++) file[b] = (char)(lengths[i] >> (8 * b));
    memcpy(file + 8, "{}", 2);
    rft_write(f, "t.safetensors", file, 10);
    expect_refused(f, "length");
  }
  /* A length above the limit is refused before anything is allocated, even if the file is that long. */
  rft_write(f, "t.safetensors", "\x01\xe1\xf5\x05\0\0\0\0{}", 10);
  assert_int_equal(truncate(rft_path(f, "t.safetensors"), 100001000), 0);
  expect_refused(f, "100,000,001");
  assert_non_null(strstr(rfr_last_error()->message, "at most 100000000"));
  /* Deeply nested brackets must not overrun the stack. */
  size_t n = 100000;
  char *tower = calloc(1, n + 16);
  for (int b = 0; b < 8; b++) tower[b] = (char)((uint64_t)n >> (8 * b));
  memcpy(tower + 8, "{\"a\":", 5);
  memset(tower + 13, '[', n - 5);
  rft_write(f, "t.safetensors", tower, n + 8);
  free(tower);
  expect_refused(f, "tower");
}

static void test_truncated(void **state) {
  rft_folder *f = *state;
  char file[4096];
  size_t n = build(file, GOOD, strlen(GOOD), 16);
  for (size_t cut = 0; cut < n; cut++) {
    rft_write(f, "t.safetensors", file, cut);
    expect_refused(f, "truncated");
  }
  rfi_safetensors *st;
  rft_write(f, "t.safetensors", file, n);
  assert_int_equal(open_it(f, &st), RFR_OK);
  float x[2]; /* truncated after it was opened */
  rft_write(f, "t.safetensors", file, n - 12);
  assert_int_equal(rfi_safetensors_read(st, rfi_safetensors_find(st, "a"), x, 8), RFR_IO);
  rfi_safetensors_close(st);
}

static void test_round_trip(void **state) {
  rft_folder *f = *state;
  const rfi_safetensors_entry entries[] = {{"w", RFR_F32, 2, {2, 3}},
                                           {"odd \"name\" \xc3\xa9/../", RFR_U8, 1, {3}},
                                           {"half", RFR_BF16, 1, {2}},
                                           {"step", RFR_I64, 0, {0}}};
  const char *const metadata[] = {"step", "12"};
  const float w[6] = {1, -2, 0.5f, 3.0e38f, 1.00390625f, 0};
  const uint16_t half[2] = {0x3f80, 0xc000};
  const int64_t step = 12;
  rfi_file *file;
  int64_t bytes;
  assert_int_equal(rfi_file_create(f->ctx, rft_path(f, "t.safetensors"), &file), RFR_OK);
  assert_int_equal(rfi_safetensors_write_header(f->ctx, file, entries, 4, metadata, 1, &bytes), RFR_OK);
  assert_int_equal(bytes, 24 + 3 + 4 + 8);
  assert_int_equal(rfi_file_size(file) % 8, 0);
  assert_int_equal(rfi_file_append(file, w, sizeof w), RFR_OK);
  assert_int_equal(rfi_file_append(file, "xyz", 3), RFR_OK);
  assert_int_equal(rfi_file_append(file, half, sizeof half), RFR_OK);
  assert_int_equal(rfi_file_append(file, &step, sizeof step), RFR_OK);
  assert_int_equal(rfi_file_finish(file, NULL), RFR_OK);

  rfi_safetensors *st;
  assert_int_equal(open_it(f, &st), RFR_OK);
  assert_int_equal(rfi_safetensors_count(st), 4);
  assert_string_equal(rfi_safetensors_metadata(st, "format"), "pt");
  assert_string_equal(rfi_safetensors_metadata(st, "step"), "12");
  const rfi_stored *t = rfi_safetensors_find(st, "w");
  assert_int_equal(t->shape[1], 3);
  float got[6];
  assert_int_equal(rfi_safetensors_read_as(st, t, RFR_F32, got, 6), RFR_OK);
  assert_memory_equal(got, w, sizeof w);
  uint16_t rounded[6];
  assert_int_equal(rfi_safetensors_read_as(st, t, RFR_BF16, rounded, 6), RFR_OK);
  assert_int_equal(rounded[1], 0xc000);
  assert_int_equal(rounded[4], 0x3f80); /* halfway between two: to even */
  assert_int_equal(rfi_safetensors_read_as(st, rfi_safetensors_find(st, "half"), RFR_F32, got, 2), RFR_OK);
  assert_true(got[0] == 1 && got[1] == -2);
  assert_int_equal(rfi_safetensors_read_as(st, t, RFR_F32, got, 5), RFR_INVALID);
  assert_non_null(rfi_safetensors_find(st, "odd \"name\" \xc3\xa9/../"));
  rfi_safetensors_close(st);
}

static void test_writer_refuses(void **state) {
  rft_folder *f = *state;
  const rfi_safetensors_entry twice[] = {{"w", RFR_F32, 1, {1}}, {"w", RFR_F32, 1, {1}}};
  const rfi_safetensors_entry big = {"w", RFR_F32, 2, {INT64_MAX / 2, 3}}, bad = {"\xff", RFR_F32, 1, {1}};
  const rfi_safetensors_entry reserved = {"__metadata__", RFR_F32, 1, {1}};
  rfi_file *file;
  assert_int_equal(rfi_file_create(f->ctx, rft_path(f, "w"), &file), RFR_OK);
  assert_int_equal(rfi_safetensors_write_header(f->ctx, file, twice, 2, NULL, 0, NULL), RFR_INVALID);
  assert_int_equal(rfi_safetensors_write_header(f->ctx, file, &big, 1, NULL, 0, NULL), RFR_INVALID);
  assert_int_equal(rfi_safetensors_write_header(f->ctx, file, &bad, 1, NULL, 0, NULL), RFR_INVALID);
  assert_int_equal(rfi_safetensors_write_header(f->ctx, file, &reserved, 1, NULL, 0, NULL), RFR_INVALID);
  assert_int_equal(rfi_file_size(file), 0);
  rfi_file_close(file);
}

static void test_json(void **state) {
  rft_folder *f = *state;
  json_t *value;
  int64_t i = 7;
  double x = 0;
  bool flag = false;
  const char *text = "default";
  rft_write(f, "good.json", "{\"i\": 3, \"x\": 1.5, \"b\": true, \"s\": \"t\", \"n\": null}", 50);
  char *path = rft_path(f, "good.json");
  assert_int_equal(rfi_json_load(f->ctx, path, &value), RFR_OK);
  assert_int_equal(rfi_json_get_int(value, path, "absent", false, 0, 9, &i), RFR_OK);
  assert_int_equal(rfi_json_get_int(value, path, "n", false, 0, 9, &i), RFR_OK);
  assert_int_equal(i, 7);
  assert_int_equal(rfi_json_get_int(value, path, "absent", true, 0, 9, &i), RFR_INVALID);
  assert_int_equal(rfi_json_get_int(value, path, "i", true, 4, 9, &i), RFR_INVALID);
  assert_int_equal(rfi_json_get_int(value, path, "x", true, 0, 9, &i), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "\"x\""));
  assert_int_equal(rfi_json_get_int(value, path, "i", true, 0, 9, &i), RFR_OK);
  assert_int_equal(i, 3);
  assert_int_equal(rfi_json_get_real(value, path, "i", true, &x), RFR_OK);
  assert_true(x == 3);
  assert_int_equal(rfi_json_get_bool(value, path, "b", true, &flag), RFR_OK);
  assert_true(flag);
  assert_int_equal(rfi_json_get_bool(value, path, "i", true, &flag), RFR_INVALID);
  assert_int_equal(rfi_json_get_string(value, path, "s", true, &text), RFR_OK);
  assert_string_equal(text, "t");
  assert_int_equal(rfi_json_set(value, "bad", json_real(1.0 / 0.0)), RFR_INVALID);
  rfi_string printed = {.ctx = f->ctx};
  assert_int_equal(rfi_json_print(value, &printed), RFR_OK);
  rft_write(f, "copy.json", printed.data, printed.n);
  rfi_string_deinit(&printed);
  json_t *copy;
  assert_int_equal(rfi_json_load(f->ctx, rft_path(f, "copy.json"), &copy), RFR_OK);
  assert_true(json_equal(copy, value));
  json_decref(copy);
  json_decref(value);
  rft_write(f, "bad.json", "{\n\"a\": 1,\n\"a\": 2}", 18);
  assert_int_equal(rfi_json_load(f->ctx, rft_path(f, "bad.json"), &value), RFR_INVALID);
  assert_null(value);
  assert_string_equal(rfr_last_error()->slug, "json");
  assert_int_equal(rfr_last_error()->line, 3);
}

/* Every allocation of the context fails once: each failure is a status, and no block leaks (the teardown counts). */
static void test_out_of_memory(void **state) {
  rft_folder *f = *state;
  put(f, GOOD, 16);
  for (int k = 1;; k++) {
    rfi_safetensors *st;
    rfr_ctx_fail_alloc(f->ctx, k);
    rfr_status s = open_it(f, &st);
    rfr_ctx_fail_alloc(f->ctx, 0);
    rfi_safetensors_close(st);
    if (s == RFR_OK) break;
    assert_int_equal(s, RFR_NO_MEMORY);
    assert_true(k < 50);
  }
}

/* ---- files of several ranks ---- */

enum { ROWS = 5, COLUMNS = 7 };

/* Elements [first, first + count) of the tensor x (5,7), whose element i is 100 + i, and all of y on rank 0. */
static void write_rank(rft_folder *f, const char *kind, int rank, int ranks, int64_t first, int64_t count) {
  char name[RFI_PART_FILE];
  rfi_file *file;
  float values[ROWS * COLUMNS], y[2] = {8, 9};
  rfi_safetensors_part parts[2] = {
      {{.name = "x", .dtype = RFR_F32, .rank = 2, .shape = {ROWS, COLUMNS}}, first, count},
      {{.name = "y", .dtype = RFR_F32, .rank = 1, .shape = {2}}, 0, 2},
  };
  for (int i = 0; i < ROWS * COLUMNS; i++) values[i] = 100.0f + (float)i;
  rfi_safetensors_part_file(name, kind, rank, ranks);
  unlink(rft_path(f, name));
  assert_int_equal(rfi_file_create(f->ctx, rft_path(f, name), &file), RFR_OK);
  const int n = count > 0 ? 1 + (rank == 0) : 0;
  assert_int_equal(rfi_safetensors_write_parts_header(f->ctx, file, parts, n), RFR_OK);
  if (n > 0) assert_int_equal(rfi_file_append(file, values + first, (size_t)count * 4), RFR_OK);
  if (n > 1) assert_int_equal(rfi_file_append(file, y, sizeof y), RFR_OK);
  assert_int_equal(rfi_file_finish(file, NULL), RFR_OK);
}

static void test_parts(void **state) {
  rft_folder *f = *state;
  rfi_safetensors *st;
  float all[ROWS * COLUMNS];
  rft_write(f, "model-rank-2-of-3.safetensors", "not ours", 8);
  assert_int_equal(rfi_safetensors_open_parts(f->ctx, f->path, "model", &st), RFR_OK);
  assert_null(st);
  write_rank(f, "model", 0, 4, 0, 16);
  write_rank(f, "model", 1, 4, 16, 16);
  write_rank(f, "model", 2, 4, 32, 3);
  write_rank(f, "model", 3, 4, 0, 0); /* a rank after the last element */
  write_rank(f, "optimizer", 0, 1, 0, 35);
  assert_int_equal(rfi_safetensors_open_parts(f->ctx, f->path, "model", &st), RFR_OK);
  assert_int_equal(rfi_safetensors_count(st), 2);
  const rfi_stored *x = rfi_safetensors_find(st, "x"), *y = rfi_safetensors_find(st, "y");
  assert_int_equal(x->rank, 2);
  assert_int_equal(x->shape[0], ROWS);
  assert_int_equal(x->shape[1], COLUMNS);
  assert_int_equal(x->elements, ROWS * COLUMNS);
  for (int64_t first = 0; first < x->elements; first++)
    for (int64_t n = 1; n <= x->elements - first; n++) {
      uint16_t half[ROWS * COLUMNS];
      assert_int_equal(rfi_safetensors_read_range(st, x, RFR_F32, all, first, n), RFR_OK);
      for (int64_t i = 0; i < n; i++) assert_true(all[i] == 100.0f + (float)(first + i));
      assert_int_equal(rfi_safetensors_read_range(st, x, RFR_BF16, half, first, n), RFR_OK);
      for (int64_t i = 0; i < n; i++) assert_true(rfr_float_from_bits(RFR_BF16, half[i]) == all[i]);
    }
  assert_int_equal(rfi_safetensors_read(st, y, all, 8), RFR_OK);
  assert_true(all[0] == 8 && all[1] == 9);
  rfi_safetensors_close(st);
}

static void expect_bad_parts(rft_folder *f, const char *says) {
  rfi_safetensors *st;
  assert_int_equal(rfi_safetensors_open_parts(f->ctx, f->path, "model", &st), RFR_INVALID);
  assert_null(st);
  assert_string_equal(rfr_last_error()->slug, "safetensors");
  if (!strstr(rfr_last_error()->message, says)) fail_msg("\"%s\": not %s", rfr_last_error()->message, says);
}

static void test_bad_parts(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *header, *says; /* of the second rank, with 4 bytes of data */
  } cases[] = {
      {"{\"x\":" ENTRY("F32", "[1]", 0, 4) "}", "a name ends in @"},
      {"{\"x@\":" ENTRY("F32", "[1]", 0, 4) "}", "a name ends in @"},
      {"{\"x@16y\":" ENTRY("F32", "[1]", 0, 4) "}", "a name ends in @"},
      {"{\"x@9999999999999999999\":" ENTRY("F32", "[1]", 0, 4) "}", "a name ends in @"},
      {"{\"x@34\":" ENTRY("F32", "[1]", 0, 4) "}", "has no shape"},
      {"{\"__metadata__\":{\"x\":\"5 a\"},\"x@34\":" ENTRY("F32", "[1]", 0, 4) "}", "no list of sizes"},
      {"{\"__metadata__\":{\"x\":\"5 8\"},\"x@34\":" ENTRY("F32", "[1]", 0, 4) "}", "another type or shape"},
      {"{\"__metadata__\":{\"x\":\"5 7\"},\"x@34\":" ENTRY("I32", "[1]", 0, 4) "}", "another type or shape"},
      {"{\"__metadata__\":{\"x\":\"5 7\"},\"x@35\":" ENTRY("F32", "[1]", 0, 4) "}", "from element 34"},
      {"{\"__metadata__\":{\"x\":\"5 7\"},\"x@33\":" ENTRY("F32", "[1]", 0, 4) "}", "from element 34"},
      {"{\"__metadata__\":{\"a\":\"2\"},\"a@0\":" ENTRY("F32", "[1]", 0, 4) "}", "1 of its 2 elements"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char file[4096];
    write_rank(f, "model", 0, 2, 0, 34);
    rft_write(f, "model-rank-0001-of-0002.safetensors", file, build(file, cases[i].header, strlen(cases[i].header), 4));
    expect_bad_parts(f, cases[i].says);
  }
  write_rank(f, "model", 1, 2, 0, 0);
  expect_bad_parts(f, "34 of its 35 elements");
  write_rank(f, "model", 0, 3, 0, 35);
  expect_bad_parts(f, "files of 2 ranks and of 3 ranks");
  assert_int_equal(unlink(rft_path(f, "model-rank-0000-of-0003.safetensors")), 0);
  assert_int_equal(unlink(rft_path(f, "model-rank-0000-of-0002.safetensors")), 0);
  rfi_safetensors *st; /* a file is missing */
  assert_int_not_equal(rfi_safetensors_open_parts(f->ctx, f->path, "model", &st), RFR_OK);
  assert_non_null(strstr(rfr_last_error()->message, "model-rank-0000-of-0002.safetensors"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_good),          rft_folder_test(test_hostile),        rft_folder_test(test_truncated),
      rft_folder_test(test_round_trip),    rft_folder_test(test_writer_refuses), rft_folder_test(test_json),
      rft_folder_test(test_out_of_memory), rft_folder_test(test_parts),          rft_folder_test(test_bad_parts),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
