/* SPDX-License-Identifier: Apache-2.0
 *
 * The recipes as data: how x, w and dy of a linear layer are quantized (docs/recipes.md).
 */
#include "pass/recipe_rules.h"

#define POW2 RFR_QUANTIZE_POW2
#define STOCHASTIC RFR_QUANTIZE_STOCHASTIC
#define HADAMARD RFR_QUANTIZE_HADAMARD

/* The recipe sets the FP8 formats; FP4 has only E2M1. wgrad multiplies Hadamard-transformed copies of x and dy, so the
 * transforms cancel. */
static const struct {
  int64_t unit;
  bool fp4;
  struct {
    rfr_scaling scaling;
    int options;
  } operand[RFI_OPERANDS];
} recipes[] = {
    [RFR_RECIPE_FP8_DELAYED] = {16, false, {{RFR_SCALING_TENSOR, 0}, {RFR_SCALING_TENSOR, 0}, {RFR_SCALING_TENSOR, 0}}},
    [RFR_RECIPE_FP8_CURRENT] = {16, false, {{RFR_SCALING_TENSOR, 0}, {RFR_SCALING_TENSOR, 0}, {RFR_SCALING_TENSOR, 0}}},
    [RFR_RECIPE_FP8_BLOCK] = {16, false, {{RFR_SCALING_ROW128, 0}, {RFR_SCALING_BLOCK128, 0}, {RFR_SCALING_ROW128, 0}}},
    [RFR_RECIPE_MXFP8] = {32, false, {{RFR_SCALING_MX32, 0}, {RFR_SCALING_MX32, 0}, {RFR_SCALING_MX32, 0}}},
    [RFR_RECIPE_NVFP4] =
        {16, true, {{RFR_SCALING_NV16, HADAMARD}, {RFR_SCALING_NV16X16, 0}, {RFR_SCALING_NV16, HADAMARD | STOCHASTIC}}},
};

rfi_quantizer rfi_recipe_quantizer(const rfr_recipe *recipe, rfi_operand operand) {
  const bool wide_range = operand == RFI_OPERAND_DY && recipe->format == RFR_RECIPE_FORMAT_HYBRID;
  const rfr_dtype fp8 = wide_range ? RFR_E5M2 : RFR_E4M3;
  return (rfi_quantizer){.format = recipes[recipe->kind].fp4 ? RFR_E2M1 : fp8,
                         .scaling = recipes[recipe->kind].operand[operand].scaling,
                         .options =
                             recipes[recipe->kind].operand[operand].options | (recipe->powers_of_two ? POW2 : 0)};
}

int64_t rfi_recipe_unit(const rfr_recipe *recipe) { return recipes[recipe->kind].unit; }
