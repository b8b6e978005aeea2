// Linear layers on AMX int8 tiles for many rows; everything else as on AVX-512.
//
// A tile product gives the exact code sums of sixteen rows, sixteen columns and one group; they are combined in float32
// exactly as linear.inl does, so both give the same bits, and rows left over from sixteen may go either way.
#include "kernels.h"

#if defined(__AMX_INT8__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vec_avx512.h"

#include "rows.inl"
#include "linear.inl"

namespace {

constexpr int kTileRows = 16;
// Fewer rows than this go to AVX-512.
constexpr int kLeastRows = 13;
// Groups whose code sums are kept before they are combined: with their codes, they fit in the first-level cache.
constexpr int64_t kGroupsAtOnce = 6;
constexpr int64_t kGroupBytes = kColumns * kGroup;      // of a group's codes, one byte each
constexpr int64_t kSumsPerTile = kTileRows * kColumns;  // int32

// The operand of LDTILECFG (Intel SDM volume 1, section 18.3).
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights, of products over `inputs` inputs.
    explicit TileConfig(int inputs) {
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_activations = tile == 4 || tile == 5, is_weights = tile >= 6;
            row_bytes[tile] = static_cast<uint16_t>(is_activations ? inputs : 64);
            rows[tile] = static_cast<uint8_t>(is_weights ? inputs / 4 : kTileRows);
        }
    }
};

// A pair of column tiles, their codes unpacked to signed bytes: [2][groups][8 quads][64].
template <class Fmt>
void unpack_codes(const LinearCall& call, const TileLayout& layout, int64_t first_tile, int num, uint8_t* codes) {
    const int64_t groups = call.weights->k / kGroup;
    for (int t = 0; t < num; ++t) {
        const Tile tile = tile_at(call, layout, first_tile + t);
        for (int64_t g = 0; g < groups; ++g) {
            B quads[8];
            Fmt::unpack(tile.quants + g * Fmt::quant_bytes, quads);
            uint8_t* out = codes + (t * groups + g) * kGroupBytes;
            for (int i = 0; i < 8; ++i) {
                b_store(out + 64 * i, b_subtract(quads[i], static_cast<int8_t>(static_cast<uint8_t>(Fmt::offset))));
            }
        }
    }
}

// Code sums of groups [begin, end) of sixteen rows and two column tiles: sums[2][kGroupsAtOnce][scales][16][16].
template <class Fmt>
void multiply(const int8_t* x, int64_t groups, int64_t begin, int64_t end, const uint8_t* codes, int32_t* sums) {
    constexpr int kScales = Fmt::scales_per_group;
    for (int64_t g = begin; g < end; ++g) {
        for (int half = 0; half < kScales; ++half) {
            const int64_t at = g * kGroupBytes + half * kGroupBytes / 2;
            int32_t* out = sums + ((g - begin) * kScales + half) * kSumsPerTile;
            _tile_loadd(4, x + g * kRowBlock * kGroup + half * kGroup / 2, kGroup);
            _tile_loadd(6, codes + at, 64);
            _tile_loadd(7, codes + groups * kGroupBytes + at, 64);
            _tile_zero(0);
            _tile_dpbssd(0, 4, 6);
            _tile_zero(1);
            _tile_dpbssd(1, 4, 7);
            _tile_stored(0, out, 64);
            _tile_stored(1, out + kGroupsAtOnce * kScales * kSumsPerTile, 64);
        }
    }
}

// Adds groups [begin, end) of one column tile to the float sums of sixteen rows, as add_group does.
template <class Fmt>
void combine(const Activations& x, int64_t begin, int64_t end, const Tile& tile, const int32_t* code_sums,
             float* sums) {
    constexpr int kScales = Fmt::scales_per_group;
    F totals[kTileRows];
    for (int j = 0; j < kTileRows; ++j) totals[j] = f_load(sums + j * kColumns);
    for (int64_t g = begin; g < end; ++g) {
        for (int half = 0; half < kScales; ++half) {
            const F scale = Fmt::load(tile.scales + (g * kScales + half) * Fmt::vector_bytes);
            const int32_t* of_group = code_sums + ((g - begin) * kScales + half) * kSumsPerTile;
#pragma GCC unroll 16
            for (int j = 0; j < kTileRows; ++j) {
                const F dot = f_from_i(i_load(of_group + j * kColumns));
                totals[j] = f_fma(dot, f_mul(scale, f_set(x.scales[g * kRowBlock + j])), totals[j]);
            }
        }
        if (Fmt::has_minimum) {
            const F minimum = Fmt::load(tile.minima + g * Fmt::vector_bytes);
#pragma GCC unroll 16
            for (int j = 0; j < kTileRows; ++j) {
                totals[j] = f_fma(minimum, f_set(x.sums[g * kRowBlock + j]), totals[j]);
            }
        }
    }
    for (int j = 0; j < kTileRows; ++j) f_store(sums + j * kColumns, totals[j]);
}

template <class Fmt>
void tiled_linear(const LinearCall& call) {
    const int64_t k = call.weights->k, groups = k / kGroup;
    const TileLayout layout = treadle::tile_layout(*treadle::format_info(call.weights->format), k);
    uint8_t* codes = call.scratch;
    auto* code_sums = reinterpret_cast<int32_t*>(call.scratch + 2 * groups * kGroupBytes);
    constexpr int64_t kSumsPerColumnTile = kGroupsAtOnce * Fmt::scales_per_group * kSumsPerTile;
    const TileConfig config(kGroup / Fmt::scales_per_group);
    _tile_loadconfig(&config);
    for (int64_t first = call.tile_begin; first < call.tile_end; first += 2) {
        const int num = call.tile_end - first < 2 ? 1 : 2;
        unpack_codes<Fmt>(call, layout, first, num, codes);
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler that they read memory
        for (int64_t row = call.row_begin; row < call.row_end; row += kTileRows) {
            const Activations x = from_row(*call.x, row, groups);
            alignas(64) float sums[2][kSumsPerTile] = {};
            for (int64_t begin = 0; begin < groups; begin += kGroupsAtOnce) {
                const int64_t end = begin + kGroupsAtOnce < groups ? begin + kGroupsAtOnce : groups;
                multiply<Fmt>(x.codes, groups, begin, end, codes, code_sums);
                for (int t = 0; t < num; ++t) {
                    combine<Fmt>(x, begin, end, tile_at(call, layout, first + t), code_sums + t * kSumsPerColumnTile,
                                 sums[t]);
                }
            }
            const int64_t rows = call.row_end - row < kTileRows ? call.row_end - row : kTileRows;
            for (int t = 0; t < num; ++t) {
                for (int64_t j = 0; j < rows; ++j) {
                    store_outputs(call, row + j, first + t, f_load(sums[t] + j * kColumns));
                }
            }
        }
    }
    _tile_release();
}

void linear_with_tiles(const LinearCall& call) {
    const int64_t rows = call.row_end - call.row_begin, left_over = rows % kTileRows;
    const bool is_quantized = treadle::format_info(call.weights->format)->is_quantized;
    const int64_t tiled_rows = left_over >= kLeastRows ? rows : rows - left_over;
    if (!is_quantized || tiled_rows == 0) return linear(call);
    LinearCall part = call;
    part.row_end = call.row_begin + tiled_rows;
    with_format(call.weights->format, [&](auto format) { tiled_linear<decltype(format)>(part); });
    part.row_begin = part.row_end;
    part.row_end = call.row_end;
    if (part.row_begin < part.row_end) linear(part);
}

// Linux hands out the tile registers on request only (Documentation/arch/x86/xstate.rst).
bool has_tiles() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    const bool has_instructions = (edx >> 24 & 1) != 0 && (edx >> 25 & 1) != 0;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return has_instructions && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

const treadle::Kernels* treadle::amx_kernels() {
    static const Kernels* const table = []() -> const Kernels* {
        static Kernels kernels;
        if (avx512_kernels() == nullptr || !has_tiles()) return nullptr;
        kernels = *avx512_kernels();
        kernels.name = "amx";
        kernels.linear = linear_with_tiles;
        return &kernels;
    }();
    return table;
}
#else
const treadle::Kernels* treadle::amx_kernels() { return nullptr; }
#endif
