// Sixteen lanes on AVX-512. The vocabulary of this file is that of vec_plain.h, where each word is defined.
#include <immintrin.h>

#include <cstdint>

#include "powers.h"

namespace {

using F = __m512;
using I = __m512i;
using B = __m512i;

constexpr int kMaxRowsAtOnce = 8;  // rows of a linear layer whose sums fit in registers
constexpr int kSplitRowsAtOnce = 2;
constexpr bool kIgnoresHighBits = true;  // CodeNumbers of four bits
constexpr int kQuadsAtOnce = 8;  // of a group of terms, unrolled
constexpr int kAttentionRowsAtOnce = 6;
constexpr int kAttentionVectorsAtOnce = 4;

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }

inline F f_set(float x) { return _mm512_set1_ps(x); }
inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
inline F f_load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void f_store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
inline F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
inline F f_at_most(F x, float limit) { return _mm512_min_ps(f_set(limit), x); }
inline F f_at_least(F x, float limit) { return _mm512_max_ps(f_set(limit), x); }
inline F f_zero_below(F value, F x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, f_set(limit), _CMP_NLT_UQ), value);
}
inline F f_zero_where_below(F value, F limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(value, limit, _CMP_NLT_UQ), value);
}
inline F f_keep_lanes(F x, int begin, int end, float other) {
    const auto mask = static_cast<__mmask16>(((1u << end) - 1) & ~((1u << begin) - 1));
    return _mm512_mask_mov_ps(f_set(other), mask, x);
}
inline F f_round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F f_times_power(F x, F t) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
inline F f_off_nearest(F x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F f_times_whole_power(F x, F n) { return _mm512_scalef_ps(x, n); }
inline F f_from_bits_less(uint32_t bits, F x) {
    return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(static_cast<int32_t>(bits)), _mm512_castps_si512(x)));
}
inline float f_sum(F x) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float f_max_lane(F x) { return _mm512_reduce_max_ps(x); }
// Combines the lanes of each of sixteen vectors as f_sum does.
template <class Operation>
inline __attribute__((always_inline)) F combine_lanes(const F* x, const Operation& combine) {
    const auto eights = [&](F a, F b) {  // eight lanes of each
        return combine(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const auto fours = [&](int i) {
        const F a = eights(x[i], x[i + 4]), b = eights(x[i + 8], x[i + 12]);
        return combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    const auto twos = [&](int i) {
        const __m512d a = _mm512_castps_pd(fours(i)), b = _mm512_castps_pd(fours(i + 1));
        return combine(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    };
    const F a = twos(0), b = twos(2);
    return combine(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
inline F f_sums(const F* x) { return combine_lanes(x, f_add); }
inline F f_max_lanes(const F* x) { return combine_lanes(x, f_max); }

inline F f_load_bf16(const uint16_t* p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline void f_load_bf16_pairs(const uint16_t* p, F& first, F& second) {
    const I pairs = _mm512_loadu_si512(p);
    first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
inline F f_load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline F f_round_bf16(F x) {
    const I bits = _mm512_castps_si512(x);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const I kept = _mm512_mask_or_epi32(nearest, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_castsi512_ps(_mm512_and_si512(kept, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
// The upper halves of f_round_bf16; by the instruction for it, denormals become 0.
inline __m256i nearest_words(F x) {
#if defined(__AVX512BF16__)
    const __m256bh nearest = _mm512_cvtneps_pbh(x);
    __m256i words;
    __builtin_memcpy(&words, &nearest, sizeof words);
    return words;
#else
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(f_round_bf16(x)), 16));
#endif
}
inline F f_store_bf16(F x, uint16_t* p) {
    const __m256i words = nearest_words(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
// What to take off from bits. On AMX, floating arithmetic and shifts have one port: the second half of each of these two
// takes the other.
inline I power_excesses(I bits) {
#if defined(__AVX512VBMI__)
    struct Table {
        alignas(64) uint8_t excess[64];

        constexpr Table() : excess() {
            for (int part = 0; part < 64; ++part) excess[part] = static_cast<uint8_t>(treadle::power_excess(2 * part));
        }
    };
    static constexpr Table kTable;
    const I from_second_bit = _mm512_set1_epi64(0x3831282118110801);
    const I parts = _mm512_multishift_epi64_epi8(from_second_bit, bits);
    return _mm512_maskz_permutexvar_epi8(0x5555'5555'5555'5555u, parts, _mm512_load_si512(kTable.excess));
#else
    const I part = _mm512_and_si512(_mm512_srli_epi16(bits, 1), _mm512_set1_epi16(63));
    const I parabola = _mm512_mullo_epi16(part, _mm512_sub_epi16(_mm512_set1_epi16(64), part));
    const I cubic = _mm512_add_epi16(_mm512_mullo_epi16(parabola, _mm512_set1_epi16(treadle::kExcessFactor)),
                                     _mm512_srli_epi16(_mm512_mullo_epi16(parabola, part), 3));
    return _mm512_srli_epi16(_mm512_add_epi16(cubic, _mm512_set1_epi16(2048)), 12);
#endif
}
inline F f_add_powers(F sums, F first_bits, F second_bits, uint16_t* p) {
    const I packed = _mm512_packus_epi32(_mm512_cvtps_epi32(first_bits), _mm512_cvtps_epi32(second_bits));
    const I bits = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), packed);
    const __mmask32 counts = _mm512_cmpge_epu16_mask(bits, _mm512_set1_epi16(treadle::kLeastPowerBits));
    const I powers = _mm512_maskz_sub_epi16(counts, bits, power_excesses(bits));
    _mm512_storeu_si512(p, powers);
#if defined(__AVX512BF16__)
    __m512bh words, ones;
    const I one = _mm512_set1_epi16(treadle::kBitsOfOne);
    __builtin_memcpy(&words, &powers, sizeof words);
    __builtin_memcpy(&ones, &one, sizeof ones);
    return _mm512_dpbf16_ps(sums, words, ones);
#else
    const I second = _mm512_and_si512(powers, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)));
    return f_add(f_add(sums, _mm512_castsi512_ps(second)), _mm512_castsi512_ps(_mm512_slli_epi32(powers, 16)));
#endif
}
inline void f_store_bf16_half_pairs(F x, int half, uint16_t* p) {
    const I bits = _mm512_castps_si512(x);
    _mm512_mask_storeu_epi16(p, half == 0 ? 0x55555555u : 0xaaaaaaaau, half == 0 ? _mm512_srli_epi32(bits, 16) : bits);
}
inline F f_truncate_bf16(F x) {
    return _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
// The middle two of each four words change places: see term_input().
inline void store_term_words(__m256i words, uint16_t* p) {
    const __m256i swapped = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), swapped);
}
inline void store_terms(F x, uint16_t* p) {
    store_term_words(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)), p);
}
inline void store_nearest_terms(F x, uint16_t* p) { store_term_words(nearest_words(x), p); }
inline void store_terms_twice(F x, uint16_t* p) {
    const I high = _mm512_castps_si512(x);
    _mm512_storeu_si512(p, _mm512_or_si512(high, _mm512_srli_epi32(high, 16)));
}

inline F f_max_magnitude(F a, F b) {
    const I mask = _mm512_set1_epi32(0x7fffffff);
    const I x = _mm512_and_si512(_mm512_castps_si512(a), mask), y = _mm512_and_si512(_mm512_castps_si512(b), mask);
    return _mm512_castsi512_ps(_mm512_max_epi32(x, y));
}
template <int kApart>
inline F f_butterfly(F x) {
    F other;
    if (kApart == 1) other = _mm512_permute_ps(x, 0xb1);
    if (kApart == 2) other = _mm512_permute_ps(x, 0x4e);
    if (kApart == 4) other = _mm512_shuffle_f32x4(x, x, 0xb1);
    if (kApart == 8) other = _mm512_shuffle_f32x4(x, x, 0x4e);
    constexpr auto kSecond = static_cast<__mmask16>(kApart == 1 ? 0xaaaa : kApart == 2 ? 0xcccc : kApart == 4 ? 0xf0f0 : 0xff00);
    return f_fma(x, _mm512_mask_mov_ps(f_set(1.0f), kSecond, f_set(-1.0f)), other);
}

inline I i_set(int32_t x) { return _mm512_set1_epi32(x); }
inline I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
inline F f_from_i(I x) { return _mm512_cvtepi32_ps(x); }
inline uint32_t max_magnitude_bits(F a, F b) {
    const I mask = _mm512_set1_epi32(0x7fffffff);
    const I x = _mm512_and_si512(_mm512_castps_si512(a), mask), y = _mm512_and_si512(_mm512_castps_si512(b), mask);
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(x, y)));
}
inline I i_round(F x) { return _mm512_cvtps_epi32(x); }
inline int32_t i_sum(I x) { return _mm512_reduce_add_epi32(x); }
inline void store_codes(I x, int8_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}

inline B b_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline B b_low_nibbles(B x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline B b_high_nibbles(B x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
inline B b_shift_nibbles(B x) { return _mm512_srli_epi32(x, 4); }
inline B b_add_fifth_bits(B x, const uint8_t* mask) {
    uint64_t bits;
    __builtin_memcpy(&bits, mask, sizeof bits);
    return _mm512_mask_add_epi8(x, bits, x, _mm512_set1_epi8(16));
}
template <int kQuad>
inline B b_add_bit_pair(B x, B pairs) {
    const B moved = kQuad < 2 ? _mm512_slli_epi16(pairs, 4 - 2 * kQuad) : _mm512_srli_epi16(pairs, 2 * kQuad - 4);
    return _mm512_or_si512(x, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)));
}
// Up to five bits by look-up, more by sign extension.
template <int kBits, int kOffset>
class CodeNumbers {
 public:
    CodeNumbers() {
        const F lanes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        low_ = f_sub(lanes, f_set(static_cast<float>(kOffset)));
        high_ = f_sub(lanes, f_set(static_cast<float>(kOffset - 16)));
    }
    template <int kByte>
    inline __attribute__((always_inline)) F of(B codes) const {
        return at<8 * kByte>(codes);
    }
    // The code at some bit of a lane; of four bits at any, of others at a byte.
    template <int kBit>
    inline __attribute__((always_inline)) F at(B codes) const {
        if (kBits == 4) return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, kBit), low_);
        if (kBits == 5) return _mm512_permutex2var_ps(low_, _mm512_srli_epi32(codes, kBit), high_);
        const B centred = _mm512_sub_epi8(codes, _mm512_set1_epi8(static_cast<int8_t>(static_cast<uint8_t>(kOffset))));
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(centred, 24 - kBit), 24));
    }

 private:
    F low_, high_;
};
template <bool kIsWide>
inline I i_dot(I sum, B codes, const int8_t* x) {
    int32_t quad;
    __builtin_memcpy(&quad, x, sizeof quad);
    return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(quad));
}

}  // namespace
