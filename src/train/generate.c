/* SPDX-License-Identifier: Apache-2.0
 *
 * Text from a model: one forward pass over the window for each token, then a draw.
 *
 * The draw of position n is a pure function of the seed and n, made in double with the
 * candidates in a fixed order (probability, then id), so that the same logits give the
 * same text. The program computes the logits of the whole window and the host picks the
 * row: its shape is the same for every token, so that one captured program serves all.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "core/rng.h"
#include "train/run.h"

enum { DRAW_STREAM = 3 };

rfr_generate_options rfr_generate_options_default(void) {
  return (rfr_generate_options){.size = sizeof(rfr_generate_options), .tokens = 256, .temperature = 0.8, .top_p = 1.0};
}

typedef struct candidate {
  double p;
  int32_t id;
} candidate;

static int likelier(const void *a, const void *b) {
  const candidate *x = a, *y = b;
  if (x->p != y->p) return x->p < y->p ? 1 : -1;
  return x->id - y->id;
}

/* Uniform in [0, 1) from 53 bits. */
static double uniform(uint64_t seed, int64_t position) {
  rfi_u32x4 r = rfi_draw4(rfi_stream_key(seed, DRAW_STREAM), 0, 0, 0, (uint64_t)position);
  return (double)(((uint64_t)r.v[0] << 32 | r.v[1]) >> 11) * 0x1p-53;
}

int32_t rfi_draw_token(const float *logits, int64_t vocab, const rfr_generate_options *o, int64_t position,
                       void *scratch) {
  int32_t best = 0;
  for (int64_t i = 1; i < vocab; i++)
    if (logits[i] > logits[best]) best = (int32_t)i;
  if (o->temperature <= 0.0) return best;
  candidate *c = scratch;
  double total = 0.0;
  for (int64_t i = 0; i < vocab; i++) {
    c[i] = (candidate){exp(((double)logits[i] - (double)logits[best]) / o->temperature), (int32_t)i};
    total += c[i].p;
  }
  int64_t n = vocab;
  if (o->top_k > 0 || o->top_p < 1.0) {
    qsort(c, (size_t)vocab, sizeof *c, likelier);
    if (o->top_k > 0 && o->top_k < n) n = o->top_k;
    const double enough = o->top_p * total;
    total = 0.0;
    for (int64_t i = 0; i < n; i++) {
      total += c[i].p;
      if (total >= enough) n = i + 1;
    }
  }
  double u = uniform(o->seed, position) * total;
  for (int64_t i = 0; i < n; i++) {
    u -= c[i].p;
    if (u < 0.0) return c[i].id;
  }
  return c[n - 1].id;
}

size_t rfi_draw_scratch(int64_t vocab) { return (size_t)vocab * sizeof(candidate); }

static rfr_status check_options(const rfr_generate_options *o, size_t n) {
  if (o->size != sizeof *o) return rfi_fail(RFI_E_ARGUMENT, "rfr_generate_options: size %zu", o->size);
  if (n == 0) return rfi_fail(RFI_E_ARGUMENT, "the prompt is empty; a model continues at least one byte");
  if (o->tokens < 0 || o->top_k < 0 || !(o->temperature >= 0.0) || !(o->top_p > 0.0 && o->top_p <= 1.0))
    return rfi_fail(RFI_E_ARGUMENT, "tokens %lld, top_k %lld, temperature %g, top_p %g: out of range",
                    (long long)o->tokens, (long long)o->top_k, o->temperature, o->top_p);
  return RFR_OK;
}

/* One forward pass over the last `width` tokens of the text; logits of the last one. */
static rfr_status next_logits(rfr_run *run, const int32_t *text, int64_t n, const float **logits) {
  const int64_t window = run->settings->spec.window, vocab = run->settings->spec.model.vocab_size;
  const int64_t width = n < window ? n : window;
  rfr_tensor tokens, offsets, out;
  const int program = rfr_run_program_index(run, RFR_RUN_GENERATE);
  RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_WINDOW, &tokens));
  RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_WINDOW_OFFSETS, &offsets));
  memset(tokens.data, 0, (size_t)tokens.bytes);
  memcpy(tokens.data, text + n - width, (size_t)width * sizeof *text);
  memcpy(offsets.data, (int32_t[]){0, (int32_t)width, (int32_t)window}, 3 * sizeof(int32_t));
  RFI_TRY(rfi_launch(run, RFR_RUN_GENERATE));
  RFI_TRY(rfr_program_output(run->programs, program, RFI_NAME_LOGITS, &out));
  *logits = (const float *)out.data + (width - 1) * vocab;
  return RFR_OK;
}

rfr_status rfr_run_generate(rfr_run *run, const char *prompt, size_t n, const rfr_generate_options *options,
                            rfr_write_fn write, void *user) {
  rfr_status s;
  int32_t *text = NULL;
  void *scratch = NULL;
  const rfr_generate_options o = options ? *options : rfr_generate_options_default();
  RFI_TRY(check_options(&o, n));
  RFI_TRY(rfi_run_check(run, RFR_RUN_GENERATE));
  RFI_GOTO(RFI_ALLOC(run->ctx, (n + (size_t)o.tokens) * sizeof *text, &text));
  RFI_GOTO(rfi_alloc(run->ctx, rfi_draw_scratch(run->settings->spec.model.vocab_size), &scratch));
  for (size_t i = 0; i < n; i++) text[i] = (unsigned char)prompt[i];
  for (int64_t i = 0; i < o.tokens && !rfi_stop_requested(run); i++) {
    const float *logits;
    const int64_t position = (int64_t)n + i;
    RFI_GOTO(next_logits(run, text, position, &logits));
    text[position] = rfi_draw_token(logits, run->settings->spec.model.vocab_size, &o, position, scratch);
    char byte = (char)text[position];
    write(&byte, 1, user);
  }
  s = RFR_OK;
fail:
  rfi_free(run->ctx, scratch);
  rfi_free(run->ctx, text);
  return s;
}
