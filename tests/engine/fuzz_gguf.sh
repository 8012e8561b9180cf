#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
#
# fuzz_gguf.sh coverage DIR            builds the 20,000-file test with clang's coverage, runs it, prints which lines of the
#                                      loader it reaches, and fails if less than 90 %
# fuzz_gguf.sh libfuzzer DIR [SECONDS] builds the libFuzzer target with ASan and UBSan, runs it on a corpus in DIR
# DIR is made if it isn't there. Ends with 77 (skipped) where clang or what goes with it is missing.
set -eu

usage() {
    echo "fuzz_gguf.sh: expected coverage DIR or libfuzzer DIR [SECONDS], came: $*" >&2
    exit 2
}
[ $# -ge 2 ] || usage "$@"
mode=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
seconds=${3:-60}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
loader=$root/examples/engine/model_file
compile="clang++ -std=c++17 -g -O1 -I$root/examples -I$root/tests"

need() {
    command -v "$1" >/dev/null 2>&1 || {
        echo "skipped: $1 isn't there"
        exit 77
    }
}
need clang++

case $mode in
coverage)
    need llvm-profdata
    need llvm-cov
    $compile -fprofile-instr-generate -fcoverage-mapping "$loader"/*.cpp "$here/gguf_builder.cpp" \
        "$here/gguf_samples.cpp" "$here/fuzz_harness.cpp" "$here/fuzz_mutations.cpp" "$here/fuzz_gguf_coverage.cpp" \
        -o "$out/fuzz_gguf_coverage"
    mkdir -p "$out/corpus"
    LLVM_PROFILE_FILE=$out/raw.profraw "$out/fuzz_gguf_coverage" "$out/corpus" 20000
    llvm-profdata merge -o "$out/merged.profdata" "$out/raw.profraw"
    llvm-cov report "$out/fuzz_gguf_coverage" -instr-profile="$out/merged.profdata" \
        -show-region-summary=false -show-branch-summary=false "$loader"/*.cpp >"$out/report.txt"
    cat "$out/report.txt"
    # The last column of the last line is the share of lines reached.
    awk '/^TOTAL/ { reached = $NF; sub("%", "", reached) }
         END { if (reached + 0 < 90) { print "expected 90 % of the loader, reached " reached; exit 1 } }' "$out/report.txt"
    ;;
libfuzzer)
    echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$out/probe.cpp"
    $compile -fsanitize=fuzzer "$out/probe.cpp" -o "$out/probe" 2>/dev/null || {
        echo "skipped: clang++ has no libFuzzer here"
        exit 77
    }
    $compile -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all "$loader"/*.cpp "$here/fuzz_harness.cpp" \
        "$here/fuzz_gguf_libfuzzer.cpp" -o "$out/fuzz_gguf_libfuzzer"
    $compile "$loader"/*.cpp "$here/gguf_builder.cpp" "$here/gguf_samples.cpp" "$here/fuzz_harness.cpp" \
        "$here/fuzz_mutations.cpp" "$here/fuzz_gguf_coverage.cpp" -o "$out/fuzz_gguf_seeds"
    mkdir -p "$out/corpus"
    "$out/fuzz_gguf_seeds" "$out/corpus" 0
    "$out/fuzz_gguf_libfuzzer" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
        -print_final_stats=1 "$out/corpus"
    ;;
*) usage "$@" ;;
esac
