// Attention over an int8 cache, in integers: queries and softmax weights become whole numbers of 15 bits, which meet
// the cache's codes in products of bytes. Sums of codes are exact, so every instruction set has the same bits.
//
// As in attention.inl, positions fall into partitions of 128.
//   query    x times 16256 / its largest magnitude, as 128 h + l: h the nearest to 1/128 of it, l the nearest to what
//            is left.
//   score    to base two: S = sum of (128 h + l) code over head_dim, times (largest / 16256 * scale * log2(e)), times
//            the key's scale.
//   weight   p = 2^(score - m), m being the largest score of the partition; its sum is over sixteen lanes by position.
//            Then w = p times the value's scale becomes whole as a query does, by the largest w of the partition.
//   output   O = sum of (128 h + l) code over the partition's positions, times largest / 16256.
//   merging  as in attention_terms.inl.
// Positions that a row does not see have the weight 0, and codes of any value: they add nothing.
#include <cstring>

#include "kernels.h"

namespace {

constexpr int kCodeOffset = 128;            // of a code in the cache
constexpr float kMostWhole = 127 * 128.0f;  // of the whole numbers: h fits in a byte
constexpr int kCodeRows = 16;               // rows that are weighed together

// Makes numbers whole, sixteen at a time, and adds up the sums of their parts.
class Wholes {
 public:
    explicit Wholes(uint32_t largest_bits) : scale_(largest_bits, kMostWhole) {}

    // What a whole number stands for.
    float scale() const { return scale_.scale; }

    void store(F x, int8_t* high, int8_t* low) {
        const F whole = scale_.scaled(x);
        const F high_part = f_round(f_mul(whole, f_set(1.0f / 128)));
        const I high_codes = i_round(high_part), low_codes = i_round(f_fma(high_part, f_set(-128.0f), whole));
        store_codes(high_codes, high);
        store_codes(low_codes, low);
        high_sum_ = i_add(high_sum_, high_codes);
        low_sum_ = i_add(low_sum_, low_codes);
    }
    int32_t high_sum() const { return i_sum(high_sum_); }
    int32_t low_sum() const { return i_sum(low_sum_); }

 private:
    const CodeScale scale_;
    I high_sum_ = i_set(0), low_sum_ = i_set(0);
};

// 2^x for x <= 0, 0 below 2^-39, with an error of 2^-13: the cubic of least relative error with p(0) = 1.
inline F f_code_weight(F x) {
    const F r = f_off_nearest(x);
    F p = f_fma(f_set(5.500893295e-2f), r, f_set(2.422109991e-1f));
    p = f_fma(p, r, f_set(6.932829022e-1f));
    p = f_fma(p, r, f_set(1.0f));
    return f_zero_below(f_times_whole_power(p, f_sub(x, r)), x, kLeastExponent);
}

// This thread's memory while it works on a call; sizes in attention_scratch_bytes.
struct CodeScratch {
    float* scores;        // [rows][128]
    float* outputs;       // [rows][padded], merged so far
    float* part_outputs;  // [rows][padded], of one partition
    float* maxima;        // [rows], merged so far
    float* sums;
    float* part_maxima;  // [rows], of one partition
    float* part_sums;
    // Whole numbers of queries, and of a partition's weights: high and low parts, what they stand for, sums of parts.
    int8_t* queries;  // [rows][2][padded]
    float* query_scales;
    int32_t* query_sums;  // [rows][2]
    int8_t* weights;      // [rows][2][128]
    float* weight_scales;
    int32_t* weight_sums;  // [rows][2]
    // Of tiles: a partition's values side by side, and sums on their way.
    uint8_t* values;     // [32 quads][padded][4]
    int32_t* tile_sums;  // [4][16][16]

    CodeScratch(uint8_t* memory, int64_t rows, int64_t padded) {
        ScratchArea area(memory);
        const auto floats = [&area](int64_t count) { return area.take<float>(count); };
        const auto ints = [&area](int64_t count) { return area.take<int32_t>(count); };
        const auto bytes = [&area](int64_t count) { return area.take<int8_t>(count); };
        scores = floats(rows * kPartition);
        outputs = floats(rows * padded);
        part_outputs = floats(rows * padded);
        maxima = floats(rows);
        sums = floats(rows);
        part_maxima = floats(rows);
        part_sums = floats(rows);
        queries = bytes(rows * 2 * padded);
        query_scales = floats(rows);
        query_sums = ints(2 * rows);
        weights = bytes(rows * 2 * kPartition);
        weight_scales = floats(rows);
        weight_sums = ints(2 * rows);
        values = area.take<uint8_t>(kPartition * padded);
        tile_sums = ints(4 * 256);
    }
};

// Of sums of both parts. Rounded once: they are exact as floats.
inline F whole_sum(I high, I low) { return f_fma(f_from_i(high), f_set(128.0f), f_from_i(low)); }

// Sums of codes with whole numbers, for some rows and vectors of sixteen columns.
template <int kRows, int kVectors>
struct CodeSums {
    I high[kRows][kVectors], low[kRows][kVectors];

    // From the sums of parts of the rows' numbers: codes have an offset.
    explicit CodeSums(const int32_t* sums) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                high[r][v] = i_set(-kCodeOffset * sums[2 * r]);
                low[r][v] = i_set(-kCodeOffset * sums[2 * r + 1]);
            }
        }
    }
    // Four numbers of each row meet the codes of a quad. Parts of a row lie `part` bytes apart, rows twice that.
    inline __attribute__((always_inline)) void add(const B* codes, const int8_t* numbers, int64_t part) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                high[r][v] = i_dot<true>(high[r][v], codes[v], numbers + 2 * r * part);
                low[r][v] = i_dot<true>(low[r][v], codes[v], numbers + (2 * r + 1) * part);
            }
        }
    }
    F sum(int r, int v) const { return whole_sum(high[r][v], low[r][v]); }
};

// A call, and the partition in work.
struct CodeStep {
    const AttentionCall& call;
    const int rows;
    const int64_t padded;
    const CodeScratch scratch;
    int partition = 0;
    Range range{};  // what any row sees
    Runs<KvI8> runs{};

    explicit CodeStep(const AttentionCall& of)
        : call(of),
          rows(of.num_queries * of.group_size),
          padded(of.kv.padded_head_dim),
          scratch(of.scratch, (treadle::attention_rows(of.group_size) + 15) / 16 * 16, padded) {}

    // What some rows see.
    Range range_of(int row, int count) const {
        const int first = call.first_position + row / call.group_size;
        const int last = call.first_position + (row + count - 1) / call.group_size;
        return {seen(call, first, partition).begin, seen(call, last, partition).end};
    }
};

// Both products by vector instructions.
class VectorCodes {
 public:
    static void begin(const CodeStep&) {}
    static void score(const CodeStep& step, int row, int count) { by_rows(count, ScoreRows{step, row}); }
    static void sum(const CodeStep& step, int row, int count) { by_rows(count, SumRows{step, row}); }

 private:
    struct ScoreRows {
        const CodeStep& step;
        const int first_row;
        template <int kRows>
        void run(int row) const {
            score_rows<kRows>(step, first_row + row);
        }
    };
    struct SumRows {
        const CodeStep& step;
        const int first_row;
        template <int kRows>
        void run(int row) const {
            sum_rows<kRows>(step, first_row + row);
        }
    };

    // Runs, or vectors of dims, that some rows take at once, so that sums do not wait for each other.
    template <int kRows>
    static constexpr int at_once() {
        return kRows > 3 ? 1 : kRows > 1 ? 2 : 4;
    }

    template <int kRows>
    static void score_rows(const CodeStep& step, int row) {
        constexpr int kCount = at_once<kRows>();
        int run = step.range.first_run();
        for (; run + kCount <= step.range.last_run(); run += kCount) score_runs<kRows, kCount>(step, row, run);
        for (; run < step.range.last_run(); ++run) score_runs<kRows, 1>(step, row, run);
    }

    template <int kRows, int kVectors>
    static void score_runs(const CodeStep& step, int row, int run) {
        CodeSums<kRows, kVectors> sums(step.scratch.query_sums + 2 * row);
        const int8_t* queries = step.scratch.queries + row * 2 * step.padded;
        for (int64_t d = 0; d < step.call.kv.head_dim; d += 4) {
            B codes[kVectors];
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                codes[v] = b_load(step.runs.keys[run + v] + 16 * d);
                // The values of these positions are needed right after their scores.
                if (step.rows <= kAttentionRowsAtOnce) __builtin_prefetch(step.runs.values[run + v] + 16 * d);
            }
            sums.add(codes, queries + d, step.padded);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                f_store(step.scratch.scores + (row + r) * kPartition + 16 * (run + v), sums.sum(r, v));
            }
        }
    }

    template <int kRows>
    static void sum_rows(const CodeStep& step, int row) {
        constexpr int kCount = at_once<kRows>();
        int64_t d = 0;
        for (; d + 16 * kCount <= step.padded; d += 16 * kCount) sum_dims<kRows, kCount>(step, row, d);
        for (; d < step.padded; d += 16) sum_dims<kRows, 1>(step, row, d);
    }

    template <int kRows, int kVectors>
    static void sum_dims(const CodeStep& step, int row, int64_t d) {
        CodeSums<kRows, kVectors> sums(step.scratch.weight_sums + 2 * row);
        const int8_t* weights = step.scratch.weights + row * 2 * kPartition;
        for (int run = step.range.first_run(); run < step.range.last_run(); ++run) {
#pragma GCC unroll 4
            for (int64_t position = 0; position < 16; position += 4) {
                const uint8_t* of_quad = step.runs.values[run] + position * step.padded + 4 * d;
                if (step.rows <= kAttentionRowsAtOnce && step.runs.next_keys[run] != nullptr) {
                    prefetch(step.runs.next_keys[run] + position * step.padded + 4 * d, 64 * kVectors);
                }
                B codes[kVectors];
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) codes[v] = b_load(of_quad + 64 * v);
                sums.add(codes, weights + 16 * run + position, kPartition);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const F scale = f_set(step.scratch.weight_scales[row + r]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                f_store(step.scratch.part_outputs + (row + r) * step.padded + d + 16 * v, f_mul(sums.sum(r, v), scale));
            }
        }
    }
};

template <class Products>
class CodeAttention {
 public:
    explicit CodeAttention(const AttentionCall& call) : step_(call) {}

    void run() {
        const AttentionCall& call = step_.call;
        const int last_position = call.first_position + call.num_queries - 1;
        prepare();
        for (int partition = call.partition_begin; partition < call.partition_end; ++partition) {
            step_.partition = partition;
            step_.range = step_.range_of(0, step_.rows);
            if (!step_.range.is_empty()) {
                step_.runs = {};
                find_runs(call, partition, step_.range, step_.runs);
                find_next_keys(call, partition, last_position, step_.runs);
                Products::begin(step_);
                for (int row = 0; row < step_.rows; row += kCodeRows) {
                    const int count = smaller(step_.rows - row, kCodeRows);
                    Products::score(step_, row, count);
                    weigh(row, count);
                    Products::sum(step_, row, count);
                }
            }
            call.out == nullptr ? keep(partition) : merge();
        }
        for (int row = 0; row < step_.rows && call.out != nullptr; ++row) {
            write_output(call, row, step_.scratch.sums[row], step_.scratch.outputs + row * step_.padded);
        }
    }

 private:
    void prepare() const {
        const int64_t head_dim = step_.call.kv.head_dim;
        for (int row = 0; row < step_.rows; ++row) {
            const float* query = query_of(step_.call, row);
            F most = f_set(0.0f);
            for (int64_t d = 0; d < head_dim; d += 16) {
                most = f_max_magnitude(most, f_load_first(query + d, rest(head_dim, d)));
            }
            Wholes wholes(max_magnitude_bits(most, most));
            int8_t* codes = step_.scratch.queries + row * 2 * step_.padded;
            for (int64_t d = 0; d < step_.padded; d += 16) {
                wholes.store(f_load_first(query + d, rest(head_dim, d)), codes + d, codes + step_.padded + d);
            }
            step_.scratch.query_scales[row] = wholes.scale() * step_.call.scale * 1.44269504f;
            step_.scratch.query_sums[2 * row] = wholes.high_sum();
            step_.scratch.query_sums[2 * row + 1] = wholes.low_sum();
            step_.scratch.maxima[row] = -__builtin_inff();
            step_.scratch.sums[row] = 0.0f;
            std::memset(step_.scratch.outputs + row * step_.padded, 0, step_.padded * sizeof(float));
        }
    }

    // Turns sums of some rows into whole weights, in three passes over all of them: in each a row waits for none.
    void weigh(int row, int count) const {
        Range seen_by[kCodeRows];
        uint32_t largest[kCodeRows];
        for (int i = 0; i < count; ++i) seen_by[i] = step_.range_of(row + i, 1);
        for (int i = 0; i < count; ++i) scale_scores(row + i, seen_by[i]);
        for (int i = 0; i < count; ++i) largest[i] = weigh_values(row + i, seen_by[i]);
        for (int i = 0; i < count; ++i) make_whole(row + i, seen_by[i], largest[i]);
    }

    // Sums become scores to base two; finds their maximum.
    void scale_scores(int row, Range of_row) const {
        float* scores = step_.scratch.scores + row * kPartition;
        const F scale = f_set(step_.scratch.query_scales[row]);
        F largest = f_set(-__builtin_inff());
        for (int run = of_row.first_run(); run < of_row.last_run(); ++run) {
            F score = f_mul(f_mul(f_load(scores + 16 * run), scale), f_load(step_.runs.key_scales[run]));
            if (!of_row.covers(run)) score = keep_seen(of_row, run, score, -__builtin_inff());
            f_store(scores + 16 * run, score);
            largest = f_max(score, largest);
        }
        step_.scratch.part_maxima[row] = f_max_lane(largest);
    }

    // Scores become weights times the values' scales; returns the bits of the largest.
    uint32_t weigh_values(int row, Range of_row) const {
        float* scores = step_.scratch.scores + row * kPartition;
        const float maximum = step_.scratch.part_maxima[row];
        const F top = f_set(maximum > kLeastMaximum ? maximum : kLeastMaximum);
        F sums = f_set(0.0f), most = f_set(0.0f);
        for (int run = of_row.first_run(); run < of_row.last_run(); ++run) {
            const F weight = f_code_weight(f_sub(f_load(scores + 16 * run), top));
            sums = f_add(sums, weight);
            F of_values = f_mul(weight, f_load(step_.runs.value_scales[run]));
            if (!of_row.covers(run)) of_values = keep_seen(of_row, run, of_values, 0.0f);
            f_store(scores + 16 * run, of_values);
            most = f_max_magnitude(most, of_values);
        }
        step_.scratch.part_sums[row] = f_sum(sums);
        return max_magnitude_bits(most, most);
    }

    // Weights of runs that a row does not see are zero.
    void make_whole(int row, Range of_row, uint32_t largest) const {
        const float* scores = step_.scratch.scores + row * kPartition;
        Wholes wholes(largest);
        int8_t* weights = step_.scratch.weights + row * 2 * kPartition;
        if (of_row.last_run() - of_row.first_run() < kRuns) std::memset(weights, 0, 2 * kPartition);
        for (int run = of_row.first_run(); run < of_row.last_run(); ++run) {
            wholes.store(f_load(scores + 16 * run), weights + 16 * run, weights + kPartition + 16 * run);
        }
        step_.scratch.weight_scales[row] = wholes.scale();
        step_.scratch.weight_sums[2 * row] = wholes.high_sum();
        step_.scratch.weight_sums[2 * row + 1] = wholes.low_sum();
    }

    // Leaves a partition's results.
    void keep(int partition) const {
        for (int row = 0; row < step_.rows; ++row) {
            const int index = partition - step_.call.partition_begin;
            if (step_.range.is_empty()) {
                keep_partial(step_.call, index, row, -__builtin_inff(), 0.0f, nullptr);
            } else {
                keep_partial(step_.call, index, row, step_.scratch.part_maxima[row], step_.scratch.part_sums[row],
                             step_.scratch.part_outputs + row * step_.padded);
            }
        }
    }

    // Folds a partition's results into what rows have so far.
    void merge() const {
        if (step_.range.is_empty()) return;
        const CodeScratch& scratch = step_.scratch;
        const int64_t padded = step_.padded;
        for (int row = 0; row < step_.rows; row += kCodeRows) {
            merge_rows(smaller(step_.rows - row, kCodeRows), scratch.maxima + row, scratch.sums + row,
                       scratch.outputs + row * padded, scratch.part_maxima + row, scratch.part_sums + row,
                       scratch.part_outputs + row * padded, padded);
        }
    }

    CodeStep step_;
};

}  // namespace
