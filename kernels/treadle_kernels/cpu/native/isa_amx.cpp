// Linear layers and attention on AMX tiles; everything else as on AVX-512.
#include "kernels.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__AVX512VBMI__) && \
    defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vec_avx512.h"

#include "rows.inl"
#include "linear.inl"
#include "linear_split.inl"
#include "linear_rotated.inl"
#include "linear_decoded.inl"
#include "amx_products.inl"
#include "amx_rotated.inl"
#include "amx_decoded.inl"
#include "amx_split.inl"
#include "attention_amx.inl"

namespace {

constexpr int kFewRows = 2;         // of bfloat16: so many are faster on AVX-512
constexpr int kFewRotatedRows = 4;  // likewise

void linear_with_tiles(const LinearCall& call) {
    const treadle::FormatInfo& info = *treadle::format_info(call.weights->format);
    const int64_t rows = call.row_end - call.row_begin;
    if (info.is_rotated && rows > kFewRotatedRows) return rotated_linear_with_tiles(call);
    if (is_decoded(call) && rows > kFewRows) {
        return with_decoded_format(call.weights->format,
                                   [&](auto format) { decoded_linear_with_tiles<decltype(format)>(call); });
    }
    const bool is_split = info.is_quantized && call.x->terms != nullptr && rows > kFewRows;
    if (info.is_rotated || !is_split) return treadle::avx512_kernels()->linear(call);
    with_format(call.weights->format, [&](auto format) {
        if (rows > 8) return SplitProduct<decltype(format), 16>(call).run();
        if (rows > 4) return SplitProduct<decltype(format), 8>(call).run();
        SplitProduct<decltype(format), 4>(call).run();
    });
}

void gate_with_tiles(const GatedCall& call) {
    if (call.gate->format == TREADLE_ROTATED) return rotated_gate_with_tiles(call);
    with_decoded_format(call.gate->format, [&](auto format) { decoded_gate_with_tiles<decltype(format)>(call); });
}

// Linux hands out the tile registers on request only (Documentation/arch/x86/xstate.rst).
bool has_tiles() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    bool has_instructions = (edx >> 24 & 1) != 0 && (edx >> 25 & 1) != 0 && (edx >> 22 & 1) != 0;
    // Shuffles of bytes and vector instructions for bfloat16 came before tiles.
    has_instructions &= (ecx >> 1 & 1) != 0;
    has_instructions &= __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 5 & 1) != 0;
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
        kernels.round_row = round_row;  // by the instruction for it
        kernels.linear = linear_with_tiles;
        kernels.gate = gate_with_tiles;
        kernels.attend = attend_with_tiles;
        return &kernels;
    }();
    return table;
}
#else
const treadle::Kernels* treadle::amx_kernels() { return nullptr; }
#endif
