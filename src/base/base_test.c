/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors, options, the counting allocator, text and numbers.
 */
#include "base/base.h"

#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/arena.h"
#include "support/comma_locale.h"
#include "support/random.h"

static rfr_ctx *make_ctx(void) {
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  return ctx;
}

static void assert_error(rfr_status got, rfr_status want, const char *slug, const char *part) {
  assert_int_equal(got, want);
  const rfr_error *e = rfr_last_error();
  assert_int_equal(e->status, want);
  assert_string_equal(e->slug, slug);
  if (strstr(e->message, part) == NULL) fail_msg("\"%s\" is not in \"%s\"", part, e->message);
}

/* ---- errors ---- */

static void test_error_table(void **state) {
  (void)state;
  rfr_error a, b;
  int n = 0;
  for (; rfr_error_row(n, &a); n++) {
    assert_true(a.slug[0] != '\0' && a.message[0] != '\0' && a.next[0] != '\0');
    assert_int_not_equal(a.status, RFR_OK);
    for (const char *c = a.slug; *c != '\0'; c++) assert_true((*c >= 'a' && *c <= 'z') || *c == '.' || *c == '_');
    for (int j = 0; j < n && rfr_error_row(j, &b); j++) assert_string_not_equal(a.slug, b.slug);
  }
  assert_int_equal(n, RFI_E_COUNT);
  assert_int_equal(rfr_error_row(-1, &a), 0);
  for (int i = RFR_OK; i <= RFR_INTERNAL; i++) {
    assert_string_not_equal(rfr_status_name((rfr_status)i), "unknown");
    for (int j = RFR_OK; j < i; j++)
      assert_string_not_equal(rfr_status_name((rfr_status)i), rfr_status_name((rfr_status)j));
  }
  assert_string_equal(rfr_status_name((rfr_status)99), "unknown");
  assert_string_equal(rfr_status_name((rfr_status)-1), "unknown");
  int major, minor, patch, end = 0;
  assert_int_equal(sscanf(rfr_version(), "%d.%d.%d%n", &major, &minor, &patch, &end), 3);
  assert_int_equal(end, strlen(rfr_version()));
}

static void test_error_text(void **state) {
  (void)state;
  assert_error(rfi_fail(RFI_E_FILE_OPEN, "%s: %d", "a.txt", 13), RFR_IO, "file.open", "a.txt: 13");
  assert_string_equal(rfr_last_error()->message, "a.txt: 13");
  assert_string_equal(rfr_last_error()->file, "");
  assert_int_equal(rfr_last_error()->line, 0);
  assert_string_equal(rfr_last_error()->next, "check the path and its permissions");

  assert_int_equal(rfi_fail_at(RFI_E_CONFIG_KEY, "run.yaml", 12, "no key \"%s\"", "lrr"), RFR_INVALID);
  assert_string_equal(rfr_last_error()->message, "run.yaml:12: no key \"lrr\"");
  assert_string_equal(rfr_last_error()->file, "run.yaml");
  assert_int_equal(rfr_last_error()->line, 12);

  /* An outer function adds its context; the rest of the error is unchanged. */
  assert_int_equal(rfi_fail_prefix("%s: ", "outer"), RFR_INVALID);
  assert_string_equal(rfr_last_error()->message, "outer: run.yaml:12: no key \"lrr\"");
  assert_string_equal(rfr_last_error()->slug, "config.key");
  assert_int_equal(rfr_last_error()->line, 12);

  rfi_fail_at(RFI_E_SAFETENSORS, "w.safetensors", 0, "too short");
  assert_string_equal(rfr_last_error()->message, "w.safetensors: too short");
  assert_int_equal(rfr_last_error()->line, 0);

  /* The text of the last error may be an argument of the next one. */
  rfi_fail_at(RFI_E_CHECKPOINT, rfr_last_error()->file, 3, "(%s)", rfr_last_error()->message);
  assert_string_equal(rfr_last_error()->message, "w.safetensors:3: (w.safetensors: too short)");
  assert_string_equal(rfr_last_error()->file, "w.safetensors");

  rfi_fail(RFI_E_ARGUMENT, "two\nlines\r\n");
  assert_string_equal(rfr_last_error()->message, "two lines  ");
  assert_error(rfi_fail((rfi_error)12345, "x"), RFR_INTERNAL, "internal", "x");
}

static void test_error_too_long(void **state) {
  (void)state;
  char text[5001];
  for (int shift = 0; shift < 3; shift++) { /* in one of them, a two-byte letter crosses the limit */
    memset(text, 'x', sizeof text);
    for (size_t i = (size_t)shift; i + 1 < sizeof text - 1; i += 2) memcpy(text + i, "\xC3\xA4", 2);
    text[5000] = '\0';
    rfi_fail(RFI_E_ARGUMENT, "%s", text);
    const char *m = rfr_last_error()->message;
    const size_t n = strlen(m);
    assert_in_range(n, 2040, 2047);
    assert_string_equal(m + n - 3, "...");
    assert_memory_equal(m, text, n - 3);
    assert_int_equal(m[n - 4] == '\xA4' || m[n - 4] == 'x', 1); /* a complete letter */
    rfi_fail_prefix("outer: ");
    assert_memory_equal(rfr_last_error()->message, "outer: ", 7);
    assert_in_range(strlen(rfr_last_error()->message), 2040, 2047);
  }
  rfi_fail_at(RFI_E_FILE_OPEN, text, 7, "end");
  assert_in_range(strlen(rfr_last_error()->message), 2040, 2047);
  assert_in_range(strlen(rfr_last_error()->file), 1000, 1100);
  rfi_fail(RFI_E_ARGUMENT, "short");
  assert_string_equal(rfr_last_error()->message, "short");
}

static void test_error_json(void **state) {
  (void)state;
  char text[RFR_ERROR_JSON_BYTES], small[16];
  rfi_fail_at(RFI_E_CONFIG_KEY, "a\\b.yaml", 12, "no key \"l\tr\" \xC3\xA4 \xFF\xC0\x80\xED\xA0\x80 end");
  const size_t n = rfr_error_json(rfr_last_error(), text, sizeof text);
  assert_int_equal(n, strlen(text));
  assert_string_equal(text, "{\"status\": \"invalid\", \"slug\": \"config.key\", \"message\": \"a\\\\b.yaml:12: no key "
                            "\\\"l\\u0009r\\\" \xC3\xA4 "
                            "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD end\", \"next\": "
                            "\"remove the key or correct its name\", \"file\": \"a\\\\b.yaml\", \"line\": 12}");
  assert_int_equal(rfr_error_json(NULL, NULL, 0), n); /* NULL: the thread's last error */
  memset(small, 'x', sizeof small);
  assert_int_equal(rfr_error_json(rfr_last_error(), small, sizeof small), n);
  assert_int_equal(strlen(small), sizeof small - 1);
  assert_memory_equal(small, text, sizeof small - 1);
  /* The longest error fits: every byte escaped. */
  char longest[4000];
  memset(longest, 1, sizeof longest - 1);
  longest[sizeof longest - 1] = '\0';
  rfi_fail_at(RFI_E_DATA_HELD_OUT, longest, INT64_MAX, "%s", longest);
  assert_true(rfr_error_json(rfr_last_error(), NULL, 0) < RFR_ERROR_JSON_BYTES);
}

static void test_error_allocates_nothing(void **state) {
  (void)state;
  rfi_fail(RFI_E_ARGUMENT, "warm");
  const size_t before = mallinfo2().uordblks;
  for (int i = 0; i < 100; i++) {
    rfi_fail_at(RFI_E_ARGUMENT, "file", i, "%d %g %s", i, 1.5, "text");
    rfi_fail_prefix("outer: ");
    rfr_error_json(NULL, NULL, 0);
  }
  assert_int_equal(mallinfo2().uordblks, before);
}

static void *fail_in_thread(void *barrier) {
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_ctx *ctx;
  void *memory;
  if (rfr_last_error()->status != RFR_OK || rfr_last_error()->message[0] != '\0') return "a fresh thread has an error";
  o.byte_limit = 1024;
  if (rfr_ctx_create(&o, &ctx) != RFR_OK) return "no context";
  rfi_alloc(ctx, 4096, &memory);
  pthread_barrier_wait(barrier); /* the other thread fails now */
  pthread_barrier_wait(barrier);
  const int is_mine = strcmp(rfr_last_error()->slug, "memory.alloc") == 0;
  rfr_ctx_destroy(ctx);
  return is_mine ? NULL : "the error of another thread";
}

static void test_error_belongs_to_thread(void **state) {
  (void)state;
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, NULL, 2);
  pthread_t thread;
  void *complaint;
  rfr_ctx *ctx = make_ctx();
  assert_int_equal(pthread_create(&thread, NULL, fail_in_thread, &barrier), 0);
  pthread_barrier_wait(&barrier);
  rfi_fail(RFI_E_ARGUMENT, "mine");
  pthread_barrier_wait(&barrier);
  assert_int_equal(pthread_join(thread, &complaint), 0);
  pthread_barrier_destroy(&barrier);
  if (complaint != NULL) fail_msg("%s", (const char *)complaint);
  assert_string_equal(rfr_last_error()->message, "mine");
  rfr_ctx_destroy(ctx);
}

/* ---- options ---- */

static rfr_status create_and_destroy(const rfr_ctx_options *o) {
  rfr_ctx *ctx = (rfr_ctx *)1;
  const rfr_status s = rfr_ctx_create(o, &ctx);
  if (s != RFR_OK) assert_null(ctx);
  rfr_ctx_destroy(ctx);
  return s;
}

static void test_options_size(void **state) {
  (void)state;
  struct {
    rfr_ctx_options o;
    unsigned char tail[24];
  } newer;
  memset(&newer, 0, sizeof newer);
  newer.o = rfr_ctx_options_default();
  newer.o.size = sizeof newer;
  assert_int_equal(create_and_destroy(&newer.o), RFR_OK);
  newer.tail[23] = 1;
  assert_error(create_and_destroy(&newer.o), RFR_INVALID, "argument", "sets byte");
  newer.o.size = sizeof newer - 1;
  assert_int_equal(create_and_destroy(&newer.o), RFR_OK);
  newer.o.size = 0;
  assert_error(create_and_destroy(&newer.o), RFR_INVALID, "argument", "size is 0");
  newer.o.size = (size_t)-1;
  assert_error(create_and_destroy(&newer.o), RFR_INVALID, "argument", "size is");

  /* An older caller's struct ends before `threads`: bytes after it are not read. */
  rfr_ctx_options older = rfr_ctx_options_default();
  older.size = offsetof(rfr_ctx_options, threads);
  older.threads = -5;
  older.isa = "nonsense";
  older.use_onednn = 9;
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(&older, &ctx), RFR_OK);
  assert_true(rfi_ctx_threads(ctx) >= 1);
  assert_true(rfi_ctx_use_onednn(ctx));
  rfr_ctx_destroy(ctx);
}

static void test_options_values(void **state) {
  (void)state;
  rfr_ctx_options o = rfr_ctx_options_default();
  assert_int_equal(o.size, sizeof o);
  o.threads = 3;
  o.isa = "v2";
  o.use_onednn = 0;
  o.module_path = "/somewhere";
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(&o, &ctx), RFR_OK);
  assert_int_equal(rfi_ctx_threads(ctx), 3);
  assert_string_equal(rfi_ctx_isa(ctx), "v2");
  assert_false(rfi_ctx_use_onednn(ctx));
  assert_string_equal(rfi_ctx_module_path(ctx), "/somewhere");
  rfr_ctx_destroy(ctx);

  o.threads = -1;
  assert_error(create_and_destroy(&o), RFR_INVALID, "argument", "threads");
  o.threads = 1000000;
  assert_error(create_and_destroy(&o), RFR_INVALID, "argument", "threads");
  o.threads = 0;
  o.isa = "v5";
  assert_error(create_and_destroy(&o), RFR_INVALID, "argument", "\"v5\"");
  o.isa = NULL;
  o.use_onednn = 2;
  assert_error(create_and_destroy(&o), RFR_INVALID, "argument", "use_onednn");
  o.use_onednn = 1;
  char *path = malloc(10001);
  memset(path, 'p', 10000);
  path[10000] = '\0';
  o.module_path = path;
  assert_error(create_and_destroy(&o), RFR_INVALID, "argument", "module_path");
  free(path);
  o.module_path = "modules"; /* it would depend on the working folder */
  assert_error(create_and_destroy(&o), RFR_INVALID, "argument", "\"modules\" is not an absolute path");
}

static void test_options_defaults(void **state) {
  (void)state;
  rfr_ctx *ctx = make_ctx();
  assert_in_range(rfi_ctx_threads(ctx), 1, sysconf(_SC_NPROCESSORS_CONF));
  const char *isa = rfi_ctx_isa(ctx);
  assert_true(strcmp(isa, "v2") == 0 || strcmp(isa, "v3") == 0 || strcmp(isa, "v4") == 0);
  struct stat st;
  assert_int_equal(stat(rfi_ctx_module_path(ctx), &st), 0);
  assert_true(S_ISDIR(st.st_mode));
  assert_int_equal(rfi_ctx_module_path(ctx)[0], '/');
  /* Every instruction set up to the best one is accepted, none above it. */
  rfr_ctx_options o = rfr_ctx_options_default();
  static const char *const all[] = {"v2", "v3", "v4"};
  for (int i = 0; i < 3; i++) {
    o.isa = all[i];
    if (strcmp(all[i], isa) <= 0) assert_int_equal(create_and_destroy(&o), RFR_OK);
    else assert_error(create_and_destroy(&o), RFR_UNSUPPORTED, "unsupported", all[i]);
  }
  rfr_ctx_destroy(ctx);
}

static void test_isa_of_build(void **state) {
  (void)state;
  const char *isa = "";
  assert_int_equal(rfi_choose_isa(7, NULL, &isa), RFR_OK);
  assert_string_equal(isa, "v4");
  assert_int_equal(rfi_choose_isa(7, "v2", &isa), RFR_OK);
  assert_string_equal(isa, "v2");
  /* Libraries of `make demo`. */
  assert_int_equal(rfi_choose_isa(2, NULL, &isa), RFR_OK);
  assert_string_equal(isa, "v3");
  assert_error(rfi_choose_isa(2, "v2", &isa), RFR_UNSUPPORTED, "unsupported", "has kernels of v3 alone");
  assert_error(rfi_choose_isa(2, "v4", &isa), RFR_UNSUPPORTED, "unsupported", "run v3 at best");
  assert_error(rfi_choose_isa(0, NULL, &isa), RFR_UNSUPPORTED, "unsupported", "for the CPU of another machine");
}

static void test_environment(void **state) {
  (void)state;
  rfr_ctx *ctx;
  setenv("REFRAIN_THREADS", "77", 1);
  setenv("REFRAIN_ISA", "v2", 1);
  setenv("REFRAIN_ONEDNN", "0", 1);
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  rfr_ctx_options o = rfr_ctx_options_default();
  /* Settings are read once, at creation; options that the caller sets are not overridden. */
  setenv("REFRAIN_ISA", "v9", 1);
  setenv("REFRAIN_THREADS", "76", 1);
  assert_int_equal(rfi_ctx_threads(ctx), 77);
  assert_string_equal(rfi_ctx_isa(ctx), "v2");
  assert_false(rfi_ctx_use_onednn(ctx));
  rfr_ctx_destroy(ctx);
  assert_int_equal(rfr_ctx_create(&o, &ctx), RFR_OK);
  assert_int_equal(rfi_ctx_threads(ctx), 77);
  assert_string_equal(rfi_ctx_isa(ctx), "v2");
  rfr_ctx_destroy(ctx);

  assert_error(create_and_destroy(NULL), RFR_INVALID, "argument", "REFRAIN_ISA) \"v9\" is none");
  unsetenv("REFRAIN_ISA");
  static const char *const wrong[] = {"two", "2x", "0", "-1", "99999999999999999999", "1.5"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    setenv("REFRAIN_THREADS", wrong[i], 1);
    assert_error(create_and_destroy(NULL), RFR_INVALID, "argument", "REFRAIN_THREADS");
  }
  setenv("REFRAIN_THREADS", "", 1); /* an empty variable counts as unset */
  setenv("REFRAIN_ONEDNN", "yes", 1);
  assert_error(create_and_destroy(NULL), RFR_INVALID, "argument", "REFRAIN_ONEDNN");
  unsetenv("REFRAIN_ONEDNN");
  unsetenv("REFRAIN_THREADS");
  assert_int_equal(create_and_destroy(NULL), RFR_OK);
}

/* ---- memory ---- */

typedef struct guard {
  int64_t calls, blocks, bytes; /* counted by this allocator */
  int refuse;
} guard;

static void *guard_alloc(size_t bytes, size_t alignment, void *user) {
  guard *g = user;
  g->calls++;
  if (g->refuse) return NULL;
  void *memory;
  if (posix_memalign(&memory, alignment, bytes) != 0) return NULL;
  memset(memory, 0xCD, bytes); /* so that zeros can come only from the library */
  g->blocks++;
  g->bytes += (int64_t)bytes;
  return memory;
}

static void guard_free(void *memory, size_t bytes, void *user) {
  guard *g = user;
  g->blocks--;
  g->bytes -= (int64_t)bytes;
  free(memory);
}

static rfr_ctx *make_guarded(guard *g, size_t byte_limit) {
  rfr_ctx_options o = rfr_ctx_options_default();
  o.alloc = guard_alloc;
  o.free = guard_free;
  o.alloc_user = g;
  o.byte_limit = byte_limit;
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(&o, &ctx), RFR_OK);
  return ctx;
}

static void test_allocator_counts(void **state) {
  (void)state;
  guard g = {0};
  rfr_ctx *ctx = make_guarded(&g, 0);
  const guard start = g;
  assert_int_equal(start.blocks, 1);
  static const size_t sizes[] = {0, 1, 63, 64, 65, 1000, 100003};
  enum { N = sizeof sizes / sizeof *sizes };
  unsigned char *blocks[N];
  for (int i = 0; i < N; i++) {
    assert_int_equal(RFI_ALLOC(ctx, sizes[i], &blocks[i]), RFR_OK);
    assert_non_null(blocks[i]);
    assert_int_equal((uintptr_t)blocks[i] % 64, 0);
    for (size_t k = 0; k < sizes[i]; k++) assert_int_equal(blocks[i][k], 0);
    memset(blocks[i], 0xEE, sizes[i]);
    const rfr_ctx_stats st = rfr_ctx_get_stats(ctx);
    assert_int_equal(st.alloc_calls, g.calls - start.calls);
    assert_int_equal(st.live_blocks, g.blocks - start.blocks);
    assert_int_equal(st.live_bytes, g.bytes - start.bytes);
    assert_int_equal(st.peak_bytes, st.live_bytes);
  }
  const int64_t peak = rfr_ctx_get_stats(ctx).live_bytes;
  for (int i = 0; i < N; i++) rfi_free(ctx, blocks[i]);
  rfi_free(ctx, NULL);
  const rfr_ctx_stats st = rfr_ctx_get_stats(ctx);
  assert_int_equal(st.live_blocks, 0);
  assert_int_equal(st.live_bytes, 0);
  assert_int_equal(st.peak_bytes, peak);
  assert_int_equal(st.alloc_calls, N);
  assert_int_equal(g.bytes, start.bytes);
  rfr_ctx_destroy(ctx);
  assert_int_equal(g.blocks, 0);
  assert_int_equal(g.bytes, 0);
}

static void test_allocator_refuses(void **state) {
  (void)state;
  guard g = {0};
  void *memory = &g;
  g.refuse = 1;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.alloc = guard_alloc;
  assert_error(create_and_destroy(&o), RFR_INVALID, "argument", "both or none");
  o.free = guard_free;
  o.alloc_user = &g;
  assert_error(create_and_destroy(&o), RFR_NO_MEMORY, "memory.alloc", "context");
  g.refuse = 0;

  rfr_ctx *ctx = make_guarded(&g, 0);
  g.refuse = 1;
  assert_error(rfi_alloc(ctx, 100, &memory), RFR_NO_MEMORY, "memory.alloc", "cannot allocate");
  assert_null(memory);
  assert_int_equal(rfr_ctx_get_stats(ctx).live_bytes, 0);
  assert_int_equal(rfr_ctx_get_stats(ctx).peak_bytes, 0);
  const int64_t calls = g.calls;
  assert_error(rfi_alloc(ctx, SIZE_MAX, &memory), RFR_INVALID, "overflow", "block");
  assert_error(rfi_alloc(ctx, SIZE_MAX - 100, &memory), RFR_INVALID, "overflow", "block");
  assert_error(rfi_alloc(ctx, (size_t)INT64_MAX, &memory), RFR_INVALID, "overflow", "block");
  assert_null(memory);
  assert_int_equal(g.calls, calls);
  rfr_ctx_destroy(ctx);
}

static void test_byte_limit(void **state) {
  (void)state;
  enum { LIMIT = 10000 };
  guard g = {0};
  rfr_ctx *ctx = make_guarded(&g, LIMIT);
  const int64_t own = g.bytes;
  void *a, *b;
  assert_int_equal(rfi_alloc(ctx, 6000, &a), RFR_OK);
  assert_error(rfi_alloc(ctx, 6000, &b), RFR_NO_MEMORY, "memory.alloc", "byte limit of 10000");
  assert_null(b);
  assert_true(g.bytes - own <= LIMIT);
  rfi_free(ctx, a);
  assert_int_equal(rfi_alloc(ctx, 6000, &b), RFR_OK); /* a refused allocation does not count */
  rfi_free(ctx, b);
  assert_int_equal(rfi_alloc(ctx, LIMIT, &b), RFR_NO_MEMORY);
  assert_true(rfr_ctx_get_stats(ctx).peak_bytes <= LIMIT);
  rfr_ctx_destroy(ctx);
}

static void test_fail_kth(void **state) {
  (void)state;
  rfr_ctx *ctx = make_ctx();
  void *m[4];
  rfr_ctx_fail_alloc(ctx, 3);
  for (int i = 0; i < 4; i++)
    assert_int_equal(rfi_alloc(ctx, 8, &m[i]), i == 2 ? RFR_NO_MEMORY : RFR_OK); /* only that one */
  assert_null(m[2]);
  for (int i = 0; i < 4; i++) rfi_free(ctx, m[i]);
  rfr_ctx_fail_alloc(ctx, 1);
  rfr_ctx_fail_alloc(ctx, 0);
  assert_int_equal(rfi_alloc(ctx, 8, &m[0]), RFR_OK);
  rfi_free(ctx, m[0]);
  assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
  rfr_ctx_destroy(ctx);
}

static void *allocate_in_thread(void *ctx) {
  for (int i = 0; i < 2000; i++) {
    void *a, *b;
    if (rfi_alloc(ctx, (size_t)i, &a) != RFR_OK) return "no memory";
    if (rfi_alloc(ctx, 17, &b) != RFR_OK) return "no memory";
    rfi_free(ctx, a);
    rfi_free(ctx, b);
  }
  return NULL;
}

static void test_counts_from_threads(void **state) {
  (void)state;
  rfr_ctx *ctx = make_ctx();
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, allocate_in_thread, ctx), 0);
  for (int i = 0; i < 4; i++) {
    void *complaint;
    pthread_join(threads[i], &complaint);
    assert_null(complaint);
  }
  const rfr_ctx_stats st = rfr_ctx_get_stats(ctx);
  assert_int_equal(st.alloc_calls, 4 * 2 * 2000);
  assert_int_equal(st.live_blocks, 0);
  assert_int_equal(st.live_bytes, 0);
  rfr_ctx_destroy(ctx);
}

/* ---- strings, numbers, log ---- */

static rfr_status build_string(rfr_ctx *ctx, rfi_string *s) {
  *s = (rfi_string){.ctx = ctx};
  for (int i = 0; i < 400; i++) RFI_TRY(rfi_string_printf(s, "%d,", i));
  return rfi_string_append(s, "end and more", 3);
}

static void test_string(void **state) {
  (void)state;
  rfr_ctx *ctx = make_ctx();
  rfi_string s;
  assert_int_equal(build_string(ctx, &s), RFR_OK);
  assert_int_equal(s.n, strlen(s.data));
  assert_string_equal(s.data + s.n - 10, "98,399,end");
  assert_memory_equal(s.data, "0,1,2,", 6);
  rfi_string_deinit(&s);
  assert_null(s.data);

  assert_int_equal(rfi_string_append(&s, NULL, 0), RFR_OK);
  assert_int_equal(rfi_string_append(&s, "abc", 3), RFR_OK);
  rfr_ctx_fail_alloc(ctx, 1);
  assert_int_equal(rfi_string_printf(&s, "%0500d", 1), RFR_NO_MEMORY);
  assert_string_equal(s.data, "abc"); /* unchanged */
  assert_int_equal(s.n, 3);
  char exact[200] = "";
  memset(exact, 'e', 124); /* fills the first block including its NUL */
  assert_int_equal(rfi_string_printf(&s, "%s", exact), RFR_OK);
  assert_int_equal(s.n, 127);
  assert_int_equal(rfi_string_printf(&s, "%s", "f"), RFR_OK);
  assert_string_equal(s.data + 126, "ef");
  rfi_string_deinit(&s);
  rfi_string_deinit(&s);

  /* Each allocation fails once. */
  const int64_t before = rfr_ctx_get_stats(ctx).alloc_calls;
  assert_int_equal(build_string(ctx, &s), RFR_OK);
  rfi_string_deinit(&s);
  const int64_t calls = rfr_ctx_get_stats(ctx).alloc_calls - before;
  assert_true(calls >= 3);
  for (int64_t k = 1; k <= calls; k++) {
    rfr_ctx_fail_alloc(ctx, k);
    assert_int_equal(build_string(ctx, &s), RFR_NO_MEMORY);
    rfi_string_deinit(&s);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
  }
  rfr_ctx_destroy(ctx);
}

static void check_numbers(void) {
  char buf[32], *end;
  static const struct {
    double x;
    const char *text;
  } cases[] = {{0, "0"},
               {-0.0, "-0"},
               {1, "1"},
               {0.1, "0.1"},
               {1e-5, "1e-05"},
               {1.0 / 3, "0.3333333333333333"},
               {1e22, "1e+22"},
               {123456.75, "123456.75"},
               {5e-324, "5e-324"},
               {0.1 + 0.2, "0.30000000000000004"},
               {INFINITY, "inf"},
               {-INFINITY, "-inf"},
               {NAN, "nan"},
               {-NAN, "nan"},
               {-1.7976931348623157e308, "-1.7976931348623157e+308"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_string_equal(rfi_format_double(buf, cases[i].x), cases[i].text);
    const double back = rfi_strtod(buf, &end);
    assert_int_equal(*end, '\0');
    assert_true(isnan(cases[i].x) ? isnan(back) : back == cases[i].x && signbit(back) == signbit(cases[i].x));
  }
  uint64_t bits = 99;
  for (int i = 0; i < 20000; i++) {
    double x, back;
    rft_next(&bits);
    memcpy(&x, &bits, sizeof x);
    if (isnan(x)) continue;
    back = rfi_strtod(rfi_format_double(buf, x), &end);
    assert_true(strlen(buf) < 32 && *end == '\0' && back == x);
  }
  assert_true(rfi_strtod("1.5,2", &end) == 1.5 && strcmp(end, ",2") == 0);
  assert_true(rfi_strtod("1,5", &end) == 1 && strcmp(end, ",5") == 0);
  assert_true(rfi_strtod("x", &end) == 0 && strcmp(end, "x") == 0);
  rfi_fail(RFI_E_ARGUMENT, "%.2f and %g", 2.25, 1e-3);
  assert_string_equal(rfr_last_error()->message, "2.25 and 0.001");
  rfr_ctx *ctx = make_ctx();
  rfi_string s = {.ctx = ctx};
  assert_int_equal(rfi_string_printf(&s, "%.1f", 0.5), RFR_OK);
  assert_string_equal(s.data, "0.5");
  rfi_string_deinit(&s);
  rfi_arena *arena;
  assert_int_equal(rfi_arena_create(ctx, &arena), RFR_OK);
  assert_string_equal(rfi_arena_printf(arena, "%.1f", 0.5), "0.5");
  rfi_arena_destroy(arena);
  rfr_ctx_destroy(ctx);
}

static void test_numbers(void **state) {
  (void)state;
  check_numbers();
}

static void test_numbers_under_comma_locale(void **state) {
  (void)state;
  char host[32];
  assert_true(rft_set_comma_locale(RFT_BINARY_DIR "/locale"));
  snprintf(host, sizeof host, "%.1f", 1.5);
  assert_string_equal(host, "1,5"); /* otherwise the test proves nothing */
  check_numbers();
  snprintf(host, sizeof host, "%.1f", 1.5);
  assert_string_equal(host, "1,5"); /* the host's locale is unchanged */
  setlocale(LC_NUMERIC, "C");
}

typedef struct log_lines {
  int n;
  rfr_log_level level;
  char text[3000];
} log_lines;

static void keep_line(rfr_log_level level, const char *message, void *user) {
  log_lines *l = user;
  l->n++;
  l->level = level;
  snprintf(l->text, sizeof l->text, "%s", message);
}

static void test_log(void **state) {
  (void)state;
  log_lines l = {0};
  rfr_ctx_options o = rfr_ctx_options_default();
  o.log = keep_line;
  o.log_user = &l;
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(&o, &ctx), RFR_OK);
  rfi_log(ctx, RFR_LOG_WARNING, "%s\n%d", "a", 2);
  assert_int_equal(l.n, 1);
  assert_int_equal(l.level, RFR_LOG_WARNING);
  assert_string_equal(l.text, "a 2");
  rfi_log(ctx, RFR_LOG_DEBUG, "%05000d", 7);
  assert_int_equal(l.n, 2);
  assert_in_range(strlen(l.text), 2000, 2100);
  rfr_ctx_destroy(ctx);
  ctx = make_ctx();
  rfi_log(ctx, RFR_LOG_INFO, "a context without a log function");
  assert_int_equal(l.n, 2);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  unsetenv("REFRAIN_THREADS");
  unsetenv("REFRAIN_ISA");
  unsetenv("REFRAIN_ONEDNN");
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_error_table),
      cmocka_unit_test(test_error_text),
      cmocka_unit_test(test_error_too_long),
      cmocka_unit_test(test_error_json),
      cmocka_unit_test(test_error_allocates_nothing),
      cmocka_unit_test(test_error_belongs_to_thread),
      cmocka_unit_test(test_options_size),
      cmocka_unit_test(test_options_values),
      cmocka_unit_test(test_options_defaults),
      cmocka_unit_test(test_isa_of_build),
      cmocka_unit_test(test_environment),
      cmocka_unit_test(test_allocator_counts),
      cmocka_unit_test(test_allocator_refuses),
      cmocka_unit_test(test_byte_limit),
      cmocka_unit_test(test_fail_kth),
      cmocka_unit_test(test_counts_from_threads),
      cmocka_unit_test(test_string),
      cmocka_unit_test(test_numbers),
      cmocka_unit_test(test_numbers_under_comma_locale),
      cmocka_unit_test(test_log),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
