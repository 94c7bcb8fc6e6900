/* What a sweep made final: `accept` of core/rows.py for float32, in one pass. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { CONVERGED = 1, SWEEP_LIMIT = 3 }; /* ranks of Status; Python checks them when the library is loaded */
const long jf_ranks[2] = {CONVERGED, SWEEP_LIMIT};

/* The rows of a batch. Sequences are [n][positions][dim], rows apart; all else is [n]. */
typedef struct {
    long n, length, dim;
    long z_row, guess_row, seen_row, answer_row, log_slope_row;
    const float *z, *guess;
    float *seen, *answer, *log_slope;
    int64_t *frontier, *sweeps, *evaluated, *status;
    double *change;
} Rows;

/* small: a change of at most tol; relative to max(|x|, |z dx/dz|), or absolute. whole: without a width. */
typedef struct {
    float tol, rounding;
    int relative, whole;
} Rule;

/* What was decided: [n] each; then the lowest and highest frontier of rows that move, how many move, how many overflow. */
typedef struct {
    uint8_t *here, *beyond;
    double *largest;
    int64_t summary[4];
} Found;

/* As Python fills it in. */
typedef struct {
    Rows rows;
    Rule rule;
    Found found;
} Sweep;

/* The largest change of a position [dim], NaN if it is not finite, and whether it stands still. Changes up to `least`,
 * if that is not negative, are not measured. */
static float measure(const Rule *rule, long dim, const float *now, const float *seen, const float *z, const float *slope,
                     float least, int *still) {
    float most = 0;
    *still = 1;
    for (long j = 0; j < dim; j++) {
        float d = fabsf(now[j] - seen[j]), size = fabsf(now[j]), change = d;
        if (!isfinite(d)) {
            *still = 0;
            return NAN;
        }
        if (d <= (rule->relative ? least * size : least)) continue; /* the exponential would take most of the time */
        if (rule->relative) {
            if (d > rule->rounding * size || d > rule->tol * size) { /* else |x| alone decides */
                float reach = fabsf(z[j]) * expf(slope[j]);
                if (reach <= FLT_MAX && reach > size) size = reach;
            }
            change = d == 0 ? 0 : d / size;
            if (!(change <= FLT_MAX)) change = FLT_MAX;
        } else if (size < 1) {
            size = 1;
        }
        *still &= d <= rule->rounding * size;
        most = change > most ? change : most;
    }
    return most;
}

/* One row, whose window begins at position `first` and is `w` wide; batch_width: the width that was asked for. */
static void accept_row(const Rows *rows, const Rule *rule, Found *found, long i, long first, long w, long batch_width,
                       const float *now, const float *slope, int cached) {
    long length = rows->length, dim = rows->dim, low = rows->frontier[i];
    long end = first + w < length ? first + w : length, count = end - low;
    float changes[count];
    uint8_t still[count];
    float *seen = rows->seen + i * rows->seen_row, *answer = rows->answer + i * rows->answer_row;
    const float *z = rows->z + i * rows->z_row, *guess = rows->guess + i * rows->guess_row;
    int all_small = low + batch_width >= length, decided = 0; /* whether later positions count as the largest only */
    double largest = 0;
    found->here[i] = found->beyond[i] = 0;
    for (long k = 0; k < count; k++) {
        long t = low + k, at = (t - first) * dim;
        int stands;
        changes[k] = measure(rule, dim, now + at, seen + t * dim, z + t * dim, slope + at,
                             decided ? (float)largest : -1, &stands);
        still[k] = (uint8_t)stands;
        all_small &= stands || changes[k] <= rule->tol;
        if (changes[k] > largest) largest = changes[k];
        decided |= !stands && (rule->whole ? !all_small : !(changes[k] <= rule->tol));
        if (isnan(changes[k])) *(k ? found->beyond + i : found->here + i) = 1;
    }
    if (found->here[i]) found->beyond[i] = 0;
    long run = 0, loose = 0, first_loose = count;
    while (run < count && (still[run] || (rule->whole ? all_small : changes[run] <= rule->tol))) run++;
    long advance = run < count && !isnan(changes[run]) ? run + 1 : run;
    for (long k = 0; k < count && first_loose == count; k++)
        if (!still[k]) first_loose = k;
    loose = first_loose < advance - 1;
    for (long k = 0; loose && k < run; k++)
        if (changes[k] > rows->change[i]) rows->change[i] = changes[k];
    for (long k = 0, to; k < count; k = to) { /* a stretch of positions that are finite, or are not */
        int lost = isnan(changes[k]) != 0;
        for (to = k + 1; to < count && (isnan(changes[to]) != 0) == lost;) to++;
        long from = lost || k >= advance ? k : advance - 1 < to ? advance - 1 : to;
        const float *given = lost ? guess + low * dim : now + (low - first) * dim;
        memcpy(seen + (low + from) * dim, given + from * dim, (to - from) * dim * sizeof(float));
        if (lost) continue;
        memcpy(answer + (low + k) * dim, given + k * dim, (to - k) * dim * sizeof(float));
        for (long j = k; j < to; j++) {
            const float *each = slope + (low + j - first) * dim;
            float total = each[0];
            for (long d = 1; d < dim; d++) total += each[d];
            rows->log_slope[i * rows->log_slope_row + low + j] = total;
        }
    }
    found->largest[i] = largest;
    rows->evaluated[i] += count + (cached ? 0 : low - 1);
    rows->sweeps[i] += 1;
    if (loose && rows->status[i] < CONVERGED) rows->status[i] = CONVERGED;
    rows->frontier[i] = low + advance;
}

/* The results of a sweep [n][w][dim] over windows that begin at starts[i] if `each`, else all at *starts. */
void jf_accept(Sweep *sweep, const int64_t *starts, long each, long w, long batch_width, const float *now,
               const float *slope, int cached) {
    const Rows *rows = &sweep->rows;
    Found *found = &sweep->found;
    int64_t *sum = found->summary;
    sum[0] = rows->length, sum[1] = 0, sum[2] = 0, sum[3] = 0;
    for (long i = 0; i < rows->n; i++) {
        long first = starts[each ? i : 0], step = w * rows->dim;
        found->here[i] = found->beyond[i] = 0, found->largest[i] = 0;
        if (rows->frontier[i] >= rows->length || rows->status[i] >= SWEEP_LIMIT) continue;
        accept_row(rows, &sweep->rule, found, i, first, w, batch_width, now + i * step, slope + i * step, cached);
        sum[3] += found->here[i] | found->beyond[i];
        if (rows->frontier[i] >= rows->length) continue;
        sum[0] = rows->frontier[i] < sum[0] ? rows->frontier[i] : sum[0];
        sum[1] = rows->frontier[i] > sum[1] ? rows->frontier[i] : sum[1];
        sum[2] += 1;
    }
}
