// Products in bfloat16 (linear_decoded.inl), on AMX tiles: weights are decoded into tiles in the thread's scratch
// memory, for few rows group by group, for many whole column tiles.

namespace {

// Writes a group as the second operand of a tile product: [16 pairs][16 columns][2]. Beside tiles, a core does floating
// arithmetic and shifts on one port alone, so halves are moved by shuffles, which take the other.
template <class Fmt>
class GroupDecoder {
 public:
    inline __attribute__((always_inline)) void decode(const Tile& tile, int64_t g, uint8_t* out) const {
        const uint8_t* quants = tile.quants + g * Fmt::quant_bytes;
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
        const I upper_halves = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);  // to the lower ones
        _mm512_store_si512(out, _mm512_mask_shuffle_epi8(_mm512_castps_si512(second), 0x3333'3333'3333'3333u,
                                                         _mm512_castps_si512(first), upper_halves));
    }

    const CodeNumbers<Fmt::bits, Fmt::offset> numbers_{};
};

template <>
class GroupDecoder<FormatBF16> {
 public:
    inline __attribute__((always_inline)) void decode(const Tile& tile, int64_t g, uint8_t* out) const {
        const uint8_t* inputs = tile.quants + g * FormatBF16::quant_bytes;  // of 32 bytes each
#pragma GCC unroll 8
        for (int quad = 0; quad < kGroup; quad += 4, out += 128) {
            store(inputs + 32 * quad, inputs + 32 * (quad + 2), out);
            store(inputs + 32 * (quad + 1), inputs + 32 * (quad + 3), out + 64);
        }
    }

 private:
    static inline __attribute__((always_inline)) void store(const uint8_t* first, const uint8_t* second, uint8_t* out) {
        const I low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
        const I high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
        const I pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
        const I magnitudes = _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff));
        const __mmask32 counts = _mm512_cmpge_epu16_mask(magnitudes, _mm512_set1_epi16(kTiniestWeight));
        _mm512_store_si512(out, _mm512_maskz_mov_epi16(counts, pairs));
    }
};

// The column tiles of a matrix, decoded.
template <class Fmt>
class DecodedTiles {
 public:
    explicit DecodedTiles(const treadle_linear& weights)
        : layout_(treadle::tile_layout(*treadle::format_info(weights.format), weights.k)),
          start_(static_cast<const uint8_t*>(weights.data)) {}

    // Writes a group, kTileBytes; asks for what comes next.
    inline __attribute__((always_inline)) void decode(int64_t tile, int64_t g, uint8_t* out) const {
        const uint8_t* start = start_ + tile * layout_.tile_bytes;
        prefetch_weights(start + g * Fmt::stream_bytes + kPrefetchBytes, Fmt::stream_bytes);
        decoder_.decode({start, start + layout_.scales, start + layout_.minima}, g, out);
    }

    // Writes groups of a column tile, from `first` on; sums in tiles are lost.
    void decode_run(int64_t tile, int64_t first, int64_t groups, uint8_t* out) const {
        keep_tiles_awake();
        for (int64_t g = 0; g < groups; ++g) decode(tile, first + g, out + g * kTileBytes);
        order_memory();
    }

 private:
    const GroupDecoder<Fmt> decoder_{};
    const TileLayout layout_;
    const uint8_t* const start_;
};

inline int64_t decoded_steps(int64_t k) { return k / kGroup; }

// Sums are numbers as they are.
class DecodedNumbers {
 public:
    explicit DecodedNumbers(const TileSums<OfBfloat16>& sums) : sums_(sums) {}

    inline __attribute__((always_inline)) F of(int index) const { return f_load(sums_.of(index)); }
    inline __attribute__((always_inline)) void next() { sums_.next(); }

 private:
    RowSums<OfBfloat16> sums_;
};

// Neighbouring column tiles of a matrix.
template <class Fmt, int kTiles>
struct DecodedWriter {
    using Operands = OfBfloat16;
    static constexpr int64_t kStepsKept = 4;

    const LinearCall& call;
    const DecodedTiles<Fmt>& tiles;
    uint8_t* const decoded;  // [kTiles][steps of a run][kTileBytes]

    void begin(int64_t tile, int64_t first, int64_t steps, const uint8_t** out) const {
        for (int i = 0; i < kTiles; ++i) {
            uint8_t* of_tile = decoded + i * steps * kTileBytes;
            tiles.decode_run(tile + i, first, steps, of_tile);
            out[i] = of_tile;
        }
    }
    void begin_steps(int64_t, const uint8_t** out) const {
        for (int i = 0; i < kTiles; ++i) out[i] = decoded + i * kStepsKept * kTileBytes;
    }
    inline __attribute__((always_inline)) void step(int64_t tile, int64_t step) const {
        for (int i = 0; i < kTiles; ++i) {
            tiles.decode(tile + i, step, decoded + (i * kStepsKept + step % kStepsKept) * kTileBytes);
        }
    }
    void ahead(const uint8_t* const*, int64_t, int64_t) const {}
    LinearOutputs<DecodedNumbers, kTiles> outputs(const TileSums<OfBfloat16>& sums) const {
        return {call, DecodedNumbers(sums), sums.tile, sums.row};
    }
};

// The same column tile of two matrices, and SwiGLU of them.
template <class Fmt>
struct DecodedGatedWriter {
    using Operands = OfBfloat16;

    const GatedCall& call;
    const DecodedTiles<Fmt>& gate;
    const DecodedTiles<Fmt>& up;
    uint8_t* const decoded;  // [2][steps of a run][kTileBytes]

    void begin(int64_t tile, int64_t first, int64_t steps, const uint8_t** out) const {
        uint8_t *of_gate = decoded, *of_up = decoded + steps * kTileBytes;
        gate.decode_run(tile, first, steps, of_gate);
        up.decode_run(tile, first, steps, of_up);
        out[0] = of_gate;
        out[1] = of_up;
    }
    void ahead(const uint8_t* const*, int64_t, int64_t) const {}
    GatedOutputs<DecodedNumbers, uint16_t> outputs(const TileSums<OfBfloat16>& sums) const {
        return {call, call.nearest, DecodedNumbers(sums), sums.tile, sums.row};
    }
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
