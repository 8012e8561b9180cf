// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/prefill_options.hpp"

#include <initializer_list>

namespace engine {

namespace {

template <class Enum>
bool parse_one(const std::string& text, Enum& value, std::initializer_list<Enum> all) {
    for (const Enum one : all) {
        if (text == name_of(one)) {
            value = one;
            return true;
        }
    }
    return false;
}

} // namespace

const char* name_of(device_kind kind) {
    return kind == device_kind::cuda ? "cuda" : "cpu";
}

const char* name_of(prefill_mode mode) {
    switch (mode) {
    case prefill_mode::dense:
        return "dense";
    case prefill_mode::drop:
        return "drop";
    case prefill_mode::lists:
        return "lists";
    case prefill_mode::both:
        break;
    }
    return "both";
}

const char* name_of(attention_kind kind) {
    return kind == attention_kind::cudnn ? "cudnn" : "uniprefill";
}

const char* name_of(counts_kind kind) {
    switch (kind) {
    case counts_kind::read:
        return "read";
    case counts_kind::budget:
        return "budget";
    case counts_kind::buckets:
        break;
    }
    return "buckets";
}

bool parse(const std::string& text, device_kind& kind) {
    return parse_one(text, kind, {device_kind::cpu, device_kind::cuda});
}

bool parse(const std::string& text, prefill_mode& mode) {
    return parse_one(text, mode,
                     {prefill_mode::dense, prefill_mode::drop, prefill_mode::lists, prefill_mode::both});
}

bool parse(const std::string& text, attention_kind& kind) {
    return parse_one(text, kind, {attention_kind::cudnn, attention_kind::uniprefill});
}

bool parse(const std::string& text, counts_kind& kind) {
    return parse_one(text, kind, {counts_kind::read, counts_kind::budget, counts_kind::buckets});
}

} // namespace engine
