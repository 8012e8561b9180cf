// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/number_text.hpp"
#include "engine/app/report.hpp"
#include "engine/app/safe_text.hpp"

#include <algorithm>
#include <cstddef>
#include <ostream>
#include <string_view>

namespace engine {
namespace {

constexpr std::size_t columns = 96;

std::string one_line(std::string_view text) {
    return visible(text, line_breaks::escape);
}

std::string left(std::string_view text, std::size_t width) {
    std::string out(text);
    if (out.size() < width) out.append(width - out.size(), ' ');
    return out;
}

std::string right(std::string_view text, std::size_t width) {
    return text.size() < width ? std::string(width - text.size(), ' ') + std::string(text)
                               : std::string(text);
}

/// Words of `text` in lines of at most `columns`, each after `indent` blanks. Words longer than a line are
/// cut.
void wrap(std::ostream& out, std::string_view text, std::size_t indent) {
    const std::size_t room = columns - indent;
    while (!text.empty()) {
        std::size_t length = std::min(text.size(), room);
        if (length < text.size()) {
            const std::size_t blank = text.rfind(' ', length);
            if (blank != std::string_view::npos && blank > 0) {
                length = blank;
            } else {
                // Not within a character: 10xxxxxx continues one.
                while (length > 1 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80) {
                    --length;
                }
            }
        }
        out << std::string(indent, ' ') << text.substr(0, length) << '\n';
        text.remove_prefix(length);
        while (!text.empty() && text.front() == ' ') {
            text.remove_prefix(1);
        }
    }
}

void print_heading(const report& made, std::ostream& out) {
    out << one_line(made.model) << " reads " << one_line(made.prompt_name) << " (" << with_commas(made.tokens)
        << " tokens)\n"
        << "  machine  "
        << (made.machine.device.empty()
                ? one_line(made.machine.cpu) + ", " + std::to_string(made.machine.threads) +
                      (made.machine.threads == 1 ? " thread" : " threads")
                : one_line(made.machine.device))
        << ", " << one_line(made.machine.arithmetic) << '\n'
        << "  policy   " << one_line(made.policy.name) << ": G " << made.policy.block_rows << ", n "
        << made.policy.num_observations << ", sink " << made.policy.sink << ", tail " << made.policy.tail
        << ", " << name_of(made.policy.propagation) << "\n\n";
}

void print_headline(const report& made, std::ostream& out) {
    const auto pair = [&](const char* label, const std::string& dense, const std::string& ours) {
        out << "  " << left(label, 22) << "dense " << right(dense, 10) << "   sparsified " << right(ours, 10);
    };
    pair("time to first token", duration_text(made.dense.ttft_s), duration_text(made.sparsified.ttft_s));
    out << "   " << speed_text(made.speedup()) << '\n';
    pair("peak memory", memory_text(made.dense.peak_memory_bytes),
         memory_text(made.sparsified.peak_memory_bytes));
    out << '\n';
    out << "  " << left("work left", 22) << fixed(made.lin, 3) << " of matmul rows (lin), "
        << fixed(made.att, 3) << " of attention pairs (att), " << fixed(made.estimator_pairs, 3)
        << " estimating\n\n";
}

void print_layers(const report& made, std::ostream& out) {
    out << "  layer   rows in  rows kept    share  mass dropped   dense ms  sparsified ms\n";
    for (std::size_t i = 0; i < made.sparsified.layers.size(); ++i) {
        const layer_row& row = made.sparsified.layers[i];
        const std::string dense_time =
            i < made.dense.layers.size() ? fixed(made.dense.layers[i].seconds * 1000, 1) : "-";
        out << (row.selects ? "* " : "  ") << right(std::to_string(row.layer), 5)
            << right(with_commas(row.rows_in), 10) << right(with_commas(row.rows_kept), 11)
            << right(percent(row.share), 9)
            << right(row.selects ? percent(row.dropped_mass_share, 2) : "-", 14) << right(dense_time, 11)
            << right(fixed(row.seconds * 1000, 1), 15);
        if (row.selects && row.reason != "selected") out << "  " << one_line(row.reason);
        out << '\n';
    }
    out << "  * selects: drops the rows that this and all later layers can do without\n\n";
}

void print_quality(const report& made, std::ostream& out) {
    const quality& compared = made.quality;
    if (compared.positions == 0) return;
    const auto of = [](double share, std::int32_t count) {
        return fixed(share, 3) + " of " + std::to_string(count) + " positions";
    };
    out << "  answers compared over " << compared.positions << " positions ("
        << (made.quality_on_real_tokens ? "the text's own next " : "the dense run's greedy next ")
        << compared.real_tokens << " tokens)\n"
        << "    " << left("KL(dense || sparsified)", 25) << "mean " << significant(compared.kl_mean, 3)
        << ", median " << significant(compared.kl_median, 3) << ", maximum "
        << significant(compared.kl_max, 3) << " nats\n"
        << "    " << left("same likeliest token", 25) << of(compared.agree, compared.positions) << ", "
        << of(compared.agree_sure, compared.sure_positions) << " where dense is sure\n"
        << "    " << left("NLL of those tokens", 25) << "dense " << fixed(compared.dense_nll, 3)
        << " nats, sparsified " << (compared.dnll >= 0 ? "+" : "") << fixed(compared.dnll, 4)
        << " (dNLL)\n\n";
}

void print_generated(const report& made, std::ostream& out) {
    if (made.dense.generated.empty() && made.sparsified.generated.empty()) return;
    const bool same = made.dense.generated == made.sparsified.generated;
    out << "  first " << made.dense.generated.size() << " tokens, dense"
        << (same ? " and sparsified alike" : "") << '\n';
    wrap(out, one_line(made.dense.generated_text), 4);
    if (same) return;
    out << "  first " << made.sparsified.generated.size() << " tokens, sparsified\n";
    wrap(out, one_line(made.sparsified.generated_text), 4);
}

} // namespace

void print_report(const report& made, std::ostream& out) {
    print_heading(made, out);
    print_headline(made, out);
    print_layers(made, out);
    print_quality(made, out);
    print_generated(made, out);
}

} // namespace engine
