#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
#
# Set-up, build, every test: the plain build, one under ASan and UBSan, one under TSan, judged in one ctest call.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tests/run.sh [--quick] [--no-install] [--no-model] [--jobs N] [-- CTEST OPTIONS]

  --quick        the plain build only, no sanitizers
  --no-install   don't look for missing packages
  --no-model     don't fetch the model; the tests that need it show as skipped
  --jobs N       processes at once (default: the number of processors)

Builds lie in build/tests. Options after -- go to ctest, for instance: tests/run.sh --quick -- -R hygiene
TEXT
}

refuse() { # one line to the error stream, exit code 2
    echo "tests/run.sh: $1" >&2
    exit 2
}

sanitizers=yes install=yes model=yes jobs=$(nproc)
while [ $# -gt 0 ]; do
    case $1 in
    --quick) sanitizers=no ;;
    --no-install) install=no ;;
    --no-model) model=no ;;
    --jobs)
        jobs=${2:-}
        [[ $jobs =~ ^[1-9][0-9]*$ ]] || refuse "--jobs: a number from 1 expected, came '$jobs'"
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    --)
        shift
        break
        ;;
    *) refuse "an option expected (see --help), came '$1'" ;;
    esac
    shift
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

# What is needed, by Debian's names. nvcc is used where it is, never installed.
packages=(
    git cmake ninja-build make pkg-config python3 python3-pip
    g++ clang llvm libclang-rt-dev libomp-dev g++-aarch64-linux-gnu
    clang-format clang-tidy doxygen
    catch2 libbenchmark-dev nlohmann-json3-dev libcli11-dev libopenblas-dev
    openmpi-bin libopenmpi-dev
    libdnnl-dev ocl-icd-opencl-dev # the CMake files of the first ask for the second
)

install_missing() {
    local missing=() name
    for name in "${packages[@]}"; do
        dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'install ok installed' || missing+=("$name")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    local command=(apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${missing[@]}") as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        if ! sudo -n true 2>/dev/null; then
            echo "Packages are missing. With an administrator's rights, run this and start again:" >&2
            echo "  apt-get update && ${command[*]}" >&2
            exit 2
        fi
        as_root=(sudo)
    fi
    echo "installing: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${as_root[@]}" apt-get -o DPkg::Lock::Timeout=300 -q update
    "${as_root[@]}" "${command[@]}"
}

if [ $install = yes ]; then
    if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
        install_missing
    else
        echo "no apt here: taking what is installed (Debian's names of what is needed: ${packages[*]})"
    fi
fi

if [ $model = yes ] && [ -x examples/engine/get_model.sh ]; then
    UNIPREFILL_MODEL=$(examples/engine/get_model.sh)
    export UNIPREFILL_MODEL
fi

trees=build/tests
build() { # PRESET: configures and builds it in its own folder
    echo "== building $1"
    cmake --preset "$1" -B "$trees/$1" -Wno-dev
    cmake --build "$trees/$1" -j "$jobs"
    echo "subdirs($1)" >>"$trees/CTestTestfile.cmake"
}

mkdir -p $trees
: >$trees/CTestTestfile.cmake
build release
if [ $sanitizers = yes ]; then
    build asan
    build tsan
fi

ctest --test-dir $trees --output-on-failure -j "$jobs" "$@"
