/* SPDX-License-Identifier: Apache-2.0
 *
 * A cache file is a header and the five arrays, in the byte order of the machine; a file of another byte order has
 * another magic number.
 */
#include "data/token_table.h"

#include <string.h>

#include "data/file.h"

#define MAGIC UINT64_C(0x31304b4f54524652) /* "RFRTOK01" on a little-endian machine */

typedef struct header {
  uint64_t magic, unused;
  rfi_hash key;
  int64_t rows, tokens;
  rfi_hash payload;
} header;

enum { ROW_BYTES = 24, TOKEN_BYTES = 6 };

/* ---- in memory ---- */

static rfr_status grow(rfr_ctx *ctx, void *array, int64_t used, int64_t capacity, size_t element) {
  void **at = array;
  char *grown;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)capacity * element, &grown));
  if (used) memcpy(grown, *at, (size_t)used * element);
  rfi_free(ctx, *at);
  *at = grown;
  return RFR_OK;
}

static int64_t larger(int64_t capacity, int64_t least, int64_t want) {
  if (capacity < least) capacity = least;
  while (capacity < want) capacity *= 2;
  return capacity;
}

rfr_status rfi_token_table_add(rfi_token_table *t, const uint32_t *ids, const uint16_t *widths, int64_t n,
                               uint64_t hash, int64_t line) {
  if (t->rows + 1 > t->row_capacity) {
    const int64_t capacity = larger(t->row_capacity, 256, t->rows + 1);
    RFI_TRY(grow(t->ctx, &t->ends, t->rows, capacity, sizeof *t->ends));
    RFI_TRY(grow(t->ctx, &t->hashes, t->rows, capacity, sizeof *t->hashes));
    RFI_TRY(grow(t->ctx, &t->lines, t->rows, capacity, sizeof *t->lines));
    t->row_capacity = capacity;
  }
  if (t->tokens + n > t->token_capacity) {
    const int64_t capacity = larger(t->token_capacity, 4096, t->tokens + n);
    RFI_TRY(grow(t->ctx, &t->ids, t->tokens, capacity, sizeof *t->ids));
    RFI_TRY(grow(t->ctx, &t->widths, t->tokens, capacity, sizeof *t->widths));
    t->token_capacity = capacity;
  }
  if (n) {
    memcpy(t->ids + t->tokens, ids, (size_t)n * sizeof *ids);
    memcpy(t->widths + t->tokens, widths, (size_t)n * sizeof *widths);
  }
  t->tokens += n;
  t->ends[t->rows] = t->tokens;
  t->hashes[t->rows] = hash;
  t->lines[t->rows++] = line;
  return RFR_OK;
}

void rfi_token_table_deinit(rfi_token_table *t) {
  rfr_ctx *ctx = t->ctx;
  if (!t->block) {
    rfi_free(ctx, t->ends);
    rfi_free(ctx, t->hashes);
    rfi_free(ctx, t->lines);
    rfi_free(ctx, t->ids);
    rfi_free(ctx, t->widths);
  }
  rfi_free(ctx, t->block);
  *t = (rfi_token_table){.ctx = ctx};
}

/* ---- as a file ---- */

static rfr_status cache_path(rfr_ctx *ctx, const char *folder, rfi_hash key, char **out) {
  char name[48], digits[33];
  rfi_snprintf(name, sizeof name, "%s.tokens", rfi_hash_format(digits, key));
  return rfi_path_join(ctx, folder, name, out);
}

static int64_t payload_bytes(int64_t rows, int64_t tokens) { return rows * ROW_BYTES + tokens * TOKEN_BYTES; }

/* Points the arrays into a payload of the table's sizes. */
static void place(rfi_token_table *t, char *payload) {
  t->ends = (int64_t *)payload;
  t->hashes = (uint64_t *)(t->ends + t->rows);
  t->lines = (int64_t *)(t->hashes + t->rows);
  t->ids = (uint32_t *)(t->lines + t->rows);
  t->widths = (uint16_t *)(t->ids + t->tokens);
}

/* Whether `n` bytes are a complete cache of `key`. */
static bool is_valid(rfi_token_table *t, char *data, size_t n, rfi_hash key, int64_t vocab) {
  header h;
  if (n < sizeof h) return false;
  memcpy(&h, data, sizeof h);
  const int64_t left = (int64_t)(n - sizeof h);
  if (h.magic != MAGIC || !rfi_hash_equal(h.key, key)) return false;
  if (h.rows < 0 || h.tokens < 0 || h.rows > left / ROW_BYTES || h.tokens > left / TOKEN_BYTES) return false;
  if (payload_bytes(h.rows, h.tokens) != left) return false;
  if (!rfi_hash_equal(rfi_hash_bytes(data + sizeof h, (size_t)left), h.payload)) return false;
  t->rows = h.rows;
  t->tokens = h.tokens;
  place(t, data + sizeof h);
  int64_t last = 0;
  for (int64_t i = 0; i < t->rows; last = t->ends[i++])
    if (t->ends[i] < last || t->ends[i] > t->tokens) return false;
  for (int64_t i = 0; i < t->tokens; i++)
    if (RFI_TOKEN_ID(t->ids[i]) >= vocab) return false;
  return last == t->tokens;
}

rfr_status rfi_token_table_load(rfi_token_table *t, const char *folder, rfi_hash key, int64_t vocab, bool *found) {
  rfr_ctx *ctx = t->ctx;
  char *path, *data = NULL, kind;
  size_t n;
  *found = false;
  RFI_TRY(cache_path(ctx, folder, key, &path));
  rfr_status s = rfi_path_kind(path, &kind);
  if (s == RFR_OK && kind == 'f') s = rfi_file_read(ctx, path, &data, &n);
  rfi_free(ctx, path);
  if (s == RFR_NO_MEMORY) return s;
  if (s != RFR_OK || !data) return RFR_OK;
  *found = is_valid(t, data, n, key, vocab);
  if (*found) {
    t->block = data;
  } else {
    *t = (rfi_token_table){.ctx = ctx};
    rfi_free(ctx, data);
  }
  return RFR_OK;
}

rfr_status rfi_token_table_save(const rfi_token_table *t, const char *folder, rfi_hash key) {
  const int64_t bytes = payload_bytes(t->rows, t->tokens);
  header h = {.magic = MAGIC, .key = key, .rows = t->rows, .tokens = t->tokens};
  rfi_token_table copy = {.rows = t->rows, .tokens = t->tokens};
  char *path, *data = NULL;
  RFI_TRY(rfi_dir_create(folder));
  RFI_TRY(cache_path(t->ctx, folder, key, &path));
  rfr_status s = RFI_ALLOC(t->ctx, sizeof h + (size_t)bytes, &data);
  if (s == RFR_OK) {
    place(&copy, data + sizeof h);
    if (t->rows) {
      memcpy(copy.ends, t->ends, (size_t)t->rows * sizeof *t->ends);
      memcpy(copy.hashes, t->hashes, (size_t)t->rows * sizeof *t->hashes);
      memcpy(copy.lines, t->lines, (size_t)t->rows * sizeof *t->lines);
    }
    if (t->tokens) {
      memcpy(copy.ids, t->ids, (size_t)t->tokens * sizeof *t->ids);
      memcpy(copy.widths, t->widths, (size_t)t->tokens * sizeof *t->widths);
    }
    h.payload = rfi_hash_bytes(data + sizeof h, (size_t)bytes);
    memcpy(data, &h, sizeof h);
    s = rfi_file_write(t->ctx, path, data, sizeof h + (size_t)bytes);
  }
  rfi_free(t->ctx, data);
  rfi_free(t->ctx, path);
  return s;
}
