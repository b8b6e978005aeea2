// Products of weights and activations rounded to bfloat16 (linear_rounded.inl), on AMX tiles.
//
// Weights are the first operand of a tile product: 16 columns and 32 inputs, decoded from their codes. Activations are the
// second, 16 rows; sums stay in a tile over all inputs.
#include "amx_decode.inl"
#include "amx_tiles.h"
#include "kernels.h"

namespace {

constexpr int kSumsAtOnce = 4;                         // tiles of sums: four column tiles, or two by two blocks of rows
constexpr int kGroupsAtOnce = 4;                       // decoded before they are multiplied, where rows are few
constexpr int kTilesDecoded = 8;                       // column tiles decoded before they are multiplied, where rows are many
constexpr int kProductFloats = kColumns * kRowBlock;   // of a tile of sums: [16 columns][block_rows]
constexpr int64_t kRoundedPrefetch = 2 * kGroupsAtOnce;  // ahead of the weights in use
constexpr int64_t kFewWords = kGroupsAtOnce * kTileWords;  // of the groups of a column tile decoded at once

static_assert(treadle::linear_scratch_bytes(kGroup) >= kTilesDecoded * kTileWords * int64_t{sizeof(uint16_t)} +
                                                           2 * kSumsAtOnce * kProductFloats * int64_t{sizeof(float)},
              "a thread's scratch memory holds the weights and two sets of products");

// Tiles 0 to 3 hold sums, 4 and 5 weights, 6 and 7 activations, of blocks of so many rows.
inline TileConfig rounded_config(int block_rows) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, tile == 4 || tile == 5 ? 64 : 4 * block_rows);
    return config;
}

// Column tiles and blocks of rows in tile registers: decoding, multiplying, and sums on their way out.
//
// Where rows are so few that their sums stay in tiles, decoding and multiplying take turns, so that the processor does
// both at once; else column tiles are decoded as a whole and meet one pair of row blocks after the other, and what
// becomes of a pair's sums is computed while the next pair is multiplied.
template <class Fmt>
class RoundedTiles {
 public:
    RoundedTiles(const treadle_linear& weights, const Activations& x, uint8_t* scratch)
        : x_(x),
          layout_(treadle::tile_layout(*treadle::format_info(weights.format), weights.k)),
          k_(weights.k),
          groups_(k_ / kGroup),
          products_(reinterpret_cast<float*>(scratch)),
          weights_(reinterpret_cast<uint16_t*>(products_ + 2 * kSumsAtOnce * kProductFloats)) {
        rounded_config(x.block_rows).load();
    }
    ~RoundedTiles() { _tile_release(); }

    int block_rows() const { return x_.block_rows; }
    Tile tile(const treadle_linear& weights, int64_t index) const {
        const uint8_t* start = static_cast<const uint8_t*>(weights.data) + index * layout_.tile_bytes;
        return {start, start + layout_.scales, start + layout_.minima};
    }

    // Few rows: kTiles column tiles, of which tiles[t] is followed in memory by what is needed `ahead` tiles later.
    template <int kTiles, int kBlocks>
    void multiply_few(const Tile* tiles, int64_t ahead, int64_t row) {
        clear();
        for (int64_t begin = 0; begin < groups_; begin += kGroupsAtOnce) {
            const int64_t end = begin + kGroupsAtOnce < groups_ ? begin + kGroupsAtOnce : groups_;
            for (int t = 0; t < kTiles; ++t) {
                for (int64_t group = begin; group < end; ++group) {
                    prefetch(tiles[t], group, ahead);
                    decode(tiles[t], group, weights_ + t * kFewWords + (group - begin) * kTileWords);
                }
            }
            multiply<kTiles, kBlocks>(weights_, kFewWords, row, begin, end, [](int64_t) {});
        }
        take_sums<kTiles * kBlocks>();
    }

    // Many rows: decodes all of a column tile.
    void decode_all(const Tile& tile, int64_t slot) const {
        for (int64_t group = 0; group < groups_; ++group) decode(tile, group, decoded(slot) + group * kTileWords);
    }
    // Multiplies decoded tiles of slots from `slot` on; after each group, between(group) is called.
    template <int kTiles, int kBlocks, class Between>
    void multiply_many(int64_t slot, int64_t row, const Between& between) {
        clear();
        multiply<kTiles, kBlocks>(decoded(slot), groups_ * kTileWords, row, 0, groups_, between);
        take_sums<kTiles * kBlocks>();
    }

    int64_t groups() const { return groups_; }
    // The sums taken last; they stay until those after the next are taken.
    const float* sums() const { return products_ + turn_ * kSumsAtOnce * kProductFloats; }

 private:
    uint16_t* decoded(int64_t slot) const { return weights_ + slot * groups_ * kTileWords; }

    static inline __attribute__((always_inline)) void decode(const Tile& tile, int64_t group, uint16_t* out) {
        GroupDecoder<Fmt>(tile, group, out).run();
    }

    // Codes some groups ahead, at the end those of the tile that is `ahead` tiles on; and a share of that one's other
    // planes.
    void prefetch(const Tile& tile, int64_t group, int64_t tiles_ahead) const {
        const uint8_t* next_tile = tile.quants + tiles_ahead * layout_.tile_bytes;
        const int64_t ahead = group + kRoundedPrefetch;
        const uint8_t* quants = ahead < groups_ ? tile.quants + ahead * Fmt::quant_bytes
                                                : next_tile + (ahead - groups_) * Fmt::quant_bytes;
        for (int i = 0; i < Fmt::quant_bytes; i += 64) __builtin_prefetch(quants + i);
        constexpr int kOtherBytes = (Fmt::scales_per_group + (Fmt::has_minimum ? 1 : 0)) * Fmt::vector_bytes;
        const uint8_t* others = next_tile + layout_.scales + group * kOtherBytes;
        for (int i = 0; i < kOtherBytes; i += 64) __builtin_prefetch(others + i);
    }

    // Tile numbers of all that follows are literals: sums of tile t and block b are in tile kBlocks t + b.
    static void clear() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    // Multiplies a group of one or two blocks of rows with column tiles that lie `apart` words from each other.
    template <int kTiles, int kBlocks>
    static inline __attribute__((always_inline)) void add_products(const uint16_t* weights, int64_t apart,
                                                                   const uint16_t* x, const uint16_t* next,
                                                                   int64_t stride) {
        _tile_loadd(6, x, stride);
        if (kBlocks == 2) _tile_loadd(7, next, stride);
        _tile_loadd(4, weights, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (kBlocks == 2) _tile_dpbf16ps(1, 4, 7);
        if (kTiles == 1) return;
        _tile_loadd(5, weights + apart, 64);
        if (kBlocks == 2) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            return;
        }
        _tile_dpbf16ps(1, 5, 6);
        if (kTiles == 2) return;
        _tile_loadd(4, weights + 2 * apart, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, weights + 3 * apart, 64);
        _tile_dpbf16ps(3, 5, 6);
    }

    // Adds groups [begin, end), decoded, of column tiles to the sums of the rows from `row` on.
    template <int kTiles, int kBlocks, class Between>
    inline __attribute__((always_inline)) void multiply(const uint16_t* weights, int64_t apart, int64_t row,
                                                        int64_t begin, int64_t end, const Between& between) const {
        order_memory();
        const int64_t x_words = int64_t{kGroup} * x_.block_rows, stride = 4 * x_.block_rows;
        const uint16_t* x = x_.rounded + treadle::rounded_row_offset(row, k_, x_.block_rows);
        x += begin * x_words;
        const uint16_t* next = x + groups_ * x_words;  // of the second block
        for (int64_t group = begin; group < end; ++group) {
            add_products<kTiles, kBlocks>(weights, apart, x, next, stride);
            weights += kTileWords;
            x += x_words;
            next += x_words;
            between(group);
        }
        order_memory();
    }

    template <int kSums>
    void take_sums() {
        turn_ = 1 - turn_;
        float* out = products_ + turn_ * kSumsAtOnce * kProductFloats;
        const int64_t stride = 4 * x_.block_rows;
        _tile_stored(0, out, stride);
        if (kSums > 1) _tile_stored(1, out + kProductFloats, stride);
        if (kSums > 2) _tile_stored(2, out + 2 * kProductFloats, stride);
        if (kSums > 2) _tile_stored(3, out + 3 * kProductFloats, stride);
        order_memory();
    }

    const Activations& x_;
    const TileLayout layout_;
    const int64_t k_;
    const int64_t groups_;
    int turn_ = 0;
    float* const products_;    // [2][kSumsAtOnce][kProductFloats]
    uint16_t* const weights_;  // [kTilesDecoded][groups or kGroupsAtOnce][kTileWords]
};

// Columns and blocks of rows whose sums were taken: how many column tiles of each product from `tile` on.
struct TileSums {
    int64_t tile = 0;
    int64_t row = 0;
    int num_tiles = 0;
    int num_blocks = 0;
    const float* products = nullptr;

    int num_parts() const { return num_tiles * num_blocks; }
};

// A thread's product of some rows with some column tiles.
template <class Fmt>
class RoundedProduct {
 public:
    explicit RoundedProduct(const LinearCall& call) : call_(call), tiles_(*call.weights, *call.x, call.scratch) {}

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
        for (; kBlocks == 1 && tile + 3 < call_.tile_end; tile += 4) multiply_few<4, 1>(tile);
        for (; tile + 1 < call_.tile_end; tile += 2) multiply_few<2, kBlocks>(tile);
        if (tile < call_.tile_end) multiply_few<1, kBlocks>(tile);
    }

    template <int kTiles, int kBlocks>
    void multiply_few(int64_t tile) {
        claim_outputs<kTiles>(tile, call_.row_begin, kBlocks * tiles_.block_rows());
        Tile tiles[kTiles];
        for (int t = 0; t < kTiles; ++t) tiles[t] = tiles_.tile(*call_.weights, tile + t);
        tiles_.template multiply_few<kTiles, kBlocks>(tiles, kSumsAtOnce, call_.row_begin);
        const TileSums sums{tile, call_.row_begin, kTiles, kBlocks, tiles_.sums()};
        for (int part = 0; part < sums.num_parts(); ++part) store_part(sums, part);
        order_memory();
    }

    void run_many() {
        for (int64_t first = call_.tile_begin; first < call_.tile_end; first += kTilesDecoded) {
            const int64_t end = first + kTilesDecoded < call_.tile_end ? first + kTilesDecoded : call_.tile_end;
            for (int64_t t = first; t < end; ++t) tiles_.decode_all(tiles_.tile(*call_.weights, t), t - first);
            int64_t row = call_.row_begin;
            const int block_rows = tiles_.block_rows();
            for (; row + block_rows < call_.row_end; row += 2 * block_rows) multiply_many<2>(first, end, row);
            if (row < call_.row_end) multiply_many<1>(first, end, row);
        }
        for (int part = 0; part < last_.num_parts(); ++part) store_part(last_, part);
        order_memory();
    }

    // Some rows and all decoded tiles.
    template <int kBlocks>
    void multiply_many(int64_t first, int64_t end, int64_t row) {
        int64_t tile = first;
        for (; tile + 1 < end; tile += 2) multiply_all<2, kBlocks>(tile, tile - first, row);
        if (tile < end) multiply_all<1, kBlocks>(tile, tile - first, row);
    }

    template <int kTiles, int kBlocks>
    void multiply_all(int64_t tile, int64_t slot, int64_t row) {
        claim_outputs<kTiles>(tile, row, kBlocks * tiles_.block_rows());
        const int num_parts = last_.num_parts();
        int part = 0;
        tiles_.template multiply_many<kTiles, kBlocks>(slot, row, [&](int64_t group) {
            if (part < num_parts && (group & 3) == 0) store_part(last_, part++);
        });
        for (; part < num_parts; ++part) store_part(last_, part);
        last_ = {tile, row, kTiles, kBlocks, tiles_.sums()};
    }

    // Asks for the cache lines that some rows' outputs will go to, while there is arithmetic to do.
    template <int kTiles>
    void claim_outputs(int64_t tile, int64_t row, int64_t count) const {
        const int64_t end = row + count < call_.row_end ? row + count : call_.row_end;
        for (; row < end; ++row) {
            const float* line = call_.y + row * call_.y_stride + tile * kColumns;
            for (int t = 0; t < kTiles; ++t) __builtin_prefetch(line + t * kColumns, 1);
        }
    }

    // Outputs of a tile and a block.
    void store_part(const TileSums& sums, int part) const {
        const int t = part / sums.num_blocks, block = part % sums.num_blocks;
        store_block(sums.row + block * tiles_.block_rows(), sums.tile + t, sums.products + part * kProductFloats);
    }

    // Products of a block: [16 columns][block_rows].
    void store_block(int64_t row, int64_t tile, const float* products) const {
        const int block_rows = tiles_.block_rows();
        const int64_t left = call_.row_end - row, count = left < block_rows ? left : block_rows;
        if (block_rows == 1) return store_outputs(call_, row, tile, f_load(products));
        if (count > 4 && block_rows == 16) {
            F rows[16];
            transpose(products, rows);
            for (int64_t j = 0; j < count; ++j) store_outputs(call_, row + j, tile, rows[j]);
            return;
        }
        const I lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const I places = _mm512_mullo_epi32(lanes, i_set(block_rows));
        for (int64_t j = 0; j < count; ++j) {
            store_outputs(call_, row + j, tile, _mm512_i32gather_ps(places, products + j, sizeof(float)));
        }
    }

    const LinearCall& call_;
    RoundedTiles<Fmt> tiles_;
    TileSums last_;  // of many rows, not yet stored
};

}  // namespace
