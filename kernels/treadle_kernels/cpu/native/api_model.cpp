// The C functions for attention, sampling and whole models: check, then call.
#include <cstring>
#include <new>

#include "error.h"
#include "layers.h"
#include "model.h"
#include "pool_handle.h"
#include "sampling.h"

using namespace treadle;

struct treadle_model : Model {
    using Model::Model;
};

extern "C" {

int treadle_kv_bytes_per_block(const treadle_kv* kv, uint64_t* num_bytes) {
    TREADLE_REQUIRE(kv != nullptr && num_bytes != nullptr, "kv or num_bytes is null");
    TREADLE_TRY(check_kv(*kv));
    *num_bytes = static_cast<uint64_t>(kv_block_bytes(*kv));
    return 0;
}

int treadle_attention(treadle_pool* pool, const treadle_kv* kv, int32_t layer, const treadle_rows* rows,
                      const float* qkv, int32_t num_heads, int32_t sliding_window, float scale, int32_t num_terms,
                      float* out) {
    TREADLE_REQUIRE(pool != nullptr && kv != nullptr && rows != nullptr, "pool, kv or rows is null");
    TREADLE_TRY(check_rows(*rows, *kv));
    TREADLE_REQUIRE(layer >= 0 && layer < kv->num_layers, "layer must be from 0 to %d, is %d", kv->num_layers - 1,
                    layer);
    TREADLE_REQUIRE(num_heads >= 1 && num_heads <= 4096 && num_heads % kv->num_kv_heads == 0,
                    "num_heads must be a multiple of num_kv_heads %d, is %d", kv->num_kv_heads, num_heads);
    TREADLE_REQUIRE(sliding_window >= 0, "sliding_window must be at least 0, is %d", sliding_window);
    TREADLE_REQUIRE(num_terms >= 0 && num_terms <= 2, "num_terms must be from 0 to 2, is %d", num_terms);
    TREADLE_REQUIRE((qkv != nullptr && out != nullptr) || rows->num_tokens == 0, "qkv or out is null");
    return guarded([&] {
        const int64_t query_width = int64_t{num_heads} * kv->head_dim,
                      kv_width = int64_t{kv->num_kv_heads} * kv->head_dim;
        for (int32_t row = 0; row < rows->num_rows; ++row) {
            const int32_t begin = rows->query_starts[row], end = rows->query_starts[row + 1];
            for (int32_t token = begin; token < end; ++token) {
                const float* key = qkv + token * (query_width + 2 * kv_width) + query_width;
                write_token(*kv, layer, rows->block_ids + rows->block_starts[row],
                            rows->context_lens[row] - (end - token), key, key + kv_width);
            }
        }
        AttentionPlan plan;
        plan.reserve(pool->num_threads(), num_heads, kv->num_kv_heads, kv->head_dim);
        plan.make(*rows, *kv, {num_heads, sliding_window, scale, num_terms}, pool->num_threads());
        plan.run(*pool, *kv, layer, qkv, out);
        return 0;
    });
}

int treadle_sample(treadle_pool* pool, const float* logits, int64_t num_rows, int64_t vocab_size,
                   const treadle_sampling* sampling, int32_t* token_ids) {
    TREADLE_REQUIRE(pool != nullptr, "pool is null");
    TREADLE_REQUIRE(num_rows >= 0 && vocab_size >= 1 && vocab_size <= INT32_MAX,
                    "logits must have at least one column");
    TREADLE_REQUIRE(num_rows == 0 || (logits != nullptr && sampling != nullptr && token_ids != nullptr),
                    "logits, sampling or token_ids is null");
    for (int64_t row = 0; row < num_rows; ++row) TREADLE_TRY(check_sampling(sampling[row], row));
    return guarded([&] {
        Buffer<float> weights;
        sample_rows(*pool, weights, logits, num_rows, vocab_size, sampling, token_ids);
        return 0;
    });
}

double treadle_uniform(uint64_t seed, uint32_t sample_index, uint64_t position) {
    return uniform(seed, sample_index, position);
}

int treadle_model_create(const treadle_model_desc* desc, treadle_pool* pool, treadle_model** model) {
    TREADLE_REQUIRE(desc != nullptr && pool != nullptr && model != nullptr, "desc, pool or model is null");
    TREADLE_TRY(check_model(*desc));
    return guarded([&] {
        *model = new treadle_model(*desc, *pool);
        return 0;
    });
}

void treadle_model_destroy(treadle_model* model) { delete model; }

uint64_t treadle_model_scratch_bytes(const treadle_model* model) {
    return model == nullptr ? 0 : model->scratch_bytes();
}

int treadle_model_step(treadle_model* model, const treadle_kv* kv, const treadle_rows* rows, const int32_t* token_ids,
                       const treadle_sampling* sampling, int32_t num_sampled, int32_t* sampled, float* logits) {
    TREADLE_REQUIRE(model != nullptr && kv != nullptr && rows != nullptr, "model, kv or rows is null");
    TREADLE_TRY(model->check_step(*kv, *rows, token_ids, sampling, num_sampled));
    TREADLE_REQUIRE(sampled != nullptr || num_sampled == 0, "sampled is null");
    return guarded([&] {
        model->step(*kv, *rows, token_ids, sampling, num_sampled, sampled, logits);
        return 0;
    });
}

int treadle_model_observe(treadle_model* model, double* squares, int64_t num_squares) {
    TREADLE_REQUIRE(model != nullptr, "model is null");
    const int64_t wanted = model->num_inputs();
    TREADLE_REQUIRE(squares == nullptr || num_squares == wanted, "squares must have %lld numbers, has %lld",
                    static_cast<long long>(wanted), static_cast<long long>(num_squares));
    model->observe(squares);
    return 0;
}

void treadle_model_phase_seconds(const treadle_model* model, double seconds[TREADLE_NUM_PHASES]) {
    if (model != nullptr && seconds != nullptr) {
        std::memcpy(seconds, model->phase_seconds(), TREADLE_NUM_PHASES * sizeof(double));
    }
}

}  // extern "C"
