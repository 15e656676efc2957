/* SPDX-License-Identifier: Apache-2.0
 *
 * Agreement of the ranks of a run. First they agree that none has failed, so that no rank waits or continues alone.
 * Then each sends a record of at most RFI_EXCHANGE_BYTES with everything that must be equal: build, device,
 * configuration, data and checkpoint. All ranks compare all records, so they all reach the same result.
 */
#include "train/handshake.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "dist/agree.h"
#include "dist/comm.h"

enum { FIELDS = 7, FIELD_BYTES = 100 };
typedef struct record {
  char field[FIELDS][FIELD_BYTES];
  uint32_t key[RFI_CFG_COUNT]; /* a hash of each configuration value */
} record;
_Static_assert(sizeof(record) <= RFI_EXCHANGE_BYTES, "one exchange");

static const char *const field_names[FIELDS] = {"version",      "build", "device",    "instruction set",
                                                "GEMM library", "data",  "checkpoint"};

/* ---- what must be equal ---- */

static uint32_t hash_text(uint32_t h, const char *text) {
  for (; *text; text++) h = (h ^ (unsigned char)*text) * 16777619u;
  return h;
}

/* A hash of ops and keys: builds of the same version that differ in these would record different programs. */
static uint32_t hash_build(void) {
  static const char *const names[] = {
#define RFI_OP(name, family, operands, results, attributes, flags) #name operands results attributes,
#include "ops/ops.def"
#undef RFI_OP
  };
  uint32_t h = 2166136261u;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) h = hash_text(h, names[i]);
  for (int i = 0; i < RFI_CFG_COUNT; i++) h = hash_text(h, rfi_config_path((rfi_config_id)i));
  return h;
}

static rfr_status note_configuration(const rfr_run *run, record *r) {
  rfr_status s = RFR_OK;
  for (int i = 0; s == RFR_OK && i < RFI_CFG_COUNT; i++) {
    rfi_string text = {.ctx = run->ctx};
    if (!rfi_config_is_used(run->settings->config, (rfi_config_id)i)) continue;
    if (i == RFI_CFG_data_root || i == RFI_CFG_data_cache) continue; /* paths differ between hosts */
    s = rfi_config_print_value(run->settings->config, (rfi_config_id)i, &text);
    if (s == RFR_OK) r->key[i] = hash_text(2166136261u, text.data) | 1;
    rfi_string_deinit(&text);
  }
  return s;
}

static rfr_status note(const rfr_run *run, int64_t checkpoint, record *r) {
  snprintf(r->field[0], FIELD_BYTES, "%s", rfr_version());
  snprintf(r->field[1], FIELD_BYTES, "%08x", hash_build());
  snprintf(r->field[2], FIELD_BYTES, "%s", rfi_ctx_backend(run->ctx));
  snprintf(r->field[3], FIELD_BYTES, "%s", rfi_ctx_isa(run->ctx));
  snprintf(r->field[4], FIELD_BYTES, "%s", run->machine.matmul);
  snprintf(r->field[5], FIELD_BYTES, "%s", run->hash);
  if (checkpoint < 0) snprintf(r->field[6], FIELD_BYTES, "none");
  else snprintf(r->field[6], FIELD_BYTES, "step %lld", (long long)checkpoint);
  return note_configuration(run, r);
}

static rfr_status compare(const record *a, const record *b, int rank) {
  for (int i = 0; i < FIELDS; i++)
    if (strcmp(a->field[i], b->field[i]) != 0)
      return rfi_fail(RFI_E_DIST_RUN, "%s of rank 0 is %s, of rank %d %s", field_names[i], a->field[i], rank,
                      b->field[i]);
  for (int i = 0; i < RFI_CFG_COUNT; i++)
    if (a->key[i] != b->key[i])
      return rfi_fail(RFI_E_DIST_RUN, "rank %d has another %s than rank 0", rank, rfi_config_path((rfi_config_id)i));
  return RFR_OK;
}

rfr_status rfi_handshake(rfr_run *run, int64_t checkpoint, rfr_status so_far) {
  rfr_comm *c = run->options.comm;
  record *mine = NULL;
  void *all = NULL;
  if (rfr_comm_size(c) <= 1) return so_far;
  if (run->options.plan_only) return so_far;
  run->met = true;
  rfr_status s = so_far == RFR_OK ? RFI_ALLOC(run->ctx, sizeof *mine, &mine) : so_far;
  if (s == RFR_OK) s = note(run, checkpoint, mine);
  s = rfi_comm_agree(run->ctx, c, s);
  if (s == RFR_OK) s = rfi_comm_collect(run->ctx, c, mine, sizeof *mine, &all);
  for (int r = 1; s == RFR_OK && r < rfr_comm_size(c); r++) s = compare((record *)all, (record *)all + r, r);
  run->refused = s != RFR_OK;
  rfi_free(run->ctx, mine);
  rfi_free(run->ctx, all);
  return s;
}
