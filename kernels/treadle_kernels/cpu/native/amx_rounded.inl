// Products of weights and activations rounded to bfloat16 (linear_rounded.inl), on AMX tiles.
//
// Weights are the first operand of a tile product: 16 columns and 32 inputs, decoded from their codes. Activations are the
// second, 16 rows; sums stay in a tile over all inputs.
#include "amx_tiles.h"
#include "kernels.h"

namespace {

constexpr int kTileWords = kColumns * kGroup;          // of a group's weights: [16 columns][32 inputs]
constexpr int kSumsAtOnce = 4;                         // tiles of sums: four column tiles, or two by two blocks of rows
constexpr int kGroupsAtOnce = 4;                       // decoded before they are multiplied, where rows are few
constexpr int kTilesDecoded = 8;                       // column tiles decoded before they are multiplied, where rows are many
constexpr int kProductFloats = kColumns * kRowBlock;
constexpr int64_t kRoundedPrefetch = 2 * kGroupsAtOnce;  // ahead of the weights in use

static_assert(treadle::linear_scratch_bytes(kGroup) >= kTilesDecoded * kTileWords * int64_t{sizeof(uint16_t)} +
                                                           kSumsAtOnce * kProductFloats * int64_t{sizeof(float)},
              "a thread's scratch memory holds the weights and products of a call");

// Tiles 0 to 3 hold sums, 4 and 5 weights, 6 and 7 activations, of blocks of so many rows.
inline TileConfig rounded_config(int block_rows) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, tile == 4 || tile == 5 ? 64 : 4 * block_rows);
    return config;
}

// Turns the codes of a group into weights: [16 columns][32 inputs]. Up to five bits, all weights that a column's
// scale allows are computed and looked up; with more, each is computed.
template <class Fmt>
class GroupDecoder {
 public:
    inline __attribute__((always_inline)) GroupDecoder(const Tile& tile, int64_t g, uint16_t* out)
        : quants_(tile.quants + g * Fmt::quant_bytes), out_(out) {
        for (int i = 0; i < kScales; ++i) {
            f_store(scales_[i], Fmt::load(tile.scales + (g * kScales + i) * Fmt::vector_bytes));
        }
        if (Fmt::has_minimum) f_store(minima_, Fmt::load(tile.minima + g * Fmt::vector_bytes));
        // To be read from memory, one by one: moving lanes between registers is what the look-ups are short of.
        asm volatile("" : "+m"(scales_), "+m"(minima_));
    }

    inline __attribute__((always_inline)) void run() const {
        if (Fmt::bits == 4) return decode_nibbles();
        if (Fmt::bits == 5) return decode_five_bits();
        if (Fmt::bits == 6) return decode_six_bits();
        decode_bytes();
    }

 private:
    static constexpr int kScales = Fmt::scales_per_group;

    // A table holds the sixteen weights of two columns; bit 4 of an index chooses between them.
    inline __attribute__((always_inline)) void decode_nibbles() const {
        const B nibble = _mm512_set1_epi8(15), second = _mm512_set1_epi8(16);
        const F numbers = numbers_from(0);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const B codes = b_load(quants_ + 64 * i);
            const B even = _mm512_and_si512(codes, nibble);
            const B odd = _mm512_ternarylogic_epi64(_mm512_srli_epi16(codes, 4), nibble, second, 0xea);  // a & b | c
            const int column = 4 * i;
            const B first = round_pair(weigh(numbers, column, 0), weigh(numbers, column + 1, 0));
            const B last = round_pair(weigh(numbers, column + 2, 0), weigh(numbers, column + 3, 0));
            look_up(even, first, column);
            look_up(odd, first, column + 1);
            look_up(_mm512_srli_epi16(even, 8), last, column + 2);
            look_up(_mm512_srli_epi16(odd, 8), last, column + 3);
        }
    }

    inline __attribute__((always_inline)) void decode_five_bits() const {
        const F low_numbers = numbers_from(0), high_numbers = numbers_from(16);
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            uint32_t fifth;
            __builtin_memcpy(&fifth, quants_ + 256 + 4 * column, sizeof fifth);
            const B low = nibbles(column);
            const B codes = _mm512_mask_add_epi16(low, fifth, low, _mm512_set1_epi16(16));
            look_up(codes, round_pair(weigh(low_numbers, column, 0), weigh(high_numbers, column, 0)), column);
        }
    }

    inline __attribute__((always_inline)) void decode_six_bits() const {
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            const B high = _mm512_srli_epi16(b_load(quants_ + 256 + 64 * (column / 8)), 2 * (column % 8));
            const B pairs = _mm512_and_si512(_mm512_slli_epi16(high, 4), _mm512_set1_epi16(48));
            compute(_mm512_or_si512(nibbles(column), pairs), column);
        }
    }

    // The offset goes into the sum: products and sums of such codes and of halves are exact.
    inline __attribute__((always_inline)) void decode_bytes() const {
        const F offset = f_set(static_cast<float>(-Fmt::offset));
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            const F scale = f_set(scales_[0][column]), start = f_mul(scale, offset);
            const F low = f_fma(f_from_u8(quants_ + kGroup * column), scale, start);
            const F high = f_fma(f_from_u8(quants_ + kGroup * column + 16), scale, start);
            _mm512_store_si512(out_ + column * kGroup, round_pair(low, high));
        }
    }
    static inline F f_from_u8(const uint8_t* p) {
        return f_from_i(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }

    // Two vectors of consecutive numbers, each to its nearest bfloat16.
    static inline B round_pair(F low, F high) { return (B)_mm512_cvtne2ps_pbh(high, low); }
    // Codes from `first` on, less the offset.
    static inline F numbers_from(int first) {
        const F lanes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        return f_add(lanes, f_set(static_cast<float>(first - Fmt::offset)));
    }
    // The low four bits of all inputs of a column.
    inline __attribute__((always_inline)) B nibbles(int column) const {
        const B codes = _mm512_srli_epi16(b_load(quants_ + 64 * (column / 4)), 4 * (column % 4));
        return _mm512_and_si512(codes, _mm512_set1_epi16(15));
    }
    inline __attribute__((always_inline)) F weigh(F numbers, int column, int half) const {
        const F scale = f_set(scales_[half % kScales][column]);
        return Fmt::has_minimum ? f_fma(numbers, scale, f_set(minima_[column])) : f_mul(numbers, scale);
    }
    inline __attribute__((always_inline)) void look_up(B codes, B table, int column) const {
        _mm512_store_si512(out_ + column * kGroup, _mm512_permutexvar_epi16(codes, table));
    }
    // Weights of a column from the codes of all inputs.
    inline __attribute__((always_inline)) void compute(B codes, int column) const {
        const I offset = i_set(Fmt::offset);
        const I low = _mm512_sub_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes)), offset);
        const I high = _mm512_sub_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1)), offset);
        const B weights = round_pair(weigh(f_from_i(low), column, 0), weigh(f_from_i(high), column, 1));
        _mm512_store_si512(out_ + column * kGroup, weights);
    }

    const uint8_t* const quants_;
    uint16_t* const out_;
    alignas(64) float scales_[kScales][kColumns];
    alignas(64) float minima_[kColumns];
};

// A thread's product of some rows with some column tiles, two by two. Where rows are so few that their sums stay in
// tiles, decoding and multiplying take turns, so that the processor does both at once; else some tiles are decoded as a
// whole, and each pair of row blocks meets them all, so that its outputs lie side by side.
template <class Fmt>
class RoundedProduct {
 public:
    explicit RoundedProduct(const LinearCall& call)
        : call_(call),
          layout_(treadle::tile_layout(*treadle::format_info(call.weights->format), call.weights->k)),
          groups_(call.weights->k / kGroup),
          block_rows_(call.x->block_rows),
          products_(reinterpret_cast<float*>(call.scratch)),
          weights_(reinterpret_cast<uint16_t*>(products_ + kSumsAtOnce * kProductFloats)) {}

    void run() {
        rounded_config(block_rows_).load();
        const int64_t rows = call_.row_end - call_.row_begin;
        if (rows <= block_rows_) {
            run_few<1>();
        } else if (rows <= 2 * block_rows_) {
            run_few<2>();
        } else {
            run_many();
        }
        _tile_release();
    }

 private:
    static constexpr int64_t kFewWords = kGroupsAtOnce * kTileWords;  // of the groups decoded at once

    template <int kBlocks>
    void run_few() {
        int64_t tile = call_.tile_begin;
        for (; kBlocks == 1 && tile + 3 < call_.tile_end; tile += 4) multiply_few<4, 1>(tile);
        for (; tile + 1 < call_.tile_end; tile += 2) multiply_few<2, kBlocks>(tile);
        if (tile < call_.tile_end) multiply_few<1, kBlocks>(tile);
    }

    template <int kTiles, int kBlocks>
    void multiply_few(int64_t tile) {
        claim_outputs<kTiles>(tile, call_.row_begin, kBlocks * block_rows_);
        clear();
        for (int64_t begin = 0; begin < groups_; begin += kGroupsAtOnce) {
            const int64_t end = begin + kGroupsAtOnce < groups_ ? begin + kGroupsAtOnce : groups_;
            for (int t = 0; t < kTiles; ++t) decode(tile + t, begin, end, weights_ + t * kFewWords, true);
            multiply<kTiles, kBlocks>(weights_, kFewWords, call_.row_begin, begin, end);
        }
        store<kTiles, kBlocks>(tile, call_.row_begin);
    }

    void run_many() {
        for (int64_t first = call_.tile_begin; first < call_.tile_end; first += kTilesDecoded) {
            const int64_t end = first + kTilesDecoded < call_.tile_end ? first + kTilesDecoded : call_.tile_end;
            for (int64_t tile = first; tile < end; ++tile) decode(tile, 0, groups_, decoded(tile - first), false);
            int64_t row = call_.row_begin;
            for (; row + block_rows_ < call_.row_end; row += 2 * block_rows_) multiply_many<2>(first, end, row);
            if (row < call_.row_end) multiply_many<1>(first, end, row);
        }
    }

    // Some rows and all decoded tiles.
    template <int kBlocks>
    void multiply_many(int64_t first, int64_t end, int64_t row) {
        int64_t tile = first;
        for (; tile + 1 < end; tile += 2) multiply_all<2, kBlocks>(tile, tile - first, row);
        if (tile < end) multiply_all<1, kBlocks>(tile, tile - first, row);
    }

    template <int kTiles, int kBlocks>
    void multiply_all(int64_t tile, int64_t slot, int64_t row) {
        claim_outputs<kTiles>(tile, row, kBlocks * block_rows_);
        clear();
        multiply<kTiles, kBlocks>(decoded(slot), groups_ * kTileWords, row, 0, groups_);
        store<kTiles, kBlocks>(tile, row);
    }

    // Asks for the cache lines that some rows' outputs will go to, while there is arithmetic to do.
    template <int kTiles>
    void claim_outputs(int64_t tile, int64_t row, int64_t count) const {
        const int64_t end = row + count < call_.row_end ? row + count : call_.row_end;
        for (; row < end; ++row) {
            const float* line = call_.y + row * call_.y_stride + tile * kColumns;
            for (int t = 0; t < kTiles; ++t) __builtin_prefetch(line + t * kColumns, 1);
        }
    }

    // Where a tile that is decoded as a whole goes.
    uint16_t* decoded(int64_t slot) const { return weights_ + slot * groups_ * kTileWords; }

    // Decodes groups [begin, end) of a column tile.
    void decode(int64_t column_tile, int64_t begin, int64_t end, uint16_t* out, bool prefetches) const {
        const Tile tile = tile_at(call_, layout_, column_tile);
        for (int64_t group = begin; group < end; ++group) {
            if (prefetches) prefetch(tile, group);
            GroupDecoder<Fmt>(tile, group, out + (group - begin) * kTileWords).run();
        }
    }

    // Codes some groups ahead, at the end those of the tile that follows these; and a share of that one's other planes.
    void prefetch(const Tile& tile, int64_t group) const {
        const uint8_t* next_tile = tile.quants + kSumsAtOnce * layout_.tile_bytes;
        const int64_t ahead = group + kRoundedPrefetch;
        const uint8_t* quants = ahead < groups_ ? tile.quants + ahead * Fmt::quant_bytes
                                                : next_tile + (ahead - groups_) * Fmt::quant_bytes;
        for (int i = 0; i < Fmt::quant_bytes; i += 64) __builtin_prefetch(quants + i);
        constexpr int kOtherBytes = (Fmt::scales_per_group + (Fmt::has_minimum ? 1 : 0)) * Fmt::vector_bytes;
        const uint8_t* others = next_tile + layout_.scales + group * kOtherBytes;
        for (int i = 0; i < kOtherBytes; i += 64) __builtin_prefetch(others + i);
    }

    // Tile numbers of all that follows are literals: sums of tile t and block b are in tile kBlocks t + b.
    static void clear() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    // Multiplies a group of one or two blocks of rows with column tiles that lie `apart` words from each other.
    template <int kTiles, int kBlocks>
    static inline __attribute__((always_inline)) void add_products(const uint16_t* weights, int64_t apart,
                                                                   const uint16_t* x, const uint16_t* next,
                                                                   int64_t stride) {
        _tile_loadd(6, x, stride);
        if (kBlocks == 2) _tile_loadd(7, next, stride);
        _tile_loadd(4, weights, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (kBlocks == 2) _tile_dpbf16ps(1, 4, 7);
        if (kTiles == 1) return;
        _tile_loadd(5, weights + apart, 64);
        if (kBlocks == 2) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            return;
        }
        _tile_dpbf16ps(1, 5, 6);
        if (kTiles == 2) return;
        _tile_loadd(4, weights + 2 * apart, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, weights + 3 * apart, 64);
        _tile_dpbf16ps(3, 5, 6);
    }

    // Adds groups [begin, end), decoded, of column tiles to the sums of the rows from `row` on.
    template <int kTiles, int kBlocks>
    inline __attribute__((always_inline)) void multiply(const uint16_t* weights, int64_t apart, int64_t row,
                                                        int64_t begin, int64_t end) const {
        order_memory();
        const int64_t x_words = int64_t{kGroup} * block_rows_, stride = 4 * block_rows_;
        const uint16_t* x = call_.x->rounded + treadle::rounded_row_offset(row, call_.weights->k, block_rows_);
        x += begin * x_words;
        const uint16_t* next = x + groups_ * x_words;  // of the second block
        for (int64_t group = begin; group < end; ++group) {
            add_products<kTiles, kBlocks>(weights, apart, x, next, stride);
            weights += kTileWords;
            x += x_words;
            next += x_words;
        }
        order_memory();
    }

    template <int kTiles, int kBlocks>
    void store(int64_t tile, int64_t row) const {
        constexpr int kSums = kTiles * kBlocks;
        const int64_t stride = 4 * block_rows_;
        _tile_stored(0, products_, stride);
        if (kSums > 1) _tile_stored(1, products_ + kProductFloats, stride);
        if (kSums > 2) _tile_stored(2, products_ + 2 * kProductFloats, stride);
        if (kSums > 2) _tile_stored(3, products_ + 3 * kProductFloats, stride);
        order_memory();
        for (int b = 0; b < kBlocks; ++b) {
            for (int t = 0; t < kTiles; ++t) {
                store_block(row + b * block_rows_, tile + t, products_ + (t * kBlocks + b) * kProductFloats);
            }
        }
        order_memory();
    }

    // Products of a block: [16 columns][block_rows].
    void store_block(int64_t row, int64_t tile, const float* products) const {
        const int64_t left = call_.row_end - row, count = left < block_rows_ ? left : block_rows_;
        if (block_rows_ == 1) return store_outputs(call_, row, tile, f_load(products));
        if (count > 4 && block_rows_ == 16) {
            F rows[16];
            transpose(products, rows);
            for (int64_t j = 0; j < count; ++j) store_outputs(call_, row + j, tile, rows[j]);
            return;
        }
        const I lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const I places = _mm512_mullo_epi32(lanes, i_set(block_rows_));
        for (int64_t j = 0; j < count; ++j) {
            store_outputs(call_, row + j, tile, _mm512_i32gather_ps(places, products + j, sizeof(float)));
        }
    }

    const LinearCall& call_;
    const TileLayout layout_;
    const int64_t groups_;
    const int block_rows_;
    float* const products_;    // [kSumsAtOnce][kProductFloats]
    uint16_t* const weights_;  // [kTilesDecoded][groups or kGroupsAtOnce][kTileWords]
};

}  // namespace
