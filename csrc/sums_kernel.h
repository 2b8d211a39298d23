// out (columns, depth) = g^T x, summed over many rows: x (rows, depth) is read once and prefetched. Needs columns_kernel.h.
// Columns of g are the rows of the micro-kernel, TILE at once, and lines of x its panel, WIDE numbers at once.

constexpr int TILE = 4;
constexpr int WIDE_VECS = ROWS == 12 && LANES != 8 ? 6 : 3;
constexpr long WIDE = WIDE_VECS * LANES;  // the least depth
constexpr long SUMMED = 64;               // rows that stay in cache while all tiles read them
constexpr long GROUP = 8;                 // rows after which more is prefetched: more at once would have to wait

struct PrefetchGroups {
    static constexpr long EVERY = GROUP;
    const float* next;
    long lines;
    INLINE_MEMBER void operator()(long k) const {
        for (long i = 0; i < lines; i++) __builtin_prefetch(next + (k / GROUP * lines + i) * LINE, 0, 2);
    }
};

// to (TILE, vecs * LANES) = start + g^T x for some rows, 1 to WIDE_VECS registers wide.
APART void tile(const float* x, long row, const float* g, long columns, const Result& result, long rows, int vecs,
                const PrefetchGroups& ahead) {
#define KRONECELL_CASE(n)                                                                                            \
    case n:                                                                                                          \
        block<TILE, (n < WIDE_VECS ? n : WIDE_VECS)>(Operand{g, 1, columns}, Panel{x, row, PANEL}, result, n * LANES, \
                                                      rows, ahead);                                                  \
        break;
    switch (vecs) {
        KRONECELL_CASE(1)
        KRONECELL_CASE(2)
        KRONECELL_CASE(3)
        KRONECELL_CASE(4)
        KRONECELL_CASE(5)
        KRONECELL_CASE(6)
    }
#undef KRONECELL_CASE
}

// The registers of the tile that holds number k of a row, and where it begins: the last one reaches back to fill them.
INLINE int tile_vecs(long k, long depth) {
    const long left = depth - k / WIDE * WIDE;
    return left < WIDE ? (int)((left + LANES - 1) / LANES) : WIDE_VECS;
}

INLINE long tile_at(long k, long depth) {
    const long at = k / WIDE * WIDE, last = depth - tile_vecs(k, depth) * LANES;
    return at < last ? at : last;
}

// A line of the tiles (depth in tiles, `across` of them, TILE, WIDE), added to `out`.
INLINE void add_line(const float* tiles, long across, long line, float* out, long depth) {
    for (long first = 0; first < depth; first += WIDE, tiles += across * TILE * WIDE) {
        const float* from = tiles + line * WIDE - tile_at(first, depth);
        const long stop = first + WIDE < depth ? first + WIDE : depth;
        for (long k = first; k < stop; k++) out[k] += from[k];
    }
}

// Of `all` lines that all tiles prefetch, those before a tile: each has its share.
INLINE long share(long tile, long tiles, long all) { return tile * all / tiles; }

long least_depth() { return WIDE; }

// Numbers of memory that column_sums needs.
long sums_memory(bool bytes, long depth, long columns) {
    const long tiles = (columns + TILE - 1) / TILE * ((depth + WIDE - 1) / WIDE);
    return tiles * TILE * WIDE + SUMMED * TILE + (bytes ? SUMMED * depth : 0);
}

// Added to out; `memory` is zeros.
void column_sums(const void* x, bool bytes, const float* g, float* out, float* memory, long rows, long depth, long columns) {
    const long across = (columns + TILE - 1) / TILE, tiles = across * ((depth + WIDE - 1) / WIDE), size = TILE * WIDE;
    float *last = memory + tiles * size, *numbers = last + SUMMED * TILE;
    const long whole = columns - columns % TILE, lines = bytes ? 0 : (GROUP * depth + LINE - 1) / LINE;
    for (long r = 0; r < rows; r += SUMMED, g += SUMMED * columns) {
        const long some = rows - r < SUMMED ? rows - r : SUMMED;
        const float *here = (const float*)x + r * depth, *next = here + SUMMED * depth;
        if (bytes) {
            convert((const uint8_t*)x + r * depth, numbers, some * depth);
            here = numbers;
        }
        for (long i = 0; i < some; i++)
            for (long n = whole; n < columns; n++) last[i * TILE + n - whole] = g[i * columns + n];
        float* to = memory;
        long t = 0;
        for (long k = 0; k < depth; k += WIDE)
            for (long n = 0; n < columns; n += TILE, to += size, t++) {
                const long before = share(t, tiles, lines), after = share(t + 1, tiles, lines);
                tile(here + tile_at(k, depth), depth, n < whole ? g + n : last, n < whole ? columns : TILE,
                     Result{to, WIDE, to, WIDE}, some, tile_vecs(k, depth),
                     PrefetchGroups{next + before * (SUMMED / GROUP) * LINE, after - before});
            }
    }
    for (long c = 0; c < columns; c++) add_line(memory, across, c, out + c * depth, depth);
}
