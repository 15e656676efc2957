/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel of an op, and its workspace: cuBLASLt's if it supports the call, otherwise one of the module's. An op that
 * consists of several GEMMs gets a library entry for each. Nothing here needs a GPU, so cuda:none selects the same.
 */
#include "backend/cuda/cuda_select.h"

#include "backend/cuda/table.h"
#include "ops/collective/collective.h"
#include "ops/loss/head.h"
#include "ops/matmul/gelu_pair.h"
#include "ops/matmul/lora_cuda.h"
#include "ops/quant/scaled_cuda.h"

/* The GEMMs inside an LM head run on cuBLASLt if it supports them. */
static rfr_status select_head(const rfi_selector *from, rfi_arena *memory, rfr_call *call) {
  const rfi_head head = rfi_head_make(call, RFI_HEAD_ALIGNED);
  rfi_head_library *entry = from->core->arena_alloc(memory, sizeof *entry * RFI_HEAD_CHUNKS * RFI_HEAD_GEMMS);
  if (!entry) return RFR_NO_MEMORY;
  call->library = entry;
  for (int kind = 0; kind < RFI_HEAD_CHUNKS; kind++) {
    rfi_head_gemm gemms[RFI_HEAD_GEMMS];
    const int64_t t = rfi_head_start(&head, kind);
    entry[kind * RFI_HEAD_GEMMS].device = from->device;
    if (t < 0) continue;
    rfi_head_gemms(call, &head, t, (void *)call->in[RFI_HEAD_X].data, gemms);
    for (int i = 0; i < RFI_HEAD_GEMMS; i++) {
      rfi_bound b = {.call = gemms[i].call};
      if (gemms[i].wanted) RFI_TRY(rfi_lt_select(from->lt, from->core->op_def(RFI_OP_matmul), &b));
      entry[kind * RFI_HEAD_GEMMS + i] = (rfi_head_library){b.run, (size_t)b.workspace, b.call.library, from->device};
    }
  }
  return RFR_OK;
}

/* lora_matmul as two GEMMs of cuBLASLt, if it supports them. */
static rfr_status select_lora(const rfi_selector *from, rfi_arena *memory, rfi_bound *b) {
  rfi_head_gemm gemms[2];
  rfi_head_library *entry = from->core->arena_alloc(memory, sizeof *entry * 2);
  if (!entry) return RFR_NO_MEMORY;
  b->kernel = "cuBLASLt";
  rfi_lora_gemms(&b->call, gemms);
  for (int i = 0; i < 2; i++) {
    rfi_bound part = {.call = gemms[i].call};
    RFI_TRY(rfi_lt_select(from->lt, from->core->op_def(RFI_OP_matmul), &part));
    if (!part.run) b->kernel = "sm80";
    if (part.workspace > b->workspace) b->workspace = part.workspace;
    entry[i] = (rfi_head_library){part.run, (size_t)part.workspace, part.call.library, from->device};
  }
  b->run = rfi_lora_run_gemms;
  b->call.library = entry;
  return RFR_OK;
}

/* matmul_gelu_bwd as one GEMM of cuBLASLt, or as two ops of which cuBLASLt may run the first. */
static rfr_status select_gelu_bwd(const rfi_selector *from, rfi_arena *memory, const rfi_op_def *def, rfi_bound *b) {
  rfi_gelu_pair p;
  RFI_TRY(rfi_lt_select(from->lt, def, b));
  if (b->run) return RFR_OK;
  rfi_head_library *entry = from->core->arena_alloc(memory, sizeof *entry);
  if (!entry) return RFR_NO_MEMORY;
  rfi_gelu_pair_of(&b->call, &p);
  rfi_bound gemm = {.call = p.gemm};
  RFI_TRY(rfi_lt_select(from->lt, from->core->op_def(RFI_OP_matmul), &gemm));
  *entry = (rfi_head_library){gemm.run, (size_t)gemm.workspace, gemm.call.library, from->device};
  b->run = rfi_cuda_kernel_of(def->code)->run;
  b->kernel = gemm.run ? "cuBLASLt" : "sm80";
  b->call.library = entry;
  b->workspace = gemm.workspace;
  return RFR_OK;
}

enum { REASON = 160 };

/* Why there is no kernel, or no faster one; NULL: no known reason. */
static const char *lacks(const rfi_selector *from, const rfi_opr *op, const rfi_cuda_kernel *kernel, rfi_arena *memory,
                         const rfr_call *call) {
  if (op->def->outside) return "rfr_op_desc.cuda is not set";
  if (!kernel || !kernel->lacks) return NULL;
  char *text = from->core->arena_alloc(memory, REASON);
  return text && kernel->lacks(call, text, REASON) ? text : NULL;
}

/* call.library stays NULL: the module's own kernels set it */
static void select_outside(const rfi_kernel *launcher, rfi_bound *b) {
  b->run = launcher->run;
  b->kernel = "registered";
  b->workspace = launcher->workspace ? (int64_t)launcher->workspace(&b->call) : 0;
}

/* Whether the op is part of a forward. A recomputed op needs the same accumulator as the original, so that its results
 * are bitwise equal. */
static bool is_forward(const rfi_opr *op) { return op->phase == RFR_PHASE_FORWARD || op->clone_of >= 0; }

/* The module's kernel of an op; NULL: none. */
static const rfi_cuda_kernel *kernel_of(const rfi_opr *op) {
  if (op->def->outside) return NULL;
  if (op->def->code == RFI_OP_matmul_scaled && is_forward(op)) return &rfi_cuda_scaled_forward;
  if (op->def->code == RFI_OP_grouped_matmul_scaled && is_forward(op)) return &rfi_cuda_grouped_scaled_forward;
  return rfi_cuda_kernel_of(op->def->code);
}

/* Bytes of the parts that a reduce-scatter receives and sums (collective_cuda.c); 0: NCCL sums them. */
static int64_t parts_bytes(const rfr_call *call) {
  const rfi_collective c = rfi_collective_of(call, RFI_REDUCE_SCATTER);
  const int64_t ranks = rfi_collective_ranks(call);
  const int64_t bytes = ranks * rfi_collective_bytes(&c);
  return ranks > 1 && bytes >= RFI_LEAST_COPIED ? bytes : 0;
}

rfr_status rfi_cuda_select(const rfi_selector *from, const rfi_opr *op, rfi_arena *memory, rfi_bound *b) {
  const rfi_cuda_kernel *kernel = kernel_of(op);
  b->call.stream = from->stream;
  if (op->def->outside && op->def->outside->cuda.run) {
    select_outside(&op->def->outside->cuda, b);
    return RFR_OK;
  }
  b->call.library = from->device;
  if (op->def->code == RFI_OP_matmul) {
    RFI_TRY(rfi_lt_select(from->lt, op->def, b));
    if (b->run) return RFR_OK;
    b->call.library = from->device;
  }
  if (op->def->code == RFI_OP_matmul_scaled) {
    RFI_TRY(rfi_lt_select_scaled(from->lt, is_forward(op), b));
    if (b->run) return RFR_OK;
    b->call.library = from->device;
  }
  if (op->def->code == RFI_OP_matmul_gelu_bwd) return select_gelu_bwd(from, memory, op->def, b);
  if (op->def->code == RFI_OP_lora_matmul && !kernel->takes(&b->call)) return select_lora(from, memory, b);
  b->why = lacks(from, op, kernel, memory, &b->call);
  if (!kernel || !kernel->run || (kernel->takes && !kernel->takes(&b->call))) return RFR_OK;
  if (rfi_is_head(op->def->code)) RFI_TRY(select_head(from, memory, &b->call));
  b->run = kernel->run;
  b->kernel = kernel->needs ? kernel->needs(&b->call) : "sm80";
  b->workspace = kernel->workspace ? (int64_t)kernel->workspace(&b->call) : 0;
  if (from->copies && op->def->code == RFI_OP_reduce_scatter) b->workspace = parts_bytes(&b->call);
  return RFR_OK;
}
