/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzzing runs with smaller limits on work: an input that reaches a limit then takes milliseconds instead of a second.
 */
#ifndef RFI_WORK_DIVISOR_H
#define RFI_WORK_DIVISOR_H

#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION /* the macro that libFuzzer and AFL++ document */
#define RFI_WORK_DIVISOR 256
#else
#define RFI_WORK_DIVISOR 1
#endif

#endif
