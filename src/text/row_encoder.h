/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokens of a row or a text, and which of them get a loss.
 *
 * A conversation is rendered by the chat template and tokenized as one string; no special token is matched in bytes
 * that came from the row. A token is trained if one of its bytes is trained, as in the transformers library.
 *
 * With a template, a row of a prompt and a completion becomes a message of the user and one of the assistant. Without
 * one, the two texts are concatenated and the end token is appended.
 *
 * In a `text` row and in a text file, every token is trained and special tokens are matched. The tokens that the
 * tokenizer adds around a text are added; the end token is appended if it is not among them. The first token of a row
 * is never a target.
 *
 * A preference row has the tokens of two sequences: the prompt with the chosen answer, then the prompt with the
 * rejected one, whose first token has RFI_TOKEN_REJECTED. The answers are trained. Without a prompt, the prompt is
 * the messages with which both answers begin.
 */
#ifndef RFI_ROW_ENCODER_H
#define RFI_ROW_ENCODER_H

#include "data/token_table.h"
#include "refrain/chat.h"
#include "refrain/text.h"
#include "text/rows.h"

/* The part of a row that is trained. auto: all of a text, the completion of a prompt, the assistant's messages of a
 * chat. */
typedef enum rfi_row_loss {
  RFI_ROW_LOSS_AUTO,
  RFI_ROW_LOSS_ASSISTANT,
  RFI_ROW_LOSS_COMPLETION,
  RFI_ROW_LOSS_ALL
} rfi_row_loss;

typedef struct rfi_row_encoder {
  rfr_ctx *ctx;
  const rfr_tokenizer *tokenizer; /* NULL: a byte is a token */
  const rfr_chat_template *chat;  /* NULL: none */
  rfi_row_loss loss;
} rfi_row_encoder;

/* The result, in memory that is reused; one per thread. Starts as zeros. */
typedef struct rfi_row_tokens {
  rfr_ctx *ctx; /* the owner of the memory, after the first use */
  rfr_tokens tokens;
  uint32_t *ids;    /* n, with RFI_TOKEN_TRAINED */
  uint16_t *widths; /* n, bytes of text */
  int64_t n, capacity;
} rfi_row_tokens;
void rfi_row_tokens_deinit(rfi_row_tokens *tokens);

/* Identifies everything in an encoder that affects tokens. */
rfr_status rfi_row_encoder_hash(const rfi_row_encoder *encoder, rfi_hash *out);
/* One more than the largest id. */
int64_t rfi_row_encoder_vocab(const rfi_row_encoder *encoder);
/* Errors name file and line: template.*, chat.*, tokenizer, data.format (messages without a template; a loss that
 * the form does not have), memory.alloc. */
rfr_status rfi_row_encode(const rfi_row_encoder *encoder, const rfi_row *row, const char *file, int64_t line,
                          rfi_row_tokens *out);
/* A document of a text file. `parallel`: uses the context's threads; must not be called from a parallel region then.
 * The result is the same. */
rfr_status rfi_text_encode(const rfi_row_encoder *encoder, const char *text, size_t n, bool parallel,
                           rfi_row_tokens *out);

#endif
