// Kernels for AVX2 with the 256-bit integer dot product (AVX-VNNI), as in processors without AVX-512.
#include "kernels.h"

#if defined(__AVXVNNI__)
#include <cpuid.h>

#include "vec_avx2.h"

#include "table.inl"

const treadle::Kernels* treadle::avx_vnni_kernels() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool has_leaf = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0;
    if (avx2_kernels() == nullptr || !has_leaf || (eax >> 4 & 1) == 0) return nullptr;
    static constexpr Kernels kKernels = make_kernels("avx_vnni");
    return &kKernels;
}
#else
const treadle::Kernels* treadle::avx_vnni_kernels() { return nullptr; }
#endif
