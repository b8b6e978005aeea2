// Kernels in portable C++.
#include "vec_plain.h"

#include "table.inl"

const treadle::Kernels* treadle::plain_kernels() {
    static constexpr Kernels kKernels = make_kernels("plain");
    return &kKernels;
}
