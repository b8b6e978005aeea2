// Linear layers over threads.
#include <algorithm>

#include "layers.h"

namespace treadle {

namespace {

// Rows of a product that one chunk computes: so few that codes stay in the second-level cache beside the weights.
constexpr int64_t kRowsPerChunk = kMaxLinearRows;
// About a microsecond of reading weights, far above the cost of claiming a chunk.
constexpr int64_t kBytesPerChunk = 32 * 1024;
// Some twenty microseconds of tile products: each chunk sets the tiles up, and writes its last outputs beside none.
constexpr int64_t kRowTilesPerChunk = 2048;

}  // namespace

void ActivationBuffer::reserve(treadle_activations format, int64_t max_rows, int64_t max_k) {
    const int64_t padded_rows = (max_rows + kRowBlock - 1) / kRowBlock * kRowBlock, groups = (max_k + kGroup - 1) / kGroup;
    format_ = format;
    switch (format) {
        case TREADLE_ACTIVATIONS_SPLIT:
            terms_.reserve(padded_rows / kRowBlock * term_block_words(groups * kGroup));
            return;
        case TREADLE_ACTIVATIONS_BF16:
            terms_.reserve(padded_rows * groups * kGroup);
            return;
        case TREADLE_ACTIVATIONS_ROTATED:
            codes_.reserve(padded_rows * padded_inputs(max_k));
            scales_.reserve(padded_rows);
            code_sums_.reserve(padded_rows);
            return;
        case TREADLE_ACTIVATIONS_INT8:
            codes_.reserve(padded_rows * groups * kGroup + 64);
            scales_.reserve(padded_rows * groups);
            sums_.reserve(padded_rows * groups);
            code_sums_.reserve(padded_rows * groups * 2);
            return;
    }
}

QuantizedRow ActivationBuffer::quantized_row(int64_t row, int64_t k) const {
    const int64_t groups = k / kGroup;
    const int64_t block = row / kRowBlock * groups * kRowBlock, lane = row % kRowBlock;
    return {codes_.data() + (block + lane) * kGroup, scales_.data() + block + lane, sums_.data() + block + lane,
            code_sums_.data() + 2 * block + lane};
}

void ActivationBuffer::write_row(const RunsOfRow& values, int64_t row, int64_t k, float* scratch) const {
    const Kernels& table = kernels();
    const int64_t block = row / kRowBlock, lane = row % kRowBlock;
    switch (format_) {
        case TREADLE_ACTIVATIONS_INT8:
            return table.quantize_row(values.start, k, quantized_row(row, k));
        case TREADLE_ACTIVATIONS_SPLIT:
            return table.split_row(values.start, k, terms_.data() + block * term_block_words(k) + lane * kGroup);
        case TREADLE_ACTIVATIONS_BF16:
            return table.round_row(values.start, k, terms_.data() + block * kRowBlock * k + lane * kGroup);
        case TREADLE_ACTIVATIONS_ROTATED:
            int8_t* codes = codes_.data() + rotated_row_offset(row, k);
            return table.rotate_row(values, k, scratch, {codes, scales_.data() + row, code_sums_.data() + row});
    }
}

Activations ActivationBuffer::view(const float* values) const {
    Activations x;
    x.values = values;
    switch (format_) {
        case TREADLE_ACTIVATIONS_SPLIT:
            x.terms = terms_.data();
            break;
        case TREADLE_ACTIVATIONS_BF16:
            x.nearest = terms_.data();
            break;
        case TREADLE_ACTIVATIONS_ROTATED:
            x.rotated = codes_.data();
            x.row_scales = scales_.data();
            x.row_starts = code_sums_.data();
            break;
        case TREADLE_ACTIVATIONS_INT8:
            x.codes = codes_.data();
            x.scales = scales_.data();
            x.sums = sums_.data();
            x.code_sums = code_sums_.data();
            break;
    }
    return x;
}

int64_t ActivationBuffer::num_bytes() const {
    return terms_.num_bytes() + codes_.num_bytes() + scales_.num_bytes() + sums_.num_bytes() + code_sums_.num_bytes();
}

void ThreadScratch::reserve(int num_threads, int64_t bytes_per_thread) {
    stride_ = (bytes_per_thread + 4095) / 4096 * 4096;  // pages apart, so that threads share no cache line
    memory_.reserve(num_threads * stride_);
}

namespace {

// Some rows and column tiles of one of several matrices.
struct Chunk {
    int matrix;
    int64_t tile_begin;
    int64_t tile_end;
    int64_t row_begin;
    int64_t row_end;
};

// The chunks of some products with the same rows. Where rows are many, each thread has its own; else each has its own
// column tiles, so that it asks in time for the weights that it needs next.
class Chunks {
 public:
    Chunks(int num_threads, int64_t rows)
        : shares_(rows, num_threads, RowShares::kLeastOfProducts), num_threads_(num_threads), rows_(rows) {
        rows_together_ = shares_.are_owned() ? shares_.count(0) : rows;
        row_blocks_ = (rows_together_ + kRowsPerChunk - 1) / kRowsPerChunk;
    }

    // A matrix of so many column tiles, each of so many bytes.
    void add(int64_t tiles, int64_t tile_bytes) {
        // With many rows the arithmetic takes over: the same time is reached with fewer tiles.
        const int64_t of_bytes = kBytesPerChunk / (tile_bytes * std::max<int64_t>(rows_together_ / 8, 1));
        const int64_t wanted = shares_.are_owned() ? kRowTilesPerChunk / rows_together_ : of_bytes;
        Matrix& matrix = matrices_[num_matrices_++];
        matrix.tiles = tiles;
        matrix.tiles_per_chunk = std::max<int64_t>(wanted / 2 * 2, 2);  // pairs of tiles share loads of activations
        matrix.ranges = (tiles + matrix.tiles_per_chunk - 1) / matrix.tiles_per_chunk;
    }

    int64_t count(int owner) const {
        int64_t count = 0;
        for (int i = 0; i < num_matrices_; ++i) count += num_ranges(i, owner) * row_blocks_;
        return count;
    }

    // An owner's index-th: matrix after matrix, column range after column range, block of rows after block of rows.
    Chunk at(int owner, int64_t index) const {
        int i = 0;
        for (; index >= num_ranges(i, owner) * row_blocks_; ++i) index -= num_ranges(i, owner) * row_blocks_;
        const Matrix& matrix = matrices_[i];
        const int64_t range = (shares_.are_owned() ? 0 : first_range(i, owner)) + index / row_blocks_;
        const int64_t first_row = shares_.are_owned() ? shares_.begin(owner) : 0;
        const int64_t end_row = shares_.are_owned() ? shares_.end(owner) : rows_;
        const int64_t row = first_row + index % row_blocks_ * kRowsPerChunk;
        return {i, range * matrix.tiles_per_chunk, std::min((range + 1) * matrix.tiles_per_chunk, matrix.tiles), row,
                std::min(row + kRowsPerChunk, end_row)};
    }

    // body(chunk, thread) for all of them.
    template <class Body>
    void run(ThreadPool& pool, const Body& body) const {
        pool.run_owned([this](int owner) { return count(owner); },
                       [&](int owner, int64_t index, int thread) {
                           const Chunk chunk = at(owner, index);
                           if (chunk.row_begin < chunk.row_end) body(chunk, thread);
                       });
    }

 private:
    static constexpr int kMaxMatrices = 4;
    struct Matrix {
        int64_t tiles;
        int64_t tiles_per_chunk;
        int64_t ranges;
    };

    int64_t first_range(int matrix, int owner) const { return matrices_[matrix].ranges * owner / num_threads_; }
    int64_t num_ranges(int matrix, int owner) const {
        if (shares_.are_owned()) return matrices_[matrix].ranges;
        return first_range(matrix, owner + 1) - first_range(matrix, owner);
    }

    RowShares shares_;
    int num_threads_;
    int64_t rows_;
    int64_t rows_together_;
    int64_t row_blocks_;
    Matrix matrices_[kMaxMatrices] = {};
    int num_matrices_ = 0;
};

int64_t tile_bytes(const treadle_linear& weights) {
    return tile_layout(*format_info(weights.format), weights.k).tile_bytes;
}

}  // namespace

void run_linear(ThreadPool& pool, const ThreadScratch& scratch, const Activations& x, int64_t rows,
                const LinearJob* jobs, int num_jobs) {
    if (rows == 0) return;
    Chunks chunks(pool.num_threads(), rows);
    for (int i = 0; i < num_jobs; ++i) chunks.add(num_tiles(jobs[i].weights->n), tile_bytes(*jobs[i].weights));
    const Kernels& table = kernels();
    chunks.run(pool, [&](const Chunk& chunk, int thread) {
        const LinearJob& job = jobs[chunk.matrix];
        LinearCall call{};
        call.weights = job.weights;
        call.x = &x;
        call.y = job.y;
        call.y_stride = job.y_stride;
        call.tile_begin = chunk.tile_begin;
        call.tile_end = chunk.tile_end;
        call.row_begin = chunk.row_begin;
        call.row_end = chunk.row_end;
        call.is_added = job.is_added;
        call.scratch = scratch.of(thread);
        table.linear(call);
    });
}

bool can_gate(const treadle_linear& gate, const treadle_linear& up, treadle_activations activations, int64_t rows) {
    const bool has_kernel = activations == TREADLE_ACTIVATIONS_ROTATED || activations == TREADLE_ACTIVATIONS_BF16;
    return kernels().gate != nullptr && has_kernel && rows > kRowBlock && takes_codes(gate, activations) &&
           up.format == gate.format && gate.bias == nullptr && up.bias == nullptr;
}

void run_gated(ThreadPool& pool, const ThreadScratch& scratch, const Activations& x, int64_t rows,
               const treadle_linear& gate, const treadle_linear& up, float* y, uint16_t* nearest) {
    if (rows == 0) return;
    Chunks chunks(pool.num_threads(), rows);
    chunks.add(num_tiles(gate.n), 2 * tile_bytes(gate));
    const Kernels& table = kernels();
    chunks.run(pool, [&](const Chunk& chunk, int thread) {
        GatedCall call{};
        call.gate = &gate;
        call.up = &up;
        call.x = &x;
        call.y = y;
        call.nearest = nearest;
        call.tile_begin = chunk.tile_begin;
        call.tile_end = chunk.tile_end;
        call.row_begin = chunk.row_begin;
        call.row_end = chunk.row_end;
        call.scratch = scratch.of(thread);
        table.gate(call);
    });
}

}  // namespace treadle
