// The C interface of Treadle's CPU engine: quantised linear layers, paged attention and whole decoder steps.
//
// Conventions. Every function that can fail returns 0, or 1 with the reason in treadle_cpu_last_error() (of the calling
// thread). Arguments are checked before anything is written; a wrong one is an error text, never a crash. Matrices are
// row-major and dense. The library owns no file and no weights: pointers given at creation must outlive the handle.
//
// Guarantees. A token's result is a function of that token and its request alone: bit for bit the same for every batch
// around it, every chunking of its prompt, every number of threads and every position in the batch. All instruction
// sets give the same bits as each other, but for plain on machines without fused products.
#ifndef TREADLE_CPU_H
#define TREADLE_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TREADLE_CPU_ABI 4
#define TREADLE_API __attribute__((visibility("default")))

// Number formats of weights. Numbers are those of ggml_type, so a GGUF file's type id can be passed on; the last is the
// engine's own, for ROTATED activations: rotated rows, as int8 codes with a scale for each. Packing makes it of float32
// rows.
typedef enum treadle_format {
    TREADLE_F32 = 0,
    TREADLE_F16 = 1,
    TREADLE_Q4_0 = 2,
    TREADLE_Q4_1 = 3,
    TREADLE_Q5_0 = 6,
    TREADLE_Q5_1 = 7,
    TREADLE_Q8_0 = 8,
    TREADLE_Q4_K = 12,
    TREADLE_Q5_K = 13,
    TREADLE_Q6_K = 14,
    TREADLE_BF16 = 30,
    TREADLE_ROTATED = 1008,
} treadle_format;

// Number formats of cached keys and values. int8 has a float32 scale per token, head and of key and value each.
typedef enum treadle_kv_dtype { TREADLE_KV_F32 = 0, TREADLE_KV_BF16 = 1, TREADLE_KV_INT8 = 2 } treadle_kv_dtype;

// How activations meet quantised weights.
//   INT8     codes with a scale for each group of 32; a second term is the code of what the first misses. Exact integer
//            sums within a group. For any machine with integer dot products.
//   SPLIT    two terms: the nearest bfloat16, and the nearest to what that misses; codes of weights are exact. For machines
//            with AMX; the others compute the same bits, slowly.
//   ROTATED  codes of a rotated row (a Walsh-Hadamard transform, which spreads large numbers over their neighbours) with
//            one scale for all of it: exact integer sums over all inputs. For ROTATED weights, the only quantised ones
//            that it takes, and they take nothing else. One term. Fastest on machines with AMX.
//   BF16     the nearest bfloat16, and weights as bfloat16 too, decoded on their way; those that are stored as bfloat16
//            take part, if k is a multiple of 32. One term. For machines with AMX; the others compute the same bits,
//            slowly.
// Attention over a BF16 cache takes queries and weights as bfloat16 terms too: two with SPLIT, one with
// ROTATED and with BF16.
typedef enum treadle_activations {
    TREADLE_ACTIVATIONS_INT8 = 0,
    TREADLE_ACTIVATIONS_SPLIT = 1,
    TREADLE_ACTIVATIONS_ROTATED = 2,
    TREADLE_ACTIVATIONS_BF16 = 3,
} treadle_activations;

TREADLE_API int32_t treadle_cpu_abi(void);
// Text of this thread's last error; valid until its next failing call.
TREADLE_API const char* treadle_cpu_last_error(void);

// --- Instruction sets ------------------------------------------------------------------------------------------------
// Comma-separated names of those this machine has, slowest first, of: plain, avx2, avx_vnni, avx512,
// amx; neon, neon_i8mm.
TREADLE_API const char* treadle_cpu_available_isas(void);
// Name of the one in use. At first: that of the environment variable TREADLE_CPU_ISA, else the fastest.
TREADLE_API const char* treadle_cpu_isa(void);
// Chooses another for all later calls. Not while any call is under way.
TREADLE_API int treadle_cpu_select_isa(const char* name);

// --- Threads ---------------------------------------------------------------------------------------------------------
typedef struct treadle_pool treadle_pool;

// num_threads counts the caller. Idle threads spin for spin_us microseconds, then sleep.
TREADLE_API int treadle_pool_create(int32_t num_threads, int32_t spin_us, treadle_pool** pool);
TREADLE_API void treadle_pool_destroy(treadle_pool* pool);
// Seconds that one empty fork and join takes, the mean of num_rounds. For benchmarks.
TREADLE_API int treadle_pool_measure(treadle_pool* pool, int32_t num_rounds, double* seconds);

// --- Weights ---------------------------------------------------------------------------------------------------------
// A linear layer's weights, packed. n: outputs; k: inputs (a multiple of the format's block). bias: [n] or null.
typedef struct treadle_linear {
    const void* data;  // 64-byte aligned
    uint64_t num_bytes;
    const float* bias;
    int32_t format;
    int32_t n;
    int32_t k;
} treadle_linear;

// Bytes of [n, k] weights as stored in a file, and packed.
TREADLE_API int treadle_raw_bytes(int32_t format, int64_t n, int64_t k, uint64_t* num_bytes);
TREADLE_API int treadle_packed_bytes(int32_t format, int64_t n, int64_t k, uint64_t* num_bytes);
// Rearranges rows as stored in a file for the kernels, without changing any value but those of ROTATED ones. The result
// is the same for all instruction sets, so it may be kept in a file.
TREADLE_API int treadle_pack(int32_t format, const void* raw, uint64_t raw_bytes, int64_t n, int64_t k, void* packed,
                             uint64_t packed_bytes);
// Decodes rows of packed weights to float32, bit for bit as gguf.quants.dequantize: out[num_rows, k]. ROTATED rows
// are rotated back.
TREADLE_API int treadle_unpack_rows(const treadle_linear* weights, const int32_t* rows, int64_t num_rows, float* out);

// --- Operations ------------------------------------------------------------------------------------------------------
// y[m, n] = x[m, k] W^T + bias; activations say how quantised weights see x (INT8: as one term here).
TREADLE_API int treadle_linear_forward(treadle_pool* pool, const treadle_linear* weights, const float* x, int64_t m,
                                       int32_t activations, float* y);
// What quantised linear layers see of x[m, k] as INT8: values[m, k], and scales[m, k / 32] to multiply them with.
TREADLE_API int treadle_quantize(const float* x, int64_t m, int64_t k, int8_t* values, float* scales);
// y[m, n] = x / sqrt(mean(x^2) + eps) * weight.
TREADLE_API int treadle_rms_norm(const float* x, const float* weight, int64_t m, int64_t n, float eps, float* y);
// y[m, n] = silu(gate) * up.
TREADLE_API int treadle_swiglu(const float* gate, const float* up, int64_t m, int64_t n, float* y);

// --- KV cache --------------------------------------------------------------------------------------------------------
// Caller's memory of keys and values, block after block. Within a block: layer by layer; within a layer: key heads,
// then value heads; int8 scales follow the layer's heads. block_size is a multiple of 16. The inside of a block is the
// library's affair, but a block's bytes may be copied, swapped out and back, and all-zero bytes are a valid state.
typedef struct treadle_kv {
    void* data;  // 64-byte aligned
    uint64_t num_bytes;
    int32_t dtype;
    int32_t num_blocks;
    int32_t block_size;
    int32_t num_layers;
    int32_t num_kv_heads;
    int32_t head_dim;
} treadle_kv;

TREADLE_API int treadle_kv_bytes_per_block(const treadle_kv* kv, uint64_t* num_bytes);

// The rows of a step. Row r has tokens [query_starts[r], query_starts[r + 1]), which are the last of its request's
// context_lens[r] known positions; its block table is block_ids[block_starts[r] : block_starts[r + 1]]. Block 0 is the
// null block, never read within a context.
typedef struct treadle_rows {
    const int32_t* query_starts;  // [num_rows + 1], from 0 to num_tokens
    const int32_t* context_lens;  // [num_rows]
    const int32_t* block_ids;
    const int32_t* block_starts;  // [num_rows + 1]
    int32_t num_rows;
    int32_t num_tokens;
} treadle_rows;

// Stores keys and values of one layer, then attends causally: out[num_tokens, num_heads * head_dim] from
// qkv[num_tokens, (num_heads + 2 num_kv_heads) * head_dim]. A token sees at most its last sliding_window positions,
// itself included; 0 means all. Over a BF16 cache, queries and softmax weights are sums of num_terms bfloat16
// numbers (1 or 2) and products are summed as AMX tiles do; with 0, and over an F32 cache, they are float32. Over an INT8
// cache they are whole numbers of 15 bits, whatever num_terms.
TREADLE_API int treadle_attention(treadle_pool* pool, const treadle_kv* kv, int32_t layer, const treadle_rows* rows,
                                  const float* qkv, int32_t num_heads, int32_t sliding_window, float scale,
                                  int32_t num_terms, float* out);

// --- Sampling --------------------------------------------------------------------------------------------------------
// How one token is chosen: temperature (below 1e-5 greedy), then min_p, top_k, top_p; off at 0, 0, 1. The draw is a
// pure function of seed, sample_index and position (Philox4x32-10, as services.worker.generator).
typedef struct treadle_sampling {
    uint64_t seed;
    uint64_t position;  // 0-based output position
    uint32_t sample_index;
    int32_t token_index;  // which of the step's tokens the new one follows
    float temperature;
    float min_p;
    float top_p;
    int32_t top_k;
} treadle_sampling;

// Chooses a token for each row of logits[num_rows, vocab_size]; -1 where no logit is finite or any is NaN.
TREADLE_API int treadle_sample(treadle_pool* pool, const float* logits, int64_t num_rows, int64_t vocab_size,
                               const treadle_sampling* sampling, int32_t* token_ids);
// The number in [0, 1) that a row's choice uses.
TREADLE_API double treadle_uniform(uint64_t seed, uint32_t sample_index, uint64_t position);

// --- Models ----------------------------------------------------------------------------------------------------------
typedef struct treadle_layer {
    const float* attention_norm;  // [hidden_size]
    const float* mlp_norm;        // [hidden_size]
    const float* query_norm;      // [head_dim] or null
    const float* key_norm;        // [head_dim] or null
    treadle_linear query, key, value, output, gate, up, down;
} treadle_layer;

// A decoder of the Llama family: pre-normalised, rotary, grouped-query attention, SwiGLU.
typedef struct treadle_model_desc {
    const treadle_layer* layers;  // [num_layers]; copied
    const float* final_norm;      // [hidden_size]
    const float* rope_cos;        // [max_positions, head_dim / 2]
    const float* rope_sin;        // likewise; both with any attention factor multiplied in
    treadle_linear embedding;     // [vocab_size, hidden_size]
    treadle_linear head;          // likewise; may be the same memory as embedding
    int32_t num_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t vocab_size;
    int32_t max_positions;
    int32_t sliding_window;  // 0: none
    float rms_norm_eps;
    int32_t max_num_tokens;   // most tokens of a step
    int32_t max_num_sampled;  // most sampled tokens of a step
    int32_t activations;       // treadle_activations
    int32_t activation_terms;  // INT8: 1 or 2; SPLIT: 2; ROTATED and BF16: 1
} treadle_model_desc;

typedef struct treadle_model treadle_model;

TREADLE_API int treadle_model_create(const treadle_model_desc* desc, treadle_pool* pool, treadle_model** model);
TREADLE_API void treadle_model_destroy(treadle_model* model);
// Bytes of scratch memory that the model holds.
TREADLE_API uint64_t treadle_model_scratch_bytes(const treadle_model* model);

// Runs one step: embeds token_ids[rows->num_tokens], writes KV, and samples. sampled[num_sampled] receives token ids
// (-1 for logits that are not finite); logits is [num_sampled, vocab_size] or null.
TREADLE_API int treadle_model_step(treadle_model* model, const treadle_kv* kv, const treadle_rows* rows,
                                   const int32_t* token_ids, const treadle_sampling* sampling, int32_t num_sampled,
                                   int32_t* sampled, float* logits);

// From now on, steps write the sums of squares of what each linear layer takes to `squares`, by input: of each layer
// attention[hidden_size], output[num_heads * head_dim], MLP[hidden_size], down[intermediate_size]; then of the head
// [hidden_size]. num_squares says how many those are. Null: no longer. The sums of a step are the same on every machine
// and with any number of threads.
TREADLE_API int treadle_model_observe(treadle_model* model, double* squares, int64_t num_squares);

// Seconds of the last step by phase, for profiles: embed, norm and quantise, qkv, rope and KV write, attention, output,
// gate and up, down, head, sampling.
#define TREADLE_NUM_PHASES 10
TREADLE_API void treadle_model_phase_seconds(const treadle_model* model, double seconds[TREADLE_NUM_PHASES]);

#ifdef __cplusplus
}
#endif
#endif  // TREADLE_CPU_H
