/* SPDX-License-Identifier: Apache-2.0
 *
 * Low-precision recipes: how the operands of the three GEMMs of a linear layer (forward, dgrad, wgrad) are quantized.
 *
 * A recipe applies to the linear layers recorded between begin and end. Recording only labels them; the pass `quantize`
 * replaces their GEMMs after autodiff and reports a reason for each GEMM that stays in the type of its operands.
 *
 *   rfr_recipe fp8 = rfr_recipe_default(RFR_RECIPE_FP8_CURRENT);
 *   rfr_recipe_begin(t, &fp8);
 *   rfr_value h = rfr_linear(t, x, w1, RFR_NONE);   // in FP8, its backward too
 *   rfr_recipe_begin(t, NULL);
 *   rfr_value y = rfr_linear(t, h, w2, RFR_NONE);   // not quantized
 *   rfr_recipe_end(t);
 *   rfr_recipe_end(t);
 *
 * The formulas and the states of fp8_delayed are in docs/recipes.md.
 */
#ifndef REFRAIN_RECIPE_H
#define REFRAIN_RECIPE_H

#include "refrain/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RFR_RECIPES(X)                     \
  X(RFR_RECIPE_NONE, "none")               \
  X(RFR_RECIPE_FP8_DELAYED, "fp8_delayed") \
  X(RFR_RECIPE_FP8_CURRENT, "fp8_current") \
  X(RFR_RECIPE_FP8_BLOCK, "fp8_block")     \
  X(RFR_RECIPE_MXFP8, "mxfp8")             \
  X(RFR_RECIPE_NVFP4, "nvfp4")
typedef enum rfr_recipe_kind {
#define RFR_RECIPE_ENUM(e, name) e,
  RFR_RECIPES(RFR_RECIPE_ENUM)
#undef RFR_RECIPE_ENUM
} rfr_recipe_kind;

/* Element types of an FP8 recipe: E4M3 everywhere, or E4M3 for x and w and E5M2 for dy. */
#define RFR_RECIPE_FORMATS(X)       \
  X(RFR_RECIPE_FORMAT_E4M3, "e4m3") \
  X(RFR_RECIPE_FORMAT_HYBRID, "hybrid")
typedef enum rfr_recipe_format {
#define RFR_RECIPE_ENUM(e, name) e,
  RFR_RECIPE_FORMATS(RFR_RECIPE_ENUM)
#undef RFR_RECIPE_ENUM
} rfr_recipe_format;

/* fp8_delayed: the largest amax of the history, or that of the last step. */
#define RFR_AMAX_RULES(X) \
  X(RFR_AMAX_MAX, "max")  \
  X(RFR_AMAX_MOST_RECENT, "most_recent")
typedef enum rfr_amax_rule {
#define RFR_RECIPE_ENUM(e, name) e,
  RFR_AMAX_RULES(RFR_RECIPE_ENUM)
#undef RFR_RECIPE_ENUM
} rfr_amax_rule;

typedef struct rfr_recipe {
  size_t size;
  rfr_recipe_kind kind;
  rfr_recipe_format format; /* nvfp4: E4M3, the type of its scales */
  int margin;               /* fp8_delayed: scales are divided by 2^margin; 0 to 16 */
  int history;              /* fp8_delayed: steps of the amax history, 1 to 4096; otherwise 0 */
  rfr_amax_rule rule;       /* fp8_delayed */
  int powers_of_two;        /* fp8_current, fp8_block: scales are rounded down to powers of two */
  int high_backward;        /* 1: dgrad and wgrad are not quantized */
  /* Patterns (rfr_name_matches) of the names of weights that are not quantized. */
  const char *const *keep;
  int n_keep;
} rfr_recipe;

/* States of fp8_delayed, which the pass adds to a program: the amax history f32 (history, slots) and the scales f32
 * (slots). The caller writes 1 into each scale before the first step. Slot 3 l is x of the l-th linear layer of a
 * microbatch, 3 l + 1 its w, 3 l + 2 its dy. */
#define RFR_RECIPE_HISTORY "recipe.history"
#define RFR_RECIPE_SCALE "recipe.scale"
/* A third state of graphed callables: the largest amax of each slot in the step so far, f32 (2,slots), a row for E4M3
 * and one for E5M2, cleared when a step begins. The graphs update the other two from it when the step ends, unless
 * rfr_graphs_options.tensors has it: then the caller does, for example after a reduction over the ranks of a
 * pipeline. With rfr_callable.first_linear slots have the numbers of a single program; the type of RFR_RECIPE_SCALE in
 * rfr_graphs_options.tensors gives their number. */
#define RFR_RECIPE_AMAX "recipe.amax"

/* The usual settings of a recipe. */
RFR_API rfr_recipe rfr_recipe_default(rfr_recipe_kind kind);
RFR_API const char *rfr_recipe_name(rfr_recipe_kind kind); /* "fp8_current" */
/* Errors: argument, with the field that is out of range or has no effect. */
RFR_API rfr_status rfr_recipe_check(const rfr_recipe *recipe);

/* Begins a scope, inside another one or not; the innermost scope applies. NULL or RFR_RECIPE_NONE: nothing is
 * quantized. Copies the patterns. Errors (latched): those of rfr_recipe_check; argument for more than 8 scopes. */
RFR_API void rfr_recipe_begin(rfr_trace *t, const rfr_recipe *recipe);
/* Ends the innermost scope. Error (latched): argument, without an open scope. */
RFR_API void rfr_recipe_end(rfr_trace *t);

#ifdef __cplusplus
}
#endif
#endif
