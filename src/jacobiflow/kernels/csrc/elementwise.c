/* What every sweep does to each number, in one pass: invert an affine map. */
#include <float.h>
#include <stdint.h>

#include "maps.h"
#include "vector.h"

const long jf_panel = PANEL;

/* Names of the maps in the order of their codes, each with its count of numbers. */
const char *jf_codes(void) { return MAPS(MAP_NAME); }

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
