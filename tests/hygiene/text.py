#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Text: licence lines, no unfinished work, nothing of one machine, plain files, portable spelling in headers."""

import os
import pathlib
import re

import gate

SOURCE = {".hpp", ".cuh", ".inl", ".cpp", ".cu", ".h", ".py", ".sh", ".cmake", ".js", ".css"}
SOURCE_NAMES = {"CMakeLists.txt", "Makefile", "Doxyfile", "run"}
BINARY = {".png", ".jpg", ".gz", ".gguf", ".bin", ".i32", ".zip"}
VERBATIM = {"LICENSE"}

# Written in pieces, so that this file passes its own test.
UNFINISHED = re.compile("|".join([r"\bTO" r"DO\b", r"\bFIX" r"ME\b", r"\bXX" r"X\b", "not imple" "mented", "place" "holder"]))
ONE_MACHINE = re.compile(r"(?<![\w.}])/(?:home|root|Users|work|farm|tmp)" r"/|https?://[a-z0-9.-]*(?:pypi|debian)\.[a-z]+")
CONFLICT = re.compile(r"^(?:<{7}|>{7}|={7})(?:\s|$)", re.M)
# Characters that reorder text on the screen, or can't be seen.
INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
SPDX = ("SPDX-License-Identifier: Apache-2.0", "SPDX-FileCopyrightText: The uniprefill authors")
ALTERNATIVE_TOKEN = re.compile(r"(?<![\w.>])(?:and|or|not|xor|bitand|bitor|compl|and_eq|or_eq|xor_eq|not_eq)(?!\w)")

options = gate.arguments(__doc__).parse_args()
faults = []


def line_of(text, match):
    return text.count("\n", 0, match.start()) + 1


def check_text(name, text):
    for pattern, fault in ((UNFINISHED, "unfinished"), (ONE_MACHINE, "belongs to one machine"), (CONFLICT, "a conflict"),
                           (INVISIBLE, "an invisible character")):  # fmt: skip
        for match in pattern.finditer(text):
            faults.append(f"{name}:{line_of(text, match)}: {fault}: {match.group(0)!r}")
    if "\r" in text:
        faults.append(f"{name}: line ends with CR")
    if text and not text.endswith("\n"):
        faults.append(f"{name}: no newline at the end")
    for number, line in enumerate(text.split("\n"), 1):
        if line != line.rstrip() and not name.endswith(".md"):
            faults.append(f"{name}:{number}: space at the end of the line")
        if "\t" in line and not name.endswith("Makefile"):
            faults.append(f"{name}:{number}: tab")


def check_source(name, path, text):
    lines = text.split("\n")
    first = 1 if lines[0].startswith("#!") else 0
    if not all(SPDX[i] in "".join(lines[first + i : first + i + 1]) for i in (0, 1)):
        faults.append(f"{name}: the first two lines must be the SPDX licence and copyright")
    if first == 1 and not os.access(path, os.X_OK):
        faults.append(f"{name}: a script that isn't executable")


def check_header(name, path, text):
    code = gate.code_of(path)
    if not name.endswith(".inl") and not re.search(r"^#pragma once$", code, re.M):
        faults.append(f"{name}: no #pragma once")
    if "@file" not in text and not name.endswith(".inl"):
        faults.append(f"{name}: no @file comment")
    for pattern, fault in (
        (r"^using namespace ", "using namespace at namespace scope"),
        (r"^template\s*<\s*int\s*(\w+\s*)?=\s*0\s*>", "a kernel made a template for the linker's sake"),
    ):
        for match in re.finditer(pattern, code, re.M):
            faults.append(f"{name}:{line_of(code, match)}: {fault}")
    for match in ALTERNATIVE_TOKEN.finditer(code):
        faults.append(f"{name}:{line_of(code, match)}: the operator's sign instead of {match.group(0)!r}")


names = [name for name in gate.tracked(options.root) if pathlib.PurePosixPath(name).suffix not in BINARY]
for name in names:
    path = options.root / name
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        faults.append(f"{name}: not UTF-8")
        continue
    if name in VERBATIM or name.startswith("bench/results/"):
        continue
    check_text(name, text)
    pure = pathlib.PurePosixPath(name)
    if pure.suffix in SOURCE or pure.name in SOURCE_NAMES:
        check_source(name, path, text)
    if name.startswith("include/"):
        check_header(name, path, text)
gate.finish(faults, f"{len(names)} files")
