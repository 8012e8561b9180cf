#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Each header compiles alone, and again after itself, without exceptions, RTTI or warnings."""

import gate

parser = gate.arguments(__doc__)
parser.add_argument("--compiler", default="g++")
parser.add_argument("--std", default="c++17")
parser.add_argument("--flag", action="append", default=[], help="one more compiler flag (may be repeated)")
options = parser.parse_args()

compiler = gate.need(options.compiler)
headers, library_flags = gate.compilable(options.root, compiler, ".hpp")
commands = {}
for header in headers:
    command = [compiler, f"-std={options.std}", "-fsyntax-only", *gate.WARNINGS, *library_flags, *options.flag]
    if not gate.needs_exceptions(options.root, header):
        command += gate.NO_RUNTIME
    commands[header] = (
        command + [f"-I{options.root}/include", "-x", "c++", "-"],
        gate.include_lines([header, header]),
    )
failures = gate.run_all(commands, options.jobs)
gate.finish([f"{header}:\n{output}" for header, output in failures], f"{len(commands)} headers")
