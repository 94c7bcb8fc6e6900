/* A masked network on the CPU in single precision: one call recomputes the hidden units that a stretch of
 * positions reaches, in every layer, and the parameters that depend on them.
 *
 * Units are sorted by degree, so a panel of 16 of them sees the first inputs only: its product ends
 * there, and half of a dense network's arithmetic is never done. A group of rows goes through all
 * layers at once; threads have rows of their own and never meet. Each row may have its own first
 * position: panels that none of a tile's rows needs are left out, and a row keeps only the units of its
 * own window, because those beyond are functions of guesses, which may overflow. Many rows that are
 * solved position after position go another way: see bands.c.
 */
#include <pthread.h>
#include <stdint.h>
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
    long n;
    long stored;                         /* inputs below it have their units in `nodes` and `active` */
    long lo, hi;                         /* positions from the first of any row to the last, hi - 1 */
    const int64_t *starts;               /* the first position of each row; null: lo for all */
    long width;                          /* positions of a row */
    const float *x;
    long x_row;
    float *const *nodes, *const *active; /* of stage i: [n][out, padded] */
    const float *const *context;         /* of stage i: [n][out, padded], or null */
    long shared;                         /* whether one row of context is for all */
    float *theta;                        /* [n][width][params] */
    int threads;
    const Solve *solve; /* one position after the other; or null */
    int bands;          /* whether rows are solved side by side */
    Partial *partial;   /* of each stage, while positions are solved one after the other; or null */
} Work;

/* Units from .. to - 1: those of a stage that a row computes. */
typedef struct {
    long from, to;
} Span;

/* One stage for a group of rows. */
typedef struct {
    const Stage *stage;
    long rows;
    const float *in, *context, *skip; /* of the first row; the last two may be null */
    long ld_in, ld_context, ld_skip;
    long seen;            /* inputs that are known */
    float *node, *active; /* of the first row; active may be null */
    long ld;
    int packed;           /* whether node's column 0 is the row's first unit, not unit 0 */
    Span all;             /* from the first unit of any row to the last */
    const Span *each;     /* of each row; null: `all` */
    Partial *partial;     /* or null */
} Pass;

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

/* Columns of panel `at` that a row keeps: c0 .. c1 - 1. */
INLINE Span columns(Span span, long at) {
    return (Span){span.from > at ? span.from - at : 0, span.to < at + PANEL ? span.to - at : PANEL};
}

/* What becomes of the sums of a panel; `ragged`: rows have units of their own */
INLINE void finish_rows(const int kind, const int ragged, const Pass *s, long at, const float *sums) {
    const Stage *w = s->stage;
    const Span *each = s->each;
    const long rows = s->rows, ld = s->ld, ld_context = s->ld_context, ld_skip = s->ld_skip;
    const long first = s->packed ? s->all.from : 0; /* the unit in node's column 0 */
    const float *factor = w->factor ? w->factor + at : 0, *offset = w->offset ? w->offset + at : 0;
    const float *context = s->context ? s->context + at : 0, *skip = s->skip ? s->skip + at : 0;
    float *node = s->node + at - first, *active = s->active ? s->active + at : 0;
    Span keep = columns(s->all, at);
    for (long i = 0; i < rows; i++) {
        if (ragged) keep = columns(each[i], at);
        if (ragged && keep.from >= keep.to) continue;
        finish(kind, sums + i * PANEL, context ? context + i * ld_context : 0, skip ? skip + i * ld_skip : 0, factor,
               offset, node + i * ld + (ragged && first ? first - each[i].from : 0), active ? active + i * ld : 0,
               keep.from, keep.to);
    }
}

/* Whether any of rows i .. i + count - 1 keeps a column of panel `at`. */
INLINE int needed(const Span *each, long i, long count, long at) {
    for (long j = i; j < i + count; j++)
        if (each[j].from < at + PANEL && each[j].to > at) return 1;
    return 0;
}

/* sums[rows][16] = bias + in b over inputs k0 .. k1 - 1 of panel `at`; or += with `add` */
INLINE void panel_rows(const int ragged, const Pass *s, long at, long k0, long k1, float *sums, const float *bias,
                       const int add) {
    const float *b = s->stage->weight + at * s->stage->in + k0 * PANEL, *in = s->in + k0;
    const long rows = s->rows, ld_in = s->ld_in;
    long i = 0;
    for (; i + ROWS <= rows; i += ROWS)
        if (!ragged || needed(s->each, i, ROWS, at))
            tile(ROWS, 1, in + i * ld_in, ld_in, b, PANEL, 0, k1 - k0, sums + i * PANEL, PANEL, bias, add);
    if (i < rows && (!ragged || needed(s->each, i, rows - i, at)))
        block(rows - i, in + i * ld_in, ld_in, b, PANEL, 0, k1 - k0, 1, sums + i * PANEL, PANEL, bias, add);
}

INLINE void stage_rows(const int ragged, const int kind, const Pass *s) {
    Partial *partial = s->partial;
    float own[GROUP * PANEL], *sums = partial ? partial->sums : own;
    for (long p = s->all.from / PANEL; p * PANEL < s->all.to; p++) {
        long limit = s->stage->limits[p], depth = limit < s->seen ? limit : s->seen, at = p * PANEL;
        long done = partial && partial->panel == p ? partial->depth : 0;
        if (done)
            panel_rows(ragged, s, at, done, depth, sums, 0, 1);
        else
            panel_rows(ragged, s, at, 0, depth, sums, s->stage->bias + at, 0);
        if (partial) partial->panel = p, partial->depth = depth;
#define CASE(KIND, NAME) \
    case KIND: finish_rows(KIND, ragged, s, at, sums); break;
        switch (kind) { ACTIVATIONS(CASE) }
#undef CASE
    }
}

/* Two copies: rows that compute the same units are the common case, and need no look at each of them. */
static void even_rows(int kind, const Pass *s) { stage_rows(0, kind, s); }
static void ragged_rows(int kind, const Pass *s) { stage_rows(1, kind, s); }

/* The units of a row that starts at position `start`, or its parameters where `ends` is null. */
static Span span_of(const Work *work, const long *ends, long start) {
    long length = work->net->length, params = work->net->params;
    long stop = start + work->width < length ? start + work->width : length;
    if (!ends) return (Span){start * params, stop * params};
    long first = start - 1 < work->stored ? start - 1 : work->stored; /* units of degree 0 come with the first */
    return (Span){first > 0 ? ends[first] : 0, ends[stop - 1]};
}

/* What the rows of a pass compute, from row r0 on; `each` has room for it. */
static void spans_of(const Work *work, const long *ends, long r0, Pass *pass, Span *each) {
    if (!work->starts) {
        pass->all = span_of(work, ends, work->lo);
        return;
    }
    for (long i = 0; i < pass->rows; i++) {
        each[i] = span_of(work, ends, work->starts[r0 + i]);
        if (i == 0 || each[i].from < pass->all.from) pass->all.from = each[i].from;
        if (i == 0 || each[i].to > pass->all.to) pass->all.to = each[i].to;
    }
    pass->each = each;
}

static void rows_of(const Work *work, long r0, long r1) {
    const Masked *net = work->net;
    Span each[GROUP];
    for (long i = 0; i <= net->depth; i++) {
        const Stage *w = net->stages + i;
        const Stage *before = w->source ? net->stages + w->source - 1 : 0;
        const float *in = before ? (w->activated ? work->active : work->nodes)[w->source - 1] : work->x;
        int head = i == net->depth;
        Pass pass = {.stage = w, .rows = r1 - r0, .partial = work->partial ? work->partial + i : 0};
        pass.ld_in = before ? up(before->out) : work->x_row;
        pass.in = in + r0 * pass.ld_in;
        pass.seen = before ? before->ends[work->hi - 1] : work->hi - 1;
        pass.ld = head ? work->width * net->params : up(w->out);
        spans_of(work, head ? 0 : w->ends, r0, &pass, each);
        if (head) {
            pass.node = work->theta + r0 * pass.ld, pass.packed = 1;
        } else {
            pass.node = work->nodes[i] + r0 * pass.ld, pass.active = work->active[i] + r0 * pass.ld;
            pass.ld_context = work->shared ? 0 : pass.ld;
            if (work->context[i]) pass.context = work->context[i] + r0 * pass.ld_context;
        }
        if (w->skip > 0) {
            pass.ld_skip = up(net->stages[w->skip - 1].out);
            pass.skip = work->nodes[w->skip - 1] + r0 * pass.ld_skip;
        }
        (pass.each ? ragged_rows : even_rows)(head ? NONE : (int)net->activation, &pass);
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
    one.theta = theta - params * r0, one.partial = partial, one.width = 1;
    for (long t = work->lo; t < work->hi; t++) {
        one.lo = t, one.hi = t + 1, one.stored = t > work->lo ? t - 1 : work->stored;
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
    long from = work->stored < work->lo ? work->stored : work->lo;
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

/* Parameters theta [n][width][params] of each row's positions from its start on, and the hidden units that they need:
 * of each row those that see its inputs start - 1 .. start + width - 2, or inputs from `stored` on, if that is less.
 * starts: of each row if `each`, else *starts of all. Nothing is written for positions beyond the last. */
void jf_masked(const Masked *net, long n, long stored, const int64_t *starts, long each, long width, const float *x,
               long x_row, float *const *nodes, float *const *active, const float *const *context, long shared,
               float *theta, int threads) {
    long first = *starts, last = *starts;
    for (long i = 0; each && i < n; i++) {
        first = first < starts[i] ? first : starts[i];
        last = last > starts[i] ? last : starts[i];
    }
    Work work = {.net = net, .n = n, .stored = stored, .lo = first, .starts = each ? starts : 0, .width = width,
                 .x = x, .x_row = x_row, .nodes = nodes, .active = active, .context = context, .shared = shared,
                 .theta = theta};
    work.hi = last + width < net->length ? last + width : net->length;
    run(&work, threads);
}

/* x [n][length] of positions lo .. hi - 1, one after the other, and log |dx/dz|.
 * Returns whether nodes and active hold the units. */
int jf_masked_solve(const Masked *net, long n, long stored, long lo, long hi, float *x, long x_row, const float *z,
                    long z_row, float *slope, long slope_row, float *const *nodes, float *const *active,
                    const float *const *context, long shared, int kind, const float *numbers, int threads) {
    Solve solve = {{kind, numbers}, z, z_row, x, slope, x_row, slope_row};
    Work work = {.net = net, .n = n, .stored = stored, .lo = lo, .hi = hi, .x = x, .x_row = x_row, .nodes = nodes,
                 .active = active, .context = context, .shared = shared, .solve = &solve,
                 .bands = n >= BANDS && hi - lo > 1};
    run(&work, threads);
    return !work.bands;
}

/* Names of the activations in the order of their codes. */
const char *jf_activations(void) { return ACTIVATIONS(ACTIVATION_NAME); }
