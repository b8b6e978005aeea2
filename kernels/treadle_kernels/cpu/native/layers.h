// Linear layers and attention over a team of threads: who computes what. No choice made here changes a bit of a result.
#ifndef TREADLE_LAYERS_H
#define TREADLE_LAYERS_H

#include <cstdint>
#include <vector>

#include "formats.h"
#include "kernels.h"
#include "memory.h"
#include "thread_pool.h"

namespace treadle {

// Memory for one matrix of activations, as numbers and as codes, for matrices up to a size.
class ActivationBuffer {
 public:
    void reserve(treadle_activations format, int64_t max_rows, int64_t max_k);
    treadle_activations format() const { return format_; }
    // Where row `row` of a matrix with k columns is quantised to.
    QuantizedRow quantized_row(int64_t row, int64_t k) const;
    // Writes a row in the buffer's format; `scratch` has room for it. Runs that are apart are for rotated activations.
    void write_row(const RunsOfRow& values, int64_t row, int64_t k, float* scratch) const;
    // Where nearest bfloat16s are; null in other formats.
    uint16_t* nearest() const { return format_ == TREADLE_ACTIVATIONS_BF16 ? terms_.data() : nullptr; }
    // The matrix for linear layers; `values` are its numbers, for floating formats.
    Activations view(const float* values) const;
    int64_t num_bytes() const;

 private:
    treadle_activations format_ = TREADLE_ACTIVATIONS_INT8;
    Buffer<uint16_t> terms_;
    Buffer<int8_t> codes_;
    Buffer<float> scales_;
    Buffer<float> sums_;
    Buffer<int32_t> code_sums_;
};

// A byte area for each thread.
class ThreadScratch {
 public:
    void reserve(int num_threads, int64_t bytes_per_thread);
    template <class T = uint8_t>
    T* of(int thread) const {
        return reinterpret_cast<T*>(memory_.data() + thread * stride_);
    }
    int64_t num_bytes() const { return memory_.num_bytes(); }

 private:
    Buffer<uint8_t> memory_;
    int64_t stride_ = 0;
};

// One product of several that share their activations.
struct LinearJob {
    const treadle_linear* weights;
    float* y;
    int64_t y_stride;
    bool is_added;  // to what y holds
};

void run_linear(ThreadPool& pool, const ThreadScratch& scratch, const Activations& x, int64_t rows,
                const LinearJob* jobs, int num_jobs);

// Whether SwiGLU of two layers with so many rows is computed on their way out.
bool can_gate(const treadle_linear& gate, const treadle_linear& up, treadle_activations activations, int64_t rows);
// See GatedCall for what is written, and where.
void run_gated(ThreadPool& pool, const ThreadScratch& scratch, const Activations& x, int64_t rows,
               const treadle_linear& gate, const treadle_linear& up, float* y, uint16_t* nearest);

int64_t kv_block_bytes(const treadle_kv& kv);
// Memory of one key head's numbers in one layer.
KvView kv_view(const treadle_kv& kv, int64_t layer, int64_t head);

// Stores keys and values of token `token` of qkv rows, at position `position` of a request.
void write_token(const treadle_kv& kv, int64_t layer, const int32_t* block_table, int64_t position, const float* key,
                 const float* value);

struct AttentionShape {
    int32_t num_heads;
    int32_t window;  // 0: all
    float scale;
    // Of queries and weights where the cache is bfloat16; 0: float32 arithmetic, as with any other cache.
    int32_t num_terms;
};

// Attention of a step's rows; plans once a step, runs once a layer.
class AttentionPlan {
 public:
    // Sizes the scratch memory.
    void reserve(int num_threads, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim);
    void make(const treadle_rows& rows, const treadle_kv& kv, const AttentionShape& shape, int num_threads);
    void run(ThreadPool& pool, const treadle_kv& kv, int64_t layer, const float* qkv, float* out) const;
    int64_t num_bytes() const { return scratch_.num_bytes() + partials_.num_bytes(); }

 private:
    // Neighbouring queries of one request and key head, over some partitions.
    struct Item {
        int32_t row;
        int32_t kv_head;
        int32_t first_token;
        int32_t num_queries;
        int32_t first_position;
        int32_t partition_begin;
        int32_t partition_end;
        int64_t partial;  // where its partial results start; negative: it writes outputs
    };
    // Partial results that belong together.
    struct Merge {
        Item item;
        int32_t num_partitions;
    };

    void add_items(const treadle_rows& rows, const treadle_kv& kv, int row, int partitions_per_item);
    void make_chunks(int num_threads);
    AttentionCall call_for(const Item& item, const treadle_kv& kv, int64_t layer, const float* qkv, float* out,
                           int thread) const;

    AttentionShape shape_{};
    treadle_rows rows_{};
    RowShares shares_{0, 1, 1};
    std::vector<Item> items_;           // by owner of their rows, then the longest first
    std::vector<int64_t> chunks_;       // first items of those that are run together, and the end
    std::vector<int64_t> first_chunk_;  // of each owner, and the end
    std::vector<Merge> merges_;
    int64_t num_partial_floats_ = 0;
    ThreadScratch scratch_;
    Buffer<float> partials_;
};

}  // namespace treadle

#endif
