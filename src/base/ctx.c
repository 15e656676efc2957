/* SPDX-License-Identifier: Apache-2.0
 *
 * The context: settings, the counting allocator, the log.
 *
 * Each block from the caller's allocator starts with a header of one cache line that holds its size. So freeing needs
 * no size, and the counts are exact: the bytes requested from the allocator, headers included, without the context
 * itself. The counts are atomic because an exported tensor may be released on any thread; everything else in a context
 * is for one thread at a time.
 *
 * Invalid settings are refused, also those of the environment: a misspelt REFRAIN_THREADS is an error of
 * rfr_ctx_create, never a silent default.
 */
#include "base/base.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { ALIGNMENT = 64, HUGE_PAGE = 1 << 21, LOG_BYTES = 2048 };

typedef struct header {
  _Alignas(ALIGNMENT) size_t bytes; /* size of the block, including the header */
} header;

struct rfr_ctx {
  rfr_ctx_options o;
  const char *isa; /* a literal */
  char module_path[PATH_MAX];
  char device[32];
  rfi_owned *owned;
  size_t own_bytes; /* size of this struct's block */
  /* The caller's handle and each live block that is not owned count as references. So an object keeps the context alive
   * until its last block is freed, and objects may be destroyed in any order. */
  _Atomic int64_t references;
  _Atomic int64_t alloc_calls, live_blocks, live_bytes, peak_bytes;
  _Atomic int64_t advanced; /* further progress, added to alloc_calls */
  _Atomic int64_t fail_in;  /* the number of allocations until one fails; 0: none fails */
};

/* ---- memory ---- */

/* Large blocks use huge pages if the system has them. Otherwise an update that streams through weights and moments
 * spends a tenth of its time on TLB misses. */
static void *default_alloc(size_t bytes, size_t alignment, void *user) {
  (void)user;
  if (bytes < 2 * HUGE_PAGE) return aligned_alloc(alignment, bytes);
  void *memory = aligned_alloc(HUGE_PAGE, (bytes + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1));
  if (memory) madvise(memory, bytes, MADV_HUGEPAGE); /* only a hint: if it is refused, only the time changes */
  return memory;
}

static void default_free(void *memory, size_t bytes, void *user) {
  (void)bytes;
  (void)user;
  free(memory);
}

static bool must_fail(rfr_ctx *ctx) {
  if (atomic_load(&ctx->fail_in) <= 0) return false;
  return atomic_fetch_sub(&ctx->fail_in, 1) == 1;
}

rfr_status rfi_alloc(rfr_ctx *ctx, size_t bytes, void **out) {
  /* memcpy, because the caller's pointer is not a void * and may not be accessed as one */
  void *memory = NULL;
  memcpy(out, &memory, sizeof memory);
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (bytes > (size_t)INT64_MAX / 2) return rfi_fail(RFI_E_OVERFLOW, "a block of %zu bytes is too large", bytes);
  const size_t total = sizeof(header) + ((bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1));

  atomic_fetch_add(&ctx->alloc_calls, 1);
  if (must_fail(ctx))
    return rfi_fail(RFI_E_NO_MEMORY, "rfr_ctx_fail_alloc makes this allocation of %zu bytes fail", bytes);
  const int64_t live = atomic_fetch_add(&ctx->live_bytes, (int64_t)total) + (int64_t)total;
  header *h = NULL;
  if (ctx->o.byte_limit == 0 || (uint64_t)live <= ctx->o.byte_limit)
    h = ctx->o.alloc(total, ALIGNMENT, ctx->o.alloc_user);
  if (h == NULL) {
    atomic_fetch_sub(&ctx->live_bytes, (int64_t)total);
    if (ctx->o.byte_limit != 0 && (uint64_t)live > ctx->o.byte_limit)
      return rfi_fail(RFI_E_NO_MEMORY, "%zu more bytes would make %lld, which exceeds the byte limit of %zu", total,
                      (long long)live, ctx->o.byte_limit);
    return rfi_fail(RFI_E_NO_MEMORY, "cannot allocate %zu bytes (%lld are in use)", total,
                    (long long)(live - (int64_t)total));
  }
  atomic_fetch_add(&ctx->live_blocks, 1);
  atomic_fetch_add(&ctx->references, 1);
  int64_t peak = atomic_load(&ctx->peak_bytes);
  while (live > peak && !atomic_compare_exchange_weak(&ctx->peak_bytes, &peak, live)) continue;
  memset(h, 0, total);
  h->bytes = total;
  memory = h + 1;
  memcpy(out, &memory, sizeof memory);
  return RFR_OK;
}

static void free_block(rfr_ctx *ctx, void *memory) {
  header *h = (header *)memory - 1;
  const size_t total = h->bytes;
  atomic_fetch_sub(&ctx->live_blocks, 1);
  atomic_fetch_sub(&ctx->live_bytes, (int64_t)total);
  ctx->o.free(h, total, ctx->o.alloc_user);
}

static void release(rfr_ctx *ctx) {
  if (atomic_fetch_sub(&ctx->references, 1) > 1) return;
  while (ctx->owned != NULL) {
    rfi_owned *block = ctx->owned;
    ctx->owned = block->next;
    free_block(ctx, block);
  }
  ctx->o.free(ctx, ctx->own_bytes, ctx->o.alloc_user);
}

void rfi_free(rfr_ctx *ctx, void *memory) {
  if (memory == NULL) return;
  free_block(ctx, memory);
  release(ctx);
}

rfr_ctx_stats rfr_ctx_get_stats(const rfr_ctx *ctx) {
  if (ctx == NULL) return (rfr_ctx_stats){0};
  return (rfr_ctx_stats){
      .alloc_calls = atomic_load(&ctx->alloc_calls),
      .live_blocks = atomic_load(&ctx->live_blocks),
      .live_bytes = atomic_load(&ctx->live_bytes),
      .peak_bytes = atomic_load(&ctx->peak_bytes),
  };
}

int64_t rfi_ctx_progress(rfr_ctx *ctx) { return atomic_load(&ctx->alloc_calls) + atomic_load(&ctx->advanced); }

void rfi_ctx_advance(rfr_ctx *ctx) { atomic_fetch_add_explicit(&ctx->advanced, 1, memory_order_relaxed); }

void rfr_ctx_fail_alloc(rfr_ctx *ctx, int64_t k) {
  if (ctx != NULL) atomic_store(&ctx->fail_in, k > 0 ? k : 0);
}

/* ---- the machine ---- */

static int usable_cores(void) {
  cpu_set_t set[16]; /* 16384 CPUs */
  CPU_ZERO_S(sizeof set, set);
  if (sched_getaffinity(0, sizeof set, set) != 0) return 1;
  int n = CPU_COUNT_S(sizeof set, set);
  return n < 1 ? 1 : n > RFI_MAX_THREADS ? RFI_MAX_THREADS : n;
}

/* The maximum number of threads of a parallel region started here. Inside an active region it is 1: OpenMP gives nested
 * regions one thread by default, and oneDNN always does. */
static int team_limit(void) {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_thread_limit();
#else
  return RFI_MAX_THREADS; /* loop parts run one after the other */
#endif
}

rfr_status rfi_check_fork(int threads) {
#ifdef _OPENMP
  static _Thread_local pid_t team_process; /* the process in which this thread first started a team */
  if (threads <= 1) return RFR_OK;
  const pid_t self = getpid();
  if (team_process == 0) team_process = self;
  if (team_process != self)
    return rfi_fail(RFI_E_THREADS_FORK, "process %ld is a fork of %ld, which started OpenMP's threads on this thread",
                    (long)self, (long)team_process);
#else
  (void)threads;
#endif
  return RFR_OK;
}

static const char *const isa_names[] = {"v2", "v3", "v4"};

/* Reads a line of /proc/self/maps: "start-end permissions offset device inode   path". Keeps the path if the range
 * contains `address`. Returns false if the line has another form. */
static bool read_mapping(const char *line, uintptr_t address, char out[PATH_MAX]) {
  char *end;
  const uintptr_t first = strtoul(line, &end, 16);
  if (end == line || *end != '-') return false;
  const uintptr_t last = strtoul(end + 1, &end, 16);
  if (address < first || address >= last) return true;
  const char *path = strchr(end, '/'), *deleted = " (deleted)";
  const size_t n = path != NULL ? strlen(path) : 0;
  if (n == 0 || n >= PATH_MAX) return true;
  if (n > strlen(deleted) && strcmp(path + n - strlen(deleted), deleted) == 0) return true;
  memcpy(out, path, n + 1);
  return true;
}

/* The file that contains this code, as the kernel names it; "": unknown. */
static void own_file(char out[PATH_MAX]) {
  char text[PATH_MAX + 4096];
  size_t n = 0;
  const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  bool valid = fd >= 0;
  out[0] = '\0';
  while (valid && out[0] == '\0') {
    const ssize_t got = read(fd, text + n, sizeof text - 1 - n);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    n += (size_t)got;
    text[n] = '\0';
    char *line = text, *stop;
    for (; valid && out[0] == '\0' && (stop = strchr(line, '\n')) != NULL; line = stop + 1) {
      *stop = '\0';
      valid = read_mapping(line, (uintptr_t)rfr_ctx_create, out);
    }
    n -= (size_t)(line - text);
    memmove(text, line, n);
    valid &= n < sizeof text - 1;
  }
  if (fd >= 0) close(fd);
}

/* The folder of the file that contains this code: the shared library, or the program it was linked into. Empty if
 * unknown; then no module is loaded. The loader's name for the file (dladdr) is relative to the working folder at
 * loading time, so it is used only if it is absolute. */
static void own_folder(char out[PATH_MAX]) {
  Dl_info info;
  own_file(out);
  if (out[0] == '\0' && dladdr((const void *)(uintptr_t)rfr_ctx_create, &info) != 0 && info.dli_fname != NULL &&
      info.dli_fname[0] == '/' && realpath(info.dli_fname, out) == NULL)
    out[0] = '\0';
  char *slash = strrchr(out, '/');
  if (slash == NULL) slash = out;
  else if (slash == out) slash++;
  *slash = '\0';
}

/* ---- the context ---- */

/* An integer in [low, high]; otherwise -1, which rfr_ctx_create refuses. */
static int parse_int(const char *s, int low, int high) {
  char *end;
  errno = 0;
  long x = strtol(s, &end, 10);
  return errno == 0 && end != s && *end == '\0' && x >= low && x <= high ? (int)x : -1;
}

static rfr_ctx_options built_in_options(void) {
  rfr_ctx_options o;
  memset(&o, 0, sizeof o);
  o.size = sizeof o;
  o.use_onednn = 1;
  return o;
}

rfr_ctx_options rfr_ctx_options_default(void) {
  rfr_ctx_options o = built_in_options();
  const char *threads = getenv("REFRAIN_THREADS"), *isa = getenv("REFRAIN_ISA"), *onednn = getenv("REFRAIN_ONEDNN"),
             *device = getenv("REFRAIN_DEVICE"), *portable = getenv("RFR_CUDA_PORTABLE");
  if (threads != NULL && *threads != '\0') o.threads = parse_int(threads, 1, RFI_MAX_THREADS);
  if (isa != NULL && *isa != '\0') {
    o.isa = isa; /* of another value: rfr_ctx_create refuses it */
    for (size_t i = 0; i < sizeof isa_names / sizeof *isa_names; i++)
      if (strcmp(isa, isa_names[i]) == 0) o.isa = isa_names[i]; /* a later setenv may free the original */
  }
  if (onednn != NULL && *onednn != '\0') o.use_onednn = parse_int(onednn, 0, 1);
  if (device != NULL && *device != '\0') o.device = device;
  if (portable != NULL && *portable != '\0') o.cuda_portable = parse_int(portable, 0, 1);
  return o;
}

/* Copies the caller's options, which may be of an older or a newer library, into `o`. */
static rfr_status read_options(const rfr_ctx_options *options, rfr_ctx_options *o) {
  if (options == NULL) {
    *o = rfr_ctx_options_default();
    return RFR_OK;
  }
  *o = built_in_options();
  if (options->size < sizeof options->size || options->size > 65536)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_ctx_options.size is %zu; start from rfr_ctx_options_default()", options->size);
  memcpy(o, options, options->size < sizeof *o ? options->size : sizeof *o);
  for (size_t i = sizeof *o; i < options->size; i++)
    if (((const unsigned char *)options)[i] != 0)
      return rfi_fail(RFI_E_ARGUMENT, "rfr_ctx_options sets byte %zu of %zu; this library knows the first %zu", i,
                      options->size, sizeof *o);
  o->size = sizeof *o;
  return RFR_OK;
}

rfr_status rfi_choose_isa(unsigned levels, const char *asked, const char **out) {
  int best = 2, chosen = 0;
  while (best >= 0 && (levels >> best & 1) == 0) best--;
  if (best < 0)
    return rfi_fail(RFI_E_UNSUPPORTED, "this library has no kernels for this CPU: it was built by `make demo`, for the "
                                       "CPU of another machine; run `make`");
  if (asked == NULL) {
    *out = isa_names[best];
    return RFR_OK;
  }
  while (chosen < 3 && strcmp(asked, isa_names[chosen]) != 0) chosen++;
  if (chosen == 3) return rfi_fail(RFI_E_ARGUMENT, "isa (or REFRAIN_ISA) \"%s\" is none of v2, v3, v4", asked);
  if (chosen > best)
    return rfi_fail(RFI_E_UNSUPPORTED, "isa %s: this machine and build run %s at best", asked, isa_names[best]);
  if ((levels >> chosen & 1) == 0)
    return rfi_fail(RFI_E_UNSUPPORTED,
                    "isa %s: this library was built by `make demo` and has kernels of %s alone; run "
                    "`make`",
                    asked, isa_names[best]);
  *out = isa_names[chosen];
  return RFR_OK;
}

static rfr_status check_options(rfr_ctx_options *o, const char **isa) {
  if ((o->alloc == NULL) != (o->free == NULL)) return rfi_fail(RFI_E_ARGUMENT, "alloc and free: set both or none");
  if (o->threads < 0 || o->threads > RFI_MAX_THREADS)
    return rfi_fail(RFI_E_ARGUMENT, "threads (or REFRAIN_THREADS) must be a whole number from 1 to %d",
                    RFI_MAX_THREADS);
  if (o->use_onednn != 0 && o->use_onednn != 1)
    return rfi_fail(RFI_E_ARGUMENT, "use_onednn (or REFRAIN_ONEDNN) must be 0 or 1");
  if (o->cuda_portable != 0 && o->cuda_portable != 1)
    return rfi_fail(RFI_E_ARGUMENT, "cuda_portable (or RFR_CUDA_PORTABLE) must be 0 or 1");
  if (o->device == NULL) o->device = "cpu";
  if ((strcmp(o->device, "cpu") != 0 && strncmp(o->device, "cuda", 4) != 0) || strlen(o->device) > 31)
    return rfi_fail(RFI_E_ARGUMENT, "device (or REFRAIN_DEVICE) \"%.40s\" is none of cpu, cuda, cuda:N", o->device);
  RFI_TRY(rfi_choose_isa(rfi_cpu_levels(), o->isa, isa));
  if (o->module_path != NULL && strlen(o->module_path) >= PATH_MAX)
    return rfi_fail(RFI_E_ARGUMENT, "module_path is longer than %d bytes", PATH_MAX - 1);
  if (o->module_path != NULL && o->module_path[0] != '/')
    return rfi_fail(RFI_E_ARGUMENT, "module_path \"%.200s\" is not an absolute path", o->module_path);
  if (o->alloc == NULL) {
    o->alloc = default_alloc;
    o->free = default_free;
  }
  if (o->threads == 0) o->threads = usable_cores();
  return RFR_OK;
}

rfr_status rfi_check_options(const char *name, const void *options, size_t size, size_t known) {
  bool fits = size >= known && size <= 65536;
  for (size_t i = known; fits && i < size; i++) fits = ((const unsigned char *)options)[i] == 0;
  if (fits) return RFR_OK;
  return rfi_fail(RFI_E_ARGUMENT, "%s: size %zu is not of this library's version; start from the default", name, size);
}

rfr_status rfr_ctx_create(const rfr_ctx_options *options, rfr_ctx **out) {
  *out = NULL;
  rfr_ctx_options o;
  const char *isa = NULL;
  RFI_TRY(read_options(options, &o));
  const int asked = o.threads;
  RFI_TRY(check_options(&o, &isa));
  const size_t bytes = (sizeof(rfr_ctx) + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
  rfr_ctx *ctx = o.alloc(bytes, ALIGNMENT, o.alloc_user);
  if (ctx == NULL) return rfi_fail(RFI_E_NO_MEMORY, "cannot allocate %zu bytes for the context", bytes);
  memset(ctx, 0, bytes);
  ctx->o = o;
  ctx->isa = isa;
  ctx->own_bytes = bytes;
  ctx->references = 1;
  if (o.module_path != NULL) strcpy(ctx->module_path, o.module_path);
  else own_folder(ctx->module_path);
  strcpy(ctx->device, o.device);
  const int limit = team_limit();
  if (ctx->o.threads > limit) ctx->o.threads = limit;
  ctx->o.device = ctx->device;
  ctx->o.isa = isa;
  ctx->o.module_path = ctx->module_path;
  if (asked > ctx->o.threads)
    rfi_log(ctx, RFR_LOG_WARNING, "%d threads are asked for, OpenMP gives %d (%s)", asked, ctx->o.threads,
            limit == 1 ? "OMP_THREAD_LIMIT, or the call is inside a parallel region" : "OMP_THREAD_LIMIT");
  *out = ctx;
  return RFR_OK;
}

void rfr_ctx_destroy(rfr_ctx *ctx) {
  if (ctx != NULL) release(ctx);
}

rfi_owned *rfi_ctx_owned(const rfr_ctx *ctx) { return ctx->owned; }
void rfi_ctx_own(rfr_ctx *ctx, rfi_owned *block) {
  block->next = ctx->owned;
  ctx->owned = block;
  atomic_fetch_sub(&ctx->references, 1);
}

int rfi_ctx_threads(const rfr_ctx *ctx) { return ctx->o.threads; }
const char *rfi_ctx_isa(const rfr_ctx *ctx) { return ctx->isa; }
bool rfi_ctx_use_onednn(const rfr_ctx *ctx) { return ctx->o.use_onednn != 0; }
const char *rfi_ctx_device(const rfr_ctx *ctx) { return ctx->device; }
const char *rfi_ctx_backend(const rfr_ctx *ctx) { return strncmp(ctx->device, "cuda", 4) == 0 ? "cuda" : "cpu"; }
bool rfi_ctx_cuda_portable(const rfr_ctx *ctx) { return ctx->o.cuda_portable != 0; }
const char *rfi_ctx_module_path(const rfr_ctx *ctx) { return ctx->module_path; }

double rfi_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void rfi_log(rfr_ctx *ctx, rfr_log_level level, const char *format, ...) {
  if (ctx->o.log == NULL) return;
  char message[LOG_BYTES] = "";
  va_list args;
  va_start(args, format);
  rfi_vsnprintf(message, sizeof message, format, args);
  va_end(args);
  for (char *c = message; *c != '\0'; c++)
    if (*c == '\n' || *c == '\r') *c = ' ';
  ctx->o.log(level, message, ctx->o.log_user);
}
