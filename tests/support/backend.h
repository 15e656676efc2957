/* SPDX-License-Identifier: Apache-2.0
 *
 * The backend that contexts find. A test can substitute another one, because cmake/tests.cmake links the library's
 * objects with --wrap=rfi_backend_find.
 */
#ifndef RFT_BACKEND_H
#define RFT_BACKEND_H

#include "backend/backend.h"

/* NULL: the library's choice. Set it while no thread compiles a program. */
extern const rfi_backend *rft_backend;

/* Substitutes a copy of the CPU's backend. Returns the copy, so that a test can change a capability. */
rfi_backend *rft_change_backend(void);

#endif
