/* SPDX-License-Identifier: Apache-2.0
 *
 * Tuning: each choice is measured once. The backend lists the choices and measures; this file stores the results by
 * name. A compile with stored choices measures nothing: it makes the same choices, or fails and names the one that is
 * not possible.
 */
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"

static rfr_status find(const rfr_compile_options *o, const char *name, const char **value) {
  *value = NULL;
  if (!o->choices) return RFR_OK;
  for (int i = 0; i < o->n_choices; i++)
    if (strcmp(o->choices[i].name, name) == 0) *value = o->choices[i].value;
  if (*value) return RFR_OK;
  return rfi_fail(RFI_E_TUNE_STORED, "no choice is stored for \"%s\"", name);
}

static rfr_status add(rfr_programs *p, const char *name, const char *value) {
  const rfr_choice copy = {rfi_arena_strdup(p->m.strings, name), rfi_arena_strdup(p->m.strings, value)};
  if (!copy.name || !copy.value ||
      !rfi_arena_grow(p->m.strings, (void **)&p->choice, &p->cap_choices, p->n_choices + 1, sizeof *p->choice))
    return RFR_NO_MEMORY;
  p->choice[p->n_choices++] = copy;
  return RFR_OK;
}

rfr_status rfi_tune(rfr_programs *p) {
  const char *name, *stored;
  char value[RFI_CHOICE];
  if (p->options.n_choices > 0 && !p->m.backend->choice(p->m.device, 0))
    return rfi_fail(RFI_E_TUNE_STORED, "%d choices are stored, but device %s has no choices", p->options.n_choices,
                    p->m.backend->name);
  for (int i = 0; (name = p->m.backend->choice(p->m.device, i)); i++) {
    RFI_TRY(find(&p->options, name, &stored));
    RFI_TRY(p->m.backend->choose(p->m.device, i, stored, value));
    if (stored && strcmp(value, stored) != 0)
      return rfi_fail(RFI_E_TUNE_STORED, "the choice stored for \"%s\" is \"%.200s\", here it is \"%s\"", name, stored,
                      *value ? value : "unavailable");
    RFI_TRY(add(p, name, value));
  }
  return RFR_OK;
}

rfr_status rfr_programs_choice_at(const rfr_programs *p, int i, rfr_choice *out) {
  RFI_TRY(rfi_check_handle(out, "rfr_choice"));
  *out = (rfr_choice){"", ""};
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  if (i < 0 || i >= p->n_choices) return rfi_fail(RFI_E_ARGUMENT, "choice %d of %d", i, p->n_choices);
  *out = p->choice[i];
  return RFR_OK;
}
