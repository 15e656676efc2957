/* SPDX-License-Identifier: Apache-2.0
 *
 * The section `parallel`, and the table of what works over several ranks. A combination that is not in the table is
 * refused here, before anything is read or compiled.
 */
#include "train/parallel.h"

#include "refrain/dist.h"
#include "train/settings.h"
#include "train/stage_trace.h"

#define FAIL_AT(s, id, ...) \
  rfi_fail_at(RFI_E_CONFIG_VALUE, (s)->config->file, (s)->config->source[id].line, __VA_ARGS__)

/* ---- combinations that are refused over several ranks ---- */

static bool has_time(const rfi_settings *s, const rfr_run_options *o) {
  (void)o;
  return s->time > 0;
}
static bool has_tune(const rfi_settings *s, const rfr_run_options *o) {
  (void)o;
  return s->tune;
}
static bool has_own_data(const rfi_settings *s, const rfr_run_options *o) {
  (void)s;
  return o->data != NULL;
}

static bool has_adapter(const rfi_settings *s, const rfr_run_options *o) {
  (void)o;
  return s->config->adapter_type != RFI_ADAPTER_none;
}
static bool has_recipe(const rfi_settings *s, const rfr_run_options *o) {
  (void)o;
  return s->config->precision_recipe != RFI_RECIPE_none;
}
static bool has_moments8(const rfi_settings *s, const rfr_run_options *o) {
  (void)o;
  return s->config->optimizer_state_dtype == RFR_U8;
}

static bool has_muon(const rfi_settings *s, const rfr_run_options *o) {
  (void)o;
  return s->config->optimizer_name == RFI_OPTIMIZER_muon;
}

static bool has_sharded_ema(const rfi_settings *s, const rfr_run_options *o) {
  (void)o;
  return s->config->optimizer_ema > 0 && s->parallel.shard != RFR_SHARD_NONE;
}

/* Flags of a table row: modes of parallel.shard, and expert parallelism. */
enum { NONE = 1 << RFR_SHARD_NONE, OPTIMIZER = 1 << RFR_SHARD_OPTIMIZER, FULL = 1 << RFR_SHARD_FULL, EXPERTS = 8 };

static const struct {
  const char *name;
  bool (*has)(const rfi_settings *s, const rfr_run_options *o);
  int refused;
  const char *why;
} rows[] = {
    {"run.time", has_time, NONE | OPTIMIZER | FULL, "the clocks of the ranks differ; give run.steps or run.epochs"},
    {"run.tune", has_tune, NONE | OPTIMIZER | FULL, "ranks would choose different algorithms; remove the key"},
    {"data of the program", has_own_data, NONE | OPTIMIZER | FULL,
     "only one rank can request windows in order; give files in data.train"},
    {"an adapter", has_adapter, EXPERTS, "give parallel.expert: 1"},
    {"precision.recipe", has_recipe, EXPERTS, "ranks would have different scales; give parallel.expert: 1"},
    {"optimizer.state_dtype: u8", has_moments8, EXPERTS,
     "the experts of a rank would have other blocks; give bf16 or f32"},
    {"optimizer.name: muon", has_muon, OPTIMIZER | FULL | EXPERTS,
     "a rank needs complete matrices; give parallel.shard: none and parallel.expert: 1"},
    {"optimizer.ema with parallel.shard", has_sharded_ema, EXPERTS,
     "the averages of experts cannot be gathered; give parallel.shard: none"},
};

/* `with`: text for the flag, before "over N ranks". */
static rfr_status check_rows(const rfi_settings *s, const rfr_run_options *o, int bit, const char *with) {
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    if ((rows[i].refused & bit) && rows[i].has(s, o))
      return rfi_fail_at(RFI_E_UNSUPPORTED, s->config->file, 0, "%s %sover %d ranks: %s", rows[i].name, with,
                         s->parallel.ranks, rows[i].why);
  return RFR_OK;
}

/* ---- pipelines ---- */

static rfr_status check_pipeline(const rfi_settings *s, const rfr_run_options *o) {
  const rfi_config *c = s->config;
  const int P = s->parallel.pipeline, ranks = s->parallel.ranks;
  if (ranks % P != 0)
    return FAIL_AT(s, RFI_CFG_parallel_pipeline,
                   "parallel.pipeline: %d does not divide the %d ranks; give a divisor, or start as many ranks", P,
                   ranks);
  if (s->parallel.shard != RFR_SHARD_NONE)
    return FAIL_AT(s, RFI_CFG_parallel_shard,
                   "parallel.shard: %s with a pipeline: each rank keeps all parameters of its stages; give none",
                   rfr_shard_name(s->parallel.shard));
  if (c->source[RFI_CFG_parallel_data].from && c->parallel_data != ranks / P)
    return FAIL_AT(s, RFI_CFG_parallel_data,
                   "parallel.data: %lld, but %d ranks in pipelines of %d are %d; remove the key, or start as many "
                   "ranks",
                   (long long)c->parallel_data, ranks, P, ranks / P);
  if (o->programs & ~(RFR_RUN_TRAIN | RFR_RUN_EVALUATE))
    return rfi_fail(RFI_E_UNSUPPORTED, "a pipeline cannot generate; export the model, and generate on one rank");
  if (o->programs && !(o->programs & RFR_RUN_TRAIN))
    return rfi_fail(RFI_E_UNSUPPORTED,
                    "the ranks of a pipeline evaluate while they train; evaluate its folder on one rank");
  return RFR_OK;
}

/* ---- experts ---- */

static rfr_status check_expert(const rfi_settings *s, const rfr_run_options *o) {
  const int N = s->parallel.expert;
  if (N != s->parallel.ranks)
    return FAIL_AT(s, RFI_CFG_parallel_expert,
                   "parallel.expert: %d, but there are %d ranks; the experts are spread over all of them", N,
                   s->parallel.ranks);
  if (s->parallel.pipeline > 1)
    return FAIL_AT(s, RFI_CFG_parallel_pipeline, "parallel.pipeline: experts are not spread in a pipeline; give 1");
  return check_rows(s, o, EXPERTS, "with experts ");
}

/* Each stage of a pipeline has at least one layer. */
static rfr_status check_layers(const rfi_settings *s) {
  const rfi_pipeline_part part = {.ranks = s->parallel.pipeline, .schedule = s->parallel.schedule};
  const int stages = rfi_pipeline_stages(&part), each = rfi_pipeline_chunks(&part);
  const int64_t layers = s->spec.model.layers;
  if (part.ranks <= 1 || layers >= stages) return RFR_OK;
  return FAIL_AT(s, RFI_CFG_parallel_pipeline,
                 "parallel.pipeline: %d with parallel.schedule: %s has %d stages, but model.num_hidden_layers is %lld; "
                 "give parallel.pipeline: %lld or less%s",
                 part.ranks, rfr_schedule_kind_name(part.schedule), stages, (long long)layers,
                 (long long)(layers >= each ? layers / each : 1),
                 each > 1 && layers >= part.ranks ? ", or parallel.schedule: 1f1b" : "");
}

rfr_status rfi_parallel_check_model(const rfi_settings *s) {
  RFI_TRY(check_layers(s));
  const int N = s->parallel.expert;
  const int64_t experts = s->spec.model.experts;
  if (N <= 1 || (experts > 0 && experts % N == 0)) return RFR_OK;
  if (experts == 0)
    return FAIL_AT(s, RFI_CFG_parallel_expert, "parallel.expert: %d, but the model has no experts; give 1", N);
  return FAIL_AT(s, RFI_CFG_parallel_expert, "parallel.expert: %d, which does not divide the model's %lld experts", N,
                 (long long)experts);
}

/* ---- the keys ---- */

rfr_status rfi_parallel_read(rfi_settings *s, const rfr_run_options *o) {
  _Static_assert((int)RFI_SHARD_none == (int)RFR_SHARD_NONE && (int)RFI_SHARD_full == (int)RFR_SHARD_FULL,
                 "same order");
  const rfi_config *c = s->config;
  rfi_parallel *p = &s->parallel;
  p->rank = o->comm ? rfr_comm_rank(o->comm) : 0;
  p->ranks = p->data = o->comm ? rfr_comm_size(o->comm) : 1;
  p->shard = (rfr_shard)c->parallel_shard;
  p->timeout = c->parallel_timeout;
  p->expert = o->comm ? (int)c->parallel_expert : 1;
  p->pipeline = o->comm ? (int)c->parallel_pipeline : 1;
  p->schedule = (rfr_schedule_kind)c->parallel_schedule;
  if (p->pipeline > 1) {
    RFI_TRY(check_pipeline(s, o));
    p->data = p->ranks / p->pipeline;
  }
  if (p->expert > 1) RFI_TRY(check_expert(s, o));
  if (c->source[RFI_CFG_parallel_data].from && c->parallel_data != p->data && o->comm)
    return FAIL_AT(s, RFI_CFG_parallel_data,
                   "parallel.data: %lld, but there are %d ranks; remove the key, or start as many ranks",
                   (long long)c->parallel_data, p->ranks);
  return p->ranks > 1 ? check_rows(s, o, 1 << p->shard, "") : RFR_OK;
}
