// Attention over threads: which queries a chunk takes, and the cache's addresses.
#include <algorithm>
#include <climits>

#include "layers.h"

namespace treadle {

namespace {

int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

int64_t number_bytes(int32_t dtype) { return dtype == TREADLE_KV_F32 ? 4 : dtype == TREADLE_KV_BF16 ? 2 : 1; }

// Bytes of a block's layer: pieces of keys and values, then their scales.
struct KvLayout {
    int64_t key_run;    // of a head
    int64_t value_run;  // likewise
    int64_t piece_runs;
    int64_t piece;
    int64_t scales;  // from the layer's start
    int64_t layer;
};

KvLayout kv_layout(const treadle_kv& kv) {
    const int64_t size = number_bytes(kv.dtype), slots = kv.block_size, heads = kv.num_kv_heads;
    KvLayout layout{};
    layout.key_run = 16 * (kv.dtype == TREADLE_KV_INT8 ? padded(kv.head_dim) : kv.head_dim) * size;
    layout.value_run = 16 * padded(kv.head_dim) * size;
    layout.piece_runs = slots % 32 == 0 ? 2 : 1;
    layout.piece = layout.piece_runs * heads * (layout.key_run + layout.value_run);
    layout.scales = slots / 16 / layout.piece_runs * layout.piece;
    layout.layer = layout.scales + (kv.dtype == TREADLE_KV_INT8 ? 2 * heads * slots * int64_t{sizeof(float)} : 0);
    return layout;
}

}  // namespace

int64_t kv_block_bytes(const treadle_kv& kv) { return (kv.num_layers * kv_layout(kv).layer + 63) / 64 * 64; }

KvView kv_view(const treadle_kv& kv, int64_t layer, int64_t head) {
    const KvLayout layout = kv_layout(kv);
    const uint8_t* start = static_cast<const uint8_t*>(kv.data) + layer * layout.layer;
    const auto* scales = reinterpret_cast<const float*>(start + layout.scales);
    KvView view{};
    view.keys = start + head * layout.key_run;
    view.values = start + layout.piece_runs * (kv.num_kv_heads * layout.key_run + head * layout.value_run);
    view.key_run_bytes = kv.num_kv_heads * layout.key_run;
    view.value_run_bytes = layout.value_run;
    view.piece_bytes = layout.piece;
    view.piece_runs = static_cast<int32_t>(layout.piece_runs);
    view.key_scales = scales + head * kv.block_size;
    view.value_scales = scales + (kv.num_kv_heads + head) * kv.block_size;
    view.block_bytes = kv_block_bytes(kv);
    view.dtype = kv.dtype;
    view.block_size = kv.block_size;
    view.head_dim = kv.head_dim;
    view.padded_head_dim = static_cast<int32_t>(padded(kv.head_dim));
    return view;
}

void write_token(const treadle_kv& kv, int64_t layer, const int32_t* block_table, int64_t position, const float* key,
                 const float* value) {
    for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
        const KvView view = kv_view(kv, layer, head);
        const int64_t block = block_table[position / kv.block_size] * view.block_bytes;
        const int slot = static_cast<int>(position % kv.block_size);
        // The caller owns this memory and lets us write it; views for readers are const.
        const auto writable = [block](const void* p, int64_t offset) {
            return reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(p)) + block + offset;
        };
        KvWriteCall call{};
        call.keys = writable(view.keys, view.key_offset(slot));
        call.values = writable(view.values, view.value_offset(slot));
        call.key_scale = reinterpret_cast<float*>(writable(view.key_scales + slot, 0));
        call.value_scale = reinterpret_cast<float*>(writable(view.value_scales + slot, 0));
        call.key = key + head * kv.head_dim;
        call.value = value + head * kv.head_dim;
        call.slot = slot % 16;
        call.dtype = kv.dtype;
        call.head_dim = kv.head_dim;
        call.padded_head_dim = view.padded_head_dim;
        kernels().write_kv(call);
    }
}

void AttentionPlan::reserve(int num_threads, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
    scratch_.reserve(num_threads, attention_scratch_bytes(num_heads / num_kv_heads, padded(head_dim)));
}

void AttentionPlan::make(const treadle_rows& rows, const treadle_kv& kv, const AttentionShape& shape, int num_threads) {
    shape_ = shape;
    rows_ = rows;
    items_.clear();
    merges_.clear();
    num_partial_floats_ = 0;
    // Rows of one token are split by partitions only where there are too few of them to keep the threads busy.
    const int64_t wanted = 4 * num_threads;
    const int64_t whole_items = int64_t{rows.num_rows} * kv.num_kv_heads;
    const int partitions_per_item = num_threads > 1 && whole_items < wanted ? 2 : INT_MAX;
    for (int row = 0; row < rows.num_rows; ++row) add_items(rows, kv, row, partitions_per_item);
    // The longest first, so that the threads finish together.
    shares_ = RowShares(rows.num_tokens, num_threads, RowShares::kLeastOfProducts);
    std::stable_sort(items_.begin(), items_.end(), [this](const Item& a, const Item& b) {
        const int owner_a = shares_.owner(a.first_token), owner_b = shares_.owner(b.first_token);
        if (owner_a != owner_b) return owner_a < owner_b;
        const auto cost = [](const Item& item) {
            return int64_t{item.num_queries} * (item.partition_end - item.partition_begin);
        };
        return cost(a) > cost(b);
    });
    make_chunks(num_threads);
    partials_.reserve(num_partial_floats_);
}

void AttentionPlan::make_chunks(int num_threads) {
    // Where one token is all that rows have, memory is what they wait for, and a row's key heads lie side by side.
    const auto follows = [](const Item& item, const Item& last) {
        return item.row == last.row && item.num_queries == 1 && item.partial < 0 && last.num_queries == 1;
    };
    const bool are_joined = rows_.num_rows >= 2 * num_threads;
    chunks_.clear();
    first_chunk_.assign(num_threads + 1, 0);
    for (size_t i = 0; i < items_.size(); ++i) {
        if (i > 0 && are_joined && follows(items_[i], items_[i - 1])) continue;
        chunks_.push_back(static_cast<int64_t>(i));
        ++first_chunk_[shares_.owner(items_[i].first_token) + 1];
    }
    for (int owner = 0; owner < num_threads; ++owner) first_chunk_[owner + 1] += first_chunk_[owner];
    chunks_.push_back(static_cast<int64_t>(items_.size()));
}

void AttentionPlan::add_items(const treadle_rows& rows, const treadle_kv& kv, int row, int partitions_per_item) {
    const int32_t group_size = shape_.num_heads / kv.num_kv_heads;
    const int32_t queries_per_item = std::max<int32_t>(kMaxAttentionRows / group_size, 1);
    const int32_t first_token = rows.query_starts[row], end_token = rows.query_starts[row + 1];
    const int32_t start = rows.context_lens[row] - (end_token - first_token);
    for (int32_t kv_head = 0; kv_head < kv.num_kv_heads; ++kv_head) {
        for (int32_t token = first_token; token < end_token; token += queries_per_item) {
            Item item{};
            item.row = row;
            item.kv_head = kv_head;
            item.first_token = token;
            item.num_queries = std::min(queries_per_item, end_token - token);
            item.first_position = start + token - first_token;
            const int32_t first_seen = shape_.window > 0 ? std::max(item.first_position + 1 - shape_.window, 0) : 0;
            item.partition_begin = first_seen / kPartition;
            item.partition_end = (item.first_position + item.num_queries - 1) / kPartition + 1;
            item.partial = -1;
            const int32_t partitions = item.partition_end - item.partition_begin;
            if (item.num_queries > 1 || partitions <= partitions_per_item) {
                items_.push_back(item);
                continue;
            }
            item.partial = num_partial_floats_;
            merges_.push_back({item, partitions});
            const int64_t floats = int64_t{group_size} * (2 + padded(kv.head_dim));
            num_partial_floats_ += partitions * floats;
            for (int32_t begin = item.partition_begin; begin < item.partition_end; begin += partitions_per_item) {
                Item part = item;
                part.partition_begin = begin;
                part.partition_end = std::min(begin + partitions_per_item, item.partition_end);
                part.partial = item.partial + (begin - item.partition_begin) * floats;
                items_.push_back(part);
            }
        }
    }
}

AttentionCall AttentionPlan::call_for(const Item& item, const treadle_kv& kv, int64_t layer, const float* qkv,
                                      float* out, int thread) const {
    const int64_t group_size = shape_.num_heads / kv.num_kv_heads;
    const int64_t width = (int64_t{shape_.num_heads} + 2 * kv.num_kv_heads) * kv.head_dim;
    const int64_t out_width = int64_t{shape_.num_heads} * kv.head_dim, column = item.kv_head * group_size * kv.head_dim;
    AttentionCall call{};
    call.kv = kv_view(kv, layer, item.kv_head);
    call.block_table = rows_.block_ids + rows_.block_starts[item.row];
    call.queries = qkv + item.first_token * width + column;
    call.query_stride = width;
    call.num_queries = item.num_queries;
    call.group_size = static_cast<int32_t>(group_size);
    call.first_position = item.first_position;
    call.window = shape_.window;
    call.partition_begin = item.partition_begin;
    call.partition_end = item.partition_end;
    call.num_terms = kv.dtype == TREADLE_KV_BF16 ? shape_.num_terms : 0;
    call.scale = shape_.scale;
    call.out = out + item.first_token * out_width + column;
    call.out_stride = out_width;
    call.partials = nullptr;
    if (item.partial >= 0) call.partials = partials_.data() + item.partial;
    call.scratch = scratch_.of(thread);
    return call;
}

void AttentionPlan::run(ThreadPool& pool, const treadle_kv& kv, int64_t layer, const float* qkv, float* out) const {
    const Kernels& table = kernels();
    // `after` is the chunk that the thread most likely takes next.
    const auto run_chunk = [&](int64_t chunk, int64_t after, int thread) {
        for (int64_t i = chunks_[chunk]; i < chunks_[chunk + 1]; ++i) {
            AttentionCall call = call_for(items_[i], kv, layer, qkv, out, thread), next{};
            if (call.partials != nullptr) call.out = nullptr;
            const bool is_last = i + 1 == chunks_[chunk + 1];
            // Over numbers of two bytes arithmetic waits for memory in any case, and this gains nothing.
            if (kv.dtype == TREADLE_KV_INT8 && (!is_last || after < first_chunk_.back())) {
                next = call_for(items_[is_last ? chunks_[after] : i + 1], kv, layer, qkv, out, thread);
                call.next = &next;
            }
            table.attend(call);
        }
    };
    const int64_t num_chunks = first_chunk_.back(), num_threads = pool.num_threads();
    if (shares_.are_owned()) {
        pool.run_owned([this](int owner) { return first_chunk_[owner + 1] - first_chunk_[owner]; },
                       [&](int owner, int64_t index, int thread) {
                           const int64_t chunk = first_chunk_[owner] + index;
                           run_chunk(chunk, chunk + 1, thread);
                       });
    } else {
        pool.run_owned([&](int owner) { return (num_chunks - owner + num_threads - 1) / num_threads; },
                       [&](int owner, int64_t index, int thread) {
                           const int64_t chunk = owner + index * num_threads;
                           run_chunk(chunk, chunk + num_threads, thread);
                       });
    }
    pool.run(static_cast<int64_t>(merges_.size()), [&](int64_t chunk, int thread) {
        const Merge& merge = merges_[chunk];
        table.merge_partials(call_for(merge.item, kv, layer, qkv, out, thread), merge.num_partitions);
    });
}

}  // namespace treadle
