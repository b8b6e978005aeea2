// Choosing tokens from logits.
#ifndef TREADLE_SAMPLING_H
#define TREADLE_SAMPLING_H

#include <cstdint>

#include "memory.h"
#include "thread_pool.h"
#include "treadle_cpu.h"

namespace treadle {

// Checks parameters; `index` is for the error text.
int check_sampling(const treadle_sampling& sampling, int64_t index);

// Chooses a token for each row; -1 where a row's logits hold NaN or nothing finite. `weights` is memory that the call
// may grow: a row of the vocabulary for each thread.
void sample_rows(ThreadPool& pool, Buffer<float>& weights, const float* logits, int64_t num_rows, int64_t vocab_size,
                 const treadle_sampling* sampling, int32_t* token_ids);

double uniform(uint64_t seed, uint32_t sample_index, uint64_t position);

}  // namespace treadle

#endif
