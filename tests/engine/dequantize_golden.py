#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Writes dequantize_golden.bin: seeded random blocks of each type and what the Python package `gguf` makes of them.

    pip install gguf==0.19.0 && python3 dequantize_golden.py

Records, little-endian: type number, count of elements, count of bytes (uint32 each), the bytes, the floats.
"""
import pathlib
import struct

import gguf
import numpy as np

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
# Where the half-precision scales of a block lie: random bits there would be NaN or infinite now and then.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # fmt: skip


def main() -> None:
    random = np.random.default_rng(20260101)
    out = b""
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = 2 if elements == 256 else 4 if elements == 32 else 40
        if name == "F32":
            raw = random.standard_normal(blocks).astype(np.float32).view(np.uint8)
        elif name == "F16":
            raw = (random.standard_normal(blocks) * 1e-3).astype(np.float16).view(np.uint8)
        elif name == "BF16":
            raw = random.standard_normal(blocks).astype(np.float32).view(np.uint16)[1::2].copy().view(np.uint8)
        else:
            raw = random.integers(0, 256, (blocks, size), dtype=np.uint8)
            for at in SCALES[name]:
                # From subnormal halves to ordinary ones, either sign.
                scales = (random.standard_normal(blocks) * 10.0 ** random.integers(-6, 1, blocks)).astype(np.float16)
                raw[:, at : at + 2] = scales.view(np.uint8).reshape(blocks, 2)
        raw = raw.reshape(1, -1)
        expected = gguf.dequantize(raw, kind).astype(np.float32).reshape(-1)
        assert np.isfinite(expected).all()
        out += struct.pack("<3I", kind, expected.size, raw.size) + raw.tobytes() + expected.tobytes()
    path = pathlib.Path(__file__).with_suffix(".bin")
    path.write_bytes(out)
    print(f"{path.name}: {len(out)} bytes")


if __name__ == "__main__":
    main()
