/* SPDX-License-Identifier: Apache-2.0
 *
 * The families of Hugging Face models: one row per model_type of config.json, with the library's defaults and functions
 * that read and write the fields of the family. A new family is one row and its two functions in hf_families.c.
 */
#ifndef RFI_HF_FAMILIES_H
#define RFI_HF_FAMILIES_H

#include <jansson.h>
#include <stdbool.h>

#include "refrain/nn.h"

typedef struct rfi_hf_family {
  const char *type, *architecture; /* of config.json */
  rfr_model_type model;            /* rfr_model_config_default(model) is called before `read` */
  double norm_eps, rope_theta;     /* the library's defaults */
  bool tied;
  rfr_status (*read)(const json_t *o, const char *file, rfr_model_config *c);
  /* adds the fields of the family; returns nonzero when out of memory */
  int (*write)(json_t *o, const rfr_model_config *c);
  const char *fields; /* fields that other families refuse (hf_config.c) and this one reads */
} rfi_hf_family;

/* NULL past the last one. */
const rfi_hf_family *rfi_hf_family_at(int i);
/* The family of a model_type; NULL: unknown. */
const rfi_hf_family *rfi_hf_family_find(const char *type);
/* The family with which a description is written. */
const rfi_hf_family *rfi_hf_family_of(const rfr_model_config *c);
bool rfi_hf_is_mixtral(const rfr_model_config *c);

/* ---- settings of RoPE (hf_rope.c) ---- */

/* Reads rope_theta and the scaling, of versions 4 and 5 of the library, over the values of `c`. */
rfr_status rfi_hf_read_rope(const json_t *o, const char *file, rfr_model_config *c);
/* Adds rope_theta, and rope_scaling if the model has one. Nonzero when out of memory. */
int rfi_hf_write_rope(json_t *o, const rfr_model_config *c);
/* Names of rope_parameters and rope_scaling that are read. */
extern const char rfi_hf_rope_fields[];

/* ---- fields of several files (hf_config.c) ---- */

/* Refuses a field of `o` that changes the mathematics, unless `fields` has its name or the value changes nothing. */
rfr_status rfi_hf_refuse(const json_t *o, const char *file, const char *fields);
/* Appends the names of fields that no family reads and that may change results. Nonzero when out of memory. */
int rfi_hf_unknown_fields(const json_t *o, json_t *list);
/* "float32", "bfloat16" or "float16" */
const char *rfi_hf_dtype_name(rfr_dtype dtype);

#endif
