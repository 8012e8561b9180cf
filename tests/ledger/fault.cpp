// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The word that a device ledger leaves: what it says, and which of two words stays.

#include "ledger/refusals.hpp"

#include <uniprefill/ledger/ledger_fault.hpp>

using namespace ledger_test;
using up::ledger_complaint;
using up::ledger_fault;
using up::status_code;

TEST_CASE("a fault's word says what was complained of, where, and what came") {
    for (std::int32_t what = 1; what <= static_cast<std::int32_t>(ledger_complaint::saved_below); ++what) {
        for (const std::int32_t request : {-1, 0, 7, 65533}) {
            for (const std::int32_t layer : {-1, 0, 31, 509}) {
                for (const std::int32_t came : {0, -1, 12345, INT32_MAX, INT32_MIN}) {
                    const ledger_fault made(static_cast<ledger_complaint>(what), request, layer, came);
                    const ledger_fault read(made.word());
                    REQUIRE(static_cast<std::int32_t>(read.what()) == what);
                    REQUIRE(read.request() == request);
                    REQUIRE(read.layer() == layer);
                    REQUIRE(read.came() == came);
                    const up::status said = read.to_status();
                    REQUIRE_FALSE(said.ok());
                    REQUIRE(said.request == request);
                    REQUIRE(said.layer == layer);
                    REQUIRE(said.came == came);
                    REQUIRE(std::string(said.argument) != "ledger_fault");
                }
            }
        }
    }
    REQUIRE(ledger_fault().what() == ledger_complaint::none);
    REQUIRE(ledger_fault(ledger_fault::no_fault).to_status().ok());
    REQUIRE(ledger_fault(std::uint64_t{60} << 32).to_status().code == status_code::invalid_argument);
}

TEST_CASE("the smallest word stays: of the lowest slot, and a cause before what follows from it") {
    const auto word = [](ledger_complaint what, std::int32_t request, std::int32_t layer) {
        return ledger_fault(what, request, layer, -5).word();
    };
    CHECK(word(ledger_complaint::gap, 3, 9) < word(ledger_complaint::tag, 4, -1));
    CHECK(word(ledger_complaint::no_page, 3, 1) < word(ledger_complaint::no_page, 3, 2));
    CHECK(word(ledger_complaint::too_many_tokens, 5, -1) < word(ledger_complaint::not_in_step, 0, -1));
    CHECK(word(ledger_complaint::not_in_step, 65534, 510) < ledger_fault::no_fault);
    CHECK(ledger_fault(word(ledger_complaint::gap, 1 << 20, 4000)).request() == 65534);
    CHECK(ledger_fault(word(ledger_complaint::gap, 1 << 20, 4000)).layer() == 510);
}
