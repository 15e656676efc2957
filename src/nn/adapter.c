/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters of low rank: LoRA (Hu et al., arXiv 2106.09685), rsLoRA (Kalajdzievski, arXiv 2312.03732) and DoRA (Liu et
 * al., arXiv 2402.09353), with the names, shapes and initial values of the PEFT library.
 *
 *   LoRA   y = x WT + b + (x (scale A)T) BT
 *   DoRA   y = (x WT + (x (scale A)T) BT) m / n + b, n = the norm of each row of W + scale B A, without a gradient
 *
 * These are recorded as ordinary ops before the base GEMM, so that a GEMM in FP8, which cannot share an accumulator,
 * can accumulate into their result. The scale is applied to A (r,in), the smallest operand, and not to x AT (T,r): a
 * power of two gives the same bits. Layers that read one x share one GEMM with their A side by side. The pass fuse
 * replaces the two GEMMs and their sum by one op (fuse_lora.c), and the two terms of dx as well. The pass prune removes
 * the gradient of the frozen base weight. A recipe applies to the base GEMM alone. Packed experts have A (E,r,in) and B
 * (E,out,r) and use grouped GEMMs.
 */
#include "nn/adapter.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "trace/trace.h"

/* Experts are not targets. */
static bool is_linear(rfi_param_kind kind) {
  return rfi_is_linear(kind) && kind != RFI_PARAM_EXPERT_UP && kind != RFI_PARAM_EXPERT_DOWN;
}

static bool is_experts(rfi_param_kind kind) { return kind == RFI_PARAM_EXPERT_UP || kind == RFI_PARAM_EXPERT_DOWN; }

void rfi_module_name(const char *parameter, char out[96]) {
  const char *dot = strrchr(parameter, '.');
  const bool cut = dot && (strcmp(dot, ".weight") == 0 || strcmp(dot, ".bias") == 0);
  snprintf(out, 96, "%.*s", cut ? (int)(dot - parameter) : (int)strlen(parameter), parameter);
}

bool rfi_adapter_can(const rfr_model_config *c, int parameter, bool *in_block, const char **reason) {
  const rfi_param_kind kind = rfi_parameter_kind(c, parameter);
  *in_block = is_linear(kind);
  *reason = "";
  if (*in_block || is_experts(kind)) return true;
  if (kind != RFI_PARAM_TOKENS && kind != RFI_PARAM_HEAD) {
    *reason = "it is neither a linear layer nor the token embedding";
    return false;
  }
  if (c->tie_embeddings) *reason = "the LM head is the embedding table: an adapter on one of them would untie them";
  return !c->tie_embeddings;
}

/* ---- targets ---- */

const rfi_adapter_target *rfi_adapter_find(const rfr_adapter *a, int parameter) {
  if (!a || parameter < 0 || parameter >= a->base_count || a->target_of[parameter] < 0) return NULL;
  return &a->targets[a->target_of[parameter]];
}

const rfi_adapter_target *rfi_adapter_owner(const rfr_model_config *c, int i, rfi_adapter_part *part) {
  const rfr_adapter *a = c->adapter;
  if (!a || i < a->base_count || i >= a->base_count + a->count) return NULL;
  const int each = a->dora ? 3 : 2;
  *part = (rfi_adapter_part)((i - a->base_count) % each);
  return &a->targets[(i - a->base_count) / each];
}

/* Whether the weight is stored as (in,out), as in GPT-2's blocks. */
static bool is_swapped(const rfr_model_config *c, int parameter) {
  return c->type == RFR_MODEL_GPT2 && is_linear(rfi_parameter_kind(c, parameter));
}

/* (out,in) of a target, and the strides of its weight over them. An embedding table (V,C) has out C and in V. Returns
 * the number of such weights: the experts of a packed one, otherwise 1. */
static int64_t layout(const rfr_model_config *c, int parameter, int64_t size[2], int64_t stride[2]) {
  rfr_parameter p = {.rank = 2};
  (void)rfr_model_parameter(c, parameter, &p);
  if (p.rank == 3) {
    size[0] = p.shape[1], size[1] = p.shape[2];
    stride[0] = p.shape[2], stride[1] = 1;
    return p.shape[0];
  }
  const bool swapped = is_swapped(c, parameter) || rfi_parameter_kind(c, parameter) == RFI_PARAM_TOKENS;
  size[0] = p.shape[swapped], size[1] = p.shape[!swapped];
  stride[0] = swapped ? 1 : p.shape[1], stride[1] = swapped ? p.shape[1] : 1;
  return 1;
}

rfr_status rfi_adapter_parameter(const rfr_model_config *c, int i, rfr_parameter *out) {
  static const char *const suffixes[2][3] = {{"lora_A.weight", "lora_B.weight", "lora_magnitude_vector"},
                                             {"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"}};
  rfi_adapter_part part;
  rfr_parameter p;
  char module[96];
  int64_t size[2], stride[2];
  const rfi_adapter_target *target = rfi_adapter_owner(c, i, &part);
  if (!target) return rfi_fail(RFI_E_INTERNAL, "parameter %d of an adapter", i);
  const bool embedding = rfi_parameter_kind(c, target->parameter) == RFI_PARAM_TOKENS;
  const int64_t experts = layout(c, target->parameter, size, stride);
  RFI_TRY(rfr_model_parameter(c, target->parameter, &p));
  rfi_module_name(p.name, module);
  memset(out, 0, sizeof *out);
  const int length = snprintf(out->name, sizeof out->name, "%s.%s", module, suffixes[embedding][part]);
  if (length < 0 || length >= (int)sizeof out->name)
    return rfi_fail(RFI_E_INTERNAL, "the name of %s is too long for an adapter", p.name);
  out->rank = part == RFI_ADAPTER_MAGNITUDE ? 1 : 2;
  out->shape[0] = part == RFI_ADAPTER_A ? target->rank : size[0];
  if (part != RFI_ADAPTER_MAGNITUDE) out->shape[1] = part == RFI_ADAPTER_A ? size[1] : target->rank;
  if (p.rank == 3) {
    memmove(out->shape + 1, out->shape, 2 * sizeof *out->shape);
    out->shape[0] = experts;
    out->rank = 3;
  }
  out->init = RFR_INIT_ZEROS;
  if (part == RFI_ADAPTER_A && !embedding) {
    out->init = RFR_INIT_UNIFORM; /* Kaiming with a = sqrt(5): between -1 / sqrt(in) and 1 / sqrt(in) */
    out->std = 1.0 / sqrt(3.0 * (double)size[1]);
  } else if (part == RFI_ADAPTER_B && embedding) {
    out->init = RFR_INIT_NORMAL;
    out->std = 1.0;
  } else if (part == RFI_ADAPTER_MAGNITUDE) {
    out->init = RFR_INIT_ONES; /* the caller replaces it: rfi_adapter_magnitude */
  }
  return RFR_OK;
}

rfr_status rfi_adapter_create(rfr_ctx *ctx, const rfr_model_config *c, const rfi_adapter_target *targets, int n,
                              int rslora, int dora, double dropout, rfr_adapter **out) {
  rfr_status s;
  rfr_adapter *a = NULL;
  rfr_parameter p;
  const char *reason;
  bool in_block;
  *out = NULL;
  if (n < 1) return rfi_fail(RFI_E_ADAPTER, "the adapter has no targets");
  if (!(dropout >= 0.0 && dropout < 1.0)) return rfi_fail(RFI_E_ADAPTER, "dropout %g is outside [0, 1)", dropout);
  RFI_TRY(RFI_ALLOC(ctx, sizeof *a, &a));
  a->ctx = ctx;
  a->base_count = rfr_model_parameter_count(c);
  if (c->adapter) RFI_GOTO(rfi_fail(RFI_E_ARGUMENT, "the model has an adapter already"));
  RFI_GOTO(RFI_ALLOC(ctx, (size_t)n * sizeof *a->targets, &a->targets));
  RFI_GOTO(RFI_ALLOC(ctx, ((size_t)a->base_count + 1) * sizeof *a->target_of, &a->target_of));
  for (int i = 0; i < a->base_count; i++) a->target_of[i] = -1;
  a->rslora = rslora != 0, a->dora = dora != 0, a->dropout = dropout;
  for (int i = 0; i < n; i++) {
    rfi_adapter_target *t = &a->targets[a->n];
    *t = targets[i];
    RFI_GOTO(rfr_model_parameter(c, t->parameter, &p));
    if (!rfi_adapter_can(c, t->parameter, &in_block, &reason))
      RFI_GOTO(rfi_fail(RFI_E_ADAPTER, "%s cannot have an adapter: %s", p.name, reason));
    if (!in_block && dora) RFI_GOTO(rfi_fail(RFI_E_ADAPTER, "%s: DoRA supports only linear layers of blocks", p.name));
    if (!in_block && dropout > 0.0 && rfi_parameter_kind(c, t->parameter) != RFI_PARAM_TOKENS)
      RFI_GOTO(rfi_fail(RFI_E_ADAPTER,
                        "%s: an adapter of the LM head or of experts has no dropout; set the dropout to 0", p.name));
    if (t->rank < 1 || t->rank > RFI_MOST_RANK)
      RFI_GOTO(rfi_fail(RFI_E_ADAPTER, "%s: rank %lld; it must be 1 to %d", p.name, (long long)t->rank, RFI_MOST_RANK));
    if (!(t->alpha > 0.0) || !isfinite(t->alpha))
      RFI_GOTO(rfi_fail(RFI_E_ADAPTER, "%s: alpha %g; it must be more than 0", p.name, t->alpha));
    t->scale = t->alpha / (rslora ? sqrt((double)t->rank) : (double)t->rank);
    t->first = a->base_count + a->count;
    a->count += dora ? 3 : 2;
    a->target_of[t->parameter] = a->n++;
  }
  *out = a;
  return RFR_OK;
fail:
  rfr_adapter_destroy(a);
  return s;
}

void rfr_adapter_destroy(rfr_adapter *a) {
  if (!a) return;
  rfi_free(a->ctx, a->targets);
  rfi_free(a->ctx, a->target_of);
  rfi_free(a->ctx, a);
}

rfr_adapter_options rfr_adapter_options_default(void) {
  static const char *const all_linear[] = {"all-linear"};
  return (rfr_adapter_options){
      .size = sizeof(rfr_adapter_options), .rank = 16, .alpha = 32.0, .targets = all_linear, .n_targets = 1};
}

/* Whether a pattern of targets matches this parameter: its module, or the parameter itself. A name without dots and
 * wildcards is the last part of a module's name, as in target_modules of PEFT. */
static bool matches(const rfr_model_config *c, const char *pattern, int i) {
  char module[96];
  rfr_parameter p;
  bool in_block;
  const char *reason;
  if (rfr_model_parameter(c, i, &p) != RFR_OK) return false;
  if (strcmp(pattern, "all-linear") == 0) return rfi_adapter_can(c, i, &in_block, &reason) && in_block;
  rfi_module_name(p.name, module);
  const char *dot = strrchr(module, '.');
  if (!pattern[strcspn(pattern, ".*?")] && dot && strcmp(pattern, dot + 1) == 0) return true;
  return rfr_name_matches(pattern, module) || rfr_name_matches(pattern, p.name);
}

/* The distinct last components of the modules that can have an adapter. */
static void list_modules(const rfr_model_config *c, char *out, size_t size) {
  size_t n = 0;
  const int count = rfr_model_parameter_count(c);
  rfr_parameter p;
  bool in_block;
  const char *reason;
  out[0] = 0;
  for (int i = 0; i < count && rfr_model_parameter(c, i, &p) == RFR_OK; i++) {
    char module[96];
    if (!rfi_adapter_can(c, i, &in_block, &reason)) continue;
    rfi_module_name(p.name, module);
    const char *dot = strrchr(module, '.'), *last = dot ? dot + 1 : module;
    if (rfi_has_word(out, last) || n + strlen(last) + 2 > size) continue;
    n += (size_t)snprintf(out + n, size - n, "%s%s", n ? " " : "", last);
  }
}

/* Lists the targets among n that a pattern matches; at least one must match. */
static rfr_status check_match(const rfr_model_config *c, const char *what, const char *pattern, const bool *among) {
  char modules[256];
  rfr_parameter p;
  const int n = rfr_model_parameter_count(c);
  for (int i = 0; i < n; i++)
    if (among[i] && matches(c, pattern, i)) return RFR_OK;
  for (int i = 0; i < n; i++) {
    bool in_block;
    const char *reason;
    if (!matches(c, pattern, i) || rfi_adapter_can(c, i, &in_block, &reason)) continue;
    RFI_TRY(rfr_model_parameter(c, i, &p));
    return rfi_fail(RFI_E_ADAPTER, "%s: \"%.100s\" matches %s, which cannot have an adapter: %s", what, pattern, p.name,
                    reason);
  }
  list_modules(c, modules, sizeof modules);
  return rfi_fail(RFI_E_ADAPTER, "%s: no %s matches \"%.100s\"; modules that can have an adapter end in: %s", what,
                  strcmp(what, "targets") == 0 ? "module" : "target", pattern, modules);
}

/* The number of the last pattern that matches, because later patterns in the list win. */
static double number_of(const rfr_model_config *c, const rfr_adapter_number *numbers, int n, int i, double otherwise) {
  for (int k = 0; k < n; k++)
    if (matches(c, numbers[k].match, i)) otherwise = numbers[k].value;
  return otherwise;
}

static rfr_status collect(const rfr_model_config *c, const rfr_adapter_options *o, bool *can, bool *targeted,
                          rfi_adapter_target *targets, int *found) {
  const int n = rfr_model_parameter_count(c);
  const char *reason;
  bool in_block;
  for (int i = 0; i < n; i++) can[i] = rfi_adapter_can(c, i, &in_block, &reason);
  for (int k = 0; k < o->n_targets; k++) RFI_TRY(check_match(c, "targets", o->targets[k], can));
  for (int i = 0; i < n; i++)
    for (int k = 0; k < o->n_targets; k++) targeted[i] = targeted[i] || (can[i] && matches(c, o->targets[k], i));
  for (int k = 0; k < o->n_ranks; k++) RFI_TRY(check_match(c, "ranks", o->ranks[k].match, targeted));
  for (int k = 0; k < o->n_alphas; k++) RFI_TRY(check_match(c, "alphas", o->alphas[k].match, targeted));
  for (int i = 0; i < n; i++) {
    if (!targeted[i]) continue;
    const double rank = number_of(c, o->ranks, o->n_ranks, i, (double)o->rank);
    if (!(rank >= 1.0 && rank <= RFI_MOST_RANK) || rank != floor(rank))
      return rfi_fail(RFI_E_ADAPTER, "ranks: %g is not an integer from 1 to %d", rank, RFI_MOST_RANK);
    targets[(*found)++] = (rfi_adapter_target){
        .parameter = i, .rank = (int64_t)rank, .alpha = number_of(c, o->alphas, o->n_alphas, i, o->alpha)};
  }
  return RFR_OK;
}

rfr_status rfr_adapter_create(rfr_ctx *ctx, const rfr_model_config *c, const rfr_adapter_options *o,
                              rfr_adapter **out) {
  rfr_status s;
  rfi_adapter_target *targets = NULL;
  bool *flags = NULL;
  int found = 0;
  *out = NULL;
  if (o->size != sizeof *o) return rfi_fail(RFI_E_ARGUMENT, "rfr_adapter_options: size %zu", o->size);
  if (o->n_targets < 1) return rfi_fail(RFI_E_ADAPTER, "targets: the list is empty");
  RFI_TRY(rfr_model_config_check(c));
  const size_t n = (size_t)rfr_model_parameter_count(c);
  RFI_TRY(RFI_ALLOC(ctx, n * sizeof *targets, &targets));
  RFI_GOTO(RFI_ALLOC(ctx, 2 * n, &flags));
  RFI_GOTO(collect(c, o, flags, flags + n, targets, &found));
  s = rfi_adapter_create(ctx, c, targets, found, o->rslora, o->dora, o->dropout, out);
fail:
  rfi_free(ctx, targets);
  rfi_free(ctx, flags);
  return s;
}

/* ---- recording ---- */

static rfr_value scaled(rfr_trace *t, rfr_value x, double scale) {
  return scale == 1.0 ? x : rfr_scale(t, x, scale, RFR_NONE);
}

/* m / n for each row of the result: see the head of this file. V = W + scale B A; the reciprocal root mean square of a
 * norm gives 1 / n. */
static rfr_value magnitude_scale(rfr_trace *t, const rfi_adapter_target *target, rfr_value w, bool swapped, rfr_value a,
                                 rfr_value b, rfr_value magnitude, rfr_dtype to) {
  const double tiny = 1e-30;
  rfr_value v = rfr_matmul(t, scaled(t, b, target->scale), a, RFR_NONE, 0, 0, rfr_value_type(t, w).dtype), out[2];
  v = rfr_detach(t, rfr_add(t, swapped ? rfr_transpose(t, w, 0, 1) : w, v));
  const int64_t in = rfr_value_type(t, v).shape[1];
  const rfr_value operands[2] = {v, rfr_fill(t, 1.0, rfr_value_type(t, v).dtype, 1, &in)};
  const rfi_attr eps = rfi_f(tiny);
  rfi_record(t, RFR_HERE, RFI_OP_rmsnorm, 2, operands, &eps, out);
  if (rfr_trace_status(t) != RFR_OK) return RFR_NONE;
  if (rfr_value_type(t, magnitude).dtype != RFR_F32) magnitude = rfr_cast(t, magnitude, RFR_F32);
  rfr_value g = rfr_mul(t, magnitude, rfr_scale(t, out[1], 1.0 / sqrt((double)in), RFR_NONE));
  return to == RFR_F32 ? g : rfr_cast(t, g, to);
}

/* Finds an op without a microbatch that precedes those of all microbatches and equals this one; NULL: none. *open: such
 * an op can still be recorded. */
static const rfi_opr *find_shared(const rfr_trace *t, const rfi_opr *like, bool *open) {
  *open = true;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    const bool is_float = op->n_out > 0 && rfr_dtype_is_float(t->values[op->out[0]].type.dtype);
    *open = *open && (op->microbatch < 0 || !is_float);
    if (!*open) return NULL;
    bool equal = op->microbatch < 0 && op->def == like->def && op->n_in >= like->n_in && rfi_attrs_equal(op, like);
    for (int k = 0; equal && k < op->n_in; k++) equal = op->in[k] == (k < like->n_in ? like->in[k] : RFR_NONE);
    if (equal) return op;
  }
  return NULL;
}

/* Records an op on trained weights once if possible, so that gradients are summed over microbatches before they are
 * scaled and sliced. Autodiff requires such an op to precede those of all microbatches. */
static rfr_value of_weights(rfr_trace *t, rfi_opcode code, int n, rfr_value *in, rfi_attr attr) {
  const rfi_opr like = {.def = rfi_op_def_get(code), .n_in = n, .in = in, .attr = &attr};
  bool open;
  if (!rfi_trace_records(t)) return RFR_NONE;
  const rfi_opr *op = find_shared(t, &like, &open);
  if (op) return op->out[0];
  const int microbatch = t->microbatch;
  if (open) rfr_microbatch(t, -1);
  const rfr_value y = rfi_record(t, RFR_HERE, code, n, in, &attr, NULL);
  rfr_microbatch(t, microbatch);
  return y;
}

/* scale A of n targets, stacked vertically. */
static rfr_value scaled_a(rfr_trace *t, const rfr_value *parameters, const rfi_adapter_target *const *targets, int n) {
  rfr_value a[RFI_MOST_SHARED];
  for (int i = 0; i < n; i++) a[i] = parameters[targets[i]->first];
  if (n > 1) a[0] = of_weights(t, RFI_OP_concat, n, a, rfi_i(0));
  return targets[0]->scale == 1.0 ? a[0] : of_weights(t, RFI_OP_scale, 1, a, rfi_f(targets[0]->scale));
}

static bool drops(const rfr_adapter *a, rfr_value step) { return a->dropout > 0.0 && step != RFR_NONE; }

/* Whether the A of two targets can be one tensor. A frozen one cannot be part of it, because it would get a gradient
 * with the other. */
static bool is_alike(const rfr_trace *t, const rfr_value *parameters, const rfi_adapter_target *p,
                     const rfi_adapter_target *q) {
  const rfr_value a = parameters[p->first], b = parameters[q->first];
  return p->scale == q->scale && a >= 0 && b >= 0 && t->values[a].role == t->values[b].role;
}

/* The targets of n weights that read the same x; false: their A cannot be one tensor. */
static bool find_alike(const rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, const int *weights,
                       int n, rfr_value step, const rfi_adapter_target **targets) {
  for (int i = 0; i < n; i++) {
    targets[i] = rfi_adapter_find(c->adapter, weights[i]);
    if (!targets[i] || drops(c->adapter, step) || !is_alike(t, parameters, targets[0], targets[i])) return false;
  }
  return true;
}

void rfi_adapter_prepare(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, const int *weights,
                         int n, rfr_value step) {
  const rfi_adapter_target *targets[RFI_MOST_SHARED];
  if (!c->adapter || !rfi_trace_records(t)) return;
  if (find_alike(t, c, parameters, weights, n, step, targets)) (void)scaled_a(t, parameters, targets, n);
  else
    for (int i = 0; i < n; i++)
      if (targets[0] = rfi_adapter_find(c->adapter, weights[i]), targets[0]) (void)scaled_a(t, parameters, targets, 1);
}

void rfi_adapter_project(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, const int *weights,
                         int n, rfr_value x, rfr_value step, rfr_value *u) {
  const rfi_adapter_target *target[RFI_MOST_SHARED];
  for (int i = 0; i < n; i++) u[i] = RFR_NONE;
  if (!c->adapter || !rfi_trace_records(t) || !find_alike(t, c, parameters, weights, n, step, target)) return;
  rfr_recipe_begin(t, NULL);
  const rfr_value all = rfr_matmul(t, x, scaled_a(t, parameters, target, n), RFR_NONE, 0, 1, c->dtype);
  rfr_recipe_end(t);
  for (int64_t i = 0, first = 0; i < n; first += target[i++]->rank) u[i] = rfr_slice(t, all, 1, first, target[i]->rank);
}

rfr_value rfi_adapter_linear(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, int weight,
                             rfr_value x, rfr_value u, rfr_value bias, rfr_value step, rfr_dtype to) {
  const rfr_adapter *a = c->adapter;
  const rfi_adapter_target *target = rfi_adapter_find(a, weight);
  const rfr_value w = rfi_parameter_values(t, c, parameters, weight);
  const bool swapped = is_swapped(c, weight);
  if (!target) return rfr_matmul(t, x, w, bias, 0, !swapped, to);
  const rfr_value A = parameters[target->first], B = parameters[target->first + 1];
  const rfr_value dropped = drops(a, step) ? rfr_dropout(t, x, step, a->dropout, RFI_DROPOUT_STREAM) : x;
  rfr_recipe_begin(t, NULL);
  if (u == RFR_NONE) u = rfr_matmul(t, dropped, scaled_a(t, parameters, &target, 1), RFR_NONE, 0, 1, c->dtype);
  u = rfr_matmul(t, u, B, RFR_NONE, 0, 1, to);
  const rfr_value g =
      a->dora ? magnitude_scale(t, target, w, swapped, A, B, parameters[target->first + 2], to) : RFR_NONE;
  rfr_recipe_end(t);
  rfr_value y = rfr_matmul(t, x, w, a->dora ? RFR_NONE : bias, 0, !swapped, to);
  if (!a->dora) return rfr_add(t, y, u);
  if (drops(a, step)) { /* y = x WT + (g - 1) dropped WT + g u, as in PEFT */
    const rfr_value z = rfr_matmul(t, dropped, w, RFR_NONE, 0, !swapped, to);
    y = rfr_add(t, rfr_add(t, y, rfr_scale(t, z, -1.0, RFR_NONE)), rfr_mul(t, rfr_add(t, z, u), g));
  } else {
    y = rfr_mul(t, rfr_add(t, y, u), g);
  }
  return bias == RFR_NONE ? y : rfr_add(t, y, bias);
}

rfr_value rfi_adapter_embedding(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, rfr_value ids,
                                rfr_value y) {
  const rfi_adapter_target *target = rfi_adapter_find(c->adapter, rfi_parameter_index(c, RFI_PARAM_TOKENS, 0));
  if (!target) return y;
  const rfr_value a = rfr_transpose(t, parameters[target->first], 0, 1); /* (V,r) */
  const rfr_value u = scaled(t, rfr_embedding(t, a, ids), target->scale);
  rfr_recipe_begin(t, NULL);
  y = rfr_add(t, y, rfr_matmul(t, u, parameters[target->first + 1], RFR_NONE, 0, 1, c->dtype));
  rfr_recipe_end(t);
  return y;
}

rfr_value rfi_adapter_experts(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, int weight,
                              rfr_value x, rfr_value offsets, rfr_value y) {
  const rfi_adapter_target *target = rfi_adapter_find(c->adapter, weight);
  if (!target) return y;
  rfr_recipe_begin(t, NULL);
  rfr_value u = rfr_grouped_linear(t, x, scaled_a(t, parameters, &target, 1), offsets, RFR_NONE, RFR_NONE); /* (R,r) */
  u = rfr_grouped_linear(t, u, parameters[target->first + 1], offsets, RFR_NONE, RFR_NONE);
  rfr_recipe_end(t);
  return rfr_add(t, y, u);
}

/* ---- on the host ---- */

static float element(rfr_dtype dtype, const void *data, int64_t i) {
  return dtype == RFR_F32 ? ((const float *)data)[i] : rfr_float_from_bits(dtype, ((const uint16_t *)data)[i]);
}

void rfi_adapter_magnitude(const rfr_model_config *c, const rfi_adapter_target *target, rfr_dtype dtype, const void *w,
                           float *magnitude) {
  int64_t size[2], stride[2];
  layout(c, target->parameter, size, stride);
  for (int64_t i = 0; i < size[0]; i++) {
    double sum = 0.0;
    for (int64_t j = 0; j < size[1]; j++) {
      const double x = (double)element(dtype, w, i * stride[0] + j * stride[1]);
      sum += x * x;
    }
    magnitude[i] = (float)sqrt(sum);
  }
}

void rfi_adapter_merge(const rfr_model_config *c, const rfi_adapter_target *target, const float *a, const float *b,
                       const float *magnitude, int threads, float *w) {
  enum { BLOCK = 256 };
  int64_t size[2], stride[2];
  (void)threads; /* unused without OpenMP */
  const int64_t experts = layout(c, target->parameter, size, stride), r = target->rank;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n_row = 0; n_row < experts * size[0]; n_row++) { /* b has a row for each */
    const int64_t e = n_row / size[0], i = n_row % size[0];
    float *row = w + e * size[0] * size[1] + i * stride[0], delta[BLOCK];
    const float *own_a = a + e * r * size[1], *own_b = b + n_row * r;
    double sum = 0.0;
    for (int64_t first = 0; first < size[1]; first += BLOCK) {
      const int64_t n = size[1] - first < BLOCK ? size[1] - first : BLOCK;
      memset(delta, 0, sizeof delta);
      for (int64_t p = 0; p < r; p++)
        for (int64_t j = 0; j < n; j++) delta[j] += own_b[p] * own_a[p * size[1] + first + j];
      for (int64_t j = 0; j < n; j++) {
        float *x = &row[(first + j) * stride[1]];
        *x += (float)target->scale * delta[j];
        sum += (double)*x * (double)*x;
      }
    }
    for (int64_t j = 0; magnitude && j < size[1]; j++) row[j * stride[1]] *= (float)((double)magnitude[i] / sqrt(sum));
  }
}
