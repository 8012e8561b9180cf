// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
// The tokenizer of the real model, SmolLM2-135M-Instruct: needs its file, named by UNIPREFILL_MODEL.

#include "engine/gguf_refusal.hpp"
#include "engine/model_file/llama_config.hpp"
#include "engine/model_file/tokenizer.hpp"
#include "engine/tokenizer_golden.hpp"
#include "support/catch.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

using namespace engine;
using namespace engine_test;

namespace {

using ids = std::vector<std::int32_t>;

/// Path of the model, or "" after saying that the test is skipped.
std::string model_path() {
    const char* const path = std::getenv("UNIPREFILL_MODEL");
    if (path != nullptr && std::filesystem::exists(path)) return path;
    uniprefill_test::skip("UNIPREFILL_MODEL doesn't name the file SmolLM2-135M-Instruct.Q4_1.gguf");
    return "";
}

bool read_file(const std::filesystem::path& path, std::string& text) {
    std::ifstream in(path, std::ios::binary);
    if (!in) {
        uniprefill_test::skip(path.string() + " isn't there");
        return false;
    }
    text.assign(std::istreambuf_iterator<char>(in), {});
    return true;
}

/// FNV-1a over the ids as little-endian 32-bit words.
std::uint64_t digest(const ids& tokens) {
    std::uint64_t hash = 0xcbf29ce484222325U;
    for (std::int32_t token : tokens) {
        for (unsigned shift = 0; shift < 32; shift += 8) {
            hash = (hash ^ (static_cast<std::uint32_t>(token) >> shift & 0xffU)) * 0x100000001b3U;
        }
    }
    return hash;
}

} // namespace

TEST_CASE("hyperparameters") {
    const std::string path = model_path();
    if (path.empty()) return;
    const llama_config config = read_llama_config(gguf::open(path));
    CHECK(config.layers == 30);
    CHECK(config.hidden == 576);
    CHECK(config.ffn == 1536);
    CHECK(config.heads == 9);
    CHECK(config.kv_heads == 3);
    CHECK(config.head_dim == 64);
    CHECK(config.rope_dims == 64);
    CHECK(config.context == 8192);
    CHECK(config.vocab == 49152);
    CHECK(config.rope_base == 100000.0F);
    CHECK(config.rms_epsilon == 1e-5F);
    CHECK(config.tied_embeddings);
}

TEST_CASE("ground truth") {
    const std::string path = model_path();
    if (path.empty()) return;
    const tokenizer t{gguf::open(path)};
    CHECK(t.vocab() == 49152);
    CHECK(t.bos() == 1);
    CHECK(t.eos() == 2);
    CHECK(!t.adds_bos());
    CHECK(t.encode("The capital of France is 1234") == ids{504, 3575, 282, 4649, 314, 216, 33, 34, 35, 36});
    CHECK(t.encode("<|im_start|>", true) == ids{1});
    CHECK(t.encode("<|im_start|>").size() > 1);
    CHECK(t.decode({504, 3575}) == "The capital");

    std::string text;
    if (!read_file("/usr/share/common-licenses/GPL-3", text)) return;
    const ids tokens = t.encode(text);
    CHECK(tokens.size() == 7639);
    CHECK(ids(tokens.begin(), tokens.begin() + 12) ==
          ids{42185, 28807, 35185, 49126, 35696, 45581, 41026, 16997, 13867, 216, 35, 28});
    CHECK(t.decode(tokens) == text);
}

TEST_CASE("ids are those of the Python package tokenizers") {
    const std::string path = model_path();
    if (path.empty()) return;
    const tokenizer t{gguf::open(path)};
    std::ifstream in = golden("tokenizer_ids.txt");
    int lines = 0;
    for (std::string line; std::getline(in, line); ++lines) {
        std::istringstream fields(line);
        std::string hex;
        fields >> hex;
        const ids expected{std::istream_iterator<std::int32_t>(fields), {}};
        const std::string text = from_hex(hex);
        INFO(line);
        CHECK(t.encode(text) == expected);
        CHECK(t.decode(expected) == text);
    }
    CHECK(lines == 100);
}

TEST_CASE("any bytes that the vocabulary has come back, the others are refused") {
    const std::string path = model_path();
    if (path.empty()) return;
    const tokenizer t{gguf::open(path)};
    std::string spelt;
    int refused = 0;
    for (int byte = 0; byte < 256; ++byte) {
        const std::string one(1, static_cast<char>(byte));
        if (refusal([&] { t.encode(one); }).empty()) {
            spelt += one;
        } else {
            ++refused;
        }
    }
    CHECK(refused == 21);
    for (int round = 0; round < 50; ++round) {
        spelt += spelt.substr(static_cast<std::size_t>(round) * 7 % 200, 40);
    }
    CHECK(t.decode(t.encode(spelt)) == spelt);
}

TEST_CASE("the stream of Debian's licences") {
    const std::string path = model_path();
    if (path.empty()) return;
    const tokenizer t{gguf::open(path)};
    ids stream;
    for (const char* const name : {"GPL-3", "GPL-2", "MPL-2.0", "Apache-2.0", "LGPL-2.1", "GFDL-1.3"}) {
        std::string text;
        if (!read_file(std::filesystem::path("/usr/share/common-licenses") / name, text)) return;
        const ids tokens = t.encode(text);
        stream.insert(stream.end(), tokens.begin(), tokens.end());
    }
    CHECK(stream.size() == 28628);
    CHECK(digest(stream) == 0x31abab20b4f03f80U);
}
