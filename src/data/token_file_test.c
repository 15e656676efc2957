/* SPDX-License-Identifier: Apache-2.0
 *
 * Token files: those that numpy wrote (tools/make_token_files.py), which the writer must write too; files with one
 * fault each; every truncation and every changed byte of an index; writes that fail.
 */
#include "data/token_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/folder.h"

#define FILES RFT_SOURCE_DIR "/tests/data/tokens/"
#define OK(call) assert_ok(call, #call, __LINE__)
enum { VOCAB_16 = 64001, VOCAB_32 = 131072 };

static void assert_ok(rfr_status s, const char *call, int line) {
  if (s != RFR_OK) fail_msg("line %d: %s: %s", line, call, rfr_last_error()->message);
}

static const int32_t ids_16[] = {5, 6, 7, 64000, 0, 1, 2, 3}, ids_32[] = {5, 70000, 131071, 0, 9};
static const int64_t ends_16[] = {3, 4, 8}, ends_32[] = {2, 5};

static const struct golden {
  const char *name;
  rfr_token_format format;
  int raw_width, n_documents;
  const int32_t *ids;
  int64_t n, vocab;
  const int64_t *ends;
} goldens[] = {
    {"nanogpt16", RFR_TOKENS_NANOGPT, 2, 0, ids_16, 8, VOCAB_16, NULL},
    {"nanogpt32", RFR_TOKENS_NANOGPT, 4, 0, ids_32, 5, VOCAB_32, NULL},
    {"llmc16", RFR_TOKENS_LLMC, 4, 0, ids_16, 8, VOCAB_16, NULL},
    {"llmc32", RFR_TOKENS_LLMC, 2, 0, ids_32, 5, VOCAB_32, NULL},
    {"megatron16", RFR_TOKENS_MEGATRON, 4, 3, ids_16, 8, VOCAB_16, ends_16},
    {"megatron32", RFR_TOKENS_MEGATRON, 2, 2, ids_32, 5, VOCAB_32, ends_32},
};
enum { GOLDENS = sizeof goldens / sizeof *goldens };

/* Reads a file of numpy's; 16 zero bytes follow it; free with free(). */
static char *golden_file(const char *name, const char *end, size_t *n) {
  char path[1024], *data = calloc(1, 4096);
  snprintf(path, sizeof path, FILES "%s%s", name, end);
  FILE *file = fopen(path, "rb");
  assert_true(data && file);
  *n = fread(data, 1, 4080, file);
  fclose(file);
  return data;
}

/* Reads all ids of a file. */
static rfr_status read_ids(rfr_ctx *ctx, const char *path, const rfi_token_file *f, int64_t vocab, int32_t *out) {
  rfi_file *file;
  const rfr_status open = rfi_file_open(ctx, path, &file);
  if (open != RFR_OK) return open;
  const rfr_status s = rfi_token_file_read(file, f, 0, f->tokens, vocab, out);
  rfi_file_close(file);
  return s;
}

static void read_goldens(void **state) {
  rft_folder *f = *state;
  for (int i = 0; i < GOLDENS; i++) {
    const struct golden *g = &goldens[i];
    rfi_token_file t;
    int32_t ids[16];
    char path[1024];
    snprintf(path, sizeof path, FILES "%s.bin", g->name);
    OK(rfi_token_file_inspect(f->ctx, path, g->raw_width, &t));
    assert_int_equal(t.format, g->format);
    assert_int_equal(t.tokens, g->n);
    assert_int_equal(t.documents, g->n_documents);
    if (g->ends) assert_memory_equal(t.ends, g->ends, (size_t)g->n_documents * sizeof *g->ends);
    OK(read_ids(f->ctx, path, &t, g->vocab, ids));
    assert_memory_equal(ids, g->ids, (size_t)g->n * sizeof *ids);
    /* Fails for a vocabulary that lacks only the largest id. */
    assert_int_equal(read_ids(f->ctx, path, &t, g->vocab - 1, ids), RFR_INVALID);
    char want[64];
    snprintf(want, sizeof want, "token %d is %d; the model has vocab_size %d", g->n == 8 ? 3 : 2, (int)g->vocab - 1,
             (int)g->vocab - 1);
    assert_non_null(strstr(rfr_last_error()->message, want));
    rfi_token_file_deinit(f->ctx, &t);
  }
}

static rfr_status write_golden(rfr_ctx *ctx, const struct golden *g, const char *path) {
  static const uint32_t a[] = {5, 6, 7}, b[] = {64000}, c[] = {0, 1, 2, 3}, d[] = {5, 70000}, e[] = {131071, 0, 9};
  rfi_token_writer *w;
  rfr_status s = rfi_token_writer_create(ctx, path, g->format, g->vocab, &w);
  if (g->n == 8) {
    if (s == RFR_OK) s = rfi_token_writer_add(w, a, 3);
    if (s == RFR_OK) s = rfi_token_writer_add(w, NULL, 0);
    if (s == RFR_OK) s = rfi_token_writer_add(w, b, 1);
    if (s == RFR_OK) s = rfi_token_writer_add(w, c, 4);
  } else {
    if (s == RFR_OK) s = rfi_token_writer_add(w, d, 2);
    if (s == RFR_OK) s = rfi_token_writer_add(w, e, 3);
  }
  if (s == RFR_OK) s = rfi_token_writer_finish(w);
  rfi_token_writer_destroy(w);
  return s;
}

static void assert_golden(rft_folder *f, const char *golden, const char *end) {
  size_t n, m;
  char name[64];
  snprintf(name, sizeof name, "%s%s", golden, end);
  char *data = rft_read(f, name, &n), *want = golden_file(golden, end, &m);
  assert_int_equal(n, m);
  assert_memory_equal(data, want, n);
  free(data);
  free(want);
}

static void write_goldens(void **state) {
  rft_folder *f = *state;
  for (int i = 0; i < GOLDENS; i++) {
    const struct golden *g = &goldens[i];
    char name[64];
    snprintf(name, sizeof name, "%s.bin", g->name);
    OK(write_golden(f->ctx, g, rft_path(f, name)));
    assert_golden(f, g->name, ".bin");
    if (g->ends) assert_golden(f, g->name, ".idx");
    assert_int_equal(write_golden(f->ctx, g, rft_path(f, name)), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "export.exists");
  }
  rft_write(f, "other.idx", "", 0); /* it would make other.bin a file of Megatron's */
  assert_int_equal(write_golden(f->ctx, &goldens[0], rft_path(f, "other.bin")), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "export.exists");
  assert_int_equal(write_golden(f->ctx, &goldens[0], rft_path(f, "tokens")), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "ends in .bin"));
}

/* Ids have four bytes if two are too few: from 65536 ids on for raw ids, from 65500 on by Megatron's rule. */
static void widths(void **state) {
  rft_folder *f = *state;
  static const struct {
    rfr_token_format format;
    int64_t vocab;
    size_t bytes;
  } cases[] = {{RFR_TOKENS_NANOGPT, 65536, 2}, {RFR_TOKENS_NANOGPT, 65537, 4},  {RFR_TOKENS_LLMC, 65536, 1026},
               {RFR_TOKENS_LLMC, 65537, 1028}, {RFR_TOKENS_MEGATRON, 65499, 2}, {RFR_TOKENS_MEGATRON, 65500, 4}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char name[32];
    size_t n;
    rfi_token_writer *w;
    const uint32_t id = 65498;
    snprintf(name, sizeof name, "%zu.bin", i);
    OK(rfi_token_writer_create(f->ctx, rft_path(f, name), cases[i].format, cases[i].vocab, &w));
    OK(rfi_token_writer_add(w, &id, 1));
    OK(rfi_token_writer_finish(w));
    rfi_token_writer_destroy(w);
    free(rft_read(f, name, &n));
    assert_int_equal(n, cases[i].bytes);
  }
}

/* ---- one fault each ---- */

/* Writes "x.bin" and, with `idx`, "x.idx" from a golden, one of them with a change. */
static const struct damage {
  const char *golden;
  char file;  /* the file that is changed: b or i */
  int64_t at; /* `bytes` bytes at `at` become `value`; -1: the size changes by `bytes` */
  int64_t value, bytes;
  const char *message;
} damages[] = {
    {"nanogpt16", 'b', -1, 0, -1, "byte 14: the file has no header, so it has ids of 2 bytes, and ends inside one"},
    {"nanogpt32", 'b', -1, 0, -1, "byte 16: the file has no header, so it has ids of 4 bytes, and ends inside one"},
    {"llmc16", 'b', 4, 2, 4, "byte 4: version 2 of an llm.c file with magic number 20240520; 1 is supported"},
    {"llmc16", 'b', 0, 20240801, 4, "byte 4: version 1 of an llm.c file with magic number 20240801; 7 is supported"},
    {"llmc16", 'b', 0, 20240522, 4, "byte 0: an llm.c file of questions and answers, not of text"},
    {"llmc16", 'b', 8, 9, 4,
     "byte 8: the header promises 9 ids of 2 bytes; the file has 16 bytes after its header of 1024"},
    {"llmc16", 'b', 8, -1, 4, "byte 8: the header promises -1 ids"},
    {"llmc16", 'b', -1, 0, -1, "the header promises 8 ids of 2 bytes; the file has 15 bytes"},
    {"llmc16", 'b', -1, 0, 2, "the header promises 8 ids of 2 bytes; the file has 18 bytes"},
    {"llmc16", 'b', -1, 0, -1000, "the header promises 8 ids of 2 bytes; the file has 0 bytes"},
    {"llmc32", 'b', 4, 1, 4, "byte 4: version 1 of an llm.c file with magic number 20240801; 7 is supported"},
    {"llmc32", 'b', 8, INT32_MAX, 4, "byte 8: the header promises 2147483647 ids of 4 bytes; the file has 20"},
    {"megatron16", 'i', 0, 'm', 1, "x.idx: byte 0: the magic number is not that of a Megatron index"},
    {"megatron16", 'i', 8, 1, 1, "byte 0: the magic number"},
    {"megatron16", 'i', 9, 2, 8, "byte 9: version 2; 1 is supported"},
    {"megatron16", 'i', 17, 6, 1, "byte 17: ids of type 6; the integer types"},
    {"megatron16", 'i', 17, 0, 1, "byte 17: ids of type 0;"},
    {"megatron16", 'i', 17, 1, 1, "byte 58: sequence 1 begins at byte 6 of the ids; those before it end at 3"},
    {"megatron16", 'i', 18, 8, 8, "byte 18: 8 sequences; the 88 bytes after the header have room for 7"},
    {"megatron16", 'i', 18, -1, 8, "byte 18: 18446744073709551615 sequences"},
    {"megatron16", 'i', 18, (int64_t)1 << 60, 8, "byte 18: 1152921504606846976 sequences"},
    {"megatron16", 'i', 18, 3, 8, "byte 110: 12 bytes after the document bounds"},
    {"megatron16", 'i', 26, 6, 8, "byte 26: 6 document bounds; the 40 bytes after the sequences have room for 1 to 5"},
    {"megatron16", 'i', 26, 0, 8, "byte 26: 0 document bounds"},
    {"megatron16", 'i', 26, INT64_MIN, 8, "byte 26: 9223372036854775808 document bounds"},
    {"megatron16", 'i', 26, 4, 8, "byte 114: 8 bytes after the document bounds"},
    {"megatron16", 'i', 34, -3, 4, "byte 34: sequence 0 has the length -3"},
    {"megatron16", 'i', 34, 4, 4, "byte 58: sequence 1 begins at byte 6 of the ids; those before it end at 8"},
    {"megatron16", 'i', 34, INT32_MAX, 4,
     "byte 34: sequence 0 ends at token 2147483647; the .bin file ends at token 8"},
    {"megatron16", 'i', 46, 5, 4, "byte 46: sequence 3 ends at token 9; the .bin file ends at token 8, at its byte 16"},
    {"megatron16", 'i', 46, 3, 4, "x.idx: the sequences have 14 bytes of ids; the .bin file has 16"},
    {"megatron16", 'i', 50, 2, 8, "byte 50: sequence 0 begins at byte 2 of the ids; those before it end at 0"},
    {"megatron16", 'i', 58, INT64_MIN, 8, "byte 58: sequence 1 begins at byte -9223372036854775808"},
    {"megatron16", 'i', 82, 1, 8, "byte 82: document bound 0 is sequence 1; 0 to 0 is possible"},
    {"megatron16", 'i', 98, 0, 8, "byte 98: document bound 2 is sequence 0; 1 to 4 is possible"},
    {"megatron16", 'i', 98, 5, 8, "byte 98: document bound 2 is sequence 5; 1 to 4 is possible"},
    {"megatron16", 'i', 106, -1, 8, "byte 106: document bound 3 is sequence -1; 2 to 4 is possible"},
    {"megatron16", 'i', 114, 3, 8, "byte 114: the last document ends with sequence 3; there are 4"},
    {"megatron16", 'i', -1, 0, 4,
     "byte 122: 4 bytes after the document bounds; sequences with modes are not supported"},
    {"megatron16", 'i', -1, 0, -100, "the file has 22 bytes, fewer than the 34 of a header"},
    {"megatron16", 'b', -1, 0, -1, "sequence 3 ends at token 8; the .bin file ends at token 7, at its byte 15"},
    {"megatron16", 'b', -1, 0, 1, "the sequences have 16 bytes of ids; the .bin file has 17"},
    {"megatron32", 'i', 17, 8, 1, "begins at byte 8 of the ids; those before it end at 4"},
};

/* Changes a copy of a file; returns the new size. */
static size_t change(const struct damage *d, char *data, size_t n) {
  if (d->at >= 0) memcpy(data + d->at, &d->value, (size_t)d->bytes);
  return d->at >= 0 ? n : n + (size_t)d->bytes;
}

static void copy_golden(rft_folder *f, const char *golden, const char *end, const struct damage *d) {
  char name[16], *data;
  size_t n;
  snprintf(name, sizeof name, "x%s", end);
  data = golden_file(golden, end, &n);
  if (d) n = change(d, data, n);
  rft_write(f, name, data, n);
  free(data);
}

static void damaged(void **state) {
  rft_folder *f = *state;
  for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
    const struct damage *d = &damages[i];
    rfi_token_file t;
    remove(rft_path(f, "x.idx"));
    copy_golden(f, d->golden, ".bin", d->file == 'b' ? d : NULL);
    if (*d->golden == 'm') copy_golden(f, d->golden, ".idx", d->file == 'i' ? d : NULL);
    const rfr_status s =
        rfi_token_file_inspect(f->ctx, rft_path(f, "x.bin"), d->golden[strlen(d->golden) - 1] == '6' ? 2 : 4, &t);
    if (s != RFR_INVALID || strcmp(rfr_last_error()->slug, "data.tokens") != 0 ||
        !strstr(rfr_last_error()->message, d->message))
      fail_msg("row %zu, \"%s\": %s", i, d->message, s == RFR_OK ? "accepted" : rfr_last_error()->message);
    assert_null(t.ends);
  }
}

/* Negative ids of signed types, and ids that do not fit 32 bits, are outside every vocabulary. */
static void signs(void **state) {
  rft_folder *f = *state;
  static const struct {
    int code, width;
    const char *message;
  } cases[] = {{1, 1, NULL},
               {2, 1, "byte 1: token 1 is -1;"},
               {3, 2, "byte 2: token 1 is -1;"},
               {4, 4, "byte 4: token 1 is -1;"},
               {5, 8, "byte 8: token 1 is -1;"},
               {8, 2, NULL}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    uint8_t index[62] = "MMIDIDX", bin[16] = {1};
    const int32_t length = 2;
    const int w = cases[i].width;
    index[9] = index[18] = 1;
    index[17] = (uint8_t)cases[i].code;
    index[26] = 2;
    memcpy(index + 34, &length, 4);
    index[54] = 1;
    memset(bin + w, 0xff, (size_t)w);
    rft_write(f, "s.bin", bin, 2 * (size_t)w);
    rft_write(f, "s.idx", index, sizeof index);
    rfi_token_file t;
    int32_t ids[2];
    OK(rfi_token_file_inspect(f->ctx, rft_path(f, "s.bin"), 2, &t));
    assert_int_equal(t.tokens, 2);
    const rfr_status s = read_ids(f->ctx, rft_path(f, "s.bin"), &t, 65536, ids);
    if (cases[i].message) assert_non_null(strstr(rfr_last_error()->message, cases[i].message));
    assert_int_equal(s, cases[i].message ? RFR_INVALID : RFR_OK);
    if (!cases[i].message) assert_int_equal(ids[1], w == 1 ? 255 : 65535);
    if (w == 8) { /* the low half alone would be an id of the vocabulary */
      memcpy(bin + 8, &(int64_t){((int64_t)1 << 32) + 3}, 8);
      rft_write(f, "s.bin", bin, 16);
      assert_int_equal(read_ids(f->ctx, rft_path(f, "s.bin"), &t, 65536, ids), RFR_INVALID);
      assert_non_null(strstr(rfr_last_error()->message, "token 1 is 4294967299;"));
    }
    rfi_token_file_deinit(f->ctx, &t);
  }
}

/* A file that is accepted can be read to its end, and its documents tile it. */
static void read_all(rft_folder *f) {
  rfi_token_file t;
  int32_t ids[64];
  const rfr_status s = rfi_token_file_inspect(f->ctx, rft_path(f, "x.bin"), 2, &t);
  if (s != RFR_OK) return;
  assert_true(t.tokens >= 0 && t.tokens <= 16);
  const rfr_status r = read_ids(f->ctx, rft_path(f, "x.bin"), &t, INT32_MAX, ids);
  assert_true(r == RFR_OK || strcmp(rfr_last_error()->slug, "data.tokens") == 0);
  for (int64_t d = 0; d < t.documents; d++) assert_true(t.ends[d] > (d ? t.ends[d - 1] : 0));
  if (t.documents) assert_int_equal(t.ends[t.documents - 1], t.tokens);
  rfi_token_file_deinit(f->ctx, &t);
}

static void every_byte(void **state) {
  rft_folder *f = *state;
  static const uint8_t values[] = {0, 1, 0x7f, 0x80, 0xff};
  size_t n;
  copy_golden(f, "megatron16", ".bin", NULL);
  char *data = golden_file("megatron16", ".idx", &n);
  for (size_t cut = 0; cut < n; cut++) {
    rfi_token_file t;
    rft_write(f, "x.idx", data, cut);
    assert_int_equal(rfi_token_file_inspect(f->ctx, rft_path(f, "x.bin"), 2, &t), RFR_INVALID);
  }
  for (size_t at = 0; at < n; at++)
    for (size_t v = 0; v < sizeof values; v++) {
      const char kept = data[at];
      data[at] = (char)values[v];
      rft_write(f, "x.idx", data, n);
      read_all(f);
      data[at] = kept;
    }
  free(data);
}

/* No temporary file is left after a call that fails. */
static void write_faults(void **state) {
  rft_folder *f = *state;
  static const int written[] = {2, 5}; /* llmc16, megatron32 */
  for (int i = 0; i < 2; i++) {
    for (int64_t k = 1;; k++) {
      const struct golden *g = &goldens[written[i]];
      rfi_io_fault fault = {.fail_at = k, .error = ENOSPC, .interrupt = k % 2, .max_transfer = k % 3 ? 0 : 5};
      char name[32];
      snprintf(name, sizeof name, "f%d-%d.bin", i, (int)k);
      char *path = rft_path(f, name);
      rfi_io_set_fault(&fault);
      const rfr_status s = write_golden(f->ctx, g, path);
      rfi_io_set_fault(NULL);
      rfi_paths names = {.ctx = f->ctx};
      OK(rfi_dir_list(f->path, &names));
      for (int j = 0; j < names.n; j++) assert_null(strstr(names.items[j], ".tmp-"));
      rfi_paths_deinit(&names);
      if (s == RFR_OK) {
        assert_true(k > 8);
        break;
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(read_goldens), rft_folder_test(write_goldens), rft_folder_test(widths),
      rft_folder_test(damaged),      rft_folder_test(signs),         rft_folder_test(every_byte),
      rft_folder_test(write_faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
