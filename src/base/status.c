/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread's last error.
 *
 * One error per thread, in buffers that the thread owns for its whole life: setting an
 * error allocates nothing, takes no lock and cannot fail, so it works when memory has
 * run out. The text is formatted into a local buffer first, because a caller may
 * pass the last error's own message as an argument. Text that does not fit ends in
 * "..."; line breaks become spaces, so that a message stays one line in every log.
 */
#include "base/base.h"

#include <stdarg.h>
#include <string.h>

enum { MESSAGE_BYTES = 2048, FILE_BYTES = 1024 };

typedef struct last_error {
  rfr_error error;
  char message[MESSAGE_BYTES];
  char file[FILE_BYTES];
} last_error;

static _Thread_local last_error last;

static const rfr_error rows[] = {
#define RFI_ERROR(id, slug, status, meaning, next) {status, slug, meaning, next, "", 0},
#include "base/errors.def"
#undef RFI_ERROR
};

static const char *const status_names[] = {
    [RFR_OK] = "ok",
    [RFR_INVALID] = "invalid",
    [RFR_NO_MEMORY] = "no memory",
    [RFR_NO_FIT] = "does not fit",
    [RFR_IO] = "input or output",
    [RFR_UNSUPPORTED] = "unsupported",
    [RFR_MISMATCH] = "mismatch",
    [RFR_NUMERIC] = "numeric",
    [RFR_STOPPED] = "stopped",
    [RFR_INTERNAL] = "internal",
};

/* Stores a text of `wanted` bytes, of which at most MESSAGE_BYTES - 1 are in `text`. */
static void set_message(const char *text, int wanted) {
  memcpy(last.message, text, MESSAGE_BYTES);
  if (wanted >= MESSAGE_BYTES) {
    /* A cut must not leave half a UTF-8 sequence. */
    size_t end = MESSAGE_BYTES - 4;
    while (end > 0 && ((unsigned char)text[end] & 0xC0) == 0x80) end--;
    memcpy(last.message + end, "...", 4);
  }
  for (char *c = last.message; *c != '\0'; c++)
    if (*c == '\n' || *c == '\r') *c = ' ';
}

/* Appends to `text` (MESSAGE_BYTES); returns the length of the full text. */
static int format_after(char *text, int used, const char *format, va_list args) {
  if (used >= MESSAGE_BYTES) return used;
  int n = rfi_vsnprintf(text + used, (size_t)(MESSAGE_BYTES - used), format, args);
  return n < 0 ? used : used + n;
}

static rfr_status set_error(rfi_error error, const char *file, int64_t line, const char *text, int wanted) {
  if ((unsigned)error >= RFI_E_COUNT) error = RFI_E_INTERNAL;
  char kept[FILE_BYTES]; /* `file` may be the last error's own buffer */
  rfi_snprintf(kept, sizeof kept, "%s", file);
  memcpy(last.file, kept, sizeof kept);
  set_message(text, wanted);
  last.error = (rfr_error){
      .status = rows[error].status,
      .slug = rows[error].slug,
      .message = last.message,
      .next = rows[error].next,
      .file = last.file,
      .line = line,
  };
  return last.error.status;
}

rfr_status rfi_fail(rfi_error error, const char *format, ...) {
  char text[MESSAGE_BYTES] = "";
  va_list args;
  va_start(args, format);
  int wanted = format_after(text, 0, format, args);
  va_end(args);
  return set_error(error, "", 0, text, wanted);
}

rfr_status rfi_fail_slug(const char *slug, const char *format, ...) {
  char text[MESSAGE_BYTES] = "";
  va_list args;
  int error = 0;
  while (error < RFI_E_COUNT - 1 && strcmp(rows[error].slug, slug) != 0) error++;
  va_start(args, format);
  int wanted = format_after(text, 0, format, args);
  va_end(args);
  return set_error(strcmp(rows[error].slug, slug) == 0 ? (rfi_error)error : RFI_E_INTERNAL, "", 0, text, wanted);
}

/* "file:line:column: " and the formatted text. */
static rfr_status fail_at(rfi_error error, const char *file, int64_t line, int64_t column, const char *format,
                          va_list args) {
  char text[MESSAGE_BYTES] = "";
  if (file == NULL) file = "";
  int wanted = 0;
  if (*file && line > 0 && column > 0)
    wanted = rfi_snprintf(text, sizeof text, "%s:%lld:%lld: ", file, (long long)line, (long long)column);
  else if (*file && line > 0) wanted = rfi_snprintf(text, sizeof text, "%s:%lld: ", file, (long long)line);
  else if (*file) wanted = rfi_snprintf(text, sizeof text, "%s: ", file);
  wanted = format_after(text, wanted < 0 ? 0 : wanted, format, args);
  return set_error(error, file, line > 0 ? line : 0, text, wanted);
}

rfr_status rfi_fail_at(rfi_error error, const char *file, int64_t line, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const rfr_status s = fail_at(error, file, line, 0, format, args);
  va_end(args);
  return s;
}

rfr_status rfi_fail_at_column(rfi_error error, const char *file, int64_t line, int64_t column, const char *format,
                              ...) {
  va_list args;
  va_start(args, format);
  const rfr_status s = fail_at(error, file, line, column, format, args);
  va_end(args);
  return s;
}

rfr_status rfi_fail_status(rfr_status status) { return last.error.status = status; }

rfr_status rfi_fail_prefix(const char *format, ...) {
  char text[MESSAGE_BYTES] = "";
  va_list args;
  va_start(args, format);
  int wanted = format_after(text, 0, format, args);
  va_end(args);
  if (wanted < MESSAGE_BYTES) {
    int n = rfi_snprintf(text + wanted, (size_t)(MESSAGE_BYTES - wanted), "%s", last.message);
    wanted += n < 0 ? 0 : n;
  }
  set_message(text, wanted);
  return last.error.status;
}

rfr_status rfi_fail_place(const char *file, int64_t line) {
  rfi_snprintf(last.file, sizeof last.file, "%s", file);
  last.error.file = last.file;
  last.error.line = line;
  return last.error.status;
}

rfr_status rfi_check_handle(const void *handle, const char *type) {
  return handle ? RFR_OK : rfi_fail(RFI_E_ARGUMENT, "the %s is NULL", type);
}

rfr_status rfi_check_out(void *out, size_t bytes, const char *type) {
  RFI_TRY(rfi_check_handle(out, type));
  memset(out, 0, bytes);
  return RFR_OK;
}

const rfr_error *rfr_last_error(void) {
  if (last.error.slug == NULL) {
    /* This thread has no error yet. */
    last.error = (rfr_error){RFR_OK, "", last.message, "", last.file, 0};
  }
  return &last.error;
}

/* ---- JSON ---- */

typedef struct json_text {
  char *out;
  size_t size, n; /* n: length of the full text, which may be more than fits */
} json_text;

static void put_byte(json_text *t, char c) {
  if (t->n + 1 < t->size) t->out[t->n] = c;
  t->n++;
}

static void put_text(json_text *t, const char *s) {
  for (; *s != '\0'; s++) put_byte(t, *s);
}

/* Length of the UTF-8 sequence at `s`, 0 if it is invalid. Overlong forms, surrogates and code points above U+10FFFF
 * are invalid. */
static int utf8_length(const unsigned char *s) {
  const int n = s[0] < 0x80 ? 1 : s[0] >= 0xC2 && s[0] < 0xE0 ? 2 : s[0] >= 0xE0 && s[0] < 0xF0 ? 3 : 4;
  if (n == 4 && (s[0] < 0xF0 || s[0] > 0xF4)) return 0;
  for (int i = 1; i < n; i++)
    if ((s[i] & 0xC0) != 0x80) return 0;
  if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F)) return 0;
  if ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F)) return 0;
  return n;
}

static void put_string(json_text *t, const char *s) {
  put_byte(t, '"');
  for (int n; s != NULL && *s != '\0'; s += n) {
    const unsigned char c = (unsigned char)*s;
    n = utf8_length((const unsigned char *)s);
    if (n == 0) {
      put_text(t, "\xEF\xBF\xBD"); /* U+FFFD */
      n = 1;
    } else if (c == '"' || c == '\\') {
      put_byte(t, '\\');
      put_byte(t, *s);
    } else if (c < 0x20) {
      char escape[8];
      rfi_snprintf(escape, sizeof escape, "\\u%04x", c);
      put_text(t, escape);
    } else {
      for (int i = 0; i < n; i++) put_byte(t, s[i]);
    }
  }
  put_byte(t, '"');
}

size_t rfr_error_json(const rfr_error *error, char *buffer, size_t size) {
  json_text t = {buffer, buffer != NULL ? size : 0, 0};
  char line[32];
  if (error == NULL) error = rfr_last_error();
  const struct {
    const char *before, *text;
  } members[] = {{"{\"status\": ", rfr_status_name(error->status)},
                 {", \"slug\": ", error->slug},
                 {", \"message\": ", error->message},
                 {", \"next\": ", error->next},
                 {", \"file\": ", error->file}};
  for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
    put_text(&t, members[i].before);
    put_string(&t, members[i].text);
  }
  rfi_snprintf(line, sizeof line, ", \"line\": %lld}", (long long)error->line);
  put_text(&t, line);
  if (t.size > 0) t.out[t.n < t.size ? t.n : t.size - 1] = '\0';
  return t.n;
}

const char *rfr_status_name(rfr_status status) {
  return (unsigned)status <= RFR_INTERNAL ? status_names[status] : "unknown";
}

int rfr_error_row(int i, rfr_error *row) {
  if (i < 0 || i >= RFI_E_COUNT) return 0;
  *row = rows[i];
  return 1;
}

const char *rfr_version(void) { return RFI_VERSION; }
