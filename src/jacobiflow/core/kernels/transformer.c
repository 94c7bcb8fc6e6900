/* A causal transformer on the CPU in single precision: one call puts a stretch of positions of all
 * samples through every layer, against a cache of keys and values.
 *
 * At small batches an interpreter's step costs more than its arithmetic, and at large ones a matrix
 * library packs the same weights again in every call. Here weights are packed once, a group of rows
 * goes through a whole layer while it is in the cache of a core, and threads meet once a call.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "vector.h"

#define EPS 1e-5f

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

/* Inputs from `first` on go in, parameters from `need` on come out: theta[n][.][params], rows apart. */
typedef struct {
    long first, need;
    float *theta;
    long theta_row;
} Stretch;

typedef struct {
    const Net *net;
    long n, last; /* samples, and the end of the inputs */
    Stretch stretch;
    const float *condition;
    float *x; /* written to by `solve` alone */
    long x_row, condition_row; /* strides; condition_row is 0 if all samples share one */
    float *k, *v;              /* [layer][n][head][T][head_dim], padded */
    long layer;                /* stride of a layer; 0 if nothing is kept */
    float scale;
    float *scratch;
    long share;     /* scratch of one thread, in floats */
    int threads, split; /* split: threads share the rows of samples, not the samples */
    const float *z; /* to be solved for x; 0 if parameters are wanted */
    float *slope;
    long z_row, slope_row, solved; /* strides, and the first position to solve */
    atomic_int arrived, turn, ready; /* ready: 1 go, -1 give up */
} Job;

typedef struct {
    Job *job;
    int index;
} Part;

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
    }
}

/* Samples n0 .. n1 - 1, their inputs r0 .. r1 - 1 (counted from the first position of the stretch). */
static void group(Job *job, Stretch here, long n0, long n1, long r0, long r1, float *scratch) {
    const Net *net = job->net;
    long s = r1 - r0, rows = (n1 - n0) * s, width = net->width, hp = up(net->head_dim);
    long ld = up(width), heads = net->heads, wide = 3 * heads * hp, hid = up(net->hidden);
    long each = net->length * hp, mixed = heads * hp;
    float *h = scratch, *y = h + rows * ld, *big = y + rows * (ld > mixed ? ld : mixed);
    float *room = big + rows * (wide > hid ? wide : hid);
    for (long i = 0; i < rows; i++) {
        long n = n0 + i / s, t = here.first + r0 + i % s;
        float *row = h + i * ld;
        memset(row, 0, ld * sizeof(float));
        memcpy(row, net->embed + t * width, width * sizeof(float));
        if (job->condition)
            for (long j = 0; j < width; j++) row[j] += job->condition[n * job->condition_row + j];
    }
    for (long n = n0; n < n1; n++)
        product(s, job->x + n * job->x_row + (here.first + r0) * net->dim, net->dim, net->in, net->dim, width,
                h + (n - n0) * s * ld, ld, 0, 1);
    for (long l = 0; l < net->depth; l++) {
        const Layer *w = net->layers + l;
        normalise(rows, width, h, y, ld);
        product(rows, y, ld, w->qkv, width, wide, big, wide, w->qkv_bias, 0);
        float *keys = job->k + l * job->layer, *values = job->v + l * job->layer;
        for (long i = 0; i < rows; i++) {
            long n = n0 + i / s, t = here.first + r0 + i % s;
            for (long head = 0; head < heads; head++) {
                const float *k = big + i * wide + (heads + head) * hp;
                long place = (n * heads + head) * each + t * hp;
                memcpy(keys + place, k, hp * sizeof(float));
                memcpy(values + place, k + mixed, hp * sizeof(float));
            }
        }
        if (job->split) meet(job);
        for (long n = n0; n < n1; n++)
            for (long head = 0; head < heads; head++)
                attend(s, here.first + r0, big + (n - n0) * s * wide + head * hp, wide,
                       keys + (n * heads + head) * each, values + (n * heads + head) * each, hp, net->length,
                       job->scale, room, y + (n - n0) * s * mixed + head * hp, mixed);
        if (job->split && !job->layer) meet(job);
        product(rows, y, mixed, w->proj, mixed, width, h, ld, w->proj_bias, 1);
        normalise(rows, width, h, y, ld);
        product(rows, y, ld, w->up, width, net->hidden, big, hid, w->up_bias, 0);
        for (long i = 0; i < rows * hid; i += LANES) store(big + i, vgelu(load(big + i)));
        product(rows, big, hid, w->down, net->hidden, width, h, ld, w->down_bias, 1);
    }
    long skip = here.need - here.first, pp = up(net->params);
    for (long n = n0; n < n1; n++) {
        long from = r0 > skip ? r0 : skip;
        if (from >= r1) continue;
        product(r1 - from, h + ((n - n0) * s + from - r0) * ld, ld, net->out, width, net->params, big, pp,
                net->out_bias, 0);
        for (long i = from; i < r1; i++)
            memcpy(here.theta + n * here.theta_row + (i - skip) * net->params, big + (i - from) * pp,
                   net->params * sizeof(float));
    }
}

/* How many rows go through a layer together: enough to use a packed panel well, few enough for the caches. */
static long group_rows(const Net *net, long s) {
    long some = 300000 / (up(net->width) * 8);
    if (some < 48) some = 48;
    if (some > 192) some = 192;
    return some > s ? some / s * s : s;
}

static long scratch_rows(const Net *net, long n, long s, int threads, int split) {
    long most = split ? n * ((s + threads - 1) / threads) : group_rows(net, s);
    return most < n * s ? most : n * s;
}

/* x = z e^a + b, or z + b without a, of one position [dim]; returns the sum of a */
static float invert(long dim, const float *z, const float *theta, int scaled, float *x) {
    vec total = all(0);
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
    float *theta = scratch;
    scratch += (n1 - n0) * net->params;
    for (long t = job->solved; t <= job->last; t++) {
        Stretch here = {t - 1, t - 1, theta - n0 * net->params, net->params};
        group(job, here, n0, n1, 0, 1, scratch);
        for (long n = n0; n < n1; n++)
            job->slope[n * job->slope_row + t - job->solved] =
                invert(net->dim, job->z + n * job->z_row + t * net->dim, theta + (n - n0) * net->params,
                       net->params > net->dim, job->x + n * job->x_row + t * net->dim);
    }
}

static void *part(void *given) {
    Part *mine = given;
    Job *job = mine->job;
    while (!atomic_load(&job->ready)) sched_yield();
    if (atomic_load(&job->ready) < 0) return 0;
    long s = job->z ? 1 : job->last - job->stretch.first, n = job->n, i = mine->index;
    float *scratch = job->scratch + i * job->share;
    if (job->split) {
        group(job, job->stretch, 0, n, s * i / job->threads, s * (i + 1) / job->threads, scratch);
        return 0;
    }
    long n0 = n * i / job->threads, end = n * (i + 1) / job->threads, step = group_rows(job->net, s) / s;
    for (; n0 < end; n0 += step) {
        long n1 = n0 + step < end ? n0 + step : end;
        if (job->z)
            solve(job, n0, n1, scratch);
        else
            group(job, job->stretch, n0, n1, 0, s, scratch);
    }
    return 0;
}

static int plan(long n, long s, int threads, int *split) {
    *split = n < threads && n * s >= 16 * threads;
    if (*split) return threads;
    long most = n * s / 4; /* a thread for less than four rows costs more than it brings */
    if (threads > n) threads = (int)n;
    if (threads > most) threads = (int)most;
    return threads < 1 ? 1 : threads;
}

/* Floats that a thread needs for so many rows. */
static long share(const Net *net, long rows) {
    long ld = up(net->width), mixed = net->heads * up(net->head_dim), pp = up(net->params);
    long big = 3 * mixed > up(net->hidden) ? 3 * mixed : up(net->hidden);
    if (pp > big) big = pp;
    return rows * (ld + (ld > mixed ? ld : mixed) + big) + (ROWS + up(net->head_dim)) * up(net->length);
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

/* Floats that `jf_params` needs to work in. */
long jf_scratch(const Net *net, long n, long s, int threads) {
    int split, count = plan(n, s, threads, &split);
    return count * share(net, scratch_rows(net, n, s, count, split));
}

/* Parameters of positions need + 1 .. last [n, last - need, params] from x[n, T, dim];
 * 1 if the threads could not be had, and nothing was done. */
int jf_params(const Net *net, long n, long first, long need, long last, const float *x, long x_row,
              const float *condition, long condition_row, float *k, float *v, long layer, float scale,
              float *theta, long theta_row, float *scratch, int threads) {
    Job job = {.net = net, .n = n, .stretch = {first, need, theta, theta_row}, .last = last, .x = (float *)x,
               .condition = condition, .x_row = x_row, .condition_row = condition_row, .k = k, .v = v,
               .layer = layer, .scale = scale, .scratch = scratch};
    long s = last - first;
    job.threads = plan(n, s, threads, &job.split);
    job.share = jf_scratch(net, n, s, threads) / job.threads;
    return run(&job);
}

static long solve_share(const Net *net, long n) {
    long rows = scratch_rows(net, n, 1, 1, 0);
    return share(net, rows) + rows * net->params;
}

/* Floats that `jf_solve` needs to work in. */
long jf_solve_scratch(const Net *net, long n, int threads) { return (threads < n ? threads : n) * solve_share(net, n); }

/* Positions lo .. hi - 1 >= 1 of x[n, T, dim], one after the other, and the sums of their log |dx/dz|
 * [n, hi - lo]; keys and values of those before lo - 1 are there. 1 as above. */
int jf_solve(const Net *net, long n, long lo, long hi, float *x, long x_row, const float *z, long z_row, float *slope,
             long slope_row, const float *condition, long condition_row, float *k, float *v, long layer, float scale,
             float *scratch, int threads) {
    Job job = {.net = net, .n = n, .last = hi - 1, .x = x, .condition = condition, .x_row = x_row,
               .condition_row = condition_row, .k = k, .v = v, .layer = layer, .scale = scale, .scratch = scratch,
               .z = z, .slope = slope, .z_row = z_row, .slope_row = slope_row, .solved = lo};
    job.threads = threads < n ? threads : (int)n;
    job.share = solve_share(net, n);
    return run(&job);
}
