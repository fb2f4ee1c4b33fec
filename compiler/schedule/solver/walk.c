/* The annealing of compiler/schedule/solver/moves.py, step for step: the same draws give the same slots. compiled.py
   calls it. The functions have the names of those in moves.py and timing.py, where they are explained. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../files/heap.h"
#include "../../files/random.h"

/* ---------------- The problem (problem.py) */

enum { MOST_CHUNKS = 16, B = 16, I = 32, W = 48, NUM_TOKENS = 64, FIXED = NUM_TOKENS * (NUM_TOKENS + 1) };
enum { NEVER, NOW, NOBODY, FIRST };

typedef struct {
    int64_t num_rows, num_chunks, count, num_events, parts, w_parts, has_equal_w, gap, room; /* room: slots of a row */
    const int64_t *caps;         /* [row] */
    const int64_t *counts;       /* [row][chunk] */
    const int64_t *needs, *makes; /* [row][kind], with two kinds of each chunk */
    const int64_t *delay;        /* [event] */
    const int64_t *times;        /* [row][slot] */
    const char *offered;         /* [row][slot] */
} Problem;

static int64_t pair(int64_t a, int64_t b) {
    return a < b ? NUM_TOKENS * (a + 1) + b : NUM_TOKENS * (b + 1) + a;
}

/* `TOKENS`: the tokens of a slot, ascending; none of a fixed slot. Returns how many there are. */
static int tokens_of(int64_t slot, int64_t tokens[2]) {
    if (slot >= FIXED)
        return 0;
    if (slot < NUM_TOKENS) {
        tokens[0] = slot;
        return 1;
    }
    tokens[0] = slot / NUM_TOKENS - 1;
    tokens[1] = slot % NUM_TOKENS;
    return 2;
}

static int64_t at_least(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* ---------------- Rows (timing.py) */

typedef struct {
    int64_t time, waits[2], makes[2];
} Step;

typedef struct {
    int64_t size; /* slots; the other lists but `chunks` have one item more */
    int64_t *slots;
    Step *steps;
    int64_t *states; /* [slot][state] */
    int64_t *work;
    int64_t *chunks, num_chunks;
    int keeps_chunks; /* whether `chunks` are those of the row before the change */
} Row;

static const Step END = {0, {NEVER, NEVER}, {NOBODY, NOBODY}};

static Row *new_row(Heap *heap, const Problem *problem) {
    int64_t room = problem->room + 1, state = 2 * problem->num_chunks + 3;
    Row *row = take(heap, sizeof *row);
    int64_t *slots = take(heap, room * sizeof *slots), *states = take(heap, room * state * sizeof *states);
    int64_t *work = take(heap, room * sizeof *work), *chunks = take(heap, room * sizeof *chunks);
    Step *steps = take(heap, room * sizeof *steps);
    if (!heap->failed)
        *row = (Row){0, slots, steps, states, work, chunks, 0, 0};
    return row;
}

/* `_of_chunks`: the slot with each W written with the chunk of the next due gradient */
static int64_t of_chunks(int64_t slot, const int64_t *chunks, int64_t num_chunks) {
    int64_t tokens[2] = {0}, next = 0;
    int num_tokens = tokens_of(slot, tokens);
    for (int i = 0; i < num_tokens; i++)
        if (tokens[i] == W) {
            tokens[i] = W + (next < num_chunks ? chunks[next] : 0);
            next++;
        }
    return num_tokens == 1 ? tokens[0] : pair(tokens[0], tokens[1]);
}

/* Fills `line`, whose `slots` and `size` are set. Returns 0 if it is illegal. */
static int change_row(const Problem *problem, int64_t row, const Row *old, Row *line, int64_t first, int64_t equal) {
    int64_t C = problem->num_chunks, width = 2 * C + 3, parts = problem->parts, w_parts = problem->w_parts;
    const int64_t *counts = problem->counts + row * C, *times = problem->times + row * FIXED;
    const int64_t *needs = problem->needs + row * 2 * C, *makes = problem->makes + row * 2 * C;
    int64_t cap = problem->caps[row], last = line->size - equal, state[2 * MOST_CHUNKS + 3], *done = state;
    memcpy(state, old->states + first * width, width * sizeof *state);
    int64_t *live = state + 2 * C, *split = live + 1, *due = live + 2, before = *split, work = old->work[first];
    memcpy(line->steps, old->steps, first * sizeof *line->steps);
    memcpy(line->states, old->states, first * width * sizeof *line->states);
    memcpy(line->work, old->work, first * sizeof *line->work);
    line->num_chunks = problem->has_equal_w ? 0 : before;
    memcpy(line->chunks, old->chunks, line->num_chunks * sizeof *line->chunks);
    line->keeps_chunks = 0;
    for (int64_t index = first; index < last; index++) {
        memcpy(line->states + index * width, state, width * sizeof *state);
        line->work[index] = work;
        int64_t slot = line->slots[index] % FIXED, tokens[2] = {0};
        int num_tokens = tokens_of(slot, tokens);
        Step *step = line->steps + index;
        if (problem->has_equal_w) {
            step->time = times[slot];
        } else {
            int64_t begin = *split - *due;
            step->time = times[of_chunks(slot, line->chunks + begin, line->num_chunks - begin)];
            for (int i = 0; i < num_tokens; i++)
                if (I <= tokens[i] && tokens[i] < W)
                    line->chunks[line->num_chunks++] = tokens[i] % MOST_CHUNKS;
        }
        work += step->time;
        step->waits[1] = NOW;
        step->makes[1] = NOBODY;
        int64_t freed = 0, splits = 0;
        /* The later kind first, so that no action of a pair can depend on the other. */
        for (int i = num_tokens - 1, place = 0; i >= 0; i--, place++) {
            int64_t token = tokens[i], chunk = token % MOST_CHUNKS, kind = token < B ? chunk : C + chunk;
            if (token == W) {
                if (!*due)
                    return 0;
                --*due;
                freed += w_parts;
                step->waits[place] = NOW;
                step->makes[place] = NOBODY;
                continue;
            }
            int64_t k = done[kind];
            if (token < B) {
                *live += parts;
                if (k >= counts[chunk])
                    return 0;
            } else {
                if (k >= done[chunk])
                    return 0;
                freed += token < I ? parts : parts - w_parts;
                splits += token >= I;
            }
            done[kind] = k + 1;
            step->waits[place] = needs[kind] + k;
            step->makes[place] = makes[kind] + k;
        }
        if (*live > cap)
            return 0;
        *live -= freed;
        *split += splits;
        *due += splits;
    }
    int64_t end = old->size - equal;
    if (!problem->has_equal_w && equal) {
        int64_t old_split = old->states[end * width + 2 * C + 1], num_new = line->num_chunks - before;
        int64_t num_old = at_least(0, (old_split < old->num_chunks ? old_split : old->num_chunks) - before);
        if (num_new != num_old || memcmp(line->chunks + before, old->chunks + before, num_new * sizeof *line->chunks))
            return change_row(problem, row, old, line, first, 0); /* later W are for other chunks */
        line->num_chunks = old->num_chunks;
        memcpy(line->chunks, old->chunks, line->num_chunks * sizeof *line->chunks);
        line->keeps_chunks = 1;
    }
    memcpy(line->steps + last, old->steps + end, (equal + 1) * sizeof *line->steps);
    if (equal)
        memcpy(line->states + last * width, old->states + end * width, (equal + 1) * width * sizeof *state);
    else
        memcpy(line->states + last * width, state, width * sizeof *state);
    line->work[last] = work;
    int64_t added = work - old->work[end];
    for (int64_t i = 1; i <= equal; i++)
        line->work[last + i] = old->work[end + i] + added;
    return 1;
}

/* ---------------- Timing (timing.py) */

typedef struct {
    int64_t users, num_timed, *events, *positions, *clocks;
} Mark;

typedef struct {
    int64_t *order, size;
    Mark **marks;
    int64_t num_marks, room; /* of `marks` and `tails` */
    int64_t *ends;
    int64_t *tails, num_tails; /* [from the last mark][row] */
    int64_t *behind;
} Timing;

typedef struct {
    const Problem *problem;
    Heap heap;
    Mark **spare; /* marks that nobody uses */
    int64_t num_spare, room_spare;
    Row **lines, **others, **candidate; /* [row]: the rows, room for a change of each, and the changed rows */
    int64_t *events, *positions, *clocks, *bounds, room_bounds;
    int64_t *order, *later; /* scratch of `is_longer` */
    struct Timed { int64_t start, index, row; } *timed;
} Walk;

static int64_t most_slots(const Problem *problem) {
    return problem->num_rows * (problem->room + 1);
}

static Timing *new_timing(Walk *walk) {
    const Problem *problem = walk->problem;
    Timing *timing = take(&walk->heap, sizeof *timing);
    int64_t *order = take(&walk->heap, most_slots(problem) * sizeof *order);
    int64_t *ends = take(&walk->heap, problem->num_rows * sizeof *ends);
    int64_t *behind = take(&walk->heap, problem->num_events * sizeof *behind);
    if (!walk->heap.failed)
        *timing = (Timing){order, 0, NULL, 0, 0, ends, NULL, 0, behind};
    return timing;
}

static Mark *new_mark(Walk *walk, int64_t num_timed) {
    const Problem *problem = walk->problem;
    Mark *mark;
    if (walk->num_spare) {
        mark = walk->spare[--walk->num_spare];
    } else {
        mark = take(&walk->heap, sizeof *mark);
        int64_t *events = take(&walk->heap, problem->num_events * sizeof *events);
        int64_t *positions = take(&walk->heap, 2 * problem->num_rows * sizeof *positions);
        if (walk->heap.failed)
            return NULL;
        *mark = (Mark){0, 0, events, positions, positions + problem->num_rows};
    }
    mark->users = 1;
    mark->num_timed = num_timed;
    memcpy(mark->events, walk->events, problem->num_events * sizeof *mark->events);
    memcpy(mark->positions, walk->positions, problem->num_rows * sizeof *mark->positions);
    memcpy(mark->clocks, walk->clocks, problem->num_rows * sizeof *mark->clocks);
    return mark;
}

/* Room for twice as many items, with the old ones */
static void *grown(Heap *heap, const void *old, int64_t size, int64_t new_size) {
    void *new = take(heap, new_size);
    if (!heap->failed && size)
        memcpy(new, old, size);
    return new;
}

static void add_mark(Walk *walk, Timing *timing, Mark *mark) {
    if (timing->num_marks == timing->room && !walk->heap.failed) {
        int64_t room = timing->room ? 2 * timing->room : 64, rows = walk->problem->num_rows;
        timing->marks = grown(&walk->heap, timing->marks, timing->room * sizeof mark, room * sizeof mark);
        timing->tails = take(&walk->heap, room * rows * sizeof *timing->tails);
        timing->num_tails = 0; /* made again */
        timing->room = room;
    }
    if (!walk->heap.failed)
        timing->marks[timing->num_marks++] = mark;
}

static void drop_marks(Walk *walk, Timing *timing) {
    for (int64_t i = 0; i < timing->num_marks; i++)
        if (!--timing->marks[i]->users) {
            if (walk->num_spare == walk->room_spare) {
                int64_t room = walk->room_spare ? 2 * walk->room_spare : 64;
                walk->spare = grown(
                    &walk->heap, walk->spare, walk->room_spare * sizeof *walk->spare, room * sizeof *walk->spare);
                walk->room_spare = room;
            }
            if (!walk->heap.failed)
                walk->spare[walk->num_spare++] = timing->marks[i];
        }
    timing->num_marks = timing->num_tails = 0;
}

static void go_to(Walk *walk, const Mark *mark) {
    memcpy(walk->events, mark->events, walk->problem->num_events * sizeof *walk->events);
    memcpy(walk->positions, mark->positions, walk->problem->num_rows * sizeof *walk->positions);
    memcpy(walk->clocks, mark->clocks, walk->problem->num_rows * sizeof *walk->clocks);
}

/* Times the next slot of a row if what it waits for is there; returns whether it is. */
static int time_slot(Walk *walk, Row *const *lines, int64_t row) {
    const Step *step = lines[row]->steps + walk->positions[row];
    int64_t *events = walk->events, ready = events[step->waits[0]], also = events[step->waits[1]];
    if (ready < 0 || also < 0)
        return 0;
    const int64_t *delay = walk->problem->delay;
    int64_t end = at_least(at_least(walk->clocks[row], ready), also) + step->time;
    walk->clocks[row] = end;
    walk->positions[row]++;
    events[step->makes[0]] = end + delay[step->makes[0]];
    events[step->makes[1]] = end + delay[step->makes[1]];
    return 1;
}

/* `retime_rows`: fills `timing` with the timing of `lines` from the mark `first` of `old` on. `limit` < 0: none.
   Returns 0 if there is none. `timing` has no marks before. */
static int retime_rows(
    Walk *walk, const Timing *old, Row *const *lines, int64_t first, int64_t limit, Timing *timing) {
    const Problem *problem = walk->problem;
    int64_t rows = problem->num_rows, begun = old->marks[first]->num_timed, remaining = 0;
    go_to(walk, old->marks[first]);
    for (int64_t i = 0; i < first; i++) {
        old->marks[i]->users++;
        add_mark(walk, timing, old->marks[i]);
    }
    memcpy(timing->order, old->order, begun * sizeof *timing->order);
    timing->size = begun;
    for (int64_t segment = first; segment < old->num_marks; segment++) {
        int64_t end = segment + 1 < old->num_marks ? old->marks[segment + 1]->num_timed : old->size;
        add_mark(walk, timing, new_mark(walk, timing->size));
        if (walk->heap.failed)
            return 0;
        for (int64_t i = old->marks[segment]->num_timed; i < end; i++)
            if (time_slot(walk, lines, old->order[i]))
                timing->order[timing->size++] = old->order[i];
        if (limit >= 0)
            for (int64_t row = 0; row < rows; row++) {
                const Row *line = lines[row];
                if (walk->clocks[row] - line->work[walk->positions[row]] + line->work[line->size] > limit)
                    return 0;
            }
    }
    for (int64_t row = 0; row < rows; row++)
        remaining += lines[row]->size - walk->positions[row];
    while (remaining) {
        int64_t before = remaining;
        if (timing->size - timing->marks[timing->num_marks - 1]->num_timed >= problem->gap)
            add_mark(walk, timing, new_mark(walk, timing->size));
        if (walk->heap.failed)
            return 0;
        for (int64_t row = 0; row < rows; row++)
            while (time_slot(walk, lines, row)) {
                timing->order[timing->size++] = row;
                remaining--;
            }
        if (remaining == before)
            return 0;
    }
    memcpy(timing->ends, walk->clocks, rows * sizeof *timing->ends);
    return 1;
}

static int earlier(const void *a, const void *b) {
    const struct Timed *first = a, *second = b;
    if (first->start != second->start)
        return first->start < second->start ? -1 : 1;
    return first->index < second->index ? -1 : first->index > second->index;
}

/* `sort_by_time`: fills `timing`; `sorted` is scratch */
static int sort_by_time(Walk *walk, const Timing *old, Row *const *lines, Timing *sorted, Timing *timing) {
    go_to(walk, old->marks[0]);
    for (int64_t index = 0; index < old->size; index++) {
        int64_t row = old->order[index];
        const Step *step = lines[row]->steps + walk->positions[row];
        time_slot(walk, lines, row);
        walk->timed[index] = (struct Timed){walk->clocks[row] - step->time, index, row};
    }
    qsort(walk->timed, old->size, sizeof *walk->timed, earlier);
    go_to(walk, old->marks[0]);
    for (int64_t index = 0; index < old->size; index++) {
        sorted->order[index] = walk->timed[index].row;
        if (index % walk->problem->gap == 0) /* only their numbers are used, and the state of the first */
            add_mark(walk, sorted, new_mark(walk, index));
    }
    sorted->size = old->size;
    int found = !walk->heap.failed && retime_rows(walk, sorted, lines, 0, -1, timing);
    drop_marks(walk, sorted);
    return found;
}

typedef struct { int64_t row, added; } Changed; /* added: how many more slots the row has */

/* `_tails`: the tails of the rows at a mark */
static const int64_t *tails_at(
    Walk *walk, Timing *timing, Row *const *lines, int64_t mark, const Changed *changed, int64_t num_changed) {
    const Problem *problem = walk->problem;
    const int64_t *delay = problem->delay;
    int64_t rows = problem->num_rows, *behind = timing->behind, *positions = walk->positions;
    if (!timing->num_tails)
        for (int64_t event = 0; event < problem->num_events; event++)
            behind[event] = -delay[event]; /* for events that nobody waits for */
    while (timing->num_marks - timing->num_tails > mark) {
        int64_t at = timing->num_marks - 1 - timing->num_tails, end = timing->size;
        int64_t *tails = timing->tails + timing->num_tails * rows;
        if (timing->num_tails) {
            const Mark *next = timing->marks[at + 1];
            end = next->num_timed;
            memcpy(tails, tails - rows, rows * sizeof *tails);
            memcpy(positions, next->positions, rows * sizeof *positions);
            for (int64_t i = 0; i < num_changed; i++)
                positions[changed[i].row] += changed[i].added;
        } else {
            memset(tails, 0, rows * sizeof *tails);
            for (int64_t row = 0; row < rows; row++)
                positions[row] = lines[row]->size;
        }
        for (int64_t i = end - 1; i >= timing->marks[at]->num_timed; i--) {
            int64_t row = timing->order[i];
            const Step *step = lines[row]->steps + --positions[row];
            int64_t tail = at_least(tails[row], behind[step->makes[0]] + delay[step->makes[0]]);
            tail = at_least(tail, behind[step->makes[1]] + delay[step->makes[1]]);
            tails[row] = behind[step->waits[0]] = behind[step->waits[1]] = tail + step->time;
        }
        timing->num_tails++;
    }
    return timing->tails + (timing->num_marks - 1 - mark) * rows;
}

static int is_longer(
    Walk *walk, Timing *old, Row *const *lines, int64_t first, int64_t last, const Changed *changed,
    int64_t num_changed, int64_t limit) {
    const Mark *begin = old->marks[first], *end = old->marks[last];
    int64_t size = end->num_timed - begin->num_timed, *order = walk->order, *later = walk->later;
    memcpy(order, old->order + begin->num_timed, size * sizeof *order);
    for (int64_t i = 0; i < num_changed; i++) {
        int64_t row = changed[i].row;
        for (int64_t n = 0; n < changed[i].added; n++)
            order[size++] = row;
        for (int64_t n = 0; n < -changed[i].added; n++) {
            int64_t place = size - 1;
            while (order[place] != row)
                place--;
            memmove(order + place, order + place + 1, (size - 1 - place) * sizeof *order);
            size--;
        }
    }
    go_to(walk, begin);
    while (size) {
        int64_t num_later = 0;
        for (int64_t i = 0; i < size; i++)
            if (!time_slot(walk, lines, order[i]))
                later[num_later++] = order[i];
        if (num_later == size)
            return 1;
        int64_t *swapped = order;
        order = later;
        later = swapped;
        size = num_later;
    }
    int64_t rows = walk->problem->num_rows, *starts = walk->clocks;
    for (int64_t row = 0; row < rows; row++) {
        const Step *step = lines[row]->steps + walk->positions[row];
        starts[row] = at_least(starts[row], at_least(walk->events[step->waits[0]], walk->events[step->waits[1]]));
    }
    const int64_t *tails = tails_at(walk, old, lines, last, changed, num_changed);
    for (int64_t row = 0; row < rows; row++)
        if (starts[row] + tails[row] > limit)
            return 1;
    return 0;
}

/* ---------------- Small changes (moves.py) */

typedef struct {
    Draw *draw;
    double drawn[32]; /* the draws of the first change, which are repeated in other rows */
    int num_drawn, place, repeats;
} Draws;

static double next_draw(Draws *draws) {
    if (!draws->repeats)
        return draws->drawn[draws->num_drawn++] = share(draws->draw);
    return draws->place < draws->num_drawn ? draws->drawn[draws->place++] : share(draws->draw);
}

typedef struct {
    int64_t *slots, size, first, equal; /* first slot that differs, and equal ones at the end */
} Change;

static void start_change(Change *new, const Row *old) {
    memcpy(new->slots, old->slots, old->size * sizeof *new->slots);
    new->size = old->size;
}

static void insert(Change *new, int64_t place, int64_t slot) {
    memmove(new->slots + place + 1, new->slots + place, (new->size - place) * sizeof *new->slots);
    new->slots[place] = slot;
    new->size++;
}

/* Put the one or no slot `remaining` (-1: none) in place of another. */
static void replace(Change *new, int64_t place, int64_t remaining) {
    if (remaining >= 0) {
        new->slots[place] = remaining;
        return;
    }
    memmove(new->slots + place, new->slots + place + 1, (new->size - 1 - place) * sizeof *new->slots);
    new->size--;
}

static int is_inside(const Row *old, int64_t gap) {
    return 0 < gap && gap < old->size && old->slots[gap - 1] >= FIXED && old->slots[gap] >= FIXED;
}

static int64_t replace_token(int64_t slot, int64_t old, int64_t new) {
    int64_t tokens[2] = {0};
    if (slot < NUM_TOKENS)
        return new;
    tokens_of(slot, tokens);
    return tokens[0] == old ? pair(new, tokens[1]) : pair(tokens[0], new);
}

static int64_t distance(Draws *draws) {
    int64_t far = 1 + (int64_t)(40 * pow(next_draw(draws), 5.0));
    return next_draw(draws) < 0.5 ? far : -far;
}

static int replace_and_insert(
    const Row *old, int64_t position, int64_t remaining, int64_t moved, int64_t gap, Change *new) {
    if (gap < 0 || gap > old->size || ((gap == position || gap == position + 1) && remaining < 0) ||
        is_inside(old, gap))
        return 0;
    start_change(new, old);
    if (gap > position) {
        insert(new, gap, moved);
        replace(new, position, remaining);
        new->first = position;
        new->equal = old->size - gap;
    } else {
        replace(new, position, remaining);
        insert(new, gap, moved);
        new->first = gap;
        new->equal = old->size - 1 - position;
    }
    return 1;
}

static int shift(const Row *old, int64_t position, Draws *draws, Change *new) {
    int64_t slot = old->slots[position];
    if (slot >= FIXED)
        return 0;
    return replace_and_insert(old, position, -1, slot, position + distance(draws), new);
}

static void set_span(Change *new, const Row *old, int64_t a, int64_t b) {
    new->first = a < b ? a : b;
    new->equal = old->size - 1 - (a < b ? b : a);
}

static int move_token(const Row *old, int64_t position, Draws *draws, const char *offered, Change *new) {
    int64_t tokens[2] = {0}, others[2] = {0};
    int num_tokens = tokens_of(old->slots[position], tokens);
    if (!num_tokens)
        return 0;
    int index = (int)(next_draw(draws) * num_tokens);
    int64_t token = tokens[index], remaining = num_tokens == 2 ? tokens[1 - index] : -1;
    int64_t target = position + distance(draws);
    if (next_draw(draws) < 0.25)
        return replace_and_insert(old, position, remaining, token, target, new);
    if (target < 0 || target >= old->size || target == position)
        return 0;
    int num_others = tokens_of(old->slots[target], others);
    if (!num_others)
        return 0;
    start_change(new, old);
    if (num_others == 1) {
        int64_t joined = pair(token, others[0]);
        if (!offered[joined])
            return 0;
        new->slots[target] = joined;
        replace(new, position, remaining);
    } else {
        int back = (int)(next_draw(draws) * 2);
        int64_t there = pair(token, others[1 - back]);
        int64_t here = remaining >= 0 ? pair(others[back], remaining) : others[back];
        if (!offered[there] || !offered[here])
            return 0;
        new->slots[target] = there;
        new->slots[position] = here;
    }
    set_span(new, old, position, target);
    return 1;
}

static int swap_chunks(const Row *old, int64_t position, Draws *draws, const char *offered, Change *new) {
    int64_t tokens[2] = {0}, others[2] = {0};
    int num_tokens = tokens_of(old->slots[position], tokens);
    if (!num_tokens)
        return 0;
    int64_t token = tokens[(int)(next_draw(draws) * num_tokens)], kind = token / MOST_CHUNKS;
    int64_t step = next_draw(draws) < 0.5 ? 1 : -1;
    for (int64_t target = position + step; 0 <= target && target < old->size && token < W; target += step) {
        int num_others = tokens_of(old->slots[target], others);
        for (int i = 0; i < num_others; i++)
            if (others[i] != token && others[i] / MOST_CHUNKS == kind) {
                int64_t here = replace_token(old->slots[position], token, others[i]);
                int64_t there = replace_token(old->slots[target], others[i], token);
                if (!offered[here] || !offered[there])
                    return 0;
                start_change(new, old);
                new->slots[position] = here;
                new->slots[target] = there;
                set_span(new, old, position, target);
                return 1;
            }
    }
    return 0;
}

/* The first token of a slot from `low` up to before `high`; -1 if there is none */
static int64_t token_between(int64_t slot, int64_t low, int64_t high) {
    int64_t tokens[2] = {0};
    int num_tokens = tokens_of(slot, tokens);
    for (int i = 0; i < num_tokens; i++)
        if (low <= tokens[i] && tokens[i] < high)
            return tokens[i];
    return -1;
}

static int split(const Row *old, int64_t position, Draws *draws, Change *new) {
    int64_t slot = old->slots[position], back = token_between(slot, B, I);
    if (back < 0)
        return 0;
    double place = next_draw(draws);
    place *= next_draw(draws);
    int64_t target = position + 1 + (int64_t)(place * old->size);
    target = target < old->size ? target : old->size;
    if (is_inside(old, target))
        return 0;
    start_change(new, old);
    new->slots[position] = replace_token(slot, back, back + MOST_CHUNKS);
    insert(new, target, W);
    new->first = position;
    new->equal = old->size - target;
    return 1;
}

static int unsplit(const Row *old, int64_t position, Change *new) {
    int64_t slot = old->slots[position], back = token_between(slot, I, W), target = position + 1, tokens[2] = {0};
    if (back < 0)
        return 0;
    while (target < old->size && token_between(old->slots[target], W, W + 1) < 0)
        target++;
    if (target >= old->size)
        return 0;
    start_change(new, old);
    new->slots[position] = replace_token(slot, back, back - MOST_CHUNKS);
    int num_tokens = tokens_of(old->slots[target], tokens);
    replace(new, target, num_tokens == 1 ? -1 : tokens[tokens[0] == W]);
    new->first = position;
    new->equal = old->size - 1 - target;
    return 1;
}

static int change(const Row *old, int64_t position, Draws *draws, const char *offered, Change *new) {
    double kind = next_draw(draws);
    if (kind < 0.35)
        return shift(old, position, draws, new);
    if (kind < 0.8)
        return move_token(old, position, draws, offered, new);
    if (kind < 0.85)
        return swap_chunks(old, position, draws, offered, new);
    return split(old, position, draws, new) || unsplit(old, position, new);
}

/* ---------------- Annealing (moves.py) */

#define DRAWN 3.0
#define CHANGED 10.0
#define SLOT 0.2
#define ONE_ROW 0.3
#define GO_ON 0.9
#define LATE 0.5
#define HOW_LATE 0.25
enum { NEAR = 12, SORTED = 50 };

static int64_t nearest_equal_slot(const Row *line, int64_t slot, int64_t around) {
    for (int64_t far = 0; far < NEAR; far++)
        for (int side = -1; side <= 1; side += 2) {
            int64_t place = around + side * far;
            if (0 <= place && place < line->size && line->slots[place] == slot)
                return place;
        }
    return -1;
}

/* `_change_rows`: fills `candidate`, `changed` and the marks between which rows differ. Returns how many differ. */
static int64_t change_rows(
    Walk *walk, const Timing *timing, Draw *draw, Changed *changed, int64_t *first_mark, int64_t *last_mark) {
    const Problem *problem = walk->problem;
    int64_t rows = problem->num_rows, row = (int64_t)(share(draw) * rows), num_changed = 0;
    int64_t first = timing->num_marks - 1, last = 0;
    double place = share(draw) < LATE ? pow(share(draw), HOW_LATE) : share(draw);
    int64_t size = walk->lines[row]->size, position = (int64_t)(place * size);
    position = position < size - 1 ? position : size - 1; /* a root may be rounded to 1 */
    double go_on = share(draw) > ONE_ROW ? GO_ON : 0.0;
    int64_t step = share(draw) < 0.5 ? 1 : -1;
    Draws draws = {.draw = draw};
    memcpy(walk->candidate, walk->lines, rows * sizeof *walk->lines);
    for (;;) {
        const Row *old = walk->lines[row];
        Row *line = walk->others[row];
        Change new = {.slots = line->slots};
        if (!change(old, position, &draws, problem->offered + row * FIXED, &new))
            return 0;
        line->size = new.size;
        if (!change_row(problem, row, old, line, new.first, new.equal))
            return 0;
        walk->candidate[row] = line;
        changed[num_changed++] = (Changed){row, line->size - old->size};
        while (timing->marks[first]->positions[row] > new.first)
            first--;
        if (!problem->has_equal_w && !line->keeps_chunks) /* the time of a later W may change */
            last = timing->num_marks;
        while (last < timing->num_marks && timing->marks[last]->positions[row] < old->size - new.equal)
            last++;
        int64_t next = row + step;
        if (share(draw) >= go_on || next < 0 || next >= rows)
            break;
        const int64_t *positions = timing->marks[first]->positions;
        int64_t around = positions[next] + position - positions[row];
        position = nearest_equal_slot(walk->lines[next], old->slots[position], around);
        if (position < 0)
            break;
        row = next;
        draws.repeats = 1;
        draws.place = 0;
    }
    *first_mark = first;
    *last_mark = last;
    return num_changed;
}

static int64_t makespan_of(const Timing *timing, int64_t rows) {
    int64_t makespan = 0;
    for (int64_t row = 0; row < rows; row++)
        makespan = at_least(makespan, timing->ends[row]);
    return makespan;
}

typedef __int128 Value; /* a makespan may need almost 64 bits */

static Value value_of(const Timing *timing, int64_t rows) {
    Value value = (Value)rows * makespan_of(timing, rows);
    for (int64_t row = 0; row < rows; row++)
        value += timing->ends[row];
    return value;
}

static void keep(Walk *walk, int64_t *slots, int64_t *sizes) {
    for (int64_t row = 0; row < walk->problem->num_rows; row++) {
        sizes[row] = walk->lines[row]->size;
        memcpy(slots + row * walk->problem->room, walk->lines[row]->slots, sizes[row] * sizeof *slots);
    }
}

/* Sets up a walk from legal slots. Returns 0 without memory. */
static int start(Walk *walk, const int64_t *slots, const int64_t *sizes) {
    const Problem *problem = walk->problem;
    int64_t rows = problem->num_rows, width = 2 * problem->num_chunks + 3;
    Heap *heap = &walk->heap;
    walk->lines = take(heap, 3 * rows * sizeof *walk->lines);
    walk->others = walk->lines + rows;
    walk->candidate = walk->others + rows;
    walk->events = take(heap, problem->num_events * sizeof *walk->events);
    walk->positions = take(heap, 2 * rows * sizeof *walk->positions);
    walk->clocks = walk->positions + rows;
    walk->order = take(heap, 2 * most_slots(problem) * sizeof *walk->order);
    walk->later = walk->order + most_slots(problem);
    walk->timed = take(heap, most_slots(problem) * sizeof *walk->timed);
    Row *empty = new_row(heap, problem);
    for (int64_t row = 0; row < rows && !heap->failed; row++) {
        walk->lines[row] = new_row(heap, problem);
        walk->others[row] = new_row(heap, problem);
        if (heap->failed)
            break;
        empty->steps[0] = END;
        empty->work[0] = 0;
        memset(empty->states, 0, width * sizeof *empty->states);
        walk->lines[row]->size = sizes[row];
        memcpy(walk->lines[row]->slots, slots + row * problem->room, sizes[row] * sizeof *slots);
        if (!change_row(problem, row, empty, walk->lines[row], 0, 0))
            return 0;
    }
    return !heap->failed;
}

/* `timing_of` without the sort: fills `timing` with the timing of the walk's rows. `scratch` is an empty timing. */
static int time_rows(Walk *walk, Timing *scratch, Timing *timing) {
    const Problem *problem = walk->problem;
    if (walk->heap.failed)
        return 0;
    for (int64_t event = 0; event < problem->num_events; event++)
        walk->events[event] = NOW <= event && event < FIRST + problem->count ? 0 : -1;
    memset(walk->positions, 0, 2 * problem->num_rows * sizeof *walk->positions); /* and the clocks */
    add_mark(walk, scratch, new_mark(walk, 0));
    scratch->size = 0;
    int found = !walk->heap.failed && retime_rows(walk, scratch, walk->lines, 0, -1, timing);
    drop_marks(walk, scratch);
    return found;
}

static void swap(Timing **a, Timing **b) {
    Timing *first = *a;
    *a = *b;
    *b = first;
}

static int walk_on(
    Walk *walk, Draw *draw, double work, double temperature, double cooling, int64_t goal, int64_t *slots,
    int64_t *sizes, int64_t best[3]) {
    int64_t rows = walk->problem->num_rows, accepted = 0;
    Timing *timing = new_timing(walk), *other = new_timing(walk), *sorted = new_timing(walk);
    Changed *changed = take(&walk->heap, rows * sizeof *changed);
    if (!time_rows(walk, sorted, other) || !sort_by_time(walk, other, walk->lines, sorted, timing))
        return 0;
    drop_marks(walk, other);
    Value value = value_of(timing, rows), best_value = value;
    best[0] = makespan_of(timing, rows);
    double spent = 0.0;
    while (spent < work && best[0] > goal) {
        spent += DRAWN;
        int64_t first, last, num_changed = change_rows(walk, timing, draw, changed, &first, &last);
        if (!num_changed)
            continue;
        double allowed = -log(1 - share(draw)) * temperature * exp(cooling * spent);
        int64_t limit = makespan_of(timing, rows) + (int64_t)(allowed / rows);
        int64_t begin = timing->marks[first]->num_timed, size = timing->size;
        spent += CHANGED * num_changed;
        if (last < timing->num_marks) {
            spent += SLOT * (timing->marks[last]->num_timed - begin);
            if (is_longer(walk, timing, walk->candidate, first, last, changed, num_changed, limit))
                continue;
        }
        spent += SLOT * (size - begin);
        if (!retime_rows(walk, timing, walk->candidate, first, limit, other)) {
            if (walk->heap.failed)
                return 0;
            drop_marks(walk, other);
            continue;
        }
        Value new_value = value_of(other, rows);
        if (new_value - value > (Value)allowed) { /* as a whole number, so exactly as in Python */
            drop_marks(walk, other);
            continue;
        }
        spent += SLOT * size; /* for its tails */
        for (int64_t i = 0; i < num_changed; i++) {
            int64_t row = changed[i].row;
            Row *line = walk->others[row];
            walk->others[row] = walk->lines[row];
            walk->lines[row] = line;
        }
        drop_marks(walk, timing);
        swap(&timing, &other);
        value = new_value;
        if (++accepted % SORTED == 0) {
            if (!sort_by_time(walk, timing, walk->lines, sorted, other))
                return 0;
            drop_marks(walk, timing);
            swap(&timing, &other);
        }
        int64_t makespan = makespan_of(timing, rows);
        if (makespan < best[0] || (makespan == best[0] && value < best_value)) {
            best[0] = makespan;
            best_value = value;
            keep(walk, slots, sizes);
        }
    }
    best[1] = (int64_t)(best_value >> 62);
    best[2] = (int64_t)(best_value & (((Value)1 << 62) - 1));
    return !walk->heap.failed;
}

/* `anneal` of moves.py. `slots` [row][room] and `sizes` [row]: the rows to start from, and then the best ones.
   `best`: their makespan, and the high and the 62 low bits of their value. Returns 0, or 1 without memory or if the
   start is not legal. */
int anneal(
    const Problem *problem, Draw *draw, double work, double temperature, double cooling, int64_t goal, int64_t *slots,
    int64_t *sizes, int64_t *best) {
    Walk walk = {.problem = problem};
    int found = start(&walk, slots, sizes) &&
                walk_on(&walk, draw, work, temperature, cooling, goal, slots, sizes, best);
    free_all(&walk.heap);
    return !found;
}

/* `makespan_of` of cycle.py: the makespan of rows; -1 if there is none, -2 without memory */
int64_t makespan(const Problem *problem, const int64_t *slots, const int64_t *sizes) {
    Walk walk = {.problem = problem};
    int64_t result = -1, width = 2 * problem->num_chunks + 3;
    int legal = start(&walk, slots, sizes);
    for (int64_t row = 0; legal && row < problem->num_rows; row++) {
        const Row *line = walk.lines[row];
        const int64_t *state = line->states + line->size * width, *counts = problem->counts + row * problem->num_chunks;
        for (int64_t kind = 0; kind < 2 * problem->num_chunks; kind++)
            legal = legal && state[kind] == counts[kind % problem->num_chunks];
        legal = legal && !state[width - 1];
    }
    if (legal) {
        Timing *timing = new_timing(&walk), *first = new_timing(&walk);
        if (time_rows(&walk, first, timing))
            result = makespan_of(timing, problem->num_rows);
    }
    if (walk.heap.failed)
        result = -2;
    free_all(&walk.heap);
    return result;
}
