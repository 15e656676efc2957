/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads a run's configuration in this order: defaults, values of the file, values of --set, each with its source; then
 * derives "auto" keys and checks relations between keys. An error points at the key that the user can change.
 */
#include "train/config.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "refrain/train.h"
#include "text/unicode.h"
#include "train/config_value.h"

#define RFI_CHOICE_TEXT(list, name) "|" #name
#define RFI_CHOICES(list) (&(RFI_CHOICES_##list(RFI_CHOICE_TEXT))[1])
static const rfi_config_row rows[RFI_CFG_COUNT] = {
#define RFI_ROW(section, key, path, field, type, initial, accepted, resume, meaning) \
  {section,                                                                          \
   key,                                                                              \
   path,                                                                             \
   RFI_KIND_##type,                                                                  \
   offsetof(rfi_config, field),                                                      \
   sizeof(RFI_CONFIG_##type),                                                        \
   initial,                                                                          \
   accepted,                                                                         \
   RFI_RESUME_##resume,                                                              \
   meaning},
#define RFI_TOP(key, type, initial, accepted, resume, meaning) \
  RFI_ROW("", #key, #key, key, type, initial, accepted, resume, meaning)
#define RFI_KEY(section, key, type, initial, accepted, resume, meaning) \
  RFI_ROW(#section, #key, #section "." #key, section##_##key, type, initial, accepted, resume, meaning)
#include "train/config_schema.def"
#undef RFI_TOP
#undef RFI_KEY
#undef RFI_ROW
};

static void *value_of(rfi_config *c, int id) { return (char *)c + rows[id].offset; }

const char *rfi_config_path(rfi_config_id id) { return rows[id].path; }

bool rfi_config_resume_compares(rfi_config_id id) { return rows[id].resume != RFI_RESUME_FREE; }

rfr_status rfr_config_key_at(int i, rfr_config_key *out) {
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_config_key"));
  out->size = sizeof *out;
  if (i < 0 || i >= RFI_CFG_COUNT) return rfi_fail(RFI_E_ARGUMENT, "key %d of %d", i, (int)RFI_CFG_COUNT);
  const rfi_config_row *row = &rows[i];
  out->name = row->path;
  out->type = rfi_config_type_text(row->kind);
  out->initial = row->initial;
  out->accepted = row->accepted;
  out->meaning = row->meaning;
  out->may_change = row->resume != RFI_RESUME_MUST;
  return RFR_OK;
}

int64_t rfi_config_steps(rfi_config_amount amount, int64_t total) {
  return amount.percent ? (int64_t)llround(amount.value / 100 * (double)total) : (int64_t)amount.value;
}

/* ---- finding keys ---- */

static int find_row(const char *section, const char *key) {
  for (int i = 0; i < RFI_CFG_COUNT; i++)
    if (strcmp(rows[i].section, section) == 0 && strcmp(rows[i].key, key) == 0) return i;
  return -1;
}

static bool is_section(const char *name) {
  for (int i = 0; i < RFI_CFG_COUNT; i++)
    if (*rows[i].section && strcmp(rows[i].section, name) == 0) return true;
  return false;
}

typedef struct foreign {
  const char *names, *ours, *note;
} foreign;

/* Finds the row of another trainer's key; NULL: none. Ignores case, and "-" equals "_". */
static const foreign *foreign_key(const char *key) {
  static const foreign table[] = {
#define RFI_FOREIGN(names, ours, note) {names, ours, note},
#include "train/config_foreign.def"
#undef RFI_FOREIGN
  };
  char name[64];
  size_t n = strlen(key);
  if (n == 0 || n >= sizeof name) return NULL;
  for (size_t i = 0; i <= n; i++)
    name[i] = (char)(key[i] == '-' ? '_' : key[i] >= 'A' && key[i] <= 'Z' ? key[i] - 'A' + 'a' : key[i]);
  for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
    if (rfi_has_word(table[i].names, name)) return &table[i];
  return NULL;
}

/* Fails with config.key and a suggestion, with its section: our key for another trainer's, else the nearest key of the
 * section, else such a key of another section. `section` may be unknown. */
static rfr_status unknown_key(const char *file, int64_t line, const char *section, const char *key) {
  const char *names[2 * RFI_CFG_COUNT], *suggestion, *path = NULL, *last = strrchr(key, '.');
  const foreign *other = foreign_key(last ? last + 1 : key);
  int n = 0;
  if (!other && !is_section(section)) other = foreign_key(section);
  if (other) {
    const char *between = *section ? "." : "", *colon = *other->ours && *other->note ? ": " : "";
    return rfi_fail_at(RFI_E_CONFIG_KEY, file, line, "unknown key \"%.60s%s%.100s\"; %s%s%s%s%s", section, between, key,
                       *other->ours ? "use \"" : "", other->ours, *other->ours ? "\"" : "", colon, other->note);
  }
  for (int i = 0; i < RFI_CFG_COUNT; i++) {
    if (strcmp(rows[i].section, section) == 0) names[n++] = rows[i].key;
    else if (!*section) names[n++] = rows[i].section;
  }
  suggestion = rfi_nearest(key, names, n);
  for (int i = 0; i < RFI_CFG_COUNT && !path; i++)
    if (strcmp(rows[i].key, suggestion ? suggestion : key) == 0 &&
        (!suggestion || strcmp(rows[i].section, section) == 0))
      path = rows[i].path;
  const char *dot = *section ? "." : "";
  if (!path) path = suggestion; /* a section */
  if (!path && !*section)
    return rfi_fail_at(RFI_E_CONFIG_KEY, file, line, "unknown key \"%.100s\"; `refrain keys` lists all keys", key);
  if (path)
    return rfi_fail_at(RFI_E_CONFIG_KEY, file, line, "unknown key \"%s%s%.100s\"; did you mean \"%s\"?", section, dot,
                       key, path);
  return rfi_fail_at(RFI_E_CONFIG_KEY, file, line,
                     "unknown key \"%s%s%.100s\"; `refrain keys %s` lists the keys of the section", section, dot, key,
                     section);
}

/* ---- reading values ---- */

static rfr_status take_default(rfi_config *c, int id) {
  const rfi_config_row *row = &rows[id];
  c->source[id] = (rfi_config_source){0};
  memset(value_of(c, id), 0, row->size);
  if (strcmp(row->initial, "required") == 0 || strcmp(row->initial, "auto") == 0) return RFR_OK;
  rfi_yaml *node;
  if (row->initial[0] == '[' || row->initial[0] == '{')
    RFI_TRY(rfi_yaml_parse(c->arena, "default", row->initial, strlen(row->initial), &node));
  else if (!(node = rfi_yaml_scalar(c->arena, row->initial, 0))) return RFR_NO_MEMORY;
  node->null = false;
  c->source[id].from = "default";
  return rfi_config_parse(c->arena, row, "default", node, value_of(c, id));
}

static rfr_status take_value(rfi_config *c, int id, const char *file, const char *from, const rfi_yaml *node) {
  bool automatic = strcmp(rows[id].initial, "auto") == 0;
  if (automatic && node->kind == RFI_YAML_SCALAR && strcmp(node->text, "auto") == 0) return take_default(c, id);
  RFI_TRY(rfi_config_parse(c->arena, &rows[id], file, node, value_of(c, id)));
  c->source[id] = (rfi_config_source){from, node->line};
  return RFR_OK;
}

static rfr_status take_section(rfi_config *c, const char *section, const char *file, const char *from,
                               const rfi_yaml *node) {
  if (node->kind != RFI_YAML_MAP)
    return rfi_fail_at(RFI_E_CONFIG_VALUE, file, node->line, "%s: this is a section and needs keys and values",
                       section);
  for (const rfi_yaml *item = node->first; item; item = item->next) {
    int id = find_row(section, item->key);
    if (id < 0) return unknown_key(file, item->line, section, item->key);
    RFI_TRY(take_value(c, id, file, from, item));
  }
  return RFR_OK;
}

/* A key at the top level is a section or a value. `model` may be both; the last form wins. */
static rfr_status take_top(rfi_config *c, const char *key, const char *file, const char *from, const rfi_yaml *node) {
  int id = find_row("", key);
  bool section = is_section(key);
  if (id < 0 && !section) return unknown_key(file, node->line, "", key);
  if (!section || (id >= 0 && node->kind == RFI_YAML_SCALAR)) {
    if (section)
      for (int i = 0; i < RFI_CFG_COUNT; i++)
        if (strcmp(rows[i].section, key) == 0) RFI_TRY(take_default(c, i));
    return take_value(c, id, file, from, node);
  }
  if (id >= 0) RFI_TRY(take_default(c, id));
  return take_section(c, key, file, from, node);
}

static rfr_status take_file(rfi_config *c, const char *text, size_t n) {
  rfi_yaml *root;
  RFI_TRY(rfi_yaml_parse(c->arena, c->file, text, n, &root));
  if (!root) return rfi_fail_at(RFI_E_CONFIG_SYNTAX, c->file, 0, "the configuration is empty");
  if (root->kind != RFI_YAML_MAP)
    return rfi_fail_at(RFI_E_CONFIG_SYNTAX, c->file, root->line, "the top level needs keys and values");
  for (const rfi_yaml *item = root->first; item; item = item->next)
    RFI_TRY(take_top(c, item->key, c->file, c->file, item));
  return RFR_OK;
}

/* Parses a value from outside of a file. Lists, maps and quoted texts are parsed as YAML. Other texts are taken
 * literally, so that a pattern such as *.h needs no quotes. */
static rfr_status parse_text(rfi_config *c, const char *file, const char *text, rfi_yaml **node) {
  if (*text && strchr("[{\"'", *text)) RFI_TRY(rfi_yaml_parse(c->arena, file, text, strlen(text), node));
  else if (!(*node = rfi_yaml_scalar(c->arena, text, 0))) return RFR_NO_MEMORY;
  return RFR_OK;
}

static void forget_lines(rfi_yaml *node) {
  node->line = 0;
  for (rfi_yaml *child = node->first; child; child = child->next) forget_lines(child);
}

/* Fails for --set SECTION.KEY of an unknown section, with a suggestion from the key, else from the section. */
static rfr_status unknown_set(const char *file, int64_t line, const char *section, const char *key) {
  return foreign_key(key) || foreign_key(section) ? unknown_key(file, line, section, key)
                                                  : unknown_key(file, line, "", section);
}

static rfr_status take_set(rfi_config *c, const char *set) {
  const char *equals = strchr(set, '='), *dot;
  char *file = rfi_arena_printf(c->arena, "--set %s", set), *path;
  rfi_yaml *node;
  if (!file) return RFR_NO_MEMORY;
  if (!equals || equals == set) return rfi_fail_at(RFI_E_CONFIG_SYNTAX, file, 0, "the form is --set section.key=value");
  path = rfi_arena_strndup(c->arena, set, (size_t)(equals - set));
  if (!path) return RFR_NO_MEMORY;
  RFI_TRY(parse_text(c, file, equals + 1, &node));
  forget_lines(node);
  dot = strchr(path, '.');
  if (!dot) return take_top(c, path, file, "--set", node);
  char *section = rfi_arena_strndup(c->arena, path, (size_t)(dot - path));
  if (!section) return RFR_NO_MEMORY;
  if (!is_section(section)) return unknown_set(file, 0, section, dot + 1);
  int id = find_row(section, dot + 1);
  if (id < 0) return unknown_key(file, 0, section, dot + 1);
  return take_value(c, id, file, "--set", node);
}

rfr_status rfi_config_find(const char *file, int64_t line, const char *path, rfi_config_id *out) {
  char section[64] = "";
  const char *dot = strchr(path, '.'), *key = dot ? dot + 1 : path;
  if (dot && dot - path < (int)sizeof section) memcpy(section, path, (size_t)(dot - path));
  const int id = find_row(section, key);
  if (id < 0)
    return dot && !is_section(section) ? unknown_set(file, line, section, key) : unknown_key(file, line, section, key);
  *out = (rfi_config_id)id;
  return RFR_OK;
}

rfr_status rfi_config_set(rfi_config *c, rfi_config_id id, const char *text, const char *from) {
  rfi_yaml *node;
  if (!text) return take_default(c, id);
  RFI_TRY(parse_text(c, from, text, &node));
  return take_value(c, id, from, from, node);
}

/* ---- derived keys and checks ---- */

static bool given(const rfi_config *c, int id) { return c->source[id].from != NULL; }

/* Fails with config.value at the line of the key. */
#define BAD(c, key, ...)                                                                                         \
  rfi_fail_at(RFI_E_CONFIG_VALUE, (c)->source[RFI_CFG_##key].line ? (c)->source[RFI_CFG_##key].from : (c)->file, \
              (c)->source[RFI_CFG_##key].line, __VA_ARGS__)

#define DERIVE(c, key, value)                                         \
  do {                                                                \
    if (!given(c, RFI_CFG_##key)) {                                   \
      (c)->key = (value);                                             \
      (c)->source[RFI_CFG_##key] = (rfi_config_source){"derived", 0}; \
    }                                                                 \
  } while (0)

static rfr_status check_required(const rfi_config *c) {
  for (int i = 0; i < RFI_CFG_COUNT; i++) {
    if (given(c, i) || strcmp(rows[i].initial, "required") != 0) continue;
    if (*c->model && strcmp(rows[i].section, "model") == 0) continue; /* config.json has these keys */
    return rfi_fail_at(RFI_E_CONFIG_VALUE, c->file, 0, "the key %s is missing: %s", rows[i].path, rows[i].meaning);
  }
  return RFR_OK;
}

static rfr_status derive_experts(rfi_config *c) {
  const bool any = c->model_model_type == RFI_MODEL_TYPE_mixtral || c->model_model_type == RFI_MODEL_TYPE_qwen3_moe;
  DERIVE(c, model_num_experts, any ? 8 : 0);
  DERIVE(c, model_num_experts_per_tok, any ? 2 : 0);
  DERIVE(c, model_moe_intermediate_size, any ? c->model_intermediate_size : 0);
  DERIVE(c, optimizer_router_aux_loss_coef, any ? 0.01 : 0);
  DERIVE(c, optimizer_router_z_loss_coef, 0);
  if (any == (c->model_num_experts > 0)) return RFR_OK;
  if (any) return BAD(c, model_num_experts, "model.num_experts: 0; this model_type needs experts");
  return BAD(c, model_num_experts, "model.num_experts: %lld; only model_type mixtral and qwen3_moe have experts",
             (long long)c->model_num_experts);
}

static rfr_status derive_model(rfi_config *c) {
  const bool gpt2 = c->model_model_type == RFI_MODEL_TYPE_gpt2;
  int64_t width = c->model_hidden_size, heads = c->model_num_attention_heads;
  if (!given(c, RFI_CFG_model_head_dim) && width % heads != 0)
    return BAD(c, model_num_attention_heads,
               "model.num_attention_heads: %lld does not divide hidden_size %lld; set model.head_dim", (long long)heads,
               (long long)width);
  if (!given(c, RFI_CFG_data_tokenizer) || rfi_has_word("auto bytes", c->data_tokenizer))
    DERIVE(c, model_vocab_size, 256);
  DERIVE(c, model_head_dim, width / heads);
  DERIVE(c, model_num_key_value_heads, heads);
  if (heads % c->model_num_key_value_heads != 0)
    return BAD(c, model_num_key_value_heads, "model.num_key_value_heads: %lld does not divide num_attention_heads %lld",
               (long long)c->model_num_key_value_heads, (long long)heads);
  DERIVE(c, model_intermediate_size, gpt2 ? 4 * width : (8 * width / 3 + 63) / 64 * 64);
  DERIVE(c, model_max_position_embeddings, c->data_sequence);
  if (c->model_max_position_embeddings < c->data_sequence)
    return BAD(c, model_max_position_embeddings, "model.max_position_embeddings: %lld is less than data.sequence %lld",
               (long long)c->model_max_position_embeddings, (long long)c->data_sequence);
  DERIVE(c, model_tie_word_embeddings, gpt2);
  DERIVE(c, model_attention_bias, gpt2);
  DERIVE(c, model_mlp_bias, gpt2);
  RFI_TRY(derive_experts(c));
  const int activation = gpt2 ? RFI_ACTIVATION_gelu_new : RFI_ACTIVATION_silu;
  DERIVE(c, model_hidden_act, activation);
  if (c->model_hidden_act == activation) return RFR_OK;
  return rfi_fail_at(RFI_E_UNSUPPORTED, c->file, c->source[RFI_CFG_model_hidden_act].line,
                     gpt2 ? "model.hidden_act: gpt2 supports only gelu_new"
                          : "model.hidden_act: this model_type supports only silu; only gpt2 has gelu_new");
}

/* Makes a path absolute. Relative paths are relative to the configuration's folder; the resolved configuration may be
 * read from another folder later. */
static rfr_status absolute(rfi_config *c, const char *folder, const char **path) {
  char here[PATH_MAX];
  if (**path == '/') return RFR_OK;
  if (!folder) folder = "";
  if (*folder != '/' && !getcwd(here, sizeof here))
    return rfi_fail(RFI_E_FILE_OPEN, "cannot get the path of the working folder: %s", strerrordesc_np(errno));
  const char *slash = *folder ? "/" : "", *inner = **path ? "/" : "";
  char *joined = *folder == '/' ? rfi_arena_printf(c->arena, "%s%s%s", folder, inner, *path)
                                : rfi_arena_printf(c->arena, "%s%s%s%s%s", here, slash, folder, inner, *path);
  *path = joined;
  return joined ? RFR_OK : RFR_NO_MEMORY;
}

static rfr_status derive_folders(rfi_config *c, const char *folder) {
  DERIVE(c, data_root, "");
  DERIVE(c, data_tokenizer, "auto");
  DERIVE(c, data_cache, "auto");
  RFI_TRY(absolute(c, folder, &c->data_root));
  if (!rfi_has_word("auto bytes", c->data_tokenizer)) RFI_TRY(absolute(c, folder, &c->data_tokenizer));
  if (!rfi_has_word("auto none", c->data_cache)) RFI_TRY(absolute(c, folder, &c->data_cache));
  if (!rfi_has_word("model chatml", c->data_template)) RFI_TRY(absolute(c, folder, &c->data_template));
  if (*c->adapter_from) RFI_TRY(absolute(c, folder, &c->adapter_from));
  return *c->model ? absolute(c, folder, &c->model) : RFR_OK;
}

/* An adapter folder determines the other keys, except the dropout and the format of the base. A key of an adapter
 * without an adapter is an error: the run would train the model itself. */
static rfr_status derive_adapter(rfi_config *c) {
  for (int i = 0; i < RFI_CFG_COUNT; i++) {
    if (strcmp(rows[i].section, "adapter") != 0 || !given(c, i) || strcmp(c->source[i].from, "default") == 0) continue;
    if (i == RFI_CFG_adapter_from || i == RFI_CFG_adapter_type) continue;
    if (*c->adapter_from && i != RFI_CFG_adapter_dropout && i != RFI_CFG_adapter_base)
      return rfi_fail_at(RFI_E_CONFIG_VALUE, c->source[i].line ? c->source[i].from : c->file, c->source[i].line,
                         "%s: not allowed with adapter.from, whose adapter_config.json has it; remove the key",
                         rows[i].path);
    if (*c->adapter_from || c->adapter_type != RFI_ADAPTER_none) continue;
    return rfi_fail_at(RFI_E_CONFIG_VALUE, c->source[i].line ? c->source[i].from : c->file, c->source[i].line,
                       "%s: there is no adapter; set adapter.type to lora or dora", rows[i].path);
  }
  if (*c->adapter_from) {
    if (given(c, RFI_CFG_adapter_type) && c->adapter_type == RFI_ADAPTER_none)
      return BAD(c, adapter_from, "adapter.from: adapter.type is none; remove one of the two keys");
    for (int i = 0; i < RFI_CFG_COUNT; i++) /* the folder determines these keys */
      if (strcmp(rows[i].section, "adapter") == 0 && given(c, i) && strcmp(c->source[i].from, "default") == 0 &&
          i != RFI_CFG_adapter_dropout && i != RFI_CFG_adapter_base)
        c->source[i] = (rfi_config_source){0};
    return RFR_OK;
  }
  DERIVE(c, adapter_type, RFI_ADAPTER_none);
  DERIVE(c, adapter_alpha, 2.0 * (double)c->adapter_rank);
  return RFR_OK;
}

/* A key of a loss that the run does not have is an error: the run would ignore it. */
static rfr_status check_preference(const rfi_config *c) {
  for (int i = 0; i < RFI_CFG_COUNT && c->data_format != RFI_FORMAT_preference; i++)
    if (strcmp(rows[i].section, "preference") == 0 && given(c, i) && strcmp(c->source[i].from, "default") != 0)
      return rfi_fail_at(RFI_E_CONFIG_VALUE, c->source[i].line ? c->source[i].from : c->file, c->source[i].line,
                         "%s: it applies only with data.format: preference; set that, or remove the key", rows[i].path);
  return RFR_OK;
}

/* A key that the recipe does not use is an error: the run would ignore it. */
static rfr_status derive_recipe(rfi_config *c) {
  static const char *const ends[] = {"first-and-last"};
  const bool delayed = c->precision_recipe == RFI_RECIPE_fp8_delayed, any = c->precision_recipe != RFI_RECIPE_none;
  const bool tensor = delayed || c->precision_recipe == RFI_RECIPE_fp8_current;
  const struct {
    rfi_config_id id;
    bool used;
    const char *with;
  } keys[] = {{RFI_CFG_precision_format, any && c->precision_recipe != RFI_RECIPE_nvfp4, "an FP8 recipe"},
              {RFI_CFG_precision_margin, delayed, "fp8_delayed"},
              {RFI_CFG_precision_history, delayed, "fp8_delayed"},
              {RFI_CFG_precision_history_rule, delayed, "fp8_delayed"},
              {RFI_CFG_precision_keep, any, "a recipe"},
              {RFI_CFG_precision_backward, any, "a recipe"}};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
    if (given(c, keys[i].id) && !keys[i].used)
      return rfi_fail_at(RFI_E_CONFIG_VALUE, c->source[keys[i].id].line ? c->source[keys[i].id].from : c->file,
                         c->source[keys[i].id].line, "%s: it applies only with %s in precision.recipe; remove the key",
                         rows[keys[i].id].path, keys[i].with);
  if (keys[0].used) DERIVE(c, precision_format, tensor ? RFI_RECIPE_FORMAT_hybrid : RFI_RECIPE_FORMAT_e4m3);
  if (delayed) {
    DERIVE(c, precision_margin, 0);
    DERIVE(c, precision_history, 1024);
    DERIVE(c, precision_history_rule, RFI_AMAX_RULE_max);
  }
  if (any) {
    DERIVE(c, precision_keep, ((rfi_config_list){ends, 1}));
    DERIVE(c, precision_backward, RFI_BACKWARD_quantized);
  }
  return RFR_OK;
}

/* Derived values must be within the ranges of the schema too, because a printed configuration is read again. */
static rfr_status check_derived(rfi_config *c) {
  for (int i = 0; i < RFI_CFG_COUNT; i++) {
    if (rows[i].kind != RFI_KIND_INT || !c->source[i].from || strcmp(c->source[i].from, "derived") != 0) continue;
    const int64_t x = *(const int64_t *)value_of(c, i);
    if (!rfi_config_in_range(&rows[i], (double)x))
      return rfi_fail_at(RFI_E_CONFIG_VALUE, c->file, 0, "%s: %lld, derived from other keys, is not in the range %s",
                         rows[i].path, (long long)x, rows[i].accepted);
  }
  return RFR_OK;
}

/* Exactly one of run.steps, run.epochs and run.time counts; --set of one replaces another one of the file. */
static rfr_status check_length(rfi_config *c) {
  const rfi_config_id ids[] = {RFI_CFG_run_steps, RFI_CFG_run_epochs, RFI_CFG_run_time};
  const bool found[] = {c->run_steps > 0, c->run_epochs > 0, c->run_time > 0};
  int n = 0, set = -1, sets = 0;
  for (int i = 0; i < 3; i++) {
    if (!found[i]) continue;
    n++;
    if (c->source[ids[i]].line == 0) set = i, sets++;
  }
  if (n == 0)
    return rfi_fail_at(RFI_E_CONFIG_VALUE, c->file, 0,
                       "run.steps, run.epochs or run.time is missing; give the length of the training");
  if (n == 1) return RFR_OK;
  if (sets != 1) {
    const int last = found[2] ? 2 : 1, first = found[0] ? 0 : 1;
    return rfi_fail_at(RFI_E_CONFIG_VALUE, c->source[ids[last]].line ? c->source[ids[last]].from : c->file,
                       c->source[ids[last]].line, "%s and %s are both set; remove one", rows[ids[last]].path,
                       rows[ids[first]].path);
  }
  for (int i = 0; i < 3; i++)
    if (i != set) RFI_TRY(take_default(c, ids[i]));
  return RFR_OK;
}

static rfr_status check_weights(const rfi_config *c) {
  const rfi_config_list *weights = &c->data_weights;
  if (weights->n > 0 && weights->n != c->data_train.n)
    return BAD(c, data_weights, "data.weights: %d numbers for %d patterns of data.train", weights->n, c->data_train.n);
  for (int i = 0; i < weights->n; i++) {
    char *end;
    const double weight = rfi_strtod(weights->items[i], &end);
    if (end == weights->items[i] || *end || !(weight > 0 && weight <= 1000))
      return BAD(c, data_weights, "data.weights: %.100s is not a number greater than 0 and at most 1000",
                 weights->items[i]);
  }
  return RFR_OK;
}

static rfr_status check_numbers(const rfi_config *c, rfi_config_id id, const char *key, const rfi_config_list *list,
                                double most) {
  const rfi_config_source *at = &c->source[id];
  const char *from = at->line ? at->from : c->file;
  if (list->n > 0 && list->n != c->data_train.n)
    return rfi_fail_at(RFI_E_CONFIG_VALUE, from, at->line, "%s: %d numbers for %d patterns of data.train", key, list->n,
                       c->data_train.n);
  for (int i = 0; i < list->n; i++) {
    char *end;
    const bool unlimited = most > 1e5 && strcmp(list->items[i], "inf") == 0;
    const double number = unlimited ? most : rfi_strtod(list->items[i], &end);
    if (!unlimited && (end == list->items[i] || *end || !(number > 0 && number <= most)))
      return rfi_fail_at(RFI_E_CONFIG_VALUE, from, at->line, "%s: %.100s is not a number greater than 0 and at most %g",
                         key, list->items[i], most);
  }
  return RFR_OK;
}

static rfr_status check_mixture(const rfi_config *c) {
  RFI_TRY(check_numbers(c, RFI_CFG_data_shares, "data.shares", &c->data_shares, 1e5));
  RFI_TRY(check_numbers(c, RFI_CFG_data_max_epochs, "data.max_epochs", &c->data_max_epochs, 1e6));
  if (c->data_shares.n == 0)
    return c->data_max_epochs.n > 0 ? BAD(c, data_max_epochs, "data.max_epochs: needs data.shares") : RFR_OK;
  if (c->data_weights.n > 0) return BAD(c, data_shares, "data.shares: not allowed with data.weights");
  if (c->run_epochs > 0)
    return BAD(c, data_shares, "data.shares: a mixture has no epochs; set run.steps or run.time instead of run.epochs");
  if (c->data_format == RFI_FORMAT_preference)
    return BAD(c, data_shares, "data.shares: not allowed with data.format: preference; use data.weights");
  return RFR_OK;
}

static rfr_status check_batch(const rfi_config *c) {
  int64_t unit = c->data_sequence * c->batch_microbatch, tokens = c->batch_tokens;
  if (tokens % unit == 0) return RFR_OK;
  int64_t near = (tokens + unit / 2) / unit * unit;
  return BAD(c, batch_tokens,
             "batch.tokens: %lld is not a multiple of data.sequence %lld x batch.microbatch %lld; the nearest is %lld",
             (long long)tokens, (long long)c->data_sequence, (long long)c->batch_microbatch,
             (long long)(near ? near : unit));
}

/* Completes the phases and checks the numbers of each. */
static rfr_status check_ramp(rfi_config *c) {
  /* we allocated it in our arena, so it may be written */
  rfi_config_phase *phases = (rfi_config_phase *)c->batch_ramp.items;
  const int64_t unit = c->data_sequence * c->batch_microbatch;
  int64_t before = 0;
  for (int i = 0; i < c->batch_ramp.n; before = phases[i++].until) {
    rfi_config_phase *p = &phases[i];
    if (p->tokens == 0) p->tokens = c->batch_tokens;
    if (p->sequence == 0) p->sequence = c->data_sequence;
    if (p->until <= before)
      return BAD(c, batch_ramp, "batch.ramp: until %lld follows until %lld; give ascending steps", (long long)p->until,
                 (long long)before);
    if (p->tokens % unit != 0)
      return BAD(c, batch_ramp,
                 "batch.ramp: until %lld: tokens: %lld is not a multiple of data.sequence %lld x batch.microbatch %lld",
                 (long long)p->until, (long long)p->tokens, (long long)c->data_sequence,
                 (long long)c->batch_microbatch);
    if (c->data_sequence % p->sequence != 0)
      return BAD(c, batch_ramp, "batch.ramp: until %lld: sequence: %lld does not divide data.sequence, %lld",
                 (long long)p->until, (long long)p->sequence, (long long)c->data_sequence);
  }
  return RFR_OK;
}

static rfr_status resolve(rfi_config *c, const char *folder) {
  RFI_TRY(check_required(c));
  for (int i = 0; i < RFI_CFG_COUNT && *c->model; i++)
    if (strcmp(rows[i].section, "model") == 0 && given(c, i) && strcmp(c->source[i].from, "default") != 0)
      return rfi_fail_at(RFI_E_CONFIG_VALUE, c->source[i].line ? c->source[i].from : c->file, c->source[i].line,
                         "%s: not allowed with a model folder, whose config.json has it; remove the key", rows[i].path);
  if (!*c->model) RFI_TRY(derive_model(c));
  RFI_TRY(derive_folders(c, folder));
  RFI_TRY(derive_adapter(c));
  RFI_TRY(derive_recipe(c));
  RFI_TRY(check_preference(c));
  RFI_TRY(check_derived(c));
  RFI_TRY(check_length(c));
  RFI_TRY(check_batch(c));
  RFI_TRY(check_ramp(c));
  RFI_TRY(check_weights(c));
  RFI_TRY(check_mixture(c));
  /* we allocated it in our arena, so it may be written */
  rfi_config_group *groups = (rfi_config_group *)c->optimizer_groups.items;
  for (int i = 0; i < c->optimizer_groups.n; i++)
    if (isnan(groups[i].weight_decay)) groups[i].weight_decay = c->optimizer_weight_decay;
  return RFR_OK;
}

rfr_status rfi_config_read(rfr_ctx *ctx, const char *file, const char *text, size_t n, const char *folder,
                           const char *const *sets, int n_sets, rfi_config **out) {
  rfr_status s;
  rfi_config *c;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *c, &c));
  c->ctx = ctx;
  RFI_GOTO(rfi_arena_create(ctx, &c->arena));
  c->file = rfi_arena_strdup(c->arena, file);
  if (!c->file) RFI_GOTO(RFR_NO_MEMORY);
  for (int i = 0; i < RFI_CFG_COUNT; i++) RFI_GOTO(take_default(c, i));
  RFI_GOTO(take_file(c, text, n));
  for (int i = 0; i < n_sets; i++) RFI_GOTO(take_set(c, sets[i]));
  RFI_GOTO(resolve(c, folder));
  *out = c;
  return RFR_OK;
fail:
  rfi_config_destroy(c);
  return s;
}

void rfi_config_destroy(rfi_config *c) {
  if (!c) return;
  rfi_arena_destroy(c->arena);
  rfi_free(c->ctx, c);
}

/* ---- printing ---- */

rfr_status rfi_config_print_value(const rfi_config *c, rfi_config_id id, rfi_string *out) {
  return rfi_config_format(&rows[id], (const char *)c + rows[id].offset, out);
}

/* The value of --set and the path of the working folder may have any bytes. */
static rfr_status print_row(const rfi_config *c, int id, bool sources, rfi_string *out) {
  const rfi_config_source *source = &c->source[id];
  RFI_TRY(rfi_string_printf(out, "%s%s: ", *rows[id].section ? "  " : "", rows[id].key));
  const size_t n = out->n;
  RFI_TRY(rfi_config_format(&rows[id], (const char *)c + rows[id].offset, out));
  if (rfi_utf8_valid(out->data + n, out->n - n) < out->n - n)
    return rfi_fail_at(
        RFI_E_CONFIG_VALUE, c->file, 0,
        "%s: %s is not valid UTF-8, so the run's config.yaml could not be read; rename the file or folder",
        rows[id].path, out->data + n);
  if (sources && source->line) RFI_TRY(rfi_string_printf(out, " # %s:%lld", source->from, (long long)source->line));
  else if (sources) RFI_TRY(rfi_string_printf(out, " # %s", source->from));
  return rfi_string_append(out, "\n", 1);
}

bool rfi_config_is_used(const rfi_config *c, rfi_config_id id) {
  const bool model = strcmp(rows[id].section, "model") == 0;
  if (id == RFI_CFG_model ? !*c->model : model && *c->model) return false;
  if (strcmp(rows[id].section, "adapter") == 0 && c->adapter_type == RFI_ADAPTER_none && !*c->adapter_from)
    return false;
  if (strcmp(rows[id].section, "preference") == 0 && c->data_format != RFI_FORMAT_preference) return false;
  const bool muon = id == RFI_CFG_optimizer_muon_momentum || id == RFI_CFG_optimizer_muon_scale;
  if (muon && c->optimizer_name != RFI_OPTIMIZER_muon) return false;
  /* Not printed at their default, because checkpoints of earlier versions do not have these keys. */
  if (id == RFI_CFG_optimizer_rounding && c->optimizer_rounding == RFI_ROUNDING_nearest) return false;
  const bool ema =
      id == RFI_CFG_optimizer_ema || id == RFI_CFG_optimizer_ema_start || id == RFI_CFG_optimizer_ema_warmup;
  if (ema && c->optimizer_ema == 0) return false;
  if (id == RFI_CFG_batch_ramp && c->batch_ramp.n == 0) return false;
  if (id == RFI_CFG_run_epochs && c->run_epochs == 0) return false;
  return c->source[id].from != NULL;
}

rfr_status rfi_config_print(const rfi_config *c, bool sources, rfi_string *out) {
  const char *section = "";
  for (int i = 0; i < RFI_CFG_COUNT; i++) {
    if (!rfi_config_is_used(c, (rfi_config_id)i)) continue;
    if (strcmp(section, rows[i].section) != 0) RFI_TRY(rfi_string_printf(out, "%s:\n", rows[i].section));
    section = rows[i].section;
    RFI_TRY(print_row(c, i, sources, out));
  }
  return RFR_OK;
}

/* A cell of a Markdown table, in which bars are escaped. */
static rfr_status print_cell(const char *text, rfi_string *out) {
  for (; *text; text++) RFI_TRY(rfi_string_printf(out, *text == '|' ? "\\%c" : "%c", *text));
  return rfi_string_append(out, " | ", 3);
}

rfr_status rfi_config_table(rfi_string *out) {
  RFI_TRY(
      rfi_string_printf(out, "| key | type | default | accepted | resume | meaning |\n|---|---|---|---|---|---|\n"));
  for (int i = 0; i < RFI_CFG_COUNT; i++) {
    const rfi_config_row *row = &rows[i];
    RFI_TRY(rfi_string_printf(out, "| `%s` | ", row->path));
    RFI_TRY(print_cell(rfi_config_type_text(row->kind), out));
    RFI_TRY(print_cell(row->initial, out));
    RFI_TRY(print_cell(row->accepted, out));
    static const char *const resume[] = {"may change", "may change, with a warning", "same"};
    RFI_TRY(rfi_string_printf(out, "%s | %s |\n", resume[row->resume], row->meaning));
  }
  return RFR_OK;
}
