// Products of rotated weights and activations (linear_rotated.inl), on AMX tiles.
//
// Activations are the first operand of a tile product, 16 rows and 64 inputs; codes of a column tile the second. Sums stay
// in a tile over all inputs. Where rows are many, what becomes of a pair of row blocks' sums is computed while the next
// pair is multiplied.
#include "amx_tiles.h"
#include "linear_rotated.inl"

namespace {

using treadle::GatedCall;

constexpr int kSumInts = kRowBlock * kColumns;  // of a tile of sums: [16 rows][16 columns]
constexpr int kSumsAtOnce = 4;                  // tiles of sums: four column tiles, or two with two blocks of rows
constexpr int64_t kTileBytes = kRowBlock * kTileInputs;
constexpr int64_t kRotatedPrefetch = 8 * kTileBytes;  // ahead of the codes in use, where rows are few

static_assert(treadle::linear_scratch_bytes(kGroup) >= 2 * kSumsAtOnce * kSumInts * int64_t{sizeof(int32_t)},
              "a thread's scratch memory holds two sets of sums");

// Sums of some column tiles, the first of which is `tile`, and of one or two blocks of rows.
struct RotatedSums {
    int64_t tile = 0;
    int64_t row = 0;
    int64_t num_rows = 0;
    int num_blocks = 0;
    const int32_t* sums = nullptr;  // [column tiles][blocks][16][16]
};

// The same, as numbers.
class RotatedNumbers {
 public:
    RotatedNumbers(const RotatedSums& of, const Activations& x)
        : sums_(of.sums),
          tile_ints_(of.num_blocks * kSumInts),
          starts_(x.row_starts + of.row),
          row_scales_(x.row_scales + of.row) {}

    // Of row `i` from the first one on, and of a column tile that has these scales.
    inline __attribute__((always_inline)) F of(int64_t i, int index, F scales) const {
        const I sum = _mm512_loadu_si512(sums_ + index * tile_ints_ + i * kColumns);
        return rotated_outputs(i_add(sum, i_set(starts_[i])), scales, row_scales_[i]);
    }

 private:
    const int32_t* const sums_;
    const int64_t tile_ints_;
    const int32_t* const starts_;
    const float* const row_scales_;
};

// Tile registers: 0 to 3 hold sums, 4 and 5 codes of weights, 6 and 7 activations.
class RotatedTiles {
 public:
    RotatedTiles(const Activations& x, int64_t k, int64_t rows, uint8_t* scratch)
        : x_(x),
          k_(k),
          steps_(treadle::padded_inputs(k) / kTileInputs),
          sums_(reinterpret_cast<int32_t*>(scratch)) {
        const int num_rows = static_cast<int>(rows < kRowBlock ? rows : kRowBlock);
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) config.set(tile, tile == 4 || tile == 5 ? 16 : num_rows, 64);
        config.load();
    }
    ~RotatedTiles() { _tile_release(); }

    int64_t steps() const { return steps_; }

    // Multiplies one or two blocks of rows from `row` on with column tiles; before each step, between(step) is called. The
    // sums stay until those after the next are taken.
    template <int kTiles, int kBlocks, class Between>
    inline __attribute__((always_inline)) const int32_t* multiply(const uint8_t* const* codes, int64_t row,
                                                                  const Between& between) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        order_memory();
        const int8_t* x = x_.rotated + treadle::rotated_row_offset(row, k_);
        for (int64_t step = 0; step < steps_; ++step) {
            between(step);
            add_products<kTiles, kBlocks>(codes, step * kTileBytes, x + step * kTileBytes);
        }
        order_memory();
        turn_ = 1 - turn_;
        int32_t* out = sums_ + turn_ * kSumsAtOnce * kSumInts;
        _tile_stored(0, out, 64);
        if (kTiles * kBlocks > 1) _tile_stored(1, out + kSumInts, 64);
        if (kTiles * kBlocks > 2) _tile_stored(2, out + 2 * kSumInts, 64);
        if (kTiles * kBlocks > 2) _tile_stored(3, out + 3 * kSumInts, 64);
        order_memory();
        return out;
    }

 private:
    // Tile numbers are literals: sums of column tile t and block b are in tile kBlocks t + b.
    template <int kTiles, int kBlocks>
    inline __attribute__((always_inline)) void add_products(const uint8_t* const* codes, int64_t place,
                                                            const int8_t* x) const {
        _tile_loadd(6, x, 64);
        if (kBlocks == 2) _tile_loadd(7, x + steps_ * kTileBytes, 64);
        _tile_loadd(4, codes[0] + place, 64);
        _tile_dpbsud(0, 6, 4);
        if (kBlocks == 2) _tile_dpbsud(1, 7, 4);
        if (kTiles == 1) return;
        _tile_loadd(5, codes[1] + place, 64);
        if (kBlocks == 2) {
            _tile_dpbsud(2, 6, 5);
            _tile_dpbsud(3, 7, 5);
            return;
        }
        _tile_dpbsud(1, 6, 5);
        if (kTiles == 2) return;
        _tile_loadd(4, codes[2] + place, 64);
        _tile_dpbsud(2, 6, 4);
        _tile_loadd(5, codes[3] + place, 64);
        _tile_dpbsud(3, 6, 5);
    }

    const Activations& x_;
    const int64_t k_;
    const int64_t steps_;
    int32_t* const sums_;  // [2][kSumsAtOnce][kSumInts]
    int turn_ = 0;
};

// Some rows and column tiles of one or two matrices. `Writer` says what is multiplied and what becomes of it:
//   codes(tile, out)   where the codes lie of the column tiles that are taken with `tile`
//   ahead()            bytes from those to the next
//   outputs(sums)      what becomes of these sums: its write(i) makes the outputs of a row
template <class Writer>
class RotatedProduct {
 public:
    RotatedProduct(const Writer& writer, const Activations& x, int64_t k, int64_t row_begin, int64_t row_end,
                   uint8_t* scratch)
        : writer_(writer), row_begin_(row_begin), row_end_(row_end), tiles_(x, k, row_end - row_begin, scratch) {}

    // One block of rows.
    template <int kTiles>
    void multiply_block(int64_t tile) {
        const uint8_t* codes[kTiles];
        writer_.codes(tile, codes);
        const auto ask = [&](int64_t step) {
            for (const uint8_t* of_tile : codes) prefetch_weights(of_tile + step * kTileBytes + kRotatedPrefetch, kTileBytes);
        };
        const int32_t* sums = tiles_.template multiply<kTiles, 1>(codes, row_begin_, ask);
        write({tile, row_begin_, row_end_ - row_begin_, 1, sums});
    }

    // Any number of rows; sums of the last ones are written with the next call, or by finish().
    template <int kTiles>
    void multiply(int64_t tile) {
        const uint8_t* codes[kTiles];
        writer_.codes(tile, codes);
        const int64_t written_at_once = (2 * kRowBlock + tiles_.steps() - 1) / tiles_.steps();
        // With every pair of blocks a share is asked for of the codes that are next.
        const int64_t num_pairs = (row_end_ - row_begin_ + 2 * kRowBlock - 1) / (2 * kRowBlock);
        const int64_t share = (kTileBytes / 64 + num_pairs - 1) / num_pairs * 64;
        int64_t asked = writer_.ahead();
        for (int64_t row = row_begin_; row < row_end_; row += 2 * kRowBlock, asked += share) {
            // All that a row needs is at hand: so few instructions that the tile products before and after overlap.
            const auto outputs = writer_.outputs(last_);
            const int64_t num_outputs = last_.num_rows;
            int64_t written = 0;
            const auto between = [&](int64_t step) {
                for (const uint8_t* of_tile : codes) prefetch_weights(of_tile + step * kTileBytes + asked, share);
                const int64_t until = written + written_at_once < num_outputs ? written + written_at_once : num_outputs;
                for (; written < until; ++written) outputs.write(written);
            };
            const int64_t num_rows = row_end_ - row < 2 * kRowBlock ? row_end_ - row : 2 * kRowBlock;
            const bool is_pair = num_rows > kRowBlock;
            const int32_t* sums = is_pair ? tiles_.template multiply<kTiles, 2>(codes, row, between)
                                          : tiles_.template multiply<kTiles, 1>(codes, row, between);
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
    void write(const RotatedSums& sums) const {
        const auto outputs = writer_.outputs(sums);
        for (int64_t i = 0; i < sums.num_rows; ++i) outputs.write(i);
        order_memory();
    }

    const Writer writer_;
    const int64_t row_begin_;
    const int64_t row_end_;
    RotatedTiles tiles_;
    RotatedSums last_;  // not yet written
};

// Neighbouring column tiles of a matrix.
template <int kTiles>
struct LinearWriter {
    const LinearCall& call;
    const ColumnTiles& tiles;

    class Outputs {
     public:
        Outputs(const LinearWriter& writer, const RotatedSums& sums)
            : numbers_(sums, *writer.call.x), call_(writer.call), row_(sums.row), tile_(sums.tile) {
            for (int index = 0; index < kTiles; ++index) scales_[index] = writer.tiles.scales(sums.tile + index);
        }
        inline __attribute__((always_inline)) void write(int64_t i) const {
            for (int index = 0; index < kTiles; ++index) {
                store_outputs(call_, row_ + i, tile_ + index, numbers_.of(i, index, scales_[index]));
            }
        }

     private:
        const RotatedNumbers numbers_;
        const LinearCall call_;
        const int64_t row_;
        const int64_t tile_;
        F scales_[kTiles];
    };

    void codes(int64_t tile, const uint8_t** out) const {
        for (int i = 0; i < kTiles; ++i) out[i] = tiles.codes(tile + i);
    }
    int64_t ahead() const { return kTiles * tiles.tile_bytes(); }
    Outputs outputs(const RotatedSums& sums) const { return {*this, sums}; }
};

// The same column tile of two matrices, and SwiGLU of them.
struct GatedWriter {
    const GatedCall& call;
    const ColumnTiles& gate;
    const ColumnTiles& up;

    class Outputs {
     public:
        Outputs(const GatedWriter& writer, const RotatedSums& sums)
            : numbers_(sums, *writer.call.x),
              gate_scales_(writer.gate.scales(sums.tile)),
              up_scales_(writer.up.scales(sums.tile)),
              stride_(writer.call.gate->n),
              y_(writer.call.y + sums.row * stride_ + sums.tile * kColumns),
              count_(rest(stride_, sums.tile * kColumns)) {}
        inline __attribute__((always_inline)) void write(int64_t i) const {
            const F gated = f_swiglu(numbers_.of(i, 0, gate_scales_), numbers_.of(i, 1, up_scales_));
            float* y = y_ + i * stride_;
            count_ == kColumns ? f_store(y, gated) : f_store_first(y, gated, count_);
        }

     private:
        const RotatedNumbers numbers_;
        const F gate_scales_;
        const F up_scales_;
        const int64_t stride_;
        float* const y_;
        const int count_;
    };

    void codes(int64_t tile, const uint8_t** out) const {
        out[0] = gate.codes(tile);
        out[1] = up.codes(tile);
    }
    int64_t ahead() const { return gate.tile_bytes(); }
    Outputs outputs(const RotatedSums& sums) const { return {*this, sums}; }
};

template <int kTiles>
void rotated_tiles(const LinearCall& call, const ColumnTiles& tiles, int64_t begin, int64_t end, bool is_block) {
    RotatedProduct product(LinearWriter<kTiles>{call, tiles}, *call.x, call.weights->k, call.row_begin, call.row_end,
                           call.scratch);
    for (int64_t tile = begin; tile < end; tile += kTiles) {
        is_block ? product.template multiply_block<kTiles>(tile) : product.template multiply<kTiles>(tile);
    }
    product.finish();
}

void rotated_linear_with_tiles(const LinearCall& call) {
    const ColumnTiles tiles(*call.weights);
    const bool is_block = call.row_end - call.row_begin <= kRowBlock;
    const int64_t count = call.tile_end - call.tile_begin, fours = is_block ? count / 4 * 4 : 0, twos = count / 2 * 2;
    const int64_t at_two = call.tile_begin + fours, at_one = call.tile_begin + twos;
    if (fours > 0) rotated_tiles<4>(call, tiles, call.tile_begin, at_two, is_block);
    if (twos > fours) rotated_tiles<2>(call, tiles, at_two, at_one, is_block);
    if (count > twos) rotated_tiles<1>(call, tiles, at_one, call.tile_end, is_block);
}

void gate_with_tiles(const GatedCall& call) {
    const ColumnTiles gate(*call.gate), up(*call.up);
    RotatedProduct product(GatedWriter{call, gate, up}, *call.x, call.gate->k, call.row_begin, call.row_end, call.scratch);
    for (int64_t tile = call.tile_begin; tile < call.tile_end; ++tile) product.template multiply<2>(tile);
    product.finish();
}

}  // namespace
