// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Prints a digest of everything that select writes over many random steps. The same source is compiled with
// several sets of flags; compare_digests.cmake demands that all print the same.

#include "step.hpp"

#include <cstdio>
#include <cstdlib>

using namespace select_test;

namespace {

/// FNV-1a over 64-bit words.
struct digest {
    std::uint64_t value = 0xcbf29ce484222325u;
    void add(std::int64_t word) {
        for (int byte = 0; byte < 8; ++byte) {
            value = (value ^ (static_cast<std::uint64_t>(word) >> (8 * byte) & 0xffu)) * 0x100000001b3u;
        }
    }
};

} // namespace

int main(int argc, char** argv) {
    const long cases = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 10000;
    const unsigned long seed = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 20260101;
    generator random(seed);
    digest sum;
    std::int64_t dropped = 0;
    for (long i = 0; i < cases; ++i) {
        step what = random_step(random);
        const auto made = select(what);
        if (!made->result.ok()) {
            std::fprintf(stderr, "case %ld: %s\n", i, made->result.argument);
            return 1;
        }
        sum.add(made->out.kept_bound);
        for (const std::int32_t row : made->rows()) {
            sum.add(row);
        }
        for (std::int32_t s = 0; s < what.num_segments(); ++s) {
            const up::segment_outcome& told = made->outcome(s);
            sum.add(told.total_mass);
            sum.add(told.dropped_mass);
            sum.add(told.kept);
            sum.add(told.cut_block);
            sum.add(static_cast<std::int64_t>(told.reason));
            dropped += told.rows - told.kept;
        }
    }
    std::printf("%ld cases, seed %lu: %lld rows dropped, digest %016llx\n", cases, seed,
                static_cast<long long>(dropped), static_cast<unsigned long long>(sum.value));
    return 0;
}
