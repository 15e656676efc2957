/* SPDX-License-Identifier: Apache-2.0
 *
 * GGUF: values and blocks of a file that the Python package gguf wrote, files with one fault each, every truncation.
 */
#include "data/gguf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/convert.h"
#include "data/safetensors.h"
#include "support/folder.h"

#define FILES RFT_SOURCE_DIR "/tests/data/gguf/"
#define OK(call) assert_ok(call, #call, __LINE__)

static void assert_ok(rfr_status s, const char *call, int line) {
  if (s != RFR_OK) fail_msg("line %d: %s: %s", line, call, rfr_last_error()->message);
}

/* ---- a file of the Python package ---- */

static const rfi_gguf_value *key(const rfi_gguf *g, const char *name) {
  const rfi_gguf_value *v = rfi_gguf_key(g, name);
  if (!v) fail_msg("there is no key %s", name);
  return v;
}

static int64_t integer(const rfi_gguf *g, const char *name, int64_t i) {
  int64_t x = 0;
  OK(rfi_gguf_int(g, key(g, name), i, &x));
  return x;
}

static double real(const rfi_gguf *g, const char *name, int64_t i) {
  double x = 0;
  OK(rfi_gguf_real(g, key(g, name), i, &x));
  return x;
}

static void values(void **state) {
  rft_folder *f = *state;
  rfi_gguf *g;
  const char *text;
  size_t n, cursor = 0;
  int64_t x;
  double r;
  OK(rfi_gguf_open(f->ctx, FILES "types.gguf", &g));
  assert_int_equal(rfi_gguf_version(g), 3);
  assert_int_equal(integer(g, "test.uint8", 0), 200);
  assert_int_equal(integer(g, "test.int8", 0), -100);
  assert_int_equal(integer(g, "test.uint16", 0), 60000);
  assert_int_equal(integer(g, "test.int16", 0), -30000);
  assert_int_equal(integer(g, "test.uint32", 0), 4000000000);
  assert_int_equal(integer(g, "test.int32", 0), -2000000000);
  assert_int_equal(integer(g, "test.uint64", 0), (int64_t)1 << 62);
  assert_int_equal(integer(g, "test.int64", 0), -((int64_t)1 << 62));
  assert_int_equal(integer(g, "test.bool", 0), 1);
  assert_true(real(g, "test.float32", 0) == (double)0.1f);
  assert_true(real(g, "test.float64", 0) == 0.1);
  assert_true(real(g, "test.int8", 0) == -100.0);
  assert_true(real(g, "test.reals", 1) == -1.5);
  assert_int_equal(integer(g, "test.integers", 1), -2);
  OK(rfi_gguf_string(g, key(g, "test.string"), &text, &n));
  assert_int_equal(n, 5);
  assert_memory_equal(text, "a\0b\xc3\xa9", 5);
  static const char *const strings[] = {"one", "", "three"};
  for (int i = 0; i < 3; i++) {
    OK(rfi_gguf_next_string(g, key(g, "test.strings"), &cursor, &text, &n));
    assert_int_equal(n, strlen(strings[i]));
    assert_memory_equal(text, strings[i], n);
  }
  /* Wrong kinds and indices past the end. */
  assert_int_equal(rfi_gguf_next_string(g, key(g, "test.strings"), &cursor, &text, &n), RFR_INVALID);
  assert_int_equal(rfi_gguf_string(g, key(g, "test.strings"), &text, &n), RFR_INVALID);
  assert_int_equal(rfi_gguf_string(g, key(g, "test.int8"), &text, &n), RFR_INVALID);
  assert_int_equal(rfi_gguf_int(g, key(g, "test.string"), 0, &x), RFR_INVALID);
  assert_int_equal(rfi_gguf_int(g, key(g, "test.float32"), 0, &x), RFR_INVALID);
  assert_int_equal(rfi_gguf_int(g, key(g, "test.integers"), 3, &x), RFR_INVALID);
  assert_int_equal(rfi_gguf_int(g, key(g, "test.integers"), -1, &x), RFR_INVALID);
  assert_int_equal(rfi_gguf_real(g, key(g, "test.reals"), 2, &r), RFR_INVALID);
  assert_int_equal(rfi_gguf_real(g, key(g, "test.string"), 0, &r), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "test.string"));
  assert_null(rfi_gguf_key(g, "test.other"));
  rfi_gguf_close(g);
}

/* Every type gives the f32 bits of the package; narrower targets are those values, rounded; parts and interleaved rows
 * are the same rows. */
static void blocks(void **state) {
  static const char *const names[] = {"F32",  "F16",  "BF16", "Q4_0", "Q4_1", "Q5_0",
                                      "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"};
  static const rfr_dtype dtypes[] = {RFR_F32, RFR_BF16, RFR_F16};
  rft_folder *f = *state;
  rfi_gguf *g;
  rfi_safetensors *st;
  OK(rfi_gguf_open(f->ctx, FILES "types.gguf", &g));
  OK(rfi_safetensors_open(f->ctx, FILES "types.safetensors", &st));
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const rfi_gguf_tensor *t = rfi_gguf_tensor_find(g, names[i]);
    const rfi_stored *wanted = rfi_safetensors_find(st, names[i]);
    assert_non_null(t);
    assert_string_equal(t->format->name, names[i]);
    assert_int_equal(t->rank, 2);
    assert_int_equal(t->elements, wanted->elements);
    const int64_t rows = t->shape[0], width = t->shape[1];
    float *x = malloc((size_t)t->elements * 4), *y = malloc((size_t)t->elements * 4),
          *z = malloc((size_t)t->elements * 4);
    OK(rfi_safetensors_read(st, wanted, x, (size_t)wanted->bytes));
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
      const size_t size = (size_t)rfr_dtype_bits(dtypes[d]) / 8;
      rfi_convert(dtypes[d], z, RFR_F32, x, t->elements);
      OK(rfi_gguf_read(g, t, 0, rows, 0, dtypes[d], y));
      if (memcmp(y, z, (size_t)t->elements * size) != 0) fail_msg("%s as %s", names[i], rfr_dtype_name(dtypes[d]));
      OK(rfi_gguf_read(g, t, 1, rows - 1, 0, dtypes[d], y));
      assert_memory_equal(y, (char *)z + (size_t)width * size, (size_t)((rows - 1) * width) * size);
      OK(rfi_gguf_read(g, t, 0, 2, 2, dtypes[d], y)); /* one pair: its own order */
      assert_memory_equal(y, z, (size_t)(2 * width) * size);
    }
    free(x), free(y), free(z);
  }
  rfi_safetensors_close(st);
  rfi_gguf_close(g);
}

/* f32 values to blocks: the bytes of the package. */
static void encodes(void **state) {
  static const char *const names[] = {"Q8_0", "Q4_0", "BF16", "F16"};
  rft_folder *f = *state;
  rfi_safetensors *st;
  float x[256];
  uint8_t have[1024], want[1024];
  char name[32];
  OK(rfi_safetensors_open(f->ctx, FILES "types.safetensors", &st));
  OK(rfi_safetensors_read(st, rfi_safetensors_find(st, "plain"), x, sizeof x));
  for (size_t i = 0; i < 4; i++) {
    const rfi_block_format *format = rfi_block_format_named(names[i]);
    snprintf(name, sizeof name, "encoded_%s", names[i]);
    const rfi_stored *wanted = rfi_safetensors_find(st, name);
    OK(rfi_safetensors_read(st, wanted, want, (size_t)wanted->bytes));
    format->encode(x, 256 / format->elements, have);
    if (memcmp(have, want, (size_t)wanted->bytes) != 0) fail_msg("%s", names[i]);
  }
  rfi_safetensors_close(st);
  /* Scales whose inverse overflows give zeros, not undefined behavior. */
  for (int i = 0; i < 256; i++) x[i] = i % 32 ? 0.0f : 1e-44f;
  rfi_block_format_named("q8_0")->encode(x, 8, have);
  rfi_block_format_named("q4_0")->encode(x, 8, have);
  assert_null(rfi_block_format_named("Q9"));
}

/* ---- crafted files ---- */

typedef struct builder {
  uint8_t data[4096];
  size_t n;
} builder;

static void put(builder *b, uint64_t x, int bytes) {
  for (int i = 0; i < bytes; i++) b->data[b->n++] = (uint8_t)(i < 8 ? x >> (8 * i) : 0);
}

static void put_text(builder *b, const char *text) {
  put(b, strlen(text), 8);
  memcpy(b->data + b->n, text, strlen(text));
  b->n += strlen(text);
}

static void header(builder *b, uint64_t tensors, uint64_t keys) {
  *b = (builder){.n = 4};
  memcpy(b->data, "GGUF", 4);
  put(b, 3, 4);
  put(b, tensors, 8);
  put(b, keys, 8);
}

static void put_key(builder *b, const char *name, uint32_t kind, uint64_t value, int bytes) {
  put_text(b, name);
  put(b, kind, 4);
  put(b, value, bytes);
}

static void put_array(builder *b, const char *name, uint32_t kind, uint64_t count) {
  put_text(b, name);
  put(b, RFI_GGUF_ARRAY, 4);
  put(b, kind, 4);
  put(b, count, 8);
}

static void put_tensor(builder *b, const char *name, uint32_t rank, const uint64_t *dims, uint32_t type,
                       uint64_t offset) {
  put_text(b, name);
  put(b, rank, 4);
  for (uint32_t i = 0; i < rank && i < 8; i++) put(b, dims[i], 8);
  put(b, type, 4);
  put(b, offset, 8);
}

static void end_metadata(builder *b, size_t alignment, size_t data) {
  while (b->n % alignment) b->data[b->n++] = 0;
  for (size_t i = 0; i < data; i++) b->data[b->n++] = (uint8_t)i;
}

static rfr_status open_built(rft_folder *f, const builder *b, rfi_gguf **g) {
  rft_write(f, "t.gguf", b->data, b->n);
  return rfi_gguf_open(f->ctx, rft_path(f, "t.gguf"), g);
}

static void refuse(rft_folder *f, const builder *b, const char *says, int line) {
  rfi_gguf *g;
  const rfr_status s = open_built(f, b, &g);
  if (s != RFR_INVALID || g || !strstr(rfr_last_error()->message, says) || strcmp(rfr_last_error()->slug, "gguf") != 0)
    fail_msg("line %d: status %d, \"%s\" is not in: %s", line, s, says, rfr_last_error()->message);
}
#define REFUSED(says) refuse(f, &b, says, __LINE__)

/* Two tensors and three keys. */
static void good(builder *b) {
  header(b, 2, 3);
  put_key(b, "general.alignment", RFI_GGUF_U32, 64, 4);
  put_key(b, "flag", RFI_GGUF_BOOL, 0, 1);
  put_array(b, "list", RFI_GGUF_STRING, 2);
  put_text(b, "x");
  put_text(b, "");
  put_tensor(b, "a", 2, (uint64_t[]){3, 2}, 0, 0);
  put_tensor(b, "b", 1, (uint64_t[]){5}, 0, 64);
  end_metadata(b, 64, 64 + 20);
}

static void crafted_good(void **state) {
  rft_folder *f = *state;
  builder b;
  rfi_gguf *g;
  uint8_t bytes[24];
  good(&b);
  OK(open_built(f, &b, &g));
  const rfi_gguf_tensor *a = rfi_gguf_tensor_find(g, "a");
  assert_int_equal(a->shape[0], 2);
  assert_int_equal(a->shape[1], 3);
  OK(rfi_gguf_read(g, a, 0, 2, 0, RFR_F32, bytes));
  for (int i = 0; i < 24; i++) assert_int_equal(bytes[i], i);
  OK(rfi_gguf_read(g, rfi_gguf_tensor_find(g, "b"), 0, 1, 0, RFR_F32, bytes));
  assert_int_equal(bytes[0], 64);
  assert_null(rfi_gguf_tensor_find(g, "c"));
  rfi_gguf_close(g);
  b.data[4] = 2;
  OK(open_built(f, &b, &g));
  rfi_gguf_close(g);
  bool is;
  OK(rfi_gguf_is(f->ctx, rft_path(f, "t.gguf"), &is));
  assert_true(is);
  OK(rfi_gguf_is(f->ctx, f->path, &is));
  assert_false(is);
  OK(rfi_gguf_is(f->ctx, rft_path(f, "missing"), &is));
  assert_false(is);
}

/* Heads of four rows whose halves are interleaved: stored 0, 2, 1, 3. */
static void interleaved(void **state) {
  rft_folder *f = *state;
  builder b;
  rfi_gguf *g;
  float stored[8 * 2], x[8 * 2];
  uint16_t half[8 * 2];
  header(&b, 1, 0);
  put_tensor(&b, "a", 2, (uint64_t[]){2, 8}, 0, 0);
  end_metadata(&b, 32, sizeof stored);
  for (int r = 0; r < 8; r++)
    for (int k = 0; k < 2; k++) stored[2 * r + k] = (float)(10 * (r / 4 * 4 + r % 4 / 2 + r % 2 * 2) + k);
  memcpy(b.data + b.n - sizeof stored, stored, sizeof stored);
  OK(open_built(f, &b, &g));
  OK(rfi_gguf_read(g, rfi_gguf_tensor_find(g, "a"), 0, 8, 4, RFR_F32, x));
  OK(rfi_gguf_read(g, rfi_gguf_tensor_find(g, "a"), 0, 8, 4, RFR_F16, half));
  for (int i = 0; i < 16; i++) {
    assert_true(x[i] == (float)(10 * (i / 2) + i % 2));
    assert_true(rfr_float_from_bits(RFR_F16, half[i]) == x[i]);
  }
  rfi_gguf_close(g);
}

static void truncated(void **state) {
  rft_folder *f = *state;
  builder b;
  rfi_gguf *g;
  good(&b);
  for (size_t n = 0; n < b.n; n++) {
    rft_write(f, "t.gguf", b.data, n);
    if (rfi_gguf_open(f->ctx, rft_path(f, "t.gguf"), &g) != RFR_INVALID) fail_msg("%zu bytes were accepted", n);
    assert_null(g);
  }
}

/* The classes of faults for which parsers of GGUF had advisories, and others. */
static void hostile(void **state) {
  rft_folder *f = *state;
  builder b;
  const uint64_t one[] = {1, 1, 1, 1, 1, 1, 1, 1};
  header(&b, 0, 0);
  b.data[3] = 'X';
  REFUSED("does not start with");
  header(&b, 0, 0);
  b.data[4] = 1;
  REFUSED("version 1");
  b.data[4] = 0, b.data[7] = 3;
  REFUSED("big-endian");
  /* Counts that no file of this size has: memory and time stay small. */
  header(&b, (uint64_t)1 << 63, 0);
  REFUSED("are more than a file");
  header(&b, 0, UINT64_MAX);
  REFUSED("are more than a file");
  header(&b, 1, 1);
  REFUSED("are more than a file");
  /* Lengths of keys, strings and arrays that wrap or pass the end. */
  for (int i = 0; i < 3; i++) {
    const uint64_t huge[] = {UINT64_MAX, (uint64_t)1 << 63, 1 << 20};
    header(&b, 0, 1);
    put(&b, huge[i], 8);
    put(&b, 0, 32);
    REFUSED("a key of");
    header(&b, 0, 1);
    put_key(&b, "k", RFI_GGUF_STRING, huge[i], 8);
    put(&b, 0, 8);
    REFUSED("more bytes are needed");
    header(&b, 0, 1);
    put_array(&b, "k", RFI_GGUF_U64, huge[i]);
    put(&b, 0, 8);
    REFUSED("are more than the file has");
    header(&b, 0, 1);
    put_array(&b, "k", RFI_GGUF_STRING, huge[i]);
    put(&b, 0, 8);
    REFUSED("are more than the file has");
  }
  header(&b, 0, 1);
  put(&b, 0, 8);
  put(&b, 0, 8);
  REFUSED("a key of 0 bytes");
  header(&b, 0, 1);
  put_key(&b, "a\nb", RFI_GGUF_U8, 1, 1);
  REFUSED("control character");
  header(&b, 0, 1);
  put_key(&b, "k", 13, 0, 8);
  REFUSED("unknown value type 13");
  header(&b, 0, 1);
  put_array(&b, "k", RFI_GGUF_ARRAY, 1);
  put(&b, 0, 16);
  REFUSED("array of arrays");
  header(&b, 0, 1);
  put_array(&b, "k", 200, 1);
  REFUSED("unknown value type 200");
  header(&b, 0, 1);
  put_key(&b, "k", RFI_GGUF_BOOL, 2, 1);
  REFUSED("neither 0 nor 1");
  header(&b, 0, 2);
  put_key(&b, "k", RFI_GGUF_U8, 1, 1);
  put_key(&b, "k", RFI_GGUF_U8, 1, 1);
  REFUSED("the key k appears twice");
  /* The alignment. */
  for (int i = 0; i < 4; i++) {
    const uint32_t wrong[] = {0, 48, 1 << 17, (uint32_t)1 << 31};
    header(&b, 0, 1);
    put_key(&b, "general.alignment", RFI_GGUF_U32, wrong[i], 4);
    REFUSED("it must be a power of two");
  }
  header(&b, 0, 1);
  put_key(&b, "general.alignment", RFI_GGUF_STRING, 0, 8);
  REFUSED("general.alignment is not an integer");
  /* Tensors: rank, sizes whose product or bytes wrap, types, blocks, offsets. */
  for (uint32_t rank = 0; rank < 8; rank += 5) {
    header(&b, 1, 0);
    put_tensor(&b, "t", rank, one, 0, 0);
    end_metadata(&b, 32, 64);
    REFUSED("has rank");
  }
  for (int i = 0; i < 6; i++) {
    const uint64_t dims[][4] = {{0, 1, 1, 1},
                                {(uint64_t)1 << 63, 1, 1, 1},
                                {UINT64_MAX, 1, 1, 1},
                                {(uint64_t)1 << 32, (uint64_t)1 << 32, 1, 1},
                                {((uint64_t)1 << 42) + 1, 1 << 10, 1 << 10, 1 << 10},
                                {3, 6148914691236517207u, 1, 1}};
    header(&b, 1, 0);
    put_tensor(&b, "t", 4, dims[i], 0, 0);
    end_metadata(&b, 32, 64);
    REFUSED("its number of elements is not");
  }
  for (int i = 0; i < 3; i++) {
    const uint64_t dims[][4] = {{(uint64_t)1 << 62, 1, 1, 1}, {((uint64_t)1 << 42) + 1, 1, 1, 1}, {1000, 1, 1, 1}};
    header(&b, 1, 0);
    put_tensor(&b, "t", 4, dims[i], 0, 0);
    end_metadata(&b, 32, 64);
    REFUSED("are more than the file has");
  }
  header(&b, 1, 0);
  put_tensor(&b, "t", 1, one, 999, 0);
  end_metadata(&b, 32, 64);
  REFUSED("unknown type 999");
  header(&b, 1, 0);
  put_tensor(&b, "t", 1, (uint64_t[]){33}, 8, 0);
  end_metadata(&b, 32, 64);
  REFUSED("are not full blocks of Q8_0");
  for (int i = 0; i < 3; i++) {
    const uint64_t offsets[] = {32, UINT64_MAX - 31, (uint64_t)INT64_MAX - 31};
    header(&b, 1, 0);
    put_tensor(&b, "t", 1, one, 0, offsets[i]);
    end_metadata(&b, 32, 64);
    REFUSED("offset");
  }
  header(&b, 2, 0); /* overlap */
  put_tensor(&b, "t", 1, (uint64_t[]){16}, 0, 0);
  put_tensor(&b, "u", 1, (uint64_t[]){16}, 0, 32);
  end_metadata(&b, 32, 128);
  REFUSED("the tensor before it ends at 64");
  header(&b, 2, 0);
  put_tensor(&b, "t", 1, one, 0, 0);
  put_tensor(&b, "t", 1, one, 0, 32);
  end_metadata(&b, 32, 64);
  REFUSED("the tensor t appears twice");
  header(&b, 1, 0);
  put_tensor(&b, "a name of more than sixty-four bytes, which is the limit of the format", 1, one, 0, 0);
  end_metadata(&b, 32, 64);
  REFUSED("a tensor name of");
  header(&b, 1, 0);
  put_tensor(&b, "t", 1, (uint64_t[]){16}, 0, 0);
  end_metadata(&b, 32, 63);
  REFUSED("the file is cut off");
}

/* A type that is stored but not decoded. */
static void undecoded(void **state) {
  rft_folder *f = *state;
  builder b;
  rfi_gguf *g;
  float x[256];
  header(&b, 1, 0);
  put_tensor(&b, "t", 1, (uint64_t[]){256}, 16, 0);
  end_metadata(&b, 32, 66);
  OK(open_built(f, &b, &g));
  assert_int_equal(rfi_gguf_read(g, rfi_gguf_tensor_at(g, 0), 0, 1, 0, RFR_F32, x), RFR_UNSUPPORTED);
  assert_non_null(strstr(rfr_last_error()->message, "IQ2_XXS"));
  rfi_gguf_close(g);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(values),      rft_folder_test(blocks),    rft_folder_test(encodes), rft_folder_test(crafted_good),
      rft_folder_test(interleaved), rft_folder_test(truncated), rft_folder_test(hostile), rft_folder_test(undecoded)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
