/* Matrix products of a few or many rows with a matrix on the right that is packed in panels. */
#ifndef JACOBIFLOW_GEMM_H
#define JACOBIFLOW_GEMM_H

#pragma GCC visibility push(hidden)

/* The right-hand side: panels of 16 columns, `next` floats apart, whose rows are `ldb` floats apart. With `pairs` every
 * float is two neighbours along the depth in bfloat16, here and on the left-hand side, and `depth` counts pairs. */
typedef struct {
    const float *b;
    long ldb, next, depth;
    int pairs;
} Panels;

/* What happens to a sum. SET: c = bias + a b. ADD: c += bias + a b. GELU: c = gelu(bias + a b). */
enum { SET, ADD, GELU };

/* Columns 16 first .. 16 last - 1 of c[rows][ldc] from a[rows][lda]; bias may be null. */
void product(long rows, const float *a, long lda, Panels right, long first, long last, float *c, long ldc,
             const float *bias, int what);

/* Rows of a[rows][columns] as pairs in bfloat16, `ldp` pairs apart. Columns are padded with zeros to a panel. */
void to_pairs(long rows, const float *a, long lda, long columns, float *pairs, long ldp);

#pragma GCC visibility pop
#endif
