/* SPDX-License-Identifier: Apache-2.0
 *
 * Status codes and the thread's last error.
 *
 * Every fallible call returns an rfr_status and sets its `out` parameters to
 * NULL first. The text belongs to the calling thread and stays valid until that
 * thread's next failing call.
 *
 *   rfr_ctx *ctx;
 *   if (rfr_ctx_create(NULL, &ctx) != RFR_OK)
 *     fprintf(stderr, "%s\n", rfr_last_error()->message);
 */
#ifndef REFRAIN_STATUS_H
#define REFRAIN_STATUS_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#error "Refrain supports POSIX systems"
#endif
#define RFR_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* The kind of a failure; the slug in rfr_error is more specific. */
typedef enum rfr_status {
  RFR_OK = 0,
  RFR_INVALID,     /* the caller's argument, configuration or file is wrong */
  RFR_NO_MEMORY,   /* an allocation failed, or a byte limit was reached */
  RFR_NO_FIT,      /* the planned memory exceeds the budget */
  RFR_IO,          /* the operating system refused a read or a write */
  RFR_UNSUPPORTED, /* valid, but this build or backend cannot do it */
  RFR_MISMATCH,    /* a replay, a resume or a rebind does not match the compiled state */
  RFR_NUMERIC,     /* a value that must be finite is not */
  RFR_STOPPED,     /* a stop was requested; the work so far is saved and resumable */
  RFR_INTERNAL     /* a defect of the library */
} rfr_status;

typedef struct rfr_error {
  rfr_status status;
  const char *slug;    /* stable, for programs: "plan.over_budget" */
  const char *message; /* place, what, numbers; one line, no newline at the end */
  const char *next;    /* one next step for the reader */
  const char *file;    /* the file that the error is about, or "" */
  int64_t line;        /* 1-based line in `file`, or 0 */
} rfr_error;

/* The calling thread's last error; never NULL (status RFR_OK before the first). */
RFR_API const rfr_error *rfr_last_error(void);

/* Writes an error as one JSON object on one line: {"status": "invalid", "slug": "config.key", "message": "...",
 * "next": "...", "file": "run.yaml", "line": 3}. Always these six members, in this order; bytes that are not UTF-8
 * become U+FFFD. `error` NULL means rfr_last_error(). Works like snprintf: writes at most `size` bytes with the NUL and
 * returns the length of the full text without it; `buffer` may be NULL when `size` is 0. A text that does not fit is
 * cut and no longer valid JSON; RFR_ERROR_JSON_BYTES is enough for every error of the library. Allocates nothing;
 * safe on any thread. */
#define RFR_ERROR_JSON_BYTES 24576
RFR_API size_t rfr_error_json(const rfr_error *error, char *buffer, size_t size);

/* "invalid", "no memory", ...: a name for a status. */
RFR_API const char *rfr_status_name(rfr_status status);

/* One row of the error table: the i-th slug, its status, meaning and next step.
 * Returns 0 past the end. docs/errors.md is generated from it. */
RFR_API int rfr_error_row(int i, rfr_error *row);

/* Library version as "major.minor.patch". */
RFR_API const char *rfr_version(void);

#ifdef __cplusplus
}
#endif
#endif
