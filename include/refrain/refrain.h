/* SPDX-License-Identifier: Apache-2.0
 *
 * Includes all public headers. Each of them can also be included alone.
 */
#ifndef REFRAIN_REFRAIN_H
#define REFRAIN_REFRAIN_H

#include "refrain/chat.h"
#include "refrain/ctx.h"
#include "refrain/dist.h"
#include "refrain/dtype.h"
#include "refrain/graphs.h"
#include "refrain/hooks.h"
#include "refrain/model.h"
#include "refrain/nn.h"
#include "refrain/op.h"
#include "refrain/ops.h"
#include "refrain/program.h"
#include "refrain/recipe.h"
#include "refrain/report.h"
#include "refrain/schedule.h"
#include "refrain/span.h"
#include "refrain/status.h"
#include "refrain/sweep.h"
#include "refrain/tensor.h"
#include "refrain/text.h"
#include "refrain/trace.h"
#include "refrain/train.h"

#endif
