#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the token files of tests/data/tokens with numpy: make_token_files.py FOLDER

The arrays are those that nanoGPT, llm.c and Megatron-LM read: a memmap of ids, 256 int32 and ids, and an index of
int32 lengths, int64 pointers and int64 bounds. token_file_test reads the files and expects to write the same bytes.
"""
import struct
import sys

import numpy as np

DOCUMENTS = {16: [[5, 6, 7], [], [64000], [0, 1, 2, 3]], 32: [[5, 70000], [131071, 0, 9]]}


def write(path, *arrays):
    with open(path, "wb") as f:
        for a in arrays:
            f.write(a if isinstance(a, bytes) else a.tobytes())


def main(folder):
    for bits, documents in DOCUMENTS.items():
        ids = np.concatenate([np.array(d, np.int64) for d in documents])
        unsigned = ids.astype(np.uint16 if bits == 16 else np.uint32)
        header = np.zeros(256, np.int32)
        header[:3] = [20240520, 1, len(ids)] if bits == 16 else [20240801, 7, len(ids)]
        lengths = np.array([len(d) for d in documents], np.int32)
        megatron = ids.astype(np.uint16 if bits == 16 else np.int32)
        pointers = np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64) * megatron.itemsize
        bounds = np.arange(len(documents) + 1, dtype=np.int64)
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8 if bits == 16 else 4, len(lengths), len(bounds))
        write(f"{folder}/nanogpt{bits}.bin", unsigned)
        write(f"{folder}/llmc{bits}.bin", header, unsigned)
        write(f"{folder}/megatron{bits}.bin", megatron)
        write(f"{folder}/megatron{bits}.idx", index, lengths, pointers, bounds)
        assert (np.memmap(f"{folder}/nanogpt{bits}.bin", unsigned.dtype, "r") == ids).all()


main(sys.argv[1])
