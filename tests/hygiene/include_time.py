#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Including the whole host library costs at most --budget seconds of processor time (the least of several runs)."""

import resource

import gate

parser = gate.arguments(__doc__)
parser.add_argument("--budget", type=float, default=3.0, help="seconds")
options = parser.parse_args()
compiler = gate.need("g++")


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cost(text):
    command = [compiler, "-std=c++17", "-O2", "-c", f"-I{options.root}/include", "-x", "c++", "-", "-o", "/dev/null"]
    before = processor_seconds()
    result = gate.run(command, input=text)
    if result.returncode:
        gate.finish([result.stdout], "the umbrella header")
    return processor_seconds() - before


runs = 4
umbrella = min(cost(gate.include_lines(["uniprefill/uniprefill.hpp"])) for _ in range(runs))
empty = min(cost("\n") for _ in range(runs))
print(f"uniprefill.hpp: {umbrella:.2f} s (an empty file: {empty:.2f} s, budget {options.budget:.2f} s)")
over = umbrella > options.budget
gate.finish(["uniprefill.hpp: over the budget"] if over else [], f"the least of {runs} runs")
