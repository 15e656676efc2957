/* SPDX-License-Identifier: Apache-2.0
 *
 * A complete run on a device whose k-th call fails, for each entry of the backend's table and k
 * = 1, 2, ... until no call fails any more. Each failure gives a status with slug and next step,
 * leaves no allocation of device or context, and keeps the earlier checkpoint intact.
 *
 * With a sticky error every later call on the run reports a dead context and none writes a
 * checkpoint; a new context resumes from the last checkpoint to the bytes of an undisturbed run.
 * An arena smaller than the plan without a side stream needs is out of memory.
 *
 * The device is the CPU backend inside support/fault_backend; a context finds it in place of the
 * library's choice (support/backend.h).
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/checkpoint.h"
#include "refrain/train.h"
#include "support/backend.h"
#include "support/context.h"
#include "support/fault_backend.h"
#include "support/folder.h"

#ifdef RFT_SANITIZED /* other calls fail than without sanitizers, and a fifth as many */
enum { STRIDE = 47 };
#else
enum { STRIDE = 9 };
#endif
enum { SHOWN = 2, LAST = 4, DENSE = 12 };

static const char config[] =
    "refrain: 1\n"
    "model: {model_type: llama, hidden_size: 8, intermediate_size: 12, num_hidden_layers: 1, num_attention_heads: 2}\n"
    "data: {train: [\"text/*.txt\"], validation: 40%, sequence: 8}\n"
    "batch: {tokens: 32, microbatch: 2}\n"
    "optimizer: {lr: 1e-2, clip: 1}\n"
    "precision: {dtype: f32}\n"
    "run: {steps: 4, keep: 3, log_every: 1, tune: true}\n";

static void nothing(const char *piece, size_t n, void *user) { (void)piece, (void)n, (void)user; }

/* On a dead device every call on a run that is still open returns backend.dead. */
static void check_dead(rfr_run *run) {
  rfr_evaluation e;
  rfr_programs *p = rfr_run_programs(run);
  int idle;
  int64_t block[4];
  rfr_tensor step;
  assert_int_equal(rfr_programs_tensor(p, "step", &step), RFR_OK);
  for (int i = 0; i < 7; i++) {
    rfr_status s = i == 0   ? rfr_run_step(run)
                   : i == 1 ? rfr_run_evaluate(run, &e)
                   : i == 2 ? rfr_run_save(run)
                   : i == 3 ? rfr_programs_wait(p)
                   : i == 4 ? rfr_programs_poll(p, &idle)
                   : i == 5 ? rfr_programs_read(p, &step, block)
                            : rfr_programs_write(p, &step, block);
    assert_int_equal(s, RFR_IO);
    assert_string_equal(rfr_last_error()->slug, "backend.dead");
    assert_non_null(strstr(rfr_last_error()->next, "resume from the last checkpoint"));
  }
}

enum { MOST_OPS = 1000 };
static rfr_op_time times[MOST_OPS];

static rfr_status profiled(rfr_run *run) {
  int n;
  return rfr_run_profile(run, times, MOST_OPS, &n);
}

/* The device's arena has the size of the plan and its guard; rings are host memory. */
static rfr_status check_memory(rfr_run *run) {
  rfr_memory_use use;
  rfr_plan_summary plan;
  rfr_programs *p = rfr_run_programs(run);
  rfr_status s = rfr_programs_memory_use(p, &use);
  if (s == RFR_OK) s = rfr_program_plan(p, 0, &plan);
  if (s != RFR_OK) return s;
  assert_int_equal(use.taken, use.arena);
  const int64_t most = plan.planned_bytes + rft_fault_backend.guard;
  if (rft_backend) assert_in_range(use.arena, plan.planned_bytes / 2, most);
  else assert_int_equal(use.arena, 0);
  return s;
}

/* Opens the run (resuming if it exists), trains from step `from` to `to`, evaluates and saves. */
static rfr_status train(rfr_ctx *ctx, const char *root, const char *folder, int from, int to, bool eager) {
  rfr_run *run;
  rfr_evaluation e;
  int idle;
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = root;
  o.resume = 1;
  o.eager = eager;
  /* inspect is called only in debug mode */
  o.debug = rft_faults.entry == RFT_ENTRY_inspect && rft_faults.k > 0;
  rfr_status s = rfr_run_open(ctx, config, folder, &o, &run);
  if (s != RFR_OK) return s;
  const bool replays = !eager && !o.debug;
  for (int i = from; s == RFR_OK && i < to; i++) s = i == from && replays ? profiled(run) : rfr_run_step(run);
  if (s == RFR_OK) s = rfr_programs_wait(rfr_run_programs(run));
  if (s == RFR_OK) s = rfr_programs_poll(rfr_run_programs(run), &idle);
  if (s == RFR_OK) s = rfr_run_evaluate(run, &e);
  if (s == RFR_OK) s = rfr_run_save(run);
  if (s == RFR_OK) s = check_memory(run);
  if (rft_faults.dead) check_dead(run);
  rfr_run_close(run);
  return s;
}

static rfr_status write_text(rfr_ctx *ctx, const char *folder) {
  rfr_run *run;
  rfr_generate_options g = rfr_generate_options_default();
  rfr_run_options o = rfr_run_options_default();
  o.programs = RFR_RUN_GENERATE;
  g.tokens = 5;
  rfr_status s = rfr_run_open(ctx, NULL, folder, &o, &run);
  if (s != RFR_OK) return s;
  s = rfr_run_generate(run, "1 plus", 6, &g, nothing, NULL);
  rfr_run_close(run);
  return s;
}

typedef struct scene {
  rft_folder *f;
  rfr_ctx *ctx;
  int64_t blocks;
  rfi_hash shown, last; /* hash of the weights of an undisturbed run */
} scene;

static void weights(scene *c, const char *run, int step, rfi_hash *hash) {
  char name[96];
  int64_t size;
  snprintf(name, sizeof name, "%s/step-%06d/model.safetensors", run, step);
  assert_int_equal(rfi_file_hash(c->f->ctx, rft_path(c->f, name), &size, hash), RFR_OK);
}

static void set_scene(scene *c, rft_folder *f) {
  *c = (scene){.f = f, .ctx = rft_one_thread()};
  rft_faults = (rft_fault){0};
  rft_backend = NULL;
  rft_write_texts(f);
  assert_int_equal(train(c->ctx, f->path, rft_path(f, "calm"), 0, SHOWN, false), RFR_OK);
  assert_int_equal(train(c->ctx, f->path, rft_path(f, "calm"), SHOWN, LAST, false), RFR_OK);
  weights(c, "calm", SHOWN, &c->shown);
  weights(c, "calm", LAST, &c->last);
  rft_backend = &rft_fault_backend;
  assert_int_equal(train(c->ctx, f->path, rft_path(f, "run"), 0, SHOWN, false), RFR_OK);
  rfi_hash hash;
  weights(c, "run", SHOWN, &hash); /* results do not depend on how bytes are copied */
  assert_memory_equal(&hash, &c->shown, sizeof hash);
  c->blocks = rfr_ctx_get_stats(c->ctx).live_blocks;
}

static void end_scene(scene *c) {
  rft_backend = NULL;
  rfr_ctx_destroy(c->ctx);
}

static void assert_checkpoint(scene *c, int step) {
  char name[64];
  rfi_checkpoint *checkpoint;
  rfi_hash hash;
  snprintf(name, sizeof name, "run/step-%06d", step);
  if (rfi_checkpoint_open(c->f->ctx, NULL, rft_path(c->f, name), &checkpoint) != RFR_OK)
    fail_msg("%s", rfr_last_error()->message);
  rfi_checkpoint_close(checkpoint);
  weights(c, "run", step, &hash);
  assert_memory_equal(&hash, step == SHOWN ? &c->shown : &c->last, sizeof hash);
}

/* Checks after any failure; the folder is restored afterwards. */
static void check_scene(scene *c, rfr_status s, const char *what) {
  const rft_fault *f = &rft_faults;
  const rfr_error *e = rfr_last_error();
  const bool logged = f->entry == RFT_ENTRY_memory_use && !f->sticky; /* a line of the log may lack the bytes */
  if (f->failed != (s != RFR_OK) && !(logged && f->failed)) fail_msg("%s: status %d", what, (int)s);
  if (s != RFR_OK && (e->status != s || strcmp(e->slug, f->sticky ? "backend.dead" : "cuda") != 0 || !*e->next))
    fail_msg("%s: %s [%s]", what, e->message, e->slug);
  if (f->devices || f->blocks || f->graphs)
    fail_msg("%s: %d devices, %d blocks, %d graphs are left", what, f->devices, f->blocks, f->graphs);
  if (rfr_ctx_get_stats(c->ctx).live_blocks != c->blocks)
    fail_msg("%s: %lld blocks of the context are left", what,
             (long long)(rfr_ctx_get_stats(c->ctx).live_blocks - c->blocks));
  char name[64];
  snprintf(name, sizeof name, "run/step-%06d", LAST);
  assert_checkpoint(c, SHOWN);
  if (access(rft_path(c->f, name), F_OK) == 0) assert_checkpoint(c, LAST);
  else assert_true(s != RFR_OK);
}

static void start_again(scene *c) {
  char name[64];
  snprintf(name, sizeof name, "run/step-%06d", LAST);
  assert_int_equal(rfi_tree_remove(c->f->ctx, rft_path(c->f, name)), RFR_OK);
}

/* Makes every call of one table entry fail once; returns the number of calls. */
static int64_t each_call(scene *c, rft_entry entry, bool eager, bool sticky) {
  int64_t tried = 0;
  for (int64_t k = 1;; k += k < DENSE ? 1 : STRIDE, tried++) {
    char what[64];
    snprintf(what, sizeof what, "call %lld of %s%s", (long long)k, rft_entry_name(entry), eager ? ", eager" : "");
    rft_faults = (rft_fault){.entry = entry, .k = k, .sticky = sticky};
    rfr_status s = train(c->ctx, c->f->path, rft_path(c->f, "run"), SHOWN, LAST, eager);
    const bool failed = rft_faults.failed;
    check_scene(c, s, what);
    if (sticky && failed) { /* a new process continues from the last checkpoint */
      start_again(c);
      rft_faults = (rft_fault){0};
      s = train(c->ctx, c->f->path, rft_path(c->f, "run"), SHOWN, LAST, eager);
      check_scene(c, s, what);
    }
    start_again(c);
    if (!failed) return tried;
  }
}

static void training(void **state, bool sticky) {
  scene c;
  set_scene(&c, *state);
  for (rft_entry entry = 0; entry < RFT_ENTRY_N; entry++) {
    if (entry == RFT_ENTRY_move) continue; /* programs do not use this entry; graphs_test tests its faults */
    const int64_t replayed = each_call(&c, entry, false, sticky), eager = each_call(&c, entry, true, sticky);
    print_message("%s: %lld and, eager, %lld calls failed\n", rft_entry_name(entry), (long long)replayed,
                  (long long)eager);
    assert_true(replayed > 0 || eager > 0);
  }
  end_scene(&c);
}

static void calls(void **state) { training(state, false); }
static void sticky_calls(void **state) { training(state, true); }

static void text_calls(void **state) {
  scene c;
  set_scene(&c, *state);
  for (rft_entry entry = 0; entry < RFT_ENTRY_N; entry++)
    for (int64_t k = 1;; k++) {
      rft_faults = (rft_fault){.entry = entry, .k = k};
      const rfr_status s = write_text(c.ctx, rft_path(c.f, "run"));
      if (rft_faults.failed != (s != RFR_OK))
        fail_msg("call %lld of %s: status %d", (long long)k, rft_entry_name(entry), (int)s);
      if (rft_faults.failed) assert_string_equal(rfr_last_error()->slug, "cuda");
      assert_true(rft_faults.devices == 0 && rft_faults.blocks == 0 && rft_faults.graphs == 0);
      assert_int_equal(rfr_ctx_get_stats(c.ctx).live_blocks, c.blocks);
      if (!rft_faults.failed) break;
    }
  end_scene(&c);
}

/* The attention work that documents leave is read from the device; the counts must equal those of the host. */
static void profile(void **state) {
  scene c;
  const char *const longer[] = {"data.sequence=64", "batch.tokens=256"};
  double flops[2][MOST_OPS], largest = 0;
  int n[2], smaller = 0;
  set_scene(&c, *state);
  for (int i = 0; i < 2; i++) {
    rfr_run *run;
    rfr_run_options o = rfr_run_options_default();
    o.config_folder = c.f->path;
    o.overrides = longer;
    o.n_overrides = 2;
    rft_faults = (rft_fault){0};
    rft_backend = i == 1 ? &rft_fault_backend : NULL;
    assert_int_equal(rfr_run_open(c.ctx, config, NULL, &o, &run), RFR_OK);
    assert_int_equal(rfr_run_profile(run, times, MOST_OPS, &n[i]), RFR_OK);
    for (int k = 0; k < n[i]; k++) {
      rfr_plan_op op;
      const int train_program = rfr_run_program_index(run, RFR_RUN_TRAIN);
      assert_int_equal(rfr_program_op(rfr_run_programs(run), train_program, times[k].op, &op), RFR_OK);
      flops[i][k] = times[k].flops;
      if (strcmp(op.name, "attention") != 0) continue;
      smaller += largest > 0 && times[k].flops != largest;
      if (times[k].flops > largest) largest = times[k].flops;
    }
    rfr_run_close(run);
  }
  assert_int_equal(n[0], n[1]);
  assert_memory_equal(flops[0], flops[1], (size_t)n[0] * sizeof flops[0][0]);
  assert_true(smaller > 0); /* some window contains the end of a document */
  end_scene(&c);
}

static void arena_cap(void **state) {
  scene c;
  set_scene(&c, *state);
  rft_faults = (rft_fault){0};
  assert_int_equal(train(c.ctx, c.f->path, rft_path(c.f, "run"), SHOWN, LAST, false), RFR_OK);
  const int64_t branched = rft_faults.most_arena_bytes;
  start_again(&c);
  rft_faults = (rft_fault){.cap = branched - 1}; /* large enough without a side stream */
  assert_int_equal(train(c.ctx, c.f->path, rft_path(c.f, "run"), SHOWN, LAST, false), RFR_OK);
  assert_checkpoint(&c, LAST);
  const int64_t needed = rft_faults.most_arena_bytes;
  assert_true(needed < branched);
  start_again(&c);
  rft_faults = (rft_fault){.cap = needed - 1};
  assert_int_equal(train(c.ctx, c.f->path, rft_path(c.f, "run"), SHOWN, LAST, false), RFR_NO_MEMORY);
  assert_string_equal(rfr_last_error()->slug, "memory.alloc");
  assert_true(rft_faults.devices == 0 && rft_faults.blocks == 0 && rft_faults.graphs == 0);
  assert_int_equal(rfr_ctx_get_stats(c.ctx).live_blocks, c.blocks);
  assert_checkpoint(&c, SHOWN);
  rft_faults = (rft_fault){.cap = needed};
  assert_int_equal(train(c.ctx, c.f->path, rft_path(c.f, "run"), SHOWN, LAST, false), RFR_OK);
  assert_checkpoint(&c, LAST);
  end_scene(&c);
}

/* budget 0: no budget. */
static rfr_plan_summary planned(scene *c, int64_t budget, char *report, size_t size) {
  char text[sizeof config + 64];
  rfr_run *run;
  rfr_plan_summary sum;
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = c->f->path;
  snprintf(text, sizeof text, "%smemory: {budget: %lld}\n", config, (long long)budget);
  assert_int_equal(rfr_run_open(c->ctx, text, NULL, &o, &run), RFR_OK);
  const rfr_programs *p = rfr_run_programs(run);
  const int program = rfr_run_program_index(run, RFR_RUN_TRAIN);
  assert_int_equal(rfr_program_plan(p, program, &sum), RFR_OK);
  const char *line = strstr(rfr_program_report(p, program, "lower"), "side stream: ");
  assert_non_null(line);
  snprintf(report, size, "%.*s", (int)strcspn(line, "\n"), line);
  rfr_run_close(run);
  return sum;
}

/* A side stream may use only memory that the budget and the device leave; no program is refused because of it. */
static void branch_or_budget(void **state) {
  scene c;
  char report[128], wanted[128];
  set_scene(&c, *state);
  rft_faults = (rft_fault){0};
  const rfr_plan_summary most = planned(&c, 0, report, sizeof report);
  assert_true(most.branch_ops > 0 && most.branch_bytes > 0);
  snprintf(wanted, sizeof wanted, "side stream: %d ops, +%lld bytes", most.branch_ops, (long long)most.branch_bytes);
  assert_string_equal(report, wanted);

  const rfr_plan_summary full = planned(&c, most.planned_bytes, report, sizeof report);
  assert_string_equal(report, wanted);
  assert_int_equal(full.planned_bytes, most.planned_bytes);

  const rfr_plan_summary line = planned(&c, most.planned_bytes - 1, report, sizeof report);
  snprintf(wanted, sizeof wanted, "side stream: 0 ops, +%lld bytes: exceeds the budget", (long long)most.branch_bytes);
  assert_string_equal(report, wanted);
  assert_int_equal(line.planned_bytes, most.planned_bytes - most.branch_bytes);
  assert_true(line.branch_ops == 0 && line.branch_bytes == most.branch_bytes);

  rft_faults.cap = rft_faults.most_arena_bytes - 1;
  const rfr_plan_summary small = planned(&c, 0, report, sizeof report);
  snprintf(wanted, sizeof wanted, "side stream: 0 ops, +%lld bytes: exceeds the device's free memory",
           (long long)most.branch_bytes);
  assert_string_equal(report, wanted);
  assert_int_equal(small.planned_bytes, line.planned_bytes);
  end_scene(&c);
}

/* Steps and evaluations do not allocate even if they copy; there are enough steps for the warning about zero
 * gradients. */
static void quiet_allocator(void **state) {
  scene c;
  rfr_run *run;
  rfr_evaluation e;
  set_scene(&c, *state);
  rft_faults = (rft_fault){0};
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = c.f->path;
  assert_int_equal(rfr_run_open(c.ctx, config, NULL, &o, &run), RFR_OK);
  const rfr_ctx_stats before = rfr_ctx_get_stats(c.ctx);
  for (int i = 0; i < 12; i++) assert_int_equal(rfr_run_step(run), RFR_OK);
  assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
  assert_int_equal(rfr_ctx_get_stats(c.ctx).alloc_calls, before.alloc_calls);
  rfr_run_close(run);
  end_scene(&c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(calls),
      rft_folder_test(sticky_calls),
      rft_folder_test(text_calls),
      rft_folder_test(arena_cap),
      rft_folder_test(profile),
      rft_folder_test(quiet_allocator),
      rft_folder_test(branch_or_budget),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
