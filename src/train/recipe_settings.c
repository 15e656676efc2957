/* SPDX-License-Identifier: Apache-2.0
 *
 * The precision.* keys as the recipe of the training step. Patterns of precision.keep become names of weights, because
 * they may match names of a model folder, which the trace does not have.
 */
#include <string.h>

#include "nn/adapter.h"
#include "pass/recipe_rules.h"
#include "train/settings.h"

/* Marks the linear weights of the first and the last layer. */
static void match_ends(const rfr_model_config *m, bool *matched) {
  for (int i = 0; i < rfr_model_parameter_count(m); i++) {
    const bool own = !rfi_adapter_owner(m, i, &(rfi_adapter_part){0});
    const rfi_param_kind kind = own ? rfi_parameter_kind(m, i) : RFI_PARAM_TOKENS;
    matched[i] = rfi_is_linear(kind) &&
                 (rfi_parameter_index(m, kind, 0) == i || rfi_parameter_index(m, kind, m->layers - 1) == i);
  }
}

/* precision.keep as a list of weight names; at least one linear weight must be left. */
static rfr_status read_keep(rfi_settings *s, rfr_recipe *r) {
  const rfi_config *c = s->config;
  const rfr_model_config *m = &s->spec.model;
  const int n = rfr_model_parameter_count(m);
  const char **names = rfi_arena_alloc(c->arena, (size_t)(n + 1) * sizeof *names);
  bool *kept = rfi_arena_alloc(c->arena, (size_t)n + 1), *matched = rfi_arena_alloc(c->arena, (size_t)n + 1);
  if (!names || !kept || !matched) return RFR_NO_MEMORY;
  for (int k = 0; k < c->precision_keep.n; k++) {
    const char *pattern = c->precision_keep.items[k];
    if (strcmp(pattern, "first-and-last") == 0) match_ends(m, matched);
    else RFI_TRY(rfi_settings_match(s, RFI_CFG_precision_keep, pattern, matched));
    for (int i = 0; i < n; i++) kept[i] |= matched[i];
  }
  bool left = false;
  rfr_parameter p;
  r->n_keep = 0;
  for (int i = 0; i < n && rfr_model_parameter(m, i, &p) == RFR_OK; i++) {
    if (rfi_adapter_owner(m, i, &(rfi_adapter_part){0}) || !rfi_is_linear(rfi_parameter_kind(m, i))) continue;
    left = left || !kept[i];
    if (kept[i] && !(names[r->n_keep++] = rfi_arena_strdup(c->arena, p.name))) return RFR_NO_MEMORY;
  }
  r->keep = names;
  if (left) return RFR_OK;
  return rfi_fail_at(
      RFI_E_CONFIG_VALUE, c->file, c->source[RFI_CFG_precision_keep].line,
      "precision.keep: every linear layer is kept, so that precision.recipe has no effect; give fewer patterns, "
      "or [] for none");
}

/* The tokens of a microbatch are a dimension of every GEMM; only grouped rows are padded. */
static rfr_status check_tokens(const rfi_settings *s, const rfr_recipe *r) {
  const rfi_config *c = s->config;
  const int64_t unit = rfi_recipe_unit(r), tokens = s->sequence * s->rows;
  if (tokens % unit == 0 || s->spec.model.experts > 0) return RFR_OK;
  return rfi_fail_at(
      RFI_E_CONFIG_VALUE, c->file, c->source[RFI_CFG_precision_recipe].line,
      "precision.recipe: it would have no effect, because data.sequence %lld x batch.microbatch %lld is not "
      "a multiple of %lld; change one of them",
      (long long)s->sequence, (long long)s->rows, (long long)unit);
}

rfr_status rfi_settings_recipe(rfi_settings *s) {
  _Static_assert((int)RFI_RECIPE_nvfp4 == (int)RFR_RECIPE_NVFP4 &&
                     (int)RFI_RECIPE_fp8_block == (int)RFR_RECIPE_FP8_BLOCK &&
                     (int)RFI_RECIPE_FORMAT_hybrid == (int)RFR_RECIPE_FORMAT_HYBRID &&
                     (int)RFI_AMAX_RULE_most_recent == (int)RFR_AMAX_MOST_RECENT,
                 "same order");
  const rfi_config *c = s->config;
  rfr_recipe r = rfr_recipe_default((rfr_recipe_kind)c->precision_recipe);
  if (r.kind != RFR_RECIPE_NONE) {
    if (r.kind != RFR_RECIPE_NVFP4) r.format = (rfr_recipe_format)c->precision_format;
    r.margin = (int)c->precision_margin;
    r.history = (int)c->precision_history;
    r.rule = (rfr_amax_rule)c->precision_history_rule;
    r.high_backward = c->precision_backward == RFI_BACKWARD_high;
    RFI_TRY(check_tokens(s, &r));
    RFI_TRY(read_keep(s, &r));
  }
  s->spec.recipe = r;
  return rfr_recipe_check(&s->spec.recipe);
}
