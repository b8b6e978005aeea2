#include "thread_pool.h"

#include <chrono>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace treadle {

namespace {

constexpr int kChunkBits = 20;
constexpr uint64_t kChunkMask = (uint64_t{1} << kChunkBits) - 1;
// A claim beyond the last chunk still adds one, so the field must not overflow into the next.
constexpr int64_t kMaxChunks = int64_t{1} << (kChunkBits - 1);

uint64_t loop_of(uint64_t ticket) { return ticket >> (2 * kChunkBits); }
int64_t chunks_of(uint64_t ticket) { return static_cast<int64_t>((ticket >> kChunkBits) & kChunkMask); }
int64_t next_of(uint64_t ticket) { return static_cast<int64_t>(ticket & kChunkMask); }

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

#if defined(__linux__)
// Sleeps while word == value; may wake without cause.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
#else
std::mutex mutex;
std::condition_variable changed;
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return word.load() != value; });
}
void wake_all(std::atomic<uint32_t>&) {
    std::lock_guard<std::mutex> lock(mutex);
    changed.notify_all();
}
#endif

// Lets tools that list threads tell these from the interpreter's.
void name_thread() {
#if defined(__linux__)
    prctl(PR_SET_NAME, "treadle-compute");
#endif
}

// Spins until is_done() or the time is over; says which. `yields`: another thread that waits for this core goes first.
template <class IsDone>
bool spin(int64_t limit_ns, bool yields, const IsDone& is_done) {
    const int64_t end_ns = now_ns() + limit_ns;
    do {
        if (yields) std::this_thread::yield();
        for (int i = 0; i < 32; ++i) {
            if (is_done()) return true;
            relax();
        }
    } while (now_ns() < end_ns);
    return is_done();
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, int spin_us) : next_owned_(num_threads), spin_ns_(int64_t{spin_us} * 1000) {
    threads_.reserve(num_threads - 1);
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
    is_stopping_.store(true);
    loop_.fetch_add(1);
    wake_all(loop_);
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::fork_join(Task task, const void* context, int64_t num_chunks) {
    // Loops too long for one ticket are run in parts; in practice there are none.
    if (num_chunks > kMaxChunks) {
        struct Part {
            Task task;
            const void* context;
            int64_t begin;
        };
        for (int64_t begin = 0; begin < num_chunks; begin += kMaxChunks) {
            const Part part{task, context, begin};
            const int64_t size = num_chunks - begin < kMaxChunks ? num_chunks - begin : kMaxChunks;
            fork_join(
                [](const void* p, int64_t chunk, int thread) {
                    const Part& of = *static_cast<const Part*>(p);
                    of.task(of.context, of.begin + chunk, thread);
                },
                &part, size);
        }
        return;
    }
    task_ = task;
    context_ = context;
    num_done_.store(0, std::memory_order_relaxed);
    const uint64_t number = loop_of(ticket_.load(std::memory_order_relaxed)) + 1;
    ticket_.store(number << (2 * kChunkBits) | static_cast<uint64_t>(num_chunks) << kChunkBits);
    // Sequentially consistent with a sleeper's announcement: either it sees the new loop, or we see the sleeper.
    loop_.fetch_add(1);
    if (num_sleepers_.load() > 0) wake_all(loop_);

    run_chunks(0);
    const auto is_joined = [&] { return num_done_.load(std::memory_order_acquire) == num_chunks; };
    while (!spin(spin_ns_, false, is_joined)) {
        const uint32_t seen = join_.load();
        is_caller_asleep_.store(true);
        if (num_done_.load() != num_chunks) sleep_while(join_, seen);
        is_caller_asleep_.store(false);
    }
}

void ThreadPool::run_chunks(int thread) {
    int64_t num_run = 0;
    for (;;) {
        const uint64_t claimed = ticket_.fetch_add(1, std::memory_order_acq_rel);
        const int64_t chunk = next_of(claimed);
        if (chunk >= chunks_of(claimed)) break;
        task_(context_, chunk, thread);
        ++num_run;
    }
    if (num_run == 0) return;
    num_done_.fetch_add(num_run);
    if (thread != 0 && is_caller_asleep_.load()) {
        join_.fetch_add(1);
        wake_all(join_);
    }
}

void ThreadPool::work(int thread) {
    name_thread();
    for (;;) {
        // Before all else, so that neither a loop that starts meanwhile nor the end is slept through.
        const uint32_t seen = loop_.load();
        if (is_stopping_.load()) return;
        run_chunks(thread);
        wait_for_loop(seen);
    }
}

void ThreadPool::wait_for_loop(uint32_t seen) {
    const auto has_changed = [&] { return loop_.load(std::memory_order_acquire) != seen; };
    // Between loops a thread holds no chunk, so whoever runs now delays nobody; later all would wait for its chunk.
    if (spin(spin_ns_, true, has_changed)) return;
    num_sleepers_.fetch_add(1);
    while (!has_changed()) sleep_while(loop_, seen);
    num_sleepers_.fetch_sub(1);
}

}  // namespace treadle
