// Prints a digest of what each operation of the CPU engine gives with the instruction sets that its arguments name:
//   <instruction set> <operation> <digest>
// Numbers are pseudo-random and the same everywhere, so equal digests mean equal bits, also between kinds of machines.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "treadle_cpu.h"

namespace {

void check(int status) {
    if (status == 0) return;
    std::fprintf(stderr, "%s\n", treadle_cpu_last_error());
    std::exit(1);
}

uint64_t random_state = 1;

// SplitMix64 (Steele, Lea and Flood 2014).
uint64_t random_bits() {
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
// In [-scale, scale), with a large one now and then.
float random_number(float scale) {
    const float x = static_cast<float>(static_cast<int64_t>(random_bits() >> 40) - (1 << 23)) / (1 << 23);
    return random_bits() % 64 == 0 ? 8 * scale * x : scale * x;
}
std::vector<float> random_numbers(size_t count, float scale = 1.0f) {
    std::vector<float> numbers(count);
    for (float& x : numbers) x = random_number(scale);
    return numbers;
}

class Digest {
 public:
    // FNV-1a.
    void add(const void* data, size_t num_bytes) {
        const auto* bytes = static_cast<const uint8_t*>(data);
        for (size_t i = 0; i < num_bytes; ++i) value_ = (value_ ^ bytes[i]) * 0x100000001b3u;
    }
    template <class Number>
    void add(const std::vector<Number>& numbers) {
        add(numbers.data(), numbers.size() * sizeof(Number));
    }
    void print(const std::string& operation) const {
        std::printf("%s %s %016llx\n", treadle_cpu_isa(), operation.c_str(), static_cast<unsigned long long>(value_));
    }

 private:
    uint64_t value_ = 0xcbf29ce484222325u;
};

// Zeros at a multiple of 64.
struct Memory {
    explicit Memory(size_t num_bytes) : size((num_bytes + 63) / 64 * 64), data(std::aligned_alloc(64, size)) {
        std::memset(data, 0, size);
    }
    Memory(const Memory&) = delete;
    ~Memory() { std::free(data); }
    const size_t size;
    void* const data;
};

struct BlockFormat {
    treadle_format format;
    const char* name;
    size_t num_bytes;                // of a block
    std::vector<size_t> halves;      // where a block has float16 numbers, which any bits would make infinite
};
const std::vector<BlockFormat> kFormats = {
    {TREADLE_F32, "F32", 4, {}},           {TREADLE_F16, "F16", 2, {0}},          {TREADLE_BF16, "BF16", 2, {}},
    {TREADLE_Q4_0, "Q4_0", 18, {0}},       {TREADLE_Q4_1, "Q4_1", 20, {0, 2}},    {TREADLE_Q5_0, "Q5_0", 22, {0}},
    {TREADLE_Q5_1, "Q5_1", 24, {0, 2}},    {TREADLE_Q8_0, "Q8_0", 34, {0}},       {TREADLE_Q4_K, "Q4_K", 144, {0, 2}},
    {TREADLE_Q5_K, "Q5_K", 176, {0, 2}},   {TREADLE_Q6_K, "Q6_K", 210, {208}},    {TREADLE_ROTATED, "ROTATED", 4, {}},
};
const BlockFormat& format_of(treadle_format format) {
    for (const BlockFormat& found : kFormats) {
        if (found.format == format) return found;
    }
    std::abort();
}

std::vector<uint8_t> random_weights(const BlockFormat& of, size_t n, size_t k) {
    uint64_t num_bytes = 0;
    check(treadle_raw_bytes(of.format, n, k, &num_bytes));
    std::vector<uint8_t> raw(num_bytes);
    if (of.format == TREADLE_F32 || of.format == TREADLE_ROTATED) {
        const std::vector<float> numbers = random_numbers(n * k, 0.1f);
        std::memcpy(raw.data(), numbers.data(), num_bytes);
        return raw;
    }
    if (of.format == TREADLE_BF16) {
        for (size_t i = 0; i < n * k; ++i) {
            const float x = random_number(0.1f);
            std::memcpy(&raw[2 * i], reinterpret_cast<const uint8_t*>(&x) + 2, 2);
        }
        return raw;
    }
    for (uint8_t& byte : raw) byte = static_cast<uint8_t>(random_bits());
    for (size_t block = 0; block < num_bytes; block += of.num_bytes) {
        // Their magnitudes become about 2^-7.
        for (const size_t half : of.halves) raw[block + half + 1] = 0x20 | (random_bits() & 0x83);
    }
    return raw;
}

// A layer and the memory of its weights.
struct Layer {
    Layer(treadle_format format, int32_t n, int32_t k, bool has_bias = false)
        : memory(packed_bytes(format, n, k)), bias(has_bias ? random_numbers(n) : std::vector<float>()) {
        const std::vector<uint8_t> raw = random_weights(format_of(format), n, k);
        check(treadle_pack(format, raw.data(), raw.size(), n, k, memory.data, packed_bytes(format, n, k)));
        weights = {memory.data, packed_bytes(format, n, k), has_bias ? bias.data() : nullptr, format, n, k};
    }
    static uint64_t packed_bytes(treadle_format format, int32_t n, int32_t k) {
        uint64_t num_bytes = 0;
        check(treadle_packed_bytes(format, n, k, &num_bytes));
        return num_bytes;
    }
    Memory memory;
    std::vector<float> bias;
    treadle_linear weights;
};

void linear_layers(treadle_pool* pool) {
    for (const BlockFormat& of : kFormats) {
        const int32_t n = 52, k = 512;  // the last tile is not full
        const Layer layer(of.format, n, k, true);
        std::vector<int32_t> rows = {0, 17, 51};
        std::vector<float> unpacked(rows.size() * k);
        Digest decoded;
        check(treadle_unpack_rows(&layer.weights, rows.data(), rows.size(), unpacked.data()));
        decoded.add(unpacked);
        decoded.print(std::string("unpack-") + of.name);
        for (int32_t activations = 0; activations <= TREADLE_ACTIVATIONS_BF16; ++activations) {
            if ((of.format == TREADLE_ROTATED) != (activations == TREADLE_ACTIVATIONS_ROTATED)) continue;
            Digest digest;
            for (const int64_t m : {1, 2, 3, 7, 21}) {
                const std::vector<float> x = random_numbers(m * k);
                std::vector<float> y(m * n);
                check(treadle_linear_forward(pool, &layer.weights, x.data(), m, activations, y.data()));
                digest.add(y);
            }
            digest.print(std::string("linear-") + of.name + "-" + std::to_string(activations));
        }
    }
}

void rows_of_numbers(treadle_pool* pool) {
    for (const int64_t n : {1, 15, 64, 97}) {
        const std::vector<float> x = random_numbers(3 * n, 4.0f), up = random_numbers(3 * n);
        const std::vector<float> weight = random_numbers(n);
        std::vector<float> y(3 * n);
        Digest digest;
        check(treadle_rms_norm(x.data(), weight.data(), 3, n, 1e-5f, y.data()));
        digest.add(y);
        check(treadle_swiglu(x.data(), up.data(), 3, n, y.data()));
        digest.add(y);
        digest.print("rows-" + std::to_string(n));
    }
    const std::vector<float> x = random_numbers(5 * 96);
    std::vector<int8_t> codes(x.size());
    std::vector<float> scales(x.size() / 32);
    check(treadle_quantize(x.data(), 5, 96, codes.data(), scales.data()));
    Digest digest;
    digest.add(codes);
    digest.add(scales);
    digest.print("quantize");

    const std::vector<float> logits = random_numbers(4 * 1000, 6.0f);
    const treadle_sampling sampling[4] = {{1, 0, 0, 0, 0.0f, 0.0f, 1.0f, 0},
                                          {2, 1, 0, 1, 0.8f, 0.0f, 0.9f, 0},
                                          {3, 2, 0, 2, 1.2f, 0.01f, 1.0f, 40},
                                          {4, 3, 1, 3, 1.0f, 0.0f, 1.0f, 0}};
    std::vector<int32_t> chosen(4);
    check(treadle_sample(pool, logits.data(), 4, 1000, sampling, chosen.data()));
    Digest of_sampling;
    of_sampling.add(chosen);
    of_sampling.print("sample");
}

// A small decoder over three steps: prompts of two requests, then one decodes beside a longer prompt, then both decode.
void model(treadle_pool* pool, treadle_format format, treadle_activations activations, int32_t terms,
           treadle_kv_dtype kv_dtype, int32_t head_dim, int32_t window) {
    constexpr int32_t kHidden = 128, kHeads = 6, kKvHeads = 2, kInner = 192, kVocab = 100, kPositions = 512;
    constexpr int32_t kLayers = 1, kBlocks = 21, kBlockSize = 32;
    const int32_t width = kHeads * head_dim, kv_width = kKvHeads * head_dim;
    const treadle_format of_output = width % 64 == 0 ? format : TREADLE_F32;
    std::deque<Layer> owned;
    const auto layer_of = [&owned](treadle_format of, int32_t n, int32_t k) {
        return owned.emplace_back(of, n, k).weights;
    };
    const std::vector<float> norm = random_numbers(kHidden), head_norm = random_numbers(head_dim);
    std::vector<treadle_layer> layers(kLayers);
    for (treadle_layer& layer : layers) {
        layer.attention_norm = layer.mlp_norm = norm.data();
        layer.query_norm = layer.key_norm = head_norm.data();
        layer.query = layer_of(format, width, kHidden);
        layer.key = layer_of(format, kv_width, kHidden);
        layer.value = layer_of(format, kv_width, kHidden);
        layer.output = layer_of(of_output, kHidden, width);
        layer.gate = layer_of(format, kInner, kHidden);
        layer.up = layer_of(format, kInner, kHidden);
        layer.down = layer_of(format, kHidden, kInner);
    }
    const std::vector<float> cosines = random_numbers(kPositions * head_dim / 2);
    const std::vector<float> sines = random_numbers(kPositions * head_dim / 2);
    treadle_model_desc desc = {};
    desc.layers = layers.data();
    desc.final_norm = norm.data();
    desc.rope_cos = cosines.data();
    desc.rope_sin = sines.data();
    desc.embedding = layer_of(TREADLE_F16, kVocab, kHidden);
    desc.head = format == TREADLE_ROTATED ? layer_of(format, kVocab, kHidden) : desc.embedding;
    desc.num_layers = kLayers;
    desc.hidden_size = kHidden;
    desc.intermediate_size = kInner;
    desc.num_heads = kHeads;
    desc.num_kv_heads = kKvHeads;
    desc.head_dim = head_dim;
    desc.vocab_size = kVocab;
    desc.max_positions = kPositions;
    desc.sliding_window = window;
    desc.rms_norm_eps = 1e-5f;
    desc.max_num_tokens = 256;
    desc.max_num_sampled = 4;
    desc.activations = activations;
    desc.activation_terms = terms;
    treadle_model* decoder = nullptr;
    check(treadle_model_create(&desc, pool, &decoder));

    treadle_kv kv = {nullptr, 0, kv_dtype, kBlocks, kBlockSize, kLayers, kKvHeads, head_dim};
    uint64_t block_bytes = 0;
    check(treadle_kv_bytes_per_block(&kv, &block_bytes));
    const Memory cache(kBlocks * block_bytes);
    kv.data = cache.data;
    kv.num_bytes = kBlocks * block_bytes;

    Digest digest;
    const int32_t lengths[3][2] = {{140, 3}, {1, 37}, {1, 1}};
    int32_t context[2] = {0, 0};
    std::vector<int32_t> blocks;
    for (int32_t block = 1; block < kBlocks; ++block) blocks.push_back(block);
    for (const auto& step : lengths) {
        const int32_t starts[3] = {0, step[0], step[0] + step[1]}, block_starts[3] = {0, 10, 20};
        for (int i = 0; i < 2; ++i) context[i] += step[i];
        const treadle_rows rows = {starts, context, blocks.data(), block_starts, 2, starts[2]};
        std::vector<int32_t> tokens(starts[2]), sampled(2);
        for (int32_t& token : tokens) token = static_cast<int32_t>(random_bits() % kVocab);
        const treadle_sampling sampling[2] = {{1, 0, 0, starts[1] - 1, 0.0f, 0.0f, 1.0f, 0},
                                              {2, 1, 0, starts[2] - 1, 1.0f, 0.0f, 0.9f, 0}};
        std::vector<float> logits(2 * kVocab);
        check(treadle_model_step(decoder, &kv, &rows, tokens.data(), sampling, 2, sampled.data(), logits.data()));
        for (const float logit : logits) {
            if (!std::isfinite(logit)) std::abort();
        }
        digest.add(logits);
        digest.add(sampled);
    }
    digest.add(cache.data, cache.size);
    digest.print("model-" + std::string(format_of(format).name) + "-" + std::to_string(activations) + "-terms" +
                 std::to_string(terms) + "-kv" + std::to_string(kv_dtype) + "-head" + std::to_string(head_dim) +
                 "-window" + std::to_string(window));
    treadle_model_destroy(decoder);
}

void models(treadle_pool* pool) {
    for (const auto kv_dtype : {TREADLE_KV_F32, TREADLE_KV_BF16, TREADLE_KV_INT8}) {
        model(pool, TREADLE_Q4_1, TREADLE_ACTIVATIONS_INT8, 2, kv_dtype, 64, 0);
        model(pool, TREADLE_Q4_1, TREADLE_ACTIVATIONS_SPLIT, 2, kv_dtype, 64, 0);
        model(pool, TREADLE_Q4_1, TREADLE_ACTIVATIONS_BF16, 1, kv_dtype, 64, 0);
        model(pool, TREADLE_ROTATED, TREADLE_ACTIVATIONS_ROTATED, 1, kv_dtype, 64, 0);
        model(pool, TREADLE_Q8_0, TREADLE_ACTIVATIONS_INT8, 1, kv_dtype, 20, 70);
        model(pool, TREADLE_Q8_0, TREADLE_ACTIVATIONS_SPLIT, 2, kv_dtype, 20, 70);
        model(pool, TREADLE_Q8_0, TREADLE_ACTIVATIONS_BF16, 1, kv_dtype, 20, 70);
    }
}

}  // namespace

int main(int argc, char** argv) {
    treadle_pool* pool = nullptr;
    check(treadle_pool_create(2, 20, &pool));
    for (int i = 1; i < argc; ++i) {
        check(treadle_cpu_select_isa(argv[i]));
        random_state = 1;
        linear_layers(pool);
        rows_of_numbers(pool);
        models(pool);
    }
    treadle_pool_destroy(pool);
}
