#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Every gate can fail: each accepts a small clean tree, and refuses it once one thing in it is spoilt."""

import pathlib
import shutil
import sys

import gate

LICENCE = "// SPDX-License-Identifier: Apache-2.0\n// SPDX-FileCopyrightText: The uniprefill authors\n"
SCALE = "include/uniprefill/core/scale.hpp"
RULE = "include/uniprefill/select/rule.hpp"
UMBRELLA = "include/uniprefill/uniprefill.hpp"
KERNEL = "include/uniprefill/core/kernel.cuh"
RANKS = "include/uniprefill/comm/ranks.hpp"

CLEAN = {
    SCALE: """
/// @file
/// A clean header.
#pragma once

#include <cstdint>

/// Keeps a symbol inside its shared object.
#define UNIPREFILL_SELFTEST_HIDDEN __attribute__((visibility("hidden")))

namespace uniprefill {

/// Twice @p value.
UNIPREFILL_SELFTEST_HIDDEN constexpr std::int32_t twice(std::int32_t value) noexcept {
    return 2 * value;
}

/// What a call comes to.
struct status {
    std::int32_t code = 0;
};

} // namespace uniprefill
""",
    RULE: """
/// @file
/// Another clean header.
#pragma once

#include <uniprefill/core/scale.hpp>

namespace uniprefill {

/// Refuses what is negative. @return an error then. Complexity O(1). Thread-safe, deterministic.
inline UNIPREFILL_SELFTEST_HIDDEN status check(std::int32_t value) noexcept {
    return {value < 0 ? 1 : 0};
}

} // namespace uniprefill
""",
    UMBRELLA: """
/// @file
/// Everything.
#pragma once

#include <uniprefill/core/scale.hpp>
#include <uniprefill/select/rule.hpp>
""",
    "include/uniprefill/uniprefill.cuh": """
/// @file
/// Everything, for nvcc.
#pragma once

#include <uniprefill/core/kernel.cuh>
#include <uniprefill/uniprefill.hpp>
""",
    KERNEL: """
/// @file
/// A clean device header.
#pragma once

#include <uniprefill/core/scale.hpp>

namespace uniprefill {

/// Doubles each element. @p values is [count].
template <class T>
__global__ UNIPREFILL_SELFTEST_HIDDEN void twice_kernel(T* values, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) {
        values[i] = 2 * values[i];
    }
}

} // namespace uniprefill
""",
    RANKS: """
/// @file
/// A clean header over a library, which not everybody has: in no umbrella.
#pragma once

#include <uniprefill/core/scale.hpp>

#include <mpi.h>

namespace uniprefill {

/// How many ranks there are.
inline UNIPREFILL_SELFTEST_HIDDEN int num_ranks(MPI_Comm ranks) noexcept {
    int count = 0;
    MPI_Comm_size(ranks, &count);
    return count;
}

} // namespace uniprefill
""",
    "examples/one.cpp": """
#include <uniprefill/uniprefill.hpp>

int main() {
    const uniprefill::status answer = uniprefill::check(1);
    return answer.code;
}
""",
    "tests/kernels.cu": """
#include <uniprefill/core/kernel.cuh>

template __global__ void uniprefill::twice_kernel<int>(int* values, int count);
""",
    "README.md": "```cpp\nconst uniprefill::status answer = uniprefill::check(1);\nreturn answer.code;\n```\n",
}


def into(path, text):
    """Spoils a file by adding text before its last closing line (inside the namespace, where there is one)."""

    def spoil(root):
        file = root / path
        lines = file.read_text().splitlines()
        file.write_text("\n".join(lines[:-1] + [text, lines[-1]]) + "\n")

    return spoil


def replace(path, old, new):
    def spoil(root):
        file = root / path
        text = file.read_text()
        assert old in text, (path, old)
        file.write_text(text.replace(old, new))

    return spoil


def create(path, text):
    def spoil(root):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    return spoil


def header(text):
    return f"{LICENCE}\n/// @file\n/// A header.\n#pragma once\n\n{text}"


# (script, arguments, {what is spoilt: (how, words of the complaint)})
UNFINISHED = "TO" "DO"
CASES = [
    ("header_alone.py", [], {
        "a missing include": (replace(SCALE, "#include <cstdint>", ""), "scale.hpp"),
        "shadowing": (into(SCALE, "inline int f(int a) { { int a = 1; return a; } }"), "shadow"),
        "an exception": (into(RULE, "inline bool g(void* p) { return dynamic_cast<int*>((int*)p) && typeid(int).name(); }"),
                         "rule.hpp"),
        "no include guard": (replace(SCALE, "#pragma once", ""), "redefinition"),
    }),
    ("poison.py", [], {
        "a bare min": (into(RULE, "template <class T> T least(T a, T b) { return std::min(a, b); }"), "poisoned"),
        "a name that is a macro elsewhere": (into(SCALE, "enum class size { small };"), "small"),
    }),
    ("macros.py", [], {
        "a macro without prefix": (into(SCALE, "#define TWICE(x) (2 * (x))"), "TWICE"),
        "one in a branch that isn't taken": (into(SCALE, "#ifdef __CUDACC__\n#define LANES 32\n#endif"), "LANES"),
        "an undefined one": (into(SCALE, "#undef assert"), "assert"),
    }),
    ("linkage.py", [], {
        "a function that isn't inline": (into(SCALE, "inline int h() { return 1; }\nint plain() { return 1; }"),
                                         "multiple definition"),
        "an exported function": (into(SCALE, "inline int h() { return 1; }"), "uniprefill::h"),
    }),
    ("hidden.py", [], {
        "an inline function": (into(SCALE, "inline int h() { return 1; }"), "uniprefill::h() isn't hidden"),
        "a template that nobody uses": (into(SCALE, "template <class T> T h(T v) { return v; }"), "uniprefill::h()"),
        "a member": (into(RULE, "struct pair { int a() const { return 1; } };"), "uniprefill::pair::a()"),
    }),
    ("cuda_headers.py", [], {
        "a header that doesn't compile": (into(KERNEL, "inline __device__ int lane() { return undeclared; }"), "undeclared"),
        "a warning": (into(KERNEL, "inline __device__ int lane() { int unused; return 0; }"), "unused"),
        "half's operators": (replace(KERNEL, "    const int i", "    (void)(__half(1) + __half(2));\n    const int i"),
                             "kernel.cuh"),
        "a kernel that isn't a template": (into(KERNEL, "__global__ void twice_all(int* v) { *v = 2; }"), "twice_all"),
    }),
    ("fast_math.py", ["--unit", "tests/kernels.cu"], {
        "a division": (replace(KERNEL, "2 * values[i]", "int(2.0f / float(values[i]))"), "div.rn.f32"),
        "a sum that flushes by flag": (replace(KERNEL, "2 * values[i]", "int(0.5f + float(values[i]))"), "add.ftz.f32"),
        "a unit without kernels": (create("tests/kernels.cu", "#include <uniprefill/core/kernel.cuh>\n"), "no kernel"),
    }),
    ("umbrella.py", [], {
        "a header left out": (create("include/uniprefill/select/other.hpp", header("")), "other.hpp is missing"),
        "a detail listed": (into(UMBRELLA, "#include <uniprefill/core/detail/x.hpp>"), "doesn't belong"),
        "a header over a library listed": (into(UMBRELLA, f"#include <{RANKS[8:]}>"), "doesn't belong"),
    }),
    ("arrows.py", [], {
        "a sibling": (create("include/uniprefill/propagate/x.hpp", header("#include <uniprefill/select/rule.hpp>\n")),
                      "propagate may not include"),
        "core knows a room": (into(SCALE, "#include <uniprefill/select/rule.hpp>"), "circle"),
        "an engine's header": (into(KERNEL, "#include <torch/torch.h>"), "torch/torch.h"),
        "a heavy header": (into(RULE, "#include <iostream>"), "iostream"),
        "a relative name": (into(RULE, '#include "../core/scale.hpp"'), "own headers are"),
        "an opt-in header": (into(RULE, f"#include <{RANKS[8:]}>"), "is opt-in"),
        "a library between ranks, elsewhere": (into(SCALE, "#include <mpi.h>"), "mpi.h"),
        "a library over CUDA in a .hpp": (into(RANKS, "#include <nccl.h>"), "nccl.h"),
        "an unknown room": (create("include/uniprefill/misc/x.hpp", header("")), "no such room"),
    }),
    ("include_time.py", ["--budget", "0"], {"any cost at all": (lambda root: None, "over the budget")}),
    ("doxygen.py", [], {
        "a function without a comment": (into(SCALE, "int thrice(int value);"), "thrice isn't described"),
        "an unknown parameter": (replace(SCALE, "/// Twice", "/// @param other nothing\n/// Twice"), "other"),
        "a contract without a word on threads": (replace(RULE, "Thread-safe, ", ""), "doesn't say: thread safety"),
    }),
    ("format.py", [], {"a space too many": (replace(SCALE, "2 * value", "2  * value"), "scale.hpp")}),
    ("tidy.py", [], {
        "a suspicious line": (into(RULE, "inline bool odd(const char* s) { return s == nullptr ? true : true; }"), "rule.hpp"),
        "an old habit": (into(RULE, "inline int* none() { return 0; }"), "nullptr"),
    }),
    ("text.py", [], {
        "no licence": (create("examples/two.cpp", "int main() {}\n"), "SPDX"),
        "unfinished work": (into(SCALE, f"// {UNFINISHED}: more"), "unfinished"),
        "a path of one machine": (create("docs/x.md", "see /ho" "me/someone/data\n"), "one machine"),
        "a tab": (into(SCALE, "\t"), "tab"),
        "an alternative token": (into(SCALE, "constexpr bool both(bool a, bool b) { return a and b; }"), "'and'"),
        "no pragma once": (replace(SCALE, "#pragma once\n", ""), "pragma once"),
        "a script that can't be run": (create("tests/x.sh", "#!/bin/sh\n" + LICENCE.replace("//", "#")), "executable"),
        "a character that can't be seen": (create("docs/x.md", "a\u202eb\n"), "invisible"),
    }),
    ("readme_code.py", [], {
        "code that drifted": (replace("README.md", "check(1)", "check_all(1)"), "README.md:1"),
        "a program that moved": (create("docs/x.md", "```sh\nexamples/engine/go.sh --help\n```\n"), "go.sh doesn't exist"),
    }),
]  # fmt: skip

# objects.py looks at a build: here, of one translation unit.
OBJECTS = {
    "a function that isn't hidden": ("namespace uniprefill { template <class T> T f(T v) { return v; } }\n"
                                     "int use() { return uniprefill::f(1); }\n", "not hidden"),
    "a local static": ('#define H __attribute__((visibility("hidden")))\nnamespace uniprefill { inline H int next() '
                       "{ static int n = 0; return ++n; } }\nint use() { return uniprefill::next(); }\n",
                       "static and not constant"),
}  # fmt: skip

parser = gate.arguments(__doc__)
parser.add_argument("--only", help="one script")
options = parser.parse_args()
here = pathlib.Path(__file__).resolve().parent
faults, tried = [], 0


def judge(script, root, *extra):
    return gate.run([sys.executable, here / script, "--root", root, "--jobs", options.jobs, *extra])


def expect(what, result, code, words=""):
    global tried
    tried += 1
    if result.returncode != code or words not in result.stdout:
        faults.append(f"{what}: exit code {code} and {words!r} expected, came {result.returncode}:\n{result.stdout}")


def clean_tree(folder):
    root = pathlib.Path(folder)
    for name, text in CLEAN.items():
        create(name, text if name.endswith(".md") else LICENCE + text)(root)
    (root / "docs").mkdir()
    for name in (".clang-format", ".clang-tidy", "docs/Doxyfile"):
        shutil.copy(options.root / name, root / name)
    return root


for script, extra, spoilings in CASES:
    if options.only and options.only != script:
        continue
    with gate.scratch() as folder:
        accepted = judge(script, clean_tree(folder), *(["--budget", "60"] if "--budget" in extra else extra))
    if accepted.returncode == gate.SKIP:
        print(f"{script}: {accepted.stdout.strip()}")
        continue
    expect(f"{script}, clean", accepted, 0)
    for what, (spoil, words) in spoilings.items():
        with gate.scratch() as folder:
            root = clean_tree(folder)
            spoil(root)
            expect(f"{script}, {what}", judge(script, root, *extra), 1, words)

if not options.only or options.only == "objects.py":
    for what, (source, words) in OBJECTS.items():
        with gate.scratch() as folder:
            gate.run(["g++", "-std=c++17", "-O0", "-c", "-o", f"{folder}/unit.o", "-x", "c++", "-"], input=source)
            expect(f"objects.py, {what}", judge("objects.py", options.root, "--build", folder), 1, words)
gate.finish(faults, f"{tried} trials of the gates")
