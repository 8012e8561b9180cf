// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app_support.hpp"
#include "quality/rules.hpp"
#include "support/catch.hpp"

#include <fstream>
#include <string>

using app_test::contains;
using app_test::refusal;

TEST_CASE("quality: the sets of rules name each rule once") {
    for (const auto& rules : {quality_bench::known_rules(), quality_bench::mean_rules(),
                              quality_bench::chunk_rules(), quality_bench::ablation_rules()}) {
        CHECK(rules.size() > 5);
        CHECK(refusal([&] { quality_bench::check_names(rules); }).empty());
    }
    auto twice = quality_bench::known_rules();
    twice.push_back(twice[1]);
    CHECK(refusal([&] { quality_bench::check_names(twice); }) ==
          "rules and policies: expected each name once, came 'outside 0.98' twice");
}

TEST_CASE("quality: policy files are rules under their names, of layers that the model has") {
    const app_test::scratch_folder folder;
    const std::string path = (folder.path() / "p.json").string();
    const auto write = [&](const std::string& more) {
        std::ofstream(path) << R"({"uniprefill_policy": 1, )" << more << "}";
    };
    write(R"("name": "mine", "layers": [3])");
    CHECK(quality_bench::rule_of_file(path, 4).name == "mine");
    CHECK(quality_bench::rule_of_file(path, 4).policy.rules.size() == 1);
    CHECK(contains(refusal([&] { quality_bench::rule_of_file(path, 3); }),
                   "p.json: layers: expected layers from 0 to 2, which the model has, came layer 3"));
    write(R"("layers": [], "lists": {"layers": [5]})");
    CHECK(quality_bench::rule_of_file(path, 6).name == path);
    CHECK(contains(refusal([&] { quality_bench::rule_of_file(path, 5); }),
                   "p.json: lists.layers: expected layers from 0 to 4, which the model has, came layer 5"));
}
