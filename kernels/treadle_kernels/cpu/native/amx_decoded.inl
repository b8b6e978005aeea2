// Products in bfloat16 (linear_decoded.inl), on AMX tiles: weights are decoded into tiles in the thread's scratch memory,
// for few rows a few groups ahead of their products, for many whole column tiles.

namespace {

// The column tiles of a matrix, decoded.
template <class Fmt>
class DecodedTiles {
 public:
    explicit DecodedTiles(const treadle_linear& weights)
        : layout_(treadle::tile_layout(*treadle::format_info(weights.format), weights.k)),
          start_(static_cast<const uint8_t*>(weights.data)) {}

    Tile tile(int64_t index) const {
        const uint8_t* start = start_ + index * layout_.tile_bytes;
        return {start, start + layout_.scales, start + layout_.minima};
    }

    // Writes a group as the second operand of a tile product: [16 pairs][16 columns][2]. Asks for what comes next.
    inline __attribute__((always_inline)) void decode(const Tile& tile, int64_t g, uint8_t* out) const {
        const uint8_t* quants = tile.quants + g * Fmt::quant_bytes;
        prefetch_weights(tile.quants + g * Fmt::stream_bytes + kPrefetchBytes, Fmt::stream_bytes);
        const GroupWeights<Fmt> weights(tile, g);
        if constexpr (Fmt::bits == 4) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const B codes = b_load(quants + 64 * i);
                store<0, 16>(weights, i, codes, out + 128 * i);
                store<8, 24>(weights, i, codes, out + 128 * i + 64);
                store<4, 20>(weights, i + 4, codes, out + 128 * i + 512);
                store<12, 28>(weights, i + 4, codes, out + 128 * i + 576);
            }
        } else {
            B codes[8];
            Fmt::unpack(quants, codes);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                store<0, 16>(weights, i, codes[i], out + 128 * i);
                store<8, 24>(weights, i, codes[i], out + 128 * i + 64);
            }
        }
    }

 private:
    // Stores the pairs of two codes of a quad, which lie at these bits.
    template <int kFirst, int kSecond>
    inline __attribute__((always_inline)) void store(const GroupWeights<Fmt>& weights, int quad, B codes,
                                                     uint8_t* out) const {
        const F first = weights.of(quad, numbers_.template at<kFirst>(codes));
        const F second = weights.of(quad, numbers_.template at<kSecond>(codes));
        const I low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
        _mm512_store_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(second)));
    }

    const CodeNumbers<Fmt::bits, Fmt::offset> numbers_{};
    const TileLayout layout_;
    const uint8_t* const start_;
};

constexpr int64_t kSumBytes = 2 * kSumsAtOnce * kTileSums * int64_t{sizeof(float)};

inline int64_t decoded_steps(int64_t k) { return k / kGroup; }

// Neighbouring column tiles of a matrix.
template <class Fmt, int kTiles>
struct DecodedWriter {
    using Operands = OfBfloat16;
    static constexpr int64_t kStepsKept = 4;

    const LinearCall& call;
    const DecodedTiles<Fmt>& tiles;
    uint8_t* const decoded;  // [kTiles][steps][kTileBytes]

    class Outputs {
     public:
        Outputs(const DecodedWriter& writer, const TileSums<OfBfloat16>& sums) : call_(writer.call), sums_(sums) {}
        inline __attribute__((always_inline)) void write(int64_t i) const {
            for (int index = 0; index < kTiles; ++index) {
                store_outputs(call_, sums_.row + i, sums_.tile + index, f_load(sums_.of(i, index)));
            }
        }

     private:
        const LinearCall call_;
        const TileSums<OfBfloat16> sums_;
    };

    void begin(int64_t tile, const uint8_t** out) const {
        const int64_t steps = decoded_steps(call.weights->k);
        for (int i = 0; i < kTiles; ++i) {
            out[i] = decoded + i * steps * kTileBytes;
            const Tile from = tiles.tile(tile + i);
            for (int64_t g = 0; g < steps; ++g) tiles.decode(from, g, decoded + (i * steps + g) * kTileBytes);
        }
        order_memory();
    }
    void begin_steps(int64_t, const uint8_t** out) const {
        for (int i = 0; i < kTiles; ++i) out[i] = decoded + i * kStepsKept * kTileBytes;
    }
    inline __attribute__((always_inline)) void step(int64_t tile, int64_t step) const {
        for (int i = 0; i < kTiles; ++i) {
            tiles.decode(tiles.tile(tile + i), step, decoded + (i * kStepsKept + step % kStepsKept) * kTileBytes);
        }
    }
    void ahead(const uint8_t* const*, int64_t, int64_t) const {}
    Outputs outputs(const TileSums<OfBfloat16>& sums) const { return {*this, sums}; }
};

// The same column tile of two matrices, and SwiGLU of them.
template <class Fmt>
struct DecodedGatedWriter {
    using Operands = OfBfloat16;

    const GatedCall& call;
    const DecodedTiles<Fmt>& gate;
    const DecodedTiles<Fmt>& up;
    uint8_t* const decoded;  // [2][steps][kTileBytes]

    class Outputs {
     public:
        Outputs(const DecodedGatedWriter& writer, const TileSums<OfBfloat16>& sums)
            : sums_(sums), rows_(writer.call, sums.tile, sums.row) {}
        inline __attribute__((always_inline)) void write(int64_t i) const {
            rows_.write(i, f_load(sums_.of(i, 0)), f_load(sums_.of(i, 1)));
        }

     private:
        const TileSums<OfBfloat16> sums_;
        const GatedRows rows_;
    };

    void begin(int64_t tile, const uint8_t** out) const {
        const int64_t steps = decoded_steps(call.gate->k);
        out[0] = decoded;
        out[1] = decoded + steps * kTileBytes;
        const Tile from_gate = gate.tile(tile), from_up = up.tile(tile);
        for (int64_t g = 0; g < steps; ++g) gate.decode(from_gate, g, decoded + g * kTileBytes);
        for (int64_t g = 0; g < steps; ++g) up.decode(from_up, g, decoded + (steps + g) * kTileBytes);
        order_memory();
    }
    void ahead(const uint8_t* const*, int64_t, int64_t) const {}
    Outputs outputs(const TileSums<OfBfloat16>& sums) const { return {*this, sums}; }
};

template <class Fmt, int kTiles>
void decoded_tiles(const LinearCall& call, int64_t begin, int64_t end) {
    const DecodedTiles<Fmt> tiles(*call.weights);
    const int64_t rows = call.row_end - call.row_begin;
    RowsProduct product(DecodedWriter<Fmt, kTiles>{call, tiles, call.scratch + kSumBytes}, call.x->nearest,
                        decoded_steps(call.weights->k), call.row_begin, call.row_end, call.scratch);
    for (int64_t tile = begin; tile < end; tile += kTiles) {
        if (rows <= kRowBlock) {
            product.template multiply_few<kTiles, 1>(tile);
        } else if (rows <= 2 * kRowBlock) {
            product.template multiply_few<kTiles, 2>(tile);
        } else {
            product.template multiply<kTiles>(tile);
        }
    }
    product.finish();
}

template <class Fmt>
void decoded_linear_with_tiles(const LinearCall& call) {
    const int64_t twos = call.tile_begin + (call.tile_end - call.tile_begin) / 2 * 2;
    if (twos > call.tile_begin) decoded_tiles<Fmt, 2>(call, call.tile_begin, twos);
    if (call.tile_end > twos) decoded_tiles<Fmt, 1>(call, twos, call.tile_end);
}

template <class Fmt>
void decoded_gate_with_tiles(const GatedCall& call) {
    const DecodedTiles<Fmt> gate(*call.gate), up(*call.up);
    RowsProduct product(DecodedGatedWriter<Fmt>{call, gate, up, call.scratch + kSumBytes}, call.x->nearest,
                        decoded_steps(call.gate->k), call.row_begin, call.row_end, call.scratch);
    for (int64_t tile = call.tile_begin; tile < call.tile_end; ++tile) product.template multiply<2>(tile);
    product.finish();
}

}  // namespace
