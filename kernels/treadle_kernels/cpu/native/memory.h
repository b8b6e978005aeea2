// Uninitialised memory that starts at a cache line, freed with its owner.
#ifndef TREADLE_MEMORY_H
#define TREADLE_MEMORY_H

#include <cstdint>
#include <cstdlib>
#include <new>

namespace treadle {

constexpr int64_t kAlignment = 64;

template <class T>
class Buffer {
 public:
    Buffer() = default;
    explicit Buffer(int64_t size) { reset(size); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // Drops the content and makes room for `size` numbers.
    void reset(int64_t size) {
        std::free(data_);
        data_ = nullptr;
        const int64_t num_bytes = (size * int64_t{sizeof(T)} + kAlignment - 1) / kAlignment * kAlignment;
        if (num_bytes > 0) data_ = static_cast<T*>(std::aligned_alloc(kAlignment, num_bytes));
        if (num_bytes > 0 && data_ == nullptr) throw std::bad_alloc();
        num_bytes_ = num_bytes;
    }
    // Makes room for at least `size` numbers; the content is lost if it has to grow.
    void reserve(int64_t size) {
        if (size * int64_t{sizeof(T)} > num_bytes_) reset(size);
    }

    T* data() const { return data_; }
    int64_t num_bytes() const { return num_bytes_; }

 private:
    T* data_ = nullptr;
    int64_t num_bytes_ = 0;
};

}  // namespace treadle

#endif
