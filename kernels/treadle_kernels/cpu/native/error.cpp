#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace treadle {

namespace {
thread_local char text[512] = "";
}

int fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return 1;
}

const char* last_error() { return text; }

}  // namespace treadle
