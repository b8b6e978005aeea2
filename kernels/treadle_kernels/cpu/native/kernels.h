// The inner loops, one table of them for each instruction set. They run on the calling thread and trust their
// arguments.
#ifndef TREADLE_KERNELS_H
#define TREADLE_KERNELS_H

#include <cstdint>

#include "formats.h"
#include "treadle_cpu.h"

namespace treadle {

constexpr int kRowBlock = 16;  // rows whose codes lie side by side, group by group

// Activations of some rows in the forms that linear layers take: numbers for floating weights, and for quantised ones
// int8 codes, bfloat16 terms, nearest bfloat16s, or int8 codes of rotated rows. All lie in blocks of rows, so that a
// kernel that works on several rows finds them at fixed distances; the last block is readable as a whole.
//
// Codes: a value is its code times the scale of its group of 32.
// Terms: a value is the sum of two terms, the nearest bfloat16 and the nearest to what that misses. The terms of a group
// are in the order of term_input(); behind the groups follow sum groups for weights with minima: words 2 i and 2 i + 1
// both hold the sum of the terms of the i-th of 16 groups.
// Nearest: a value is one bfloat16; a group is in the order of term_input(), the first operand of a tile product.
// Rotated: the rotated row's values are its codes times the row's scale. Inputs are padded with zeros to a multiple of 64,
// and lie as the first operand of a tile product.
struct Activations {
    const float* values = nullptr;       // [rows][k]
    const uint16_t* terms = nullptr;     // [row blocks]{[groups][2], [sum groups][2]}[16][32], or null
    const uint16_t* nearest = nullptr;   // [row blocks][groups][16][32], or null
    const int8_t* rotated = nullptr;     // [row blocks][padded k / 64][16][64], or null
    const float* row_scales = nullptr;   // [rows], of `rotated`
    const int32_t* row_starts = nullptr;  // [rows]: what a row's sums begin with, for the codes of weights have an offset
    const int8_t* codes = nullptr;       // [row blocks][groups][16][32]
    const float* scales = nullptr;       // [row blocks][groups][16]
    const float* sums = nullptr;         // likewise: scale times the sum of the group's codes
    const int32_t* code_sums = nullptr;  // [row blocks][groups][2][16]: sum of each half group's codes
};

// Whether a layer is multiplied with what activations are made into, rather than with their numbers: weights that are
// stored as bfloat16 are, where activations are bfloat16 too.
static inline bool takes_codes(const treadle_linear& weights, treadle_activations activations) {
    if (weights.format == TREADLE_BF16) return activations == TREADLE_ACTIVATIONS_BF16 && weights.k % kGroup == 0;
    return format_info(weights.format)->is_quantized;
}

constexpr int kRotatedOffset = 128;  // of every code of a rotated weight
constexpr int kTerms = 2;
constexpr int kTermWords = kRowBlock * kGroup;  // of one term of a group, for a block of rows

// Groups that hold sums of groups.
static inline int64_t num_sum_groups(int64_t groups) { return (groups + 15) / 16; }
// Words of all terms of a block of rows.
static inline int64_t term_block_words(int64_t k) {
    const int64_t groups = k / kGroup;
    return (groups + num_sum_groups(groups)) * kTerms * kTermWords;
}
// Which input of a group the terms' word `word` holds: the middle two of each four are swapped, so that a vector of
// weight codes, four inputs of a column side by side, gives two vectors of pairs without moving lanes.
static inline int term_input(int word) { return (word & ~3) | (word & 1) << 1 | (word & 2) >> 1; }

// Bytes from the start of rotated activations to the first of a row; those of the next 64 inputs are 16 * 64 further.
static inline int64_t rotated_row_offset(int64_t row, int64_t k) {
    return row / kRowBlock * kRowBlock * padded_inputs(k) + row % kRowBlock * kTileInputs;
}

// Where quantize_row writes: the row's place in the first group, in the same arrays.
struct QuantizedRow {
    int8_t* codes;
    float* scales;
    float* sums;
    int32_t* code_sums;
};

// Where rotate_row writes.
struct RotatedRow {
    int8_t* codes;
    float* scale;
    int32_t* start;
};

// Rows [row_begin, row_end) of some tiles of a product: y[row][column] = (or +=) x W^T + bias.
struct LinearCall {
    const treadle_linear* weights;
    const Activations* x;
    float* y;  // [rows][y_stride], of column 0
    int64_t y_stride;
    int64_t tile_begin;
    int64_t tile_end;
    int64_t row_begin;
    int64_t row_end;
    bool is_added;     // to what y holds
    uint8_t* scratch;  // linear_scratch_bytes of this thread, 64-byte aligned
};

// Numbers of a row in runs of 32, the first at `start` and each `apart` numbers from the one before.
struct RunsOfRow {
    const float* start;
    int64_t apart = kGroup;  // side by side

    // From the i-th number on there are sixteen, where i is a multiple of sixteen.
    const float* at(int64_t i) const { return start + i / kGroup * apart + i % kGroup; }
};

// The place in a matrix in blocks, [row blocks][k / 32][16][32], of a row's first number; its runs are kBlockedRun apart.
// Vectors of neighbouring rows lie side by side, as tile products compute them.
constexpr int64_t kBlockedRun = kRowBlock * kGroup;
static inline int64_t blocked_row_offset(int64_t row, int64_t k) {
    return row / kRowBlock * kRowBlock * k + row % kRowBlock * kGroup;
}

// Rows and tiles of two products and SwiGLU of them, in blocks, [row blocks][n / 32][16][32]: nearest bfloat16s as the next
// layer takes them where activations are such, else the numbers.
struct GatedCall {
    const treadle_linear* gate;  // of the same shape and format as `up`, quantised; without biases; n a multiple of 32
    const treadle_linear* up;
    const Activations* x;
    float* y;
    uint16_t* nearest;
    int64_t tile_begin;
    int64_t tile_end;
    int64_t row_begin;
    int64_t row_end;
    uint8_t* scratch;
};

constexpr int kPartition = 128;        // positions whose softmax is taken together: [128 j, 128 (j + 1))
constexpr int kMaxAttentionRows = 96;  // queries times heads of a group taken together, or the group if it is larger

// One key head's cached numbers in one layer, addressed by block. Slots come in runs of sixteen. A run's keys and values
// are [head_dim][16] and [16][padded head_dim]; in bfloat16, pairs of dims and pairs of slots lie side by side, as tile
// products take them: [head_dim / 2][16][2] and [8][padded head_dim][2]; codes of int8, with an offset of 128, likewise
// in quads: [padded head_dim / 4][16][4] and [4][padded head_dim][4].
//
// Heads take turns run by run, in values by pairs of runs where blocks are so large: a core reads what follows into its
// cache by itself, and that is the next head's, which the same thread takes next.
struct KvView {
    const uint8_t* keys;        // of block 0
    const uint8_t* values;      // likewise
    int64_t key_run_bytes;      // from a run's keys to the next's within a piece
    int64_t value_run_bytes;
    int64_t piece_bytes;        // from a piece to the next
    int32_t piece_runs;         // 2, or 1 where blocks do not consist of such
    const float* key_scales;    // of block 0: [block_size]; int8 only
    const float* value_scales;  // likewise
    int64_t block_bytes;        // from a block to the next
    int32_t dtype;
    int32_t block_size;
    int32_t head_dim;
    int32_t padded_head_dim;

    // From the start of a block, of the run that a slot is in.
    int64_t key_offset(int slot) const { return offset(slot / 16, key_run_bytes); }
    int64_t value_offset(int slot) const { return offset(slot / 16, value_run_bytes); }

 private:
    int64_t offset(int run, int64_t run_bytes) const {
        return piece_runs == 1 ? run * piece_bytes : run / 2 * piece_bytes + run % 2 * run_bytes;
    }
};

// Some neighbouring queries of one request, for the query heads of one key head.
struct AttentionCall {
    KvView kv;
    const int32_t* block_table;
    const float* queries;  // first query's first head: [num_queries][query_stride], heads of the group side by side
    int64_t query_stride;
    int32_t num_queries;
    int32_t group_size;      // query heads of a key head
    int32_t first_position;  // of the first query
    int32_t window;          // 0: all
    int32_t partition_begin;
    int32_t partition_end;
    int32_t num_terms;  // of a query and of a weight, see attention_terms.inl; 0: float32
    float scale;
    float* out;  // [num_queries][out_stride]; null to leave partial results instead
    int64_t out_stride;
    float* partials;   // [partition_end - partition_begin][rows][2 + padded_head_dim], see merge
    // What this thread computes next, whose first keys may be asked for; null where that is not known.
    const AttentionCall* next;
    uint8_t* scratch;  // attention_scratch_bytes of this thread, 64-byte aligned
};

// Stores one token's rotated keys and values of one key head.
struct KvWriteCall {
    uint8_t* keys;  // of the token's run
    uint8_t* values;
    float* key_scale;
    float* value_scale;
    const float* key;  // [head_dim]
    const float* value;
    int32_t slot;  // in the run
    int32_t dtype;
    int32_t head_dim;
    int32_t padded_head_dim;
};

struct Kernels {
    const char* name;
    void (*quantize_row)(const float* x, int64_t k, const QuantizedRow& out);
    // Writes the terms of a row, the first to `out`, the others kTermWords apart.
    // Magnitudes below 2^-90 become 0, so that no product or sum is ever denormal.
    void (*split_row)(const float* x, int64_t k, uint16_t* out);
    // Writes the nearest bfloat16s of a row, groups kTermWords apart. Magnitudes below 2^-60 become 0, likewise.
    void (*round_row)(const float* x, int64_t k, uint16_t* out);
    // Rotates a row and writes its codes, those of the padding included; `scratch` has room for the row.
    void (*rotate_row)(const RunsOfRow& x, int64_t k, float* scratch, const RotatedRow& out);
    void (*rms_norm_row)(const float* x, const float* weight, int64_t n, float eps, float* y);
    void (*swiglu_row)(const float* gate, const float* up, int64_t n, float* y);
    void (*rotate_head)(float* head, const float* cos, const float* sin, int64_t half);
    void (*write_kv)(const KvWriteCall& call);
    void (*linear)(const LinearCall& call);
    // With rotated or nearest activations. Bits as of `linear` twice and swiglu_row; null: that is how it is done.
    void (*gate)(const GatedCall& call);
    void (*attend)(const AttentionCall& call);
    // Folds `num_partitions` partial results in order and writes the outputs of `rows` = num_queries * group_size rows.
    void (*merge_partials)(const AttentionCall& call, int32_t num_partitions);
    // Index of the largest number, the lowest among equals; is_finite: it is finite and none is NaN.
    int64_t (*argmax)(const float* x, int64_t n, bool* is_finite);
    // y = exp((x - x_max) / temperature), 0 below min_weight.
    void (*softmax_weights)(const float* x, int64_t n, float x_max, float temperature, float min_weight, float* y);
};

constexpr int64_t kMaxLinearRows = 512;  // of a call

// What a thread's part of a product needs, whatever the kernel. Two terms: codes and products on their way, and sums of
// the rows of a call for two column tiles; or two rows of terms. Rotated and nearest: two sets of sums of four tiles, and
// those of 288 rows between two runs of inputs. Nearest: two column tiles of a run besides.
constexpr int64_t linear_scratch_bytes(int64_t k) {
    const int64_t of_sums = 24 * 1024 + kMaxLinearRows * 2 * kColumns * int64_t{sizeof(float)};
    const int64_t of_rows = 20 * (k + 1024);
    const int64_t of_tiles = 80 * 1024;
    const int64_t most = of_sums > of_rows ? of_sums : of_rows;
    return most > of_tiles ? most : of_tiles;
}

static inline int64_t attention_rows(int64_t group_size) {
    return group_size > kMaxAttentionRows ? group_size : kMaxAttentionRows;
}

// Of any arithmetic.
static inline int64_t attention_scratch_bytes(int64_t group_size, int64_t padded_head_dim) {
    const int64_t rows = (attention_rows(group_size) + 15) / 16 * 16, groups = (padded_head_dim + kGroup - 1) / kGroup;
    // Queries, outputs, a partition's outputs; scores; maxima and sums; keys and values as float32.
    const int64_t floats =
        3 * rows * padded_head_dim + rows * kPartition + 4 * (rows + 16) + 2 * kPartition * padded_head_dim;
    // Queries as two terms, two of them as float32; outputs, a step's outputs; scores of two steps; maxima and sums of
    // all and of steps; values of three partitions.
    const int64_t of_terms = rows * groups * kGroup + 4 * groups * kGroup + (rows + 16) * padded_head_dim +
                             2 * 16 * kPartition + 3 * (rows + 2 * 16) + 3 * kPartition * padded_head_dim / 2;
    // Scores; outputs, a partition's outputs; maxima and sums, likewise; scales and sums of whole numbers; these, of
    // queries and of weights, as two bytes; a partition's values, sums of tiles.
    const int64_t of_codes = rows * kPartition + 2 * rows * padded_head_dim + 4 * rows + 6 * rows +
                             rows * (padded_head_dim + kPartition) / 2 + kPartition * padded_head_dim / 4 + 1024;
    const int64_t most = floats > of_terms ? floats : of_terms;
    return 4 * (most > of_codes ? most : of_codes) + 2048;
}

// Null where the library was built without it or the machine lacks it.
const Kernels* plain_kernels();
const Kernels* avx2_kernels();
const Kernels* avx_vnni_kernels();
const Kernels* avx512_kernels();
const Kernels* amx_kernels();
const Kernels* neon_kernels();
const Kernels* neon_i8mm_kernels();

// The table in use; see treadle_cpu_select_isa.
const Kernels& kernels();

}  // namespace treadle

#endif
