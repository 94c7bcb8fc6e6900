/* What the two ways through a masked network share: panels of units (masked.c) and bands of rows (bands.c). */
#ifndef JACOBIFLOW_MASKED_H
#define JACOBIFLOW_MASKED_H

#include "maps.h"
#include "vector.h"

/* Activations: their codes, and the names by which Python knows them. */
#define ACTIVATIONS(M) M(NONE, "none") M(RELU, "relu") M(ELU, "elu") M(GELU, "gelu") M(SILU, "silu") M(TANH, "tanh")
#define ACTIVATION_CODE(CODE, NAME) CODE,
#define ACTIVATION_NAME(CODE, NAME) NAME " "

enum { ACTIVATIONS(ACTIVATION_CODE) };

typedef struct {
    const float *weight, *bias;    /* packed; padded */
    const float *factor, *offset;  /* the activation sees factor * unit + offset; or null */
    const long *limits;            /* inputs that each panel sees */
    const long *ends;              /* ends[d]: units of degree d or less */
    long in, out;
    long source, activated, skip;  /* nodes: 0 is the input, i + 1 the output of stage i; skip -1: none */
} Stage;

typedef struct {
    long length, params, depth, activation;
    const Stage *stages; /* depth hidden ones, then the head */
} Masked;

typedef struct {
    long kind; /* as in maps.h */
    const float *number;
} Map;

INLINE vec vtanh(vec x) {
    vec t = vexp(pick(x < 0, x, -x) * 2.0f);
    vec y = (1.0f - t) / (1.0f + t);
    return pick(x < 0, -y, y);
}

INLINE vec activate(const int kind, vec x) {
    switch (kind) {
    case RELU: return pick(x < 0, all(0), x);
    case ELU: return pick(x < 0, vexp(x) - 1.0f, x);
    case GELU: return vgelu(x);
    case SILU: return x / (1.0f + vexp_over(-x));
    case TANH: return vtanh(x);
    default: return x;
    }
}

INLINE vec vabs(vec x) { return pick(x < 0, -x, x); }

INLINE vec vsqrt(vec x) {
    for (int i = 0; i < LANES; i++) x[i] = sqrtf(x[i]);
    return x;
}

/* theta's parameter i of some rows is at theta + i * next */
INLINE void affine(const Map *map, const float *theta, long next, vec z, vec *x, vec *slope) {
    vec p = load(theta), q = load(theta + next), s;
    const float first = map->number[0], second = map->number[1];
    switch (map->kind) {
    case EXP:
        *x = z * vexp_over(p) + q, *slope = p;
        break;
    case SOFTCLIP:
        q = q / (1.0f + vabs(q) * first);
        *x = (z - p) / vexp_over(q), *slope = -q;
        break;
    case CLAMPED:
        q = q + (pick(q < first, all(first), pick(q > second, all(second), q)) - q); /* as Pyro rounds it */
        *x = (z - p) * vexp_over(-q), *slope = -q;
        break;
    case STABLE:
        s = 1.0f + vexp_over(-q - first);
        *x = s * z + (1.0f - s) * p, *slope = vlog(s);
        break;
    default:
        s = (map->kind == SOFTPLUS ? vsoftplus(p) : 1.0f / (1.0f + vexp_over(-p - 2.0f))) + first;
        *x = (z - q) / s, *slope = -vlog(s);
    }
}

/* x of an elementwise map's inverse and log |dx/dz|, from z and the parameters */
void map_inverse(const Map *map, const float *theta, long next, vec z, vec *x, vec *slope);

/* Rows solved one position after the other: where z comes from and the answers go. */
typedef struct {
    Map map;
    const float *z;
    long z_row;
    float *x, *slope;
    long x_row, slope_row;
} Solve;

/* Of bands.c: rows that pass together, of those that a thread has; numbers of scratch that they take; their solution. */
long bands_rows(const Masked *net, long rows);
long bands_scratch(const Masked *net, long rows);
void bands_solve(const Masked *net, const Solve *solve, long r0, long r1, long lo, long hi,
                 const float *const *context, long shared, float *scratch);

#endif
