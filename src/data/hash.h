/* SPDX-License-Identifier: Apache-2.0
 *
 * XXH3-128 in one call and in pieces. It detects damage and equal files; it does not protect against collisions made on
 * purpose.
 */
#ifndef RFI_HASH_H
#define RFI_HASH_H

#include "base/base.h"

typedef struct rfi_hash {
  uint64_t high, low;
} rfi_hash;
typedef struct rfi_hasher rfi_hasher;

rfi_hash rfi_hash_bytes(const void *data, size_t n);
/* 32 hexadecimal digits and a NUL, as `xxhsum -H2` prints them. Returns text. */
char *rfi_hash_format(char text[33], rfi_hash hash);
bool rfi_hash_equal(rfi_hash a, rfi_hash b);

rfr_status rfi_hasher_create(rfr_ctx *ctx, rfi_hasher **out);
void rfi_hasher_destroy(rfi_hasher *hasher); /* accepts NULL */
void rfi_hasher_add(rfi_hasher *hasher, const void *data, size_t n);
/* Adds eight bytes, little-endian on every machine. */
void rfi_hasher_add_u64(rfi_hasher *hasher, uint64_t x);
rfi_hash rfi_hasher_result(const rfi_hasher *hasher);

#endif
