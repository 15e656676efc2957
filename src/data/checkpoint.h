/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints: folders RUN/step-000123 that are complete or absent.
 *
 * A checkpoint is written as RUN/step-000123.tmp-PID; MANIFEST.json comes last and holds
 * the size and XXH3-128 of every other file. Everything is made durable, then one rename makes it visible. So a folder
 * without the suffix was complete when it appeared, and damage that came later is found by its hashes. An older
 * checkpoint is deleted only by rfi_checkpoint_retain, after a newer one is durable: a full disk costs the new
 * checkpoint, never the last good one.
 *
 *   rfi_checkpoint_writer *w;
 *   RFI_TRY(rfi_checkpoint_begin(ctx, NULL, "runs/a", 123, &w));
 *   s = rfi_checkpoint_add(w, "state.json", text, n);
 *   s = rfi_checkpoint_finish(w, s);
 *
 * One process writes into a run's folder at a time, with one writer open at a time. Over several ranks all of them
 * begin and finish a checkpoint together, and each adds its own files, under different names. Rank 0 creates the
 * folder; when every rank has made its files durable, it writes the manifest and renames the folder. If one rank fails,
 * the checkpoint is discarded and all ranks return its error. All ranks need the same file system.
 */
#ifndef RFI_CHECKPOINT_H
#define RFI_CHECKPOINT_H

#include "data/file.h"
#include "refrain/dist.h"

typedef struct rfi_checkpoint_writer rfi_checkpoint_writer;

/* Creates the run's folder if needed, and the temporary folder in it. `comm` NULL: one rank. */
rfr_status rfi_checkpoint_begin(rfr_ctx *ctx, rfr_comm *comm, const char *run, int64_t step,
                                rfi_checkpoint_writer **out);
/* The same for a folder at a given path, without manifest; it must not exist. */
rfr_status rfi_checkpoint_begin_folder(rfr_ctx *ctx, const char *folder, rfi_checkpoint_writer **out);
/* Starts a file and finishes the previous one. The writer owns it: the caller may only append to it. */
rfr_status rfi_checkpoint_file(rfi_checkpoint_writer *writer, const char *name, rfi_file **file);
/* Adds a file with its full contents. */
rfr_status rfi_checkpoint_add(rfi_checkpoint_writer *writer, const char *name, const void *data, size_t n);
/* `s`: the status of this rank so far. If all ranks have RFR_OK: writes the manifest, fsync, rename, fsync; replaces a
 * checkpoint of the same step. Destroys the writer; on an error removes the temporary folder. Returns the same status
 * on all ranks, except dist.peer. */
rfr_status rfi_checkpoint_finish(rfi_checkpoint_writer *writer, rfr_status s);

typedef struct rfi_checkpoint {
  rfr_ctx *ctx;
  char *folder;
  int64_t step;
  rfi_paths files; /* sorted, without MANIFEST.json */
} rfi_checkpoint;

/* Opens a checkpoint's folder after comparing every file with the manifest. A file that loading reads (config.json,
 * adapter_config.json, state.json, *.safetensors and their index) must have an entry; other files without one are
 * ignored. Error "checkpoint" names the file that is missing, damaged or not listed.
 *
 * Over several ranks all of them call it, here and below: each hashes its share of the files, and all have the result
 * of all. A rank that has failed before calls rfi_comm_agree with its error instead. `comm` NULL: one rank. */
rfr_status rfi_checkpoint_open(rfr_ctx *ctx, rfr_comm *comm, const char *folder, rfi_checkpoint **out);
void rfi_checkpoint_close(rfi_checkpoint *checkpoint); /* accepts NULL */
/* folder/name of a file of the checkpoint; free with rfi_free. */
rfr_status rfi_checkpoint_path(const rfi_checkpoint *checkpoint, const char *name, char **out);

/* The newest complete checkpoint of a run. Damaged newer ones are skipped, each with a warning in the context's log (of
 * rank 0), and counted in *skipped (may be NULL). If the run has no checkpoint, *out is NULL with RFR_OK; if it has
 * only damaged ones, that is an error. Error dist.run: ranks see different checkpoints. */
rfr_status rfi_checkpoint_latest(rfr_ctx *ctx, rfr_comm *comm, const char *run, rfi_checkpoint **out, int *skipped);
/* Deletes the oldest complete checkpoints beyond the newest `keep` (>= 1), and temporary folders left by earlier runs.
 * Damaged ones are kept for the user to inspect. */
rfr_status rfi_checkpoint_retain(rfr_ctx *ctx, const char *run, int keep);
/* Unfinished checkpoints of killed processes; those of processes that still run on this machine do not count. */
typedef struct rfi_leftovers {
  int n;
  int64_t bytes;
  char first[64]; /* the first name; "": none */
} rfi_leftovers;
/* Counts them, and removes them if `remove`; the caller must have locked the run. */
rfr_status rfi_checkpoint_leftovers(rfr_ctx *ctx, const char *run, bool remove, rfi_leftovers *out);

#endif
