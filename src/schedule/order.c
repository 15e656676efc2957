/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads order lists in the format of Transformer Engine and Megatron: c is a forward of chunk c, -c its backward,
 * -c-0.5 its weight gradients; chunks count from 1. The k-th forward, backward and weight gradient of a chunk are those
 * of microbatch k - 1. A chunk with separate weight gradients has I where others have B.
 *
 * One list per rank, separated by ; or a newline; commas or blanks between numbers; brackets around a list are
 * optional. Chunk c of rank r of R is stage (c - 1) R + r.
 */
#include <ctype.h>
#include <string.h>

#include "schedule/schedule.h"

typedef struct entry {
  int chunk; /* > 0 */
  int op;    /* F, B, or W */
} entry;

typedef struct reader {
  rfr_ctx *ctx;
  rfi_arena *arena;
  const char *name, *p, *end;
  int line;
  entry *entries; /* of all ranks */
  int n, capacity;
  int *begin, *lines; /* of each rank */
  int ranks, begin_capacity, lines_capacity;
} reader;

static rfr_status bad(const reader *q, const char *what) {
  int n = 0;
  while (n < 24 && q->p + n < q->end && q->p[n] != '\n') n++;
  return rfi_fail_at(RFI_E_SCHEDULE_PARSE, q->name, q->line, "list %d: %s at \"%.*s\"", q->ranks, what, n, q->p);
}

static bool at(const reader *q, const char *any) { return q->p < q->end && *q->p && strchr(any, *q->p); }
static bool digit(const reader *q) { return q->p < q->end && isdigit((unsigned char)*q->p); }

static rfr_status take_entry(reader *q) {
  const char *start = q->p;
  const bool minus = at(q, "-");
  bool half = false;
  int64_t chunk = 0;
  q->p += minus;
  if (!digit(q)) return q->p = start, bad(q, "a number expected");
  for (; digit(q); q->p++)
    if (chunk <= INT32_MAX) chunk = 10 * chunk + (*q->p - '0');
  if (at(q, ".")) {
    half = q->end - q->p >= 2 && q->p[1] == '5';
    if (!half) return q->p = start, bad(q, "only halves are known (-c-0.5: weight gradients of chunk c)");
    q->p += 2;
  }
  if (q->p < q->end && !at(q, " \t\r\n,;]")) return q->p = start, bad(q, "a number expected");
  if (half && !minus) return q->p = start, bad(q, "a forward has no half");
  if (chunk < 1 || chunk >= INT32_MAX) return q->p = start, bad(q, "chunks count from 1");
  if (!rfi_arena_grow(q->arena, (void **)&q->entries, &q->capacity, q->n + 1, sizeof *q->entries)) return RFR_NO_MEMORY;
  q->entries[q->n++] = (entry){(int)chunk, !minus ? RFR_ACTION_F : half ? RFR_ACTION_W : RFR_ACTION_B};
  return RFR_OK;
}

/* One list, up to the end of the line or ;. An empty list is skipped. */
static rfr_status take_list(reader *q) {
  const int first = q->n;
  while (at(q, " \t\r")) q->p++;
  const bool bracket = at(q, "[");
  bool closed = false, comma = false;
  q->p += bracket;
  for (;;) {
    while (at(q, " \t\r")) q->p++;
    if (q->p == q->end || at(q, "\n;")) break;
    if (closed) return bad(q, "a list begins on a line of its own, or after ;");
    if (bracket && !comma && at(q, "]")) {
      closed = true;
      q->p++;
      continue;
    }
    RFI_TRY(take_entry(q));
    while (at(q, " \t\r")) q->p++;
    comma = at(q, ",");
    q->p += comma;
  }
  if (comma) return bad(q, "a number expected after the comma");
  if (bracket && !closed) return bad(q, "] expected");
  if (q->n == first && bracket) return bad(q, "an empty list");
  if (q->n == first) return RFR_OK;
  if (!rfi_arena_grow(q->arena, (void **)&q->begin, &q->begin_capacity, q->ranks + 2, sizeof *q->begin) ||
      !rfi_arena_grow(q->arena, (void **)&q->lines, &q->lines_capacity, q->ranks + 1, sizeof *q->lines))
    return RFR_NO_MEMORY;
  q->begin[q->ranks] = first;
  q->begin[q->ranks + 1] = q->n;
  q->lines[q->ranks++] = q->line;
  return RFR_OK;
}

static rfr_status take_lists(reader *q) {
  for (q->line = 1; q->p < q->end; q->p++) {
    RFI_TRY(take_list(q));
    if (q->p == q->end) break;
    q->line += *q->p == '\n';
  }
  return q->ranks > 0 ? RFR_OK : rfi_fail_at(RFI_E_SCHEDULE_PARSE, q->name, 0, "there is no list");
}

static rfr_status convert(const reader *q, int chunks, rfr_schedule *s) {
  enum { F = RFR_ACTION_F, B = RFR_ACTION_B, W = RFR_ACTION_W };
  /* per chunk: the number of F, B and W so far */
  int(*seen)[RFR_ACTION_COUNT] = rfi_arena_alloc(q->arena, sizeof *seen * (size_t)chunks);
  bool *split = rfi_arena_alloc(q->arena, (size_t)chunks);
  if (!seen || !split) return RFR_NO_MEMORY;
  for (int r = 0; r < q->ranks; r++) {
    memset(seen, 0, sizeof *seen * (size_t)chunks);
    memset(split, 0, (size_t)chunks);
    for (int i = q->begin[r]; i < q->begin[r + 1]; i++) split[q->entries[i].chunk - 1] |= q->entries[i].op == W;
    RFI_TRY(rfi_schedule_rank(s, q->lines[r]));
    for (int i = q->begin[r]; i < q->begin[r + 1]; i++) {
      const entry e = q->entries[i];
      const int op = e.op == B && split[e.chunk - 1] ? RFR_ACTION_I : e.op;
      RFI_TRY(rfi_schedule_add(s, op, (e.chunk - 1) * q->ranks + r, seen[e.chunk - 1][e.op]++));
    }
    for (int c = 0; c < chunks; c++) {
      const int f = seen[c][F], b = seen[c][B], w = seen[c][W];
      if ((b == 0 && w == 0) || (f == b && (!split[c] || w == b))) continue;
      return rfi_fail_at(RFI_E_SCHEDULE_COUNT, q->name, q->lines[r],
                         "list %d: chunk %d has %d forwards, %d backwards and %d weight gradients", r, c + 1, f, b, w);
    }
  }
  return RFR_OK;
}

static rfr_status read_order(reader *q, const int *layers, int n_layers, rfr_schedule **out) {
  rfr_schedule *s;
  rfr_status status;
  int chunks = 0;
  RFI_TRY(take_lists(q));
  for (int i = 0; i < q->n; i++)
    if (q->entries[i].chunk > chunks) chunks = q->entries[i].chunk;
  if (chunks > q->n || q->ranks > INT32_MAX / chunks)
    return rfi_fail_at(RFI_E_SCHEDULE_COUNT, q->name, 0, "there is a chunk %d, but there are only %d numbers in all",
                       chunks, q->n);
  if (n_layers > 1 && n_layers != chunks)
    return rfi_fail(RFI_E_ARGUMENT, "%d counts of layers for %d chunks; give one count, or one for each chunk",
                    n_layers, chunks);
  RFI_TRY(rfi_schedule_open(q->ctx, q->name, &s));
  status = convert(q, chunks, s);
  if (status != RFR_OK) {
    rfr_schedule_destroy(s);
    return status;
  }
  RFI_TRY(rfi_schedule_close(&s));
  int *of_stage = rfi_arena_alloc(q->arena, sizeof *of_stage * (size_t)s->stages);
  status = of_stage ? RFR_OK : RFR_NO_MEMORY;
  for (int i = 0; of_stage && i < s->stages; i++)
    of_stage[i] = n_layers == 0 ? 1 : layers[n_layers == 1 ? 0 : i / q->ranks];
  if (status == RFR_OK) status = rfr_schedule_set_layers(s, of_stage, s->stages);
  if (status == RFR_OK) *out = s;
  else rfr_schedule_destroy(s);
  return status;
}

rfr_status rfr_schedule_parse_order(rfr_ctx *ctx, const char *name, const char *text, size_t n, const int *layers,
                                    int n_layers, rfr_schedule **out) {
  *out = NULL;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  RFI_TRY(rfi_check_handle(text, "text"));
  if (n_layers < 0 || (n_layers > 0 && !layers)) return rfi_fail(RFI_E_ARGUMENT, "%d counts of layers", n_layers);
  reader q = {.ctx = ctx, .name = name ? name : "", .p = text, .end = text + n};
  RFI_TRY(rfi_arena_create(ctx, &q.arena));
  const rfr_status status = read_order(&q, layers, n_layers, out);
  rfi_arena_destroy(q.arena);
  return status;
}
