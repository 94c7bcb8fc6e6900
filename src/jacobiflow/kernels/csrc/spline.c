/* The inverse of elementwise maps: affine ones, and the rational-quadratic spline of bijectors.py in any of its
 * parametrisations, for as many rows at a time as a vector has lanes.
 *
 * All knots of a spline are found, but only the two slopes that its bin needs.
 */
#include "masked.h"

/* Whether the raw parameters of a spline are soft-clipped, and how strongly. */
INLINE vec clip(vec x, float strength) { return x / (1.0f + vabs(x * strength)); }

/* raw widths or heights of `bins` bins; their exponentials, and the factor that makes sizes of them */
INLINE vec sizes(const float *raw, long next, long bins, float strength, vec *powers) {
    vec most = clip(load(raw), strength), total = all(0);
    for (long k = 0; k < bins; k++) {
        powers[k] = clip(load(raw + k * next), strength);
        most = pick(powers[k] > most, powers[k], most);
    }
    for (long k = 0; k < bins; k++) powers[k] = vexp(powers[k] - most), total += powers[k];
    return 1.0f / total;
}

static void spline(const Map *map, const float *theta, long next, vec z, vec *x, vec *slope) {
    const long bins = (long)map->number[0];
    const float bound = map->number[1], least = map->number[2], floor = map->number[3], offset = map->number[4];
    const int clipped = map->kind == CLIPPED_SPLINE; /* then `floor` is the strength of clipping */
    const float strength = clipped ? 2 * floor : 0, rest = 1 - least * bins, span = 2 * bound;
    const float *slopes = theta + 2 * bins * next;
    vec wide[bins], high[bins];
    vec w = sizes(theta, next, bins, strength, wide) * rest;
    vec h = sizes(theta + bins * next, next, bins, strength, high) * rest;
    ivec inside = vabs(z) < bound;
    vec value = pick(inside, z, all(0)), x0 = all(-bound), z0 = x0, x1 = x0, z1 = x0, xs = all(0), zs = all(0);
    vec d0 = all(0), d1 = all(0), xe = all(-bound), ze = all(-bound);
    ivec first = ~(ivec){0}, last = (ivec){0};
    for (long k = 0; k < bins; k++) {
        vec from_x = xe, from_z = ze;
        xs += least + w * wide[k], zs += least + h * high[k];
        xe = xs * span - bound, ze = zs * span - bound;
        if (k == bins - 1) xe = all(bound), ze = all(bound); /* the sum rounds; the last edge must not */
        ivec here = k ? value >= from_z : ~(ivec){0};
        x0 = pick(here, from_x, x0), z0 = pick(here, from_z, z0), x1 = pick(here, xe, x1), z1 = pick(here, ze, z1);
        if (k) d0 = pick(here, load(slopes + (k - 1) * next), d0), first &= ~here;
        if (k < bins - 1)
            d1 = pick(here, load(slopes + k * next), d1);
        else
            last = here;
    }
    d0 = clipped ? vexp_over(clip(d0, floor)) : vsoftplus(d0 + offset) + floor;
    d1 = clipped ? vexp_over(clip(d1, floor)) : vsoftplus(d1 + offset) + floor;
    d0 = pick(first, all(1), d0), d1 = pick(last, all(1), d1);
    w = x1 - x0, h = z1 - z0;
    vec y = value - z0, s = h / w, mixed = d1 + d0 - 2.0f * s;
    vec a = h * (s - d0) + y * mixed, b = h * d0 - y * mixed, c = -s * y;
    vec under = b * b - 4.0f * a * c;
    vec t = 2.0f * c / (-b - vsqrt(pick(under < 0, all(0), under)));
    t = pick(t < 0, all(0), pick(t > 1, all(1), t)); /* rounding may lead out of the bin */
    vec u = t * (1.0f - t), back = 1.0f - t;
    vec top = s * s * (d1 * t * t + 2.0f * s * u + d0 * back * back);
    *x = pick(inside, x0 + t * w, z);
    *slope = pick(inside, 2.0f * vlog(s + mixed * u) - vlog(top), all(0));
}

void map_inverse(const Map *map, const float *theta, long next, vec z, vec *x, vec *slope) {
    if (map->kind < SPLINE)
        affine(map, theta, next, z, x, slope);
    else
        spline(map, theta, next, z, x, slope);
}

/* The same for one number of n rows: z [n] with rows z_row apart, theta [n][params]. */
void jf_map(int kind, const float *number, long n, long params, const float *z, long z_row, const float *theta, float *x,
            float *slope) {
    const Map map = {kind, number};
    float each[params * LANES];
    for (long i = 0; i < n; i += LANES) {
        long here = n - i < LANES ? n - i : LANES;
        float from[LANES] = {0};
        for (long j = 0; j < LANES; j++)
            for (long p = 0; p < params; p++) each[p * LANES + j] = j < here ? theta[(i + j) * params + p] : 0;
        for (long j = 0; j < here; j++) from[j] = z[(i + j) * z_row];
        vec to, log;
        map_inverse(&map, each, LANES, load(from), &to, &log);
        for (long j = 0; j < here; j++) x[i + j] = to[j], slope[i + j] = log[j];
    }
}
