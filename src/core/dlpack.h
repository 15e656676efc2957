/* SPDX-License-Identifier: Apache-2.0
 *
 * The layout of DLPack's versioned tensor (major version 1), as an ABI: names of members
 * are ours where the ABI does not see them, and only what the library reads is named.
 */
#ifndef RFI_DLPACK_H
#define RFI_DLPACK_H

#include <stddef.h>
#include <stdint.h>

#include "refrain/tensor.h"

enum { RFI_DL_MAJOR = 1, RFI_DL_MINOR = 1 };
/* Kinds of memory: host memory, GPU memory, pinned host memory, and managed memory. */
enum { RFI_DL_CPU = 1, RFI_DL_CUDA = 2, RFI_DL_CUDA_HOST = 3, RFI_DL_CUDA_MANAGED = 13 };
enum { RFI_DL_READ_ONLY = 1 };

typedef struct rfi_dl_type {
  uint8_t code, bits;
  uint16_t lanes;
} rfi_dl_type;

typedef struct rfi_dl_tensor {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t rank;
  rfi_dl_type type;
  int64_t *shape;
  int64_t *strides; /* elements; NULL: dense */
  uint64_t byte_offset;
} rfi_dl_tensor;

struct DLManagedTensorVersioned {
  struct {
    uint32_t major, minor;
  } version;
  void *manager;
  void (*deleter)(struct DLManagedTensorVersioned *self);
  uint64_t flags;
  rfi_dl_tensor tensor;
};

#if UINTPTR_MAX == UINT64_MAX && !defined(__cplusplus)
_Static_assert(offsetof(rfi_dl_tensor, shape) == 24 && sizeof(rfi_dl_tensor) == 48, "DLTensor");
_Static_assert(offsetof(struct DLManagedTensorVersioned, deleter) == 16 &&
                   offsetof(struct DLManagedTensorVersioned, tensor) == 32,
               "DLManagedTensorVersioned");
#endif

#endif
