/* SPDX-License-Identifier: Apache-2.0
 *
 * Patterns over names and over folders; the interface is in file.h.
 *
 * Own code instead of glob(3), which has no `**`, sorts by locale and reports no errors. A walk follows the pattern
 * name by name: plain names are looked up, and only names with wildcards read a folder. `**` never follows a link to a
 * folder, and every other name consumes a part of the pattern, so that a loop of links cannot make a walk endless.
 */
#include <limits.h>
#include <string.h>

#include "data/file.h"

/* Whether byte c is in the set after `[`. Sets *end to the byte after `]`, or to NULL if the set is not closed: then
 * the bracket is an ordinary byte. */
static bool in_set(const char *p, unsigned char c, const char **end) {
  bool inverted = *p == '!' || *p == '^', found = false;
  if (inverted) p++;
  for (const char *first = p; *p && (*p != ']' || p == first); p++) {
    unsigned char low = (unsigned char)*p, high = low;
    if (p[1] == '-' && p[2] && p[2] != ']') {
      high = (unsigned char)p[2];
      p += 2;
    }
    found |= low <= c && c <= high;
  }
  *end = *p ? p + 1 : NULL;
  return found != inverted;
}

/* One pattern element other than `*` against one byte; returns the rest of the pattern, or NULL. */
static const char *match_one(const char *p, unsigned char c) {
  const char *end;
  switch (*p) {
    case 0: return NULL;
    case '?': return p + 1;
    case '[':
      if (in_set(p + 1, c, &end) && end) return end;
      if (end) return NULL;
      break;
    case '\\':
      if (p[1]) p++;
      break;
  }
  return (unsigned char)*p == c ? p + 1 : NULL;
}

bool rfi_ends_in(const char *text, const char *end) {
  const size_t n = strlen(text), m = strlen(end);
  return n >= m && strcmp(text + n - m, end) == 0;
}

/* Backtracking to the last `*` is sufficient: it can match all bytes that an earlier `*` could give up. */
bool rfi_match(const char *pattern, const char *text) {
  const char *star = NULL, *retry = NULL;
  while (*text) {
    const char *next;
    if (*pattern == '*') {
      star = ++pattern;
      retry = text;
    } else if ((next = match_one(pattern, (unsigned char)*text)) != NULL) {
      pattern = next;
      text++;
    } else if (star) {
      pattern = star;
      text = ++retry;
    } else {
      return false;
    }
  }
  while (*pattern == '*') pattern++;
  return *pattern == 0;
}

typedef struct walk {
  rfi_paths *out;
  size_t root; /* bytes of `path` that are not part of the result */
  size_t n;    /* bytes in `path` */
  char path[PATH_MAX];
} walk;

static rfr_status push(walk *w, const char *name, size_t n, size_t *before) {
  *before = w->n;
  bool slash = w->n > 0 && w->path[w->n - 1] != '/';
  if (w->n + n + 2 > sizeof w->path)
    return rfi_fail_at(RFI_E_FILE_OPEN, w->path, 0, "a name in this folder makes the path too long");
  if (slash) w->path[w->n++] = '/';
  memcpy(w->path + w->n, name, n);
  w->n += n;
  w->path[w->n] = 0;
  return RFR_OK;
}

static void pop(walk *w, size_t before) {
  w->n = before;
  w->path[before] = 0;
}

static const char *shown(const walk *w) { return w->n ? w->path : "."; }

static rfr_status walk_from(walk *w, const char *pattern);

/* Continues with `pattern` in every entry that matches `name` (NULL: all entries that are not hidden). */
static rfr_status walk_entries(walk *w, const char *name, const char *pattern, bool folders_only) {
  rfi_paths entries = {.ctx = w->out->ctx};
  rfr_status s = rfi_dir_list(shown(w), &entries);
  for (int i = 0; i < entries.n && s == RFR_OK; i++) {
    const char *entry = entries.items[i];
    size_t before;
    if (entry[0] == '.' && !(name && name[0] == '.')) continue;
    if (name && !rfi_match(name, entry)) continue;
    s = push(w, entry, strlen(entry), &before);
    if (s != RFR_OK) break;
    char kind;
    s = rfi_path_kind(shown(w), &kind);
    /* If the last name of a pattern has wildcards it matches only files: `src/` + `*` does not match all files below
     * src. */
    if (s != RFR_OK) break;
    if (folders_only ? kind == 'd' : *pattern || kind == 'f') s = walk_from(w, pattern);
    pop(w, before);
  }
  rfi_paths_deinit(&entries);
  return s;
}

static rfr_status walk_from(walk *w, const char *pattern) {
  while (*pattern == '/') pattern++;
  char kind;
  RFI_TRY(rfi_path_kind(shown(w), &kind));
  if (*pattern == 0) {
    if (kind == 'f') return rfi_paths_add(w->out, w->path + w->root, w->n - w->root);
    return kind == 'd' || kind == 'l' ? walk_from(w, "**/*") : RFR_OK;
  }
  if (kind != 'd' && kind != 'l') return RFR_OK;
  size_t n = strcspn(pattern, "/"), before;
  const char *rest = pattern + n;
  if (n == 1 && pattern[0] == '.') return walk_from(w, rest);
  if (n == 2 && memcmp(pattern, "**", 2) == 0) {
    while (*rest == '/') rest++;
    if (*rest == 0) return walk_from(w, "**/*"); /* `a/` + `**` names all files below a */
    /* Consecutive ones mean the same as one and would visit each folder many times. */
    if (rest[0] == '*' && rest[1] == '*' && (rest[2] == '/' || rest[2] == 0)) return walk_from(w, rest);
    RFI_TRY(walk_from(w, rest));
    return walk_entries(w, NULL, pattern, true);
  }
  char name[NAME_MAX + 1];
  if (n > NAME_MAX) return RFR_OK; /* no entry has this name */
  memcpy(name, pattern, n);
  name[n] = 0;
  if (strpbrk(name, "*?[\\")) return walk_entries(w, name, rest, false);
  RFI_TRY(push(w, name, n, &before));
  rfr_status s = walk_from(w, rest);
  pop(w, before);
  return s;
}

rfr_status rfi_glob(const char *root, const char *pattern, rfi_paths *paths) {
  walk w = {.out = paths};
  while (pattern[0] == '.' && pattern[1] == '/') pattern += 2;
  size_t n = strlen(root);
  if (pattern[0] == '/') {
    w.path[w.n++] = '/';
  } else if (n > 0) {
    if (n + 2 > sizeof w.path) return rfi_fail_at(RFI_E_FILE_OPEN, root, 0, "the path is too long");
    memcpy(w.path, root, n);
    if (root[n - 1] != '/') w.path[n++] = '/';
    w.n = w.root = n;
  }
  w.path[w.n] = 0;
  return walk_from(&w, pattern);
}
