/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain inspect: describes the contents of a model's folder or file.
 */
#include "cli.h"
#include "refrain/model.h"

static void print(const char *text, size_t n, void *user) { fwrite(text, 1, n, user); }

rfr_status cli_inspect(cli *c) { return rfr_inspect(c->ctx, c->operand, c->json, print, stdout); }
