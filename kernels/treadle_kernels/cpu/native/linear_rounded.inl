// Quantised linear layers with weights and activations rounded to bfloat16, over the vocabulary of vec_*.h.
//
// A weight, (code - offset) * scale + minimum in float32, and an activation are rounded to the nearest bfloat16. Of a
// group, products of the even inputs and of the odd ones are summed apart, each in order with fused additions, and
// sum = sum + (even + odd). This is what the AMX instruction TDPBF16PS computes for numbers that cannot become denormal
// (Intel Architecture Instruction Set Extensions: fused, nearest even, denormals as zero); weights are multiples of 2^-24
// by their scales, and activations not tiny. Where there are no tiles it is slow, and only right.
#include "kernels.h"

namespace {

// Code of an input and column, where codes lie by input; see formats.h.
template <class Fmt>
inline int code_at(const uint8_t* quants, int column, int input) {
    if (Fmt::bits == 8) return quants[kGroup * column + input];
    const int low = quants[64 * (column / 4) + 2 * input + column % 4 / 2] >> (4 * (column % 2)) & 15;
    const uint8_t* high = quants + 256;
    if (Fmt::bits == 5) return low | (high[4 * column + input / 8] >> (input % 8) & 1) << 4;
    if (Fmt::bits == 6) return low | (high[64 * (column / 8) + 2 * input + column % 8 / 4] >> (2 * (column % 4)) & 3) << 4;
    return low;
}

// Weights of a group, rounded and widened to float32 again: out[32 inputs][16 columns].
template <class Fmt>
void decode_group(const Tile& tile, int64_t g, float* out) {
    constexpr int kScales = Fmt::scales_per_group;
    float scales[kScales][kColumns], minima[kColumns] = {};
    for (int i = 0; i < kScales; ++i) f_store(scales[i], Fmt::load(tile.scales + (g * kScales + i) * Fmt::vector_bytes));
    if (Fmt::has_minimum) f_store(minima, Fmt::load(tile.minima + g * Fmt::vector_bytes));
    const uint8_t* quants = tile.quants + g * Fmt::quant_bytes;
    for (int column = 0; column < kColumns; ++column) {
        for (int half = 0; half < 2; ++half) {
            float numbers[16];
            for (int i = 0; i < 16; ++i) {
                numbers[i] = static_cast<float>(code_at<Fmt>(quants, column, 16 * half + i) - Fmt::offset);
            }
            const F scale = f_set(scales[half % kScales][column]);
            const F codes = f_load(numbers), minimum = f_set(minima[column]);
            f_store(numbers, f_round_bf16(Fmt::has_minimum ? f_fma(codes, scale, minimum) : f_mul(codes, scale)));
            float* of_half = out + 16 * half * kColumns + column;
            for (int i = 0; i < 16; ++i) of_half[i * kColumns] = numbers[i];
        }
    }
}

// sum + (even + odd): a row's group with its weights. Pairs of `x` lie `stride` words apart.
inline F add_products(const uint16_t* x, int64_t stride, const float* weights, F sum) {
    F even = f_set(0.0f), odd = f_set(0.0f);
    for (int pair = 0; pair < kGroup / 2; ++pair, x += stride, weights += 2 * kColumns) {
        even = f_fma(f_set(treadle::f32_from_bf16(x[0])), f_load(weights), even);
        odd = f_fma(f_set(treadle::f32_from_bf16(x[1])), f_load(weights + kColumns), odd);
    }
    return f_add(sum, f_add(even, odd));
}

// Decodes a group of a tile at a time, for all rows.
template <class Fmt>
void rounded_linear(const LinearCall& call) {
    const treadle_linear& weights = *call.weights;
    const TileLayout layout = treadle::tile_layout(*treadle::format_info(weights.format), weights.k);
    const int64_t rows = call.row_end - call.row_begin, stride = 2 * call.x->block_rows;
    auto* decoded = reinterpret_cast<float*>(call.scratch);  // [kGroup][kColumns]
    float* sums = decoded + kGroup * kColumns;               // [rows][kColumns]
    for (int64_t t = call.tile_begin; t < call.tile_end; ++t) {
        const Tile tile = tile_at(call, layout, t);
        for (int64_t i = 0; i < rows; ++i) f_store(sums + i * kColumns, f_set(0.0f));
        for (int64_t g = 0; g < weights.k / kGroup; ++g) {
            decode_group<Fmt>(tile, g, decoded);
            for (int64_t i = 0; i < rows; ++i) {
                const uint16_t* x = call.x->rounded + g * (kGroup / 2) * stride +
                                    treadle::rounded_row_offset(call.row_begin + i, weights.k, call.x->block_rows);
                f_store(sums + i * kColumns, add_products(x, stride, decoded, f_load(sums + i * kColumns)));
            }
        }
        for (int64_t i = 0; i < rows; ++i) store_outputs(call, call.row_begin + i, t, f_load(sums + i * kColumns));
    }
}

}  // namespace
