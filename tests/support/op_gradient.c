/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradient rules against central differences, both in f64.
 *
 * The op is recorded with its first result weighted by random numbers and summed to a loss; autodiff records the
 * gradient of every operand `f`; the interpreter computes loss and gradients without rounding. Along a direction v the
 * difference (L(x + h v) - L(x - h v)) / 2h must equal g.v. Directions that are random in all elements detect any wrong
 * element; a few single elements distinguish a wrong one from an unlucky sum. The other results (statistics that the
 * backward reads) have no gradient of their own; operands `F` and integers are not differentiated.
 *
 * Values are not rounded to the type under test, because ties would make kinks; the type changes the rule: casts, and
 * types of the ops it records. Every case runs twice, with the operands as inputs and as weights, whose gradients are
 * recorded differently.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/loss/head.h"
#include "pass/pass.h"
#include "support/interp.h"
#include "support/thin.h"

enum {
  DIRECTIONS = 3,
  ELEMENTS = 3,
  BIG = RFT_FEWER(2048, 0) /* maximum elements for several directions; above, one of each kind is enough */
};
static const double BAR = 1e-6;

/* A maximum has kinks where two elements are close, and no curvature. */
static double step_of(const rft_case *c) { return c->def->code == RFI_OP_max ? 1e-7 : 1e-4; }

/* ---- recording ---- */

static void record(rfr_trace *t, const rft_case *c, rfr_role role) {
  rfr_value given[RFT_MAX_IN], in[RFT_MAX_IN], out[RFI_MAX_NAMES];
  for (int i = 0; i < c->n_in; i++) {
    const rft_operand *o = &c->in[i];
    char name[16];
    snprintf(name, sizeof name, "x%d", i);
    in[i] = RFR_NONE;
    if (o->kind != '_')
      in[i] = rfr_input(t, name, o->kind == 'f' ? role : RFR_ROLE_INPUT, o->type.dtype, o->type.rank, o->type.shape);
    given[i] = in[i];
    for (int j = 0; j < c->def->n_results; j++)
      if (c->def->alias[j] == i && in[i] >= 0) in[i] = rfr_copy(t, in[i]); /* the op writes it in place */
  }
  rfr_microbatch(t, c->microbatch);
  rfr_value y = rfi_record(t, RFR_HERE, c->def->code, c->n_in, in, c->attr, out);
  rfr_type type = rfr_value_type(t, y);
  rfr_value weights = rfr_input(t, "weights", RFR_ROLE_INPUT, type.dtype, type.rank, type.shape);
  rfi_attr all[] = {rfi_i(-1), rfi_i(RFR_F32)};
  rfr_value weighted = rfr_mul(t, y, weights);
  rfr_value loss = rfi_record(t, RFR_HERE, RFI_OP_sum, 1, &weighted, all, NULL);
  rfr_output(t, "loss", loss);
  rfr_microbatch(t, -1);
  for (int i = 0; i < c->n_in; i++) {
    char name[16];
    snprintf(name, sizeof name, "g%d", i);
    if (c->in[i].kind == 'f') rfr_output(t, name, rfr_gradient(t, loss, given[i], RFR_F32));
  }
}

/* ---- evaluating ---- */

/* The operands of one evaluation: x + h v for operand `moved`, x for the others. */
typedef struct point {
  const rft_case *c;
  int moved;
  double h;
  const double *v;
} point;

static const char *evaluate(rft_interp *in, const point *p) {
  for (int i = 0; i < p->c->n_in; i++) {
    char name[16];
    snprintf(name, sizeof name, "x%d", i);
    rfr_value x = rft_input_of(in->trace, name);
    for (int64_t k = 0; x >= 0 && k < rfi_count(&p->c->in[i].type); k++)
      rft_set(&in->arg[x], k, rft_case_value(p->c, i, k) + (i == p->moved ? p->h * p->v[k] : 0));
  }
  const rfi_arg *weights = &in->arg[rft_input_of(in->trace, "weights")];
  for (int64_t k = 0; k < rfi_count(&weights->type); k++) rft_set(weights, k, rft_random(p->c, 50, k) + 1.5);
  return rft_interp_run(in);
}

static double loss_of(const rft_interp *in) { return rft_get(&in->arg[rft_output_of(in->trace, "loss")], 0); }

/* Compares g with differences of the loss along directions of operand i. */
static void compare(rft_interp *in, const rft_case *c, int i, const double *g, rfr_dtype type, rft_cell *cell) {
  int64_t n = rfi_count(&c->in[i].type);
  double *v = calloc((size_t)n + 1, sizeof *v), largest = 0;
  if (!v) abort();
  for (int64_t k = 0; k < n; k++) largest = fmax(largest, fabs(g[k]));
  for (int d = n > BIG ? DIRECTIONS - 1 : 0; d < (n > BIG ? DIRECTIONS + 1 : DIRECTIONS + ELEMENTS) && n > 0; d++) {
    double dot = 0, size = 0, h = step_of(c);
    int64_t element = (int64_t)((rft_random(c, 60 + i, d) + 2) / 4 * (double)n);
    for (int64_t k = 0; k < n; k++) {
      v[k] = d < DIRECTIONS ? rft_random(c, 70 + 8 * i + d, k) : k == element;
      dot += g[k] * v[k];
      size += fabs(g[k] * v[k]);
    }
    if (d >= DIRECTIONS) size += 1e-3 * largest;
    evaluate(in, &(point){c, i, h, v});
    double high = loss_of(in);
    evaluate(in, &(point){c, i, -h, v});
    double difference = (high - loss_of(in)) / (2 * h), ratio = fabs(difference - dot) / (BAR * (size + 1e-6));
    if (ratio > cell->worst) cell->worst = ratio;
    if (!(ratio <= 1))
      rft_cell_fail(cell, c, type, "d/d%s along %s: rule %.12g, difference %.12g", c->def->operand[i],
                    d < DIRECTIONS ? "a random direction" : "one element", dot, difference);
  }
  free(v);
}

static const char *check_trace(rfr_ctx *ctx, const rft_case *c, rfr_role role, rfr_dtype type, rft_cell *cell) {
  rfr_trace *t = NULL, *joint = NULL;
  rfi_report report = {.text = {.ctx = ctx}};
  rfi_pass_options options = {0};
  const char *wrong = NULL;
  if (rfr_trace_create(ctx, &t) != RFR_OK) return rfr_last_error()->message;
  record(t, c, role);
  if (rfr_trace_finish(t) != RFR_OK || rfi_pass_autodiff(t, &options, &report, &joint) != RFR_OK) {
    wrong = rfr_last_error()->message;
  } else {
    rft_interp in;
    rft_interp_init(&in, joint);
    wrong = evaluate(&in, &(point){c, -1, 0, NULL});
    double *g[RFT_MAX_IN] = {0};
    for (int i = 0; i < c->n_in; i++) {
      char name[16];
      snprintf(name, sizeof name, "g%d", i);
      rfr_value id = rft_output_of(joint, name);
      if (id < 0) continue;
      int64_t n = rfi_count(&c->in[i].type);
      g[i] = calloc((size_t)n + 1, sizeof *g[i]);
      if (!g[i]) abort();
      for (int64_t k = 0; k < n; k++) g[i][k] = rft_get(&in.arg[id], k);
    }
    for (int i = 0; i < c->n_in; i++)
      if (g[i] && !wrong) compare(&in, c, i, g[i], type, cell);
    for (int i = 0; i < c->n_in; i++) free(g[i]);
    rft_interp_deinit(&in);
  }
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(joint);
  rfr_trace_destroy(t);
  return wrong;
}

/* The reason why an op has no gradient check, or NULL. */
static const char *exempt(const rft_op *op, char word[32]) {
  static const char *const suffixes[] = {"_bwd", "_dx", "_dw", "_db", "_grad"};
  const rfi_op_def *def = op->def;
  if (def->flags & RFI_GRAD) return NULL;
  for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
    size_t n = strlen(def->name), m = strlen(suffixes[i]);
    if (n <= m || strcmp(def->name + n - m, suffixes[i]) != 0) continue;
    const rfi_op_def *forward = rfi_op_def_find(NULL, def->name, n - m);
    if (forward && (forward->flags & RFI_GRAD)) {
      snprintf(word, 32, "via %s", forward->name);
      return word;
    }
  }
  if (rfi_is_head(def->code) || def->code == RFI_OP_attention_bwd_packed || def->code == RFI_OP_swiglu_bwd_packed ||
      def->code == RFI_OP_swiglu_weighted_bwd_packed || def->code == RFI_OP_accumulate)
    return "is a backward";
  if (strcmp(def->family, "grouped") == 0 && def->code != RFI_OP_splits_to_offsets) return "via grouped_matmul";
  if (def->code == RFI_OP_add_layernorm || def->code == RFI_OP_add_rmsnorm || strcmp(def->family, "matmul") == 0)
    return "none: lowered";
  if (def->flags & RFI_STATE) return "none: state";
  if (strcmp(def->family, "quant") == 0 && def->code != RFI_OP_dequantize) return "none: lowered";
  if (strcmp(def->family, "optim") == 0) return "none: optimizer";
  if (strcmp(def->family, "ring") == 0) return "none: host data";
  if (strcmp(def->family, "decode") == 0 || def->code == RFI_OP_attention_cached) return "none: generation";
  if (def->n_operands == 0) return "none: constant";
  if (def->code == RFI_OP_token_count || def->code == RFI_OP_positions || def->code == RFI_OP_splits_to_offsets ||
      def->code == RFI_OP_moe_sort || def->code == RFI_OP_moe_parts || def->code == RFI_OP_moe_part_experts ||
      def->code == RFI_OP_moe_load || def->code == RFI_OP_dequantize)
    return "none: integers";
  return ""; /* an empty cell, which fails */
}

void rft_check_gradient(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  static const rfr_role roles[] = {RFR_ROLE_INPUT_GRAD, RFR_ROLE_TRAINABLE};
  char word[32];
  const char *why = exempt(op, word);
  bool differentiated = false, finite = true;
  if (why) {
    snprintf(cell->word, sizeof cell->word, "%s", why);
    return;
  }
  for (int i = 0; i < c->n_in; i++) differentiated |= c->in[i].kind == 'f', finite &= !c->in[i].has_row;
  if (!finite || !differentiated || !rfr_dtype_is_float(c->out[0].dtype)) return; /* this case has only integers */
  for (int r = 0; r < 2; r++) {
    rfr_ctx *ctx;
    if (rfr_ctx_create(NULL, &ctx) != RFR_OK) abort();
    const char *wrong = check_trace(ctx, c, roles[r], type, cell);
    if (wrong) rft_cell_fail(cell, c, type, "gradient: %s", wrong);
    rfr_ctx_destroy(ctx);
    cell->done++;
  }
}
