// The two products of attention in float32, over runs of sixteen positions: queries with keys, weights with values.
//
// Each number adds up in an order that tiling does not touch: scores over head_dim, outputs over positions.
#include "kernels.h"

namespace {

constexpr int kConvertFromRows = 12;  // rows that make it worth turning keys and values into float32 first

template <class Kv, int kRows, int kVectors>
inline void score_tile(const float* queries, int64_t head_dim, int64_t padded, const Runs<Kv>& runs, int run,
                       float* scores) {
    F sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = f_set(0.0f);
    }
    for (int64_t d = 0; d < head_dim; d += 2) {
        // The values of these positions are needed right after their scores.
        if (kRows <= 4) {
            for (int v = 0; v < kVectors; ++v) prefetch(runs.values[run + v] + 16 * d, 32);
        }
        F keys[2][kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) Kv::load_keys(runs.keys[run + v] + 16 * d, keys[0][v], keys[1][v]);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const F query = f_set(queries[r * padded + d + i]);
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) sums[r][v] = f_fma(query, keys[i][v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) f_store(scores + r * kPartition + 16 * (run + v), sums[r][v]);
    }
}

template <class Kv, int kRows>
void score_rows(const AttentionCall& call, const Runs<Kv>& runs, Range range, const float* queries, float* scores) {
    const int64_t head_dim = call.kv.head_dim, padded = call.kv.padded_head_dim;
    const int last = range.last_run();
    int run = range.first_run();
    for (; run + kAttentionVectorsAtOnce <= last; run += kAttentionVectorsAtOnce) {
        score_tile<Kv, kRows, kAttentionVectorsAtOnce>(queries, head_dim, padded, runs, run, scores);
    }
    for (; run < last; ++run) score_tile<Kv, kRows, 1>(queries, head_dim, padded, runs, run, scores);
}

template <class Kv, int kRows, int kVectors>
inline void value_tile(const float* weights, const Runs<Kv>& runs, Range range, int64_t padded, int64_t d,
                       float* outputs) {
    F sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = f_set(0.0f);
    }
    for (int run = range.first_run(); run < range.last_run(); ++run) {
        const int begin = larger(range.begin, run * 16), end = smaller(range.end, run * 16 + 16);
        for (int position = begin & ~1; position < end; position += 2) {
            const typename Kv::Number* of_pair = runs.values[run] + (position - run * 16) * padded;
            if (kRows <= 4 && runs.next_keys[run] != nullptr) {
                const int64_t offset = (position - run * 16) * padded + 2 * d;
                prefetch(runs.next_keys[run] + offset, 32 * kVectors);
            }
            F values[2][kVectors];
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) Kv::load_values(of_pair, padded, d + 16 * v, values[0][v], values[1][v]);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                // The other position of a pair at either end may hold anything.
                if (position + i < begin || position + i >= end) continue;
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    const F weight = f_set(weights[r * kPartition + position + i]);
#pragma GCC unroll 8
                    for (int v = 0; v < kVectors; ++v) sums[r][v] = f_fma(weight, values[i][v], sums[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) f_store(outputs + r * padded + d + 16 * v, sums[r][v]);
    }
}

template <class Kv, int kRows>
void value_rows(const AttentionCall& call, const Runs<Kv>& runs, Range range, const float* weights, float* outputs) {
    const int64_t padded = call.kv.padded_head_dim;
    int64_t d = 0;
    for (; d + 16 * kAttentionVectorsAtOnce <= padded; d += 16 * kAttentionVectorsAtOnce) {
        value_tile<Kv, kRows, kAttentionVectorsAtOnce>(weights, runs, range, padded, d, outputs);
    }
    for (; d < padded; d += 16) value_tile<Kv, kRows, 1>(weights, runs, range, padded, d, outputs);
}

}  // namespace
