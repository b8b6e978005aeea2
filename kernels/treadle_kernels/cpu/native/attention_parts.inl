// What both arithmetics of attention share: partitions, what a query sees of one, and where its keys and values lie.
#include "kernels.h"

namespace {

using treadle::AttentionCall;
using treadle::kPartition;
using treadle::KvView;

constexpr int kRuns = kPartition / 16;  // runs of sixteen positions, each within one block

// How numbers of a cache are read. Keys of a run are read two dims at a time, values two positions at a time.
struct KvF32 {
    using Number = float;
    static F load(const float* p) { return f_load(p); }
    static void load_keys(const float* p, F& first, F& second) {
        first = load(p);
        second = load(p + 16);
    }
    static void load_values(const float* of_pair, int64_t padded, int64_t d, F& first, F& second) {
        first = load(of_pair + d);
        second = load(of_pair + padded + d);
    }
};
struct KvBF16 {
    using Number = uint16_t;
    static void load_keys(const uint16_t* p, F& first, F& second) { f_load_bf16_pairs(p, first, second); }
    static void load_values(const uint16_t* of_pair, int64_t, int64_t d, F& first, F& second) {
        f_load_bf16_pairs(of_pair + 2 * d, first, second);
    }
};
// Codes with an offset of 128, in quads; see attention_codes.inl.
struct KvI8 {
    using Number = uint8_t;
};

// Keys and values of a partition, by runs of sixteen positions; laid out as KvView says.
template <class Kv>
struct Runs {
    const typename Kv::Number* keys[kRuns];
    const typename Kv::Number* values[kRuns];
    const float* key_scales[kRuns];  // [16]; int8 only
    const float* value_scales[kRuns];
    // Numbers that are read next, to be fetched on the way, by run; null where there is nothing to fetch.
    const typename Kv::Number* next_keys[kRuns];
};

template <class Number>
inline void prefetch(const Number* numbers, int64_t count) {
    for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(Number)); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(numbers) + byte);
    }
}

// Positions within a partition, [begin, end).
struct Range {
    int begin;
    int end;

    bool is_empty() const { return begin >= end; }
    bool covers(int run) const { return begin <= 16 * run && end >= 16 * run + 16; }
    int first_run() const { return begin / 16; }
    int last_run() const { return is_empty() ? first_run() : (end + 15) / 16; }  // exclusive
    int first_pair() const { return first_run() / 2; }
    int last_pair() const { return (last_run() + 1) / 2; }
};

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// What the query at a position sees of a partition.
inline Range seen(const AttentionCall& call, int position, int partition) {
    const int start = partition * kPartition;
    const int first = call.window > 0 ? position + 1 - call.window : 0;
    return {smaller(larger(first - start, 0), kPartition), smaller(larger(position + 1 - start, 0), kPartition)};
}

// Replaces what of a run is not seen.
inline F keep_seen(Range seen, int run, F x, float instead) {
    const int begin = smaller(larger(seen.begin - 16 * run, 0), 16), end = smaller(larger(seen.end - 16 * run, 0), 16);
    return f_keep_lanes(x, begin, end, instead);
}

inline const float* query_of(const AttentionCall& call, int row) {
    return call.queries + row / call.group_size * call.query_stride + row % call.group_size * call.kv.head_dim;
}

// Hands out a thread's memory, each piece from a cache line on.
class ScratchArea {
 public:
    explicit ScratchArea(uint8_t* memory) : next_(memory) {}

    template <class Number>
    Number* take(int64_t count) {
        auto* taken = reinterpret_cast<Number*>(next_);
        next_ += (count * static_cast<int64_t>(sizeof(Number)) + 63) / 64 * 64;
        return taken;
    }

 private:
    uint8_t* next_;
};

template <class Kv>
void find_runs(const AttentionCall& call, int partition, Range range, Runs<Kv>& runs) {
    using Number = typename Kv::Number;
    const KvView& kv = call.kv;
    for (int run = range.first_run(); run < range.last_run(); ++run) {
        const int position = partition * kPartition + run * 16;
        const int64_t block = call.block_table[position / kv.block_size] * kv.block_bytes;
        const int slot = position % kv.block_size;
        runs.keys[run] = reinterpret_cast<const Number*>(kv.keys + block + kv.key_offset(slot));
        runs.values[run] = reinterpret_cast<const Number*>(kv.values + block + kv.value_offset(slot));
        if (kv.dtype == TREADLE_KV_INT8) {
            const auto scales = [&](const float* p) {
                return reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(p) + block) + slot;
            };
            runs.key_scales[run] = scales(kv.key_scales);
            runs.value_scales[run] = scales(kv.value_scales);
        }
    }
}

// The keys that are read after those of this partition, run by run.
template <class Kv>
void find_next_keys(const AttentionCall& call, int partition, int last_position, Runs<Kv>& runs) {
    Runs<Kv> next{};
    if (partition + 1 < call.partition_end) {
        find_runs(call, partition + 1, {0, seen(call, last_position, partition + 1).end}, next);
    } else if (call.next != nullptr) {
        const int first = call.next->partition_begin;
        find_runs(*call.next, first, seen(*call.next, call.next->first_position, first), next);
    }
    for (int run = 0; run < kRuns; ++run) runs.next_keys[run] = next.keys[run];
}

inline void write_output(const AttentionCall& call, int row, float sum, const float* outputs) {
    const int64_t head_dim = call.kv.head_dim;
    float* out = call.out + row / call.group_size * call.out_stride + row % call.group_size * head_dim;
    const F share = f_set(1.0f / sum);
    for (int64_t d = 0; d < head_dim; d += 16) {
        f_store_first(out + d, f_mul(f_load(outputs + d), share), rest(head_dim, d));
    }
}

// A row's result of the call's index-th partition: maximum, sum, outputs.
inline float* partial_of(const AttentionCall& call, int index, int row) {
    const int rows = call.num_queries * call.group_size;
    return call.partials + (int64_t{index} * rows + row) * (2 + call.kv.padded_head_dim);
}

inline void keep_partial(const AttentionCall& call, int index, int row, float maximum, float sum,
                         const float* outputs) {
    float* partial = partial_of(call, index, row);
    partial[0] = maximum;
    partial[1] = sum;
    for (int64_t d = 0; d < call.kv.padded_head_dim; d += 16) {
        f_store(partial + 2 + d, outputs == nullptr ? f_set(0.0f) : f_load(outputs + d));
    }
}

// Calls body.template operator()<number of rows>(first row) for all rows, as many at once as registers allow.
template <class Body>
inline void by_rows(int rows, const Body& body) {
    int row = 0;
    for (; row + kAttentionRowsAtOnce <= rows; row += kAttentionRowsAtOnce)
        body.template run<kAttentionRowsAtOnce>(row);
    if (kAttentionRowsAtOnce > 3 && row + 3 <= rows) {
        body.template run<3>(row);
        row += 3;
    }
    if (row + 2 <= rows) {
        body.template run<2>(row);
        row += 2;
    }
    if (row < rows) body.template run<1>(row);
}

}  // namespace
