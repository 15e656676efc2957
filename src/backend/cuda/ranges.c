/* SPDX-License-Identifier: Apache-2.0
 *
 * NVTX consists of headers: they load the library that a profiler names (NVTX_INJECTION64_PATH) at the first call;
 * without one every call tests a pointer. The domain is then NULL, and no name is formatted.
 */
#include "backend/cuda/ranges.h"

#include <stdio.h>
#include <string.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

bool rfi_ranges_built(void) { return true; }

void rfi_ranges_open(rfi_ranges *r) { *r = (rfi_ranges){.domain = nvtxDomainCreateA("refrain")}; }

void rfi_ranges_close(rfi_ranges *r) {
  if (r->domain) nvtxDomainDestroy(r->domain);
  *r = (rfi_ranges){0};
}

static void push(const rfi_ranges *r, const char *text) {
  nvtxEventAttributes_t a;
  memset(&a, 0, sizeof a);
  a.version = NVTX_VERSION;
  a.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  a.messageType = NVTX_MESSAGE_TYPE_ASCII;
  a.message.ascii = text;
  nvtxDomainRangePushEx(r->domain, &a);
}

static void pop(const rfi_ranges *r) { nvtxDomainRangePop(r->domain); }
#else
bool rfi_ranges_built(void) { return false; }
void rfi_ranges_open(rfi_ranges *r) { *r = (rfi_ranges){0}; }
void rfi_ranges_close(rfi_ranges *r) { *r = (rfi_ranges){0}; }
static void push(const rfi_ranges *r, const char *text) { (void)r, (void)text; }
static void pop(const rfi_ranges *r) { (void)r; }
#endif

static bool is_same_layer(const rfi_opr *a, const rfi_opr *b) {
  return a->phase == b->phase && strcmp(a->scope, b->scope) == 0;
}

static void begin_layer(rfi_ranges *r, const rfi_opr *op) {
  static const char *const phases[] = {
#define X(e, name) name,
      RFR_PHASES(X)
#undef X
  };
  char text[256];
  snprintf(text, sizeof text, "%s%s%s", phases[op->phase], op->scope[0] ? " " : "", op->scope);
  push(r, text);
  r->layer = op;
}

void rfi_ranges_begin(rfi_ranges *r, const rfi_opr *op) {
  if (!r->domain) return;
  if (r->layer && !is_same_layer(r->layer, op)) rfi_ranges_end_layer(r);
  if (!r->layer) begin_layer(r, op);
  push(r, op->def->name);
}

void rfi_ranges_begin_named(rfi_ranges *r, const char *name) {
  if (r->domain) push(r, name);
}

void rfi_ranges_end(rfi_ranges *r) {
  if (r->domain) pop(r);
}

void rfi_ranges_end_layer(rfi_ranges *r) {
  if (r->layer) pop(r);
  r->layer = NULL;
}
