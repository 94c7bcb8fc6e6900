/* What every sweep does to each number, in one pass: invert an affine map, and look how far things moved. */
#include <float.h>
#include <stdint.h>

#include "vector.h"

enum { EXP, SOFTPLUS, SIGMOID };

/* x = (z - b) / s with s = softplus(a) + eps or sigmoid(a + 2) + eps, or x = z e^a + b; and log |dx/dz|.
 * z: [n][w][d] with rows z_row apart; theta: [n][w][a's d, b's d]; x, slope: [n][w][d]. */
void jf_affine(int kind, float eps, long n, long w, long d, const float *z, long z_row, const float *theta, float *x,
               float *slope) {
    for (long i = 0; i < n; i++) {
        long count = w * d;
        for (long k = 0; k < count; k += LANES, x += LANES, slope += LANES) {
            long here = count - k < LANES ? count - k : LANES;
            float raw[LANES] = {0}, shift[LANES] = {0}, from[LANES] = {0}, to[LANES], log[LANES];
            for (long j = 0; j < here; j++) {
                const float *a = theta + (i * w + (k + j) / d) * 2 * d + (k + j) % d;
                raw[j] = a[0], shift[j] = a[d], from[j] = z[i * z_row + k + j];
            }
            vec a = load(raw), b = load(shift), zs = load(from);
            if (kind == EXP) {
                store(to, zs * vexp_over(a) + b);
                store(log, a);
            } else {
                vec s = (kind == SOFTPLUS ? vsoftplus(a) : 1.0f / (1.0f + vexp_over(-a - 2.0f))) + eps;
                store(to, (zs - b) / s);
                store(log, -vlog(s));
            }
            for (long j = 0; j < here; j++) x[j] = to[j], slope[j] = log[j];
            if (here < LANES) x -= LANES - here, slope -= LANES - here;
        }
    }
}

/* max(|x|, |z dx/dz|), or |x| where the other overflows */
INLINE float unit(float x, float z, float log_slope) {
    float size = fabsf(x), reach = fabsf(z) * expf(log_slope);
    return reach <= FLT_MAX && reach > size ? reach : size;
}

/* The rule of stopping.py. For each row of [w][d] numbers: the largest change, and how many leading positions
 * stand still. With z and slopes, changes are in units of max(|x|, |z dx/dz|). */
void jf_compare(long n, long w, long d, const float *now, const float *before, long before_row, const float *z,
                long z_row, const float *log_slope, float rounding, float *update, int64_t *still) {
    for (long i = 0; i < n; i++) {
        const float *a = now + i * w * d, *b = before + i * before_row;
        float most = 0, bad = 0;
        int64_t count = 0;
        int moving = 0;
        for (long t = 0; t < w; t++, a += d, b += d) {
            for (long j = 0; j < d; j++) {
                float change = fabsf(a[j] - b[j]), size = fabsf(a[j]);
                bad += change - change; /* 0, or NaN for good */
                if (z) {
                    long k = t * d + j;
                    /* the unit is at least |x|: most numbers need no exponential */
                    if (!(change <= most * size && (moving || change <= rounding * size)))
                        size = unit(a[j], z[i * z_row + k], log_slope[i * w * d + k]);
                } else
                    size = size > 1 ? size : 1;
                moving |= !(change <= rounding * size && change <= FLT_MAX);
                if (z && change > 0) change = change / size < FLT_MAX ? change / size : FLT_MAX;
                most = change > most ? change : most;
            }
            count += !moving;
        }
        update[i] = bad == 0 ? most : NAN;
        still[i] = count;
    }
}
