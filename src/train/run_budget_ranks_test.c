/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.recompute: auto within a memory.budget over ranks, which are threads. In each layout the budget is halfway
 * between the plans without and with all recompute; the run stays within it and is bitwise equal to one without a
 * budget.
 */
#include <stdio.h>
#include <string.h>

#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"
#include "train/run.h"

#define STEPS RFT_FEWER(4, 2)

#define CONFIG(model)                                                                                    \
  "refrain: 1\nmodel: {" model ", hidden_size: 32, num_hidden_layers: 6, num_attention_heads: 4}\n" DATA \
  "batch: {tokens: 256, microbatch: 4}\noptimizer: {lr: 3e-3}\nrun: {seed: 3, steps: " RFT_STRING(STEPS) "}\n"

static const struct layout {
  const char *name, *config, *set[3];
  int ranks;
} layouts[] = {
    {"none", CONFIG("model_type: llama") SINGLE, {"parallel.shard=none"}, 2},
    {"optimizer", CONFIG("model_type: llama, dropout: 0.1") SINGLE, {"parallel.shard=optimizer"}, 2},
    {"full", CONFIG("model_type: llama") "precision: {dtype: bf16}\n", {"parallel.shard=full"}, 2},
    {"experts",
     CONFIG("model_type: qwen3_moe, num_experts: 4, moe_intermediate_size: 24") SINGLE,
     {"parallel.expert=2", "parallel.shard=full"},
     2},
    {"1f1b", CONFIG("model_type: llama, dropout: 0.1") SINGLE, {"parallel.pipeline=2", "parallel.schedule=1f1b"}, 2},
    {"zb-v, 2 x 2", CONFIG("model_type: llama") SINGLE, {"parallel.pipeline=2", "parallel.schedule=zb-v"}, 4},
};

typedef struct job {
  const struct layout *layout;
  const char *recompute, *budget;
  bool plans; /* plans only, does not run */
  double loss[STEPS + 1], norm[STEPS + 1];
  int64_t planned;
} job;

static void on_event(const rfr_event *e, void *user) {
  job *j = user;
  if (e->kind == RFR_EVENT_METRICS) j->loss[e->step] = e->loss, j->norm[e->step] = e->grad_norm;
}

static int64_t planned_bytes(const rfr_run *run) {
  rfr_plan_summary plan;
  rfr_graphs_memory m;
  if (rfr_program_plan(run->programs, 0, &plan) != RFR_OK) return -1;
  if (!run->stages) return plan.planned_bytes;
  rfi_stages_memory(run->stages, &m);
  return plan.planned_bytes + m.planned_bytes - m.step_memory_bytes; /* programs and callables share the step memory */
}

static rfr_status work(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  const char *sets[5] = {j->recompute, j->budget};
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  (void)number;
  o.config_folder = rft_run_root;
  o.overrides = sets, o.n_overrides = 2;
  for (int i = 0; i < 3 && j->layout->set[i]; i++) sets[o.n_overrides++] = j->layout->set[i];
  o.on_event = on_event, o.event_user = j;
  o.comm = comm;
  o.plan_only = j->plans;
  rfr_status s = rfr_run_open(own, j->layout->config, NULL, &o, &run);
  if (s == RFR_OK) j->planned = planned_bytes(run);
  for (int i = 0; s == RFR_OK && !j->plans && i < STEPS; i++) s = rfr_run_step(run);
  rfr_run_close(run);
  return s;
}

static job all[RFT_MOST_RANKS];

/* Returns the maximum over ranks of the planned bytes. */
static int64_t run_all(const struct layout *layout, const char *recompute, const char *budget, bool plans) {
  int64_t most = 0;
  for (int r = 0; r < layout->ranks; r++)
    all[r] = (job){.layout = layout, .recompute = recompute, .budget = budget, .plans = plans};
  rft_run_ranks(layout->ranks, all, sizeof *all, work);
  for (int r = 0; r < layout->ranks; r++) most = all[r].planned > most ? all[r].planned : most;
  return most;
}

static void budgets(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
    if (RFT_LEFT_OUT(i, 2)) continue;
    const struct layout *l = &layouts[i];
    char budget[64];
    const int64_t least = run_all(l, "memory.recompute=all", "memory.budget=0", true),
                  most = run_all(l, "memory.recompute=none", "memory.budget=0", false), limit = (least + most) / 2;
    const job free_run = all[0];
    if (!(least < most))
      fail_msg("%s: %lld bytes without recompute, %lld with", l->name, (long long)most, (long long)least);
    snprintf(budget, sizeof budget, "memory.budget=%lld", (long long)limit);
    const int64_t used = run_all(l, "memory.recompute=auto", budget, false);
    if (used > limit || used == most) fail_msg("%s: %lld bytes of %lld", l->name, (long long)used, (long long)limit);
    assert_memory_equal(all[0].loss, free_run.loss, sizeof free_run.loss);
    assert_memory_equal(all[0].norm, free_run.norm, sizeof free_run.norm);
    assert_true(free_run.loss[STEPS] > 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(budgets)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
