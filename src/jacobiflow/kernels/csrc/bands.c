/* A masked network solved position after position, for rows that lie side by side in the lanes of vectors.
 *
 * A position brings one or two new units to each layer. A unit is a sum over what it sees, weight by weight, for a
 * whole band of rows at a time: no product is wasted on units that are not due, and what a unit was computed from is
 * never looked at again. The sums are taken in the order of masked.c, so a row's answer does not depend on which of
 * the two took it.
 */
#include "masked.h"

#define WIDEST 6       /* vectors of a band: two units of them fill the registers of AVX2 */
#define BUDGET 98304   /* numbers of a band that stay in a core's second cache */

/* Whether any stage reads a node (before or after its activation). */
static int used(const Masked *net, long node, int activated) {
    for (long i = 0; i <= net->depth; i++) {
        const Stage *w = net->stages + i;
        if ((w->source == node && w->activated == activated) || (w->skip == node && !activated)) return 1;
    }
    return 0;
}

static long numbers(const Masked *net) {
    long total = net->length + net->params;
    for (long i = 0; i < net->depth; i++) total += net->stages[i].out * (used(net, i + 1, 0) + used(net, i + 1, 1));
    return total;
}

long bands_rows(const Masked *net, long rows) {
    long most = BUDGET / LANES / numbers(net);
    most = most < 1 ? 1 : most > WIDEST ? WIDEST : most;
    long count = (rows + most * LANES - 1) / (most * LANES);
    return ((rows + count - 1) / count + LANES - 1) / LANES * LANES;
}

long bands_scratch(const Masked *net, long rows) { return numbers(net) * rows; }

/* sums += weights of one or two neighbouring units times their inputs */
INLINE void dots(const int units, const int vecs, const float *in, const float *weight, long depth,
                 vec sums[2][WIDEST]) {
    vec s[2][WIDEST];
#pragma GCC unroll 6
    for (int v = 0; v < vecs; v++) s[0][v] = sums[0][v], s[1][v] = sums[1][v];
    for (long k = 0; k < depth; k++) {
        const float *x = in + k * vecs * LANES, *w = weight + k * PANEL;
        vec one = all(w[0]), two = units > 1 ? all(w[1]) : one;
#pragma GCC unroll 6
        for (int v = 0; v < vecs; v++) {
            vec here = load(x + v * LANES);
            s[0][v] = madd(one, here, s[0][v]);
            if (units > 1) s[1][v] = madd(two, here, s[1][v]);
        }
    }
#pragma GCC unroll 6
    for (int v = 0; v < vecs; v++) sums[0][v] = s[0][v], sums[1][v] = s[1][v];
}

static void light(long kind, long n, const float *from, float *to) {
#define CASE(KIND)                                                                     \
    case KIND:                                                                         \
        for (long i = 0; i < n; i += LANES) store(to + i, activate(KIND, load(from + i))); \
        break;
    switch (kind) {
        CASE(RELU) CASE(ELU) CASE(GELU) CASE(SILU) CASE(TANH) CASE(NONE)
    }
#undef CASE
}

typedef struct {
    const Masked *net;
    const Solve *solve;
    long r0, rows, wide;    /* the first row; how many; how many there is room for */
    float *x, *theta;       /* [length][wide], and [params][wide] of one position */
    float **raw, **lit;     /* of stage i: [units][wide], before and after activation; null where nobody reads it */
    const float *const *context;
    long shared;
} Band;

/* One unit of stage i, from the sum of its inputs on. */
static void finish(const Band *b, long i, long unit, const vec *sums) {
    const Stage *w = b->net->stages + i;
    long at = unit * b->wide;
    const float *skip = w->skip > 0 ? b->raw[w->skip - 1] + at : 0, *context = b->context[i];
    float extra[WIDEST * LANES] = {0}, done[WIDEST * LANES];
    if (context)
        for (long j = 0; j < b->rows; j++) extra[j] = context[unit + (b->shared ? 0 : (b->r0 + j) * up(w->out))];
    for (long j = 0; j < b->wide; j += LANES) {
        vec here = sums[j / LANES];
        if (context) here += load(extra + j);
        if (skip) here += load(skip + j);
        if (b->raw[i]) store(b->raw[i] + at + j, here);
        if (w->factor) here = here * w->factor[unit] + w->offset[unit];
        store(done + j, here);
    }
    if (b->lit[i]) light(b->net->activation, b->wide, done, b->lit[i] + at);
}

/* Position t, from its parameters. */
static void place(const Band *b, long t) {
    const Solve *solve = b->solve;
    float z[WIDEST * LANES] = {0}, slope[WIDEST * LANES], *x = b->x + t * b->wide;
    for (long j = 0; j < b->rows; j++) z[j] = solve->z[(b->r0 + j) * solve->z_row + t];
    for (long j = 0; j < b->wide; j += LANES) {
        vec there, log;
        map_inverse(&solve->map, b->theta + j, b->wide, load(z + j), &there, &log);
        store(x + j, there), store(slope + j, log);
    }
    for (long j = 0; j < b->rows; j++) {
        solve->x[(b->r0 + j) * solve->x_row + t] = x[j];
        solve->slope[(b->r0 + j) * solve->slope_row + t] = slope[j];
    }
}

/* What a position brings to stage i: the units that see all before it and nothing else, or its parameters. */
INLINE void step(const int vecs, const Band *b, long i, long t) {
    const Stage *stages = b->net->stages, *w = stages + i, *before = w->source ? stages + w->source - 1 : 0;
    const float *in = before ? (w->activated ? b->lit : b->raw)[w->source - 1] : b->x;
    long params = b->net->params;
    int head = i == b->net->depth;
    long from = head ? params * t : t ? w->ends[t - 1] : 0, to = head ? params * (t + 1) : w->ends[t];
    long seen = before ? before->ends[t] : t;
    for (long u = from, units; u < to; u += units) {
        units = u + 1 < to && (u + 1) % PANEL ? 2 : 1;
        const float *weight = w->weight + u / PANEL * PANEL * w->in + u % PANEL;
        vec s[2][WIDEST];
        for (int v = 0; v < vecs; v++) s[0][v] = all(w->bias[u]), s[1][v] = all(w->bias[u + units - 1]);
        if (units > 1)
            dots(2, vecs, in, weight, seen, s);
        else
            dots(1, vecs, in, weight, seen, s);
        for (long k = 0; k < units; k++)
            if (head)
                for (int v = 0; v < vecs; v++) store(b->theta + (u - from + k) * b->wide + v * LANES, s[k][v]);
            else
                finish(b, i, u + k, s[k]);
    }
}

INLINE void solve_band(const int vecs, const Band *b, long lo, long hi) {
    for (long t = 0; t < hi; t++) {
        for (long i = 0; i < b->net->depth + (t >= lo); i++) step(vecs, b, i, t);
        if (t >= lo) place(b, t);
    }
}

void bands_solve(const Masked *net, const Solve *solve, long r0, long r1, long lo, long hi,
                 const float *const *context, long shared, float *scratch) {
    long rows = r1 - r0, vecs = (rows + LANES - 1) / LANES, wide = vecs * LANES;
    float *raw[net->depth + 1], *lit[net->depth + 1], *x = scratch, *theta = x + net->length * wide;
    scratch = theta + net->params * wide;
    for (long i = 0; i < net->depth; i++) {
        long size = net->stages[i].out * wide;
        raw[i] = used(net, i + 1, 0) ? scratch : 0, scratch += raw[i] ? size : 0;
        lit[i] = used(net, i + 1, 1) ? scratch : 0, scratch += lit[i] ? size : 0;
    }
    for (long t = 0; t < lo; t++)
        for (long j = 0; j < wide; j++) x[t * wide + j] = j < rows ? solve->x[(r0 + j) * solve->x_row + t] : 0;
    Band b = {net, solve, r0, rows, wide, x, theta, raw, lit, context, shared};
#define CASE(VECS_) \
    case VECS_: solve_band(VECS_, &b, lo, hi); break;
    switch (vecs) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}
