// Quantised linear layers in bfloat16, over the vocabulary of vec_*.h: activations are the nearest bfloat16, weights
// are decoded to one on their way.
//
// A weight is fma(code, scale, minimum) without the lower half of its bits. Scale and minimum are a little larger than
// stated, by what the cut takes in the mean, so that the cut rounds and costs nothing: a weight is off by less than a
// unit in the last place, by 0.31 in the root of the mean square, where rounding to nearest is off by 0.29. In each
// group the products of even and of odd words are summed apart, each in order with fused additions, and (even + odd) is
// added to the sum: what TDPBF16PS computes, see linear_split.inl. Weights of every format are multiples of 2^-57 and
// activations of 2^-67, so nothing becomes denormal.
#include "kernels.h"

namespace {

using treadle::kTermWords;

// Half a unit in the last place, 2^-7, over the mean of a mantissa's inverse: 0.72 where logarithms are spread evenly.
constexpr float kUpward = 1.0f + 0.36f / 128.0f;

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

// The weights of a group in the order of activations' words: use(word, first, second) for each pair of them, numbers of
// which the upper half counts.
template <class Fmt>
class GroupPairs {
 public:
    template <class Use>
    inline __attribute__((always_inline)) void each(const Tile& tile, int64_t g, const Use& use) const {
        const GroupWeights<Fmt> weights(tile, g);
        B codes[8];
        Fmt::unpack_numbers(tile.quants + g * Fmt::quant_bytes, codes);
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; ++quad) {
            const F first = weights.of(quad, numbers_.template of<0>(codes[quad]));
            const F second = weights.of(quad, numbers_.template of<1>(codes[quad]));
            const F third = weights.of(quad, numbers_.template of<2>(codes[quad]));
            const F fourth = weights.of(quad, numbers_.template of<3>(codes[quad]));
            use(4 * quad, first, third);
            use(4 * quad + 2, second, fourth);
        }
    }

 private:
    const CodeNumbers<Fmt::bits, Fmt::offset> numbers_{};
};

// Weights that are stored as bfloat16.
struct FormatBF16 {
    static constexpr int quant_bytes = kGroup * kColumns * 2;  // of a group
    static constexpr int stream_bytes = quant_bytes;
};
constexpr int16_t kTiniestWeight = 0x2680;  // 2^-50, the bits of bfloat16: smaller ones count as zero

template <>
class GroupPairs<FormatBF16> {
 public:
    template <class Use>
    inline __attribute__((always_inline)) void each(const Tile& tile, int64_t g, const Use& use) const {
        const auto* inputs = reinterpret_cast<const uint16_t*>(tile.quants + g * FormatBF16::quant_bytes);
        const auto of = [&](int input) { return f_zero_if_tiny(f_load_bf16(inputs + input * kColumns), 0x1p-50f); };
        for (int quad = 0; quad < kGroup; quad += 4) {
            use(quad, of(quad), of(quad + 2));
            use(quad + 2, of(quad + 1), of(quad + 3));
        }
    }
};

// Words of a row in group 0; those of the next group are kTermWords further.
inline const uint16_t* nearest_row(const Activations& x, int64_t row, int64_t k) {
    return x.nearest + row / kRowBlock * kRowBlock * k + row % kRowBlock * kGroup;
}

template <class Fmt, int kRows>
void decoded_rows(const LinearCall& call, int64_t row) {
    const int64_t k = call.weights->k, groups = k / kGroup;
    const TileLayout layout = treadle::tile_layout(*treadle::format_info(call.weights->format), k);
    const GroupPairs<Fmt> weights;
    auto* x = reinterpret_cast<float*>(call.scratch);
    for (int j = 0; j < kRows; ++j) {
        const uint16_t* words = nearest_row(*call.x, row + j, k);
        for (int64_t i = 0; i < k; i += 16) {
            f_store(x + j * k + i, f_load_bf16(words + i / kGroup * kTermWords + i % kGroup));
        }
    }
    for (int64_t t = call.tile_begin; t < call.tile_end; ++t) {
        const Tile tile = tile_at(call, layout, t);
        F sums[kRows];
        for (F& sum : sums) sum = f_set(0.0f);
        for (int64_t g = 0; g < groups; ++g) {
            prefetch_weights(tile.quants + g * Fmt::stream_bytes + kPrefetchBytes, Fmt::stream_bytes);
            PairSums<kRows> pairs;
            weights.each(tile, g, [&](int word, F first, F second) __attribute__((always_inline)) {
                pairs.add(x + g * kGroup + word, k, f_truncate_bf16(first), f_truncate_bf16(second));
            });
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

inline bool is_decoded(const LinearCall& call) {
    return call.x->nearest != nullptr && treadle::takes_codes(*call.weights, TREADLE_ACTIVATIONS_BF16);
}

// Calls body(Format{}) for the number of a format that is multiplied in bfloat16.
template <class Body>
inline void with_decoded_format(int32_t format, const Body& body) {
    if (format == TREADLE_BF16) return body(FormatBF16{});
    with_format(format, body);
}

}  // namespace
