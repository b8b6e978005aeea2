// The products of attention_codes.inl on AMX tiles, where rows are many.
//
// A tile product (TDPBSUD) takes 64 numbers of sixteen rows at once: all of a head of that size, or a half of a
// partition's positions, whose values are brought together for that.
#include <cstring>

#include "amx_tiles.h"

namespace {

constexpr int kTileNumbers = 64;  // of a row, that a tile product takes

// Tiles 0 to 3 hold sums of high and of low parts with two runs or two vectors of dims, 4 and 5 parts of numbers, 6
// and 7 codes.
class TileCodes {
 public:
    static bool can(const AttentionCall& call) {
        return call.kv.padded_head_dim % kTileNumbers == 0 && call.num_queries * call.group_size > kFewCodeRows;
    }
    static void configure() {
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
        config.load();
    }

    static void begin(const CodeStep& step) {
        const int64_t run_bytes = 16 * step.padded;
        for (int run = step.range.first_run(); run < step.range.last_run(); ++run) {
            std::memcpy(step.scratch.values + run * run_bytes, step.runs.values[run], run_bytes);
        }
    }

    static void score(const CodeStep& step, int row, int count) {
        const Range range = step.range_of(row, count);
        int run = range.first_run();
        for (; run + 2 <= range.last_run(); run += 2) score_runs<2>(step, row, run);
        if (run < range.last_run()) score_runs<1>(step, row, run);
    }

    static void sum(const CodeStep& step, int row, int count) {
        const Range range = step.range_of(row, count);
        for (int64_t d = 0; d < step.padded; d += 32) sum_dims(step, row, range, d);
    }

 private:
    static constexpr int kFewCodeRows = 8;

    template <int kCount>
    static void score_runs(const CodeStep& step, int row, int run) {
        const int64_t padded = step.padded;
        const int8_t* queries = step.scratch.queries + row * 2 * padded;
        zero();
        for (int64_t d = 0; d < padded; d += kTileNumbers) {
            _tile_loadd(4, queries + d, 2 * padded);
            _tile_loadd(5, queries + padded + d, 2 * padded);
            _tile_loadd(6, step.runs.keys[run] + 16 * d, 64);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 5, 6);
            if (kCount == 1) continue;
            _tile_loadd(7, step.runs.keys[run + 1] + 16 * d, 64);
            _tile_dpbsud(2, 4, 7);
            _tile_dpbsud(3, 5, 7);
        }
        store<kCount>(step);
        for (int i = 0; i < 16 && row + i < step.rows; ++i) {
            float* scores = step.scratch.scores + (row + i) * kPartition + 16 * run;
            const int32_t* sums = step.scratch.query_sums + 2 * (row + i);
            for (int j = 0; j < kCount; ++j) f_store(scores + 16 * j, sum_of(step, i, j, sums));
        }
    }

    static void sum_dims(const CodeStep& step, int row, Range range, int64_t d) {
        const int64_t padded = step.padded;
        zero();
        for (int position = range.begin / kTileNumbers * kTileNumbers; position < range.end; position += kTileNumbers) {
            const int8_t* weights = step.scratch.weights + row * 2 * kPartition + position;
            const uint8_t* values = step.scratch.values + position * padded + 4 * d;
            _tile_loadd(4, weights, 2 * kPartition);
            _tile_loadd(5, weights + kPartition, 2 * kPartition);
            _tile_loadd(6, values, 4 * padded);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 5, 6);
            _tile_loadd(7, values + 64, 4 * padded);
            _tile_dpbsud(2, 4, 7);
            _tile_dpbsud(3, 5, 7);
        }
        store<2>(step);
        for (int i = 0; i < 16 && row + i < step.rows; ++i) {
            float* outputs = step.scratch.part_outputs + (row + i) * padded + d;
            const int32_t* sums = step.scratch.weight_sums + 2 * (row + i);
            const F scale = f_set(step.scratch.weight_scales[row + i]);
            for (int j = 0; j < 2; ++j) f_store(outputs + 16 * j, f_mul(sum_of(step, i, j, sums), scale));
        }
    }

    static inline __attribute__((always_inline)) void zero() {
        order_memory();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    template <int kCount>
    static inline __attribute__((always_inline)) void store(const CodeStep& step) {
        int32_t* sums = step.scratch.tile_sums;
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + 256, 64);
        if (kCount > 1) _tile_stored(2, sums + 512, 64);
        if (kCount > 1) _tile_stored(3, sums + 768, 64);
        order_memory();
    }

    // Of row i of the tiles and the j-th run or vector of dims, as CodeSums has it.
    static inline __attribute__((always_inline)) F sum_of(const CodeStep& step, int i, int j, const int32_t* sums) {
        const int32_t* high = step.scratch.tile_sums + 512 * j + 16 * i;
        const I of_high = i_add(_mm512_loadu_si512(high), i_set(-kCodeOffset * sums[0]));
        const I of_low = i_add(_mm512_loadu_si512(high + 256), i_set(-kCodeOffset * sums[1]));
        return whole_sum(of_high, of_low);
    }
};

}  // namespace
