/* SPDX-License-Identifier: Apache-2.0
 *
 * XXH3-128 from the header-only xxhash. Only this file includes it: the header brings
 * several thousand lines, and its streaming state must be 64-byte aligned, which the
 * context's allocator gives.
 */
#include "data/hash.h"

#include <string.h>

#define XXH_INLINE_ALL
#define XXH_NO_STDLIB
#include <xxhash.h>

struct rfi_hasher {
  XXH3_state_t state; /* first: carries the alignment */
  rfr_ctx *ctx;
};

static rfi_hash from_xxh(XXH128_hash_t h) { return (rfi_hash){h.high64, h.low64}; }

rfi_hash rfi_hash_bytes(const void *data, size_t n) { return from_xxh(XXH3_128bits(data, n)); }

char *rfi_hash_format(char text[33], rfi_hash hash) {
  static const char digits[] = "0123456789abcdef";
  for (int i = 0; i < 16; i++) {
    text[i] = digits[hash.high >> (60 - 4 * i) & 15];
    text[16 + i] = digits[hash.low >> (60 - 4 * i) & 15];
  }
  text[32] = 0;
  return text;
}

bool rfi_hash_equal(rfi_hash a, rfi_hash b) { return a.high == b.high && a.low == b.low; }

rfi_hash rfi_hash_block(const char *name, uint64_t type, int64_t index, const void *data, size_t n) {
  const XXH128_hash_t of_name = XXH3_128bits(name, strlen(name)), of_data = XXH3_128bits(data, n);
  const uint64_t words[] = {of_name.low64, of_name.high64, type, (uint64_t)index, of_data.low64, of_data.high64};
  uint8_t bytes[sizeof words]; /* little-endian on every machine */
  for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(words[i / 8] >> (8 * (i % 8)));
  return rfi_hash_bytes(bytes, sizeof bytes);
}

void rfi_hash_add(rfi_hash *sum, rfi_hash hash) {
  sum->low += hash.low;
  sum->high += hash.high;
}

void rfi_hash_add_tensor(rfi_hash *sum, const char *name, uint64_t type, const void *data, size_t n) {
  const size_t block = RFI_HASH_BLOCK;
  for (size_t at = 0; at < n; at += block)
    rfi_hash_add(sum, rfi_hash_block(name, type, (int64_t)(at / block), (const char *)data + at,
                                     n - at < block ? n - at : block));
}

rfr_status rfi_hasher_create(rfr_ctx *ctx, rfi_hasher **out) {
  RFI_TRY(RFI_ALLOC(ctx, sizeof **out, out));
  (*out)->ctx = ctx;
  XXH3_128bits_reset(&(*out)->state);
  return RFR_OK;
}

void rfi_hasher_reset(rfi_hasher *hasher) { XXH3_128bits_reset(&hasher->state); }

void rfi_hasher_destroy(rfi_hasher *hasher) {
  if (hasher) rfi_free(hasher->ctx, hasher);
}

void rfi_hasher_add(rfi_hasher *hasher, const void *data, size_t n) {
  if (n) XXH3_128bits_update(&hasher->state, data, n);
}

void rfi_hasher_add_u64(rfi_hasher *hasher, uint64_t x) {
  uint8_t bytes[8];
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(x >> (8 * i));
  rfi_hasher_add(hasher, bytes, sizeof bytes);
}

rfi_hash rfi_hasher_result(const rfi_hasher *hasher) { return from_xxh(XXH3_128bits_digest(&hasher->state)); }
