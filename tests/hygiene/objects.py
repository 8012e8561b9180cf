#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""In the objects of a build (the tests instantiate the templates): the library's symbols are hidden, and none of its
static variables can change."""

import pathlib

import gate
import symbols

parser = gate.arguments(__doc__)
parser.add_argument("--build", type=pathlib.Path, required=True, help="a build tree of the tests")
options = parser.parse_args()
gate.need("readelf")

objects = sorted(options.build.rglob("*.o"))
visible, mutable = {}, {}
for path in objects:
    visible.update((name, path) for name in symbols.visible(path))
    mutable.update((name, path) for name in symbols.mutable(path))
faults = [] if objects else [f"{options.build}: no object files"]
for found, fault in ((visible, "not hidden"), (mutable, "static and not constant")):
    for name, mangled in sorted(zip(symbols.demangled(list(found)), found)):
        faults.append(f"{name}: {fault} (in {found[mangled].name})")
gate.finish(faults, f"{len(objects)} objects")
