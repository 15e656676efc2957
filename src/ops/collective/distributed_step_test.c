/* SPDX-License-Identifier: Apache-2.0
 *
 * A full step over several ranks as one captured program: sharded weights, gathered by ops of the trace, their
 * gradients reduced by the gradient rule of the gather, the shards updated. After ten replays the weights are bitwise
 * those of one rank whose step has the ranks' batches as microbatches.
 */
#include <stdio.h>
#include <string.h>

#include "refrain/ops.h"
#include "support/context.h"
#include "support/ranks.h"

enum { T = 6, C = 5, HIDDEN = 7, LAYERS = 2, N = C * HIDDEN, STEPS = 10, MOST_RANKS = 3 };

static float noise(int seed, int64_t i) {
  const uint32_t z = (uint32_t)seed * 2654435761u + (uint32_t)i * 40503u + 17u;
  return (float)((z ^ z >> 13) * 2246822519u >> 8) / 8388608.0f - 1.0f;
}

static int part_size(int ranks) { return (N + ranks - 1) / ranks; }

static rfr_value weight(rfr_trace *t, int layer, int ranks, rfr_value *part) {
  char name[8];
  snprintf(name, sizeof name, "w%d", layer);
  *part = rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){part_size(ranks)}));
  const rfr_value all = rfr_all_gather(t, *part, ranks);
  const int64_t shape[2] = {layer == 0 ? HIDDEN : C, layer == 0 ? C : HIDDEN};
  return rfr_reshape(t, rfr_slice(t, all, 0, 0, N), 2, shape);
}

/* `ranks` ranks with one microbatch each, or one rank with `microbatches`. */
static rfr_trace *record(rfr_ctx *own, int ranks, int microbatches) {
  rfr_trace *t;
  rfr_value part[LAYERS], w[LAYERS], loss = RFR_NONE;
  if (rfr_trace_create(own, &t) != RFR_OK) return NULL;
  for (int l = 0; l < LAYERS; l++) w[l] = weight(t, l, ranks, &part[l]);
  for (int m = 0; m < microbatches; m++) {
    char name[8];
    snprintf(name, sizeof name, "x%d", m);
    const rfr_value x = rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
    rfr_microbatch(t, m);
    const rfr_value h = rfr_gelu(t, rfr_linear(t, x, w[0], RFR_NONE), 1);
    const rfr_value y = rfr_linear(t, h, w[1], RFR_NONE), e = rfr_add(t, y, rfr_scale(t, x, -1, RFR_NONE));
    const rfr_value one = rfr_sum(t, rfr_mul(t, e, e), -1);
    loss = loss == RFR_NONE ? one : rfr_add(t, loss, one);
  }
  rfr_microbatch(t, -1);
  const rfr_value lr = rfr_fill(t, 0.01, RFR_F32, 1, ((int64_t[]){1}));
  rfr_value g[LAYERS];
  for (int l = 0; l < LAYERS; l++) g[l] = rfr_gradient(t, loss, part[l], RFR_F32);
  for (int l = 0; l < LAYERS; l++) rfr_sgd(t, part[l], g[l], RFR_NONE, RFR_NONE, lr, RFR_NONE, RFR_NONE, 0, 0, 1);
  rfr_output(t, "loss", rfr_all_reduce(t, loss, ranks));
  return t;
}

typedef struct rank {
  int ranks, microbatches;
  float weights[LAYERS][N + MOST_RANKS], loss;
} rank;

static rfr_status train(void *rank_of_test, int number, rfr_comm *comm, rfr_ctx *own) {
  rank *r = rank_of_test;
  rfr_programs *p = NULL;
  rfr_tensor x;
  rfr_compile_options o = rfr_compile_options_default();
  const int n = part_size(r->ranks);
  char name[8];
  o.comm = comm;
  o.fuse = 0;
  rfr_trace *t = record(own, r->ranks, r->microbatches);
  rfr_status s = t ? rfr_compile(own, 1, (const rfr_trace *const *)&t, NULL, &o, &p) : RFR_NO_MEMORY;
  rfr_trace_destroy(t);
  if (s == RFR_OK) s = rfr_program_capture(p, 0);
  for (int l = 0; l < LAYERS && s == RFR_OK; l++) {
    snprintf(name, sizeof name, "w%d", l);
    s = rfr_programs_tensor(p, name, &x);
    for (int i = 0; i < n && s == RFR_OK; i++)
      ((float *)x.data)[i] = number * n + i < N ? 0.5f * noise(50 + l, number * n + i) : 0;
  }
  for (int step = 0; step < STEPS && s == RFR_OK; step++) {
    for (int m = 0; m < r->microbatches && s == RFR_OK; m++) {
      snprintf(name, sizeof name, "x%d", m);
      s = rfr_programs_tensor(p, name, &x);
      for (int i = 0; i < T * C && s == RFR_OK; i++) ((float *)x.data)[i] = noise(10 * step + number + m, i);
    }
    if (s == RFR_OK) s = rfr_program_replay(p, 0, NULL, 0);
  }
  for (int l = 0; l < LAYERS && s == RFR_OK; l++) {
    snprintf(name, sizeof name, "w%d", l);
    s = rfr_programs_tensor(p, name, &x);
    if (s == RFR_OK && comm) s = rfr_comm_all_gather(comm, x.data, r->weights[l], n, RFR_F32);
    else if (s == RFR_OK) memcpy(r->weights[l], x.data, (size_t)x.bytes);
  }
  if (s == RFR_OK) s = rfr_program_output(p, 0, "loss", &x);
  if (s == RFR_OK) r->loss = *(float *)x.data;
  rfr_programs_destroy(p);
  return s;
}

static void test_distributed_step(void **state) {
  (void)state;
  for (int ranks = 2; ranks <= MOST_RANKS; ranks++) {
    static rank one, many[MOST_RANKS];
    one = (rank){.ranks = 1, .microbatches = ranks};
    rft_run_ranks(1, &one, sizeof one, train);
    for (int i = 0; i < ranks; i++) many[i] = (rank){.ranks = ranks, .microbatches = 1};
    rft_run_ranks(ranks, many, sizeof *many, train);
    for (int i = 0; i < ranks; i++) {
      for (int l = 0; l < LAYERS; l++)
        assert_memory_equal(one.weights[l], many[i].weights[l], sizeof(float) * (size_t)N);
      assert_memory_equal(&one.loss, &many[i].loss, sizeof one.loss);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_distributed_step)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
