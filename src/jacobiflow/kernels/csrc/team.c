/* A job of 20 microseconds cannot pay for a new thread, which costs as much. Threads are created once; between jobs
 * they look for the next one for a while, then sleep.
 */
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define MOST 256
#define SPINS 20000  /* some 200 microseconds, longer than the Python code between two sweeps */
#define PATIENCE 300 /* spins of a thread that waits in a meeting, before it lets other programs run */

#define CROWDED 20   /* long waits for which a wait is remembered */
#define FOREVER 1e9

static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t wake;
    int workers, sleeping; /* workers: those that exist, numbered from 1 on */
    atomic_int tickets[MOST], running;
    void (*work)(void *job, int index);
    void *job;
} team = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static _Atomic double crowded_until;

int crowded(void) {
    double until = atomic_load_explicit(&crowded_until, memory_order_relaxed);
    return until && now() < until;
}

/* A while in which to wait without giving way. None where threads outnumber processors: the one that is waited for may
 * need this one. */
static int spins(int threads) {
    static atomic_long processors;
    if (!processors) processors = sysconf(_SC_NPROCESSORS_ONLN);
    return threads > processors ? 0 : PATIENCE;
}

static void wait_for(atomic_int *value, int other, int spins, double long_wait) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(value, memory_order_acquire) != other) return;
        rest();
    }
    if (atomic_load_explicit(value, memory_order_acquire) != other) return;
    double began = now();
    while (atomic_load_explicit(value, memory_order_acquire) == other) sched_yield();
    double end = now(), waited = end - began;
    if (waited > long_wait) atomic_store(&crowded_until, end + CROWDED * waited);
}

static void arrive(Meeting *meeting, double long_wait) {
    int turn = atomic_load(&meeting->turn);
    if (atomic_fetch_add(&meeting->arrived, 1) + 1 < meeting->threads) {
        wait_for(&meeting->turn, turn, spins(meeting->threads), long_wait);
        return;
    }
    atomic_store(&meeting->arrived, 0);
    atomic_fetch_add(&meeting->turn, 1);
}

void meet(Meeting *meeting) { arrive(meeting, meeting->long_wait); }

void meet_idle(Meeting *meeting) { arrive(meeting, FOREVER); }

static void *worker(void *given) {
    int index = (int)(long)given, last = 0;
    atomic_int *ticket = team.tickets + index;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load_explicit(ticket, memory_order_acquire) == last; i++) rest();
        if (atomic_load(ticket) == last) {
            pthread_mutex_lock(&team.lock);
            team.sleeping++;
            while (atomic_load(ticket) == last) pthread_cond_wait(&team.wake, &team.lock);
            team.sleeping--;
            pthread_mutex_unlock(&team.lock);
        }
        last = atomic_load(ticket);
        team.work(team.job, index);
        atomic_fetch_sub(&team.running, 1);
    }
    return 0;
}

/* A child of fork() has none of its parent's threads. */
static void forget(void) {
    pthread_mutex_init(&team.busy, 0);
    pthread_mutex_init(&team.lock, 0);
    pthread_cond_init(&team.wake, 0);
    team.workers = team.sleeping = 0;
    for (int i = 0; i < MOST; i++) atomic_store(team.tickets + i, 0);
}

static void prepare(void) { pthread_atfork(0, 0, forget); }

/* Whether there are so many workers, if need be new ones. Signals are the business of the threads of the program. */
static int hire(int workers) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    pthread_t thread;
    for (; team.workers < workers && team.workers + 1 < MOST; team.workers++) {
        long index = team.workers + 1;
        if (pthread_create(&thread, 0, worker, (void *)index)) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return team.workers >= workers;
}

int together(int threads, void (*work)(void *job, int index), void *job) {
    if (threads <= 1) {
        work(job, 0);
        return 0;
    }
    if (pthread_mutex_trylock(&team.busy)) return 1;
    int enough = hire(threads - 1);
    if (enough) {
        team.work = work, team.job = job;
        atomic_store(&team.running, threads - 1);
        for (int i = 1; i < threads; i++) atomic_fetch_add(team.tickets + i, 1);
        pthread_mutex_lock(&team.lock);
        if (team.sleeping) pthread_cond_broadcast(&team.wake);
        pthread_mutex_unlock(&team.lock);
        work(job, 0);
        for (int left; (left = atomic_load(&team.running));) wait_for(&team.running, left, spins(threads), FOREVER);
    }
    pthread_mutex_unlock(&team.busy);
    return !enough;
}
