#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""What the CUDA estimator, selector and compaction are measured against, on one GPU: PyTorch 2.5 or newer, and Triton.

The published pipeline's stages as plain PyTorch (scores of the last 128 queries, softmax over all keys, sums, sort,
mask, nonzero), attention of the same rows by PyTorch's flash and cuDNN backends, top-k and sort of block masses, row
gathers; and the chip's own rates in the same run: bf16 matrix product, device copy, ex2, launch gap. JSON out.

Every case is warmed, then timed by CUDA events with the L2 cache flushed before each repetition; host_ms is the host's
clock around the same work and a synchronisation. q and k are standard normal and scores are scaled by 1/sqrt(d), so
that softmax is neither flat nor one-hot. Attention takes all keys for all rows: the causal triangle would leave out 64
of N keys of a row on average.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

OBSERVED = 128  # n
BLOCK = 64  # G
P = 0.98
KEPT = 0.43

# requests, tokens of each, query heads, KV heads, head dimension
SHAPES = [
    (1, 4096, 32, 8, 128),
    (1, 32768, 32, 8, 128),
    (1, 131072, 32, 8, 128),
    (16, 4096, 32, 8, 128),
    (4, 16384, 32, 8, 128),
    (1, 1048576, 32, 8, 128),
    (1, 131072, 16, 4, 256),
]
MASSES = [(1, 2048), (1, 16384), (256, 64)]  # requests, blocks of each
ROWS = [4096, 131072]  # of 8 KiB


def smi(fields):
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    values = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return dict(zip(fields.split(","), values))


class Bench:
    def __init__(self, repeats):
        self.repeats = repeats
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")  # several times the L2 cache
        self.results = []

    def add(self, name, work, stages=(), **what):
        """Times work(mark); mark() ends one of `stages`. `what` describes the case; counts of work become rates."""
        try:
            for _ in range(5):
                work(lambda: None)
            torch.cuda.synchronize()
            times = [self.once(work) for _ in range(self.repeats)]
            host = statistics.median(self.once_by_host(work) for _ in range(self.repeats))
        except RuntimeError as error:
            torch.cuda.empty_cache()
            self.store(name, {**what, "error": str(error).strip().split("\n")[0]})
            return
        totals = [sum(one) for one in times]
        median = statistics.median(totals)
        result = {**what, "median_ms": median, "least_ms": min(totals), "most_ms": max(totals), "host_ms": host}
        if "flops" in what:
            result["tflops"] = what["flops"] / median * 1e-9
        if "bytes" in what:
            result["tb_per_s"] = what["bytes"] / median * 1e-9
        if "ex2" in what:
            result["t_ex2_per_s"] = what["ex2"] / median * 1e-9
        if "launches" in what:
            result["us_per_launch"] = median / what["launches"] * 1e3
        if stages:
            result["stages_ms"] = {stage: statistics.median(one[i] for one in times) for i, stage in enumerate(stages)}
        self.store(name, result)

    def store(self, name, result):
        result = {"name": name, **result, **smi("clocks.sm,clocks.mem,temperature.gpu,power.draw")}
        self.results.append(result)
        shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}
        print(json.dumps(shown), flush=True)

    def once(self, work):
        """Milliseconds of each stage: the whole, where there are none."""
        marks = []

        def mark():
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

        self.flush.zero_()
        mark()
        work(mark)
        mark()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])]

    def once_by_host(self, work):
        self.flush.zero_()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work(lambda: None)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3


# ------------------------------------------------------------------------------------------- the published pipeline
STAGES = ["scores", "softmax", "sum_queries", "sum_blocks", "sum_heads", "top_p", "expand", "nonzero"]


def select_by_stages(q, k, mark):
    """Indices of the tokens kept of each request, each stage a tensor in memory as published.

    q is [requests, KV heads, heads of a group * n, d], k is [requests, KV heads, tokens, d].
    """
    requests, kv_heads, rows, dim = q.shape
    tokens = k.shape[2]
    scores = q @ k.transpose(-1, -2)
    scores *= 1 / math.sqrt(dim)
    queries = scores.view(requests, -1, OBSERVED, tokens)
    later = torch.ones(OBSERVED, OBSERVED, dtype=torch.bool, device=q.device).triu(1)
    queries[..., -OBSERVED:].masked_fill_(later, -math.inf)
    mark()
    shares = torch.softmax(queries, dim=-1)
    mark()
    by_key = shares.sum(dim=2, dtype=torch.float32)
    mark()
    by_block = by_key.view(requests, -1, tokens // BLOCK, BLOCK).sum(dim=-1)
    mark()
    mass = by_block.sum(dim=1)
    mark()
    ordered, block = mass.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.zeros_like(mass, dtype=torch.bool).scatter(1, block, before < P * ordered.sum(dim=-1, keepdim=True))
    mark()
    keep = kept.repeat_interleave(BLOCK, dim=-1)
    keep[:, -OBSERVED:] = True
    mark()
    return keep.flatten().nonzero().flatten(), mass


def estimates(bench, shape):
    requests, tokens, heads, kv_heads, dim = shape
    group = heads // kv_heads
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*size):
        return torch.randn(*size, dtype=torch.bfloat16, device="cuda", generator=generator)

    k = normal(requests, kv_heads, tokens, dim)
    v = normal(requests, kv_heads, tokens, dim)
    q = normal(requests, heads, OBSERVED, dim)
    packed = q.view(requests, kv_heads, group * OBSERVED, dim)  # query heads of a KV head as rows of one product
    product = 2 * requests * heads * OBSERVED * tokens * dim
    what = dict(requests=requests, tokens=tokens, heads=heads, kv_heads=kv_heads, dim=dim)

    kept, mass = select_by_stages(packed, k, lambda: None)
    what_kept = dict(kept=kept.numel() / (requests * tokens), total_mass=mass.sum().item() / (requests * heads * OBSERVED))
    del kept, mass
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    select_by_stages(packed, k, lambda: None)
    extra = torch.cuda.max_memory_allocated() - before
    bench.add("published_stages", lambda mark: select_by_stages(packed, k, mark), STAGES, **what, **what_kept,
              extra_bytes=extra, product_flops=product)  # fmt: skip

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def attend(rows, **options):
            def work(_):
                with sdpa_kernel(backend):
                    F.scaled_dot_product_attention(rows, k, v, **options)

            return work

        name = backend.name.lower()
        bench.add(f"{name}_gqa", attend(q, enable_gqa=True), **what, flops=2 * product)
        bench.add(f"{name}_packed", attend(packed), **what, flops=2 * product)
    bench.add("scores_alone", lambda _: packed @ k.transpose(-1, -2), **what, flops=product)
    torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------- selection and compaction
def selections(bench, requests, blocks):
    mass = torch.rand(requests, blocks, device="cuda").pow(4)
    fixed = (mass * 2**40).long()
    what = dict(requests=requests, blocks=blocks)
    bench.add("topk", lambda _: mass.topk(int(KEPT * blocks), dim=-1), **what)
    bench.add("topk_sorted_off", lambda _: mass.topk(int(KEPT * blocks), dim=-1, sorted=False), **what)
    bench.add("sort_float", lambda _: mass.sort(dim=-1, descending=True), **what)
    bench.add("sort_int64", lambda _: fixed.sort(dim=-1, descending=True), **what)

    def top_p(_):
        ordered, block = mass.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        torch.zeros_like(mass, dtype=torch.bool).scatter(1, block, before < P * ordered.sum(dim=-1, keepdim=True))

    bench.add("top_p_sort_cumsum", top_p, **what)


def compactions(bench, rows):
    width = 4096
    hidden = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    residual = torch.randn_like(hidden)
    weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    keep = torch.rand(rows // BLOCK, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) < KEPT
    index = keep.repeat_interleave(BLOCK).nonzero().flatten()
    count = index.numel()
    out = torch.empty(count, width, dtype=torch.bfloat16, device="cuda")
    what = dict(rows=rows, row_bytes=2 * width, kept=count / rows)
    bench.add("index_select", lambda _: torch.index_select(hidden, 0, index, out=out), **what, bytes=2 * out.nbytes)

    def library_calls(_):
        hidden[:count] = hidden.index_select(0, index)
        residual[:count] = residual.index_select(0, index)
        residual[:count] += hidden[:count]
        hidden[:count] = F.rms_norm(residual[:count], (width,), weight, 1e-5)

    bench.add("gather_copy_add_norm", library_calls, **what)
    bench.add("add_norm", lambda _: F.rms_norm(residual.add_(hidden), (width,), weight, 1e-5), **what)


# ------------------------------------------------------------------------------------------- the chip's own rates
def denominators(bench):
    size = 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    bench.add("matrix_product", lambda _: a @ b.t(), size=size, flops=2 * size**3)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bench.add("copy", lambda _: target.copy_(source), bytes=2 * source.nbytes)
    ex2_rate(bench)

    one = torch.zeros(1, device="cuda")
    launches = 1000

    def launch(_):
        for _ in range(launches):
            one.add_(1)

    bench.add("launches_eager", launch, launches=launches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(None)
    bench.add("launches_graph", lambda _: graph.replay(), launches=launches)


@triton.jit
def ex2_kernel(out, ROUNDS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = at.to(tl.float32) * 1e-7
    for _ in range(ROUNDS):
        x = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [-x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out + at, x)


def ex2_rate(bench):
    rounds, size, programs = 2048, 1024, 16 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs * size, dtype=torch.float32, device="cuda")
    bench.add("ex2", lambda _: ex2_kernel[(programs,)](out, ROUNDS=rounds, SIZE=size), ex2=rounds * size * programs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit", default="", help="what to write down as the commit")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats: a number from 1 expected, came {options.repeats}")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        sys.exit(77)

    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    context = {
        **smi("name,driver_version,clocks.max.sm,clocks.max.mem,power.limit"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "commit": options.commit,
        "repeats": options.repeats,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    bench = Bench(options.repeats)
    try:
        denominators(bench)
        for requests, blocks in MASSES:
            selections(bench, requests, blocks)
        for rows in ROWS:
            compactions(bench, rows)
        for shape in SHAPES:
            estimates(bench, shape)
        denominators(bench)  # again, warm
    finally:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"context": context, "results": bench.results}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
