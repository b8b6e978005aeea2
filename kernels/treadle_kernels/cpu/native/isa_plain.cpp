// Kernels in portable C++.
#include "vec_plain.h"

#include "rows.inl"
#include "linear.inl"
#include "linear_rotated.inl"
#include "linear_split.inl"
#include "attention.inl"
#include "kv_write.inl"
#include "table.inl"

const treadle::Kernels* treadle::plain_kernels() {
    static constexpr Kernels kKernels = make_kernels("plain");
    return &kKernels;
}
