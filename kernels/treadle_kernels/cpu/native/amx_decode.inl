// Decoding of weights rounded to bfloat16 (linear_rounded.inl) as first operands of tile products.
#include "kernels.h"

namespace {

constexpr int kTileWords = kColumns * kGroup;  // of a group's weights: [16 columns][32 inputs]

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

}  // namespace
