// What every user of the tile registers needs.
#ifndef TREADLE_AMX_TILES_H
#define TREADLE_AMX_TILES_H

#include <immintrin.h>

#include <cstdint>

namespace {

// Tile instructions do not tell the compiler what memory they touch.
inline void order_memory() { asm volatile("" ::: "memory"); }

// The operand of LDTILECFG (Intel SDM volume 1, section 18.3).
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_row_bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(num_row_bytes);
    }
    void load() const {
        asm volatile("" ::"r"(this) : "memory");  // the instruction does not tell the compiler that it reads memory
        _tile_loadconfig(this);
    }
};

}  // namespace

#endif
