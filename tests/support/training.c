/* SPDX-License-Identifier: Apache-2.0
 *
 * Training steps of small models; see training.h.
 */
#include "support/training.h"

#include <stdio.h>
#include <string.h>

#include "exec/exec.h"

enum { MOST = 512 };

rfr_model_config rft_small_llama(int64_t layers) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  c.vocab_size = RFT_VOCAB;
  c.hidden_size = 24;
  c.intermediate_size = 56;
  c.layers = layers;
  c.heads = 3;
  c.kv_heads = 1;
  c.head_dim = 8;
  c.dropout = 0.2;
  c.dtype = RFR_F32;
  return c;
}

static rfr_value update(rfr_trace *t, rfr_value w, rfr_value g, rfr_value rate, rfr_value clip, rfr_value skip,
                        rfr_value step) {
  rfr_adamw_options adam = rfr_adamw_options_default();
  rfr_type type = rfr_value_type(t, w);
  char m[128], v[128];
  snprintf(m, sizeof m, "%s.m", rfr_value_name(t, w));
  snprintf(v, sizeof v, "%s.v", rfr_value_name(t, w));
  return rfr_adamw(t, w, g, rfr_input(t, m, RFR_ROLE_STATE, RFR_F32, type.rank, type.shape),
                   rfr_input(t, v, RFR_ROLE_STATE, RFR_F32, type.rank, type.shape), RFR_NONE, rate, clip, skip, step,
                   &adam);
}

rfr_trace *rft_training(const rfr_model_config *model, int microbatches, rfr_policy policy) {
  rfr_trace *t;
  rfr_model_config c = *model;
  rfr_value parameter[MOST], grad[MOST], targets[8], tokens[8], loss = RFR_NONE, skip;
  OK(rfr_trace_create(ctx, &t));
  for (int m = 0; m < microbatches; m++) {
    char name[2][16];
    snprintf(name[0], 16, "tokens%d", m);
    snprintf(name[1], 16, "targets%d", m);
    tokens[m] = rfr_input(t, name[0], RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){RFT_TOKENS}));
    targets[m] = rfr_input(t, name[1], RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){RFT_TOKENS}));
  }
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){3}));
  rfr_value step = rfr_step_block(t);
  rfr_model_declare(t, &c, NULL, 0, parameter);
  rfr_value inv = rfr_token_count(t, microbatches, targets, -100, NULL);
  for (int m = 0; m < microbatches; m++) {
    rfr_microbatch(t, m);
    rfr_set_recompute(t, policy);
    rfr_value h = rfr_model_forward(t, &c, parameter, tokens[m], offsets, step);
    rfr_set_recompute(t, RFR_POLICY_AUTO);
    rfr_value part = rfr_cross_entropy(t, rfr_model_logits(t, &c, parameter, h, RFR_F32), targets[m], inv, -100);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  rfr_scope(t, "");
  int n = rfr_model_parameter_count(&c);
  for (int i = 0; i < n; i++) grad[i] = rfr_gradient(t, loss, parameter[i], RFR_F32);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_lr_options lr = rfr_lr_options_default();
  lr.base = 0.003;
  rfr_value rate = rfr_lr_schedule(t, step, &lr), norm = rfr_grad_norm(t, n, grad, &skip);
  rfr_value clip = rfr_clip_scale(t, norm, 1);
  for (int i = 0; i < n; i++) update(t, parameter[i], grad[i], rate, clip, skip, step);
  rfr_step_end(t, step, skip);
  rfr_output(t, "loss", loss);
  OK(rfr_trace_finish(t));
  return t;
}

rfr_trace *rft_llama(int64_t layers, int microbatches, rfr_policy policy) {
  rfr_model_config c = rft_small_llama(layers);
  return rft_training(&c, microbatches, policy);
}

void rft_init_model(rfr_programs *p, const rfr_model_config *model, int microbatches) {
  rfr_model_config c = *model;
  rfr_tensor x;
  for (int i = 0; i < rfr_model_parameter_count(&c); i++) {
    rfr_parameter parameter;
    OK(rfr_model_parameter(&c, i, &parameter));
    OK(rfr_programs_tensor(p, parameter.name, &x));
    OK(rfr_parameter_fill(&parameter, 7, c.dtype, 1, x.data));
  }
  for (int m = 0; m < microbatches; m++)
    for (int k = 0; k < 2; k++) {
      char name[16];
      snprintf(name, 16, k ? "targets%d" : "tokens%d", m);
      OK(rfr_programs_tensor(p, name, &x));
      for (int i = 0; i < RFT_TOKENS; i++)
        ((int32_t *)x.data)[i] = (int32_t)((i + k) * (i + k) * 3 + m * 5) % RFT_VOCAB;
    }
  OK(rfr_programs_tensor(p, "offsets", &x));
  memcpy(x.data, ((int32_t[]){0, 17, RFT_TOKENS}), 12);
  OK(rfr_programs_tensor(p, "step", &x));
  ((int64_t *)x.data)[2] = 1234;
  OK(rfr_programs_load(p));
}

void rft_init_llama(rfr_programs *p, int64_t layers, int microbatches) {
  rfr_model_config c = rft_small_llama(layers);
  rft_init_model(p, &c, microbatches);
}

rfr_programs *rft_recompute(const rfr_trace *t, rfr_recompute recompute, int64_t budget) {
  rfr_compile_options o = rfr_compile_options_default();
  o.recompute = recompute;
  o.budget = budget;
  return rft_compile(t, &o);
}

rfr_plan_summary rft_plan(const rfr_programs *p) {
  rfr_plan_summary s;
  OK(rfr_program_plan(p, 0, &s));
  return s;
}

int rft_clones(const rfr_programs *p) {
  const rfr_trace *t = rfr_program_trace(p, 0, "lower");
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    n += op->clone_of >= 0 && !(op->def->flags & RFI_VIEW);
    n += op->n_out > 0 && op->def->only_onto[op->n_out - 1] && op->out[op->n_out - 1] >= 0;
  }
  return n;
}

uint64_t rft_state_hash(rfr_programs *p) {
  uint64_t h = 1;
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    for (int64_t k = 0; k < x.bytes; k++) h = (h ^ ((unsigned char *)x.data)[k]) * 0x100000001b3u;
  return h;
}

int64_t rft_between(const rfr_trace *t, double part) {
  rfr_programs *none = rft_recompute(t, RFR_RECOMPUTE_KEEP, 0), *all = rft_recompute(t, RFR_RECOMPUTE_ALL, 0);
  int64_t high = rft_plan(none).planned_bytes, low = rft_plan(all).planned_bytes;
  assert_true(low < high);
  rfr_programs_destroy(none);
  rfr_programs_destroy(all);
  return low + (int64_t)((double)(high - low) * part);
}
