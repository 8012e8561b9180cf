// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/policy_file.hpp"

#include "engine/error.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <set>
#include <utility>

namespace engine {
namespace {

using json = nlohmann::ordered_json;

constexpr int max_depth = 4;
constexpr std::size_t max_layers = 4096;
constexpr std::size_t max_text = 4096;
constexpr const char* rule_keys[] = {"selector", "scope",    "p",    "budget",
                                     "min_kept", "max_kept", "ties", "crossing"};

std::string kind_of(const json& value) {
    switch (value.type()) {
    case json::value_t::null:
        return "null";
    case json::value_t::boolean:
        return value.get<bool>() ? "true" : "false";
    case json::value_t::string:
        return engine::quoted(value.get_ref<const std::string&>(), 40);
    case json::value_t::array:
        return "an array";
    case json::value_t::object:
        return "an object";
    default:
        return value.dump();
    }
}

/// An object of the file with the path that leads to it, so that every complaint can say where.
class object {
  public:
    object(const json& value, std::string path)
        : value_(value)
        , path_(std::move(path)) {
        if (!value.is_object()) throw error(path_.empty() ? "policy" : path_, "an object", kind_of(value));
    }

    bool has(const char* key) const { return value_.contains(key); }
    const json& at(const char* key) const { return value_.at(key); }
    std::string path(const char* key) const { return path_ + key; }

    void allow_only(std::initializer_list<const char*> keys, bool with_rule_keys) const {
        for (const auto& item : value_.items()) {
            const auto is_it = [&](const char* key) { return item.key() == key; };
            if (std::any_of(keys.begin(), keys.end(), is_it)) continue;
            if (with_rule_keys && std::any_of(std::begin(rule_keys), std::end(rule_keys), is_it)) continue;
            throw error(path_ + printable(item.key(), 40), "a key that policies have", "one that they don't");
        }
    }

    void read(const char* key, std::int32_t& number) const {
        if (!has(key)) return;
        const json& value = at(key);
        if (!value.is_number_integer()) throw error(path(key), "a whole number", kind_of(value));
        const bool fits =
            value.is_number_unsigned()
                ? value.get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<std::int32_t>::max()}
                : value.get<std::int64_t>() >= std::numeric_limits<std::int32_t>::min();
        if (!fits) throw error(path(key), "a number of 32 bits", kind_of(value));
        number = value.get<std::int32_t>();
    }

    void read(const char* key, std::string& text) const {
        if (!has(key)) return;
        const json& value = at(key);
        if (!value.is_string()) throw error(path(key), "a text", kind_of(value));
        text = value.get<std::string>();
    }

    void read(const char* key, bool& truth) const {
        if (!has(key)) return;
        const json& value = at(key);
        if (!value.is_boolean()) throw error(path(key), "true or false", kind_of(value));
        truth = value.get<bool>();
    }

    template <class Enum>
    void read_name(const char* key, Enum& name, const char* expected) const {
        if (!has(key)) return;
        const json& value = at(key);
        if (!value.is_string() || !parse(value.get_ref<const std::string&>(), name)) {
            throw error(path(key), expected, kind_of(value));
        }
    }

    /// The keys of a rule, where they are given.
    void read_rule(uniprefill::selection_rule& rule) const {
        read_name("selector", rule.kind, "'top-p', 'fixed-ratio', 'fixed-budget' or 'max-fraction'");
        read_name("scope", rule.scope, "'free' or 'all'");
        if (has("p")) {
            const json& value = at("p");
            if (!value.is_number()) throw error(path("p"), "a number in (0, 1]", kind_of(value));
            const auto share = value.get<double>();
            rule.p = uniprefill::unit_fraction::from(share);
            if (rule.p.value == 0) throw error(path("p"), "a number in (0, 1]", kind_of(value));
        }
        read_name("ties", rule.ties, "'lower-block-first' or 'higher-block-first'");
        read_name("crossing", rule.crossing, "'minimal' or 'published'");
        read("budget", rule.budget_rows);
        read("min_kept", rule.min_kept_rows);
        read("max_kept", rule.max_kept_rows);
    }

  private:
    const json& value_;
    std::string path_;
};

std::string line_and_column(std::string_view text, std::size_t byte) {
    const std::string_view before = text.substr(0, std::min(byte > 0 ? byte - 1 : 0, text.size()));
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const std::size_t start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
    return "line " + std::to_string(line) + ", column " + std::to_string(before.size() - start + 1);
}

/// The file as a tree that is no deeper than a policy can be, with no key twice in an object (the parser
/// itself would let the last one win).
json parse_strictly(std::string_view text, const std::string& source) {
    std::vector<std::set<std::string>> keys;
    const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
        if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
            if (depth >= max_depth) throw error(source, "at most 4 levels of nesting", "more");
        }
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (event == json::parse_event_t::key) {
            const auto& key = parsed.get_ref<const std::string&>();
            if (!keys.back().insert(key).second) {
                throw error(source + ": " + printable(key, 40), "the key once", "the key twice");
            }
        }
        return true;
    };
    try {
        return json::parse(text.begin(), text.end(), watch);
    } catch (const json::parse_error& fault) {
        throw error(source, "JSON", "what isn't, at " + line_and_column(text, fault.byte));
    } catch (const json::exception&) {
        throw error(source, "JSON", "a number out of range");
    }
}

std::string read_comment(const object& root) {
    if (!root.has("comment")) return {};
    const json& value = root.at("comment");
    const json lines = value.is_array() ? value : json::array({value});
    std::string out;
    for (const json& line : lines) {
        if (!line.is_string()) {
            throw error(root.path("comment"), "a text or an array of texts", kind_of(line));
        }
        if (!out.empty()) out += '\n';
        out += line.get_ref<const std::string&>();
    }
    if (out.size() > max_text) {
        throw error(root.path("comment"), "at most " + std::to_string(max_text) + " bytes",
                    std::to_string(out.size()));
    }
    return out;
}

/// What follows for one layer from keys that only one of the two places has.
void complete(uniprefill::selection_rule& rule, const object& root, const object& entry) {
    const bool has_share = entry.has("p") || root.has("p");
    switch (rule.kind) {
    case uniprefill::rule_kind::top_p:
        if (!has_share) rule.p = uniprefill::unit_fraction::from(default_share(rule.scope));
        break;
    case uniprefill::rule_kind::fixed_ratio:
    case uniprefill::rule_kind::max_fraction:
        if (!has_share) {
            throw error(entry.path("p"), std::string("a number in (0, 1] for selector ") + name_of(rule.kind),
                        "none");
        }
        break;
    case uniprefill::rule_kind::fixed_budget:
        break;
    }
    // A budget meant for all layers doesn't bind one that has chosen another selector.
    if (entry.has("selector") && !entry.has("budget") && rule.kind != uniprefill::rule_kind::fixed_budget) {
        rule.budget_rows = 0;
    }
}

/// The rules of `layers` in @p root; @p common is what stands beside it.
std::vector<layer_rule> rules_by_layer(const object& root, const uniprefill::selection_rule& common) {
    if (!root.has("layers")) throw error(root.path("layers"), "an array", "none");
    const json& layers = root.at("layers");
    if (!layers.is_array()) throw error(root.path("layers"), "an array", kind_of(layers));
    if (layers.size() > max_layers) {
        throw error(root.path("layers"), "at most " + std::to_string(max_layers) + " entries",
                    std::to_string(layers.size()));
    }
    std::vector<layer_rule> out;
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const std::string at = root.path("layers") + "[" + std::to_string(i) + "]";
        layer_rule entry;
        entry.rule = common;
        const json number_alone = {{"layer", layers[i]}};
        const object one(layers[i].is_object() ? layers[i] : number_alone, at + ".");
        one.allow_only({"layer"}, true);
        if (!one.has("layer")) throw error(one.path("layer"), "a whole number", "none");
        one.read("layer", entry.layer);
        one.read_rule(entry.rule);
        complete(entry.rule, root, one);
        out.push_back(entry);
    }
    return out;
}

void read_lists(const object& root, policy& out) {
    if (!root.has("lists")) return;
    if (!root.at("lists").is_object())
        throw error(root.path("lists"), "an object", kind_of(root.at("lists")));
    const object entry(root.at("lists"), root.path("lists."));
    entry.allow_only({"sink", "window", "mean", "query_rows", "sample", "layers"}, true);
    uniprefill::list_options<> lists;
    lists.rule.p = {}; // complete() knows the usual one
    entry.read("sink", lists.sink);
    entry.read("window", lists.window);
    entry.read("mean", out.list_means);
    entry.read_rule(lists.rule);
    const uniprefill::selection_rule common = lists.rule;
    complete(lists.rule, entry, entry);
    out.lists = lists;
    if (entry.has("layers")) out.list_rules = rules_by_layer(entry, common);
    if (entry.has("query_rows")) {
        out.list_sampling.emplace();
        entry.read("query_rows", out.list_sampling->query_rows);
        entry.read("sample", out.list_sampling->sample);
    } else if (entry.has("sample")) {
        throw error(entry.path("sample"), "none without query_rows", "some");
    }
}

json rule_to_json(const uniprefill::selection_rule& rule) {
    const uniprefill::selection_rule usual;
    json out = {{"selector", name_of(rule.kind)}, {"scope", name_of(rule.scope)}};
    if (rule.kind == uniprefill::rule_kind::fixed_budget) {
        out["budget"] = rule.budget_rows;
    } else {
        out["p"] = share_of(rule);
    }
    if (rule.min_kept_rows != usual.min_kept_rows) out["min_kept"] = rule.min_kept_rows;
    if (rule.max_kept_rows != usual.max_kept_rows) out["max_kept"] = rule.max_kept_rows;
    if (rule.ties != usual.ties) out["ties"] = name_of(rule.ties);
    if (rule.crossing != usual.crossing) out["crossing"] = name_of(rule.crossing);
    return out;
}

json rules_to_json(const std::vector<layer_rule>& rules) {
    json out = json::array();
    for (const layer_rule& entry : rules) {
        json layer = {{"layer", entry.layer}};
        layer.update(rule_to_json(entry.rule));
        out.push_back(layer);
    }
    return out;
}

} // namespace

policy parse_policy(std::string_view text, const std::string& source) {
    if (text.size() > max_policy_bytes) {
        throw error(source, "at most " + std::to_string(max_policy_bytes) + " bytes",
                    std::to_string(text.size()));
    }
    const json tree = parse_strictly(text, source);
    if (!tree.is_object()) throw error(source, "a JSON object", kind_of(tree));
    const object root(tree, source + ": ");

    std::int32_t version = 0;
    root.read("uniprefill_policy", version);
    if (version != 1) {
        throw error(root.path("uniprefill_policy"), "1",
                    root.has("uniprefill_policy") ? std::to_string(version) : "none");
    }
    root.allow_only({"uniprefill_policy", "name", "comment", "block_rows", "observations", "sink", "tail",
                     "min_length", "span", "propagation", "layers", "lists"},
                    true);
    policy out;
    root.read("name", out.name);
    out.comment = read_comment(root);
    root.read("block_rows", out.block_rows);
    root.read("observations", out.num_observations);
    root.read("sink", out.sink);
    out.tail = out.num_observations;
    root.read("tail", out.tail);
    root.read("min_length", out.min_length);
    root.read("span", out.span);
    root.read_name("propagation", out.propagation, "'cumulative' or 'revive'");

    uniprefill::selection_rule common;
    root.read_rule(common);
    out.rules = rules_by_layer(root, common);
    read_lists(root, out);
    check(out, source + ": ");
    return out;
}

policy load_policy(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string text(max_policy_bytes + 1, '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (!file.is_open() || file.bad()) {
        throw error("policy file " + engine::quoted(path), "a file that can be read", "none");
    }
    text.resize(static_cast<std::size_t>(file.gcount()));
    return parse_policy(text, printable(path));
}

std::string write_policy(const policy& written) {
    json out = {{"uniprefill_policy", 1},
                {"name", written.name},
                {"comment", written.comment},
                {"block_rows", written.block_rows},
                {"observations", written.num_observations},
                {"sink", written.sink},
                {"tail", written.tail},
                {"min_length", written.min_length},
                {"span", written.span},
                {"propagation", name_of(written.propagation)},
                {"layers", rules_to_json(written.rules)}};
    if (written.lists) {
        out["lists"] = rule_to_json(written.lists->rule);
        out["lists"]["sink"] = written.lists->sink;
        out["lists"]["window"] = written.lists->window;
        if (!written.list_rules.empty()) out["lists"]["layers"] = rules_to_json(written.list_rules);
        if (written.list_means) out["lists"]["mean"] = true;
        if (written.list_sampling) {
            out["lists"]["query_rows"] = written.list_sampling->query_rows;
            out["lists"]["sample"] = written.list_sampling->sample;
        }
    }
    return out.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

} // namespace engine
