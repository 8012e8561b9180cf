// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/model_file/llama_config.hpp"

#include "engine/error.hpp"

#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace engine {

namespace {

std::string key_named(const std::string& key) {
    return "key '" + key + "'";
}

std::int32_t bounded(const std::string& key, std::uint32_t value, std::uint32_t most) {
    if (value < 1 || value > most) {
        throw error(key_named(key), "1 to " + std::to_string(most), std::to_string(value));
    }
    return static_cast<std::int32_t>(value);
}

std::int32_t read_size(const gguf& file, const std::string& key, std::uint32_t most) {
    return bounded(key, file.get_u32(key), most);
}

float read_positive(const std::string& key, float value, float most) {
    // Written so that NaN fails.
    if (!(value > 0.0F && value <= most)) {
        throw error(key_named(key), "more than 0, at most " + text_of_number(most), text_of_number(value));
    }
    return value;
}

/// A model that says how its arithmetic differs from plain llama would give wrong answers in silence: refuse
/// it.
void refuse_unimplemented(const gguf& file) {
    const auto scaling = file.find_string("llama.rope.scaling.type");
    if (scaling && *scaling != "none") {
        throw error(key_named("llama.rope.scaling.type"), "'none' (no rope scaling is implemented)",
                    quoted(*scaling));
    }
    // Without a type, a factor means linear scaling.
    for (const char* const key : {"llama.rope.scaling.factor", "llama.rope.scale_linear"}) {
        const auto factor = file.find_f32(key);
        if (!scaling && factor && *factor != 0.0F && *factor != 1.0F) {
            throw error(key_named(key), "1 (linear rope scaling isn't implemented)", text_of_number(*factor));
        }
    }
    for (const char* const key :
         {"llama.expert_count", "llama.expert_used_count", "llama.attention.sliding_window"}) {
        const auto count = file.find_u32(key);
        if (count && *count != 0)
            throw error(key_named(key), "0 (this engine doesn't do that)", std::to_string(*count));
    }
    for (const char* const key :
         {"llama.attention.scale", "llama.attention.clamp_kqv", "llama.attention.max_alibi_bias",
          "llama.attn_logit_softcapping", "llama.final_logit_softcapping", "llama.logit_scale",
          "llama.embedding_scale", "llama.residual_scale"}) {
        const auto scale = file.find_f32(key);
        if (scale && *scale != 0.0F)
            throw error(key_named(key), "0 (this engine doesn't do that)", text_of_number(*scale));
    }
    const auto causal = file.find_bool("llama.attention.causal");
    if (causal && !*causal) throw error(key_named("llama.attention.causal"), "true", "false");
}

/// Checks the tensors that a llama model has, and remembers them so that others can't hide.
class tensor_check {
  public:
    explicit tensor_check(const gguf& file)
        : file_(file)
        , seen_(file.tensors().size()) {}

    void expect(const std::string& name, std::initializer_list<std::int64_t> shape) {
        const tensor_info* const tensor = file_.find_tensor(name);
        if (tensor == nullptr)
            throw error("tensor '" + name + "'", "shape " + text_of(shape), "no such tensor");
        bool same = tensor->rank == static_cast<int>(shape.size());
        std::size_t d = 0;
        for (std::int64_t size : shape) {
            same = same && tensor->shape[d++] == size;
        }
        if (!same) throw error("tensor '" + name + "'", "shape " + text_of(shape), text_of(*tensor));
        if (!tensor->type->readable) {
            throw error("tensor '" + name + "'",
                        "a type that is implemented (F32, F16, BF16, Q4_0, Q4_1, Q5_0, "
                        "Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)",
                        std::string(tensor->type->name));
        }
        seen_[static_cast<std::size_t>(tensor - file_.tensors().data())] = true;
    }

    /// Once all are seen: any other tensor would be ignored in silence.
    void expect_no_others() const {
        for (std::size_t i = 0; i < seen_.size(); ++i) {
            if (!seen_[i]) {
                throw error("tensor " + quoted(file_.tensors()[i].name),
                            "only tensors of a plain llama model", "one that isn't implemented");
            }
        }
    }

  private:
    template <class Sizes>
    static std::string joined(const Sizes& sizes, int rank) {
        std::string out = "[";
        int d = 0;
        for (std::int64_t size : sizes) {
            if (d == rank) break;
            out += (d++ != 0 ? ", " : "") + std::to_string(size);
        }
        return out + "]";
    }
    static std::string text_of(std::initializer_list<std::int64_t> shape) {
        return joined(shape, static_cast<int>(shape.size()));
    }
    static std::string text_of(const tensor_info& tensor) { return joined(tensor.shape, tensor.rank); }

    const gguf& file_;
    std::vector<bool> seen_; ///< by the tensor's place in the file
};

void check_tensors(const gguf& file, const llama_config& model) {
    const std::int64_t queries = std::int64_t{model.heads} * model.head_dim;
    const std::int64_t keys = std::int64_t{model.kv_heads} * model.head_dim;
    tensor_check check(file);
    check.expect("token_embd.weight", {model.hidden, model.vocab});
    check.expect("output_norm.weight", {model.hidden});
    if (!model.tied_embeddings) check.expect("output.weight", {model.hidden, model.vocab});
    for (std::int32_t layer = 0; layer < model.layers; ++layer) {
        const std::string block = "blk." + std::to_string(layer) + ".";
        check.expect(block + "attn_norm.weight", {model.hidden});
        check.expect(block + "attn_q.weight", {model.hidden, queries});
        check.expect(block + "attn_k.weight", {model.hidden, keys});
        check.expect(block + "attn_v.weight", {model.hidden, keys});
        check.expect(block + "attn_output.weight", {queries, model.hidden});
        check.expect(block + "ffn_norm.weight", {model.hidden});
        check.expect(block + "ffn_gate.weight", {model.hidden, model.ffn});
        check.expect(block + "ffn_up.weight", {model.hidden, model.ffn});
        check.expect(block + "ffn_down.weight", {model.ffn, model.hidden});
    }
    check.expect_no_others();
}

std::int32_t read_vocab(const gguf& file) {
    constexpr std::uint32_t most = 1U << 22;
    const string_array tokens = file.get_strings("tokenizer.ggml.tokens");
    if (tokens.size() < 1 || tokens.size() > most) {
        throw error(key_named("tokenizer.ggml.tokens"), "1 to " + std::to_string(most) + " tokens",
                    std::to_string(tokens.size()));
    }
    const auto declared = file.find_u32("llama.vocab_size");
    if (declared && *declared != tokens.size()) {
        throw error(key_named("llama.vocab_size"), "the tokenizer's " + std::to_string(tokens.size()),
                    std::to_string(*declared));
    }
    return static_cast<std::int32_t>(tokens.size());
}

} // namespace

llama_config read_llama_config(const gguf& file) {
    const std::string_view architecture = file.get_string("general.architecture");
    if (architecture != "llama") {
        throw error(key_named("general.architecture"), "'llama'", quoted(architecture));
    }
    refuse_unimplemented(file);

    llama_config model = {};
    model.layers = read_size(file, "llama.block_count", 1024);
    model.hidden = read_size(file, "llama.embedding_length", 1U << 17);
    model.ffn = read_size(file, "llama.feed_forward_length", 1U << 20);
    model.context = read_size(file, "llama.context_length", 1U << 24);
    model.heads = read_size(file, "llama.attention.head_count", 1024);

    const std::string kv_key = "llama.attention.head_count_kv";
    model.kv_heads =
        bounded(kv_key, file.find_u32(kv_key).value_or(static_cast<std::uint32_t>(model.heads)), 1024);
    if (model.heads % model.kv_heads != 0) {
        throw error(key_named(kv_key), "a divisor of the " + std::to_string(model.heads) + " heads",
                    std::to_string(model.kv_heads));
    }

    constexpr std::uint32_t most_head_dim = 256;
    const std::string dim_key = "llama.attention.key_length";
    if (const auto dim = file.find_u32(dim_key)) {
        model.head_dim = bounded(dim_key, *dim, most_head_dim);
    } else {
        if (model.hidden % model.heads != 0) {
            throw error(key_named("llama.attention.head_count"),
                        "a divisor of the embedding's length " + std::to_string(model.hidden),
                        std::to_string(model.heads));
        }
        model.head_dim = bounded("llama.embedding_length' / 'llama.attention.head_count",
                                 static_cast<std::uint32_t>(model.hidden / model.heads), most_head_dim);
    }
    const std::string value_key = "llama.attention.value_length";
    const auto value_dim = file.find_u32(value_key);
    if (value_dim && *value_dim != static_cast<std::uint32_t>(model.head_dim)) {
        throw error(key_named(value_key), "the keys' length " + std::to_string(model.head_dim),
                    std::to_string(*value_dim));
    }

    const std::string rope_key = "llama.rope.dimension_count";
    const auto rope_dims = file.find_u32(rope_key).value_or(static_cast<std::uint32_t>(model.head_dim));
    model.rope_dims = bounded(rope_key, rope_dims, static_cast<std::uint32_t>(model.head_dim));
    if (model.rope_dims % 2 != 0) {
        throw error(key_named(rope_key), "an even number", std::to_string(model.rope_dims));
    }
    const std::string base_key = "llama.rope.freq_base";
    model.rope_base = read_positive(base_key, file.find_f32(base_key).value_or(10000.0F), 1e12F);
    const std::string epsilon_key = "llama.attention.layer_norm_rms_epsilon";
    model.rms_epsilon = read_positive(epsilon_key, file.get_f32(epsilon_key), 1.0F);

    model.vocab = read_vocab(file);
    model.tied_embeddings = file.find_tensor("output.weight") == nullptr;
    check_tensors(file, model);
    return model;
}

} // namespace engine
