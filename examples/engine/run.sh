#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
#
# Reads a long text with a real language model twice, dense and sparsified, on this machine's processor.
#   examples/engine/run.sh                      the whole GPL-3 (7,639 tokens) with SmolLM2-135M
#   examples/engine/run.sh compare --help       any other command of the engine, after the same set-up
# Installs what is missing (Debian packages), builds, gets the model. A second run skips what is done and needs no network.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${UNIPREFILL_BUILD_DIR:-$root/build/engine}
# libdnnl-dev's CMake files look for OpenCL, which it does not depend on.
packages=(g++ cmake make libdnnl-dev ocl-icd-opencl-dev nlohmann-json3-dev libcli11-dev python3 python3-pip)

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
[ -t 2 ] || say() { echo "$*" >&2; }

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' && continue
    # A compiler, CMake, make or Python that came from elsewhere does as well.
    case $package in
        g++ | cmake | make | python3) command -v "$package" >/dev/null && continue ;;
        python3-pip) python3 -m pip --version >/dev/null 2>&1 && continue ;;
    esac
    missing+=("$package")
done

if [ $# -eq 0 ]; then
    say "This reads the whole GPL-3 with SmolLM2-135M, dense and sparsified, and compares time and answers."
    say "It takes a minute or two of set-up the first time: packages (${missing[*]:-all there}), a build in ${build#"$root"/}, the model (98 MB)."
fi
if [ ${#missing[@]} -gt 0 ]; then
    install="apt-get install -y --no-install-recommends ${missing[*]}"
    if [ "$(id -u)" = 0 ]; then
        as_root=()
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root=(sudo -n)
    else
        echo "run.sh: packages: expected rights to install them, came none. Run this, then try again:" >&2
        echo "  sudo apt-get update && sudo $install" >&2
        exit 2
    fi
    say "Installing ${missing[*]}"
    "${as_root[@]}" apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" $install -qq >/dev/null
fi

engine=$build/examples/engine/uniprefill-engine
say "Building"
if [ ! -f "$build/CMakeCache.txt" ]; then
    cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DUNIPREFILL_CUDA=OFF -DUNIPREFILL_BUILD_TESTS=OFF \
        -DUNIPREFILL_BUILD_BENCH=OFF -DUNIPREFILL_BUILD_DOCS=OFF -DUNIPREFILL_ENGINE_NATIVE=ON >/dev/null
fi
cmake --build "$build" --target uniprefill-engine -j "$(nproc)" >/dev/null

if [ $# -gt 0 ]; then
    exec "$engine" "$@"
fi
model=$("$root/examples/engine/get_model.sh")
exec "$engine" compare --model "$model" --text-file /usr/share/common-licenses/GPL-3 --out "$build/report"
