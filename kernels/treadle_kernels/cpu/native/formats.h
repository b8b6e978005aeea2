// The packed layout of weights, shared by packing, kernels and unpacking.
//
// Outputs (columns of the product) come in tiles of 16; the last tile is padded with zeros. Quantised formats keep, for
// each tile, three planes one after the other, each over the groups of 32 inputs in order:
//   quants   codes, `quant_bytes` a group (below)
//   scales   [groups][scales per group][16], f16 or f32
//   minima   [groups][16] likewise, where the format has them
// A weight is (code - offset) * scale + minimum. An input quad is 4 consecutive inputs; a plane of 64 bytes holds one quad
// of all 16 columns, byte 4 c + b being input b of column c.
//   4 bits   4 planes; the low nibbles of plane i are quad i, the high ones quad i + 4
//   5 bits   as 4 bits, then 8 masks of 64 bits, bit 4 c + b of mask i being the fifth bit in quad i
//   6 bits   as 4 bits, then 2 planes with two more bits of four quads each: bits 2 i of plane j are quad 4 j + i
//   8 bits   8 planes, code = value + 128
// Rotated rows are planes of 8 bits for all quads, inputs padded to a multiple of 64, and then [16] f32 scales.
// Floating formats keep [k][16] numbers a tile.
#ifndef TREADLE_FORMATS_H
#define TREADLE_FORMATS_H

#include <cstdint>

#include "treadle_cpu.h"

namespace treadle {

constexpr int kGroup = 32;    // inputs that share an activation scale
constexpr int kColumns = 16;  // outputs of a tile
constexpr int kTileInputs = 64;  // of one tile product of bytes

struct FormatInfo {
    int32_t format;
    const char* name;
    int raw_block_size;   // numbers in a block of the file format
    int raw_block_bytes;  // its bytes
    bool is_quantized;
    int quant_bytes;       // of one group and tile
    int scales_per_group;  // 2: one for each half
    int scale_bytes;       // 2: f16, 4: f32; of minima too
    bool has_minimum;
    int offset;
    bool is_rotated = false;
};

// Null for a format that the library does not know.
static inline const FormatInfo* format_info(int32_t format) {
    static constexpr FormatInfo kFormats[] = {
        {TREADLE_F32, "F32", 1, 4, false, 0, 0, 4, false, 0},
        {TREADLE_F16, "F16", 1, 2, false, 0, 0, 2, false, 0},
        {TREADLE_BF16, "BF16", 1, 2, false, 0, 0, 2, false, 0},
        {TREADLE_Q4_0, "Q4_0", 32, 18, true, 256, 1, 2, false, 8},
        {TREADLE_Q4_1, "Q4_1", 32, 20, true, 256, 1, 2, true, 0},
        {TREADLE_Q5_0, "Q5_0", 32, 22, true, 320, 1, 2, false, 16},
        {TREADLE_Q5_1, "Q5_1", 32, 24, true, 320, 1, 2, true, 0},
        {TREADLE_Q8_0, "Q8_0", 32, 34, true, 512, 1, 2, false, 128},
        {TREADLE_Q4_K, "Q4_K", 256, 144, true, 256, 1, 4, true, 0},
        {TREADLE_Q5_K, "Q5_K", 256, 176, true, 320, 1, 4, true, 0},
        {TREADLE_Q6_K, "Q6_K", 256, 210, true, 384, 2, 4, false, 32},
        {TREADLE_ROTATED, "ROTATED", 32, 128, true, 0, 0, 4, false, 128, true},
    };
    for (const FormatInfo& info : kFormats) {
        if (info.format == format) return &info;
    }
    return nullptr;
}

// Inputs of rotated rows, with padding.
static inline int64_t padded_inputs(int64_t k) { return (k + kTileInputs - 1) / kTileInputs * kTileInputs; }

// Where the planes of a tile start, in bytes from the tile's start.
struct TileLayout {
    int64_t scales;
    int64_t minima;
    int64_t tile_bytes;
};

static inline TileLayout tile_layout(const FormatInfo& info, int64_t k) {
    if (!info.is_quantized) return {0, 0, (k * kColumns * info.raw_block_bytes + 63) / 64 * 64};
    if (info.is_rotated) {
        const int64_t scales = padded_inputs(k) * kColumns;
        return {scales, 0, scales + kColumns * int64_t{sizeof(float)}};
    }
    const int64_t groups = k / kGroup, vector_bytes = kColumns * info.scale_bytes;
    const int64_t scales = groups * info.quant_bytes;
    const int64_t minima = scales + groups * info.scales_per_group * vector_bytes;
    const int64_t end = minima + (info.has_minimum ? groups * vector_bytes : 0);
    return {scales, minima, (end + 63) / 64 * 64};
}

static inline int64_t num_tiles(int64_t n) { return (n + kColumns - 1) / kColumns; }

static inline int64_t packed_bytes(const FormatInfo& info, int64_t n, int64_t k) {
    return num_tiles(n) * tile_layout(info, k).tile_bytes;
}

// Some bits of one code: those from `shift` on of a byte of its group.
struct CodePlace {
    int byte;
    int shift;
};

// Where the lowest four bits of a code lie, or all eight.
static inline CodePlace low_bits(const FormatInfo& info, int column, int input) {
    const int quad = input / 4, byte = 4 * column + input % 4;
    if (info.quant_bytes == 512) return {64 * quad + byte, 0};
    return {64 * (quad % 4) + byte, quad < 4 ? 0 : 4};
}

// Where the others lie: one bit in formats of five, two in those of six.
static inline CodePlace high_bits(const FormatInfo& info, int column, int input) {
    constexpr int kStart = 256;  // behind the planes of low bits
    const int quad = input / 4, byte = 4 * column + input % 4;
    if (info.quant_bytes == 320) return {kStart + 8 * quad + byte / 8, byte % 8};
    return {kStart + 64 * (quad / 4) + byte, 2 * (quad % 4)};
}

// Exact conversions of the two-byte floats.
static inline float f32_from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_from_f32(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float f32_from_bf16(uint16_t half) { return f32_from_bits(static_cast<uint32_t>(half) << 16); }

static inline float f32_from_f16(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, fraction = half & 1023u;
    if (exponent == 31) return f32_from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return f32_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // subnormal, exact
    return sign ? -magnitude : magnitude;
}

}  // namespace treadle

#endif
