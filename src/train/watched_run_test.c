/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs that watch values: bitwise equal to runs that do not, eager, resumed, recomputed, with adapters, experts and
 * over ranks; lines of watch.jsonl against the checkpoint; what is refused.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "data/safetensors.h"
#include "refrain/train.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"

#define WATCH "run: {steps: 50, seed: 3, log_every: 1, evaluate_windows: 0, watch: [\"*\"], watch_every: 3}\n"
#define LORA "adapter: {type: lora, rank: 3, alpha: 6, dropout: 0.1}\n"

/* Statistics by step and name, from events. */
enum { STEPS = 12, MOST = 512 };
typedef struct seen {
  int n[STEPS + 1], rank;
  char *name[STEPS + 1][MOST];
  rfr_watched stats[STEPS + 1][MOST];
  char warning[256];
} seen;

static void keep(const rfr_event *e, void *user) {
  seen *s = user;
  if (e->kind == RFR_EVENT_WARNING) snprintf(s->warning, sizeof s->warning, "%s", e->message);
  if (e->kind != RFR_EVENT_WATCH) return;
  assert_true(e->step <= STEPS && e->values <= MOST);
  s->rank = e->rank;
  for (int64_t i = 0; i < e->values; i++) {
    free(s->name[e->step][i]);
    s->name[e->step][i] = strdup(e->watched[i].name);
    s->stats[e->step][i] = e->watched[i];
  }
  s->n[e->step] = (int)e->values;
}
static void forget(seen *s) {
  for (int step = 0; step <= STEPS; step++)
    for (int i = 0; i < s->n[step]; i++) free(s->name[step][i]);
  free(s);
}
static const rfr_watched *find(const seen *s, int step, const char *name) {
  for (int i = 0; i < s->n[step]; i++)
    if (strcmp(s->name[step][i], name) == 0) return &s->stats[step][i];
  return NULL;
}

static rfr_run_options options(seen *s) {
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = rft_run_root;
  o.on_event = keep, o.event_user = s;
  return o;
}

static seen *run_steps(rfr_ctx *own, const char *config, bool eager, rfr_run **run) {
  seen *s = calloc(1, sizeof *s);
  assert_non_null(s);
  rfr_run_options o = options(s);
  o.eager = eager;
  *run = rft_run_open(own, config, NULL, &o);
  rft_run_steps(*run, STEPS);
  return s;
}

/* Compares values that both have; `all`: `b` must have all of `a`. */
static void assert_same_stats(const seen *a, const seen *b, bool all) {
  for (int step = 1; step <= STEPS; step++) {
    assert_int_equal(a->n[step] > 0, step == 1 || step % 3 == 0);
    assert_int_equal(b->n[step] > 0, a->n[step] > 0);
    for (int i = 0; i < a->n[step]; i++) {
      const rfr_watched *x = &a->stats[step][i], *y = find(b, step, a->name[step][i]);
      if (!y && all) fail_msg("%s", a->name[step][i]);
      if (y) assert_memory_equal(&x->elements, &y->elements, sizeof *x - offsetof(rfr_watched, elements));
    }
  }
}

static void same_bits(const char *model, const char *settings) {
  rfr_ctx *own = rft_run_ctx(2);
  char plain[2000], watched[2000], recomputed[2000];
  rft_record r = {0};
  rfr_run *a, *b, *c, *d;
  snprintf(plain, sizeof plain, "refrain: 1\n%s%s%s", model, settings, DATA TWO_BATCHES RUN);
  snprintf(watched, sizeof watched, "refrain: 1\n%s%s%s", model, settings, DATA TWO_BATCHES WATCH);
  snprintf(recomputed, sizeof recomputed, "%smemory: {recompute: all}\n", watched);
  rfr_run_options o = rft_run_options(&r);
  a = rft_run_open(own, plain, NULL, &o);
  rft_run_steps(a, STEPS);
  seen *replayed = run_steps(own, watched, false, &b), *eager = run_steps(own, watched, true, &c);
  seen *again = run_steps(own, recomputed, false, &d);
  rft_assert_same_state(a, b);
  rft_assert_same_state(a, c);
  rft_assert_same_state(a, d);
  assert_true(replayed->n[3] > 20);
  assert_same_stats(replayed, eager, true);
  assert_same_stats(again, replayed, true);
  forget(replayed), forget(eager), forget(again);
  rfr_run_close(a), rfr_run_close(b), rfr_run_close(c), rfr_run_close(d);
  rfr_ctx_destroy(own);
}

static void bits(void **state) {
  (void)state;
  same_bits(LLAMA SINGLE, ADAM);
  same_bits(GPT2, ADAM);
  same_bits(EXPERTS SINGLE, "optimizer: {name: muon, lr: 1e-2}\n");
  same_bits(LLAMA "precision: {dtype: bf16}\n", LORA ADAM);
  same_bits(LLAMA HALF, "optimizer: {name: sgd, lr: 1e-2, momentum: 0.9}\n");
}

/* With a budget only some microbatches are recomputed: a value has the statistics of all microbatches, or is left
 * out. */
static void budget(void **state) {
  (void)state;
  const char *config = "refrain: 1\n" LLAMA SINGLE DATA "batch: {tokens: 256, microbatch: 4}\n" ADAM WATCH;
  rfr_ctx *own = rft_run_ctx(2);
  char less[2000];
  rfr_plan_summary all, part;
  rfr_run *a, *b;
  seen *kept = run_steps(own, config, false, &a);
  assert_int_equal(rfr_program_plan(rfr_run_programs(a), 0, &all), RFR_OK);
  snprintf(less, sizeof less, "%smemory: {recompute: auto, budget: %lldB}\n", config,
           (long long)(all.planned_bytes - all.transient_planned_bytes / 10));
  seen *fewer = run_steps(own, less, false, &b);
  assert_int_equal(rfr_program_plan(rfr_run_programs(b), 0, &part), RFR_OK);
  assert_true(part.transient_planned_bytes < all.transient_planned_bytes);
  assert_true(fewer->n[1] < kept->n[1]);
  assert_same_stats(fewer, kept, true);
  rft_assert_same_state(a, b);
  forget(kept), forget(fewer);
  rfr_run_close(a), rfr_run_close(b);
  rfr_ctx_destroy(own);
}

/* ---- watch.jsonl ---- */

static json_t *read_lines(const char *folder) {
  char path[256];
  size_t n;
  char *text;
  rfr_ctx *own = rft_run_ctx(1);
  json_t *lines = json_array();
  snprintf(path, sizeof path, "%s/watch.jsonl", rft_run_folder(folder));
  assert_int_equal(rfi_file_read(own, path, &text, &n), RFR_OK);
  for (const char *line = text; *line; line += strcspn(line, "\n") + 1)
    json_array_append_new(lines, json_loadb(line, strcspn(line, "\n"), JSON_REJECT_DUPLICATES, NULL));
  rfi_free(own, text);
  rfr_ctx_destroy(own);
  return lines;
}
static int64_t step_of(const json_t *line) { return json_integer_value(json_object_get(line, "step")); }

/* Weights and moments in the last line equal those of the checkpoint after the same step. */
static void assert_checkpoint(const char *folder, const char *file, const char *name, const json_t *line) {
  char path[300];
  rfr_ctx *own = rft_run_ctx(1);
  rfi_safetensors *st;
  float *x;
  double squares = 0, sum = 0;
  snprintf(path, sizeof path, "%s/step-000009/%s", rft_run_folder(folder), file);
  assert_int_equal(rfi_safetensors_open(own, path, &st), RFR_OK);
  const rfi_stored *stored = rfi_safetensors_find(st, name);
  assert_non_null(stored);
  assert_int_equal(RFI_ALLOC(own, (size_t)stored->elements * sizeof *x, &x), RFR_OK);
  assert_int_equal(rfi_safetensors_read_as(st, stored, RFR_F32, x, stored->elements), RFR_OK);
  for (int64_t i = 0; i < stored->elements; i++) sum += x[i], squares += (double)x[i] * x[i];
  const json_t *stats = json_object_get(json_object_get(line, "values"), name);
  assert_int_equal(json_array_size(stats), 8);
  const double n = (double)stored->elements, rms = sqrt(squares / n);
  assert_int_equal(json_integer_value(json_array_get(stats, 0)), stored->elements);
  assert_true(fabs(json_real_value(json_array_get(stats, 3)) - sum / n) <= 1e-9 * rms);
  assert_true(fabs(json_real_value(json_array_get(stats, 4)) - rms) <= 1e-9 * rms);
  rfi_free(own, x);
  rfi_safetensors_close(st);
  rfr_ctx_destroy(own);
}

/* Trains up to step 9, without interruption or with a checkpoint and a resume after step 5. */
static void train_folder(const char *name, bool parts) {
  rfr_ctx *own = rft_run_ctx(2);
  seen *s = calloc(1, sizeof *s);
  assert_non_null(s);
  rfr_run_options o = options(s);
  rfr_run *run = rft_run_open(own, "refrain: 1\n" LLAMA SINGLE DATA TWO_BATCHES ADAM WATCH, name, &o);
  rft_run_steps(run, parts ? 5 : 9);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  o.resume = 1;
  if (parts) {
    run = rft_run_open(own, "refrain: 1\n" LLAMA SINGLE DATA TWO_BATCHES ADAM WATCH, name, &o);
    rft_run_steps(run, 4);
    rfr_run_close(run);
  }
  rfr_ctx_destroy(own);
  forget(s);
}

static void lines(void **state) {
  (void)state;
  train_folder("whole", false);
  train_folder("parts", true);
  json_t *a = read_lines("whole"), *b = read_lines("parts");
  assert_int_equal(json_array_size(a), 4);
  assert_int_equal(json_array_size(b), 4);
  for (size_t i = 0; i < 4; i++) {
    const json_t *x = json_array_get(a, i), *y = json_array_get(b, i);
    assert_int_equal(step_of(x), i == 0 ? 1 : 3 * i);
    assert_int_equal(step_of(y), step_of(x));
    assert_true(json_equal(json_object_get(x, "values"), json_object_get(y, "values")));
    assert_true(json_real_value(json_object_get(x, "time")) > 1e9);
  }
  assert_checkpoint("whole", "model.safetensors", "model.layers.1.mlp.down_proj.weight", json_array_get(a, 3));
  assert_checkpoint("whole", "optimizer.safetensors", "model.layers.0.self_attn.q_proj.weight.exp_avg",
                    json_array_get(a, 3));
  json_decref(a);
  json_decref(b);
}

/* A file that cannot be written: one warning, and the run continues. */
static void unwritable(void **state) {
  (void)state;
  char path[256];
  rfr_ctx *own = rft_run_ctx(1);
  seen *s = calloc(1, sizeof *s);
  assert_non_null(s);
  rfr_run_options o = options(s);
  snprintf(path, sizeof path, "%s/watch.jsonl", rft_run_folder("full"));
  assert_int_equal(rfi_dir_create(path), RFR_OK);
  rfr_run *run = rft_run_open(own, "refrain: 1\n" LLAMA SINGLE DATA TWO_BATCHES ADAM WATCH, "full", &o);
  rft_run_steps(run, 6);
  assert_non_null(strstr(s->warning, "watch.jsonl cannot be written ("));
  assert_true(s->n[6] > 0); /* events continue */
  rfr_run_close(run);
  rfr_ctx_destroy(own);
  forget(s);
}

/* ---- ranks ---- */

typedef struct job {
  const char *set;
  bool watches;
  seen *s;
  rfi_hash state;
} job;

static rfr_status work(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  rfr_run *run;
  (void)number;
  rfr_run_options o = options(j->s);
  o.overrides = &j->set, o.n_overrides = 1;
  o.comm = comm;
  rfr_status s =
      rfr_run_open(own,
                   j->watches ? "refrain: 1\n" LLAMA SINGLE DATA "batch: {tokens: 128, microbatch: 2}\n" ADAM WATCH
                              : "refrain: 1\n" LLAMA SINGLE DATA "batch: {tokens: 128, microbatch: 2}\n" ADAM RUN,
                   NULL, &o, &run);
  for (int i = 0; i < 3 && s == RFR_OK; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = rft_hash_state(run, &j->state);
  rfr_run_close(run);
  return s;
}

/* Each rank has its part and its microbatches; together they cover all elements. */
static void ranks(void **state) {
  static const char *const modes[] = {"parallel.shard=none", "parallel.shard=optimizer", "parallel.shard=full"};
  (void)state;
  for (int m = 0; m < 3; m++) {
    job plain[2], watched[2], one = {.set = modes[0], .watches = true, .s = calloc(1, sizeof *one.s)};
    for (int r = 0; r < 2; r++) {
      plain[r] = (job){.set = modes[m], .s = calloc(1, sizeof *one.s)};
      watched[r] = (job){.set = modes[m], .watches = true, .s = calloc(1, sizeof *one.s)};
    }
    rft_run_ranks(2, plain, sizeof *plain, work);
    rft_run_ranks(2, watched, sizeof *watched, work);
    rft_run_ranks(1, &one, sizeof one, work);
    assert_true(rfi_hash_equal(plain[0].state, watched[0].state));
    const char *output = "model.layers.0.self_attn.q_proj.output", *moment = "model.norm.weight.exp_avg",
               *gradient = "grad:model.layers.0.mlp.up_proj.weight";
    const rfr_watched *all = find(one.s, 3, output), *norm = find(one.s, 3, gradient);
    int64_t elements = 0;
    double squares = 0, whole = 0;
    for (int r = 0; r < 2; r++) {
      const rfr_watched *x = find(watched[r].s, 3, output), *g = find(watched[r].s, 3, gradient);
      assert_int_equal(watched[r].s->rank, r);
      assert_non_null(x);
      assert_non_null(g);
      assert_non_null(find(watched[r].s, 3, moment));
      elements += x->elements;
      squares += x->rms * x->rms * (double)x->elements;
      whole += g->rms * g->rms * (double)g->elements / (m == 0 ? 2 : 1);
    }
    assert_int_equal(elements, all->elements);
    assert_true(fabs(squares / (all->rms * all->rms * (double)all->elements) - 1) < 1e-5);
    assert_true(fabs(whole / (norm->rms * norm->rms * (double)norm->elements) - 1) < 1e-4);
    for (int r = 0; r < 2; r++) forget(plain[r].s), forget(watched[r].s);
    forget(one.s);
  }
}

/* ---- refused ---- */

static void assert_refused(const char *key, const char *slug, const char *says) {
  char config[1024];
  rfr_ctx *own = rft_run_ctx(1);
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = rft_run_root;
  snprintf(config, sizeof config, "%srun: {steps: 5, %s}\n", "refrain: 1\n" LLAMA SINGLE DATA TWO_BATCHES ADAM, key);
  assert_int_equal(rfr_run_open(own, config, NULL, &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, says)) fail_msg("%s", rfr_last_error()->message);
  rfr_ctx_destroy(own);
}

static rfr_status open_pipeline(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  rfr_run *run;
  static const char *const sets[] = {"parallel.pipeline=2"};
  rfr_run_options o = rfr_run_options_default();
  (void)rank, (void)number;
  o.config_folder = rft_run_root;
  o.overrides = sets, o.n_overrides = 1;
  o.comm = comm;
  if (rfr_run_open(own, "refrain: 1\n" LLAMA SINGLE DATA TWO_BATCHES ADAM WATCH, NULL, &o, &run) == RFR_OK)
    return rfi_fail(RFI_E_INTERNAL, "a pipeline watches values");
  return strstr(rfr_last_error()->message, "run.watch: a pipeline") ? RFR_OK : RFR_INTERNAL;
}

static void refused(void **state) {
  (void)state;
  char two[2] = {0};
  assert_refused("watch: [\"*.self_atn.q*\"]", "watch.name",
                 "config:8: run.watch: the pattern \"*.self_atn.q*\" matches no value; the nearest is");
  assert_refused("watch: [\"*.weight\", \"lm_head.output\"]", "watch.name", "matches only values that fusion removes");
  assert_refused("watch: [x], watch_every: 0", "config.value", "run.watch_every");
  assert_refused("watch: {a: b}", "config.value", "run.watch");
  rft_run_ranks(2, two, 1, open_pipeline);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_one_thread_test(bits),  rft_one_thread_test(budget),
                                     rft_one_thread_test(lines), rft_one_thread_test(unwritable),
                                     rft_context_test(ranks),    rft_context_test(refused)};
  return cmocka_run_group_tests_name("watched_run", tests, rft_run_setup, rft_run_teardown);
}
