// The C functions for instruction sets, threads, weights and single operations: check, then call.
#include <chrono>
#include <climits>
#include <cstring>

#include "error.h"
#include "isa.h"
#include "kernels.h"
#include "layers.h"
#include "pack.h"
#include "pool_handle.h"

using namespace treadle;

namespace {

constexpr int64_t kMaxSize = int64_t{1} << 40;  // of any array, so that products of sizes cannot overflow

int check_matrix(const void* data, int64_t m, int64_t n, const char* name) {
    TREADLE_REQUIRE(m >= 0 && n >= 1 && (m == 0 || n <= kMaxSize / m),
                    "%s: must have m >= 0 rows and n >= 1 columns, has [%lld, %lld]", name, static_cast<long long>(m),
                    static_cast<long long>(n));
    TREADLE_REQUIRE(data != nullptr || m == 0, "%s is null", name);
    return 0;
}

}  // namespace

extern "C" {

int32_t treadle_cpu_abi(void) { return TREADLE_CPU_ABI; }
const char* treadle_cpu_last_error(void) { return last_error(); }
const char* treadle_cpu_available_isas(void) { return isa_names(); }
const char* treadle_cpu_isa(void) { return kernels().name; }
int treadle_cpu_select_isa(const char* name) { return select_isa(name); }

int treadle_pool_create(int32_t num_threads, int32_t spin_us, treadle_pool** pool) {
    TREADLE_REQUIRE(pool != nullptr, "pool is null");
    TREADLE_REQUIRE(num_threads >= 1 && num_threads <= 1024, "num_threads must be from 1 to 1024, is %d", num_threads);
    TREADLE_REQUIRE(spin_us >= 0 && spin_us <= 1000000, "spin_us must be from 0 to 1000000, is %d", spin_us);
    return guarded([&] {
        *pool = new treadle_pool(num_threads, spin_us);
        return 0;
    });
}

void treadle_pool_destroy(treadle_pool* pool) { delete pool; }

int treadle_pool_measure(treadle_pool* pool, int32_t num_rounds, double* seconds) {
    TREADLE_REQUIRE(pool != nullptr && seconds != nullptr, "pool or seconds is null");
    TREADLE_REQUIRE(num_rounds >= 1, "num_rounds must be at least 1, is %d", num_rounds);
    const auto start = std::chrono::steady_clock::now();
    for (int32_t round = 0; round < num_rounds; ++round) pool->run(2 * pool->num_threads(), [](int64_t, int) {});
    *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / num_rounds;
    return 0;
}

int treadle_raw_bytes(int32_t format, int64_t n, int64_t k, uint64_t* num_bytes) {
    TREADLE_REQUIRE(num_bytes != nullptr, "num_bytes is null");
    TREADLE_TRY(check_shape(format, n, k, "weights"));
    const FormatInfo& info = *format_info(format);
    *num_bytes = static_cast<uint64_t>(k / info.raw_block_size) * info.raw_block_bytes * static_cast<uint64_t>(n);
    return 0;
}

int treadle_packed_bytes(int32_t format, int64_t n, int64_t k, uint64_t* num_bytes) {
    TREADLE_REQUIRE(num_bytes != nullptr, "num_bytes is null");
    TREADLE_TRY(check_shape(format, n, k, "weights"));
    *num_bytes = static_cast<uint64_t>(packed_bytes(*format_info(format), n, k));
    return 0;
}

int treadle_pack(int32_t format, const void* raw, uint64_t raw_bytes, int64_t n, int64_t k, void* packed,
                 uint64_t packed_size) {
    uint64_t wanted_raw = 0, wanted_packed = 0;
    TREADLE_TRY(treadle_raw_bytes(format, n, k, &wanted_raw));
    TREADLE_TRY(treadle_packed_bytes(format, n, k, &wanted_packed));
    TREADLE_REQUIRE(raw != nullptr && raw_bytes == wanted_raw, "raw weights must have %llu bytes, have %llu",
                    static_cast<unsigned long long>(wanted_raw), static_cast<unsigned long long>(raw_bytes));
    TREADLE_REQUIRE(packed != nullptr && packed_size == wanted_packed, "packed weights must have %llu bytes, have %llu",
                    static_cast<unsigned long long>(wanted_packed), static_cast<unsigned long long>(packed_size));
    pack(*format_info(format), static_cast<const uint8_t*>(raw), n, k, static_cast<uint8_t*>(packed));
    return 0;
}

int treadle_unpack_rows(const treadle_linear* weights, const int32_t* rows, int64_t num_rows, float* out) {
    TREADLE_REQUIRE(weights != nullptr, "weights is null");
    TREADLE_TRY(check_linear(*weights, "weights"));
    TREADLE_TRY(check_matrix(rows, num_rows, 1, "rows"));
    TREADLE_TRY(check_matrix(out, num_rows, weights->k, "out"));
    for (int64_t i = 0; i < num_rows; ++i) {
        TREADLE_REQUIRE(rows[i] >= 0 && rows[i] < weights->n, "rows[%lld] must be from 0 to %d, is %d",
                        static_cast<long long>(i), weights->n - 1, rows[i]);
    }
    for (int64_t i = 0; i < num_rows; ++i) unpack_row(*weights, rows[i], out + i * weights->k);
    return 0;
}

int treadle_linear_forward(treadle_pool* pool, const treadle_linear* weights, const float* x, int64_t m,
                           int32_t activations, float* y) {
    TREADLE_REQUIRE(pool != nullptr && weights != nullptr, "pool or weights is null");
    TREADLE_TRY(check_linear(*weights, "weights"));
    TREADLE_TRY(check_matrix(x, m, weights->k, "x"));
    TREADLE_TRY(check_matrix(y, m, weights->n, "y"));
    TREADLE_TRY(check_activations(activations));
    TREADLE_TRY(check_fit(*weights, activations, "weights"));
    return guarded([&] {
        const int64_t k = weights->k;
        ActivationBuffer buffer;
        ThreadScratch scratch;
        scratch.reserve(pool->num_threads(), linear_scratch_bytes(k));
        if (takes_codes(*weights, static_cast<treadle_activations>(activations))) {
            buffer.reserve(static_cast<treadle_activations>(activations), m, k);
            pool->run_ranges(m, kRowBlock, [&](int64_t begin, int64_t end, int thread) {
                for (int64_t row = begin; row < end; ++row) {
                    buffer.write_row({x + row * k}, row, k, scratch.of<float>(thread));
                }
            });
        }
        const LinearJob job{weights, y, weights->n, false};
        run_linear(*pool, scratch, buffer.view(x), m, &job, 1);
        return 0;
    });
}

int treadle_quantize(const float* x, int64_t m, int64_t k, int8_t* values, float* scales) {
    TREADLE_TRY(check_matrix(x, m, k, "x"));
    TREADLE_REQUIRE(k % kGroup == 0, "x: the number of columns must be a multiple of %d, is %lld", kGroup,
                    static_cast<long long>(k));
    TREADLE_TRY(check_matrix(values, m, k, "values"));
    TREADLE_TRY(check_matrix(scales, m, 1, "scales"));
    return guarded([&] {
        ActivationBuffer block;
        block.reserve(TREADLE_ACTIVATIONS_INT8, 1, k);
        for (int64_t row = 0; row < m; ++row) {
            const QuantizedRow out = block.quantized_row(0, k);
            kernels().quantize_row(x + row * k, k, out);
            for (int64_t g = 0; g < k / kGroup; ++g) {
                std::memcpy(values + row * k + g * kGroup, out.codes + g * kRowBlock * kGroup, kGroup);
                scales[row * (k / kGroup) + g] = out.scales[g * kRowBlock];
            }
        }
        return 0;
    });
}

int treadle_rms_norm(const float* x, const float* weight, int64_t m, int64_t n, float eps, float* y) {
    TREADLE_TRY(check_matrix(x, m, n, "x"));
    TREADLE_TRY(check_matrix(y, m, n, "y"));
    TREADLE_REQUIRE(weight != nullptr, "weight is null");
    for (int64_t row = 0; row < m; ++row) kernels().rms_norm_row(x + row * n, weight, n, eps, y + row * n);
    return 0;
}

int treadle_swiglu(const float* gate, const float* up, int64_t m, int64_t n, float* y) {
    TREADLE_TRY(check_matrix(gate, m, n, "gate"));
    TREADLE_TRY(check_matrix(up, m, n, "up"));
    TREADLE_TRY(check_matrix(y, m, n, "y"));
    for (int64_t row = 0; row < m; ++row) kernels().swiglu_row(gate + row * n, up + row * n, n, y + row * n);
    return 0;
}

}  // extern "C"
