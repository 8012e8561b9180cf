// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/host_info.hpp"
#include "engine/app/options.hpp"
#include "engine/commands.hpp"
#include "engine/cuda/program.hpp"
#include "engine/inspect.hpp"

#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <vector>

namespace {

constexpr int exit_refused = 2;

void run(const engine::options& chosen) {
    switch (chosen.command) {
    case engine::command::calibrate:
        engine::run_calibrate(chosen);
        break;
    case engine::command::compare:
        engine::run_compare(chosen);
        break;
    case engine::command::generate:
        engine::run_generate(chosen);
        break;
    case engine::command::inspect:
        engine::inspect(chosen.model, chosen.json, std::cout);
        break;
    case engine::command::prefill:
        engine::run_cuda_prefill(chosen);
        break;
    case engine::command::serve_sim:
        engine::run_serve_sim(chosen);
        break;
    }
}

} // namespace

int main(int argc, char** argv) {
    try {
        const std::vector<std::string> arguments(argv + 1, argv + argc);
        const engine::command_line line = engine::parse_command_line(arguments, engine::usable_cores());
        std::cout << line.print;
        if (line.run) run(*line.run);
        if (!std::cout.flush()) {
            std::cerr << "uniprefill-engine: standard output: expected room to write, came an error\n";
            return exit_refused;
        }
        return 0;
    } catch (const std::bad_alloc&) {
        std::cerr << "uniprefill-engine: memory: expected enough for this model and prompt, came less\n";
    } catch (const std::exception& failure) {
        std::cerr << "uniprefill-engine: " << failure.what() << '\n';
    }
    return exit_refused;
}
