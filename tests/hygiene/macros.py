#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Our headers define and undefine macros that start with UNIPREFILL_, and no others.

Once over the text of every header (all branches), once over what the preprocessor saw (macros that come through an
include of an include).
"""

import re

import gate

options = gate.arguments(__doc__).parse_args()
compiler = gate.need("g++")
compilable, flags = gate.compilable(options.root, compiler, ".hpp")
faults = []

names = gate.headers(options.root, ".hpp", ".cuh", ".inl")
directive = re.compile(r"^[ \t]*#[ \t]*(?:define|undef)[ \t]+(\w+)", re.M)
for header in names:
    for macro in directive.findall(gate.code_of(options.root / "include" / header)):
        if not macro.startswith("UNIPREFILL_"):
            faults.append(f"{header}: defines or undefines {macro}")


def macros_after(text):
    command = [compiler, *flags, "-std=c++17", "-dM", "-E", f"-I{options.root}/include", "-x", "c++", "-"]
    result = gate.run(command, input=text)
    if result.returncode:
        gate.finish([result.stdout], "the preprocessed headers")
    return set(re.findall(r"^#define (\w+)", result.stdout, re.M))


foreign = gate.foreign_includes(options.root, ".hpp", ".inl")
ours = gate.include_lines(compilable)
for macro in sorted(macros_after(foreign + ours) - macros_after(foreign)):
    if not macro.startswith("UNIPREFILL_"):
        faults.append(f"{macro} is defined once all headers are included")
gate.finish(faults, f"{len(names)} headers")
