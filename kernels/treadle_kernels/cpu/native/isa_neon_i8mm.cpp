// Kernels for NEON with dot products of unsigned and signed bytes (Armv8.6; Neoverse V1 and later).
#include "kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__linux__)
#include <sys/auxv.h>

#include "vec_neon.h"

#include "table.inl"

const treadle::Kernels* treadle::neon_i8mm_kernels() {
    constexpr unsigned long kHasMixedProducts = 1ul << 13;  // HWCAP2_I8MM
    if (neon_kernels() == nullptr || (getauxval(AT_HWCAP2) & kHasMixedProducts) == 0) return nullptr;
    static constexpr Kernels kKernels = make_kernels("neon_i8mm");
    return &kKernels;
}
#else
const treadle::Kernels* treadle::neon_i8mm_kernels() { return nullptr; }
#endif
