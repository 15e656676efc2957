/* SPDX-License-Identifier: Apache-2.0
 *
 * Trains a small Llama and writes the data that another framework needs to do the same: the initial weights, every
 * step's tokens, targets and offsets as the device read them from its ring, and the losses. bench/peers/parity.py
 * compares.
 *
 *   parity_run DEVICE DTYPE STEPS FOLDER    with the repository's root as the working folder
 *
 * FOLDER gets NAME.f32 for each weight (its master if it is narrower), tokens.i32, targets.i32 and offsets.i32 (a row
 * per step), losses.f64.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "refrain/ctx.h"
#include "refrain/program.h"
#include "refrain/train.h"

static void die(const char *what) {
  fprintf(stderr, "error: %s: %s\n", what, rfr_last_error()->message);
  exit(1);
}
#define OR_DIE(call)                  \
  do {                                \
    if ((call) != RFR_OK) die(#call); \
  } while (0)

static FILE *create(const char *folder, const char *name, const char *suffix) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s%s", folder, name, suffix);
  FILE *f = fopen(path, "wb");
  if (!f) {
    fprintf(stderr, "error: %s cannot be written\n", path);
    exit(4);
  }
  return f;
}

static void write_weight(rfr_programs *p, const rfr_tensor *w, const char *folder) {
  char master[160];
  rfr_tensor x = *w;
  snprintf(master, sizeof master, "%s.master", w->name);
  if (w->type.dtype != RFR_F32) OR_DIE(rfr_programs_tensor(p, master, &x));
  void *host = malloc((size_t)x.bytes);
  if (!host) exit(3);
  OR_DIE(rfr_programs_read(p, &x, host));
  FILE *f = create(folder, w->name, ".f32");
  fwrite(host, 1, (size_t)x.bytes, f);
  fclose(f);
  free(host);
}

/* Writes this step's entry of a ring: the host may read it until it is refilled for a later step. */
static void write_slot(rfr_programs *p, const char *name, int64_t step, FILE *f) {
  rfr_tensor ring;
  OR_DIE(rfr_programs_tensor(p, name, &ring));
  const size_t bytes = (size_t)(ring.bytes / ring.type.shape[0]);
  fwrite((const char *)ring.data + (size_t)(step % ring.type.shape[0]) * bytes, 1, bytes, f);
}

static void on_event(const rfr_event *e, void *losses) {
  if (e->kind == RFR_EVENT_METRICS) fwrite(&e->loss, sizeof e->loss, 1, losses);
}

int main(int argc, char **argv) {
  static const char *const rings[] = {"tokens", "targets", "offsets"};
  char config[600];
  rfr_ctx *ctx;
  rfr_run *run;
  rfr_tensor x;
  if (argc != 5) {
    fprintf(stderr, "usage: parity_run DEVICE DTYPE STEPS FOLDER\n");
    return 2;
  }
  const char *folder = argv[4];
  const int64_t steps = strtoll(argv[3], NULL, 10);
  mkdir(folder, 0777);
  snprintf(config, sizeof config,
           "refrain: 1\n"
           "model: {model_type: llama, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 2,\n"
           "        num_attention_heads: 4, num_key_value_heads: 2, rope_theta: 10000, tie_word_embeddings: false}\n"
           "data: {train: [\"src/base/*.c\"], sequence: 128}\n"
           "batch: {tokens: 1024, microbatch: 8}\n"
           "optimizer: {lr: 1e-3, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1}\n"
           "schedule: {name: constant}\n"
           "precision: {dtype: %s}\n"
           "run: {steps: %lld, seed: 1}\n",
           argv[2], (long long)steps);
  rfr_ctx_options c = rfr_ctx_options_default();
  c.device = argv[1];
  OR_DIE(rfr_ctx_create(&c, &ctx));
  rfr_run_options o = rfr_run_options_default();
  FILE *losses = create(folder, "losses", ".f64"), *slots[3];
  o.config_folder = ".";
  o.programs = RFR_RUN_TRAIN;
  o.on_event = on_event;
  o.event_user = losses;
  OR_DIE(rfr_run_open(ctx, config, NULL, &o, &run));
  rfr_programs *p = rfr_run_programs(run);
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    if (x.role == RFR_ROLE_TRAINABLE) write_weight(p, &x, folder);
  for (int i = 0; i < 3; i++) slots[i] = create(folder, rings[i], ".i32");
  for (int64_t step = 0; step < steps; step++) {
    OR_DIE(rfr_run_step(run));
    for (int i = 0; i < 3; i++) write_slot(p, rings[i], step, slots[i]);
  }
  for (int i = 0; i < 3; i++) fclose(slots[i]);
  fclose(losses);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
  return 0;
}
