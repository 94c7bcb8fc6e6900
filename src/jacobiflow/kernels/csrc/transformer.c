/* A causal transformer on the CPU in single precision: one call puts a window of positions of each
 * sample through every layer, against a cache of keys and values. Each sample has a window of its own.
 *
 * Weights are packed once. Threads share the work of a call in one of two ways:
 * - Few rows (a row is one position of one branch of a sample): every thread has all rows and its own columns of each
 *   matrix, so each weight is read once per call, and by the same thread in every call. Threads meet after each step.
 * - Many rows: every thread has its own rows and all columns. Some rows at a time go through a step while they are in
 *   the cache of a core, and threads meet only around attention.
 * Sequential decoding of many samples gives each thread samples of its own.
 */
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "attention.h"
#include "maps.h"
#include "transformer.h"

#define FEW_ROWS 64               /* of a call: threads share columns */
#define SOLVE_ROWS 16             /* that are solved together at least */
#define SPLIT_SAMPLES 4           /* per thread, from which on each thread solves samples of its own */
#define SOLVE_FLOATS (2 << 20)    /* of the keys and values of more rows: they stay in the last cache */
#define CACHED_FLOATS (160 << 10) /* of the activations of rows that go through a step together, for a core's cache */
#define LEAST_WORK (1 << 17)      /* products of a layer below which a second thread costs more than it brings */

static long shared_floats(const Job *job) {
    Strides ld = strides(job->net);
    return job->group * (ld.h + ld.q) + job->some * ld.big;
}

static long own_floats(const Job *job) {
    Strides ld = strides(job->net);
    return job->some * (ld.y + ld.pairs) + attention_room(job->net->length);
}

/* Parameters of the samples that are solved together, then the parts of the threads. */
static long theta_floats(const Job *job) { return job->z ? up(job->group * job->net->params) : 0; }

static long scratch_floats(const Job *job) {
    long parts = job->columns ? 1 : job->meeting.threads;
    return theta_floats(job) + parts * shared_floats(job) + job->meeting.threads * own_floats(job);
}

static Worker equipped(Job *job, int index) {
    Worker me = {.job = job, .index = index, .ld = strides(job->net)};
    me.sharers = job->columns ? job->meeting.threads : 1;
    float *at = job->scratch + theta_floats(job);
    long parts = job->columns ? 1 : job->meeting.threads;
    me.h = at + (job->columns ? 0 : index) * shared_floats(job);
    me.q = me.h + job->group * me.ld.h;
    me.big = me.q + job->group * me.ld.q;
    me.y = at + parts * shared_floats(job) + index * own_floats(job);
    me.pairs = me.y + job->some * me.ld.y;
    me.room = me.pairs + job->some * me.ld.pairs;
    return me;
}

/* Rows of the network that a sample takes. */
static long cost(const Job *job, Window window, long sample) {
    Span s = span(job, window, sample);
    return job->rows->branches * (s.last - s.first);
}

/* The group that begins with n0: as many samples as fit, but at least one. */
static Group group_from(const Job *job, long n0) {
    long rows = cost(job, job->window, n0), n1 = n0 + 1;
    for (; n1 < job->rows->samples; n1++) {
        rows += cost(job, job->window, n1);
        if (rows > job->group) break;
    }
    return (Group){n0, n1};
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

/* Position t of the samples of a group. */
static void solve_position(const Worker *me, Group group, long t) {
    const Job *job = me->job;
    const Net *net = job->net;
    float *theta = job->scratch - group.n0 * net->params;
    evaluate(me, (Window){0, t, 1, theta, net->params}, group);
    for (long n = group.n0; n < group.n1; n++)
        if (mine(me, n))
            job->slope[n * job->slope_row + t - job->window.start] =
                invert(job->map, net->dim, job->z + n * job->z_row + t * net->dim, theta + n * net->params,
                       job->rows->x + n * job->rows->x_row + t * net->dim);
}

/* The samples of a group, position after position: each as soon as those before it are there. If other programs take
 * processors away, the first thread goes on alone for a while. */
static void solve(Worker *me, Group group) {
    Job *job = me->job;
    const int threads = me->sharers;
    for (long t = job->window.start; t < job->stop; t++) {
        solve_position(me, group, t);
        if (threads == 1) continue;
        if (!me->index) job->alone = crowded();
        meet(&job->meeting);
        if (!job->alone) continue;
        if (!me->index) {
            me->sharers = 1;
            while (t + 1 < job->stop && crowded()) solve_position(me, group, ++t);
            me->sharers = threads, job->reached = t;
        }
        meet_idle(&job->meeting);
        t = job->reached;
    }
}

static void part(void *given, int index) {
    Job *job = given;
    Worker me = equipped(job, index);
    Group group;
    for (long n = 0; n < job->rows->samples; n = group.n1) {
        group = group_from(job, n);
        if (job->z)
            solve(&me, group);
        else
            evaluate(&me, job->window, group);
    }
}

/* Rows of a thread for whose steps the cache of a core has room. */
static long cached_rows(const Net *net) {
    Strides ld = strides(net);
    return larger(CACHED_FLOATS / (ld.y + ld.big) / QUERIES, 8) * QUERIES;
}

/* Rows that are solved together. */
static long solve_rows(const Net *net) {
    return larger(SOLVE_ROWS, SOLVE_FLOATS / (2 * net->depth * net->heads * head_floats(net)));
}

/* Seconds, far more than threads take to a step that they share. */
static double long_wait(const Net *net, long rows) { return 5e-4 + 2e-11 * rows * net->width * net->hidden; }

/* How the threads share the work, and what they need. */
static void plan(Job *job, int threads) {
    const Net *net = job->net;
    long rows = 0, largest = 0;
    for (long n = 0; n < job->rows->samples; n++) {
        long own = cost(job, job->window, n);
        rows += own, largest = larger(largest, own);
    }
    long at_once = job->z ? smaller(rows, solve_rows(net)) : rows;
    if (at_once * net->width * (4 * net->width + 2 * net->hidden) < LEAST_WORK) threads = 1;
    job->meeting.threads = threads < 1 ? 1 : threads;
    job->columns = threads > 1 && (job->z || rows <= FEW_ROWS);
    job->group = job->z ? solve_rows(net) : job->columns ? rows : cached_rows(net) * job->meeting.threads;
    job->group = smaller(larger(job->group, largest), rows);
    job->some = job->columns ? job->group : smaller(cached_rows(net), job->group);
    job->meeting.long_wait = long_wait(net, job->group);
}

static Job params_job(const Net *net, const Rows *rows, const int64_t *starts, long each, long width, int threads) {
    Job job = {.net = net, .rows = rows, .window = {.starts = each ? starts : 0, .start = *starts, .width = width}};
    plan(&job, threads);
    return job;
}

/* Floats that `jf_params` needs to work in. */
long jf_params_scratch(const Net *net, const Rows *rows, const int64_t *starts, long each, long width, int threads) {
    Job job = params_job(net, rows, starts, each, width, threads);
    return scratch_floats(&job);
}

/* Parameters of a window of positions per sample, theta[sample][width][params], from x[sample][T][dim]. It begins at
 * the sample's own start if `each`, else at *starts. Keys and values of the inputs before start - 1 are there, unless
 * nothing is kept; those of the inputs that are read are written. Positions beyond the last are left as they are.
 * 1 if the threads could not be had: nothing was done. */
int jf_params(const Net *net, const Rows *rows, const int64_t *starts, long each, long width, float *theta,
              float *scratch, int threads) {
    Job job = params_job(net, rows, starts, each, width, threads);
    job.window.theta = theta, job.window.theta_row = width * net->params, job.scratch = scratch;
    if (job.columns && crowded()) job.meeting.threads = 1;
    return together(job.meeting.threads, part, &job);
}

static Job solve_job(const Net *net, const Rows *rows, long start, long stop, const float *z, int threads) {
    Job job = {.net = net, .rows = rows, .window = {.start = start, .width = 1}, .stop = stop, .z = z};
    plan(&job, threads);
    return job;
}

/* Whether each thread solves samples of its own: then threads never meet, but each reads all weights. */
static int splits(const Job *job) {
    const int threads = job->meeting.threads;
    return threads > 1 && job->rows->samples >= SPLIT_SAMPLES * threads;
}

/* Samples first .. last - 1 as a job of one thread; `rows` is where their description goes. */
static Job own_job(const Job *whole, long first, long last, Rows *rows) {
    const long place = first * whole->rows->branches * whole->net->heads * head_floats(whole->net);
    *rows = *whole->rows;
    rows->samples = last - first, rows->x += first * rows->x_row, rows->k += place, rows->v += place;
    rows->scale += first * rows->scale_row, rows->condition += first * rows->condition_row;
    Job job = solve_job(whole->net, rows, whole->window.start, whole->stop, whole->z + first * whole->z_row, 1);
    job.z_row = whole->z_row, job.slope_row = whole->slope_row, job.map = whole->map;
    return job;
}

/* Floats that a thread needs for the samples of its own. */
static long split_floats(const Job *whole) {
    Rows rows;
    Job job = own_job(whole, 0, (whole->rows->samples + whole->meeting.threads - 1) / whole->meeting.threads, &rows);
    return up(scratch_floats(&job));
}

static void solve_own(void *given, int index) {
    const Job *whole = given;
    const long samples = whole->rows->samples, threads = whole->meeting.threads, first = samples * index / threads;
    Rows rows;
    Job job = own_job(whole, first, samples * (index + 1) / threads, &rows);
    job.slope = whole->slope + first * whole->slope_row;
    job.scratch = whole->scratch + index * split_floats(whole);
    part(&job, 0);
}

/* Floats that `jf_solve` needs to work in. */
long jf_solve_scratch(const Net *net, const Rows *rows, long start, long stop, const float *z, int threads) {
    Job job = solve_job(net, rows, start, stop, z, threads);
    return splits(&job) ? job.meeting.threads * split_floats(&job) : scratch_floats(&job);
}

/* Positions start .. stop - 1 >= 1 of x, one after the other, and the sums of their log |dx/dz|
 * [sample][stop - start]; keys and values of the inputs before start - 1 are there. 1 as above. */
int jf_solve(const Net *net, const Rows *rows, long start, long stop, const float *z, long z_row, float *slope,
             long slope_row, int map, float *scratch, int threads) {
    Job job = solve_job(net, rows, start, stop, z, threads);
    job.z_row = z_row, job.slope = slope, job.slope_row = slope_row, job.map = map, job.scratch = scratch;
    return together(job.meeting.threads, splits(&job) ? solve_own : part, &job);
}

/* Asks for large pages in fresh memory: the system makes thousands of small ones in the time of a sweep of few rows. */
void jf_large_pages(void *from, long bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const unsigned long page = 1 << 21, first = ((unsigned long)from + page - 1) / page * page;
    const unsigned long end = ((unsigned long)from + bytes) / page * page;
    if (first < end) madvise((void *)first, end - first, MADV_HUGEPAGE);
#endif
}
