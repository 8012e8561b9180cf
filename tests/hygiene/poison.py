#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""The headers survive the macros that engines, toolkits and operating systems define before them."""

import gate

FUNCTION_LIKE = "min max abs CHECK LOG ASSERT MAX MIN DIVIDE_ROUND_UP CEILDIV STR CONCAT STRINGIFY DISPATCH major minor"
OBJECT_LIKE = (
    "small near far interface WARP_SIZE FULL_MASK BLOCK_SIZE PAGE_SIZE HEAD_DIM TRUE FALSE DEBUG ERROR INFO OK FAIL "
    "IN OUT OPTIONAL VOID DELETE None Bool Status Success Always I unix linux EMPTY NAN_VALUE PI EPS"
)

options = gate.arguments(__doc__).parse_args()
compiler = gate.need("g++")

poison = "".join(f"#undef {n}\n#define {n}(...) poisoned macro {n}\n" for n in FUNCTION_LIKE.split())
poison += "".join(f"#undef {n}\n#define {n} poisoned macro {n}\n" for n in OBJECT_LIKE.split())
# Toolkit headers don't survive this themselves, so theirs and the standard's come first.
before = gate.foreign_includes(options.root, ".hpp", ".inl") + poison

headers, flags = gate.compilable(options.root, compiler, ".hpp")
flags += ["-std=c++17", "-fsyntax-only", *gate.WARNINGS, f"-I{options.root}/include"]
commands = {}
for header in headers:
    command = [compiler, *flags, "-x", "c++", "-"]
    commands[header] = (command, before + gate.include_lines([header]))
failures = gate.run_all(commands, options.jobs)
gate.finish([f"{header}:\n{output}" for header, output in failures], f"{len(commands)} headers")
