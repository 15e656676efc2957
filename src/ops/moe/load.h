/* SPDX-License-Identifier: Apache-2.0
 *
 * Limit of moe_load, for the rule and the kernels.
 */
#ifndef RFI_MOE_LOAD_H
#define RFI_MOE_LOAD_H

enum { RFI_MAX_LOAD_LAYERS = 4096 }; /* a block on a GPU has a word of shared memory per expert */

#endif
