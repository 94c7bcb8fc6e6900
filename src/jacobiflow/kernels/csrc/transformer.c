/* A causal transformer on the CPU in single precision: one call puts a window of positions of each
 * sample through every layer, against a cache of keys and values. Each sample has a window of its own.
 *
 * At small batches an interpreter's step costs more than its arithmetic, and at large ones a matrix
 * library packs the same weights again in every call. Here weights are packed once, a group of rows
 * goes through a whole layer while it is in the cache of a core, and threads meet once a call.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "maps.h"
#include "vector.h"

#define EPS 1e-5f
#define SOLVE_ROWS 16           /* that are solved together where weights are small */
#define SOLVE_WEIGHTS (2 << 20) /* small: so many numbers, 8 MiB */

/* c = bias + a w, or c += it; a[rows, depth], w packed in panels [depth][16] */
static void product(long rows, const float *a, long lda, const float *w, long depth, long width, float *c, long ldc,
                    const float *bias, int add) {
    long panels = up(width) / PANEL, next = depth * PANEL, i = 0;
    if (rows <= 0) return; /* a block of no rows does not exist */
    if (rows < ROWS) {
        if (add)
            block(rows, a, lda, w, PANEL, next, depth, panels, c, ldc, bias, 1);
        else
            block(rows, a, lda, w, PANEL, next, depth, panels, c, ldc, bias, 0);
        return;
    }
    for (long p = 0; p < panels; p++) { /* a panel stays in the first cache while the rows pass */
        const float *b = w + p * next, *start = bias ? bias + p * PANEL : 0;
        float *out = c + p * PANEL;
        for (i = 0; i + ROWS <= rows; i += ROWS) {
            if (add)
                tile(ROWS, 1, a + i * lda, lda, b, PANEL, next, depth, out + i * ldc, ldc, start, 1);
            else
                tile(ROWS, 1, a + i * lda, lda, b, PANEL, next, depth, out + i * ldc, ldc, start, 0);
        }
        if (i < rows) {
            if (add)
                block(rows - i, a + i * lda, lda, b, PANEL, next, depth, 1, out + i * ldc, ldc, start, 1);
            else
                block(rows - i, a + i * lda, lda, b, PANEL, next, depth, 1, out + i * ldc, ldc, start, 0);
        }
    }
}

/* rows of x to mean 0 and variance 1; padding beyond `width` is zero before and after */
static void normalise(long rows, long width, const float *x, float *y, long ld) {
    for (long i = 0; i < rows; i++, x += ld, y += ld) {
        vec s = all(0), q = all(0);
        for (long j = 0; j < ld; j += LANES) s += load(x + j);
        float mean = sum(s) / width;
        for (long j = 0; j < ld; j += LANES) {
            vec d = load(x + j) - mean;
            store(y + j, d);
        }
        for (long j = width; j < ld; j++) y[j] = 0;
        for (long j = 0; j < ld; j += LANES) q += load(y + j) * load(y + j);
        float scale = 1.0f / sqrtf(sum(q) / width + EPS);
        for (long j = 0; j < ld; j += LANES) store(y + j, load(y + j) * scale);
    }
}

/* Weights of one layer, the norms' folded in, each matrix packed for `product`. */
typedef struct {
    const float *qkv, *qkv_bias, *proj, *proj_bias, *up, *up_bias, *down, *down_bias;
} Layer;

typedef struct {
    long length, dim, width, heads, head_dim, hidden, depth, params;
    const float *in, *embed, *out, *out_bias; /* embed: [T, width], the bias of `in` added */
    const Layer *layers;
} Net;

/* The samples of a call. Guided ones have two branches, the informed one first, which read the same x. */
typedef struct {
    long samples, branches;
    float *x; /* [sample][T][dim], `x_row` apart; written to by `jf_solve` alone */
    long x_row;
    const float *condition; /* [branch][sample][width], or null; a stride of 0 shares one */
    long condition_branch, condition_row;
    const float *scale; /* of the attention's logits, [branch][sample] */
    long scale_branch, scale_row;
    const float *blend; /* [T][params]: w of theta + w (theta - null); null with one branch */
    float *k, *v;       /* [layer][sample][branch][head][T][head_dim], padded */
    long layer;         /* stride of a layer; 0 if nothing is kept */
} Rows;

/* Positions whose parameters are wanted, `width` of them from `start` on, or from starts[sample] on. */
typedef struct {
    const int64_t *starts;
    long start, width;
    float *theta; /* [sample][width][params], `theta_row` apart; not written to beyond the last position */
    long theta_row;
} Window;

typedef struct {
    const Net *net;
    const Rows *rows;
    Window window;
    float *scratch;
    long share;         /* scratch of one thread, in floats */
    long most;          /* rows that go through a layer together */
    int threads, split; /* split: threads share the positions of samples, not the samples */
    const float *z;     /* to be solved for x; 0 if parameters are wanted */
    float *slope;
    long z_row, slope_row, stop; /* strides, and the end of the positions to solve */
    int map;                     /* EXP or SHIFT */
    atomic_int arrived, turn, ready; /* ready: 1 go, -1 give up */
} Job;

typedef struct {
    Job *job;
    int index;
} Part;

/* Inputs first .. last - 1 of a sample go through the network; parameters are wanted from input `need` on. */
typedef struct {
    long first, need, last;
} Span;

static Span span(const Job *job, Window window, long sample) {
    long end = job->net->length - 1, need = (window.starts ? window.starts[sample] : window.start) - 1;
    if (need >= end) return (Span){end, end, end};
    long last = need + window.width < end ? need + window.width : end;
    return (Span){job->rows->layer ? need : 0, need, last};
}

/* Rows of the network that a sample takes. */
static long cost(const Job *job, Window window, long sample) {
    Span s = span(job, window, sample);
    return job->rows->branches * (s.last - s.first);
}

static void meet(Job *job) {
    int turn = atomic_load(&job->turn);
    if (atomic_fetch_add(&job->arrived, 1) + 1 == job->threads) {
        atomic_store(&job->arrived, 0);
        atomic_fetch_add(&job->turn, 1);
        return;
    }
    for (int spins = 0; atomic_load(&job->turn) == turn; spins++)
        if (spins > 2000) sched_yield();
}

/* scores of one query against `seen` keys [T][hd], a dot product each */
INLINE void compare(const float *q, const float *keys, long ld, long seen, float *scores) {
    for (long j = 0; j < seen; j++, keys += ld) {
        vec s[4] = {all(0), all(0), all(0), all(0)};
        for (long d = 0; d < ld; d += PANEL)
#pragma GCC unroll 4
            for (int p = 0; p < VECS; p++) s[p] += load(q + d + p * LANES) * load(keys + d + p * LANES);
        scores[j] = sum((s[0] + s[1]) + (s[2] + s[3]));
    }
}

/* scores[seen] to weights that add up to one; zero from there to the end of the panel */
INLINE void soften(float *scores, long seen, float scale) {
    long end = up(seen);
    for (long j = seen; j < end; j++) scores[j] = -INFINITY;
    vec top = load(scores);
    for (long j = LANES; j < end; j += LANES) top = pick(load(scores + j) > top, load(scores + j), top);
    float most = top[0];
    for (int j = 1; j < LANES; j++) most = top[j] > most ? top[j] : most;
    vec total = all(0);
    for (long j = 0; j < end; j += LANES) {
        vec e = vexp((load(scores + j) - most) * scale);
        store(scores + j, e);
        total += e; /* what lies beyond adds 1e-38 */
    }
    vec share = all(1.0f / sum(total));
    for (long j = 0; j < end; j += LANES) store(scores + j, load(scores + j) * share);
    for (long j = seen; j < end; j++) scores[j] = 0;
}

static int all_finite(const float *x, long count) {
    vec s = all(0);
    for (long j = 0; j < count; j += LANES) s += load(x + j) * 0.0f;
    return sum(s) == 0;
}

/* Attention of `rows` queries at positions from, from + 1, ... of one head over keys and values [T][ld].
 * room: ROWS rows of scores, then the keys the other way round if there are many queries. */
static void attend(long rows, long from, const float *q, long ldq, const float *keys, const float *values, long ld,
                   long length, float scale, float *room, float *out, long ldo) {
    long tp = up(length);
    float *turned = room + ROWS * tp;
    const int many = rows > 2;
    for (long j = 0; many && j < from + rows; j++)
        for (long d = 0; d < ld; d++) turned[d * tp + j] = keys[j * ld + d];
    for (long i = 0; i < rows; i += ROWS) {
        long count = rows - i < ROWS ? rows - i : ROWS, seen = from + i + count, wide = up(seen);
        if (many)
            block(count, q + i * ldq, ldq, turned, tp, PANEL, ld, wide / PANEL, room, tp, 0, 0);
        for (long r = 0; r < count; r++) {
            if (!many) compare(q + (i + r) * ldq, keys, ld, from + i + r + 1, room + r * tp);
            soften(room + r * tp, from + i + r + 1, scale);
            for (long j = up(from + i + r + 1); j < wide; j++) room[r * tp + j] = 0;
        }
        block(count, room, tp, values, ld, PANEL, seen, ld / PANEL, out + i * ldo, ldo, 0, 0);
        for (long r = 0; r + 1 < count; r++) /* 0 * NaN is NaN: a later value that overflowed must not show */
            if (!all_finite(out + (i + r) * ldo, ld))
                block(1, room + r * tp, tp, values, ld, PANEL, from + i + r + 1, ld / PANEL, out + (i + r) * ldo, ldo,
                      0, 0);
    }
}

/* Consecutive inputs of one branch of a sample, which are rows at .. at + count - 1 of a group. */
typedef struct {
    long sample, branch, from, count, at;
    long need; /* the first input whose parameters are wanted */
    float scale;
    long place; /* of its keys and values in a layer */
} Run;

/* The inputs of samples n0 .. n1 - 1, or a thread's part of them; returns how many runs there are. */
static long line_up(const Job *job, Window window, long n0, long n1, int part, Run *runs, long *rows) {
    const Net *net = job->net;
    const Rows *given = job->rows;
    long count = 0, each = net->heads * net->length * up(net->head_dim);
    *rows = 0;
    for (long n = n0; n < n1; n++) {
        Span s = span(job, window, n);
        long inputs = s.last - s.first, from = s.first;
        if (job->split) {
            from += inputs * part / job->threads;
            inputs = s.first + inputs * (part + 1) / job->threads - from;
        }
        for (long b = 0; inputs && b < given->branches; b++, *rows += inputs)
            runs[count++] = (Run){n, b, from, inputs, *rows, s.need,
                                  given->scale[b * given->scale_branch + n * given->scale_row],
                                  (n * given->branches + b) * each};
    }
    return count;
}

/* h[at ..] = embedding + condition + x w of the inputs of a run */
static void embed(const Job *job, const Run *run, float *h, long ld) {
    const Net *net = job->net;
    const Rows *given = job->rows;
    const float *condition = given->condition;
    if (condition) condition += run->branch * given->condition_branch + run->sample * given->condition_row;
    h += run->at * ld;
    for (long i = 0; i < run->count; i++) {
        float *row = h + i * ld;
        memcpy(row, net->embed + (run->from + i) * net->width, net->width * sizeof(float));
        for (long j = net->width; j < ld; j++) row[j] = 0;
        for (long j = 0; condition && j < net->width; j++) row[j] += condition[j];
    }
    product(run->count, given->x + run->sample * given->x_row + run->from * net->dim, net->dim, net->in, net->dim,
            net->width, h, ld, 0, 1);
}

/* keys and values of a run, out of big[at ..][q, k, v of all heads], into the cache */
static void keep(const Net *net, const Run *run, const float *big, float *keys, float *values) {
    long hp = up(net->head_dim), mixed = net->heads * hp, each = net->length * hp;
    for (long i = 0; i < run->count; i++)
        for (long head = 0; head < net->heads; head++) {
            const float *k = big + (run->at + i) * 3 * mixed + mixed + head * hp;
            long place = run->place + head * each + (run->from + i) * hp;
            memcpy(keys + place, k, hp * sizeof(float));
            memcpy(values + place, k + mixed, hp * sizeof(float));
        }
}

/* theta of a sample's window from its outputs [at ..][pp]; those of the uninformed branch follow */
static void emit(const Job *job, Window window, const Run *run, const float *outputs, long pp) {
    long params = job->net->params;
    const float *blend = job->rows->blend;
    for (long i = run->need > run->from ? run->need - run->from : 0; i < run->count; i++) {
        const float *own = outputs + (run->at + i) * pp, *null = own + run->count * pp;
        float *theta = window.theta + run->sample * window.theta_row + (run->from + i - run->need) * params;
        if (!blend) {
            memcpy(theta, own, params * sizeof(float));
            continue;
        }
        const float *w = blend + (run->from + i + 1) * params;
        for (long j = 0; j < params; j++) theta[j] = own[j] + w[j] * (own[j] - null[j]);
    }
}

/* The windows of samples n0 .. n1 - 1, or a thread's part of them. */
static void group(Job *job, Window window, long n0, long n1, int part, float *scratch) {
    const Net *net = job->net;
    Run runs[(n1 - n0) * job->rows->branches];
    long rows, count = line_up(job, window, n0, n1, part, runs, &rows);
    long width = net->width, hp = up(net->head_dim), pp = up(net->params);
    long ld = up(width), heads = net->heads, mixed = heads * hp, wide = 3 * mixed, hid = up(net->hidden);
    long most = wide > hid ? wide : hid, each = net->length * hp;
    float *h = scratch, *y = h + rows * ld, *big = y + rows * (ld > mixed ? ld : mixed);
    float *room = big + rows * (most > pp ? most : pp);
    for (long i = 0; i < count; i++) embed(job, runs + i, h, ld);
    for (long l = 0; l < net->depth; l++) {
        const Layer *w = net->layers + l;
        float *keys = job->rows->k + l * job->rows->layer, *values = job->rows->v + l * job->rows->layer;
        normalise(rows, width, h, y, ld);
        product(rows, y, ld, w->qkv, width, wide, big, wide, w->qkv_bias, 0);
        for (long i = 0; i < count; i++) keep(net, runs + i, big, keys, values);
        if (job->split) meet(job);
        for (const Run *run = runs; run < runs + count; run++)
            for (long head = 0; head < heads; head++)
                attend(run->count, run->from, big + run->at * wide + head * hp, wide, keys + run->place + head * each,
                       values + run->place + head * each, hp, net->length, run->scale, room,
                       y + run->at * mixed + head * hp, mixed);
        if (job->split && !job->rows->layer) meet(job); /* the next layer takes the same room */
        product(rows, y, mixed, w->proj, mixed, width, h, ld, w->proj_bias, 1);
        normalise(rows, width, h, y, ld);
        product(rows, y, ld, w->up, width, net->hidden, big, hid, w->up_bias, 0);
        for (long i = 0; i < rows * hid; i += LANES) store(big + i, vgelu(load(big + i)));
        product(rows, big, hid, w->down, net->hidden, width, h, ld, w->down_bias, 1);
    }
    product(rows, h, ld, net->out, width, net->params, big, pp, net->out_bias, 0);
    for (long i = 0; i < count; i += job->rows->branches) emit(job, window, runs + i, big, pp);
}

/* How many rows go through a layer together: enough to use a packed panel well, few enough for the caches. */
static long group_rows(const Net *net) {
    long some = 300000 / (up(net->width) * 8);
    return some < 48 ? 48 : some > 192 ? 192 : some;
}

/* The same where a thread solves `samples` one position after the other: few rows, whose activations, keys and
 * values stay in the nearer caches, as long as the weights, read again for each group, stay in the last one. */
static long solve_rows(const Net *net, long samples, long branches) {
    long weights = net->depth * up(net->width) * (4 * up(net->width) + 2 * up(net->hidden));
    if (weights > SOLVE_WEIGHTS) return group_rows(net);
    long groups = (samples * branches + SOLVE_ROWS - 1) / SOLVE_ROWS;
    return groups > 1 ? (samples + groups - 1) / groups * branches : SOLVE_ROWS;
}

/* The end of the group of samples that begins with n0: as many as fit, but at least one. */
static long group_end(const Job *job, long n0, long end) {
    long rows = cost(job, job->window, n0), n1 = n0 + 1;
    for (; n1 < end && n1 - n0 < job->most; n1++) {
        rows += cost(job, job->window, n1);
        if (rows > job->most) break;
    }
    return n1;
}

/* x = z e^a + b (EXP), or z + b (SHIFT), of one position [dim]; returns the sum of a */
static float invert(int map, long dim, const float *z, const float *theta, float *x) {
    vec total = all(0);
    const int scaled = map == EXP;
    for (long j = 0; j < dim; j += LANES) {
        long here = dim - j < LANES ? dim - j : LANES;
        float raw[LANES] = {0}, shift[LANES] = {0}, from[LANES] = {0}, to[LANES];
        if (scaled) memcpy(raw, theta + j, here * sizeof(float));
        memcpy(shift, theta + (scaled ? dim : 0) + j, here * sizeof(float));
        memcpy(from, z + j, here * sizeof(float));
        vec a = load(raw);
        total += a;
        store(to, scaled ? load(from) * vexp_over(a) + load(shift) : load(from) + load(shift));
        memcpy(x + j, to, here * sizeof(float));
    }
    return sum(total);
}

/* Samples n0 .. n1 - 1, position after position: each as soon as those before it are there. */
static void solve(Job *job, long n0, long n1, float *scratch) {
    const Net *net = job->net;
    const Rows *given = job->rows;
    float *theta = scratch;
    scratch += (n1 - n0) * net->params;
    for (long t = job->window.start; t < job->stop; t++) {
        Window here = {0, t, 1, theta - n0 * net->params, net->params};
        group(job, here, n0, n1, 0, scratch);
        for (long n = n0; n < n1; n++)
            job->slope[n * job->slope_row + t - job->window.start] =
                invert(job->map, net->dim, job->z + n * job->z_row + t * net->dim, theta + (n - n0) * net->params,
                       given->x + n * given->x_row + t * net->dim);
    }
}

static long total(const Job *job) {
    long rows = 0;
    for (long n = 0; n < job->rows->samples; n++) rows += cost(job, job->window, n);
    return rows;
}

/* The samples of a thread: those before which so many shares of all rows stand. */
static void own_samples(const Job *job, int index, long *n0, long *end) {
    long all_rows = total(job), before = 0, n = 0, samples = job->rows->samples;
    for (; n < samples && before * job->threads < all_rows * index; n++) before += cost(job, job->window, n);
    for (*n0 = n; n < samples && before * job->threads < all_rows * (index + 1); n++)
        before += cost(job, job->window, n);
    *end = n;
}

static void *part(void *given) {
    Part *mine = given;
    Job *job = mine->job;
    while (!atomic_load(&job->ready)) sched_yield();
    if (atomic_load(&job->ready) < 0) return 0;
    float *scratch = job->scratch + mine->index * job->share;
    if (job->split) {
        group(job, job->window, 0, job->rows->samples, mine->index, scratch);
        return 0;
    }
    long n0, end;
    own_samples(job, mine->index, &n0, &end);
    for (long n1; n0 < end; n0 = n1) {
        n1 = group_end(job, n0, end);
        if (job->z)
            solve(job, n0, n1, scratch);
        else
            group(job, job->window, n0, n1, 0, scratch);
    }
    return 0;
}

/* Floats that a thread needs for so many rows. */
static long share(const Net *net, long rows) {
    long ld = up(net->width), mixed = net->heads * up(net->head_dim), pp = up(net->params);
    long big = 3 * mixed > up(net->hidden) ? 3 * mixed : up(net->hidden);
    if (pp > big) big = pp;
    return rows * (ld + (ld > mixed ? ld : mixed) + big) + (ROWS + up(net->head_dim)) * up(net->length);
}

/* How many threads, and what they need. */
static void plan(Job *job, int threads) {
    long samples = job->rows->samples, branches = job->rows->branches, rows = total(job), each = 0;
    job->split = !job->z && samples < threads && rows >= 16 * threads;
    for (long n = 0; n < samples; n++) {
        long own = cost(job, job->window, n);
        each = job->split ? each + (own + threads - 1) / threads + branches : own > each ? own : each;
    }
    if (!job->split) {
        long least = job->z ? 1 : 4; /* a thread for less than four rows costs more than it brings */
        if (threads > samples) threads = (int)samples;
        if (threads > rows / least) threads = (int)(rows / least);
    }
    job->threads = threads < 1 ? 1 : threads;
    long own_samples = (samples + job->threads - 1) / job->threads;
    job->most = job->z ? solve_rows(job->net, own_samples, branches) : group_rows(job->net);
    if (!job->split) {
        if (each < job->most) each = job->most;
        if (each > rows) each = rows;
    }
    job->share = share(job->net, each) + (job->z ? each * job->net->params : 0);
}

/* All threads of a job; 1 if they could not be had, and nothing was done. */
static int run(Job *job) {
    pthread_t others[job->threads];
    Part parts[job->threads];
    int running = 1;
    for (int i = 0; i < job->threads; i++) parts[i] = (Part){job, i};
    while (running < job->threads && !pthread_create(others + running, 0, part, parts + running)) running++;
    atomic_store(&job->ready, running == job->threads ? 1 : -1);
    part(parts);
    for (int i = 1; i < running; i++) pthread_join(others[i], 0);
    return running < job->threads;
}

static Job params_job(const Net *net, const Rows *rows, const int64_t *starts, long start, long width, int threads) {
    Job job = {.net = net, .rows = rows, .window = {.starts = starts, .start = start, .width = width}};
    plan(&job, threads);
    return job;
}

/* Floats that `jf_params` needs to work in. */
long jf_params_scratch(const Net *net, const Rows *rows, const int64_t *starts, long start, long width, int threads) {
    Job job = params_job(net, rows, starts, start, width, threads);
    return job.threads * job.share;
}

/* Parameters of a window of positions per sample, theta[sample][width][params], from x[sample][T][dim]. Keys and
 * values of the inputs before start - 1 are there, unless nothing is kept; those of the inputs that are read are
 * written. Positions beyond the last are left as they are. 1 if the threads could not be had: nothing was done. */
int jf_params(const Net *net, const Rows *rows, const int64_t *starts, long start, long width, float *theta,
              float *scratch, int threads) {
    Job job = params_job(net, rows, starts, start, width, threads);
    job.window.theta = theta, job.window.theta_row = width * net->params, job.scratch = scratch;
    return run(&job);
}

static Job solve_job(const Net *net, const Rows *rows, long start, long stop, const float *z, int threads) {
    Job job = {.net = net, .rows = rows, .window = {.start = start, .width = 1}, .stop = stop, .z = z};
    plan(&job, threads);
    return job;
}

/* Floats that `jf_solve` needs to work in. */
long jf_solve_scratch(const Net *net, const Rows *rows, long start, long stop, const float *z, int threads) {
    Job job = solve_job(net, rows, start, stop, z, threads);
    return job.threads * job.share;
}

/* Positions start .. stop - 1 >= 1 of x, one after the other, and the sums of their log |dx/dz|
 * [sample][stop - start]; keys and values of the inputs before start - 1 are there. 1 as above. */
int jf_solve(const Net *net, const Rows *rows, long start, long stop, const float *z, long z_row, float *slope,
             long slope_row, int map, float *scratch, int threads) {
    Job job = solve_job(net, rows, start, stop, z, threads);
    job.z_row = z_row, job.slope = slope, job.slope_row = slope_row, job.map = map, job.scratch = scratch;
    return run(&job);
}
