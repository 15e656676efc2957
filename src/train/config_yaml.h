/* SPDX-License-Identifier: Apache-2.0
 *
 * A subset of YAML as a tree: scalars, lists and maps with text keys, in one document. Anchors, aliases, tags,
 * duplicate keys and texts above the limits of config_yaml.c are errors (config.syntax, config.key).
 */
#ifndef RFI_CONFIG_YAML_H
#define RFI_CONFIG_YAML_H

#include "base/arena.h"
#include "base/base.h"

typedef enum rfi_yaml_kind { RFI_YAML_SCALAR, RFI_YAML_LIST, RFI_YAML_MAP } rfi_yaml_kind;

typedef struct rfi_yaml {
  rfi_yaml_kind kind;
  bool null;                            /* a scalar without a value: empty, ~ or null, unquoted */
  const char *text;                     /* scalars only */
  const char *key;                      /* children of a map only */
  int64_t line;                         /* of the key, for a child of a map; otherwise of the value */
  struct rfi_yaml *first, *last, *next; /* children; next sibling */
  int n;                                /* number of children */
} rfi_yaml;

/* The tree is allocated in the arena. *out is NULL if the text has no document. */
rfr_status rfi_yaml_parse(rfi_arena *arena, const char *file, const char *text, size_t n, rfi_yaml **out);
rfi_yaml *rfi_yaml_scalar(rfi_arena *arena, const char *text, int64_t line); /* NULL: out of memory */

#endif
