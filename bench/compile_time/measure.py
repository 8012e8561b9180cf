#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""What each public CUDA header costs an includer's build: nvcc's time for it alone, and with one instantiation.

usage: bench/compile_time/measure.py OUT.json [--arch sm_90a] [--runs 3]

Processor seconds (user and system, of nvcc and all that it starts) are the least of several runs, one compilation at a
time; they depend little on what else the machine did. Elapsed seconds of that run, and the load before and after, stand
beside them. "runtime" is a file that includes <cuda_runtime.h> and nothing else: what every .cu pays.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPES = "#include <uniprefill/core/element.hpp>\nnamespace up = uniprefill;\nusing bf16 = up::bfloat16;\nusing device = up::backend::cuda;\n"
D128 = "up::estimator_policy<64, 128, up::head_sum, 128>"

# One use of each header, as an includer would have it: bfloat16, head dimension 128, n 128, G 64.
USES = {
    "core/cuda.cuh": "up::status use(up::cuda_device& d) { return up::cuda_device::current(d); }",
    "comm/nccl.cuh": "up::status use(ncclComm_t c, std::int64_t* b, cudaStream_t s) "
                     "{ return up::nccl_reduction(c)(b, 1, up::rank_reduction::sum, s); }",
    "importance/importance.cuh": f"""
up::status use(const up::importance_estimator<{D128}, device>& e, const up::head_rows<const bf16>& q,
               const up::key_source<bf16>& k, const up::batch_view& b, const up::mass_view& m, up::workspace w, cudaStream_t s) {{
    const up::status ready = e.prepare<bf16>();
    return ready.ok() ? e.run(q, k, {{}}, b, m, {{}}, w, s) : ready;
}}""",
    "ledger/drop_ledger.cuh": """
up::status use(up::drop_ledger<device>& l, const up::batch_view& b, const std::int32_t* ids, up::ledger_step& step,
               const up::step_wishes<up::block_table_view>& wishes, cudaStream_t s) {
    UNIPREFILL_TRY(l.begin_step(b, ids, step, wishes, s));
    UNIPREFILL_TRY(l.append(step, 1, b, wishes, s));
    return l.commit_step(step, s);
}""",
    "select/selector.cuh": """
up::status use(const up::block_selector<up::selection_rule, device>& e, const up::mass_view& m, const up::batch_view& b,
               const up::selection_rule* r, up::selection& out, up::workspace w, cudaStream_t s) {
    return e.run(m, b, r, out, w, s);
}""",
    "propagate/compaction.cuh": """
up::status use(const up::row_map& m, const up::byte_rows& r, up::workspace w, const up::cuda_device& d, cudaStream_t s) {
    return up::compact(m, r, r, w, d, s);
}""",
    "propagate/add_norm.cuh": """
up::status use(const up::row_map& m, const up::add_norm<bf16>& n, up::workspace w, const up::cuda_device& d, cudaStream_t s) {
    return up::compact_add_norm(m, n, w, d, s);
}""",
    "propagate/lineage.cuh": """
up::status use(up::row_lineage<device>& l, const up::selection& kept, cudaStream_t s) { return l.apply(kept, s); }""",
    "pipeline/prefill_sparsifier.cuh": """
using policy = up::default_policy<64, 128, 128>;
up::status use(const up::prefill_sparsifier<policy, device>& all, up::prefill_step<policy, device>& step,
               const up::batch_view& b, const up::head_rows<const bf16>& q, const up::key_source<bf16>& k,
               const up::row_tensor& rows, up::selection& kept, up::workspace w, cudaStream_t s) {
    UNIPREFILL_TRY(all.prepare<bf16>());
    UNIPREFILL_TRY(step.begin(b, w, s));
    UNIPREFILL_TRY(step.decide(1, q, k, {}, nullptr, kept, s));
    return step.leave(kept, &rows, 1, s);
}""",
}  # fmt: skip


def text_of(*command):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compile_once(text, arch, object_file):
    source = object_file.with_suffix(".cu")
    source.write_text(text, encoding="utf-8")
    command = ["nvcc", "-std=c++17", "-O3", f"-arch={arch}", f"-I{ROOT}/include", "-c", str(source), "-o", str(object_file)]
    processor, elapsed = processor_seconds(), time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return None, result.stdout + result.stderr
    return (processor_seconds() - processor, time.monotonic() - elapsed), ""


def cost(text, options, folder):
    """The least of several runs as a dictionary, or a text: why it doesn't compile here."""
    object_file = pathlib.Path(folder) / "unit.o"
    times = []
    for _ in range(options.runs):
        came, complaint = compile_once(text, options.arch, object_file)
        if came is None:
            return complaint
        times.append(came)
    processor, elapsed = min(times)
    return {"processor_s": round(processor, 2), "elapsed_s": round(elapsed, 2),
            "object_bytes": object_file.stat().st_size}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    include = ROOT / "include/uniprefill"
    public = sorted(p.relative_to(include).as_posix() for p in include.rglob("*.cuh") if "detail" not in p.parts)
    unknown = [name for name in public if "/" in name and name not in USES]
    if unknown:
        sys.exit(f"a use of each header expected in {__file__}, none came of {', '.join(unknown)}")

    cpu = re.search(r"model name\s*:\s*(.*)", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    result = {
        "context": {
            "commit": text_of("git", "describe", "--always", "--dirty", "--abbrev=12"),
            "cores": os.cpu_count(),
            "processor": cpu.group(1) if cpu else platform.machine(),
            "nvcc": text_of("nvcc", "--version").splitlines()[-2],
            "host_compiler": text_of("g++", "--version").splitlines()[0],
            "flags": f"-std=c++17 -O3 -arch={options.arch}",
            "runs": options.runs,
            "load_before": os.getloadavg()[0],
        },
        "headers": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        result["runtime"] = cost("#include <cuda_runtime.h>\n", options, folder)
        for name in public:
            alone = f"#include <uniprefill/{name}>\n"
            row = {"header": name, "alone": cost(alone, options, folder)}
            if isinstance(row["alone"], str):
                print(f"left out: {name}: {row['alone'].splitlines()[0]}")
                continue
            if name in USES:
                row["with_one_use"] = cost(alone + TYPES + USES[name] + "\n", options, folder)
                if isinstance(row["with_one_use"], str):
                    sys.exit(f"the use of {name} doesn't compile:\n{row['with_one_use']}")
            result["headers"].append(row)
            used = row.get("with_one_use", {}).get("processor_s", "-")
            print(f"{name}: alone {row['alone']['processor_s']} s, with one use {used} s", flush=True)
    result["context"]["load_after"] = os.getloadavg()[0]
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


main()
