// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/prompt.hpp"

#include "engine/cuda/policy_session.hpp"
#include "engine/cuda/program.hpp"

#include <fstream>
#include <numeric>
#include <sstream>
#include <utility>

namespace engine {

namespace {

/// One prompt read on a CUDA device. It is read twice: once for the records, which also sets products up,
/// and once for the time.
class cuda_reader final : public prompt_reader {
  public:
    /// @param idle  where the session goes back to; it must outlive the reader
    cuda_reader(std::unique_ptr<cuda::session> session, std::unique_ptr<cuda::session>& idle)
        : session_(std::move(session))
        , idle_(idle) {}
    cuda_reader(const cuda_reader&) = delete;
    cuda_reader& operator=(const cuda_reader&) = delete;
    ~cuda_reader() override { idle_ = std::move(session_); }

    void prefill(const std::vector<std::int32_t>& tokens, const progress_call& progress) override {
        session_->record(true);
        static_cast<void>(session_->prefill(tokens));
        note_layers(tokens.size());
        if (progress) progress(0.5);
        session_->record(false);
        seconds_ = session_->prefill(tokens).wall_ms / 1000;
        const std::vector<double> times = session_->layer_ms();
        for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
            layers_[layer].seconds = times[layer] / 1000;
        }
        logits_ = session_->logits();
        length_ = static_cast<double>(tokens.size());
    }
    void feed(const std::vector<std::int32_t>& tokens) override {
        session_->feed(tokens);
        logits_ = session_->logits();
        length_ += static_cast<double>(tokens.size());
    }
    void feed_one(std::int32_t token) override { feed({token}); }
    void back_to_prompt() override {
        session_->back_to_prompt();
        length_ = session_->options().prompt;
    }

    const std::vector<float>& logits() const override { return logits_; }
    double prefill_seconds() const override { return seconds_; }
    const std::vector<layer_record>& layers() const override { return layers_; }
    const std::vector<std::int32_t>& dropped_at() const override { return dropped_at_; }
    double held_share() const override {
        const std::vector<std::int32_t> lengths = session_->lengths();
        const double rows = std::accumulate(lengths.begin(), lengths.end(), 0.0);
        return rows / static_cast<double>(lengths.size()) / length_;
    }

  private:
    void note_layers(std::size_t tokens) {
        layers_ = cuda::records_of(*session_);
        dropped_at_.assign(tokens, -1);
        std::vector<std::size_t> alive(tokens);
        std::iota(alive.begin(), alive.end(), std::size_t{0});
        for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
            const cuda::layer_facts& facts = session_->facts()[layer];
            if (facts.kept_to_old.empty()) continue;
            std::vector<std::size_t> kept;
            std::size_t next = 0;
            for (const std::int32_t old : facts.kept_to_old) {
                for (; next < static_cast<std::size_t>(old); ++next) {
                    dropped_at_[alive[next]] = static_cast<std::int32_t>(layer);
                }
                kept.push_back(alive[next++]);
            }
            for (; next < alive.size(); ++next) {
                dropped_at_[alive[next]] = static_cast<std::int32_t>(layer);
            }
            alive = std::move(kept);
        }
        for (const cuda::decision_record& decision : session_->decisions()) {
            layer_record& record = layers_[static_cast<std::size_t>(decision.layer)];
            record.selected = true;
            record.outcomes = decision.outcomes;
        }
    }

    std::unique_ptr<cuda::session> session_;
    std::unique_ptr<cuda::session>& idle_;
    std::vector<float> logits_;
    std::vector<layer_record> layers_;
    std::vector<std::int32_t> dropped_at_;
    double seconds_ = 0;
    double length_ = 0; ///< positions so far
};

/// The kernel module's version, the one word of its line about itself that is digits and dots; empty where
/// there is none to read.
std::string kernel_driver() {
    std::ifstream file("/proc/driver/nvidia/version");
    std::string line;
    std::getline(file, line);
    std::istringstream words(line);
    for (std::string word; words >> word;) {
        if (word.find('.') != std::string::npos &&
            word.find_first_not_of("0123456789.") == std::string::npos) {
            return word;
        }
    }
    return {};
}

std::string version_text(int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

} // namespace

std::string cuda_prompt_model::device() const {
    cudaDeviceProp properties{};
    int device = 0;
    int runtime = 0;
    int driver = 0;
    cuda::check(cudaGetDevice(&device), "device");
    cuda::check(cudaGetDeviceProperties(&properties, device), "device");
    cuda::check(cudaRuntimeGetVersion(&runtime), "device");
    cuda::check(cudaDriverGetVersion(&driver), "device");
    std::string text = printable(properties.name);
    const std::string kernel = printable(kernel_driver());
    if (!kernel.empty()) text += ", driver " + kernel;
    return text + ", CUDA driver " + version_text(driver) + ", runtime " + version_text(runtime);
}

std::unique_ptr<prompt_reader> cuda_prompt_model::reader_of(const policy& policy, std::int32_t prompt,
                                                            std::int32_t following) {
    std::unique_ptr<cuda::session> session = std::move(idle_);
    cuda::session_options wanted = cuda::options_under(policy, prompt, following);
    wanted.time_layers = true;
    const auto fits = [&wanted](const cuda::session_options& has) {
        return has.prompt == wanted.prompt && has.following == wanted.following &&
               has.span_ends == wanted.span_ends && has.block_rows == wanted.block_rows &&
               has.num_observations == wanted.num_observations && has.list_means == wanted.list_means;
    };
    if (session && fits(session->options())) {
        cuda::change_policy(*session, policy);
    } else {
        session.reset(); // before another takes memory
        session = std::make_unique<cuda::session>(weights_, std::move(wanted));
    }
    return std::make_unique<cuda_reader>(std::move(session), idle_);
}

std::unique_ptr<prompt_model> open_cuda_model(const std::string& path) {
    cuda::require_device();
    return std::make_unique<cuda_prompt_model>(path);
}

} // namespace engine
