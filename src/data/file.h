/* SPDX-License-Identifier: Apache-2.0
 *
 * Files: read in full, read at an offset, write atomically, walk folders, match names.
 *
 * Invariants. Nothing is mapped: if a file shrinks while it is read, the result is a status, never a signal. A written
 * file becomes visible under its name only when it is complete and durable (temporary name, write, fsync, rename, fsync
 * of the folder). On any failure the old file is untouched and the temporary one is removed. A failed fsync is final
 * and is not retried: the kernel may have dropped the pages and marked them clean.
 *
 * Every system call on a file goes through one function that a test can make fail.
 */
#ifndef RFI_FILE_H
#define RFI_FILE_H

#include "base/base.h"
#include "data/hash.h"

/* Makes the calling thread's file system calls fail, or transfer fewer bytes; for tests. */
typedef struct rfi_io_fault {
  int64_t fail_at;  /* the number of the call that fails, 1 for the next one; 0: none */
  int error;        /* its errno */
  bool sticky;      /* all later calls fail too */
  int max_transfer; /* reads and writes move at most this many bytes; 0: no limit */
  bool interrupt;   /* every read and write is interrupted once */
  int64_t space;    /* free bytes that file systems report; 0: the true number */
  int64_t calls;    /* incremented by each call */
  bool interrupted; /* private */
} rfi_io_fault;
/* The caller owns `fault`, which must outlive its use; NULL ends it. */
void rfi_io_set_fault(rfi_io_fault *fault);

/* An open regular file, for reading or for writing. */
typedef struct rfi_file rfi_file;

/* Opens a regular file for reading; folders, pipes and devices are refused. */
rfr_status rfi_file_open(rfr_ctx *ctx, const char *path, rfi_file **out);
/* Size at the time of opening, or bytes written so far. */
int64_t rfi_file_size(const rfi_file *file);
const char *rfi_file_path(const rfi_file *file);
/* Exactly n bytes at `offset`; fewer is an error with the length of the file. */
rfr_status rfi_file_read_at(rfi_file *file, void *data, size_t n, int64_t offset);

/* Creates a file that must not exist. Appended bytes are hashed on the way. */
rfr_status rfi_file_create(rfr_ctx *ctx, const char *path, rfi_file **out);
rfr_status rfi_file_append(rfi_file *file, const void *data, size_t n);
/* Replaces bytes that were appended. The hash has the old ones. */
rfr_status rfi_file_overwrite(rfi_file *file, const void *data, size_t n, int64_t offset);
/* fsync and close; `hash` may be NULL. The object is destroyed, also on error. */
rfr_status rfi_file_finish(rfi_file *file, rfi_hash *hash);
/* Closes a file that was read, or abandons one that was written. Accepts NULL. */
void rfi_file_close(rfi_file *file);

/* The full contents in the context's memory, followed by a NUL; free with rfi_free. */
rfr_status rfi_file_read(rfr_ctx *ctx, const char *path, char **data, size_t *n);
/* The same for a file of at most `limit` bytes; a larger one is the error file.size. */
rfr_status rfi_file_read_limited(rfr_ctx *ctx, const char *path, int64_t limit, char **data, size_t *n);
/* Replaces `path` atomically; a symbolic link at `path` is replaced, not followed. */
rfr_status rfi_file_write(rfr_ctx *ctx, const char *path, const void *data, size_t n);
/* Size and XXH3-128 of a file. */
rfr_status rfi_file_hash(rfr_ctx *ctx, const char *path, int64_t *size, rfi_hash *hash);

/* The kind of `path`: 'f' a regular file, 'd' a folder, 'l' a link to a folder, '?' another kind, 0 no such path. If
 * the kind cannot be determined, the call fails. */
rfr_status rfi_path_kind(const char *path, char *kind);
/* Whether `path` is a dangling symbolic link; rfi_path_kind sets *kind to 0 for it. */
rfr_status rfi_path_dangles(const char *path, bool *dangles);

/* A journal is a file of lines with one writer at a time: the open descriptor is a lock. */
/* *taken is set, and the descriptor is -1, if another process has the file open. A file system without locks is
 * accepted. */
rfr_status rfi_journal_open(const char *path, int *fd, bool *taken);
/* Appends a complete line; after a failure no part of it is in the file, and the reason is returned. */
const char *rfi_journal_append(int fd, const char *line, size_t n);
void rfi_journal_close(int fd); /* accepts -1 */

/* Creates a folder and its missing parents, durably; an existing one is fine. */
rfr_status rfi_dir_create(const char *path);
/* Whether files can be created in a folder, or the folder itself in its nearest existing parent. */
rfr_status rfi_dir_check_writable(const char *path);
/* Free bytes of the file system of a folder, or of its nearest existing parent; INT64_MAX: unknown. */
rfr_status rfi_dir_space(const char *path, int64_t *bytes);
/* Makes the names in a folder durable. */
rfr_status rfi_dir_sync(const char *path);
/* Removes a file or a folder with its contents; links are removed, never followed. A missing path is no error. */
rfr_status rfi_tree_remove(rfr_ctx *ctx, const char *path);
/* The same, for cleaning up after an error: continues as far as it can and keeps the thread's last error. */
void rfi_tree_discard(const char *path);
/* Renames `from` to `to`. An existing folder at `to` and `from` exchange their names (*exchanged); if the file system
 * cannot do that, the old folder is renamed to FROM-old. */
rfr_status rfi_dir_replace(const char *from, const char *to, bool *exchanged);

/* A list of strings in the context's memory. */
typedef struct rfi_paths {
  rfr_ctx *ctx;
  char **items;
  int n, capacity;
} rfi_paths;
rfr_status rfi_paths_add(rfi_paths *paths, const char *path, size_t n);
/* Sorts by bytes and removes equal ones. */
void rfi_paths_sort(rfi_paths *paths);
void rfi_paths_deinit(rfi_paths *paths);

/* Names in a folder, sorted, without "." and "..". paths->ctx must be set. */
rfr_status rfi_dir_list(const char *path, rfi_paths *paths);

/* Whether `text` matches `pattern`: `*` any bytes, `?` one byte, `[a-z]` and `[!a-z]` a set, `\` makes the next byte
 * literal. Takes time len(pattern) * len(text) at most. */
bool rfi_match(const char *pattern, const char *text);
bool rfi_ends_in(const char *text, const char *end);

/* Adds the files that match `pattern`, relative to `root` (or absolute), as paths relative to `root`. `*`, `?` and sets
 * match within one name and do not match a leading dot. The name `**` matches any number of folders and follows no
 * links, so a walk ends. If the last name of a pattern is plain and names a folder, all files below it match. */
rfr_status rfi_glob(const char *root, const char *pattern, rfi_paths *paths);

/* root/name, or name itself if it is absolute. Free with rfi_free. */
rfr_status rfi_path_join(rfr_ctx *ctx, const char *root, const char *name, char **out);
/* The folder of `path`: "." for a plain name. Slashes at the end are ignored. Free with rfi_free. */
rfr_status rfi_path_parent(rfr_ctx *ctx, const char *path, char **out);
/* PATH.tmp-PID, the name under which `path` is written before it is renamed. Free with rfi_free. */
rfr_status rfi_path_temporary(rfr_ctx *ctx, const char *path, char **out);
/* Renames a finished file to `path`, durably. */
rfr_status rfi_file_rename(rfr_ctx *ctx, const char *from, const char *path);

#endif
