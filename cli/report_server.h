/* SPDX-License-Identifier: Apache-2.0
 *
 * The page of a report over HTTP, for browsers of this machine.
 */
#ifndef REPORT_SERVER_H
#define REPORT_SERVER_H

#include "cli.h"

/* Prints the address on standard output and serves until SIGINT or SIGTERM. Port 0: any free port. */
rfr_status report_serve(rfr_report *r, int64_t port);

#endif
