/* 64-bit checksums of pieces of memory, at the speed at which it can be read, beside other work if wanted.
 *
 * A lane takes one word after the other: y = state ^ word, then two xor-shifts and an odd product. Each step is a
 * bijection of the word, so that a change of a single word always changes the sum. The shifts carry the high bits
 * down: with products alone two flipped signs would cancel. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512DQ__)
typedef uint64_t words __attribute__((vector_size(64)));
#define VECTORS 4 /* whose steps do not wait for each other */
#elif defined(__AVX2__)
typedef uint64_t words __attribute__((vector_size(32)));
#define VECTORS 4
#else
typedef uint64_t words; /* few processors multiply vectors of such words well */
#define VECTORS 8
#endif
#define STEP ((long)(VECTORS * sizeof(words))) /* bytes */
#define LANES (STEP / 8)
#define MOST 16 /* threads */

static const uint64_t ODD = 0x9e3779b97f4a7c15u;

#define MIX(state, word) \
    (state) ^= (word), (state) ^= (state) >> 29, (state) *= ODD, (state) ^= (state) >> 32

static inline __attribute__((always_inline)) void step(words *state, const unsigned char *p) {
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        words word;
        memcpy(&word, p + i * sizeof word, sizeof word);
        MIX(state[i], word);
    }
}

static uint64_t checksum(const unsigned char *p, long bytes) {
    words state[VECTORS];
    uint64_t lanes[LANES], sum = (uint64_t)bytes;
    for (int i = 0; i < LANES; i++) lanes[i] = ODD * (uint64_t)(1 + i);
    memcpy(state, lanes, STEP);
    for (; bytes >= STEP; bytes -= STEP, p += STEP) step(state, p);
    if (bytes) {
        unsigned char rest[STEP];
        memset(rest, 0, STEP);
        memcpy(rest, p, bytes);
        step(state, rest);
    }
    memcpy(lanes, state, STEP);
    for (int i = 0; i < LANES; i++) MIX(sum, lanes[i]);
    return sum;
}

typedef struct {
    const unsigned char *start;
    long bytes;
} Piece;

typedef struct {
    const Piece *pieces;
    uint64_t *sums;
    long count, next; /* pieces, and the first that nobody has taken */
    int running;
    pthread_t threads[MOST];
} Job;

static void *work(void *of) {
    Job *job = of;
    for (long i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->count;)
        job->sums[i] = checksum(job->pieces[i].start, job->pieces[i].bytes);
    return 0;
}

/* Starts the sums of `count` pieces on threads of their own; *started stays NULL where there is no memory. */
void jf_checksums_begin(const Piece *pieces, long count, uint64_t *sums, int threads, Job **started) {
    Job *job = malloc(sizeof(Job));
    if (!job) return;
    *job = (Job){pieces, sums, count, 0, 0, {0}};
    if (threads > MOST) threads = MOST;
    while (job->running < threads && !pthread_create(job->threads + job->running, 0, work, job)) job->running++;
    *started = job;
}

/* Computes what is left of them, waits for the threads, frees the job; once, however often it is called. */
void jf_checksums_end(Job **started) {
    Job *job = *started;
    if (!job) return;
    work(job);
    for (int i = 0; i < job->running; i++) pthread_join(job->threads[i], 0);
    free(job);
    *started = 0;
}
