/* SPDX-License-Identifier: Apache-2.0
 *
 * The op table of ops.def, parsed once per process into constant definitions. The rules of an
 * op are found by name (rfi_infer_NAME, rfi_grad_NAME, ...): an op needs a row and its files,
 * and no other list. Registered ops belong to a context and are found through it.
 */
#include <pthread.h>
#include <string.h>

#include "base/base.h"
#include "trace/trace.h"

typedef rfr_status rfi_infer_fn(const rfi_infer *c);
typedef rfr_status rfi_grad_fn(rfi_grad *g);
typedef bool rfi_view_fn(const rfi_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset);
typedef void rfi_gemm_fn(const rfi_infer *c, rfi_gemm_desc *d);
typedef double rfi_cost_fn(const rfi_infer *c);

#define RFI_OP(name, family, operands, results, attributes, flags) \
  extern rfi_infer_fn rfi_infer_##name __attribute__((weak));      \
  extern rfi_grad_fn rfi_grad_##name __attribute__((weak));        \
  extern rfi_view_fn rfi_view_##name __attribute__((weak));        \
  extern rfi_gemm_fn rfi_gemm_##name __attribute__((weak));        \
  extern rfi_cost_fn rfi_flops_##name __attribute__((weak));       \
  extern rfi_cost_fn rfi_bytes_##name __attribute__((weak));       \
  extern const rfi_share rfi_share_##name __attribute__((weak));
#include "ops/ops.def"
#undef RFI_OP

enum {
  GRAD = RFI_GRAD,
  VIEW = RFI_VIEW,
  ROWS = RFI_ROWS,
  ANY = RFI_ANY,
  STATE = RFI_STATE,
  HOST = RFI_HOST,
  COLLECTIVE = RFI_COLLECTIVE,
  RNG = RFI_RNG,
  FORM = RFI_FORM,
  STOP = RFI_STOP,
  LOCAL = RFI_LOCAL
};

static const struct row {
  const char *name, *family, *operands, *results, *attributes;
  unsigned flags;
  rfi_infer_fn *infer;
  rfi_grad_fn *grad;
  rfi_view_fn *view;
  rfi_gemm_fn *gemm;
  rfi_cost_fn *flops, *bytes;
  const rfi_share *share;
} rows[RFI_OP_COUNT] = {
#define RFI_OP(name, family, operands, results, attributes, flags) \
  {#name,                                                          \
   #family,                                                        \
   operands,                                                       \
   results,                                                        \
   attributes,                                                     \
   flags,                                                          \
   rfi_infer_##name,                                               \
   rfi_grad_##name,                                                \
   rfi_view_##name,                                                \
   rfi_gemm_##name,                                                \
   rfi_flops_##name,                                               \
   rfi_bytes_##name,                                               \
   &rfi_share_##name},
#include "ops/ops.def"
#undef RFI_OP
};

static rfi_op_def defs[RFI_OP_COUNT];
static pthread_once_t parsed = PTHREAD_ONCE_INIT;

/* Copies the next word of *s into word; false at the end. */
static bool next_word(const char **s, char *word, size_t size) {
  while (**s == ' ') (*s)++;
  size_t n = strcspn(*s, " ");
  if (n == 0) return false;
  if (n >= size) n = size - 1;
  memcpy(word, *s, n);
  word[n] = 0;
  *s += strcspn(*s, " ");
  return true;
}

static void keep_name(char name[16], const char *word) {
  memcpy(name, word, strnlen(word, 15)); /* the table starts as zeros */
}

static int operand_index(const rfi_op_def *d, const char *name) {
  for (int i = 0; i < d->n_operands; i++)
    if (strcmp(d->operand[i], name) == 0) return i;
  return -1;
}

int rfi_attr_find(const rfi_op_def *d, const char *name) {
  for (int i = 0; i < d->n_attrs; i++)
    if (strcmp(d->attr[i], name) == 0) return i;
  return -1;
}

void rfi_op_def_parse(const char *operands, const char *results, const char *attributes, rfi_op_def *d) {
  char word[40];
  const char *s = operands;
  while (next_word(&s, word, sizeof word)) {
    const size_t n = strcspn(word, "?*~");
    const int k = d->n_operands++;
    d->optional[k] = strchr(word + n, '?');
    d->given[k] = strchr(word + n, '~');
    d->variadic = d->variadic || strchr(word + n, '*');
    if (!strpbrk(word + n, "?*")) d->n_required = k + 1;
    word[n] = 0;
    keep_name(d->operand[k], word);
  }
  for (s = results; next_word(&s, word, sizeof word); d->n_results++) {
    char *at = strchr(word, '@'), *infinite = strchr(word, '!'), *only = strchr(word, '?');
    if (at) *at = 0;
    if (only) *only = 0;
    if (infinite) *infinite = 0;
    d->infinite[d->n_results] = infinite;
    d->only_onto[d->n_results] = only;
    d->alias[d->n_results] = at ? operand_index(d, at + 1) : -1;
    keep_name(d->result[d->n_results], word);
  }
  for (s = attributes; next_word(&s, word, sizeof word); d->n_attrs++) {
    char *colon = strchr(word, ':');
    *colon = 0;
    keep_name(d->attr[d->n_attrs], word);
    d->attr_type[d->n_attrs] = colon[1];
  }
}

static void parse_table(void) {
  for (int i = 0; i < RFI_OP_COUNT; i++) {
    defs[i].code = (rfi_opcode)i;
    defs[i].name = rows[i].name;
    defs[i].family = rows[i].family;
    defs[i].flags = rows[i].flags;
    defs[i].infer = rows[i].infer;
    defs[i].grad = rows[i].flags & RFI_GRAD ? rows[i].grad : NULL;
    defs[i].view = rows[i].view;
    defs[i].gemm = rows[i].gemm;
    defs[i].flops = rows[i].flops;
    defs[i].bytes = rows[i].bytes;
    defs[i].share = rows[i].share;
    rfi_op_def_parse(rows[i].operands, rows[i].results, rows[i].attributes, &defs[i]);
  }
}

const rfi_op_def *rfi_op_def_get(rfi_opcode code) {
  pthread_once(&parsed, parse_table);
  return &defs[code];
}

const rfi_op_def *rfi_op_def_find(const rfr_ctx *ctx, const char *name, size_t n) {
  pthread_once(&parsed, parse_table);
  for (int i = 0; i < RFI_OP_COUNT; i++)
    if (strlen(defs[i].name) == n && memcmp(defs[i].name, name, n) == 0) return &defs[i];
  for (const rfi_owned *o = ctx ? rfi_ctx_owned(ctx) : NULL; o; o = o->next) {
    const rfi_op_def *d = (const rfi_op_def *)(o + 1);
    if (strlen(d->name) == n && memcmp(d->name, name, n) == 0) return d;
  }
  return NULL;
}
