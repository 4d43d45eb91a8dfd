#ifndef KVROUTE_BLOCKS_H
#define KVROUTE_BLOCKS_H

#include "sets.h"

/* Blocks. Free ones form maximal runs, in bins. The first of a run keeps START, its length and the next run in
 * the bin as its key; the last (of two or more) the number of the first. */

#define START ((u64)1 << 63)

static inline int is_free(const Index *x, u32 id) { return (x->word[id] & FREE) != 0; }

static inline u32 run_length(const Index *x, u32 start) { return (u32)(x->key[start] >> ID_BITS) & NIL; }

static u32 bin_of(u32 length) {
    u32 bin = 0;
    while (length >>= 1)
        bin++;
    return bin;
}

static void run_link(Index *x, u32 start, u32 length) {
    u32 *bin = &x->bins[bin_of(length)];
    if (length > 1)
        x->key[start + length - 1] = start;
    x->key[start] = START | (u64)length << ID_BITS | *bin;
    x->word[start] = FREE | NIL;
    if (*bin != NIL)
        x->word[*bin] = FREE | start;
    *bin = start;
}

static void run_unlink(Index *x, u32 start) {
    u32 next = (u32)x->key[start] & NIL, before = x->word[start] & NIL;
    if (before == NIL)
        x->bins[bin_of(run_length(x, start))] = next;
    else
        x->key[before] = (x->key[before] & ~(u64)NIL) | next;
    if (next != NIL)
        x->word[next] = FREE | before;
}

static int blocks_resize(Index *x, u32 cap) {
    u64 *key = resized(x->key, cap + 1, sizeof(u64));
    if (key)
        x->key = key;
    u32 *word = resized(x->word, cap + 1, sizeof(u32));
    if (word)
        x->word = word;
    u16 *gen = resized(x->gen, cap + 1, sizeof(u16));
    if (gen)
        x->gen = gen;
    if (cap > x->cap && !(key && word && gen))
        return -1; /* what has grown already does no harm, and neither does what did not shrink */
    x->cap = cap;
    return 0;
}

static int blocks_reserve(Index *x) {
    if (x->top < x->cap || x->free_blocks > x->blocks / 4)
        return 0;
    u32 cap = x->cap + x->cap / 8 + 64;
    if (cap < NIL && blocks_resize(x, cap) == 0)
        return 0;
    return x->free_blocks ? 0 : -1;
}

static u32 take_front(Index *x, u32 start) {
    u32 length = run_length(x, start);
    run_unlink(x, start);
    if (length > 1)
        run_link(x, start + 1, length - 1);
    x->free_blocks--;
    return start;
}

/* A number for a block: the one after `before` if it can be, else where `wanted` follow it. Room reserved. */
static u32 take_id(Index *x, u32 before, u32 wanted) {
    if (before != NIL && before + 1 < x->top && is_free(x, before + 1))
        return take_front(x, before + 1);
    if (before == NIL || before + 1 != x->top || x->top == x->cap) {
        u32 bin = bin_of(wanted) + (wanted & (wanted - 1) ? 1 : 0);
        for (; bin < BINS; bin++)
            if (x->bins[bin] != NIL)
                return take_front(x, x->bins[bin]);
        if (x->top == x->cap || x->free_blocks > x->blocks / 4)
            for (bin = BINS; bin-- > 0;)
                if (x->bins[bin] != NIL)
                    return take_front(x, x->bins[bin]);
    }
    return x->top++;
}

static void give_id(Index *x, u32 id) {
    u32 start = id, end = id + 1;
    if (id && is_free(x, id - 1)) {
        start = x->key[id - 1] & START ? id - 1 : (u32)x->key[id - 1];
        run_unlink(x, start);
    }
    if (end < x->top && is_free(x, end)) {
        u32 next = end;
        end += run_length(x, next);
        run_unlink(x, next);
    }
    x->word[id] = FREE;
    x->free_blocks++;
    if (end < x->top) {
        run_link(x, start, end - start);
        return;
    }
    x->free_blocks -= end - start;
    x->top = start;
    if (x->cap > 256 && x->top < x->cap / 3)
        (void)blocks_resize(x, x->top + x->top / 2);
}

static int parent_of(const Index *x, u32 id, u64 *key) {
    if (x->word[id] & ROOT)
        return 0;
    *key = x->word[id] & CONT ? x->key[id - 1] : *map_find(x, &x->parents, id, 0);
    return 1;
}

static inline void set_block(Index *x, u32 id, u32 set) {
    u32 old = x->word[id] & SET_MASK;
    x->sets.refs[set]++;
    x->word[id] = (x->word[id] & ~SET_MASK) | set;
    x->sets.refs[old]--;
    set_release(x, old);
}

/* Forget a block that nobody holds. -1 without memory, and then nothing has changed. */
static int drop_block(Index *x, u32 id) {
    u32 next = id + 1;
    if (next < x->top && !is_free(x, next) && x->word[next] & CONT) {
        if (map_reserve(x, &x->parents) < 0)
            return -1;
        map_put(x, &x->parents, next, 0, x->key[id]);
        x->word[next] &= ~CONT;
    }
    if (!(x->word[id] & (CONT | ROOT))) {
        map_delete(x, &x->parents, id, 0);
        map_shrink(x, &x->parents);
    }
    u32 set = x->word[id] & SET_MASK;
    x->sets.refs[set]--;
    set_release(x, set);
    table_delete(x, id);
    x->blocks--;
    give_id(x, id);
    if (!x->blocks)
        sets_free(x);
    return 0;
}

/* Give a block another set; without holders it is forgotten. -1 without memory. */
static int change_block(Index *x, u32 id, u32 set) {
    if (set == FAILED)
        return -1;
    if (!set)
        return drop_block(x, id);
    if (set != (x->word[id] & SET_MASK))
        set_block(x, id, set);
    return 0;
}

#endif
