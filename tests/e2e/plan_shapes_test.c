/* SPDX-License-Identifier: Apache-2.0
 *
 * Plans of complete training steps, for realistic shapes, with and without recompute, with the workspaces of this
 * machine's kernels. The step-scoped part of the arena must be nearly as small as the maximum of live bytes, counted
 * without the padding between buffers. Nothing is allocated or run, so that models with billions of parameters take
 * milliseconds.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/base.h"
#include "exec/exec.h"
#include "support/context.h"
#include "train/step_trace.h"

typedef struct shape {
  const char *name;
  rfr_model_type type;
  int64_t vocab, hidden, intermediate, layers, heads, kv_heads, tokens, microbatches;
  rfr_dtype dtype;
  double dropout;
  double bar; /* planned bytes per live byte */
} shape;

static const shape shapes[] = {
    {"GPT-2 124M, 4 x 64", RFR_MODEL_GPT2, 50257, 768, 3072, 12, 12, 12, 256, 1, RFR_F32, 0, 1.01},
    {"GPT-2 124M, 4 microbatches", RFR_MODEL_GPT2, 50257, 768, 3072, 12, 12, 12, 1024, 4, RFR_BF16, 0.1, 1.01},
    {"Llama 8B", RFR_MODEL_LLAMA, 128256, 4096, 14336, 32, 32, 8, 4096, 2, RFR_BF16, 0, 1.01},
    {"Llama 1.1B", RFR_MODEL_LLAMA, 32000, 2048, 5632, 22, 32, 4, 2048, 4, RFR_BF16, 0, 1.01},
    {"Llama 135M", RFR_MODEL_LLAMA, 49152, 576, 1536, 30, 9, 3, 512, 2, RFR_F32, 0, 1.01},
    {"bytes", RFR_MODEL_LLAMA, 256, 256, 704, 4, 4, 4, 4096, 1, RFR_F32, 0, 1.01},
    {"16 narrow layers", RFR_MODEL_LLAMA, 256, 256, 704, 16, 4, 4, 512, 1, RFR_F32, 0.1, 1.01},
    /* small shapes, where padding matters and workspaces are as large as values */
    {"tiny", RFR_MODEL_LLAMA, 50, 24, 56, 3, 3, 1, 64, 2, RFR_F32, 0.2, 1.05},
};

static rfr_trace *step_of(const shape *h) {
  rfr_trace *t;
  rfi_step_spec s = {.slots = 4, .microbatches = h->microbatches, .tokens = h->tokens, .clip = 1};
  rfr_model_config c = rfr_model_config_default(h->type);
  c.vocab_size = h->vocab;
  c.hidden_size = h->hidden;
  c.intermediate_size = h->intermediate;
  c.layers = h->layers;
  c.heads = h->heads;
  c.kv_heads = h->kv_heads;
  c.head_dim = h->hidden / h->heads;
  c.max_positions = h->tokens;
  c.dropout = h->dropout;
  c.tie_embeddings = h->type == RFR_MODEL_GPT2;
  c.dtype = h->dtype;
  s.model = c;
  s.master = h->dtype != RFR_F32;
  s.gradient_dtype = s.logits_dtype = s.state_dtype = RFR_F32;
  s.adamw = rfr_adamw_options_default();
  s.lr = rfr_lr_options_default();
  OK(rfi_trace_train(ctx, &s, &t));
  return t;
}

/* Any programs will do: they are needed only to query the workspaces of kernels. */
static rfr_programs *kernels(void) {
  rfr_trace *t;
  rfr_programs *p;
  OK(rfr_trace_create(ctx, &t));
  rfr_output(t, "y", rfr_silu(t, rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){5}))));
  OK(rfr_trace_finish(t));
  OK(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p));
  rfr_trace_destroy(t);
  return p;
}

/* The maximum of live bytes, without padding. */
static int64_t live_bytes(const rfr_trace *t, const int64_t *workspace, const rfi_plan *p) {
  int64_t *live = calloc((size_t)t->n_ops + 2, sizeof *live), most = 0;
  for (int i = 0; i < p->n; i++) {
    const rfi_buffer *b = &p->buffer[i];
    int64_t bytes = b->value >= 0 ? rfi_bytes(&t->values[b->value].type) : workspace[b->first];
    live[b->first] += bytes;
    live[b->last + 1] -= bytes;
  }
  for (int i = 0; i <= t->n_ops; i++) {
    if (i) live[i] += live[i - 1];
    if (live[i] > most) most = live[i];
  }
  free(live);
  return most;
}

/* Compiles up to the plan and checks it; returns its bytes. */
static int64_t plan(const shape *h, const rfr_trace *t, rfr_programs *user, rfr_recompute recompute, int64_t budget) {
  rfi_pass_options o = {.fuse = true,
                        .prune = true,
                        .loss_chunk = 1024,
                        .recompute = recompute,
                        .workspace = rfi_select_workspaces,
                        .user = &user->m};
  rfi_pipeline line;
  OK(rfi_pipeline_run(t, &o, &line));
  if (budget) {
    OK(rfi_frontier_create(line.stage[RFI_STAGES - 4].trace, &o, false, &o.frontier));
    const rfi_levels levels = rfi_frontier_levels(o.frontier);
    OK(rfi_find_level(&levels, rfi_frontier_first(o.frontier, budget), budget, &o.level));
    OK(rfi_pipeline_redo(&line, "recompute", &o));
    rfi_frontier_destroy(o.frontier);
  }
  const rfr_trace *u = line.stage[RFI_STAGES - 1].trace;
  int64_t *workspace = calloc((size_t)u->n_ops + 1, sizeof *workspace);
  OK(rfi_select_workspaces(&user->m, u, workspace));
  rfi_plan p;
  OK(rfi_plan_make(u, workspace, NULL, &p));
  double ratio = (double)p.bytes / (double)live_bytes(u, workspace, &p);
  if (ratio > h->bar)
    fail_msg("%s, recompute %d, budget %lld: %lld bytes planned, %f of those live", h->name, (int)recompute,
             (long long)budget, (long long)p.bytes, ratio);
  if (budget) assert_true(p.bytes <= budget);
  int64_t bytes = p.bytes;
  rfi_plan_deinit(&p);
  free(workspace);
  rfi_pipeline_deinit(&line);
  return bytes;
}

static void test_shapes(void **state) {
  (void)state;
  rfr_programs *user = kernels();
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    rfr_trace *t = step_of(&shapes[i]);
    int64_t high = plan(&shapes[i], t, user, RFR_RECOMPUTE_KEEP, 0);
    int64_t low = plan(&shapes[i], t, user, RFR_RECOMPUTE_ALL, 0);
    assert_true(low <= high);
    for (int k = 1; k < 4; k++) plan(&shapes[i], t, user, RFR_RECOMPUTE_AUTO, low + (high - low) * k / 4);
    rfr_trace_destroy(t);
  }
  rfr_programs_destroy(user);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_shapes)};
  return cmocka_run_group_tests_name("plan_shapes", tests, NULL, NULL);
}
