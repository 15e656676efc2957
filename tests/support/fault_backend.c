/* SPDX-License-Identifier: Apache-2.0 */
#include "support/fault_backend.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"

enum { MOST_BLOCKS = 64 };

rft_fault rft_faults;
static struct {
  void *memory;
  int64_t bytes;
} block[MOST_BLOCKS];

static const rfi_backend *cpu(void) { return &rfi_backend_cpu; }

const char *rft_entry_name(rft_entry entry) {
  static const char *const names[] = {
#define RFT_ENTRY_NAME(name) #name,
      RFT_ENTRIES(RFT_ENTRY_NAME)
#undef RFT_ENTRY_NAME
  };
  return names[entry];
}

/* Counts a call, and fails it if it is the k-th. */
static rfr_status enter(rft_entry entry) {
  rft_fault *f = &rft_faults;
  f->calls[entry]++;
  if (f->dead) return rfi_fail(RFI_E_BACKEND_DEAD, "%s: an earlier error", rft_entry_name(entry));
  if (f->k == 0 || f->entry != entry || f->calls[entry] != f->k) return RFR_OK;
  f->failed = true;
  f->dead = f->sticky;
  return rfi_fail(f->sticky ? RFI_E_BACKEND_DEAD : RFI_E_CUDA, "%s: injected", rft_entry_name(entry));
}

static rfr_status fault_open(rfr_ctx *ctx, rfi_device **out) {
  *out = NULL;
  RFI_TRY(enter(RFT_ENTRY_open));
  RFI_TRY(cpu()->open(ctx, out));
  rft_faults.devices++;
  return RFR_OK;
}

static void fault_close(rfi_device *d) {
  if (d) rft_faults.devices--;
  cpu()->close(d);
}

static rfr_status fault_alloc(rfi_device *d, rfi_memory kind, size_t bytes, void **out) {
  rft_fault *f = &rft_faults;
  int i = 0;
  *out = NULL;
  RFI_TRY(enter(RFT_ENTRY_alloc));
  if (kind == RFI_MEMORY_ARENA && f->cap > 0 && f->arena_bytes + (int64_t)bytes > f->cap)
    return rfi_fail(RFI_E_NO_MEMORY, "the plan needs %zu bytes of a device of %lld", bytes, (long long)f->cap);
  while (i < MOST_BLOCKS && block[i].memory) i++;
  if (i == MOST_BLOCKS) return rfi_fail(RFI_E_NO_MEMORY, "the test counts %d blocks at most", MOST_BLOCKS);
  RFI_TRY(cpu()->alloc(d, kind, bytes, out));
  block[i].memory = *out;
  block[i].bytes = kind == RFI_MEMORY_ARENA ? (int64_t)bytes : 0;
  f->blocks++;
  f->arena_bytes += block[i].bytes;
  if (f->arena_bytes > f->most_arena_bytes) f->most_arena_bytes = f->arena_bytes;
  return RFR_OK;
}

static void fault_free(rfi_device *d, rfi_memory kind, void *memory) {
  for (int i = 0; memory && i < MOST_BLOCKS; i++) {
    if (block[i].memory != memory) continue;
    block[i].memory = NULL;
    rft_faults.blocks--;
    rft_faults.arena_bytes -= block[i].bytes;
  }
  cpu()->free(d, kind, memory);
}

static rfr_status fault_fill(rfi_device *d, void *to, unsigned char byte, size_t n) {
  RFI_TRY(enter(RFT_ENTRY_fill));
  return cpu()->fill(d, to, byte, n);
}

static rfr_status fault_copy(rfi_device *d, void *to, const void *from, size_t n) {
  RFI_TRY(enter(RFT_ENTRY_copy));
  return cpu()->copy(d, to, from, n);
}

static rfr_status fault_move(rfi_device *d, void *to, const void *from, size_t n) {
  RFI_TRY(enter(RFT_ENTRY_move));
  return cpu()->move(d, to, from, n);
}

static bool fault_reaches(const rfi_device *d, const void *memory) {
  (void)d;
  return memory != rft_faults.away;
}

static rfr_status fault_inspect(rfi_device *d, rfi_range *ranges, int n) {
  RFI_TRY(enter(RFT_ENTRY_inspect));
  return cpu()->inspect(d, ranges, n);
}

static rfr_status fault_memory_use(rfi_device *d, rfr_memory_use *out) {
  (void)d;
  RFI_TRY(enter(RFT_ENTRY_memory_use));
  *out = (rfr_memory_use){.arena = rft_faults.arena_bytes, .taken = rft_faults.arena_bytes};
  return RFR_OK;
}

static rfr_status fault_select(rfi_device *d, const rfi_opr *op, rfi_arena *memory, rfi_bound *b) {
  RFI_TRY(enter(RFT_ENTRY_select));
  return cpu()->select(d, op, memory, b);
}

static const char *fault_choice(rfi_device *d, int i) {
  static const char *const names[] = {"library", "a product", "another product"};
  (void)d;
  return i < (rft_faults.version == 0 ? 2 : 3) ? names[i] : NULL;
}

static rfr_status fault_choose(rfi_device *d, int i, const char *stored, char value[RFI_CHOICE]) {
  (void)d;
  value[0] = '\0';
  RFI_TRY(enter(RFT_ENTRY_choose));
  if (i == 0) {
    snprintf(value, RFI_CHOICE, "version %d", rft_faults.version / 2);
    return RFR_OK;
  }
  if (!stored) rft_faults.measured++;
  if (!stored || strcmp(stored, "quick") == 0 || strcmp(stored, "slow") == 0)
    snprintf(value, RFI_CHOICE, "%s", stored ? stored : "quick");
  return RFR_OK;
}

static rfr_status fault_run(rfi_device *d, const rfi_bound *bound, int n) {
  RFI_TRY(enter(RFT_ENTRY_run));
  return cpu()->run(d, bound, n);
}

static rfr_status fault_run_timed(rfi_device *d, const rfi_bound *bound, int n, int *many, double *seconds) {
  *seconds = 0;
  RFI_TRY(enter(RFT_ENTRY_run_timed));
  return cpu()->run_timed(d, bound, n, many, seconds);
}

static rfr_status fault_capture(rfi_device *d, const rfi_copy *copies, int n_copies, const rfi_bound *bound, int n,
                                rfi_graph **out) {
  *out = NULL;
  RFI_TRY(enter(RFT_ENTRY_capture));
  RFI_TRY(cpu()->capture(d, copies, n_copies, bound, n, out));
  rft_faults.graphs++;
  return RFR_OK;
}

static int fault_failed(const rfi_device *d) { return cpu()->failed(d); }

static rfr_status fault_launch(rfi_device *d, rfi_graph *graph, const void *const *from) {
  RFI_TRY(enter(RFT_ENTRY_launch));
  rft_faults.from = from;
  return cpu()->launch(d, graph, from);
}

static void fault_graph_destroy(rfi_device *d, rfi_graph *graph) {
  if (graph) rft_faults.graphs--;
  cpu()->graph_destroy(d, graph);
}

static rfr_status fault_wait(rfi_device *d) {
  RFI_TRY(enter(RFT_ENTRY_wait));
  return cpu()->wait(d);
}

static rfr_status fault_set_stream(rfi_device *d, void *stream) { return cpu()->set_stream(d, stream); }

static rfr_status fault_poll(rfi_device *d, bool *idle) {
  *idle = false;
  RFI_TRY(enter(RFT_ENTRY_poll));
  return cpu()->poll(d, idle);
}

const rfi_backend rft_fault_backend = {
    .name = "the failing device",
    .host = false,
    .branches = true,
    .guard = 256,
    .loss_chunk = 1024,
    .open = fault_open,
    .close = fault_close,
    .alloc = fault_alloc,
    .free = fault_free,
    .fill = fault_fill,
    .copy = fault_copy,
    .move = fault_move,
    .reaches = fault_reaches,
    .inspect = fault_inspect,
    .memory_use = fault_memory_use,
    .select = fault_select,
    .choice = fault_choice,
    .choose = fault_choose,
    .run = fault_run,
    .run_timed = fault_run_timed,
    .capture = fault_capture,
    .launch = fault_launch,
    .failed = fault_failed,
    .graph_destroy = fault_graph_destroy,
    .wait = fault_wait,
    .set_stream = fault_set_stream,
    .poll = fault_poll,
};
