/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads a run's configuration, YAML or JSON, into one struct.
 *
 * Unknown keys, duplicate keys, values of a wrong type or out of range, anchors, aliases, tags and several documents
 * are errors with file and line; the error of an unknown key names the most similar known one. Each value has a source.
 * The printed form reads back as the same values. config_schema.def is the only list of keys.
 */
#ifndef RFI_CONFIG_H
#define RFI_CONFIG_H

#include "base/arena.h"
#include "base/base.h"
#include "refrain/dtype.h"

typedef struct rfi_config_list {
  const char *const *items;
  int n;
} rfi_config_list;

/* Steps, or a percentage of all steps. */
typedef struct rfi_config_amount {
  double value;
  bool percent;
} rfi_config_amount;

/* Patterns, or a percentage if there are none. */
typedef struct rfi_config_split {
  double percent;
  rfi_config_list patterns;
} rfi_config_split;

typedef struct rfi_config_pair {
  double v[2];
} rfi_config_pair;

typedef struct rfi_config_group {
  const char *match;   /* pattern of parameter names */
  double weight_decay; /* optimizer.weight_decay if the group gives none */
  double lr_scale;
} rfi_config_group;

typedef struct rfi_config_groups {
  const rfi_config_group *items;
  int n;
} rfi_config_groups;

/* Steps up to `until` have `tokens` tokens, in sequences of `sequence`. */
typedef struct rfi_config_phase {
  int64_t until, tokens, sequence; /* tokens and sequence: batch.tokens and data.sequence if the phase gives none */
} rfi_config_phase;

typedef struct rfi_config_ramp {
  const rfi_config_phase *items;
  int n;
} rfi_config_ramp;
enum { RFI_RAMP_MOST = 8 }; /* phases before the last */

/* A number for each pattern; the last that matches counts. The elements are those of rfr_adapter_number. */
typedef struct rfi_config_numbers {
  const struct rfr_adapter_number *items;
  int n;
} rfi_config_numbers;

/* X(list, name): the choices of a CHOICE key; its value is the enumerator RFI_list_name. SCHEDULE has the order of
 * rfr_lr_kind, RECOMPUTE that of rfr_recompute, FORMAT after auto that of rfi_row_form, LOSS that of rfi_row_loss,
 * TRUNCATE that of rfi_row_truncate, RECIPE that of rfr_recipe_kind, RECIPE_FORMAT that of rfr_recipe_format, AMAX_RULE
 * that of rfr_amax_rule, SHARD that of rfr_shard. */
#define RFI_CHOICES_MODEL_TYPE(X) \
  X(MODEL_TYPE, llama) X(MODEL_TYPE, gpt2) X(MODEL_TYPE, mixtral) X(MODEL_TYPE, qwen3_moe)
#define RFI_CHOICES_ACTIVATION(X) X(ACTIVATION, silu) X(ACTIVATION, gelu_new)
#define RFI_CHOICES_FORMAT(X) \
  X(FORMAT, auto)             \
  X(FORMAT, text) X(FORMAT, chat) X(FORMAT, completion) X(FORMAT, alpaca) X(FORMAT, sharegpt) X(FORMAT, preference)
#define RFI_CHOICES_LOSS(X) X(LOSS, auto) X(LOSS, assistant) X(LOSS, completion) X(LOSS, all)
#define RFI_CHOICES_TOKEN_DTYPE(X) X(TOKEN_DTYPE, auto) X(TOKEN_DTYPE, uint16) X(TOKEN_DTYPE, uint32)
#define RFI_CHOICES_TRUNCATE(X) X(TRUNCATE, cut) X(TRUNCATE, drop) X(TRUNCATE, refuse)
#define RFI_CHOICES_OPTIMIZER(X) X(OPTIMIZER, adamw) X(OPTIMIZER, sgd) X(OPTIMIZER, muon)
#define RFI_CHOICES_MUON_SCALE(X) X(MUON_SCALE, rms) X(MUON_SCALE, shape)
#define RFI_CHOICES_ROUNDING(X) X(ROUNDING, nearest) X(ROUNDING, stochastic)
#define RFI_CHOICES_WIDTH(X) X(WIDTH, f32) X(WIDTH, model)
#define RFI_CHOICES_SCHEDULE(X) X(SCHEDULE, constant) X(SCHEDULE, linear) X(SCHEDULE, cosine) X(SCHEDULE, wsd)
#define RFI_CHOICES_RECOMPUTE(X) X(RECOMPUTE, none) X(RECOMPUTE, auto) X(RECOMPUTE, all)
#define RFI_CHOICES_ADAPTER(X) X(ADAPTER, none) X(ADAPTER, lora) X(ADAPTER, dora)
#define RFI_CHOICES_BASE(X) X(BASE, model) X(BASE, nf4) X(BASE, int8) X(BASE, fp8)
#define RFI_CHOICES_RECIPE(X) \
  X(RECIPE, none) X(RECIPE, fp8_delayed) X(RECIPE, fp8_current) X(RECIPE, fp8_block) X(RECIPE, mxfp8) X(RECIPE, nvfp4)
#define RFI_CHOICES_RECIPE_FORMAT(X) X(RECIPE_FORMAT, e4m3) X(RECIPE_FORMAT, hybrid)
#define RFI_CHOICES_AMAX_RULE(X) X(AMAX_RULE, max) X(AMAX_RULE, most_recent)
#define RFI_CHOICES_BACKWARD(X) X(BACKWARD, quantized) X(BACKWARD, high)
#define RFI_CHOICES_SHARD(X) X(SHARD, none) X(SHARD, optimizer) X(SHARD, full)
#define RFI_CHOICES_DROPOUT(X) X(DROPOUT, model) X(DROPOUT, none)
#define RFI_CHOICE_ENUM(list, name) RFI_##list##_##name,
enum { RFI_CHOICES_MODEL_TYPE(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_ACTIVATION(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_FORMAT(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_LOSS(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_TOKEN_DTYPE(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_TRUNCATE(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_OPTIMIZER(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_MUON_SCALE(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_ROUNDING(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_WIDTH(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_SCHEDULE(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_RECOMPUTE(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_SHARD(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_DROPOUT(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_ADAPTER(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_BASE(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_RECIPE(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_RECIPE_FORMAT(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_AMAX_RULE(RFI_CHOICE_ENUM) };
enum { RFI_CHOICES_BACKWARD(RFI_CHOICE_ENUM) };
#undef RFI_CHOICE_ENUM

/* X(type, C type, what a file may hold): the types of the schema. Numbers of type INT may end in k, M or G
 * (1024 and its powers); SIZE in B, KB, MB, GB, TB or KiB, MiB, GiB, TiB; DURATION needs ms, s, min, h or d. */
#define RFI_CONFIG_TYPES(X)                                        \
  X(INT, int64_t, "integer, 64k")                                  \
  X(FLOAT, double, "number")                                       \
  X(SIZE, int64_t, "bytes, 20GiB")                                 \
  X(DURATION, double, "time, 120s")                                \
  X(BOOL, bool, "true or false")                                   \
  X(STRING, const char *, "text")                                  \
  X(CHOICE, int, "one of")                                         \
  X(DTYPE, rfr_dtype, "one of")                                    \
  X(STRINGS, rfi_config_list, "list of texts")                     \
  X(PAIR, rfi_config_pair, "list of two numbers")                  \
  X(AMOUNT, rfi_config_amount, "steps or percent, 2%")             \
  X(SPLIT, rfi_config_split, "percent, 5%, or a list of patterns") \
  X(GROUPS, rfi_config_groups, "list of groups")                   \
  X(RAMP, rfi_config_ramp, "list of phases")                       \
  X(NUMBERS, rfi_config_numbers, "map of patterns to numbers")

#define RFI_CONFIG_TYPE(type, ctype, text) typedef ctype RFI_CONFIG_##type;
RFI_CONFIG_TYPES(RFI_CONFIG_TYPE)
#undef RFI_CONFIG_TYPE

/* RFI_CFG_SECTION_KEY for each key, such as RFI_CFG_model_hidden_size. */
typedef enum rfi_config_id {
#define RFI_TOP(key, type, initial, accepted, resume, meaning) RFI_CFG_##key,
#define RFI_KEY(section, key, type, initial, accepted, resume, meaning) RFI_CFG_##section##_##key,
#include "train/config_schema.def"
#undef RFI_TOP
#undef RFI_KEY
  RFI_CFG_COUNT
} rfi_config_id;

typedef struct rfi_config_source {
  const char *from; /* "default", "derived", a file name or "--set"; NULL: the key has no value */
  int64_t line;     /* 1-based; 0: unknown */
} rfi_config_source;

typedef struct rfi_config {
/* model.hidden_size is config->model_hidden_size. */
#define RFI_TOP(key, type, initial, accepted, resume, meaning) RFI_CONFIG_##type key;
#define RFI_KEY(section, key, type, initial, accepted, resume, meaning) RFI_CONFIG_##type section##_##key;
#include "train/config_schema.def"
#undef RFI_TOP
#undef RFI_KEY
  rfi_config_source source[RFI_CFG_COUNT];
  rfr_ctx *ctx;
  rfi_arena *arena; /* owns all text and lists */
  const char *file; /* file name for errors */
} rfi_config;

/* Reads a configuration from memory. `file` is its name in errors and sources. Relative paths start at `folder`; NULL:
 * the working folder. `sets` are overrides "section.key=value"; later ones win. Errors: config.syntax, config.key,
 * config.value, unsupported. */
rfr_status rfi_config_read(rfr_ctx *ctx, const char *file, const char *text, size_t n, const char *folder,
                           const char *const *sets, int n_sets, rfi_config **out);
void rfi_config_destroy(rfi_config *config); /* accepts NULL */

/* Changes one key after reading; `from` becomes its source. NULL text: the default. Keys that were derived from it do
 * not change. */
rfr_status rfi_config_set(rfi_config *config, rfi_config_id id, const char *text, const char *from);

/* The resolved configuration as YAML; with `sources`, each line ends with the source of its value. */
rfr_status rfi_config_print(const rfi_config *config, bool sources, rfi_string *out);
/* Whether the key has a value that is used. It does not: model.* if `model` is a folder, `model` if it is not,
 * adapter.* without an adapter, preference.* without preferences, run.epochs if it is 0, and keys that are still
 * auto. */
bool rfi_config_is_used(const rfi_config *config, rfi_config_id id);
/* One value as YAML on one line. */
rfr_status rfi_config_print_value(const rfi_config *config, rfi_config_id id, rfi_string *out);
/* The key of a path, such as "model.hidden_size". Errors: config.key, at the file and line. */
rfr_status rfi_config_find(const char *file, int64_t line, const char *path, rfi_config_id *out);
/* its path, "model.hidden_size" */
const char *rfi_config_path(rfi_config_id id);
/* Whether a resume compares the key with the checkpoint; run.steps is compared, and a change is a warning. */
bool rfi_config_resume_compares(rfi_config_id id);
/* The table of all keys in Markdown. */
rfr_status rfi_config_table(rfi_string *out);

/* An amount in steps, for a run of `total` steps. */
int64_t rfi_config_steps(rfi_config_amount amount, int64_t total);

#endif
