/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend. Memory comes from the context, a call is done when it returns, and a graph is the
 * list of calls, so launching a graph and running eagerly make the same calls.
 *
 * Results do not depend on the host's rounding mode or on its flush to zero, and a run leaves both unchanged for the
 * host. These modes belong to threads, and the host shares its OpenMP workers with the library. So a run begins with a
 * parallel region in which every thread takes the default modes, and ends with one that restores the old modes if they
 * differed. (A region costs a few microseconds; with one thread there is none.) The first region also checks the size
 * of the team.
 */
#include <fenv.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <string.h>
#include <time.h>

#include "backend/backend.h"
#include "backend/cpu/cpu.h"
#include "backend/cpu/library.h"
#include "base/base.h"
#include "ops/gemm.h"
#include "ops/loss/head.h"

struct rfi_device {
  rfr_ctx *ctx;
  rfi_cpu_library *library;
  int threads;
  bool foreign; /* a worker thread had a non-default floating-point mode */
  int dynamic;  /* OpenMP's dynamic setting before the run */
  int failed;   /* index of the call that failed in the last run; -1: none */
  fenv_t *env;  /* per thread: its mode before the run */
};

struct rfi_graph {
  const rfi_bound *bound;
  int n, n_copies;
  rfi_copy copies[];
};

static void device_close(rfi_device *d) {
  if (!d) return;
  rfi_cpu_library_close(d->library);
  rfi_free(d->ctx, d->env);
  rfi_free(d->ctx, d);
}

/* Inside an active parallel region oneDNN uses one thread, whatever the region's team size. There a GEMM for more
 * threads must be neither created nor run. */
static rfr_status check_region(const rfi_device *d) {
#ifdef _OPENMP
  if (d->threads > 1 && omp_in_parallel())
    return rfi_fail(RFI_E_THREADS_TEAM,
                    "the context has %d threads, and this call is inside a parallel region of OpenMP, "
                    "where it gets 1",
                    d->threads);
#else
  (void)d;
#endif
  return RFR_OK;
}

static rfr_status device_open(rfr_ctx *ctx, rfi_device **out) {
  rfi_device *d = NULL;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *d, &d));
  d->ctx = ctx;
  d->threads = rfi_ctx_threads(ctx);
  rfr_status s = check_region(d);
  if (s == RFR_OK) s = rfi_cpu_library_open(ctx, &d->library);
  if (s == RFR_OK) s = RFI_ALLOC(ctx, sizeof *d->env * (size_t)d->threads, &d->env);
  if (s == RFR_OK) *out = d;
  else device_close(d);
  return s;
}

/* ---- memory ---- */

static rfr_status memory_alloc(rfi_device *d, rfi_memory kind, size_t bytes, void **out) {
  (void)kind;
  return rfi_alloc(d->ctx, bytes, out);
}

static void memory_free(rfi_device *d, rfi_memory kind, void *memory) {
  (void)kind;
  rfi_free(d->ctx, memory);
}

static rfr_status memory_fill(rfi_device *d, void *to, unsigned char byte, size_t n) {
  (void)d;
  memset(to, byte, n);
  return RFR_OK;
}

static rfr_status memory_copy(rfi_device *d, void *to, const void *from, size_t n) {
  (void)d;
  if (n > 0) memcpy(to, from, n);
  return RFR_OK;
}

static bool memory_reaches(const rfi_device *d, const void *memory) {
  (void)d, (void)memory;
  return true;
}

static rfr_status memory_inspect(rfi_device *d, rfi_range *ranges, int n) {
  (void)d;
  for (int i = 0; i < n; i++) {
    const unsigned char *at = ranges[i].at;
    const int64_t bytes = ranges[i].bytes;
    if (bytes > 0 && (at[0] != ranges[i].byte || memcmp(at, at + 1, (size_t)bytes - 1) != 0)) ranges[i].broken = 1;
  }
  return RFR_OK;
}

static rfr_status memory_use(rfi_device *d, rfr_memory_use *out) {
  (void)d, (void)out; /* the context counts it: rfr_ctx_get_stats */
  return RFR_OK;
}

/* ---- kernels ---- */

/* The GEMMs inside an LM head: its kernel calls the library for those that the library supports. */
static rfr_status select_head(rfi_device *d, rfi_arena *memory, rfi_call *call, const char **kernel) {
  rfi_head head = rfi_head_make(call, 1);
  rfi_head_library *entry = rfi_arena_alloc(memory, sizeof *entry * RFI_HEAD_CHUNKS * RFI_HEAD_GEMMS);
  if (!entry) return RFR_NO_MEMORY;
  call->library = entry;
  for (int kind = 0; kind < RFI_HEAD_CHUNKS; kind++) {
    rfi_head_gemm gemms[RFI_HEAD_GEMMS];
    int64_t t = rfi_head_start(&head, kind);
    if (t < 0) continue;
    rfi_head_gemms(call, &head, t, &head, gemms);
    for (int i = 0; i < RFI_HEAD_GEMMS; i++) {
      rfi_head_library *e = &entry[kind * RFI_HEAD_GEMMS + i];
      if (gemms[i].wanted)
        RFI_TRY(rfi_cpu_library_select(d->library, rfi_op_def_get(RFI_OP_matmul), &gemms[i].call, &e->run,
                                       &e->workspace, &e->handle));
      if (e->run) *kernel = RFI_LIBRARY_KERNEL;
    }
  }
  return RFR_OK;
}

static rfr_status select_kernel(rfi_device *d, const rfi_opr *op, rfi_arena *memory, rfi_bound *b) {
  const rfi_kernel *kernel =
      op->def->outside ? &op->def->outside->cpu : rfi_cpu_kernel(rfi_ctx_isa(d->ctx), op->def->code);
  if (!kernel || !kernel->run) return RFR_OK;
  rfi_kernel_fn library = NULL;
  b->kernel = op->def->outside ? "registered" : rfi_ctx_isa(d->ctx);
  size_t scratch = 0;
  RFI_TRY(rfi_cpu_library_select(d->library, op->def, &b->call, &library, &scratch, &b->call.library));
  if (rfi_is_head(op->def->code)) RFI_TRY(select_head(d, memory, &b->call, &b->kernel));
  if (library) {
    b->run = library;
    b->kernel = rfi_is_grouped_gemm(op->def, &b->call) ? RFI_GROUPS_KERNEL : RFI_LIBRARY_KERNEL;
  } else {
    b->run = kernel->run;
    b->why = rfi_cpu_library_lacks(d->library, op->def, &b->call);
    scratch = kernel->workspace ? kernel->workspace(&b->call) : 0;
  }
  b->workspace = (int64_t)scratch;
  return RFR_OK;
}

/* A GEMM has one algorithm: there are no choices. */
static const char *choice(rfi_device *d, int i) {
  (void)d, (void)i;
  return NULL;
}

/* ---- running ---- */

static bool is_default_mode(void) {
#ifdef __x86_64__
  return (__builtin_ia32_stmxcsr() & 0xffc0) == 0x1f80; /* ignores the flags of past exceptions */
#else
  return fegetround() == FE_TONEAREST;
#endif
}

#ifdef _OPENMP
static int thread_number(void) { return omp_get_thread_num(); }
static int team_size(void) { return omp_get_num_threads(); }
/* With OMP_DYNAMIC the team size could change from region to region. Returns the previous setting. */
static int set_dynamic(int dynamic) {
  const int before = omp_get_dynamic();
  omp_set_dynamic(dynamic);
  return before;
}
#else
static int thread_number(void) { return 0; }
static int set_dynamic(int dynamic) { return dynamic; }
#endif

/* Saves the calling thread's floating-point mode and sets the default mode. Returns whether they differed. */
static bool take_own_mode(fenv_t *env) {
  const bool foreign = !is_default_mode();
  fegetenv(env);
  fesetenv(FE_DFL_ENV);
  return foreign;
}

static void end_run(rfi_device *d) {
  if (d->threads > 1 && d->foreign) {
#pragma omp parallel num_threads(d->threads)
    if (thread_number() > 0) fesetenv(&d->env[thread_number()]);
  }
  if (d->threads > 1) set_dynamic(d->dynamic);
  fesetenv(&d->env[0]);
}

/* The first region of a run also checks how many threads OpenMP provides. Kernels and oneDNN's GEMMs are planned for
 * the context's number; with fewer threads oneDNN computes wrong results. */
static rfr_status begin_run(rfi_device *d) {
  d->failed = -1;
  RFI_TRY(check_region(d));
  RFI_TRY(rfi_check_fork(d->threads));
  bool foreign = take_own_mode(&d->env[0]);
  int team = d->threads;
  if (d->threads > 1) {
    d->dynamic = set_dynamic(0);
#pragma omp parallel num_threads(d->threads) reduction(|| : foreign)
    {
      if (thread_number() > 0) foreign = take_own_mode(&d->env[thread_number()]);
#ifdef _OPENMP
      if (thread_number() == 0) team = team_size();
#endif
    }
  }
  d->foreign = foreign;
  if (team == d->threads) return RFR_OK;
  end_run(d);
  return rfi_fail(RFI_E_THREADS_TEAM, "the context has %d threads, OpenMP gives %d here; nothing was executed",
                  d->threads, team);
}

static rfr_status run_calls(rfi_device *d, const rfi_bound *bound, int n) {
  d->failed = -1;
  for (int i = 0; i < n; i++) {
    const rfr_status s = bound[i].run(&bound[i].call);
    if (s == RFR_OK) continue;
    if (bound[i].recorded->def->outside) rfi_outside_failed(bound[i].recorded, s);
    d->failed = i;
    return s;
  }
  return RFR_OK;
}

static int failed(const rfi_device *d) { return d->failed; }

static rfr_status run(rfi_device *d, const rfi_bound *bound, int n) {
  RFI_TRY(begin_run(d));
  rfr_status s = run_calls(d, bound, n);
  end_run(d);
  return s;
}

static rfr_status run_timed(rfi_device *d, const rfi_bound *bound, int n, int *many, double *seconds) {
  (void)n;
  *many = 1;
  struct timespec start, end;
  *seconds = 0;
  RFI_TRY(begin_run(d));
  clock_gettime(CLOCK_MONOTONIC, &start);
  rfr_status s = run_calls(d, bound, 1);
  clock_gettime(CLOCK_MONOTONIC, &end);
  end_run(d);
  *seconds = (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
  return s;
}

static rfr_status capture(rfi_device *d, const rfi_copy *copies, int n_copies, const rfi_bound *bound, int n,
                          rfi_graph **out) {
  *out = NULL;
  d->failed = -1;
  RFI_TRY(RFI_ALLOC(d->ctx, sizeof **out + sizeof *copies * (size_t)n_copies, out));
  **out = (rfi_graph){bound, n, n_copies};
  for (int i = 0; i < n_copies; i++) (*out)->copies[i] = copies[i];
  return RFR_OK;
}

static rfr_status launch(rfi_device *d, rfi_graph *graph, const void *const *from) {
  d->failed = -1;
  for (int i = 0; i < graph->n_copies; i++)
    if (from[i] != graph->copies[i].to) RFI_TRY(memory_copy(d, graph->copies[i].to, from[i], graph->copies[i].n));
  return run(d, graph->bound, graph->n);
}

static void graph_destroy(rfi_device *d, rfi_graph *graph) { rfi_free(d->ctx, graph); }

static rfr_status wait(rfi_device *d) {
  (void)d;
  return RFR_OK;
}

static rfr_status set_stream(rfi_device *d, void *stream) {
  (void)d;
  return stream ? rfi_fail(RFI_E_ARGUMENT, "a stream was given, but the CPU has none: pass NULL") : RFR_OK;
}

static rfr_status poll(rfi_device *d, bool *idle) {
  (void)d;
  *idle = true;
  return RFR_OK;
}

const rfi_backend rfi_backend_cpu = {
    .name = "the CPU",
    .host = true,
    .guard = 256,
    .loss_chunk = 1024,
    .open = device_open,
    .close = device_close,
    .alloc = memory_alloc,
    .free = memory_free,
    .fill = memory_fill,
    .copy = memory_copy,
    .move = memory_copy,
    .reaches = memory_reaches,
    .inspect = memory_inspect,
    .memory_use = memory_use,
    .select = select_kernel,
    .choice = choice,
    .run = run,
    .run_timed = run_timed,
    .capture = capture,
    .launch = launch,
    .failed = failed,
    .graph_destroy = graph_destroy,
    .wait = wait,
    .set_stream = set_stream,
    .poll = poll,
};
