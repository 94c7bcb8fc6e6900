/* Matrix products on packed panels: a tile of sums stays in registers while the depth passes.
 *
 * A tile is as many rows and panels as the registers hold: with 32 registers of 16 lanes 9 rows x 48 columns, or
 * 6 rows x 64 columns. Every weight is loaded once per tile, every input is broadcast to a tile's columns.
 */
#include "gemm.h"

#include "vector.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#define MOST_PANELS 4          /* of a tile */
#define DEPTH 384              /* of the part of a tile's panels that all tiles of rows read before the next part */
#define FETCH_ROWS 6           /* fewer rows leave no time to fetch the next part: they fetch a few steps ahead */
#define STEPS_AHEAD 64         /* of the depth; a single row reads as fast as the processor can without */
#define NEAR_FLOATS (96 << 10) /* of weights that stay in the second cache from call to call */

/* Panels beside `rows` rows of sums, so that sums, weights and one input fit into the registers. */
#define FITTING(rows) ((REGISTERS - 1) / VECS / ((rows) + 1))
#define BESIDE(rows) (FITTING(rows) > MOST_PANELS ? MOST_PANELS : FITTING(rows) < 1 ? 1 : FITTING(rows))

#if LANES == 16
#define TILE_ROWS 9
#elif LANES == 8 || defined(__aarch64__)
#define TILE_ROWS 6
#else
#define TILE_ROWS 2
#endif

/* Weights that will be read: a tile fetches `pace` floats of each panel per step of its own depth, or none at all. */
typedef struct {
    const float *from;
    long pace;
} Ahead;

#ifdef __AVX512BF16__
const long jf_bfloat16 = 1;
INLINE vec madd_pairs(vec a, vec b, vec c) { return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }

void to_pairs(long rows, const float *a, long lda, long columns, float *pairs, long ldp) {
    for (long i = 0; i < rows; i++, a += lda, pairs += ldp)
        for (long j = 0; j < columns; j += 16)
            _mm256_storeu_si256((__m256i *)(pairs + j / 2), (__m256i)_mm512_cvtneps_pbh((__m512)load(a + j)));
}
#else
const long jf_bfloat16 = 0; /* no network has pairs */
INLINE vec madd_pairs(vec a, vec b, vec c) { return madd(a, b, c); }
void to_pairs(long rows, const float *a, long lda, long columns, float *pairs, long ldp) {}
#endif

/* One tile; `rows` and `panels` are constants of the code that calls it. */
INLINE void sums(const int rows, const int panels, const int fetch, const int pairs, const float *a, long lda, Panels right,
                 Ahead ahead, float *c, long ldc, const float *bias, int add) {
    const int wide = panels * VECS;
    vec s[TILE_ROWS][MOST_PANELS * VECS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int p = 0; p < wide; p++) s[i][p] = bias ? load(bias + p * LANES) : all(0);
    const float *b = right.b;
    for (long k = 0; k < right.depth; k++, b += right.ldb, a++, ahead.from += ahead.pace) {
        vec w[MOST_PANELS * VECS];
#pragma GCC unroll 16
        for (int p = 0; fetch && p < panels; p++) __builtin_prefetch(ahead.from + p * right.next);
#pragma GCC unroll 16
        for (int p = 0; p < wide; p++) w[p] = load(b + p / VECS * right.next + p % VECS * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            vec x = all(a[i * lda]);
#pragma GCC unroll 16
            for (int p = 0; p < wide; p++) s[i][p] = pairs ? madd_pairs(x, w[p], s[i][p]) : madd(x, w[p], s[i][p]);
        }
    }
    if (add)
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
            for (int p = 0; p < wide; p++) s[i][p] += load(c + i * ldc + p * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int p = 0; p < wide; p++) store(c + i * ldc + p * LANES, s[i][p]);
}

/* Three functions for each number of panels; the numbers of rows that fit beside them are cases. The second fetches, the
 * third fetches and multiplies pairs. */
typedef void Tile(long rows, const float *a, long lda, Panels right, Ahead ahead, float *c, long ldc,
                  const float *bias, int add);
#define CASE(count)                                                                                              \
    case count:                                                                                                  \
        if (BESIDE(count) >= wide) sums(count, wide, fetch, pairs, a, lda, right, ahead, c, ldc, bias, add);            \
        break;
#define TILE(name, panels, ahead_of, in_pairs)                                                                             \
    static void name(long rows, const float *a, long lda, Panels right, Ahead ahead, float *c, long ldc,         \
                     const float *bias, int add) {                                                               \
        const int wide = panels, fetch = ahead_of, pairs = in_pairs;                                             \
        switch (rows) { EACH(CASE) }                                                                             \
    }
#if TILE_ROWS == 9
#define EACH(use) use(1) use(2) use(3) use(4) use(5) use(6) use(7) use(8) use(9)
#elif TILE_ROWS == 6
#define EACH(use) use(1) use(2) use(3) use(4) use(5) use(6)
#else
#define EACH(use) use(1) use(2)
#endif
TILE(tile1, 1, 0, 0)
TILE(tile2, 2, 0, 0)
TILE(tile3, 3, 0, 0)
TILE(tile4, 4, 0, 0)
TILE(fetch1, 1, 1, 0)
TILE(fetch2, 2, 1, 0)
TILE(fetch3, 3, 1, 0)
TILE(fetch4, 4, 1, 0)
TILE(pairs1, 1, 1, 1)
TILE(pairs2, 2, 1, 1)
TILE(pairs3, 3, 1, 1)
TILE(pairs4, 4, 1, 1)
static Tile *const tiles[3][5] = {
    {0, tile1, tile2, tile3, tile4}, {0, fetch1, fetch2, fetch3, fetch4}, {0, pairs1, pairs2, pairs3, pairs4}};

static void gelu(long rows, long columns, float *c, long ldc) {
    for (long i = 0; i < rows; i++, c += ldc)
        for (long j = 0; j < columns; j += LANES) store(c + j, vgelu(load(c + j)));
}

/* The first of as few parts as possible of at most `most`, all about the same. */
static long even_part(long all, long most) {
    long parts = (all + most - 1) / most;
    return (all + parts - 1) / parts;
}

void product(long rows, const float *a, long lda, Panels right, long first, long last, float *c, long ldc,
             const float *bias, int what) {
    if (rows <= 0) return;
    long each = even_part(rows, TILE_ROWS), count = (rows + each - 1) / each;
    long most = rows >= FETCH_ROWS ? DEPTH : right.depth;
    int kind = right.pairs ? 2 : rows > 1 && right.depth * (last - first) * PANEL > NEAR_FLOATS;
    for (long p = first, panels; p < last; p += panels) {
        panels = even_part(last - p, BESIDE(each));
        const float *b = right.b + p * right.next;
        for (long k = 0; k < right.depth; k += most) {
            long depth = right.depth - k < most ? right.depth - k : most;
            Panels part = {b + k * right.ldb, right.ldb, right.next, depth, right.pairs};
            const float *start = bias && !k ? bias + p * PANEL : 0;
            /* While these weights are in the first cache, the tiles fetch the next ones, each its share. */
            const float *next = k + depth < right.depth ? part.b + depth * right.ldb : b + panels * right.next;
            Ahead ahead = {next, (right.ldb + count - 1) / count};
            if (rows < FETCH_ROWS) ahead = (Ahead){part.b + STEPS_AHEAD * right.ldb, right.ldb};
            for (long i = 0; i < rows; i += each, ahead.from += depth * ahead.pace) {
                long here = rows - i < each ? rows - i : each;
                float *out = c + i * ldc + p * PANEL;
                tiles[kind][panels](here, a + i * lda + k, lda, part, ahead, out, ldc, start, k || what == ADD);
                if (what == GELU && k + depth == right.depth) gelu(here, panels * PANEL, out, ldc);
            }
        }
    }
}
