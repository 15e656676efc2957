/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints of runs over several ranks, which are threads: loaded under any other layout they have the same values,
 * bit by bit; training continues bit by bit under the same layout; and each rank writes and reads its part alone.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/file.h"
#include "data/hash.h"
#include "refrain/model.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "train/host.h"
#include "train/parts.h"

typedef struct job {
  const char *config, *folder, *shard;
  int resume, steps; /* 0: the state is only loaded */
  rfi_hash state;
  int layout_warnings, checkpoints;
} job;

static void on_event(const rfr_event *e, void *user) {
  job *j = user;
  j->layout_warnings += e->kind == RFR_EVENT_WARNING && strstr(e->message, "another layout") != NULL;
  j->checkpoints += e->kind == RFR_EVENT_CHECKPOINT;
}

/* Of every tensor that a checkpoint has, as one rank would hold it. */
static rfr_status hash_state(rfr_run *run, rfi_hash *out) {
  rfr_tensor x;
  rfi_hasher *h;
  rfr_status s = rfi_hasher_create(run->ctx, &h);
  for (int i = 0; s == RFR_OK && rfi_run_tensor_at(run, i, &x) == RFR_OK; i++) {
    void *host;
    if (x.role == RFR_ROLE_INPUT || strcmp(x.name, RFI_NAME_METRICS) == 0) continue;
    s = rfi_host_open(run, &x, RFI_HOST_READ, &host);
    if (s != RFR_OK) break;
    rfi_hasher_add(h, x.name, strlen(x.name));
    rfi_hasher_add(h, host, (size_t)x.bytes);
    s = rfi_host_close(run, &x, RFI_HOST_READ, host, s);
  }
  *out = rfi_hasher_result(h);
  rfi_hasher_destroy(h);
  return s;
}

static rfr_status work(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  char folder[160], shard[64], steps[32];
  const char *const sets[] = {shard, steps, "schedule.name=constant"};
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  (void)number;
  snprintf(folder, sizeof folder, "%s/%s", rft_run_root, j->folder);
  snprintf(shard, sizeof shard, "parallel.shard=%s", j->shard);
  snprintf(steps, sizeof steps, "run.steps=%d", j->steps ? j->steps : 6);
  o.config_folder = rft_run_root;
  o.overrides = sets, o.n_overrides = 3;
  o.programs = RFR_RUN_TRAIN;
  o.on_event = on_event, o.event_user = j;
  o.resume = j->resume;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->config, folder, &o, &run);
  if (s == RFR_OK && j->steps) s = rfr_run_train(run);
  if (s == RFR_OK) s = hash_state(run, &j->state);
  rfr_run_close(run);
  return s;
}

static bool same(rfi_hash a, rfi_hash b) { return a.high == b.high && a.low == b.low; }

static job run_job(int ranks, job j) {
  job all[RFT_MOST_RANKS];
  for (int r = 0; r < ranks; r++) all[r] = j;
  rft_run_ranks(ranks, all, sizeof *all, work);
  for (int r = 1; r < ranks; r++) {
    assert_true(same(all[r].state, all[0].state));
    assert_int_equal(all[r].checkpoints, 0);
  }
  return all[0];
}

static bool is_there(const char *folder, const char *name) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", rft_run_folder(folder), name);
  return access(path, F_OK) == 0;
}

#define BATCH "batch: {tokens: 192, microbatch: 2}\n" /* 6 microbatches */
#define STEPS_RUN "run: {steps: 6, seed: 3, evaluate_windows: 4}\n"

static const struct row {
  const char *name, *config;
  bool adapter;
} rows[] = {
    {"bf16 with master weights", "refrain: 1\n" LLAMA DATA BATCH ADAM "precision: {dtype: bf16}\n" STEPS_RUN, false},
    {"experts, which are pieces in a folder", "refrain: 1\n" EXPERTS DATA BATCH BALANCED SINGLE STEPS_RUN, false},
    {"moments of 8 bits",
     "refrain: 1\nmodel: {model_type: llama, hidden_size: 72, num_hidden_layers: 1, num_attention_heads: 3}\n" DATA
         BATCH "optimizer: {name: adamw, lr: 3e-3, state_dtype: u8}\n" SINGLE STEPS_RUN,
     false},
    {"frozen weights, SGD",
     "refrain: 1\n" LLAMA DATA BATCH
     "optimizer: {name: sgd, lr: 1e-2, momentum: 0.9, frozen: [\"model.embed_tokens.*\"]}\n" SINGLE STEPS_RUN,
     false},
    {"f16", "refrain: 1\n" LLAMA DATA BATCH ADAM HALF STEPS_RUN, false},
    {"lora",
     "refrain: 1\n" LLAMA DATA BATCH ADAM "precision: {dtype: bf16}\nadapter: {type: lora, rank: 4}\n" STEPS_RUN, true},
};
static const char *const modes[] = {"none", "optimizer", "full"};

/* The files of a checkpoint of three ranks. */
static void expect_files(const char *folder, const char *step, bool parts, bool adapter) {
  static const char *const kinds[] = {"model", "optimizer"};
  char name[128];
  for (int k = adapter; k < 2; k++) {
    snprintf(name, sizeof name, "%s/%s.safetensors", step, kinds[k]);
    assert_int_equal(is_there(folder, name), !parts);
    for (int r = 0; r < 3; r++) {
      snprintf(name, sizeof name, "%s/%s-rank-%04d-of-0003.safetensors", step, kinds[k], r);
      assert_int_equal(is_there(folder, name), parts);
    }
  }
}

/* Three ranks save; every number of ranks in every mode loads the same values, and saves them again. */
static void layouts(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    for (int m = 0; m < 3; m++) {
      char folder[32];
      snprintf(folder, sizeof folder, "layouts-%d-%d", (int)i, m);
      const job saved = run_job(3, (job){rows[i].config, folder, modes[m], 0, 4});
      assert_int_equal(saved.checkpoints, 1);
      expect_files(folder, "step-000004", m > 0, rows[i].adapter);
      for (int ranks = 1; ranks <= 6; ranks += ranks == 3 ? 3 : 1)
        for (int other = 0; other < 3; other++) {
          if (ranks == 1 && other > 0) continue;
          const job j = run_job(ranks, (job){rows[i].config, folder, modes[other], 1, 0});
          if (!same(j.state, saved.state))
            fail_msg("%s: %d ranks, %s differ from 3 ranks, %s", rows[i].name, ranks, modes[other], modes[m]);
          assert_int_equal(j.layout_warnings, ranks != 3 || other != m);
        }
    }
}

/* A resume under the same layout has the bits of a run that was not interrupted, and the bits of the other modes. */
static void resume(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfi_hash first = {0};
    for (int m = 0; m < 3; m++) {
      char once[32], twice[32];
      snprintf(once, sizeof once, "once-%d-%d", (int)i, m);
      snprintf(twice, sizeof twice, "twice-%d-%d", (int)i, m);
      const job whole = run_job(3, (job){rows[i].config, once, modes[m], 0, 6});
      run_job(3, (job){rows[i].config, twice, modes[m], 0, 4});
      const job rest = run_job(3, (job){rows[i].config, twice, modes[m], 1, 6});
      if (!same(whole.state, rest.state)) fail_msg("%s, %s: the resumed run differs", rows[i].name, modes[m]);
      if (m == 0) first = whole.state;
      if (!same(whole.state, first)) fail_msg("%s, %s: differs from none", rows[i].name, modes[m]);
    }
  }
}

/* ---- folders of the transformers library ---- */

static void expect_same_file(const char *a, const char *b, const char *name) {
  char path[2][256], *text[2];
  size_t n[2];
  snprintf(path[0], sizeof path[0], "%s/%s", rft_run_folder(a), name);
  snprintf(path[1], sizeof path[1], "%s/%s", rft_run_folder(b), name);
  for (int k = 0; k < 2; k++) OK(rfi_file_read(ctx, path[k], &text[k], &n[k]));
  assert_int_equal(n[0], n[1]);
  assert_memory_equal(text[0], text[1], n[0]);
  for (int k = 0; k < 2; k++) rfi_free(ctx, text[k]);
}

/* The export of parts is that of one file; a run that begins from it holds these weights in every mode. */
static void folders(void **state) {
  (void)state;
  for (size_t i = 0; i < 2; i++) {
    char run[32], out[200], from[200], all[32], name[2][48];
    for (int m = 0; m < 3; m += 2) {
      snprintf(run, sizeof run, "export-%d-%d", (int)i, m);
      run_job(3, (job){rows[i].config, run, modes[m], 0, 4});
      rfr_export_options o = rfr_export_options_default();
      snprintf(name[m / 2], sizeof name[0], "hf-%d-%d", (int)i, m);
      snprintf(from, sizeof from, "%s", rft_run_folder(run));
      snprintf(out, sizeof out, "%s", rft_run_folder(name[m / 2]));
      OK(rfr_export(ctx, from, out, &o));
    }
    expect_same_file(name[0], name[1], "model.safetensors");
    char config[1024];
    rfi_hash first = {0};
    snprintf(config, sizeof config, "refrain: 1\nmodel: %s\n%s", out,
             i == 0 ? DATA BATCH ADAM "precision: {dtype: bf16}\n" STEPS_RUN : DATA BATCH ADAM SINGLE STEPS_RUN);
    for (int m = 0; m < 3; m++) {
      snprintf(all, sizeof all, "from-%d-%d", (int)i, m);
      const job j = run_job(2, (job){config, all, modes[m], 0, 0});
      if (m == 0) first = j.state;
      assert_true(same(j.state, first));
    }
  }
}

/* An evaluation reads the newest checkpoint, whatever its layout. */
static void evaluate(void **state) {
  double loss[2];
  (void)state;
  for (int m = 0; m < 3; m += 2) {
    char run[32];
    rfr_run *reader;
    rfr_evaluation e;
    rfr_run_options o = rfr_run_options_default();
    snprintf(run, sizeof run, "evaluate-%d", m);
    run_job(3, (job){rows[1].config, run, modes[m], 0, 4});
    o.programs = RFR_RUN_EVALUATE;
    OK(rfr_run_open(ctx, NULL, rft_run_folder(run), &o, &reader));
    OK(rfr_run_evaluate(reader, &e));
    loss[m / 2] = e.loss;
    rfr_run_close(reader);
  }
  assert_true(loss[0] == loss[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(layouts),
      rft_context_test(resume),
      rft_context_test(folders),
      rft_context_test(evaluate),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
