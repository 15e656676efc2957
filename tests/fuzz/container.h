/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of GGUF and safetensors files that need not be valid, and the repair of their lengths and offsets.
 */
#ifndef RFT_CONTAINER_H
#define RFT_CONTAINER_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The size of the header if the data looks like a safetensors file; 0: it does not. */
size_t rft_safetensors_header(const uint8_t *data, size_t n);
/* Sets the data_offsets of a header so that the tensors are adjacent; returns their total size. A tensor whose size
 * cannot be determined keeps its offsets. */
int64_t rft_safetensors_tile(json_t *header);
/* Repairs a file in place, with the `header` bytes after its first 8: offsets, length, data. Returns the new size. */
size_t rft_safetensors_seal(uint8_t *data, size_t header, size_t most);

/* The description of a key or a tensor. */
typedef struct rft_gguf_part {
  bool is_tensor;
  size_t begin, name, end;
  size_t fields[8]; /* the first byte of each number after the name */
  int n_fields;
} rft_gguf_part;
typedef struct rft_gguf_parts {
  rft_gguf_part items[64];
  int n;
} rft_gguf_parts;
/* Finds the descriptions in a file, up to the first that is not complete. */
void rft_gguf_find(const uint8_t *data, size_t n, rft_gguf_parts *out);
/* Changes the number of tensors or keys in the header. */
void rft_gguf_count(uint8_t *data, bool tensors, int change);
/* Repairs the offsets of the tensors and the size of the file. Returns the new size. */
size_t rft_gguf_seal(uint8_t *data, size_t n, size_t most);

#endif
