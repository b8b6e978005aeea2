// Chooses an instruction set: the fastest, unless TREADLE_CPU_ISA or a caller says otherwise.
#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "error.h"
#include "kernels.h"

namespace treadle {

namespace {

const std::vector<const Kernels*>& available() {
    static const std::vector<const Kernels*> tables = [] {
        std::vector<const Kernels*> found;
        for (const Kernels* table :
             {plain_kernels(), neon_kernels(), neon_i8mm_kernels(), avx2_kernels(), avx_vnni_kernels(), avx512_kernels(),
              amx_kernels()}) {
            if (table != nullptr) found.push_back(table);
        }
        return found;
    }();
    return tables;
}

const Kernels* find(const char* name) {
    for (const Kernels* table : available()) {
        if (std::string(table->name) == name) return table;
    }
    return nullptr;
}

// A name in the environment that this machine does not have is passed over: treadle_cpu_isa() tells.
std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> table{[] {
        const char* wanted = std::getenv("TREADLE_CPU_ISA");
        const Kernels* found = wanted == nullptr ? nullptr : find(wanted);
        return found == nullptr ? available().back() : found;
    }()};
    return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

const char* isa_names() {
    static const std::string names = [] {
        std::string joined;
        for (const Kernels* table : available()) joined += (joined.empty() ? "" : ",") + std::string(table->name);
        return joined;
    }();
    return names.c_str();
}

int select_isa(const char* name) {
    TREADLE_REQUIRE(name != nullptr, "the instruction set's name is null");
    const Kernels* table = find(name);
    TREADLE_REQUIRE(table != nullptr, "no instruction set %s here; there are %s", name, isa_names());
    chosen().store(table);
    return 0;
}

}  // namespace treadle
