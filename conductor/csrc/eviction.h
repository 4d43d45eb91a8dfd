/* What memory is used, and how it is given back. */
#ifndef KVROUTE_EVICTION_H
#define KVROUTE_EVICTION_H

#include "lookup.h"

/* Entries that a table for `count` has when it is tight: full enough, and not so full that it soon grows. */
static u32 tight(u32 count, u32 percent) { return count ? (u32)((u64)count * 100 / percent) + 8 : 0; }

static u32 tight_blocks(u32 blocks) { return blocks ? blocks + blocks / 32 + 16 : 0; }

enum { NAMES_LOAD = 64, TABLE_LOAD = 52, MAP_LOAD = 60, QUEUE_LOAD = 90 };

static inline u64 capacity(u32 cap, u32 least, int if_tight) { return if_tight ? least : cap; }

/* What is allocated, or is at most once all tables have been made tight. */
static u64 memory(const Index *x, int if_tight) {
    const Sets *s = &x->sets;
    u64 bytes = sizeof(Index) + capacity(x->cap, tight_blocks(x->blocks), if_tight) * BLOCK_BYTES +
                capacity(x->parents.cap, tight(x->parents.count, MAP_LOAD), if_tight) * sizeof(Pair) +
                (u64)s->cap * (TIERS * x->words * sizeof(u64) + 2 * sizeof(u32)) +
                (u64)s->table_cap * sizeof(u32) + (u64)x->slot_cap * sizeof(Slot) +
                (3 + TIERS) * (u64)x->words * sizeof(u64);
    for (const Shard *t = x->shards; t < x->shards + SHARDS; t++)
        bytes += capacity(t->cap, tight(t->count, TABLE_LOAD), if_tight) * sizeof(u32);
    for (const Slot *at = x->slots; at < x->slots + x->slot_cap; at++) {
        u64 queued = capacity(at->probable.cap, tight(at->probable.count, QUEUE_LOAD), if_tight);
        bytes += capacity(at->names.cap, tight(at->names.count, NAMES_LOAD), if_tight) * sizeof(Name) +
                 capacity(at->side.cap, tight(at->side.count, MAP_LOAD), if_tight) * sizeof(Pair) +
                 queued * sizeof(Node) + queued * 3 / 2 * sizeof(u32);
    }
    return bytes;
}

typedef struct { u32 *mark, *order, *starts; Map parents; } Room;

#define DROPPED FAILED

/* Everything that eviction needs, before it begins: it cannot fail half way. */
static int room_for_eviction(Index *x, Room *room) {
    room->mark = zeroed((u64)x->top + 1, sizeof(u32));
    room->order = zeroed((u64)x->blocks + 1, sizeof(u32));
    room->starts = zeroed(UINT16_MAX + 2, sizeof(u32));
    room->parents = (Map){zeroed((u64)x->parents.cap + 8, sizeof(Pair)), x->parents.cap + 8, 0};
    return room->mark && room->order && room->starts && room->parents.at ? 0 : -1;
}

static void order_by_generation(const Index *x, u32 *order, u32 *starts) {
    for (u32 id = 0; id < x->top; id++)
        if (!is_free(x, id))
            starts[x->gen[id] + 1]++;
    for (u32 gen = 0; gen <= UINT16_MAX; gen++)
        starts[gen + 1] += starts[gen];
    for (u32 id = 0; id < x->top; id++)
        if (!is_free(x, id))
            order[starts[x->gen[id]]++] = id;
}

static u32 parent_block(const Index *x, u32 id) {
    u64 key;
    if (x->word[id] & CONT)
        return id - 1;
    return parent_of(x, id, &key) ? find_block(x, key) : NIL;
}

#define PASSED 0x80000000u

/* Mark the least recently stored, leaves before what they hang on. mark: children left, and PASSED. */
static u32 choose(const Index *x, u32 *mark, const u32 *order, u32 wanted) {
    u32 dropped = 0;
    for (u32 id = 0; id < x->top; id++)
        if (!is_free(x, id)) {
            u32 parent = parent_block(x, id);
            if (parent != NIL)
                mark[parent]++;
        }
    for (u32 i = 0; i < x->blocks && dropped < wanted; i++) {
        u32 id = order[i];
        mark[id] |= PASSED;
        while (id != NIL && mark[id] == PASSED && dropped < wanted) {
            mark[id] = DROPPED;
            dropped++;
            id = parent_block(x, id);
            if (id != NIL)
                mark[id]--;
        }
    }
    if (!dropped && wanted && x->blocks) { /* chains that bite their own tail */
        mark[order[0]] = DROPPED;
        dropped = 1;
    }
    return dropped;
}

/* Take dropped blocks out of the slots' books; names first, while blocks are where they were. */
static void forget_names(Index *x, const u32 *mark) {
    for (u32 slot = 0; slot < x->slot_cap; slot++) {
        Slot *s = &x->slots[slot];
        for (u32 at = 0; at < s->names.cap;) {
            Name *name = &s->names.at[at];
            if (!name->value || mark[name->value & NIL] != DROPPED) {
                at++;
                continue;
            }
            for (u32 tier = 0; tier < PROBABLE; tier++) {
                map_delete(x, &s->side, hash_of(name), COUNT_OF(tier));
                map_delete(x, &s->side, x->key[name->value & NIL], ALIAS_OF(tier));
            }
            name_delete(x, &s->names, name);
        }
        for (u32 node = s->probable.count ? s->probable.head : NIL, next; node != NIL; node = next) {
            next = s->probable.at[node].after;
            if (mark[s->probable.at[node].block] == DROPPED)
                queue_delete(x, &s->probable, node);
        }
    }
}

/* Of the rest of the books. Its key stays in place until blocks are renumbered. */
static void uncount(Index *x, u32 id) {
    u32 set = x->word[id] & SET_MASK;
    for (u32 tier = 0; tier < TIERS; tier++)
        for (u32 at = 0; at < x->words; at++) {
            u64 bits = set_words(x, set)[tier * x->words + at] & x->open_bits[at];
            for (; bits; bits &= bits - 1) {
                x->slots[at * 64 + lowest_bit(bits)].held[tier]--;
                *(tier == PROBABLE ? &x->probable : &x->entries) -= 1;
            }
        }
    x->sets.refs[set]--;
    set_release(x, set);
    table_delete(x, id);
    x->blocks--;
}

/* Number what is left without gaps; mark becomes old number -> new. */
static void renumber(Index *x, u32 *mark, Map *parents) {
    u32 top = 0, left = NIL; /* the new number of the block that was one before, if it is left */
    for (u32 id = 0; id < x->top; id++) {
        if (is_free(x, id) || mark[id] == DROPPED) {
            left = NIL;
            continue;
        }
        u64 key;
        u32 bits = x->word[id] & ROOT;
        if (!bits) {
            if (x->word[id] & CONT && left != NIL) {
                bits = CONT;
            } else {
                /* x->key[id - 1] is untouched where it matters: a dropped or free block is never written over
                 * before those behind it have been read, but by one that moved down to it. */
                (void)parent_of(x, id, &key);
                if (top && x->key[top - 1] == key)
                    bits = CONT;
                else
                    map_put(x, parents, top, 0, key);
            }
        }
        mark[id] = top;
        x->key[top] = x->key[id];
        x->gen[top] = x->gen[id];
        x->word[top] = (x->word[id] & SET_MASK) | bits;
        left = top++;
    }
    x->top = top;
}

/* After blocks were renumbered: tables that name blocks. */
static void rename_blocks(Index *x, const u32 *now) {
    for (const Shard *s = x->shards; s < x->shards + SHARDS; s++)
        for (u32 at = 0; at < s->cap; at++)
            if (s->at[at])
                s->at[at] = (s->at[at] & ~NIL) | (now[(s->at[at] & NIL) - 1] + 1);
    for (u32 slot = 0; slot < x->slot_cap; slot++) {
        Names *n = &x->slots[slot].names;
        for (u32 at = 0; at < n->cap; at++)
            if (n->at[at].value)
                n->at[at].value = (n->at[at].value & ~NIL) | now[n->at[at].value & NIL];
        Queue *q = &x->slots[slot].probable;
        if (q->table_cap)
            memset(q->table, 0, q->table_cap * sizeof(u32));
        for (u32 node = q->count ? q->head : NIL; node != NIL; node = q->at[node].after) {
            q->at[node].block = now[q->at[node].block];
            queue_index(x, q, node);
        }
    }
}

/* Give back what tables have too much. Where that needs memory that is not there, they stay. */
static void tighten(Index *x) {
    for (Shard *s = x->shards; s < x->shards + SHARDS; s++)
        if (tight(s->count, TABLE_LOAD) < s->cap)
            (void)shard_resize(x, s, tight(s->count, TABLE_LOAD));
    for (Slot *s = x->slots; s < x->slots + x->slot_cap; s++) {
        if (tight(s->names.count, NAMES_LOAD) < s->names.cap)
            (void)names_resize(x, &s->names, tight(s->names.count, NAMES_LOAD));
        if (tight(s->side.count, MAP_LOAD) < s->side.cap)
            (void)map_resize(x, &s->side, tight(s->side.count, MAP_LOAD));
        if (tight(s->probable.count, QUEUE_LOAD) < s->probable.cap)
            (void)queue_resize(x, &s->probable, tight(s->probable.count, QUEUE_LOAD));
    }
    if (tight(x->parents.count, MAP_LOAD) < x->parents.cap)
        (void)map_resize(x, &x->parents, tight(x->parents.count, MAP_LOAD));
    if (tight_blocks(x->blocks) < x->cap)
        (void)blocks_resize(x, tight_blocks(x->blocks));
    if (!x->blocks)
        sets_free(x);
}

/* Drop so many blocks and close all gaps; -1 without memory, and then nothing has changed. */
static int compact(Index *x, u32 wanted) {
    Room room;
    int failed = room_for_eviction(x, &room);
    if (!failed) {
        if (wanted) {
            order_by_generation(x, room.order, room.starts);
            (void)choose(x, room.mark, room.order, wanted);
            forget_names(x, room.mark);
            for (u32 id = 0; id < x->top; id++)
                if (!is_free(x, id) && room.mark[id] == DROPPED)
                    uncount(x, id);
        }
        renumber(x, room.mark, &room.parents);
        Map old = x->parents;
        x->parents = room.parents;
        room.parents = old;
        for (u32 bin = 0; bin < BINS; bin++)
            x->bins[bin] = NIL;
        x->free_blocks = 0;
        x->cursor = x->top; /* a sweep under way begins again */
        rename_blocks(x, room.mark);
        tighten(x);
    }
    PyMem_RawFree(room.mark);
    PyMem_RawFree(room.order);
    PyMem_RawFree(room.starts);
    PyMem_RawFree(room.parents.at);
    return failed;
}

/* How many of `count` to drop: a little more than their share, since a second time costs as much again. */
static u32 share(const Index *x, u64 count, u64 limit) {
    u64 least = memory(x, 1);
    if (least <= limit)
        return 0;
    u64 wanted = (u64)((double)count * ((double)(least - limit) / (double)least)) + count / 64 + 1;
    return (u32)(wanted < count ? wanted : count);
}

static int drop_oldest_probable(Index *x, u64 wanted) {
    while (wanted && x->probable)
        for (u32 slot = 0; slot < x->slot_cap && wanted; slot++)
            if (x->slots[slot].probable.count) {
                if (drop_probable(x, slot, x->slots[slot].probable.head) < 0)
                    return -1;
                wanted--;
            }
    return 0;
}

/* The first time dropping nothing may do: closing gaps is enough. */
static int evict(Index *x, u64 limit) {
    u32 least = 0, wanted;
    for (; memory(x, 0) > limit && x->probable; least = 1) {
        wanted = share(x, x->probable, limit);
        if (drop_oldest_probable(x, wanted > least ? wanted : least) < 0 || compact(x, 0) < 0)
            return -1;
    }
    for (; memory(x, 0) > limit && x->blocks; least = 1) {
        wanted = share(x, x->blocks, limit);
        if (compact(x, wanted > least ? wanted : least) < 0)
            return -1;
    }
    return 0;
}

#endif
