// A decoder of the Llama family and the memory of its steps.
#ifndef TREADLE_MODEL_H
#define TREADLE_MODEL_H

#include <chrono>
#include <cstdint>
#include <vector>

#include "layers.h"
#include "memory.h"
#include "thread_pool.h"
#include "treadle_cpu.h"

namespace treadle {

// By their place in treadle_model_phase_seconds.
enum Phase { kEmbed, kNorm, kQkv, kRotate, kAttention, kOutput, kGateUp, kDown, kHead, kSample };

class Model {
 public:
    // Of a checked description.
    Model(const treadle_model_desc& desc, ThreadPool& pool);

    // Checks a step's arguments; changes nothing.
    int check_step(const treadle_kv& kv, const treadle_rows& rows, const int32_t* token_ids,
                   const treadle_sampling* sampling, int32_t num_sampled) const;
    void step(const treadle_kv& kv, const treadle_rows& rows, const int32_t* token_ids,
              const treadle_sampling* sampling, int32_t num_sampled, int32_t* sampled, float* logits);

    // Of all linear layers, those of a group that takes the same counted once.
    int64_t num_inputs() const;
    // See treadle_model_observe.
    void observe(double* squares) { squares_ = squares; }

    uint64_t scratch_bytes() const;
    const double* phase_seconds() const { return seconds_; }

 private:
    using Clock = std::chrono::steady_clock;

    void embed(const int32_t* token_ids, int64_t num_tokens);
    void plan_attention(const treadle_kv& kv);
    // A layer up to the keys and values of all tokens, which other tokens may read.
    void store_keys_and_values(const treadle_kv& kv, int64_t index);
    // The rest of a layer, in place.
    void finish_layer(const treadle_kv& kv, int64_t index);
    // Leaves only tokens that are sampled from in rows_, and what follows them in their rows: of the last layer, nobody
    // reads the rest of others.
    void keep_sampled(const treadle_kv& kv, const treadle_sampling* sampling, int32_t num_sampled);
    // Head norms, rotation and storing of keys and values of all tokens.
    void rotate_and_store(const treadle_kv& kv, int64_t layer, int64_t num_tokens);
    void run_mlp(const treadle_layer& layer, int64_t num_tokens);
    // Chooses tokens from the hidden state of the sampled ones.
    void run_head(const treadle_sampling* sampling, int32_t num_sampled, int32_t* sampled, float* logits);
    // Whether a layer takes codes or terms of its activations, rather than their numbers.
    bool takes_codes(const treadle_linear& weights) const {
        return treadle::takes_codes(weights, activations_.format());
    }
    // What the layers that share some activations take.
    struct Needs {
        bool codes = false;
        bool numbers = false;
    };
    Needs needs_of(std::initializer_list<const treadle_linear*> layers) const;
    // Fills activations_ from rows of `source`, normalised if there is a weight; normalised numbers go to normed_.
    void prepare(const float* source, int64_t rows, int64_t k, const float* norm_weight, Needs needs);
    // Whether the second term of a row is a row of its own: so it is for int8 codes, which have their own scales.
    bool is_doubled() const {
        return desc_.activations == TREADLE_ACTIVATIONS_INT8 && desc_.activation_terms == 2;
    }
    // Writes one of `rows` rows as linear layers take it; the codes of what int8 codes miss are row `rows + row`.
    void quantize_row(const float* values, int64_t row, int64_t rows, int64_t k, int thread);
    // Computes products of prepared activations. Rows beyond `rows` of each y are overwritten where there are two terms.
    void multiply(const ActivationBuffer& activations, const float* values, int64_t rows, const LinearJob* jobs,
                  int num_jobs);
    // Adds the time since the last call to a phase.
    void lap(Phase phase);

    treadle_model_desc desc_;
    std::vector<treadle_layer> layers_;
    ThreadPool& pool_;
    int64_t qkv_width_;
    int64_t query_width_;
    int64_t widest_;

    Buffer<float> hidden_;
    Buffer<float> normed_;
    Buffer<float> qkv_;
    Buffer<float> attended_;
    Buffer<float> gated_;
    Buffer<float> up_;
    Buffer<float> selected_;
    Buffer<float> logits_;
    Buffer<float> weights_;
    Buffer<float> residuals_;  // one row a thread
    ActivationBuffer activations_;
    ActivationBuffer gated_activations_;  // where SwiGLU leaves them ready; else it has no memory
    ThreadScratch scratch_;
    ThreadScratch normed_rows_;  // of a chunk
    AttentionPlan attention_;
    // Of each token in the step: its row, its position in the request, and where its hidden state is.
    std::vector<int32_t> row_of_token_;
    std::vector<int32_t> position_of_token_;
    std::vector<int32_t> place_of_token_;
    treadle_rows rows_{};
    std::vector<int32_t> kept_starts_;  // of the rows of the last layer
    std::vector<int32_t> first_kept_;   // token of each row

    double* squares_ = nullptr;   // where steps write what they observe
    double* observed_ = nullptr;  // where the next layer's go, or null

    double seconds_[TREADLE_NUM_PHASES] = {};
    Clock::time_point lap_start_{};
};

// Checks.
int check_model(const treadle_model_desc& desc);
int check_kv(const treadle_kv& kv);
int check_rows(const treadle_rows& rows, const treadle_kv& kv);

}  // namespace treadle

#endif
