/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors, allocation and the internal interface of the context. Independent of tensors.
 */
#ifndef RFI_BASE_H
#define RFI_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "refrain/ctx.h"
#include "refrain/status.h"

/* One enumerator per row of errors.def. */
typedef enum rfi_error {
#define RFI_ERROR(id, slug, status, meaning, next) RFI_E_##id,
#include "base/errors.def"
#undef RFI_ERROR
  RFI_E_COUNT
} rfi_error;

/* Sets the thread's last error and returns its status. Allocates nothing; line breaks
 * become spaces; a text of more than 2047 bytes ends in "...". */
rfr_status rfi_fail(rfi_error error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same with a location in a file; line 0: the file as such. The message starts with "file:line: ", or with nothing
 * if there is no file ("" or NULL). */
/* The same by slug: an error that another process has reported. */
rfr_status rfi_fail_slug(const char *slug, const char *format, ...) __attribute__((format(printf, 2, 3)));
rfr_status rfi_fail_at(rfi_error error, const char *file, int64_t line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The same with a column of the line, from 1: "file:line:column: ". */
rfr_status rfi_fail_at_column(rfi_error error, const char *file, int64_t line, int64_t column, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* Sets the status of the current error to one chosen by other code; returns it. */
rfr_status rfi_fail_status(rfr_status status);
/* Prepends text to the current message, so that an outer function can add its context with its own separator ("layer3:
 * "); slug, file and line are unchanged. Returns the current status. */
rfr_status rfi_fail_prefix(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Sets file and line of the current error: the place to correct, which an outer function may know better. Returns the
 * current status. */
rfr_status rfi_fail_place(const char *file, int64_t line);

#define RFI_TRY(expr)                    \
  do {                                   \
    rfr_status rfi_s_ = (expr);          \
    if (rfi_s_ != RFR_OK) return rfi_s_; \
  } while (0)
/* For functions with one `fail:` label and a variable `s`. */
#define RFI_GOTO(expr)          \
  do {                          \
    s = (expr);                 \
    if (s != RFR_OK) goto fail; \
  } while (0)

/* Checks the size of a caller's options: as long as ours, or longer with only zeros after the members we know. `name`
 * is the struct's. */
rfr_status rfi_check_options(const char *name, const void *options, size_t size, size_t known);

/* The fewest insertions, deletions and replacements of characters after which `name` matches the pattern `glob`;
 * characters that * matches cost nothing. Names are cut off at 255 characters. */
int rfi_glob_distance(const char *glob, const char *name);

/* A broken invariant of the library: an error, never an abort. */
#define RFI_CHECK(condition)                                                                        \
  do {                                                                                              \
    if (!(condition)) return rfi_fail(RFI_E_INTERNAL, "%s:%d: %s", __FILE__, __LINE__, #condition); \
  } while (0)

/* An error for a NULL handle; `type` is its type, "rfr_trace". */
rfr_status rfi_check_handle(const void *handle, const char *type);
/* The same for a result. It is zeroed, so its pointers are NULL after a later error. */
rfr_status rfi_check_out(void *out, size_t bytes, const char *type);
#define RFI_CHECK_OUT(out, type) rfi_check_out(out, sizeof *(out), type)
/* Whether a caller's list of n entries exists, and n is not negative. */
static inline bool rfi_is_list(const void *list, int n) { return n == 0 || (n > 0 && list); }

/* Zeroed memory from the context's allocator, 64-byte aligned. *out is NULL on error, as without a
 * context. Bytes 0 gives a valid block. Safe from several threads at once if the caller's allocator is. */
rfr_status rfi_alloc(rfr_ctx *ctx, size_t bytes, void **out);
#define RFI_ALLOC(ctx, bytes, out) rfi_alloc(ctx, bytes, (void **)(out))
/* Accepts NULL. The context ends with its last block if the caller has destroyed it: do not use it afterwards. */
void rfi_free(rfr_ctx *ctx, void *memory);

/* Blocks that are freed with the context, newest first: the ops registered with it, each after its link. They do not
 * keep the context alive. */
typedef struct rfi_owned {
  _Alignas(16) struct rfi_owned *next;
} rfi_owned;
rfi_owned *rfi_ctx_owned(const rfr_ctx *ctx);
void rfi_ctx_own(rfr_ctx *ctx, rfi_owned *block); /* from rfi_alloc */

enum { RFI_MAX_THREADS = 4096 };

/* The context's settings. */
/* The number of threads of a parallel region: that of the options, at most what OpenMP provides. Results depend on
 * it. */
int rfi_ctx_threads(const rfr_ctx *ctx);
/* A counter that grows while the context's threads work: with each allocation, and with each rfi_ctx_advance, which
 * long work without allocations calls. */
int64_t rfi_ctx_progress(rfr_ctx *ctx);
void rfi_ctx_advance(rfr_ctx *ctx);
/* Call before a parallel region of `threads`. Fails in the child of a fork whose parent had a team on this thread:
 * OpenMP's threads do not exist in the child, and the region would wait for them forever. */
rfr_status rfi_check_fork(int threads);
/* Bits 0, 1 and 2: this CPU runs the instruction set "v2", "v3", "v4", and this build has kernels for it. */
unsigned rfi_cpu_levels(void);
/* Chooses the set `asked`, or the best of `levels` if NULL. The library of `make demo` has one set only. */
rfr_status rfi_choose_isa(unsigned levels, const char *asked, const char **out);
bool rfi_cpu_has_amx(void);                      /* AMX tiles with bf16, which the operating system supports */
const char *rfi_ctx_isa(const rfr_ctx *ctx);     /* the best set that kernels may use: "v2", "v3" or "v4" */
const char *rfi_ctx_device(const rfr_ctx *ctx);  /* "cpu", "cuda", "cuda:N", "cuda:none" */
const char *rfi_ctx_backend(const rfr_ctx *ctx); /* "cpu" or "cuda": results do not depend on the number of a GPU */
bool rfi_ctx_cuda_portable(const rfr_ctx *ctx);
bool rfi_ctx_use_onednn(const rfr_ctx *ctx);
const char *rfi_ctx_module_path(const rfr_ctx *ctx); /* absolute path; "": unknown, load no module */
/* Loads `file` from that folder for the rest of the process; path[PATH_MAX] gets where it is. `name` and `hint` are for
 * the error. Errors: backend.missing. */
rfr_status rfi_module_open(const rfr_ctx *ctx, const char *file, const char *name, const char *hint, char *path,
                           void **out);
double rfi_now(void); /* seconds, monotonic */
void rfi_log(rfr_ctx *ctx, rfr_log_level level, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* snprintf and strtod that ignore the locale. All formatted text of base goes through
 * rfi_vsnprintf, so that rfi_fail, rfi_log, rfi_string_printf and rfi_arena_printf do too. */
int rfi_snprintf(char *out, size_t n, const char *format, ...) __attribute__((format(printf, 3, 4)));
int rfi_vsnprintf(char *out, size_t n, const char *format, va_list args) __attribute__((format(printf, 3, 0)));
double rfi_strtod(const char *s, char **end);
/* Shortest "%.17g" form that reads back equal, with a dot, into 32 bytes; inf and nan as such. Returns buf. */
char *rfi_format_double(char buf[32], double x);

/* A growing string in the context's memory; starts as {ctx}. A failed call leaves it unchanged. Appended text must not
 * point into the string itself. */
typedef struct rfi_string {
  rfr_ctx *ctx;
  char *data; /* NUL-terminated, NULL when empty */
  size_t n, capacity;
} rfi_string;
rfr_status rfi_string_printf(rfi_string *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
rfr_status rfi_string_append(rfi_string *s, const char *text, size_t n);
void rfi_string_deinit(rfi_string *s);
/* Whether `word` is one of the blank-separated words of a text. */
bool rfi_has_word(const char *words, const char *word);

#endif
