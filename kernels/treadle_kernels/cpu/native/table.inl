// The table of an instruction set, and what is in it, over the vocabulary that the file before this one defines.
#include "rows.inl"
#include "linear.inl"
#include "linear_rotated.inl"
#include "linear_split.inl"
#include "linear_decoded.inl"
#include "attention.inl"
#include "kv_write.inl"

namespace {

void linear(const LinearCall& call) {
    if (is_decoded(call)) {
        return with_decoded_format(call.weights->format,
                                   [&](auto format) { decoded_linear<decltype(format)>(call); });
    }
    switch (call.weights->format) {
        case TREADLE_F32:
            return floating_linear<NumbersF32>(call);
        case TREADLE_F16:
            return floating_linear<NumbersF16>(call);
        case TREADLE_BF16:
            return floating_linear<NumbersBF16>(call);
        case TREADLE_ROTATED:
            return rotated_linear(call);
        default:
            return with_format(call.weights->format, [&](auto format) {
                if (call.x->terms != nullptr) return split_linear<decltype(format)>(call);
                quantized_linear<decltype(format)>(call);
            });
    }
}

constexpr treadle::Kernels make_kernels(const char* name) {
    return {name,        quantize_row, split_row, round_row, rotate_row, rms_norm_row,   swiglu_row,
            rotate_head, write_kv,     linear,    nullptr,   attend,     merge_partials, argmax,
            softmax_weights};
}

}  // namespace
