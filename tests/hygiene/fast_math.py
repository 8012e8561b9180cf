#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""-use_fast_math changes no number of the kernels: --unit gives the same PTX with and without it, for 8.0 and 9.0a.

But for one suffix: .ftz on comparisons, negations and conversions. It matters for subnormal operands alone, and there are
none where all arithmetic flushes its results, which is in both. Everything that rounds must be the same instruction.
"""

import concurrent.futures
import difflib
import re

import gate

parser = gate.arguments(__doc__)
parser.add_argument("--unit", default="tests/property/gpu_flags_run.cu", help="what instantiates the kernels")
options = parser.parse_args()
nvcc = gate.need("nvcc")

MAY_FLUSH = re.compile(r"^(\s*(?:@!?%p\d+\s+)?(?:neg|setp|cvt)\b[\w.]*?)\.ftz\b")
# Objects that the toolkit's headers have in every unit: their names hold a number of the process.
OF_THE_UNIT = re.compile(r"^\.global\s.*_INTERNAL_")


def compile_ptx(architecture, flags, path):
    command = [nvcc, "-std=c++17", "-O3", f"-arch=compute_{architecture}", "--ptx", *flags, "-I", options.root / "include",
               "-I", options.root / "tests", "-DUNIPREFILL_WRAPPED_NAMESPACE=as_it_is", options.root / options.unit,
               "-o", path]  # fmt: skip
    result = gate.run(command)
    return result.stdout if result.returncode else ""


def instructions(path):
    with open(path, encoding="utf-8") as file:
        return [MAY_FLUSH.sub(r"\1", line.rstrip()) for line in file if not OF_THE_UNIT.match(line)]


faults, compared = [], 0
with gate.scratch() as folder, concurrent.futures.ThreadPoolExecutor(max_workers=options.jobs) as pool:
    units = [(a, name, flags) for a in ("80", "90a") for name, flags in (("plain", []), ("fast", ["-use_fast_math"]))]
    outputs = pool.map(lambda unit: compile_ptx(unit[0], unit[2], f"{folder}/{unit[1]}{unit[0]}.ptx"), units)
    faults += [f"{name}, {a}:\n{output}" for (a, name, _), output in zip(units, outputs) if output]
    for architecture in ("80", "90a") if not faults else ():
        plain, fast = (instructions(f"{folder}/{name}{architecture}.ptx") for name in ("plain", "fast"))
        compared += sum(1 for line in plain if "\t" in line)
        if not any(".entry" in line for line in plain):
            faults.append(f"compute_{architecture}: no kernel in {options.unit}")
        if plain != fast:
            lines = list(difflib.unified_diff(plain, fast, "without", "with -use_fast_math", lineterm="", n=1))
            shown = "\n".join(lines[:20])
            faults.append(f"compute_{architecture}: {sum(1 for x in lines if x.startswith('+')) - 1} lines differ\n{shown}")
gate.finish(faults, f"{compared} lines of PTX")
