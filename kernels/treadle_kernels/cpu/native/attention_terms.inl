// Attention whose queries and weights are sums of one or two bfloat16 terms, over a bfloat16 cache: what tile products
// (AMX) are made for, stated so that any instruction set computes the same bits.
//
// As in attention.inl, positions fall into partitions of 128. With T terms:
//   query    times scale and log2(e) in float32, 0 below 2^-40; its first term is the nearest bfloat16 (ties to
//            even), the second the nearest to what the first misses.
//   score    to base two. Over groups of 32 of head_dim in order, for each term in turn, c = c + (even + odd): the sums
//            of the products of the group's even and of its odd dims, each from 0, in order, with fused additions.
//   weight   p = 2^(score - m), 0 below 2^-39, m being the largest score of the partition. With two terms in float32; l
//            sums p over sixteen lanes by position, and terms of p are made as those of a query. With one as powers.h
//            has it, of 128 (score - m) rounded; l sums those over sixteen lanes, of two neighbours each.
//   output   over pairs of runs, 32 positions, in order, for each term in turn, o = o + (even + odd), likewise over the
//            pair's positions.
//   merging  with m' = max(m, m of the partition): l = l 2^(m - m') + ..., o = o 2^(m - m') + ...
// That is what TDPBF16PS sums (Intel Architecture Instruction Set Extensions), which takes denormals for zero and
// rounds to nearest even. Cached numbers are 0 or at least 2^-55, so products and their sums are multiples of 2^-125:
// never denormal, and no instruction set has anything to flush. Positions that a row does not see have the weight 0,
// which adds nothing to sums that are never -0.
//
// What is not a number shows. A query's makes all its scores such, which one term gives no weight at all: 0 / 0. Of a key
// its values tell (kv_write.inl), or the largest score is infinite, which gives no weight either.
#include "kernels.h"

namespace {

using treadle::kGroup;

constexpr int kTermRows = 16;                  // rows taken together
constexpr int kQueryWords = kTermRows * kGroup;       // of a term of a group
constexpr int kStepScores = kTermRows * kPartition;
constexpr int kFewTermRows = 4;
constexpr int kStepsAtOnce = 2;                       // with scores or weights
constexpr int kPartitionsAtOnce = 3;                  // of a step, the one before and the one after
constexpr int kRunScores = kTermRows * 16;            // of a run
constexpr int kPairs = kRuns / 2;                     // of runs, whose values lie side by side
constexpr int kPairPositions = 32;
constexpr int kPairWeights = kTermRows * kPairPositions;  // words of a term of a pair's weights
constexpr float kBitsAPower = 128.0f;                     // see powers.h
constexpr float kLeastQuery = 0x1p-40f;
constexpr float kLeastExponent = -39.0f;
constexpr float kLeastMaximum = -1e30f;  // stands for -infinity where two are subtracted

inline int64_t num_groups(int64_t head_dim) { return (head_dim + kGroup - 1) / kGroup; }

// 2^x for x <= 0, 0 below 2^-39, with an error below 2 ulp, by Cephes' polynomial (S. Moshier, exp2f.c).
inline F f_weight(F x) {
    const F shifter = f_set(kShifter);
    const F shifted = f_add(x, shifter);
    const F r = f_sub(x, f_sub(shifted, shifter));
    F p = f_fma(f_set(1.535336188319500e-4f), r, f_set(1.339887440266574e-3f));
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
    float* scores;        // [2 steps][8 runs][16][16]; weights take their places
    float* part_maxima;   // [2 steps][16]
    float* part_tops;     // likewise
    float* part_sums;     // likewise
    float* part_outputs;  // [16][padded], of a step
    uint16_t* values;     // [3 partitions][4 pairs][16][padded][2], of pairs that do not lie so in the cache

    TermScratch(uint8_t* memory, int64_t rows, int64_t groups, int64_t padded) {
        ScratchArea area(memory);
        const auto floats = [&area](int64_t count) { return area.take<float>(count); };
        const auto words = [&area](int64_t count) { return area.take<uint16_t>(count); };
        queries = words(rows * groups * 2 * kGroup);
        widened = floats(2 * groups * 2 * kGroup);
        outputs = floats(rows * padded);
        maxima = floats(rows);
        sums = floats(rows);
        scores = floats(kStepsAtOnce * kStepScores);
        part_maxima = floats(kStepsAtOnce * kTermRows);
        part_tops = floats(kStepsAtOnce * kTermRows);
        part_sums = floats(kStepsAtOnce * kTermRows);
        part_outputs = floats(kTermRows * padded);
        values = words(kPartitionsAtOnce * kPartition * padded);
    }
};

inline int64_t term_rows(const AttentionCall& call) {
    return (treadle::attention_rows(call.group_size) + kTermRows - 1) / kTermRows * kTermRows;
}

// Up to sixteen rows and a partition.
struct TermStep {
    int partition;
    int first_row;
    int rows;
    Range range;              // what any of them sees
    bool is_whole;            // sixteen rows that see the whole partition
    const Runs<KvBF16>* runs;
    const uint16_t* queries;  // [groups][terms][16][32]
    float* scores;            // [8 runs][16][16]
    uint16_t* weights;        // [4 pairs][2 terms][16][32], in place of the scores
    float* maxima;            // [16]
    float* tops;              // [16], what scores are measured by: of one term bits of 1 less the maximum's, of two the maximum
    float* sums;              // [16]
    float* outputs;           // [16][padded]

    uint16_t* weights_of(int pair, int term) const { return weights + (2 * pair + term) * kPairWeights; }
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

// The two products by vector instructions, at once: nothing is left to do on the way.
template <int kTerms>
class VectorProducts {
 public:
    VectorProducts(const AttentionCall& call, float* widened)
        : head_dim_(call.kv.head_dim), padded_(call.kv.padded_head_dim), widened_(widened) {}

    void stay_awake() const {}
    bool has_order(const TermStep&) const { return false; }
    void add_in_order(const TermStep&, int) const {}
    void score_in_order(const TermStep&, int) const {}

    int num_score_parts(const TermStep&) const { return 0; }
    int start_scores(const TermStep& step) const {
        int row = 0;
        for (; row + kSplitRowsAtOnce <= step.rows; row += kSplitRowsAtOnce) score_rows<kSplitRowsAtOnce>(step, row);
        for (; row < step.rows; ++row) score_rows<1>(step, row);
        return 0;
    }
    void advance_scores() const {}
    int start_outputs(const TermStep& step) const {
        int row = 0;
        for (; row + kSplitRowsAtOnce <= step.rows; row += kSplitRowsAtOnce) output_rows<kSplitRowsAtOnce>(step, row);
        for (; row < step.rows; ++row) output_rows<1>(step, row);
        return 0;
    }
    void advance_outputs() const {}

 private:
    template <int kRows>
    void score_rows(const TermStep& step, int row) const {
        const int64_t groups = num_groups(head_dim_), stride = groups * kTerms * kGroup;
        for (int64_t i = 0; i < groups * kTerms; ++i) {
            for (int j = 0; j < kRows; ++j) {
                const uint16_t* words = step.queries + i * kQueryWords + (row + j) * kGroup;
                f_store(widened_ + j * stride + i * kGroup, f_load_bf16(words));
                f_store(widened_ + j * stride + i * kGroup + 16, f_load_bf16(words + 16));
            }
        }
        for (int run = step.range.first_run(); run < step.range.last_run(); ++run) {
            F scores[kRows];
            for (F& score : scores) score = f_set(0.0f);
            for (int64_t g = 0; g < groups; ++g) {
                EvenOdd<kRows> of_term[kTerms];
                const float* words = widened_ + g * kTerms * kGroup;
                const int64_t dims = head_dim_ - g * kGroup < kGroup ? head_dim_ - g * kGroup : kGroup;
                for (int64_t d = 0; d < dims; d += 2) {
                    F first, second;
                    KvBF16::load_keys(step.runs->keys[run] + 16 * (g * kGroup + d), first, second);
#pragma GCC unroll 2
                    for (int t = 0; t < kTerms; ++t) of_term[t].add(words + t * kGroup + d, stride, first, second);
                }
                for (const EvenOdd<kRows>& sums : of_term) {
                    for (int j = 0; j < kRows; ++j) scores[j] = f_add(scores[j], sums.sum(j));
                }
            }
            for (int j = 0; j < kRows; ++j) f_store(step.scores + run * kRunScores + (row + j) * 16, scores[j]);
        }
    }

    template <int kRows>
    void output_rows(const TermStep& step, int row) const {
        for (int pair = step.range.first_pair(); pair < step.range.last_pair(); ++pair) {
            float words[kTerms][kRows][kPairPositions];
            for (int t = 0; t < kTerms; ++t) {
                for (int j = 0; j < kRows; ++j) {
                    const uint16_t* of_row = step.weights_of(pair, t) + (row + j) * kPairPositions;
                    f_store(words[t][j], f_load_bf16(of_row));
                    f_store(words[t][j] + 16, f_load_bf16(of_row + 16));
                }
            }
            for (int64_t d = 0; d < padded_; d += 16) {
                EvenOdd<kRows> of_term[kTerms];
                for (int64_t position = 0; position < kPairPositions; position += 2) {
                    F first, second;
                    KvBF16::load_values(step.runs->values[2 * pair] + position * padded_, padded_, d, first, second);
#pragma GCC unroll 2
                    for (int t = 0; t < kTerms; ++t) of_term[t].add(words[t][0] + position, kPairPositions, first, second);
                }
                for (int j = 0; j < kRows; ++j) {
                    float* out = step.outputs + (row + j) * padded_ + d;
                    F sum = pair == step.range.first_pair() ? f_set(0.0f) : f_load(out);
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

// Folds a partition's results of up to sixteen rows into what they have so far; there is memory for all sixteen.
inline void merge_rows(int rows, float* maxima, float* sums, float* outputs, const float* part_maxima,
                       const float* part_sums, const float* part_outputs, int64_t padded) {
    const F old_maxima = f_load(maxima), new_maxima = f_load(part_maxima);
    F old_shares, new_shares;
    merge_shares(old_maxima, new_maxima, old_shares, new_shares);
    f_store(maxima, f_max(old_maxima, new_maxima));
    f_store(sums, merged(f_load(sums), old_shares, f_load(part_sums), new_shares));
    float old_share[kTermRows], new_share[kTermRows];
    f_store(old_share, old_shares);
    f_store(new_share, new_shares);
    for (int row = 0; row < rows; ++row) {
        const F old = f_set(old_share[row]), fresh = f_set(new_share[row]);
        for (int64_t d = row * padded; d < (row + 1) * padded; d += 16) {
            f_store(outputs + d, merged(f_load(outputs + d), old, f_load(part_outputs + d), fresh));
        }
    }
}

}  // namespace
