/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiles a reference a second time, as the plain low-precision computation. Included before each X_ref.c of that
 * build, it turns `double` into `float`, so that rft_plain_NAME runs the same loops with f32 storage and f32 sums. The
 * headers come first, so that their declarations do not change. Library functions still take and return double, which
 * makes the computation slightly more accurate and the tolerance slightly stricter.
 */
#ifndef RFT_OP_PLAIN_H
#define RFT_OP_PLAIN_H

#define RFT_PLAIN

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "support/op_case.h"

#define double float

#endif
