#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
#
# Time to first token on this machine: llama.cpp (built from source for this processor, the best of its settings) against
# the example engine, dense and sparsified, on the same file, text and number of threads.
#   bench/compare_llama_cpp/run.sh [--threads T] [--text-file FILE] [--repeats R] [--out FILE]
# Builds llama-cpp-python in the cache folder the first time, which takes several minutes. LLAMA_PYTHON names a Python that
# has it already.
set -euo pipefail

readonly version=0.3.36
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cache=${UNIPREFILL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/uniprefill}

threads=$(nproc)
text=/usr/share/common-licenses/GPL-3
repeats=1
out=$root/bench/results/compare_llama_cpp.json
while [ $# -gt 0 ]; do
    if [ $# -lt 2 ]; then
        echo "run.sh: $1: expected a value after it, came none" >&2
        exit 2
    fi
    case $1 in
        --threads) threads=$2 ;;
        --text-file) text=$2 ;;
        --repeats) repeats=$2 ;;
        --out) out=$2 ;;
        *)
            echo "run.sh: option: expected --threads, --text-file, --repeats or --out, came $1" >&2
            exit 2
            ;;
    esac
    shift 2
done

model=$("$root/examples/engine/get_model.sh")

# Whether this Python's llama.cpp gets through a few tokens.
works() {
    "$1" "$here/time_to_first_token.py" --model "$model" --check >/dev/null 2>&1
}
build() {
    CMAKE_ARGS="-DGGML_NATIVE=ON" CXXFLAGS=$1 CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$python" -m pip install --quiet --no-cache-dir \
        --force-reinstall --no-binary llama-cpp-python "llama-cpp-python==$version"
}

python=${LLAMA_PYTHON:-$cache/llama-cpp-python-$version/bin/python}
if ! works "$python"; then
    if [ -n "${LLAMA_PYTHON:-}" ]; then
        echo "run.sh: LLAMA_PYTHON: expected a Python whose llama_cpp runs the model, came $LLAMA_PYTHON" >&2
        exit 2
    fi
    echo "Building llama-cpp-python $version for this processor" >&2
    python3 -m venv "$cache/llama-cpp-python-$version"
    build ""
    if ! works "$python"; then
        # GCC 12 takes the instruction that loads a tile configuration to read 8 bytes of its 64 and drops the stores to the
        # others, so llama.cpp's AMX code faults at its first product. Without that pass it runs.
        echo "It crashes; building it again without dead store elimination" >&2
        build "-fno-tree-dse -fno-dse"
        works "$python" || { echo "run.sh: llama.cpp: expected a build that runs the model, came a crash" >&2; exit 2; }
    fi
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/examples/engine/run.sh" compare --model "$model" --text-file "$text" --threads "$threads" --out "$work" >&2
commit=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
git -C "$root" diff --quiet HEAD 2>/dev/null || commit="$commit with changes"
"$python" "$here/time_to_first_token.py" --model "$model" --text-file "$text" --threads "$threads" --repeats "$repeats" \
    --report "$work/report.json" --commit "$commit" --out "$out"
