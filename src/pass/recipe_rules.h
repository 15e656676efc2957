/* SPDX-License-Identifier: Apache-2.0
 *
 * The quantizers of a linear layer's tensors under each recipe: one row per recipe (recipe_rules.c).
 */
#ifndef RFI_RECIPE_RULES_H
#define RFI_RECIPE_RULES_H

#include "trace/trace.h"

/* The three tensors of a linear; each of its GEMMs reads two of them. */
typedef enum rfi_operand { RFI_OPERAND_X, RFI_OPERAND_W, RFI_OPERAND_DY, RFI_OPERANDS } rfi_operand;

/* How one tensor is quantized. */
typedef struct rfi_quantizer {
  rfr_dtype format;
  rfr_scaling scaling;
  int options; /* RFR_QUANTIZE_* */
} rfi_quantizer;

/* The quantizer of an operand under a recipe. */
rfi_quantizer rfi_recipe_quantizer(const rfr_recipe *recipe, rfi_operand operand);
/* The dimensions of a linear, tokens included, must be multiples of this. */
int64_t rfi_recipe_unit(const rfr_recipe *recipe);

#endif
