/* SPDX-License-Identifier: Apache-2.0
 *
 * Limits of attention on a GPU: a block keeps a row of a head in registers, and heads are a dimension of the grid.
 */
#ifndef RFI_ATTENTION_LIMITS_H
#define RFI_ATTENTION_LIMITS_H

enum { RFI_ATTENTION_MOST_D = 256, RFI_ATTENTION_MOST_HEADS = 65535 };

#endif
