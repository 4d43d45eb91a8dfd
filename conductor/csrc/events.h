/* What events do to blocks, sets and names. */
#ifndef KVROUTE_EVENTS_H
#define KVROUTE_EVENTS_H

#include "blocks.h"

static int drop_probable(Index *x, u32 slot, u32 node) {
    Slot *s = &x->slots[slot];
    u32 id = s->probable.at[node].block;
    if (change_block(x, id, set_changed(x, x->word[id] & SET_MASK, slot, 1u << PROBABLE, 0)) < 0)
        return -1;
    queue_delete(x, &s->probable, node);
    s->held[PROBABLE]--;
    x->probable--;
    return 0;
}

static int trim_probable(Index *x, u32 slot, u32 capacity) {
    Queue *q = &x->slots[slot].probable;
    while (q->count > capacity)
        if (drop_probable(x, slot, q->head) < 0)
            return -1;
    queue_shrink(x, q);
    return 0;
}

/* No hash of `slot` names block `id` in `tier` any more. `silently`: it may have gone to the silent tier.
 * -1 without memory, and then it is there still. */
static int leave(Index *x, u32 slot, u32 tier, u32 id, int silently) {
    Slot *s = &x->slots[slot];
    Queue *q = &s->probable;
    int keep = silently && tier == GPU && s->silent;
    u32 node = keep ? queue_find(x, q, id) : NIL;
    if (keep && node == NIL && (trim_probable(x, slot, s->silent - 1) < 0 || queue_reserve(x, q) < 0))
        return -1;
    u32 set = set_changed(x, x->word[id] & SET_MASK, slot, 1u << tier, keep ? 1u << PROBABLE : 0);
    if (change_block(x, id, set) < 0)
        return -1;
    s->held[tier]--;
    x->entries--;
    if (node != NIL) {
        queue_unlink(q, node);
        queue_link_last(q, node);
    } else if (keep) {
        queue_push(x, q, id);
        s->held[PROBABLE]++;
        x->probable++;
    }
    return 0;
}

/* Take a name from a tier it is in once. -1 without memory, and then it is there still. */
static int take_name(Index *x, u32 slot, u32 tier, Name *name, int silently) {
    Slot *s = &x->slots[slot];
    u32 id = name->value & NIL;
    u64 key = x->key[id], *alias = map_find(x, &s->side, key, ALIAS_OF(tier));
    if (!alias) {
        if (leave(x, slot, tier, id, silently) < 0)
            return -1;
    } else if (--*alias == 0) {
        map_delete(x, &s->side, key, ALIAS_OF(tier));
    }
    name->value &= ~TIER_BIT(tier);
    return 0;
}

/* Take one off a count above one; 0 if the name is there just once. */
static int take_count(Index *x, Slot *s, u32 tier, Name *name, int all) {
    if (!(name->value & EXTRA))
        return 0;
    u64 hash = hash_of(name);
    u64 *count = map_find(x, &s->side, hash, COUNT_OF(tier));
    if (!count)
        return 0;
    if (all || --*count == 0) {
        map_delete(x, &s->side, hash, COUNT_OF(tier));
        name->value &= ~EXTRA;
        for (u32 other = 0; other < PROBABLE; other++)
            if (map_find(x, &s->side, hash, COUNT_OF(other)))
                name->value |= EXTRA;
    }
    return !all;
}

/* A hash came to name another key: it leaves all tiers. */
static int let_go(Index *x, u32 slot, Name *name) {
    Slot *s = &x->slots[slot];
    for (u32 tier = 0; tier < PROBABLE; tier++) {
        if (!(name->value & TIER_BIT(tier)))
            continue;
        (void)take_count(x, s, tier, name, 1);
        if (take_name(x, slot, tier, name, 0) < 0)
            return -1;
    }
    name_delete(x, &s->names, name);
    return 0;
}

static int side_add(Index *x, Slot *s, u64 a, u32 b) {
    u64 *value = map_find(x, &s->side, a, b);
    if (value) {
        ++*value;
        return 0;
    }
    if (map_reserve(x, &s->side) < 0)
        return -1;
    map_put(x, &s->side, a, b, 1);
    return 0;
}

typedef struct { int has_parent; u64 parent; u32 before; u32 remaining; } Place;

/* A block not known so far, held by (slot, tier) alone; its id, or NIL without memory. */
static u32 add_block(Index *x, u32 slot, u32 tier, u64 key, const Place *place) {
    u64 hash = mixed(x, key);
    if (blocks_reserve(x) < 0 || table_reserve(x, hash) < 0 || map_reserve(x, &x->parents) < 0)
        return NIL;
    u32 set = set_changed(x, 0, slot, 0, 1u << tier);
    if (set == FAILED)
        return NIL;
    u32 id = take_id(x, place->before, place->remaining);
    x->key[id] = key;
    x->word[id] = set;
    x->sets.refs[set]++;
    if (!place->has_parent)
        x->word[id] |= ROOT;
    else if (place->before != NIL && id == place->before + 1)
        x->word[id] |= CONT;
    else
        map_put(x, &x->parents, id, 0, place->parent);
    Shard *s = &x->shards[hash >> 56];
    shard_put(s, hash, id);
    s->count++;
    x->blocks++;
    return id;
}

static u32 known_block(const Index *x, u64 key, u32 before) {
    if (before != NIL && before + 1 < x->top && x->key[before + 1] == key && !is_free(x, before + 1))
        return before + 1;
    return find_block(x, key);
}

/* One block of a chain. 1 if it is new in the tier, 0 if not, -1 without memory. */
static int store_block(Index *x, u32 slot, u32 tier, u64 hash, u64 key, Place *place) {
    Slot *s = &x->slots[slot];
    Name *name = name_find(x, &s->names, hash);
    if (name && x->key[name->value & NIL] != key) {
        if (let_go(x, slot, name) < 0)
            return -1;
        name = NULL;
        if (place->before != NIL && find_block(x, place->parent) != place->before)
            place->before = NIL;
    }
    u32 id = name ? name->value & NIL : known_block(x, key, place->before);
    int new = 0;
    if (!name && names_reserve(x, &s->names) < 0)
        return -1;
    if (name && name->value & TIER_BIT(tier)) {
        if (side_add(x, s, hash, COUNT_OF(tier)) < 0)
            return -1;
        name->value |= EXTRA;
    } else {
        if (id == NIL) {
            id = add_block(x, slot, tier, key, place);
            if (id == NIL)
                return -1;
            new = 1;
        } else if (!set_has(x, x->word[id] & SET_MASK, slot, tier)) {
            u32 set = set_changed(x, x->word[id] & SET_MASK, slot, 0, 1u << tier);
            if (change_block(x, id, set) < 0)
                return -1;
            new = 1;
        } else if (side_add(x, s, key, ALIAS_OF(tier)) < 0) {
            return -1;
        }
        if (name) {
            name->value |= TIER_BIT(tier);
        } else {
            name_place(x, &s->names, (Name){(u32)hash, (u32)(hash >> 32), id | TIER_BIT(tier)});
            s->names.count++;
        }
        s->held[tier] += (u32)new;
        x->entries += (u32)new;
    }
    x->gen[id] = x->generation;
    *place = (Place){1, key, id, place->remaining - 1};
    return new;
}

static void next_generation(Index *x, size_t stored) {
    x->generation_stores += (u32)(stored < 1u << 20 ? stored : 1u << 20);
    if (x->generation_stores < x->blocks / 32 + 64)
        return;
    x->generation_stores = 0;
    if (++x->generation == UINT16_MAX) {
        x->generation /= 2;
        for (u32 id = 0; id < x->top; id++)
            x->gen[id] /= 2;
    }
}

#endif
