/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints of runs over several ranks, which are threads: loaded under any other layout they have bitwise equal
 * values; training continues bitwise under the same layout; and each rank writes and reads its part alone.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "data/file.h"
#include "refrain/model.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"

typedef struct job {
  const char *config, *folder, *shard;
  int resume, steps; /* steps 0: only loads the state */
  int expert;        /* parallel.expert; 0 counts as 1 */
  rfi_hash state;
  int layout_warnings, checkpoints, fallbacks;
  char fallback[512]; /* text of the warning */
} job;

static void on_event(const rfr_event *e, void *user) {
  job *j = user;
  j->layout_warnings += e->kind == RFR_EVENT_WARNING && strstr(e->message, "another layout") != NULL;
  j->checkpoints += e->kind == RFR_EVENT_CHECKPOINT;
  if (e->kind != RFR_EVENT_WARNING || !strstr(e->message, "using the older checkpoint")) return;
  j->fallbacks++;
  snprintf(j->fallback, sizeof j->fallback, "%s", e->message);
}

static rfr_status work(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  char folder[160], shard[64], steps[32], expert[32];
  const char *const sets[] = {shard, steps, "schedule.name=constant", expert};
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  (void)number;
  snprintf(folder, sizeof folder, "%s/%s", rft_run_root, j->folder);
  snprintf(shard, sizeof shard, "parallel.shard=%s", j->shard);
  snprintf(steps, sizeof steps, "run.steps=%d", j->steps ? j->steps : 6);
  o.config_folder = rft_run_root;
  snprintf(expert, sizeof expert, "parallel.expert=%d", j->expert ? j->expert : 1);
  o.overrides = sets, o.n_overrides = 4;
  o.programs = RFR_RUN_TRAIN;
  o.on_event = on_event, o.event_user = j;
  o.resume = j->resume;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->config, folder, &o, &run);
  if (s == RFR_OK && j->steps) s = rfr_run_train(run);
  if (s == RFR_OK) s = rft_hash_state(run, &j->state);
  rfr_run_close(run);
  return s;
}

static job run_job(int ranks, job j) {
  job all[RFT_MOST_RANKS];
  for (int r = 0; r < ranks; r++) all[r] = j;
  rft_run_ranks(ranks, all, sizeof *all, work);
  for (int r = 1; r < ranks; r++) {
    assert_true(rfi_hash_equal(all[r].state, all[0].state));
    assert_int_equal(all[r].checkpoints, 0);
    assert_int_equal(all[r].fallbacks, 0); /* only rank 0 warns */
  }
  return all[0];
}

#define BATCH "batch: {tokens: 192, microbatch: 2}\n" /* 6 microbatches */
#define STEPS_RUN "run: {steps: 6, seed: 3, evaluate_windows: 4}\n"

static const struct row {
  const char *name, *config;
  bool adapter;
} rows[] = {
    {"bf16 with master weights", "refrain: 1\n" LLAMA DATA BATCH ADAM "precision: {dtype: bf16}\n" STEPS_RUN, false},
    {"experts, which are pieces in a folder", "refrain: 1\n" EXPERTS DATA BATCH BALANCED SINGLE STEPS_RUN, false},
    {"8-bit moments",
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
static const struct {
  int ranks, mode;
} others[] = {{1, 0}, {2, 0}, {2, 2}, {3, 1}, {3, 2}, {6, 1}}; /* layouts that load the checkpoint */

/* The expected files of a checkpoint of three ranks. */
static void expect_files(const char *folder, const char *step, bool parts, bool adapter) {
  static const char *const kinds[] = {"model", "optimizer"};
  char name[128];
  for (int k = adapter; k < 2; k++) {
    snprintf(name, sizeof name, "%s/%s.safetensors", step, kinds[k]);
    assert_int_equal(rft_run_has(folder, name), !parts);
    for (int r = 0; r < 3; r++) {
      snprintf(name, sizeof name, "%s/%s-rank-%04d-of-0003.safetensors", step, kinds[k], r);
      assert_int_equal(rft_run_has(folder, name), parts);
    }
  }
}

/* Three ranks save; other layouts load the same values. */
static void layouts(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    for (int m = 0; m < 3; m++) {
      if (RFT_LEFT_OUT(i + m, 3)) continue;
      char folder[32];
      snprintf(folder, sizeof folder, "layouts-%d-%d", (int)i, m);
      const job saved = run_job(3, (job){rows[i].config, folder, modes[m], 0, 4});
      assert_int_equal(saved.checkpoints, 1);
      expect_files(folder, "step-000004", m > 0, rows[i].adapter);
      for (size_t k = 0; k < sizeof others / sizeof *others; k++) {
        if (RFT_LEFT_OUT(i + k, 2)) continue;
        const job j = run_job(others[k].ranks, (job){rows[i].config, folder, modes[others[k].mode], 1, 0});
        if (!rfi_hash_equal(j.state, saved.state))
          fail_msg("%s: %d ranks, %s differ from 3 ranks, %s", rows[i].name, others[k].ranks, modes[others[k].mode],
                   modes[m]);
        assert_int_equal(j.layout_warnings, others[k].ranks != 3 || others[k].mode != m);
      }
    }
}

/* Experts distributed over two ranks: each rank saves its experts, and the checkpoint loads under other layouts with
 * the same values, and vice versa. A resume is bitwise equal to an uninterrupted run. */
static void spread_experts(void **state) {
  static const char *const config =
      "refrain: 1\nmodel: {model_type: mixtral, hidden_size: 24, intermediate_size: 20, num_hidden_layers: 2, "
      "num_experts: 4, num_attention_heads: 4}\nprecision: {dtype: bf16}\n" DATA BATCH ADAM STEPS_RUN;
  static const struct {
    int ranks, mode, expert;
  } layouts[] = {{1, 0, 1}, {2, 0, 1}, {3, 2, 1}, {2, 0, 2}, {2, 1, 2}, {2, 2, 2}};
  (void)state;
  const job saved = run_job(2, (job){config, "spread", "none", 0, 4, .expert = 2});
  assert_true(rft_run_has("spread", "step-000004/model-rank-0001-of-0002.safetensors"));
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
    const job j =
        run_job(layouts[i].ranks, (job){config, "spread", modes[layouts[i].mode], 1, 0, .expert = layouts[i].expert});
    if (!rfi_hash_equal(j.state, saved.state)) fail_msg("layout %d differs", (int)i);
    assert_int_equal(j.layout_warnings, layouts[i].expert != 2 || layouts[i].mode > 0);
  }
  const job other = run_job(3, (job){config, "gathered", "full", 0, 4});
  assert_true(rfi_hash_equal(run_job(2, (job){config, "gathered", "none", 1, 0, .expert = 2}).state, other.state));
  const job whole = run_job(2, (job){config, "spread-once", "none", 0, 6, .expert = 2});
  const job rest = run_job(2, (job){config, "spread", "none", 1, 6, .expert = 2});
  assert_true(rfi_hash_equal(whole.state, rest.state));
  /* the other parameters are sharded too */
  const job full = run_job(2, (job){config, "spread-full", "full", 0, 4, .expert = 2});
  assert_true(rfi_hash_equal(run_job(1, (job){config, "spread-full", "none", 1, 0}).state, full.state));
  assert_true(
      rfi_hash_equal(run_job(2, (job){config, "spread-full", "optimizer", 1, 0, .expert = 2}).state, full.state));
  const job full_once = run_job(2, (job){config, "spread-full-once", "full", 0, 6, .expert = 2});
  const job full_rest = run_job(2, (job){config, "spread-full", "full", 1, 6, .expert = 2});
  assert_true(rfi_hash_equal(full_once.state, full_rest.state));
}

/* A resume under the same layout is bitwise equal to an uninterrupted run. `optimizer` equals `none` bitwise; `full`
 * sums microbatches in another order. */
static void resume(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    if (RFT_LEFT_OUT(i, 3)) continue;
    rfi_hash first = {0};
    for (int m = 0; m < 3; m++) {
      char once[32], twice[32];
      snprintf(once, sizeof once, "once-%d-%d", (int)i, m);
      snprintf(twice, sizeof twice, "twice-%d-%d", (int)i, m);
      const job whole = run_job(3, (job){rows[i].config, once, modes[m], 0, 6});
      run_job(3, (job){rows[i].config, twice, modes[m], 0, 4});
      const job rest = run_job(3, (job){rows[i].config, twice, modes[m], 1, 6});
      if (!rfi_hash_equal(whole.state, rest.state)) fail_msg("%s, %s: the resumed run differs", rows[i].name, modes[m]);
      if (m == 0) first = whole.state;
      if (m == 1 && !rfi_hash_equal(whole.state, first)) fail_msg("%s, %s: differs from none", rows[i].name, modes[m]);
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

/* The export of a sharded checkpoint equals that of one file. A run that starts from it has the same weights in every
 * mode. */
static void folders(void **state) {
  (void)state;
  for (size_t i = 0; i < 2; i++) {
    char run[32], out[200], from[200], all[32], name[2][48];
    for (int m = 0; m < 2; m++) {
      snprintf(run, sizeof run, "export-%d-%d", (int)i, m);
      run_job(3, (job){rows[i].config, run, modes[m], 0, 4});
      rfr_export_options o = rfr_export_options_default();
      snprintf(name[m], sizeof name[0], "hf-%d-%d", (int)i, m);
      snprintf(from, sizeof from, "%s", rft_run_folder(run));
      snprintf(out, sizeof out, "%s", rft_run_folder(name[m]));
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
      assert_true(rfi_hash_equal(j.state, first));
    }
  }
}

/* An evaluation can read the newest checkpoint in any layout. */
static void evaluate(void **state) {
  double loss[2];
  (void)state;
  for (int m = 0; m < 2; m++) {
    char run[32];
    rfr_run *reader;
    rfr_evaluation e;
    rfr_run_options o = rfr_run_options_default();
    snprintf(run, sizeof run, "evaluate-%d", m);
    run_job(3, (job){rows[1].config, run, modes[m], 0, 4});
    o.programs = RFR_RUN_EVALUATE;
    OK(rfr_run_open(ctx, NULL, rft_run_folder(run), &o, &reader));
    OK(rfr_run_evaluate(reader, &e));
    loss[m] = e.loss;
    rfr_run_close(reader);
  }
  assert_true(loss[0] == loss[1]);
}

/* ---- failures ---- */

/* One rank finds a file of the newest checkpoint damaged: all ranks continue from the same older one. */
static void damaged(void **state) {
  static const char *const files[] = {"model-rank-0000", "model-rank-0002", "optimizer-rank-0001"};
  (void)state;
  const job first = run_job(3, (job){rows[0].config, "damaged", "full", 0, 2});
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    char path[300], file[64];
    size_t n;
    char *data;
    const job last = run_job(3, (job){rows[0].config, "damaged", "full", 1, 4});
    assert_int_equal(last.fallbacks, 0);
    assert_false(rfi_hash_equal(last.state, first.state));
    snprintf(file, sizeof file, "step-000004/%s-of-0003.safetensors", files[i]);
    snprintf(path, sizeof path, "%s/%s", rft_run_folder("damaged"), file);
    OK(rfi_file_read(ctx, path, &data, &n));
    data[n - 1] ^= 1;
    OK(rfi_file_write(ctx, path, data, n));
    rfi_free(ctx, data);
    const job j = run_job(3, (job){rows[0].config, "damaged", "full", 1, 0});
    assert_true(rfi_hash_equal(j.state, first.state));
    assert_int_equal(j.fallbacks, 1);
    if (!strstr(j.fallback, file) || !strstr(j.fallback, "step-000002")) fail_msg("%s", j.fallback);
    snprintf(path, sizeof path, "%s/step-000004", rft_run_folder("damaged"));
    OK(rfi_tree_remove(ctx, path));
  }
}

static void diverged(void **state) {
  const rft_flip cases[] = {
      {rows[0].config, "parallel.shard=none", "model.norm.weight", 3, 1, 2,
       "rank 1 differs after step 2 from 2 of 3 ranks"},
      {rows[0].config, "parallel.shard=none", "model.norm.weight", 3, 0, 2,
       "rank 0 differs after step 2 from 2 of 3 ranks"},
      {rows[0].config, "parallel.shard=none", "model.norm.weight.exp_avg", 2, 1, 2,
       "rank 1 differs after step 2 from 1 of 2 ranks"},
      {rows[0].config, "parallel.shard=full", "zero_steps", 3, 2, 2, "rank 2 differs after step 2 from 2 of 3 ranks"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char name[32];
    snprintf(name, sizeof name, "flip-%d", (int)i);
    rft_assert_flip_is_found(&cases[i], name);
  }
}

typedef struct faulty {
  char folder[160];
  int rank;
  rfr_status status;
} faulty;

/* After an error each rank leaves a record that names the rank at fault. */
static rfr_status train_to_fault(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  faulty *f = rank;
  rfr_run *run;
  rfi_io_fault fault = {.error = ENOSPC, .sticky = true};
  rfr_run_options o = rfr_run_options_default();
  const char *const sets[] = {"parallel.shard=full"};
  o.config_folder = rft_run_root;
  o.overrides = sets, o.n_overrides = 1;
  o.programs = RFR_RUN_TRAIN;
  o.comm = comm;
  RFI_TRY(rfr_run_open(own, rows[0].config, f->folder, &o, &run));
  fault.fail_at = number == f->rank; /* the next file call belongs to the final checkpoint */
  rfi_io_set_fault(&fault);
  f->status = rfr_run_train(run);
  rfi_io_set_fault(NULL);
  rfr_run_close(run);
  return RFR_OK;
}

static void records(void **state) {
  faulty all[3];
  char *text;
  bool is_second = false;
  size_t n;
  int lines = 0;
  (void)state;
  for (int r = 0; r < 3; r++) {
    all[r] = (faulty){.rank = 2};
    snprintf(all[r].folder, sizeof all[r].folder, "%s", rft_run_folder("records"));
  }
  rft_run_ranks(3, all, sizeof *all, train_to_fault);
  char path[200];
  snprintf(path, sizeof path, "%s/failures.jsonl", rft_run_folder("records"));
  OK(rfi_file_read(ctx, path, &text, &n));
  for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1, lines++) {
    *end = 0;
    assert_non_null(strstr(line, "\"error\":\"file."));
    assert_non_null(strstr(line, "\"message\":\"rank 2: "));
    assert_non_null(strstr(line, "\"step\":6"));
    if (strstr(line, "\"rank\":1,")) is_second = true;
  }
  assert_true(is_second);
  assert_int_equal(lines, 2); /* the disk of rank 2 is full */
  rfi_free(ctx, text);
  for (int r = 0; r < 3; r++) assert_int_equal(all[r].status, RFR_IO);
  /* The line of a launcher when there is neither a step nor a checkpoint. */
  rfr_failure f = rfr_failure_default();
  f.rank = 2, f.ranks = 3;
  f.error = "launcher", f.message = "rank 2 was \"ended\"";
  OK(rfr_failure_append(ctx, rft_run_folder("records"), &f));
  OK(rfi_file_read(ctx, path, &text, &n));
  const char *last = strstr(text, "\"rank\":2,\"ranks\":3,\"error\":\"launcher\",");
  assert_non_null(last);
  assert_string_equal(strstr(last, "\"message\""), "\"message\":\"rank 2 was \\\"ended\\\"\"}\n");
  rfi_free(ctx, text);
  assert_int_equal(rfr_failure_append(ctx, "/no/such/folder", &f), RFR_IO);
  f.message = NULL;
  assert_int_equal(rfr_failure_append(ctx, rft_run_folder("records"), &f), RFR_INVALID);
  f.size = 4;
  assert_int_equal(rfr_failure_append(ctx, rft_run_folder("records"), &f), RFR_INVALID);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(layouts),  rft_context_test(spread_experts), rft_context_test(resume),
      rft_context_test(folders),  rft_context_test(evaluate),       rft_context_test(damaged),
      rft_context_test(diverged), rft_context_test(records),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
