// How the library reports a wrong argument: a text for the calling thread, and 1 as the result.
#ifndef TREADLE_ERROR_H
#define TREADLE_ERROR_H

namespace treadle {

// Sets the thread's error text, printf-like, and returns 1.
int fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
const char* last_error();

}  // namespace treadle

// Returns from the enclosing function unless the condition holds.
#define TREADLE_REQUIRE(condition, ...)                      \
    do {                                                     \
        if (!(condition)) return treadle::fail(__VA_ARGS__); \
    } while (0)

// Returns from the enclosing function if the call failed.
#define TREADLE_TRY(call)                       \
    do {                                        \
        if (int status = (call)) return status; \
    } while (0)

#endif
