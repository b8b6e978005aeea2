// Operations on one row of numbers, over the vocabulary of vec_*.h. Every sum runs in an order fixed by the row's
// length.
#include "formats.h"
#include "kernels.h"
#include "rotation.h"

namespace {

using treadle::kRowBlock;
using treadle::kTileInputs;
using treadle::QuantizedRow;
using treadle::RunsOfRow;

inline int rest(int64_t n, int64_t i) { return static_cast<int>(n - i < 16 ? n - i : 16); }

// Added to a small number, leaves the nearest integer at the bottom of the sum's bits.
constexpr float kShifter = 0x1.8p23f;

// exp(x) of x in [-87, most], and of the nearer end outside, with an error below 1 ulp; NaN stays. x = n ln 2 + r, where n
// is an integer and ln 2 is taken in two parts (Cody and Waite 1980); exp(r) is a minimax polynomial.
inline F f_exp_within(F x, float most) {
    const F bounded = f_at_least(f_at_most(x, most), -87.0f);
    const F shifter = f_set(kShifter);
    const F shifted = f_fma(bounded, f_set(1.44269504088896341f), shifter);
    const F n = f_sub(shifted, shifter);
    F r = f_fma(n, f_set(-0.693359375f), bounded);
    r = f_fma(n, f_set(2.12194440e-4f), r);
    F p = f_set(1.3886650974e-3f);
    p = f_fma(p, r, f_set(8.3733442605e-3f));
    p = f_fma(p, r, f_set(4.1667596235e-2f));
    p = f_fma(p, r, f_set(1.6666472908e-1f));
    p = f_fma(p, r, f_set(4.9999993464e-1f));
    p = f_fma(p, r, f_set(1.0f));
    p = f_fma(p, r, f_set(1.0f));
    return f_times_power(p, shifted);
}

// exp(x) with an error below 1 ulp; 0 below -87, that of 88 above it.
inline F f_exp(F x) { return f_zero_below(f_exp_within(x, 88.0f), x, -87.0f); }

// -1 / x for x between -2^125 and -2^-125, with an error below 2 ulp, in half a division's time. Bits are nearly a
// logarithm, so those of the inverse are nearly a constant less those of x, within an eighth; each of two of Halley's
// steps cubes that error.
inline F f_negated_inverse(F x) {
    F inverse = f_from_bits_less(0xfef311c7u, x);
    for (int step = 0; step < 2; ++step) {
        const F missing = f_fma(x, inverse, f_set(1.0f));
        inverse = f_fma(f_fma(missing, missing, missing), inverse, inverse);
    }
    return inverse;
}

// How numbers of a largest magnitude, given as bits, become whole numbers up to `most`: x * inverse, to nearest even,
// each of which stands for `scale`. Numbers too small to divide by are zero; those of which one is not finite get the
// scale NaN, so that it shows in every output.
struct CodeScale {
    float scale;
    float inverse;
    bool has_codes;  // else all of them are zero

    explicit CodeScale(uint32_t largest_bits, float most = 127.0f) {
        const float largest = treadle::f32_from_bits(largest_bits);
        const bool is_finite = largest_bits < 0x7f800000u;
        has_codes = is_finite && largest >= 1e-30f;
        scale = !is_finite ? __builtin_nanf("") : has_codes ? largest / most : 0.0f;
        inverse = has_codes ? most / largest : 0.0f;
    }
    F scaled(F x) const { return has_codes ? f_mul(x, f_set(inverse)) : f_set(0.0f); }
    I codes(F x) const { return i_round(scaled(x)); }
};

void quantize_row(const float* x, int64_t k, const QuantizedRow& out) {
    for (int64_t g = 0; g < k / 32; ++g) {
        const F a = f_load(x + 32 * g), b = f_load(x + 32 * g + 16);
        const CodeScale of_group(max_magnitude_bits(a, b));
        const I codes_a = of_group.codes(a), codes_b = of_group.codes(b);
        store_codes(codes_a, out.codes + 512 * g);
        store_codes(codes_b, out.codes + 512 * g + 16);
        const int32_t sum_a = i_sum(codes_a), sum_b = i_sum(codes_b);
        out.scales[16 * g] = of_group.scale;
        out.sums[16 * g] = of_group.scale * static_cast<float>(sum_a + sum_b);
        out.code_sums[32 * g] = sum_a;
        out.code_sums[32 * g + 16] = sum_b;
    }
}

// Numbers whose products with terms or weights might become denormal count as zero.
inline F f_zero_if_tiny(F x, float least = 0x1p-90f) {
    return f_zero_below(x, f_max(x, f_sub(f_set(0.0f), x)), least);
}

void split_row(const float* x, int64_t k, uint16_t* out) {
    const int64_t groups = k / 32;
    uint16_t* out_of_sums = out + groups * treadle::kTerms * treadle::kTermWords;
    float sums[16] = {};
    for (int64_t g = 0; g < groups; ++g) {
        F a = f_zero_if_tiny(f_load(x + 32 * g)), b = f_zero_if_tiny(f_load(x + 32 * g + 16)), kept = f_set(0.0f);
        for (int term = 0; term < treadle::kTerms; ++term, out += treadle::kTermWords) {
            const F nearest_a = f_round_bf16(a), nearest_b = f_round_bf16(b);
            store_terms(nearest_a, out);
            store_terms(nearest_b, out + 16);
            kept = f_add(kept, f_add(nearest_a, nearest_b));
            a = f_sub(a, nearest_a);
            b = f_sub(b, nearest_b);
        }
        sums[g % 16] = f_sum(kept);
        if (g % 16 != 15 && g != groups - 1) continue;
        F left = f_zero_if_tiny(f_load_first(sums, static_cast<int>(g % 16 + 1)));
        for (int term = 0; term < 2; ++term, out_of_sums += treadle::kTermWords) {
            const F nearest = f_round_bf16(left);
            store_terms_twice(nearest, out_of_sums);
            left = f_sub(left, nearest);
        }
    }
}

// The nearest bfloat16s of sixteen numbers, half a group.
inline void store_rounded(F x, uint16_t* out) { store_nearest_terms(f_zero_if_tiny(x, 0x1p-60f), out); }

void round_row(const float* x, int64_t k, uint16_t* out) {
    for (int64_t g = 0; g < k / 32; ++g, out += treadle::kTermWords) {
        store_rounded(f_load(x + 32 * g), out);
        store_rounded(f_load(x + 32 * g + 16), out + 16);
    }
}

// Sums and differences of lanes 1, 2, 4 and 8 apart, as rotate() of rotation.h.
inline F f_rotate_lanes(F x) { return f_butterfly<8>(f_butterfly<4>(f_butterfly<2>(f_butterfly<1>(x)))); }

// Some passes of a rotation in one: kVectors vectors, `apart` numbers from each to the next, meet in registers, after
// the lanes of each where those are still to be rotated. Returns the largest magnitudes, if asked for.
template <int kVectors, bool kHasLanes>
F rotate_vectors(const RunsOfRow& x, float* out, int64_t k, int64_t apart, bool is_last) {
    F most = f_set(0.0f);
    for (int64_t begin = 0; begin < k; begin += kVectors * apart) {
        for (int64_t at = begin; at < begin + apart; at += 16) {
            F vectors[kVectors];
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) {
                vectors[i] = f_load(x.at(at + i * apart));
                if (kHasLanes) vectors[i] = f_rotate_lanes(vectors[i]);
            }
#pragma GCC unroll 3
            for (int distance = 1; distance < kVectors; distance *= 2) {
#pragma GCC unroll 8
                for (int i = 0; i < kVectors; ++i) {
                    if ((i & distance) != 0) continue;
                    const F a = vectors[i], b = vectors[i + distance];
                    vectors[i] = f_add(a, b);
                    vectors[i + distance] = f_sub(a, b);
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) f_store(out + at + i * apart, vectors[i]);
            if (!is_last) continue;
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) most = f_max_magnitude(most, vectors[i]);
        }
    }
    return most;
}

// Rotates a row of a multiple of 32 numbers; returns the largest magnitudes.
inline F rotate_all(const RunsOfRow& x, int64_t k, float* out) {
    const int64_t length = treadle::rotation_length(k);
    if (length == 32) return rotate_vectors<2, true>(x, out, k, 16, true);
    F most = rotate_vectors<4, true>(x, out, k, 16, length == 64);
    for (int64_t apart = 64; apart < length;) {
        const int64_t left = length / apart;
        if (left >= 8) most = rotate_vectors<8, false>({out}, out, k, apart, left == 8);
        if (left == 4) most = rotate_vectors<4, false>({out}, out, k, apart, true);
        if (left == 2) most = rotate_vectors<2, false>({out}, out, k, apart, true);
        apart *= left >= 8 ? 8 : left;
    }
    return most;
}

void rotate_row(const RunsOfRow& x, int64_t k, float* scratch, const treadle::RotatedRow& out) {
    const F most = rotate_all(x, k, scratch);
    const CodeScale of_row(max_magnitude_bits(most, most));
    *out.scale = of_row.scale;
    I sum = i_set(0);
    for (int64_t i = 0; i < treadle::padded_inputs(k); i += 16) {
        const I codes = i < k ? of_row.codes(f_load(scratch + i)) : i_set(0);
        store_codes(codes, out.codes + i / kTileInputs * (kRowBlock * kTileInputs) + i % kTileInputs);
        sum = i_add(sum, codes);
    }
    *out.start = -treadle::kRotatedOffset * i_sum(sum);
}

void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, float* y) {
    // Four sums, of every fourth vector, or each addition would wait for the one before.
    F squares[4] = {f_set(0.0f), f_set(0.0f), f_set(0.0f), f_set(0.0f)};
    int64_t done = 0;
    for (; done + 64 <= n; done += 64) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const F a = f_load(x + done + 16 * j);
            squares[j] = f_fma(a, a, squares[j]);
        }
    }
    for (; done < n; done += 16) {
        const F a = f_load_first(x + done, rest(n, done));
        squares[0] = f_fma(a, a, squares[0]);
    }
    const F all = f_add(f_add(squares[0], squares[1]), f_add(squares[2], squares[3]));
    const F factor = f_set(1.0f / __builtin_sqrtf(f_sum(all) / static_cast<float>(n) + eps));
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) f_store(y + i, f_mul(f_mul(f_load(x + i), factor), f_load(weight + i)));
    if (i < n) {
        const int left = rest(n, i);
        f_store_first(y + i, f_mul(f_mul(f_load_first(x + i, left), factor), f_load_first(weight + i, left)), left);
    }
}

inline F f_swiglu(F gate, F up) {
    // Where an exponential is out of range, it makes no difference to a sum with 1, or the quotient is 0 or nearly so.
    const F negated = f_sub(f_set(-1.0f), f_exp_within(f_sub(f_set(0.0f), gate), 86.0f));
    return f_mul(f_mul(gate, f_negated_inverse(negated)), up);
}

void swiglu_row(const float* gate, const float* up, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) f_store(y + i, f_swiglu(f_load(gate + i), f_load(up + i)));
    if (i < n) {
        const int left = rest(n, i);
        f_store_first(y + i, f_swiglu(f_load_first(gate + i, left), f_load_first(up + i, left)), left);
    }
}

// Pairs number i of the first half with number i of the second, as Hugging Face does.
void rotate_head(float* head, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const F c = f_load(cos + i), s = f_load(sin + i), a = f_load(head + i), b = f_load(head + half + i);
        f_store(head + i, f_sub(f_mul(a, c), f_mul(b, s)));
        f_store(head + half + i, f_add(f_mul(b, c), f_mul(a, s)));
    }
    if (i < half) {
        const int left = rest(half, i);
        const F c = f_load_first(cos + i, left), s = f_load_first(sin + i, left);
        const F a = f_load_first(head + i, left), b = f_load_first(head + half + i, left);
        f_store_first(head + i, f_sub(f_mul(a, c), f_mul(b, s)), left);
        f_store_first(head + half + i, f_add(f_mul(b, c), f_mul(a, s)), left);
    }
}

int64_t argmax(const float* x, int64_t n, bool* is_finite) {
    // Sixteen running maxima first; the index is looked up once the value is known.
    F largest = f_set(-__builtin_inff()), spoiled = f_set(0.0f);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const F a = f_load(x + i);
        largest = f_max(a, largest);
        spoiled = f_add(spoiled, f_sub(a, a));  // NaN where a is NaN, or infinite
    }
    float value = f_max_lane(largest);
    for (; i < n; ++i) value = x[i] > value ? x[i] : value;
    bool has_nan = false;
    if (f_sum(spoiled) != 0.0f || n % 16 != 0) {
        for (int64_t j = 0; j < n; ++j) has_nan |= x[j] != x[j];
    }
    *is_finite = !has_nan && value - value == 0.0f;
    for (int64_t j = 0; j < n; ++j) {
        if (x[j] == value) return j;
    }
    return 0;
}

void softmax_weights(const float* x, int64_t n, float x_max, float temperature, float min_weight, float* y) {
    const F top = f_set(x_max), divisor = f_set(temperature), least = f_set(min_weight);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        f_store(y + i, f_zero_where_below(f_exp(f_div(f_sub(f_load(x + i), top), divisor)), least));
    }
    if (i < n) {
        const int left = rest(n, i);
        const F a = f_exp(f_div(f_sub(f_load_first(x + i, left), top), divisor));
        f_store_first(y + i, f_zero_where_below(a, least), left);
    }
}

}  // namespace
