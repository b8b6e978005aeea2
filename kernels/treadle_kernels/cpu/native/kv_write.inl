// Storing a token's keys and values, over the vocabulary of vec_*.h.
#include <cstring>

#include "formats.h"
#include "kernels.h"

namespace {

using treadle::KvWriteCall;

void write_f32(const KvWriteCall& call) {
    float* keys = reinterpret_cast<float*>(call.key_block) + call.slot / 16 * 16 * call.head_dim + call.slot % 16;
    float* values = reinterpret_cast<float*>(call.value_block) + int64_t{call.slot} * call.padded_head_dim;
    for (int64_t d = 0; d < call.head_dim; ++d) keys[16 * d] = call.key[d];
    for (int64_t d = 0; d < call.padded_head_dim; d += 16) f_store(values + d, f_load_first(call.value + d, rest(call.head_dim, d)));
}

// Numbers whose products with a query's or a weight's terms might become denormal count as zero.
inline F bf16_for_cache(F x) {
    const F nearest = f_round_bf16(x);
    return f_zero_below(nearest, f_max(nearest, f_sub(f_set(0.0f), nearest)), 0x1p-55f);
}

// Pairs of dims of a key, and pairs of positions of a value, lie side by side.
void write_bf16(const KvWriteCall& call) {
    const int64_t run = call.slot / 16 * 16, slot = call.slot % 16, padded = call.padded_head_dim;
    uint16_t* keys = reinterpret_cast<uint16_t*>(call.key_block) + run * call.head_dim + 2 * slot;
    uint16_t* values = reinterpret_cast<uint16_t*>(call.value_block) + (run + slot / 2 * 2) * padded;
    for (int64_t d = 0; d < padded; d += 16) {
        const int count = rest(call.head_dim, d);
        uint16_t words[16];
        f_store_bf16(bf16_for_cache(f_load_first(call.key + d, count)), words);
        for (int i = 0; i < count; i += 2) std::memcpy(keys + 16 * (d + i), words + i, 2 * sizeof *words);
        f_store_bf16_half_pairs(bf16_for_cache(f_load_first(call.value + d, count)), slot % 2, values + 2 * d);
    }
}

// Codes of one head into codes[padded]; returns their scale. Value = code * scale, scale = largest magnitude / 127.
inline float quantize_head(const float* x, int64_t head_dim, int64_t padded, int8_t* codes) {
    F most = f_set(0.0f);
    for (int64_t d = 0; d < head_dim; d += 16) most = f_max_magnitude(most, f_load_first(x + d, rest(head_dim, d)));
    const uint32_t bits = max_magnitude_bits(most, most);
    const float largest = treadle::f32_from_bits(bits);
    const bool is_finite = bits < 0x7f800000u, is_zero = largest < 1e-30f;
    const F inverse = f_set(127.0f / largest);
    for (int64_t d = 0; d < padded; d += 16) {
        const bool has_codes = is_finite && !is_zero && d < head_dim;
        store_codes(has_codes ? i_round(f_mul(f_load_first(x + d, rest(head_dim, d)), inverse)) : i_set(0), codes + d);
    }
    return !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / 127.0f;
}

void write_int8(const KvWriteCall& call) {
    const int64_t padded = call.padded_head_dim;
    auto* keys = reinterpret_cast<int8_t*>(call.key_block) + call.slot / 16 * 16 * call.head_dim + call.slot % 16;
    auto* values = reinterpret_cast<int8_t*>(call.value_block) + call.slot * padded;
    // The value's place holds the codes of the key meanwhile.
    call.key_scales[call.slot] = quantize_head(call.key, call.head_dim, padded, values);
    for (int64_t d = 0; d < call.head_dim; ++d) keys[16 * d] = values[d];
    call.value_scales[call.slot] = quantize_head(call.value, call.head_dim, padded, values);
}

void write_kv(const KvWriteCall& call) {
    if (call.dtype == TREADLE_KV_F32) return write_f32(call);
    if (call.dtype == TREADLE_KV_BF16) return write_bf16(call);
    write_int8(call);
}

}  // namespace
