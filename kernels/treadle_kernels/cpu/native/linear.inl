// Linear layers over the vocabulary of vec_*.h.
//
// Quantised: within a group of 32 inputs the products of codes are summed exactly in int32; over groups, in the order
// of k,  sum = fma(code sum, activation scale * weight scale, sum), then where the format has minima sum = fma(minimum,
// activation sum, sum). Floating: sum = fma(w, x, sum) in the order of k. So an output's bits depend on its own row and
// column alone, whatever the blocking.
//
// Quantised, with activations as bfloat16 terms: for each term in turn, the products of a group's even and of its odd
// words are summed apart, each in order with fused additions, and (even + odd) is added to the group's product; over
// groups, sum = fma(product, weight scale, sum). Minima are groups of their own: a sum group meets the minima of 16
// groups, each as two bfloat16 terms (the upper half of its bits, and that of what is left), with a scale of 1. This is
// what the AMX instruction TDPBF16PS computes for numbers that cannot become denormal (Intel Architecture Instruction
// Set Extensions: fused, nearest even, denormals as zero).
#include "formats.h"
#include "kernels.h"

namespace {

using treadle::Activations;
using treadle::kColumns;
using treadle::kGroup;
using treadle::kRowBlock;
using treadle::LinearCall;
using treadle::TileLayout;

constexpr int kPrefetchBytes = 4096;  // ahead of the weights in use

// Quantised formats at compile time; the figures are those of formats.h.
template <int kBits, bool kHasHalves, bool kHasMinimum, int kScaleBytes, int kScales, int kOffset>
struct Format {
    static constexpr int bits = kBits;
    static constexpr bool has_minimum = kHasMinimum;
    static constexpr int scales_per_group = kScales;
    static constexpr int offset = kOffset;
    static constexpr int quant_bytes = kBits == 8 ? 512 : kBits == 6 ? 384 : kBits == 5 ? 320 : 256;
    static constexpr int vector_bytes = kScaleBytes * kColumns;

    static F load(const uint8_t* p) {
        if (kHasHalves) return f_load_f16(reinterpret_cast<const uint16_t*>(p));
        return f_load(reinterpret_cast<const float*>(p));
    }

    // The same for CodeNumbers, which may leave bits above the code in place.
    static inline __attribute__((always_inline)) void unpack_numbers(const uint8_t* p, B codes[8]) {
        if (kBits != 4 || !kIgnoresHighBits) return unpack(p, codes);
        for (int i = 0; i < 4; ++i) {
            codes[i] = b_load(p + 64 * i);
            codes[i + 4] = b_shift_nibbles(codes[i]);
        }
    }

    // The eight quads of a group: codes[i] byte 4 c + b is input 4 i + b of column c.
    static inline __attribute__((always_inline)) void unpack(const uint8_t* p, B codes[8]) {
        if (kBits == 8) {
            for (int i = 0; i < 8; ++i) codes[i] = b_load(p + 64 * i);
            return;
        }
        for (int i = 0; i < 4; ++i) {
            const B pair = b_load(p + 64 * i);
            codes[i] = b_low_nibbles(pair);
            codes[i + 4] = b_high_nibbles(pair);
        }
        if (kBits == 5) {
            for (int i = 0; i < 8; ++i) codes[i] = b_add_fifth_bits(codes[i], p + 256 + 8 * i);
        }
        if (kBits == 6) {
            const B low = b_load(p + 256), high = b_load(p + 320);
            codes[0] = b_add_bit_pair<0>(codes[0], low);
            codes[1] = b_add_bit_pair<1>(codes[1], low);
            codes[2] = b_add_bit_pair<2>(codes[2], low);
            codes[3] = b_add_bit_pair<3>(codes[3], low);
            codes[4] = b_add_bit_pair<0>(codes[4], high);
            codes[5] = b_add_bit_pair<1>(codes[5], high);
            codes[6] = b_add_bit_pair<2>(codes[6], high);
            codes[7] = b_add_bit_pair<3>(codes[7], high);
        }
    }
};

using FormatQ4_0 = Format<4, true, false, 2, 1, 8>;
using FormatQ4_1 = Format<4, true, true, 2, 1, 0>;
using FormatQ5_0 = Format<5, true, false, 2, 1, 16>;
using FormatQ5_1 = Format<5, true, true, 2, 1, 0>;
using FormatQ8_0 = Format<8, true, false, 2, 1, 128>;
using FormatQ4_K = Format<4, false, true, 4, 1, 0>;
using FormatQ5_K = Format<5, false, true, 4, 1, 0>;
using FormatQ6_K = Format<6, false, false, 4, 2, 32>;

// Calls body(Format{}) for a quantised format's number.
template <class Body>
inline void with_format(int32_t format, const Body& body) {
    switch (format) {
        case TREADLE_Q4_0:
            return body(FormatQ4_0{});
        case TREADLE_Q4_1:
            return body(FormatQ4_1{});
        case TREADLE_Q5_0:
            return body(FormatQ5_0{});
        case TREADLE_Q5_1:
            return body(FormatQ5_1{});
        case TREADLE_Q8_0:
            return body(FormatQ8_0{});
        case TREADLE_Q4_K:
            return body(FormatQ4_K{});
        case TREADLE_Q5_K:
            return body(FormatQ5_K{});
        case TREADLE_Q6_K:
            return body(FormatQ6_K{});
        default:
            return;
    }
}

// Writes sixteen outputs of a row, fewer in a matrix's last tile.
inline void store_outputs(const LinearCall& call, int64_t row, int64_t tile, F sums) {
    const int64_t column = tile * kColumns;
    const int count = rest(call.weights->n, column);
    float* y = call.y + row * call.y_stride + column;
    if (call.weights->bias != nullptr) sums = f_add(sums, f_load_first(call.weights->bias + column, count));
    if (count == kColumns) {
        f_store(y, call.is_added ? f_add(f_load(y), sums) : sums);
    } else {
        f_store_first(y, call.is_added ? f_add(f_load_first(y, count), sums) : sums, count);
    }
}

// Where a tile's planes lie and what its groups cost.
struct Tile {
    const uint8_t* quants;
    const uint8_t* scales;
    const uint8_t* minima;
};

inline Tile tile_at(const LinearCall& call, const TileLayout& layout, int64_t tile) {
    const uint8_t* start = static_cast<const uint8_t*>(call.weights->data) + tile * layout.tile_bytes;
    return {start, start + layout.scales, start + layout.minima};
}

// Adds a group to the sums of kRows rows that lie in one row block; `x` is at the first of them, in the group.
template <class Fmt, int kRows>
inline __attribute__((always_inline)) void add_group(const Activations& x, int64_t g, const Tile& tile, F sums[kRows]) {
    constexpr int kScales = Fmt::scales_per_group;
    constexpr int kQuads = 8 / kScales;
    B codes[8];
    Fmt::unpack(tile.quants + g * Fmt::quant_bytes, codes);
    for (int half = 0; half < kScales; ++half) {
        const F scale = Fmt::load(tile.scales + (g * kScales + half) * Fmt::vector_bytes);
#pragma GCC unroll 8
        for (int j = 0; j < kRows; ++j) {
            int32_t start = 0;
            if (Fmt::offset != 0) {
                start =
                    -Fmt::offset * (kScales == 2 ? x.code_sums[16 * half + j] : x.code_sums[j] + x.code_sums[16 + j]);
            }
            I dot = i_set(start);
#pragma GCC unroll 8
            for (int i = 0; i < kQuads; ++i) {
                const int quad = half * kQuads + i;
                dot = i_dot<Fmt::bits == 8>(dot, codes[quad], x.codes + kGroup * j + 4 * quad);
            }
            sums[j] = f_fma(f_from_i(dot), f_mul(scale, f_set(x.scales[j])), sums[j]);
        }
    }
    if (Fmt::has_minimum) {
        const F minimum = Fmt::load(tile.minima + g * Fmt::vector_bytes);
#pragma GCC unroll 8
        for (int j = 0; j < kRows; ++j) sums[j] = f_fma(minimum, f_set(x.sums[j]), sums[j]);
    }
}

// The arrays from a row and group on; the row's block decides the rest.
inline Activations from_row(const Activations& x, int64_t row, int64_t groups) {
    const int64_t block = row / kRowBlock * groups, lane = row % kRowBlock;
    Activations at;
    at.codes = x.codes + (block * kRowBlock + lane) * kGroup;
    at.scales = x.scales + block * kRowBlock + lane;
    at.sums = x.sums + block * kRowBlock + lane;
    at.code_sums = x.code_sums + 2 * block * kRowBlock + lane;
    return at;
}

inline void to_next_group(Activations& x) {
    x.codes += kRowBlock * kGroup;
    x.scales += kRowBlock;
    x.sums += kRowBlock;
    x.code_sums += 2 * kRowBlock;
}

template <class Fmt, int kRows>
void quantized_rows(const LinearCall& call, const Tile& tile, int64_t tile_index, int64_t row) {
    const int64_t groups = call.weights->k / kGroup;
    F sums[kRows];
    for (F& sum : sums) sum = f_set(0.0f);
    Activations x = from_row(*call.x, row, groups);
    for (int64_t g = 0; g < groups; ++g) {
        if (kRows <= 4) {  // with few rows, memory is what the loop waits for
            // The planes of a tile follow each other, and so do tiles: one stream, of so many bytes a group.
            constexpr int kStreamBytes =
                Fmt::quant_bytes + (Fmt::scales_per_group + (Fmt::has_minimum ? 1 : 0)) * Fmt::vector_bytes;
            for (int i = 0; i < kStreamBytes; i += 64) {
                __builtin_prefetch(tile.quants + g * kStreamBytes + kPrefetchBytes + i);
            }
        }
        add_group<Fmt, kRows>(x, g, tile, sums);
        to_next_group(x);
    }
    for (int j = 0; j < kRows; ++j) store_outputs(call, row + j, tile_index, sums[j]);
}

template <class Fmt>
void quantized_linear(const LinearCall& call) {
    const TileLayout layout = treadle::tile_layout(*treadle::format_info(call.weights->format), call.weights->k);
    for (int64_t t = call.tile_begin; t < call.tile_end; ++t) {
        const Tile tile = tile_at(call, layout, t);
        int64_t row = call.row_begin;
        for (; row + kMaxRowsAtOnce <= call.row_end; row += kMaxRowsAtOnce) {
            quantized_rows<Fmt, kMaxRowsAtOnce>(call, tile, t, row);
        }
        if (kMaxRowsAtOnce > 4 && row + 4 <= call.row_end) {
            quantized_rows<Fmt, 4>(call, tile, t, row);
            row += 4;
        }
        if (kMaxRowsAtOnce > 2 && row + 2 <= call.row_end) {
            quantized_rows<Fmt, 2>(call, tile, t, row);
            row += 2;
        }
        for (; row < call.row_end; ++row) quantized_rows<Fmt, 1>(call, tile, t, row);
    }
}

// Terms of a row in group 0.
inline const uint16_t* row_terms(const Activations& x, int64_t row, int64_t k) {
    return x.terms + row / kRowBlock * treadle::term_block_words(k, x.num_terms) + row % kRowBlock * kGroup;
}

// Terms of a row one after the other, of groups and then of sum groups.
inline int64_t terms_of_row(int64_t k, int num_terms) {
    return treadle::term_block_words(k, num_terms) / kRowBlock;
}

// The same as float32, so that a product can take them from memory.
inline void widen_terms(const Activations& x, int64_t row, int64_t k, float* out) {
    const uint16_t* terms = row_terms(x, row, k);
    for (int64_t i = 0; i < terms_of_row(k, x.num_terms); i += kGroup, terms += treadle::kTermWords) {
        f_store(out + i, f_load_bf16(terms));
        f_store(out + i + 16, f_load_bf16(terms + 16));
    }
}

// Sums of products of even words and of odd words, of some rows.
template <int kRows>
struct PairSums {
    F even[kRows], odd[kRows];

    PairSums() {
        for (int j = 0; j < kRows; ++j) even[j] = odd[j] = f_set(0.0f);
    }
    // Adds two words of a term; rows lie `stride` apart.
    inline __attribute__((always_inline)) void add(const float* words, int64_t stride, F even_weights, F odd_weights) {
#pragma GCC unroll 4
        for (int j = 0; j < kRows; ++j) {
            even[j] = f_fma(f_set(words[stride * j]), even_weights, even[j]);
            odd[j] = f_fma(f_set(words[stride * j + 1]), odd_weights, odd[j]);
        }
    }
    void add_to(F products[kRows]) const {
        for (int j = 0; j < kRows; ++j) products[j] = f_add(products[j], f_add(even[j], odd[j]));
    }
};

// Some rows and one column tile, with activations as kTerms terms.
template <class Fmt, int kTerms, int kRows>
class SplitRows {
 public:
    // x: widened terms of the rows, terms_of_row(k, kTerms) apart.
    SplitRows(const LinearCall& call, const Tile& tile, const float* x)
        : groups_(call.weights->k / kGroup), stride_(terms_of_row(call.weights->k, kTerms)), tile_(tile), x_(x) {
        for (F& sum : sums_) sum = f_set(0.0f);
        for (int64_t g = 0; g < groups_; ++g) add_group(g);
        for (int64_t g = 0; Fmt::has_minimum && g < groups_; g += 16) add_minima(g);
    }
    F sum(int j) const { return sums_[j]; }

 private:
    void add_group(int64_t g) {
        constexpr int kHalves = Fmt::scales_per_group, kQuads = 8 / kHalves;
        constexpr int kStreamBytes = Fmt::quant_bytes + (kHalves + (Fmt::has_minimum ? 1 : 0)) * Fmt::vector_bytes;
        // The planes of a tile follow each other, and so do tiles: one stream, of so many bytes a group.
        for (int i = 0; i < kStreamBytes; i += 64) {
            __builtin_prefetch(tile_.quants + g * kStreamBytes + kPrefetchBytes + i);
        }
        B codes[8];
        Fmt::unpack_numbers(tile_.quants + g * Fmt::quant_bytes, codes);
        const float* x = x_ + g * kTerms * kGroup;
        for (int half = 0; half < kHalves; ++half) {
            PairSums<kRows> pairs[kTerms];
#pragma GCC unroll kQuadsAtOnce
            for (int i = 0; i < kQuads; ++i) {
                const int quad = half * kQuads + i;
                const F first = numbers_.template of<0>(codes[quad]), second = numbers_.template of<1>(codes[quad]);
                const F third = numbers_.template of<2>(codes[quad]), fourth = numbers_.template of<3>(codes[quad]);
#pragma GCC unroll 2
                for (int term = 0; term < kTerms; ++term) {
                    pairs[term].add(x + term * kGroup + 4 * quad, stride_, first, third);
                    pairs[term].add(x + term * kGroup + 4 * quad + 2, stride_, second, fourth);
                }
            }
            F products[kRows];
            for (F& product : products) product = f_set(0.0f);
            for (const PairSums<kRows>& of_term : pairs) of_term.add_to(products);
            const F scale = Fmt::load(tile_.scales + (g * kHalves + half) * Fmt::vector_bytes);
            for (int j = 0; j < kRows; ++j) sums_[j] = f_fma(products[j], scale, sums_[j]);
        }
    }

    // Of up to 16 groups from g on.
    void add_minima(int64_t g) {
        const float* x = x_ + (groups_ * kTerms + g / 16 * 2) * kGroup;
        PairSums<kRows> pairs[2];
        for (int i = 0; i < rest(groups_, g); ++i) {
            const F minimum = Fmt::load(tile_.minima + (g + i) * Fmt::vector_bytes), high = f_truncate_bf16(minimum);
            const F low = f_truncate_bf16(f_sub(minimum, high));
            for (int term = 0; term < 2; ++term) pairs[term].add(x + term * kGroup + 2 * i, stride_, high, low);
        }
        F products[kRows];
        for (F& product : products) product = f_set(0.0f);
        for (const PairSums<kRows>& of_term : pairs) of_term.add_to(products);
        for (int j = 0; j < kRows; ++j) sums_[j] = f_add(products[j], sums_[j]);
    }

    const CodeNumbers<Fmt::bits, Fmt::offset> numbers_{};
    const int64_t groups_;
    const int64_t stride_;
    const Tile tile_;
    const float* x_;
    F sums_[kRows];
};

template <class Fmt, int kTerms, int kRows>
void split_rows(const LinearCall& call, int64_t row) {
    const TileLayout layout = treadle::tile_layout(*treadle::format_info(call.weights->format), call.weights->k);
    auto* x = reinterpret_cast<float*>(call.scratch);
    for (int j = 0; j < kRows; ++j) {
        widen_terms(*call.x, row + j, call.weights->k, x + j * terms_of_row(call.weights->k, kTerms));
    }
    for (int64_t t = call.tile_begin; t < call.tile_end; ++t) {
        const SplitRows<Fmt, kTerms, kRows> product(call, tile_at(call, layout, t), x);
        for (int j = 0; j < kRows; ++j) store_outputs(call, row + j, t, product.sum(j));
    }
}

template <class Fmt, int kTerms>
void split_linear(const LinearCall& call) {
    int64_t row = call.row_begin;
    if constexpr (kSplitRowsAtOnce == 2) {
        for (; row + 2 <= call.row_end; row += 2) split_rows<Fmt, kTerms, 2>(call, row);
    }
    for (; row < call.row_end; ++row) split_rows<Fmt, kTerms, 1>(call, row);
}

struct NumbersF32 {
    static F load(const uint8_t* p) { return f_load(reinterpret_cast<const float*>(p)); }
    static constexpr int bytes = 4;
};
struct NumbersF16 {
    static F load(const uint8_t* p) { return f_load_f16(reinterpret_cast<const uint16_t*>(p)); }
    static constexpr int bytes = 2;
};
struct NumbersBF16 {
    static F load(const uint8_t* p) { return f_load_bf16(reinterpret_cast<const uint16_t*>(p)); }
    static constexpr int bytes = 2;
};

template <class Numbers, int kRows>
void floating_rows(const LinearCall& call, const uint8_t* tile, int64_t tile_index, int64_t row) {
    const int64_t k = call.weights->k;
    const float* x = call.x->values + row * k;
    F sums[kRows];
    for (F& sum : sums) sum = f_set(0.0f);
    for (int64_t i = 0; i < k; ++i) {
        const F w = Numbers::load(tile + i * kColumns * Numbers::bytes);
#pragma GCC unroll 8
        for (int j = 0; j < kRows; ++j) sums[j] = f_fma(w, f_set(x[j * k + i]), sums[j]);
    }
    for (int j = 0; j < kRows; ++j) store_outputs(call, row + j, tile_index, sums[j]);
}

template <class Numbers>
void floating_linear(const LinearCall& call) {
    const TileLayout layout = treadle::tile_layout(*treadle::format_info(call.weights->format), call.weights->k);
    for (int64_t t = call.tile_begin; t < call.tile_end; ++t) {
        const uint8_t* tile = tile_at(call, layout, t).quants;
        int64_t row = call.row_begin;
        for (; row + 8 <= call.row_end; row += 8) floating_rows<Numbers, 8>(call, tile, t, row);
        if (row + 4 <= call.row_end) {
            floating_rows<Numbers, 4>(call, tile, t, row);
            row += 4;
        }
        for (; row < call.row_end; ++row) floating_rows<Numbers, 1>(call, tile, t, row);
    }
}

void linear(const LinearCall& call) {
    switch (call.weights->format) {
        case TREADLE_F32:
            return floating_linear<NumbersF32>(call);
        case TREADLE_F16:
            return floating_linear<NumbersF16>(call);
        case TREADLE_BF16:
            return floating_linear<NumbersBF16>(call);
        default:
            return with_format(call.weights->format, [&](auto format) {
                if (call.x->terms == nullptr) return quantized_linear<decltype(format)>(call);
                if (call.x->num_terms == 2) return split_linear<decltype(format), 2>(call);
                split_linear<decltype(format), 1>(call);
            });
    }
}

}  // namespace
