// Two products of rounded weights and activations and SwiGLU of them, on AMX tiles: neither product ever goes to memory.
//
// Sums of a tile are [16 columns][block_rows], and columns are inputs of the layer that follows, whose activations are
// [pairs of inputs][block_rows][2]: pairs of columns become pairs of words.
#include "amx_rounded.inl"

namespace {

using treadle::GatedCall;

// The rounded words of a pair of vectors, taking turns.
inline B round_by_turns(F even, F odd) {
    const B words = (B)_mm512_cvtne2ps_pbh(odd, even);
    const B places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                      20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(places, words);
}

template <class Fmt>
class GatedProduct {
 public:
    explicit GatedProduct(const GatedCall& call) : call_(call), tiles_(*call.gate, *call.x, call.scratch) {
        // Of a vector with several columns of few rows: where its rounded numbers go.
        const int block_rows = tiles_.block_rows();
        for (int word = 0; word < 16; ++word) {
            const int pair = word / (2 * block_rows), row = word / 2 % block_rows;
            places_[word] = static_cast<uint16_t>((2 * pair + word % 2) * block_rows + row);
        }
    }

    void run() {
        const int64_t rows = call_.row_end - call_.row_begin;
        if (rows <= tiles_.block_rows()) return run_few<1>();
        if (rows <= 2 * tiles_.block_rows()) return run_few<2>();
        run_many();
    }

 private:
    template <int kBlocks>
    void run_few() {
        int64_t tile = call_.tile_begin;
        for (; kBlocks == 1 && tile + 1 < call_.tile_end; tile += 2) multiply_few<2, 1>(tile);
        for (; tile < call_.tile_end; ++tile) multiply_few<1, kBlocks>(tile);
    }

    template <int kTiles, int kBlocks>
    void multiply_few(int64_t tile) {
        Tile tiles[2 * kTiles];
        for (int t = 0; t < kTiles; ++t) {
            tiles[t] = tiles_.tile(*call_.gate, tile + t);
            tiles[kTiles + t] = tiles_.tile(*call_.up, tile + t);
        }
        tiles_.template multiply_few<2 * kTiles, kBlocks>(tiles, kTiles, call_.row_begin);
        const TileSums sums{tile, call_.row_begin, kTiles, kBlocks, tiles_.sums()};
        for (int part = 0; part < num_parts(sums); ++part) store_part(sums, part);
        order_memory();
    }

    void run_many() {
        const int block_rows = tiles_.block_rows();
        for (int64_t tile = call_.tile_begin; tile < call_.tile_end; ++tile) {
            tiles_.decode_all(tiles_.tile(*call_.gate, tile), 0);
            tiles_.decode_all(tiles_.tile(*call_.up, tile), 1);
            int64_t row = call_.row_begin;
            for (; row + block_rows < call_.row_end; row += 2 * block_rows) multiply_all<2>(tile, row);
            if (row < call_.row_end) multiply_all<1>(tile, row);
        }
        for (int part = 0; part < num_parts(last_); ++part) store_part(last_, part);
        order_memory();
    }

    template <int kBlocks>
    void multiply_all(int64_t tile, int64_t row) {
        const int parts = num_parts(last_);
        const int parts_a_group = static_cast<int>((parts + tiles_.groups() - 1) / tiles_.groups());
        int part = 0;
        tiles_.template multiply_many<2, kBlocks>(0, row, [&](int64_t) {
            for (const int end = part + parts_a_group < parts ? part + parts_a_group : parts; part < end; ++part) {
                store_part(last_, part);
            }
        });
        for (; part < parts; ++part) store_part(last_, part);
        last_ = {tile, row, 1, kBlocks, tiles_.sums()};
    }

    // A part is one store: a pair of columns of sixteen rows, or a vector of several columns.
    int parts_of_block() const { return tiles_.block_rows() == 16 ? 8 : tiles_.block_rows(); }
    int num_parts(const TileSums& sums) const { return sums.num_parts() * parts_of_block(); }

    inline __attribute__((always_inline)) void store_part(const TileSums& sums, int part) const {
        const int block_rows = tiles_.block_rows(), in_block = part % parts_of_block(), index = part / parts_of_block();
        const int64_t tile = sums.tile + index / sums.num_blocks;
        const int64_t row = sums.row + index % sums.num_blocks * block_rows;
        const float* gate = sums.products + index * kProductFloats;
        const float* up = gate + sums.num_parts() * kProductFloats;
        uint16_t* out = call_.out + treadle::rounded_row_offset(row, call_.up->n, block_rows) + tile * kColumns * block_rows;
        if (block_rows == 16) {
            gate += 32 * in_block;
            up += 32 * in_block;
            const F even = f_roundable(f_swiglu(f_load(gate), f_load(up)));
            const F odd = f_roundable(f_swiglu(f_load(gate + 16), f_load(up + 16)));
            _mm512_store_si512(out + 32 * in_block, round_by_turns(even, odd));
            return;
        }
        const F numbers = f_roundable(f_swiglu(f_load(gate + 16 * in_block), f_load(up + 16 * in_block)));
        const __m256i words = (__m256i)_mm512_cvtneps_pbh(numbers);
        const __m256i places = _mm256_load_si256(reinterpret_cast<const __m256i*>(places_));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * in_block), _mm256_permutexvar_epi16(places, words));
    }

    const GatedCall& call_;
    RoundedTiles<Fmt> tiles_;
    alignas(32) uint16_t places_[16];
    TileSums last_;  // of many rows, not yet stored
};

}  // namespace
