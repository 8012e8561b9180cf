#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""What attention costs with PyTorch's own calls, 2.5 or newer: the figures that cuda_attention.cu and cuda_decode.cu are
set beside.

Causal attention of one request, and of one row each of several requests of one length, by the cuDNN and flash backends,
grouped query heads, bfloat16, the same shapes, cold caches and medians; and a bf16 matrix product, as the chip's own rate
in the same run. JSON out.

Where a backend doesn't take grouped heads, keys and values are repeated beforehand, outside of what is timed, and the
result says so: it reads more from memory then, which at these lengths is little.
"""

import argparse
import json
import statistics
import subprocess

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# tokens, query heads, KV heads, head dimension
SHAPES = [
    (4096, 32, 8, 128),
    (8192, 32, 8, 128),
    (32768, 32, 8, 128),
    (131072, 32, 8, 128),
    (8192, 32, 8, 64),
    (32768, 32, 8, 64),
    (8192, 16, 4, 256),
    (32768, 16, 4, 256),
]
# requests, tokens: one decode row each, 32 query and 8 KV heads of 128
DECODE_SHAPES = [(1, 8192), (1, 131072), (16, 32768), (64, 8192), (256, 2048)]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", help="file for the results as JSON")
parser.add_argument("--calls", type=int, default=20, help="timed calls of each operation")
options = parser.parse_args()

flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
results = []


def measure(name, operations, work, **what):
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
    results.append({"name": name, "median_us": ms * 1e3, "TFLOP_s": operations / ms * 1e-9, **what})
    print(f"{name:60} {ms * 1e3:10.1f} us {operations / ms * 1e-9:8.1f} TFLOP/s", flush=True)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


a, b = normal(8192, 8192), normal(8192, 8192)
measure("matrix product 8192", 2 * 8192**3, lambda: a @ b)


def measure_attention(shape, operations, q, k, v, causal):
    for backend, choice in BACKENDS.items():
        name = f"{backend}/{shape}"
        refusal = None
        for repeated in (False, True):
            keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) if repeated else x for x in (k, v))
            try:
                with sdpa_kernel(choice):
                    measure(
                        name,
                        operations,
                        lambda: F.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=not repeated),
                        repeated=repeated,
                    )
                break
            except RuntimeError as error:
                refusal = str(error).strip().split("\n")[0]
        else:
            results.append({"name": name, "error": refusal})
            print(f"{name:60} {refusal}", flush=True)


for tokens, heads, kv_heads, dim in SHAPES:
    # [tokens, heads, dim] in memory, as an engine has them.
    q, k, v = (normal(1, tokens, count, dim).transpose(1, 2) for count in (heads, kv_heads, kv_heads))
    operations = 4 * heads * dim * tokens * (tokens + 1) / 2
    measure_attention(f"tokens:{tokens}/heads:{heads}/{kv_heads}/d:{dim}", operations, q, k, v, True)
for requests, tokens in DECODE_SHAPES:
    q, k, v = (normal(requests, rows, count, 128).transpose(1, 2) for rows, count in ((1, 32), (tokens, 8), (tokens, 8)))
    measure_attention(f"decode/requests:{requests}/tokens:{tokens}", 4.0 * 32 * 128 * requests * tokens, q, k, v, False)

query = ["nvidia-smi", "-i", "0", "--query-gpu=name,driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
context = {
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version(),
    "device": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
    "calls": options.calls,
}
if options.out:
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump({"context": context, "results": results}, file, indent=1)
        file.write("\n")
