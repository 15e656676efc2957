/* SPDX-License-Identifier: Apache-2.0
 *
 * The collectives of a part of a unit, compared between all ranks before the part runs for the first time. Over NCCL
 * nothing else compares them: ranks that launch graphs with other collectives, or with the same ones in another order,
 * would wait for each other forever. Threads and MPI compare each call, but by then some ops of the part have already
 * run.
 *
 * Each rank sends a description of the first collectives, for the text of the error, and a hash of all of them.
 */
#include <string.h>

#include "base/base.h"
#include "exec/unit.h"
#include "trace/trace.h"

enum { ENTRIES = 62 };

typedef struct entry {
  int32_t op, dtype;
  int64_t n; /* elements of operand 0 */
} entry;

typedef struct sequence {
  int64_t n;
  uint64_t hash;
  entry entry[ENTRIES];
} sequence;
_Static_assert(sizeof(sequence) == RFI_SEQUENCE_BYTES, "room of a rank");

static void add(sequence *s, const rfi_opr *op, const rfi_call *call) {
  const entry e = {.op = op->def->code, .dtype = call->in[0].type.dtype, .n = rfi_count(&call->in[0].type)};
  const unsigned char *bytes = (const unsigned char *)&e;                                /* the struct has no padding */
  for (size_t i = 0; i < sizeof e; i++) s->hash = (s->hash ^ bytes[i]) * 1099511628211u; /* FNV-1a */
  if (s->n < ENTRIES) s->entry[s->n] = e;
  s->n++;
}

static void read_part(const rfi_exec_unit *u, rfi_part part, sequence *s) {
  *s = (sequence){.hash = 14695981039346656037u};
  for (int i = u->first[part]; i < u->first[part + 1]; i++) {
    const rfi_opr *op = &u->trace->ops[u->bound[i].op];
    if (op->def->flags & RFI_COLLECTIVE && op->attr[0].i > 1) add(s, op, &u->bound[i].call);
  }
}

static const char *describe(const sequence *s, int64_t i, char *text, size_t size) {
  const entry *e = &s->entry[i < ENTRIES ? i : 0];
  const bool known = e->op >= 0 && e->op < RFI_OP_COUNT && e->dtype >= 0 && e->dtype < RFR_DTYPE_COUNT;
  if (i >= s->n) rfi_snprintf(text, size, "none");
  else if (!known) rfi_snprintf(text, size, "another one");
  else
    rfi_snprintf(text, size, "%s of %lld %s", rfi_op_def_get((rfi_opcode)e->op)->name, (long long)e->n,
                 rfr_dtype_name((rfr_dtype)e->dtype));
  return text;
}

/* All ranks get the same error. */
static rfr_status compare(const char *name, const sequence *all, int ranks) {
  char first[96], other[96];
  int r = 1;
  int64_t i = 0;
  while (r < ranks && all[r].n == all[0].n && all[r].hash == all[0].hash) r++;
  if (r == ranks) return RFR_OK;
  while (i < ENTRIES && i < all[0].n && i < all[r].n && memcmp(&all[0].entry[i], &all[r].entry[i], sizeof(entry)) == 0)
    i++;
  if (i == ENTRIES)
    return rfi_fail(RFI_E_DIST_MISMATCH, "\"%s\": the collectives of ranks 0 and %d differ after the first %d", name, r,
                    ENTRIES);
  return rfi_fail(RFI_E_DIST_MISMATCH, "\"%s\": collective %lld is %s on rank 0 and %s on rank %d", name, (long long)i,
                  describe(&all[0], i, first, sizeof first), describe(&all[r], i, other, sizeof other), r);
}

rfr_status rfi_unit_agree(const rfi_executor *m, const rfi_exec_unit *u, rfi_part part) {
  rfi_instance *x = &u->instance[0];
  sequence mine;
  if (!m->sequences || x->agreed[part]) return RFR_OK;
  read_part(u, part, &mine);
  if (mine.n > 0) {
    RFI_TRY(rfi_comm_exchange(m->comm, &mine, sizeof mine, m->sequences));
    RFI_TRY(compare(u->name, m->sequences, m->comm->size));
    const rfi_bound *bound = u->instance[0].bound + u->first[part];
    if (m->shares && m->backend->share)
      RFI_TRY(m->backend->share(m->device, bound, u->first[part + 1] - u->first[part]));
  }
  x->agreed[part] = true;
  return RFR_OK;
}
