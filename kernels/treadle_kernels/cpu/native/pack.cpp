#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "error.h"
#include "rotation.h"

namespace treadle {

namespace {

// One group of 32 weights of one row: weight i is (codes[i] - offset) * scales[i / (32 / number of scales)] + minimum.
struct Group {
    uint8_t codes[kGroup];
    float scales[2];
    float minimum;
};

uint16_t load_u16(const uint8_t* bytes) {
    uint16_t value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

float load_f16(const uint8_t* bytes) { return f32_from_f16(load_u16(bytes)); }

void read_nibbles(const uint8_t* bytes, Group& group) {
    for (int i = 0; i < 16; ++i) {
        group.codes[i] = bytes[i] & 15;
        group.codes[i + 16] = bytes[i] >> 4;
    }
}

void add_fifth_bits(const uint8_t* bytes, Group& group) {
    for (int i = 0; i < kGroup; ++i) group.codes[i] |= static_cast<uint8_t>((bytes[i / 8] >> (i % 8) & 1) << 4);
}

// Scale and minimum number `index` of the 12 bytes that eight of each share in Q4_K and Q5_K, six bits a number.
void read_six_bits(const uint8_t* bytes, int index, int* scale, int* minimum) {
    if (index < 4) {
        *scale = bytes[index] & 63;
        *minimum = bytes[index + 4] & 63;
    } else {
        *scale = (bytes[index + 4] & 15) | (bytes[index - 4] >> 6) << 4;
        *minimum = bytes[index + 4] >> 4 | (bytes[index] >> 6) << 4;
    }
}

// Q4_K and Q5_K: [f16 d, f16 dmin, 12 bytes of scales, (Q5_K: 32 bytes of fifth bits,) 128 bytes of nibbles]. The
// products of a half and a six-bit integer are exact in float32.
void read_k_group(const uint8_t* block, int index, bool has_fifth_bits, Group& group) {
    int scale, minimum;
    read_six_bits(block + 4, index, &scale, &minimum);
    group.scales[0] = load_f16(block) * static_cast<float>(scale);
    group.minimum = -(load_f16(block + 2) * static_cast<float>(minimum));
    const uint8_t* nibbles = block + (has_fifth_bits ? 48 : 16) + index / 2 * 32;
    for (int i = 0; i < kGroup; ++i) {
        group.codes[i] = index % 2 == 0 ? nibbles[i] & 15 : nibbles[i] >> 4;
        if (has_fifth_bits) group.codes[i] |= static_cast<uint8_t>((block[16 + i] >> index & 1) << 4);
    }
}

// Q6_K: [128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, f16 d], in two halves of 128 weights.
void read_q6_k_group(const uint8_t* block, int index, Group& group) {
    const int half = index / 4, quarter = index % 4;
    const uint8_t* low = block + 64 * half + 32 * (quarter % 2);
    const uint8_t* high = block + 128 + 32 * half;
    const auto* scales = reinterpret_cast<const int8_t*>(block + 192 + 8 * half + 2 * quarter);
    const float d = load_f16(block + 208);
    for (int i = 0; i < kGroup; ++i) {
        const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
        group.codes[i] = static_cast<uint8_t>(nibble | (high[i] >> (2 * quarter) & 3) << 4);
    }
    group.scales[0] = d * static_cast<float>(scales[0]);
    group.scales[1] = d * static_cast<float>(scales[1]);
}

// Layouts as in ggml-org/ggml, src/ggml-common.h and ggml-quants.c. `row` is a whole row of the file.
Group read_group(const FormatInfo& info, const uint8_t* row, int64_t index) {
    Group group{};
    const uint8_t* block = row + index * kGroup / info.raw_block_size * info.raw_block_bytes;
    const int in_block = static_cast<int>(index * kGroup % info.raw_block_size / kGroup);
    switch (info.format) {
        case TREADLE_Q4_0:
            read_nibbles(block + 2, group);
            break;
        case TREADLE_Q4_1:
            read_nibbles(block + 4, group);
            break;
        case TREADLE_Q5_0:
            read_nibbles(block + 6, group);
            add_fifth_bits(block + 2, group);
            break;
        case TREADLE_Q5_1:
            read_nibbles(block + 8, group);
            add_fifth_bits(block + 4, group);
            break;
        case TREADLE_Q8_0:
            for (int i = 0; i < kGroup; ++i) group.codes[i] = static_cast<uint8_t>(block[2 + i] ^ 0x80);
            break;
        case TREADLE_Q4_K:
            read_k_group(block, in_block, false, group);
            break;
        case TREADLE_Q5_K:
            read_k_group(block, in_block, true, group);
            break;
        case TREADLE_Q6_K:
            read_q6_k_group(block, in_block, group);
            break;
        default:
            break;
    }
    return group;
}

int num_high_bits(const FormatInfo& info) { return info.quant_bytes == 320 ? 1 : info.quant_bytes == 384 ? 2 : 0; }

void write_codes(const FormatInfo& info, const uint8_t* codes, int column, uint8_t* out) {
    const int low_mask = info.quant_bytes == 512 ? 255 : 15;
    for (int i = 0; i < kGroup; ++i) {
        const CodePlace low = low_bits(info, column, i);
        out[low.byte] |= static_cast<uint8_t>((codes[i] & low_mask) << low.shift);
        if (num_high_bits(info) == 0) continue;
        const CodePlace high = high_bits(info, column, i);
        out[high.byte] |= static_cast<uint8_t>(codes[i] >> 4 << high.shift);
    }
}

int read_code(const FormatInfo& info, const uint8_t* quants, int column, int i) {
    const CodePlace low = low_bits(info, column, i);
    const int code = quants[low.byte] >> low.shift & (info.quant_bytes == 512 ? 255 : 15);
    if (num_high_bits(info) == 0) return code;
    const CodePlace high = high_bits(info, column, i);
    return code | (quants[high.byte] >> high.shift & ((1 << num_high_bits(info)) - 1)) << 4;
}

void pack_quantized_row(const FormatInfo& info, const uint8_t* row, int64_t k, int column,
                        uint8_t* tile) {
    const TileLayout planes = tile_layout(info, k);
    for (int64_t g = 0; g < k / kGroup; ++g) {
        const Group group = read_group(info, row, g);
        write_codes(info, group.codes, column, tile + g * info.quant_bytes);
        uint8_t* scales = tile + planes.scales + g * info.scales_per_group * kColumns * info.scale_bytes;
        uint8_t* minimum = tile + planes.minima + (g * kColumns + column) * info.scale_bytes;
        if (info.scale_bytes == 2) {  // the halves of the file as they are
            const uint8_t* block = row + g * info.raw_block_bytes;
            std::memcpy(scales + 2 * column, block, 2);
            if (info.has_minimum) std::memcpy(minimum, block + 2, 2);
        } else {
            for (int i = 0; i < info.scales_per_group; ++i) {
                std::memcpy(scales + 4 * (kColumns * i + column), &group.scales[i], 4);
            }
            if (info.has_minimum) std::memcpy(minimum, &group.minimum, 4);
        }
    }
}

// Where the code of an input of a column lies in its tile.
int64_t rotated_place(int column, int64_t input) { return input / 4 * 64 + 4 * column + input % 4; }

// The largest magnitude becomes 127. A row that is not finite has the scale NaN, so that it shows.
void pack_rotated_row(const FormatInfo& info, const uint8_t* row, int64_t k, int column, uint8_t* tile) {
    std::vector<float> values(k);
    std::memcpy(values.data(), row, k * sizeof(float));
    rotate(values.data(), k);
    float largest = 0.0f;
    bool is_finite = true;
    for (const float value : values) {
        is_finite &= std::isfinite(value);
        largest = std::max(largest, std::fabs(value));
    }
    const float inverse = is_finite && largest > 1e-30f ? 127.0f / largest : 0.0f;
    for (int64_t i = 0; i < k; ++i) {
        const int code = inverse == 0.0f ? 0 : static_cast<int>(std::nearbyint(values[i] * inverse));
        tile[rotated_place(column, i)] = static_cast<uint8_t>(code + info.offset);
    }
    // Rotating twice multiplies by the length of what is rotated; a power of two, so that this is exact.
    const float scale = is_finite ? largest / 127.0f / static_cast<float>(rotation_length(k)) : std::nanf("");
    std::memcpy(tile + tile_layout(info, k).scales + column * sizeof scale, &scale, sizeof scale);
}

void unpack_rotated_row(const FormatInfo& info, const uint8_t* tile, int64_t k, int column, float* out) {
    float scale;
    std::memcpy(&scale, tile + tile_layout(info, k).scales + column * sizeof scale, sizeof scale);
    for (int64_t i = 0; i < k; ++i) {
        out[i] = static_cast<float>(tile[rotated_place(column, i)] - info.offset) * scale;
    }
    rotate(out, k);
}

void pack_float_row(const FormatInfo& info, const uint8_t* row, int64_t k, int column, uint8_t* tile) {
    const int size = info.raw_block_bytes;
    for (int64_t i = 0; i < k; ++i) std::memcpy(tile + (i * kColumns + column) * size, row + i * size, size);
}

float load_scale(const FormatInfo& info, const uint8_t* plane, int64_t index) {
    if (info.scale_bytes == 2) return load_f16(plane + 2 * index);
    float value;
    std::memcpy(&value, plane + 4 * index, sizeof value);
    return value;
}

}  // namespace

int check_shape(int32_t format, int64_t n, int64_t k, const char* what) {
    const FormatInfo* info = format_info(format);
    TREADLE_REQUIRE(info != nullptr, "%s: unknown weight format %d", what, format);
    TREADLE_REQUIRE(n >= 1 && n <= INT32_MAX, "%s: must have 1 to 2^31 - 1 outputs, has %lld", what,
                    static_cast<long long>(n));
    TREADLE_REQUIRE(k >= 1 && k <= INT32_MAX && k % info->raw_block_size == 0,
                    "%s: the number of inputs must be a positive multiple of %d for %s, is %lld", what,
                    info->raw_block_size, info->name, static_cast<long long>(k));
    return 0;
}

int check_activations(int32_t activations) {
    TREADLE_REQUIRE(activations >= TREADLE_ACTIVATIONS_INT8 && activations <= TREADLE_ACTIVATIONS_BF16,
                    "unknown activations %d", activations);
    return 0;
}

int check_fit(const treadle_linear& weights, int32_t activations, const char* what) {
    const FormatInfo& info = *format_info(weights.format);
    TREADLE_REQUIRE(!info.is_quantized || info.is_rotated == (activations == TREADLE_ACTIVATIONS_ROTATED),
                    "%s: weights in %s do not meet activations of kind %d", what, info.name, activations);
    return 0;
}

int check_linear(const treadle_linear& weights, const char* what) {
    TREADLE_TRY(check_shape(weights.format, weights.n, weights.k, what));
    TREADLE_REQUIRE(weights.data != nullptr && reinterpret_cast<uintptr_t>(weights.data) % 64 == 0,
                    "%s: packed weights must start at a multiple of 64 bytes", what);
    const auto wanted = static_cast<uint64_t>(packed_bytes(*format_info(weights.format), weights.n, weights.k));
    TREADLE_REQUIRE(weights.num_bytes == wanted, "%s: packed weights must have %llu bytes, have %llu", what,
                    static_cast<unsigned long long>(wanted), static_cast<unsigned long long>(weights.num_bytes));
    return 0;
}

void pack(const FormatInfo& info, const uint8_t* raw, int64_t n, int64_t k, uint8_t* packed) {
    const int64_t row_bytes = k / info.raw_block_size * info.raw_block_bytes;
    const int64_t tile_bytes = tile_layout(info, k).tile_bytes;
    std::memset(packed, 0, static_cast<size_t>(packed_bytes(info, n, k)));
    for (int64_t row = 0; row < n; ++row) {
        uint8_t* tile = packed + row / kColumns * tile_bytes;
        const int column = static_cast<int>(row % kColumns);
        if (info.is_rotated) {
            pack_rotated_row(info, raw + row * row_bytes, k, column, tile);
        } else if (info.is_quantized) {
            pack_quantized_row(info, raw + row * row_bytes, k, column, tile);
        } else {
            pack_float_row(info, raw + row * row_bytes, k, column, tile);
        }
    }
}

void unpack_row(const treadle_linear& weights, int64_t row, float* out) {
    const FormatInfo& info = *format_info(weights.format);
    const TileLayout layout = tile_layout(info, weights.k);
    const uint8_t* tile = static_cast<const uint8_t*>(weights.data) + row / kColumns * layout.tile_bytes;
    const int column = static_cast<int>(row % kColumns);
    if (info.is_rotated) return unpack_rotated_row(info, tile, weights.k, column, out);
    if (!info.is_quantized) {
        for (int64_t i = 0; i < weights.k; ++i) {
            const uint8_t* number = tile + (i * kColumns + column) * info.raw_block_bytes;
            if (info.format == TREADLE_F32) {
                std::memcpy(out + i, number, sizeof(float));
            } else {
                out[i] = info.format == TREADLE_F16 ? load_f16(number) : f32_from_bf16(load_u16(number));
            }
        }
        return;
    }
    const int run = kGroup / info.scales_per_group;  // weights of one scale
    for (int64_t g = 0; g < weights.k / kGroup; ++g) {
        const uint8_t* quants = tile + g * info.quant_bytes;
        const float minimum = info.has_minimum ? load_scale(info, tile + layout.minima, g * kColumns + column) : 0.0f;
        for (int first = 0; first < kGroup; first += run) {
            const int64_t index = (g * info.scales_per_group + first / run) * kColumns + column;
            const float scale = load_scale(info, tile + layout.scales, index);
            for (int i = first; i < first + run; ++i) {
                const float product = static_cast<float>(read_code(info, quants, column, i) - info.offset) * scale;
                out[g * kGroup + i] = info.has_minimum ? product + minimum : product;
            }
        }
    }
}

void prefetch_row(const treadle_linear& weights, int64_t row) {
    const int64_t tile_bytes = tile_layout(*format_info(weights.format), weights.k).tile_bytes;
    const uint8_t* tile = static_cast<const uint8_t*>(weights.data) + row / kColumns * tile_bytes;
    for (int64_t i = 0; i < tile_bytes; i += 64) __builtin_prefetch(tile + i);
}

}  // namespace treadle
