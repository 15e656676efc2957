/* SPDX-License-Identifier: Apache-2.0
 *
 * Text and tokens for the commands that generate text: the tokenizer, or bytes; the chat template; stop tokens and
 * stop strings; the stream of text that a model writes.
 */
#ifndef CLI_MODEL_TEXT_H
#define CLI_MODEL_TEXT_H

#include <jansson.h>
#include <stdatomic.h>

#include "cli.h"
#include "refrain/chat.h"
#include "refrain/text.h"

enum { CLI_STOPS = 64 };
typedef struct cli_text {
  const rfr_tokenizer *tokenizer; /* the run's; NULL: tokens are bytes */
  const rfr_chat_template *chat;  /* NULL: none was opened */
  rfr_chat_template *own;         /* of --template */
  int32_t stop[CLI_STOPS];
  int n_stop;
  rfr_tokens tokens; /* of the last prompt */
} cli_text;

/* The tokenizer of an open run and its stop tokens. */
void cli_text_open(const rfr_run *run, cli_text *out);
/* The chat template: --template, else that of the run. The end of an assistant's turn becomes a stop token. */
rfr_status cli_text_open_chat(const cli *c, const rfr_run *run, cli_text *text);
void cli_text_deinit(cli_text *text);

/* Tokens of a raw prompt, and of a conversation (a list of messages) that the assistant continues, in text->tokens. */
rfr_status cli_text_encode(cli_text *text, const char *prompt, size_t n);
rfr_status cli_text_encode_chat(cli_text *text, const json_t *messages);

/* The text that a model generates. `write` gets it as soon as it is complete: valid UTF-8 for a model with a tokenizer,
 * and never a part that may begin a stop string. */
typedef struct cli_stream {
  cli_text *text;
  const cli_list *stops; /* strings, each of which ends the text */
  rfr_write_fn write;
  void *user;
  rfr_decoder *decoder;
  char *pending; /* pending text that may begin a stop string */
  size_t n, capacity;
  const atomic_bool *interrupted; /* returns true to end the text; NULL: never */
  bool stopped;                   /* a stop string has ended the text */
  rfr_status status;
  int64_t tokens;
  double start, first, last; /* times of the call, of the first token and of the last one */
} cli_stream;

/* Continues text->tokens. --tokens, --temperature, ... are the options of `c`. The caller calls cli_stream_deinit. */
rfr_status cli_stream_run(cli *c, rfr_run *run, cli_stream *stream);
void cli_stream_deinit(cli_stream *stream);
/* The parts of cli_stream_run, for texts of a batch: text->tokens is the prompt at the start; cli_stream_take gets the
 * tokens. */
rfr_generate_options cli_sampling(const cli *c, const cli_text *text);
rfr_status cli_stream_begin(const cli *c, const rfr_run *run, cli_stream *stream);
int cli_stream_take(int32_t token, void *stream); /* a rfr_token_fn */
rfr_status cli_stream_end(cli_stream *stream);
/* Tokens per second without the first token, whose time is that of the prompt. 0: unknown. */
double cli_stream_rate(const cli_stream *stream);

/* Checks the options of sampling. */
rfr_status cli_check_sampling(const cli *c);
/* Opens a run's newest checkpoint or a model for generation. */
rfr_status cli_open_generator(cli *c, rfr_run **out);

#endif
