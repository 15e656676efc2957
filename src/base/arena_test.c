/* SPDX-License-Identifier: Apache-2.0
 *
 * The arena: zeroed, aligned, disjoint blocks; failures; no leaks.
 */
#include "base/arena.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "support/random.h"

typedef struct fixture {
  rfr_ctx *ctx;
  rfi_arena *arena;
} fixture;

static int setup(void **state) {
  static fixture f;
  *state = &f;
  return rfr_ctx_create(NULL, &f.ctx) != RFR_OK || rfi_arena_create(f.ctx, &f.arena) != RFR_OK;
}

static int teardown(void **state) {
  fixture *f = *state;
  rfi_arena_destroy(f->arena);
  const int64_t left = rfr_ctx_get_stats(f->ctx).live_blocks;
  rfr_ctx_destroy(f->ctx);
  return left != 0;
}

static void test_blocks(void **state) {
  rfi_arena *arena = ((fixture *)*state)->arena;
  enum { N = 3000 };
  static unsigned char *block[N];
  static size_t size[N];
  uint64_t random = 1;
  for (int i = 0; i < N; i++) {
    size[i] = i % 500 == 499 ? 3000000 + (size_t)i : rft_below(&random, 300); /* some sizes exceed a chunk */
    block[i] = rfi_arena_alloc(arena, size[i]);
    assert_non_null(block[i]);
    assert_int_equal((uintptr_t)block[i] % 16, 0);
    for (size_t k = 0; k < size[i]; k++)
      if (block[i][k] != 0) fail_msg("block %d is not zero at %zu", i, k);
    memset(block[i], i % 255 + 1, size[i]);
  }
  for (int i = 0; i < N; i++)
    for (size_t k = 0; k < size[i]; k++)
      if (block[i][k] != i % 255 + 1) fail_msg("block %d was overwritten at %zu", i, k);
  assert_ptr_not_equal(rfi_arena_alloc(arena, 0), rfi_arena_alloc(arena, 0));
}

static void test_few_calls(void **state) {
  fixture *f = *state;
  const int64_t before = rfr_ctx_get_stats(f->ctx).alloc_calls;
  for (int i = 0; i < 100000; i++) assert_non_null(rfi_arena_alloc(f->arena, 100));
  assert_true(rfr_ctx_get_stats(f->ctx).alloc_calls - before < 30); /* 11 MB in chunks that grow */
}

static void test_strings(void **state) {
  rfi_arena *arena = ((fixture *)*state)->arena;
  char text[] = "layer3.attention";
  char *a = rfi_arena_strdup(arena, text), *b = rfi_arena_strndup(arena, text, 6);
  char *c = rfi_arena_strndup(arena, "ab", 50), *d = rfi_arena_strdup(arena, "");
  text[0] = 'X';
  assert_string_equal(a, "layer3.attention");
  assert_string_equal(b, "layer3");
  assert_string_equal(c, "ab");
  assert_string_equal(d, "");
  assert_string_equal(rfi_arena_printf(arena, "%s/%d", a, 7), "layer3.attention/7");
  char *wide = rfi_arena_printf(arena, "%06000d", 5);
  assert_int_equal(strlen(wide), 6000);
  assert_int_equal(wide[5999], '5');
}

static void test_grow(void **state) {
  fixture *f = *state;
  int64_t *array = NULL;
  int capacity = 0;
  for (int i = 0; i < 5000; i++) {
    const int before = capacity;
    assert_true(rfi_arena_grow(f->arena, (void **)&array, &capacity, i + 1, sizeof *array));
    assert_true(capacity > i);
    if (capacity != before) {
      assert_true(capacity >= 2 * before); /* doubling keeps the work linear */
      for (int k = i; k < capacity; k++) assert_int_equal(array[k], 0);
    }
    array[i] = i * 3;
  }
  for (int i = 0; i < 5000; i++) assert_int_equal(array[i], i * 3);
  int64_t *same = array;
  assert_true(rfi_arena_grow(f->arena, (void **)&array, &capacity, 10, sizeof *array));
  assert_ptr_equal(array, same);

  /* A failure leaves array and capacity unchanged. */
  const int old = capacity;
  rfr_ctx_fail_alloc(f->ctx, 1);
  assert_false(rfi_arena_grow(f->arena, (void **)&array, &capacity, 1 << 20, sizeof *array));
  rfr_ctx_fail_alloc(f->ctx, 0);
  assert_string_equal(rfr_last_error()->slug, "memory.alloc");
  assert_false(rfi_arena_grow(f->arena, (void **)&array, &capacity, INT_MAX, SIZE_MAX / 4));
  assert_string_equal(rfr_last_error()->slug, "overflow");
  assert_ptr_equal(array, same);
  assert_int_equal(capacity, old);
}

static void test_too_large(void **state) {
  rfi_arena *arena = ((fixture *)*state)->arena;
  assert_null(rfi_arena_alloc(arena, SIZE_MAX));
  assert_string_equal(rfr_last_error()->slug, "overflow");
  assert_null(rfi_arena_alloc(arena, SIZE_MAX - 15));
  assert_null(rfi_arena_alloc(arena, SIZE_MAX / 2 - 100));
  assert_non_null(rfi_arena_alloc(arena, 100)); /* still usable */
}

static int use(rfr_ctx *ctx) {
  rfi_arena *arena = (rfi_arena *)1;
  if (rfi_arena_create(ctx, &arena) != RFR_OK) {
    assert_null(arena);
    return 0;
  }
  int *array = NULL, capacity = 0, ok = 1;
  for (int i = 0; ok && i < 100; i++) {
    ok = rfi_arena_alloc(arena, 1000) != NULL && rfi_arena_strdup(arena, "text") != NULL &&
         rfi_arena_printf(arena, "%0800d", i) != NULL &&
         rfi_arena_grow(arena, (void **)&array, &capacity, 50 * i, sizeof *array);
  }
  rfi_arena_destroy(arena);
  return ok;
}

static void test_each_allocation_fails(void **state) {
  rfr_ctx *ctx = ((fixture *)*state)->ctx;
  const rfr_ctx_stats start = rfr_ctx_get_stats(ctx);
  assert_true(use(ctx));
  const int64_t calls = rfr_ctx_get_stats(ctx).alloc_calls - start.alloc_calls;
  assert_true(calls > 4);
  for (int64_t k = 1; k <= calls; k++) {
    rfi_fail(RFI_E_ARGUMENT, "before");
    rfr_ctx_fail_alloc(ctx, k);
    assert_false(use(ctx));
    assert_string_equal(rfr_last_error()->slug, "memory.alloc");
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, start.live_blocks);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_bytes, start.live_bytes);
  }
  rfi_arena_destroy(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_blocks, setup, teardown),
      cmocka_unit_test_setup_teardown(test_few_calls, setup, teardown),
      cmocka_unit_test_setup_teardown(test_strings, setup, teardown),
      cmocka_unit_test_setup_teardown(test_grow, setup, teardown),
      cmocka_unit_test_setup_teardown(test_too_large, setup, teardown),
      cmocka_unit_test_setup_teardown(test_each_allocation_fails, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
