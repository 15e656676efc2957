/* SPDX-License-Identifier: Apache-2.0
 *
 * The context: allocator, log sink, threads and settings. There is no other
 * global state; contexts are independent. A context serves one thread at a time.
 */
#ifndef REFRAIN_CTX_H
#define REFRAIN_CTX_H

#include <stddef.h>

#include "refrain/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_ctx rfr_ctx;

typedef enum rfr_log_level { RFR_LOG_DEBUG, RFR_LOG_INFO, RFR_LOG_WARNING } rfr_log_level;

/* Called on the thread that uses the context; `message` has no newline. */
typedef void (*rfr_log_fn)(rfr_log_level level, const char *message, void *user);

/* Receives text in pieces. */
typedef void (*rfr_write_fn)(const char *text, size_t n, void *user);

/* Returns memory aligned to `alignment` (a power of two) or NULL. */
typedef void *(*rfr_alloc_fn)(size_t bytes, size_t alignment, void *user);
typedef void (*rfr_free_fn)(void *memory, size_t bytes, void *user);

typedef struct rfr_ctx_options {
  size_t size;        /* sizeof (rfr_ctx_options), so that the struct can grow */
  rfr_alloc_fn alloc; /* NULL: aligned_alloc */
  rfr_free_fn free;   /* NULL: free; set both or none */
  void *alloc_user;
  rfr_log_fn log; /* NULL: no log */
  void *log_user;
  int threads;             /* threads of a parallel op; 0: the cores this process may use. At most what
                              OpenMP gives: see rfr_ctx_create */
  const char *isa;         /* "v2", "v3" (AVX2), "v4" (AVX-512) or NULL: the best the CPU has */
  const char *module_path; /* folder of the loadable modules, an absolute path; NULL: that of the library */
  int use_onednn;          /* 1: GEMMs by oneDNN if it is available; 0: by the portable kernel */
  const char *device;      /* "cpu" (or NULL), "cuda" (the first GPU), "cuda:1", ...; "cuda:none" makes plans for a
                              GPU without using one, and runs nothing. Copied */
  int cuda_portable;       /* 1: the library's GPU kernels use no feature above compute capability 8.0 */
  size_t byte_limit;       /* limit on the bytes that are allocated at one time; 0: no limit */
} rfr_ctx_options;

/* Defaults; reads REFRAIN_THREADS, REFRAIN_ISA, REFRAIN_ONEDNN (0 or 1), REFRAIN_DEVICE and
 * RFR_CUDA_PORTABLE (0 or 1). The environment is read here and nowhere else. */
RFR_API rfr_ctx_options rfr_ctx_options_default(void);

/* Creates a context; `options` may be NULL. Errors: RFR_INVALID (options of a
 * newer library with a non-zero tail, unknown isa), RFR_NO_MEMORY.
 * The number of threads is capped by OMP_THREAD_LIMIT, with a warning in the log, and is 1 inside a parallel region.
 * A call that computes fails with threads.team where OpenMP gives fewer threads later, and with threads.fork in the
 * child of a fork whose parent computed on the same thread. OMP_DYNAMIC has no effect on the library's regions. */
RFR_API rfr_status rfr_ctx_create(const rfr_ctx_options *options, rfr_ctx **out);

/* Ends the caller's use of the context; accepts NULL. Objects created with it may be destroyed before or after, in any
 * order: the context's memory, `alloc_user` and `log_user` stay in use until the last object is destroyed. */
RFR_API void rfr_ctx_destroy(rfr_ctx *ctx);

/* Counts of the context's allocator since creation. */
typedef struct rfr_ctx_stats {
  int64_t alloc_calls; /* calls of the allocator since creation */
  int64_t live_blocks;
  int64_t live_bytes;
  int64_t peak_bytes;
} rfr_ctx_stats;
RFR_API rfr_ctx_stats rfr_ctx_get_stats(const rfr_ctx *ctx);

/* Makes the k-th allocation from now fail (k = 1 is the next one); 0 turns it off. For tests. */
RFR_API void rfr_ctx_fail_alloc(rfr_ctx *ctx, int64_t k);

#ifdef __cplusplus
}
#endif
#endif
