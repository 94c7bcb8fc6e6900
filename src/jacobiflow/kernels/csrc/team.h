/* Threads that work on one job together and stay between jobs. */
#ifndef JACOBIFLOW_TEAM_H
#define JACOBIFLOW_TEAM_H

#include <stdatomic.h>

#pragma GCC visibility push(hidden)

/* Where the threads of a job wait for each other. Zero but for the first two at first. */
typedef struct {
    int threads;
    double long_wait; /* seconds after which the others seem to have lost their processor to another program */
    atomic_int arrived, turn;
} Meeting;

void meet(Meeting *meeting);

/* The same for threads that had nothing to do meanwhile. */
void meet_idle(Meeting *meeting);

/* Whether there were long waits of late. Then work that is split finely is faster in one thread. */
int crowded(void);

/* work(job, 0), ..., work(job, threads - 1) at the same time. 1 if the threads cannot be had, because the system
 * gives no more or another caller has them: nothing was done. */
int together(int threads, void (*work)(void *job, int index), void *job);

#pragma GCC visibility pop
#endif
