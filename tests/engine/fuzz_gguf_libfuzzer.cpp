// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
// The loader under libFuzzer: see fuzz_gguf.sh.

#include "engine/fuzz_harness.hpp"

#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    engine_test::load_everything({reinterpret_cast<const std::byte*>(data), size});
    return 0;
}
