/* SPDX-License-Identifier: Apache-2.0
 *
 * The internal interface of chat templates, with jansson values instead of JSON text.
 */
#ifndef RFI_CHAT_H
#define RFI_CHAT_H

#include <jansson.h>

#include "base/base.h"
#include "refrain/chat.h"

/* The variables of a render call; all are borrowed. */
typedef struct rfi_chat_input {
  const json_t *messages;  /* a list of objects */
  const json_t *tools;     /* a list, or NULL */
  const json_t *variables; /* an object, or NULL */
  bool add_generation_prompt;
  int64_t date; /* see rfr_chat_options.date */
} rfi_chat_input;

/* rfr_chat_render and rfr_chat_render_training. */
rfr_status rfi_chat_render(const rfr_chat_template *chat, const rfi_chat_input *in, rfr_rendered *out);
rfr_status rfi_chat_render_training(const rfr_chat_template *chat, const rfi_chat_input *in, rfr_rendered *out);

/* The text of the template and its special token variables, for export. Valid as long as the template. */
const char *rfi_chat_template_text(const rfr_chat_template *chat, size_t *n);
/* Identifies the template and its variables, for caches of rendered data. */
uint64_t rfi_chat_template_hash(const rfr_chat_template *chat);
/* Whether a folder has a template; errors of reading are returned. */
rfr_status rfi_chat_template_exists(rfr_ctx *ctx, const char *folder, bool *exists);

#endif
