// Words of vec_plain.h's vocabulary that are made of its others, for the instruction sets that have nothing better.

namespace {

// f_sum and f_max_lane of sixteen vectors, in a lane each.
template <class Number>
inline F number_of_each(const F* x, const Number& number) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = number(x[i]);
    return f_load(lanes);
}
inline F f_sums(const F* x) { return number_of_each(x, f_sum); }
inline F f_max_lanes(const F* x) { return number_of_each(x, f_max_lane); }

// Stores powers of both vectors and adds them to `sums`: to lane i the second of the i-th two, then the first.
inline F f_add_powers(F sums, F first_bits, F second_bits, uint16_t* p) {
    store_powers(first_bits, p);
    store_powers(second_bits, p + 16);
    F first, second;
    f_load_bf16_pairs(p, first, second);
    return f_add(f_add(sums, second), first);
}

}  // namespace
