// Paged attention over the vocabulary of vec_*.h, and its arithmetic in float32; attention_terms.inl and
// attention_codes.inl have the others.
//
// Positions fall into partitions of 128, fixed by absolute position. A row (one query head of one token) gets for each
// partition the maximum m of its scores, l = sum of exp(score - m) and o = sum of exp(score - m) times the values; the
// partitions are then merged in order (online softmax: Milakov and Gimelshein, 2018; merging of partial results: Dao et
// al., FlashAttention, 2022, section 3.1). Scores add over head_dim in order, o over positions in order, l over sixteen
// lanes by position. So a row's bits depend on its own query, keys and values alone: positions that it does not see get
// the weight 0, which adds nothing, however many of them a neighbour drags in.
#include "attention_parts.inl"
#include "attention_terms.inl"
#include "attention_codes.inl"
#include "attention_steps.inl"
#include "attention_tiles.inl"
#include "kernels.h"

namespace {

// This thread's memory while it works on a call; sizes in attention_scratch_bytes.
struct AttentionScratch {
    float* queries;       // [rows][head_dim], scaled
    float* outputs;       // [rows][padded], merged so far
    float* part_outputs;  // [rows][padded], of one partition
    float* scores;        // [rows][128]
    float* maxima;        // [rows], merged so far
    float* sums;
    float* part_maxima;  // [rows], of one partition
    float* part_sums;
    float* keys;    // [8][head_dim][16], converted
    float* values;  // [128][padded], converted

    AttentionScratch(uint8_t* memory, int64_t rows, int64_t padded) {
        ScratchArea area(memory);
        const auto take = [&area](int64_t size) { return area.take<float>(size); };
        queries = take(rows * padded);
        outputs = take(rows * padded);
        part_outputs = take(rows * padded);
        scores = take(rows * kPartition);
        maxima = take(rows);
        sums = take(rows);
        part_maxima = take(rows);
        part_sums = take(rows);
        keys = take(kPartition * padded);
        values = take(kPartition * padded);
    }
};

// The same numbers as float32.
template <class Kv>
void convert_runs(const AttentionCall& call, Range range, const Runs<Kv>& from, const AttentionScratch& scratch,
                  Runs<KvF32>& to) {
    const int64_t head_dim = call.kv.head_dim, padded = call.kv.padded_head_dim;
    for (int run = range.first_run(); run < range.last_run(); ++run) {
        float* keys = scratch.keys + run * 16 * head_dim;
        float* values = scratch.values + run * 16 * padded;
        F first, second;
        for (int64_t d = 0; d < head_dim; d += 2) {
            Kv::load_keys(from.keys[run] + 16 * d, first, second);
            f_store(keys + 16 * d, first);
            f_store(keys + 16 * d + 16, second);
        }
        for (int64_t position = 0; position < 16; position += 2) {
            for (int64_t d = 0; d < padded; d += 16) {
                Kv::load_values(from.values[run] + position * padded, padded, d, first, second);
                f_store(values + position * padded + d, first);
                f_store(values + (position + 1) * padded + d, second);
            }
        }
        to.keys[run] = keys;
        to.values[run] = values;
    }
}

template <class Kv>
struct ScoreBody {
    const AttentionCall& call;
    const Runs<Kv>& runs;
    Range range;
    const AttentionScratch& scratch;
    template <int kRows>
    void run(int row) const {
        score_rows<Kv, kRows>(call, runs, range, scratch.queries + row * call.kv.padded_head_dim,
                              scratch.scores + row * kPartition);
    }
};

template <class Kv>
struct ValueBody {
    const AttentionCall& call;
    const Runs<Kv>& runs;
    Range range;
    const AttentionScratch& scratch;
    template <int kRows>
    void run(int row) const {
        value_rows<Kv, kRows>(call, runs, range, scratch.scores + row * kPartition,
                              scratch.part_outputs + row * call.kv.padded_head_dim);
    }
};

// Turns one row's scores into weights; returns their maximum, -infinity if the row sees nothing here.
inline float weigh(Range range, Range of_row, float* scores, float* sum) {
    const float minus_infinity = -__builtin_inff();
    if (of_row.is_empty()) {
        for (int run = range.first_run(); run < range.last_run(); ++run) f_store(scores + 16 * run, f_set(0.0f));
        *sum = 0.0f;
        return minus_infinity;
    }
    F largest = f_set(minus_infinity);
    for (int run = range.first_run(); run < range.last_run(); ++run) {
        const F score = keep_seen(of_row, run, f_load(scores + 16 * run), minus_infinity);
        f_store(scores + 16 * run, score);
        largest = f_max(score, largest);
    }
    const float maximum = f_max_lane(largest);
    F sums = f_set(0.0f);
    for (int run = range.first_run(); run < range.last_run(); ++run) {
        const F weight = f_exp(f_sub(f_load(scores + 16 * run), f_set(maximum)));
        sums = f_add(sums, weight);
        f_store(scores + 16 * run, weight);
    }
    *sum = f_sum(sums);
    return maximum;
}

// Folds a partition's result into what a row has so far.
inline void merge_row(float part_maximum, float part_sum, const float* part_outputs, int64_t padded, float* maximum,
                      float* sum, float* outputs) {
    const float minus_infinity = -__builtin_inff();
    if (part_maximum == minus_infinity) return;
    if (*maximum == minus_infinity) {
        *maximum = part_maximum;
        *sum = part_sum;
        for (int64_t d = 0; d < padded; d += 16) f_store(outputs + d, f_load(part_outputs + d));
        return;
    }
    const float larger_maximum = *maximum > part_maximum ? *maximum : part_maximum;
    const F old_factor = f_exp(f_set(*maximum - larger_maximum)),
            new_factor = f_exp(f_set(part_maximum - larger_maximum));
    float factors[16], old_weight, new_weight;
    f_store(factors, old_factor);
    old_weight = factors[0];
    f_store(factors, new_factor);
    new_weight = factors[0];
    *maximum = larger_maximum;
    *sum = *sum * old_weight + part_sum * new_weight;
    for (int64_t d = 0; d < padded; d += 16) {
        const F added = f_mul(f_load(part_outputs + d), new_factor);
        f_store(outputs + d, f_fma(f_load(outputs + d), old_factor, added));
    }
}

template <class Kv>
void attend_partition(const AttentionCall& call, const Runs<Kv>& runs, int partition, Range range,
                      const AttentionScratch& scratch) {
    const int rows = call.num_queries * call.group_size;
    by_rows(rows, ScoreBody<Kv>{call, runs, range, scratch});
    for (int row = 0; row < rows; ++row) {
        const Range of_row = seen(call, call.first_position + row / call.group_size, partition);
        scratch.part_maxima[row] =
            weigh(range, of_row, scratch.scores + row * kPartition, &scratch.part_sums[row]);
    }
    by_rows(rows, ValueBody<Kv>{call, runs, range, scratch});
}

template <class Kv>
void attend_as(const AttentionCall& call) {
    const int64_t head_dim = call.kv.head_dim, padded = call.kv.padded_head_dim;
    const int rows = call.num_queries * call.group_size;
    const AttentionScratch scratch(call.scratch, treadle::attention_rows(call.group_size), padded);
    for (int row = 0; row < rows; ++row) {
        const float* query = query_of(call, row);
        for (int64_t d = 0; d < head_dim; ++d) scratch.queries[row * padded + d] = query[d] * call.scale;
        scratch.maxima[row] = -__builtin_inff();
        scratch.sums[row] = 0.0f;
    }
    const int last_position = call.first_position + call.num_queries - 1;
    for (int partition = call.partition_begin; partition < call.partition_end; ++partition) {
        const Range range{seen(call, call.first_position, partition).begin, seen(call, last_position, partition).end};
        const bool is_empty = range.is_empty();
        if (!is_empty) {
            Runs<Kv> runs{};
            find_runs(call, partition, range, runs);
            find_next_keys(call, partition, last_position, runs);
            if (rows >= kConvertFromRows) {
                Runs<KvF32> converted{};
                convert_runs(call, range, runs, scratch, converted);
                attend_partition(call, converted, partition, range, scratch);
            } else {
                attend_partition(call, runs, partition, range, scratch);
            }
        }
        for (int row = 0; row < rows && call.out == nullptr; ++row) {
            const int index = partition - call.partition_begin;
            if (is_empty) {
                keep_partial(call, index, row, -__builtin_inff(), 0.0f, nullptr);
            } else {
                keep_partial(call, index, row, scratch.part_maxima[row], scratch.part_sums[row],
                             scratch.part_outputs + row * padded);
            }
        }
        if (call.out == nullptr) continue;
        for (int row = 0; row < rows && !is_empty; ++row) {
            merge_row(scratch.part_maxima[row], scratch.part_sums[row], scratch.part_outputs + row * padded, padded,
                      &scratch.maxima[row], &scratch.sums[row], scratch.outputs + row * padded);
        }
    }
    for (int row = 0; row < rows && call.out != nullptr; ++row) {
        write_output(call, row, scratch.sums[row], scratch.outputs + row * padded);
    }
}

void attend(const AttentionCall& call) {
    if (call.num_terms == 1) return attend_with_terms<1, VectorProducts<1>>(call);
    if (call.num_terms == 2) return attend_with_terms<2, VectorProducts<2>>(call);
    switch (call.kv.dtype) {
        case TREADLE_KV_F32:
            return attend_as<KvF32>(call);
        case TREADLE_KV_BF16:
            return attend_as<KvBF16>(call);
        default:
            return CodeAttention<VectorCodes>(call).run();
    }
}

void merge_partials(const AttentionCall& call, int32_t num_partitions) {
    if (call.num_terms > 0 || call.kv.dtype == TREADLE_KV_INT8) return merge_partials_of_terms(call, num_partitions);
    const int64_t padded = call.kv.padded_head_dim;
    const int rows = call.num_queries * call.group_size;
    const AttentionScratch scratch(call.scratch, treadle::attention_rows(call.group_size), padded);
    for (int row = 0; row < rows; ++row) {
        float maximum = -__builtin_inff(), sum = 0.0f;
        for (int index = 0; index < num_partitions; ++index) {
            const float* partial = partial_of(call, index, row);
            merge_row(partial[0], partial[1], partial + 2, padded, &maximum, &sum, scratch.outputs);
        }
        write_output(call, row, sum, scratch.outputs);
    }
}

}  // namespace
