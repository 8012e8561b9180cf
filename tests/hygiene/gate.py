# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""What the gates share: the tree they look at, how they run tools, how they end.

Every gate takes --root (the tree to judge, this one by default), prints one line for each fault, and exits with 0 when
there is none, 1 when there are some, 77 when a tool that it needs isn't installed.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
NO_RUNTIME = ["-fno-exceptions", "-fno-rtti"]
SKIP = 77


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    here = pathlib.Path(__file__).resolve()
    parser.add_argument("--root", type=pathlib.Path, default=here.parents[2], help="the tree to judge")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    return parser


def need(tool):
    """The tool's path; ends the gate as skipped where there is none."""
    path = shutil.which(tool)
    if path is None:
        print(f"skipped: {tool} is not installed")
        sys.exit(SKIP)
    return path


def run(command, **options):
    """Runs a command with its output merged and captured as text."""
    return subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def run_all(commands, jobs):
    """Runs {name: (command, input)} at most `jobs` at once; gives (name, start of its output) of those that failed."""

    def one(item):
        name, (command, text) = item
        result = run(command, input=text)
        return (name, "\n".join(result.stdout.splitlines()[:25])) if result.returncode else None

    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        return [failure for failure in pool.map(one, commands.items()) if failure]


def headers(root, *suffixes):
    """Headers as `uniprefill/room/name.hpp`, sorted."""
    include = root / "include"
    found = [path for path in sorted(include.rglob("*")) if path.is_file() and path.suffix in suffixes]
    return [path.relative_to(include).as_posix() for path in found]


def is_detail(header):
    return "detail" in header.split("/")


def needs_exceptions(root, header):
    """Opt-in headers that throw: no other header may include them, the umbrella leaves them out."""
    return re.search(r"\bthrow\b", code_of(root / "include" / header)) is not None


# Headers over a library that not everybody has: its header, and what prints the flags that find it (where it isn't found
# without). They are opt-in: no other header may include them, no umbrella lists them, and they are compiled where the
# library is installed.
LIBRARIES = {"mpi.h": ["pkg-config", "--cflags-only-I", "mpi-cxx"], "nccl.h": []}


def library_of(root, header):
    """The header of the library that ours is over, None for those that need none."""
    return next((name for _, name in includes(root / "include" / header) if name in LIBRARIES), None)


def is_opt_in(root, header):
    return needs_exceptions(root, header) or library_of(root, header) is not None


def compilable(root, compiler, *suffixes):
    """Headers whose libraries the compiler finds, and the flags that it finds them with. Tells which it doesn't find."""
    ours = headers(root, *suffixes)
    flags, absent = [], set()
    for library in sorted({library_of(root, header) for header in ours} - {None}):
        hint = LIBRARIES[library]
        printed = run(hint).stdout if hint and shutil.which(hint[0]) else ""
        folders = [word[2:] for word in printed.split() if word.startswith("-I")]
        found = [word for folder in folders for word in ("-isystem", folder)]
        found.append("-DOMPI_SKIP_MPICXX")  # Open MPI's C++ bindings are long gone from MPI
        probe = f"#if !__has_include(<{library}>)\n#error\n#endif\n"
        language = "cu" if "nvcc" in str(compiler) else "c++"
        if run([compiler, *found, "-E", "-x", language, "-"], input=probe).returncode:
            absent.add(library)
        else:
            flags += found
    left_out = [header for header in ours if library_of(root, header) in absent]
    for header in left_out:
        print(f"left out, as <{library_of(root, header)}> isn't installed: {header}")
    return [header for header in ours if header not in left_out], flags


def code_of(path):
    """The text without comments and string literals, line structure kept."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)

    def blank(match):
        text = match.group(0)
        return '""' if text[0] in "\"'" else "\n" * text.count("\n")

    return pattern.sub(blank, without_digit_separators(path.read_text(encoding="utf-8")))


def without_digit_separators(text):
    return re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", "", text)


INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def includes(path):
    """The (delimiter, name) of each include directive."""
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


def foreign_includes(root, *suffixes):
    """Everything that our headers include and that isn't ours, as lines that tolerate absence."""
    names = set()
    for header in headers(root, *suffixes):
        names |= {name for _, name in includes(root / "include" / header) if not name.startswith("uniprefill/")}
    return "".join(f"#if __has_include(<{n}>)\n#include <{n}>\n#endif\n" for n in sorted(names))


def include_lines(names):
    return "".join(f"#include <{name}>\n" for name in names)


def tracked(root, *suffixes):
    """Files under version control or about to be; every file where there is no repository."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, text=True
    )
    if listed.returncode == 0 and (root / ".git").exists():
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    names = sorted(name for name in set(names) if (root / name).is_file())
    return [name for name in names if not suffixes or pathlib.PurePosixPath(name).suffix in suffixes]


def scratch():
    return tempfile.TemporaryDirectory(prefix="uniprefill-gate-")


def finish(faults, looked_at):
    for fault in faults:
        print(fault)
    print(f"{len(faults)} fault(s) in {looked_at}")
    sys.exit(1 if faults else 0)
