/* Open addressing, linear probing, no tombstones: three tables of different shapes. */
#ifndef KVROUTE_TABLES_H
#define KVROUTE_TABLES_H

#include "index.h"

/* A map from (a, b) to a value, for what is rare. */

static u32 map_place(const Index *x, const Map *m, u64 a, u32 b) {
    u32 at = in_range(mixed(x, a + b * UINT64_C(0xD1B54A32D192ED03)), m->cap);
    while (m->at[at].used && (m->at[at].a != a || m->at[at].b != b))
        if (++at == m->cap)
            at = 0;
    return at;
}

static u64 *map_find(const Index *x, const Map *m, u64 a, u32 b) {
    if (!m->count)
        return NULL;
    u32 at = map_place(x, m, a, b);
    return m->at[at].used ? &m->at[at].value : NULL;
}

static int map_resize(Index *x, Map *m, u32 cap) {
    Map fresh = {NULL, cap, m->count};
    if (cap) {
        fresh.at = zeroed(cap, sizeof(Pair));
        if (!fresh.at)
            return -1;
        for (u32 i = 0; i < m->cap; i++)
            if (m->at[i].used)
                fresh.at[map_place(x, &fresh, m->at[i].a, m->at[i].b)] = m->at[i];
    }
    PyMem_RawFree(m->at);
    *m = fresh;
    return 0;
}

static int map_reserve(Index *x, Map *m) {
    return (u64)m->count * 4 + 4 <= (u64)m->cap * 3 ? 0 : map_resize(x, m, m->cap + m->cap / 2 + 8);
}

/* Room must have been reserved. */
static void map_put(Index *x, Map *m, u64 a, u32 b, u64 value) {
    u32 at = map_place(x, m, a, b);
    if (!m->at[at].used)
        m->count++;
    m->at[at] = (Pair){a, value, b, 1};
}

static void map_delete(Index *x, Map *m, u64 a, u32 b) {
    if (!m->count)
        return;
    u32 hole = map_place(x, m, a, b);
    if (!m->at[hole].used)
        return;
    for (u32 at = hole;;) {
        if (++at == m->cap)
            at = 0;
        const Pair *pair = &m->at[at];
        if (!pair->used)
            break;
        u32 home = in_range(mixed(x, pair->a + pair->b * UINT64_C(0xD1B54A32D192ED03)), m->cap);
        if (may_fill(hole, at, home, m->cap)) {
            m->at[hole] = *pair;
            hole = at;
        }
    }
    m->at[hole].used = 0;
    m->count--;
}

static void map_shrink(Index *x, Map *m) {
    if (m->cap && (!m->count || (m->cap > 64 && m->count < m->cap / 5)))
        (void)map_resize(x, m, m->count ? m->count * 2 + 8 : 0);
}

/* The table from key to block: shards, so that growing one takes a moment only. An entry is four bits of the
 * hash and the block plus one. */

static inline u32 tag_of(u64 hash) { return (u32)hash << ID_BITS; }

static inline const u32 *shard_home(const Index *x, u64 hash) {
    const Shard *s = &x->shards[hash >> 56];
    return s->cap ? s->at + in_range(hash >> 24, s->cap) : NULL;
}

static u32 find_block(const Index *x, u64 key) {
    u64 hash = mixed(x, key);
    const Shard *s = &x->shards[hash >> 56];
    if (!s->count)
        return NIL;
    for (u32 at = in_range(hash >> 24, s->cap);;) {
        u32 entry = s->at[at];
        if (!entry)
            return NIL;
        if ((entry & ~NIL) == tag_of(hash) && x->key[(entry & NIL) - 1] == key)
            return (entry & NIL) - 1;
        if (++at == s->cap)
            at = 0;
    }
}

static void shard_put(Shard *s, u64 hash, u32 id) {
    u32 at = in_range(hash >> 24, s->cap);
    while (s->at[at])
        if (++at == s->cap)
            at = 0;
    s->at[at] = tag_of(hash) | (id + 1);
}

static int shard_resize(Index *x, Shard *s, u32 cap) {
    Shard fresh = {NULL, cap, s->count};
    if (cap) {
        fresh.at = zeroed(cap, sizeof(u32));
        if (!fresh.at)
            return -1;
        for (u32 i = 0; i < s->cap; i++) {
            if (i + AHEAD < s->cap && s->at[i + AHEAD])
                PREFETCH(&x->key[(s->at[i + AHEAD] & NIL) - 1]);
            if (s->at[i]) {
                u32 id = (s->at[i] & NIL) - 1;
                shard_put(&fresh, mixed(x, x->key[id]), id);
            }
        }
    }
    PyMem_RawFree(s->at);
    *s = fresh;
    return 0;
}

static int table_reserve(Index *x, u64 hash) {
    Shard *s = &x->shards[hash >> 56];
    return (u64)s->count * 10 + 10 <= (u64)s->cap * 7 ? 0 : shard_resize(x, s, s->cap * 2 + 8);
}

static void table_delete(Index *x, u32 id) {
    u64 hash = mixed(x, x->key[id]);
    Shard *s = &x->shards[hash >> 56];
    u32 hole = in_range(hash >> 24, s->cap);
    while ((s->at[hole] & NIL) != id + 1)
        if (++hole == s->cap)
            hole = 0;
    for (u32 at = hole;;) {
        if (++at == s->cap)
            at = 0;
        u32 entry = s->at[at];
        if (!entry)
            break;
        u32 home = in_range(mixed(x, x->key[(entry & NIL) - 1]) >> 24, s->cap);
        if (may_fill(hole, at, home, s->cap)) {
            s->at[hole] = entry;
            hole = at;
        }
    }
    s->at[hole] = 0;
    s->count--;
    if (!s->count || (s->cap > 64 && s->count < s->cap / 5))
        (void)shard_resize(x, s, s->count ? s->count * 2 + 8 : 0);
}

/* A slot's table from the engine's hash to block and tiers. An entry without a tier is empty. */

static inline u64 hash_of(const Name *name) { return (u64)name->high << 32 | name->low; }

static inline u32 name_home(const Index *x, const Names *n, u64 hash) { return in_range(mixed(x, hash), n->cap); }

static Name *name_find(const Index *x, const Names *n, u64 hash) {
    if (!n->count)
        return NULL;
    for (u32 at = name_home(x, n, hash);;) {
        Name *name = &n->at[at];
        if (!name->value)
            return NULL;
        if (hash_of(name) == hash)
            return name;
        if (++at == n->cap)
            at = 0;
    }
}

static void name_place(const Index *x, Names *n, Name name) {
    u32 at = name_home(x, n, hash_of(&name));
    while (n->at[at].value)
        if (++at == n->cap)
            at = 0;
    n->at[at] = name;
}

static int names_resize(Index *x, Names *n, u32 cap) {
    Names fresh = {NULL, cap, n->count};
    if (cap) {
        fresh.at = zeroed(cap, sizeof(Name));
        if (!fresh.at)
            return -1;
        for (u32 i = 0; i < n->cap; i++)
            if (n->at[i].value)
                name_place(x, &fresh, n->at[i]);
    }
    PyMem_RawFree(n->at);
    *n = fresh;
    return 0;
}

static int names_reserve(Index *x, Names *n) {
    return (u64)n->count * 5 + 5 <= (u64)n->cap * 4 ? 0 : names_resize(x, n, n->cap + n->cap / 2 + 8);
}

static void name_delete(Index *x, Names *n, Name *name) {
    u32 hole = (u32)(name - n->at);
    for (u32 at = hole;;) {
        if (++at == n->cap)
            at = 0;
        if (!n->at[at].value)
            break;
        if (may_fill(hole, at, name_home(x, n, hash_of(&n->at[at])), n->cap)) {
            n->at[hole] = n->at[at];
            hole = at;
        }
    }
    n->at[hole].value = 0;
    n->count--;
}

static void names_shrink(Index *x, Names *n) {
    if (n->cap && (!n->count || (n->cap > 64 && n->count < n->cap / 5)))
        (void)names_resize(x, n, n->count ? n->count * 2 + 8 : 0);
}

#endif
