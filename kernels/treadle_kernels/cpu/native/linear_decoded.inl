// Quantised linear layers in bfloat16, over the vocabulary of vec_*.h: activations are the nearest bfloat16, weights are
// decoded to one on their way.
//
// A weight is fma(code, scale, minimum) without the lower half of its bits, with scale and minimum a little larger than they
// are, by half of what the cut takes in the mean; so it is off by less than a unit in the last place of bfloat16 and by 0.31
// in the mean square, where rounding to nearest is off by 0.29, and the cut costs nothing. In each group the products of
// even and of odd words are summed apart, each in order with fused additions, and (even + odd) is added to the sum: what
// TDPBF16PS computes, see linear_split.inl. Weights of every format are multiples of 2^-55 or so and activations of 2^-67,
// so nothing becomes denormal.
#include "kernels.h"

namespace {

constexpr float kUpward = 1.0f + 0.36f / 128.0f;  // half a unit, over the mean of mantissas that are spread as logarithms

// What the codes of a group become.
template <class Fmt>
class GroupWeights {
 public:
    GroupWeights(const Tile& tile, int64_t g) {
        for (int i = 0; i < kScales; ++i) {
            scales_[i] = f_mul(Fmt::load(tile.scales + (g * kScales + i) * Fmt::vector_bytes), f_set(kUpward));
        }
        if (Fmt::has_minimum) minimum_ = f_mul(Fmt::load(tile.minima + g * Fmt::vector_bytes), f_set(kUpward));
    }
    // Of a quad: numbers of which the upper half counts.
    inline __attribute__((always_inline)) F of(int quad, F codes) const {
        const F scale = scales_[quad * kScales / 8];
        return Fmt::has_minimum ? f_fma(codes, scale, minimum_) : f_mul(codes, scale);
    }

 private:
    static constexpr int kScales = Fmt::scales_per_group;
    F scales_[kScales];
    F minimum_;
};

// Words of a row in group 0; those of the next group are kTermWords further.
inline const uint16_t* nearest_row(const Activations& x, int64_t row, int64_t k) {
    return x.nearest + row / kRowBlock * kRowBlock * k + row % kRowBlock * kGroup;
}

template <class Fmt, int kRows>
void decoded_rows(const LinearCall& call, int64_t row) {
    const int64_t k = call.weights->k, groups = k / kGroup;
    const TileLayout layout = treadle::tile_layout(*treadle::format_info(call.weights->format), k);
    const CodeNumbers<Fmt::bits, Fmt::offset> numbers;
    auto* x = reinterpret_cast<float*>(call.scratch);
    for (int j = 0; j < kRows; ++j) {
        const uint16_t* words = nearest_row(*call.x, row + j, k);
        for (int64_t i = 0; i < k; i += 16) f_store(x + j * k + i, f_load_bf16(words + i / kGroup * treadle::kTermWords + i % kGroup));
    }
    for (int64_t t = call.tile_begin; t < call.tile_end; ++t) {
        const Tile tile = tile_at(call, layout, t);
        F sums[kRows];
        for (F& sum : sums) sum = f_set(0.0f);
        for (int64_t g = 0; g < groups; ++g) {
            prefetch_weights(tile.quants + g * Fmt::stream_bytes + kPrefetchBytes, Fmt::stream_bytes);
            const GroupWeights<Fmt> weights(tile, g);
            B codes[8];
            Fmt::unpack_numbers(tile.quants + g * Fmt::quant_bytes, codes);
            PairSums<kRows> pairs;
            const float* words = x + g * kGroup;
#pragma GCC unroll 8
            for (int quad = 0; quad < 8; ++quad) {
                const auto weight = [&](F numbers_of_byte) { return f_truncate_bf16(weights.of(quad, numbers_of_byte)); };
                pairs.add(words + 4 * quad, k, weight(numbers.template of<0>(codes[quad])),
                          weight(numbers.template of<2>(codes[quad])));
                pairs.add(words + 4 * quad + 2, k, weight(numbers.template of<1>(codes[quad])),
                          weight(numbers.template of<3>(codes[quad])));
            }
            pairs.add_to(sums);
        }
        for (int j = 0; j < kRows; ++j) store_outputs(call, row + j, t, sums[j]);
    }
}

template <class Fmt>
void decoded_linear(const LinearCall& call) {
    int64_t row = call.row_begin;
    if constexpr (kSplitRowsAtOnce == 2) {
        for (; row + 2 <= call.row_end; row += 2) decoded_rows<Fmt, 2>(call, row);
    }
    for (; row < call.row_end; ++row) decoded_rows<Fmt, 1>(call, row);
}

}  // namespace
