// The products of attention_terms.inl on AMX tiles: keys and values are operands as they lie in the cache.
#include "attention_parts.inl"
#include "attention_terms.inl"
#include "kernels.h"

namespace {

// The operand of LDTILECFG (Intel SDM volume 1, section 18.3). Tiles 0 to 3 hold sums, 4 keys of a run and a group, 5
// the term of queries that meets them, 6 values of a run and sixteen dims, 7 the term of weights that meets those.
struct alignas(64) AttentionTiles {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 32};
    uint8_t rows[16] = {};

    explicit AttentionTiles(int num_rows) {
        for (int tile = 0; tile < 8; ++tile) rows[tile] = static_cast<uint8_t>(tile == 4 ? 16 : tile == 6 ? 8 : num_rows);
    }
    void load() const {
        asm volatile("" ::"r"(this) : "memory");  // the instruction does not tell the compiler that it reads memory
        _tile_loadconfig(this);
    }
};

// Tile instructions do not tell the compiler what memory they touch.
inline void finish_memory_accesses() { asm volatile("" ::: "memory"); }

// Four sums are under way at once, since a product takes longer than its turn in the unit.
template <int kTerms>
class TileProducts {
 public:
    TileProducts(const AttentionCall& call, float*)
        : head_dim_(call.kv.head_dim),
          padded_(call.kv.padded_head_dim),
          // With one row tile, arithmetic does not hide memory.
          prefetches_(call.num_queries * call.group_size <= kTermRows) {}

    void score(const TermTile& tile, const Runs<KvBF16>& runs, Range range) {
        int run = range.first_run();
        const int last = range.last_run();
        for (; run + 4 <= last; run += 4) score_runs<4>(tile, runs, run);
        if (last - run == 3) score_runs<3>(tile, runs, run);
        if (last - run == 2) score_runs<2>(tile, runs, run);
        if (last - run == 1) score_runs<1>(tile, runs, run);
    }

    void add_up(const TermTile& tile, const Runs<KvBF16>& runs, Range range) const {
        for (int64_t d = 0; d < padded_; d += 64) {
            const int64_t left = (padded_ - d) / 16;
            if (left >= 4) add_up_columns<4>(tile, runs, range, d);
            if (left == 3) add_up_columns<3>(tile, runs, range, d);
            if (left == 2) add_up_columns<2>(tile, runs, range, d);
            if (left == 1) add_up_columns<1>(tile, runs, range, d);
        }
    }

 private:
    // Keys of a group: [16 pairs][16][2]. Zeros fill up the last one, copied, where head_dim does not.
    const uint16_t* group_of(const uint16_t* keys, int64_t g) {
        const uint16_t* group = keys + g * kGroup * 16;
        const int64_t words = (head_dim_ - g * kGroup) * 16;
        if (words >= kGroup * 16) return group;
        finish_memory_accesses();
        for (int64_t i = 0; i < words; i += 32) {
            _mm512_store_si512(last_group_ + i, _mm512_loadu_si512(group + i));
        }
        finish_memory_accesses();
        return last_group_;
    }

    template <int kCount>
    void score_runs(const TermTile& tile, const Runs<KvBF16>& runs, int run) {
        if (prefetches_) {
            for (int i = 0; i < kCount; ++i) prefetch(runs.values[run + i], 16 * padded_);
        }
        finish_memory_accesses();
        _tile_zero(0);
        if (kCount > 1) _tile_zero(1);
        if (kCount > 2) _tile_zero(2);
        if (kCount > 3) _tile_zero(3);
        for (int64_t g = 0; g < num_groups(head_dim_); ++g) {
            for (int t = 0; t < kTerms; ++t) {
                _tile_loadd(5, tile.queries + (g * kTerms + t) * kQueryWords, 64);
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
            }
        }
        float* scores = tile.scores + 16 * run;
        _tile_stored(0, scores, 4 * kPartition);
        if (kCount > 1) _tile_stored(1, scores + 16, 4 * kPartition);
        if (kCount > 2) _tile_stored(2, scores + 32, 4 * kPartition);
        if (kCount > 3) _tile_stored(3, scores + 48, 4 * kPartition);
        finish_memory_accesses();
    }

    // Sixteen dims of the outputs for each of kCount tiles, from dim d on.
    template <int kCount>
    void add_up_columns(const TermTile& tile, const Runs<KvBF16>& runs, Range range, int64_t d) const {
        finish_memory_accesses();
        _tile_zero(0);
        if (kCount > 1) _tile_zero(1);
        if (kCount > 2) _tile_zero(2);
        if (kCount > 3) _tile_zero(3);
        for (int run = range.first_run(); run < range.last_run(); ++run) {
            if (prefetches_ && d == 0 && runs.next_keys[run] != nullptr) prefetch(runs.next_keys[run], 16 * head_dim_);
            const uint16_t* values = runs.values[run] + 2 * d;
            for (int t = 0; t < kTerms; ++t) {
                _tile_loadd(7, tile.weights + (run * kTerms + t) * kWeightWords, 32);
                _tile_loadd(6, values, 4 * padded_);
                _tile_dpbf16ps(0, 7, 6);
                if (kCount > 1) {
                    _tile_loadd(6, values + 32, 4 * padded_);
                    _tile_dpbf16ps(1, 7, 6);
                }
                if (kCount > 2) {
                    _tile_loadd(6, values + 64, 4 * padded_);
                    _tile_dpbf16ps(2, 7, 6);
                }
                if (kCount > 3) {
                    _tile_loadd(6, values + 96, 4 * padded_);
                    _tile_dpbf16ps(3, 7, 6);
                }
            }
        }
        float* outputs = tile.outputs + d;
        _tile_stored(0, outputs, 4 * padded_);
        if (kCount > 1) _tile_stored(1, outputs + 16, 4 * padded_);
        if (kCount > 2) _tile_stored(2, outputs + 32, 4 * padded_);
        if (kCount > 3) _tile_stored(3, outputs + 48, 4 * padded_);
        finish_memory_accesses();
    }

    const int64_t head_dim_;
    const int64_t padded_;
    const bool prefetches_;
    alignas(64) uint16_t last_group_[kGroup * 16] = {};
};

void attend_with_tiles(const AttentionCall& call) {
    if (call.num_terms == 0) return treadle::avx512_kernels()->attend(call);
    AttentionTiles(smaller(call.num_queries * call.group_size, kTermRows)).load();
    if (call.num_terms == 1) attend_with_terms<1, TileProducts<1>>(call);
    if (call.num_terms == 2) attend_with_terms<2, TileProducts<2>>(call);
    _tile_release();
}

}  // namespace
