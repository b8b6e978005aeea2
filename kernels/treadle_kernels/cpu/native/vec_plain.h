// Sixteen lanes in portable C++, for any machine; the compiler vectorises as it can.
//
// This file also defines the words that the other vec_*.h spell with intrinsics. All give the same bits, but for
// f_fma, which rounds twice here where the machine has no fused instruction.
#include <cstdint>

#include "formats.h"
#include "powers.h"

namespace {

// Sixteen floats, sixteen int32, sixty-four bytes.
struct F {
    float lane[16];
};
struct I {
    int32_t lane[16];
};
struct B {
    uint8_t lane[64];
};

constexpr int kMaxRowsAtOnce = 4;
// Rows with activations as terms, which only AVX-512 is fast with: elsewhere the code is kept small.
constexpr int kSplitRowsAtOnce = 1;
constexpr bool kIgnoresHighBits = false;  // CodeNumbers of four bits
constexpr int kQuadsAtOnce = 1;  // of a group of terms, unrolled
constexpr int kAttentionRowsAtOnce = 2;
constexpr int kAttentionVectorsAtOnce = 2;

template <class Operation>
inline F f_each(const Operation& operation) {
    F result;
    for (int i = 0; i < 16; ++i) result.lane[i] = operation(i);
    return result;
}

inline F f_set(float x) {
    return f_each([&](int) { return x; });
}
inline F f_load(const float* p) {
    return f_each([&](int i) { return p[i]; });
}
// The first n lanes; zeros after them.
inline F f_load_first(const float* p, int n) {
    return f_each([&](int i) { return i < n ? p[i] : 0.0f; });
}
inline void f_store(float* p, F x) { __builtin_memcpy(p, x.lane, sizeof x.lane); }
inline void f_store_first(float* p, F x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x.lane[i];
}
inline F f_add(F a, F b) {
    return f_each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F f_sub(F a, F b) {
    return f_each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F f_mul(F a, F b) {
    return f_each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline F f_div(F a, F b) {
    return f_each([&](int i) { return a.lane[i] / b.lane[i]; });
}
// a b + c.
inline F f_fma(F a, F b, F c) {
#if defined(__FP_FAST_FMAF)
    return f_each([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
#else
    return f_each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
#endif
}
// The larger; b if either is NaN.
inline F f_max(F a, F b) {
    return f_each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
// Clamped from above or below; NaN stays.
inline F f_at_most(F x, float limit) {
    return f_each([&](int i) { return limit < x.lane[i] ? limit : x.lane[i]; });
}
inline F f_at_least(F x, float limit) {
    return f_each([&](int i) { return limit > x.lane[i] ? limit : x.lane[i]; });
}
// value, but 0 where x < limit.
inline F f_zero_below(F value, F x, float limit) {
    return f_each([&](int i) { return x.lane[i] < limit ? 0.0f : value.lane[i]; });
}
// value, but 0 where value < limit.
inline F f_zero_where_below(F value, F limit) {
    return f_each([&](int i) { return value.lane[i] < limit.lane[i] ? 0.0f : value.lane[i]; });
}
// Lanes [begin, end) of x, `other` elsewhere.
inline F f_keep_lanes(F x, int begin, int end, float other) {
    return f_each([&](int i) { return i >= begin && i < end ? x.lane[i] : other; });
}
// To the nearest integer, ties to even.
inline F f_round(F x) {
    return f_each([&](int i) { return __builtin_rintf(x.lane[i]); });
}
// x 2^n, n being the integer at the bottom of t's bits; its exponent must be within range.
inline F f_times_power(F x, F t) {
    return f_each([&](int i) {
        return treadle::f32_from_bits(treadle::bits_from_f32(x.lane[i]) + (treadle::bits_from_f32(t.lane[i]) << 23));
    });
}
// x less the nearest integer.
inline F f_off_nearest(F x) { return f_sub(x, f_round(x)); }
// x 2^n of an integer n; the exponent must be within range where the number counts.
inline F f_times_whole_power(F x, F n) {
    return f_each([&](int i) {
        const int power = n.lane[i] > -128.0f && n.lane[i] < 128.0f ? static_cast<int>(n.lane[i]) : 0;
        return treadle::f32_from_bits(treadle::bits_from_f32(x.lane[i]) + (static_cast<uint32_t>(power) << 23));
    });
}
// The number of which the bits are these less those of x.
inline F f_from_bits_less(uint32_t bits, F x) {
    return f_each([&](int i) { return treadle::f32_from_bits(bits - treadle::bits_from_f32(x.lane[i])); });
}
// Sum of the lanes: lane i + lane i + 8, then + 4, + 2, + 1.
inline float f_sum(F x) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) x.lane[i] += x.lane[i + half];
    }
    return x.lane[0];
}
inline float f_max_lane(F x) {
    float result = x.lane[0];
    for (int i = 1; i < 16; ++i) result = x.lane[i] > result ? x.lane[i] : result;
    return result;
}

inline F f_load_bf16(const uint16_t* p) {
    return f_each([&](int i) { return treadle::f32_from_bf16(p[i]); });
}
// Sixteen pairs: the first of each, and the second.
inline void f_load_bf16_pairs(const uint16_t* p, F& first, F& second) {
    first = f_each([&](int i) { return treadle::f32_from_bf16(p[2 * i]); });
    second = f_each([&](int i) { return treadle::f32_from_bf16(p[2 * i + 1]); });
}
inline F f_load_f16(const uint16_t* p) {
    return f_each([&](int i) { return treadle::f32_from_f16(p[i]); });
}

// The nearest bfloat16, ties to even.
inline F f_round_bf16(F x) {
    return f_each([&](int i) {
        const uint32_t bits = treadle::bits_from_f32(x.lane[i]);
        if (x.lane[i] != x.lane[i]) return treadle::f32_from_bits((bits & 0xffff0000u) | 0x400000u);  // stays NaN
        return treadle::f32_from_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
    });
}
// Stores the nearest bfloat16 of lanes that are not denormal, and returns them as floats.
inline F f_store_bf16(F x, uint16_t* p) {
    const F nearest = f_round_bf16(x);
    for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(treadle::bits_from_f32(nearest.lane[i]) >> 16);
    return nearest;
}
// Stores powers of two (powers.h) by their bits before the excess is off, which are rounded first; 0 instead of those below
// kLeastPowerBits and of NaN.
inline void store_powers(F rough_bits, uint16_t* p) {
    for (int i = 0; i < 16; ++i) {
        const float x = __builtin_rintf(rough_bits.lane[i]);
        const int bits = x >= treadle::kLeastPowerBits && x < 65536.0f ? static_cast<int>(x) : 0;
        p[i] = static_cast<uint16_t>(bits == 0 ? 0 : bits - treadle::power_excess(bits));
    }
}
// Stores lanes that are bfloat16 as one of each of sixteen pairs: the first (0) or the second (1).
inline void f_store_bf16_half_pairs(F x, int half, uint16_t* p) {
    uint16_t words[16];
    f_store_bf16(x, words);
    for (int i = 0; i < 16; ++i) p[2 * i + half] = words[i];
}
// The bfloat16 that is nearest towards zero.
inline F f_truncate_bf16(F x) {
    return f_each([&](int i) { return treadle::f32_from_bits(treadle::bits_from_f32(x.lane[i]) & 0xffff0000u); });
}
// Stores lanes that are bfloat16; the middle two of each four swapped.
inline void store_terms(F x, uint16_t* p) {
    for (int i = 0; i < 16; ++i) {
        const int from = (i & ~3) | (i & 1) << 1 | (i & 2) >> 1;
        p[i] = static_cast<uint16_t>(treadle::bits_from_f32(x.lane[from]) >> 16);
    }
}
// The same of the nearest bfloat16s.
inline void store_nearest_terms(F x, uint16_t* p) { store_terms(f_round_bf16(x), p); }
// Stores each such lane twice.
inline void store_terms_twice(F x, uint16_t* p) {
    for (int i = 0; i < 32; ++i) p[i] = static_cast<uint16_t>(treadle::bits_from_f32(x.lane[i / 2]) >> 16);
}

// The larger magnitudes, as positive numbers; NaN and infinity compare as their bits do, above everything finite.
inline F f_max_magnitude(F a, F b) {
    return f_each([&](int i) {
        const uint32_t x = treadle::bits_from_f32(a.lane[i]) & 0x7fffffffu, y = treadle::bits_from_f32(b.lane[i]) & 0x7fffffffu;
        return treadle::f32_from_bits(x > y ? x : y);
    });
}
// Sums of each two lanes so far from each other, and in the second of them differences. kApart: 1, 2, 4 or 8.
template <int kApart>
inline F f_butterfly(F x) {
    return f_each([&](int i) {
        return (i & kApart) == 0 ? x.lane[i] + x.lane[i + kApart] : x.lane[i - kApart] - x.lane[i];
    });
}

inline I i_set(int32_t x) {
    I result;
    for (int32_t& lane : result.lane) lane = x;
    return result;
}
inline I i_add(I a, I b) {
    for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
    return a;
}
inline F f_from_i(I x) {
    return f_each([&](int i) { return static_cast<float>(x.lane[i]); });
}
// Bits of the largest magnitude among the lanes; NaN and infinity compare as their bits do, above everything finite.
inline uint32_t max_magnitude_bits(F a, F b) {
    uint32_t result = 0;
    for (int i = 0; i < 16; ++i) {
        const uint32_t x = treadle::bits_from_f32(a.lane[i]) & 0x7fffffffu;
        const uint32_t y = treadle::bits_from_f32(b.lane[i]) & 0x7fffffffu;
        result = x > result ? x : result;
        result = y > result ? y : result;
    }
    return result;
}
// Lanes rounded to nearest even, of magnitudes below 2^31.
inline I i_round(F x) {
    I result;
    for (int i = 0; i < 16; ++i) result.lane[i] = static_cast<int32_t>(__builtin_nearbyintf(x.lane[i]));
    return result;
}
inline int32_t i_sum(I x) {
    int32_t sum = 0;
    for (const int32_t lane : x.lane) sum += lane;
    return sum;
}
// Stores lanes from -127 to 127 as bytes.
inline void store_codes(I x, int8_t* p) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x.lane[i]);
}

inline B b_load(const uint8_t* p) {
    B result;
    __builtin_memcpy(result.lane, p, sizeof result.lane);
    return result;
}
inline B b_low_nibbles(B x) {
    for (uint8_t& lane : x.lane) lane &= 15;
    return x;
}
inline B b_high_nibbles(B x) {
    for (uint8_t& lane : x.lane) lane >>= 4;
    return x;
}
// High nibbles in place of the low ones; what lies above them is undefined.
inline B b_shift_nibbles(B x) { return b_high_nibbles(x); }
// Adds 16 to the bytes whose bits are set in the 64 at `mask`.
inline B b_add_fifth_bits(B x, const uint8_t* mask) {
    for (int i = 0; i < 64; ++i) x.lane[i] = static_cast<uint8_t>(x.lane[i] + ((mask[i / 8] >> (i % 8) & 1) << 4));
    return x;
}
// Puts bits [2 kQuad, 2 kQuad + 2) of each byte of `pairs` above the four bits of x's.
template <int kQuad>
inline B b_add_bit_pair(B x, B pairs) {
    for (int i = 0; i < 64; ++i) x.lane[i] = static_cast<uint8_t>(x.lane[i] | (pairs.lane[i] >> (2 * kQuad) & 3) << 4);
    return x;
}
// Codes of kBits bits as numbers: code - kOffset.
template <int kBits, int kOffset>
struct CodeNumbers {
    // Of byte kByte of each four.
    template <int kByte>
    F of(B codes) const {
        return f_each([&](int i) { return static_cast<float>(codes.lane[4 * i + kByte] - kOffset); });
    }
};
// Adds to each lane the dot product of its four unsigned codes with the four signed numbers at x. kIsWide: codes may
// exceed 127.
template <bool kIsWide>
inline I i_dot(I sum, B codes, const int8_t* x) {
    for (int i = 0; i < 16; ++i) {
        int32_t dot = 0;
        for (int j = 0; j < 4; ++j) dot += codes.lane[4 * i + j] * x[j];
        sum.lane[i] += dot;
    }
    return sum;
}

}  // namespace

#include "vec_words.inl"
