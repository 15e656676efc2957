/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat templates turn a conversation into the text that a model was trained on.
 *
 *   rfr_chat_template *chat;
 *   rfr_rendered text;
 *   const char *messages = "[{\"role\": \"user\", \"content\": \"Hello\"}]";
 *   if (rfr_chat_template_open(ctx, "SmolLM2-135M-Instruct", NULL, &chat) == RFR_OK &&
 *       rfr_chat_render(chat, messages, strlen(messages), NULL, &text) == RFR_OK) {
 *     fwrite(text.text, 1, text.n, stdout);
 *     rfr_rendered_deinit(&text);
 *   }
 *
 * A template is a program in the subset of Jinja that published templates use (docs/chat.md). The interpreter gives it
 * no files, no environment and no host objects, and limits steps, depth, output and memory. The text equals that of
 * apply_chat_template of the transformers library byte for byte, or both refuse the conversation.
 *
 * A rendered text marks its bytes with spans:
 *   foreign  bytes that came from the conversation, the tools or the caller's variables, and not from the template.
 *            A tokenizer matches no special token there (rfr_encode_options.foreign), so a user's text never becomes
 *            a special token.
 *   trained  bytes of the assistant's messages, for a loss mask. A token is trained if one of its bytes is in such a
 *            span.
 *
 * Threads: a template is immutable; any number of threads may render with it, if the context's allocator allows it.
 * None of these calls may run during capture.
 */
#ifndef REFRAIN_CHAT_H
#define REFRAIN_CHAT_H

#include <stddef.h>

#include "refrain/ctx.h"
#include "refrain/span.h"
#include "refrain/status.h"
#include "refrain/text.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_chat_template rfr_chat_template;

/* Parses a template of n bytes of UTF-8; `name` is used in errors. `variables` is a JSON object of more template
 * variables, such as {"bos_token": "<s>", "eos_token": "</s>"}, or NULL; their text is not foreign.
 * Errors: template.syntax with line and column, json. */
RFR_API rfr_status rfr_chat_template_create(rfr_ctx *ctx, const char *name, const char *text, size_t n,
                                            const char *variables, rfr_chat_template **out);
/* Opens a template. `path` is a model folder, a template file, or "chatml", the built-in template. In a folder, the
 * template is chat_template.jinja, chat_template.json or the member chat_template of tokenizer_config.json; the special
 * tokens become variables: bos_token, eos_token, ... `choice` names one of several templates of a folder; NULL:
 * "default".
 * Errors: chat.template (the folder has no template, or none of that name), template.syntax, file.*, json. */
RFR_API rfr_status rfr_chat_template_open(rfr_ctx *ctx, const char *path, const char *choice, rfr_chat_template **out);
RFR_API void rfr_chat_template_destroy(rfr_chat_template *chat); /* accepts NULL */
/* 1 if the template marks the assistant's text with {% generation %}. */
RFR_API int rfr_chat_template_marks_generation(const rfr_chat_template *chat);

typedef struct rfr_chat_options {
  size_t size;               /* sizeof (rfr_chat_options) */
  const char *tools;         /* JSON list of tools, or NULL */
  const char *variables;     /* JSON object of the caller's variables, such as {"enable_thinking": false}, or NULL */
  int add_generation_prompt; /* 1: ends with the header of an assistant's message */
  int64_t date;              /* for strftime_now: seconds since 1970-01-01 UTC, rendered as UTC; 0: now, local time */
} rfr_chat_options;
RFR_API rfr_chat_options rfr_chat_options_default(void);

/* A rendered conversation. Free it with rfr_rendered_deinit. */
typedef struct rfr_rendered {
  char *text; /* UTF-8 with a NUL at the end */
  size_t n;
  rfr_span *foreign;
  size_t n_foreign;
  rfr_span *trained; /* rfr_chat_render: the bytes inside {% generation %} */
  size_t n_trained;
  rfr_ctx *ctx; /* owner of the memory */
} rfr_rendered;

/* Renders `messages`, a JSON list of objects. Members with the value null are dropped. reasoning_content, thinking and
 * reasoning are names of one member, as in transformers. `options` may be NULL.
 * Errors: json, template.render (the template's own raise_exception too), template.limit. */
RFR_API rfr_status rfr_chat_render(const rfr_chat_template *chat, const char *messages, size_t n,
                                   const rfr_chat_options *options, rfr_rendered *out);

/* Renders a conversation for training and marks the assistant's bytes in `trained`. add_generation_prompt is ignored.
 *
 * In a template with {% generation %}, the trained bytes are exactly those in these blocks: the end-of-turn token is
 * trained only if a block contains it. Without {% generation %}, for each message of role "assistant" with index i, the
 * following texts are compared:
 *   full    all messages
 *   prompt  messages [0, i) and the generation prompt
 *   turn    messages [0, i]
 * If prompt is a prefix of turn and turn is a prefix of full, the trained bytes are turn without prompt. Otherwise the
 * template renders an earlier turn differently when later turns follow. Then the trained bytes are those that the
 * template wrote to full in the loop iteration of message i, without the leading generation prompt. The conversation is
 * refused with chat.mask if these bytes are not contiguous, or do not begin with the generation prompt or a part of it.
 * Such a part ends where the message's own text begins, or else where the output of a statement of the template ends.
 * The text is never searched.
 * White space that the template writes after the end-of-turn token is not trained.
 * Errors: those of rfr_chat_render, and chat.mask. */
RFR_API rfr_status rfr_chat_render_training(const rfr_chat_template *chat, const char *messages, size_t n,
                                            const rfr_chat_options *options, rfr_rendered *out);

RFR_API void rfr_rendered_deinit(rfr_rendered *rendered);

/* Renders a conversation and tokenizes it. Only text of the template becomes special tokens. `options` may be NULL;
 * with add_generation_prompt the tokens are a prompt for rfr_run_generate_tokens. `out` as in rfr_tokenizer_encode.
 * Errors: those of rfr_chat_render and rfr_tokenizer_encode. */
RFR_API rfr_status rfr_chat_encode(const rfr_chat_template *chat, const rfr_tokenizer *tokenizer, const char *messages,
                                   size_t n, const rfr_chat_options *options, rfr_tokens *out);
/* The tokens that end a generated text: those of rfr_tokenizer_stop and, with a template (or NULL), the special token
 * that it writes after the assistant's text. At most `most` ids; *n gets their number. Errors: as above. */
RFR_API rfr_status rfr_chat_stops(const rfr_chat_template *chat, const rfr_tokenizer *tokenizer, int32_t *ids, int most,
                                  int *n);

#ifdef __cplusplus
}
#endif
#endif
