// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Rates of matrix products in the shapes of SmolLM2-135M by OpenBLAS and oneDNN: the measurement that the
// example engine's choice of library and arithmetic rests on. Writes JSON to the path given, or to standard
// output.
//
//   uniprefill_bench_cpu_products [--threads T] [--out FILE]

#include <cblas.h>
#include <dnnl.hpp>
#include <nlohmann/json.hpp>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>

#if defined(__linux__) && defined(__x86_64__)
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

namespace {

using json = nlohmann::json;
using dnnl::memory;

struct shape {
    const char* name;
    int in, out;
};

constexpr shape shapes[] = {
    {"qkv", 576, 576 + 192 + 192}, {"output", 576, 576}, {"gate_up", 576, 2 * 1536},
    {"down", 1536, 576},           {"head", 576, 49152},
};

// Linux hands out the AMX tile state only to processes that ask for it (arch_prctl, ARCH_REQ_XCOMP_PERM,
// feature 18).
bool request_amx() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

std::string cpu_name() {
    std::ifstream info("/proc/cpuinfo");
    for (std::string line; std::getline(info, line);)
        if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
    return "unknown";
}

// Best of several runs, each long enough to be timed, in seconds.
double best_time(const std::function<void()>& work) {
    work();
    double best = 1e30, spent = 0;
    for (int i = 0; i < 12 && spent < 0.6; ++i) {
        const auto start = std::chrono::steady_clock::now();
        work();
        const double t = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best = std::min(best, t);
        spent += t;
    }
    return best;
}

std::vector<float> ramp(std::size_t n) {
    std::vector<float> v(n);
    for (std::size_t i = 0; i < n; ++i)
        v[i] = static_cast<float>(static_cast<int>(i * 2654435761u >> 20 & 255) - 128) / 128.0f;
    return v;
}

// One oneDNN product of `tile` rows with weights in the layout it likes best, ready to run on any rows.
class dnnl_tile {
  public:
    dnnl_tile(const dnnl::engine& engine, shape s, int tile, memory::data_type type) {
        const bool int8 = type == memory::data_type::s8;
        const auto x_type = int8 ? memory::data_type::u8 : type;
        const memory::desc x({tile, s.in}, x_type, memory::format_tag::ab);
        const memory::desc w({s.in, s.out}, type, memory::format_tag::any);
        const memory::desc y({tile, s.out}, memory::data_type::f32, memory::format_tag::ab);
        dnnl::primitive_attr attributes;
        attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
        const dnnl::matmul::primitive_desc desc({x, w, y}, attributes, engine);
        kernel_ = desc.impl_info_str();
        primitive_ = dnnl::matmul(desc);
        x_ = x, y_ = y, scratch_ = desc.scratchpad_desc();
        weights_ = memory(desc.weights_desc(), engine);
        const auto plain = ramp(static_cast<std::size_t>(s.in) * static_cast<std::size_t>(s.out));
        if (int8) {
            std::fill_n(static_cast<std::int8_t*>(weights_.get_data_handle()), weights_.get_desc().get_size(),
                        3);
        } else {
            memory from({{s.in, s.out}, memory::data_type::f32, memory::format_tag::ab}, engine,
                        const_cast<float*>(plain.data()));
            dnnl::stream stream(engine);
            dnnl::reorder(from, weights_).execute(stream, from, weights_);
        }
    }
    void run(const dnnl::engine& engine, dnnl::stream& stream, void* x, float* y, void* scratch) const {
        primitive_.execute(stream, {{DNNL_ARG_SRC, memory(x_, engine, x)},
                                    {DNNL_ARG_WEIGHTS, weights_},
                                    {DNNL_ARG_DST, memory(y_, engine, y)},
                                    {DNNL_ARG_SCRATCHPAD, memory(scratch_, engine, scratch)}});
    }
    const std::string& kernel() const { return kernel_; }
    std::size_t scratch_bytes() const { return scratch_.get_size(); }

  private:
    std::string kernel_;
    dnnl::matmul primitive_;
    memory::desc x_, y_, scratch_;
    memory weights_;
};

} // namespace

int main(int argc, char** argv) {
    int threads = std::min(2, omp_get_num_procs());
    std::string out;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        if (option == "--threads") threads = std::atoi(argv[i + 1]);
        if (option == "--out") out = argv[i + 1];
    }
    if (threads < 1 || threads > omp_get_num_procs()) {
        std::cerr << "--threads: expected 1 to " << omp_get_num_procs() << ", came " << threads << '\n';
        return 2;
    }
    const bool amx = request_amx();
    openblas_set_num_threads(threads);
    const auto* version = dnnl_version();
    json report{{"cpu", cpu_name()},
                {"threads", threads},
                {"amx_granted", amx},
                {"openblas", {{"config", openblas_get_config()}, {"kernel", openblas_get_corename()}}},
                {"onednn", std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
                               std::to_string(version->patch)},
                {"unit", "GFLOP/s (two per multiply-add), best of up to 12 runs"},
                {"results", json::array()}};

    dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    for (const shape s : shapes) {
        const int rows = s.out > 10000 ? 512 : 2048;
        const double work = 2.0 * rows * s.in * s.out * 1e-9;
        const auto x = ramp(static_cast<std::size_t>(rows) * static_cast<std::size_t>(s.in));
        std::vector<float> y(static_cast<std::size_t>(rows) * static_cast<std::size_t>(s.out));
        auto record = [&](const char* library, const char* arithmetic, const char* threading, int tile,
                          const std::string& kernel, double seconds) {
            report["results"].push_back({{"shape", s.name},
                                         {"in", s.in},
                                         {"out", s.out},
                                         {"tile_rows", tile},
                                         {"library", library},
                                         {"arithmetic", arithmetic},
                                         {"threading", threading},
                                         {"kernel", kernel},
                                         {"gflops", std::round(work / seconds)}});
            std::cerr << s.name << ' ' << tile << ' ' << library << ' ' << arithmetic << ' ' << threading
                      << ' ' << kernel << ' ' << work / seconds << '\n';
        };
        const auto w = ramp(static_cast<std::size_t>(s.in) * static_cast<std::size_t>(s.out));
        for (int tile : {32, 64, 128, 256, 512}) {
            record("OpenBLAS", "fp32", "inside", tile, openblas_get_corename(), best_time([&] {
                       for (int r = 0; r < rows; r += tile)
                           cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, tile, s.out, s.in, 1,
                                       x.data() + static_cast<std::ptrdiff_t>(r) * s.in, s.in, w.data(), s.in,
                                       0, y.data() + static_cast<std::ptrdiff_t>(r) * s.out, s.out);
                   }));
            using type = memory::data_type;
            for (const auto& [arithmetic, dtype] :
                 {std::pair{"fp32", type::f32}, {"bf16", type::bf16}, {"int8", type::s8}}) {
                std::vector<char> input(static_cast<std::size_t>(rows) * static_cast<std::size_t>(s.in) * 4,
                                        0);
                const std::size_t row_bytes = static_cast<std::size_t>(s.in) * (dtype == type::f32    ? 4
                                                                                : dtype == type::bf16 ? 2
                                                                                                      : 1);
                for (bool inside : {true, false}) {
                    omp_set_num_threads(inside ? threads : 1);
                    const dnnl_tile product(engine, s, tile, dtype);
                    omp_set_num_threads(threads);
                    std::vector<std::vector<char>> scratch(static_cast<std::size_t>(threads),
                                                           std::vector<char>(product.scratch_bytes() + 64));
                    const double t = best_time([&] {
                        if (inside) {
                            dnnl::stream stream(engine);
                            for (int r = 0; r < rows; r += tile)
                                product.run(
                                    engine, stream, input.data() + static_cast<std::size_t>(r) * row_bytes,
                                    y.data() + static_cast<std::ptrdiff_t>(r) * s.out, scratch[0].data());
                        } else {
#pragma omp parallel num_threads(threads)
                            {
                                dnnl::stream stream(engine);
                                auto& own = scratch[static_cast<std::size_t>(omp_get_thread_num())];
#pragma omp for schedule(static)
                                for (int r = 0; r < rows; r += tile)
                                    product.run(engine, stream,
                                                input.data() + static_cast<std::size_t>(r) * row_bytes,
                                                y.data() + static_cast<std::ptrdiff_t>(r) * s.out,
                                                own.data());
                            }
                        }
                    });
                    record("oneDNN", arithmetic, inside ? "inside" : "over tiles", tile, product.kernel(), t);
                }
            }
        }
    }
    if (out.empty()) {
        std::cout << report.dump(2) << '\n';
    } else if (!(std::ofstream(out) << report.dump(1) << '\n')) {
        std::cerr << "--out: expected a path that can be written, came " << out << '\n';
        return 2;
    }
}
