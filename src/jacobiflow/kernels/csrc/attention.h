/* Causal attention over cached keys and values. */
#ifndef JACOBIFLOW_ATTENTION_H
#define JACOBIFLOW_ATTENTION_H

#pragma GCC visibility push(hidden)

#define QUERIES 12 /* that are attended to together at most */

/* Keys and values of one head. Keys lie as a product takes them, [T / 16][size][16]; values as [T][size]. */
typedef struct {
    float *keys, *values;
    long size; /* of a head, padded */
} Head;

/* Floats of room that `attend` needs. */
long attention_room(long length);

/* q[rows][ld] at positions from, from + 1, ... becomes softmax(scale q k') v over the positions up to its own. */
void attend(long rows, long from, float *q, long ld, Head head, long length, float scale, float *room);

#pragma GCC visibility pop
#endif
