/* SPDX-License-Identifier: Apache-2.0
 *
 * A message is built after the twelve bytes of its record's head. CRC-32C is computed bit by bit over a few hundred
 * bytes per logged step, so a table would not pay.
 */
#include "train/event_file.h"

#include <math.h>
#include <string.h>

/* Field numbers of Event, Summary.Value and SessionLog. */
enum { WALL_TIME = 1, STEP = 2, FILE_VERSION = 3, SUMMARY = 5, SESSION_LOG = 7 };
enum { SUMMARY_VALUE = 1, TAG = 1, SIMPLE_VALUE = 2, STATUS = 1, START = 1 };
enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };
enum { HEAD = 12, FOOT = 4 };

uint32_t rfi_crc32c(const void *data, size_t n) {
  const uint8_t *bytes = data;
  uint32_t crc = ~0u;
  for (size_t i = 0; i < n; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

/* The format stores a masked CRC, because the CRC of data that contains CRCs is weak. */
static uint32_t masked_crc(const void *data, size_t n) {
  const uint32_t crc = rfi_crc32c(data, n);
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static uint8_t *put_fixed(uint8_t *at, uint64_t x, int bytes) {
  for (int i = 0; i < bytes; i++) *at++ = (uint8_t)(x >> 8 * i);
  return at;
}

static uint8_t *put_varint(uint8_t *at, uint64_t x) {
  for (; x >= 0x80; x >>= 7) *at++ = (uint8_t)(x | 0x80);
  *at++ = (uint8_t)x;
  return at;
}

static uint8_t *put_key(uint8_t *at, int field, int type) { return put_varint(at, (uint64_t)(field << 3 | type)); }

static uint8_t *put_bytes(uint8_t *at, int field, const void *data, size_t n) {
  at = put_varint(put_key(at, field, BYTES), n);
  memcpy(at, data, n);
  return at + n;
}

static uint8_t *begin_event(uint8_t *at, double time, int64_t step) {
  uint64_t bits;
  memcpy(&bits, &time, sizeof bits);
  at = put_fixed(put_key(at, WALL_TIME, FIXED64), bits, 8);
  return put_varint(put_key(at, STEP, VARINT), (uint64_t)step);
}

/* Completes the record whose message lies from out + HEAD to `end`. */
static size_t close_record(uint8_t *out, uint8_t *end) {
  const size_t n = (size_t)(end - (out + HEAD));
  put_fixed(out, n, 8);
  put_fixed(out + 8, masked_crc(out, 8), 4);
  put_fixed(end, masked_crc(out + HEAD, n), 4);
  return HEAD + n + FOOT;
}

size_t rfi_event_version(double time, uint8_t out[RFI_EVENT_BYTES]) {
  static const char version[] = "brain.Event:2";
  return close_record(out, put_bytes(begin_event(out + HEAD, time, 0), FILE_VERSION, version, sizeof version - 1));
}

size_t rfi_event_session(double time, int64_t step, uint8_t out[RFI_EVENT_BYTES]) {
  uint8_t log[8], *end = put_varint(put_key(log, STATUS, VARINT), START);
  return close_record(out, put_bytes(begin_event(out + HEAD, time, step), SESSION_LOG, log, (size_t)(end - log)));
}

size_t rfi_event_scalars(double time, int64_t step, const rfi_scalar *scalars, int n, uint8_t out[RFI_EVENT_BYTES]) {
  uint8_t summary[RFI_EVENT_BYTES], *at = summary;
  for (int i = 0; i < n; i++) {
    const float value = (float)scalars[i].value;
    uint8_t one[RFI_EVENT_TAG + 16], *end = put_bytes(one, TAG, scalars[i].tag, strlen(scalars[i].tag));
    uint32_t bits;
    if (!isfinite(scalars[i].value)) continue;
    memcpy(&bits, &value, sizeof bits);
    end = put_fixed(put_key(end, SIMPLE_VALUE, FIXED32), bits, 4);
    at = put_bytes(at, SUMMARY_VALUE, one, (size_t)(end - one));
  }
  return close_record(out, put_bytes(begin_event(out + HEAD, time, step), SUMMARY, summary, (size_t)(at - summary)));
}
