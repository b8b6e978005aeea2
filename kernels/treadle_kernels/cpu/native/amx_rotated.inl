// Products of rotated weights and activations (linear_rotated.inl), on AMX tiles: weights lie in memory as tiles.

namespace {

constexpr int64_t kRotatedPrefetch = 8 * kTileBytes;  // ahead of the codes in use, where rows are few

// The sums of some tiles as numbers.
template <int kTiles>
class RotatedNumbers {
 public:
    RotatedNumbers(const TileSums<OfBytes>& sums, const Activations& x)
        : sums_(sums), starts_(x.row_starts + sums.row), row_scales_(x.row_scales + sums.row) {}

    void set_scales(int index, F scales) { scales_[index] = scales; }
    inline __attribute__((always_inline)) F of(int index) const {
        const I sum = _mm512_loadu_si512(sums_.of(index));
        return rotated_outputs(i_add(sum, i_set(*starts_)), scales_[index], *row_scales_);
    }
    inline __attribute__((always_inline)) void next() {
        sums_.next();
        ++starts_;
        ++row_scales_;
    }

 private:
    RowSums<OfBytes> sums_;
    const int32_t* starts_;
    const float* row_scales_;
    F scales_[kTiles];  // of column tiles
};

// Neighbouring column tiles of a matrix.
template <int kTiles>
struct RotatedWriter {
    using Operands = OfBytes;
    static constexpr int64_t kStepsKept = kAllSteps;

    const LinearCall& call;
    const ColumnTiles& tiles;

    void begin(int64_t tile, int64_t first, int64_t, const uint8_t** out) const {
        for (int i = 0; i < kTiles; ++i) out[i] = tiles.codes(tile + i) + first * kTileBytes;
    }
    void begin_steps(int64_t tile, const uint8_t** out) const { begin(tile, 0, kAllSteps, out); }
    void step(int64_t tile, int64_t step) const {
        for (int i = 0; i < kTiles; ++i) {
            prefetch_weights(tiles.codes(tile + i) + step * kTileBytes + kRotatedPrefetch, kTileBytes);
        }
    }
    void ahead(const uint8_t* const* codes, int64_t at, int64_t num_bytes) const {
        for (int i = 0; i < kTiles; ++i) prefetch_weights(codes[i] + kTiles * tiles.tile_bytes() + at, num_bytes);
    }
    LinearOutputs<RotatedNumbers<kTiles>, kTiles> outputs(const TileSums<OfBytes>& sums) const {
        RotatedNumbers<kTiles> numbers(sums, *call.x);
        for (int i = 0; i < kTiles; ++i) numbers.set_scales(i, tiles.scales(sums.tile + i));
        return {call, numbers, sums.tile, sums.row};
    }
};

// The same column tile of two matrices, and SwiGLU of them.
struct RotatedGatedWriter {
    using Operands = OfBytes;

    const GatedCall& call;
    const ColumnTiles& gate;
    const ColumnTiles& up;

    void begin(int64_t tile, int64_t first, int64_t, const uint8_t** out) const {
        out[0] = gate.codes(tile) + first * kTileBytes;
        out[1] = up.codes(tile) + first * kTileBytes;
    }
    void ahead(const uint8_t* const* codes, int64_t at, int64_t num_bytes) const {
        for (int i = 0; i < 2; ++i) prefetch_weights(codes[i] + gate.tile_bytes() + at, num_bytes);
    }
    GatedOutputs<RotatedNumbers<2>, float> outputs(const TileSums<OfBytes>& sums) const {
        RotatedNumbers<2> numbers(sums, *call.x);
        numbers.set_scales(0, gate.scales(sums.tile));
        numbers.set_scales(1, up.scales(sums.tile));
        return {call, call.y, numbers, sums.tile, sums.row};
    }
};

int64_t rotated_steps(int64_t k) { return treadle::padded_inputs(k) / kTileInputs; }

template <int kTiles>
void rotated_tiles(const LinearCall& call, const ColumnTiles& tiles, int64_t begin, int64_t end, bool is_block) {
    RowsProduct product(RotatedWriter<kTiles>{call, tiles}, call.x->rotated, rotated_steps(call.weights->k),
                        call.row_begin, call.row_end, call.scratch);
    for (int64_t tile = begin; tile < end; tile += kTiles) {
        is_block ? product.template multiply_few<kTiles, 1>(tile) : product.template multiply<kTiles>(tile);
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

void rotated_gate_with_tiles(const GatedCall& call) {
    const ColumnTiles gate(*call.gate), up(*call.up);
    RowsProduct product(RotatedGatedWriter{call, gate, up}, call.x->rotated, rotated_steps(call.gate->k),
                        call.row_begin, call.row_end, call.scratch);
    for (int64_t tile = call.tile_begin; tile < call.tile_end; ++tile) product.template multiply<2>(tile);
    product.finish();
}

}  // namespace
