// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "support/catch.hpp"

#include <uniprefill/core/exceptions.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/core/workspace.hpp>

#include <set>
#include <vector>

namespace up = uniprefill;

namespace {

std::string text(const up::status& what) {
    char buffer[256];
    const std::size_t needed = up::format(what, buffer, sizeof buffer);
    CHECK(needed == std::string(buffer).size());
    return buffer;
}

up::status tries(const up::status& inner, bool& went_on) {
    UNIPREFILL_TRY(inner);
    went_on = true;
    return up::success();
}

} // namespace

TEST_CASE("status: messages") {
    const up::status bad = up::failure(up::status_code::invalid_argument, "p", "(0, 1]", 1.5);
    CHECK(text(bad) == "p: expected (0, 1], came 1.5 (invalid argument)");
    CHECK(text(bad.at_request(3)) == "p: expected (0, 1], came 1.5 (invalid argument, request 3)");
    CHECK(text(bad.at_layer(0)) == "p: expected (0, 1], came 1.5 (invalid argument, layer 0)");
    CHECK(text(bad.at_request(3).at_layer(7)) ==
          "p: expected (0, 1], came 1.5 (invalid argument, request 3, layer 7)");
    CHECK(text(up::failure(up::status_code::out_of_range, "rows", "0..9", INT32_MIN)) ==
          "rows: expected 0..9, came -2147483648 (out of range)");
    CHECK(text(up::success()) == "ok");
}

TEST_CASE("status: a message that doesn't fit is cut, and the needed length told") {
    const up::status bad =
        up::failure(up::status_code::misaligned, "workspace", "a multiple of 256", 8).at_layer(2);
    const std::string whole = text(bad);
    for (std::size_t size = 1; size <= whole.size() + 1; ++size) {
        std::vector<char> buffer(size + 1, '#');
        CHECK(up::format(bad, buffer.data(), size) == whole.size());
        CHECK(buffer.data() == whole.substr(0, size - 1));
        CHECK(buffer[size] == '#');
    }
    CHECK(up::format(bad, nullptr, 0) == whole.size());
}

TEST_CASE("status: every code has a name of its own") {
    std::set<std::string> names;
    constexpr auto last = static_cast<std::int32_t>(up::status_code::backend_error);
    for (std::int32_t code = 0; code <= last; ++code) {
        names.insert(up::to_string(static_cast<up::status_code>(code)));
    }
    CHECK(names.size() == static_cast<std::size_t>(last) + 1);
    CHECK(names.count("unknown status code") == 0);
    CHECK(up::to_string(static_cast<up::status_code>(999)) == std::string("unknown status code"));
}

TEST_CASE("status: UNIPREFILL_TRY passes failures on and goes on otherwise") {
    bool went_on = false;
    CHECK(tries(up::failure(up::status_code::wrong_state, "a", "b", 0), went_on).code ==
          up::status_code::wrong_state);
    CHECK_FALSE(went_on);
    CHECK(tries(up::success(), went_on).ok());
    CHECK(went_on);
    CHECK(static_cast<bool>(up::success()));
    CHECK_FALSE(static_cast<bool>(up::failure(up::status_code::wrong_state, "a", "b", 0)));
}

TEST_CASE("status: exceptions for those who want them") {
    CHECK_NOTHROW(up::throw_if_failed(up::success()));
    try {
        up::throw_if_failed(up::failure(up::status_code::invalid_argument, "p", "(0, 1]", 0).at_request(1));
        FAIL("nothing was thrown");
    } catch (const up::error& caught) {
        CHECK(caught.what() == std::string("p: expected (0, 1], came 0 (invalid argument, request 1)"));
        CHECK(caught.reason().request == 1);
    }
}

namespace {

/// A buffer aligned as a workspace must be.
struct aligned_buffer {
    std::vector<std::byte> storage;
    std::byte* data;
    explicit aligned_buffer(std::size_t bytes)
        : storage(bytes + up::workspace::alignment)
        , data(storage.data()) {
        while (reinterpret_cast<std::uintptr_t>(data) % up::workspace::alignment != 0) {
            ++data;
        }
    }
};

struct pieces {
    char* a;
    std::int64_t* b;
    float* c;
    std::int32_t* d;
};

pieces carve(up::workspace& memory, std::int64_t count) {
    pieces made{};
    made.a = memory.take<char>(count);
    made.b = memory.take<std::int64_t>(2 * count);
    made.c = memory.take<float>(0);
    made.d = memory.take<std::int32_t>(count);
    return made;
}

} // namespace

TEST_CASE("workspace: counting and carving agree, pieces are aligned and apart") {
    std::size_t previous = 0;
    for (std::int64_t count = 0; count < 400; ++count) {
        up::workspace counting;
        const pieces none = carve(counting, count);
        CHECK(none.a == nullptr);
        CHECK(none.d == nullptr);
        CHECK(counting.bytes_used() >= previous);
        previous = counting.bytes_used();

        aligned_buffer buffer(counting.bytes_used());
        up::workspace memory(buffer.data, counting.bytes_used());
        REQUIRE(memory.check(counting.bytes_used()).ok());
        const pieces made = carve(memory, count);
        CHECK(memory.bytes_used() == counting.bytes_used());
        const auto offset = [&](const void* piece) {
            return static_cast<const std::byte*>(piece) - buffer.data;
        };
        for (const std::ptrdiff_t at : {offset(made.a), offset(made.b), offset(made.c), offset(made.d)}) {
            CHECK(at % 256 == 0);
        }
        CHECK(offset(made.b) >= offset(made.a) + count);
        CHECK(offset(made.c) >= offset(made.b) + 16 * count);
        CHECK(offset(made.d) >= offset(made.c));
        CHECK(offset(made.d) + 4 * count <= static_cast<std::ptrdiff_t>(memory.bytes()));

        // One byte less, and the last piece is refused; those before it are still right.
        if (count > 0) {
            up::workspace small(buffer.data, counting.bytes_used() - 1);
            const pieces cut = carve(small, count);
            CHECK(cut.a == made.a);
            CHECK(cut.d == nullptr);
            CHECK(small.check(counting.bytes_used()).code == up::status_code::workspace_too_small);
        }
    }
}

TEST_CASE("workspace: what is wrong with a buffer is told") {
    aligned_buffer buffer(1024);
    CHECK(up::workspace().check(0).code == up::status_code::invalid_argument);
    CHECK(up::workspace(buffer.data + 1, 512).check(512).code == up::status_code::misaligned);
    CHECK(up::workspace(buffer.data + 128, 512).check(512).came == 128);
    CHECK(up::workspace(buffer.data, 512).check(513).came == 512);
    CHECK(up::workspace(buffer.data, 512).check(512).ok());
    CHECK(up::workspace().bytes_used() == 1);
    up::workspace memory(buffer.data, 512);
    CHECK(memory.take<char>(-5) == reinterpret_cast<char*>(buffer.data)); // nothing asked, nothing used
    CHECK(memory.bytes_used() == 1);
}
