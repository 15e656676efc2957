/* SPDX-License-Identifier: Apache-2.0 */
#include "report/wandb_file.h"

#include <string.h>

#include "report/inert.h"

/* Fields of Record, and of the messages in it. */
enum { NUMBER = 1, HISTORY = 2, SUMMARY = 3, RUN = 17, EXIT = 18, HEADER = 21 };
enum { VERSION_INFO = 1, PRODUCER = 1, MIN_CONSUMER = 2 };
enum { RUN_ID = 1, PROJECT = 3, CONFIG = 4, DISPLAY_NAME = 8, START_TIME = 17, SECONDS = 1, NANOS = 2 };
enum { ITEM = 1, KEY = 1, VALUE_JSON = 16 }; /* of HistoryRecord, ConfigRecord and SummaryRecord */
enum { STEP = 2, STEP_NUMBER = 1, EXIT_CODE = 1, RUNTIME = 2 };
enum { VARINT = 0, BYTES = 2 };
enum { BLOCK = 32768, HEAD = 7, FULL = 1, FIRST = 2, MIDDLE = 3, LAST = 4 };

static uint32_t crc32(const uint8_t *data, size_t n) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < n; i++) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

void rfi_wandb_deinit(rfi_wandb *w) {
  rfi_string_deinit(&w->text);
  rfi_string_deinit(&w->message);
  rfi_string_deinit(&w->item);
}

static void put(rfi_wandb *w, rfi_string *out, const void *data, size_t n) {
  if (w->status == RFR_OK && n > 0) w->status = rfi_string_append(out, data, n);
}

/* ---- messages ---- */

static void put_varint(rfi_wandb *w, rfi_string *out, uint64_t x) {
  uint8_t bytes[10];
  size_t n = 0;
  for (; x >= 0x80; x >>= 7) bytes[n++] = (uint8_t)(x | 0x80);
  bytes[n++] = (uint8_t)x;
  put(w, out, bytes, n);
}

static void put_number(rfi_wandb *w, rfi_string *out, int field, int64_t x) {
  put_varint(w, out, (uint64_t)(field << 3 | VARINT));
  put_varint(w, out, (uint64_t)x);
}

static void put_bytes(rfi_wandb *w, rfi_string *out, int field, const void *data, size_t n) {
  put_varint(w, out, (uint64_t)(field << 3 | BYTES));
  put_varint(w, out, n);
  put(w, out, data, n);
}

/* Readers refuse a file with text that is not UTF-8, but a folder name may have any bytes. */
static void put_text(rfi_wandb *w, rfi_string *out, int field, const char *text) {
  const size_t n = strlen(text);
  rfi_string valid = {.ctx = w->text.ctx};
  for (size_t i = 0; i < n;) {
    const int length = rfi_inert_utf8((const unsigned char *)text + i);
    if (length > 0) put(w, &valid, text + i, (size_t)length);
    else put(w, &valid, "\xef\xbf\xbd", 3); /* U+FFFD */
    i += length > 0 ? (size_t)length : 1;
  }
  put_bytes(w, out, field, valid.data, valid.n);
  rfi_string_deinit(&valid);
}

/* Items of a key and a JSON text. */
static void put_items(rfi_wandb *w, rfi_string *out, const rfi_wandb_value *values, size_t n) {
  for (size_t i = 0; i < n; i++) {
    w->item.n = 0;
    put_text(w, &w->item, KEY, values[i].key);
    put_text(w, &w->item, VALUE_JSON, values[i].json);
    put_bytes(w, out, ITEM, w->item.data, w->item.n);
  }
}

/* ---- records ---- */

static void put_part(rfi_wandb *w, int type, const char *data, size_t n) {
  const uint8_t kind = (uint8_t)type;
  uint8_t head[HEAD];
  w->item.n = 0;
  put(w, &w->item, &kind, 1);
  put(w, &w->item, data, n);
  if (w->status != RFR_OK) return;
  const uint32_t crc = crc32((const uint8_t *)w->item.data, w->item.n);
  for (int i = 0; i < 4; i++) head[i] = (uint8_t)(crc >> 8 * i);
  head[4] = (uint8_t)n;
  head[5] = (uint8_t)(n >> 8);
  head[6] = kind;
  put(w, &w->text, head, HEAD);
  put(w, &w->text, data, n);
}

/* Writes the message as a record of its field, split where a block of the file ends. If a block has too little space
 * left for a header, the rest is zeros. */
static void put_record(rfi_wandb *w, int field) {
  static const char zeros[HEAD];
  rfi_string record = {.ctx = w->text.ctx};
  put_number(w, &record, NUMBER, ++w->records);
  put_bytes(w, &record, field, w->message.data, w->message.n);
  w->message.n = 0;
  for (size_t at = 0; w->status == RFR_OK;) {
    size_t room = BLOCK - w->text.n % BLOCK;
    if (room < HEAD) {
      put(w, &w->text, zeros, room);
      continue;
    }
    room -= HEAD;
    const size_t left = record.n - at, n = left < room ? left : room;
    put_part(w, n == left ? (at == 0 ? FULL : LAST) : at == 0 ? FIRST : MIDDLE, record.data + at, n);
    at += n;
    if (at == record.n) break;
  }
  rfi_string_deinit(&record);
}

void rfi_wandb_begin(rfi_wandb *w, const char *id, const char *project, const char *name, double time,
                     const rfi_wandb_value *config, size_t n) {
  static const char head[] = {':', 'W', '&', 'B', '\xe1', '\xbe', 0}; /* magic 0xBEE1, version 0 */
  rfi_string inner = {.ctx = w->text.ctx};
  w->message.ctx = w->item.ctx = w->text.ctx;
  put(w, &w->text, head, sizeof head);
  put_text(w, &inner, PRODUCER, "refrain " RFI_VERSION);
  put_text(w, &inner, MIN_CONSUMER, "0.12.0");
  put_bytes(w, &w->message, VERSION_INFO, inner.data, inner.n);
  put_record(w, HEADER);
  put_text(w, &w->message, RUN_ID, id);
  put_text(w, &w->message, PROJECT, project);
  inner.n = 0;
  put_items(w, &inner, config, n);
  put_bytes(w, &w->message, CONFIG, inner.data, inner.n);
  put_text(w, &w->message, DISPLAY_NAME, name);
  inner.n = 0;
  put_number(w, &inner, SECONDS, (int64_t)time);
  put_number(w, &inner, NANOS, (int64_t)((time - (double)(int64_t)time) * 1e9));
  put_bytes(w, &w->message, START_TIME, inner.data, inner.n);
  put_record(w, RUN);
  rfi_string_deinit(&inner);
}

void rfi_wandb_history(rfi_wandb *w, int64_t step, const rfi_wandb_value *values, size_t n) {
  put_items(w, &w->message, values, n);
  w->item.n = 0;
  put_number(w, &w->item, STEP_NUMBER, step);
  put_bytes(w, &w->message, STEP, w->item.data, w->item.n);
  put_record(w, HISTORY);
}

void rfi_wandb_end(rfi_wandb *w, const rfi_wandb_value *values, size_t n, double runtime, int exit_code) {
  put_items(w, &w->message, values, n);
  put_record(w, SUMMARY);
  put_number(w, &w->message, EXIT_CODE, exit_code);
  put_number(w, &w->message, RUNTIME, (int64_t)runtime);
  put_record(w, EXIT);
}
