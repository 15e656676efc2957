/* SPDX-License-Identifier: Apache-2.0
 *
 * Shard: distributes optimizer and parameters of a data-parallel step over its ranks. The step was recorded with an
 * all_reduce for each gradient, so every rank would keep all parameters and states. This pass replaces the all_reduce.
 * All modes are bitwise equal, except that `full` sums in another order if there are several microbatches:
 *
 *   all modes   gradient -> reduce_scatter, as soon as the gradients of a bucket are complete; the norm is computed
 *               from the squares of all shards, which every rank gathers
 *   none        shard -> all_gather -> the full gradient; every rank updates everything
 *   optimizer   a rank updates its shard of w, of the moments and of the master weight; their inputs have the size of a
 *               shard. Each w is gathered once per step, before its first use
 *   full        each w is gathered for each of its uses, by layer, and its memory is free in between; the gradients of
 *               each microbatch are reduced separately and added to this rank's shard
 *
 * A shard is flat: ceil(n / ranks) elements, rounded up to SHARD_UNIT, so that 8-bit moments have the blocks of the
 * full tensor and every shard is aligned. The last shards are zero-padded.
 *
 * Expert parallelism: the weights of a rank's experts are not sharded. grad_squares, whose results the ranks gather,
 * reads the shards of the other gradients.
 *
 * A bucket is the parameters of one layer (the first component of the scope of their first reader; a small bucket joins
 * the next one). Its collectives are adjacent, so that a backend can launch them together. Only the large gradients of
 * the last bucket are reduced one by one, because few ops remain to overlap with their reduction. A region is a run of
 * ops in which only one bucket is read. The gather of a bucket is placed one region ahead.
 */
#include <stdlib.h>
#include <string.h>

#include "pass/pass.h"

enum {
  SHARD_UNIT = 256,
  SMALL = 8,      /* a bucket is small if the next bucket has more than SMALL times its elements */
  LARGE = 1 << 20 /* elements from which a gradient of the last group is reduced by itself */
};

typedef struct parameter {
  bool own;           /* a weight of this rank's experts */
  int bucket;         /* -1: no op reads it */
  int region;         /* the last region for which it was gathered; -1: none */
  rfr_value shard;    /* input of the new trace: this rank's shard */
  rfr_value gathered; /* the gathered value, with the shape of w */
} parameter;

typedef struct bucket {
  const char *name;
  int length; /* length of the name */
  int64_t elements;
  int last; /* the last region that reads it, so far */
} bucket;

typedef struct gradient { /* the gradient of a parameter; in mode full, the contribution of one microbatch */
  rfr_value value;        /* in the old trace */
  int sum, bucket, microbatch;
  int alone;       /* 0: it is reduced with its group; else 1 + the op that computes it */
  int after;       /* the op after which all gradients of its group are complete; -1: they are inputs */
  rfr_value shard; /* in the new trace: this rank's shard, reduced */
} gradient;

typedef struct region {
  int bucket, first, last; /* a range of ops of the old trace */
} region;

typedef struct sharding {
  const rfi_pass_options *o;
  rfi_report *report;
  rfi_rewrite r;
  int *of;            /* per value: the sharded parameter that it is or is a view of; -1: none */
  int *own;           /* per value: the parameter whose gradient, moment or master weight it is; -1: none */
  rfr_value *reduced; /* per value: this rank's shard of a gradient in the new trace, the sum so far */
  rfr_value *again;   /* per value: a view of a gathered parameter, in the new trace */
  int *again_in;      /* the region in which that view was recorded */
  bool *sum;          /* per op: it is the all_reduce of a gradient */
  /* per op: a bit mask of the operands that are gradients of earlier microbatches; these are added later */
  unsigned *cut;
  parameter *parameter;
  bucket *bucket;
  region *region;
  int n_buckets, n_regions, next; /* next: the first region whose gather is not recorded yet */
  gradient *gradient;             /* in the order of the reductions */
  int n_gradients, n_reduced, n_added;
  int gathers, scatters;
} sharding;

static const rfr_source nowhere;

static int64_t shard_elements(const sharding *s, const rfr_type *type) {
  const int64_t least = (rfi_count(type) + s->o->ranks - 1) / s->o->ranks;
  return (least + SHARD_UNIT - 1) / SHARD_UNIT * SHARD_UNIT;
}

static bool is_update(const rfi_opr *op) { return op->def->code == RFI_OP_adamw || op->def->code == RFI_OP_sgd; }
/* Whether operand 0 is a parameter, or its average, of which the op reads and writes this rank's shard. */
static bool writes_shard(const rfi_opr *op) { return is_update(op) || op->def->code == RFI_OP_ema; }

/* Marks the weights of this rank's experts: under expert parallelism, the weights of grouped GEMMs. They are not
 * sharded, and their gradients already contain the rows of all ranks. */
static void find_experts(sharding *s) {
  const rfr_trace *t = s->r.from;
  bool spread = false;
  for (int i = 0; i < t->n_ops; i++) spread = spread || t->ops[i].def->code == RFI_OP_all_to_all_rows;
  for (int i = 0; i < t->n_ops && spread; i++)
    for (int k = 0; k < t->ops[i].n_in; k++) {
      const rfr_value v = t->ops[i].in[k];
      if (v < 0 || t->ops[i].def->outside || strcmp(t->ops[i].def->family, "grouped") != 0) continue;
      for (int p = 0; p < t->n_inputs; p++)
        s->parameter[p].own = s->parameter[p].own || t->inputs[p] == t->values[v].base;
    }
}

static bool is_sharded(const sharding *s, int input) {
  const rfi_value *x = &s->r.from->values[s->r.from->inputs[input]];
  if (s->o->shard == RFR_SHARD_NONE || s->parameter[input].own) return false;
  return x->role == RFR_ROLE_TRAINABLE || (x->role == RFR_ROLE_FROZEN && s->o->shard == RFR_SHARD_FULL);
}

/* The parameter that an op reads gathered as operand k; -1: none. An update reads and writes only the shard. */
static int reads(const sharding *s, const rfi_opr *op, int k) {
  return op->in[k] < 0 || (op->def->flags & RFI_VIEW) || (writes_shard(op) && k == 0) ? -1 : s->of[op->in[k]];
}

/* ---- gradients ---- */

/* The input that an op updates, sharded or not; -1: it updates none. */
static int updated(const sharding *s, const rfi_opr *op) {
  const rfr_trace *t = s->r.from;
  for (int p = 0; is_update(op) && p < t->n_inputs; p++)
    if (t->inputs[p] == op->in[0]) return p;
  return -1;
}

/* Marks each all_reduce that only updates and the norm read; *all: every gradient is such an all_reduce, except those
 * of experts. */
static rfr_status find_sums(sharding *s, bool *all) {
  const rfr_trace *t = s->r.from;
  rfi_uses *uses;
  RFI_TRY(rfi_count_uses(t, &uses));
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].def->code == RFI_OP_all_reduce && t->ops[i].attr[0].i == s->o->ranks)
      s->sum[i] = !uses[t->ops[i].out[0]].output && uses[t->ops[i].out[0]].count > 0;
  rfi_free(t->ctx, uses);
  for (int i = 0; i < t->n_ops; i++)
    for (int k = 0; k < t->ops[i].n_in; k++) {
      const rfi_opr *op = &t->ops[i];
      const int from = op->in[k] < 0 ? -1 : t->values[op->in[k]].op;
      const bool fits = op->def->code == RFI_OP_grad_norm      ? k > 0
                        : op->def->code == RFI_OP_grad_squares ? true
                                                               : is_update(op) && k == 1;
      if (from >= 0 && s->sum[from] && !fits) s->sum[from] = false;
    }
  *all = true;
  for (int i = 0; i < t->n_ops; i++) {
    const int p = updated(s, &t->ops[i]), from = p < 0 ? -1 : t->values[t->ops[i].in[1]].op;
    *all = *all && (p < 0 || s->parameter[p].own || (from >= 0 && t->ops[from].def->code == RFI_OP_all_reduce));
  }
  for (int i = 0; i < t->n_ops; i++)
    for (int k = 1; t->ops[i].def->code == RFI_OP_grad_norm && k < t->ops[i].n_in; k++) {
      const int from = t->values[t->ops[i].in[k]].op;
      *all = *all && from >= 0 && s->sum[from];
    }
  return RFR_OK;
}

static rfr_status refuse(const rfi_value *x, const char *why) {
  return rfi_fail(RFI_E_DIST_SHARD, "\"%s\": %s", x->name, why);
}

/* Finds the parameter to which each gradient and each optimizer state belongs. */
static rfr_status find_owners(sharding *s) {
  const rfr_trace *t = s->r.from;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (!is_update(op)) continue;
    const int p = s->of[op->in[0]], states = op->def->code == RFI_OP_adamw ? 5 : 4, from = t->values[op->in[1]].op;
    if (p < 0) continue;
    const rfi_value *w = &t->values[t->inputs[p]];
    if (from < 0 || !s->sum[from]) return refuse(w, "its gradient is not an all_reduce over the ranks");
    for (int k = 2; k < states; k++) {
      if (op->in[k] < 0) continue;
      const rfi_value *x = &t->values[op->in[k]];
      if (x->op >= 0 || x->role != RFR_ROLE_STATE) return refuse(w, "a moment of it is not an input");
      s->own[op->in[k]] = p;
    }
  }
  for (int i = 0; i < t->n_ops; i++)
    for (int k = 0; k < t->ops[i].n_in; k++)
      if (t->ops[i].in[k] >= 0 && s->own[t->ops[i].in[k]] >= 0 && !is_update(&t->ops[i]))
        return refuse(&t->values[t->ops[i].in[k]], "an op other than the update reads this state");
  return RFR_OK;
}

/* ---- buckets and regions ---- */

static int bucket_of(sharding *s, const char *scope) {
  const int n = (int)strcspn(scope, ".");
  int b = 0;
  while (b < s->n_buckets && (s->bucket[b].length != n || memcmp(s->bucket[b].name, scope, (size_t)n) != 0)) b++;
  if (b == s->n_buckets) s->bucket[s->n_buckets++] = (bucket){scope, n, 0, -1};
  return b;
}

static void find_buckets(sharding *s) {
  const rfr_trace *t = s->r.from;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    for (int k = 0; k < op->n_in; k++) {
      const rfr_value v = op->in[k];
      if (v < 0 || writes_shard(op) || t->values[t->values[v].base].op >= 0) continue;
      for (int p = 0; p < t->n_inputs; p++) {
        const rfi_value *w = &t->values[t->inputs[p]];
        if (t->inputs[p] != t->values[v].base || s->parameter[p].bucket >= 0) continue;
        if (w->role != RFR_ROLE_TRAINABLE && w->role != RFR_ROLE_FROZEN) continue;
        s->parameter[p].bucket = bucket_of(s, op->scope);
        s->bucket[s->parameter[p].bucket].elements += rfi_count(&w->type);
      }
    }
  }
  for (int b = 0; b < s->n_buckets && s->n_buckets > 1; b++) {
    const int into = b + 1 < s->n_buckets ? b + 1 : b - 1;
    if (s->bucket[b].elements * SMALL >= s->bucket[into].elements || s->bucket[b].elements == 0) continue;
    s->bucket[into].elements += s->bucket[b].elements;
    s->bucket[b].elements = 0;
    for (int p = 0; p < t->n_inputs; p++)
      if (s->parameter[p].bucket == b) s->parameter[p].bucket = into;
  }
}

static void find_regions(sharding *s) {
  const rfr_trace *t = s->r.from;
  int now = -1;
  for (int i = 0; i < t->n_ops; i++)
    for (int k = 0; k < t->ops[i].n_in; k++) {
      const int p = reads(s, &t->ops[i], k);
      if (p < 0) continue;
      const int b = s->parameter[p].bucket;
      const bool known = s->o->shard == RFR_SHARD_FULL ? b == now : s->bucket[b].last >= 0;
      if (!known) {
        s->bucket[b].last = s->n_regions;
        s->region[s->n_regions++] = (region){b, i, i};
      }
      s->region[s->bucket[b].last].last = i;
      now = b;
    }
}

/* The operand to which op i adds something, with the sum v; -1: none. */
static int acc_operand_of(const rfr_trace *t, int i, rfr_value v) {
  const rfi_opr *op = &t->ops[i];
  if (op->def->code == RFI_OP_add) {
    const int first = t->values[op->in[0]].op;
    return first >= 0 && t->ops[first].microbatch != op->microbatch ? 0 : 1;
  }
  for (int j = 0; j < op->n_out; j++)
    if (op->out[j] == v && op->def->alias[j] >= 0 && op->def->alias[j] < op->n_in) return op->def->alias[j];
  return -1;
}

static bool is_alike(const rfr_type *a, const rfr_type *b) {
  return a->dtype == b->dtype && rfi_count(a) == rfi_count(b);
}

/* The gradient of the earlier microbatches to which the gradient of a microbatch is added; RFR_NONE: there is none, or
 * another op reads it. Marks that operand of the adding op in cut[]. */
static rfr_value earlier(sharding *s, const rfi_uses *uses, rfr_value v) {
  const rfr_trace *t = s->r.from;
  for (;;) {
    const int i = t->values[v].op, k = i < 0 ? -1 : acc_operand_of(t, i, v);
    const rfr_value y = k < 0 ? RFR_NONE : t->ops[i].in[k];
    const int made = y < 0 ? -1 : t->values[y].op;
    if (made < 0 || uses[y].count != 1 || !is_alike(&t->values[y].type, &t->values[v].type)) return RFR_NONE;
    if (t->ops[made].microbatch != t->ops[i].microbatch) {
      s->cut[i] |= 1u << k;
      return y;
    }
    v = y;
  }
}

static void add_gradients(sharding *s, const rfi_uses *uses, int sum, int bucket) {
  const rfr_trace *t = s->r.from;
  for (rfr_value v = t->ops[sum].in[0]; v >= 0; v = s->o->shard == RFR_SHARD_FULL ? earlier(s, uses, v) : RFR_NONE) {
    const int made = t->values[v].op, microbatch = made < 0 ? -1 : t->ops[made].microbatch;
    s->gradient[s->n_gradients++] = (gradient){v, sum, bucket, microbatch, 0, made, RFR_NONE};
  }
}

static int compare(int x, int y) { return (x > y) - (x < y); }

static int by_group(const gradient *x, const gradient *y) {
  return x->bucket != y->bucket           ? compare(x->bucket, y->bucket)
         : x->microbatch != y->microbatch ? compare(x->microbatch, y->microbatch)
                                          : compare(x->alone, y->alone);
}

static int compare_groups(const void *a, const void *b) {
  const gradient *x = a, *y = b;
  const int order = by_group(x, y);
  return order ? order : compare(x->sum, y->sum);
}

static int compare_times(const void *a, const void *b) {
  const gradient *x = a, *y = b;
  return x->after != y->after ? compare(x->after, y->after) : compare_groups(a, b);
}

/* The end of the group of gradients that begins at index i. */
static int group_end(const sharding *s, int i) {
  int end = i + 1;
  while (end < s->n_gradients && by_group(&s->gradient[i], &s->gradient[end]) == 0) end++;
  return end;
}

static rfr_status find_reductions(sharding *s) {
  const rfr_trace *t = s->r.from;
  rfi_uses *uses;
  RFI_TRY(rfi_count_uses(t, &uses));
  for (int i = 0; i < t->n_ops; i++) {
    const int p = updated(s, &t->ops[i]), from = p < 0 ? -1 : t->values[t->ops[i].in[1]].op;
    if (from < 0 || !s->sum[from]) continue;
    if (s->parameter[p].bucket < 0) s->parameter[p].bucket = bucket_of(s, "");
    s->own[t->ops[from].out[0]] = p;
    add_gradients(s, uses, from, s->parameter[p].bucket);
  }
  rfi_free(t->ctx, uses);
  qsort(s->gradient, (size_t)s->n_gradients, sizeof *s->gradient, compare_groups);
  const gradient *latest = NULL;
  for (int i = 0; i < s->n_gradients; i++)
    if (!latest || s->gradient[i].after > latest->after) latest = &s->gradient[i];
  for (int i = 0, end; i < s->n_gradients; i = end) {
    int last = -1;
    end = group_end(s, i);
    for (int k = i; k < end; k++) last = s->gradient[k].after > last ? s->gradient[k].after : last;
    const bool is_latest = latest && by_group(&s->gradient[i], latest) == 0;
    for (int k = i; k < end; k++) {
      gradient *g = &s->gradient[k];
      if (is_latest && rfi_count(&t->values[g->value].type) >= LARGE) g->alone = g->after + 1;
      else g->after = last;
    }
  }
  qsort(s->gradient, (size_t)s->n_gradients, sizeof *s->gradient, compare_times);
  return RFR_OK;
}

/* ---- inputs ---- */

static rfr_status add_shard(sharding *s, int i, int p) {
  const rfr_trace *t = s->r.from;
  const rfi_value *x = &t->values[t->inputs[i]], *w = &t->values[t->inputs[p]];
  int64_t n = shard_elements(s, &w->type);
  if (x->type.dtype == RFR_U8 && i != p) n = rfr_quant_bytes(RFR_QUANT_DYNAMIC8, 1, &n);
  s->r.map[t->inputs[i]] = rfr_input_at(s->r.to, nowhere, x->name, (rfr_role)x->role, x->type.dtype, 1, &n);
  if (i == p) s->parameter[p].shard = s->r.map[t->inputs[i]];
  return rfr_trace_status(s->r.to);
}

static rfr_status add_inputs(sharding *s) {
  const rfr_trace *t = s->r.from;
  for (int i = 0; i < t->n_inputs; i++) {
    const int p = s->of[t->inputs[i]] >= 0 ? i : s->own[t->inputs[i]];
    RFI_TRY(p >= 0 ? add_shard(s, i, p) : rfi_rewrite_input(&s->r, i));
  }
  return RFR_OK;
}

/* ---- collectives ---- */

/* Removes the padding from the flat value of all ranks' shards and gives it w's shape. */
static rfr_value shaped(sharding *s, rfr_value x, const rfr_type *type) {
  rfr_trace *to = s->r.to;
  const int64_t n = rfi_count(type);
  if (shard_elements(s, type) * s->o->ranks != n) x = rfr_slice_at(to, nowhere, x, 0, 0, n);
  return rfr_reshape_at(to, nowhere, x, type->rank, type->shape);
}

static rfr_status begin(sharding *s, const bucket *b, int phase, int microbatch, const char *reason) {
  rfr_trace *to = s->r.to;
  const char *name = rfi_arena_printf(to->arena, "%.*s", b->length, b->name);
  if (!name) return RFR_NO_MEMORY;
  rfr_scope(to, name);
  rfr_set_phase(to, (rfr_phase)phase);
  rfr_microbatch(to, microbatch);
  to->reason = reason;
  return RFR_OK;
}

/* Gathers the parameters that the next region reads; `before`: the op of the old trace that follows. */
static rfr_status gather(sharding *s, int before) {
  const rfr_trace *t = s->r.from;
  const region *x = &s->region[s->next];
  const rfi_opr *first = &t->ops[x->first];
  const int number = s->next++;
  int tensors = 0;
  int64_t bytes = 0;
  RFI_TRY(begin(s, &s->bucket[x->bucket], first->phase, first->microbatch, "shard: gathered one region ahead"));
  for (int i = x->first; i <= x->last; i++)
    for (int k = 0; k < t->ops[i].n_in; k++) {
      const int p = reads(s, &t->ops[i], k);
      if (p < 0 || s->parameter[p].bucket != x->bucket || s->parameter[p].region == number) continue;
      const rfi_value *w = &t->values[t->inputs[p]];
      if (t->ops[i].phase == RFR_PHASE_LOAD) return refuse(w, "an op of phase load reads it: it must stay gathered");
      const rfr_value all = rfr_all_gather_at(s->r.to, nowhere, s->parameter[p].shard, s->o->ranks);
      s->parameter[p].gathered = shaped(s, all, &w->type);
      s->parameter[p].region = number;
      bytes += shard_elements(s, &w->type) * rfr_dtype_bits(w->type.dtype) / 8 * s->o->ranks;
      tensors++;
    }
  s->r.to->reason = "";
  s->gathers += tensors;
  return rfi_report_line(s->report, "gathered: %.*s, %d tensors of %lld bytes, before op %d for ops %d to %d",
                         s->bucket[x->bucket].length, s->bucket[x->bucket].name, tensors, (long long)bytes, before,
                         x->first, x->last);
}

/* The gradient, flat and zero-padded, as the ranks' shards. */
static rfr_status flatten(sharding *s, gradient *g) {
  rfr_trace *to = s->r.to;
  const rfr_type *type = &s->r.from->values[g->value].type;
  const int64_t n = rfi_count(type), padded = shard_elements(s, type) * s->o->ranks;
  const rfi_attr pad[3] = {rfi_i(0), rfi_i(0), rfi_i(padded)};
  rfr_value x = rfr_reshape_at(to, nowhere, s->r.map[g->value], 1, &n);
  if (padded != n) x = rfi_record(to, nowhere, RFI_OP_pad, 1, &x, pad, NULL);
  g->shard = x;
  return rfr_trace_status(to);
}

/* Sums the shards of gradients before `end`. The sums are recorded after the next reductions have begun, so that the
 * main stream does not wait for a reduction that has just begun. */
static rfr_status add_shards(sharding *s, int end) {
  for (; s->n_added < end; s->n_added++) {
    const gradient *g = &s->gradient[s->n_added];
    rfr_value *sum = &s->reduced[s->r.from->ops[g->sum].out[0]];
    if (*sum != RFR_NONE) {
      RFI_TRY(begin(s, &s->bucket[g->bucket], RFR_PHASE_OPTIM, -1, "shard: added to earlier microbatches"));
      *sum = rfi_record(s->r.to, nowhere, RFI_OP_accumulate, 2, (rfr_value[]){g->shard, *sum}, NULL, NULL);
    } else {
      *sum = g->shard;
    }
  }
  s->r.to->reason = "";
  return rfr_trace_status(s->r.to);
}

/* Gathers the sums of gradients `from` up to `end`. */
static void gather_sums(sharding *s, int from, int end) {
  const rfr_trace *t = s->r.from;
  for (int k = from; k < end; k++) {
    const rfr_value y = t->ops[s->gradient[k].sum].out[0];
    const rfr_value all = rfr_all_gather_at(s->r.to, nowhere, s->gradient[k].shard, s->o->ranks);
    rfi_replace_value(&s->r, y, shaped(s, all, &t->values[y].type));
  }
}

/* Reduces the gradients that are complete after op i. In mode none, all gathers follow all sums. */
static rfr_status reduce(sharding *s, int i) {
  while (s->n_reduced < s->n_gradients && s->gradient[s->n_reduced].after == i) {
    const int from = s->n_reduced, end = group_end(s, from);
    const bucket *b = &s->bucket[s->gradient[from].bucket];
    RFI_TRY(begin(s, b, RFR_PHASE_OPTIM, -1, "shard: gradients complete"));
    for (int k = from; k < end; k++) RFI_TRY(flatten(s, &s->gradient[k]));
    for (int k = from; k < end; k++)
      s->gradient[k].shard = rfr_reduce_scatter_at(s->r.to, nowhere, s->gradient[k].shard, s->o->ranks);
    if (s->o->shard == RFR_SHARD_NONE) gather_sums(s, from, end);
    s->n_reduced = end;
    s->scatters += end - from;
    RFI_TRY(add_shards(s, from));
    RFI_TRY(rfi_report_line(s->report, "reduced: %.*s, %d gradients, after op %d", b->length, b->name, end - from, i));
  }
  return rfr_trace_status(s->r.to);
}

/* ---- ops ---- */

/* The new value of v, a value of the old trace, for a reader; views of a parameter are recorded once per region. */
static rfr_value operand(sharding *s, rfr_value v) {
  const rfr_trace *t = s->r.from;
  const int p = v < 0 ? -1 : s->of[v];
  if (p < 0) return v < 0 ? RFR_NONE : s->r.map[v];
  if (v == t->inputs[p]) return s->parameter[p].gathered;
  if (s->again[v] >= 0 && s->again_in[v] == s->parameter[p].region) return s->again[v];
  const rfi_opr *op = &t->ops[t->values[v].op];
  const rfr_value x = operand(s, op->in[0]);
  rfr_source at = op->at;
  if (rfi_rewrite_source(&s->r, &at) != RFR_OK) at = nowhere;
  s->again_in[v] = s->parameter[p].region;
  return s->again[v] = rfi_record(s->r.to, at, op->def->code, 1, &x, op->attr, NULL);
}

/* The operands of grad_norm from *first up to *end, which contain all gradients that are reduced last. *first is n_in
 * if they are all operands, or if no operand is reduced last. */
static void find_latest(const sharding *s, const rfi_opr *op, int *first, int *end) {
  const rfr_trace *t = s->r.from;
  const int last = s->gradient[s->n_gradients - 1].after;
  *first = op->n_in, *end = 0;
  for (int i = s->n_gradients - 1; i >= 0 && s->gradient[i].after == last; i--)
    for (int k = 1; k < op->n_in; k++) {
      if (op->in[k] != t->ops[s->gradient[i].sum].out[0]) continue;
      if (k < *first) *first = k;
      if (k >= *end) *end = k + 1;
    }
  if (*end - *first == op->n_in - 1 || *end == 0) *first = *end = op->n_in;
}

/* The sums of squares of this rank's shards, in the order of grad_norm's operands. Those of the gradients that are
 * reduced last are a later op, so that the others overlap with these reductions. */
static rfr_value record_squares(sharding *s, const rfi_opr *op, rfr_source at, const rfr_value *shard) {
  enum { BEFORE, LATEST, AFTER, PIECES };
  static const int order[PIECES] = {BEFORE, AFTER, LATEST};
  int begin[PIECES + 1] = {1, 0, 0, op->n_in}, n = 0;
  rfr_value piece[PIECES], some[PIECES];
  find_latest(s, op, &begin[LATEST], &begin[AFTER]);
  for (int i = 0; i < PIECES; i++) {
    const int p = order[i], count = begin[p + 1] - begin[p];
    piece[p] =
        count == 0 ? RFR_NONE : rfi_record(s->r.to, at, RFI_OP_grad_squares, count, shard + begin[p], NULL, NULL);
  }
  for (int p = 0; p < PIECES; p++)
    if (piece[p] != RFR_NONE) some[n++] = piece[p];
  return n == 1 ? some[0] : rfr_concat_at(s->r.to, at, n, some, 0);
}

static rfr_status rewrite_norm(sharding *s, int i) {
  const rfi_opr *op = &s->r.from->ops[i];
  rfr_trace *to = s->r.to;
  rfr_value *shard, out[3];
  rfr_source at = op->at;
  RFI_TRY(rfi_rewrite_source(&s->r, &at));
  RFI_TRY(RFI_ALLOC(to->ctx, sizeof *shard * (size_t)op->n_in, &shard));
  for (int k = 1; k < op->n_in; k++) shard[k] = s->reduced[op->in[k]];
  const rfi_attr ranks = rfi_i(s->o->ranks);
  rfr_scope(to, "optimizer");
  rfr_set_phase(to, RFR_PHASE_OPTIM);
  const rfr_value own = record_squares(s, op, at, shard);
  const rfr_value zeros = op->in[0] < 0 ? RFR_NONE : s->r.map[op->in[0]];
  const rfr_value in[2] = {zeros, rfr_all_gather_at(to, at, own, s->o->ranks)};
  rfi_record(to, at, RFI_OP_norm_of_squares, 2, in, &ranks, out);
  rfi_free(to->ctx, shard);
  RFI_TRY(rfr_trace_status(to));
  for (int j = 0; j < op->n_out; j++)
    if (op->out[j] >= 0) rfi_replace_value(&s->r, op->out[j], out[j]);
  return rfr_trace_status(to);
}

/* Whether op i only adds to the gradient of earlier microbatches; then it is removed. */
static bool is_only_sum(const sharding *s, int i) {
  const int code = s->r.from->ops[i].def->code;
  return s->cut[i] && (code == RFI_OP_add || code == RFI_OP_accumulate);
}

static rfr_status rewrite_op(sharding *s, int i) {
  const rfi_opr *old = &s->r.from->ops[i];
  rfi_opr op = *old;
  bool dead[RFI_MAX_NAMES];
  if (s->sum[i] || ((op.def->flags & RFI_VIEW) && s->of[op.out[0]] >= 0)) return RFR_OK;
  if (is_only_sum(s, i)) {
    rfi_replace_value(&s->r, op.out[0], s->r.map[op.in[s->cut[i] & 1 ? 1 : 0]]);
    return RFR_OK;
  }
  if (op.def->code == RFI_OP_grad_norm || op.def->code == RFI_OP_grad_squares || is_update(&op))
    RFI_TRY(add_shards(s, s->n_reduced));
  if (op.def->code == RFI_OP_grad_norm && s->scatters > 0) return rewrite_norm(s, i);
  rfr_value *in;
  RFI_TRY(RFI_ALLOC(s->r.to->ctx, sizeof *in * (size_t)(op.n_in + 1), &in));
  RFI_TRY(begin(s, &(bucket){.name = op.scope, .length = (int)strlen(op.scope)}, op.phase, op.microbatch, ""));
  const bool sharded = writes_shard(&op) && s->of[op.in[0]] >= 0, squares = op.def->code == RFI_OP_grad_squares;
  for (int k = 0; k < op.n_in; k++) {
    const bool reduced = squares && s->reduced[op.in[k]] != RFR_NONE;
    in[k] = reduced ? s->reduced[op.in[k]] : sharded && op.in[k] >= 0 ? s->r.map[op.in[k]] : operand(s, op.in[k]);
  }
  if (sharded && is_update(&op)) in[1] = s->reduced[op.in[1]];
  for (int k = 0; k < op.n_in && s->cut[i]; k++)
    if (s->cut[i] >> k & 1) in[k] = RFR_NONE;
  for (int j = 0; j < op.n_out; j++) dead[j] = op.out[j] < 0;
  op.in = in;
  rfi_attr attr[RFI_MAX_ATTR];
  const int first = sharded ? rfi_attr_find(op.def, "first") : -1;
  if (first >= 0) { /* draws are addressed by the element of the full weight */
    memcpy(attr, op.attr, sizeof *attr * (size_t)op.def->n_attrs);
    attr[first].i += s->o->rank * shard_elements(s, &s->r.from->values[old->in[0]].type);
    op.attr = attr;
  }
  const rfr_status st = rfi_rewrite_as(&s->r, i, &op, dead);
  rfi_free(s->r.to->ctx, in);
  return st;
}

static rfr_status rewrite(sharding *s) {
  const rfr_trace *t = s->r.from;
  int reached = 0; /* number of regions that have begun */
  RFI_TRY(add_inputs(s));
  RFI_TRY(reduce(s, -1));
  for (int i = 0; i < t->n_ops; i++) {
    if (s->next == 0 && s->n_regions > 0 && t->ops[i].phase != RFR_PHASE_LOAD) RFI_TRY(gather(s, i));
    for (; reached < s->n_regions && s->region[reached].first == i; reached++) {
      while (s->next <= reached + 1 && s->next < s->n_regions) RFI_TRY(gather(s, i));
    }
    RFI_TRY(rewrite_op(s, i));
    RFI_TRY(reduce(s, i));
  }
  return rfr_trace_status(s->r.to);
}

static rfr_status analyze(sharding *s, bool *any) {
  const rfr_trace *t = s->r.from;
  bool all;
  *any = false;
  for (int v = 0; v < t->n_values; v++) s->of[v] = s->own[v] = -1, s->reduced[v] = s->again[v] = RFR_NONE;
  for (int i = 0; i < t->n_inputs; i++) s->parameter[i] = (parameter){false, -1, -1, RFR_NONE, RFR_NONE};
  find_experts(s);
  for (int i = 0; i < t->n_inputs; i++) {
    if (!is_sharded(s, i)) continue;
    s->of[t->inputs[i]] = i;
    *any = true;
  }
  for (int i = 0; i < t->n_ops; i++)
    if ((t->ops[i].def->flags & RFI_VIEW) && t->ops[i].in[0] >= 0) s->of[t->ops[i].out[0]] = s->of[t->ops[i].in[0]];
  for (int i = 0; i < t->n_outputs; i++) {
    const int p = s->of[t->outputs[i].value];
    if (p >= 0) return refuse(&t->values[t->inputs[p]], "it is an output");
  }
  RFI_TRY(find_sums(s, &all));
  RFI_TRY(find_owners(s));
  find_buckets(s);
  find_regions(s);
  if (!all && *any)
    return rfi_fail(RFI_E_DIST_SHARD, "the norm has a gradient that is not an all_reduce over the ranks");
  if (all) RFI_TRY(find_reductions(s));
  for (int i = 0; i < t->n_ops; i++) { /* without an update that reads it, an all_reduce is kept */
    s->sum[i] = all && s->sum[i] && s->own[t->ops[i].out[0]] >= 0;
    *any |= s->sum[i];
  }
  return RFR_OK;
}

static rfr_status allocate(sharding *s) {
  const rfr_trace *t = s->r.from;
  size_t operands = 1;
  for (int i = 0; i < t->n_ops; i++) operands += (size_t)t->ops[i].n_in;
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->of * (size_t)(t->n_values + 1), &s->of));
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->own * (size_t)(t->n_values + 1), &s->own));
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->reduced * (size_t)(t->n_values + 1), &s->reduced));
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->again * (size_t)(t->n_values + 1), &s->again));
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->again_in * (size_t)(t->n_values + 1), &s->again_in));
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->sum * (size_t)(t->n_ops + 1), &s->sum));
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->cut * (size_t)(t->n_ops + 1), &s->cut));
  /* one per sum, and one per op with a mark in cut[] */
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->gradient * (size_t)(2 * t->n_ops + 1), &s->gradient));
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->parameter * (size_t)(t->n_inputs + 1), &s->parameter));
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *s->bucket * (size_t)(t->n_inputs + 1), &s->bucket));
  return RFI_ALLOC(t->ctx, sizeof *s->region * operands, &s->region);
}

static void deinit(sharding *s) {
  rfr_ctx *ctx = s->r.from->ctx;
  void *const memory[] = {s->of,  s->own,       s->reduced, s->again,  s->again_in, s->sum,
                          s->cut, s->parameter, s->bucket,  s->region, s->gradient};
  for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) rfi_free(ctx, memory[i]);
}

static rfr_status shard(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  sharding s = {.o = o, .report = report, .r = {.from = in}};
  rfr_status st;
  bool any = false;
  st = allocate(&s);
  if (st == RFR_OK) st = analyze(&s, &any);
  if (st == RFR_OK && !any) st = rfi_copy_trace(in, out);
  else if (st == RFR_OK) {
    st = rfi_rewrite_open(in, &s.r);
    if (st == RFR_OK) st = rewrite(&s);
    if (st == RFR_OK)
      st = rfi_report_line(report, "shard: %d ranks, %d gathers, %d reductions", o->ranks, s.gathers, s.scatters);
    if (st == RFR_OK) st = rfi_rewrite_end(&s.r, out);
    else if (s.r.map) rfi_rewrite_abort(&s.r);
  }
  s.r.from = in;
  deinit(&s);
  return st;
}

rfr_status rfi_pass_shard(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  rfr_trace *delayed;
  *out = NULL;
  if (o->ranks <= 1) return rfi_copy_trace(in, out);
  rfr_status s = rfi_delay_wgrads(in, report, &delayed);
  if (s == RFR_OK) s = shard(delayed ? delayed : in, o, report, out);
  rfr_trace_destroy(delayed);
  return s;
}
