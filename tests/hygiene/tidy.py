#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""clang-tidy (.clang-tidy holds the checks) finds nothing in the headers, nor in the sources of the example engine."""

import json
import pathlib

import gate

parser = gate.arguments(__doc__)
parser.add_argument("--build", type=pathlib.Path, help="a build tree with compile_commands.json, for the examples")
options = parser.parse_args()
# clang-tidy 14 crashes on vector types whose size is a template parameter.
CRASHING = {"kernels_avx2.cpp", "kernels_avx512.cpp", "kernels_portable.cpp"}

tool = gate.need("clang-tidy")
root = options.root.resolve()
common = [tool, "--quiet", "--warnings-as-errors=*", f"--config-file={root}/.clang-tidy"]
common += [f"--header-filter={root}/(include/uniprefill|examples)/.*"]

with gate.scratch() as folder:
    unit = pathlib.Path(folder) / "everything.cpp"
    headers, library_flags = gate.compilable(root, gate.need("clang++"), ".hpp")
    unit.write_text(gate.include_lines(headers), encoding="utf-8")
    commands = {"headers": ([*common, unit, "--", "-std=c++17", *library_flags, f"-I{root}/include"], None)}
    database = options.build / "compile_commands.json" if options.build else None
    if database and database.exists():
        examples = {entry["file"] for entry in json.loads(database.read_text(encoding="utf-8"))}
        for source in sorted(examples):
            if pathlib.Path(source).name in CRASHING:
                continue
            if source.startswith(f"{root}/examples/") and source.endswith(".cpp"):
                commands[source] = ([*common, "-p", options.build, "--extra-arg-before=-std=c++17",
                                     "--extra-arg=-Wno-unknown-warning-option", source], None)
    failures = gate.run_all(commands, options.jobs)
gate.finish([f"{name}:\n{output}" for name, output in failures], f"{len(commands)} translation units")
