/* Vectors of the widest kind that the processor has, and small matrix products with them.
 *
 * Little but GCC's vector extensions is used, so any target that GCC or clang knows will do. Matrices on the
 * right are packed in panels of 16 columns: [panel][depth][16].
 */
#ifndef JACOBIFLOW_VECTOR_H
#define JACOBIFLOW_VECTOR_H

#include <math.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define PANEL 16 /* columns that are packed together; all widths are padded to it */
#define VECS (PANEL / LANES)
#define ROWS 6 /* of a tile: 6 x 16 sums fill the registers of AVX2 */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int ivec __attribute__((vector_size(4 * LANES)));
typedef unsigned uvec __attribute__((vector_size(4 * LANES))); /* whose overflow is defined */

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec x) { *(loose *)p = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE long up(long n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* a b + c, rounded once where the processor can: compilers choose from case to case, and sums would differ */
INLINE vec madd(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* pairs, then pairs of these: short chains, and the same order on every processor with as many lanes */
INLINE float sum(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
#endif
}

/* lane by lane, a where the mask says so, else b */
INLINE vec pick(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* the smaller and the larger, lane by lane; b where it is NaN */
INLINE vec vmin(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return pick(a < b, a, b);
#endif
}
INLINE vec vmax(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

/* of all lanes; NaN may be passed over */
INLINE float largest(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = x[0];
    for (int j = 1; j < LANES; j++) top = x[j] > top ? x[j] : top;
    return top;
#endif
}

/* e^x to single precision; NaN stays NaN, large x saturates just below overflow */
INLINE vec vexp(vec x) {
    x = vmax(all(-87.0f), vmin(all(88.0f), x));
    vec shifted = x * 1.44269504f + 12582912.0f; /* rounds to a whole number in the low bits */
    vec k = shifted - 12582912.0f;
    vec r = x - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    vec p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * r * r + r + 1.0f;
    uvec bits = ((uvec)shifted + 127) << 23; /* the mantissa's low bits hold k */
    return p * (vec)bits;
}

/* e^x, infinite where it overflows */
INLINE vec vexp_over(vec x) {
    ivec large = x > 80.0f;
    return vexp(pick(large, x - 16.0f, x)) * pick(large, all(8886110.5f), all(1.0f));
}

/* log x of a positive number */
INLINE vec vlog(vec x) {
    ivec bits = (ivec)x;
    ivec e = (bits >> 23) - 126;
    vec m = (vec)((bits & 0x7fffff) | 0x3f000000); /* in [1/2, 1) */
    ivec low = m < 0.70710678f;
    e += low; /* -1 where it holds */
    m = pick(low, m + m, m) - 1.0f;
    vec k = __builtin_convertvector(e, vec), z = m * m;
    vec y = m * 7.0376836e-2f - 1.1514610e-1f;
    y = y * m + 1.1676998e-1f;
    y = y * m - 1.2420141e-1f;
    y = y * m + 1.4249323e-1f;
    y = y * m - 1.6668057e-1f;
    y = y * m + 2.0000715e-1f;
    y = y * m - 2.4999994e-1f;
    y = y * m + 3.3333331e-1f;
    y = y * m * z - k * 2.12194440e-4f - z * 0.5f;
    return m + y + k * 0.693359375f + (x - x); /* what is not finite shows */
}

/* log(1 + e^x), accurate in both tails */
INLINE vec vsoftplus(vec x) {
    vec y = vexp(pick(x > 0, -x, x)), u = 1.0f + y;
    return pick(x > 0, x, all(0)) + vlog(u) - ((u - 1.0f) - y) / u;
}

/* x Phi(x), within 1e-6: Phi(x) - 1/2 is x times a polynomial in x^2, fitted on |x| <= 5.3, and 1/2 beyond */
INLINE vec vgelu(vec x) {
    const float fit[] = {1.5569873e-3f, -1.7809306e-3f, 2.2114171e-3f, -5.1156948e-3f, 9.3279202e-3f, -1.3557835e-2f, 1.8791547e-2f,
                         -2.5207913e-2f, 3.2095943e-2f, -3.9598156e-2f, 4.9263459e-2f, -6.6518240e-2f, 1.3339257e-1f};
    vec s = madd(vmin(all(28.09f), x * x), all(2 / 28.09f), all(-1)), p = all(-5.2142906e-4f);
#pragma GCC unroll 16
    for (int i = 0; i < 13; i++) p = madd(p, s, all(fit[i]));
    vec half = p * vmax(all(-5.3f), vmin(all(5.3f), x));
    return madd(x, vmax(all(-0.5f), vmin(all(0.5f), half)), x * 0.5f);
}

/* c[rows, panels of 16] = bias + a[rows, depth] b, or += with `add`, term by term; b's panels are `next` apart */
INLINE void tile(const int rows, const int panels, const float *a, long lda, const float *b, long ldb,
                 long next, long depth, float *c, long ldc, const float *bias, const int add) {
    const int wide = panels * VECS;
    vec s[ROWS][4 * VECS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int p = 0; p < wide; p++) {
            s[i][p] = bias ? load(bias + p * LANES) : all(0);
            if (add) s[i][p] += load(c + i * ldc + p * LANES);
        }
    for (long k = 0; k < depth; k++) {
        vec right[4 * VECS];
#pragma GCC unroll 16
        for (int p = 0; p < wide; p++) right[p] = load(b + p / VECS * next + p % VECS * LANES + k * ldb);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            vec left = all(a[i * lda + k]);
#pragma GCC unroll 16
            for (int p = 0; p < wide; p++) s[i][p] = madd(left, right[p], s[i][p]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int p = 0; p < wide; p++) store(c + i * ldc + p * LANES, s[i][p]);
}

/* all panels of one block of rows; few rows take several panels at once, to keep the units busy */
INLINE void strip(const int rows, const int wide, const float *a, long lda, const float *b, long ldb, long next,
                  long depth, long panels, float *c, long ldc, const float *bias, const int add) {
    long p = 0;
    for (; p + wide <= panels; p += wide)
        tile(rows, wide, a, lda, b + p * next, ldb, next, depth, c + p * PANEL, ldc, bias ? bias + p * PANEL : 0,
             add);
    for (; p < panels; p++)
        tile(rows, 1, a, lda, b + p * next, ldb, next, depth, c + p * PANEL, ldc, bias ? bias + p * PANEL : 0, add);
}

INLINE void block(long rows, const float *a, long lda, const float *b, long ldb, long next, long depth, long panels,
                  float *c, long ldc, const float *bias, const int add) {
    switch (rows) {
    case 1: strip(1, 4, a, lda, b, ldb, next, depth, panels, c, ldc, bias, add); break;
    case 2: strip(2, 2, a, lda, b, ldb, next, depth, panels, c, ldc, bias, add); break;
    case 3: strip(3, 2, a, lda, b, ldb, next, depth, panels, c, ldc, bias, add); break;
    case 4: strip(4, 1, a, lda, b, ldb, next, depth, panels, c, ldc, bias, add); break;
    case 5: strip(5, 1, a, lda, b, ldb, next, depth, panels, c, ldc, bias, add); break;
    default: strip(6, 1, a, lda, b, ldb, next, depth, panels, c, ldc, bias, add); break;
    }
}

#endif
