// The order of attention in terms: steps of sixteen rows and a partition, in three stages that overlap.
#include "kernels.h"

namespace {

template <int kTerms, class Products>
class TermAttention {
 public:
    explicit TermAttention(const AttentionCall& call)
        : call_(call),
          rows_(call.num_queries * call.group_size),
          padded_(call.kv.padded_head_dim),
          groups_(num_groups(call.kv.head_dim)),
          scratch_(call.scratch, term_rows(call), groups_, padded_),
          products_(call, scratch_.widened) {}

    // While a step's scores become weights, first the outputs of the one before are computed, then the scores of the
    // one after, in the place of the former's weights.
    void run() {
        prepare();
        TermStep last{}, current{}, next{};
        bool has_last = false, has_current = take_step(current);
        if (has_current) {
            for (int left = products_.start_scores(current); left > 0; --left) products_.advance_scores();
            find_maxima(current);
        }
        while (has_current) {
            const bool has_next = take_step(next);
            weigh(current, has_last ? &last : nullptr, has_next ? &next : nullptr);
            if (has_next) find_maxima(next);
            last = current;
            has_last = true;
            current = next;
            has_current = has_next;
        }
        if (has_last) {
            for (int left = products_.start_outputs(last); left > 0; --left) products_.advance_outputs();
            finish(last);
        }
        for (int row = 0; row < rows_ && call_.out != nullptr; ++row) {
            if (row % kTermRows == 0) products_.stay_awake();
            write_output(call_, row, scratch_.sums[row], scratch_.outputs + row * padded_);
        }
    }

 private:
    // Splits the queries; rows that fill the last tile up are zero.
    void prepare() {
        const int64_t head_dim = call_.kv.head_dim;
        const F scale = f_set(call_.scale * 1.44269504f);
        // Of a tile with fewer rows than it could have, no others are read.
        const int filled = rows_ <= kTermRows ? rows_ : (rows_ + kTermRows - 1) / kTermRows * kTermRows;
        for (int row = 0; row < filled; ++row) {
            if (row % kTermRows == 0) products_.stay_awake();
            const float* query = query_of(call_, row);
            uint16_t* out = scratch_.queries + row / kTermRows * groups_ * kTerms * kQueryWords +
                            row % kTermRows * kGroup;
            for (int64_t d = 0; d < groups_ * kGroup; d += 16) {
                const int64_t left = row < rows_ && d < head_dim ? head_dim - d : 0;
                F x = left > 0 ? f_mul(f_load_first(query + d, rest(left, 0)), scale) : f_set(0.0f);
                x = f_zero_below(x, f_max(x, f_sub(f_set(0.0f), x)), kLeastQuery);
                uint16_t* words = out + d / kGroup * kTerms * kQueryWords + d % kGroup;
                for (int t = 0; t < kTerms; ++t) x = f_sub(x, f_store_bf16(x, words + t * kQueryWords));
            }
            scratch_.maxima[row] = -__builtin_inff();
            scratch_.sums[row] = 0.0f;
            for (int64_t d = 0; d < padded_; d += 16) f_store(scratch_.outputs + row * padded_ + d, f_set(0.0f));
        }
        for (int i = 0; i < kStepsAtOnce * kTermRows; i += 16) {
            f_store(scratch_.part_maxima + i, f_set(-__builtin_inff()));
            f_store(scratch_.part_sums + i, f_set(0.0f));
        }
        partition_ = call_.partition_begin - 1;
        next_row_ = rows_;
    }

    // Whatever a partition holds for the call's rows.
    void enter_partition() {
        next_row_ = 0;
        ++partition_;
        Runs<KvBF16>& runs = runs_[++num_partitions_ % 3];
        runs = {};
        const int last_position = call_.first_position + call_.num_queries - 1;
        const Range range{seen(call_, call_.first_position, partition_).begin,
                          seen(call_, last_position, partition_).end};
        if (range.is_empty()) return;
        find_runs(call_, partition_, range, runs);
        if (rows_ <= kTermRows) find_next_keys(call_, partition_, last_position, runs);
        hide_unseen(range, runs);
    }

    // The next step in which any row sees anything; false: there is none.
    bool take_step(TermStep& step) {
        for (;;) {
            if (next_row_ >= rows_) {
                if (partition_ + 1 >= call_.partition_end) return false;
                enter_partition();
            }
            const int first_row = next_row_, rows = smaller(rows_ - first_row, kTermRows);
            next_row_ += kTermRows;
            const Range range{seen(call_, position_of(first_row), partition_).begin,
                              seen(call_, position_of(first_row + rows - 1), partition_).end};
            if (!range.is_empty()) {
                make_step(first_row, rows, range, step);
                return true;
            }
            for (int row = first_row; row < first_row + rows && call_.out == nullptr; ++row) {
                keep_partial(call_, partition_ - call_.partition_begin, row, -__builtin_inff(), 0.0f, nullptr);
            }
        }
    }

    void make_step(int first_row, int rows, Range range, TermStep& step) {
        const int slot = ++num_steps_ % kStepsAtOnce;
        step.partition = partition_;
        step.first_row = first_row;
        step.rows = rows;
        step.range = range;
        step.is_whole = rows == kTermRows && range.begin == 0 && range.end == kPartition &&
                        seen(call_, position_of(first_row), partition_).end == kPartition &&
                        seen(call_, position_of(first_row + rows - 1), partition_).begin == 0;
        step.runs = &runs_[num_partitions_ % 3];
        step.queries = scratch_.queries + first_row / kTermRows * groups_ * kTerms * kQueryWords;
        step.scores = scratch_.scores + slot * kStepScores;
        step.weights = reinterpret_cast<uint16_t*>(step.scores);
        step.maxima = scratch_.part_maxima + slot * kTermRows;
        step.sums = scratch_.part_sums + slot * kTermRows;
        step.outputs = scratch_.part_outputs;
    }

    // Positions that no row sees may hold anything, and 0 times NaN is NaN.
    void hide_unseen(Range range, Runs<KvBF16>& runs) const {
        const int first = range.first_run(), last = range.last_run() - 1;
        if (range.begin % 16 != 0) copy_seen(range, first, scratch_.values, runs);
        if (range.end % 16 != 0) copy_seen(range, last, scratch_.values + 16 * padded_, runs);
    }

    void copy_seen(Range range, int run, uint16_t* out, Runs<KvBF16>& runs) const {
        for (int64_t position = 0; position < 16; position += 2) {
            const auto mask = [&](int64_t at) {
                return static_cast<uint16_t>(16 * run + at >= range.begin && 16 * run + at < range.end ? 0xffff : 0);
            };
            const uint16_t even = mask(position), odd = mask(position + 1);
            const uint16_t* in = runs.values[run] + position * padded_;
            uint16_t* to = out + position * padded_;
            for (int64_t d = 0; d < padded_; ++d) {
                to[2 * d] = in[2 * d] & even;
                to[2 * d + 1] = in[2 * d + 1] & odd;
            }
        }
        runs.values[run] = out;
    }

    int position_of(int row) const { return call_.first_position + row / call_.group_size; }

    // Of each row; what a row does not see becomes -infinity.
    void find_maxima(const TermStep& step) const {
        if (step.is_whole) {
            for (int row = 0; row < kTermRows; ++row) step.maxima[row] = largest_score(step.scores + row * 16);
            return;
        }
        const int last = step.range.last_run();
        for (int row = 0; row < step.rows; ++row) {
            const Range of_row = seen(call_, position_of(step.first_row + row), step.partition);
            float* scores = step.scores + row * 16;
            F largest = f_set(-__builtin_inff());
            int run = step.range.first_run();
            for (; of_row.begin == 0 && run < of_row.end / 16; ++run) {
                largest = f_max(f_load(scores + run * kRunScores), largest);
            }
            for (; run < last; ++run) {
                const F score = keep_seen(of_row, run, f_load(scores + run * kRunScores), -__builtin_inff());
                f_store(scores + run * kRunScores, score);
                largest = f_max(score, largest);
            }
            step.maxima[row] = f_max_lane(largest);
        }
    }

    // Of a row that sees the whole partition.
    static float largest_score(const float* scores) {
        F largest[2] = {f_set(-__builtin_inff()), f_set(-__builtin_inff())};
#pragma GCC unroll 8
        for (int run = 0; run < kRuns; ++run) {
            largest[run % 2] = f_max(f_load(scores + run * kRunScores), largest[run % 2]);
        }
        return f_max_lane(f_max(largest[0], largest[1]));
    }

    // Turns a step's scores into the terms of weights. Between rows goes a share of the work on others' products.
    void weigh(const TermStep& step, const TermStep* last, const TermStep* next) {
        const auto has_order = [this](const TermStep* other) {
            return other == nullptr || products_.has_order(*other);
        };
        has_order(last) && has_order(&step) && has_order(next) ? weigh_in_order(step, last, next)
                                                               : weigh_by_shares(step, last, next);
    }

    void weigh_by_shares(const TermStep& step, const TermStep* last, const TermStep* next) {
        int outputs_left = last == nullptr ? 0 : products_.start_outputs(*last);
        int scores_left = next == nullptr ? 0 : products_.num_score_parts(*next);
        if (last != nullptr && outputs_left == 0) finish(*last);
        bool is_scoring = false, is_added_up = false;
        for (int row = 0; row < step.rows; ++row) {
            weigh_row(step, row);
            if (is_added_up) finish(*last);
            is_added_up = false;
            // All is done before the last row, so that what was stored is at hand when it is read.
            const int rows_left = larger(step.rows - row - 1, 1);
            for (int share = (scores_left + outputs_left + rows_left - 1) / rows_left; share > 0; --share) {
                if (outputs_left > 0) {
                    products_.advance_outputs();
                    is_added_up = --outputs_left == 0;
                    continue;
                }
                if (!is_scoring) products_.start_scores(*next);
                is_scoring = true;
                products_.advance_scores();
                --scores_left;
            }
        }
        if (is_added_up) finish(*last);
        if (next != nullptr && !is_scoring) products_.start_scores(*next);
    }

    // The same in an order that depends on no state.
    void weigh_in_order(const TermStep& step, const TermStep* last, const TermStep* next) const {
        for (int row = 0; row < kTermRows / 2; ++row) {
            if (last != nullptr) products_.add_in_order(*last, row);
            weigh_one(step, row);
        }
        if (last != nullptr) finish(*last);
        for (int row = kTermRows / 2; row < kTermRows; ++row) {
            if (next != nullptr) products_.score_in_order(*next, row - kTermRows / 2);
            weigh_one(step, row);
        }
    }

    inline __attribute__((always_inline)) void weigh_one(const TermStep& step, int row) const {
        if (step.is_whole) return weigh_whole_row(step, row);
        if (row < step.rows) weigh_row(step, row);
    }

    inline __attribute__((always_inline)) void weigh_whole_row(const TermStep& step, int row) const {
        const F top = top_of(step, row);
        F sums = f_set(0.0f);
#pragma GCC unroll 8
        for (int run = 0; run < kRuns; ++run) sums = f_add(sums, weigh_run(step, row, run, top));
        step.sums[row] = f_sum(sums);
    }

    inline __attribute__((always_inline)) void weigh_row(const TermStep& step, int row) const {
        const F top = top_of(step, row);
        F sums = f_set(0.0f);
        for (int run = step.range.first_run(); run < step.range.last_run(); ++run) {
            sums = f_add(sums, weigh_run(step, row, run, top));
        }
        step.sums[row] = f_sum(sums);
    }

    static F top_of(const TermStep& step, int row) {
        return f_set(step.maxima[row] > kLeastMaximum ? step.maxima[row] : kLeastMaximum);
    }

    // Leaves the terms of a row's sixteen weights, and returns them.
    static inline __attribute__((always_inline)) F weigh_run(const TermStep& step, int row, int run, F top) {
        const F weights = f_weight<kTerms>(f_sub(f_load(step.scores + run * kRunScores + row * 16), top));
        uint16_t* words = step.weights + 2 * run * kRunScores + row * kWeightStride;
        F left = weights;
#pragma GCC unroll 2
        for (int t = 0; t < kTerms; ++t) left = f_sub(left, f_store_bf16(left, words + 16 * t));
        return weights;
    }

    // Folds a step into what its rows have so far, or leaves it as a partial result.
    void finish(const TermStep& step) const {
        if (call_.out != nullptr) return merge(step);
        for (int row = 0; row < step.rows; ++row) {
            keep_partial(call_, step.partition - call_.partition_begin, step.first_row + row, step.maxima[row],
                         step.sums[row], step.outputs + row * padded_);
        }
    }

    void merge(const TermStep& step) const {
        merge_rows(step.rows, scratch_.maxima + step.first_row, scratch_.sums + step.first_row,
                   scratch_.outputs + step.first_row * padded_, step.maxima, step.sums, step.outputs, padded_);
    }

    const AttentionCall& call_;
    const int rows_;
    const int64_t padded_;
    const int64_t groups_;
    const TermScratch scratch_;
    Products products_;
    int partition_ = 0;       // the one that steps are taken from
    int next_row_ = 0;        // in it
    int num_partitions_ = 0;  // entered so far
    int num_steps_ = 0;       // taken so far
    Runs<KvBF16> runs_[3];    // of the partitions of a step, the one before and the one after
};

template <int kTerms, class Products>
void attend_with_terms(const AttentionCall& call) {
    TermAttention<kTerms, Products>(call).run();
}

inline void merge_partials_of_terms(const AttentionCall& call, int32_t num_partitions) {
    const int64_t padded = call.kv.padded_head_dim;
    const TermScratch scratch(call.scratch, term_rows(call), num_groups(call.kv.head_dim), padded);
    float* outputs = scratch.outputs;
    for (int row = 0; row < call.num_queries * call.group_size; ++row) {
        F maximum = f_set(-__builtin_inff()), sum = f_set(0.0f);
        for (int64_t d = 0; d < padded; d += 16) f_store(outputs + d, f_set(0.0f));
        for (int index = 0; index < num_partitions; ++index) {
            const float* partial = partial_of(call, index, row);
            if (partial[1] == 0.0f) continue;  // it sees nothing here
            const F new_maximum = f_set(partial[0]);
            F old_share, new_share;
            merge_shares(maximum, new_maximum, old_share, new_share);
            maximum = f_max(maximum, new_maximum);
            sum = merged(sum, old_share, f_set(partial[1]), new_share);
            for (int64_t d = 0; d < padded; d += 16) {
                f_store(outputs + d, merged(f_load(outputs + d), old_share, f_load(partial + 2 + d), new_share));
            }
        }
        float total[16];
        f_store(total, sum);
        write_output(call, row, total[0], outputs);
    }
}

}  // namespace
