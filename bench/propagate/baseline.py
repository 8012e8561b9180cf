#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""What moving rows costs with PyTorch's own calls: the figures that cuda_rows.cu is set beside.

The same shapes, cold caches and medians. `separate` is the sequence of the released implementation (UniPrefill,
arXiv 2605.06221): gather hidden states and residuals, copy both back, add, RMSNorm.
"""

import argparse
import json
import statistics

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", help="file for the results as JSON")
parser.add_argument("--calls", type=int, default=50, help="timed calls of each operation")
options = parser.parse_args()

BLOCK = 64
flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
results = []


def measure(name, bytes_moved, work):
    for _ in range(3):
        work()
    times = []
    for _ in range(options.calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    ms = statistics.median(times)
    results.append({"name": name, "median_us": ms * 1e3, "TB_s": bytes_moved / ms * 1e-9})
    print(f"{name:60} {ms * 1e3:10.1f} us {bytes_moved / ms * 1e-9:8.3f} TB/s")


for rows, size, keep in ((131072, 4096, 0.43), (32768, 4096, 0.43), (4096, 4096, 0.43)):
    blocks = rows // BLOCK
    kept_blocks = torch.randperm(blocks, device="cuda")[: round(keep * blocks)].sort().values
    index = (kept_blocks[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
    kept = index.numel()
    hidden = torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")
    residual = torch.randn_like(hidden)
    weight = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    packed = torch.empty(kept, size, dtype=torch.bfloat16, device="cuda")
    moved = 2 * kept * size * 2  # bytes, read and written
    shape = f"rows:{rows // 1024}K/bytes:{size * 2}/keep:{keep}"

    def separate():
        hidden[:kept] = hidden[index]
        residual[:kept] = residual[index]
        summed = hidden[:kept] + residual[:kept]
        return torch.nn.functional.rms_norm(summed, (size,), weight, 1e-6), summed

    def gather_add_norm():
        summed = hidden.index_select(0, index) + residual.index_select(0, index)
        return torch.nn.functional.rms_norm(summed, (size,), weight, 1e-6), summed

    def in_place():
        hidden[:kept] = hidden[index]

    def scatter():
        hidden[index] = packed

    measure(f"copy/{shape}", moved, lambda: packed.copy_(hidden[:kept]))
    measure(f"index_select/{shape}", moved, lambda: torch.index_select(hidden, 0, index, out=packed))
    measure(f"gather_and_copy_back/{shape}", moved, in_place)
    measure(f"scatter/{shape}", moved, scatter)
    measure(f"gather_add_norm/{shape}", 2 * moved, gather_add_norm)
    measure(f"separate/{shape}", 2 * moved, separate)

context = {
    "device": torch.cuda.get_device_name(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
}
if options.out:
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump({"context": context, "benchmarks": results}, file, indent=2)
        file.write("\n")
