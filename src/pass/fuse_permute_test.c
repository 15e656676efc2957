/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantize before permute: with the pass and without it, a layer of experts has bitwise the same results and scales,
 * with recompute and without. The pass applies only with one given scale for all groups, and only to rows in the order
 * of moe_route's choices. With --device cuda on a GPU.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "support/context.h"
#include "support/device.h"
#include "support/random.h"
#include "support/rewrite.h"

enum { T = 50, I = 144, EXPERTS = 5, K = 2 };

typedef struct cell {
  rfr_recipe_kind recipe;
  rfr_dtype type;
  int64_t width;
  bool norm, weighted, shown; /* shown: the sorted rows are also an output */
  rfr_recompute recompute;
} cell;

static rfr_value parameter(rfr_trace *t, const cell *c, const char *name, int rank, const int64_t *shape,
                           rfr_value *wide) {
  *wide = rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_F32, rank, shape);
  return rfr_cast(t, *wide, c->type);
}

static rfr_trace *record(const cell *c) {
  static const char *const names[] = {"x", "norm", "up", "down"};
  rfr_recipe recipe = rfr_recipe_default(c->recipe);
  rfr_moe_options o = rfr_moe_options_default();
  const int64_t C = c->width;
  rfr_value wide[4], index, order, place;
  rfr_trace *t;
  o.k = K;
  OK(rfr_trace_create(ctx, &t));
  rfr_step_block(t);
  rfr_value x = parameter(t, c, names[0], 2, (int64_t[]){T, C}, &wide[0]);
  const rfr_value scale = parameter(t, c, names[1], 1, (int64_t[]){C}, &wide[1]);
  const rfr_value up = parameter(t, c, names[2], 3, (int64_t[]){EXPERTS, I, C}, &wide[2]);
  const rfr_value down = parameter(t, c, names[3], 3, (int64_t[]){EXPERTS, C, I}, &wide[3]);
  const rfr_value logits = rfr_input(t, "logits", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, EXPERTS}));
  const rfr_value r = rfr_input(t, "r", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  if (c->norm) x = rfr_rmsnorm(t, x, scale, 1e-5);
  const rfr_value weight = rfr_moe_route(t, logits, RFR_NONE, &o, &index);
  const rfr_value splits = rfr_moe_sort(t, index, EXPERTS, &order, &place);
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, T * K, NULL);
  const rfr_value rows = rfr_moe_permute(t, x, order, place, c->weighted ? weight : RFR_NONE);
  if (c->shown) rfr_output(t, "rows", rows);
  rfr_recipe_begin(t, &recipe);
  rfr_value y = rfr_grouped_linear(t, rows, up, offsets, RFR_NONE, RFR_NONE);
  y = rfr_grouped_linear(t, rfr_silu(t, y), down, offsets, RFR_NONE, RFR_NONE);
  rfr_recipe_end(t);
  y = rfr_moe_unpermute(t, y, order, place, RFR_NONE);
  const rfr_value loss = rfr_sum(t, rfr_mul(t, rfr_cast(t, y, RFR_F32), r), -1);
  rfr_output(t, "loss", loss);
  for (int i = 0; i < 4; i++)
    if (i != 1 || c->norm) rfr_output(t, names[i], rfr_gradient(t, loss, wide[i], RFR_F32));
  OK(rfr_trace_finish(t));
  return t;
}

static void fill(rfr_programs *p, const rfr_tensor *x, uint64_t seed) {
  const int64_t n = rfi_count(&x->type);
  float *values = calloc((size_t)x->bytes + 1, 1);
  assert_non_null(values);
  const bool scale = strcmp(x->name, RFR_RECIPE_SCALE) == 0, zero = strcmp(x->name, RFR_RECIPE_HISTORY) == 0;
  for (int64_t k = 0; x->type.dtype == RFR_F32 && !zero && k < n; k++)
    values[k] = scale ? 1 + (float)k : (float)rft_uniform(&seed);
  OK(rfr_programs_write(p, x, values));
  free(values);
}

static rfr_programs *run(const cell *c, const rfr_trace *t, bool fuse) {
  rfr_compile_options o = rfr_compile_options_default();
  rfr_tensor x;
  o.fuse = fuse, o.recompute = c->recompute;
  rfr_programs *p = rft_compile(t, &o);
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) fill(p, &x, (uint64_t)i);
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  OK(rfr_programs_wait(p));
  return p;
}

/* The bytes of an output or a state; NULL: there is none. */
static void *bytes_of(rfr_programs *p, const char *what, int64_t *n) {
  rfr_tensor x;
  if (rfr_program_output(p, 0, what, &x) != RFR_OK && rfr_programs_tensor(p, what, &x) != RFR_OK) return NULL;
  void *bytes = malloc((size_t)x.bytes + 1);
  assert_non_null(bytes);
  OK(rfr_programs_read(p, &x, bytes));
  *n = x.bytes;
  return bytes;
}

static void same(rfr_programs *p, rfr_programs *q, const char *what) {
  int64_t n = 0, m = 0;
  void *a = bytes_of(p, what, &n), *b = bytes_of(q, what, &m);
  assert_int_equal(n, m);
  if (a && memcmp(a, b, (size_t)n) != 0) fail_msg("%s has other bits", what);
  free(a), free(b);
}

static void check(const cell *c) {
  static const char *const results[] = {"loss",          "x", "norm", "up", "down", "rows", RFR_RECIPE_HISTORY,
                                        RFR_RECIPE_SCALE};
  rfr_trace *t = record(c);
  rfr_programs *p = run(c, t, true), *q = run(c, t, false);
  const bool given = c->recipe == RFR_RECIPE_FP8_DELAYED, first = given && !c->weighted && !c->shown;
  const int again = c->recompute == RFR_RECOMPUTE_ALL;
  assert_int_equal(rft_count_lowered(q, RFI_OP_permute_codes), 0);
  /* quantizes rows of dy and of x; recompute that keeps the rows quantizes both twice */
  assert_in_range(rft_count_lowered(p, RFI_OP_permute_codes), given + first * !again, given + first * (1 + again));
  if (first && c->norm && !again) assert_int_equal(rft_count_lowered(p, RFI_OP_rmsnorm_quantize), 1);
  for (size_t i = 0; i < sizeof results / sizeof *results; i++) same(p, q, results[i]);
  rfr_programs_destroy(p);
  rfr_programs_destroy(q);
  rfr_trace_destroy(t);
}

static void bits(void **state) {
  (void)state;
  static const rfr_recipe_kind recipes[] = {RFR_RECIPE_FP8_DELAYED, RFR_RECIPE_FP8_CURRENT, RFR_RECIPE_FP8_BLOCK};
  for (size_t r = 0; r < sizeof recipes / sizeof *recipes; r++)
    for (int k = 0; k < 32; k++)
      check(&(cell){.recipe = recipes[r],
                    .type = k % 2 ? RFR_BF16 : RFR_F32,
                    .width = k / 2 % 2 == k / 8 % 2 ? 128 : 48,
                    .norm = k / 2 % 2,
                    .weighted = k / 4 % 2,
                    .shown = k / 8 % 2,
                    .recompute = k / 16 ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP});
}

int main(int argc, char **argv) {
  if (!rft_device_named(&argc, argv)) return 77;
  const struct CMUnitTest tests[] = {rft_context_test(bits)};
  return cmocka_run_group_tests_name("fuse_permute", tests, NULL, NULL);
}
