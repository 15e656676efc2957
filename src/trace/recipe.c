/* SPDX-License-Identifier: Apache-2.0
 *
 * Recipes in a trace: scopes while it is recorded, labels of GEMMs, and their text.
 *
 * Only GEMMs of linear layers get a label: a matrix times a weight, plain or grouped. Autodiff copies the label and its
 * number to the backward GEMMs, so that the pass `quantize` can find the GEMMs that belong together. A GEMM whose
 * weight matches a pattern of `keep` gets the label "keep", so that the pass can report it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "refrain/nn.h"
#include "trace/trace.h"

enum { MOST_MARGIN = 16, MOST_HISTORY = 4096 };
static const char keep_text[] = "keep";

#define NAME(e, name) name,
static const char *const kinds[] = {RFR_RECIPES(NAME)};
static const char *const formats[] = {RFR_RECIPE_FORMATS(NAME)};
static const char *const rules[] = {RFR_AMAX_RULES(NAME)};
static const char *const backwards[] = {"quantized", "high"};
#undef NAME
#define COUNT(table) ((int)(sizeof(table) / sizeof *(table)))

const char *rfr_recipe_name(rfr_recipe_kind kind) {
  return (unsigned)kind < (unsigned)COUNT(kinds) ? kinds[kind] : "?";
}

rfr_recipe rfr_recipe_default(rfr_recipe_kind kind) {
  const bool tensor = kind == RFR_RECIPE_FP8_DELAYED || kind == RFR_RECIPE_FP8_CURRENT;
  return (rfr_recipe){.size = sizeof(rfr_recipe),
                      .kind = kind,
                      .format = tensor ? RFR_RECIPE_FORMAT_HYBRID : RFR_RECIPE_FORMAT_E4M3,
                      .history = kind == RFR_RECIPE_FP8_DELAYED ? 1024 : 0,
                      .powers_of_two = kind == RFR_RECIPE_FP8_BLOCK};
}

/* The reason why a recipe is invalid; NULL: it is valid. */
static const char *fault_of(const rfr_recipe *r) {
  const bool delayed = r->kind == RFR_RECIPE_FP8_DELAYED;
  if ((unsigned)r->kind >= (unsigned)COUNT(kinds)) return "kind is not a recipe";
  if ((unsigned)r->format >= (unsigned)COUNT(formats)) return "format is not a format";
  if ((unsigned)r->rule >= (unsigned)COUNT(rules)) return "rule is not a rule";
  if (r->margin < 0 || r->margin > MOST_MARGIN) return "margin must be 0 to 16";
  if (delayed && (r->history < 1 || r->history > MOST_HISTORY)) return "history must be 1 to 4096";
  if (!delayed && (r->margin || r->history || r->rule)) return "only fp8_delayed has margin, history and rule";
  if (r->kind == RFR_RECIPE_NVFP4 && r->format != RFR_RECIPE_FORMAT_E4M3) return "nvfp4 has one format, E2M1";
  if (r->powers_of_two >> 1 || r->high_backward >> 1) return "a flag is neither 0 nor 1";
  if (r->powers_of_two && r->kind != RFR_RECIPE_FP8_CURRENT && r->kind != RFR_RECIPE_FP8_BLOCK)
    return "only fp8_current and fp8_block have a choice of powers_of_two";
  if (r->n_keep < 0 || (r->n_keep > 0 && !r->keep)) return "keep is NULL, or n_keep is negative";
  for (int i = 0; i < r->n_keep; i++)
    if (!r->keep[i]) return "a pattern of keep is NULL";
  return NULL;
}

rfr_status rfr_recipe_check(const rfr_recipe *r) {
  RFI_TRY(rfi_check_handle(r, "rfr_recipe"));
  if (r->size != sizeof *r)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_recipe.size is %zu: start from rfr_recipe_default", r->size);
  const char *fault = fault_of(r);
  return fault ? rfi_fail(RFI_E_ARGUMENT, "recipe %s: %s", rfr_recipe_name(r->kind), fault) : RFR_OK;
}

/* ---- scopes ---- */

static const rfr_source nowhere = {NULL, 0};

static bool copy_patterns(rfr_trace *t, rfr_recipe *r) {
  const char **keep = rfi_arena_alloc(t->arena, sizeof *keep * (size_t)(r->n_keep + 1));
  for (int i = 0; keep && i < r->n_keep; i++)
    if (!(keep[i] = rfi_arena_strdup(t->arena, r->keep[i]))) return false;
  r->keep = keep;
  return keep != NULL;
}

void rfr_recipe_begin(rfr_trace *t, const rfr_recipe *recipe) {
  if (!rfi_trace_records(t)) return;
  rfr_recipe r = rfr_recipe_default(RFR_RECIPE_NONE);
  if (recipe && rfr_recipe_check(recipe) != RFR_OK) {
    char text[200];
    rfi_snprintf(text, sizeof text, "%s", rfr_last_error()->message);
    rfi_trace_fail(t, nowhere, "", RFI_E_ARGUMENT, "%s", text);
    return;
  }
  if (recipe) r = *recipe;
  if (t->n_scopes == RFI_MAX_RECIPE_SCOPES) {
    rfi_trace_fail(t, nowhere, "", RFI_E_ARGUMENT, "more than %d recipe scopes are open", RFI_MAX_RECIPE_SCOPES);
    return;
  }
  if (r.n_keep > 0 && !copy_patterns(t, &r)) {
    rfi_trace_fail(t, nowhere, "", RFI_E_NO_MEMORY, "the patterns of a recipe");
    return;
  }
  t->scopes[t->n_scopes++] = r;
}

void rfr_recipe_end(rfr_trace *t) {
  if (!rfi_trace_records(t)) return;
  if (t->n_scopes > 0) t->n_scopes--;
  else rfi_trace_fail(t, nowhere, "", RFI_E_ARGUMENT, "no recipe scope is open");
}

/* ---- labels ---- */

static bool recipes_equal(const rfr_recipe *a, const rfr_recipe *b) {
  return a->kind == b->kind && a->format == b->format && a->margin == b->margin && a->history == b->history &&
         a->rule == b->rule && a->powers_of_two == b->powers_of_two && a->high_backward == b->high_backward;
}

rfr_status rfi_recipe_intern(rfr_trace *t, const rfr_recipe *recipe, uint8_t *out) {
  for (int i = 0; i < t->n_recipes; i++)
    if (recipes_equal(&t->recipes[i], recipe)) {
      *out = (uint8_t)(i + 1);
      return RFR_OK;
    }
  if (t->n_recipes == RFI_MAX_RECIPES)
    return rfi_fail(RFI_E_ARGUMENT, "a trace has at most %d different recipes", RFI_MAX_RECIPES);
  if (!rfi_arena_grow(t->arena, (void **)&t->recipes, &t->cap_recipes, t->n_recipes + 1, sizeof *t->recipes))
    return RFR_NO_MEMORY;
  t->recipes[t->n_recipes] = *recipe;
  t->recipes[t->n_recipes].keep = NULL;
  t->recipes[t->n_recipes].n_keep = 0;
  *out = (uint8_t)++t->n_recipes;
  return RFR_OK;
}

bool rfi_labels_equal(const rfr_trace *a, rfi_label la, const rfr_trace *b, rfi_label lb) {
  if (!la.recipe || !lb.recipe) return la.recipe == lb.recipe;
  if (la.linear != lb.linear) return false;
  if (la.recipe == RFI_RECIPE_KEEP || lb.recipe == RFI_RECIPE_KEEP) return la.recipe == lb.recipe;
  return recipes_equal(&a->recipes[la.recipe - 1], &b->recipes[lb.recipe - 1]);
}

const rfi_value *rfi_input_of(const rfr_trace *t, rfr_value v) {
  while (v >= 0 && v < t->n_values) {
    const rfi_value *x = &t->values[v];
    if (x->op < 0) return x;
    const rfi_opr *op = &t->ops[x->op];
    if (!(op->def->flags & (RFI_VIEW | RFI_FORM | RFI_LOCAL))) return NULL;
    v = op->in[0];
  }
  return NULL;
}

/* The weight of a linear; RFR_NONE: the call is not a linear. */
static rfr_value weight_of(const rfr_trace *t, const rfi_op_def *def, int n_in, const rfr_value *in,
                           const rfi_attr *attr) {
  enum { W = 1, SEPARATE = 5 };
  if (n_in < 2 || in[0] < 0 || in[0] >= t->n_values) return RFR_NONE;
  if (def->code == RFI_OP_matmul) return t->values[in[0]].type.rank == 2 && !attr[0].i ? in[W] : RFR_NONE;
  if (def->code != RFI_OP_grouped_matmul) return RFR_NONE;
  return in[W] >= 0 || n_in <= SEPARATE ? in[W] : in[SEPARATE];
}

rfr_status rfi_label_now(rfr_trace *t, const rfi_op_def *def, int n_in, const rfr_value *in, const rfi_attr *attr,
                         rfi_label *out) {
  *out = (rfi_label){0, 0};
  if (!rfi_takes_recipe(def)) return RFR_OK;
  if (t->inherits) *out = t->inherited;
  if (t->inherits || t->n_scopes == 0) return RFR_OK;
  const rfr_recipe *r = &t->scopes[t->n_scopes - 1];
  const rfr_value w = weight_of(t, def, n_in, in, attr);
  if (r->kind == RFR_RECIPE_NONE || w < 0) return RFR_OK;
  const rfi_value *input = rfi_input_of(t, w);
  out->linear = t->next_linear++;
  for (int i = 0; input && i < r->n_keep; i++)
    if (rfr_name_matches(r->keep[i], input->name)) out->recipe = RFI_RECIPE_KEEP;
  return out->recipe ? RFR_OK : rfi_recipe_intern(t, r, &out->recipe);
}

/* ---- text ---- */

const char *rfi_recipe_text(const rfr_trace *t, rfi_label label, char buf[RFI_RECIPE_TEXT]) {
  if (label.recipe == RFI_RECIPE_KEEP) return memcpy(buf, keep_text, sizeof keep_text);
  const rfr_recipe *r = &t->recipes[label.recipe - 1];
  rfi_snprintf(buf, RFI_RECIPE_TEXT, "%s format=%s margin=%d history=%d rule=%s powers_of_two=%d backward=%s",
               kinds[r->kind], formats[r->format], r->margin, r->history, rules[r->rule], r->powers_of_two,
               backwards[r->high_backward]);
  return buf;
}

/* Reads `prefix` and the following word, up to a space or the end. */
static bool take_word(const char **p, const char *prefix, char word[32]) {
  const size_t n = strlen(prefix);
  if (strncmp(*p, prefix, n) != 0) return false;
  *p += n;
  const size_t length = strcspn(*p, " ");
  if (length == 0 || length >= 32) return false;
  memcpy(word, *p, length);
  word[length] = 0;
  *p += length;
  return true;
}

static bool take_choice(const char **p, const char *prefix, const char *const *names, int count, int *out) {
  char word[32];
  if (!take_word(p, prefix, word)) return false;
  for (*out = 0; *out < count; ++*out)
    if (strcmp(names[*out], word) == 0) return true;
  return false;
}

static bool take_number(const char **p, const char *prefix, int *out) {
  char word[32], *end;
  if (!take_word(p, prefix, word) || strlen(word) > 6) return false;
  *out = (int)strtol(word, &end, 10);
  return *end == 0;
}

rfr_status rfi_recipe_parse(rfr_trace *t, const char *text, uint8_t *out) {
  rfr_recipe r = {.size = sizeof r};
  int kind = 0, format = 0, rule = 0;
  *out = RFI_RECIPE_KEEP;
  if (strcmp(text, keep_text) == 0) return RFR_OK;
  const bool read = take_choice(&text, "", kinds, COUNT(kinds), &kind) &&
                    take_choice(&text, " format=", formats, COUNT(formats), &format) &&
                    take_number(&text, " margin=", &r.margin) && take_number(&text, " history=", &r.history) &&
                    take_choice(&text, " rule=", rules, COUNT(rules), &rule) &&
                    take_number(&text, " powers_of_two=", &r.powers_of_two) &&
                    take_choice(&text, " backward=", backwards, COUNT(backwards), &r.high_backward) && !*text;
  r.kind = (rfr_recipe_kind)kind, r.format = (rfr_recipe_format)format, r.rule = (rfr_amax_rule)rule;
  if (!read || kind == RFR_RECIPE_NONE || fault_of(&r)) return rfi_fail(RFI_E_TRACE_PARSE, "not a recipe");
  return rfi_recipe_intern(t, &r, out);
}
