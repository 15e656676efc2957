/* SPDX-License-Identifier: Apache-2.0
 *
 * grouped_sm90.cu once more under another name, with random waits before its barriers and copies.
 */
#define RFI_DELAYS
#define rfi_grouped_sm90 rfi_grouped_delayed
#define rfi_grouped_sm90_lacks rfi_grouped_delayed_lacks
#include "ops/grouped/grouped_sm90.cu"
