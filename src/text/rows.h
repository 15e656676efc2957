/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of JSONL files: one JSON object per line, in one of the forms of docs/data.md.
 *
 * The forms are reduced to three contents: a text; a prompt with its completion as texts; a list of messages, of which
 * the first n_prompt are the prompt. Errors name file, line, column and key. Invalid UTF-8, NUL and duplicate keys are
 * errors. Blank lines are skipped.
 */
#ifndef RFI_ROWS_H
#define RFI_ROWS_H

#include <jansson.h>

#include "base/base.h"
#include "data/hash.h"

/* X(form, keys that detect it) */
#define RFI_ROW_FORMS(X)                 \
  X(text, "text")                        \
  X(chat, "messages")                    \
  X(completion, "prompt and completion") \
  X(alpaca, "instruction and output")    \
  X(sharegpt, "conversations")           \
  X(preference, "chosen and rejected")
typedef enum rfi_row_form {
#define RFI_ROW_FORM(form, keys) RFI_ROW_##form,
  RFI_ROW_FORMS(RFI_ROW_FORM)
#undef RFI_ROW_FORM
      RFI_ROW_FORM_COUNT
} rfi_row_form;
const char *rfi_row_form_name(rfi_row_form form);

enum { RFI_ROW_MESSAGES = 100000 /* maximum messages of a row */ };

typedef struct rfi_row {
  rfi_row_form form;
  json_t *value;    /* the parsed row, owned */
  const char *text; /* a text row; the other members are unset */
  size_t text_n;
  json_t *messages;                            /* owned; NULL for a row of two texts */
  int n_prompt;                                /* number of prompt messages; 0 for chat and sharegpt */
  json_t *tools;                               /* owned, or NULL */
  char *prompt;                                /* alpaca: instruction and input; owned by the context */
  const char *completion;                      /* completion of a prompt; preference: the chosen text */
  const char *rejected;                        /* preference: texts, or lists of messages after `messages` */
  json_t *chosen_messages, *rejected_messages; /* owned */
} rfi_row;

/* The form that the keys of a row indicate. `file` and `line` are for errors. Errors: data.row, data.format, memory. */
rfr_status rfi_row_detect(const char *file, int64_t line, const char *text, size_t n, rfi_row_form *form);
/* Reads one line as a row of `form`. Release with rfi_row_deinit, also after an error. Thread-safe. Errors: data.row,
 * memory.alloc. */
rfr_status rfi_row_read(rfr_ctx *ctx, rfi_row_form form, const char *file, int64_t line, const char *text, size_t n,
                        rfi_row *row);
void rfi_row_deinit(rfr_ctx *ctx, rfi_row *row);
/* The name ends in .jsonl, .jsonl.gz or .jsonl.zst. */
bool rfi_is_row_file(const char *path);
/* The line has only white space. */
bool rfi_row_is_blank(const char *text, size_t n);

#endif
