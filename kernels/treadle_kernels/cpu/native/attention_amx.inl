// The products of attention_terms.inl on AMX tiles: keys and values are operands as they lie in the cache.
#include "amx_tiles.h"
#include "attention_parts.inl"
#include "attention_terms.inl"
#include "attention_codes.inl"
#include "amx_codes.inl"
#include "attention_steps.inl"
#include "kernels.h"

namespace {

// Tiles 0 to 3 hold sums, 4 keys of a run and a group, 5 the term of queries that meets them, 6 values of a pair of runs
// and sixteen dims, 7 the term of weights that meets those; steps in a fixed order have the other group of keys and
// queries in 6 and 7.
inline TileConfig attention_config(int num_rows) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, tile == 4 || tile == 6 ? 16 : num_rows, 64);
    return config;
}

// Four sums are under way at once, since a product takes longer than its turn in the unit. Products are made in small
// steps, between which the caller works with vectors, as the two kinds of work hide each other.
template <int kTerms>
class TileProducts {
 public:
    TileProducts(const AttentionCall& call, float*)
        : head_dim_(call.kv.head_dim),
          padded_(call.kv.padded_head_dim),
          // With few rows, arithmetic does not hide memory.
          prefetches_(call.num_queries * call.group_size <= kTermRows) {}

    // See keep_tiles_awake; sums under way are lost.
    void stay_awake() const { _tile_dpbf16ps(3, 5, 4); }

    // How often to advance until scores are done.
    int num_score_parts(const TermStep& step) const {
        return (step.range.last_run() - step.range.first_run() + 3) / 4 * num_parts();
    }
    // Both return how often to advance until it is done; one is done before the other starts, since they share tiles.
    int start_scores(const TermStep& step) {
        scoring_ = step;
        run_ = step.range.first_run();
        part_ = 0;
        return num_score_parts(step);
    }
    inline __attribute__((always_inline)) void advance_scores() {
        const int left = scoring_.range.last_run() - run_;
        if (left >= 4) score<4>();
        if (left == 3) score<3>();
        if (left == 2) score<2>();
        if (left == 1) score<1>();
        if (++part_ < num_parts()) return;
        part_ = 0;
        run_ += 4;
    }

    int start_outputs(const TermStep& step) {
        summing_ = step;
        summed_pair_ = step.range.first_pair();
        column_ = 0;
        return static_cast<int>((padded_ + 63) / 64) * (step.range.last_pair() - summed_pair_);
    }
    inline __attribute__((always_inline)) void advance_outputs() {
        const int64_t left = (padded_ - column_) / 16;
        if (left >= 4) add_pair<4>();
        if (left == 3) add_pair<3>();
        if (left == 2) add_pair<2>();
        if (left == 1) add_pair<1>();
        if (++summed_pair_ < summing_.range.last_pair()) return;
        summed_pair_ = summing_.range.first_pair();
        column_ += 64;
    }

    // Steps of long prompts are computed in a fixed order and without state. Keys and values pass by the first-level
    // cache, where scores and weights stay.
    bool has_order(const TermStep& step) const {
        return kTerms == 1 && head_dim_ == kOrderedDims && !prefetches_ && step.range.first_run() == 0;
    }

    // One of eight parts of a step's outputs: the weights of a pair meet half of the dims of its values, then the others.
    inline __attribute__((always_inline)) void add_in_order(const TermStep& step, int part) const {
        const int pair = part / 2, pairs = step.range.last_pair();
        if (pair >= pairs) return;
        const uint16_t* values = step.runs->values[2 * pair] + part % 2 * 64;
        float* out = step.outputs + part % 2 * 32;
        order_memory();
        if (part % 2 == 0) {
            if (pair == 0) zero_sums<4>();
            _tile_loadd(7, step.weights_of(pair, 0), 64);
            add_values<0>(values, kOrderedDims);
            add_values<1>(values + 32, kOrderedDims);
        } else {
            add_values<2>(values, kOrderedDims);
            add_values<3>(values + 32, kOrderedDims);
        }
        if (pair + 1 == pairs) {
            part % 2 == 0 ? store_sum<0>(out, 4 * kOrderedDims) : store_sum<2>(out, 4 * kOrderedDims);
            part % 2 == 0 ? store_sum<1>(out + 16, 4 * kOrderedDims) : store_sum<3>(out + 16, 4 * kOrderedDims);
        }
        order_memory();
    }

    // One of eight parts of a step's scores, a run each. Sums that are stored one after the other leave the unit free.
    inline __attribute__((always_inline)) void score_in_order(const TermStep& step, int run) const {
        if (run >= step.range.last_run()) return;
        const uint16_t* keys = step.runs->keys[run];
        float* scores = step.scores + run * kRunScores;
        order_memory();
        if (run == 0) {
            _tile_loadd(5, step.queries, 64);
            _tile_loadd(7, step.queries + kQueryWords, 64);
        }
        if (run % 4 == 0) score_run<0>(keys, scores);
        if (run % 4 == 1) score_run<1>(keys, scores);
        if (run % 4 == 2) score_run<2>(keys, scores);
        if (run % 4 == 3) score_run<3>(keys, scores);
        order_memory();
    }

 private:
    static constexpr int64_t kOrderedDims = 64;

    template <int kSum>
    static inline __attribute__((always_inline)) void score_run(const uint16_t* keys, float* scores) {
#define TREADLE_SCORE_RUN(sum)                         \
    if (kSum == sum) {                                 \
        _tile_zero(sum);                               \
        _tile_stream_loadd(4, keys, 64);               \
        _tile_dpbf16ps(sum, 5, 4);                     \
        _tile_stream_loadd(6, keys + kGroup * 16, 64); \
        _tile_dpbf16ps(sum, 7, 6);                     \
        _tile_stored(sum, scores, 64);                 \
    }
        TREADLE_SCORE_RUN(0)
        TREADLE_SCORE_RUN(1)
        TREADLE_SCORE_RUN(2)
        TREADLE_SCORE_RUN(3)
#undef TREADLE_SCORE_RUN
    }

    // Keys of a group: [16 pairs][16][2]. Zeros fill up the last one, copied, where head_dim does not.
    const uint16_t* group_of(const uint16_t* keys, int64_t g) {
        const uint16_t* group = keys + g * kGroup * 16;
        const int64_t words = (head_dim_ - g * kGroup) * 16;
        if (words >= kGroup * 16) return group;
        order_memory();
        for (int64_t i = 0; i < words; i += 32) {
            _mm512_store_si512(last_group_ + i, _mm512_loadu_si512(group + i));
        }
        order_memory();
        return last_group_;
    }

    // Groups' terms, in order.
    int num_parts() const { return static_cast<int>(num_groups(head_dim_)) * kTerms; }

    // One term of one group meets kCount runs. Asks for a share of what is read next: their values, the next keys.
    template <int kCount>
    inline __attribute__((always_inline)) void score() {
        const Runs<KvBF16>& runs = *scoring_.runs;
        const int run = run_, g = part_ / kTerms;
        if (prefetches_) {
            const int64_t share = 16 * padded_ / num_parts();
            const int64_t key_share = 16 * head_dim_ / num_parts();
            for (int i = 0; i < kCount; ++i) prefetch(runs.values[run + i] + part_ * share, share);
            for (int i = 0; i < kCount; ++i) {
                if (runs.next_keys[run + i] != nullptr) {
                    prefetch(runs.next_keys[run + i] + part_ * key_share, key_share);
                }
            }
        }
        order_memory();
        if (part_ == 0) zero_sums<kCount>();
        _tile_loadd(5, scoring_.queries + part_ * kQueryWords, 64);
        _tile_loadd(4, group_of(runs.keys[run], g), 64);
        _tile_dpbf16ps(0, 5, 4);
        if (kCount > 1) {
            _tile_loadd(4, group_of(runs.keys[run + 1], g), 64);
            _tile_dpbf16ps(1, 5, 4);
        }
        if (kCount > 2) {
            _tile_loadd(4, group_of(runs.keys[run + 2], g), 64);
            _tile_dpbf16ps(2, 5, 4);
        }
        if (kCount > 3) {
            _tile_loadd(4, group_of(runs.keys[run + 3], g), 64);
            _tile_dpbf16ps(3, 5, 4);
        }
        if (part_ + 1 == num_parts()) store_sums<kCount>(scoring_.scores + run * kRunScores, kRunScores, 64);
    }

    // The terms of a pair's weights meet kCount times sixteen dims of its values.
    template <int kCount>
    inline __attribute__((always_inline)) void add_pair() {
        const int pair = summed_pair_;
        const uint16_t* values = summing_.runs->values[2 * pair] + 2 * column_;
        order_memory();
        if (pair == summing_.range.first_pair()) zero_sums<kCount>();
        for (int t = 0; t < kTerms; ++t) {
            _tile_loadd(7, summing_.weights_of(pair, t), 64);
            add_values<0>(values, padded_);
            if (kCount > 1) add_values<1>(values + 32, padded_);
            if (kCount > 2) add_values<2>(values + 64, padded_);
            if (kCount > 3) add_values<3>(values + 96, padded_);
        }
        if (pair + 1 == summing_.range.last_pair()) store_sums<kCount>(summing_.outputs + column_, 16, 4 * padded_);
    }

    template <int kCount>
    static inline __attribute__((always_inline)) void zero_sums() {
        _tile_zero(0);
        if (kCount > 1) _tile_zero(1);
        if (kCount > 2) _tile_zero(2);
        if (kCount > 3) _tile_zero(3);
    }

    // Tiles lie `apart` numbers from each other, their rows `stride` bytes.
    template <int kCount>
    static inline __attribute__((always_inline)) void store_sums(float* out, int64_t apart, int64_t stride) {
        store_sum<0>(out, stride);
        if (kCount > 1) store_sum<1>(out + apart, stride);
        if (kCount > 2) store_sum<2>(out + 2 * apart, stride);
        if (kCount > 3) store_sum<3>(out + 3 * apart, stride);
        order_memory();
    }

    // Numbers of tiles must be literals.
    template <int kSum>
    static inline __attribute__((always_inline)) void store_sum(float* out, int64_t stride) {
        if (kSum == 0) _tile_stored(0, out, stride);
        if (kSum == 1) _tile_stored(1, out, stride);
        if (kSum == 2) _tile_stored(2, out, stride);
        if (kSum == 3) _tile_stored(3, out, stride);
    }

    // Weights in tile 7 meet sixteen dims of a pair's values.
    template <int kSum>
    static inline __attribute__((always_inline)) void add_values(const uint16_t* values, int64_t padded) {
        _tile_stream_loadd(6, values, 4 * padded);
        if (kSum == 0) _tile_dpbf16ps(0, 7, 6);
        if (kSum == 1) _tile_dpbf16ps(1, 7, 6);
        if (kSum == 2) _tile_dpbf16ps(2, 7, 6);
        if (kSum == 3) _tile_dpbf16ps(3, 7, 6);
    }

    const int64_t head_dim_;
    const int64_t padded_;
    const bool prefetches_;
    TermStep scoring_{};
    int run_ = 0;   // its first of those under way
    int part_ = 0;  // of them
    TermStep summing_{};
    int summed_pair_ = 0;
    int64_t column_ = 0;
    alignas(64) uint16_t last_group_[kGroup * 16] = {};
};

void attend_with_tiles(const AttentionCall& call) {
    if (call.kv.dtype == TREADLE_KV_INT8 && TileCodes::can(call)) {
        TileCodes::configure();
        CodeAttention<TileCodes>(call).run();
        return _tile_release();
    }
    if (call.num_terms == 0) return treadle::avx512_kernels()->attend(call);
    attention_config(smaller(call.num_queries * call.group_size, kTermRows)).load();
    if (call.num_terms == 1) attend_with_terms<1, TileProducts<1>>(call);
    if (call.num_terms == 2) attend_with_terms<2, TileProducts<2>>(call);
    _tile_release();
}

}  // namespace
