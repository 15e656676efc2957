/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain tokenizer-train: a tokenizer from texts.
 */
#include <string.h>

#include "cli.h"
#include "refrain/text.h"

static void print(const cli *c, const rfr_tokenizer_training *t, double seconds) {
  json j = {.f = stdout};
  if (c->json) {
    json_begin(&j, NULL, '{');
    json_text(&j, "out", c->out);
    json_int(&j, "vocab_size", t->vocab_size);
    json_int(&j, "merges", t->merges);
    json_int(&j, "least", t->least);
    json_int(&j, "files", t->files);
    json_int(&j, "bytes", t->bytes);
    json_int(&j, "words", t->words);
    json_end(&j, '}');
    putchar('\n');
    return;
  }
  if (c->quiet) return;
  fprintf(stderr, "read %lld bytes of %lld files: %lld distinct words\n", (long long)t->bytes, (long long)t->files,
          (long long)t->words);
  fprintf(stderr, "wrote %s: %lld tokens in %.1f s; the last of %lld merges occurred %lld times\n", c->out,
          (long long)t->vocab_size, seconds, (long long)t->merges, (long long)t->least);
}

rfr_status cli_tokenizer_train(cli *c) {
  rfr_tokenizer_train_options o = rfr_tokenizer_train_options_default();
  rfr_tokenizer_training t;
  if (!c->out) return cli_usage("add --out FOLDER", "--out is missing");
  o.vocab_size = c->vocab;
  o.pattern = !c->pattern || strcmp(c->pattern, "gpt2") == 0 ? RFR_WORDS_GPT2
              : strcmp(c->pattern, "llama3") == 0            ? RFR_WORDS_LLAMA3
                                                             : RFR_WORDS_QWEN2;
  if (c->specials.n) o.special = c->specials.items, o.n_special = c->specials.n;
  o.min_frequency = c->min_frequency;
  o.max_bytes = c->max_bytes;
  o.chat_template = c->template;
  const double start = cli_now();
  const rfr_status s = rfr_tokenizer_train(c->ctx, c->operands, c->n_operands, &o, c->out, &t);
  if (s != RFR_OK) return s;
  print(c, &t, cli_now() - start);
  if (t.vocab_size < o.vocab_size) {
    char text[160];
    snprintf(text, sizeof text, "the texts have pairs for %lld tokens, not %lld; no other pair occurs %lld times",
             (long long)t.vocab_size, (long long)o.vocab_size, (long long)o.min_frequency);
    cli_warn(c, text);
  }
  return RFR_OK;
}
