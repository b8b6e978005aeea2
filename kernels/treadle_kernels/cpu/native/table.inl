// The table of an instruction set, from what the files before this one define.
namespace {

constexpr treadle::Kernels make_kernels(const char* name) {
    return {name,   quantize_row, split_row,      rms_norm_row, swiglu_row,     rotate_head, write_kv,
            linear, attend,       merge_partials, argmax,       softmax_weights};
}

}  // namespace
