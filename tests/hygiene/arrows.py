#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""What may include what: rooms know core and their own, with two exceptions; pipeline knows all; nobody knows engines.

Own headers are named absolutely (<uniprefill/...>), exist, and form no circle. From outside: the C++17 library without
its heavy parts, OpenMP and vector intrinsics; in .cuh also the toolkit's runtime and block-wide primitives; in comm also
the libraries between ranks.
"""

import re

import gate

ROOMS = "core importance select propagate ledger attend kv preempt schedule comm pipeline adapt".split()
KNOWS = {room: {"core", room} for room in ROOMS}
KNOWS["kv"] |= {"attend", "ledger"}
KNOWS["pipeline"] = set(ROOMS)

STANDARD = set(
    "algorithm array atomic bitset cassert cerrno cfloat chrono climits cmath cstddef cstdint cstdio cstdlib cstring "
    "functional initializer_list iterator limits memory mutex new numeric optional stdexcept string string_view thread "
    "condition_variable tuple type_traits utility variant vector version".split()
)
INTRINSICS = {"omp.h", "immintrin.h", "arm_neon.h"}
TOOLKIT = re.compile(r"^(cuda(_runtime(_api)?|_fp16|_bf16|_fp8|_pipeline)?\.h|nvtx3/nvToolsExt\.h|cub/(block|warp|util)\S*"
                     r"|cuda/(std/)?\w+|mma\.h)$")  # fmt: skip

options = gate.arguments(__doc__).parse_args()
include = options.root / "include"
names = gate.headers(options.root, ".hpp", ".cuh", ".inl")
faults = []
arrows = {}


def room_of(header):
    parts = header.split("/")
    return parts[1] if len(parts) > 2 else None  # None: an umbrella


for header in names:
    room = room_of(header)
    if room is not None and room not in KNOWS:
        faults.append(f"{header}: no such room ({', '.join(ROOMS)})")
        continue
    arrows[header] = []
    for delimiter, name in gate.includes(include / header):
        if name.startswith("uniprefill/"):
            arrows[header].append(name)
            if delimiter == '"':
                faults.append(f'{header}: <{name}> expected, came "{name}"')
            if not (include / name).is_file():
                faults.append(f"{header}: {name} doesn't exist")
            elif room is not None and room_of(name) is None:
                faults.append(f"{header}: includes the umbrella {name}")
            elif room is not None and room_of(name) not in KNOWS[room]:
                faults.append(f"{header}: {room} may not include {name}")
            elif room is not None and gate.is_detail(name) and room_of(name) not in (room, "core"):
                faults.append(f"{header}: {name} is a detail of another room")
            if name.endswith(".cuh") and header.endswith(".hpp"):
                faults.append(f"{header}: a .hpp may not include {name}")
            if (include / name).is_file() and gate.is_opt_in(options.root, name):
                faults.append(f"{header}: {name} is opt-in, so it is for users alone")
        elif delimiter == '"':
            faults.append(f'{header}: "{name}": own headers are <uniprefill/...>')
        elif name in STANDARD or name in INTRINSICS:
            pass
        elif room == "comm" and (name == "mpi.h" or (name == "nccl.h" and header.endswith(".cuh"))):
            pass
        elif not (header.endswith((".cuh", ".inl")) and TOOLKIT.match(name)):
            faults.append(f"{header}: <{name}> is not among the headers that the library may use")

done, path = set(), []


def visit(header):
    if header in path:
        circle = path[path.index(header):] + [header]
        faults.append("circle: " + " -> ".join(circle))
    elif header not in done:
        path.append(header)
        for name in arrows.get(header, []):
            visit(name)
        path.pop()
        done.add(header)


for header in names:
    visit(header)
gate.finish(faults, f"{len(names)} headers")
