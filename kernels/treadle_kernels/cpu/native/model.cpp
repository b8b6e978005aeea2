#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pack.h"
#include "sampling.h"

namespace treadle {

namespace {

// Rows that one chunk of a row-wise operation takes: a few microseconds.
constexpr int64_t kRowsPerChunk = 8;

void add_terms(float* y, const float* rest, const float* bias, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] += rest[i];
    if (bias == nullptr) return;
    for (int64_t i = 0; i < n; ++i) y[i] += bias[i];
}

// Sums of squares by column; returns where those of the next matrix go.
double* write_squares(const float* values, int64_t rows, int64_t k, double* out) {
    std::fill(out, out + k, 0.0);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < k; ++i) out[i] += static_cast<double>(values[row * k + i]) * values[row * k + i];
    }
    return out + k;
}

}  // namespace

Model::Model(const treadle_model_desc& desc, ThreadPool& pool)
    : desc_(desc), layers_(desc.layers, desc.layers + desc.num_layers), pool_(pool) {
    desc_.layers = layers_.data();
    query_width_ = int64_t{desc.num_heads} * desc.head_dim;
    qkv_width_ = query_width_ + 2 * int64_t{desc.num_kv_heads} * desc.head_dim;
    const int64_t tokens = desc.max_num_tokens;
    widest_ = std::max<int64_t>({desc.hidden_size, desc.intermediate_size, query_width_});
    const int64_t rows = std::max<int64_t>(tokens, desc.max_num_sampled);
    const int64_t copies = is_doubled() ? 2 : 1;
    hidden_.reset(copies * tokens * desc.hidden_size);
    normed_.reset(rows * desc.hidden_size);
    qkv_.reset(copies * tokens * qkv_width_);
    attended_.reset(tokens * query_width_);
    gated_.reset((copies * tokens + kRowBlock - 1) / kRowBlock * kRowBlock * desc.intermediate_size);
    up_.reset(copies * tokens * desc.intermediate_size);
    selected_.reset(int64_t{desc.max_num_sampled} * desc.hidden_size);
    logits_.reset(copies * int64_t{desc.max_num_sampled} * desc.vocab_size);
    if (is_doubled()) residuals_.reset(pool.num_threads() * widest_);
    const auto format = static_cast<treadle_activations>(desc.activations);
    activations_.reserve(format, copies * rows, widest_);
    if (format == TREADLE_ACTIVATIONS_BF16) gated_activations_.reserve(format, tokens, desc.intermediate_size);
    scratch_.reserve(pool.num_threads(), linear_scratch_bytes(widest_));
    normed_rows_.reserve(pool.num_threads(), kRowBlock * desc.hidden_size * int64_t{sizeof(float)});
    attention_.reserve(pool.num_threads(), desc.num_heads, desc.num_kv_heads, desc.head_dim);
    row_of_token_.resize(tokens);
    position_of_token_.resize(tokens);
    place_of_token_.resize(tokens);
}

uint64_t Model::scratch_bytes() const {
    int64_t total = activations_.num_bytes() + gated_activations_.num_bytes() + scratch_.num_bytes() +
                    attention_.num_bytes() + normed_rows_.num_bytes();
    for (const Buffer<float>* buffer :
         {&hidden_, &normed_, &qkv_, &attended_, &gated_, &up_, &selected_, &logits_, &weights_, &residuals_}) {
        total += buffer->num_bytes();
    }
    return static_cast<uint64_t>(total);
}

int64_t Model::num_inputs() const {
    return desc_.num_layers * (2 * int64_t{desc_.hidden_size} + query_width_ + desc_.intermediate_size) + desc_.hidden_size;
}

void Model::lap(Phase phase) {
    const Clock::time_point now = Clock::now();
    seconds_[phase] += std::chrono::duration<double>(now - lap_start_).count();
    lap_start_ = now;
}

void Model::step(const treadle_kv& kv, const treadle_rows& rows, const int32_t* token_ids,
                 const treadle_sampling* sampling, int32_t num_sampled, int32_t* sampled, float* logits) {
    std::memset(seconds_, 0, sizeof seconds_);
    lap_start_ = Clock::now();
    rows_ = rows;
    observed_ = squares_;
    for (int32_t row = 0; row < rows.num_rows; ++row) {
        const int32_t begin = rows.query_starts[row], end = rows.query_starts[row + 1];
        for (int32_t token = begin; token < end; ++token) {
            row_of_token_[token] = row;
            position_of_token_[token] = rows.context_lens[row] - (end - token);
            place_of_token_[token] = token;
        }
    }
    plan_attention(kv);
    embed(token_ids, rows.num_tokens);
    lap(kEmbed);
    for (int64_t layer = 0; layer < desc_.num_layers; ++layer) {
        store_keys_and_values(kv, layer);
        if (layer + 1 == desc_.num_layers && observed_ == nullptr) keep_sampled(kv, sampling, num_sampled);
        if (rows_.num_tokens > 0) finish_layer(kv, layer);
    }
    run_head(sampling, num_sampled, sampled, logits);
}

void Model::plan_attention(const treadle_kv& kv) {
    const AttentionShape shape{desc_.num_heads, desc_.sliding_window,
                               1.0f / std::sqrt(static_cast<float>(desc_.head_dim)),
                               desc_.activations == TREADLE_ACTIVATIONS_INT8 ? 0 : desc_.activation_terms};
    attention_.make(rows_, kv, shape, pool_.num_threads());
}

void Model::embed(const int32_t* token_ids, int64_t num_tokens) {
    pool_.run_rows(num_tokens, kRowsPerChunk, [&](int64_t begin, int64_t end, int) {
        for (int64_t token = begin; token < end; ++token) {
            if (token + 1 < end) prefetch_row(desc_.embedding, token_ids[token + 1]);
            unpack_row(desc_.embedding, token_ids[token], hidden_.data() + token * desc_.hidden_size);
        }
    });
}

Model::Needs Model::needs_of(std::initializer_list<const treadle_linear*> layers) const {
    Needs needs;
    for (const treadle_linear* layer : layers) (takes_codes(*layer) ? needs.codes : needs.numbers) = true;
    return needs;
}

void Model::prepare(const float* source, int64_t rows, int64_t k, const float* norm_weight, Needs needs) {
    const Kernels& table = kernels();
    pool_.run_rows(rows, kRowsPerChunk, [&](int64_t begin, int64_t end, int thread) {
        const float* values = source + begin * k;
        if (norm_weight != nullptr) {
            // Numbers that nobody reads again stay in the cache.
            float* normed = needs.numbers || observed_ != nullptr ? normed_.data() + begin * k : normed_rows_.of<float>(thread);
            for (int64_t row = begin; row < end; ++row) {
                table.rms_norm_row(source + row * k, norm_weight, k, desc_.rms_norm_eps, normed + (row - begin) * k);
            }
            values = normed;
        }
        for (int64_t row = begin; needs.codes && row < end; ++row) {
            quantize_row(values + (row - begin) * k, row, rows, k, thread);
        }
    });
}

void Model::quantize_row(const float* values, int64_t row, int64_t rows, int64_t k, int thread) {
    activations_.write_row({values}, row, k, scratch_.of<float>(thread));
    if (!is_doubled()) return;
    const QuantizedRow codes = activations_.quantized_row(row, k);
    float* residual = residuals_.data() + thread * widest_;
    for (int64_t g = 0; g < k / kGroup; ++g) {
        const int8_t* group = codes.codes + kRowBlock * kGroup * g;
        const float scale = codes.scales[kRowBlock * g];
        for (int64_t i = 0; i < kGroup; ++i) {
            residual[kGroup * g + i] = values[kGroup * g + i] - scale * static_cast<float>(group[i]);
        }
    }
    activations_.write_row({residual}, rows + row, k, nullptr);
}

void Model::multiply(const ActivationBuffer& activations, const float* values, int64_t rows, const LinearJob* jobs,
                     int num_jobs) {
    if (observed_ != nullptr) observed_ = write_squares(values, rows, jobs->weights->k, observed_);
    const Activations x = activations.view(values);
    if (!is_doubled()) return run_linear(pool_, scratch_, x, rows, jobs, num_jobs);
    // A product is linear in its activations: codes and residual codes are rows like others, and their results are added,
    // with the bias once. Floating formats take the numbers themselves, in one term.
    std::vector<LinearJob> of_codes, of_numbers;
    std::vector<const float*> biases;
    std::vector<treadle_linear> without_bias;
    without_bias.reserve(num_jobs);  // the jobs point into it
    for (int i = 0; i < num_jobs; ++i) {
        LinearJob job = jobs[i];
        if (!takes_codes(*job.weights)) {
            of_numbers.push_back(job);
            continue;
        }
        biases.push_back(job.weights->bias);
        without_bias.push_back(*job.weights);
        without_bias.back().bias = nullptr;
        job.weights = &without_bias.back();
        of_codes.push_back(job);
        if (!job.is_added) continue;
        for (int64_t row = rows; row < 2 * rows; ++row) {
            std::memset(job.y + row * job.y_stride, 0, job.weights->n * sizeof(float));
        }
    }
    if (!of_numbers.empty()) run_linear(pool_, scratch_, x, rows, of_numbers.data(), static_cast<int>(of_numbers.size()));
    if (of_codes.empty()) return;
    run_linear(pool_, scratch_, x, 2 * rows, of_codes.data(), static_cast<int>(of_codes.size()));
    pool_.run_ranges(rows, kRowsPerChunk, [&](int64_t begin, int64_t end, int) {
        for (size_t i = 0; i < of_codes.size(); ++i) {
            for (int64_t row = begin; row < end; ++row) {
                float* y = of_codes[i].y + row * of_codes[i].y_stride;
                add_terms(y, y + rows * of_codes[i].y_stride, biases[i], of_codes[i].weights->n);
            }
        }
    });
}

void Model::store_keys_and_values(const treadle_kv& kv, int64_t index) {
    const treadle_layer& layer = layers_[index];
    const int64_t hidden_size = desc_.hidden_size, kv_width = int64_t{desc_.num_kv_heads} * desc_.head_dim;
    const int64_t num_tokens = rows_.num_tokens;
    const Needs needs = needs_of({&layer.query, &layer.key, &layer.value});
    prepare(hidden_.data(), num_tokens, hidden_size, layer.attention_norm, needs);
    lap(kNorm);
    float* qkv = qkv_.data();
    const LinearJob projections[] = {{&layer.query, qkv, qkv_width_, false},
                                     {&layer.key, qkv + query_width_, qkv_width_, false},
                                     {&layer.value, qkv + query_width_ + kv_width, qkv_width_, false}};
    multiply(activations_, normed_.data(), num_tokens, projections, 3);
    lap(kQkv);
    rotate_and_store(kv, index, num_tokens);
    lap(kRotate);
}

void Model::keep_sampled(const treadle_kv& kv, const treadle_sampling* sampling, int32_t num_sampled) {
    const int32_t* starts = rows_.query_starts;
    first_kept_.assign(starts + 1, starts + 1 + rows_.num_rows);  // none
    for (int32_t i = 0; i < num_sampled; ++i) {
        int32_t& first = first_kept_[row_of_token_[sampling[i].token_index]];
        first = std::min(first, sampling[i].token_index);
    }
    int32_t num_kept = 0;
    kept_starts_.assign(1, 0);
    for (int32_t row = 0; row < rows_.num_rows; ++row) {
        for (int32_t token = first_kept_[row]; token < starts[row + 1]; ++token, ++num_kept) {
            place_of_token_[token] = num_kept;
            if (token == num_kept) continue;
            std::memcpy(hidden_.data() + num_kept * desc_.hidden_size, hidden_.data() + token * desc_.hidden_size,
                        desc_.hidden_size * sizeof(float));
            std::memcpy(qkv_.data() + num_kept * qkv_width_, qkv_.data() + token * qkv_width_,
                        query_width_ * sizeof(float));
        }
        kept_starts_.push_back(num_kept);
    }
    if (num_kept == rows_.num_tokens) return;
    rows_.query_starts = kept_starts_.data();
    rows_.num_tokens = num_kept;
    plan_attention(kv);
}

void Model::finish_layer(const treadle_kv& kv, int64_t index) {
    const treadle_layer& layer = layers_[index];
    const int64_t num_tokens = rows_.num_tokens, hidden_size = desc_.hidden_size;
    float* hidden = hidden_.data();
    attention_.run(pool_, kv, index, qkv_.data(), attended_.data());
    lap(kAttention);
    prepare(attended_.data(), num_tokens, query_width_, nullptr, needs_of({&layer.output}));
    const LinearJob output{&layer.output, hidden, hidden_size, true};
    multiply(activations_, attended_.data(), num_tokens, &output, 1);
    lap(kOutput);
    run_mlp(layer, num_tokens);
}

void Model::rotate_and_store(const treadle_kv& kv, int64_t layer, int64_t num_tokens) {
    const Kernels& table = kernels();
    const treadle_layer& weights = layers_[layer];
    const int64_t head_dim = desc_.head_dim, half = head_dim / 2;
    pool_.run_rows(num_tokens, kRowsPerChunk, [&](int64_t begin, int64_t end, int) {
        for (int64_t token = begin; token < end; ++token) {
            float* heads = qkv_.data() + token * qkv_width_;
            const int64_t position = position_of_token_[token];
            const float *cos = desc_.rope_cos + position * half, *sin = desc_.rope_sin + position * half;
            for (int32_t head = 0; head < desc_.num_heads + desc_.num_kv_heads; ++head) {
                float* values = heads + head * head_dim;
                const float* norm = head < desc_.num_heads ? weights.query_norm : weights.key_norm;
                if (norm != nullptr) table.rms_norm_row(values, norm, head_dim, desc_.rms_norm_eps, values);
                table.rotate_head(values, cos, sin, half);
            }
            const float* key = heads + query_width_;
            const float* value = key + int64_t{desc_.num_kv_heads} * head_dim;
            write_token(kv, layer, rows_.block_ids + rows_.block_starts[row_of_token_[token]], position, key, value);
        }
    });
}

void Model::run_mlp(const treadle_layer& layer, int64_t num_tokens) {
    const int64_t hidden_size = desc_.hidden_size, width = desc_.intermediate_size;
    float* hidden = hidden_.data();
    prepare(hidden, num_tokens, hidden_size, layer.mlp_norm, needs_of({&layer.gate, &layer.up}));
    lap(kNorm);
    const LinearJob down{&layer.down, hidden, hidden_size, true};
    float *gated = gated_.data(), *up = up_.data();
    const bool is_gated = observed_ == nullptr && takes_codes(layer.down) &&
                          can_gate(layer.gate, layer.up, activations_.format(), num_tokens);
    if (is_gated) {
        run_gated(pool_, scratch_, activations_.view(nullptr), num_tokens, layer.gate, layer.up, gated,
                  gated_activations_.nearest());
    } else {
        const LinearJob jobs[] = {{&layer.gate, gated, width, false}, {&layer.up, up, width, false}};
        multiply(activations_, normed_.data(), num_tokens, jobs, 2);
    }
    lap(kGateUp);
    // As they left the products, they may be what is multiplied next.
    const bool are_ready = is_gated && gated_activations_.nearest() != nullptr;
    const Kernels& table = kernels();
    const auto prepare_rows = [&](int64_t begin, int64_t end, int thread) {
        for (int64_t token = begin; token < end; ++token) {
            if (is_gated) {
                const RunsOfRow runs{gated + blocked_row_offset(token, width), kBlockedRun};
                activations_.write_row(runs, token, width, scratch_.of<float>(thread));
                continue;
            }
            float* row = gated + token * width;
            table.swiglu_row(row, up + token * width, width, row);
            if (takes_codes(layer.down)) quantize_row(row, token, num_tokens, width, thread);
        }
    };
    if (!are_ready) pool_.run_rows(num_tokens, kRowsPerChunk, prepare_rows);
    lap(kNorm);
    multiply(are_ready ? gated_activations_ : activations_, gated_.data(), num_tokens, &down, 1);
    lap(kDown);
}

void Model::run_head(const treadle_sampling* sampling, int32_t num_sampled, int32_t* sampled, float* logits) {
    if (num_sampled == 0) return;
    const int64_t hidden_size = desc_.hidden_size;
    for (int32_t i = 0; i < num_sampled; ++i) {
        const int64_t place = place_of_token_[sampling[i].token_index];
        std::memcpy(selected_.data() + i * hidden_size, hidden_.data() + place * hidden_size,
                    hidden_size * sizeof(float));
    }
    prepare(selected_.data(), num_sampled, hidden_size, desc_.final_norm, needs_of({&desc_.head}));
    float* scores = logits_.data();
    const LinearJob head{&desc_.head, scores, desc_.vocab_size, false};
    multiply(activations_, normed_.data(), num_sampled, &head, 1);
    if (logits != nullptr) std::memcpy(logits, scores, num_sampled * int64_t{desc_.vocab_size} * sizeof(float));
    lap(kHead);
    sample_rows(pool_, weights_, scores, num_sampled, desc_.vocab_size, sampling, sampled);
    lap(kSample);
}

}  // namespace treadle
