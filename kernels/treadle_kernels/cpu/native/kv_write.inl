// Storing a token's keys and values, over plain numbers: it is a scatter, which vectors do not help.
#include "formats.h"
#include "kernels.h"

namespace {

using treadle::KvWriteCall;

inline uint16_t bf16_from_f32(float value) {
    const uint32_t bits = treadle::bits_from_f32(value);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);  // stays NaN
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Codes of one head: value = code * scale, scale = largest magnitude / 127.
inline float int8_scale(const float* x, int64_t n, float* inverse) {
    uint32_t bits = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = treadle::bits_from_f32(x[i]) & 0x7fffffffu;
        bits = magnitude > bits ? magnitude : bits;
    }
    const float largest = treadle::f32_from_bits(bits);
    if (bits >= 0x7f800000u || largest < 1e-30f) {
        *inverse = 0.0f;
        return bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
    }
    *inverse = 127.0f / largest;
    return largest / 127.0f;
}

template <class Number, class Convert>
void write_numbers(const KvWriteCall& call, const Convert& convert_key, const Convert& convert_value) {
    auto* keys = reinterpret_cast<Number*>(call.key_block) + call.slot / 16 * 16 * call.head_dim + call.slot % 16;
    auto* values = reinterpret_cast<Number*>(call.value_block) + int64_t{call.slot} * call.padded_head_dim;
    for (int64_t d = 0; d < call.head_dim; ++d) keys[16 * d] = convert_key(call.key[d]);
    for (int64_t d = 0; d < call.head_dim; ++d) values[d] = convert_value(call.value[d]);
    for (int64_t d = call.head_dim; d < call.padded_head_dim; ++d) values[d] = 0;
}

// Numbers whose products with a query's or a weight's terms might become denormal count as zero.
inline uint16_t bf16_for_cache(float value) {
    constexpr uint16_t kLeast = (127 - 55) << 7;  // 2^-55
    const uint16_t half = bf16_from_f32(value);
    return (half & 0x7fff) < kLeast ? uint16_t{0} : half;
}

// Pairs of dims of a key, and pairs of positions of a value, lie side by side.
void write_pairs(const KvWriteCall& call) {
    const int64_t run = call.slot / 16 * 16, slot = call.slot % 16, padded = call.padded_head_dim;
    uint16_t* keys = reinterpret_cast<uint16_t*>(call.key_block) + run * call.head_dim + 2 * slot;
    uint16_t* values = reinterpret_cast<uint16_t*>(call.value_block) + (run + slot / 2 * 2) * padded + slot % 2;
    for (int64_t d = 0; d < call.head_dim; d += 2) {
        keys[16 * d] = bf16_for_cache(call.key[d]);
        keys[16 * d + 1] = bf16_for_cache(call.key[d + 1]);
    }
    for (int64_t d = 0; d < call.head_dim; ++d) values[2 * d] = bf16_for_cache(call.value[d]);
    for (int64_t d = call.head_dim; d < padded; ++d) values[2 * d] = 0;
}

struct ToF32 {
    float operator()(float x) const { return x; }
};
struct ToI8 {
    float inverse;
    int8_t operator()(float x) const {
        return inverse == 0.0f ? int8_t{0} : static_cast<int8_t>(__builtin_rintf(x * inverse));
    }
};

void write_kv(const KvWriteCall& call) {
    if (call.dtype == TREADLE_KV_F32) return write_numbers<float>(call, ToF32{}, ToF32{});
    if (call.dtype == TREADLE_KV_BF16) return write_pairs(call);
    ToI8 key{}, value{};
    call.key_scales[call.slot] = int8_scale(call.key, call.head_dim, &key.inverse);
    call.value_scales[call.slot] = int8_scale(call.value, call.head_dim, &value.inverse);
    write_numbers<int8_t>(call, key, value);
}

}  // namespace
