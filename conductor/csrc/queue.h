#ifndef KVROUTE_QUEUE_H
#define KVROUTE_QUEUE_H

#include "tables.h"

/* What is probable in one slot: a queue, the oldest first, that finds a block and moves it to the end. */

static inline u32 queue_home(const Index *x, const Queue *q, u32 block) {
    return in_range(mixed(x, block), q->table_cap);
}

static u32 queue_find(const Index *x, const Queue *q, u32 block) {
    if (!q->count)
        return NIL;
    for (u32 at = queue_home(x, q, block); q->table[at]; at = at + 1 == q->table_cap ? 0 : at + 1)
        if (q->at[q->table[at] - 1].block == block)
            return q->table[at] - 1;
    return NIL;
}

static void queue_index(const Index *x, Queue *q, u32 node) {
    u32 at = queue_home(x, q, q->at[node].block);
    while (q->table[at])
        at = at + 1 == q->table_cap ? 0 : at + 1;
    q->table[at] = node + 1;
}

static void queue_link_last(Queue *q, u32 node) {
    q->at[node].before = q->tail;
    q->at[node].after = NIL;
    if (q->tail == NIL)
        q->head = node;
    else
        q->at[q->tail].after = node;
    q->tail = node;
}

static void queue_unlink(Queue *q, u32 node) {
    Node *n = &q->at[node];
    if (n->before == NIL)
        q->head = n->after;
    else
        q->at[n->before].after = n->after;
    if (n->after == NIL)
        q->tail = n->before;
    else
        q->at[n->after].before = n->before;
}

static int queue_resize(Index *x, Queue *q, u32 cap) {
    Queue fresh = {NULL, NULL, cap, cap + cap / 2, 0, NIL, NIL, NIL};
    if (cap) {
        fresh.at = zeroed(cap, sizeof(Node));
        fresh.table = zeroed(fresh.table_cap, sizeof(u32));
        if (!fresh.at || !fresh.table) {
            PyMem_RawFree(fresh.at);
            PyMem_RawFree(fresh.table);
            return -1;
        }
        for (u32 node = q->count ? q->head : NIL; node != NIL; node = q->at[node].after) {
            fresh.at[fresh.count].block = q->at[node].block;
            queue_link_last(&fresh, fresh.count);
            queue_index(x, &fresh, fresh.count++);
        }
        for (u32 node = cap; node-- > fresh.count;) {
            fresh.at[node].after = fresh.unused;
            fresh.unused = node;
        }
    }
    PyMem_RawFree(q->at);
    PyMem_RawFree(q->table);
    *q = fresh;
    return 0;
}

static int queue_reserve(Index *x, Queue *q) {
    return q->count < q->cap ? 0 : queue_resize(x, q, q->cap + q->cap / 2 + 8);
}

/* Room must have been reserved. */
static void queue_push(Index *x, Queue *q, u32 block) {
    u32 node = q->unused;
    q->unused = q->at[node].after;
    q->at[node].block = block;
    queue_link_last(q, node);
    queue_index(x, q, node);
    q->count++;
}

static void queue_delete(Index *x, Queue *q, u32 node) {
    u32 hole = queue_home(x, q, q->at[node].block);
    while (q->table[hole] != node + 1)
        hole = hole + 1 == q->table_cap ? 0 : hole + 1;
    for (u32 at = hole;;) {
        at = at + 1 == q->table_cap ? 0 : at + 1;
        if (!q->table[at])
            break;
        if (may_fill(hole, at, queue_home(x, q, q->at[q->table[at] - 1].block), q->table_cap)) {
            q->table[hole] = q->table[at];
            hole = at;
        }
    }
    q->table[hole] = 0;
    queue_unlink(q, node);
    q->at[node].after = q->unused;
    q->unused = node;
    q->count--;
}

static void queue_shrink(Index *x, Queue *q) {
    if (q->cap && (!q->count || (q->cap > 64 && q->count < q->cap / 5)))
        (void)queue_resize(x, q, q->count ? q->count * 2 + 8 : 0);
}

#endif
