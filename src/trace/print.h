/* SPDX-License-Identifier: Apache-2.0
 *
 * Pieces of printed text that passes and reports use too.
 */
#ifndef RFI_PRINT_H
#define RFI_PRINT_H

#include "base/base.h"
#include "trace/trace.h"

const char *rfi_role_name(int role);
const char *rfi_phase_name(int phase);
const char *rfi_policy_name(int policy);
/* "1.5 MiB" */
rfr_status rfi_put_bytes(rfi_string *s, int64_t bytes);
/* Prints one op in the form for people, with newline; live < 0: without bytes. */
rfr_status rfi_put_op_line(rfi_string *s, const rfr_trace *t, int op, int64_t live);

#endif
