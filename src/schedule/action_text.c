/* SPDX-License-Identifier: Apache-2.0
 *
 * The text form, 0F0 1F0 1I0 1W0 ...: one line per rank. Parsing is strict: numbers without signs or leading zeros, one
 * or more blanks between actions, nothing else.
 */
#include <ctype.h>
#include <string.h>

#include "schedule/schedule.h"

/* Parses digits at *p into *out; returns -1 if there are none, or if the number has a leading zero or is too large. */
static int take_number(const char **p, const char *end) {
  const char *s = *p;
  int64_t x = 0;
  while (*p < end && isdigit((unsigned char)**p) && x <= INT32_MAX) x = 10 * x + (*(*p)++ - '0');
  const bool plain = *p > s && (*s != '0' || *p == s + 1);
  return plain && x < INT32_MAX ? (int)x : -1;
}

static rfr_status take_action(rfr_schedule *s, int line, const char **p, const char *end) {
  const char *start = *p;
  const int stage = take_number(p, end), position = s->n - s->begin[s->ranks - 1];
  const char *word = *p;
  while (*p < end && (isupper((unsigned char)**p) || **p == '_')) (*p)++;
  const size_t length = (size_t)(*p - word);
  int op = 0;
  while (op < RFR_ACTION_COUNT &&
         (strlen(rfi_action_name(op)) != length || memcmp(rfi_action_name(op), word, length) != 0))
    op++;
  const bool numbered = op < RFR_ACTION_COUNT && rfi_action_of_microbatch(op);
  const int microbatch = numbered ? take_number(p, end) : -1;
  const bool ends = *p == end || **p == ' ' || **p == '\t';
  if (stage >= 0 && op < RFR_ACTION_COUNT && ends && (!numbered || microbatch >= 0))
    return rfi_schedule_add(s, op, stage, microbatch);
  size_t n = 0;
  while (start + n < end && n < 24 && start[n] != ' ' && start[n] != '\t') n++;
  return rfi_fail_at(
      RFI_E_SCHEDULE_PARSE, s->file, line,
      "rank %d, action %d: \"%.*s\" is not an action; an action is stage, op, microbatch, such as 0F0 or 1SEND_B3, or "
      "stage and op, such as 0OPT",
      s->ranks - 1, position, (int)n, start);
}

static rfr_status take_line(rfr_schedule *s, int line, const char *p, const char *end) {
  if (p < end && end[-1] == '\r') end--;
  while (p < end && (*p == ' ' || *p == '\t')) p++;
  if (p == end || *p == '#') return RFR_OK;
  RFI_TRY(rfi_schedule_rank(s, line));
  while (p < end) {
    RFI_TRY(take_action(s, line, &p, end));
    while (p < end && (*p == ' ' || *p == '\t')) p++;
  }
  return RFR_OK;
}

rfr_status rfr_schedule_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, rfr_schedule **out) {
  rfr_status s = RFR_OK;
  rfr_schedule *made;
  *out = NULL;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  RFI_TRY(rfi_check_handle(text, "text"));
  RFI_TRY(rfi_schedule_open(ctx, name ? name : "", &made));
  int line = 0;
  for (const char *p = text, *end = text + n, *stop; p < end; p = stop + 1) {
    stop = memchr(p, '\n', (size_t)(end - p));
    if (!stop) stop = end;
    RFI_GOTO(take_line(made, ++line, p, stop));
  }
  if (made->ranks == 0) RFI_GOTO(rfi_fail_at(RFI_E_SCHEDULE_PARSE, made->file, 0, "there is no action"));
  RFI_TRY(rfi_schedule_close(&made));
  *out = made;
  return RFR_OK;
fail:
  rfr_schedule_destroy(made);
  return s;
}

rfr_status rfr_schedule_print(const rfr_schedule *s, rfr_write_fn write, void *user) {
  RFI_TRY(rfi_check_handle(s, "rfr_schedule"));
  char text[RFR_ACTION_TEXT + 1];
  for (int r = 0; r < s->ranks; r++)
    for (int i = s->begin[r]; i < s->begin[r + 1]; i++) {
      rfr_action_print(s->action[i], text);
      strcat(text, i + 1 < s->begin[r + 1] ? " " : "\n");
      write(text, strlen(text), user);
    }
  return RFR_OK;
}
