// Kernels for NEON with dot products of bytes (Armv8.2; every 64-bit Arm server since Neoverse N1).
#include "kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>

#include "vec_neon.h"

#include "table.inl"

const treadle::Kernels* treadle::neon_kernels() {
    constexpr unsigned long kHasDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
    if ((getauxval(AT_HWCAP) & kHasDotProducts) == 0) return nullptr;
    static constexpr Kernels kKernels = make_kernels("neon");
    return &kKernels;
}
#else
const treadle::Kernels* treadle::neon_kernels() { return nullptr; }
#endif
