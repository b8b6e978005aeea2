// Linear layers of rotated weights and activations, over the vocabulary of vec_*.h.
//
// Products of codes are summed exactly in int32 over all inputs, so their order is free. An output is that sum times
// (column's scale * row's scale).
#include "kernels.h"

namespace {

constexpr int kSumsInFlight = 4;     // of a row: one sum after the other would wait for itself

// The column tiles of a matrix: of each its codes, quads of 64 bytes, then the columns' scales.
class ColumnTiles {
 public:
    explicit ColumnTiles(const treadle_linear& weights)
        : layout_(treadle::tile_layout(*treadle::format_info(weights.format), weights.k)),
          start_(static_cast<const uint8_t*>(weights.data)) {}

    const uint8_t* codes(int64_t tile) const { return start_ + tile * layout_.tile_bytes; }
    F scales(int64_t tile) const { return f_load(reinterpret_cast<const float*>(codes(tile) + layout_.scales)); }
    int64_t tile_bytes() const { return layout_.tile_bytes; }

 private:
    const TileLayout layout_;
    const uint8_t* const start_;
};

inline F rotated_outputs(I sums, F scales, float row_scale) {
    return f_mul(f_from_i(sums), f_mul(scales, f_set(row_scale)));
}

// Some rows of one block with one tile.
template <int kRows>
void rotated_rows(const LinearCall& call, const ColumnTiles& tiles, int64_t tile, int64_t row) {
    constexpr int kChains = kRows >= kSumsInFlight ? 1 : kSumsInFlight / kRows;
    I sums[kChains][kRows];
    for (int j = 0; j < kRows; ++j) {
        sums[0][j] = i_set(call.x->row_starts[row + j]);
        for (int chain = 1; chain < kChains; ++chain) sums[chain][j] = i_set(0);
    }
    const int64_t k = call.weights->k;
    const uint8_t* quads = tiles.codes(tile);
    const int8_t* x = call.x->rotated + treadle::rotated_row_offset(row, k);
    for (int64_t i = 0; i < treadle::padded_inputs(k); i += kTileInputs, x += kRowBlock * kTileInputs) {
#pragma GCC unroll 16
        for (int quad = 0; quad < kTileInputs / 4; ++quad, quads += 64) {
            prefetch_weights(quads + kPrefetchBytes, 64);
            const B codes = b_load(quads);
#pragma GCC unroll 8
            for (int j = 0; j < kRows; ++j) {
                I& sum = sums[quad % kChains][j];
                sum = i_dot<true>(sum, codes, x + j * kTileInputs + 4 * quad);
            }
        }
    }
    for (int j = 0; j < kRows; ++j) {
        for (int chain = 1; chain < kChains; ++chain) sums[0][j] = i_add(sums[0][j], sums[chain][j]);
        store_outputs(call, row + j, tile, rotated_outputs(sums[0][j], tiles.scales(tile), call.x->row_scales[row + j]));
    }
}

void rotated_linear(const LinearCall& call) {
    const ColumnTiles tiles(*call.weights);
    for (int64_t t = call.tile_begin; t < call.tile_end; ++t) {
        int64_t row = call.row_begin;
        // Calls begin with a block of rows, so steps of a power of two stay within one.
        for (; row + kMaxRowsAtOnce <= call.row_end; row += kMaxRowsAtOnce) {
            rotated_rows<kMaxRowsAtOnce>(call, tiles, t, row);
        }
        if (kMaxRowsAtOnce > 4 && row + 4 <= call.row_end) {
            rotated_rows<4>(call, tiles, t, row);
            row += 4;
        }
        if (kMaxRowsAtOnce > 2 && row + 2 <= call.row_end) {
            rotated_rows<2>(call, tiles, t, row);
            row += 2;
        }
        for (; row < call.row_end; ++row) rotated_rows<1>(call, tiles, t, row);
    }
}

}  // namespace
