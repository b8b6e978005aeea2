// Quantised linear layers with activations as two bfloat16 terms, over the vocabulary of vec_*.h.
//
// For each term in turn, the products of a group's even and of its odd words with the codes of weights, exact in
// bfloat16, are summed apart, each in order with fused additions, and (even + odd) is added to the group's product; over
// groups, sum = fma(product, weight scale, sum). Minima are groups of their own: a sum group meets the minima of 16
// groups, each as two bfloat16 terms (the upper half of its bits, and that of what is left), with a scale of 1. This is
// what the AMX instruction TDPBF16PS computes for numbers that cannot become denormal (Intel Architecture Instruction
// Set Extensions: fused, nearest even, denormals as zero).
#include "kernels.h"

namespace {

using treadle::kTerms;

// Terms of a row in group 0.
inline const uint16_t* row_terms(const Activations& x, int64_t row, int64_t k) {
    return x.terms + row / kRowBlock * treadle::term_block_words(k) + row % kRowBlock * kGroup;
}

// Terms of a row one after the other, of groups and then of sum groups.
inline int64_t terms_of_row(int64_t k) { return treadle::term_block_words(k) / kRowBlock; }

// The same as float32, so that a product can take them from memory.
inline void widen_terms(const Activations& x, int64_t row, int64_t k, float* out) {
    const uint16_t* terms = row_terms(x, row, k);
    for (int64_t i = 0; i < terms_of_row(k); i += kGroup, terms += treadle::kTermWords) {
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

// Some rows and one column tile.
template <class Fmt, int kRows>
class SplitRows {
 public:
    // x: widened terms of the rows, terms_of_row(k) apart.
    SplitRows(const LinearCall& call, const Tile& tile, const float* x)
        : groups_(call.weights->k / kGroup), stride_(terms_of_row(call.weights->k)), tile_(tile), x_(x) {
        for (F& sum : sums_) sum = f_set(0.0f);
        for (int64_t g = 0; g < groups_; ++g) add_group(g);
        for (int64_t g = 0; Fmt::has_minimum && g < groups_; g += 16) add_minima(g);
    }
    F sum(int j) const { return sums_[j]; }

 private:
    void add_group(int64_t g) {
        constexpr int kHalves = Fmt::scales_per_group, kQuads = 8 / kHalves;
        prefetch_weights(tile_.quants + g * Fmt::stream_bytes + kPrefetchBytes, Fmt::stream_bytes);
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

template <class Fmt, int kRows>
void split_rows(const LinearCall& call, int64_t row) {
    const TileLayout layout = treadle::tile_layout(*treadle::format_info(call.weights->format), call.weights->k);
    auto* x = reinterpret_cast<float*>(call.scratch);
    for (int j = 0; j < kRows; ++j) {
        widen_terms(*call.x, row + j, call.weights->k, x + j * terms_of_row(call.weights->k));
    }
    for (int64_t t = call.tile_begin; t < call.tile_end; ++t) {
        const SplitRows<Fmt, kRows> product(call, tile_at(call, layout, t), x);
        for (int j = 0; j < kRows; ++j) store_outputs(call, row + j, t, product.sum(j));
    }
}

template <class Fmt>
void split_linear(const LinearCall& call) {
    int64_t row = call.row_begin;
    if constexpr (kSplitRowsAtOnce == 2) {
        for (; row + 2 <= call.row_end; row += 2) split_rows<Fmt, 2>(call, row);
    }
    for (; row < call.row_end; ++row) split_rows<Fmt, 1>(call, row);
}

}  // namespace
