// Sixteen lanes on AVX2 with FMA and F16C, as two halves. The vocabulary of this file is that of vec_plain.h.
#include <immintrin.h>

#include <cstdint>

#include "powers.h"

namespace {

struct F {
    __m256 low, high;
};
struct I {
    __m256i low, high;
};
struct B {
    __m256i low, high;
};

constexpr int kMaxRowsAtOnce = 2;
constexpr int kSplitRowsAtOnce = 1;
constexpr bool kIgnoresHighBits = false;  // CodeNumbers of four bits
constexpr int kQuadsAtOnce = 2;  // of a group of terms, unrolled
constexpr int kAttentionRowsAtOnce = 2;
constexpr int kAttentionVectorsAtOnce = 2;

inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256i below(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_numbers()); }

inline F f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F f_load_first(const float* p, int n) {
    return {_mm256_maskload_ps(p, below(n)), _mm256_maskload_ps(p + 8, below(n - 8))};
}
inline void f_store(float* p, F x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
inline void f_store_first(float* p, F x, int n) {
    _mm256_maskstore_ps(p, below(n), x.low);
    _mm256_maskstore_ps(p + 8, below(n - 8), x.high);
}
inline F f_add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F f_sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F f_mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F f_div(F a, F b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline F f_fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline F f_max(F a, F b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F f_at_most(F x, float limit) {
    const __m256 bound = _mm256_set1_ps(limit);
    return {_mm256_min_ps(bound, x.low), _mm256_min_ps(bound, x.high)};
}
inline F f_at_least(F x, float limit) {
    const __m256 bound = _mm256_set1_ps(limit);
    return {_mm256_max_ps(bound, x.low), _mm256_max_ps(bound, x.high)};
}
inline F f_zero_below(F value, F x, float limit) {
    const __m256 bound = _mm256_set1_ps(limit);
    return {_mm256_and_ps(value.low, _mm256_cmp_ps(x.low, bound, _CMP_NLT_UQ)),
            _mm256_and_ps(value.high, _mm256_cmp_ps(x.high, bound, _CMP_NLT_UQ))};
}
inline F f_zero_where_below(F value, F limit) {
    return {_mm256_and_ps(value.low, _mm256_cmp_ps(value.low, limit.low, _CMP_NLT_UQ)),
            _mm256_and_ps(value.high, _mm256_cmp_ps(value.high, limit.high, _CMP_NLT_UQ))};
}
inline F f_keep_lanes(F x, int begin, int end, float other) {
    const __m256 bound = _mm256_set1_ps(other);
    const __m256i low = _mm256_andnot_si256(below(begin), below(end));
    const __m256i high = _mm256_andnot_si256(below(begin - 8), below(end - 8));
    return {_mm256_blendv_ps(bound, x.low, _mm256_castsi256_ps(low)),
            _mm256_blendv_ps(bound, x.high, _mm256_castsi256_ps(high))};
}
inline F f_round(F x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, kNearest), _mm256_round_ps(x.high, kNearest)};
}
inline __m256 times_power(__m256 x, __m256 t) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
inline F f_times_power(F x, F t) { return {times_power(x.low, t.low), times_power(x.high, t.high)}; }
inline F f_off_nearest(F x) { return f_sub(x, f_round(x)); }
inline __m256 times_whole_power(__m256 x, __m256 n) {
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), power));
}
inline F f_times_whole_power(F x, F n) { return {times_whole_power(x.low, n.low), times_whole_power(x.high, n.high)}; }
inline __m256 from_bits_less(uint32_t bits, __m256 x) {
    return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(static_cast<int32_t>(bits)), _mm256_castps_si256(x)));
}
inline F f_from_bits_less(uint32_t bits, F x) { return {from_bits_less(bits, x.low), from_bits_less(bits, x.high)}; }
inline float f_sum(F x) {
    const __m256 a = _mm256_add_ps(x.low, x.high);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float f_max_lane(F x) {
    const __m256 a = _mm256_max_ps(x.low, x.high);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline __m256 load_bf16(const uint16_t* p) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline F f_load_bf16(const uint16_t* p) { return {load_bf16(p), load_bf16(p + 8)}; }
inline void f_load_bf16_pairs(const uint16_t* p, F& first, F& second) {
    const __m256i low = load_256(p), high = load_256(p + 16);
    const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
    first = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
    second = {_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))};
}
inline __m256 load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F f_load_f16(const uint16_t* p) { return {load_f16(p), load_f16(p + 8)}; }

inline __m256 round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(nearest),
                                         _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x400000))),
                                         _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_and_ps(kept, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
inline F f_round_bf16(F x) { return {round_bf16(x.low), round_bf16(x.high)}; }
inline F f_store_bf16(F x, uint16_t* p) {
    const F nearest = f_round_bf16(x);
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(nearest.low), 16);
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(nearest.high), 16);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
    return nearest;
}
inline void store_powers(F rough_bits, uint16_t* p) {
    const __m256i low = _mm256_cvtps_epi32(rough_bits.low), high = _mm256_cvtps_epi32(rough_bits.high);
    const __m256i bits = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    const __m256i part = _mm256_and_si256(_mm256_srli_epi16(bits, 1), _mm256_set1_epi16(63));
    const __m256i parabola = _mm256_mullo_epi16(part, _mm256_sub_epi16(_mm256_set1_epi16(64), part));
    const __m256i cubic = _mm256_add_epi16(_mm256_mullo_epi16(parabola, _mm256_set1_epi16(treadle::kExcessFactor)),
                                           _mm256_srli_epi16(_mm256_mullo_epi16(parabola, part), 3));
    const __m256i excess = _mm256_srli_epi16(_mm256_add_epi16(cubic, _mm256_set1_epi16(2048)), 12);
    const __m256i least = _mm256_max_epu16(bits, _mm256_set1_epi16(treadle::kLeastPowerBits));
    const __m256i powers = _mm256_and_si256(_mm256_sub_epi16(bits, excess), _mm256_cmpeq_epi16(bits, least));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), powers);
}
inline void f_store_bf16_half_pairs(F x, int half, uint16_t* p) {
    uint16_t words[16];
    f_store_bf16(x, words);
    for (int i = 0; i < 16; ++i) p[2 * i + half] = words[i];
}
inline F f_truncate_bf16(F x) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int32_t>(0xffff0000)));
    return {_mm256_and_ps(x.low, mask), _mm256_and_ps(x.high, mask)};
}
inline void store_terms(F x, uint16_t* p) {
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(x.low), 16);
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(x.high), 16);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    const __m256i swapped = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), swapped);
}
inline void store_nearest_terms(F x, uint16_t* p) { store_terms(f_round_bf16(x), p); }
inline void store_terms_twice(F x, uint16_t* p) {
    const auto twice = [](__m256 lanes) {
        const __m256i high = _mm256_castps_si256(lanes);
        return _mm256_or_si256(high, _mm256_srli_epi32(high, 16));
    };
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), twice(x.low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), twice(x.high));
}

inline __m256 max_magnitude(__m256 a, __m256 b) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a), mask),
                                                _mm256_and_si256(_mm256_castps_si256(b), mask)));
}
inline F f_max_magnitude(F a, F b) { return {max_magnitude(a.low, b.low), max_magnitude(a.high, b.high)}; }
template <int kApart>
inline __m256 butterfly(__m256 x) {
    const __m256 other = kApart == 4 ? _mm256_permute2f128_ps(x, x, 1) : _mm256_permute_ps(x, kApart == 1 ? 0xb1 : 0x4e);
    return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), kApart == 1 ? 0xaa : kApart == 2 ? 0xcc : 0xf0);
}
template <int kApart>
inline F f_butterfly(F x) {
    if (kApart == 8) return {_mm256_add_ps(x.low, x.high), _mm256_sub_ps(x.low, x.high)};
    return {butterfly<kApart>(x.low), butterfly<kApart>(x.high)};
}

inline I i_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I i_add(I a, I b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline F f_from_i(I x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline uint32_t max_magnitude_bits(F a, F b) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    const auto magnitude = [&](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), mask); };
    const __m256i x = _mm256_max_epi32(magnitude(a.low), magnitude(a.high));
    const __m256i y = _mm256_max_epi32(x, _mm256_max_epi32(magnitude(b.low), magnitude(b.high)));
    const __m128i c = _mm_max_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    const __m128i d = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(d, _mm_shuffle_epi32(d, 0xb1))));
}
inline I i_round(F x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline int32_t i_sum(I x) {
    const __m256i pairs = _mm256_add_epi32(x.low, x.high);
    const __m128i a = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128i b = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
inline void store_codes(I x, int8_t* p) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

inline B b_load(const uint8_t* p) { return {load_256(p), load_256(p + 32)}; }
inline B b_low_nibbles(B x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask)};
}
inline B b_high_nibbles(B x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(x.low, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.high, 4), mask)};
}
inline B b_shift_nibbles(B x) { return b_high_nibbles(x); }
// 16 in each byte whose bit is set.
inline __m256i sixteens(const uint8_t* mask) {
    int32_t bits;
    __builtin_memcpy(&bits, mask, sizeof bits);
    const __m256i byte_of_lane = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2,
                                                  2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit_of_lane = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of_lane);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of_lane), bit_of_lane);
    return _mm256_and_si256(is_set, _mm256_set1_epi8(16));
}
inline B b_add_fifth_bits(B x, const uint8_t* mask) {
    return {_mm256_or_si256(x.low, sixteens(mask)), _mm256_or_si256(x.high, sixteens(mask + 4))};
}
template <int kQuad>
inline __m256i bit_pair(__m256i pairs) {
    const __m256i moved = kQuad < 2 ? _mm256_slli_epi16(pairs, 4 - 2 * kQuad) : _mm256_srli_epi16(pairs, 2 * kQuad - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8(0x30));
}
template <int kQuad>
inline B b_add_bit_pair(B x, B pairs) {
    return {_mm256_or_si256(x.low, bit_pair<kQuad>(pairs.low)), _mm256_or_si256(x.high, bit_pair<kQuad>(pairs.high))};
}

template <int kByte>
inline __m256 from_code(__m256i codes) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(codes, 8 * kByte), _mm256_set1_epi32(255)));
}
template <int kBits, int kOffset>
struct CodeNumbers {
    template <int kByte>
    F of(B codes) const {
        return f_sub({from_code<kByte>(codes.low), from_code<kByte>(codes.high)}, f_set(static_cast<float>(kOffset)));
    }
};

#if defined(__AVXVNNI__)
template <bool kIsWide>
inline I i_dot(I sum, B codes, const int8_t* x) {
    int32_t quad;
    __builtin_memcpy(&quad, x, sizeof quad);
    const __m256i numbers = _mm256_set1_epi32(quad);
    return {_mm256_dpbusd_avx_epi32(sum.low, codes.low, numbers),
            _mm256_dpbusd_avx_epi32(sum.high, codes.high, numbers)};
}
#else
// The byte product saturates at 16 bits, which two products with codes up to 127 cannot reach; wider codes go one at a
// time.
template <bool kIsWide>
inline __m256i dot_products(__m256i codes, __m256i numbers) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (!kIsWide) return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, numbers), ones);
    const __m256i even = _mm256_maddubs_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0xff)), numbers);
    const __m256i odd = _mm256_maddubs_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0xff), codes), numbers);
    return _mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones));
}
template <bool kIsWide>
inline I i_dot(I sum, B codes, const int8_t* x) {
    int32_t quad;
    __builtin_memcpy(&quad, x, sizeof quad);
    const __m256i numbers = _mm256_set1_epi32(quad);
    return {_mm256_add_epi32(sum.low, dot_products<kIsWide>(codes.low, numbers)),
            _mm256_add_epi32(sum.high, dot_products<kIsWide>(codes.high, numbers))};
}
#endif

}  // namespace

#include "vec_words.inl"
