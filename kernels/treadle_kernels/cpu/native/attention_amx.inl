// The products of attention_terms.inl on AMX tiles: keys and values are operands as they lie in the cache.
#include "amx_tiles.h"
#include "attention_parts.inl"
#include "attention_terms.inl"
#include "attention_codes.inl"
#include "amx_codes.inl"
#include "attention_steps.inl"
#include "kernels.h"

namespace {

// Tiles 0 to 3 hold sums, 4 keys of a run and a group, 5 the term of queries that meets them, 6 values of a run and
// sixteen dims, 7 the term of weights that meets those.
inline TileConfig attention_config(int num_rows) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.set(tile, tile == 4 ? 16 : tile == 6 ? 8 : num_rows, tile == 7 ? 32 : 64);
    }
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
        summed_run_ = step.range.first_run();
        column_ = 0;
        return static_cast<int>((padded_ + 63) / 64) * (step.range.last_run() - summed_run_);
    }
    inline __attribute__((always_inline)) void advance_outputs() {
        const int64_t left = (padded_ - column_) / 16;
        if (left >= 4) add_run<4>();
        if (left == 3) add_run<3>();
        if (left == 2) add_run<2>();
        if (left == 1) add_run<1>();
        if (++summed_run_ < summing_.range.last_run()) return;
        summed_run_ = summing_.range.first_run();
        column_ += 64;
    }

    // Steps of long prompts are computed in a fixed order and without state. Keys and values pass by the first-level
    // cache, where scores and weights stay.
    bool has_order(const TermStep& step) const {
        return kTerms == 1 && head_dim_ == kOrderedDims && !prefetches_ && step.range.first_run() == 0;
    }

    // The weights of a run meet its values.
    inline __attribute__((always_inline)) void add_in_order(const TermStep& step, int run) const {
        const int runs = step.range.last_run();
        if (run >= runs) return;
        order_memory();
        if (run == 0) zero_sums<4>();
        add_values<4>(step.weights + 2 * run * kRunScores, step.runs->values[run], kOrderedDims);
        if (run + 1 == runs) store_sums<4>(step.outputs, 16, 4 * kOrderedDims);
    }

    // One of eight parts of a step's scores: four runs' first group of dims in two parts, then their second, then the same
    // of the other four runs.
    inline __attribute__((always_inline)) void score_in_order(const TermStep& step, int part) const {
        const int g = part / 2 % 2, first = part / 4 * 4, run = first + part % 2 * 2, runs = step.range.last_run();
        if (first >= runs) return;
        const uint16_t* const* keys = step.runs->keys + run;
        order_memory();
        if (part % 4 == 0) zero_sums<4>();
        _tile_loadd(5, step.queries + g * kQueryWords, 64);
        if (part % 2 == 0) {
            multiply_keys<0>(keys[0], g);
            if (run + 1 < runs) multiply_keys<1>(keys[1], g);
            return;
        }
        if (run < runs) multiply_keys<2>(keys[0], g);
        if (run + 1 < runs) multiply_keys<3>(keys[1], g);
        if (g == 1) store_sums<4>(step.scores + first * kRunScores, kRunScores, 64);
    }

 private:
    static constexpr int64_t kOrderedDims = 64;

    template <int kSums>
    static inline __attribute__((always_inline)) void multiply_keys(const uint16_t* keys, int g) {
        _tile_stream_loadd(4, keys + g * kGroup * 16, 64);
        if (kSums == 0) _tile_dpbf16ps(0, 5, 4);
        if (kSums == 1) _tile_dpbf16ps(1, 5, 4);
        if (kSums == 2) _tile_dpbf16ps(2, 5, 4);
        if (kSums == 3) _tile_dpbf16ps(3, 5, 4);
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

    // The terms of a run's weights meet kCount times sixteen dims of its values.
    template <int kCount>
    inline __attribute__((always_inline)) void add_run() {
        const Runs<KvBF16>& runs = *summing_.runs;
        const int run = summed_run_;
        order_memory();
        if (run == summing_.range.first_run()) zero_sums<kCount>();
        add_values<kCount>(summing_.weights + 2 * run * kRunScores, runs.values[run] + 2 * column_, padded_);
        if (run + 1 == summing_.range.last_run()) store_sums<kCount>(summing_.outputs + column_, 16, 4 * padded_);
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
        _tile_stored(0, out, stride);
        if (kCount > 1) _tile_stored(1, out + apart, stride);
        if (kCount > 2) _tile_stored(2, out + 2 * apart, stride);
        if (kCount > 3) _tile_stored(3, out + 3 * apart, stride);
        order_memory();
    }

    // Terms of a run's weights meet kCount times sixteen dims of its values.
    template <int kCount>
    static inline __attribute__((always_inline)) void add_values(const uint16_t* weights, const uint16_t* values,
                                                                 int64_t padded) {
        for (int t = 0; t < kTerms; ++t) {
            _tile_loadd(7, weights + t * 16, 2 * kWeightStride);
            _tile_stream_loadd(6, values, 4 * padded);
            _tile_dpbf16ps(0, 7, 6);
            if (kCount > 1) {
                _tile_stream_loadd(6, values + 32, 4 * padded);
                _tile_dpbf16ps(1, 7, 6);
            }
            if (kCount > 2) {
                _tile_stream_loadd(6, values + 64, 4 * padded);
                _tile_dpbf16ps(2, 7, 6);
            }
            if (kCount > 3) {
                _tile_stream_loadd(6, values + 96, 4 * padded);
                _tile_dpbf16ps(3, 7, 6);
            }
        }
    }

    const int64_t head_dim_;
    const int64_t padded_;
    const bool prefetches_;
    TermStep scoring_{};
    int run_ = 0;   // its first of those under way
    int part_ = 0;  // of them
    TermStep summing_{};
    int summed_run_ = 0;
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
