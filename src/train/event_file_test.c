/* SPDX-License-Identifier: Apache-2.0
 *
 * Event files, read by a reader of this test: records with their checksums, protocol buffers field by field. The same
 * numbers as in log.jsonl; a resume begins a session in a new file.
 */
#include "train/event_file.h"

#include <dirent.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "refrain/train.h"
#include "support/folder.h"

/* ---- reading ---- */

/* CRC-32C by polynomial division of the bits, highest first, without the reflected form of the writer. */
static uint32_t crc_of(const uint8_t *bytes, size_t n) {
  uint32_t r = ~0u, reflected = 0;
  for (size_t i = 0; i < 8 * n; i++) {
    const uint32_t bit = bytes[i / 8] >> i % 8 & 1;
    r = r << 1 ^ (r >> 31 ^ bit ? 0x1edc6f41u : 0);
  }
  for (int i = 0; i < 32; i++) reflected |= (~r >> i & 1) << (31 - i);
  return reflected;
}

static uint64_t fixed(const uint8_t *at, int bytes) {
  uint64_t x = 0;
  for (int i = bytes; i > 0; i--) x = x << 8 | at[i - 1];
  return x;
}

static void check_crc(const uint8_t *bytes, size_t n, const uint8_t *stored) {
  const uint32_t mask = (uint32_t)fixed(stored, 4) - 0xa282ead8u;
  assert_int_equal(mask << 15 | mask >> 17, crc_of(bytes, n));
}

typedef struct field {
  int number, type;
  uint64_t value; /* a number, or the length of the bytes */
  const uint8_t *bytes;
} field;

static uint64_t varint(const uint8_t **at) {
  uint64_t x = 0;
  for (int shift = 0;; shift += 7) {
    x |= (uint64_t)(**at & 0x7f) << shift;
    if (!(*(*at)++ & 0x80)) return x;
  }
}

static bool next_field(const uint8_t **at, const uint8_t *end, field *f) {
  if (*at >= end) return false;
  const uint64_t key = varint(at);
  *f = (field){.number = (int)(key >> 3), .type = (int)(key & 7)};
  if (f->type == 0) f->value = varint(at);
  else if (f->type == 1) f->value = fixed(*at, 8), *at += 8;
  else if (f->type == 5) f->value = fixed(*at, 4), *at += 4;
  else if (f->type == 2) f->value = varint(at), f->bytes = *at, *at += f->value;
  else fail_msg("type %d", f->type);
  assert_true(*at <= end);
  return true;
}

typedef struct event {
  double time;
  int64_t step;
  char version[32];
  int session; /* status; -1: none */
  int n;
  char tags[24][64];
  double values[24];
} event;

static void read_value(const field *summary, event *e) {
  const uint8_t *at = summary->bytes, *end = at + summary->value;
  for (field f; next_field(&at, end, &f);) {
    float value;
    if (f.number == 1) snprintf(e->tags[e->n], 64, "%.*s", (int)f.value, (const char *)f.bytes);
    else if (f.number == 2) memcpy(&value, &(uint32_t){(uint32_t)f.value}, 4), e->values[e->n] = value;
    else fail_msg("field %d of a value", f.number);
  }
  e->n++;
}

static void read_message(const uint8_t *at, size_t n, event *e) {
  const uint8_t *end = at + n;
  *e = (event){.session = -1};
  for (field f, inner; next_field(&at, end, &f);) {
    const uint8_t *from = f.bytes;
    if (f.number == 1) memcpy(&e->time, &f.value, 8);
    else if (f.number == 2) e->step = (int64_t)f.value;
    else if (f.number == 3) snprintf(e->version, sizeof e->version, "%.*s", (int)f.value, (const char *)f.bytes);
    else if (f.number == 7) assert_true(next_field(&from, from + f.value, &inner)), e->session = (int)inner.value;
    else if (f.number != 5) fail_msg("field %d of an event", f.number);
    else
      while (next_field(&from, f.bytes + f.value, &inner)) read_value(&inner, e);
  }
}

static int read_file(const uint8_t *bytes, size_t size, event *events, int most) {
  int n = 0;
  for (size_t at = 0; at < size; n++) {
    assert_true(n < most && at + 16 <= size);
    const size_t length = (size_t)fixed(bytes + at, 8);
    assert_true(at + 16 + length <= size);
    check_crc(bytes + at, 8, bytes + at + 8);
    check_crc(bytes + at + 12, length, bytes + at + 12 + length);
    read_message(bytes + at + 12, length, &events[n]);
    at += 16 + length;
  }
  return n;
}

/* ---- tests ---- */

static void test_checksum(void **state) {
  (void)state;
  uint8_t zeros[32] = {0}, ones[32];
  memset(ones, 0xff, sizeof ones);
  assert_int_equal(rfi_crc32c("123456789", 9), 0xe3069283u);
  assert_int_equal(rfi_crc32c(zeros, 32), 0x8a9136aau); /* RFC 3720, B.4 */
  assert_int_equal(rfi_crc32c(ones, 32), 0x62a8ab43u);
  assert_int_equal(rfi_crc32c("", 0), 0);
  assert_int_equal(crc_of((const uint8_t *)"123456789", 9), 0xe3069283u);
}

static void test_records(void **state) {
  (void)state;
  uint8_t out[RFI_EVENT_BYTES];
  event e;
  assert_int_equal(read_file(out, rfi_event_version(1.5, out), &e, 1), 1);
  assert_string_equal(e.version, "brain.Event:2");
  assert_int_equal(read_file(out, rfi_event_session(1.5, 300, out), &e, 1), 1);
  assert_int_equal(e.session, 1);
  assert_int_equal(e.step, 300);
  char tags[20][65];
  rfi_scalar scalars[20];
  for (int i = 0; i < 20; i++) {
    memset(tags[i], 'a' + i, 64);
    tags[i][i < 3 ? 3 : 63] = 0;
    scalars[i] = (rfi_scalar){tags[i], i == 1 ? NAN : i == 2 ? INFINITY : 0.1 * i};
  }
  assert_int_equal(read_file(out, rfi_event_scalars(1795485415.25, INT64_C(1) << 40, scalars, 20, out), &e, 1), 1);
  assert_int_equal(e.n, 18); /* numbers only */
  assert_true(e.time == 1795485415.25);
  assert_int_equal(e.step, INT64_C(1) << 40);
  assert_true(e.values[1] == (double)0.3f);
  assert_string_equal(e.tags[17], tags[19]);
}

/* ---- a run ---- */

static const char config[] =
    "refrain: 1\n"
    "model: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}\n"
    "data: {train: [\"text/*.txt\"], validation: 30%, sequence: 16, root: \"ROOT\"}\n"
    "batch: {tokens: 64, microbatch: 2}\noptimizer: {lr: 1e-2}\nprecision: {dtype: f32}\n"
    "run: {steps: STEPS, log_every: 1, tensorboard: true}\n";

static int n_warnings;
static void on_event(const rfr_event *e, void *user) {
  (void)user;
  n_warnings += e->kind == RFR_EVENT_WARNING && strstr(e->message, "event file") != NULL;
}

static void train(rft_folder *f, const char *steps, bool resume) {
  char text[1024] = "", *out = text;
  for (const char *s = config; *s; s++) {
    if (strncmp(s, "ROOT", 4) == 0) out += sprintf(out, "%s", f->path), s += 3;
    else if (strncmp(s, "STEPS", 5) == 0) out += sprintf(out, "%s", steps), s += 4;
    else *out++ = *s;
  }
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  o.resume = resume;
  o.on_event = on_event;
  if (rfr_run_open(f->ctx, text, rft_path(f, "run"), &o, &run) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  rfr_run_close(run);
}

/* Finds the event file of the session that begins with `step`, and reads its events. */
static int read_session(rft_folder *f, int64_t step, event *events, int most) {
  DIR *d = opendir(rft_path(f, "run"));
  int found = 0;
  assert_non_null(d);
  for (const struct dirent *e; (e = readdir(d));) {
    char name[300];
    size_t n;
    if (strncmp(e->d_name, "events.out.tfevents.", 20) != 0) continue;
    snprintf(name, sizeof name, "run/%s", e->d_name);
    char *bytes = rft_read(f, name, &n);
    const int count = read_file((const uint8_t *)bytes, n, events, most);
    free(bytes);
    /* the name has seconds and process id, so two sessions of this process may share a file */
    for (int i = 0; i < count && !found; i++)
      if (events[i].session == 1 && events[i].step == step) {
        found = count - i - 1;
        memmove(events, events + i + 1, (size_t)found * sizeof *events);
      }
    if (found) break;
  }
  closedir(d);
  return found;
}

/* The value of an event in log.jsonl. */
static double logged(const char *log, const char *kind, int64_t step, const char *key) {
  char begin[80];
  snprintf(begin, sizeof begin, "{\"event\": \"%s\", \"step\": %lld,", kind, (long long)step);
  const char *line = strstr(log, begin);
  assert_non_null(line);
  json_t *v = json_loadb(line, strcspn(line, "\n"), 0, NULL);
  const double x = json_number_value(json_object_get(v, key));
  json_decref(v);
  return x;
}

static void test_run(void **state) {
  rft_folder *f = *state;
  enum { MOST = 64 };
  event *events = calloc(MOST, sizeof *events);
  size_t n;
  rft_write_texts(f);
  train(f, "5", false);
  train(f, "8", true);
  char *log = rft_read(f, "run/log.jsonl", &n);
  assert_true(read_session(f, 1, events, MOST) >= 6);
  for (int i = 0; i < 6; i++) { /* five steps, then the evaluation */
    const event *e = &events[i];
    const bool last = i == 5;
    assert_int_equal(e->step, last ? 5 : i + 1);
    assert_true(e->time > 1.6e9);
    assert_string_equal(e->tags[0], last ? "evaluation/loss" : "train/loss");
    const char *kind = last ? "evaluation" : "metrics";
    assert_true(e->values[0] == (double)(float)logged(log, kind, e->step, "loss"));
    if (!last) assert_string_equal(e->tags[2], "train/lr");
    if (!last) assert_true(e->values[2] == (double)(float)logged(log, kind, e->step, "lr"));
  }
  assert_int_equal(read_session(f, 6, events, MOST), 4);
  assert_int_equal(events[0].step, 6);
  assert_int_equal(n_warnings, 0);
  free(log);
  free(events);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_checksum),
      cmocka_unit_test(test_records),
      rft_folder_test(test_run),
  };
  return cmocka_run_group_tests_name("event_file", tests, NULL, NULL);
}
