/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors at the API boundary: a program's memory, and conversion from and to DLPack.
 *
 * DLPack's versioned struct is an ABI that array libraries share. Here it is only forward-declared; also include
 * dlpack.h (1.0 or newer) to access its members.
 *
 *   rfr_tensor w;
 *   DLManagedTensorVersioned *dl;
 *   rfr_programs_tensor(p, "w", &w);
 *   rfr_tensor_to_dlpack(ctx, &w, NULL, NULL, &dl);   // borrows; p must outlive dl
 *   consume(dl);                                      // calls dl->deleter(dl) in the end
 */
#ifndef REFRAIN_TENSOR_H
#define REFRAIN_TENSOR_H

#include "refrain/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Dense memory of a program's input, state or output; borrowed, valid until the
 * programs are destroyed (outputs: until the next run). */
typedef struct rfr_tensor {
  const char *name;
  rfr_role role;
  rfr_type type;
  void *data;
  int64_t bytes;
  int host; /* 1: `data` may be read and written directly; 0: it is an address of the device, see rfr_programs_read */
} rfr_tensor;

/* DLPack's own name, so that the two headers agree when both are included. */
typedef struct DLManagedTensorVersioned DLManagedTensorVersioned;

/* Called once, by the exported tensor's deleter, on the thread that calls it. */
typedef void (*rfr_release_fn)(void *user);

/* Wraps a tensor's memory for a consumer, without a copy. The memory must stay valid until
 * the consumer calls `(*out)->deleter(*out)`, exactly once, on any thread: either keep a reference for the consumer and
 * drop it in `release` (called last, with `user`), or pass NULL and outlive the consumer. A tensor with `host` 0 is on
 * the GPU of `ctx`. Strides are always given; an empty tensor has a NULL data pointer, as DLPack requires. On an error
 * `release` is not called. Errors: tensor (a type of less than 8 bits, a NULL pointer, `bytes` that do not match the
 * type), memory.alloc. */
RFR_API rfr_status rfr_tensor_to_dlpack(rfr_ctx *ctx, const rfr_tensor *tensor, rfr_release_fn release, void *user,
                                        DLManagedTensorVersioned **out);

/* Describes a DLPack tensor as an rfr_tensor: a view, valid as long as `dl`, which the caller still owns. `name` is "",
 * role RFR_ROLE_CONST if the exporter marked it read-only and RFR_ROLE_NONE otherwise; byte_offset is already in
 * `data`. Accepts tensors of version 1.x on the CPU or on a CUDA GPU (then `host` is 0), with dense rows (strides of
 * dimensions of size 1 are ignored), at most RFR_MAX_RANK dimensions, one lane, a type of the library with at least 8
 * bits, and data aligned to its element. Errors: tensor, naming the field. If the major version differs, only the
 * version is read. */
RFR_API rfr_status rfr_tensor_from_dlpack(const DLManagedTensorVersioned *dl, rfr_tensor *out);

#ifdef __cplusplus
}
#endif
#endif
