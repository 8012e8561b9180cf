#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""The umbrella headers list every public header, in order: uniprefill.hpp the .hpp, uniprefill.cuh the .cuh besides.

Headers that throw, or are over a library that not everybody has, are opt-in: no umbrella lists them.
"""

import gate

options = gate.arguments(__doc__).parse_args()
faults = []


def compare(umbrella, suffix, also):
    path = options.root / "include/uniprefill" / umbrella
    public = [
        header
        for header in gate.headers(options.root, suffix)
        if header.count("/") > 1
        and not gate.is_detail(header)
        and not gate.is_opt_in(options.root, header)
    ]
    if not path.exists():
        if public or suffix == ".hpp":
            faults.append(f"{umbrella}: expected a file that includes {len(public)} headers, there is none")
        return
    listed = [name for _, name in gate.includes(path) if name != also]
    if also and not any(name == also for _, name in gate.includes(path)):
        faults.append(f"{umbrella}: doesn't include {also}")
    faults.extend(f"{umbrella}: {header} is missing" for header in public if header not in listed)
    faults.extend(f"{umbrella}: {header} doesn't belong here" for header in listed if header not in public)


compare("uniprefill.hpp", ".hpp", None)
compare("uniprefill.cuh", ".cuh", "uniprefill/uniprefill.hpp")
gate.finish(faults, "the umbrella headers")
