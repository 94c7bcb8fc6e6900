/* The structures of the transformer, which c_transformer.py fills in or which its files share. */
#ifndef JACOBIFLOW_TRANSFORMER_H
#define JACOBIFLOW_TRANSFORMER_H

#include <stdint.h>

#include "team.h"
#include "vector.h"

/* Weights of one layer, the norms' folded in, each matrix packed in panels, of pairs if the network has `pairs`. */
typedef struct {
    const float *qkv, *qkv_bias, *proj, *proj_bias, *up, *up_bias, *down, *down_bias;
} Layer;

typedef struct {
    long length, dim, width, heads, head_dim, hidden, depth, params;
    const float *in, *embed, *out, *out_bias; /* embed: [T, width], the bias of `in` added */
    const Layer *layers;
    long pairs; /* whether layers multiply in bfloat16 */
} Net;

/* The samples of a call. Guided ones have two branches, the informed one first, which read the same x. */
typedef struct {
    long samples, branches;
    float *x; /* [sample][T][dim], `x_row` apart; written to by `jf_solve` alone */
    long x_row;
    const float *condition; /* [branch][sample][width]; a stride of 0 shares one */
    long condition_branch, condition_row;
    const float *scale; /* of the attention's logits, [branch][sample] */
    long scale_branch, scale_row;
    const float *blend; /* [T][params]: w of theta + w (theta - null); null with one branch */
    float *k, *v;       /* [layer][sample][branch][head], then as in `Head`; sizes and lengths are padded */
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
    Meeting meeting;
    int columns;    /* whether threads share columns, not rows */
    long group;     /* rows that go through the network together, all threads' */
    long some;      /* rows of a thread that go through a step together */
    float *scratch;
    const float *z; /* to be solved for x; 0 if parameters are wanted */
    float *slope;
    long z_row, slope_row, stop; /* strides, and the end of the positions to solve */
    int map;                     /* EXP or SHIFT */
    int alone;                   /* whether the first thread solves alone, up to position `reached` */
    long reached;
} Job;

/* Distances of rows. Powers of two are avoided: the rows of a tile would share a set of the first cache. */
INLINE long apart(long columns) { return up(columns) + PANEL; }

typedef struct {
    long h, q, y, big, pairs;
} Strides;

INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE long smaller(long a, long b) { return a < b ? a : b; }

INLINE Strides strides(const Net *net) {
    long mixed = net->heads * up(net->head_dim);
    return (Strides){apart(net->width), apart(larger(mixed, net->params)), apart(net->width),
                     apart(larger(2 * mixed, net->hidden)),
                     net->pairs ? apart(larger(up(net->width), larger(mixed, up(net->hidden))) / 2) : 0};
}

/* What a thread works in. Threads that share columns share all of it but y, room and pairs. */
typedef struct {
    Job *job;
    int index, sharers; /* sharers: threads that share columns, 1 if this one has them all */
    Strides ld;
    float *h, *q;    /* [group]: the residual stream; queries, then what they attend to, at last the outputs */
    float *big;      /* [some]: keys and values, or hidden units */
    float *y, *room; /* [some]: normalised rows; and room for attention */
    float *pairs;    /* [some]: the rows of a product in bfloat16 */
} Worker;

/* Whether this thread does piece `i` of a step that is no product. */
INLINE int mine(const Worker *me, long i) { return me->sharers == 1 || i % me->sharers == me->index; }

/* Inputs first .. last - 1 of a sample go through the network; parameters are wanted from input `need` on. */
typedef struct {
    long first, need, last;
} Span;

/* Samples n0 .. n1 - 1, which go through the network together. */
typedef struct {
    long n0, n1;
} Group;

/* Floats of the keys or values of a head. */
INLINE long head_floats(const Net *net) { return up(net->length) * up(net->head_dim); }

#pragma GCC visibility push(hidden)

Span span(const Job *job, Window window, long sample);

/* The windows of a group, or a thread's part of them. */
void evaluate(const Worker *me, Window window, Group group);

#pragma GCC visibility pop
#endif
