// The rotation of rows of activations and weights: both are rotated alike, so products stay what they were, times a power
// of two; but a large number is spread over its neighbours, and a row can do with one scale for all of its codes.
//
// The Walsh-Hadamard transform in natural order, of each run of the largest power of two that divides the row's length,
// without its factor. As in Ashkboos et al., QuaRot (2024), here of activations as they come.
#ifndef TREADLE_ROTATION_H
#define TREADLE_ROTATION_H

#include <cstdint>

namespace treadle {

// Numbers that are rotated together.
static inline int64_t rotation_length(int64_t k) { return k & -k; }

static inline void rotate(float* x, int64_t k) {
    for (int64_t apart = 1; apart < rotation_length(k); apart *= 2) {
        for (int64_t begin = 0; begin < k; begin += 2 * apart) {
            for (int64_t i = begin; i < begin + apart; ++i) {
                const float a = x[i], b = x[i + apart];
                x[i] = a + b;
                x[i + apart] = a - b;
            }
        }
    }
}

}  // namespace treadle

#endif
