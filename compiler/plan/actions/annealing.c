/* The annealing of compiler/plan/actions/search.py, step for step: the same draws give the same order. compiled.py
   calls it. Times are nanoseconds below 2^53, so their differences are exact as doubles. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../files/random.h"

/* `_below` of search.py */
static int64_t below(Draw *draw, int64_t count) {
    int bits = 64 - __builtin_clzll((uint64_t)count);
    int64_t number;
    do
        number = word_of(draw) >> (32 - bits);
    while (number >= count);
    return number;
}

/* ---------------- Orders */

typedef struct {
    int64_t count;
    const int64_t *time, *least;   /* of each job: beside an exchange, and the least */
    const int64_t *first, *awaits; /* job j awaits awaits[first[j]] to awaits[first[j + 1] - 1] */
    const char *exchange;          /* of each job: whether it is an exchange */
    const char *after;             /* after[i * count + j]: whether job i comes after job j in any order */
} Jobs;

/* `end_of` of lanes.py. `ends`: scratch of `count` numbers */
static int64_t end_of(const Jobs *jobs, const int64_t *order, int64_t *ends) {
    int64_t compute = 0, link = 0;
    for (int64_t i = 0; i < jobs->count; i++) {
        int64_t job = order[i], time = jobs->time[job], busy;
        for (int64_t k = jobs->first[job]; k < jobs->first[job + 1]; k++)
            if (ends[jobs->awaits[k]] > compute)
                compute = ends[jobs->awaits[k]];
        busy = link - compute;
        if (jobs->exchange[job])
            link = ends[job] = (busy > 0 ? link : compute) + time;
        else if (busy <= 0)
            compute += jobs->least[job];
        else if (busy >= time)
            compute += time;
        else
            compute += busy + (int64_t)((__int128)jobs->least[job] * (time - busy) / time);
    }
    return compute > link ? compute : link;
}

static void move(int64_t *order, int64_t position, int64_t target) {
    int64_t job = order[position];
    if (position < target)
        memmove(order + position, order + position + 1, (target - position) * sizeof *order);
    else
        memmove(order + target + 1, order + target, (position - target) * sizeof *order);
    order[target] = job;
}

/* `_anneal` of search.py. `best`: the order to start from, and then the best one. Returns 0, or 1 without memory */
int anneal(const Jobs *jobs, Draw *draw, int64_t steps, double heat, double cooling, int64_t least, int64_t *best) {
    int64_t count = jobs->count, *order = malloc(2 * count * sizeof *order), *ends = order + count;
    if (!order)
        return 1;
    memcpy(order, best, count * sizeof *order);
    int64_t time = end_of(jobs, order, ends), least_time = time;
    for (int64_t step = 0; step < steps && least_time > least; step++) {
        heat *= cooling;
        int64_t position = below(draw, count), low = position, high = position, job = order[position];
        while (low > 0 && !jobs->after[job * count + order[low - 1]])
            low--;
        while (high < count - 1 && !jobs->after[order[high + 1] * count + job])
            high++;
        if (low == high)
            continue;
        int64_t target = low + below(draw, high - low);
        target += target >= position;
        move(order, position, target);
        int64_t end = end_of(jobs, order, ends);
        if (end <= time || share(draw) < exp((double)(time - end) / heat)) {
            time = end;
            if (end < least_time) {
                least_time = end;
                memcpy(best, order, count * sizeof *order);
            }
        } else {
            move(order, target, position);
        }
    }
    free(order);
    return 0;
}
