#include "sampling.h"

#include <algorithm>
#include <vector>

#include "error.h"
#include "kernels.h"

namespace treadle {

namespace {

// Below this a row is greedy: a logit lead of 1e-3 already decides beyond what 53 random bits can tell.
constexpr float kGreedyTemperature = 1e-5f;
// Most nuclei are smaller, and finding so many best tokens is far cheaper than sorting the vocabulary.
constexpr int64_t kFirstNumCandidates = 256;
// Weights are summed in runs of so many: which sum a draw falls into is found run by run, then weight by weight.
constexpr int64_t kRun = 64;

// Philox4x32-10: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, section 3.3.
void philox4x32(uint32_t counter[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t{0xD2511F53} * counter[0], second = uint64_t{0xCD9E8D57} * counter[2];
        const uint32_t c0 = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key0;
        const uint32_t c2 = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key1;
        counter[0] = c0;
        counter[1] = static_cast<uint32_t>(second);
        counter[2] = c2;
        counter[3] = static_cast<uint32_t>(first);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// Index of the first weight at which the running sum exceeds `draw` of the total; never one that weighs 0.
int64_t invert(const float* weights, int64_t n, double draw) {
    const auto run_sum = [&](int64_t begin) {
        double sum = 0.0;
        for (int64_t i = begin; i < std::min(begin + kRun, n); ++i) sum += weights[i];
        return sum;
    };
    double total = 0.0;
    for (int64_t begin = 0; begin < n; begin += kRun) total += run_sum(begin);
    const double wanted = draw * total;
    double mass = 0.0;
    int64_t last = 0;
    for (int64_t begin = 0; begin < n; begin += kRun) {
        const double sum = run_sum(begin);
        if (mass + sum <= wanted) {
            mass += sum;
            continue;
        }
        // Rounding may keep the sum below the draw up to the run's end; its last weight is then the one.
        double within = mass;
        for (int64_t i = begin; i < std::min(begin + kRun, n); ++i) {
            if (weights[i] == 0.0f) continue;
            last = i;
            within += weights[i];
            if (within > wanted) return i;
        }
        return last;
    }
    for (int64_t i = n - 1; i >= 0; --i) {
        if (weights[i] > 0.0f) return i;
    }
    return last;
}

// Draws from the tokens that top_k and top_p keep, best first, lower ids first among equals.
int32_t draw_from_best(const float* weights, int64_t vocab_size, const treadle_sampling& sampling, double draw) {
    const bool is_top_k_on = sampling.top_k > 0 && sampling.top_k < vocab_size;
    int64_t num_candidates = is_top_k_on ? sampling.top_k : std::min(kFirstNumCandidates, vocab_size);
    double total = 0.0;
    for (int64_t i = 0; i < vocab_size; ++i) total += weights[i];
    std::vector<int32_t> ids(static_cast<size_t>(vocab_size));
    for (int64_t i = 0; i < vocab_size; ++i) ids[i] = static_cast<int32_t>(i);
    const auto is_better = [weights](int32_t a, int32_t b) {
        return weights[a] > weights[b] || (weights[a] == weights[b] && a < b);
    };
    std::vector<float> kept;
    for (;;) {
        if (num_candidates < vocab_size)
            std::nth_element(ids.begin(), ids.begin() + num_candidates, ids.end(), is_better);
        std::sort(ids.begin(), ids.begin() + num_candidates, is_better);
        double mass = 0.0;
        for (int64_t i = 0; i < num_candidates; ++i) mass += weights[ids[i]];
        const double wanted = static_cast<double>(sampling.top_p) * (is_top_k_on ? mass : total);
        if (sampling.top_p >= 1.0f || mass >= wanted || num_candidates == vocab_size) {
            double running = 0.0;
            for (int64_t i = 0; i < num_candidates; ++i) {
                running += weights[ids[i]];
                kept.push_back(weights[ids[i]]);
                if (sampling.top_p < 1.0f && running >= wanted) break;
            }
            return ids[invert(kept.data(), static_cast<int64_t>(kept.size()), draw)];
        }
        num_candidates = std::min(8 * num_candidates, vocab_size);
    }
}

int32_t sample_row(const float* logits, int64_t vocab_size, const treadle_sampling& sampling, float* weights) {
    bool is_finite = false;
    const int64_t best = kernels().argmax(logits, vocab_size, &is_finite);
    if (!is_finite) return -1;
    if (sampling.temperature < kGreedyTemperature) return static_cast<int32_t>(best);
    kernels().softmax_weights(logits, vocab_size, logits[best], sampling.temperature, sampling.min_p, weights);
    const double draw = uniform(sampling.seed, sampling.sample_index, sampling.position);
    if ((sampling.top_k > 0 && sampling.top_k < vocab_size) || sampling.top_p < 1.0f) {
        return draw_from_best(weights, vocab_size, sampling, draw);
    }
    return static_cast<int32_t>(invert(weights, vocab_size, draw));
}

}  // namespace

int check_sampling(const treadle_sampling& sampling, int64_t index) {
    const auto at = static_cast<long long>(index);
    // Negated comparisons, so that NaN is refused as well.
    TREADLE_REQUIRE(!(sampling.temperature < 0.0f) && sampling.temperature == sampling.temperature,
                    "sampling[%lld]: temperature must be at least 0, is %g", at,
                    static_cast<double>(sampling.temperature));
    TREADLE_REQUIRE(sampling.min_p >= 0.0f && sampling.min_p <= 1.0f,
                    "sampling[%lld]: min_p must be from 0 to 1, is %g", at, static_cast<double>(sampling.min_p));
    TREADLE_REQUIRE(sampling.top_p > 0.0f && sampling.top_p <= 1.0f,
                    "sampling[%lld]: top_p must be above 0 and at most 1, is %g", at,
                    static_cast<double>(sampling.top_p));
    TREADLE_REQUIRE(sampling.top_k >= 0, "sampling[%lld]: top_k must be at least 0, is %d", at, sampling.top_k);
    return 0;
}

double uniform(uint64_t seed, uint32_t sample_index, uint64_t position) {
    uint32_t words[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), sample_index, 0};
    philox4x32(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    const uint64_t mantissa = uint64_t{words[0] >> 5} << 26 | words[1] >> 6;
    return static_cast<double>(mantissa) * 0x1p-53;
}

void sample_rows(ThreadPool& pool, Buffer<float>& weights, const float* logits, int64_t num_rows, int64_t vocab_size,
                 const treadle_sampling* sampling, int32_t* token_ids) {
    const int64_t stride = (vocab_size + 1023) / 1024 * 1024;
    weights.reserve(pool.num_threads() * stride);
    pool.run(num_rows, [&](int64_t row, int thread) {
        token_ids[row] =
            sample_row(logits + row * vocab_size, vocab_size, sampling[row], weights.data() + thread * stride);
    });
}

}  // namespace treadle
