// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/gguf_refusal.hpp"
#include "engine/gguf_samples.hpp"
#include "engine/model_file/gguf.hpp"
#include "support/catch.hpp"

#include <cstring>
#include <limits>
#include <string>
#include <vector>

using namespace engine;
using namespace engine_test;
using kind = gguf_builder::field_kind;

namespace {

/// Overwrites part of a file.
template <class T>
void poke(bytes& file, std::size_t offset, T value) {
    REQUIRE(offset + sizeof(value) <= file.size());
    std::memcpy(file.data() + offset, &value, sizeof(value));
}

/// The n-th field of a kind.
std::size_t place_of(const gguf_builder& builder, kind what, std::size_t n = 0) {
    for (const auto& field : builder.fields()) {
        if (field.kind == what && n-- == 0) return field.offset;
    }
    FAIL("no such field");
    return 0;
}

gguf parse(const bytes& file) {
    return gguf(span_of(file));
}

/// A file of one tensor.
bytes one_tensor(std::uint32_t type, const std::vector<std::uint64_t>& shape, std::size_t data_size) {
    gguf_builder builder;
    builder.add_tensor("t", type, shape, bytes(data_size));
    return builder.build();
}

} // namespace

TEST_CASE("every value type is read") {
    gguf_builder builder = sample_of_every_value();
    const bytes content = builder.build();
    const gguf file = parse(content);
    CHECK(file.version() == 3);
    CHECK(file.alignment() == 64);
    CHECK(file.metadata().front().key == "general.alignment");
    CHECK(file.get_string("one.string") == "line one\nline two \x1b[31m");
    CHECK(file.get_string("one.empty_string").empty());
    CHECK(file.get_bool("one.bool") == false);
    CHECK(file.get_u32("one.u32") == load<std::uint32_t>(sample_data(4).data()));
    CHECK(file.get_f32("one.f32") == load<float>(sample_data(4).data()));
    CHECK(file.get_f32s("several.f32").size() == 5);
    CHECK(file.get_i32s("several.i32")[4] == load<std::int32_t>(sample_data(20).data() + 16));
    CHECK(file.get_i32s("no.i32").size() == 0);
    const string_array strings = file.get_strings("several.string");
    REQUIRE(strings.size() == 4);
    CHECK(strings[0] == "a");
    CHECK(strings[1].empty());
    CHECK(strings[3] == "\xff\xfe");
    CHECK(file.find("none") == nullptr);
    CHECK(!file.find_u32("none"));
    CHECK(!file.find_string("none"));

    REQUIRE(file.tensors().size() == 5);
    const tensor_info* const tensor = file.find_tensor("rank3");
    REQUIRE(tensor != nullptr);
    CHECK(tensor->rank == 3);
    CHECK(tensor->elements() == 128);
    CHECK(tensor->rows() == 4);
    CHECK(tensor->row_bytes() == 18);
    CHECK(tensor->offset % 64 == 0);
    CHECK(std::memcmp(tensor->data, sample_data(72).data(), 72) == 0);
    CHECK(!file.find_tensor("unreadable")->type->readable);
    CHECK(file.find_tensor("rank") == nullptr);
}

TEST_CASE("integers of any width are numbers where they fit") {
    gguf_builder builder;
    const std::uint8_t u8 = 200;
    const std::int8_t i8 = -1;
    const std::int16_t i16 = 300;
    const std::uint16_t u16 = 65535;
    const std::int32_t i32 = -5;
    const std::uint64_t u64 = 4294967295U;
    const std::uint64_t large = 4294967296U;
    const std::int64_t i64 = -6;
    builder.add_scalar("u8", value_type::u8, &u8);
    builder.add_scalar("i8", value_type::i8, &i8);
    builder.add_scalar("i16", value_type::i16, &i16);
    builder.add_scalar("u16", value_type::u16, &u16);
    builder.add_scalar("i32", value_type::i32, &i32);
    builder.add_scalar("u64", value_type::u64, &u64);
    builder.add_scalar("large", value_type::u64, &large);
    builder.add_scalar("i64", value_type::i64, &i64);
    builder.add_f32("f32", 1.0F);
    builder.add_i32s("i32s", {1});
    const bytes content = builder.build();
    const gguf file = parse(content);
    CHECK(file.get_u32("u8") == 200);
    CHECK(file.get_u32("i16") == 300);
    CHECK(file.get_u32("u16") == 65535);
    CHECK(file.get_u32("u64") == 4294967295U);
    CHECK_REFUSES(file.get_u32("i8"), "key 'i8'", "came -1");
    CHECK_REFUSES(file.get_u32("i32"), "key 'i32'", "came -5");
    CHECK_REFUSES(file.get_u32("large"), "key 'large'", "came 4294967296");
    CHECK_REFUSES(file.get_u32("i64"), "key 'i64'", "came -6");
    CHECK_REFUSES(file.get_u32("f32"), "key 'f32'", "came f32");
    CHECK_REFUSES(file.get_u32("none"), "key 'none'", "came none");
    CHECK_REFUSES(file.get_f32("u8"), "key 'u8'", "came u8");
    CHECK_REFUSES(file.get_bool("u8"), "key 'u8'", "came u8");
    CHECK_REFUSES(file.get_string("i32s"), "key 'i32s'", "an array of i32");
    CHECK_REFUSES(file.get_strings("i32s"), "key 'i32s'", "an array of i32");
    CHECK_REFUSES(file.get_f32s("f32"), "key 'f32'", "came f32");
    CHECK_REFUSES(file.find_u32("f32"), "key 'f32'", "came f32");
}

TEST_CASE("header") {
    sample_model model;
    gguf_builder builder = model.builder();
    const bytes sound = builder.build();
    REQUIRE(refusal([&] { parse(sound); }).empty());

    bytes file = sound;
    file[0] = std::byte{0x7f};
    CHECK_REFUSES(parse(file), "magic number", "'\\x7fGUF'");
    for (std::uint32_t version : {0U, 1U, 4U}) {
        file = sound;
        poke(file, 4, version);
        CHECK_REFUSES(parse(file), "version", std::to_string(version));
    }
    file = sound;
    poke(file, 4, std::uint32_t{0x03000000});
    CHECK_REFUSES(parse(file), "version", "big-endian");
    file = sound;
    poke(file, 8, std::uint64_t{1} << 40);
    CHECK_REFUSES(parse(file), "tensor count", std::to_string(std::uint64_t{1} << 40));
    file = sound;
    poke(file, 16, std::numeric_limits<std::uint64_t>::max());
    CHECK_REFUSES(parse(file), "metadata count", "18446744073709551615");
    for (std::uint64_t less : {23U, 15U, 7U, 3U, 0U}) {
        file = sound;
        file.resize(less);
        INFO(less);
        CHECK(!refusal([&] { parse(file); }).empty());
    }
    model.version = 2;
    const bytes second = model.builder().build();
    CHECK(parse(second).version() == 2);
}

TEST_CASE("a file cut anywhere is refused, whole it isn't") {
    gguf_builder builder = sample_of_every_value();
    const bytes whole = builder.build();
    std::size_t accepted = 0;
    for (std::size_t size = 0; size < whole.size(); ++size) {
        const bytes part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
        accepted += refusal([&] { parse(part); }).empty();
    }
    CHECK(accepted == 0);
    CHECK(refusal([&] { parse(whole); }).empty());
}

TEST_CASE("metadata") {
    const auto with = [](auto add) {
        gguf_builder builder;
        add(builder);
        return builder;
    };
    SECTION("duplicate keys") {
        const bytes file = with([](gguf_builder& b) {
                               b.add_u32("b", 1);
                               b.add_u32("a", 1);
                               b.add_f32("b", 2);
                           }).build();
        CHECK_REFUSES(parse(file), "key 'b'", "two of them");
    }
    SECTION("an empty key") {
        const bytes file = with([](gguf_builder& b) { b.add_u32("", 1); }).build();
        CHECK_REFUSES(parse(file), "key number 1", "empty");
    }
    SECTION("a long key") {
        const bytes file = with([](gguf_builder& b) { b.add_u32(std::string(5000, 'k'), 1); }).build();
        CHECK_REFUSES(parse(file), "key number 1", "5000");
    }
    SECTION("a key that would write on the terminal") {
        const bytes file = with([](gguf_builder& b) { b.add_nested_array("a\n\x1b[2J"); }).build();
        CHECK_REFUSES(parse(file), "key 'a\\n\\x1b[2J'", "an array of arrays");
    }
    SECTION("an unknown type") {
        gguf_builder builder = with([](gguf_builder& b) { b.add_u32("k", 1); });
        bytes file = builder.build();
        poke(file, place_of(builder, kind::value_type), std::uint32_t{13});
        CHECK_REFUSES(parse(file), "key 'k'", "13");
    }
    SECTION("a bool that is neither") {
        gguf_builder builder = with([](gguf_builder& b) { b.add_bool("k", true); });
        bytes file = builder.build();
        poke(file, place_of(builder, kind::scalar), std::uint8_t{2});
        CHECK_REFUSES(parse(file), "key 'k'", "came 2");
    }
    SECTION("lengths and counts beyond the file") {
        gguf_builder builder = with([](gguf_builder& b) {
            b.add_string("s", "text");
            b.add_strings("ss", {"one", "two"});
            b.add_i32s("is", {1, 2, 3});
        });
        const bytes sound = builder.build();
        for (std::uint64_t value :
             {std::uint64_t{1000}, std::uint64_t{1} << 28, std::uint64_t{1} << 32, std::uint64_t{1} << 61,
              std::uint64_t{1} << 62, std::numeric_limits<std::uint64_t>::max()}) {
            INFO(value);
            bytes file = sound;
            poke(file, place_of(builder, kind::length, 1), value); // length 0 is the key's
            CHECK_REFUSES(parse(file), "key 's'", "");
            file = sound;
            poke(file, place_of(builder, kind::length, 4), value);
            CHECK_REFUSES(parse(file), "key 'ss'", "");
            file = sound;
            poke(file, place_of(builder, kind::count, 2), value); // the first two are the header's
            CHECK_REFUSES(parse(file), "key 'ss'", "");
            file = sound;
            poke(file, place_of(builder, kind::count, 3), value);
            CHECK_REFUSES(parse(file), "key 'is'", "");
        }
    }
    SECTION("alignment") {
        for (std::uint32_t wrong : {0U, 1U, 4U, 24U, 33U, 1U << 17, 1U << 31, 0xffffffffU}) {
            const bytes file = with([&](gguf_builder& b) { b.add_u32("general.alignment", wrong); }).build();
            CHECK_REFUSES(parse(file), "key 'general.alignment'", std::to_string(wrong));
        }
        const bytes file = with([](gguf_builder& b) { b.add_string("general.alignment", "32"); }).build();
        CHECK_REFUSES(parse(file), "key 'general.alignment'", "string");
    }
}

TEST_CASE("tensor table") {
    CHECK(parse(one_tensor(0, {4}, 16)).tensors().size() == 1);
    CHECK_REFUSES(parse(one_tensor(0, {}, 16)), "tensor 't'", "came 0");
    CHECK_REFUSES(parse(one_tensor(0, {1, 1, 1, 1, 1}, 16)), "tensor 't'", "came 5");
    CHECK_REFUSES(parse(one_tensor(0, {4, 0}, 16)), "tensor 't'", "came 0");
    CHECK_REFUSES(parse(one_tensor(2, {33}, 36)), "tensor 't'", "multiple of 32");
    CHECK_REFUSES(parse(one_tensor(12, {128, 2}, 144)), "tensor 't'", "multiple of 256");
    CHECK_REFUSES(parse(one_tensor(5, {32}, 64)), "tensor 't'", "type number 5");
    CHECK_REFUSES(parse(one_tensor(0, {5}, 16)), "tensor 't'", "20 bytes at offset 0");
    // Products that are small again modulo 2^64.
    const std::uint64_t large = std::uint64_t{1} << 32;
    CHECK_REFUSES(parse(one_tensor(0, {large, large}, 16)), "tensor 't'", "2^48");
    CHECK_REFUSES(parse(one_tensor(0, {large, large, 4}, 16)), "tensor 't'", "2^48");
    CHECK_REFUSES(parse(one_tensor(0, {std::numeric_limits<std::uint64_t>::max()}, 16)), "tensor 't'",
                  "2^48");
    CHECK_REFUSES(parse(one_tensor(0, {std::uint64_t{1} << 63, 2}, 16)), "tensor 't'", "2^48");

    const auto two = [](std::uint64_t second_offset, const char* second_name, std::size_t data_size) {
        gguf_builder builder;
        builder.add_tensor("first", 0, {16}, bytes(data_size));
        builder.add_tensor_at(second_name, 0, {8}, second_offset);
        return builder.build();
    };
    CHECK(parse(two(64, "second", 96)).tensors().size() == 2);
    CHECK_REFUSES(parse(two(64, "first", 96)), "tensor 'first'", "two of them");
    CHECK_REFUSES(parse(two(65, "second", 128)), "tensor 'second'", "multiple of 32");
    CHECK_REFUSES(parse(two(96, "second", 96)), "tensor 'second'", "within the file");
    CHECK_REFUSES(parse(two(std::uint64_t{0} - 32, "second", 96)), "tensor 'second'", "within the file");
    CHECK_REFUSES(parse(two(32, "second", 96)), "tensor 'second'", "overlaps tensor 'first'");
    CHECK_REFUSES(parse(two(0, "second", 96)), "tensor", "overlaps tensor");
}

TEST_CASE("names that sort and views that stay when the object moves") {
    gguf_builder builder;
    for (int i = 0; i < 1000; ++i) {
        builder.add_u32("key." + std::to_string(i * 7919 % 1000), static_cast<std::uint32_t>(i));
    }
    builder.add_strings("strings", {"x", "y"});
    const bytes content = builder.build();
    gguf first = parse(content);
    const gguf file = std::move(first);
    for (int i = 0; i < 1000; ++i) {
        REQUIRE(file.get_u32("key." + std::to_string(i * 7919 % 1000)) == static_cast<std::uint32_t>(i));
    }
    CHECK(file.get_strings("strings")[1] == "y");
}
