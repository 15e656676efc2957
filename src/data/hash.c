/* SPDX-License-Identifier: Apache-2.0
 *
 * XXH3-128 from the header-only xxhash. Only this file includes it: the header brings
 * several thousand lines, and its streaming state must be 64-byte aligned, which the
 * context's allocator gives.
 */
#include "data/hash.h"

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

rfr_status rfi_hasher_create(rfr_ctx *ctx, rfi_hasher **out) {
  RFI_TRY(RFI_ALLOC(ctx, sizeof **out, out));
  (*out)->ctx = ctx;
  XXH3_128bits_reset(&(*out)->state);
  return RFR_OK;
}

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
