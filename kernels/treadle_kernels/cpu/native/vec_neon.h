// Sixteen lanes on NEON with dot products of bytes (Armv8.2), as four quarters. The vocabulary of this file is that of
// vec_plain.h, where each word is defined.
#include <arm_neon.h>

#include <cstdint>

#include "powers.h"

namespace {

struct F {
    float32x4_t quarter[4];
};
struct I {
    int32x4_t quarter[4];
};
struct B {
    uint8x16_t quarter[4];
};

constexpr int kMaxRowsAtOnce = 4;
constexpr int kSplitRowsAtOnce = 1;
constexpr bool kIgnoresHighBits = false;  // CodeNumbers of four bits
constexpr int kQuadsAtOnce = 2;           // of a group of terms, unrolled
constexpr int kAttentionRowsAtOnce = 2;
constexpr int kAttentionVectorsAtOnce = 2;

// {operation(0), ... operation(3)}, each of which gives a quarter.
template <class Vector, class Operation>
inline __attribute__((always_inline)) Vector quarters(const Operation& operation) {
    return {{operation(0), operation(1), operation(2), operation(3)}};
}
template <class Operation>
inline __attribute__((always_inline)) F f_quarters(const Operation& operation) {
    return quarters<F>(operation);
}
inline uint32x4_t bits_of(float32x4_t x) { return vreinterpretq_u32_f32(x); }
inline float32x4_t floats_of(uint32x4_t x) { return vreinterpretq_f32_u32(x); }
inline float32x4_t choose(uint32x4_t mask, float32x4_t yes, float32x4_t no) { return vbslq_f32(mask, yes, no); }

inline F f_set(float x) {
    return f_quarters([=](int) { return vdupq_n_f32(x); });
}
inline F f_load(const float* p) {
    return f_quarters([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline F f_load_first(const float* p, int n) {
    if (n >= 16) return f_load(p);
    float lanes[16] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return f_load(lanes);
}
inline void f_store(float* p, F x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.quarter[i]);
}
inline void f_store_first(float* p, F x, int n) {
    if (n >= 16) return f_store(p, x);
    float lanes[16];
    f_store(lanes, x);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
inline F f_add(F a, F b) {
    return f_quarters([&](int i) { return vaddq_f32(a.quarter[i], b.quarter[i]); });
}
inline F f_sub(F a, F b) {
    return f_quarters([&](int i) { return vsubq_f32(a.quarter[i], b.quarter[i]); });
}
inline F f_mul(F a, F b) {
    return f_quarters([&](int i) { return vmulq_f32(a.quarter[i], b.quarter[i]); });
}
inline F f_div(F a, F b) {
    return f_quarters([&](int i) { return vdivq_f32(a.quarter[i], b.quarter[i]); });
}
inline F f_fma(F a, F b, F c) {
    return f_quarters([&](int i) { return vfmaq_f32(c.quarter[i], a.quarter[i], b.quarter[i]); });
}
// Comparisons and not vmaxq, which would hand on NaN.
inline float32x4_t larger(float32x4_t a, float32x4_t b) { return choose(vcgtq_f32(a, b), a, b); }
inline F f_max(F a, F b) {
    return f_quarters([&](int i) { return larger(a.quarter[i], b.quarter[i]); });
}
inline F f_at_most(F x, float limit) {
    const float32x4_t bound = vdupq_n_f32(limit);
    return f_quarters([&](int i) { return choose(vcltq_f32(bound, x.quarter[i]), bound, x.quarter[i]); });
}
inline F f_at_least(F x, float limit) {
    const float32x4_t bound = vdupq_n_f32(limit);
    return f_quarters([&](int i) { return larger(bound, x.quarter[i]); });
}
inline float32x4_t zero_where(uint32x4_t mask, float32x4_t x) { return floats_of(vbicq_u32(bits_of(x), mask)); }
inline F f_zero_below(F value, F x, float limit) {
    const float32x4_t bound = vdupq_n_f32(limit);
    return f_quarters([&](int i) { return zero_where(vcltq_f32(x.quarter[i], bound), value.quarter[i]); });
}
inline F f_zero_where_below(F value, F limit) {
    return f_quarters([&](int i) {
        return zero_where(vcltq_f32(value.quarter[i], limit.quarter[i]), value.quarter[i]);
    });
}
inline F f_keep_lanes(F x, int begin, int end, float other) {
    static const int32_t kNumbers[4] = {0, 1, 2, 3};
    const float32x4_t outside = vdupq_n_f32(other);
    return f_quarters([&](int i) {
        const int32x4_t lane = vaddq_s32(vld1q_s32(kNumbers), vdupq_n_s32(4 * i));
        const uint32x4_t is_kept = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(begin)), vcltq_s32(lane, vdupq_n_s32(end)));
        return choose(is_kept, x.quarter[i], outside);
    });
}
inline F f_round(F x) {
    return f_quarters([&](int i) { return vrndnq_f32(x.quarter[i]); });
}
inline F f_times_power(F x, F t) {
    return f_quarters([&](int i) {
        return floats_of(vaddq_u32(bits_of(x.quarter[i]), vshlq_n_u32(bits_of(t.quarter[i]), 23)));
    });
}
inline F f_off_nearest(F x) { return f_sub(x, f_round(x)); }
inline F f_times_whole_power(F x, F n) {
    return f_quarters([&](int i) {
        const uint32x4_t power = vreinterpretq_u32_s32(vshlq_n_s32(vcvtq_s32_f32(n.quarter[i]), 23));
        return floats_of(vaddq_u32(bits_of(x.quarter[i]), power));
    });
}
inline F f_from_bits_less(uint32_t bits, F x) {
    return f_quarters([&](int i) { return floats_of(vsubq_u32(vdupq_n_u32(bits), bits_of(x.quarter[i]))); });
}
inline float f_sum(F x) {
    const float32x4_t four =
        vaddq_f32(vaddq_f32(x.quarter[0], x.quarter[2]), vaddq_f32(x.quarter[1], x.quarter[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float f_max_lane(F x) {
    return vmaxnmvq_f32(larger(larger(x.quarter[0], x.quarter[1]), larger(x.quarter[2], x.quarter[3])));
}

inline F f_load_bf16(const uint16_t* p) {
    return f_quarters([=](int i) { return floats_of(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
constexpr uint32_t kHighHalf = 0xffff0000u;
inline void f_load_bf16_pairs(const uint16_t* p, F& first, F& second) {
    const auto pairs = [=](int i) { return vreinterpretq_u32_u16(vld1q_u16(p + 8 * i)); };
    first = f_quarters([&](int i) { return floats_of(vshlq_n_u32(pairs(i), 16)); });
    second = f_quarters([&](int i) { return floats_of(vandq_u32(pairs(i), vdupq_n_u32(kHighHalf))); });
}
inline F f_load_f16(const uint16_t* p) {
    return f_quarters([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}

inline F f_round_bf16(F x) {
    return f_quarters([&](int i) {
        const uint32x4_t bits = bits_of(x.quarter[i]);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t nearest = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        const uint32x4_t is_number = vceqq_f32(x.quarter[i], x.quarter[i]);
        const uint32x4_t kept = vbslq_u32(is_number, nearest, vorrq_u32(bits, vdupq_n_u32(0x400000)));
        return floats_of(vandq_u32(kept, vdupq_n_u32(kHighHalf)));
    });
}
// The upper halves of the lanes of a quarter.
inline uint16x4_t high_halves(float32x4_t x) { return vshrn_n_u32(bits_of(x), 16); }
inline F f_store_bf16(F x, uint16_t* p) {
    const F nearest = f_round_bf16(x);
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, high_halves(nearest.quarter[i]));
    return nearest;
}
inline void store_powers(F rough_bits, uint16_t* p) {
    for (int half = 0; half < 2; ++half) {
        const auto words = [&](int i) { return vqmovun_s32(vcvtnq_s32_f32(rough_bits.quarter[2 * half + i])); };
        const uint16x8_t bits = vcombine_u16(words(0), words(1));
        const uint16x8_t part = vandq_u16(vshrq_n_u16(bits, 1), vdupq_n_u16(63));
        const uint16x8_t parabola = vmulq_u16(part, vsubq_u16(vdupq_n_u16(64), part));
        const uint16x8_t cubic =
            vaddq_u16(vmulq_n_u16(parabola, treadle::kExcessFactor), vshrq_n_u16(vmulq_u16(parabola, part), 3));
        const uint16x8_t excess = vshrq_n_u16(vaddq_u16(cubic, vdupq_n_u16(2048)), 12);
        const uint16x8_t counts = vcgeq_u16(bits, vdupq_n_u16(treadle::kLeastPowerBits));
        vst1q_u16(p + 8 * half, vandq_u16(vsubq_u16(bits, excess), counts));
    }
}
inline void f_store_bf16_half_pairs(F x, int half, uint16_t* p) {
    for (int i = 0; i < 4; ++i) {
        uint16_t* pairs = p + 8 * i + half;
        const uint16x4_t words = high_halves(x.quarter[i]);
        vst1_lane_u16(pairs, words, 0);
        vst1_lane_u16(pairs + 2, words, 1);
        vst1_lane_u16(pairs + 4, words, 2);
        vst1_lane_u16(pairs + 6, words, 3);
    }
}
inline F f_truncate_bf16(F x) {
    return f_quarters([&](int i) { return floats_of(vandq_u32(bits_of(x.quarter[i]), vdupq_n_u32(kHighHalf))); });
}
inline void store_terms(F x, uint16_t* p) {
    for (int i = 0; i < 4; ++i) {
        const float32x4_t lanes = x.quarter[i];
        const float32x4_t swapped =
            vcombine_f32(vget_low_f32(vuzp1q_f32(lanes, lanes)), vget_low_f32(vuzp2q_f32(lanes, lanes)));
        vst1_u16(p + 4 * i, high_halves(swapped));
    }
}
inline void store_nearest_terms(F x, uint16_t* p) { store_terms(f_round_bf16(x), p); }
inline void store_terms_twice(F x, uint16_t* p) {
    for (int i = 0; i < 4; ++i) {
        const uint32x4_t high = bits_of(x.quarter[i]);
        vst1q_u16(p + 8 * i, vreinterpretq_u16_u32(vorrq_u32(high, vshrq_n_u32(high, 16))));
    }
}

// Without their signs, numbers are ordered as their bits are.
inline uint32x4_t magnitude(float32x4_t x) { return vandq_u32(bits_of(x), vdupq_n_u32(0x7fffffff)); }
inline F f_max_magnitude(F a, F b) {
    return f_quarters(
        [&](int i) { return floats_of(vmaxq_u32(magnitude(a.quarter[i]), magnitude(b.quarter[i]))); });
}
template <int kApart>
inline F f_butterfly(F x) {
    if (kApart >= 4) {
        constexpr int kQuarters = kApart / 4;
        return f_quarters([&](int i) {
            return (i & kQuarters) == 0 ? vaddq_f32(x.quarter[i], x.quarter[(i + kQuarters) & 3])
                                        : vsubq_f32(x.quarter[(i - kQuarters) & 3], x.quarter[i]);
        });
    }
    static const uint32_t kSecond[2][4] = {{0, ~0u, 0, ~0u}, {0, 0, ~0u, ~0u}};
    const uint32x4_t is_second = vld1q_u32(kSecond[kApart == 1 ? 0 : 1]);
    return f_quarters([&](int i) {
        const float32x4_t lanes = x.quarter[i];
        const float32x4_t other = kApart == 1 ? vrev64q_f32(lanes) : vextq_f32(lanes, lanes, 2);
        return choose(is_second, vsubq_f32(other, lanes), vaddq_f32(lanes, other));
    });
}

inline I i_set(int32_t x) {
    return quarters<I>([=](int) { return vdupq_n_s32(x); });
}
inline I i_add(I a, I b) {
    return quarters<I>([&](int i) { return vaddq_s32(a.quarter[i], b.quarter[i]); });
}
inline F f_from_i(I x) {
    return f_quarters([&](int i) { return vcvtq_f32_s32(x.quarter[i]); });
}
inline uint32_t max_magnitude_bits(F a, F b) {
    const F most = f_max_magnitude(a, b);
    const uint32x4_t low = vmaxq_u32(bits_of(most.quarter[0]), bits_of(most.quarter[1]));
    return vmaxvq_u32(vmaxq_u32(low, vmaxq_u32(bits_of(most.quarter[2]), bits_of(most.quarter[3]))));
}
inline I i_round(F x) {
    return quarters<I>([&](int i) { return vcvtnq_s32_f32(x.quarter[i]); });
}
inline int32_t i_sum(I x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.quarter[0], x.quarter[1]), vaddq_s32(x.quarter[2], x.quarter[3])));
}
inline void store_codes(I x, int8_t* p) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x.quarter[0]), vmovn_s32(x.quarter[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(x.quarter[2]), vmovn_s32(x.quarter[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline B b_load(const uint8_t* p) {
    return quarters<B>([=](int i) { return vld1q_u8(p + 16 * i); });
}
inline B b_low_nibbles(B x) {
    return quarters<B>([&](int i) { return vandq_u8(x.quarter[i], vdupq_n_u8(15)); });
}
inline B b_high_nibbles(B x) {
    return quarters<B>([&](int i) { return vshrq_n_u8(x.quarter[i], 4); });
}
inline B b_shift_nibbles(B x) { return b_high_nibbles(x); }
inline B b_add_fifth_bits(B x, const uint8_t* mask) {
    static const uint8_t kBit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bit = vld1q_u8(kBit);
    return quarters<B>([&](int i) {
        const uint8x16_t bytes = vcombine_u8(vdup_n_u8(mask[2 * i]), vdup_n_u8(mask[2 * i + 1]));
        return vaddq_u8(x.quarter[i], vandq_u8(vtstq_u8(bytes, bit), vdupq_n_u8(16)));
    });
}
template <int kQuad>
inline B b_add_bit_pair(B x, B pairs) {
    constexpr int kLeft = 4 - 2 * kQuad;
    return quarters<B>([&](int i) {
        const uint8x16_t moved = vshlq_u8(pairs.quarter[i], vdupq_n_s8(kLeft));  // to the right if negative
        return vorrq_u8(x.quarter[i], vandq_u8(moved, vdupq_n_u8(0x30)));
    });
}
template <int kBits, int kOffset>
struct CodeNumbers {
    template <int kByte>
    F of(B codes) const {
        return f_quarters([&](int i) {
            const uint32x4_t quads = vreinterpretq_u32_u8(codes.quarter[i]);
            const uint32x4_t moved = kByte == 0 ? quads : vshrq_n_u32(quads, kByte == 0 ? 1 : 8 * kByte);
            const int32x4_t code = vreinterpretq_s32_u32(vandq_u32(moved, vdupq_n_u32(255)));
            return vcvtq_f32_s32(vsubq_s32(code, vdupq_n_s32(kOffset)));
        });
    }
};

// Four numbers, in each lane.
inline int8x16_t quad_in_lanes(const int8_t* x) {
    int32_t quad;
    __builtin_memcpy(&quad, x, sizeof quad);
    return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
template <bool kIsWide>
inline I i_dot(I sum, B codes, const int8_t* x) {
    const int8x16_t numbers = quad_in_lanes(x);
    return quarters<I>([&](int i) { return vusdotq_s32(sum.quarter[i], codes.quarter[i], numbers); });
}
#else
// Both sides are signed here: codes that may exceed 127 lose 128, and the numbers' sum, 128 times, makes up for it.
template <bool kIsWide>
inline I i_dot(I sum, B codes, const int8_t* x) {
    const int8x16_t numbers = quad_in_lanes(x);
    if (!kIsWide) {
        return quarters<I>([&](int i) {
            return vdotq_s32(sum.quarter[i], vreinterpretq_s8_u8(codes.quarter[i]), numbers);
        });
    }
    const int32x4_t half = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(64), numbers);
    const int32x4_t missing = vaddq_s32(half, half);
    return quarters<I>([&](int i) {
        const int8x16_t signed_codes = vreinterpretq_s8_u8(veorq_u8(codes.quarter[i], vdupq_n_u8(128)));
        return vdotq_s32(vaddq_s32(sum.quarter[i], missing), signed_codes, numbers);
    });
}
#endif

}  // namespace

#include "vec_words.inl"
