// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/host_info.hpp"
#include "engine/app/output_folder.hpp"
#include "engine/app/progress.hpp"
#include "engine/app/report.hpp"
#include "engine/commands.hpp"
#include "engine/cpu/threads.hpp"
#include "engine/open_model.hpp"
#include "engine/reading/reader.hpp"

#include <algorithm>
#include <iostream>
#include <memory>

namespace engine {

namespace {

/// What one policy made of the prompt.
struct outcome {
    prefill_run run;
    std::vector<layer_record> layers;
    std::vector<std::int32_t> dropped_at;
    std::vector<float> logits; ///< of the prompt's last row and of every token fed after it
};

std::vector<layer_row> rows_of(const std::vector<layer_record>& layers, std::int32_t tokens) {
    std::vector<layer_row> rows;
    for (const layer_record& record : layers) {
        layer_row row;
        row.layer = static_cast<std::int32_t>(rows.size());
        row.rows_in = static_cast<std::int32_t>(record.rows_in);
        row.rows_kept = static_cast<std::int32_t>(record.rows_kept);
        row.share = static_cast<double>(record.rows_kept) / tokens;
        row.seconds = record.seconds;
        row.selects = record.selected;
        double dropped = 0;
        double total = 0;
        for (const auto& segment : record.outcomes) {
            dropped += static_cast<double>(segment.dropped_mass);
            total += static_cast<double>(segment.total_mass);
            if (row.reason.empty() || uniprefill::is_fault(segment.reason))
                row.reason = to_string(segment.reason);
        }
        row.dropped_mass_share = total > 0 ? dropped / total : 0;
        rows.push_back(row);
    }
    return rows;
}

/// Reads the prompt under one policy and generates @p generated tokens.
outcome read(prompt_model& model, prompt_reader& pass, const std::string& label,
             const std::vector<std::int32_t>& prompt, const sampling_options& sampling,
             std::int32_t generated) {
    outcome made;
    {
        progress bar(label);
        pass.prefill(prompt, [&](double done) { bar.update(done); });
    }
    made.run.ttft_s = pass.prefill_seconds();
    made.run.layers = rows_of(pass.layers(), static_cast<std::int32_t>(prompt.size()));
    made.run.peak_memory_bytes = peak_memory_bytes();
    made.layers = pass.layers();
    made.dropped_at = pass.dropped_at();
    made.logits = pass.logits();

    sampler draw(sampling);
    while (static_cast<std::int32_t>(made.run.generated.size()) < generated) {
        const std::int32_t token = draw.next(pass.logits().data(), model.config().vocab);
        if (model.words().ends_generation(token)) break;
        made.run.generated.push_back(token);
        pass.feed_one(token);
    }
    return made;
}

/// Feeds the tokens that the answers are compared on.
void feed(prompt_reader& pass, const std::vector<std::int32_t>& following, outcome& made) {
    pass.back_to_prompt();
    if (following.empty()) return;
    pass.feed(following);
    made.logits.insert(made.logits.end(), pass.logits().begin(), pass.logits().end());
}

/// Cuts what was generated to what is shown.
void show(const prompt_model& model, std::int32_t tokens, prefill_run& run) {
    run.generated.resize(std::min(run.generated.size(), static_cast<std::size_t>(tokens)));
    for (const std::int32_t token : run.generated) {
        run.generated_text += model.words().bytes_of(token);
    }
}

/// Primitives are compiled and threads started by their first use, which is not what is compared.
void warm_up(prompt_model& model, const policy& policy, std::vector<std::int32_t> prompt) {
    prompt.resize(std::min<std::size_t>(prompt.size(), 512));
    model.reader_of(policy, static_cast<std::int32_t>(prompt.size()), 1)->prefill(prompt);
}

std::vector<selecting_layer_masses> masses_of(const outcome& made, const policy& policy) {
    std::vector<selecting_layer_masses> all;
    for (const layer_rule& rule : policy.rules) {
        const layer_record& record = made.layers[static_cast<std::size_t>(rule.layer)];
        if (!record.selected || record.block_mass.empty()) continue;
        all.push_back({rule.layer, describe(rule.rule), record.block_mass, record.block_first_position,
                       record.block_kept, record.block_forced});
    }
    return all;
}

} // namespace

void run_compare(const options& chosen) {
    output_folder out(chosen.out);
    cpu::set_threads(chosen.threads);
    const std::string text = read_prompt(chosen, std::cin);
    const std::unique_ptr<prompt_model> opened = open_model(chosen);
    prompt_model& model = *opened;
    const policy policy = resolve_policy(chosen, model.identity());
    const std::vector<std::int32_t> tokens = model.words().encode(text);
    const prompt_plan plan =
        plan_prompt(chosen, static_cast<std::int32_t>(tokens.size()), model.config().context);
    const std::vector<std::int32_t> prompt(tokens.begin(), tokens.begin() + plan.prompt);
    std::vector<std::int32_t> following(tokens.begin() + plan.prompt,
                                        tokens.begin() + plan.prompt + plan.held_out);
    const bool real = !following.empty();
    const std::int32_t shown = std::min(chosen.tokens, model.config().context - plan.prompt);
    const std::int32_t room = std::max(plan.compared, shown);

    warm_up(model, policy, prompt);
    outcome dense_run;
    {
        reset_peak_memory();
        const std::unique_ptr<prompt_reader> reading = model.reader_of(dense(), plan.prompt, room);
        prompt_reader& pass = *reading;
        dense_run = read(model, pass, "reading, dense", prompt, chosen.sampling, real ? shown : room);
        if (!real) { // both runs are compared on what the dense one says
            following = dense_run.run.generated;
            following.resize(std::min(following.size(), static_cast<std::size_t>(plan.compared)));
        }
        feed(pass, following, dense_run);
    }
    outcome sparse_run;
    {
        reset_peak_memory();
        const std::unique_ptr<prompt_reader> reading = model.reader_of(policy, plan.prompt, room);
        prompt_reader& pass = *reading;
        sparse_run = read(model, pass, "reading, sparsified", prompt, chosen.sampling, shown);
        feed(pass, following, sparse_run);
    }
    show(model, shown, dense_run.run);
    show(model, shown, sparse_run.run);

    report made;
    made.model = model.name();
    made.prompt_name = chosen.text_file.value_or("the text of --text");
    made.policy = policy;
    made.machine = {cpu_name(), chosen.threads, model.arithmetic(), {}};
    if (chosen.device != device_kind::cpu) made.machine.device = model.device();
    made.tokens = plan.prompt;
    made.dense = dense_run.run;
    made.sparsified = sparse_run.run;
    made.lin = share_of_rows(sparse_run.layers, plan.prompt);
    made.att = share_of_pairs(sparse_run.layers, plan.prompt);
    made.estimator_pairs = share_of_estimator_pairs(sparse_run.layers, plan.prompt);
    made.quality =
        compare_logits(dense_run.logits.data(), sparse_run.logits.data(),
                       static_cast<std::int32_t>(following.size()) + 1, model.config().vocab, following);
    made.quality_on_real_tokens = real;
    made.masses = masses_of(sparse_run, policy);
    made.drop_layer = sparse_run.dropped_at;
    for (const std::int32_t token : prompt) {
        made.token_bytes.emplace_back(model.words().bytes_of(token));
    }

    const std::string json = report_json(made);
    out.write({{"report.json", json}, {"report.html", report_html(made)}});
    if (chosen.json) {
        std::cout << json;
        return;
    }
    print_report(made, std::cout);
    std::cout << "\nThe report: " << out.path() << "/report.html and report.json\n";
}

} // namespace engine
