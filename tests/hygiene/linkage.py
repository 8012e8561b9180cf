#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Two translation units that both include everything link; two shared objects made so export nothing of ours.

Inline functions are kept even when unused, so that the linker sees them all; hidden.py sees templates too. Headers over
a library (MPI) are left to hidden.py: this program links no library.
"""

import gate
import symbols

options = gate.arguments(__doc__).parse_args()
compiler = gate.need("g++")
gate.need("nm")
headers = gate.headers(options.root, ".hpp")
everything = gate.include_lines(header for header in headers if gate.library_of(options.root, header) is None)
faults = []

with gate.scratch() as folder:

    def compile_to(output, source, *flags):
        command = [compiler, "-std=c++17", f"-I{options.root}/include", "-o", f"{folder}/{output}", *flags]
        result = gate.run(command + ["-x", "c++", "-"] if source else command, input=source)
        if result.returncode:
            faults.append(f"{output}:\n{result.stdout}")

    keep = ["-O0", "-fkeep-inline-functions", "-fPIC"]
    for letter in "ab":
        compile_to(f"{letter}.o", everything + f"int value_of_{letter}() {{ return 1; }}\n", "-c", *keep)
    main = "int value_of_a(); int value_of_b();\nint main() { return value_of_a() + value_of_b() == 2 ? 0 : 1; }\n"
    compile_to("main.o", main, "-c")
    if not faults:
        compile_to("two_units", None, *(f"{folder}/{name}.o" for name in ("main", "a", "b")))
        for letter in "ab":
            compile_to(f"lib{letter}.so", None, "-shared", f"{folder}/{letter}.o")
        compile_to("two_objects", None, f"{folder}/main.o", f"{folder}/liba.so", f"{folder}/libb.so")
    if not faults:
        for program in ("two_units", "two_objects"):
            if gate.run([f"{folder}/{program}"]).returncode:
                faults.append(f"{program}: wrong answer")
        faults += symbols.exported(f"{folder}/liba.so", "-D")
gate.finish(faults, "two translation units, two shared objects")
