/* SPDX-License-Identifier: Apache-2.0
 *
 * The vocabulary and the chat template of a GGUF file as the files that a model folder has, so that one reader serves
 * both. Vocabularies: gpt2 (byte-level BPE with merges) with the pre-tokenizers smollm, llama-bpe, qwen2, gpt-2, tekken,
 * default and their aliases; llama (sentencepiece BPE: scores, byte tokens). Others are refused by name.
 */
#ifndef RFI_GGUF_TOKENIZER_H
#define RFI_GGUF_TOKENIZER_H

#include <jansson.h>

#include "data/gguf.h"

/* The text of tokenizer.json, tokenizer_config.json (with chat_template) or generation_config.json (ids that begin and
 * end a text) for a GGUF file, followed by a NUL; free with rfi_free. *data NULL: the file has no vocabulary, or `name`
 * is another file. Errors: unsupported for an unknown kind or pre-tokenizer; gguf. */
rfr_status rfi_gguf_text_file(rfr_ctx *ctx, const rfi_gguf *g, const char *name, char **data, size_t *n);

#endif
