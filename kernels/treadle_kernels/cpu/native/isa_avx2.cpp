// Kernels for AVX2 with FMA and F16C.
#include "kernels.h"

#if defined(__AVX2__)
#include "vec_avx2.h"

#include "table.inl"

const treadle::Kernels* treadle::avx2_kernels() {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return nullptr;
    static constexpr Kernels kKernels = make_kernels("avx2");
    return &kKernels;
}
#else
const treadle::Kernels* treadle::avx2_kernels() { return nullptr; }
#endif
