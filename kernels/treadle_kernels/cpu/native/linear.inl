// Linear layers over the vocabulary of vec_*.h.
//
// Quantised: within a group of 32 inputs the products of codes are summed exactly in int32; over groups, in the order
// of k,  sum = fma(code sum, activation scale * weight scale, sum), then where the format has minima sum = fma(minimum,
// activation sum, sum). Floating: sum = fma(w, x, sum) in the order of k. So an output's bits depend on its own row and
// column alone, whatever the blocking.
#include "formats.h"
#include "kernels.h"

namespace {

using treadle::Activations;
using treadle::kColumns;
using treadle::kGroup;
using treadle::LinearCall;
using treadle::TileLayout;

constexpr int kPrefetchBytes = 16384;  // ahead of the weights in use

// Asks for weights, into the second-level cache: more of such requests can be under way than of those to the first.
inline __attribute__((always_inline)) void prefetch_weights(const uint8_t* from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Quantised formats at compile time; the figures are those of formats.h.
template <int kBits, bool kHasHalves, bool kHasMinimum, int kScaleBytes, int kScales, int kOffset>
struct Format {
    static constexpr int bits = kBits;
    static constexpr bool has_minimum = kHasMinimum;
    static constexpr int scales_per_group = kScales;
    static constexpr int offset = kOffset;
    static constexpr int quant_bytes = kBits == 8 ? 512 : kBits == 6 ? 384 : kBits == 5 ? 320 : 256;
    static constexpr int vector_bytes = kScaleBytes * kColumns;
    // Of a group, in the planes of scales and minima, and in all. The planes of a tile follow each other, and so do
    // tiles: weights are one stream, of so many bytes a group.
    static constexpr int other_bytes = (kScales + (kHasMinimum ? 1 : 0)) * vector_bytes;
    static constexpr int stream_bytes = quant_bytes + other_bytes;

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

inline void store_whole_outputs(float* y, bool is_added, F sums) { f_store(y, is_added ? f_add(f_load(y), sums) : sums); }

// Writes sixteen outputs of a row, fewer in a matrix's last tile.
inline void store_outputs(const LinearCall& call, int64_t row, int64_t tile, F sums) {
    const int64_t column = tile * kColumns;
    const int count = rest(call.weights->n, column);
    float* y = call.y + row * call.y_stride + column;
    if (call.weights->bias != nullptr) sums = f_add(sums, f_load_first(call.weights->bias + column, count));
    if (count == kColumns) {
        store_whole_outputs(y, call.is_added, sums);
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
            prefetch_weights(tile.quants + g * Fmt::stream_bytes + kPrefetchBytes, Fmt::stream_bytes);
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

}  // namespace
