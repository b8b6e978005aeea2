// Packing of weights and its inverse.
#ifndef TREADLE_PACK_H
#define TREADLE_PACK_H

#include <cstdint>

#include "formats.h"

namespace treadle {

// Checks sizes; `what` names the matrix in the error text.
int check_shape(int32_t format, int64_t n, int64_t k, const char* what);
int check_activations(int32_t activations);
// Whether weights meet such activations; floating formats always do.
int check_fit(const treadle_linear& weights, int32_t activations, const char* what);
int check_linear(const treadle_linear& weights, const char* what);

// Packs rows [0, n) of raw weights of checked shape.
void pack(const FormatInfo& info, const uint8_t* raw, int64_t n, int64_t k, uint8_t* packed);
// Decodes one row of packed weights to out[k].
void unpack_row(const treadle_linear& weights, int64_t row, float* out);
// Asks for what that reads.
void prefetch_row(const treadle_linear& weights, int64_t row);

}  // namespace treadle

#endif
