// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
// Files on disk, and what `inspect` prints of them.

#include "engine/gguf_refusal.hpp"
#include "engine/gguf_samples.hpp"
#include "engine/inspect.hpp"
#include "engine/model_file/gguf.hpp"
#include "support/catch.hpp"

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>

using namespace engine;
using namespace engine_test;

namespace {

/// A file of this test's own, gone at its end.
struct own_file {
    std::string path;
    own_file(const std::string& name, const bytes& content)
        : path(ENGINE_TEST_OUTPUT "/" + name) {
        std::ofstream out(path, std::ios::binary);
        out.write(reinterpret_cast<const char*>(content.data()),
                  static_cast<std::streamsize>(content.size()));
    }
    ~own_file() { std::remove(path.c_str()); }
};

} // namespace

TEST_CASE("files") {
    const bytes content = sample_model().builder().build();
    {
        const own_file on_disk("sound.gguf", content);
        gguf first = gguf::open(on_disk.path);
        const gguf file = std::move(first);
        CHECK(file.get_string("general.architecture") == "llama");
        CHECK(file.file_bytes() == content.size());

        mapped_file one(on_disk.path);
        mapped_file other(on_disk.path);
        one = std::move(other);
        CHECK(one.bytes().size == content.size());
    }
    CHECK_REFUSES(gguf::open("no/such/file"), "model file 'no/such/file'", "No such file");
    CHECK_REFUSES(gguf::open(ENGINE_TEST_OUTPUT), "model file", "a directory");
    CHECK_REFUSES(gguf::open("/dev/null"), "model file '/dev/null'", "regular file");
    const own_file empty("empty.gguf", {});
    CHECK_REFUSES(gguf::open(empty.path), "model file", "an empty file");
    const own_file text("text.gguf", bytes(100, std::byte{'x'}));
    CHECK_REFUSES(gguf::open(text.path), "model file '" + text.path + "', magic number", "came 'xxxx'");
    const own_file cut("cut.gguf", bytes(content.begin(), content.begin() + 1000));
    CHECK_REFUSES(gguf::open(cut.path), "model file '" + cut.path + "', ", "the end of the file");
}

TEST_CASE("inspect, as text") {
    const own_file on_disk("every.gguf", sample_of_every_value().build());
    std::ostringstream out;
    REQUIRE(inspect(on_disk.path, false, out) == 0);
    const std::string text = out.str();
    const auto holds = [&](const std::string& part) { return text.find(part) != std::string::npos; };
    CHECK(holds("GGUF 3"));
    CHECK(holds("'line one\\nline two \\x1b[31m'"));
    CHECK(holds("['a', '', 'ccc', '\\xff\\xfe']"));
    CHECK(holds("Q2_K"));
    CHECK(holds("32 x 2 x 2"));
    CHECK(holds("[false, true, true, false]"));
    for (char c : text) {
        REQUIRE((c == '\n' || (c >= ' ' && c <= '~')));
    }

    gguf_builder builder;
    builder.add_f32("epsilon", 1e-5F);
    builder.add_i32s("long", std::vector<std::int32_t>(1000, 5));
    builder.add_string("longer", std::string(10000, 'x'));
    const own_file second("long.gguf", builder.build());
    std::ostringstream again;
    inspect(second.path, false, again);
    CHECK(again.str().find("1e-05") != std::string::npos);
    CHECK(again.str().find("[5, 5, 5, 5, 5, 5, 5, 5, ... (1000)]") != std::string::npos);
    CHECK(again.str().size() < 1000);
}

TEST_CASE("inspect, as JSON") {
    const own_file on_disk("every.gguf", sample_of_every_value().build());
    std::ostringstream out;
    REQUIRE(inspect(on_disk.path, true, out) == 0);
    const nlohmann::json all = nlohmann::json::parse(out.str());
    CHECK(all["version"] == 3);
    CHECK(all["metadata"]["one.string"]["value"] == "line one\nline two \x1b[31m");
    CHECK(all["metadata"]["several.bool"]["value"] == nlohmann::json({false, true, true, false}));
    CHECK(all["metadata"]["several.string"]["value"][3] == "\xef\xbf\xbd\xef\xbf\xbd"); // not UTF-8
    CHECK(all["metadata"]["no.u8"]["count"] == 0);
    REQUIRE(all["tensors"].size() == 5);
    CHECK(all["tensors"][3]["shape"] == nlohmann::json({256, 1, 2, 1}));
    CHECK(all["totals"]["tensors"] == 5);
    CHECK(all["totals"]["bytes"] == 12 + 12 + 72 + 420 + 84);
    CHECK(all["totals"]["by_type"]["F16"]["elements"] == 6);
}
