// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Masses by head and block of a real model, for lists as a model makes them: writes head_masses.inc, which
// cuda_attention.cu tiles.
//   uniprefill-record-masses MODEL TEXT-FILE > bench/attend/head_masses.inc
// A line is a head: the masses of its whole blocks of 64 rows, in 2^-24 of all that it gives to them. Heads
// of every fourth layer from the fourth on.

#include "engine/app/safe_text.hpp"
#include "engine/error.hpp"
#include "engine/model/machine.hpp"
#include "engine/reading/reader.hpp"

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

namespace {

void print_head(const uniprefill::head_mass_view& masses, std::int32_t head, std::int64_t blocks) {
    const auto mass = [&](std::int64_t block) {
        const std::int64_t at = head * masses.head_stride + block;
        return static_cast<double>(masses.free[at] + masses.forced[at]);
    };
    double all = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
        all += mass(block);
    }
    for (std::int64_t block = 0; block < blocks; ++block) {
        std::printf("%d,", static_cast<int>(mass(block) / all * (1 << 24)));
    }
    std::printf("\n");
}

void record(const std::string& model_path, const std::string& text_path) {
    engine::loaded_model model(model_path, engine::cpu::arithmetic::automatic);
    std::ifstream text_file(text_path, std::ios::binary);
    if (!text_file) throw engine::error("text file", "one that can be read", text_path);
    const std::string text((std::istreambuf_iterator<char>(text_file)), std::istreambuf_iterator<char>());
    engine::planned_request whole;
    whole.tag = uniprefill::request_tag::prefill;
    whole.tokens = model.words().encode(text);
    const auto rows = static_cast<std::int32_t>(whole.tokens.size());
    whole.span_ends = {rows};
    whole.logits_rows = {rows - 1};

    engine::session_options options;
    options.max_step_rows = options.max_tokens = rows;
    options.lists.emplace();
    engine::cpu_session session(model.weights(), model.ops(), options);
    session.admit(0);
    const engine::step_plan plan({std::move(whole)});
    engine::cpu_machine machine(session, plan);
    std::printf(
        "// SPDX-License-Identifier: Apache-2.0\n// SPDX-FileCopyrightText: The uniprefill authors\n\n"
        "// By record_masses.cpp: %s, %d tokens.\n",
        engine::printable(model.name()).c_str(), static_cast<int>(rows));
    for (;;) {
        const bool decides = machine.next() == engine::segment::decide;
        const std::int32_t layer = machine.layer();
        if (!machine.advance()) return;
        if (decides && layer % 4 == 3) {
            for (std::int32_t head = 0; head < model.config().heads; ++head) {
                print_head(machine.head_masses(), head, rows / options.block_rows);
            }
        }
    }
}

} // namespace

int main(int argc, char** argv) {
    try {
        if (argc != 3)
            throw engine::error("arguments", "MODEL TEXT-FILE", std::to_string(argc - 1) + " of them");
        record(argv[1], argv[2]);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "uniprefill-record-masses: %s\n", error.what());
        return 2;
    }
    return 0;
}
