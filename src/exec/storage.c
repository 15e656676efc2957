/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of names of shared memory (storage.h).
 */
#include "exec/storage.h"

#include <string.h>

#include "base/base.h"
#include "trace/live.h"

rfi_named *rfi_storage_find(const rfi_storage *s, const char *name) {
  const int i = name ? rfi_names_find(&s->names, name) : -1;
  return i < 0 ? NULL : &s->named[i];
}

rfr_status rfi_storage_add(rfi_storage *s, rfi_arena *a, const rfi_value *x, const char *kind, const char *unit,
                           rfi_named **fresh) {
  const rfi_named *have = rfi_storage_find(s, x->name);
  *fresh = NULL;
  if (have && (memcmp(&have->tensor.type, &x->type, sizeof x->type) != 0 || have->tensor.role != (rfr_role)x->role))
    return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" has another type or role in %s \"%s\" than in an earlier %s", x->name,
                    kind, unit, kind);
  if (have) return RFR_OK;
  if (!rfi_arena_grow(a, (void **)&s->named, &s->capacity, s->n + 1, sizeof *s->named)) return RFR_NO_MEMORY;
  const char *name = rfi_arena_strdup(a, x->name);
  if (!name || !rfi_names_add(&s->names, a, name, s->n)) return RFR_NO_MEMORY;
  *fresh = &s->named[s->n++];
  **fresh =
      (rfi_named){.tensor = {.name = name, .role = (rfr_role)x->role, .type = x->type, .bytes = rfi_bytes(&x->type)},
                  .region = RFI_REGION_PERSISTENT,
                  .offset = -1,
                  .writer = -1,
                  .parameter = -1,
                  .gradient = -1};
  return RFR_OK;
}

void rfi_storage_place(rfi_storage *s, rfi_layout *l, rfi_region region) {
  for (int i = 0; i < s->n; i++) {
    rfi_named *x = &s->named[i];
    if (x->region == region && !x->tensor.data)
      x->offset = rfi_layout_add(l, region, rfi_storage_bytes(&x->tensor.type));
  }
}

void rfi_storage_attach(rfi_storage *s, const rfi_layout *l, bool host) {
  for (int i = 0; i < s->n; i++) {
    rfi_named *x = &s->named[i];
    x->tensor.host = host || x->region == RFI_REGION_RING;
    if (x->offset >= 0) x->tensor.data = rfi_address(l, x->region, x->offset);
  }
}
