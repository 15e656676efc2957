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

/* The hash of named tensors is the sum of the hashes of their blocks of RFI_HASH_BLOCK bytes, so that threads may hash
 * blocks of one tensor in any order. `index` counts the blocks of the tensor. */
enum { RFI_HASH_BLOCK = 1 << 20 };
rfi_hash rfi_hash_block(const char *name, uint64_t type, int64_t index, const void *data, size_t n);
void rfi_hash_add(rfi_hash *sum, rfi_hash hash);
/* Adds all blocks of a tensor. */
void rfi_hash_add_tensor(rfi_hash *sum, const char *name, uint64_t type, const void *data, size_t n);

rfr_status rfi_hasher_create(rfr_ctx *ctx, rfi_hasher **out);
void rfi_hasher_reset(rfi_hasher *hasher); /* as created */
void rfi_hasher_destroy(rfi_hasher *hasher); /* accepts NULL */
void rfi_hasher_add(rfi_hasher *hasher, const void *data, size_t n);
/* Adds eight bytes, little-endian on every machine. */
void rfi_hasher_add_u64(rfi_hasher *hasher, uint64_t x);
rfi_hash rfi_hasher_result(const rfi_hasher *hasher);

#endif
