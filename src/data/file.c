/* SPDX-License-Identifier: Apache-2.0
 *
 * Files and folders; file.h has the invariants.
 *
 * The sys_ functions below are the only system calls. Each first consults the thread's fault, so that a test can fail
 * the k-th call for every k and check that the old data survived and nothing leaked. Reading and writing each have one
 * loop for short transfers and interrupts.
 */
#include "data/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

/* ---- the system, with faults ---- */

static _Thread_local rfi_io_fault *thread_fault; /* NULL outside tests */

void rfi_io_set_fault(rfi_io_fault *fault) { thread_fault = fault; }

static bool faulted(void) {
  rfi_io_fault *f = thread_fault;
  if (!f) return false;
  f->calls++;
  if (f->fail_at == 0 || f->calls < f->fail_at || (f->calls > f->fail_at && !f->sticky)) return false;
  errno = f->error;
  return true;
}

/* For reads and writes: also interrupts and shortens them. */
static bool transfer_faulted(size_t *n) {
  rfi_io_fault *f = thread_fault;
  if (!f) return false;
  if (f->interrupt) {
    f->interrupted = !f->interrupted;
    if (f->interrupted) {
      errno = EINTR;
      return true;
    }
  }
  if (f->max_transfer > 0 && *n > (size_t)f->max_transfer) *n = (size_t)f->max_transfer;
  return faulted();
}

/* Never returns descriptor 0, 1 or 2: if the host program has closed its standard streams, its output would be written
 * into our file. */
static int sys_open(const char *path, int flags, mode_t mode) {
  if (faulted()) return -1;
  int fd;
  do fd = open(path, flags | O_CLOEXEC, mode);
  while (fd < 0 && errno == EINTR);
  if (fd < 0 || fd > 2) return fd;
  const int above = fcntl(fd, F_DUPFD_CLOEXEC, 3), error = errno;
  close(fd);
  errno = error;
  return above;
}

static int sys_close(int fd) {
  int rc = close(fd); /* the descriptor is closed even if this fails */
  return faulted() ? -1 : rc;
}

static ssize_t sys_pread(int fd, void *data, size_t n, int64_t offset) {
  return transfer_faulted(&n) ? -1 : pread(fd, data, n, offset);
}
/* A write past the limit on file sizes (ulimit -f) sends SIGXFSZ to this thread, whose default action ends the process.
 * The library installs no handlers, so the thread blocks the signal during the write and then consumes it: only EFBIG
 * remains. A signal that was pending before stays pending. */
static ssize_t write_without_signal(int fd, const void *data, size_t n) {
  sigset_t signal, mask, pending;
  sigemptyset(&signal);
  sigaddset(&signal, SIGXFSZ);
  sigemptyset(&pending);
  pthread_sigmask(SIG_BLOCK, &signal, &mask);
  sigpending(&pending);
  const ssize_t wrote = write(fd, data, n);
  const int error = errno;
  if (wrote < 0 && error == EFBIG && !sigismember(&pending, SIGXFSZ))
    while (sigtimedwait(&signal, NULL, &(struct timespec){0}) < 0 && errno == EINTR) {}
  pthread_sigmask(SIG_SETMASK, &mask, NULL);
  errno = error;
  return wrote;
}

static ssize_t sys_write(int fd, const void *data, size_t n) {
  return transfer_faulted(&n) ? -1 : write_without_signal(fd, data, n);
}
/* Writes within the file, so no size limit is reached. */
static ssize_t sys_pwrite(int fd, const void *data, size_t n, int64_t offset) {
  return transfer_faulted(&n) ? -1 : pwrite(fd, data, n, offset);
}
static int sys_statvfs(const char *path, struct statvfs *st) {
  if (faulted()) return -1;
  const int rc = statvfs(path, st);
  if (thread_fault && thread_fault->space > 0 && rc == 0)
    st->f_bavail = (fsblkcnt_t)thread_fault->space, st->f_frsize = 1;
  return rc;
}
static int sys_access(const char *path, int mode) { return faulted() ? -1 : access(path, mode); }
static int sys_fstat(int fd, struct stat *st) { return faulted() ? -1 : fstat(fd, st); }
static int sys_stat(const char *path, struct stat *st) { return faulted() ? -1 : stat(path, st); }
static int sys_lstat(const char *path, struct stat *st) { return faulted() ? -1 : lstat(path, st); }
static int sys_fsync(int fd) { return faulted() ? -1 : fsync(fd); }
static int sys_rename(const char *from, const char *to) { return faulted() ? -1 : rename(from, to); }
static int sys_exchange(const char *a, const char *b) {
  return faulted() ? -1 : renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE);
}
static int sys_mkdir(const char *path) { return faulted() ? -1 : mkdir(path, 0777); }
static int sys_unlink(const char *path) { return faulted() ? -1 : unlink(path); }
static int sys_rmdir(const char *path) { return faulted() ? -1 : rmdir(path); }
static DIR *sys_opendir(const char *path) { return faulted() ? NULL : opendir(path); }
static struct dirent *sys_readdir(DIR *dir) { return faulted() ? NULL : readdir(dir); }
static int sys_lock(int fd) { return faulted() ? -1 : flock(fd, LOCK_EX | LOCK_NB); }

/* The message of an errno, independent of the locale and without a shared buffer. */
static const char *reason(int error) {
  const char *text = strerrordesc_np(error);
  return text ? text : "unknown error";
}

static rfr_status fail_errno(rfi_error slug, const char *path, const char *what) {
  int error = errno;
  return rfi_fail_at(slug, path, 0, "cannot %s: %s", what, reason(error));
}

/* ---- one open file ---- */

enum { HASH_CHUNK = 1 << 20 };

struct rfi_file {
  rfr_ctx *ctx;
  int fd;
  int64_t size;
  rfi_hasher *hasher; /* only when writing */
  char path[];
};

static rfr_status file_object(rfr_ctx *ctx, const char *path, rfi_file **out) {
  size_t n = strlen(path) + 1;
  RFI_TRY(RFI_ALLOC(ctx, sizeof **out + n, out));
  (*out)->ctx = ctx;
  (*out)->fd = -1;
  memcpy((*out)->path, path, n);
  return RFR_OK;
}

void rfi_file_close(rfi_file *file) {
  if (!file) return;
  if (file->fd >= 0) sys_close(file->fd);
  rfi_hasher_destroy(file->hasher);
  rfi_free(file->ctx, file);
}

int64_t rfi_file_size(const rfi_file *file) { return file->size; }
const char *rfi_file_path(const rfi_file *file) { return file->path; }

rfr_status rfi_file_open(rfr_ctx *ctx, const char *path, rfi_file **out) {
  rfr_status s;
  rfi_file *file = NULL;
  struct stat st;
  *out = NULL;
  RFI_GOTO(file_object(ctx, path, &file));
  /* O_NONBLOCK: a pipe without a writer must not hang the open; regular files ignore it. */
  file->fd = sys_open(path, O_RDONLY | O_NONBLOCK, 0);
  if (file->fd < 0 || sys_fstat(file->fd, &st) != 0) RFI_GOTO(fail_errno(RFI_E_FILE_OPEN, path, "open"));
  if (!S_ISREG(st.st_mode))
    RFI_GOTO(
        rfi_fail_at(RFI_E_FILE_OPEN, path, 0, "%s", S_ISDIR(st.st_mode) ? "is a folder" : "is not a regular file"));
  file->size = st.st_size;
  *out = file;
  return RFR_OK;
fail:
  rfi_file_close(file);
  return s;
}

rfr_status rfi_file_read_at(rfi_file *file, void *data, size_t n, int64_t offset) {
  if (offset < 0 || n > (uint64_t)INT64_MAX - (uint64_t)offset)
    return rfi_fail_at(RFI_E_FILE_READ, file->path, 0, "%zu bytes at %lld are not a valid range of a file", n,
                       (long long)offset);
  char *p = data;
  while (n > 0) {
    ssize_t got = sys_pread(file->fd, p, n, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(RFI_E_FILE_READ, file->path, "read");
    if (got == 0)
      return rfi_fail_at(RFI_E_FILE_READ, file->path, 0,
                         "ends at byte %lld, %zu bytes are missing (it had %lld when opened)", (long long)offset, n,
                         (long long)file->size);
    rfi_ctx_advance(file->ctx);
    p += got;
    offset += got;
    n -= (size_t)got;
  }
  return RFR_OK;
}

rfr_status rfi_file_create(rfr_ctx *ctx, const char *path, rfi_file **out) {
  rfr_status s;
  rfi_file *file = NULL;
  *out = NULL;
  RFI_GOTO(file_object(ctx, path, &file));
  RFI_GOTO(rfi_hasher_create(ctx, &file->hasher));
  file->fd = sys_open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
  if (file->fd < 0) RFI_GOTO(fail_errno(RFI_E_FILE_WRITE, path, "create"));
  *out = file;
  return RFR_OK;
fail:
  rfi_file_close(file);
  return s;
}

rfr_status rfi_file_append(rfi_file *file, const void *data, size_t n) {
  const char *p = data;
  rfi_hasher_add(file->hasher, data, n);
  while (n > 0) {
    ssize_t put = sys_write(file->fd, p, n);
    if (put < 0 && errno == EINTR) continue;
    if (put == 0) errno = EIO; /* impossible for a regular file */
    if (put <= 0) return fail_errno(RFI_E_FILE_WRITE, file->path, "write");
    p += put;
    file->size += put;
    n -= (size_t)put;
  }
  return RFR_OK;
}

rfr_status rfi_file_overwrite(rfi_file *file, const void *data, size_t n, int64_t offset) {
  const char *p = data;
  if (offset < 0 || offset > file->size || (int64_t)n > file->size - offset)
    return rfi_fail_at(RFI_E_INTERNAL, file->path, 0, "%zu bytes at %lld are not in the file", n, (long long)offset);
  while (n > 0) {
    const ssize_t put = sys_pwrite(file->fd, p, n, offset);
    if (put < 0 && errno == EINTR) continue;
    if (put == 0) errno = EIO;
    if (put <= 0) return fail_errno(RFI_E_FILE_WRITE, file->path, "write");
    p += put;
    offset += put;
    n -= (size_t)put;
  }
  return RFR_OK;
}

rfr_status rfi_file_finish(rfi_file *file, rfi_hash *hash) {
  rfr_status s = RFR_OK;
  if (hash) *hash = rfi_hasher_result(file->hasher);
  if (sys_fsync(file->fd) != 0) s = fail_errno(RFI_E_FILE_WRITE, file->path, "make durable");
  int fd = file->fd;
  file->fd = -1;
  if (sys_close(fd) != 0 && s == RFR_OK) s = fail_errno(RFI_E_FILE_WRITE, file->path, "close");
  rfi_file_close(file);
  return s;
}

/* ---- full files ---- */

rfr_status rfi_file_read(rfr_ctx *ctx, const char *path, char **data, size_t *n) {
  return rfi_file_read_limited(ctx, path, INT64_MAX - 1, data, n);
}

rfr_status rfi_file_read_limited(rfr_ctx *ctx, const char *path, int64_t limit, char **data, size_t *n) {
  rfr_status s;
  rfi_file *file = NULL;
  *data = NULL;
  *n = 0;
  RFI_GOTO(rfi_file_open(ctx, path, &file));
  if (file->size > limit)
    RFI_GOTO(rfi_fail_at(RFI_E_FILE_SIZE, path, 0, "has %lld bytes; at most %lld are read", (long long)file->size,
                         (long long)limit));
  RFI_GOTO(RFI_ALLOC(ctx, (size_t)file->size + 1, data));
  RFI_GOTO(rfi_file_read_at(file, *data, (size_t)file->size, 0));
  *n = (size_t)file->size;
  rfi_file_close(file);
  return RFR_OK;
fail:
  rfi_file_close(file);
  rfi_free(ctx, *data);
  *data = NULL;
  return s;
}

rfr_status rfi_file_hash(rfr_ctx *ctx, const char *path, int64_t *size, rfi_hash *hash) {
  rfr_status s;
  rfi_file *file = NULL;
  rfi_hasher *hasher = NULL;
  char *chunk = NULL;
  RFI_GOTO(rfi_file_open(ctx, path, &file));
  RFI_GOTO(rfi_hasher_create(ctx, &hasher));
  RFI_GOTO(RFI_ALLOC(ctx, HASH_CHUNK, &chunk));
  for (int64_t at = 0; at < file->size;) {
    size_t n = file->size - at < HASH_CHUNK ? (size_t)(file->size - at) : HASH_CHUNK;
    RFI_GOTO(rfi_file_read_at(file, chunk, n, at));
    rfi_hasher_add(hasher, chunk, n);
    at += (int64_t)n;
  }
  *size = file->size;
  *hash = rfi_hasher_result(hasher);
fail: /* reached on success too */
  rfi_free(ctx, chunk);
  rfi_hasher_destroy(hasher);
  rfi_file_close(file);
  return s;
}

/* The folder that contains `path`, in a buffer of the caller. */
static const char *parent_of(const char *path, char *buffer, size_t n) {
  const char *slash = strrchr(path, '/');
  if (!slash) return ".";
  size_t length = slash == path ? 1 : (size_t)(slash - path);
  if (length >= n) return path; /* too long for the system too */
  memcpy(buffer, path, length);
  buffer[length] = 0;
  return buffer;
}

rfr_status rfi_file_write(rfr_ctx *ctx, const char *path, const void *data, size_t n) {
  rfi_file *file;
  struct stat st;
  char temporary[PATH_MAX + 48], folder[PATH_MAX];
  if (strlen(path) >= PATH_MAX) {
    errno = ENAMETOOLONG;
    return fail_errno(RFI_E_FILE_WRITE, path, "create");
  }
  /* A file left by a dead process that had our process id is not an error: use the next free name. */
  for (int attempt = 0; attempt < 100; attempt++) {
    snprintf(temporary, sizeof temporary, "%s.tmp-%ld-%d", path, (long)getpid(), attempt);
    if (lstat(temporary, &st) != 0) break; /* only a hint: creating the file decides */
  }
  RFI_TRY(rfi_file_create(ctx, temporary, &file));
  rfr_status s = rfi_file_append(file, data, n);
  if (s != RFR_OK) rfi_file_close(file);
  else s = rfi_file_finish(file, NULL);
  if (s == RFR_OK && sys_rename(temporary, path) != 0) s = fail_errno(RFI_E_FILE_WRITE, path, "replace");
  if (s != RFR_OK) {
    unlink(temporary); /* not sys_unlink, because the first failure must be reported */
    return s;
  }
  return rfi_dir_sync(parent_of(path, folder, sizeof folder));
}

rfr_status rfi_path_kind(const char *path, char *kind) {
  struct stat st, link;
  *kind = 0;
  if (sys_stat(path, &st) != 0) {
    if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) return RFR_OK;
    return fail_errno(RFI_E_FILE_OPEN, path, "see what it is");
  }
  *kind = S_ISREG(st.st_mode) ? 'f' : S_ISDIR(st.st_mode) ? 'd' : '?';
  if (*kind != 'd') return RFR_OK;
  if (sys_lstat(path, &link) != 0) return fail_errno(RFI_E_FILE_OPEN, path, "see what it is");
  if (S_ISLNK(link.st_mode)) *kind = 'l';
  return RFR_OK;
}

rfr_status rfi_path_dangles(const char *path, bool *dangles) {
  struct stat link;
  char kind;
  *dangles = false;
  RFI_TRY(rfi_path_kind(path, &kind));
  if (kind) return RFR_OK;
  if (sys_lstat(path, &link) == 0) *dangles = S_ISLNK(link.st_mode);
  else if (errno != ENOENT && errno != ENOTDIR) return fail_errno(RFI_E_FILE_OPEN, path, "see what it is");
  return RFR_OK;
}

/* ---- journals ---- */

rfr_status rfi_journal_open(const char *path, int *fd, bool *taken) {
  struct stat st;
  *taken = false;
  /* O_NONBLOCK: opening a pipe without a reader must not wait. O_NOFOLLOW: a link could lead to any file. */
  *fd = sys_open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK, 0666);
  if (*fd < 0 && (errno == ELOOP || errno == ENXIO || errno == EISDIR))
    return rfi_fail_at(RFI_E_FILE_WRITE, path, 0, "is not a regular file, but %s",
                       errno == ELOOP    ? "a symbolic link"
                       : errno == EISDIR ? "a folder"
                                         : "a pipe, socket or device");
  if (*fd < 0) return fail_errno(RFI_E_FILE_WRITE, path, "open");
  rfr_status s = RFR_OK;
  if (sys_fstat(*fd, &st) != 0) s = fail_errno(RFI_E_FILE_WRITE, path, "open");
  else if (!S_ISREG(st.st_mode))
    s = rfi_fail_at(RFI_E_FILE_WRITE, path, 0, "is not a regular file, but a pipe, socket or device");
  if (s != RFR_OK) {
    rfi_journal_close(*fd);
    *fd = -1;
    return s;
  }
  *taken = sys_lock(*fd) != 0 && errno == EWOULDBLOCK;
  if (!*taken) return RFR_OK;
  rfi_journal_close(*fd);
  *fd = -1;
  return RFR_OK;
}

const char *rfi_journal_append(int fd, const char *line, size_t n) {
  for (size_t done = 0; done < n;) {
    const ssize_t wrote = sys_write(fd, line + done, n - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote > 0) {
      done += (size_t)wrote;
      continue;
    }
    const char *why = reason(wrote < 0 ? errno : EIO);
    struct stat st;
    /* The lock makes us the only writer, so the last bytes are ours. If removing them fails too, a part of the line
     * remains. */
    const bool clean = done == 0 || (fstat(fd, &st) == 0 && ftruncate(fd, st.st_size - (off_t)done) == 0);
    return clean ? why : "its last line is cut";
  }
  return NULL;
}

void rfi_journal_close(int fd) {
  if (fd >= 0) sys_close(fd);
}

/* ---- folders ---- */

rfr_status rfi_dir_create(const char *path) {
  char part[PATH_MAX], parent[PATH_MAX];
  size_t n = strlen(path);
  struct stat st;
  if (n == 0) return rfi_fail(RFI_E_FILE_WRITE, "cannot create a folder with an empty name");
  if (n >= sizeof part) {
    errno = ENAMETOOLONG;
    return fail_errno(RFI_E_FILE_WRITE, path, "create the folder");
  }
  memcpy(part, path, n + 1);
  for (size_t i = 1; i <= n; i++) {
    if (part[i] != '/' && part[i] != 0) continue;
    char kept = part[i];
    part[i] = 0;
    if (sys_mkdir(part) == 0) RFI_TRY(rfi_dir_sync(parent_of(part, parent, sizeof parent)));
    else if (errno != EEXIST) return fail_errno(RFI_E_FILE_WRITE, part, "create the folder");
    part[i] = kept;
  }
  if (sys_stat(path, &st) != 0) return fail_errno(RFI_E_FILE_WRITE, path, "create the folder");
  if (!S_ISDIR(st.st_mode)) return rfi_fail_at(RFI_E_FILE_WRITE, path, 0, "is a file, a folder is needed here");
  return RFR_OK;
}

/* The path itself, or the nearest existing folder above it, in a buffer of PATH_MAX bytes. */
static rfr_status nearest_folder(const char *path, char *folder, struct stat *st) {
  if (strlen(path) >= PATH_MAX) {
    errno = ENAMETOOLONG;
    return fail_errno(RFI_E_FILE_WRITE, path, "create the folder");
  }
  memcpy(folder, path, strlen(path) + 1);
  while (sys_stat(*folder ? folder : ".", st) != 0) {
    if (errno != ENOENT) return fail_errno(RFI_E_FILE_WRITE, path, "create the folder");
    char *slash = strrchr(folder, '/');
    if (slash == folder) folder[1] = 0;
    else if (slash) *slash = 0;
    else folder[0] = 0;
  }
  if (!*folder) memcpy(folder, ".", 2);
  return RFR_OK;
}

rfr_status rfi_dir_check_writable(const char *path) {
  char folder[PATH_MAX];
  struct stat st;
  RFI_TRY(nearest_folder(path, folder, &st));
  if (!S_ISDIR(st.st_mode)) return rfi_fail_at(RFI_E_FILE_WRITE, folder, 0, "is a file, a folder is needed here");
  return sys_access(folder, W_OK | X_OK) == 0 ? RFR_OK : fail_errno(RFI_E_FILE_WRITE, folder, "write in the folder");
}

rfr_status rfi_dir_space(const char *path, int64_t *bytes) {
  char folder[PATH_MAX];
  struct stat st;
  struct statvfs space;
  *bytes = INT64_MAX;
  RFI_TRY(nearest_folder(path, folder, &st));
  if (sys_statvfs(folder, &space) != 0) return RFR_OK; /* unknown */
  if (__builtin_mul_overflow((int64_t)space.f_bavail, (int64_t)space.f_frsize, bytes)) *bytes = INT64_MAX;
  return RFR_OK;
}

rfr_status rfi_dir_sync(const char *path) {
  int fd = sys_open(path, O_RDONLY | O_DIRECTORY, 0);
  if (fd < 0) return fail_errno(RFI_E_FILE_WRITE, path, "open the folder");
  int rc = sys_fsync(fd), error = errno;
  close(fd);
  errno = error;
  /* EINVAL: the file system does not sync folders */
  return rc != 0 && error != EINVAL ? fail_errno(RFI_E_FILE_WRITE, path, "make the folder durable") : RFR_OK;
}

rfr_status rfi_dir_list(const char *path, rfi_paths *paths) {
  DIR *dir = sys_opendir(path);
  if (!dir) return fail_errno(RFI_E_FILE_OPEN, path, "list the folder");
  rfr_status s = RFR_OK;
  while (s == RFR_OK) {
    errno = 0;
    struct dirent *entry = sys_readdir(dir);
    if (!entry) {
      if (errno) s = fail_errno(RFI_E_FILE_READ, path, "list the folder");
      break;
    }
    if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
    s = rfi_paths_add(paths, entry->d_name, strlen(entry->d_name));
  }
  closedir(dir);
  rfi_paths_sort(paths);
  return s;
}

rfr_status rfi_tree_remove(rfr_ctx *ctx, const char *path) {
  struct stat st;
  if (sys_lstat(path, &st) != 0) return errno == ENOENT ? RFR_OK : fail_errno(RFI_E_FILE_WRITE, path, "remove");
  if (!S_ISDIR(st.st_mode)) return sys_unlink(path) != 0 ? fail_errno(RFI_E_FILE_WRITE, path, "remove") : RFR_OK;
  rfi_paths names = {.ctx = ctx};
  rfr_status s = rfi_dir_list(path, &names);
  for (int i = 0; i < names.n && s == RFR_OK; i++) {
    char *inner;
    s = rfi_path_join(ctx, path, names.items[i], &inner);
    if (s == RFR_OK) s = rfi_tree_remove(ctx, inner);
    rfi_free(ctx, inner);
  }
  rfi_paths_deinit(&names);
  if (s == RFR_OK && sys_rmdir(path) != 0) s = fail_errno(RFI_E_FILE_WRITE, path, "remove");
  return s;
}

static int discard_one(const char *path, const struct stat *st, int kind, struct FTW *at) {
  (void)st, (void)kind, (void)at;
  remove(path);
  return 0;
}

void rfi_tree_discard(const char *path) { nftw(path, discard_one, 16, FTW_DEPTH | FTW_PHYS); }

rfr_status rfi_dir_replace(const char *from, const char *to, bool *exchanged) {
  struct stat st;
  *exchanged = false;
  if (sys_lstat(to, &st) != 0) {
    if (errno != ENOENT) return fail_errno(RFI_E_FILE_WRITE, to, "replace");
    return sys_rename(from, to) != 0 ? fail_errno(RFI_E_FILE_WRITE, to, "rename") : RFR_OK;
  }
  /* One call, so `to` always exists. */
  if (sys_exchange(from, to) == 0) {
    *exchanged = true;
    return RFR_OK;
  }
  if (errno != EINVAL && errno != ENOSYS) return fail_errno(RFI_E_FILE_WRITE, to, "replace");
  /* The file system cannot exchange names: rename the old folder to a name that every reader ignores, then the new
   * one. */
  char old[PATH_MAX];
  if ((size_t)snprintf(old, sizeof old, "%s-old", from) >= sizeof old) errno = ENAMETOOLONG;
  else if (sys_rename(to, old) == 0 && sys_rename(from, to) == 0) return RFR_OK;
  return fail_errno(RFI_E_FILE_WRITE, to, "replace");
}

/* ---- lists of paths ---- */

rfr_status rfi_paths_add(rfi_paths *paths, const char *path, size_t n) {
  if (paths->n == paths->capacity) {
    if (paths->capacity > INT_MAX / 2) return rfi_fail(RFI_E_OVERFLOW, "too many files");
    int capacity = paths->capacity ? 2 * paths->capacity : 16;
    char **items;
    RFI_TRY(RFI_ALLOC(paths->ctx, (size_t)capacity * sizeof *items, &items));
    if (paths->n) memcpy(items, paths->items, (size_t)paths->n * sizeof *items);
    rfi_free(paths->ctx, paths->items);
    paths->items = items;
    paths->capacity = capacity;
  }
  char *copy;
  RFI_TRY(RFI_ALLOC(paths->ctx, n + 1, &copy));
  memcpy(copy, path, n);
  paths->items[paths->n++] = copy;
  return RFR_OK;
}

static int compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

void rfi_paths_sort(rfi_paths *paths) {
  if (paths->n == 0) return;
  qsort(paths->items, (size_t)paths->n, sizeof *paths->items, compare_paths);
  int kept = 1;
  for (int i = 1; i < paths->n; i++) {
    if (strcmp(paths->items[i], paths->items[kept - 1]) == 0) rfi_free(paths->ctx, paths->items[i]);
    else paths->items[kept++] = paths->items[i];
  }
  paths->n = kept;
}

void rfi_paths_deinit(rfi_paths *paths) {
  for (int i = 0; i < paths->n; i++) rfi_free(paths->ctx, paths->items[i]);
  if (paths->items) rfi_free(paths->ctx, paths->items);
  *paths = (rfi_paths){.ctx = paths->ctx};
}

rfr_status rfi_path_join(rfr_ctx *ctx, const char *root, const char *name, char **out) {
  size_t a = strlen(root), b = strlen(name);
  *out = NULL;
  if (name[0] == '/' || a == 0) a = 0;
  RFI_TRY(RFI_ALLOC(ctx, a + b + 2, out));
  memcpy(*out, root, a);
  if (a > 0 && root[a - 1] != '/') (*out)[a++] = '/';
  memcpy(*out + a, name, b + 1);
  return RFR_OK;
}

/* Bytes of the path without slashes at its end. */
static size_t length_of(const char *path) {
  size_t n = strlen(path);
  while (n > 1 && path[n - 1] == '/') n--;
  return n;
}

rfr_status rfi_path_parent(rfr_ctx *ctx, const char *path, char **out) {
  size_t n = length_of(path);
  while (n > 0 && path[n - 1] != '/') n--;
  while (n > 1 && path[n - 1] == '/') n--;
  RFI_TRY(RFI_ALLOC(ctx, n + 2, out));
  memcpy(*out, n ? path : ".", n ? n : 1);
  return RFR_OK;
}

rfr_status rfi_path_temporary(rfr_ctx *ctx, const char *path, char **out) {
  rfi_string s = {.ctx = ctx};
  *out = NULL;
  RFI_TRY(rfi_string_printf(&s, "%.*s.tmp-%ld", (int)length_of(path), path, (long)getpid()));
  *out = s.data;
  return RFR_OK;
}

rfr_status rfi_file_rename(rfr_ctx *ctx, const char *from, const char *path) {
  char *parent;
  RFI_TRY(rfi_path_parent(ctx, path, &parent)); /* may fail, so it precedes the rename */
  rfr_status s = sys_rename(from, path) != 0 ? fail_errno(RFI_E_FILE_WRITE, path, "rename") : RFR_OK;
  if (s == RFR_OK) s = rfi_dir_sync(parent);
  rfi_free(ctx, parent);
  return s;
}
