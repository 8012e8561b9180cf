#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
#
# Builds one of the consumer projects beside this script in a fresh folder, and runs its program.
# usage: build_consumer.sh KIND SOURCE_TREE INSTALLED_PREFIX BUILD_FOLDER VERSION
set -euo pipefail

kind=$1 source=$2 prefix=$3 build=$4 version=$5
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
IFS=. read -r major minor _ <<<"$version"
rm -rf "$build"
mkdir -p "$build"

with_cmake() { # PROJECT FOLDER OPTIONS...: configures and builds
    local project=$1 folder=$2
    shift 2
    cmake -S "$here/$project" -B "$folder" -DCMAKE_BUILD_TYPE=Debug -DFETCHCONTENT_FULLY_DISCONNECTED=ON \
        -DCMAKE_CXX_FLAGS="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror" "$@"
    cmake --build "$folder"
}

case $kind in
find_package)
    with_cmake find_package "$build" -DCMAKE_PREFIX_PATH="$prefix" -DTHIS_VERSION="$version" \
        -DNEXT_MINOR_VERSION="$major.$((minor + 1))"
    ;;
moved_prefix) # an installed tree that was moved afterwards
    cp -r "$prefix" "$build/elsewhere"
    PKG_CONFIG_PATH="$build/elsewhere/share/pkgconfig" make -C "$here/pkg_config" OUT="$build" THIS_VERSION="$version"
    with_cmake find_package "$build" -DCMAKE_PREFIX_PATH="$build/elsewhere" -DTHIS_VERSION="$version" \
        -DNEXT_MINOR_VERSION="$major.$((minor + 1))"
    ;;
add_subdirectory | fetch_content)
    with_cmake "$kind" "$build" -DUNIPREFILL_SOURCE="$source"
    cmake --install "$build" --prefix "$build/installed"
    if [ -e "$build/installed/include/uniprefill" ]; then
        echo "the consumer's installation holds uniprefill, which it didn't ask for" >&2
        exit 1
    fi
    ;;
raw_include)
    make -C "$here/raw_include" OUT="$build" UNIPREFILL_SOURCE="$source"
    ;;
pkg_config)
    PKG_CONFIG_PATH="$prefix/share/pkgconfig" make -C "$here/pkg_config" OUT="$build" THIS_VERSION="$version"
    ;;
reexport | reexport_vendored)
    if [ "$kind" = reexport ]; then
        with_cmake reexport/middle "$build/middle" -DCMAKE_PREFIX_PATH="$prefix"
        prefixes="$build/installed;$prefix"
    else
        with_cmake reexport/middle "$build/middle" -DUNIPREFILL_SOURCE="$source"
        prefixes="$build/installed"
    fi
    cmake --install "$build/middle" --prefix "$build/installed"
    with_cmake reexport/application "$build" -DCMAKE_PREFIX_PATH="$prefixes"
    ;;
*)
    echo "build_consumer.sh: KIND: a consumer project expected, came $kind" >&2
    exit 2
    ;;
esac

"$build/consumer"
