/* A masked network on the CPU in single precision: one call recomputes the hidden units that a stretch of
 * positions reaches, in every layer, and the parameters that depend on them.
 *
 * Units are sorted by degree, so a panel of 16 of them sees the first inputs only: its product ends
 * there, and half of a dense network's arithmetic is never done. A group of rows goes through all
 * layers at once; threads have rows of their own and never meet. Many rows that are solved position
 * after position go another way: see bands.c.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "masked.h"

#define GROUP 96 /* rows that pass a panel together */
#define BANDS (LANES + 1) /* rows from which bands are the faster way to solve */

/* The sums of one panel of units for a group of rows, over its first `depth` inputs: as positions become known one
 * by one, only what is new is added. */
typedef struct {
    long panel, depth;
    float sums[GROUP * PANEL];
} Partial;

typedef struct {
    const Masked *net;
    long n, first, upto, lo, hi;
    const float *x;
    long x_row;
    float *const *nodes, *const *active; /* of stage i: [n][out, padded] */
    const float *const *context;         /* of stage i: [n][out, padded], or null */
    long shared;                         /* whether one row of context is for all */
    float *theta;                        /* [n][hi - lo][params] */
    int threads;
    const Solve *solve; /* one position after the other; or null */
    int bands;          /* whether rows are solved side by side */
    Partial *partial; /* of each stage, while positions are solved one after the other; or null */
} Work;

typedef struct {
    Work *work;
    int index;
} Share;

/* 16 units of one row, from the sum of their inputs on; columns c0 .. c1 - 1 are kept */
INLINE void finish(const int kind, const float *sums, const float *context, const float *skip, const float *factor,
                   const float *offset, float *node, float *active, long c0, long c1) {
    float raw[PANEL], done[PANEL];
    for (long j = c0 / LANES * LANES; j < c1; j += LANES) {
        vec v = load(sums + j);
        if (context) v += load(context + j);
        if (skip) v += load(skip + j);
        store(raw + j, v);
        if (factor) v = v * load(factor + j) + load(offset + j);
        if (active) store(done + j, activate(kind, v));
    }
    memcpy(node + c0, raw + c0, (c1 - c0) * sizeof(float));
    if (active) memcpy(active + c0, done + c0, (c1 - c0) * sizeof(float));
}

INLINE void finish_rows(const int kind, long rows, const float *sums, const float *context, long ld_context,
                        const float *skip, long ld_skip, const float *factor, const float *offset, float *node,
                        float *active, long ld, long c0, long c1) {
    for (long i = 0; i < rows; i++)
        finish(kind, sums + i * PANEL, context ? context + i * ld_context : 0, skip ? skip + i * ld_skip : 0, factor,
               offset, node + i * ld, active ? active + i * ld : 0, c0, c1);
}

/* sums[rows][16] = bias + in b over `depth` inputs; or += with `add` */
INLINE void panel_rows(long rows, const float *in, long ld_in, const float *b, long depth, float *sums,
                       const float *bias, const int add) {
    long i = 0;
    for (; i + ROWS <= rows; i += ROWS)
        tile(ROWS, 1, in + i * ld_in, ld_in, b, PANEL, 0, depth, sums + i * PANEL, PANEL, bias, add);
    if (i < rows) block(rows - i, in + i * ld_in, ld_in, b, PANEL, 0, depth, 1, sums + i * PANEL, PANEL, bias, add);
}

/* Units from .. to - 1 of one stage for `rows` rows; `seen` inputs are known. node's column 0 is unit `base`. */
static void stage_rows(const Stage *w, int kind, long rows, const float *in, long ld_in, long seen, long from, long to,
                       const float *context, long ld_context, const float *skip, long ld_skip, float *node,
                       float *active, long ld, long base, Partial *partial) {
    float own[GROUP * PANEL], *sums = partial ? partial->sums : own;
    for (long p = from / PANEL; p * PANEL < to; p++) {
        long depth = w->limits[p] < seen ? w->limits[p] : seen, at = p * PANEL;
        long done = partial && partial->panel == p ? partial->depth : 0;
        const float *b = w->weight + at * w->in;
        if (done)
            panel_rows(rows, in + done, ld_in, b + done * PANEL, depth - done, sums, 0, 1);
        else
            panel_rows(rows, in, ld_in, b, depth, sums, w->bias + at, 0);
        if (partial) partial->panel = p, partial->depth = depth;
        long c0 = from > at ? from - at : 0, c1 = to < at + PANEL ? to - at : PANEL;
        const float *f = w->factor ? w->factor + at : 0, *o = w->offset ? w->offset + at : 0;
        const float *extra = context ? context + at : 0, *carried = skip ? skip + at : 0;
        float *unit = node + at - base, *lit = active ? active + at - base : 0;
#define CASE(KIND)                                                                                               \
    case KIND:                                                                                                   \
        finish_rows(KIND, rows, sums, extra, ld_context, carried, ld_skip, f, o, unit, lit, ld, c0, c1);         \
        break;
        switch (kind) {
            CASE(RELU) CASE(ELU) CASE(GELU) CASE(SILU) CASE(TANH) CASE(NONE)
        }
    }
}

static void rows_of(const Work *work, long r0, long r1) {
    const Masked *net = work->net;
    long rows = r1 - r0;
    for (long i = 0; i <= net->depth; i++) {
        const Stage *w = net->stages + i;
        const Stage *before = w->source ? net->stages + w->source - 1 : 0;
        const float *in = before ? (w->activated ? work->active : work->nodes)[w->source - 1] : work->x;
        long ld_in = before ? up(before->out) : work->x_row;
        if (i == net->depth) {
            long wide = (work->hi - work->lo) * net->params, seen = before ? before->ends[work->hi - 1] : work->hi - 1;
            stage_rows(w, NONE, rows, in + r0 * ld_in, ld_in, seen, work->lo * net->params, work->hi * net->params, 0,
                       0, 0, 0, work->theta + r0 * wide, 0, wide, work->lo * net->params,
                       work->partial ? work->partial + i : 0);
            continue;
        }
        if (work->upto <= work->first && work->first) continue; /* all units are known */
        long from = work->first ? w->ends[work->first] : 0, to = w->ends[work->upto], ld = up(w->out);
        long seen = before ? before->ends[work->upto] : work->upto;
        if (from >= to) continue;
        const Stage *other = w->skip > 0 ? net->stages + w->skip - 1 : 0;
        const float *skip = w->skip < 0 ? 0 : other ? work->nodes[w->skip - 1] + r0 * up(other->out) : 0;
        stage_rows(w, (int)net->activation, rows, in + r0 * ld_in, ld_in, seen, from, to,
                   work->context[i] ? work->context[i] + (work->shared ? 0 : r0 * ld) : 0, work->shared ? 0 : ld,
                   skip, other ? up(other->out) : 0,
                   work->nodes[i] + r0 * ld, work->active[i] + r0 * ld, ld, 0, work->partial ? work->partial + i : 0);
    }
}

/* Position t of some rows, from theta [rows][params]. */
static void place_rows(const Solve *solve, long r0, long r1, long t, const float *theta, long params) {
    float each[params * LANES];
    for (long i = r0; i < r1; i += LANES) {
        long here = r1 - i < LANES ? r1 - i : LANES;
        float z[LANES] = {0};
        for (long j = 0; j < LANES; j++)
            for (long p = 0; p < params; p++) each[p * LANES + j] = j < here ? theta[(i - r0 + j) * params + p] : 0;
        for (long j = 0; j < here; j++) z[j] = solve->z[(i + j) * solve->z_row + t];
        vec x, slope;
        map_inverse(&solve->map, each, LANES, load(z), &x, &slope);
        for (long j = 0; j < here; j++) {
            solve->x[(i + j) * solve->x_row + t] = x[j];
            solve->slope[(i + j) * solve->slope_row + t] = slope[j];
        }
    }
}

/* Positions lo .. hi - 1 of some rows, one after the other. */
static void solve_rows(const Work *work, long r0, long r1) {
    long params = work->net->params;
    float theta[params * GROUP];
    Partial partial[work->net->depth + 1];
    for (long i = 0; i <= work->net->depth; i++) partial[i].panel = -1;
    Work one = *work;
    one.theta = theta - params * r0, one.partial = partial;
    for (long t = work->lo; t < work->hi; t++) {
        one.first = t > work->lo ? t - 1 : work->first, one.upto = t, one.lo = t, one.hi = t + 1;
        rows_of(&one, r0, r1);
        place_rows(work->solve, r0, r1, t, theta, params);
    }
}

static void *share(void *given) {
    Share *mine = given;
    Work *work = mine->work;
    long r = work->n * mine->index / work->threads, end = work->n * (mine->index + 1) / work->threads;
    if (work->bands) {
        long step = bands_rows(work->net, end - r);
        float *scratch = malloc(bands_scratch(work->net, step) * sizeof(float));
        for (; scratch && r < end; r += step)
            bands_solve(work->net, work->solve, r, r + step < end ? r + step : end, work->lo, work->hi, work->context,
                        work->shared, scratch);
        free(scratch);
    }
    for (; r < end; r += GROUP) (work->solve ? solve_rows : rows_of)(work, r, r + GROUP < end ? r + GROUP : end);
    return 0;
}

static void run(Work *work, int threads) {
    const Masked *net = work->net;
    long arithmetic = 0; /* a thread costs about as much as a million products */
    for (long i = 0; i <= net->depth; i++) arithmetic += net->stages[i].in * net->stages[i].out / 2;
    long from = work->first < work->lo ? work->first : work->lo;
    arithmetic = arithmetic * (work->hi - from) / net->length * work->n;
    if (threads > 1 + arithmetic / 1000000) threads = (int)(1 + arithmetic / 1000000);
    if (threads > work->n) threads = (int)work->n;
    work->threads = threads < 1 ? 1 : threads;
    pthread_t others[work->threads];
    Share shares[work->threads];
    int running = 1;
    for (int i = 0; i < work->threads; i++) shares[i] = (Share){work, i};
    while (running < work->threads && !pthread_create(others + running, 0, share, shares + running)) running++;
    share(shares);
    for (int i = running; i < work->threads; i++) share(shares + i); /* threads that could not be had */
    for (int i = 1; i < running; i++) pthread_join(others[i], 0);
}

/* Units that see positions first .. upto - 1 and none beyond, then parameters of positions lo .. hi - 1. */
void jf_masked(const Masked *net, long n, long first, long upto, long lo, long hi, const float *x, long x_row,
               float *const *nodes, float *const *active, const float *const *context, long shared,
               float *theta, int threads) {
    Work work = {net, n, first, upto, lo, hi, x, x_row, nodes, active, context, shared, theta, 1, 0, 0, 0};
    run(&work, threads);
}

/* x [n][length] of positions lo .. hi - 1, one after the other, and log |dx/dz|.
 * Returns whether nodes and active hold the units. */
int jf_masked_solve(const Masked *net, long n, long first, long lo, long hi, float *x, long x_row, const float *z,
                    long z_row, float *slope, long slope_row, float *const *nodes, float *const *active,
                    const float *const *context, long shared, int kind, const float *numbers, int threads) {
    Solve solve = {{kind, numbers}, z, z_row, x, slope, x_row, slope_row};
    int bands = n >= BANDS && hi - lo > 1;
    Work work = {net, n, first, lo, lo, hi, x, x_row, nodes, active, context, shared, 0, 1, &solve, bands, 0};
    run(&work, threads);
    return !bands;
}
