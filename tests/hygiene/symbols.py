# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Reads the symbols that object files carry for the library."""

import re

import gate

# Mangled names of things that live in namespace uniprefill: functions and variables, their guards and local statics,
# vtables and typeinfo. A name that merely has one of our types among its parameters doesn't match.
OURS = re.compile(r"^_Z(?:GV|GR|T[VTISCW])?Z?(?:N[VKRO]*)?10uniprefill")

# An exception type must be recognised across shared objects, so its typeinfo and its vtable stay visible.
EXCEPTION = re.compile(r"^_ZT[VIS]N10uniprefill\d+v\d+_\d+5errorE")

# Members that the compiler writes (default, copy and move constructors, destructors, assignments) can't be annotated in
# an aggregate, and do the same in every build of one version.
IMPLICIT = re.compile(r"(?:^|::)(?:(\w+)(?:<.*>)?::~?\1|(\w+)(?:<.*>)?::operator=)\((?:uniprefill::[^,]*(?:const&|&&))?\)$")


def demangled(names):
    return gate.run(["c++filt", *names]).stdout.split("\n")[: len(names)] if names else []


def ours(name):
    return OURS.match(name) and not EXCEPTION.match(name)


def exported(path, *nm_flags):
    """Symbols of ours that another shared object could bind to."""
    listing = gate.run(["nm", "--defined-only", *nm_flags, path]).stdout
    names = [line.split()[-1] for line in listing.splitlines() if line.split()]
    return [f"exports {name}" for name in demangled([name for name in names if ours(name)]) if not IMPLICIT.search(name)]


def visible(path):
    """Symbols of ours in an object file that aren't hidden: they would be exported by a shared object."""
    listing = gate.run(["readelf", "-sW", path]).stdout
    names = []
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[4] in ("GLOBAL", "WEAK", "UNIQUE") and fields[5] == "DEFAULT":
            if fields[6] != "UND" and ours(fields[7]):
                names.append(fields[7])
    return [name for name, plain in zip(names, demangled(names)) if not IMPLICIT.search(plain)]


def mutable(path):
    """Static variables of ours in a section that can be written."""
    listing = gate.run(["nm", "--defined-only", "--format=sysv", path]).stdout
    fields = [[word.strip() for word in line.split("|")] for line in listing.splitlines() if "|" in line]
    written = re.compile(r"^\.t?(?:data|bss)(?!\.rel\.ro)")
    return [f[0] for f in fields if OURS.match(f[0]) and written.match(f[-1])]
