#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints how much communication is hidden in each replayed step of a file by bench/timeline.c: timeline.py FILE

A step ends with the kernel step_end. Communication is copies, NCCL's kernels and the sums of reduce-scatters. It is
hidden while any other kernel runs on the same GPU. NCCL's kernels also wait for the other rank, so the last two columns
leave them out.
"""
import sys


def union(intervals):
    out = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out


def length(intervals):
    return sum(end - start for start, end in intervals)


def overlap(a, b):
    i = j = total = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def steps(rows):
    """Lists of rows (kind, start, end, node, name) of one GPU."""
    ends = [end for _, _, end, _, name in rows if "step_end" in name]
    after = 0
    for end in ends:
        yield [row for row in rows if after < row[1] <= end and row[3]]
        after = end


def main():
    if len(sys.argv) != 2:
        print("usage: timeline.py FILE", file=sys.stderr)
        return 2
    devices = {}
    for line in open(sys.argv[1], encoding="utf-8"):
        kind, device, _, start, end, node, _, name = line.rstrip("\n").split(",", 7)
        devices.setdefault(device, []).append((kind, int(start), int(end), int(node), name))
    print("GPU  step       ms  communication ms  hidden  without NCCL's kernels ms  hidden")
    for device, rows in sorted(devices.items()):
        rows.sort(key=lambda row: row[1])
        for number, step in enumerate(steps(rows)):
            parts = {"copies": [], "nccl": [], "others": []}
            for kind, first, last, _, name in step:
                what = "copies" if kind == "copy" or "sum_parts" in name else "nccl" if "nccl" in name else "others"
                parts[what].append((first, last))
            copies, nccl, busy = parts["copies"], parts["nccl"], union(parts["others"])
            if not copies or not busy:
                continue
            columns = []
            for what in (copies + nccl, copies):
                times = union(what)
                columns += [length(times) / 1e6, 100 * overlap(times, busy) / length(times)]
            total = (max(r[2] for r in step) - min(r[1] for r in step)) / 1e6
            print("%3s %5d %8.1f %17.1f %6.0f%% %26.1f %6.0f%%" % (device, number, total, *columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
