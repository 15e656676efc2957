/* SPDX-License-Identifier: Apache-2.0
 *
 * Delayed scaling over ranks: after each step all ranks must have the same history and scales. These must be bitwise
 * equal to those of a single rank whose step has the ranks' batches as microbatches, even if the amax of one rank is
 * infinite.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "refrain/ops.h"
#include "refrain/recipe.h"
#include "support/context.h"
#include "support/ranks.h"
#include "trace/trace.h"

enum { M = 32, K = 32, N = 48, STEPS = 3, INFINITE_STEP = 1, MOST_RANKS = 4, HISTORY = 4, SLOTS = 6 };

typedef struct rank {
  int ranks, microbatches;
  float history[STEPS][HISTORY * SLOTS], scale[STEPS][SLOTS];
} rank;

/* Two linears; the gradients are summed over the ranks. */
static rfr_trace *record(rfr_ctx *own, const rank *r) {
  rfr_trace *t;
  rfr_recipe recipe = rfr_recipe_default(RFR_RECIPE_FP8_DELAYED);
  recipe.history = HISTORY;
  if (rfr_trace_create(own, &t) != RFR_OK) return NULL;
  const rfr_value w[] = {rfr_input(t, "w0", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){N, K})),
                         rfr_input(t, "w1", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){K, N}))};
  rfr_value loss = RFR_NONE;
  rfr_recipe_begin(t, &recipe);
  for (int m = 0; m < r->microbatches; m++) {
    char name[8];
    snprintf(name, sizeof name, "x%d", m);
    rfr_microbatch(t, m);
    const rfr_value x = rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){M, K}));
    const rfr_value y = rfr_linear(t, rfr_linear(t, x, w[0], RFR_NONE), w[1], RFR_NONE);
    const rfr_value one = rfr_sum(t, rfr_mul(t, y, y), -1);
    rfr_microbatch(t, -1);
    loss = m ? rfr_add(t, loss, one) : one;
  }
  rfr_recipe_end(t);
  rfr_output(t, "d_w0", rfr_all_reduce(t, rfr_gradient(t, loss, w[0], RFR_F32), r->ranks));
  rfr_output(t, "d_w1", rfr_all_reduce(t, rfr_gradient(t, loss, w[1], RFR_F32), r->ranks));
  return t;
}

static void start(rfr_programs *p) {
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    float *data = x.data;
    if (x.name[0] == 'w') rft_fill(&x, (uint64_t)x.name[1]);
    else if (strcmp(x.name, RFR_RECIPE_HISTORY) == 0) memset(data, 0, (size_t)x.bytes);
    else if (strcmp(x.name, RFR_RECIPE_SCALE) == 0)
      for (int64_t k = 0; k < rfi_count(&x.type); k++) data[k] = 1;
  }
}

/* Batch b of a step; each batch has a different magnitude. */
static void fill_batch(const rfr_tensor *x, int step, int batch) {
  float *data = x->data;
  rft_fill(x, (uint64_t)(100 + MOST_RANKS * step + batch));
  for (int64_t i = 0; i < rfi_count(&x->type); i++) data[i] *= 1.0f + (float)((step + 2 * batch) % MOST_RANKS);
  if (step == INFINITE_STEP && batch == 0) data[5] = INFINITY;
}

static rfr_status take(rfr_programs *p, const char *name, float *to, size_t bytes) {
  rfr_tensor x;
  const rfr_status s = rfr_programs_tensor(p, name, &x);
  if (s == RFR_OK && (size_t)x.bytes != bytes) return RFR_INVALID;
  if (s == RFR_OK) memcpy(to, x.data, bytes);
  return s;
}

static rfr_status train(void *rank_of_test, int number, rfr_comm *comm, rfr_ctx *own) {
  rank *r = rank_of_test;
  rfr_programs *p = NULL;
  rfr_tensor x;
  rfr_compile_options o = rfr_compile_options_default();
  o.comm = comm;
  rfr_trace *t = record(own, r);
  rfr_status s = t ? rfr_compile(own, 1, (const rfr_trace *const *)&t, NULL, &o, &p) : RFR_NO_MEMORY;
  rfr_trace_destroy(t);
  if (s == RFR_OK) s = rfr_program_capture(p, 0);
  if (s == RFR_OK) start(p);
  for (int step = 0; step < STEPS && s == RFR_OK; step++) {
    for (int m = 0; m < r->microbatches && s == RFR_OK; m++) {
      char name[8];
      snprintf(name, sizeof name, "x%d", m);
      s = rfr_programs_tensor(p, name, &x);
      if (s == RFR_OK) fill_batch(&x, step, number + m);
    }
    if (s == RFR_OK) s = rfr_program_replay(p, 0, NULL, 0);
    if (s == RFR_OK) s = take(p, RFR_RECIPE_HISTORY, r->history[step], sizeof r->history[step]);
    if (s == RFR_OK) s = take(p, RFR_RECIPE_SCALE, r->scale[step], sizeof r->scale[step]);
  }
  rfr_programs_destroy(p);
  return s;
}

static void ranks_as_microbatches(void **state) {
  (void)state;
  for (int ranks = 2; ranks <= MOST_RANKS; ranks += 2) {
    static rank one, many[MOST_RANKS];
    one = (rank){.ranks = 1, .microbatches = ranks};
    rft_run_ranks(1, &one, sizeof one, train);
    assert_memory_not_equal(one.scale[0], one.scale[STEPS - 1], sizeof one.scale[0]);
    for (int i = 0; i < ranks; i++) many[i] = (rank){.ranks = ranks, .microbatches = 1};
    rft_run_ranks(ranks, many, sizeof *many, train);
    for (int i = 0; i < ranks; i++) {
      assert_memory_equal(one.history, many[i].history, sizeof one.history);
      assert_memory_equal(one.scale, many[i].scale, sizeof one.scale);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(ranks_as_microbatches)};
  return cmocka_run_group_tests_name("recipe_ranks", tests, NULL, NULL);
}
