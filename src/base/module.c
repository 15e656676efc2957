/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules: libraries that are loaded when they are first used. They stay loaded, because threads of theirs may outlive
 * a dlclose.
 */
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>

#include "base/base.h"

rfr_status rfi_module_open(const rfr_ctx *ctx, const char *file, const char *name, const char *hint, char *path,
                           void **out) {
  const int n = snprintf(path, PATH_MAX, "%s/%s", rfi_ctx_module_path(ctx), file);
  *out = NULL;
  if (!*rfi_ctx_module_path(ctx))
    return rfi_fail(RFI_E_BACKEND_MISSING, "the folder of the library is not known, and so not that of its modules");
  if (n < 0 || n >= PATH_MAX) return rfi_fail(RFI_E_BACKEND_MISSING, "the module path is too long");
  *out = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (*out) return RFR_OK;
  const char *why = dlerror();
  return rfi_fail(RFI_E_BACKEND_MISSING, "the %s is not there: %s%s", name, why ? why : path, hint);
}
