/* SPDX-License-Identifier: Apache-2.0
 *
 * Records when each kernel and copy ran on each GPU, inside captured graphs too. CUDA's driver loads this library into
 * a program:
 *
 *   CUDA_INJECTION64_PATH=$PWD/libtimeline.so TIMELINE=FILE PROGRAM ...
 *   bench/timeline.py FILE
 *
 * A line of FILE: kernel or copy, device, stream, start and end in ns, the graph's node (0: none), bytes of a copy,
 * name.
 */
#include <cupti.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *file;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void write_line(const char *kind, unsigned device, unsigned stream, uint64_t start, uint64_t end, uint64_t node,
                       uint64_t bytes, const char *name) {
  fprintf(file, "%s,%u,%u,%llu,%llu,%llu,%llu,%s\n", kind, device, stream, (unsigned long long)start,
          (unsigned long long)end, (unsigned long long)node, (unsigned long long)bytes, name ? name : "");
}

static void write_record(const CUpti_Activity *r) {
  if (r->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
    const CUpti_ActivityKernel10 *k = (const void *)r;
    write_line("kernel", k->deviceId, k->streamId, k->start, k->end, k->graphNodeId, 0, k->name);
  } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    const CUpti_ActivityMemcpy6 *k = (const void *)r;
    write_line("copy", k->deviceId, k->streamId, k->start, k->end, k->graphNodeId, k->bytes, "");
  } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) {
    const CUpti_ActivityMemcpyPtoP4 *k = (const void *)r;
    write_line("copy", k->deviceId, k->streamId, k->start, k->end, k->graphNodeId, k->bytes, "to another GPU");
  }
}

static void CUPTIAPI get_buffer(uint8_t **buffer, size_t *size, size_t *most) {
  *size = 8 << 20, *most = 0;
  if (posix_memalign((void **)buffer, 64, *size) != 0) *buffer = NULL, *size = 0;
}

static void CUPTIAPI take_buffer(CUcontext ctx, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  CUpti_Activity *r = NULL;
  (void)ctx, (void)stream, (void)size;
  pthread_mutex_lock(&mutex);
  while (cuptiActivityGetNextRecord(buffer, valid, &r) == CUPTI_SUCCESS) write_record(r);
  pthread_mutex_unlock(&mutex);
  free(buffer);
}

static void finish(void) {
  cuptiActivityFlushAll(1);
  if (fclose(file) != 0) perror("timeline");
}

/* The driver calls this when it is initialized. */
int InitializeInjection(void) {
  static const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                             CUPTI_ACTIVITY_KIND_MEMCPY2};
  const char *path = getenv("TIMELINE");
  file = fopen(path ? path : "timeline.csv", "w");
  if (!file) return perror("timeline"), 1;
  CUptiResult e = cuptiActivityRegisterCallbacks(get_buffer, take_buffer);
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds && e == CUPTI_SUCCESS; i++) e = cuptiActivityEnable(kinds[i]);
  if (e != CUPTI_SUCCESS) fprintf(stderr, "timeline: CUPTI error %d: nothing is recorded\n", (int)e);
  atexit(finish);
  return 1;
}
