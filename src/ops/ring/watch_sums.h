/* SPDX-License-Identifier: Apache-2.0
 *
 * A row of the watch ring: sums over the elements of a value, on the CPU and on a GPU.
 */
#ifndef RFI_WATCH_SUMS_H
#define RFI_WATCH_SUMS_H

/* COUNT: all elements. SUM, SQUARES and MAX: over the finite ones. LEAST: the smallest magnitude of those that are
 * neither 0 nor infinite, 0 if there are none. */
enum {
  RFI_WATCH_COUNT,
  RFI_WATCH_SUM,
  RFI_WATCH_SQUARES,
  RFI_WATCH_MAX,
  RFI_WATCH_ZEROS,
  RFI_WATCH_NANS,
  RFI_WATCH_INFS,
  RFI_WATCH_LEAST,
  RFI_WATCH_SUMS
};

#endif
