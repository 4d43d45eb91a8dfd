#ifndef KVROUTE_SETS_H
#define KVROUTE_SETS_H

#include "queue.h"

/* Interned sets of (slot, tier). Set 0 is the empty one. */

static inline u64 *set_words(const Index *x, u32 set) { return x->sets.words + (size_t)set * TIERS * x->words; }

static inline int set_has(const Index *x, u32 set, u32 slot, u32 tier) {
    return (int)(set_words(x, set)[tier * x->words + slot / 64] >> (slot % 64) & 1);
}

/* Does not depend on how wide sets are. */
static u32 words_hash(const Index *x, const u64 *words) {
    u64 hash = 0;
    for (u32 tier = 0; tier < TIERS; tier++)
        for (u32 i = 0; i < x->words; i++)
            if (words[tier * x->words + i])
                hash = mixed(x, hash ^ mixed(x, words[tier * x->words + i]) ^ ((u64)i << 8 | tier));
    return (u32)hash;
}

static int sets_rehash(Index *x, u32 cap) {
    Sets *s = &x->sets;
    u32 *table = zeroed(cap, sizeof(u32));
    if (!table)
        return -1;
    for (u32 set = 1; set < s->top; set++)
        if (s->refs[set]) {
            u32 at = in_range(s->hash[set], cap);
            while (table[at])
                at = at + 1 == cap ? 0 : at + 1;
            table[at] = set;
        }
    PyMem_RawFree(s->table);
    s->table = table;
    s->table_cap = cap;
    return 0;
}

static int sets_reserve(Index *x) {
    Sets *s = &x->sets;
    if ((u64)s->live * 10 + 10 > (u64)s->table_cap * 7 && sets_rehash(x, s->table_cap + s->table_cap / 2 + 16) < 0)
        return -1;
    if (s->unused || s->top < s->cap)
        return 0;
    u32 cap = s->cap + s->cap / 4 + 16;
    if (cap > SET_MASK)
        return -1;
    /* `cap` moves when all three have grown; that one is larger than it says does no harm. */
    u64 *words = resized(s->words, (u64)cap * TIERS * x->words, sizeof(u64));
    if (!words)
        return -1;
    s->words = words;
    u32 *refs = resized(s->refs, cap, sizeof(u32));
    if (!refs)
        return -1;
    s->refs = refs;
    u32 *hash = resized(s->hash, cap, sizeof(u32));
    if (!hash)
        return -1;
    s->hash = hash;
    s->cap = cap;
    return 0;
}

/* The set of these words (not those of a set), with no reference added; FAILED without memory. */
static u32 set_of(Index *x, const u64 *words) {
    Sets *s = &x->sets;
    u64 any = 0;
    for (u32 i = 0; i < TIERS * x->words; i++)
        any |= words[i];
    if (!any)
        return 0;
    if (sets_reserve(x) < 0)
        return FAILED;
    u32 hash = words_hash(x, words);
    size_t bytes = TIERS * x->words * sizeof(u64);
    u32 at = in_range(hash, s->table_cap);
    for (; s->table[at]; at = at + 1 == s->table_cap ? 0 : at + 1)
        if (s->hash[s->table[at]] == hash && !memcmp(set_words(x, s->table[at]), words, bytes))
            return s->table[at];
    u32 set = s->unused;
    if (set)
        s->unused = s->hash[set];
    else
        set = s->top++;
    memcpy(set_words(x, set), words, bytes);
    s->hash[set] = hash;
    s->refs[set] = 0;
    s->table[at] = set;
    s->live++;
    return set;
}

static void set_release(Index *x, u32 set) {
    Sets *s = &x->sets;
    if (!set || s->refs[set])
        return;
    u32 hole = in_range(s->hash[set], s->table_cap);
    while (s->table[hole] != set)
        hole = hole + 1 == s->table_cap ? 0 : hole + 1;
    for (u32 at = hole;;) {
        at = at + 1 == s->table_cap ? 0 : at + 1;
        if (!s->table[at])
            break;
        if (may_fill(hole, at, in_range(s->hash[s->table[at]], s->table_cap), s->table_cap)) {
            s->table[hole] = s->table[at];
            hole = at;
        }
    }
    s->table[hole] = 0;
    s->hash[set] = s->unused;
    s->unused = set;
    s->live--;
    x->last.to = FAILED;
}

static void sets_free(Index *x) {
    Sets *s = &x->sets;
    PyMem_RawFree(s->words);
    PyMem_RawFree(s->refs);
    PyMem_RawFree(s->hash);
    PyMem_RawFree(s->table);
    *s = (Sets){.top = 1};
}

/* `set` with a slot taken from the tiers in `clear` and put in those in `add` (a bit each). */
static u32 set_changed(Index *x, u32 set, u32 slot, u32 clear, u32 add) {
    if (x->last.to != FAILED && x->last.from == set && x->last.slot == slot && x->last.clear == clear &&
        x->last.add == add)
        return x->last.to;
    if (set)
        memcpy(x->scratch, set_words(x, set), TIERS * x->words * sizeof(u64));
    else
        memset(x->scratch, 0, TIERS * x->words * sizeof(u64));
    for (u32 tier = 0; tier < TIERS; tier++) {
        u64 *word = &x->scratch[tier * x->words + slot / 64], bit = (u64)1 << (slot % 64);
        if (clear >> tier & 1)
            *word &= ~bit;
        if (add >> tier & 1)
            *word |= bit;
    }
    u32 to = set_of(x, x->scratch);
    if (to != FAILED) {
        x->last.from = set;
        x->last.slot = slot;
        x->last.clear = clear;
        x->last.add = add;
        x->last.to = to;
    }
    return to;
}

#endif
