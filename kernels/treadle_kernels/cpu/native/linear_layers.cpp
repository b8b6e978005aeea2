// Linear layers over threads.
#include <algorithm>

#include "layers.h"

namespace treadle {

namespace {

// Rows of a product that one chunk computes: so few that codes stay in the second-level cache beside the weights.
constexpr int64_t kRowsPerChunk = kMaxLinearRows;
// About a microsecond of reading weights, far above the cost of claiming a chunk.
constexpr int64_t kBytesPerChunk = 32 * 1024;

int64_t tiles_per_chunk(const treadle_linear& weights, int64_t rows) {
    const int64_t tile_bytes = tile_layout(*format_info(weights.format), weights.k).tile_bytes;
    // With many rows the arithmetic takes over: the same time is reached with fewer tiles.
    const int64_t wanted = kBytesPerChunk / (tile_bytes * std::max<int64_t>(rows / 8, 1));
    return std::max<int64_t>(wanted / 2 * 2, 2);  // pairs of tiles share loads of activations
}

}  // namespace

void ActivationBuffer::reserve(treadle_activations format, int num_terms, int64_t max_rows, int64_t max_k) {
    const int64_t padded_rows = (max_rows + 15) / 16 * 16, groups = (max_k + kGroup - 1) / kGroup;
    format_ = format;
    num_terms_ = num_terms;
    if (format == TREADLE_ACTIVATIONS_BF16) {
        const int64_t blocks = padded_rows / kRowBlock, width = groups * kGroup;
        terms_.reserve(is_rounded() ? padded_rows * width : blocks * term_block_words(width));
        return;
    }
    codes_.reserve(padded_rows * groups * kGroup + 64);
    scales_.reserve(padded_rows * groups);
    sums_.reserve(padded_rows * groups);
    code_sums_.reserve(padded_rows * groups * 2);
}

QuantizedRow ActivationBuffer::quantized_row(int64_t row, int64_t k) const {
    const int64_t groups = k / kGroup;
    const int64_t block = row / kRowBlock * groups * kRowBlock, lane = row % kRowBlock;
    return {codes_.data() + (block + lane) * kGroup, scales_.data() + block + lane, sums_.data() + block + lane,
            code_sums_.data() + 2 * block + lane};
}

void ActivationBuffer::split_row(const float* values, int64_t row, int64_t k) const {
    uint16_t* block = terms_.data() + row / kRowBlock * term_block_words(k);
    kernels().split_row(values, k, block + row % kRowBlock * kGroup);
}

void ActivationBuffer::round_rows(const float* values, int64_t begin, int64_t end, int64_t rows, int64_t k) const {
    const int block_rows = rounded_block_rows(rows);
    for (int64_t row = begin; row < end; row += block_rows) {
        const int count = static_cast<int>(std::min<int64_t>(end - row, block_rows));
        uint16_t* out = terms_.data() + rounded_row_offset(row, k, block_rows);
        kernels().round_rows(values + row * k, k, count, k, block_rows, out);
    }
}

Activations ActivationBuffer::view(const float* values, int64_t rows) const {
    Activations x;
    x.values = values;
    if (is_rounded()) {
        x.rounded = terms_.data();
        x.block_rows = rounded_block_rows(rows);
    } else if (format_ == TREADLE_ACTIVATIONS_BF16) {
        x.terms = terms_.data();
    }
    x.codes = codes_.data();
    x.scales = scales_.data();
    x.sums = sums_.data();
    x.code_sums = code_sums_.data();
    return x;
}

int64_t ActivationBuffer::num_bytes() const {
    return terms_.num_bytes() + codes_.num_bytes() + scales_.num_bytes() + sums_.num_bytes() + code_sums_.num_bytes();
}

void ThreadScratch::reserve(int num_threads, int64_t bytes_per_thread) {
    stride_ = (bytes_per_thread + 4095) / 4096 * 4096;  // pages apart, so that threads share no cache line
    memory_.reserve(num_threads * stride_);
}

void run_linear(ThreadPool& pool, const ThreadScratch& scratch, const Activations& x, int64_t rows,
                const LinearJob* jobs, int num_jobs) {
    if (rows == 0) return;
    // Chunks of all jobs in one loop: job after job, column range after column range, block of rows after block of
    // rows.
    constexpr int kMaxJobs = 4;
    int64_t first_chunk[kMaxJobs + 1] = {0}, tiles[kMaxJobs];
    const int64_t row_blocks = (rows + kRowsPerChunk - 1) / kRowsPerChunk;
    for (int i = 0; i < num_jobs; ++i) {
        tiles[i] = tiles_per_chunk(*jobs[i].weights, rows);
        const int64_t ranges = (num_tiles(jobs[i].weights->n) + tiles[i] - 1) / tiles[i];
        first_chunk[i + 1] = first_chunk[i] + ranges * row_blocks;
    }
    const Kernels& table = kernels();
    pool.run(first_chunk[num_jobs], [&](int64_t chunk, int thread) {
        int i = 0;
        while (chunk >= first_chunk[i + 1]) ++i;
        const LinearJob& job = jobs[i];
        const int64_t range = (chunk - first_chunk[i]) / row_blocks, block = (chunk - first_chunk[i]) % row_blocks;
        LinearCall call{};
        call.weights = job.weights;
        call.x = &x;
        call.y = job.y;
        call.y_stride = job.y_stride;
        call.tile_begin = range * tiles[i];
        call.tile_end = std::min(call.tile_begin + tiles[i], num_tiles(job.weights->n));
        call.row_begin = block * kRowsPerChunk;
        call.row_end = std::min(call.row_begin + kRowsPerChunk, rows);
        call.is_added = job.is_added;
        call.scratch = scratch.of(thread);
        table.linear(call);
    });
}

}  // namespace treadle
