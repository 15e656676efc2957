/* SPDX-License-Identifier: Apache-2.0
 *
 * Converts the vocabulary and the chat template of a GGUF file to the files of a model folder, so that one reader
 * serves both. Vocabularies: gpt2 (byte-level BPE with merges) with the pre-tokenizers smollm, llama-bpe, qwen2, gpt-2,
 * tekken, default and their aliases; llama (sentencepiece BPE: scores, byte tokens). Others are refused by name.
 */
#ifndef RFI_GGUF_TOKENIZER_H
#define RFI_GGUF_TOKENIZER_H

#include <jansson.h>

#include "data/gguf_write.h"

/* Returns the text of tokenizer.json, tokenizer_config.json (with chat_template) or generation_config.json (ids that
 * begin and end a text) for a GGUF file, followed by a NUL; free with rfi_free. *data NULL: the file has no vocabulary,
 * or `name` is another file. Errors: tokenizer.unsupported for an unknown kind or pre-tokenizer; gguf. */
rfr_status rfi_gguf_text_file(rfr_ctx *ctx, const rfi_gguf *g, const char *name, char **data, size_t *n);
/* The files of a folder from which a vocabulary is made; NULL if the folder lacks one. */
typedef struct rfi_gguf_text_files {
  const char *file;        /* tokenizer.json, for errors */
  const json_t *tokenizer; /* required */
  const json_t *config, *generation;
  const char *chat_template; /* n_template bytes of chat_template.jinja */
  size_t n_template;
} rfi_gguf_text_files;
/* Adds the vocabulary, padded to vocab_size tokens, and the chat template to a file. Errors: tokenizer.unsupported for
 * a tokenizer that GGUF has no name for; json. */
rfr_status rfi_gguf_put_text_files(rfr_ctx *ctx, rfi_gguf_writer *w, const rfi_gguf_text_files *from,
                                   int64_t vocab_size);

#endif
