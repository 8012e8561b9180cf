#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""The code in README.md and docs/ is real.

A ```cpp block either stands, line for line (indentation aside), in a source under examples/, tests/ or bench/, all of
which are built; or it compiles as it is. The programs that a ```sh block starts by a path in the repository exist.
"""

import re

import gate

options = gate.arguments(__doc__).parse_args()
compiler = gate.need("g++")
faults = []
blocks = 0


def squeezed(text):
    """Lines without indentation, blank lines left out."""
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


sources = "\n\n".join(
    "\n" + squeezed((options.root / name).read_text(encoding="utf-8")) + "\n"
    for name in gate.tracked(options.root, ".cpp", ".cu", ".hpp", ".cuh")
    if name.startswith(("examples/", "tests/", "bench/"))
)


def compiles(code):
    command = [compiler, "-std=c++17", "-fsyntax-only", *gate.WARNINGS, f"-I{options.root}/include", "-x", "c++", "-"]
    return gate.run(command, input=code)


for name in gate.tracked(options.root, ".md"):
    if not (name == "README.md" or name.startswith(("docs/", "examples/"))):
        continue
    text = (options.root / name).read_text(encoding="utf-8")
    for match in re.finditer(r"^([ ]*)```(\w+)\n(.*?)^\1```[ ]*$", text, re.M | re.S):
        where = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        language, code = match.group(2), match.group(3)
        if language in ("cpp", "c++", "cuda"):
            blocks += 1
            if f"\n{squeezed(code)}\n" not in sources:
                result = compiles(code)
                if result.returncode:
                    faults.append(f"{where}: neither in a built source nor able to compile alone:\n{result.stdout}")
        elif language in ("sh", "bash", "console"):
            blocks += 1
            for program in re.findall(r"^\s*(?:\$ )?(?:\./)?((?:examples|tests|bench|docs|\.ci)/[\w./-]+)", code, re.M):
                if not (options.root / program).is_file():
                    faults.append(f"{where}: {program} doesn't exist")
gate.finish(faults, f"{blocks} blocks of code")
