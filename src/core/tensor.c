/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors in and out as DLPack.
 *
 * Nothing is copied in either direction. An imported tensor is only read, so it keeps one owner, the caller, who calls
 * the deleter once. An exported tensor has its own block (struct, shape, strides) from the context's allocator; its
 * deleter frees the block, then calls the release function of the owner. Everything about a foreign tensor is checked
 * before its pointer is used, and a refusal prints what was found.
 */
#include "refrain/tensor.h"

#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "core/dlpack.h"

typedef struct type_row {
  rfr_dtype dtype;
  uint8_t code, bits;
} type_row;

static const type_row types[] = {
    {RFR_F64, 2, 64},  {RFR_F32, 2, 32}, {RFR_F16, 2, 16}, {RFR_BF16, 4, 16}, {RFR_E4M3, 10, 8}, {RFR_E5M2, 12, 8},
    {RFR_E8M0, 14, 8}, {RFR_I64, 0, 64}, {RFR_I32, 0, 32}, {RFR_U8, 1, 8},    {RFR_BOOL, 6, 8},
};
enum { N_TYPES = sizeof types / sizeof *types };

/* An exported tensor in one block; `dl` first, so that the block's address is its own. */
typedef struct exported {
  DLManagedTensorVersioned dl;
  rfr_ctx *ctx;
  rfr_release_fn release;
  void *user;
  int64_t shape[RFR_MAX_RANK], strides[RFR_MAX_RANK];
} exported;

/* The number of elements of a shape; false if a dimension is negative or the product overflows. For an empty tensor the
 * product without its zeros must not overflow either, because strides are computed from it. */
static bool count_elements(int rank, const int64_t *shape, int64_t *n) {
  int64_t product = 1;
  bool is_empty = false;
  for (int i = 0; i < rank; i++) {
    if (shape[i] < 0) return false;
    if (shape[i] == 0) is_empty = true;
    else if (__builtin_mul_overflow(product, shape[i], &product)) return false;
  }
  *n = is_empty ? 0 : product;
  return product <= INT64_MAX / 8;
}

static void dense_strides(int rank, const int64_t *shape, int64_t *strides) {
  int64_t step = 1;
  for (int i = rank - 1; i >= 0; i--) {
    strides[i] = step;
    if (shape[i] > 1) step *= shape[i];
  }
}

static const char *format_dims(char *out, size_t size, int rank, const int64_t *dims) {
  size_t used = 0;
  out[0] = '\0';
  for (int i = 0; i < rank && used < size; i++)
    used += (size_t)rfi_snprintf(out + used, size - used, "%s%lld", i == 0 ? "" : ", ", (long long)dims[i]);
  return out;
}

/* ---- out ---- */

static void delete_exported(DLManagedTensorVersioned *dl) {
  exported *e = (exported *)dl;
  rfr_release_fn release = e->release;
  void *user = e->user;
  rfi_free(e->ctx, e);
  if (release != NULL) release(user);
}

/* The GPU of a context, which owns a tensor without host memory. */
static void find_device(const rfr_ctx *ctx, rfi_dl_tensor *t) {
  const char *device = rfi_ctx_device(ctx), *number = strchr(device, ':');
  if (strncmp(device, "cuda", 4) != 0) return;
  t->device.type = RFI_DL_CUDA;
  t->device.id = number ? (int32_t)strtol(number + 1, NULL, 10) : 0;
}

rfr_status rfr_tensor_to_dlpack(rfr_ctx *ctx, const rfr_tensor *tensor, rfr_release_fn release, void *user,
                                DLManagedTensorVersioned **out) {
  *out = NULL;
  const char *name = tensor->name != NULL ? tensor->name : "";
  const rfr_type *type = &tensor->type;
  int row = 0;
  while (row < N_TYPES && types[row].dtype != type->dtype) row++;
  if (row == N_TYPES)
    return rfi_fail(RFI_E_TENSOR, "tensor \"%s\": type %s cannot be exported to DLPack", name,
                    rfr_dtype_name(type->dtype));
  int64_t n;
  if (type->rank < 0 || type->rank > RFR_MAX_RANK || !count_elements(type->rank, type->shape, &n))
    return rfi_fail(RFI_E_TENSOR, "tensor \"%s\": its shape (rank %d) is not valid", name, type->rank);
  const int64_t bytes = n * (types[row].bits / 8);
  if (tensor->bytes != bytes)
    return rfi_fail(RFI_E_TENSOR, "tensor \"%s\": bytes is %lld, its type needs %lld", name, (long long)tensor->bytes,
                    (long long)bytes);
  if (tensor->data == NULL && n > 0) return rfi_fail(RFI_E_TENSOR, "tensor \"%s\": data is NULL", name);

  exported *e;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *e, &e));
  e->ctx = ctx;
  e->release = release;
  e->user = user;
  memcpy(e->shape, type->shape, sizeof e->shape);
  dense_strides(type->rank, e->shape, e->strides);
  e->dl.version.major = RFI_DL_MAJOR;
  e->dl.version.minor = RFI_DL_MINOR;
  e->dl.manager = e;
  e->dl.deleter = delete_exported;
  e->dl.tensor.data = n > 0 ? tensor->data : NULL;
  e->dl.tensor.device.type = RFI_DL_CPU;
  if (!tensor->host) find_device(ctx, &e->dl.tensor);
  e->dl.tensor.rank = type->rank;
  e->dl.tensor.type = (rfi_dl_type){types[row].code, types[row].bits, 1};
  e->dl.tensor.shape = e->shape;
  e->dl.tensor.strides = e->strides;
  *out = &e->dl;
  return RFR_OK;
}

/* ---- in ---- */

static rfr_status check_layout(const rfi_dl_tensor *t, int64_t n) {
  if (t->strides == NULL || n == 0) return RFR_OK;
  int64_t dense[RFR_MAX_RANK];
  dense_strides(t->rank, t->shape, dense);
  for (int i = 0; i < t->rank; i++) {
    if (t->shape[i] == 1 || t->strides[i] == dense[i]) continue;
    char shape[160], strides[160];
    return rfi_fail(
        RFI_E_TENSOR, "the DLPack tensor of shape (%s) has strides (%s), which are not dense: copy it first",
        format_dims(shape, sizeof shape, t->rank, t->shape), format_dims(strides, sizeof strides, t->rank, t->strides));
  }
  return RFR_OK;
}

rfr_status rfr_tensor_from_dlpack(const DLManagedTensorVersioned *dl, rfr_tensor *out) {
  memset(out, 0, sizeof *out);
  if (dl == NULL) return rfi_fail(RFI_E_TENSOR, "the DLPack tensor is NULL");
  if (dl->version.major != RFI_DL_MAJOR)
    return rfi_fail(RFI_E_TENSOR, "the DLPack tensor has version %u.%u; this library reads version %d",
                    dl->version.major, dl->version.minor, RFI_DL_MAJOR);
  const rfi_dl_tensor *t = &dl->tensor;
  const int32_t device = t->device.type;
  const bool on_host = device == RFI_DL_CPU || device == RFI_DL_CUDA_HOST;
  if (!on_host && device != RFI_DL_CUDA && device != RFI_DL_CUDA_MANAGED)
    return rfi_fail(RFI_E_TENSOR,
                    "the DLPack tensor is on device type %d (id %d); only the CPU (type %d) and CUDA (type %d)"
                    " are supported",
                    device, t->device.id, RFI_DL_CPU, RFI_DL_CUDA);
  int row = 0;
  while (row < N_TYPES && (types[row].code != t->type.code || types[row].bits != t->type.bits)) row++;
  if (row == N_TYPES || t->type.lanes != 1)
    return rfi_fail(RFI_E_TENSOR, "the DLPack tensor has type code %d, %d bits, %d lanes, which is not supported",
                    t->type.code, t->type.bits, t->type.lanes);
  if (t->rank < 0 || t->rank > RFR_MAX_RANK)
    return rfi_fail(RFI_E_TENSOR, "the DLPack tensor has %d dimensions; at most %d are supported", t->rank,
                    RFR_MAX_RANK);
  if (t->rank > 0 && t->shape == NULL)
    return rfi_fail(RFI_E_TENSOR, "the DLPack tensor has %d dimensions, but its shape is NULL", t->rank);
  int64_t n;
  char dims[160];
  if (!count_elements(t->rank, t->shape, &n))
    return rfi_fail(RFI_E_TENSOR, "the DLPack tensor has the invalid shape (%s)",
                    format_dims(dims, sizeof dims, t->rank, t->shape));
  RFI_TRY(check_layout(t, n));
  if (n > 0 && t->data == NULL) return rfi_fail(RFI_E_TENSOR, "the data of the DLPack tensor is NULL");
  const int64_t element = types[row].bits / 8;
  const uintptr_t address = n > 0 ? (uintptr_t)t->data + (uintptr_t)t->byte_offset : 0;
  if (address % (uintptr_t)element != 0)
    return rfi_fail(RFI_E_TENSOR, "the data of the DLPack tensor is not aligned to its %d-byte elements: copy it first",
                    (int)element);

  out->name = "";
  out->role = (dl->flags & RFI_DL_READ_ONLY) != 0 ? RFR_ROLE_CONST : RFR_ROLE_NONE;
  out->type.dtype = types[row].dtype;
  out->type.rank = t->rank;
  for (int i = 0; i < t->rank; i++) out->type.shape[i] = t->shape[i];
  out->data = n > 0 ? (char *)t->data + t->byte_offset : NULL;
  out->bytes = n * element;
  out->host = on_host;
  return RFR_OK;
}
