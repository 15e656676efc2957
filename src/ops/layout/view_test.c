/* SPDX-License-Identifier: Apache-2.0
 *
 * Views against their definition: random chains of reshape, transpose, slice and expand of a base whose elements are
 * numbered. The view's strides and offset are compared element by element with the ops. Then reshapes that strides
 * cannot express, refusals of the shape rules, and the broadcast of add.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "support/random.h"
#include "trace/trace.h"

enum { MOST = 4096 };

typedef struct shown {
  rfr_type type;
  int n;
  int64_t id[MOST]; /* indices of elements of the base, in the order of the dense value */
} shown;

static rfr_trace *t;
static rfr_ctx *ctx;
static uint64_t state;

static int draw(int n) { return (int)rft_below(&state, (uint32_t)n); }

static int setup(void **unused) {
  (void)unused;
  return rfr_ctx_create(NULL, &ctx) != RFR_OK || rfr_trace_create(ctx, &t) != RFR_OK;
}
static int teardown(void **unused) {
  (void)unused;
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
  return 0;
}

/* ---- expected values ---- */

static void index_of(const rfr_type *type, int64_t i, int64_t *index) {
  for (int d = type->rank - 1; d >= 0; d--) {
    index[d] = i % type->shape[d];
    i /= type->shape[d];
  }
}
static int64_t flat(const rfr_type *type, const int64_t *index) {
  int64_t i = 0;
  for (int d = 0; d < type->rank; d++) i = i * type->shape[d] + index[d];
  return i;
}

/* Replaces v by a value of type `to`: its element at index i is the element of v at map(i). */
static void remap(shown *v, const rfr_type *to, void (*map)(int64_t *index, const int64_t *args), const int64_t *args) {
  shown *old = malloc(sizeof *old);
  assert_non_null(old);
  *old = *v;
  v->type = *to;
  v->n = (int)rfi_count(to);
  for (int i = 0; i < v->n; i++) {
    int64_t index[RFR_MAX_RANK];
    index_of(to, i, index);
    map(index, args);
    v->id[i] = old->id[flat(&old->type, index)];
  }
  free(old);
}
static void swap(int64_t *index, const int64_t *args) {
  int64_t x = index[args[0]];
  index[args[0]] = index[args[1]];
  index[args[1]] = x;
}
static void shift(int64_t *index, const int64_t *args) { index[args[0]] += args[1]; }
static void repeat(int64_t *index, const int64_t *args) { index[args[0]] = 0; }

static void assert_shows(const shown *want, rfr_value v) {
  const rfi_value *x = &t->values[v];
  assert_int_equal(t->status, RFR_OK);
  assert_memory_equal(&x->type, &want->type, sizeof x->type);
  for (int i = 0; i < want->n; i++) {
    int64_t index[RFR_MAX_RANK], at = x->offset;
    index_of(&x->type, i, index);
    for (int d = 0; d < x->type.rank; d++) at += index[d] * x->stride[d];
    assert_int_equal(at, want->id[i]);
  }
}

/* A random factorization of n into at most RFR_MAX_RANK dimensions. */
static int factors(int64_t n, int64_t *dim) {
  int rank = 0;
  while (n > 1 && rank < RFR_MAX_RANK - 1) {
    int64_t f = 1 + draw((int)n);
    if (n % f || (f == 1 && draw(4))) continue;
    dim[rank++] = f;
    n /= f;
  }
  dim[rank++] = n;
  return rank;
}

static rfr_value reshape_step(rfr_value v, shown *s) {
  int64_t dim[RFR_MAX_RANK];
  int rank = factors(s->n, dim);
  rfr_value base = t->values[v].base;
  v = rfr_reshape(t, v, rank, dim);
  assert_int_equal(t->status, RFR_OK);
  s->type.rank = rank;
  memset(s->type.shape, 0, sizeof s->type.shape);
  memcpy(s->type.shape, dim, sizeof *dim * (size_t)rank);
  if (t->values[v].base != base) /* a copy was necessary, so indices now refer to the copy */
    for (int i = 0; i < s->n; i++) s->id[i] = i;
  return v;
}

static rfr_value step(rfr_value v, shown *s) {
  rfr_type to = s->type;
  int64_t a = draw(to.rank), b = draw(to.rank), args[2] = {a, b};
  switch (draw(4)) {
    case 0: return reshape_step(v, s);
    case 1:
      to.shape[a] = s->type.shape[b];
      to.shape[b] = s->type.shape[a];
      remap(s, &to, swap, args);
      return rfr_transpose(t, v, (int)a, (int)b);
    case 2:
      args[1] = draw((int)to.shape[a]);
      to.shape[a] = 1 + draw((int)(to.shape[a] - args[1]));
      remap(s, &to, shift, args);
      return rfr_slice(t, v, (int)a, args[1], to.shape[a]);
    default:
      if (to.shape[a] != 1 || s->n > MOST / 8) return v;
      to.shape[a] = 1 + draw(3);
      remap(s, &to, repeat, args);
      return rfr_expand(t, v, (int)a, to.shape[a]);
  }
}

static void test_chains(void **unused) {
  (void)unused;
  static shown s;
  for (int chain = 0; chain < 400; chain++) {
    char name[16] = {'x', (char)('a' + chain / 26 % 26), (char)('a' + chain % 26), 0};
    int64_t shape[3] = {1 + draw(5), 1 + draw(6), 1 + draw(4)};
    state = (uint32_t)chain * 2654435761u + 1;
    rfr_value v = rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 3, shape);
    s.type = rfr_value_type(t, v);
    s.n = (int)rfi_count(&s.type);
    for (int i = 0; i < s.n; i++) s.id[i] = i;
    for (int i = 0; i < 8; i++) {
      v = step(v, &s);
      assert_shows(&s, v);
    }
  }
  assert_int_equal(rfr_trace_verify(t), RFR_OK);
}

/* ---- particular reshapes ---- */

static rfr_value input(int rank, const int64_t *shape) {
  static int n;
  char name[16] = {'p', (char)('0' + n / 10), (char)('0' + n % 10), 0};
  n++;
  return rfr_input(t, name, RFR_ROLE_INPUT, RFR_BF16, rank, shape);
}
static int64_t base_of(rfr_value v) { return t->values[v].base; }

static void test_reshape(void **unused) {
  (void)unused;
  rfr_value x = input(2, (int64_t[]){6, 10}), y = rfr_transpose(t, x, 0, 1);
  assert_int_equal(base_of(rfr_reshape(t, x, 1, (int64_t[]){60})), x);
  assert_int_equal(base_of(rfr_reshape(t, y, 3, (int64_t[]){5, 2, 6})), x); /* splits a dimension */
  /* merges dimensions that are not contiguous */
  assert_int_not_equal(base_of(rfr_reshape(t, y, 1, (int64_t[]){60})), x);
  assert_int_not_equal(base_of(rfr_reshape(t, rfr_slice(t, x, 1, 0, 5), 1, (int64_t[]){30})), x);
  assert_int_equal(base_of(rfr_reshape(t, rfr_slice(t, x, 0, 2, 3), 1, (int64_t[]){30})), x);
  rfr_value e = rfr_expand(t, rfr_reshape(t, input(1, (int64_t[]){7}), 2, (int64_t[]){1, 7}), 0, 12);
  rfr_value f = rfr_reshape(t, e, 3, (int64_t[]){3, 4, 7}); /* dimensions of stride 0 keep stride 0 */
  assert_int_equal(base_of(f), base_of(e));
  assert_int_equal(t->values[f].stride[0], 0);
  assert_int_equal(t->values[f].stride[1], 0);
  rfr_value empty = rfr_reshape(t, rfr_transpose(t, input(2, (int64_t[]){0, 5}), 0, 1), 3, (int64_t[]){3, 0, 2});
  assert_int_equal(rfr_value_type(t, empty).rank, 3);
  assert_int_equal(t->status, RFR_OK);
}

static void test_broadcast(void **unused) {
  (void)unused;
  rfr_value a = input(3, (int64_t[]){2, 3, 5}), v = input(1, (int64_t[]){5}), one = input(1, (int64_t[]){1});
  rfr_value sums[2] = {rfr_add(t, a, v), rfr_mul(t, a, one)};
  for (int i = 0; i < 2; i++) {
    assert_int_equal(t->status, RFR_OK);
    const rfi_opr *op = &t->ops[t->values[sums[i]].op];
    const rfi_value *b = &t->values[op->in[1]];
    assert_int_equal(b->base, i ? one : v);
    assert_int_equal(b->stride[0], 0);
    assert_int_equal(b->stride[1], 0);
    assert_int_equal(b->stride[2], i ? 0 : 1);
  }
}

/* ---- refusals ---- */

typedef rfr_value (*wrong_call)(rfr_trace *fresh, rfr_value x);
static rfr_value wrong_count(rfr_trace *f, rfr_value x) { return rfr_reshape(f, x, 2, (int64_t[]){3, 9}); }
static rfr_value wrong_overflow(rfr_trace *f, rfr_value x) {
  return rfr_reshape(f, x, 3, (int64_t[]){INT64_MAX / 2, 4, 4});
}
static rfr_value wrong_rank(rfr_trace *f, rfr_value x) {
  return rfr_reshape(f, x, 7, (int64_t[]){1, 1, 1, 1, 1, 4, 6});
}
static rfr_value wrong_axis(rfr_trace *f, rfr_value x) { return rfr_transpose(f, x, 0, 2); }
static rfr_value wrong_slice(rfr_trace *f, rfr_value x) { return rfr_slice(f, x, 1, 4, 3); }
static rfr_value wrong_start(rfr_trace *f, rfr_value x) { return rfr_slice(f, x, 1, -1, 2); }
static rfr_value wrong_expand(rfr_trace *f, rfr_value x) { return rfr_expand(f, x, 0, 8); }
static rfr_value wrong_add(rfr_trace *f, rfr_value x) { return rfr_add(f, x, rfr_cast(f, x, RFR_F32)); }
static rfr_value wrong_join(rfr_trace *f, rfr_value x) {
  return rfr_concat(f, 2, ((rfr_value[]){x, rfr_slice(f, x, 1, 0, 2)}), 0);
}

static void test_refusals(void **unused) {
  (void)unused;
  const wrong_call calls[] = {wrong_count, wrong_overflow, wrong_rank, wrong_axis, wrong_slice,
                              wrong_start, wrong_expand,   wrong_add,  wrong_join};
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
    rfr_trace *fresh;
    assert_int_equal(rfr_trace_create(ctx, &fresh), RFR_OK);
    rfr_value x = rfr_input(fresh, "x", RFR_ROLE_INPUT, RFR_BF16, 2, (int64_t[]){4, 6});
    assert_int_equal(calls[i](fresh, x), RFR_NONE);
    assert_int_equal(rfr_trace_status(fresh), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "trace.shape");
    assert_non_null(strstr(rfr_last_error()->message, "view_test.c:"));
    rfr_trace_destroy(fresh);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_chains),
      cmocka_unit_test(test_reshape),
      cmocka_unit_test(test_broadcast),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
