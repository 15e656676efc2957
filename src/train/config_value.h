/* SPDX-License-Identifier: Apache-2.0
 *
 * One value of the configuration: parsed from a node of the file, and printed as text.
 */
#ifndef RFI_CONFIG_VALUE_H
#define RFI_CONFIG_VALUE_H

#include "train/config.h"
#include "train/config_yaml.h"

typedef enum rfi_config_kind {
#define RFI_CONFIG_TYPE(type, ctype, text) RFI_KIND_##type,
  RFI_CONFIG_TYPES(RFI_CONFIG_TYPE)
#undef RFI_CONFIG_TYPE
} rfi_config_kind;

/* Whether a resume may change the key. FREE keys do not affect the results of a run. */
typedef enum rfi_config_resume { RFI_RESUME_FREE, RFI_RESUME_WARNS, RFI_RESUME_MUST } rfi_config_resume;

/* A row of config_schema.def. */
typedef struct rfi_config_row {
  const char *section; /* "" for a top-level key */
  const char *key, *path;
  rfi_config_kind kind;
  size_t offset, size; /* offset in rfi_config */
  const char *initial, *accepted;
  rfi_config_resume resume;
  const char *meaning;
} rfi_config_row;

/* Parses `node` as the row's type into `value`. Errors: config.value with the file, the node's line and the key. */
rfr_status rfi_config_parse(rfi_arena *arena, const rfi_config_row *row, const char *file, const rfi_yaml *node,
                            void *value);
/* Whether a number is in the row's range; true for a row without one. */
bool rfi_config_in_range(const rfi_config_row *row, double x);
/* Appends the value as YAML on one line. */
rfr_status rfi_config_format(const rfi_config_row *row, const void *value, rfi_string *out);
/* A description of the values that a file may have for this type. */
const char *rfi_config_type_text(rfi_config_kind kind);
/* The nearest of n names; NULL if none is similar. */
const char *rfi_nearest(const char *name, const char *const *names, int n);

#endif
