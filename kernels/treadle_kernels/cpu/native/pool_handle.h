// What both files of C functions share: the pool's handle, and how exceptions become errors.
#ifndef TREADLE_POOL_HANDLE_H
#define TREADLE_POOL_HANDLE_H

#include <exception>

#include "error.h"
#include "thread_pool.h"
#include "treadle_cpu.h"

struct treadle_pool : treadle::ThreadPool {
    using ThreadPool::ThreadPool;
};

namespace treadle {

// Runs something that may run out of memory or threads.
template <class Body>
int guarded(const Body& body) {
    try {
        return body();
    } catch (const std::exception& error) {
        return fail("out of resources: %s", error.what());
    }
}

}  // namespace treadle

#endif
