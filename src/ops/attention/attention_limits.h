/* SPDX-License-Identifier: Apache-2.0
 *
 * What attention takes on a GPU: a row of a head is in a block's registers, a head is one of a grid's.
 */
#ifndef RFI_ATTENTION_LIMITS_H
#define RFI_ATTENTION_LIMITS_H

enum { RFI_ATTENTION_MOST_D = 256, RFI_ATTENTION_MOST_HEADS = 65535 };

#endif
