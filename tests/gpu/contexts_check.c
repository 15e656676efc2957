/* SPDX-License-Identifier: Apache-2.0
 *
 * Contexts do not influence each other, on one device or on two: two runs at once, in separate threads, each with a
 * context on the given device, must have bitwise the losses and weights of a run alone.
 *
 *   contexts_check DEVICE DEVICE    with the repository's root as the working folder
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refrain/ctx.h"
#include "refrain/program.h"
#include "refrain/train.h"

enum { STEPS = 30 };

static const char config[] =
    "refrain: 1\n"
    "model: {model_type: llama, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 2,\n"
    "        num_attention_heads: 4}\n"
    "data: {train: [\"src/base/*.c\"], sequence: 128}\n"
    "batch: {tokens: 1024, microbatch: 4}\n"
    "optimizer: {lr: 1e-3, clip: 1}\n"
    "precision: {dtype: bf16}\n"
    "run: {steps: 30, log_every: 1}\n";

typedef struct training {
  const char *device;
  double loss[STEPS];
  int n;
  uint64_t weights; /* a hash of all weights */
  bool failed;
} training;

static void on_event(const rfr_event *e, void *user) {
  training *t = user;
  if (e->kind == RFR_EVENT_METRICS && t->n < STEPS) t->loss[t->n++] = e->loss;
}

static rfr_status hash_weights(rfr_programs *p, uint64_t *hash) {
  rfr_tensor x;
  rfr_status s = RFR_OK;
  *hash = 0xcbf29ce484222325u;
  for (int i = 0; s == RFR_OK && rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    if (x.role != RFR_ROLE_TRAINABLE) continue;
    unsigned char *host = malloc((size_t)x.bytes);
    if (!host) return RFR_NO_MEMORY;
    s = rfr_programs_read(p, &x, host);
    for (int64_t k = 0; k < x.bytes; k++) *hash = (*hash ^ host[k]) * 0x100000001b3u;
    free(host);
  }
  return s;
}

static void *train(void *user) {
  training *t = user;
  rfr_ctx *ctx = NULL;
  rfr_run *run = NULL;
  rfr_ctx_options c = rfr_ctx_options_default();
  rfr_run_options o = rfr_run_options_default();
  c.device = t->device;
  c.threads = 1;
  o.config_folder = ".";
  o.programs = RFR_RUN_TRAIN;
  o.on_event = on_event;
  o.event_user = t;
  rfr_status s = rfr_ctx_create(&c, &ctx);
  if (s == RFR_OK) s = rfr_run_open(ctx, config, NULL, &o, &run);
  for (int i = 0; i < STEPS && s == RFR_OK; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = hash_weights(rfr_run_programs(run), &t->weights);
  if (s != RFR_OK) fprintf(stderr, "error: %s: %s\n", t->device, rfr_last_error()->message);
  t->failed = s != RFR_OK;
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
  return NULL;
}

static int compare(const training *a, const training *b) {
  const bool same = a->n > 0 && a->n == b->n && a->weights == b->weights &&
                    memcmp(a->loss, b->loss, (size_t)a->n * sizeof a->loss[0]) == 0;
  printf("%-10s loss %.9g after %d steps, weights %016llx: %s\n", b->device, b->n ? b->loss[b->n - 1] : 0.0, b->n,
         (unsigned long long)b->weights, same ? "as alone" : "FAILED, other bits than alone");
  return !same;
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: contexts_check DEVICE DEVICE\n");
    return 2;
  }
  training alone = {.device = argv[1]}, both[2] = {{.device = argv[1]}, {.device = argv[2]}};
  pthread_t thread[2];
  train(&alone);
  for (int i = 0; i < 2; i++)
    if (pthread_create(&thread[i], NULL, train, &both[i]) != 0) return 3;
  for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
  if (alone.failed || both[0].failed || both[1].failed) return 1;
  return compare(&alone, &both[0]) + compare(&alone, &both[1]) > 0;
}
