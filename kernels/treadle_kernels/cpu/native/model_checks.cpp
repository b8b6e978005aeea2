// What a description, a cache and a step must look like.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "error.h"
#include "model.h"
#include "pack.h"
#include "sampling.h"

namespace treadle {

namespace {

constexpr int32_t kMaxWidth = 1 << 24;

// Packed weights that meet the model's activations.
int check_model_linear(const treadle_model_desc& desc, const treadle_linear& weights, const char* what) {
    TREADLE_TRY(check_linear(weights, what));
    TREADLE_TRY(check_fit(weights, desc.activations, what));
    return 0;
}

int check_layer_linear(const treadle_model_desc& desc, const treadle_linear& weights, int64_t n, int64_t k, int layer,
                       const char* name) {
    char what[64];
    snprintf(what, sizeof what, "layer %d, %s", layer, name);
    TREADLE_TRY(check_model_linear(desc, weights, what));
    TREADLE_REQUIRE(weights.n == n && weights.k == k, "%s: must have shape [%lld, %lld], has [%d, %d]", what,
                    static_cast<long long>(n), static_cast<long long>(k), weights.n, weights.k);
    return 0;
}

int check_terms(int32_t activations, int32_t terms) {
    const bool fits = activations == TREADLE_ACTIVATIONS_INT8
                          ? terms == 1 || terms == 2
                          : terms == (activations == TREADLE_ACTIVATIONS_SPLIT ? 2 : 1);
    TREADLE_REQUIRE(fits, "activations of kind %d do not come in %d terms", activations, terms);
    return 0;
}

int check_layer(const treadle_model_desc& desc, int index) {
    const treadle_layer& layer = desc.layers[index];
    const int64_t hidden = desc.hidden_size, width = desc.intermediate_size;
    const int64_t query = int64_t{desc.num_heads} * desc.head_dim, key = int64_t{desc.num_kv_heads} * desc.head_dim;
    TREADLE_REQUIRE(layer.attention_norm != nullptr && layer.mlp_norm != nullptr, "layer %d: a norm is null", index);
    TREADLE_TRY(check_layer_linear(desc, layer.query, query, hidden, index, "query"));
    TREADLE_TRY(check_layer_linear(desc, layer.key, key, hidden, index, "key"));
    TREADLE_TRY(check_layer_linear(desc, layer.value, key, hidden, index, "value"));
    TREADLE_TRY(check_layer_linear(desc, layer.output, hidden, query, index, "output"));
    TREADLE_TRY(check_layer_linear(desc, layer.gate, width, hidden, index, "gate"));
    TREADLE_TRY(check_layer_linear(desc, layer.up, width, hidden, index, "up"));
    TREADLE_TRY(check_layer_linear(desc, layer.down, hidden, width, index, "down"));
    return 0;
}

}  // namespace

int check_model(const treadle_model_desc& desc) {
    struct Size {
        const char* name;
        int32_t value, at_most;
    };
    const Size sizes[] = {{"num_layers", desc.num_layers, 4096},
                          {"hidden_size", desc.hidden_size, kMaxWidth},
                          {"intermediate_size", desc.intermediate_size, kMaxWidth},
                          {"num_heads", desc.num_heads, 4096},
                          {"num_kv_heads", desc.num_kv_heads, 4096},
                          {"head_dim", desc.head_dim, 4096},
                          {"vocab_size", desc.vocab_size, kMaxWidth},
                          {"max_positions", desc.max_positions, 1 << 30},
                          {"max_num_tokens", desc.max_num_tokens, 1 << 20},
                          {"max_num_sampled", desc.max_num_sampled, 1 << 20},
                          {"activation_terms", desc.activation_terms, 2}};
    for (const Size& size : sizes) {
        TREADLE_REQUIRE(size.value >= 1 && size.value <= size.at_most, "%s must be from 1 to %d, is %d", size.name,
                        size.at_most, size.value);
    }
    TREADLE_TRY(check_activations(desc.activations));
    TREADLE_TRY(check_terms(desc.activations, desc.activation_terms));
    TREADLE_REQUIRE(desc.num_heads % desc.num_kv_heads == 0, "num_kv_heads %d must divide num_heads %d",
                    desc.num_kv_heads, desc.num_heads);
    TREADLE_REQUIRE(desc.head_dim % 2 == 0, "head_dim must be even, is %d", desc.head_dim);
    TREADLE_REQUIRE(desc.sliding_window >= 0, "sliding_window must be at least 0, is %d", desc.sliding_window);
    TREADLE_REQUIRE(desc.rms_norm_eps >= 0.0f, "rms_norm_eps must be at least 0, is %g",
                    static_cast<double>(desc.rms_norm_eps));
    TREADLE_REQUIRE(
        desc.layers != nullptr && desc.final_norm != nullptr && desc.rope_cos != nullptr && desc.rope_sin != nullptr,
        "layers, final_norm, rope_cos or rope_sin is null");
    for (const auto& [weights, name] : {std::pair{&desc.embedding, "embedding"}, std::pair{&desc.head, "head"}}) {
        // Embeddings are decoded, whatever their format.
        TREADLE_TRY(weights == &desc.head ? check_model_linear(desc, *weights, name) : check_linear(*weights, name));
        TREADLE_REQUIRE(weights->n == desc.vocab_size && weights->k == desc.hidden_size,
                        "%s: must have shape [%d, %d], has [%d, %d]", name, desc.vocab_size, desc.hidden_size,
                        weights->n, weights->k);
    }
    for (int index = 0; index < desc.num_layers; ++index) TREADLE_TRY(check_layer(desc, index));
    return 0;
}

int check_kv(const treadle_kv& kv) {
    TREADLE_REQUIRE(kv.dtype >= TREADLE_KV_F32 && kv.dtype <= TREADLE_KV_INT8, "unknown KV dtype %d", kv.dtype);
    TREADLE_REQUIRE(kv.block_size >= 16 && kv.block_size <= 1 << 16 && kv.block_size % 16 == 0,
                    "block_size must be a multiple of 16, is %d", kv.block_size);
    TREADLE_REQUIRE(kv.num_blocks >= 1, "num_blocks must be at least 1, is %d", kv.num_blocks);
    TREADLE_REQUIRE(kv.num_layers >= 1 && kv.num_layers <= 4096, "KV num_layers must be from 1 to 4096, is %d",
                    kv.num_layers);
    TREADLE_REQUIRE(kv.num_kv_heads >= 1 && kv.num_kv_heads <= 4096, "num_kv_heads must be from 1 to 4096, is %d",
                    kv.num_kv_heads);
    TREADLE_REQUIRE(kv.head_dim >= 2 && kv.head_dim <= 4096 && kv.head_dim % 2 == 0,
                    "head_dim must be even and from 2 to 4096, is %d", kv.head_dim);
    return 0;
}

int check_rows(const treadle_rows& rows, const treadle_kv& kv) {
    TREADLE_TRY(check_kv(kv));
    TREADLE_REQUIRE(kv.data != nullptr && reinterpret_cast<uintptr_t>(kv.data) % 64 == 0,
                    "KV memory must start at a multiple of 64 bytes");
    const uint64_t wanted = static_cast<uint64_t>(kv_block_bytes(kv)) * static_cast<uint64_t>(kv.num_blocks);
    TREADLE_REQUIRE(kv.num_bytes == wanted, "KV memory must have %llu bytes, has %llu",
                    static_cast<unsigned long long>(wanted), static_cast<unsigned long long>(kv.num_bytes));
    TREADLE_REQUIRE(rows.num_rows >= 0 && rows.num_tokens >= 0, "num_rows and num_tokens must be at least 0");
    TREADLE_REQUIRE(rows.query_starts != nullptr && rows.block_starts != nullptr,
                    "query_starts or block_starts is null");
    TREADLE_REQUIRE(rows.num_rows == 0 || (rows.context_lens != nullptr && rows.block_ids != nullptr),
                    "context_lens or block_ids is null");
    TREADLE_REQUIRE(rows.query_starts[0] == 0 && rows.query_starts[rows.num_rows] == rows.num_tokens,
                    "query_starts must go from 0 to num_tokens %d", rows.num_tokens);
    TREADLE_REQUIRE(rows.block_starts[0] == 0, "block_starts must begin with 0");
    for (int32_t row = 0; row < rows.num_rows; ++row) {
        const int64_t queries = int64_t{rows.query_starts[row + 1]} - rows.query_starts[row];
        const int64_t blocks = int64_t{rows.block_starts[row + 1]} - rows.block_starts[row];
        const int64_t context = rows.context_lens[row];
        TREADLE_REQUIRE(queries >= 0 && blocks >= 0, "row %d: query_starts and block_starts must not decrease", row);
        TREADLE_REQUIRE(context >= queries, "row %d: %lld tokens exceed the context of %lld", row,
                        static_cast<long long>(queries), static_cast<long long>(context));
        TREADLE_REQUIRE(queries == 0 || blocks * kv.block_size >= context,
                        "row %d: %lld blocks of %d slots do not hold a context of %lld", row,
                        static_cast<long long>(blocks), kv.block_size, static_cast<long long>(context));
        for (int64_t i = rows.block_starts[row]; i < rows.block_starts[row + 1]; ++i) {
            TREADLE_REQUIRE(rows.block_ids[i] >= 0 && rows.block_ids[i] < kv.num_blocks,
                            "row %d: block id %d is outside the pool of %d", row, rows.block_ids[i], kv.num_blocks);
        }
    }
    return 0;
}

int Model::check_step(const treadle_kv& kv, const treadle_rows& rows, const int32_t* token_ids,
                      const treadle_sampling* sampling, int32_t num_sampled) const {
    TREADLE_TRY(check_rows(rows, kv));
    TREADLE_REQUIRE(
        kv.num_layers == desc_.num_layers && kv.num_kv_heads == desc_.num_kv_heads && kv.head_dim == desc_.head_dim,
        "the KV cache is for %d layers, %d heads of %d; the model has %d, %d of %d", kv.num_layers, kv.num_kv_heads,
        kv.head_dim, desc_.num_layers, desc_.num_kv_heads, desc_.head_dim);
    TREADLE_REQUIRE(rows.num_tokens <= desc_.max_num_tokens, "the step has %d tokens, at most %d are allowed",
                    rows.num_tokens, desc_.max_num_tokens);
    TREADLE_REQUIRE(num_sampled >= 0 && num_sampled <= desc_.max_num_sampled,
                    "the step samples %d tokens, at most %d are allowed", num_sampled, desc_.max_num_sampled);
    TREADLE_REQUIRE(token_ids != nullptr || rows.num_tokens == 0, "token_ids is null");
    TREADLE_REQUIRE(sampling != nullptr || num_sampled == 0, "sampling is null");
    for (int32_t token = 0; token < rows.num_tokens; ++token) {
        TREADLE_REQUIRE(token_ids[token] >= 0 && token_ids[token] < desc_.vocab_size,
                        "token_ids[%d] must be from 0 to %d, is %d", token, desc_.vocab_size - 1, token_ids[token]);
    }
    for (int32_t row = 0; row < rows.num_rows; ++row) {
        TREADLE_REQUIRE(rows.context_lens[row] <= desc_.max_positions, "row %d: context of %d exceeds %d positions",
                        row, rows.context_lens[row], desc_.max_positions);
    }
    for (int32_t i = 0; i < num_sampled; ++i) {
        TREADLE_TRY(check_sampling(sampling[i], i));
        TREADLE_REQUIRE(sampling[i].token_index >= 0 && sampling[i].token_index < rows.num_tokens,
                        "sampling[%d]: token_index must be from 0 to %d, is %d", i, rows.num_tokens - 1,
                        sampling[i].token_index);
    }
    return 0;
}

}  // namespace treadle
