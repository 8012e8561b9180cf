// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
// The files of fuzz_gguf.cpp without its checks, for builds that measure coverage; with a folder as argument,
// writes the seeds there instead, for libFuzzer to begin from. See fuzz_gguf.sh.

#include "engine/error.hpp"
#include "engine/fuzz_harness.hpp"
#include "engine/fuzz_mutations.hpp"
#include "engine/model_file/gguf.hpp"

#include <fstream>
#include <iostream>
#include <random>
#include <string>

using namespace engine_test;

int main(int argc, char** argv) {
    if (argc != 3) {
        std::cerr << "arguments: expected FOLDER FILES, came " << argc - 1 << '\n';
        return 2;
    }
    const std::vector<seed_file> seeds = seed_files();
    for (std::size_t i = 0; i < seeds.size(); ++i) {
        const std::string path = std::string(argv[1]) + "/seed" + std::to_string(i) + ".gguf";
        std::ofstream out(path, std::ios::binary);
        const bytes& content = seeds[i].content;
        out.write(reinterpret_cast<const char*>(content.data()),
                  static_cast<std::streamsize>(content.size()));
        out.close();
        try {
            engine::gguf::open(path);
        } catch (const engine::error& refused) {
            std::cout << refused.what() << '\n';
        }
        load_everything(span_of(content));
    }
    std::mt19937_64 random(20260101);
    for (int i = std::stoi(argv[2]); i > 0; --i) {
        const bytes file = mutated(seeds[random() % seeds.size()], random);
        load_everything(span_of(file));
    }
    return 0;
}
