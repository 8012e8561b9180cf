#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""clang-format has nothing to change in any C++ or CUDA source."""

import gate

options = gate.arguments(__doc__).parse_args()
tool = gate.need("clang-format")
sources = gate.tracked(options.root, ".hpp", ".cuh", ".inl", ".cpp", ".cu", ".h")
commands = {name: ([tool, "--dry-run", "-Werror", "--style=file", options.root / name], None) for name in sources}
failures = gate.run_all(commands, options.jobs)
gate.finish([f"{name}: clang-format would change it\n{output}" for name, output in failures], f"{len(sources)} files")
