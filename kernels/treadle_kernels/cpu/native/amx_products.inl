// Products whose sums stay in tiles over all inputs, on AMX: of bytes (linear_rotated.inl) or of bfloat16
// (linear_decoded.inl).
//
// Activations are the first operand of a tile product, 16 rows of 64 bytes; weights of a column tile the second. Where
// rows are many, what becomes of a pair of row blocks' sums is computed while the next pair is multiplied, and inputs
// are taken in runs, the weights of which stay in the first-level cache while all rows pass them by.
#include "amx_tiles.h"
#include "kernels.h"

namespace {

using treadle::GatedCall;

constexpr int kTileSums = kRowBlock * kColumns;  // of a tile: [16 rows][16 columns]
constexpr int kSumsAtOnce = 4;                   // tiles of sums: four column tiles, or two with two blocks of rows
constexpr int64_t kTileBytes = 1024;             // of either operand
constexpr int64_t kAllSteps = int64_t{1} << 40;
constexpr int64_t kRunSteps = 18;                // at most, of a run of inputs: 36 KB of weights
constexpr int64_t kUnfinishedRows = 288;         // have sums of some runs, but not of all
constexpr int64_t kSumBytes = (2 + kUnfinishedRows / (2 * kRowBlock)) * kSumsAtOnce * kTileSums * 4;

// The unit of tile products sleeps when it has had nothing to do for about half a microsecond, and takes as long to wake
// up, which all other instructions wait for. To be called about as often in between; tile 3 is overwritten.
inline __attribute__((always_inline)) void keep_tiles_awake() { _tile_dpbf16ps(3, 6, 4); }

// What is multiplied: `Sum` is the type of sums; are_bytes says which instruction.
struct OfBytes {
    using Sum = int32_t;
    static constexpr bool are_bytes = true;
};
struct OfBfloat16 {
    using Sum = float;
    static constexpr bool are_bytes = false;
};

static_assert(treadle::linear_scratch_bytes(kGroup) >= kSumBytes + 2 * kRunSteps * kTileBytes,
              "a thread's scratch memory holds sums, and the weights of a run");

// Sums of some column tiles, the first of which is `tile`, and of one or two blocks of rows.
template <class Operands>
struct TileSums {
    int64_t tile = 0;
    int64_t row = 0;
    int64_t num_rows = 0;
    int num_blocks = 0;
    const typename Operands::Sum* sums = nullptr;  // [column tiles][blocks][16][16]
};

// Tile registers: 0 to 3 hold sums, 4 and 5 weights, 6 and 7 activations. Their numbers must be literals.
template <class Operands>
class ProductTiles {
 public:
    using Sum = typename Operands::Sum;

    // x: activations, [row blocks][steps][kTileBytes].
    ProductTiles(const void* x, int64_t steps, int64_t rows) : x_(static_cast<const uint8_t*>(x)), steps_(steps) {
        const int num_rows = static_cast<int>(rows < kRowBlock ? rows : kRowBlock);
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) config.set(tile, tile == 4 || tile == 5 ? 16 : num_rows, 64);
        config.load();
    }
    ~ProductTiles() { _tile_release(); }

    int64_t steps() const { return steps_; }

    // Multiplies one or two blocks of rows from `row` on with column tiles, from step `first` on; before each step,
    // between(step) is called, which counts from there. Weights of a step lie at step % kStepsKept. Goes on with the sums
    // `before`, null at the first step, and stores them to `out`.
    template <int kTiles, int kBlocks, int64_t kStepsKept, class Between>
    inline __attribute__((always_inline)) void multiply(const uint8_t* const* weights, int64_t row, int64_t first,
                                                        int64_t steps, const Sum* before, Sum* out,
                                                        const Between& between) const {
        if (before == nullptr) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, before, 64);
            if (kTiles * kBlocks > 1) _tile_loadd(1, before + kTileSums, 64);
            if (kTiles * kBlocks > 2) _tile_loadd(2, before + 2 * kTileSums, 64);
            if (kTiles * kBlocks > 2) _tile_loadd(3, before + 3 * kTileSums, 64);
        }
        order_memory();
        const uint8_t* x = x_ + (row / kRowBlock * steps_ + first) * kTileBytes + row % kRowBlock * 64;
        for (int64_t step = 0; step < steps; ++step) {
            between(step);
            order_memory();
            add_products<kTiles, kBlocks>(weights, step % kStepsKept * kTileBytes, x + step * kTileBytes);
        }
        order_memory();
        _tile_stored(0, out, 64);
        if (kTiles * kBlocks > 1) _tile_stored(1, out + kTileSums, 64);
        if (kTiles * kBlocks > 2) _tile_stored(2, out + 2 * kTileSums, 64);
        if (kTiles * kBlocks > 2) _tile_stored(3, out + 3 * kTileSums, 64);
        order_memory();
    }

 private:
    // Sums of column tile t and block b are in tile kBlocks t + b. Activations are loaded past the first-level cache, or
    // they would drive the weights out of it, which all rows meet.
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
};

// Where the sums of a row lie, from the first row on; next() goes on to the next one.
template <class Operands>
class RowSums {
 public:
    explicit RowSums(const TileSums<Operands>& sums) : sums_(sums.sums), apart_(sums.num_blocks * kTileSums) {}

    inline __attribute__((always_inline)) const typename Operands::Sum* of(int index) const {
        return sums_ + index * apart_;
    }
    inline __attribute__((always_inline)) void next() { sums_ += kColumns; }

 private:
    const typename Operands::Sum* sums_;
    const int64_t apart_;
};

// What becomes of sums, row by row, where `numbers` makes numbers of those of a row and a column tile, and goes on to the
// next row: outputs of a layer.
template <class Numbers, int kTiles>
class LinearOutputs {
 public:
    LinearOutputs(const LinearCall& call, const Numbers& numbers, int64_t tile, int64_t row)
        : numbers_(numbers),
          y_(call.y + row * call.y_stride + tile * kColumns),
          stride_(call.y_stride),
          is_added_(call.is_added),
          is_plain_(call.weights->bias == nullptr && (tile + kTiles) * kColumns <= call.weights->n),
          call_(call),
          tile_(tile),
          row_(row) {}
    inline __attribute__((always_inline)) void write_next() {
        for (int index = 0; index < kTiles; ++index) {
            const F sums = numbers_.of(index);
            if (is_plain_) {
                store_whole_outputs(y_ + index * kColumns, is_added_, sums);
            } else {
                store_outputs(call_, row_, tile_ + index, sums);
            }
        }
        numbers_.next();
        y_ += stride_;
        ++row_;
    }

 private:
    Numbers numbers_;
    float* y_;
    const int64_t stride_;
    const bool is_added_;
    const bool is_plain_;  // sixteen outputs of each tile, without biases
    const LinearCall& call_;
    const int64_t tile_;
    int64_t row_;
};

inline __attribute__((always_inline)) void store_gated(F gated, float* y) { f_store(y, gated); }
inline __attribute__((always_inline)) void store_gated(F gated, uint16_t* nearest) { store_rounded(gated, nearest); }

// SwiGLU of the same column tile of two layers, as float or uint16_t, of rows from a block's first on.
template <class Numbers, class Output>
class GatedOutputs {
 public:
    GatedOutputs(const GatedCall& call, Output* out, const Numbers& numbers, int64_t tile, int64_t row)
        : numbers_(numbers),
          out_(out + treadle::blocked_row_offset(row, call.gate->n) + tile / 2 * treadle::kBlockedRun +
               tile % 2 * kColumns),
          to_next_block_(treadle::blocked_row_offset(kRowBlock, call.gate->n) -
                         treadle::blocked_row_offset(kRowBlock - 1, call.gate->n)) {}
    inline __attribute__((always_inline)) void write_next() {
        store_gated(f_swiglu(numbers_.of(0), numbers_.of(1)), out_);
        numbers_.next();
        out_ += --left_in_block_ == 0 ? to_next_block_ : kGroup;
    }

 private:
    Numbers numbers_;
    Output* out_;
    const int64_t to_next_block_;
    int left_in_block_ = kRowBlock;  // two blocks at most
};

// Some rows and column tiles of one or two matrices. `Writer` says what is multiplied and what becomes of it:
//   Operands               OfBytes or OfBfloat16
//   begin(tile, first, steps, out)
//                          where the weights lie of the column tiles that are taken with `tile`, from step `first` on
//   ahead(weights, at, n)  asks for n bytes, `at` and on, of each of those that are next
//   outputs(sums)          what becomes of these sums: its write_next() makes the outputs of one row after the other
// and for few rows, where weights may come step by step
//   kStepsKept             of how many steps they are kept
//   begin_steps(tile, out) where they lie
//   step(tile, step)       comes before each step
template <class Writer>
class RowsProduct {
 public:
    using Operands = typename Writer::Operands;
    using Sum = typename Operands::Sum;

    // sums: kSumBytes of this thread.
    RowsProduct(const Writer& writer, const void* x, int64_t steps, int64_t row_begin, int64_t row_end, void* sums)
        : writer_(writer),
          row_begin_(row_begin),
          row_end_(row_end),
          tiles_(x, steps, row_end - row_begin),
          sums_(static_cast<Sum*>(sums)) {}

    // One or two blocks of rows, weights step by step.
    template <int kTiles, int kBlocks>
    void multiply_few(int64_t tile) {
        const uint8_t* weights[kTiles];
        writer_.begin_steps(tile, weights);
        const auto between = [&](int64_t step) { writer_.step(tile, step); };
        Sum* sums = next_sums();
        tiles_.template multiply<kTiles, kBlocks, Writer::kStepsKept>(weights, row_begin_, 0, tiles_.steps(), nullptr,
                                                                     sums, between);
        write({tile, row_begin_, row_end_ - row_begin_, kBlocks, sums});
    }

    // Any number of rows; sums of the last ones are written with the next call, or by finish().
    template <int kTiles>
    void multiply(int64_t tile) {
        const int64_t runs = (tiles_.steps() + kRunSteps - 1) / kRunSteps;
        const int64_t steps = (tiles_.steps() + runs - 1) / runs;
        const int64_t rows = runs == 1 ? row_end_ - row_begin_ : kUnfinishedRows;
        for (int64_t row = row_begin_; row < row_end_; row += rows) {
            const int64_t end = row + rows < row_end_ ? row + rows : row_end_;
            for (int64_t first = 0; first < tiles_.steps(); first += steps) {
                const int64_t left = tiles_.steps() - first;
                multiply_run<kTiles>(tile, row, end, first, left < steps ? left : steps);
            }
        }
    }

    void finish() {
        write(last_);
        last_ = {};
    }

 private:
    template <int kTiles>
    void multiply_run(int64_t tile, int64_t row_begin, int64_t row_end, int64_t first, int64_t steps) {
        const uint8_t* weights[kTiles];
        writer_.begin(tile, first, steps, weights);
        const int64_t written_at_once = (2 * kRowBlock + steps - 1) / steps;
        // With every pair of blocks a share is asked for of the weights that are next.
        const int64_t num_pairs = (row_end - row_begin + 2 * kRowBlock - 1) / (2 * kRowBlock);
        const int64_t share = (kTileBytes / 64 + num_pairs - 1) / num_pairs * 64;
        const bool is_last = first + steps == tiles_.steps();
        Sum* unfinished = sums_ + 2 * kSumsAtOnce * kTileSums;
        int64_t asked = 0;
        for (int64_t row = row_begin; row < row_end; row += 2 * kRowBlock, asked += share) {
            // All that a row needs is at hand: so few instructions that the tile products before and after overlap.
            auto outputs = writer_.outputs(last_);
            int64_t unwritten = last_.num_rows;
            const auto between = [&](int64_t step) {
                writer_.ahead(weights, step * kTileBytes + asked, share);
                for (int64_t i = 0; i < written_at_once && unwritten > 0; ++i, --unwritten) outputs.write_next();
            };
            const int64_t num_rows = row_end - row < 2 * kRowBlock ? row_end - row : 2 * kRowBlock;
            const bool is_pair = num_rows > kRowBlock;
            const Sum* before = first == 0 ? nullptr : unfinished;
            Sum* sums = is_last ? next_sums() : unfinished;
            is_pair ? tiles_.template multiply<kTiles, 2, kAllSteps>(weights, row, first, steps, before, sums, between)
                    : tiles_.template multiply<kTiles, 1, kAllSteps>(weights, row, first, steps, before, sums, between);
            for (; unwritten > 0; --unwritten) outputs.write_next();
            order_memory();
            last_ = is_last ? TileSums<Operands>{tile, row, num_rows, is_pair ? 2 : 1, sums} : TileSums<Operands>{};
            unfinished += kSumsAtOnce * kTileSums;
        }
    }

    // Memory for sums that are finished; those of the time before stay.
    Sum* next_sums() {
        turn_ = 1 - turn_;
        return sums_ + turn_ * kSumsAtOnce * kTileSums;
    }

    void write(const TileSums<Operands>& sums) const {
        auto outputs = writer_.outputs(sums);
        for (int64_t i = 0; i < sums.num_rows; ++i) {
            if (i % kRowBlock == 0) keep_tiles_awake();
            outputs.write_next();
        }
        order_memory();
    }

    const Writer writer_;
    const int64_t row_begin_;
    const int64_t row_end_;
    const ProductTiles<Operands> tiles_;
    Sum* const sums_;  // [2][kSumsAtOnce][kTileSums] that are finished in turn, then those that are not
    int turn_ = 0;
    TileSums<Operands> last_;  // not yet written
};

}  // namespace
