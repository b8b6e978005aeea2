// A fixed team of threads for short parallel loops: a decoder step forks and joins over a hundred times.
//
// Chunks are claimed one at a time from an atomic counter, so that a thread which the system takes away for a while
// delays only the chunk it holds. Idle threads spin for a bounded time, then sleep, and so does the caller at a join.
#ifndef TREADLE_THREAD_POOL_H
#define TREADLE_THREAD_POOL_H

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace treadle {

// Which rows of a step each thread works on in every loop, so that it finds them in its cache. Where they are fewer than
// `least` a thread, they are nobody's.
class RowShares {
 public:
    // In products and attention: a weight is decoded once for all rows of a chunk, and would be decoded by each thread.
    static constexpr int64_t kLeastOfProducts = 64;
    // In loops over rows alone.
    static constexpr int64_t kLeast = 16;
    // Shares begin with a tile of rows, and with a run of the KV cache, as neighbours' numbers lie in the same lines there.
    static constexpr int64_t kGrain = 16;

    RowShares(int64_t rows, int num_threads, int64_t least) : rows_(rows) {
        if (num_threads > 1 && rows >= least * num_threads) {
            share_ = (rows + num_threads * kGrain - 1) / (num_threads * kGrain) * kGrain;
        }
    }
    bool are_owned() const { return share_ > 0; }
    int owner(int64_t row) const { return are_owned() ? static_cast<int>(row / share_) : 0; }
    int64_t begin(int owner) const { return smaller(owner * share_); }
    int64_t end(int owner) const { return smaller((owner + 1) * share_); }
    int64_t count(int owner) const { return end(owner) - begin(owner); }

 private:
    int64_t smaller(int64_t row) const { return row < rows_ ? row : rows_; }

    int64_t rows_;
    int64_t share_ = 0;
};

class ThreadPool {
 public:
    // Runs one chunk; thread is below num_threads().
    using Task = void (*)(const void* context, int64_t chunk, int thread);

    ThreadPool(int num_threads, int spin_us);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

    // Calls body(chunk, thread) for every chunk in [0, num_chunks) and returns when all are done. One caller at a time.
    // Everything that ran before is visible to the chunks, and they to everything after.
    template <class Body>
    void run(int64_t num_chunks, const Body& body) {
        if (num_chunks <= 0) return;
        if (num_chunks == 1 || threads_.empty()) {
            for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk, 0);
            return;
        }
        fork_join(
            [](const void* context, int64_t chunk, int thread) { (*static_cast<const Body*>(context))(chunk, thread); },
            &body, num_chunks);
    }

    // The same over `size` things in chunks of `grain`: body(begin, end, thread).
    template <class Body>
    void run_ranges(int64_t size, int64_t grain, const Body& body) {
        run((size + grain - 1) / grain, [&](int64_t chunk, int thread) {
            const int64_t begin = chunk * grain;
            body(begin, begin + grain < size ? begin + grain : size, thread);
        });
    }

    // Calls body(owner, chunk, thread) for `num_chunks(owner)` chunks of each thread's own. A thread takes its own first,
    // as what they need may be in its cache, then what the others have left.
    template <class Count, class Body>
    void run_owned(const Count& num_chunks, const Body& body) {
        const int num_owners = num_threads();
        for (Counter& counter : next_owned_) counter.next.store(0, std::memory_order_relaxed);
        run(num_owners, [&](int64_t, int thread) {
            for (int i = 0; i < num_owners; ++i) {
                const int owner = (thread + i) % num_owners;
                const int64_t end = num_chunks(owner);
                for (;;) {
                    const int64_t chunk = next_owned_[owner].next.fetch_add(1, std::memory_order_relaxed);
                    if (chunk >= end) break;
                    body(owner, chunk, thread);
                }
            }
        });
    }

    // Over rows in chunks of `grain`, by owner where they are shared out: body(begin, end, thread).
    template <class Body>
    void run_rows(int64_t rows, int64_t grain, const Body& body) {
        const RowShares shares(rows, num_threads(), RowShares::kLeast);
        if (!shares.are_owned()) return run_ranges(rows, grain, body);
        run_owned([&](int owner) { return (shares.count(owner) + grain - 1) / grain; },
                  [&](int owner, int64_t chunk, int thread) {
                      const int64_t begin = shares.begin(owner) + chunk * grain, end = shares.end(owner);
                      body(begin, begin + grain < end ? begin + grain : end, thread);
                  });
    }

 private:
    void fork_join(Task task, const void* context, int64_t num_chunks);
    void work(int thread);
    // Runs chunks of the current loop until none is left.
    void run_chunks(int thread);
    void wait_for_loop(uint32_t seen);

    // One word says which loop is on and which of its chunks is next, so that a claim is one atomic addition and a late
    // thread can never take a chunk for one of another loop: loop number (24 bits) | chunks (20) | next chunk (20).
    std::atomic<uint64_t> ticket_{0};
    // Written before ticket_ by the caller, read by whoever has claimed a chunk, which holds the loop open.
    Task task_ = nullptr;
    const void* context_ = nullptr;
    alignas(64) std::atomic<int64_t> num_done_{0};
    // What sleepers wait on: changes with every loop. 32 bits, as futexes are.
    alignas(64) std::atomic<uint32_t> loop_{0};
    std::atomic<int32_t> num_sleepers_{0};
    std::atomic<uint32_t> join_{0};
    std::atomic<bool> is_caller_asleep_{false};
    std::atomic<bool> is_stopping_{false};
    // A thread's next chunk of its own, each on a cache line.
    struct alignas(64) Counter {
        std::atomic<int64_t> next{0};
    };
    std::vector<Counter> next_owned_;
    int64_t spin_ns_;
    std::vector<std::thread> threads_;
};

}  // namespace treadle

#endif
