#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Under nvcc, for sm_80 and sm_90a: each .cuh alone, all .hpp together, then a program of several translation units.

With warnings as errors, relocatable device code on and off, C++17 and C++20, the flags that switch CUDA's half and
bfloat16 operators off (torch sets them), fast math, and without the extensions for lambdas and constexpr functions.
Then the PTX of all headers together, included and not used, which must have no kernel: an includer pays for what it uses.
"""

import gate

TORCH = ["HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS", "BFLOAT16_OPERATORS"]
BASE = [f"-D__CUDA_NO_{name}__" for name in TORCH]
BASE += ["-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"]
BASE += ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90a,code=sm_90a"]
VARIANTS = {
    "C++17, rdc": ["-std=c++17", "-rdc=true"],
    "C++20, fast math": ["-std=c++20", "-rdc=false", "-use_fast_math"],
}

options = gate.arguments(__doc__).parse_args()
nvcc = gate.need("nvcc")
device, device_flags = gate.compilable(options.root, nvcc, ".cuh")
host, host_flags = gate.compilable(options.root, nvcc, ".hpp")
host = [h for h in host if not gate.needs_exceptions(options.root, h)]
sources = {header: gate.include_lines([header]) for header in device}
sources["all .hpp"] = gate.include_lines(host)
faults = []

with gate.scratch() as folder:

    def nvcc_command(source_name, text, *flags):
        path = f"{folder}/{source_name}"
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return [nvcc, *BASE, *device_flags, *host_flags, f"-I{options.root}/include", *flags, "-c", path, "-o", f"{path}.o"], None

    commands = {}
    for number, (name, text) in enumerate(sources.items()):
        for letter, (variant, flags) in zip("xy", VARIANTS.items()):
            commands[f"{name} ({variant})"] = nvcc_command(f"alone_{number}{letter}.cu", text, *flags)
    everything = gate.include_lines(host + device)
    rdc = VARIANTS["C++17, rdc"]
    for unit in "ab":
        text = everything + f"int value_of_{unit}() {{ return 1; }}\n"
        commands[f"unit {unit}"] = nvcc_command(f"{unit}.cu", text, *rdc)
    main = "int value_of_a(); int value_of_b();\nint main() { return value_of_a() + value_of_b() == 2 ? 0 : 1; }\n"
    commands["unit main"] = nvcc_command("main.cu", main, *rdc)

    faults += [f"{name}:\n{output}" for name, output in gate.run_all(commands, options.jobs)]
    if not faults:
        units = [f"{folder}/{unit}.cu.o" for unit in ("main", "a", "b")]
        arch = [flag for flag in BASE if flag.startswith("-gencode")]
        linked = gate.run([nvcc, *arch, *rdc, *units, "-o", f"{folder}/program"])
        if linked.returncode:
            faults.append(f"linking two units:\n{linked.stdout}")
        elif gate.run([f"{folder}/program"]).returncode:
            faults.append("the program of two units gives a wrong answer")
        ptx = gate.run([nvcc, *device_flags, *host_flags, "-std=c++17", f"-I{options.root}/include", "-arch=compute_80", "-ptx", f"{folder}/a.cu", "-o", f"{folder}/a.ptx"])
        if ptx.returncode:
            faults.append(f"PTX of all headers:\n{ptx.stdout}")
        else:
            with open(f"{folder}/a.ptx", encoding="utf-8") as file:
                faults += [f"instantiated by inclusion alone: {line.strip()}" for line in file if ".entry " in line]
gate.finish(faults, f"{len(commands)} translation units")
