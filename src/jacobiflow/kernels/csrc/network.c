/* One pass through the network: embedding, layers, parameters. */
#include <string.h>

#include "attention.h"
#include "gemm.h"
#include "transformer.h"

#define EPS 1e-5f

/* After a step whose results all threads need: if they share columns. */
static void meet_columns(const Worker *me) {
    if (me->sharers > 1) meet(&me->job->meeting);
}

/* The panels of a thread. */
typedef struct {
    long first, last;
} Range;

static Range own(const Worker *me, long panels) {
    if (me->sharers == 1) return (Range){0, panels};
    return (Range){panels * me->index / me->sharers, panels * (me->index + 1) / me->sharers};
}

/* The left-hand side of a product with weights of a layer, and the other side that goes with it. */
typedef struct {
    const float *a;
    long lda;
    Panels right;
} Factors;

static Factors factors(const Worker *me, long rows, const float *a, long lda, const float *w, long depth) {
    if (!me->job->net->pairs) return (Factors){a, lda, {w, PANEL, depth * PANEL, depth, 0}};
    to_pairs(rows, a, lda, depth, me->pairs, me->ld.pairs);
    return (Factors){me->pairs, me->ld.pairs, {w, PANEL, up(depth) / 2 * PANEL, up(depth) / 2, 1}};
}

/* A thread's columns of c = a w, where w is a packed matrix [depth][columns] of a layer. */
static void multiply(const Worker *me, long rows, const float *a, long lda, const float *w, const float *bias,
                     long depth, long columns, float *c, long ldc, int what) {
    Range range = own(me, up(columns) / PANEL);
    Factors f = factors(me, rows, a, lda, w, depth);
    product(rows, f.a, f.lda, f.right, range.first, range.last, c, ldc, bias, what);
}

/* rows of x to mean 0 and variance 1; padding beyond `width` is zero before and after */
static void normalise(long rows, long width, const float *x, long ldx, float *y, long ldy) {
    for (long i = 0; i < rows; i++, x += ldx, y += ldy) {
        vec s = all(0), q = all(0);
        for (long j = 0; j < width; j += LANES) s += load(x + j);
        float mean = sum(s) / width;
        for (long j = 0; j < width; j += LANES) {
            vec d = load(x + j) - mean;
            store(y + j, d);
        }
        for (long j = width; j < up(width); j++) y[j] = 0;
        for (long j = 0; j < width; j += LANES) q += load(y + j) * load(y + j);
        float scale = 1.0f / sqrtf(sum(q) / width + EPS);
        for (long j = 0; j < width; j += LANES) store(y + j, load(y + j) * scale);
    }
}

Span span(const Job *job, Window window, long sample) {
    long end = job->net->length - 1, need = (window.starts ? window.starts[sample] : window.start) - 1;
    if (need >= end) return (Span){end, end, end};
    long last = smaller(need + window.width, end);
    return (Span){job->rows->layer ? need : 0, need, last};
}

/* Work of inputs from .. to - 1, products with weights and then attention, in products of one key. */
static long work(const Net *net, long from, long to) {
    return (to - from) * 6 * net->width + (to - from) * (from + to) / 2;
}

/* An input of a group: where the part of a thread begins, if threads share rows. */
typedef struct {
    long sample, input;
} Cut;

static Cut cut(const Job *job, Window window, Group group, int index) {
    long whole = 0, n = group.n0;
    for (long i = group.n0; i < group.n1; i++) {
        Span s = span(job, window, i);
        whole += work(job->net, s.first, s.last);
    }
    long before = whole / job->meeting.threads * index;
    if (index == job->meeting.threads) return (Cut){group.n1, 0};
    for (; n < group.n1; n++) {
        Span s = span(job, window, n);
        long here = work(job->net, s.first, s.last), input = s.first;
        if (before < here) {
            while (work(job->net, s.first, input) < before) input++;
            return (Cut){n, input};
        }
        before -= here;
    }
    return (Cut){n, 0};
}

/* Consecutive inputs of one branch of a sample, which are rows at .. at + count - 1 of a thread. */
typedef struct {
    long sample, branch, from, count, at;
    long need; /* the first input whose parameters are wanted */
    float scale;
    long place; /* of its keys and values in a layer */
} Run;

/* The inputs of a group, or a thread's part of them; returns how many runs there are. */
static long line_up(const Worker *me, Window window, Group group, Run *runs, long *rows) {
    const Job *job = me->job;
    const Rows *given = job->rows;
    Cut from = {group.n0, 0}, to = {group.n1, 0};
    if (!job->columns) from = cut(job, window, group, me->index), to = cut(job, window, group, me->index + 1);
    long count = 0;
    *rows = 0;
    for (long n = from.sample; n < group.n1 && n <= to.sample; n++) {
        Span s = span(job, window, n);
        long first = n == from.sample ? larger(s.first, from.input) : s.first;
        long inputs = (n == to.sample ? to.input : s.last) - first;
        for (long b = 0; inputs > 0 && b < given->branches; b++, *rows += inputs)
            runs[count++] = (Run){n, b, first, inputs, *rows, s.need,
                                  given->scale[b * given->scale_branch + n * given->scale_row],
                                  (n * given->branches + b) * job->net->heads * head_floats(job->net)};
    }
    return count;
}

/* h[at ..] = embedding + condition + x w of the inputs of a run */
static void embed(const Worker *me, const Run *run) {
    const Net *net = me->job->net;
    const Rows *given = me->job->rows;
    const float *condition =
        given->condition + run->branch * given->condition_branch + run->sample * given->condition_row;
    Range range = own(me, up(net->width) / PANEL);
    long first = range.first * PANEL, last = range.last * PANEL, end = smaller(last, net->width);
    float *h = me->h + run->at * me->ld.h;
    for (long i = 0; i < run->count; i++) {
        float *row = h + i * me->ld.h;
        const float *e = net->embed + (run->from + i) * net->width;
        for (long j = first; j < end; j++) row[j] = e[j] + condition[j];
        for (long j = end; j < last; j++) row[j] = 0;
    }
    Panels right = {net->in, PANEL, net->dim * PANEL, net->dim, 0};
    product(run->count, given->x + run->sample * given->x_row + run->from * net->dim, net->dim, right, range.first,
            range.last, h, me->ld.h, 0, ADD);
}

/* The head of a run in a layer. */
static Head head_of(const Job *job, const Run *run, long l, long head) {
    const Net *net = job->net;
    long place = l * job->rows->layer + run->place + head * head_floats(net);
    return (Head){job->rows->k + place, job->rows->v + place, up(net->head_dim)};
}

/* Panels of keys and values of the rows at .. at + count - 1 of a run, out of big, into the cache. */
static void keep(const Worker *me, const Run *run, long l, long at, long count, const float *big, Range range) {
    long size = up(me->job->net->head_dim), mixed = me->job->net->heads * size;
    for (long p = range.first; p < range.last; p++) {
        long column = p * PANEL % mixed, d = column % size;
        Head head = head_of(me->job, run, l, column / size);
        const float *from = big + p * PANEL;
        for (long t = run->from + at - run->at; t < run->from + at - run->at + count; t++, from += me->ld.big) {
            float *key = head.keys + t / PANEL * PANEL * size + d * PANEL + t % PANEL;
            if (p * PANEL >= mixed)
                memcpy(head.values + t * size + d, from, PANEL * sizeof(float));
            else
                for (int j = 0; j < PANEL; j++) key[j * PANEL] = from[j];
        }
    }
}

/* Queries of the rows at .. at + rows - 1; their keys and values go to the cache. */
static void project(const Worker *me, long l, const Run *runs, long count, long at, long rows) {
    const Net *net = me->job->net;
    const Layer *w = net->layers + l;
    long panels = net->heads * up(net->head_dim) / PANEL;
    Range range = own(me, 3 * panels), q = range, kv = range;
    if (q.last > panels) q.last = panels;
    if (kv.first < panels) kv.first = panels;
    normalise(rows, net->width, me->h + at * me->ld.h, me->ld.h, me->y, me->ld.y);
    Factors f = factors(me, rows, me->y, me->ld.y, w->qkv, net->width);
    product(rows, f.a, f.lda, f.right, q.first, q.last, me->q + at * me->ld.q, me->ld.q, w->qkv_bias, SET);
    float *big = me->big - panels * PANEL; /* panels of keys are the first in it */
    product(rows, f.a, f.lda, f.right, kv.first, kv.last, big, me->ld.big, w->qkv_bias, SET);
    kv.first -= panels, kv.last -= panels;
    for (const Run *run = runs; run < runs + count; run++) {
        long first = larger(run->at, at), end = run->at + run->count, last = smaller(end, at + rows);
        if (first < last) keep(me, run, l, first, last - first, me->big + (first - at) * me->ld.big, kv);
    }
}

/* Queries to what they attend to; threads that share columns share heads and tiles of queries. */
static void attend_all(const Worker *me, long l, const Run *runs, long count) {
    const Net *net = me->job->net;
    long size = up(net->head_dim), piece = 0;
    for (const Run *run = runs; run < runs + count; run++) {
        long tiles = (run->count + QUERIES - 1) / QUERIES, each = (run->count + tiles - 1) / tiles;
        for (long head = 0; head < net->heads; head++)
            for (long i = 0; i < run->count; i += each)
                if (mine(me, piece++))
                    attend(smaller(run->count - i, each), run->from + i,
                           me->q + (run->at + i) * me->ld.q + head * size, me->ld.q,
                           head_of(me->job, run, l, head), net->length, run->scale, me->room);
    }
}

/* What follows the attention of a layer, for the rows at .. at + rows - 1. */
static void finish(const Worker *me, const Layer *w, long at, long rows) {
    const Net *net = me->job->net;
    long mixed = net->heads * up(net->head_dim);
    float *h = me->h + at * me->ld.h;
    multiply(me, rows, me->q + at * me->ld.q, me->ld.q, w->proj, w->proj_bias, mixed, net->width, h, me->ld.h,
             ADD);
    meet_columns(me);
    normalise(rows, net->width, h, me->ld.h, me->y, me->ld.y);
    multiply(me, rows, me->y, me->ld.y, w->up, w->up_bias, net->width, net->hidden, me->big, me->ld.big, GELU);
    meet_columns(me);
    multiply(me, rows, me->big, me->ld.big, w->down, w->down_bias, net->hidden, net->width, h, me->ld.h, ADD);
    meet_columns(me);
}

/* theta of the inputs of a run from the outputs; those of the uninformed branch follow */
static void emit(const Worker *me, Window window, const Run *run) {
    long params = me->job->net->params;
    const float *blend = me->job->rows->blend;
    for (long i = larger(run->need - run->from, 0); i < run->count; i++) {
        const float *own = me->q + (run->at + i) * me->ld.q, *null = own + run->count * me->ld.q;
        float *theta = window.theta + run->sample * window.theta_row + (run->from + i - run->need) * params;
        if (!blend) {
            memcpy(theta, own, params * sizeof(float));
            continue;
        }
        const float *w = blend + (run->from + i + 1) * params;
        for (long j = 0; j < params; j++) theta[j] = own[j] + w[j] * (own[j] - null[j]);
    }
}

void evaluate(const Worker *me, Window window, Group group) {
    Job *job = me->job;
    const Net *net = job->net;
    Run runs[(group.n1 - group.n0) * job->rows->branches];
    long rows, some = job->some, count = line_up(me, window, group, runs, &rows);
    const int together = job->columns ? me->sharers > 1 : job->meeting.threads > 1;
    for (long i = 0; i < count; i++) embed(me, runs + i);
    meet_columns(me);
    for (long l = 0; l < net->depth; l++) {
        for (long i = 0; i < rows; i += some) project(me, l, runs, count, i, smaller(rows - i, some));
        if (together) meet(&job->meeting);
        attend_all(me, l, runs, count);
        /* If nothing is kept, the next layer takes the same room. */
        if (together && (job->columns || !job->rows->layer)) meet(&job->meeting);
        for (long i = 0; i < rows; i += some) finish(me, net->layers + l, i, smaller(rows - i, some));
    }
    Range range = own(me, up(net->params) / PANEL);
    Panels right = {net->out, PANEL, net->width * PANEL, net->width, 0};
    product(rows, me->h, me->ld.h, right, range.first, range.last, me->q, me->ld.q, net->out_bias, SET);
    meet_columns(me);
    for (long i = 0; i < count; i += job->rows->branches)
        if (mine(me, runs[i].sample)) emit(me, window, runs + i);
}
