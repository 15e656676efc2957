/* SPDX-License-Identifier: Apache-2.0
 *
 * Pipeline runs in one folder, over ranks that are threads: checkpoints under other layouts, resumed bit by bit;
 * evaluation; several data-parallel ranks.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file.h"
#include "refrain/model.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"
#include "train/parts.h"

enum { MOST_TENSORS = 1024 };

/* Trains up to step `steps` (0: only loads) and records the tensors of the rank. */
typedef struct job {
  const char *config, *folder, *schedule;
  int pipeline, resume, steps;
  struct {
    char name[96];
    rfi_hash hash;
  } tensor[MOST_TENSORS];
  int n, layout_warnings, checkpoints, zero_warnings;
  double loss, norm, evaluation, bits;
  int64_t tokens;
} job;

static void on_event(const rfr_event *e, void *user) {
  job *j = user;
  j->layout_warnings += e->kind == RFR_EVENT_WARNING && strstr(e->message, "another layout") != NULL;
  j->zero_warnings += e->kind == RFR_EVENT_WARNING && strstr(e->message, "exactly zero") != NULL;
  j->checkpoints += e->kind == RFR_EVENT_CHECKPOINT;
  if (e->kind == RFR_EVENT_METRICS) j->loss = e->loss, j->norm = e->grad_norm, j->tokens = e->tokens;
  if (e->kind == RFR_EVENT_EVALUATION) j->evaluation = e->loss, j->bits = e->bits_per_byte;
}

static rfr_status keep(job *j, rfr_run *run) {
  rfr_tensor x;
  j->n = 0;
  for (int i = 0; rfi_run_tensor_at(run, i, &x) == RFR_OK; i++) {
    char *host;
    if (x.role == RFR_ROLE_INPUT || strcmp(x.name, RFI_NAME_METRICS) == 0) continue;
    RFI_TRY(rfi_alloc(run->ctx, (size_t)x.bytes, (void **)&host));
    RFI_TRY(rfr_programs_read(run->programs, &x, host));
    snprintf(j->tensor[j->n].name, sizeof j->tensor->name, "%s", x.name);
    j->tensor[j->n++].hash = rfi_hash_bytes(host, (size_t)x.bytes);
    rfi_free(run->ctx, host);
  }
  return RFR_OK;
}

static rfr_status work(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  char pipeline[64], schedule[64], steps[32];
  const char *const sets[] = {steps, "schedule.name=constant", schedule, pipeline};
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  (void)number;
  snprintf(schedule, sizeof schedule, "parallel.schedule=%s", j->schedule ? j->schedule : "1f1b");
  snprintf(pipeline, sizeof pipeline, "parallel.pipeline=%d", j->pipeline);
  snprintf(steps, sizeof steps, "run.steps=%d", j->steps ? j->steps : 6);
  o.config_folder = rft_run_root;
  o.overrides = sets, o.n_overrides = 4;
  o.on_event = on_event, o.event_user = j;
  o.resume = j->resume;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->config, j->folder, &o, &run);
  if (s == RFR_OK && j->steps) s = rfr_run_train(run);
  if (s == RFR_OK) s = keep(j, run);
  rfr_run_close(run);
  return s;
}

static job all[RFT_MOST_RANKS];

static void run_jobs(int ranks, job j) {
  char folder[200];
  if (j.folder) snprintf(folder, sizeof folder, "%s/%s", rft_run_root, j.folder), j.folder = folder;
  for (int r = 0; r < ranks; r++) all[r] = j;
  rft_run_ranks(ranks, all, sizeof *all, work);
  for (int r = 1; r < ranks; r++) {
    assert_memory_equal(&all[r].loss, &all[0].loss, sizeof all[0].loss);
    assert_memory_equal(&all[r].evaluation, &all[0].evaluation, sizeof all[0].evaluation);
    assert_int_equal(all[r].checkpoints, 0);
  }
}

static int find(const job *one, const char *name) {
  int i = 0;
  while (i < one->n && strcmp(one->tensor[i].name, name) != 0) i++;
  return i;
}

/* All tensors of `one` are on some rank, with equal values. */
static void expect_same(const job *one, int ranks, const char *what) {
  bool seen[MOST_TENSORS] = {false};
  for (int r = 0; r < ranks; r++)
    for (int i = 0; i < all[r].n; i++) {
      const int k = find(one, all[r].tensor[i].name);
      if (k == one->n) fail_msg("%s: rank %d: %s is not of one rank", what, r, all[r].tensor[i].name);
      if (!rfi_hash_equal(one->tensor[k].hash, all[r].tensor[i].hash))
        fail_msg("%s: rank %d: %s differs", what, r, all[r].tensor[i].name);
      seen[k] = true;
    }
  for (int k = 0; k < one->n; k++)
    if (!seen[k]) fail_msg("%s: no rank has %s", what, one->tensor[k].name);
}

#define TIED                                                                                   \
  "model: {model_type: llama, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 8,\n" \
  "        tie_word_embeddings: true, num_attention_heads: 4, num_key_value_heads: 2}\n"
#define UNTIED                                                                                               \
  "model: {model_type: llama, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 8, dropout: 0.1,\n" \
  "        num_attention_heads: 4, num_key_value_heads: 2}\n"
#define BATCH "batch: {tokens: 192, microbatch: 2}\n" /* 6 microbatches */
#define STEPS_RUN "run: {steps: 6, seed: 3, evaluate_windows: 4}\n"

static const struct {
  const char *name, *config;
  double tolerance; /* pipelines compared with one rank */
} rows[] = {
    {"bf16 with master weights", "refrain: 1\n" UNTIED DATA BATCH ADAM "precision: {dtype: bf16}\n" STEPS_RUN, 5e-3},
    {"tied embedding", "refrain: 1\n" TIED DATA BATCH ADAM SINGLE STEPS_RUN, 1e-6},
    {"f16", "refrain: 1\n" UNTIED DATA BATCH ADAM HALF STEPS_RUN, 5e-3},
    {"frozen embedding, SGD",
     "refrain: 1\n" UNTIED DATA BATCH
     "optimizer: {name: sgd, lr: 1e-2, momentum: 0.9, frozen: [\"model.embed_tokens.*\"]}\n" SINGLE STEPS_RUN,
     1e-6},
    {"lora",
     "refrain: 1\n" UNTIED DATA BATCH ADAM "precision: {dtype: bf16}\nadapter: {type: lora, rank: 4}\n" STEPS_RUN,
     5e-3},
    {"dora on a quantized base",
     "refrain: 1\n" UNTIED DATA BATCH ADAM SINGLE "adapter: {type: dora, rank: 4, base: nf4}\n" STEPS_RUN, 1e-6},
    {"8-bit moments, recomputed",
     "refrain: 1\nmodel: {model_type: llama, hidden_size: 72, num_hidden_layers: 4, num_attention_heads: 3}\n" DATA
         BATCH "optimizer: {name: adamw, lr: 3e-3, state_dtype: u8}\nmemory: {recompute: all}\n" SINGLE STEPS_RUN,
     1e-5}, /* the codes of an 8-bit moment change with the rounding of a gradient */
    {"fp8_delayed",
     "refrain: 1\nmodel: {model_type: llama, hidden_size: 48, num_hidden_layers: 4, num_attention_heads: 3}\n" DATA
         BATCH ADAM "precision: {dtype: f32, recipe: fp8_delayed, history: 2}\n" STEPS_RUN,
     2e-2},
};
enum { ROWS = sizeof rows / sizeof *rows };
static const char *const schedules[] = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"};

/* A checkpoint of any layout loads bitwise equal under any other layout. */
static void layouts(void **state) {
  static const struct {
    int ranks, pipeline;
    const char *schedule;
  } layout[] = {{1, 1, NULL}, {2, 2, "zb-v"}, {4, 4, "gpipe"}, {2, 1, NULL}, {4, 2, "interleaved"}};
  enum { LAYOUTS = sizeof layout / sizeof *layout };
  (void)state;
  for (int i = 0; i < ROWS; i++)
    for (int from = 0; from < LAYOUTS; from += i == 1 ? 1 : 4) { /* saved by one rank, and by 2 x 2 */
      char folder[32], what[128];
      snprintf(folder, sizeof folder, "layouts-%d-%d", i, from);
      run_jobs(layout[from].ranks,
               (job){rows[i].config, folder, layout[from].schedule, layout[from].pipeline, .steps = 3});
      assert_int_equal(all[0].checkpoints, 1);
      static job one, saved[RFT_MOST_RANKS];
      memcpy(saved, all, sizeof saved);
      run_jobs(1, (job){rows[i].config, folder, .pipeline = 1, .resume = 1});
      one = all[0];
      assert_int_equal(one.layout_warnings, from != 0);
      memcpy(all, saved, sizeof saved);
      snprintf(what, sizeof what, "%s, saved by layout %d", rows[i].name, from);
      expect_same(&one, layout[from].ranks, what);
      for (int to = 1; to < LAYOUTS; to++) {
        if (RFT_LEFT_OUT(i + from + to, 3)) continue;
        run_jobs(layout[to].ranks,
                 (job){rows[i].config, folder, layout[to].schedule, layout[to].pipeline, .resume = 1});
        snprintf(what, sizeof what, "%s, layout %d to %d", rows[i].name, from, to);
        expect_same(&one, layout[to].ranks, what);
      }
    }
}

/* A pipeline that resumes under the same layout is bitwise equal to an uninterrupted run. */
static void resume(void **state) {
  (void)state;
  for (int i = 0; i < ROWS; i++)
    for (int k = i; k < (i == 0 ? 5 : i + 1); k++) {
      char once[32], twice[32], what[128];
      static job whole[RFT_MOST_RANKS];
      const int ranks = k % 2 ? 4 : 2;
      snprintf(once, sizeof once, "once-%d-%d", i, k);
      snprintf(twice, sizeof twice, "twice-%d-%d", i, k);
      run_jobs(ranks, (job){rows[i].config, once, schedules[k % 5], 2, .steps = 6});
      memcpy(whole, all, sizeof whole);
      run_jobs(ranks, (job){rows[i].config, twice, schedules[k % 5], 2, .steps = 4});
      run_jobs(ranks, (job){rows[i].config, twice, schedules[k % 5], 2, .resume = 1, .steps = 6});
      assert_int_equal(all[0].layout_warnings, 0);
      snprintf(what, sizeof what, "%s, %s", rows[i].name, schedules[k % 5]);
      for (int r = 0; r < ranks; r++)
        for (int x = 0; x < whole[r].n; x++)
          if (!rfi_hash_equal(whole[r].tensor[x].hash, all[r].tensor[x].hash))
            fail_msg("%s: rank %d: %s differs", what, r, whole[r].tensor[x].name);
      assert_true(whole[0].evaluation == all[0].evaluation);
    }
}

static double relative(double a, double b) { return fabs(a / b - 1); }

/* Loss, norm, tokens and evaluation of each schedule equal those of one rank, with and without data-parallel ranks. */
static void values(void **state) {
  static job one;
  (void)state;
  for (int i = 0; i < ROWS; i++) {
    run_jobs(1, (job){rows[i].config, .pipeline = 1, .steps = 6});
    one = all[0];
    assert_true(one.evaluation > 0);
    for (int k = 0; k < 5; k++)
      for (int ranks = 2; ranks <= (k == 1 ? 6 : k == 4 ? 4 : 2); ranks += 2) {
        if (RFT_LEFT_OUT(i + k + ranks / 2, 4)) continue;
        run_jobs(ranks, (job){rows[i].config, NULL, schedules[k], 2, .steps = 6});
        const double d = fmax(fmax(relative(all[0].loss, one.loss), relative(all[0].norm, one.norm)),
                              fmax(relative(all[0].evaluation, one.evaluation), relative(all[0].bits, one.bits)));
        if (!(d <= rows[i].tolerance))
          fail_msg("%s, %s, %d ranks: %g; %g %g %g", rows[i].name, schedules[k], ranks, d,
                   relative(all[0].loss, one.loss), relative(all[0].norm, one.norm),
                   relative(all[0].evaluation, one.evaluation));
        assert_int_equal(all[0].tokens, one.tokens);
      }
  }
}

/* Each rank of the pipeline writes its tensors, for any number of data-parallel ranks; the export has the same
 * header. */
static void files(void **state) {
  char *text[2], from[200], to[200], path[256];
  size_t n[2];
  (void)state;
  run_jobs(4, (job){rows[1].config, "files", "zb-v", 2, .steps = 2});
  assert_true(rft_run_has("files", "step-000002/model-rank-0000-of-0002.safetensors"));
  assert_true(rft_run_has("files", "step-000002/optimizer-rank-0001-of-0002.safetensors"));
  assert_false(rft_run_has("files", "step-000002/model.safetensors"));
  run_jobs(1, (job){rows[1].config, "files", .pipeline = 1, .resume = 1, .steps = 3});
  assert_true(rft_run_has("files", "step-000003/model.safetensors"));
  run_jobs(2, (job){rows[1].config, "files", "gpipe", 2, .resume = 1, .steps = 0});
  for (int k = 0; k < 2; k++) {
    rfr_export_options o = rfr_export_options_default();
    run_jobs(k ? 2 : 1, (job){rows[1].config, k ? "two" : "one", .pipeline = k + 1, .steps = 1});
    snprintf(from, sizeof from, "%s", rft_run_folder(k ? "two" : "one"));
    snprintf(to, sizeof to, "%s", rft_run_folder(k ? "hf-two" : "hf-one"));
    OK(rfr_export(ctx, from, to, &o));
    snprintf(path, sizeof path, "%s/model.safetensors", to);
    OK(rfi_file_read(ctx, path, &text[k], &n[k]));
  }
  uint64_t header; /* names, types, shapes and offsets */
  memcpy(&header, text[0], sizeof header);
  assert_int_equal(n[0], n[1]);
  assert_memory_equal(text[0], text[1], sizeof header + header);
  for (int k = 0; k < 2; k++) rfi_free(ctx, text[k]);
}

static void diverged(void **state) {
  const rft_flip cases[] = {
      {rows[1].config, "parallel.pipeline=4", "model.embed_tokens.weight", 4, 3, 1,
       "rank 3 differs after step 1 from 3 of 4 ranks"},
      {rows[1].config, "parallel.pipeline=2", "model.layers.0.mlp.up_proj.weight", 4, 1, 1,
       "rank 1 differs after step 1 from 3 of 4 ranks"},
      {rows[1].config, "parallel.pipeline=2", "zero_steps", 4, 2, 1, "rank 2 differs after step 1 from 3 of 4 ranks"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char name[32];
    snprintf(name, sizeof name, "flip-%d", (int)i);
    rft_assert_flip_is_found(&cases[i], name);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(values), rft_context_test(layouts), rft_context_test(resume),
                                     rft_context_test(files), rft_context_test(diverged)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
