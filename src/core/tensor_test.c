/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors in and out as DLPack: round trips, refusals, ownership.
 */
#include "refrain/tensor.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/dlpack.h"

static rfr_ctx *make_ctx(void) {
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  return ctx;
}

static rfr_tensor make_tensor(rfr_dtype dtype, int rank, const int64_t *shape, void *data) {
  rfr_tensor t = {.name = "w", .role = RFR_ROLE_TRAINABLE, .type = {.dtype = dtype, .rank = rank}, .data = data};
  t.bytes = rfr_dtype_bits(dtype) / 8;
  for (int i = 0; i < rank; i++) {
    t.type.shape[i] = shape[i];
    t.bytes *= shape[i];
  }
  return t;
}

static void count_release(void *user) { ++*(int *)user; }

static void assert_refused(rfr_status s, const char *part) {
  assert_int_equal(s, RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "tensor");
  if (strstr(rfr_last_error()->message, part) == NULL)
    fail_msg("\"%s\" is not in \"%s\"", part, rfr_last_error()->message);
}

static void test_out_and_in(void **state) {
  (void)state;
  /* Codes from the standard's enumeration. */
  static const struct {
    rfr_dtype dtype;
    int code, bits;
  } types[] = {{RFR_F64, 2, 64},  {RFR_F32, 2, 32},  {RFR_F16, 2, 16},  {RFR_BF16, 4, 16},
               {RFR_E4M3, 10, 8}, {RFR_E5M2, 12, 8}, {RFR_E8M0, 14, 8}, {RFR_I64, 0, 64},
               {RFR_I32, 0, 32},  {RFR_U8, 1, 8},    {RFR_BOOL, 6, 8}};
  static const int64_t shape[RFR_MAX_RANK] = {2, 3, 1, 5, 4, 2};
  static const int64_t strides[RFR_MAX_RANK] = {120, 40, 40, 8, 2, 1};
  static _Alignas(64) char memory[240 * 8];
  rfr_ctx *ctx = make_ctx();
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    for (int rank = 0; rank <= RFR_MAX_RANK; rank++) {
      int released = 0;
      const rfr_tensor t = make_tensor(types[i].dtype, rank, shape, memory);
      DLManagedTensorVersioned *dl;
      assert_int_equal(rfr_tensor_to_dlpack(ctx, &t, count_release, &released, &dl), RFR_OK);
      assert_int_equal(dl->version.major, 1);
      assert_int_equal(dl->flags, 0);
      assert_int_equal(dl->tensor.device.type, 1);
      assert_int_equal(dl->tensor.device.id, 0);
      assert_int_equal(dl->tensor.type.code, types[i].code);
      assert_int_equal(dl->tensor.type.bits, types[i].bits);
      assert_int_equal(dl->tensor.type.lanes, 1);
      assert_int_equal(dl->tensor.byte_offset, 0);
      assert_ptr_equal(dl->tensor.data, memory);
      assert_int_equal(dl->tensor.rank, rank);
      if (rank == RFR_MAX_RANK) assert_memory_equal(dl->tensor.strides, strides, sizeof strides);
      if (rank > 0) assert_memory_equal(dl->tensor.shape, shape, (size_t)rank * 8);

      rfr_tensor back;
      assert_int_equal(rfr_tensor_from_dlpack(dl, &back), RFR_OK);
      assert_int_equal(back.type.dtype, t.type.dtype);
      assert_int_equal(back.type.rank, rank);
      assert_memory_equal(back.type.shape, t.type.shape, sizeof t.type.shape);
      assert_ptr_equal(back.data, memory);
      assert_int_equal(back.bytes, t.bytes);
      assert_int_equal(back.role, RFR_ROLE_NONE);
      assert_string_equal(back.name, "");
      assert_int_equal(released, 0); /* describing the tensor does not consume it */
      dl->deleter(dl);
      assert_int_equal(released, 1);
      assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
    }
  }
  rfr_ctx_destroy(ctx);
}

/* Kinds of memory: the standard's number, and 1 if the host may read it. */
static void test_devices(void **state) {
  (void)state;
  static const struct { int type, host; } kinds[] = {{1, 1}, {2, 0}, {3, 1}, {13, 0}};
  float data[6];
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.device = "cuda:1"; /* must not be opened before it is used */
  assert_int_equal(rfr_ctx_create(&o, &ctx), RFR_OK);
  rfr_tensor t = make_tensor(RFR_F32, 2, (const int64_t[]){2, 3}, data);
  DLManagedTensorVersioned *dl;
  for (t.host = 0; t.host < 2; t.host++) {
    assert_int_equal(rfr_tensor_to_dlpack(ctx, &t, NULL, NULL, &dl), RFR_OK);
    assert_int_equal(dl->tensor.device.type, t.host ? 1 : 2);
    assert_int_equal(dl->tensor.device.id, t.host ? 0 : 1);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
      rfr_tensor back;
      dl->tensor.device.type = kinds[i].type;
      assert_int_equal(rfr_tensor_from_dlpack(dl, &back), RFR_OK);
      assert_int_equal(back.host, kinds[i].host);
    }
    dl->deleter(dl);
  }
  rfr_ctx_destroy(ctx);
}

static void test_out_owns_its_shape(void **state) {
  (void)state;
  rfr_ctx *ctx = make_ctx();
  float data[6];
  DLManagedTensorVersioned *dl;
  {
    rfr_tensor t = make_tensor(RFR_F32, 2, (const int64_t[]){2, 3}, data);
    assert_int_equal(rfr_tensor_to_dlpack(ctx, &t, NULL, NULL, &dl), RFR_OK);
    memset(&t, 0xEE, sizeof t);
  }
  assert_int_equal(dl->tensor.shape[0], 2);
  assert_int_equal(dl->tensor.shape[1], 3);
  assert_int_equal(dl->tensor.strides[0], 3);
  dl->deleter(dl); /* borrowed: there is no release function */
  assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
  rfr_ctx_destroy(ctx);
}

static void test_empty(void **state) {
  (void)state;
  rfr_ctx *ctx = make_ctx();
  char somewhere[8];
  rfr_tensor t = make_tensor(RFR_BF16, 3, (const int64_t[]){4, 0, 3}, somewhere), back;
  DLManagedTensorVersioned *dl;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(rfr_tensor_to_dlpack(ctx, &t, NULL, NULL, &dl), RFR_OK);
    assert_null(dl->tensor.data);
    dl->tensor.strides[1] = 77; /* strides of an empty tensor are never used */
    assert_int_equal(rfr_tensor_from_dlpack(dl, &back), RFR_OK);
    assert_int_equal(back.bytes, 0);
    assert_null(back.data);
    assert_int_equal(back.type.shape[0], 4);
    dl->deleter(dl);
    t.data = NULL;
  }
  rfr_ctx_destroy(ctx);
}

static void test_out_refuses(void **state) {
  (void)state;
  rfr_ctx *ctx = make_ctx();
  int released = 0;
  float data[6];
  DLManagedTensorVersioned *dl = (DLManagedTensorVersioned *)1;
  rfr_tensor t = make_tensor(RFR_E2M1, 1, (const int64_t[]){6}, data);
  assert_refused(rfr_tensor_to_dlpack(ctx, &t, count_release, &released, &dl), "e2m1");
  assert_null(dl);
  t = make_tensor(RFR_F32, 2, (const int64_t[]){2, 3}, data);
  t.bytes = 23;
  assert_refused(rfr_tensor_to_dlpack(ctx, &t, count_release, &released, &dl), "bytes is 23, its type needs 24");
  t = make_tensor(RFR_F32, 2, (const int64_t[]){2, 3}, NULL);
  assert_refused(rfr_tensor_to_dlpack(ctx, &t, count_release, &released, &dl), "data is NULL");
  t = make_tensor(RFR_F32, 2, (const int64_t[]){2, -3}, data);
  assert_refused(rfr_tensor_to_dlpack(ctx, &t, count_release, &released, &dl), "shape");
  t = make_tensor(RFR_F32, 1, (const int64_t[]){6}, data);
  t.type.rank = RFR_MAX_RANK + 1;
  assert_refused(rfr_tensor_to_dlpack(ctx, &t, count_release, &released, &dl), "rank 7");
  t = make_tensor(RFR_F32, 1, (const int64_t[]){6}, data);
  rfr_ctx_fail_alloc(ctx, 1);
  assert_int_equal(rfr_tensor_to_dlpack(ctx, &t, count_release, &released, &dl), RFR_NO_MEMORY);
  assert_null(dl);
  assert_int_equal(released, 0); /* the caller still owns it */
  assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
  rfr_ctx_destroy(ctx);
}

/* A tensor as another library makes it. */
typedef struct foreign {
  DLManagedTensorVersioned dl;
  int64_t shape[8], strides[8];
  int deleted;
  float data[24];
} foreign;

static void foreign_delete(DLManagedTensorVersioned *dl) { ((foreign *)dl)->deleted++; }

static foreign *make_foreign(foreign *f) {
  memset(f, 0, sizeof *f);
  f->dl.version.major = 1;
  f->dl.version.minor = 3; /* a newer minor version is compatible */
  f->dl.deleter = foreign_delete;
  f->dl.tensor = (rfi_dl_tensor){.data = f->data, .device = {1, 0}, .rank = 2, .type = {2, 32, 1}};
  f->dl.tensor.shape = memcpy(f->shape, (const int64_t[]){3, 4}, 16);
  f->dl.tensor.strides = memcpy(f->strides, (const int64_t[]){4, 1}, 16);
  return f;
}

static void test_in_takes(void **state) {
  (void)state;
  foreign f;
  rfr_tensor t;
  make_foreign(&f);
  assert_int_equal(rfr_tensor_from_dlpack(&f.dl, &t), RFR_OK);
  assert_int_equal(t.bytes, 48);
  assert_ptr_equal(t.data, f.data);

  f.dl.tensor.strides = NULL; /* dense by definition */
  f.dl.tensor.byte_offset = 20;
  f.dl.flags = RFI_DL_READ_ONLY;
  assert_int_equal(rfr_tensor_from_dlpack(&f.dl, &t), RFR_OK);
  assert_ptr_equal(t.data, &f.data[5]);
  assert_int_equal(t.role, RFR_ROLE_CONST);

  /* A dimension of size 1 may have any stride. */
  make_foreign(&f);
  f.dl.tensor.rank = 4;
  memcpy(f.shape, (const int64_t[]){1, 3, 1, 4}, 32);
  memcpy(f.strides, (const int64_t[]){-9, 4, 1000, 1}, 32);
  assert_int_equal(rfr_tensor_from_dlpack(&f.dl, &t), RFR_OK);
  assert_int_equal(t.type.rank, 4);
  assert_int_equal(f.deleted, 0);
}

static void test_in_refuses(void **state) {
  (void)state;
  foreign f;
  rfr_tensor t;
  assert_refused(rfr_tensor_from_dlpack(NULL, &t), "NULL");

  make_foreign(&f)->dl.version.major = 2;
  f.dl.tensor.shape = (int64_t *)8; /* an unknown layout: no pointer in it may be dereferenced */
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "version 2.3");
  make_foreign(&f)->dl.version.major = 0;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "version 0.3");

  make_foreign(&f)->dl.tensor.device.type = 10; /* a GPU of another vendor */
  f.dl.tensor.device.id = 5;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "device type 10 (id 5)");

  make_foreign(&f);
  memcpy(f.strides, (const int64_t[]){1, 3}, 16); /* a transpose */
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "shape (3, 4) has strides (1, 3)");
  memcpy(f.strides, (const int64_t[]){8, 1}, 16); /* rows with a gap */
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "strides (8, 1)");
  memcpy(f.strides, (const int64_t[]){0, 1}, 16); /* all rows are one row (stride 0) */
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "strides (0, 1)");
  memcpy(f.strides, (const int64_t[]){4, -1}, 16);
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "strides (4, -1)");

  make_foreign(&f)->dl.tensor.type.lanes = 4;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "4 lanes");
  make_foreign(&f)->dl.tensor.type = (rfi_dl_type){17, 4, 1};
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "type code 17, 4 bits");
  make_foreign(&f)->dl.tensor.type = (rfi_dl_type){5, 64, 1};
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "type code 5, 64 bits");
  make_foreign(&f)->dl.tensor.type = (rfi_dl_type){0, 16, 1};
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "type code 0, 16 bits");

  make_foreign(&f)->dl.tensor.rank = 7;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "7 dimensions");
  make_foreign(&f)->dl.tensor.rank = -1;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "-1 dimensions");
  make_foreign(&f)->dl.tensor.shape = NULL;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "its shape is NULL");
  make_foreign(&f)->shape[1] = -4;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "invalid shape (3, -4)");
  make_foreign(&f)->shape[1] = INT64_MAX / 2;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "invalid shape");
  make_foreign(&f)->shape[0] = 0;
  f.shape[1] = INT64_MAX;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "invalid shape");
  make_foreign(&f)->dl.tensor.data = NULL;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "data of the DLPack tensor is NULL");
  make_foreign(&f)->dl.tensor.byte_offset = 2;
  assert_refused(rfr_tensor_from_dlpack(&f.dl, &t), "aligned to its 4-byte");

  assert_null(t.data);
  assert_int_equal(t.bytes, 0);
  assert_int_equal(f.deleted, 0); /* the caller still owns a refused tensor */
}

/* The struct as another library sees it: plain offsets. */
static void test_abi(void **state) {
  (void)state;
  rfr_ctx *ctx = make_ctx();
  float data[6];
  const rfr_tensor t = make_tensor(RFR_BF16, 2, (const int64_t[]){2, 5}, data);
  DLManagedTensorVersioned *dl;
  assert_int_equal(rfr_tensor_to_dlpack(ctx, &t, NULL, NULL, &dl), RFR_OK);
  const unsigned char *p = (const unsigned char *)dl;
  uint32_t u;
  void *pointer;
  memcpy(&u, p, 4);
  assert_int_equal(u, 1); /* version.major */
  memcpy(&pointer, p + 32, 8);
  assert_ptr_equal(pointer, data);
  memcpy(&u, p + 40, 4);
  assert_int_equal(u, 1); /* device_type: CPU */
  memcpy(&u, p + 48, 4);
  assert_int_equal(u, 2);     /* ndim */
  assert_int_equal(p[52], 4); /* dtype.code: bfloat */
  assert_int_equal(p[53], 16);
  memcpy(&pointer, p + 56, 8);
  assert_int_equal(((int64_t *)pointer)[1], 5); /* shape */
  memcpy(&pointer, p + 64, 8);
  assert_int_equal(((int64_t *)pointer)[0], 5); /* strides */
  dl->deleter(dl);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_out_and_in), cmocka_unit_test(test_devices),     cmocka_unit_test(test_out_owns_its_shape),
      cmocka_unit_test(test_empty),      cmocka_unit_test(test_out_refuses), cmocka_unit_test(test_in_takes),
      cmocka_unit_test(test_in_refuses), cmocka_unit_test(test_abi),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
