/* SPDX-License-Identifier: Apache-2.0
 *
 * Tests that run on a device too: `--device NAME` in front of the other arguments, or REFRAIN_DEVICE.
 */
#ifndef RFT_DEVICE_H
#define RFT_DEVICE_H

#include <stdbool.h>

/* Takes `--device NAME` at argv[1] out of the arguments and names it to every context from now on. False: a device is
 * named and is not there; standard error has why. */
bool rft_device_named(int *argc, char **argv);

#endif
