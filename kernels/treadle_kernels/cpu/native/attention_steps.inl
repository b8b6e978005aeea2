// The order of attention in terms: steps of sixteen rows and a partition, in three stages that overlap.
#include <cstring>

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
        const int place = ++num_partitions_ % kPartitionsAtOnce;
        Runs<KvBF16>& runs = runs_[place];
        runs = {};
        const int last_position = call_.first_position + call_.num_queries - 1;
        const Range range{seen(call_, call_.first_position, partition_).begin,
                          seen(call_, last_position, partition_).end};
        if (range.is_empty()) return;
        find_runs(call_, partition_, range, runs);
        if (rows_ <= kTermRows) find_next_keys(call_, partition_, last_position, runs);
        join_pairs(range, runs, scratch_.values + place * kPartition * padded_);
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
        step.runs = &runs_[num_partitions_ % kPartitionsAtOnce];
        step.queries = scratch_.queries + first_row / kTermRows * groups_ * kTerms * kQueryWords;
        step.scores = scratch_.scores + slot * kStepScores;
        step.weights = reinterpret_cast<uint16_t*>(step.scores);
        step.maxima = scratch_.part_maxima + slot * kTermRows;
        step.tops = scratch_.part_tops + slot * kTermRows;
        step.sums = scratch_.part_sums + slot * kTermRows;
        step.outputs = scratch_.part_outputs;
    }

    // Has the values of each pair of runs lie side by side, 0 where no row sees them: what is not seen may be anything, and
    // 0 times NaN is NaN. Copies, where blocks are of one run or something is not seen.
    void join_pairs(Range range, Runs<KvBF16>& runs, uint16_t* copies) const {
        for (int pair = range.first_pair(); pair < range.last_pair(); ++pair) {
            const uint16_t* const* values = runs.values + 2 * pair;
            const bool is_seen = range.covers(2 * pair) && range.covers(2 * pair + 1);
            if (is_seen && values[1] == values[0] + 16 * padded_) continue;
            uint16_t* out = copies + pair * kPairPositions * padded_;
            for (int run = 2 * pair; run < 2 * pair + 2; ++run, out += 16 * padded_) {
                copy_seen(range, run, runs.values[run], out);
                runs.values[run] = out;
            }
        }
    }

    // `values` may be null where nothing of the run is seen.
    void copy_seen(Range range, int run, const uint16_t* values, uint16_t* out) const {
        if (range.covers(run)) {
            std::memcpy(out, values, 16 * padded_ * sizeof *out);
            return;
        }
        for (int64_t position = 0; position < 16; ++position) {
            const bool is_seen = 16 * run + position >= range.begin && 16 * run + position < range.end;
            const int64_t first = position / 2 * 2 * padded_ + position % 2;
            for (int64_t d = 0; d < padded_; ++d) out[first + 2 * d] = is_seen ? values[first + 2 * d] : uint16_t{0};
        }
    }

    int position_of(int row) const { return call_.first_position + row / call_.group_size; }

    // Of each row, and the tops; what a row does not see becomes -infinity.
    void find_maxima(const TermStep& step) const {
        if (step.rows <= kFewTermRows) {
            for (int row = 0; row < step.rows; ++row) {
                const float maximum = f_max_lane(largest_scores(step, row));
                step.maxima[row] = maximum;
                const float top = maximum > kLeastMaximum ? maximum : kLeastMaximum;
                step.tops[row] = kTerms > 1 ? top : treadle::kBitsOfOne - top * kBitsAPower;
            }
            return;
        }
        F largest[kTermRows];
        for (int row = 0; row < kTermRows; ++row) {
            largest[row] = row < step.rows ? largest_scores(step, row) : f_set(-__builtin_inff());
        }
        const F maxima = f_max_lanes(largest);
        f_store(step.maxima, maxima);
        const F tops = f_at_least(maxima, kLeastMaximum);
        f_store(step.tops, kTerms > 1 ? tops : f_fma(tops, f_set(-kBitsAPower), f_set(treadle::kBitsOfOne)));
    }

    // By lanes.
    F largest_scores(const TermStep& step, int row) const {
        if (!step.is_whole) return largest_seen(step, row);
        F largest[2] = {score_at(step, row, 0), score_at(step, row, 1)};
#pragma GCC unroll 8
        for (int run = 2; run < kRuns; ++run) largest[run % 2] = f_max(score_at(step, row, run), largest[run % 2]);
        return f_max(largest[0], largest[1]);
    }

    F largest_seen(const TermStep& step, int row) const {
        const Range of_row = seen(call_, position_of(step.first_row + row), step.partition);
        float* scores = step.scores + row * 16;
        F largest = f_set(-__builtin_inff());
        int run = step.range.first_run();
        for (; of_row.begin == 0 && run < of_row.end / 16; ++run) {
            largest = f_max(f_load(scores + run * kRunScores), largest);
        }
        for (; run < step.range.last_run(); ++run) {
            const F score = keep_seen(of_row, run, f_load(scores + run * kRunScores), -__builtin_inff());
            f_store(scores + run * kRunScores, score);
            largest = f_max(score, largest);
        }
        return largest;
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
            step.sums[row] = f_sum(weigh_row(step, row));
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
        F sums[kTermRows];
#pragma GCC unroll 8
        for (int row = 0; row < kTermRows / 2; ++row) {
            if (last != nullptr) products_.add_in_order(*last, row);
            sums[row] = row < step.rows ? weigh_row(step, row) : f_set(0.0f);
        }
        if (last != nullptr) finish(*last);
#pragma GCC unroll 8
        for (int row = kTermRows / 2; row < kTermRows; ++row) {
            if (next != nullptr) products_.score_in_order(*next, row - kTermRows / 2);
            sums[row] = row < step.rows ? weigh_row(step, row) : f_set(0.0f);
        }
        f_store(step.sums, f_sums(sums));
    }

    // A row's sums, by lanes.
    inline __attribute__((always_inline)) F weigh_row(const TermStep& step, int row) const {
        const F top = f_set(step.tops[row]);
        F sums = f_set(0.0f);
        const int first = step.range.first_run(), last = step.range.last_run();
        if (first == 0 && last == kRuns) {
#pragma GCC unroll 4
            for (int pair = 0; pair < kPairs; ++pair) {
                const F of_first = score_at(step, row, 2 * pair), of_second = score_at(step, row, 2 * pair + 1);
                sums = weigh_pair(step, row, pair, top, of_first, of_second, sums);
            }
            return sums;
        }
        const auto score = [&](int run) {  // others were not computed
            return run >= first && run < last ? score_at(step, row, run) : f_set(-__builtin_inff());
        };
        for (int pair = step.range.first_pair(); pair < step.range.last_pair(); ++pair) {
            sums = weigh_pair(step, row, pair, top, score(2 * pair), score(2 * pair + 1), sums);
        }
        return sums;
    }

    static F score_at(const TermStep& step, int row, int run) { return f_load(step.scores + run * kRunScores + row * 16); }

    // Leaves the terms of a pair's weights for a row, and adds the weights to its sums.
    static inline __attribute__((always_inline)) F weigh_pair(const TermStep& step, int row, int pair, F top, F first,
                                                              F second, F sums) {
        if (kTerms == 1) {
            const F scale = f_set(kBitsAPower);
            return f_add_powers(sums, f_fma(first, scale, top), f_fma(second, scale, top),
                                step.weights_of(pair, 0) + row * kPairPositions);
        }
        const F weights[2] = {f_weight(f_sub(first, top)), f_weight(f_sub(second, top))};
        for (int half = 0; half < 2; ++half) {
            F left = weights[half];
            for (int t = 0; t < kTerms; ++t) {
                uint16_t* words = step.weights_of(pair, t) + row * kPairPositions + 16 * half;
                left = f_sub(left, f_store_bf16(left, words));
            }
        }
        return f_add(f_add(sums, weights[0]), weights[1]);
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
    Runs<KvBF16> runs_[kPartitionsAtOnce];
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
