/* What a core can do at best while others do the same: the limits that benchmarks/kernels.py compares with. */
#include <time.h>

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Seconds of 24 * count products of 16 numbers with sums in registers (32 operations each): the least within
 * `seconds`. */
double multiplying(long count, double seconds) {
    double best = 1e9, end = now() + seconds;
    for (double began; (began = now()) < end;) {
        vec s[24], a = {0.5f}, b = {0.5f};
#pragma GCC unroll 24
        for (int i = 0; i < 24; i++) s[i] = a;
        for (long k = 0; k < count; k++)
#pragma GCC unroll 24
            for (int i = 0; i < 24; i++) {
                s[i] = s[i] * a + b;
                __asm__ volatile("" : "+v"(s[i]));
            }
        double took = now() - began;
        if (took < best) best = took;
    }
    return best;
}

/* Seconds to read n numbers again: the least within `seconds`. */
double reading(const float *x, long n, double seconds) {
    static _Thread_local float sink;
    double best = 1e9, end = now() + seconds;
    for (double began; (began = now()) < end;) {
        vec s[8] = {{0}};
        for (long k = 0; k + 128 <= n; k += 128)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) s[i] += *(const vec *)(x + k + 16 * i);
        double took = now() - began;
        for (int i = 0; i < 8; i++) sink += s[i][0];
        if (took < best) best = took;
    }
    return best;
}
