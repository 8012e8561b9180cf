// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cpu/products.hpp"

#include "engine/cpu/aligned_buffer.hpp"
#include "engine/cpu/kernels.hpp"
#include "engine/cpu/threads.hpp"
#include "engine/error.hpp"

#include <dnnl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <random>
#include <string>
#include <vector>

namespace engine::cpu {

namespace {

constexpr int fp32_tile = 128;      // rows of a full tile
constexpr int fp32_small_tile = 16; // and of those that the rest is cut into, where both give the same bits
constexpr int fp32_panel = 512;
// Rows converted at once: a block of weights then serves them all from the nearest cache.
constexpr int amx_group = 128;
constexpr int amx_panel = 96;

std::int64_t divide_up(std::int64_t a, std::int64_t b) {
    return (a + b - 1) / b;
}

// oneDNN divides its work by the number of threads that it finds. Ours runs on one thread each, always.
class single_threaded {
  public:
    single_threaded()
        : before_(max_threads()) {
        set_threads(1);
    }
    ~single_threaded() { set_threads(before_); }
    single_threaded(const single_threaded&) = delete;
    single_threaded& operator=(const single_threaded&) = delete;

  private:
    int before_;
};

// y[rows, columns] (+)= x[rows, in] * w[columns, in]^T on the calling thread.
void sgemm(std::int64_t rows, std::int64_t columns, std::int64_t in, const float* x, std::int64_t x_stride,
           const float* w, float* y, std::int64_t y_stride, bool add) {
    const dnnl_status_t status =
        dnnl_sgemm('N', 'T', rows, columns, in, 1.0f, x, x_stride, w, in, add ? 1.0f : 0.0f, y, y_stride);
    if (status != dnnl_success) throw error("sgemm", "success", "status " + std::to_string(status));
}

// Whether a row has the same bits in a small tile as in a full one: true of every kernel that cuts the depth
// alike for both, and seen at once on random numbers where one doesn't.
bool small_tiles_agree(int columns, int in, const float* w) {
    std::vector<float> x(static_cast<std::size_t>(fp32_tile) * static_cast<std::size_t>(in));
    std::vector<float> full(static_cast<std::size_t>(fp32_tile) * static_cast<std::size_t>(columns)),
        parts = full;
    std::minstd_rand bits(1);
    for (float& v : x) {
        v = static_cast<float>(bits()) * 0x1p-30f - 1.0f;
    }
    const single_threaded guard;
    sgemm(fp32_tile, columns, in, x.data(), in, w, full.data(), columns, false);
    for (int r = 0; r < fp32_tile; r += fp32_small_tile) {
        sgemm(fp32_small_tile, columns, in, x.data() + std::int64_t{r} * in, in, w,
              parts.data() + std::int64_t{r} * columns, columns, false);
    }
    return std::memcmp(full.data(), parts.data(), full.size() * sizeof(float)) == 0;
}

} // namespace

struct matrix::packed {
    int out = 0, in = 0;
    arithmetic kind = arithmetic::fp32;
    aligned_buffer weights; // fp32: [out, in]; else blocks of 32 rows
    int panel = 0;          // columns that one thread computes at a time
    int rest_tile = 0;      // fp32: rows of the tiles after the last full one

    const tile_products& tiles() const { return amx_products(kind == arithmetic::bf16x3); }
    const float* fp32_rows(std::int64_t first) const {
        return reinterpret_cast<const float*>(weights.data()) + first * in;
    }
    std::byte* block(std::int64_t first) const {
        return weights.data() +
               static_cast<std::size_t>(first / tile_products::rows) * tiles().block_bytes(in);
    }

    void fill(const row_source& source);
    void run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride,
             bool add, scratch& memory) const;
    void run_fp32(const float* x, std::int64_t x_stride, std::int64_t rows, int columns, const float* w,
                  float* y, std::int64_t y_stride, bool add, float* padded) const;
};

void matrix::packed::fill(const row_source& source) {
    const std::int64_t blocks = divide_up(out, tile_products::rows);
    std::exception_ptr failure;
#pragma omp parallel
    {
        std::vector<float> rows;
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < blocks; ++i) {
            try {
                const int first = static_cast<int>(i) * tile_products::rows;
                const int count = std::min(tile_products::rows, out - first);
                if (kind == arithmetic::fp32) {
                    source(first, count, reinterpret_cast<float*>(weights.data()) + std::int64_t{first} * in);
                } else {
                    rows.resize(std::size_t{tile_products::rows} * static_cast<std::size_t>(in));
                    source(first, count, rows.data());
                    tiles().pack_right(rows.data(), in, count, in, block(first));
                }
            } catch (...) {
#pragma omp critical(engine_cpu_matrix)
                failure = std::current_exception();
            }
        }
    }
    if (failure) std::rethrow_exception(failure);
}

matrix::matrix(int out, int in, arithmetic kind, const row_source& source) {
    if (out < 1) throw error("out", "at least 1", std::to_string(out));
    if (in < 1) throw error("in", "at least 1", std::to_string(in));
    auto data = std::make_shared<packed>();
    data->out = out;
    data->in = in;
    data->kind = resolve(kind);
    const auto wide_out = static_cast<std::size_t>(out), wide_in = static_cast<std::size_t>(in);
    if (data->kind == arithmetic::fp32) {
        data->weights = aligned_buffer(wide_out * wide_in * sizeof(float));
        data->panel = static_cast<int>(divide_up(out, std::max<std::int64_t>(2, divide_up(out, fp32_panel))));
        data->fill(source);
        data->rest_tile =
            small_tiles_agree(data->panel, in, data->fp32_rows(0)) ? fp32_small_tile : fp32_tile;
    } else {
        const auto blocks = static_cast<std::size_t>(divide_up(out, tile_products::rows));
        data->weights = aligned_buffer(blocks * data->tiles().block_bytes(in));
        data->panel = amx_panel;
        data->fill(source);
    }
    data_ = std::move(data);
}

matrix::matrix(int out, int in, arithmetic kind, const float* weights, std::int64_t stride)
    : matrix(out, in, kind, [&](int first, int count, float* to) {
        for (int row = 0; row < count; ++row) {
            std::copy_n(weights + (first + row) * stride, in, to + static_cast<std::int64_t>(row) * in);
        }
    }) {}

int matrix::out() const {
    return data_ ? data_->out : 0;
}
int matrix::in() const {
    return data_ ? data_->in : 0;
}
arithmetic matrix::kind() const {
    return data_ ? data_->kind : arithmetic::fp32;
}
std::size_t matrix::bytes() const {
    return data_ ? data_->weights.size() : 0;
}

// One panel for up to fp32_tile rows; `padded` holds a tile of x and one of y.
void matrix::packed::run_fp32(const float* x, std::int64_t x_stride, std::int64_t rows, int columns,
                              const float* w, float* y, std::int64_t y_stride, bool add,
                              float* padded) const {
    const std::int64_t tile = rows == fp32_tile ? fp32_tile : rest_tile;
    const std::int64_t whole = rows / tile * tile;
    for (std::int64_t r = 0; r < whole; r += tile) {
        sgemm(tile, columns, in, x + r * x_stride, x_stride, w, y + r * y_stride, y_stride, add);
    }
    if (whole == rows) return;
    float* x_tile = padded;
    float* y_tile = padded + tile * in;
    std::fill_n(x_tile, tile * in, 0.0f);
    std::fill_n(y_tile, tile * columns, 0.0f);
    for (std::int64_t r = whole; r < rows; ++r) {
        std::copy_n(x + r * x_stride, in, x_tile + (r - whole) * in);
        if (add) std::copy_n(y + r * y_stride, columns, y_tile + (r - whole) * columns);
    }
    sgemm(tile, columns, in, x_tile, in, w, y_tile, columns, add);
    for (std::int64_t r = whole; r < rows; ++r) {
        std::copy_n(y_tile + (r - whole) * columns, columns, y + r * y_stride);
    }
}

void matrix::packed::run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y,
                         std::int64_t y_stride, bool add, scratch& memory) const {
    if (rows == 0) return;
    if (rows < 0) throw error("rows", "0 or more", std::to_string(rows));
    if (rows > 1 && x_stride < in)
        throw error("x_stride", std::to_string(in) + " or more", std::to_string(x_stride));
    if (rows > 1 && y_stride < out)
        throw error("y_stride", std::to_string(out) + " or more", std::to_string(y_stride));
    const bool fp32 = kind == arithmetic::fp32;
    const std::size_t left_block = fp32 ? 0 : tiles().block_bytes(in);
    const std::int64_t group_rows = fp32 ? fp32_tile : amx_group;
    const std::int64_t groups = divide_up(rows, group_rows);
    const std::int64_t panels = divide_up(out, panel);
    const int threads = static_cast<int>(std::min<std::int64_t>(max_threads(), groups * panels));
    std::exception_ptr failure; // oneDNN's, when it can't allocate
    memory.reserve_threads(threads,
                           fp32 ? sizeof(float) * static_cast<std::size_t>(fp32_tile) *
                                      static_cast<std::size_t>(in + panel)
                                : left_block * static_cast<std::size_t>(group_rows / tile_products::rows));

#pragma omp parallel num_threads(threads)
    {
        const single_threaded guard;
        std::byte* own = memory.own(this_thread());
        std::int64_t converted = -1;
        // Panels of a group are neighbours in this order, so a thread converts each group once; where there
        // are few rows, the panels are what the threads share.
#pragma omp for schedule(static)
        for (std::int64_t item = 0; item < groups * panels; ++item) {
            const std::int64_t group = item / panels, first_row = group * group_rows;
            const std::int64_t count = std::min(group_rows, rows - first_row);
            const std::int64_t first = item % panels * panel;
            const int columns = static_cast<int>(std::min<std::int64_t>(panel, out - first));
            const float* from = x + first_row * x_stride;
            float* to = y + first_row * y_stride + first;
            if (fp32) {
                try {
                    run_fp32(from, x_stride, count, columns, fp32_rows(first), to, y_stride, add,
                             reinterpret_cast<float*>(own));
                } catch (...) {
#pragma omp critical(engine_cpu_matrix)
                    failure = std::current_exception();
                }
                continue;
            }
            constexpr int block_rows = tile_products::rows;
            for (std::int64_t r = 0; group != converted && r < count; r += block_rows) {
                tiles().pack_left(from + r * x_stride, x_stride,
                                  static_cast<int>(std::min<std::int64_t>(block_rows, count - r)), in,
                                  own + static_cast<std::size_t>(r / block_rows) * left_block);
            }
            converted = group;
            for (int column = 0; column < columns; column += block_rows) {
                tiles().multiply(own, count, block(first + column), std::min(block_rows, columns - column),
                                 in, to + column, y_stride, add);
            }
        }
    }
}

void multiply(const matrix& weights, const float* x, std::int64_t x_stride, std::int64_t rows, float* y,
              std::int64_t y_stride, scratch& memory) {
    weights.data_->run(x, x_stride, rows, y, y_stride, false, memory);
}

void multiply_add(const matrix& weights, const float* x, std::int64_t x_stride, std::int64_t rows, float* y,
                  std::int64_t y_stride, scratch& memory) {
    weights.data_->run(x, x_stride, rows, y, y_stride, true, memory);
}

const char* products_library() {
    static const std::string text = [] {
        const dnnl_version_t* version = dnnl_version();
        return "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
               std::to_string(version->patch);
    }();
    return text.c_str();
}

} // namespace engine::cpu
