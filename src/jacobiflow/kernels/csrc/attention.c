/* A tile of queries meets all keys that its last one sees: only tiles on the diagonal compute scores in vain. */
#include "attention.h"

#include <string.h>

#include "gemm.h"
#include "vector.h"

/* Of a row of scores. Not a power of two: the rows of a tile would share a set of the first cache. */
static long row(long length) { return up(length) + PANEL; }

long attention_room(long length) { return QUERIES * row(length); }

/* scores[seen] to weights, zero from there to `end`; returns one over their sum */
static float soften(float *scores, long seen, long end, float scale) {
    static const int lanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    long last = (seen - 1) / LANES * LANES;
    ivec hidden;
    memcpy(&hidden, lanes, sizeof hidden);
    hidden = hidden >= (int)(seen - last);
    vec tail = pick(hidden, all(-INFINITY), load(scores + last)), top = tail;
    for (long j = 0; j < last; j += LANES) top = vmax(top, load(scores + j));
    vec highest = all(largest(top));
    vec total = pick(hidden, all(0), vexp((tail - highest) * scale));
    store(scores + last, total);
    for (long j = 0; j < last; j += LANES) {
        vec e = vexp((load(scores + j) - highest) * scale);
        store(scores + j, e);
        total += e;
    }
    for (long j = last + LANES; j < end; j += LANES) store(scores + j, all(0));
    return 1.0f / sum(total);
}

static int all_finite(const float *x, long count) {
    vec s = all(0);
    for (long j = 0; j < count; j += LANES) s += load(x + j) * 0.0f;
    return sum(s) == 0;
}

/* The sum of the first `seen` values under the weights of each row. */
static void mix(long rows, const float *weights, long ld, Head head, long seen, float *out, long ldo) {
    Panels values = {head.values, head.size, PANEL, seen, 0};
    product(rows, weights, ld, values, 0, head.size / PANEL, out, ldo, 0, SET);
}

/* One query against `seen` keys: they are read in the order of memory, in four sums, with the next panel fetched. */
static void score_one(const float *q, Head head, long seen, float *scores) {
    const float *key = head.keys;
    for (long p = 0; p < seen; p += PANEL) {
        vec s[4][VECS] = {0};
        for (long d = 0; d < head.size; d += 4)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++, key += PANEL) {
                __builtin_prefetch(key + head.size * PANEL);
#pragma GCC unroll 4
                for (int v = 0; v < VECS; v++) s[i][v] = madd(all(q[d + i]), load(key + v * LANES), s[i][v]);
            }
        for (int v = 0; v < VECS; v++) store(scores + p + v * LANES, (s[0][v] + s[1][v]) + (s[2][v] + s[3][v]));
    }
}

/* The sum of `seen` values of 64 columns under the weights of one row, in two sums. */
static void mix_one(const float *weights, const float *value, long size, long seen, float share, float *out) {
    vec s[2][64 / LANES] = {0};
    long t = 0;
    for (; t + 1 < seen; t += 2)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, value += size) {
            vec w = all(weights[t + i]);
            for (int j = 0; j < 64; j += 16) __builtin_prefetch(value + 16 * size + j);
#pragma GCC unroll 16
            for (int v = 0; v < 64 / LANES; v++) s[i][v] = madd(w, load(value + v * LANES), s[i][v]);
        }
    for (int v = 0; t < seen && v < 64 / LANES; v++)
        s[0][v] = madd(all(weights[t]), load(value + v * LANES), s[0][v]);
    for (int v = 0; v < 64 / LANES; v++) store(out + v * LANES, (s[0][v] + s[1][v]) * share);
}

static void attend_one(long seen, float *q, Head head, float scale, float *scores) {
    score_one(q, head, seen, scores);
    float share = soften(scores, seen, seen, scale);
    for (long d = 0; d < head.size; d += 64) mix_one(scores, head.values + d, head.size, seen, share, q + d);
}

void attend(long rows, long from, float *q, long ld, Head head, long length, float scale, float *room) {
    const Panels keys = {head.keys, PANEL, head.size * PANEL, head.size, 0};
    long seen = from + rows, stride = row(length);
    if (rows == 1 && head.size % 64 == 0) {
        attend_one(seen, q, head, scale, room);
        return;
    }
    product(rows, q, ld, keys, 0, up(seen) / PANEL, room, stride, 0, SET);
    float shares[QUERIES];
    for (long i = 0; i < rows; i++) shares[i] = soften(room + i * stride, from + i + 1, up(seen), scale);
    mix(rows, room, stride, head, seen, q, ld);
    for (long i = 0; i < rows; i++) {
        /* 0 * NaN is NaN: a later value that overflowed must not show. */
        if (i + 1 < rows && !all_finite(q + i * ld, head.size))
            mix(1, room + i * stride, stride, head, from + i + 1, q + i * ld, ld);
        for (long d = 0; d < head.size; d += LANES) store(q + i * ld + d, load(q + i * ld + d) * shares[i]);
    }
}
