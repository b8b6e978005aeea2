// Attention whose queries and weights are sums of one or two bfloat16 terms, over a bfloat16 cache: what tile products
// (AMX) are made for, stated so that any instruction set computes the same bits.
//
// As in attention.inl, positions fall into partitions of 128. With T terms:
//   query    times scale and log2(e) in float32, 0 below 2^-40; its first term is the nearest bfloat16 (ties to even),
//            the second the nearest to what the first misses.
//   score    to base two. Over groups of 32 of head_dim in order, for each term in turn, c = c + (even + odd): the sums
//            of the products of the group's even and of its odd dims, each from 0, in order, with fused additions.
//   weight   p = 2^(score - m) in float32, 0 below 2^-39, m being the largest score of the partition; l sums p over
//            sixteen lanes by position. Terms of p are made as those of a query.
//   output   over runs of sixteen positions in order, for each term in turn, o = o + (even + odd), likewise over the
//            run's positions.
//   merging  with m' = max(m, m of the partition): l = l 2^(m - m') + ..., o = o 2^(m - m') + ...
// That is what TDPBF16PS sums (Intel Architecture Instruction Set Extensions), which takes denormals for zero and rounds
// to nearest even. Cached numbers are at least 2^-55, so products and their sums are multiples of 2^-125: never
// denormal, and no instruction set has anything to flush. Positions that a row does not see have the weight 0, which
// adds nothing to sums that are never -0.
#include "kernels.h"

namespace {

using treadle::kGroup;

constexpr int kTermRows = 16;                  // rows taken together
constexpr int kQueryWords = kTermRows * kGroup;  // of a term of a group
constexpr int kWeightWords = kTermRows * 16;     // of a term of a run
constexpr float kLeastQuery = 0x1p-40f;
constexpr float kLeastExponent = -39.0f;
constexpr float kLeastMaximum = -1e38f;  // stands for -infinity where two are subtracted

inline int64_t num_groups(int64_t head_dim) { return (head_dim + kGroup - 1) / kGroup; }

// 2^x for x <= 0, 0 below 2^-39; error below 2 ulp. Cephes' polynomial (S. Moshier, exp2f.c).
inline F f_weight(F x) {
    const F magic = f_set(12582912.0f);  // 1.5 * 2^23: the sum's last bits are the nearest integer
    const F shifted = f_add(x, magic);
    const F r = f_sub(x, f_sub(shifted, magic));
    F p = f_set(1.535336188319500e-4f);
    p = f_fma(p, r, f_set(1.339887440266574e-3f));
    p = f_fma(p, r, f_set(9.618437357674640e-3f));
    p = f_fma(p, r, f_set(5.550332471162809e-2f));
    p = f_fma(p, r, f_set(2.402264791363012e-1f));
    p = f_fma(p, r, f_set(6.931472028550421e-1f));
    p = f_fma(p, r, f_set(1.0f));
    return f_zero_below(f_times_power(p, shifted), x, kLeastExponent);
}

// This thread's memory while it works on a call; sizes in attention_scratch_bytes.
struct TermScratch {
    uint16_t* queries;    // [row tiles][groups][terms][16][32]
    float* widened;       // [2][groups][terms][32]
    float* outputs;       // [rows][padded], merged so far
    float* maxima;        // [rows], merged so far
    float* sums;          // likewise
    float* scores;        // [16][128], from here on of a row tile and a partition
    uint16_t* weights;    // [8 runs][terms][16][16]
    float* part_outputs;  // [16][padded]
    float* part_maxima;   // [16]
    float* part_sums;     // [16]
    uint16_t* values;     // [2 runs][8][padded][2]

    TermScratch(uint8_t* memory, int64_t rows, int64_t groups, int64_t padded) {
        const auto take = [&memory](int64_t num_bytes) {
            uint8_t* taken = memory;
            memory += (num_bytes + 63) / 64 * 64;
            return taken;
        };
        const auto floats = [&take](int64_t count) { return reinterpret_cast<float*>(take(4 * count)); };
        const auto words = [&take](int64_t count) { return reinterpret_cast<uint16_t*>(take(2 * count)); };
        queries = words(rows * groups * 2 * kGroup);
        widened = floats(2 * groups * 2 * kGroup);
        outputs = floats(rows * padded);
        maxima = floats(rows);
        sums = floats(rows);
        scores = floats(kTermRows * kPartition);
        weights = words(kRuns * 2 * kWeightWords);
        part_outputs = floats(kTermRows * padded);
        part_maxima = floats(kTermRows);
        part_sums = floats(kTermRows);
        values = words(2 * 16 * padded);
    }
};

inline int64_t term_rows(const AttentionCall& call) {
    return (treadle::attention_rows(call.group_size) + kTermRows - 1) / kTermRows * kTermRows;
}

// Up to sixteen rows and their products with a partition.
struct TermTile {
    int rows;
    const uint16_t* queries;  // [groups][terms][16][32]
    float* scores;            // [16][128]
    uint16_t* weights;        // [8 runs][terms][16][16]
    float* outputs;           // [16][padded]
};

// Sums of products with even and with odd words, of some rows.
template <int kRows>
struct EvenOdd {
    F even[kRows], odd[kRows];

    EvenOdd() {
        for (int j = 0; j < kRows; ++j) even[j] = odd[j] = f_set(0.0f);
    }
    // Adds two words of a term; rows lie `stride` apart.
    inline __attribute__((always_inline)) void add(const float* words, int64_t stride, F first, F second) {
#pragma GCC unroll 4
        for (int j = 0; j < kRows; ++j) {
            even[j] = f_fma(f_set(words[stride * j]), first, even[j]);
            odd[j] = f_fma(f_set(words[stride * j + 1]), second, odd[j]);
        }
    }
    F sum(int j) const { return f_add(even[j], odd[j]); }
};

// The two products by vector instructions.
template <int kTerms>
class VectorProducts {
 public:
    VectorProducts(const AttentionCall& call, float* widened)
        : head_dim_(call.kv.head_dim), padded_(call.kv.padded_head_dim), widened_(widened) {}

    void score(const TermTile& tile, const Runs<KvBF16>& runs, Range range) const {
        int row = 0;
        for (; row + kSplitRowsAtOnce <= tile.rows; row += kSplitRowsAtOnce) {
            score_rows<kSplitRowsAtOnce>(tile, runs, range, row);
        }
        for (; row < tile.rows; ++row) score_rows<1>(tile, runs, range, row);
    }

    void add_up(const TermTile& tile, const Runs<KvBF16>& runs, Range range) const {
        int row = 0;
        for (; row + kSplitRowsAtOnce <= tile.rows; row += kSplitRowsAtOnce) {
            output_rows<kSplitRowsAtOnce>(tile, runs, range, row);
        }
        for (; row < tile.rows; ++row) output_rows<1>(tile, runs, range, row);
    }

 private:
    template <int kRows>
    void score_rows(const TermTile& tile, const Runs<KvBF16>& runs, Range range, int row) const {
        const int64_t groups = num_groups(head_dim_), stride = groups * kTerms * kGroup;
        for (int64_t i = 0; i < groups * kTerms; ++i) {
            for (int j = 0; j < kRows; ++j) {
                const uint16_t* words = tile.queries + i * kQueryWords + (row + j) * kGroup;
                f_store(widened_ + j * stride + i * kGroup, f_load_bf16(words));
                f_store(widened_ + j * stride + i * kGroup + 16, f_load_bf16(words + 16));
            }
        }
        for (int run = range.first_run(); run < range.last_run(); ++run) {
            F scores[kRows];
            for (F& score : scores) score = f_set(0.0f);
            for (int64_t g = 0; g < groups; ++g) {
                EvenOdd<kRows> of_term[kTerms];
                const float* words = widened_ + g * kTerms * kGroup;
                const int64_t dims = head_dim_ - g * kGroup < kGroup ? head_dim_ - g * kGroup : kGroup;
                for (int64_t d = 0; d < dims; d += 2) {
                    F first, second;
                    KvBF16::load_keys(runs.keys[run] + 16 * (g * kGroup + d), first, second);
#pragma GCC unroll 2
                    for (int t = 0; t < kTerms; ++t) of_term[t].add(words + t * kGroup + d, stride, first, second);
                }
                for (const EvenOdd<kRows>& sums : of_term) {
                    for (int j = 0; j < kRows; ++j) scores[j] = f_add(scores[j], sums.sum(j));
                }
            }
            for (int j = 0; j < kRows; ++j) f_store(tile.scores + (row + j) * kPartition + 16 * run, scores[j]);
        }
    }

    template <int kRows>
    void output_rows(const TermTile& tile, const Runs<KvBF16>& runs, Range range, int row) const {
        for (int run = range.first_run(); run < range.last_run(); ++run) {
            float words[kTerms][kRows][16];
            for (int t = 0; t < kTerms; ++t) {
                for (int j = 0; j < kRows; ++j) {
                    f_store(words[t][j], f_load_bf16(tile.weights + (run * kTerms + t) * kWeightWords + (row + j) * 16));
                }
            }
            for (int64_t d = 0; d < padded_; d += 16) {
                EvenOdd<kRows> of_term[kTerms];
                for (int64_t position = 0; position < 16; position += 2) {
                    F first, second;
                    KvBF16::load_values(runs.values[run] + position * padded_, padded_, d, first, second);
#pragma GCC unroll 2
                    for (int t = 0; t < kTerms; ++t) of_term[t].add(words[t][0] + position, 16, first, second);
                }
                for (int j = 0; j < kRows; ++j) {
                    float* out = tile.outputs + (row + j) * padded_ + d;
                    F sum = run == range.first_run() ? f_set(0.0f) : f_load(out);
                    for (const EvenOdd<kRows>& sums : of_term) sum = f_add(sum, sums.sum(j));
                    f_store(out, sum);
                }
            }
        }
    }

    const int64_t head_dim_;
    const int64_t padded_;
    float* const widened_;
};

// Shares, after merging, of what was there and of what is new, from their maxima.
inline void merge_shares(F old_maximum, F new_maximum, F& old_share, F& new_share) {
    const F top = f_at_least(f_max(old_maximum, new_maximum), kLeastMaximum);
    old_share = f_weight(f_sub(old_maximum, top));
    new_share = f_weight(f_sub(new_maximum, top));
}

inline F merged(F old_number, F old_share, F new_number, F new_share) {
    return f_fma(old_number, old_share, f_mul(new_number, new_share));
}

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

    void run() {
        prepare();
        const int last_position = call_.first_position + call_.num_queries - 1;
        for (int partition = call_.partition_begin; partition < call_.partition_end; ++partition) {
            const Range range{seen(call_, call_.first_position, partition).begin,
                              seen(call_, last_position, partition).end};
            Runs<KvBF16> runs{};
            if (!range.is_empty()) {
                find_runs(call_, partition, range, runs);
                if (rows_ <= kTermRows) find_next_keys(call_, partition, last_position, runs);
                hide_unseen(range, runs);
            }
            for (int row = 0; row < rows_; row += kTermRows) attend_tile(row, partition, runs);
        }
        for (int row = 0; row < rows_ && call_.out != nullptr; ++row) {
            write_output(call_, row, scratch_.sums[row], scratch_.outputs + row * padded_);
        }
    }

 private:
    // Splits the queries; rows that fill the last tile up are zero.
    void prepare() {
        const int64_t head_dim = call_.kv.head_dim;
        const F scale = f_set(call_.scale * 1.44269504f);
        for (int row = 0; row < (rows_ + kTermRows - 1) / kTermRows * kTermRows; ++row) {
            const float* query = call_.queries + row / call_.group_size * call_.query_stride +
                                 row % call_.group_size * head_dim;
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
        f_store(scratch_.part_maxima, f_set(-__builtin_inff()));
        f_store(scratch_.part_sums, f_set(0.0f));
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

    void attend_tile(int first_row, int partition, const Runs<KvBF16>& runs) {
        const int rows = smaller(rows_ - first_row, kTermRows), last_row = first_row + rows - 1;
        const Range range{seen(call_, position_of(first_row), partition).begin,
                          seen(call_, position_of(last_row), partition).end};
        const int index = partition - call_.partition_begin;
        if (range.is_empty()) {
            for (int row = first_row; row <= last_row && call_.out == nullptr; ++row) {
                keep_partial(call_, index, row, -__builtin_inff(), 0.0f, nullptr);
            }
            return;
        }
        const TermTile tile{rows, scratch_.queries + first_row / kTermRows * groups_ * kTerms * kQueryWords,
                            scratch_.scores, scratch_.weights, scratch_.part_outputs};
        products_.score(tile, runs, range);
        find_maxima(tile, range, first_row, partition);
        weigh(tile, range);
        products_.add_up(tile, runs, range);
        if (call_.out != nullptr) return merge(tile, first_row);
        for (int i = 0; i < rows; ++i) {
            keep_partial(call_, index, first_row + i, scratch_.part_maxima[i], scratch_.part_sums[i],
                         scratch_.part_outputs + i * padded_);
        }
    }

    // Of each row; what a row does not see becomes -infinity.
    void find_maxima(const TermTile& tile, Range range, int first_row, int partition) const {
        for (int row = 0; row < tile.rows; ++row) {
            const Range of_row = seen(call_, position_of(first_row + row), partition);
            F largest = f_set(-__builtin_inff());
            for (int run = range.first_run(); run < range.last_run(); ++run) {
                float* scores = tile.scores + row * kPartition + 16 * run;
                F score = f_load(scores);
                if (of_row.begin > 16 * run || of_row.end < 16 * run + 16) {
                    const int begin = smaller(larger(of_row.begin - 16 * run, 0), 16),
                              end = smaller(larger(of_row.end - 16 * run, 0), 16);
                    score = f_keep_lanes(score, begin, end, -__builtin_inff());
                    f_store(scores, score);
                }
                largest = f_max(score, largest);
            }
            scratch_.part_maxima[row] = f_max_lane(largest);
        }
    }

    // Turns scores into the terms of weights.
    void weigh(const TermTile& tile, Range range) const {
        for (int row = 0; row < tile.rows; ++row) {
            const float maximum = scratch_.part_maxima[row];
            const F top = f_set(maximum > kLeastMaximum ? maximum : kLeastMaximum);
            F sums = f_set(0.0f);
            for (int run = range.first_run(); run < range.last_run(); ++run) {
                F weight = f_weight(f_sub(f_load(tile.scores + row * kPartition + 16 * run), top));
                sums = f_add(sums, weight);
                uint16_t* words = tile.weights + run * kTerms * kWeightWords + row * 16;
#pragma GCC unroll 2
                for (int t = 0; t < kTerms; ++t) weight = f_sub(weight, f_store_bf16(weight, words + t * kWeightWords));
            }
            scratch_.part_sums[row] = f_sum(sums);
        }
    }

    // Folds a tile's partition into what its rows have so far.
    void merge(const TermTile& tile, int first_row) const {
        float *maxima = scratch_.maxima + first_row, *sums = scratch_.sums + first_row;
        const F old_maxima = f_load(maxima), new_maxima = f_load(scratch_.part_maxima);
        F old_shares, new_shares;
        merge_shares(old_maxima, new_maxima, old_shares, new_shares);
        f_store(maxima, f_max(old_maxima, new_maxima));
        f_store(sums, merged(f_load(sums), old_shares, f_load(scratch_.part_sums), new_shares));
        float old_share[kTermRows], new_share[kTermRows];
        f_store(old_share, old_shares);
        f_store(new_share, new_shares);
        for (int row = 0; row < tile.rows; ++row) {
            float* outputs = scratch_.outputs + (first_row + row) * padded_;
            const float* part = tile.outputs + row * padded_;
            const F old = f_set(old_share[row]), fresh = f_set(new_share[row]);
            for (int64_t d = 0; d < padded_; d += 16) {
                f_store(outputs + d, merged(f_load(outputs + d), old, f_load(part + d), fresh));
            }
        }
    }

    const AttentionCall& call_;
    const int rows_;
    const int64_t padded_;
    const int64_t groups_;
    const TermScratch scratch_;
    Products products_;
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
