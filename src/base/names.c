/* SPDX-License-Identifier: Apache-2.0
 *
 * Open addressing with linear probing; FNV-1a. A table that grows leaves its old block in
 * the arena: the sum of all blocks is at most twice the last one.
 */
#include "base/names.h"

#include <stdint.h>
#include <string.h>

static struct rfi_name *probe(struct rfi_name *slot, int capacity, const char *name) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char *c = name; *c; c++) h = (h ^ (unsigned char)*c) * 0x100000001b3u;
  uint64_t i = (h ^ h >> 32) & (uint64_t)(capacity - 1);
  while (slot[i].name && strcmp(slot[i].name, name) != 0) i = (i + 1) & (uint64_t)(capacity - 1);
  return &slot[i];
}

int rfi_names_find(const rfi_names *names, const char *name) {
  if (names->n == 0) return -1;
  const struct rfi_name *s = probe(names->slot, names->capacity, name);
  return s->name ? s->id : -1;
}

bool rfi_names_add(rfi_names *names, rfi_arena *arena, const char *name, int id) {
  if (2 * (names->n + 1) > names->capacity) {
    int capacity = names->capacity ? 2 * names->capacity : 64;
    struct rfi_name *slot = rfi_arena_alloc(arena, sizeof *slot * (size_t)capacity);
    if (!slot) return false;
    for (int i = 0; i < names->capacity; i++)
      if (names->slot[i].name) *probe(slot, capacity, names->slot[i].name) = names->slot[i];
    names->slot = slot;
    names->capacity = capacity;
  }
  *probe(names->slot, names->capacity, name) = (struct rfi_name){name, id};
  names->n++;
  return true;
}
