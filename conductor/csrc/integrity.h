#ifndef KVROUTE_INTEGRITY_H
#define KVROUTE_INTEGRITY_H

#include "export.h"

/* Integrity: NULL if all is well, else what is wrong. Raises MemoryError itself. */

#define CHECK(condition, what) \
    if (!(condition))          \
    return what

static const char *check_blocks(const Index *x, u32 *refs) {
    u32 blocks = 0, free_blocks = 0, linked = 0, tabled = 0, parents = 0;
    for (u32 id = 0; id < x->top; id++) {
        if (is_free(x, id)) {
            free_blocks++;
            continue;
        }
        u32 word = x->word[id], set = word & SET_MASK;
        blocks++;
        CHECK(find_block(x, x->key[id]) == id, "a block is not found by its key");
        CHECK(set && set < x->sets.top && x->sets.refs[set], "a block has no set");
        refs[set]++;
        CHECK(!(word & CONT) || (id && !is_free(x, id - 1) && !(word & ROOT)), "a block follows no block");
        int listed = map_find(x, &x->parents, id, 0) != NULL;
        CHECK(listed == !(word & (CONT | ROOT)), "a block's parent is listed where it should not be, or is not");
        parents += (u32)listed;
    }
    for (u32 bin = 0; bin < BINS; bin++)
        for (u32 start = x->bins[bin], before = NIL; start != NIL; before = start, start = (u32)x->key[start] & NIL) {
            u32 length = run_length(x, start);
            CHECK(start < x->top && length && start + length < x->top, "a free run is out of range");
            CHECK(bin_of(length) == bin && x->word[start] == (FREE | before), "a free run is in the wrong bin");
            CHECK(!start || !is_free(x, start - 1), "free runs touch");
            CHECK(!is_free(x, start + length), "free runs touch or end at the top");
            CHECK(length == 1 || x->key[start + length - 1] == start, "a free run does not know its start");
            linked += length;
        }
    for (u32 shard = 0; shard < SHARDS; shard++)
        tabled += x->shards[shard].count;
    CHECK(blocks == x->blocks && tabled == blocks, "blocks are miscounted");
    CHECK(free_blocks == x->free_blocks && linked == free_blocks, "free blocks are lost");
    CHECK(parents == x->parents.count, "parents of no block are listed");
    return NULL;
}

static const char *check_sets(const Index *x, const u32 *refs) {
    const Sets *s = &x->sets;
    u32 live = 0, tabled = 0;
    for (u32 set = 1; set < s->top; set++) {
        live += s->refs[set] != 0;
        CHECK(refs[set] == s->refs[set], "references to a set are miscounted");
        CHECK(!refs[set] || s->hash[set] == words_hash(x, set_words(x, set)), "a set is not under its hash");
        for (u32 at = 0; at < TIERS * x->words && refs[set]; at++) {
            u32 word = at % x->words;
            u64 known = x->open_bits[word] | x->sweep_bits[word] | x->queue_bits[word];
            CHECK(!(set_words(x, set)[at] & ~known), "a set has a slot that is not in use");
        }
    }
    for (u32 at = 0; at < s->table_cap; at++)
        if (s->table[at]) {
            tabled++;
            for (u32 other = at + 1; other < s->table_cap && s->table[other]; other++)
                CHECK(memcmp(set_words(x, s->table[at]), set_words(x, s->table[other]), TIERS * x->words * 8),
                      "two sets are equal");
        }
    CHECK(live == s->live && tabled == live, "sets are miscounted");
    return NULL;
}

static u32 held_in(const Index *x, u32 slot, u32 tier) {
    u32 held = 0;
    for (u32 id = 0; id < x->top; id++)
        held += !is_free(x, id) && set_has(x, x->word[id] & SET_MASK, slot, tier);
    return held;
}

static const char *check_slot(const Index *x, u32 slot) {
    const Slot *s = &x->slots[slot];
    u32 names = 0, sides = 0, named[PROBABLE] = {0}, alias[PROBABLE] = {0};
    for (u32 at = 0; at < s->names.cap; at++) {
        const Name *name = &s->names.at[at];
        if (!name->value)
            continue;
        u32 id = name->value & NIL, counts = 0;
        names++;
        CHECK(name->value & TIER_MASK, "a name is in no tier");
        CHECK(id < x->top && !is_free(x, id), "a name is of no block");
        CHECK(name_find(x, &s->names, hash_of(name)) == name, "a name is not found by its hash");
        for (u32 tier = 0; tier < PROBABLE; tier++) {
            int in = (name->value & TIER_BIT(tier)) != 0;
            counts += map_find(x, &s->side, hash_of(name), COUNT_OF(tier)) != NULL;
            CHECK(in || !map_find(x, &s->side, hash_of(name), COUNT_OF(tier)), "a count is of no name");
            CHECK(!in || set_has(x, x->word[id] & SET_MASK, slot, tier), "a name's block is not held");
            named[tier] += (u32)in;
        }
        sides += counts;
        CHECK(!(name->value & EXTRA) == !counts, "a name does not know of its counts, or has none");
    }
    for (u32 at = 0; at < s->side.cap; at++)
        if (s->side.at[at].used && s->side.at[at].b & 4) {
            CHECK(find_block(x, s->side.at[at].a) != NIL, "an alias is of no block");
            alias[s->side.at[at].b & 3] += (u32)s->side.at[at].value;
            sides++;
        }
    CHECK(names == s->names.count && sides == s->side.count, "names are miscounted");
    for (u32 tier = 0; tier < PROBABLE; tier++)
        CHECK(named[tier] == held_in(x, slot, tier) + alias[tier] && held_in(x, slot, tier) == s->held[tier],
              "a slot's blocks are miscounted");
    u32 queued = 0;
    for (u32 node = s->probable.count ? s->probable.head : NIL; node != NIL; node = s->probable.at[node].after) {
        CHECK(queue_find(x, &s->probable, s->probable.at[node].block) == node, "what is probable is not found");
        CHECK(set_has(x, x->word[s->probable.at[node].block] & SET_MASK, slot, PROBABLE), "it is not probable");
        queued++;
    }
    CHECK(queued == s->probable.count && queued == s->held[PROBABLE], "what is probable is miscounted");
    CHECK(queued == held_in(x, slot, PROBABLE) && queued <= s->silent, "more is probable than may be");
    return NULL;
}

static const char *check_all(const Index *x, u32 *refs) {
    const char *wrong = check_blocks(x, refs);
    if (!wrong)
        wrong = check_sets(x, refs);
    u64 entries = 0, probable = 0;
    for (u32 slot = 0; slot < x->slot_cap && !wrong; slot++) {
        const Slot *s = &x->slots[slot];
        int open = (int)(x->open_bits[slot / 64] >> (slot % 64) & 1);
        CHECK(open == (s->state == OPEN), "the bits of open slots differ");
        if (!open)
            continue;
        wrong = check_slot(x, slot);
        entries += (u64)s->held[GPU] + s->held[CPU] + s->held[DISK];
        probable += s->held[PROBABLE];
    }
    if (!wrong && (entries != x->entries || probable != x->probable))
        wrong = "entries are miscounted";
    return wrong;
}

#endif
