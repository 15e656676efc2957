/* SPDX-License-Identifier: Apache-2.0
 *
 * Registered ops: a description becomes a definition in the context.
 *
 * The rest of the library uses an op by its definition, so a registered op needs a special case
 * only at kernel selection, where its kernel comes from the definition. Results of its callbacks are
 * checked here: types must be well formed, gradients must have their operand's shape. A definition
 * is not changed or freed before its context is destroyed, because traces point to it.
 */
#include <ctype.h>
#include <string.h>

#include "base/base.h"
#include "ops/rule.h"

/* One allocation of the context: definition, callbacks, name. */
typedef struct registered {
  rfi_owned link;
  rfi_op_def def; /* must follow the link directly: rfi_op_def_find relies on it */
  struct rfi_outside outside;
  char name[RFI_OP_NAME];
} registered;
_Static_assert(offsetof(registered, def) == sizeof(rfi_owned), "the definition follows the link");

/* ---- callbacks of the definition ---- */

static rfi_infer with_user(const rfi_infer *c) {
  rfi_infer own = *c;
  own.user = c->def->outside->user;
  return own;
}

static rfr_status infer(const rfi_infer *c) {
  const rfi_infer own = with_user(c);
  const char *wrong = c->def->outside->shape(&own);
  if (wrong) return rfi_fail(RFI_E_TRACE_SHAPE, "%s", wrong);
  for (int j = 0; j < c->def->n_results; j++) {
    rfr_type *y = &c->out[j];
    if ((unsigned)y->dtype >= RFR_DTYPE_COUNT || y->rank < 0 || y->rank > RFR_MAX_RANK)
      return rfi_fail(RFI_E_TRACE_SHAPE, "its shape rule gives result %s no valid type", c->def->result[j]);
    int64_t bits = rfr_dtype_bits(y->dtype);
    for (int d = 0; d < y->rank; d++)
      if (y->shape[d] < 0 || __builtin_mul_overflow(bits, y->shape[d] ? y->shape[d] : 1, &bits))
        return rfi_fail(RFI_E_TRACE_SHAPE, "its shape rule gives result %s a dimension of %lld, or the size overflows",
                        c->def->result[j], (long long)y->shape[d]);
    for (int d = y->rank; d < RFR_MAX_RANK; d++) y->shape[d] = 0; /* types are compared as bytes */
  }
  return RFR_OK;
}

static double flops(const rfi_infer *c) {
  const rfi_infer own = with_user(c);
  return c->def->outside->flops(&own);
}

static double bytes(const rfi_infer *c) {
  const rfi_infer own = with_user(c);
  return c->def->outside->bytes(&own);
}

static bool view(const rfi_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset) {
  const rfi_infer own = with_user(c);
  return c->def->outside->view(&own, stride, y_stride, offset);
}

/* The gradient of operand k, cast to the type that the rest of the backward expects. */
static rfr_status take_gradient(rfi_grad *g, int k) {
  rfr_trace *t = g->t;
  const rfi_op_def *def = g->op->def;
  if (g->dx[k] == RFR_NONE) return RFR_OK;
  const char *name = def->operand[k < def->n_operands ? k : def->n_operands - 1];
  if (g->dx[k] < 0 || g->dx[k] >= t->n_values)
    return rfi_fail(RFI_E_TRACE_VALUE, "%s: the gradient of %s is not a value of this trace", def->name, name);
  const rfr_type *x = &t->values[g->op->in[k]].type, *dx = &t->values[g->dx[k]].type;
  if (x->rank != dx->rank || memcmp(x->shape, dx->shape, sizeof x->shape) != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "%s: the gradient of %s differs from it in shape", def->name, name);
  rfr_dtype to = rfi_emit_dtype(g, k);
  rfr_set_phase(t, g->is_weight[k] ? RFR_PHASE_WGRAD : RFR_PHASE_DGRAD);
  if (dx->dtype != to) g->dx[k] = rfr_cast_at(t, g->at, g->dx[k], to);
  return rfr_trace_status(t);
}

static rfr_status grad(rfi_grad *g) {
  const rfi_opr *op = g->op;
  const struct rfi_outside *o = op->def->outside;
  rfr_grad call = {.t = g->t,
                   .at = g->at,
                   .n_in = op->n_in,
                   .n_out = op->n_out,
                   .in = op->in,
                   .out = op->out,
                   .attr = op->attr,
                   .need = g->need,
                   .is_weight = g->is_weight,
                   .dy = g->dy,
                   .dx = g->dx,
                   .user = o->user};
  bool weights = true;
  for (int k = 0; k < op->n_in; k++) weights = weights && (!g->need[k] || g->is_weight[k]);
  rfr_set_phase(g->t, weights ? RFR_PHASE_WGRAD : RFR_PHASE_DGRAD);
  o->gradient(&call);
  RFI_TRY(rfr_trace_status(g->t));
  for (int k = 0; k < op->n_in; k++)
    if (g->need[k]) RFI_TRY(take_gradient(g, k));
  rfr_set_phase(g->t, RFR_PHASE_DGRAD);
  return RFR_OK;
}

rfr_status rfi_outside_failed(const rfi_opr *op, rfr_status s) {
  rfi_fail_at(RFI_E_OP_KERNEL, op->at.file, op->at.line, "its kernel returned \"%s\"", rfr_status_name(s));
  return rfi_fail_status(s);
}

/* ---- the description ---- */

static bool is_word(const char *s, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (!isascii((unsigned char)s[i]) || !(isalnum((unsigned char)s[i]) || s[i] == '_')) return false;
  return n > 0 && !isdigit((unsigned char)s[0]);
}

static rfr_status check_name(const rfr_ctx *ctx, const char *name) {
  size_t n = name ? strnlen(name, RFI_OP_NAME) : 0;
  bool good = n > 0 && n < RFI_OP_NAME && strchr(name, '.');
  for (const char *s = name; good; s += strcspn(s, ".") + 1) {
    good = is_word(s, strcspn(s, "."));
    if (!s[strcspn(s, ".")]) break;
  }
  if (!good)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.name: \"%.80s\" is not like mine.swish, at most %d bytes",
                    name ? name : "", RFI_OP_NAME - 1);
  if (rfi_op_def_find(ctx, name, n)) return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.name: \"%s\" is taken", name);
  return RFR_OK;
}

typedef struct word {
  const char *s;
  size_t n;
} word;

static bool words_equal(word a, word b) { return a.n == b.n && memcmp(a.s, b.s, a.n) == 0; }

/* Splits at blanks; each word before one of `ends` must be unique. */
static rfr_status split(const char *field, const char *text, const char *ends, int most, word *words, int *n) {
  *n = 0;
  for (const char *s = text ? text : "";;) {
    s += strspn(s, " ");
    if (!*s) return RFR_OK;
    word w = {s, strcspn(s, " ")};
    size_t name = strcspn(s, ends) < w.n ? strcspn(s, ends) : w.n;
    if (*n == most) return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.%s: more than %d", field, most);
    if (!is_word(s, name) || name > 15)
      return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.%s: \"%.*s\" is not a name of at most 15 bytes", field,
                      (int)(w.n < 80 ? w.n : 80), s);
    for (int i = 0; i < *n; i++)
      if (words_equal((word){words[i].s, strcspn(words[i].s, " ?*~!@:")}, (word){s, name}))
        return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.%s: \"%.*s\" is given twice", field, (int)name, s);
    words[(*n)++] = w;
    s += w.n;
  }
}

static rfr_status check_operands(const rfr_op_desc *d, word *in, int *n_in) {
  bool acc = false;
  RFI_TRY(split("operands", d->operands, "?*~", RFI_MAX_NAMES, in, n_in));
  for (int i = 0; i < *n_in; i++) {
    size_t name = strcspn(in[i].s, " ?*~"), end = in[i].n - (in[i].s[in[i].n - 1] == '~');
    bool rest = end == name + 1 && in[i].s[name] == '*';
    acc = acc || words_equal((word){in[i].s, name}, (word){"acc", 3});
    if (end > name + 1 || (rest && (i + 1 < *n_in || acc)))
      return rfi_fail(RFI_E_ARGUMENT,
                      "rfr_op_desc.operands: \"%.*s\": one ? or *, then ~, may end a word; * the last, without acc",
                      (int)in[i].n, in[i].s);
  }
  return RFR_OK;
}

static rfr_status check_results(const rfr_op_desc *d, const word *in, int n_in) {
  word out[RFI_MAX_NAMES];
  bool versions = false;
  unsigned used = 0;
  int n;
  RFI_TRY(split("results", d->results, "@!", RFI_MAX_NAMES, out, &n));
  if (n == 0) return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.results: an op needs at least one result");
  for (int j = 0; j < n; j++) {
    size_t name = strcspn(out[j].s, " @!");
    if (name == out[j].n || (name + 1 == out[j].n && out[j].s[name] == '!')) continue;
    word of = {out[j].s + name + 1, out[j].n - name - 1};
    int k = 0;
    while (k < n_in && !words_equal((word){in[k].s, strcspn(in[k].s, " ?~")}, of)) k++;
    if (k == n_in || used & 1u << k)
      return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.results: \"%.*s\" names no operand whose storage is free",
                      (int)out[j].n, out[j].s);
    used |= 1u << k;
    versions = true;
    if (!(d->flags & RFR_OP_STATE) && !memchr(in[k].s, '?', in[k].n))
      return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.flags: \"%.*s\" always writes its operand: RFR_OP_STATE is missing",
                      (int)out[j].n, out[j].s);
  }
  if ((d->flags & RFR_OP_STATE) && !versions)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.flags: RFR_OP_STATE without a result like w1@w");
  return RFR_OK;
}

/* Keys of the printed form that an attribute must not hide. */
static rfr_status check_attributes(const rfr_op_desc *d) {
  static const char *const keys[] = {"phase", "mb", "token", "clone_of", "policy", "scope", "effects"};
  word attr[RFI_MAX_ATTR];
  int n;
  RFI_TRY(split("attributes", d->attributes, ":", RFI_MAX_ATTR, attr, &n));
  for (int i = 0; i < n; i++) {
    size_t name = strcspn(attr[i].s, " :");
    bool good = attr[i].n == name + 2 && strchr("bifts", attr[i].s[name + 1]);
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
      good = good && !words_equal((word){attr[i].s, name}, (word){keys[k], strlen(keys[k])});
    if (!good)
      return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.attributes: \"%.*s\" is not name:type, or is a key of the format",
                      (int)attr[i].n, attr[i].s);
  }
  return RFR_OK;
}

static rfr_status check(const rfr_ctx *ctx, const rfr_op_desc *d) {
  const unsigned known = RFR_OP_VIEW | RFR_OP_ROWS | RFR_OP_ANY | RFR_OP_STATE | RFR_OP_HOST | RFR_OP_RNG |
                         RFR_OP_FORM | RFR_OP_STOP | RFR_OP_LOCAL;
  const unsigned effects = RFR_OP_STATE | RFR_OP_HOST | RFR_OP_RNG;
  word in[RFI_MAX_NAMES];
  int n_in;
  if (d->size != sizeof *d)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.size is %zu; start from rfr_op_desc_default()", d->size);
  RFI_TRY(check_name(ctx, d->name));
  if (d->flags & ~known || (d->flags & RFR_OP_ROWS && d->flags & RFR_OP_ANY))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.flags: 0x%x has unknown bits, or both RFR_OP_ROWS and RFR_OP_ANY",
                    d->flags);
  if (!d->shape) return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.shape: every op has a shape rule");
  if (d->gradient && d->flags & (RFR_OP_STATE | RFR_OP_HOST))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.gradient: an op with effects has none");
  if (d->gradient && d->flags & RFR_OP_STOP)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.gradient: an op with RFR_OP_STOP has none");
  if (!d->view == ((d->flags & RFR_OP_VIEW) != 0))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.view: an op with RFR_OP_VIEW has one, any other has none");
  if (d->flags & RFR_OP_VIEW && (d->flags & effects || d->cpu || d->cuda))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.flags: a view has neither effects nor kernels");
  RFI_TRY(check_operands(d, in, &n_in));
  RFI_TRY(check_results(d, in, n_in));
  if (d->share.of && (d->share.operand < 0 || d->share.operand >= n_in))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_op_desc.share: the op has no operand %d", d->share.operand);
  return check_attributes(d);
}

rfr_op_desc rfr_op_desc_default(void) {
  return (rfr_op_desc){.size = sizeof(rfr_op_desc), .operands = "", .results = "y", .attributes = ""};
}

const rfr_op *rfr_op_find(const rfr_ctx *ctx, const char *name) {
  return name ? rfi_op_def_find(ctx, name, strlen(name)) : NULL;
}

rfr_status rfr_op_register(rfr_ctx *ctx, const rfr_op_desc *desc, const rfr_op **out) {
  registered *r;
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_op *"));
  RFI_TRY(rfi_check_handle(desc, "rfr_op_desc"));
  RFI_TRY(check(ctx, desc));
  RFI_TRY(RFI_ALLOC(ctx, sizeof *r, &r));
  memcpy(r->name, desc->name, strlen(desc->name));
  r->outside = (struct rfi_outside){.ctx = ctx,
                                    .shape = desc->shape,
                                    .gradient = desc->gradient,
                                    .cpu = {desc->cpu, desc->cpu_workspace},
                                    .cuda = {desc->cuda, desc->cuda_workspace},
                                    .view = desc->view,
                                    .flops = desc->flops,
                                    .bytes = desc->bytes,
                                    .share = desc->share,
                                    .user = desc->user};
  r->def.code = RFI_OP_COUNT;
  r->def.name = r->name;
  r->def.family = "outside";
  r->def.flags = desc->flags | (desc->gradient ? RFI_GRAD : 0);
  r->def.infer = infer;
  r->def.grad = desc->gradient ? grad : NULL;
  r->def.view = desc->view ? view : NULL;
  r->def.flops = desc->flops ? flops : NULL;
  r->def.bytes = desc->bytes ? bytes : NULL;
  r->def.share = desc->share.of ? &r->outside.share : NULL;
  r->def.outside = &r->outside;
  rfi_op_def_parse(desc->operands ? desc->operands : "", desc->results ? desc->results : "",
                   desc->attributes ? desc->attributes : "", &r->def);
  rfi_ctx_own(ctx, &r->link);
  *out = &r->def;
  return RFR_OK;
}
