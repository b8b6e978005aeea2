// Powers of two as bfloat16, made of whole numbers: a softmax weight is rounded to eight bits anyway.
//
// The bits of a bfloat16 from 2^-126 on, as a whole number b, say that it is 2^(b / 128 - 127) wherever b is a multiple of
// 128, and up to 6 % more in between, where bits are linear and powers are not. After N. Schraudolph, A Fast, Compact
// Approximation of the Exponential Function (1999); what is too much is taken off again by a cubic. What is left is 0.24 %
// (root of the mean square; 0.17 % if powers were rounded to the nearest bfloat16), and as often too much as too little:
// the largest weight of a row is exact, so a mean error of the others would tell.
#ifndef TREADLE_POWERS_H
#define TREADLE_POWERS_H

#include <cstdint>

namespace treadle {

constexpr int kBitsOfOne = 127 * 128;
// Of 2^-39: what is less counts as 0. See attention_terms.inl for what that is good for.
constexpr int kLeastPowerBits = kBitsOfOne - 39 * 128;
constexpr int kExcessFactor = 40;

// What to take off from bits. No number on the way has more than 16 bits.
constexpr int power_excess(int bits) {
    const int part = bits >> 1 & 63, parabola = part * (64 - part);
    return (parabola * kExcessFactor + (parabola * part >> 3) + 2048) >> 12;
}

}  // namespace treadle

#endif
