// Products with activations as two bfloat16 terms (linear_split.inl), on AMX tiles.
//
// Codes of weights are small integers, which bfloat16 holds exactly. A tile product gives sixteen rows, sixteen columns
// and one group, and leaves the tile to be scaled.
#include "amx_tiles.h"
#include "kernels.h"

namespace {

using treadle::kTerms;

// A unit is what one tile product takes in: a group, or half of one where that has a scale of its own, or a sum group.
constexpr int kTileRows = 16;
constexpr int kUnitsAtOnce = 4;                        // their codes and terms stay in the first-level cache
constexpr int kTilesAtOnce = 2;                         // column tiles that meet the same terms
constexpr int kGroupWords = kColumns * kGroup;         // of a group's codes: [16 pairs][16 columns][2]
constexpr int kUnitFloats = kTileRows * kColumns;   // of a unit
constexpr int64_t kPrefetchGroups = 2 * kUnitsAtOnce;  // ahead of the weights in use
constexpr int kPrefetchUpToRows = 64;                  // with more, arithmetic hides memory

// Codes, two sets of products, and sums, one after the other.
static_assert(treadle::linear_scratch_bytes(0) >=
                  kTilesAtOnce * kUnitsAtOnce * kGroupWords * int64_t{sizeof(uint16_t)} +
                      (2 * kUnitsAtOnce * kUnitFloats + kTilesAtOnce * treadle::kMaxLinearRows * kColumns) *
                          int64_t{sizeof(float)},
              "a thread's scratch memory holds what a tiled product needs");

// Tiles 0 and 1 hold products, 2 to 5 terms of activations, 6 and 7 codes, of `inputs` inputs.
inline TileConfig split_config(int num_rows, int inputs) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        const bool is_terms = tile >= 2 && tile <= 5, is_codes = tile >= 6;
        config.set(tile, is_codes ? inputs / 2 : num_rows, is_terms ? 2 * inputs : 64);
    }
    return config;
}

// Turns the codes of a group into bfloat16 numbers.
template <class Fmt>
class CodeTable {
 public:
    CodeTable() {
        constexpr int kNumbers = Fmt::bits == 6 ? 64 : 32;
        alignas(64) uint16_t numbers[64] = {};
        for (int i = 0; i < kNumbers; ++i) {
            const int code = Fmt::bits == 4 ? i % 16 : i;  // above four bits lie those of a neighbour
            numbers[i] = static_cast<uint16_t>(treadle::bits_from_f32(static_cast<float>(code - Fmt::offset)) >> 16);
        }
        low_ = _mm512_load_si512(numbers);
        high_ = _mm512_load_si512(numbers + 32);
    }

    // Writes a group as pairs of inputs in the order of the activations' terms: [16 pairs][16 columns][2].
    inline __attribute__((always_inline)) void unpack(const uint8_t* quants, uint16_t* out) const {
        if (Fmt::bits == 4) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const B codes = b_load(quants + 64 * i);
                store(out, 2 * i, codes);
                store(out, 2 * i + 1, _mm512_srli_epi16(codes, 8));
                store(out, 2 * i + 8, _mm512_srli_epi16(codes, 4));
                store(out, 2 * i + 9, _mm512_srli_epi16(codes, 12));
            }
            return;
        }
        B codes[8];
        Fmt::unpack(quants, codes);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            store(out, 2 * i, codes[i]);
            store(out, 2 * i + 1, _mm512_srli_epi16(codes[i], 8));
        }
    }

 private:
    // Stores a row of pairs, from words with the codes in their low bits.
    inline __attribute__((always_inline)) void store(uint16_t* out, int pair, B words) const {
        _mm512_store_si512(out + 32 * pair, Fmt::bits == 8 ? from_bytes(words) : look_up(words));
    }
    inline B look_up(B words) const {
        if (Fmt::bits == 6) return _mm512_permutex2var_epi16(low_, words, high_);
        return _mm512_permutexvar_epi16(words, low_);
    }
    // 2^23 + code, as bits, less 2^23 + offset.
    static inline B from_bytes(B words) {
        const I magic = _mm512_set1_epi32(0x4b000000);
        const F base = f_set(static_cast<float>((1 << 23) + Fmt::offset));
        const I byte = _mm512_set1_epi32(255);
        const I low = _mm512_or_si512(_mm512_and_si512(words, byte), magic);
        const I high = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(words, 16), byte), magic);
        const I low_number = _mm512_castps_si512(f_sub(_mm512_castsi512_ps(low), base));
        const I high_number = _mm512_castps_si512(f_sub(_mm512_castsi512_ps(high), base));
        return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(low_number, 16), high_number);
    }

    B low_, high_;
};

// Minima of up to 16 groups as pairs: [16 groups][16 columns][upper half of its bits, and that of what is left].
template <class Fmt>
void unpack_minima(const uint8_t* minima, int64_t count, uint16_t* out) {
    for (int64_t g = 0; g < 16; ++g) {
        I pairs = _mm512_setzero_si512();
        if (g < count) {
            const F minimum = Fmt::load(minima + g * Fmt::vector_bytes);
            const F low = f_truncate_bf16(f_sub(minimum, f_truncate_bf16(minimum)));
            pairs = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(minimum), 16), _mm512_castps_si512(low));
        }
        _mm512_store_si512(out + 32 * g, pairs);
    }
}

// Multiplies some rows and one column tile of one unit. Tile numbers are literals; turns between two sets let a
// product start while the last one is stored.
inline __attribute__((always_inline)) void multiply(bool is_odd, const uint16_t* terms, const uint16_t* codes,
                                                    float* out) {
    if (is_odd) {
        _tile_loadd(6, codes, 64);
        _tile_loadd(4, terms, 64);
        _tile_zero(0);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, terms + kTermWords, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_stored(0, out, 64);
    } else {
        _tile_loadd(7, codes, 64);
        _tile_loadd(2, terms, 64);
        _tile_zero(1);
        _tile_dpbf16ps(1, 2, 7);
        _tile_loadd(3, terms + kTermWords, 64);
        _tile_dpbf16ps(1, 3, 7);
        _tile_stored(1, out, 64);
    }
    order_memory();
}

// A thread's product of some rows with some column tiles. Units are taken kUnitsAtOnce at a time: their codes are
// unpacked, and meet one block of rows after the other, whose sums wait in memory meanwhile.
template <class Fmt, int kRows>
class SplitProduct {
 public:
    explicit SplitProduct(const LinearCall& call)
        : call_(call),
          layout_(treadle::tile_layout(*treadle::format_info(call.weights->format), call.weights->k)),
          groups_(call.weights->k / kGroup),
          num_scaled_(groups_ * kHalves),
          num_units_(num_scaled_ + (Fmt::has_minimum ? treadle::num_sum_groups(groups_) : 0)),
          codes_(reinterpret_cast<uint16_t*>(call.scratch)),
          products_(reinterpret_cast<float*>(codes_ + kTilesAtOnce * kUnitsAtOnce * kGroupWords)),
          sums_(products_ + 2 * kUnitsAtOnce * kUnitFloats) {}

    void run() {
        split_config(kRows, kGroup / kHalves).load();
        for (first_tile_ = call_.tile_begin; first_tile_ < call_.tile_end; first_tile_ += kTilesAtOnce) {
            const int64_t left = call_.tile_end - first_tile_;
            num_tiles_ = left < kTilesAtOnce ? static_cast<int>(left) : kTilesAtOnce;
            for (int64_t begin = 0; begin < num_units_; begin += kUnitsAtOnce) {
                const int64_t units_left = num_units_ - begin;
                const int count = units_left < kUnitsAtOnce ? static_cast<int>(units_left) : kUnitsAtOnce;
                for (int t = 0; t < num_tiles_; ++t) unpack(t, begin, count);
                for (int64_t row = call_.row_begin; row < call_.row_end; row += kRows) add_units(row, begin, count);
            }
        }
        _tile_release();
    }

 private:
    static constexpr int kHalves = Fmt::scales_per_group;
    static constexpr int kUnitWords = kGroupWords / kHalves;

    // Codes of some units of a tile, in their order; asks for those that come next.
    void unpack(int t, int64_t begin, int count) {
        const Tile tile = tile_at(call_, layout_, first_tile_ + t);
        uint16_t* out = codes_ + t * kUnitsAtOnce * kUnitWords;
        const bool prefetches = call_.row_end - call_.row_begin <= kPrefetchUpToRows;
        for (int64_t unit = begin; unit < begin + count; unit += unit < num_scaled_ ? kHalves : 1) {
            uint16_t* of_unit = out + (unit - begin) * kUnitWords;
            if (unit >= num_scaled_) {
                const int64_t group = (unit - num_scaled_) * 16;
                unpack_minima<Fmt>(tile.minima + group * Fmt::vector_bytes, groups_ - group, of_unit);
                continue;
            }
            const int64_t group = unit / kHalves;
            if (prefetches) prefetch(tile, group);
            table_.unpack(tile.quants + group * Fmt::quant_bytes, of_unit);
        }
    }

    // Codes some groups ahead, at the end those of the tile that follows these; and a share of that one's other planes.
    void prefetch(const Tile& tile, int64_t group) const {
        const uint8_t* next_tile = tile.quants + num_tiles_ * layout_.tile_bytes;
        const int64_t ahead = group + kPrefetchGroups;
        const uint8_t* quants = ahead < groups_ ? tile.quants + ahead * Fmt::quant_bytes
                                                : next_tile + (ahead - groups_) * Fmt::quant_bytes;
        prefetch_weights(quants, Fmt::quant_bytes);
        prefetch_weights(next_tile + layout_.scales + group * Fmt::other_bytes, Fmt::other_bytes);
    }

    inline __attribute__((always_inline)) void multiply_unit(const uint16_t* terms, int t, int64_t begin, int i) const {
        const int64_t unit = begin + i;
        const uint16_t* codes = codes_ + (t * kUnitsAtOnce + i) * kUnitWords;
        float* out = products_ + (t % 2 * kUnitsAtOnce + i) * kUnitFloats;
        if (unit < num_scaled_) {
            const int64_t word = unit / kHalves * kTerms * kTermWords + unit % kHalves * (kGroup / kHalves);
            multiply(i % 2 != 0, terms + word, codes, out);
        } else {
            const int64_t word = (groups_ + unit - num_scaled_) * kTerms * kTermWords;
            multiply(i % 2 != 0, terms + word, codes, out);
        }
    }

    // Adds some units to a block of rows: products of a tile while those of the one before are summed.
    void add_units(int64_t row, int64_t begin, int count) {
        const uint16_t* terms = row_terms(*call_.x, row, call_.weights->k);
        float* sums = sums_ + (row - call_.row_begin) / kRows * kTilesAtOnce * kRows * kColumns;
        for (int i = 0; i < count; ++i) multiply_unit(terms, 0, begin, i);
        for (int t = 0; t < num_tiles_; ++t) {
            float* of_tile = sums + t * kRows * kColumns;
            const Tile tile = tile_at(call_, layout_, first_tile_ + t);
            const float* products = products_ + t % 2 * kUnitsAtOnce * kUnitFloats;
            F rows[kRows];
#pragma GCC unroll 16
            for (int j = 0; j < kRows; ++j) rows[j] = begin == 0 ? f_set(0.0f) : f_load(of_tile + j * kColumns);
            for (int i = 0; i < count; ++i) {
                if (t + 1 < num_tiles_) multiply_unit(terms, t + 1, begin, i);
                const int64_t unit = begin + i;
                const F scale =
                    unit < num_scaled_ ? Fmt::load(tile.scales + unit * Fmt::vector_bytes) : f_set(1.0f);
#pragma GCC unroll 16
                for (int j = 0; j < kRows; ++j) {
                    rows[j] = f_fma(f_load(products + i * kUnitFloats + j * kColumns), scale, rows[j]);
                }
            }
#pragma GCC unroll 16
            for (int j = 0; j < kRows; ++j) f_store(of_tile + j * kColumns, rows[j]);
            if (begin + count == num_units_) store_rows(row, first_tile_ + t, of_tile);
        }
    }

    void store_rows(int64_t row, int64_t tile, const float* sums) const {
        const int64_t count = call_.row_end - row < kRows ? call_.row_end - row : kRows;
        for (int64_t j = 0; j < count; ++j) store_outputs(call_, row + j, tile, f_load(sums + j * kColumns));
    }

    const LinearCall& call_;
    const CodeTable<Fmt> table_;
    const TileLayout layout_;
    const int64_t groups_;
    const int64_t num_scaled_;  // units with scales; those after them are sum groups
    const int64_t num_units_;
    uint16_t* const codes_;   // [kTilesAtOnce][kUnitsAtOnce]
    float* const products_;   // [2][kUnitsAtOnce][kTileRows][kColumns]
    float* const sums_;       // [row blocks][kTilesAtOnce][kRows][kColumns]
    int64_t first_tile_ = 0;
    int num_tiles_ = 0;
};

}  // namespace
