// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/progress.hpp"
#include "engine/commands.hpp"
#include "engine/cpu/threads.hpp"
#include "engine/model_file/utf8.hpp"
#include "engine/open_model.hpp"

#include <algorithm>
#include <iostream>
#include <memory>

namespace engine {

void run_generate(const options& chosen) {
    cpu::set_threads(chosen.threads);
    const std::string text = read_prompt(chosen, std::cin);
    const std::unique_ptr<prompt_model> opened = open_model(chosen);
    prompt_model& model = *opened;
    const policy policy = chosen.dense ? dense() : resolve_policy(chosen, model.identity());
    const std::vector<std::int32_t> prompt = model.words().encode(text);
    const auto rows = static_cast<std::int32_t>(prompt.size());
    static_cast<void>(plan_prompt(chosen, rows, model.config().context));

    const std::unique_ptr<prompt_reader> reading = model.reader_of(policy, rows, std::max(chosen.tokens, 1));
    prompt_reader& pass = *reading;
    {
        progress bar("reading the prompt");
        pass.prefill(prompt, [&](double done) { bar.update(done); });
    }
    sampler draw(chosen.sampling);
    utf8_stream whole;
    for (std::int32_t i = 0; i < chosen.tokens; ++i) {
        const std::int32_t token = draw.next(pass.logits().data(), model.config().vocab);
        if (model.words().ends_generation(token)) break;
        std::cout << whole.push(model.words().bytes_of(token)) << std::flush;
        if (i + 1 < chosen.tokens) pass.feed_one(token);
    }
    std::cout << whole.flush() << '\n';
}

} // namespace engine
