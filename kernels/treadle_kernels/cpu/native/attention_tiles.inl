// The two products of attention over runs of sixteen positions: queries with keys, weights with values.
//
// Each number adds up in an order that tiling does not touch: scores over head_dim, outputs over positions.
#include "kernels.h"

namespace {

using treadle::AttentionCall;
using treadle::kPartition;

constexpr int kRuns = kPartition / 16;  // runs of sixteen positions, each within one block
constexpr int kConvertFromRows = 12;    // rows that make it worth turning keys and values into float32 first

struct KvF32 {
    using Number = float;
    static F load(const float* p) { return f_load(p); }
};
struct KvBF16 {
    using Number = uint16_t;
    static F load(const uint16_t* p) { return f_load_bf16(p); }
};
struct KvI8 {
    using Number = int8_t;
    static F load(const int8_t* p) { return f_load_i8(p); }
};

// Keys and values of a partition, by runs of sixteen positions.
template <class Kv>
struct Runs {
    const typename Kv::Number* keys[kRuns];    // [head_dim][16]
    const typename Kv::Number* values[kRuns];  // [16][padded]
    const float* key_scales[kRuns];            // [16]; int8 only
    const float* value_scales[kRuns];
    // Numbers that are read next, to be fetched on the way, by run; null where there is nothing to fetch.
    const typename Kv::Number* next_keys[kRuns];
};

template <class Number>
inline void prefetch(const Number* numbers, int count) {
    for (int byte = 0; byte < count * static_cast<int>(sizeof(Number)); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(numbers) + byte);
    }
}

// Positions within a partition, [begin, end).
struct Range {
    int begin;
    int end;
};

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

template <class Kv, int kRows, int kVectors>
inline void score_tile(const float* queries, int64_t head_dim, int64_t padded, const Runs<Kv>& runs, int run,
                       float* scores) {
    F sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = f_set(0.0f);
    }
    for (int64_t d = 0; d < head_dim; ++d) {
        // The values of these positions are needed right after their scores.
        if (kRows <= 4 && d % 2 == 0) {
            for (int v = 0; v < kVectors; ++v) prefetch(runs.values[run + v] + 16 * d, 32);
        }
        F keys[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) keys[v] = Kv::load(runs.keys[run + v] + 16 * d);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const F query = f_set(queries[r * padded + d]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[r][v] = f_fma(query, keys[v], sums[r][v]);
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
    const int last = (range.end + 15) / 16;
    int run = range.begin / 16;
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
    for (int run = range.begin / 16; run * 16 < range.end; ++run) {
        const int begin = larger(range.begin, run * 16), end = smaller(range.end, run * 16 + 16);
        for (int position = begin; position < end; ++position) {
            const typename Kv::Number* value = runs.values[run] + (position - run * 16) * padded + d;
            if (kRows <= 4 && runs.next_keys[run] != nullptr) {
                prefetch(runs.next_keys[run] + (value - runs.values[run]), 16 * kVectors);
            }
            F values[kVectors];
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) values[v] = Kv::load(value + 16 * v);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const F weight = f_set(weights[r * kPartition + position]);
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) sums[r][v] = f_fma(weight, values[v], sums[r][v]);
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
