// Products whose sums stay in tiles over all inputs, on AMX: of bytes (linear_rotated.inl) or of bfloat16
// (linear_decoded.inl).
//
// Activations are the first operand of a tile product, 16 rows of 64 bytes; weights of a column tile the second. Where
// rows are many, what becomes of a pair of row blocks' sums is computed while the next pair is multiplied.
#include "amx_tiles.h"
#include "kernels.h"

namespace {

using treadle::GatedCall;

constexpr int kTileSums = kRowBlock * kColumns;  // of a tile: [16 rows][16 columns]
constexpr int kSumsAtOnce = 4;                   // tiles of sums: four column tiles, or two with two blocks of rows
constexpr int64_t kTileBytes = 1024;             // of either operand
constexpr int64_t kAllSteps = int64_t{1} << 40;

// What is multiplied: `Sum` is the type of sums; are_bytes says which instruction.
struct OfBytes {
    using Sum = int32_t;
    static constexpr bool are_bytes = true;
};
struct OfBfloat16 {
    using Sum = float;
    static constexpr bool are_bytes = false;
};

static_assert(treadle::linear_scratch_bytes(kGroup) >= 2 * kSumsAtOnce * kTileSums * int64_t{sizeof(int32_t)},
              "a thread's scratch memory holds two sets of sums");

// Sums of some column tiles, the first of which is `tile`, and of one or two blocks of rows.
template <class Operands>
struct TileSums {
    int64_t tile = 0;
    int64_t row = 0;
    int64_t num_rows = 0;
    int num_blocks = 0;
    const typename Operands::Sum* sums = nullptr;  // [column tiles][blocks][16][16]

    // Of row `i` from the first one on, and of a column tile.
    inline __attribute__((always_inline)) const typename Operands::Sum* of(int64_t i, int index) const {
        return sums + index * num_blocks * kTileSums + i * kColumns;
    }
};

// Tile registers: 0 to 3 hold sums, 4 and 5 weights, 6 and 7 activations. Their numbers must be literals.
template <class Operands>
class ProductTiles {
 public:
    using Sum = typename Operands::Sum;

    // x: activations, [row blocks][steps][kTileBytes].
    ProductTiles(const void* x, int64_t steps, int64_t rows, Sum* sums)
        : x_(static_cast<const uint8_t*>(x)), steps_(steps), sums_(sums) {
        const int num_rows = static_cast<int>(rows < kRowBlock ? rows : kRowBlock);
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) config.set(tile, tile == 4 || tile == 5 ? 16 : num_rows, 64);
        config.load();
    }
    ~ProductTiles() { _tile_release(); }

    int64_t steps() const { return steps_; }

    // Multiplies one or two blocks of rows from `row` on with column tiles; before each step, between(step) is called.
    // The sums stay until those after the next are taken. Weights of a step lie at step % kStepsKept.
    template <int kTiles, int kBlocks, int64_t kStepsKept, class Between>
    inline __attribute__((always_inline)) const Sum* multiply(const uint8_t* const* weights, int64_t row,
                                                              const Between& between) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        order_memory();
        const uint8_t* x = x_ + row / kRowBlock * steps_ * kTileBytes + row % kRowBlock * 64;
        for (int64_t step = 0; step < steps_; ++step) {
            between(step);
            order_memory();
            add_products<kTiles, kBlocks>(weights, step % kStepsKept * kTileBytes, x + step * kTileBytes);
        }
        order_memory();
        turn_ = 1 - turn_;
        Sum* out = sums_ + turn_ * kSumsAtOnce * kTileSums;
        _tile_stored(0, out, 64);
        if (kTiles * kBlocks > 1) _tile_stored(1, out + kTileSums, 64);
        if (kTiles * kBlocks > 2) _tile_stored(2, out + 2 * kTileSums, 64);
        if (kTiles * kBlocks > 2) _tile_stored(3, out + 3 * kTileSums, 64);
        order_memory();
        return out;
    }

 private:
    // Sums of column tile t and block b are in tile kBlocks t + b.
    template <int kTiles, int kBlocks>
    inline __attribute__((always_inline)) void add_products(const uint8_t* const* weights, int64_t place,
                                                            const uint8_t* x) const {
#define TREADLE_PRODUCT(sums, rows, columns)                                    \
    if (Operands::are_bytes) {                                                  \
        _tile_dpbsud(sums, rows, columns);                                      \
    } else {                                                                    \
        _tile_dpbf16ps(sums, rows, columns);                                    \
    }
        _tile_stream_loadd(6, x, 64);
        if (kBlocks == 2) _tile_stream_loadd(7, x + steps_ * kTileBytes, 64);
        _tile_loadd(4, weights[0] + place, 64);
        TREADLE_PRODUCT(0, 6, 4)
        if (kBlocks == 2) TREADLE_PRODUCT(1, 7, 4)
        if (kTiles == 1) return;
        _tile_loadd(5, weights[1] + place, 64);
        if (kBlocks == 2) {
            TREADLE_PRODUCT(2, 6, 5)
            TREADLE_PRODUCT(3, 7, 5)
            return;
        }
        TREADLE_PRODUCT(1, 6, 5)
        if (kTiles == 2) return;
        _tile_loadd(4, weights[2] + place, 64);
        TREADLE_PRODUCT(2, 6, 4)
        _tile_loadd(5, weights[3] + place, 64);
        TREADLE_PRODUCT(3, 6, 5)
#undef TREADLE_PRODUCT
    }

    const uint8_t* const x_;
    const int64_t steps_;
    Sum* const sums_;  // [2][kSumsAtOnce][kTileSums]
    int turn_ = 0;
};

// What becomes of sums, row by row, where numbers.of(i, index) makes numbers of those of row `i` and a column tile:
// outputs of a layer.
template <class Numbers, int kTiles>
class LinearOutputs {
 public:
    LinearOutputs(const LinearCall& call, const Numbers& numbers, int64_t tile, int64_t row)
        : numbers_(numbers), call_(call), tile_(tile), row_(row) {}
    inline __attribute__((always_inline)) void write(int64_t i) const {
        for (int index = 0; index < kTiles; ++index) {
            store_outputs(call_, row_ + i, tile_ + index, numbers_.of(i, index));
        }
    }

 private:
    const Numbers numbers_;
    const LinearCall call_;
    const int64_t tile_;
    const int64_t row_;
};

inline __attribute__((always_inline)) void store_gated(F gated, float* y) { f_store(y, gated); }
inline __attribute__((always_inline)) void store_gated(F gated, uint16_t* nearest) { store_rounded(gated, nearest); }

// SwiGLU of the same column tile of two layers, as float or uint16_t.
template <class Numbers, class Output>
class GatedOutputs {
 public:
    GatedOutputs(const GatedCall& call, Output* out, const Numbers& numbers, int64_t tile, int64_t row)
        : numbers_(numbers),
          n_(call.gate->n),
          out_(out + treadle::blocked_row_offset(row, n_) + tile / 2 * treadle::kBlockedRun + tile % 2 * kColumns) {}
    inline __attribute__((always_inline)) void write(int64_t i) const {
        store_gated(f_swiglu(numbers_.of(i, 0), numbers_.of(i, 1)), out_ + treadle::blocked_row_offset(i, n_));
    }

 private:
    const Numbers numbers_;
    const int64_t n_;
    Output* const out_;
};

// Some rows and column tiles of one or two matrices. `Writer` says what is multiplied and what becomes of it:
//   Operands               OfBytes or OfBfloat16
//   begin(tile, out)       where the weights lie of the column tiles that are taken with `tile`
//   ahead(weights, at, n)  asks for n bytes, `at` and on, of each of those that are next
//   outputs(sums)          what becomes of these sums: its write(i) makes the outputs of a row
// and for few rows, where weights may come step by step
//   kStepsKept             of how many steps they are kept
//   begin_steps(tile, out) where they lie
//   step(tile, step)       comes before each step
template <class Writer>
class RowsProduct {
 public:
    using Operands = typename Writer::Operands;

    RowsProduct(const Writer& writer, const void* x, int64_t steps, int64_t row_begin, int64_t row_end, void* sums)
        : writer_(writer),
          row_begin_(row_begin),
          row_end_(row_end),
          tiles_(x, steps, row_end - row_begin, static_cast<typename Operands::Sum*>(sums)) {}

    // One or two blocks of rows, weights step by step.
    template <int kTiles, int kBlocks>
    void multiply_few(int64_t tile) {
        const uint8_t* weights[kTiles];
        writer_.begin_steps(tile, weights);
        const auto between = [&](int64_t step) { writer_.step(tile, step); };
        const auto* sums = tiles_.template multiply<kTiles, kBlocks, Writer::kStepsKept>(weights, row_begin_, between);
        write({tile, row_begin_, row_end_ - row_begin_, kBlocks, sums});
    }

    // Any number of rows; sums of the last ones are written with the next call, or by finish().
    template <int kTiles>
    void multiply(int64_t tile) {
        const uint8_t* weights[kTiles];
        writer_.begin(tile, weights);
        const int64_t written_at_once = (2 * kRowBlock + tiles_.steps() - 1) / tiles_.steps();
        // With every pair of blocks a share is asked for of the weights that are next.
        const int64_t num_pairs = (row_end_ - row_begin_ + 2 * kRowBlock - 1) / (2 * kRowBlock);
        const int64_t share = (kTileBytes / 64 + num_pairs - 1) / num_pairs * 64;
        int64_t asked = 0;
        for (int64_t row = row_begin_; row < row_end_; row += 2 * kRowBlock, asked += share) {
            // All that a row needs is at hand: so few instructions that the tile products before and after overlap.
            const auto outputs = writer_.outputs(last_);
            const int64_t num_outputs = last_.num_rows;
            int64_t written = 0;
            const auto between = [&](int64_t step) {
                writer_.ahead(weights, step * kTileBytes + asked, share);
                const int64_t until = written + written_at_once < num_outputs ? written + written_at_once : num_outputs;
                for (; written < until; ++written) outputs.write(written);
            };
            const int64_t num_rows = row_end_ - row < 2 * kRowBlock ? row_end_ - row : 2 * kRowBlock;
            const bool is_pair = num_rows > kRowBlock;
            const auto* sums = is_pair ? tiles_.template multiply<kTiles, 2, kAllSteps>(weights, row, between)
                                       : tiles_.template multiply<kTiles, 1, kAllSteps>(weights, row, between);
            for (; written < num_outputs; ++written) outputs.write(written);
            order_memory();
            last_ = {tile, row, num_rows, is_pair ? 2 : 1, sums};
        }
    }

    void finish() {
        write(last_);
        last_ = {};
    }

 private:
    void write(const TileSums<Operands>& sums) const {
        const auto outputs = writer_.outputs(sums);
        for (int64_t i = 0; i < sums.num_rows; ++i) outputs.write(i);
        order_memory();
    }

    const Writer writer_;
    const int64_t row_begin_;
    const int64_t row_end_;
    ProductTiles<Operands> tiles_;
    TileSums<Operands> last_;  // not yet written
};

}  // namespace
