/* SPDX-License-Identifier: Apache-2.0
 *
 * Turns a configuration into settings: resolves "auto" and percentages, builds the spec of the programs, and lists the
 * keys that a checkpoint must agree with.
 */
#include "train/settings.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "data/dataset.h"
#include "data/file.h"
#include "data/mixture.h"
#include "data/token_dataset.h"
#include "model/peft.h"
#include "nn/adapter.h"
#include "text/chat.h"
#include "text/model_file.h"
#include "text/row_dataset.h"
#include "text/text_documents.h"
#include "train/machine.h"
#include "train/patterns.h"
#include "train/ramp.h"
#include "train/stage_trace.h"

enum { RING_SLOTS = 4, PROVISIONAL_STEPS = 1000, MOST_MICROBATCHES = 4096 };
enum { MOST_NUMBERS = 1 << 16 }; /* maximum number of microbatches, as the address of random draws allows */

/* Fails with config.value at the line of a key. */
#define FAIL_AT(s, id, ...) \
  rfi_fail_at(RFI_E_CONFIG_VALUE, (s)->config->file, (s)->config->source[id].line, __VA_ARGS__)

static rfr_status read_layer_types(const rfi_settings *s, rfr_model_config *m) {
  const rfi_config_list *types = &s->config->model_layer_types;
  if (types->n != 0 && types->n != m->layers)
    return FAIL_AT(s, RFI_CFG_model_layer_types, "model.layer_types: %d values for %lld layers", types->n,
                   (long long)m->layers);
  for (int i = 0; i < types->n; i++) {
    const char *wrong = rfi_hf_layer_type(m, i, types->items[i]);
    if (wrong) return FAIL_AT(s, RFI_CFG_model_layer_types, "model.layer_types: the value of layer %d %s", i, wrong);
  }
  return RFR_OK;
}

static rfr_status read_mlp_only(const rfi_settings *s, rfr_model_config *m) {
  const rfi_config_list *layers = &s->config->model_mlp_only_layers;
  rfi_hf_sparse_step(m, s->config->model_decoder_sparse_step);
  for (int i = 0; i < layers->n; i++) {
    char *end;
    const long layer = strtol(layers->items[i], &end, 10);
    if (end == layers->items[i] || *end || layer < 0 || layer >= m->layers)
      return FAIL_AT(s, RFI_CFG_model_mlp_only_layers,
                     "model.mlp_only_layers: %.100s is not a layer; they are 0 to %lld", layers->items[i],
                     (long long)m->layers - 1);
    rfi_hf_mlp_only(m, layer);
  }
  return RFR_OK;
}

/* A factor of the router losses: from the configuration if given, otherwise from the folder. */
static void resolve_loss(rfi_settings *s, rfi_config_id id, double *given, double *factor) {
  if (s->config->source[id].from) {
    *factor = *given;
  } else if (s->spec.model.experts > 0) {
    *given = *factor;
    s->config->source[id] = (rfi_config_source){"the folder's config.json", 0};
  }
}

static void resolve_losses(rfi_settings *s) {
  rfi_config *c = s->config;
  resolve_loss(s, RFI_CFG_optimizer_router_aux_loss_coef, &c->optimizer_router_aux_loss_coef,
               &s->spec.model.balance_loss);
  resolve_loss(s, RFI_CFG_optimizer_router_z_loss_coef, &c->optimizer_router_z_loss_coef, &s->spec.model.z_loss);
}

/* Sets precision.dtype if it is auto. */
static void resolve_dtype(rfi_settings *s, rfr_dtype dtype, const char *from) {
  if (s->config->source[RFI_CFG_precision_dtype].from) return;
  s->config->precision_dtype = dtype;
  s->config->source[RFI_CFG_precision_dtype].from = from;
}

/* Sets model.vocab_size if it is auto: to that of the given tokenizer. */
static rfr_status resolve_vocab(rfi_settings *s) {
  rfi_config *c = s->config;
  rfr_tokenizer *tokenizer;
  if (c->source[RFI_CFG_model_vocab_size].from) return RFR_OK;
  RFI_TRY(rfr_tokenizer_open(s->ctx, c->data_tokenizer, &tokenizer));
  const int64_t n = rfr_tokenizer_vocab_size(tokenizer);
  c->model_vocab_size = n < 256 ? 256 : n;
  c->source[RFI_CFG_model_vocab_size] = (rfi_config_source){"data.tokenizer", 0};
  rfr_tokenizer_destroy(tokenizer);
  return RFR_OK;
}

static rfr_status read_model(rfi_settings *s, bool bf16_fast) {
  const rfi_config *c = s->config;
  const rfr_model_type type = c->model_model_type == RFI_MODEL_TYPE_gpt2 ? RFR_MODEL_GPT2 : RFR_MODEL_LLAMA;
  rfr_model_config m = rfr_model_config_default(type);
  const bool dropout = c->run_dropout == RFI_DROPOUT_model,
             router_narrow = c->precision_router_dtype == RFI_WIDTH_model;
  if (*c->model) {
    s->weights = c->model;
    RFI_TRY(rfi_hf_read(s->ctx, c->model, dropout, &m));
    RFI_TRY(rfi_hf_notes_read(s->ctx, c->model, &s->notes));
    if (s->notes.dtype != RFR_DTYPE_COUNT) resolve_dtype(s, s->notes.dtype, "the folder's config.json");
  }
  resolve_dtype(s, bf16_fast ? RFR_BF16 : RFR_F32, "this machine");
  m.dtype = c->precision_dtype;
  if (*c->model) {
    m.router_narrow = router_narrow;
    s->spec.model = m;
    resolve_losses(s);
    return rfr_model_config_check(&s->spec.model);
  }
  RFI_TRY(resolve_vocab(s));
  m.vocab_size = c->model_vocab_size;
  m.hidden_size = c->model_hidden_size;
  m.intermediate_size = c->model_intermediate_size;
  m.layers = c->model_num_hidden_layers;
  m.heads = c->model_num_attention_heads;
  m.kv_heads = c->model_num_key_value_heads;
  m.head_dim = c->model_head_dim;
  m.max_positions = c->model_max_position_embeddings;
  m.norm_eps = c->model_rms_norm_eps;
  m.rope_theta = c->model_rope_theta;
  m.dropout = dropout ? c->model_dropout : 0.0;
  m.init_std = c->model_init_std;
  m.window = c->model_sliding_window;
  RFI_TRY(read_layer_types(s, &m));
  m.tie_embeddings = c->model_tie_word_embeddings;
  m.attention_bias = c->model_attention_bias;
  m.mlp_bias = c->model_mlp_bias;
  m.qk_norm = c->model_model_type == RFI_MODEL_TYPE_qwen3_moe;
  m.experts = c->model_num_experts;
  m.experts_per_token = c->model_num_experts_per_tok;
  m.expert_size = c->model_moe_intermediate_size;
  RFI_TRY(read_mlp_only(s, &m));
  m.expert_norm = m.experts > 0 && c->model_norm_topk_prob;
  m.router_narrow = router_narrow;
  s->spec.model = m;
  resolve_losses(s);
  return rfr_model_config_check(&s->spec.model);
}

/* Reads the adapter of the folder adapter.from. */
static rfr_status read_adapter_folder(rfi_settings *s) {
  rfi_config *c = s->config;
  rfi_peft *p;
  RFI_TRY(rfi_peft_open(s->ctx, c->adapter_from, &p));
  const rfr_status status = rfi_peft_adapter(p, &s->spec.model, c->adapter_dropout, &s->adapter);
  rfi_peft_close(p);
  RFI_TRY(status);
  const int type = s->adapter->dora ? RFI_ADAPTER_dora : RFI_ADAPTER_lora;
  if (c->source[RFI_CFG_adapter_type].from && c->adapter_type != type)
    return FAIL_AT(s, RFI_CFG_adapter_type, "adapter.type: the folder adapter.from has an adapter of type %s",
                   s->adapter->dora ? "dora" : "lora");
  c->adapter_type = type;
  c->source[RFI_CFG_adapter_type].from = "the folder's " RFI_PEFT_CONFIG;
  s->adapter_from = c->adapter_from;
  s->spec.model.adapter = s->adapter;
  return RFR_OK;
}

/* Adds the adapter to the description of the model. */
static rfr_status read_adapter(rfi_settings *s) {
  _Static_assert((int)RFI_BASE_nf4 == (int)RFR_QUANT_NF4 && (int)RFI_BASE_int8 == (int)RFR_QUANT_INT8 &&
                     (int)RFI_BASE_fp8 == (int)RFR_QUANT_FP8,
                 "same order");
  const rfi_config *c = s->config;
  if (!*c->adapter_from && c->adapter_type == RFI_ADAPTER_none) return RFR_OK;
  s->spec.model.base_format = (rfr_quant)c->adapter_base;
  if (*c->adapter_from) return read_adapter_folder(s);
  const rfr_adapter_options o = {.size = sizeof o,
                                 .rank = c->adapter_rank,
                                 .alpha = c->adapter_alpha,
                                 .rslora = c->adapter_rslora,
                                 .dora = c->adapter_type == RFI_ADAPTER_dora,
                                 .dropout = c->adapter_dropout,
                                 .targets = c->adapter_targets.items,
                                 .n_targets = c->adapter_targets.n,
                                 .ranks = c->adapter_ranks.items,
                                 .n_ranks = c->adapter_ranks.n,
                                 .alphas = c->adapter_alphas.items,
                                 .n_alphas = c->adapter_alphas.n};
  const rfr_status status = rfr_adapter_create(s->ctx, &s->spec.model, &o, &s->adapter);
  if (status == RFR_NO_MEMORY) return status;
  if (status != RFR_OK) {
    char text[512];
    snprintf(text, sizeof text, "%s", rfr_last_error()->message);
    return FAIL_AT(s, RFI_CFG_adapter_targets, "adapter: %s", text);
  }
  s->spec.model.adapter = s->adapter;
  return RFR_OK;
}

/* Sets the number of microbatches per rank. */
static rfr_status share_microbatches(rfi_settings *s, int64_t all) {
  const int64_t ranks = s->spec.ranks, one = s->sequence * s->rows, least = all / ranks * ranks;
  s->spec.microbatches = all / ranks;
  if (least == all) return RFR_OK;
  char lower[64] = "";
  if (least > 0) snprintf(lower, sizeof lower, "%lld or ", (long long)(least * one));
  return FAIL_AT(s, RFI_CFG_batch_tokens,
                 "batch.tokens: %lld are %lld microbatch%s, which %lld ranks do not divide; give %s%lld",
                 (long long)s->config->batch_tokens, (long long)all, all == 1 ? "" : "es", (long long)ranks, lower,
                 (long long)((least + ranks) * one));
}

static rfr_status read_batch(rfi_settings *s) {
  const rfi_config *c = s->config;
  s->sequence = c->data_sequence;
  if (s->spec.model.vocab_size < 256 && c->data_train.n > 0)
    return FAIL_AT(s, RFI_CFG_model_vocab_size, "model.vocab_size: %lld is less than 256, the number of bytes",
                   (long long)s->spec.model.vocab_size);
  if (c->run_evaluate_context >= s->sequence)
    return FAIL_AT(s, RFI_CFG_run_evaluate_context,
                   "run.evaluate_context: %lld tokens; it must be less than data.sequence %lld",
                   (long long)c->run_evaluate_context, (long long)s->sequence);
  if (s->sequence > s->spec.model.max_positions)
    return FAIL_AT(s, RFI_CFG_data_sequence,
                   "data.sequence: %lld tokens are more than the %lld positions of the model (max_position_embeddings)",
                   (long long)s->sequence, (long long)s->spec.model.max_positions);
  s->rows = c->batch_microbatch; /* config.c checks that the step is a multiple of a microbatch */
  s->eval_rows = s->rows;
  rfi_step_spec *p = &s->spec;
  p->slots = RING_SLOTS;
  p->rank = s->parallel.rank % s->parallel.data;
  p->ranks = s->parallel.data;
  /* plans of a pipeline are smaller if entire blocks are recomputed */
  p->checkpoint = s->parallel.ranks > 1 && s->recompute == RFR_RECOMPUTE_ALL;
  p->expert_ranks = s->parallel.expert;
  p->expert_capacity = c->parallel_capacity;
  p->pipeline = (rfi_pipeline_part){
      .ranks = s->parallel.pipeline, .rank = s->parallel.rank / s->parallel.data, .schedule = s->parallel.schedule};
  RFI_TRY(share_microbatches(s, c->batch_tokens / s->sequence / s->rows));
  p->tokens = s->rows * s->sequence;
  p->eval_tokens = s->eval_rows * s->sequence;
  p->window = s->sequence;
  p->preference = c->data_format == RFI_FORMAT_preference;
  p->beta = c->preference_beta;
  p->smoothing = c->preference_label_smoothing;
  if (p->preference && ((float)p->beta == 0 || isinf((float)p->beta)))
    return FAIL_AT(s, RFI_CFG_preference_beta,
                   "preference.beta: %g is 0 or infinite in f32, in which the loss is computed", p->beta);
  if (p->preference && s->sequence < RFI_PAIR_TOKENS)
    return FAIL_AT(s, RFI_CFG_data_sequence, "data.sequence: %lld tokens are too few for a pair of answers",
                   (long long)s->sequence);
  p->model.longest = s->sequence;
  if (s->parallel.pipeline > 1)
    p->pipeline.last_layers = rfi_stage_layers(p, rfi_pipeline_stages(&p->pipeline) - 1, NULL);
  if (p->tokens > INT32_MAX || p->microbatches > MOST_MICROBATCHES || p->microbatches * p->ranks > MOST_NUMBERS)
    return FAIL_AT(s, RFI_CFG_batch_tokens,
                   "batch.tokens: %lld in %lld microbatches is too much for one program; raise batch.microbatch or "
                   "lower batch.tokens",
                   (long long)c->batch_tokens, (long long)p->microbatches);
  RFI_TRY(rfi_ramp_read(s));
  if (p->ring_microbatches > MOST_MICROBATCHES || p->ring_microbatches * p->ranks > MOST_NUMBERS)
    return FAIL_AT(s, RFI_CFG_batch_ramp,
                   "batch.ramp: %lld microbatches are too many for one program; lower the tokens",
                   (long long)p->ring_microbatches);
  return RFR_OK;
}

rfr_status rfi_settings_match(const rfi_settings *s, rfi_config_id key, const char *pattern, bool *matched) {
  const rfr_model_config *m = &s->spec.model;
  char nearest[256] = "";
  bool any = false;
  rfr_parameter p;
  for (int i = 0; i < rfr_model_parameter_count(m) && rfr_model_parameter(m, i, &p) == RFR_OK; i++) {
    matched[i] = rfi_pattern_matches(m, pattern, &p);
    any = any || matched[i];
  }
  if (any) return RFR_OK;
  rfi_pattern_miss(m, pattern, nearest, sizeof nearest);
  return FAIL_AT(s, key, "%s: no parameter matches \"%.100s\"; %s", rfi_config_path(key), pattern, nearest);
}

static rfr_status read_logits(rfi_settings *s) {
  rfi_step_spec *p = &s->spec;
  const bool narrow = s->config->precision_logits == RFI_WIDTH_model && p->model.dtype != RFR_F32;
  p->logits_dtype = narrow ? p->model.dtype : RFR_F32;
  if (narrow && p->model.logit_cap > 0.0)
    return FAIL_AT(s, RFI_CFG_precision_logits,
                   "precision.logits: this model softcaps its logits, so they must not be rounded; set f32");
  if (narrow && p->preference)
    return FAIL_AT(s, RFI_CFG_precision_logits,
                   "precision.logits: DPO compares losses with those of a reference with f32 logits; set f32");
  return RFR_OK;
}

/* Combines optimizer.frozen and optimizer.groups to one rule per parameter. */
static rfr_status read_rules(rfi_settings *s) {
  const rfi_config *c = s->config;
  const size_t n = (size_t)rfr_model_parameter_count(&s->spec.model);
  rfi_param_rule *rules = rfi_arena_alloc(c->arena, n * sizeof *rules);
  bool *matched = rfi_arena_alloc(c->arena, n * sizeof *matched),
       *grouped = rfi_arena_alloc(c->arena, n * sizeof *grouped);
  if (!rules || !matched || !grouped) return RFR_NO_MEMORY;
  for (size_t i = 0; i < n; i++)
    rules[i] = (rfi_param_rule){.frozen = rfi_adapter_freezes(&s->spec.model, (int)i),
                                .lr_scale = 1.0,
                                .weight_decay = c->optimizer_weight_decay};
  for (int k = 0; k < c->optimizer_frozen.n; k++) {
    RFI_TRY(rfi_settings_match(s, RFI_CFG_optimizer_frozen, c->optimizer_frozen.items[k], matched));
    for (size_t i = 0; i < n; i++) rules[i].frozen |= matched[i];
  }
  for (int k = 0; k < c->optimizer_groups.n; k++) {
    const rfi_config_group *g = &c->optimizer_groups.items[k];
    RFI_TRY(rfi_settings_match(s, RFI_CFG_optimizer_groups, g->match, matched));
    for (size_t i = 0; i < n; i++) {
      if (!matched[i] || grouped[i]) continue; /* the first matching group applies */
      rules[i].lr_scale = g->lr_scale;
      rules[i].weight_decay = g->weight_decay;
      grouped[i] = true;
    }
  }
  s->spec.rules = rules;
  return RFR_OK;
}

static rfr_status read_rounding(rfi_settings *s) {
  rfi_step_spec *p = &s->spec;
  p->stochastic = s->config->optimizer_rounding == RFI_ROUNDING_stochastic;
  if (!p->stochastic) return RFR_OK;
  if (p->model.dtype != RFR_BF16)
    return FAIL_AT(s, RFI_CFG_optimizer_rounding,
                   "optimizer.rounding: stochastic is for weights in bf16, and these are %s; give nearest",
                   rfr_dtype_name(p->model.dtype));
  if (p->master)
    return FAIL_AT(s, RFI_CFG_optimizer_rounding,
                   "optimizer.rounding: stochastic is for weights without an f32 master weight; give "
                   "optimizer.master_weights: false, or nearest");
  return RFR_OK;
}

static rfr_status read_ema(rfi_settings *s, bool trains) {
  const rfi_config *c = s->config;
  const rfi_config_id ids[2] = {RFI_CFG_optimizer_ema_start, RFI_CFG_optimizer_ema_warmup};
  const bool given[2] = {c->optimizer_ema_start > 0, c->optimizer_ema_warmup};
  for (int i = 0; i < 2 && c->optimizer_ema == 0; i++)
    if (given[i])
      return FAIL_AT(s, ids[i], "%s: it applies only with optimizer.ema; give a decay, or remove the key",
                     rfi_config_path(ids[i]));
  if (trains) s->spec.ema = (rfi_ema){c->optimizer_ema, c->optimizer_ema_start, c->optimizer_ema_warmup};
  return RFR_OK;
}

static rfr_status read_optimizer(rfi_settings *s) {
  const rfi_config *c = s->config;
  rfi_step_spec *p = &s->spec;
  RFI_TRY(read_rules(s));
  p->sgd = c->optimizer_name == RFI_OPTIMIZER_sgd;
  p->momentum = c->optimizer_momentum;
  p->muon = c->optimizer_name == RFI_OPTIMIZER_muon;
  p->muon_momentum = c->optimizer_muon_momentum;
  p->muon_rms = c->optimizer_muon_scale == RFI_MUON_SCALE_rms;
  p->adamw = rfr_adamw_options_default();
  p->adamw.beta1 = c->optimizer_betas.v[0];
  p->adamw.beta2 = c->optimizer_betas.v[1];
  p->adamw.eps = c->optimizer_eps;
  p->adamw.decay = c->optimizer_weight_decay;
  p->clip = c->optimizer_clip;
  p->state_dtype = c->optimizer_state_dtype;
  if ((p->sgd || p->muon) && p->state_dtype == RFR_U8)
    return FAIL_AT(s, RFI_CFG_optimizer_state_dtype,
                   "optimizer.state_dtype: u8 is for adamw, and optimizer.name is %s; give f32 or bf16",
                   p->sgd ? "sgd" : "muon");
  if (p->muon && p->model.adapter)
    return FAIL_AT(s, RFI_CFG_optimizer_name,
                   "optimizer.name: muon updates matrices of the model, which are frozen with an adapter; give adamw");
  p->gradient_dtype = c->optimizer_gradient_dtype == RFI_WIDTH_model ? p->model.dtype : RFR_F32;
  p->master = c->optimizer_master_weights && p->model.dtype != RFR_F32;
  return read_rounding(s);
}

static rfr_status read_schedule(rfi_settings *s) {
  _Static_assert((int)RFR_LR_WSD == (int)RFI_SCHEDULE_wsd && (int)RFR_LR_COSINE == (int)RFI_SCHEDULE_cosine,
                 "same order");
  const rfi_config *c = s->config;
  const int64_t total = s->steps > 0 ? s->steps : PROVISIONAL_STEPS;
  rfr_lr_options o = rfr_lr_options_default();
  o.kind = (rfr_lr_kind)c->schedule_name;
  s->spec.timed = s->time > 0;
  if (s->spec.timed && o.kind != RFR_LR_WSD && o.kind != RFR_LR_CONSTANT)
    return FAIL_AT(s, RFI_CFG_schedule_name,
                   "schedule.name: %s needs the number of steps, and run.time leaves it open; give wsd or constant, "
                   "or run.steps",
                   o.kind == RFR_LR_COSINE ? "cosine" : "linear");
  o.base = c->optimizer_lr;
  o.min = c->schedule_min_lr * c->optimizer_lr;
  o.total = total;
  o.warmup = rfi_config_steps(c->schedule_warmup, total);
  o.decay = rfi_config_steps(c->schedule_decay, total);
  const int64_t most = o.kind == RFR_LR_CONSTANT ? total : total - 1;
  if (s->steps > 0 && o.warmup > most)
    return FAIL_AT(s, RFI_CFG_schedule_warmup,
                   "schedule.warmup: %lld steps leave no step for schedule.name in a run of %lld steps",
                   (long long)o.warmup, (long long)total);
  if (o.warmup > most) o.warmup = most;
  if (o.decay > total - o.warmup) o.decay = total - o.warmup;
  s->spec.lr = o;
  return RFR_OK;
}

rfr_status rfi_settings_read(rfr_ctx *ctx, const char *text, const rfr_run_options *options, bool bf16_fast,
                             rfi_settings **out) {
  static const rfr_recompute recomputes[] = {[RFI_RECOMPUTE_none] = RFR_RECOMPUTE_KEEP,
                                             [RFI_RECOMPUTE_auto] = RFR_RECOMPUTE_AUTO,
                                             [RFI_RECOMPUTE_all] = RFR_RECOMPUTE_ALL};
  rfr_status status;
  rfi_settings *s = NULL;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *s, &s));
  s->ctx = ctx;
  status = rfi_config_read(ctx, options->config_name ? options->config_name : "config", text, strlen(text),
                           options->config_folder, options->overrides, options->n_overrides, &s->config);
  if (status != RFR_OK) goto fail;
  const rfi_config *c = s->config;
  s->steps = c->run_steps;
  s->time = c->run_time;
  s->epochs = c->run_epochs;
  s->evaluate_every = c->run_evaluate_every;
  s->evaluate_windows = c->source[RFI_CFG_run_evaluate_windows].from ? c->run_evaluate_windows : -1;
  s->checkpoint_every = c->run_checkpoint_every;
  s->log_every = c->run_log_every;
  s->tensorboard = c->run_tensorboard;
  s->sample_every = c->run_sample_every;
  s->keep = (int)c->run_keep;
  s->seed = (uint64_t)c->run_seed;
  s->budget = c->memory_budget;
  s->recompute = recomputes[c->memory_recompute];
  s->debug = c->run_debug;
  s->tune = c->run_tune;
  status = rfi_parallel_read(s, options);
  if (status == RFR_OK) status = read_model(s, bf16_fast);
  if (status == RFR_OK) status = rfi_parallel_check_model(s);
  if (status == RFR_OK) status = read_adapter(s);
  if (status == RFR_OK) status = read_batch(s);
  if (status == RFR_OK) status = read_logits(s);
  if (status == RFR_OK) status = rfi_settings_recipe(s);
  if (status == RFR_OK) status = read_optimizer(s);
  if (status == RFR_OK) status = read_ema(s, (options->programs & RFR_RUN_TRAIN) != 0);
  if (status == RFR_OK) status = read_schedule(s);
  if (status != RFR_OK) goto fail;
  *out = s;
  return RFR_OK;
fail:
  rfi_settings_destroy(s);
  return status;
}

rfr_status rfi_settings_set_steps(rfi_settings *s, int64_t steps) {
  s->steps = steps;
  return read_schedule(s);
}

void rfi_settings_destroy(rfi_settings *s) {
  if (!s) return;
  rfr_tokenizer_destroy(s->tokenizer);
  rfr_chat_template_destroy(s->chat);
  rfi_hf_notes_deinit(&s->notes);
  rfi_config_destroy(s->config);
  rfr_adapter_destroy(s->adapter);
  rfi_free(s->ctx, s);
}

rfr_status rfi_settings_print(const rfi_settings *s, bool sources, rfi_string *out) {
  return rfi_config_print(s->config, sources, out);
}

void rfi_settings_warn(const rfi_settings *s, void (*warn)(void *user, const char *line), void *user) {
  enum { MOST_LINES = 8 };
  char line[512];
  const size_t n = json_array_size(s->notes.unknown), most = n > MOST_LINES ? MOST_LINES - 1 : n;
  for (size_t i = 0; i < most; i++) {
    snprintf(line, sizeof line, "%.200s/config.json: unknown field \"%.100s\" is ignored", s->weights,
             json_string_value(json_array_get(s->notes.unknown, i)));
    for (char *c = line; *c; c++)
      if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    warn(user, line);
  }
  if (n == most) return;
  snprintf(line, sizeof line, "%.200s/config.json: %zu more unknown fields are ignored", s->weights, n - most);
  warn(user, line);
}

bool rfi_settings_has_byte_tokens(const rfi_settings *s) {
  return !s->weights || (s->spec.model.vocab_size <= 256 && !s->notes.tokenizer);
}

/* ---- tokenizer and template ---- */

/* The folder of the tokenizer, or its file; NULL: tokens are bytes. */
static rfr_status find_tokenizer(const rfi_settings *s, const char **path) {
  const rfi_config *c = s->config;
  const bool bytes = strcmp(c->data_tokenizer, "bytes") == 0, given = strcmp(c->data_tokenizer, "auto") != 0;
  *path = given && !bytes ? c->data_tokenizer : NULL;
  if (*path || rfi_settings_has_byte_tokens(s)) return RFR_OK;
  const char *name = s->notes.tokenizer, *file = name ? " and the file " : "";
  if (!bytes && !name && c->data_train.n == 0) return RFR_OK; /* the program provides tokens */
  if (!bytes && name && strcmp(name, "tokenizer.json") == 0) {
    *path = s->weights;
    return RFR_OK;
  }
  return rfi_fail_at(RFI_E_DATA_TOKENIZER, c->file, c->source[RFI_CFG_data_tokenizer].line,
                     "data.tokenizer: %s%s%s: the model has vocab_size %lld%s%s",
                     bytes ? "bytes does not fit " : "there is no ", s->weights, bytes ? "" : "/tokenizer.json",
                     (long long)s->spec.model.vocab_size, file, name ? name : "");
}

rfr_status rfi_settings_open_text(rfi_settings *s) {
  const rfi_config *c = s->config;
  const char *path;
  RFI_TRY(find_tokenizer(s, &path));
  if (path) RFI_TRY(rfr_tokenizer_open(s->ctx, path, &s->tokenizer));
  if (s->tokenizer && rfr_tokenizer_vocab_size(s->tokenizer) > s->spec.model.vocab_size)
    return rfi_fail_at(RFI_E_DATA_TOKENIZER, c->file, c->source[RFI_CFG_data_tokenizer].line,
                       "data.tokenizer: %s has %lld tokens, the model's vocab_size is %lld", path,
                       (long long)rfr_tokenizer_vocab_size(s->tokenizer), (long long)s->spec.model.vocab_size);
  if (path && !s->weights) RFI_TRY(rfi_hf_notes_read_tokenizer(s->ctx, path, s->tokenizer, &s->notes));
  if (strcmp(c->data_template, "model") != 0) return rfr_chat_template_open(s->ctx, c->data_template, NULL, &s->chat);
  const char *folder = s->weights;
  bool exists = false;
  if (path && !folder) RFI_TRY(rfi_model_has_files(s->ctx, path, &exists));
  if (exists) folder = path;
  exists = false;
  if (folder) RFI_TRY(rfi_chat_template_exists(s->ctx, folder, &exists));
  return exists ? rfr_chat_template_open(s->ctx, folder, NULL, &s->chat) : RFR_OK;
}

/* ---- data ---- */

/* Replaces each pattern "@FILE" by the lines of the file. */
static rfr_status expand(const rfi_settings *s, const char *root, const rfi_config_list *in, rfi_paths *out) {
  for (int i = 0; i < in->n; i++) {
    char *path = NULL, *text = NULL;
    size_t n;
    if (in->items[i][0] != '@') {
      RFI_TRY(rfi_paths_add(out, in->items[i], strlen(in->items[i])));
      continue;
    }
    RFI_TRY(rfi_path_join(s->ctx, root, in->items[i] + 1, &path));
    rfr_status status = rfi_file_read(s->ctx, path, &text, &n);
    rfi_free(s->ctx, path);
    for (char *line = text; status == RFR_OK && *line;) {
      const size_t length = strcspn(line, "\n");
      if (length > 0) status = rfi_paths_add(out, line, length);
      line += length + (line[length] == '\n');
    }
    rfi_free(s->ctx, text);
    RFI_TRY(status);
  }
  return RFR_OK;
}

typedef enum file_kind { FILE_TEXT, FILE_ROWS, FILE_TOKENS, FILE_KINDS } file_kind;

static file_kind kind_of_file(const char *path) {
  if (rfi_ends_in(path, ".bin") || rfi_ends_in(path, ".idx")) return FILE_TOKENS;
  return rfi_is_row_file(path) ? FILE_ROWS : FILE_TEXT;
}

/* Finds the common kind of all files. */
static rfr_status find_kind(const rfi_settings *s, const rfi_paths *train, const rfi_paths *validation,
                            file_kind *kind) {
  static const char *const names[] = {"is text", "has rows", "has tokens"};
  const rfi_config *c = s->config;
  const rfi_paths *const lists[] = {train, validation};
  rfi_paths files = {.ctx = s->ctx};
  rfr_status status = RFR_OK;
  int first[FILE_KINDS] = {-1, -1, -1}; /* index of the first file of each kind */
  *kind = c->data_format > RFI_FORMAT_text ? FILE_ROWS : FILE_TEXT;
  if (*kind == FILE_ROWS) return RFR_OK;
  for (int i = 0; i < 2 && status == RFR_OK; i++)
    for (int k = 0; k < lists[i]->n && status == RFR_OK; k++)
      status = rfi_glob(c->data_root, lists[i]->items[k], &files);
  for (int i = files.n - 1; i >= 0; i--) first[kind_of_file(files.items[i])] = i;
  for (int k = FILE_TEXT; k < FILE_KINDS; k++)
    if (first[k] >= 0) *kind = (file_kind)k;
  int documents = 0; /* a JSON document: probably a list of rows; as text, the run would train on its syntax */
  for (int i = 0; i < files.n; i++) documents += rfi_ends_in(files.items[i], ".json");
  if (status == RFR_OK && files.n > 0 && documents == files.n && c->data_format == RFI_FORMAT_auto)
    status = FAIL_AT(s, RFI_CFG_data_train,
                     "data.train: %.200s is a JSON document; write one row per line into a .jsonl file, or set "
                     "data.format: text",
                     files.items[0]);
  for (int k = FILE_TEXT; k < (int)*kind && status == RFR_OK; k++)
    if (first[k] >= 0)
      status = FAIL_AT(s, RFI_CFG_data_train,
                       "data.train: %.200s %s and %.200s %s; train on files of one kind, or set data.format",
                       files.items[first[*kind]], names[*kind], files.items[first[k]], names[k]);
  rfi_paths_deinit(&files);
  return status;
}

static rfr_status open_rows(const rfi_settings *s, const rfi_row_encoder *encoder, rfi_token_cache *cache,
                            const rfi_paths *train, const rfi_paths *validation, rfi_dataset **out) {
  _Static_assert((int)RFI_FORMAT_text == (int)RFI_ROW_text + 1 &&
                     (int)RFI_FORMAT_preference == (int)RFI_ROW_preference + 1,
                 "same order");
  const rfi_config *c = s->config;
  double *weights = NULL;
  if (c->data_weights.n > 0 && train->n > 0) {
    if (train->n != c->data_weights.n)
      return FAIL_AT(s, RFI_CFG_data_weights, "data.weights: not allowed with a list of patterns from a file (@FILE)");
    RFI_TRY(RFI_ALLOC(s->ctx, (size_t)train->n * sizeof *weights, &weights));
    for (int i = 0; i < train->n; i++) weights[i] = rfi_strtod(c->data_weights.items[i], &(char *){NULL});
  }
  const rfi_row_dataset_options o = {.root = c->data_root,
                                     .patterns = (const char *const *)train->items,
                                     .weights = weights,
                                     .n_patterns = train->n,
                                     .validation_fraction = c->data_validation.percent / 100.0,
                                     .validation_patterns = (const char *const *)validation->items,
                                     .n_validation_patterns = validation->n,
                                     .sequence = (int)s->sequence,
                                     .packing = c->data_packing,
                                     .truncate = (rfi_row_truncate)c->data_truncate,
                                     .form = c->data_format == RFI_FORMAT_auto ? RFI_ROW_FORM_COUNT
                                                                               : (rfi_row_form)(c->data_format - 1),
                                     .cache = cache};
  const rfr_status status = rfi_row_dataset_open(encoder, &o, out);
  rfi_free(s->ctx, weights);
  return status;
}

static rfr_status open_text(const rfi_settings *s, const rfi_row_encoder *encoder, rfi_token_cache *cache,
                            const rfi_paths *train, const rfi_paths *validation, rfi_dataset **out) {
  const rfi_config *c = s->config;
  rfi_text_documents documents = {.encoder = encoder, .cache = cache, .root = c->data_root};
  if (c->data_weights.n > 0) return FAIL_AT(s, RFI_CFG_data_weights, "data.weights: only files of rows have weights");
  const rfi_dataset_options o = {.root = c->data_root,
                                 .validation_fraction = c->data_validation.percent / 100.0,
                                 .validation_patterns = (const char *const *)validation->items,
                                 .n_validation_patterns = validation->n,
                                 .sequence = (int)s->sequence,
                                 .context = (int)c->run_evaluate_context,
                                 .encode = encoder->tokenizer ? rfi_text_documents_encode : NULL,
                                 .encode_user = &documents};
  return rfi_dataset_open(s->ctx, (const char *const *)train->items, train->n, &o, out);
}

static rfr_status open_tokens(const rfi_settings *s, const rfi_row_encoder *encoder, rfi_token_cache *cache,
                              const rfi_paths *train, const rfi_paths *validation, rfi_dataset **out) {
  (void)encoder, (void)cache;
  static const int widths[] = {[RFI_TOKEN_DTYPE_auto] = 0, [RFI_TOKEN_DTYPE_uint16] = 2, [RFI_TOKEN_DTYPE_uint32] = 4};
  const rfi_config *c = s->config;
  if (c->data_weights.n > 0) return FAIL_AT(s, RFI_CFG_data_weights, "data.weights: only files of rows have weights");
  const rfi_dataset_options o = {.root = c->data_root,
                                 .validation_fraction = c->data_validation.percent / 100.0,
                                 .validation_patterns = (const char *const *)validation->items,
                                 .n_validation_patterns = validation->n,
                                 .sequence = (int)s->sequence,
                                 .context = (int)c->run_evaluate_context};
  return rfi_token_dataset_open(s->ctx, (const char *const *)train->items, train->n, &o, s->spec.model.vocab_size,
                                widths[c->data_token_dtype], out);
}

/* Opens one data set of files of a kind. */
typedef rfr_status opener(const rfi_settings *, const rfi_row_encoder *, rfi_token_cache *, const rfi_paths *train,
                          const rfi_paths *validation, rfi_dataset **);

/* data.shares: each pattern is a separate data set. If there are held-out patterns, all data sets have the same
 * held-out files. */
static rfr_status open_mixture(const rfi_settings *s, const rfi_row_encoder *encoder, rfi_token_cache *cache,
                               const rfi_paths *train, const rfi_paths *validation, opener *open, rfi_dataset **out) {
  const rfi_config *c = s->config;
  rfi_mixture_source *sources;
  rfr_status status = RFR_OK;
  int n = 0;
  if (train->n != c->data_shares.n)
    return FAIL_AT(s, RFI_CFG_data_shares, "data.shares: not allowed with a list of patterns from a file (@FILE)");
  RFI_TRY(RFI_ALLOC(s->ctx, (size_t)train->n * sizeof *sources, &sources));
  for (; n < train->n && status == RFR_OK; n++) {
    const rfi_paths one = {.ctx = s->ctx, .items = &train->items[n], .n = 1};
    rfi_mixture_source *source = &sources[n];
    source->share = rfi_strtod(c->data_shares.items[n], &(char *){NULL});
    source->epochs = INFINITY;
    if (c->data_max_epochs.n > 0 && strcmp(c->data_max_epochs.items[n], "inf") != 0)
      source->epochs = rfi_strtod(c->data_max_epochs.items[n], &(char *){NULL});
    status = open(s, encoder, cache, &one, validation, &source->data);
    if (status != RFR_OK && strcmp(rfr_last_error()->slug, "data.empty") == 0)
      rfi_fail_prefix("data.shares: %.200s: ", train->items[n]);
    if (status == RFR_OK && rfi_dataset_get_stats(source->data)->trained[RFI_TRAIN] == 0)
      status = FAIL_AT(s, RFI_CFG_data_shares, "data.shares: %.200s has no token to train", train->items[n]);
  }
  if (status == RFR_OK) status = rfi_mixture_open(s->ctx, sources, n, validation->n > 0, out);
  else
    for (int i = 0; i < n; i++) rfi_dataset_close(sources[i].data);
  rfi_free(s->ctx, sources);
  return status;
}

rfr_status rfi_settings_open_data(const rfi_settings *s, bool evaluates, void (*warn)(void *user, const char *line),
                                  void *user, rfi_dataset **out) {
  _Static_assert((int)RFI_LOSS_all == (int)RFI_ROW_LOSS_ALL && (int)RFI_TRUNCATE_refuse == (int)RFI_ROW_REFUSE,
                 "same order");
  const rfi_config *c = s->config;
  const rfi_row_encoder encoder = {
      .ctx = s->ctx, .tokenizer = s->tokenizer, .chat = s->chat, .loss = (rfi_row_loss)c->data_loss};
  rfi_token_cache cache = {.ctx = s->ctx, .folder = c->data_cache, .warn = warn, .user = user};
  rfi_paths train = {.ctx = s->ctx}, validation = {.ctx = s->ctx};
  static opener *const openers[] = {[FILE_TEXT] = open_text, [FILE_ROWS] = open_rows, [FILE_TOKENS] = open_tokens};
  file_kind kind = FILE_TEXT;
  *out = NULL;
  if (strcmp(c->data_cache, "auto") == 0) cache.folder = "";
  if (strcmp(c->data_cache, "none") == 0 || !s->tokenizer) cache.folder = NULL; /* bytes need no cache */
  rfr_status status = expand(s, c->data_root, &c->data_train, &train);
  if (status == RFR_OK) status = expand(s, c->data_root, &c->data_validation.patterns, &validation);
  if (status == RFR_OK && evaluates && validation.n > 0) {
    const rfi_paths none = {.ctx = s->ctx};
    status = find_kind(s, &none, &validation, &kind);
    if (kind != FILE_TEXT) rfi_paths_deinit(&train), train = none;
  }
  if (status == RFR_OK) status = find_kind(s, &train, &validation, &kind);
  if (status == RFR_OK && c->data_shares.n > 0 && train.n > 0)
    status = open_mixture(s, &encoder, &cache, &train, &validation, openers[kind], out);
  else if (status == RFR_OK) status = openers[kind](s, &encoder, &cache, &train, &validation, out);
  rfi_paths_deinit(&train);
  rfi_paths_deinit(&validation);
  return status;
}

/* ---- comparison with a checkpoint ---- */

rfr_status rfi_settings_signature(const rfi_settings *s, json_t **out) {
  json_t *object = json_object();
  rfr_status status = object ? RFR_OK : rfi_fail(RFI_E_NO_MEMORY, "the signature of a run");
  for (int id = 0; status == RFR_OK && id < RFI_CFG_COUNT; id++) {
    if (!rfi_config_resume_compares((rfi_config_id)id) || !rfi_config_is_used(s->config, (rfi_config_id)id)) continue;
    rfi_string text = {.ctx = s->ctx};
    status = rfi_config_print_value(s->config, (rfi_config_id)id, &text);
    if (status == RFR_OK) status = rfi_json_set(object, rfi_config_path((rfi_config_id)id), json_string(text.data));
    rfi_string_deinit(&text);
  }
  if (status != RFR_OK) {
    json_decref(object);
    object = NULL;
  }
  *out = object;
  return status;
}

static void warn_event(void *user, const char *line) {
  const rfr_run_options *o = user;
  const rfr_event e = {.size = sizeof e, .kind = RFR_EVENT_WARNING, .message = line};
  if (o->on_event) o->on_event(&e, o->event_user);
}

rfr_status rfr_config_resolve(rfr_ctx *ctx, const char *config_text, const rfr_run_options *options, int sources,
                              rfr_write_fn write, void *user) {
  rfi_settings *s = NULL;
  rfi_host_info machine;
  rfi_string text = {.ctx = ctx};
  rfr_run_options o = options ? *options : rfr_run_options_default();
  RFI_TRY(rfi_host_info_read(ctx, &machine));
  RFI_TRY(rfi_settings_read(ctx, config_text, &o, machine.bf16_fast, &s));
  rfi_settings_warn(s, warn_event, &o);
  rfr_status status = rfi_settings_print(s, sources != 0, &text);
  if (status == RFR_OK) write(text.data, text.n, user);
  rfi_string_deinit(&text);
  rfi_settings_destroy(s);
  return status;
}
