// Kernels for AVX-512 with byte, word and integer dot product instructions (VNNI).
#include "kernels.h"

#if defined(__AVX512VNNI__)
#include "vec_avx512.h"

#include "table.inl"

const treadle::Kernels* treadle::avx512_kernels() {
    const bool has_it = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    if (!has_it) return nullptr;
    static constexpr Kernels kKernels = make_kernels("avx512");
    return &kKernels;
}
#else
const treadle::Kernels* treadle::avx512_kernels() { return nullptr; }
#endif
