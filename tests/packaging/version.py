#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""core/version.hpp: a second copy of the same version is accepted, one of another version is an error that says so."""

import pathlib
import re
import subprocess
import sys
import tempfile

root = pathlib.Path(__file__).resolve().parents[2]
text = (root / "include/uniprefill/core/version.hpp").read_text(encoding="utf-8")
faults = []


def compiles(second):
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("first.hpp", text + "\n"), ("second.hpp", second)):
            pathlib.Path(folder, name).write_text(content, encoding="utf-8")
        unit = '#include "first.hpp"\n#include "second.hpp"\n'
        command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{folder}", "-x", "c++", "-"]
        result = subprocess.run(command, input=unit, text=True, capture_output=True)
    return result.returncode == 0, result.stderr


same, output = compiles(text)
if not same:
    faults.append(f"a copy of the same version is refused:\n{output}")
minor = int(re.search(r"UNIPREFILL_VERSION_MINOR (\d+)", text).group(1))
number = int(re.search(r"define UNIPREFILL_VERSION (\d+)", text).group(1))
other = re.sub(rf"\b{number}\b", str(number + 100), text.replace(f"VERSION_MINOR {minor}", f"VERSION_MINOR {minor + 1}"))
accepted, output = compiles(other)
if accepted or "two versions of uniprefill" not in output:
    faults.append(f"another version isn't refused as such:\n{output}")
print("\n".join(faults) or "one version to a translation unit")
sys.exit(1 if faults else 0)
