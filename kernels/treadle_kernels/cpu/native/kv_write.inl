// Storing a token's keys and values, over the vocabulary of vec_*.h.
#include <cstring>

#include "formats.h"
#include "kernels.h"

namespace {

using treadle::KvWriteCall;

void write_f32(const KvWriteCall& call) {
    float* keys = reinterpret_cast<float*>(call.keys) + call.slot;
    float* values = reinterpret_cast<float*>(call.values) + int64_t{call.slot} * call.padded_head_dim;
    for (int64_t d = 0; d < call.head_dim; ++d) keys[16 * d] = call.key[d];
    for (int64_t d = 0; d < call.padded_head_dim; d += 16) {
        f_store(values + d, f_load_first(call.value + d, rest(call.head_dim, d)));
    }
}

// Numbers whose products with a query's or a weight's terms might become denormal count as zero.
inline F bf16_for_cache(F x) {
    const F nearest = f_round_bf16(x);
    return f_zero_below(nearest, f_max(nearest, f_sub(f_set(0.0f), nearest)), 0x1p-55f);
}

// Pairs of dims of a key, and pairs of positions of a value, lie side by side. Values of a key that is not finite are NaN,
// since scores that are NaN give no weight (attention_terms.inl).
void write_bf16(const KvWriteCall& call) {
    const int64_t slot = call.slot, padded = call.padded_head_dim;
    uint16_t* keys = reinterpret_cast<uint16_t*>(call.keys) + 2 * slot;
    uint16_t* values = reinterpret_cast<uint16_t*>(call.values) + slot / 2 * 2 * padded;
    F spoils = f_set(0.0f);
    for (int64_t d = 0; d < padded; d += 16) {
        const int count = rest(call.head_dim, d);
        uint16_t words[16];
        const F numbers = f_store_bf16(bf16_for_cache(f_load_first(call.key + d, count)), words);
        spoils = f_add(spoils, f_sub(numbers, numbers));
        for (int i = 0; i < count; i += 2) std::memcpy(keys + 16 * (d + i), words + i, 2 * sizeof *words);
    }
    const F spoil = f_set(f_sum(spoils));  // 0 or NaN
    for (int64_t d = 0; d < padded; d += 16) {
        const F numbers = bf16_for_cache(f_load_first(call.value + d, rest(call.head_dim, d)));
        f_store_bf16_half_pairs(f_add(numbers, spoil), slot % 2, values + 2 * d);
    }
}

inline CodeScale scale_of_head(const float* x, int64_t head_dim) {
    F most = f_set(0.0f);
    for (int64_t d = 0; d < head_dim; d += 16) most = f_max_magnitude(most, f_load_first(x + d, rest(head_dim, d)));
    return CodeScale(max_magnitude_bits(most, most));
}

// Quads of dims of a key, and quads of positions of a value, lie side by side; codes have an offset of 128.
void write_int8(const KvWriteCall& call) {
    const int64_t slot = call.slot, padded = call.padded_head_dim;
    uint8_t* keys = call.keys + 4 * slot;
    uint8_t* values = call.values + slot / 4 * 4 * padded + slot % 4;
    const CodeScale of_key = scale_of_head(call.key, call.head_dim);
    const CodeScale of_value = scale_of_head(call.value, call.head_dim);
    *call.key_scale = of_key.scale;
    *call.value_scale = of_value.scale;
    for (int64_t d = 0; d < padded; d += 16) {
        const int count = rest(call.head_dim, d);
        int8_t codes[2][16];
        store_codes(of_key.codes(f_load_first(call.key + d, count)), codes[0]);
        store_codes(of_value.codes(f_load_first(call.value + d, count)), codes[1]);
        for (int i = 0; i < 16; i += 4) {
            uint32_t quad;
            std::memcpy(&quad, codes[0] + i, sizeof quad);
            quad ^= 0x80808080u;
            std::memcpy(keys + 16 * (d + i), &quad, sizeof quad);
        }
        for (int i = 0; i < 16; ++i) values[4 * (d + i)] = static_cast<uint8_t>(codes[1][i] ^ 0x80);
    }
}

void write_kv(const KvWriteCall& call) {
    if (call.dtype == TREADLE_KV_F32) return write_f32(call);
    if (call.dtype == TREADLE_KV_BF16) return write_bf16(call);
    write_int8(call);
}

}  // namespace
