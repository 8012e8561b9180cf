#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
#
# GPU tests, benchmarks, the example engine and the programs that measure its quality: built here, run here or on another machine.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tests/gpu.sh [--arch LIST] [--jobs N]     build into build/gpu/bin
       tests/gpu.sh --run [--quick] [PATTERN]    run what was built, then scaled down under each tool of compute-sanitizer
       tests/gpu.sh --bench FOLDER [PATTERN]     run the benchmarks, JSON into FOLDER

  --arch LIST   CMake's CUDA architectures (default "90a-real;80-virtual": SASS for Hopper, PTX for the rest)
  --jobs N      compilers at once (default: the number of processors)
  --quick       without compute-sanitizer
  PATTERN       only the executables whose name contains it

build/gpu/bin holds all that another machine needs besides its driver: copy it to the same place in a checkout there.
TEXT
}

refuse() { # one line to the error stream, exit code 2
    echo "tests/gpu.sh: $1" >&2
    exit 2
}

mode=build arch="90a-real;80-virtual" jobs=$(nproc) sanitize=yes pattern= out=
while [ $# -gt 0 ]; do
    case $1 in
    --run) mode=run ;;
    --bench)
        mode=bench out=${2:-}
        [ -n "$out" ] || refuse "--bench: a folder expected, none came"
        shift
        ;;
    --arch)
        arch=${2:-}
        [[ $arch =~ ^[0-9a-z\;-]+$ ]] || refuse "--arch: CMake's CUDA architectures expected, came '$arch'"
        shift
        ;;
    --jobs)
        jobs=${2:-}
        [[ $jobs =~ ^[1-9][0-9]*$ ]] || refuse "--jobs: a number from 1 expected, came '$jobs'"
        shift
        ;;
    --quick) sanitize=no ;;
    -h | --help)
        usage
        exit 0
        ;;
    -*) refuse "an option expected (see --help), came '$1'" ;;
    *) pattern=$1 ;;
    esac
    shift
done
[ -z "$out" ] || out=$(mkdir -p "$out" && cd "$out" && pwd)

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tree=build/gpu/tree bin=build/gpu/bin

build() {
    command -v nvcc >/dev/null || refuse "nvcc on the PATH expected, there is none"
    cmake -S . -B $tree -G Ninja -Wno-dev -DCMAKE_BUILD_TYPE=Release -DUNIPREFILL_CUDA=ON \
        -DUNIPREFILL_BUILD_DOCS=OFF -DCMAKE_CUDA_ARCHITECTURES="$arch" -DCMAKE_CUDA_RUNTIME_LIBRARY=Static \
        -DCMAKE_RUNTIME_OUTPUT_DIRECTORY="$PWD/$bin" -DCMAKE_BUILD_RPATH='$ORIGIN' -DCMAKE_EXE_LINKER_FLAGS=-s
    local targets
    mapfile -t targets < <(ninja -C $tree -t targets all |
        sed -nE 's/^(uniprefill-(engine|quality|passkeys)|uniprefill_(test_gpu\.|bench_.*(cuda|gpu))[^:]*): phony$/\1/p' | sort)
    cmake --build $tree -j "$jobs" --target "${targets[@]}"
    # Libraries that machines with a driver alone don't have.
    local library
    for library in $(cd $bin && ldd uniprefill* | awk '$1 ~ /^lib(benchmark|dnnl|gomp|OpenCL)\.so/ { print $3 }' | sort -u); do
        [ "$library" -ef "$bin/${library##*/}" ] || cp -L "$library" $bin/
    done
    git describe --always --dirty --abbrev=12 >$bin/commit || echo unknown >$bin/commit
    ls -sh $bin
}

# NCCL, cuBLASLt, cuDNN and the CUDA runtime where Python keeps them.
use_libraries_of_python() {
    local folders
    folders=$(python3 -c 'import glob, nvidia; print(":".join(f for path in nvidia.__path__ for f in sorted(glob.glob(path + "/*/lib"))))' 2>/dev/null) || return 0
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folders
}

executables() { # KIND
    local found
    mapfile -t found < <(compgen -G "$bin/uniprefill_$1*" | grep -F -e "$pattern" || true)
    [ ${#found[@]} -gt 0 ] || refuse "an executable $bin/uniprefill_$1*$pattern* expected (tests/gpu.sh builds them), there is none"
    printf '%s\n' "${found[@]}"
}

passed=0 skipped=0 failed=0
judge() { # NAME COMMAND...: runs it, one line, its output only where it fails
    local name=$1 log begin=$SECONDS code=0
    shift
    log=$(mktemp)
    timeout 900 "$@" >"$log" 2>&1 || code=$?
    case $code in
    0) passed=$((passed + 1)) && echo "passed   $name ($((SECONDS - begin)) s)" ;;
    77) skipped=$((skipped + 1)) && echo "skipped  $name ($(sed -n 's/^skipped: //p' "$log" | sort -u | paste -sd ';'))" ;;
    *) failed=$((failed + 1)) && echo "FAILED   $name (exit code $code)" && tail -n 60 "$log" ;;
    esac
    rm -f "$log"
}

# Under compute-sanitizer tests are scaled down: everything launches 5 to 100 times as slowly. They do 1 case in 200 of those
# drawn at random, and of sizes, grids and kinds as many as meet every kernel, with tiles and rows enough for several turns
# of each of its loops. Left out on purpose:
#   estimator   the longest of three n but for two head dimensions; 40,000 tokens stand for 2 million, a small pool for one of
#               2^31 elements (offsets of 64 bits are a matter of the full run)
#   attend      three of five numbers of heads of each combination, half of the kinds of steps, other grids and packings
#   selector    20,000 blocks stand for 262,144, 300 requests for 4,096
#   rows        tensors of more than 2^31 elements; the longest rows in tens instead of hundreds
#   facade      most tests with revival alone
#   comm_nccl   whole: its kernels are NCCL's and the facade's
#   engine      whole: its kernels are cuBLAS's, cuDNN's, engine_operators' and the library's
#   engine_windows the same
#   engine_hybrid  the same, and engine_linear's
# racecheck counts the barriers that each warp has passed. It can't follow warps that pass different numbers of them (named
# barriers), nor one lane that arrives at an mbarrier for its warp: it reports hazards in the plainest such kernel. What
# threads share in the kernels is kept within groups whose numbers agree, and all lanes arrive; but for attention on Hopper,
# where one lane arrives for its warp: racecheck reports 84 hazards there, so it isn't run, nor on select_query_lists, whose
# lists attention reads at the end.
# initcheck isn't run on engine_linear, which copies padding that nobody writes or uses along with what it needs.
left_out() { # TOOL TEST
    case ${2##*/uniprefill_test_gpu.}:$1 in
    comm_nccl:* | engine:* | engine_hybrid:* | engine_windows:* | attend*:racecheck | select_query_lists:racecheck | engine_linear:initcheck) return 0 ;;
    *) return 1 ;;
    esac
}
sanitized() { # TOOL TEST
    local fill=1 more=()
    [ "$1" = initcheck ] && fill=0                      # it would take what tests fill fresh memory with for a value
    [ "$1" = memcheck ] && more=(--report-api-errors no) # tests provoke them
    judge "${2##*/uniprefill_test_}, $1" env UNIPREFILL_TEST_SCALE=0.005 UNIPREFILL_TEST_FILL=$fill \
        compute-sanitizer --tool "$1" "${more[@]}" --error-exitcode 1 "$2"
}

run() {
    local tests test tool
    tests=$(executables test_gpu.)
    use_libraries_of_python
    for test in $tests; do
        judge "${test##*/uniprefill_test_}" "$test"
    done
    if [ $sanitize = yes ]; then
        command -v compute-sanitizer >/dev/null || refuse "compute-sanitizer on the PATH expected (or --quick), there is none"
        for tool in memcheck racecheck initcheck synccheck; do
            for test in $tests; do
                left_out $tool "$test" || sanitized $tool "$test"
            done
        done
    fi
    echo "$passed passed, $skipped skipped, $failed failed"
    [ $failed -eq 0 ] || exit 1
    [ $passed -gt 0 ] || exit 77
}

bench() {
    local benches one name device driver sm memory most power
    benches=$(executables bench_)
    command -v nvidia-smi >/dev/null || refuse "nvidia-smi on the PATH expected, there is none"
    local fields=clocks.sm,clocks.mem,temperature.gpu,power.draw
    IFS=, read -r device driver sm memory most power < <(nvidia-smi -i 0 --format=csv,noheader,nounits \
        --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit | sed 's/, /,/g')
    # What the clocks were while it ran, five times a second.
    nvidia-smi -i 0 --query-gpu=timestamp,$fields --format=csv -lms 200 >"$out/clocks.csv" &
    trap "kill $!" EXIT
    for one in $benches; do
        name=${one##*/uniprefill_bench_}
        echo "== $name"
        "$one" --benchmark_out="$out/$name.json" --benchmark_out_format=json --benchmark_context="device=$device,driver=$driver,\
commit=$(<$bin/commit),sm_clock_mhz_before=$sm,memory_clock_mhz=$memory,sm_clock_mhz_max=$most,power_limit_w=$power"
    done
}

$mode
