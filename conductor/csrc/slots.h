/* Slots are opened, retired, and swept out of all blocks. */
#ifndef KVROUTE_SLOTS_H
#define KVROUTE_SLOTS_H

#include "events.h"

/* Room for twice the slots: all sets become wider. */
static int widen(Index *x) {
    u32 cap = x->slot_cap ? x->slot_cap * 2 : 64, words = cap / 64;
    Sets *s = &x->sets;
    if (cap > MAX_SLOTS)
        return -1;
    Slot *slots = resized(x->slots, cap, sizeof(Slot));
    if (!slots)
        return -1;
    x->slots = slots;
    u64 *bits = zeroed(3 * words + TIERS * words, sizeof(u64));
    u64 *wide = s->cap ? zeroed((u64)s->cap * TIERS * words, sizeof(u64)) : NULL;
    if (!bits || (s->cap && !wide)) {
        PyMem_RawFree(bits);
        PyMem_RawFree(wide);
        return -1;
    }
    for (u32 set = 1; set < s->top; set++)
        for (u32 tier = 0; tier < TIERS; tier++)
            memcpy(wide + ((size_t)set * TIERS + tier) * words, set_words(x, set) + tier * x->words,
                   x->words * sizeof(u64));
    for (u32 kind = 0; kind < 3 && x->words; kind++)
        memcpy(bits + kind * words, x->open_bits + kind * x->words, x->words * sizeof(u64));
    PyMem_RawFree(s->words);
    PyMem_RawFree(x->open_bits);
    s->words = wide;
    x->open_bits = bits;
    x->sweep_bits = bits + words;
    x->queue_bits = bits + 2 * words;
    x->scratch = bits + 3 * words;
    memset(slots + x->slot_cap, 0, (cap - x->slot_cap) * sizeof(Slot));
    x->slot_cap = cap;
    x->words = words;
    x->last.to = FAILED;
    return 0;
}

static inline void bit_set(u64 *bits, u32 slot) { bits[slot / 64] |= (u64)1 << (slot % 64); }

static inline void bit_clear(u64 *bits, u32 slot) { bits[slot / 64] &= ~((u64)1 << (slot % 64)); }

static int sweep(Index *x, u64 budget);

static u32 open_slot(Index *x) {
    if (x->retired >= 64)
        while (sweep(x, UINT32_MAX) > 0) /* rather than sets that grow wider with every restart */
            ;
    u32 slot = 0;
    while (slot < x->slot_cap && x->slots[slot].state != UNUSED)
        slot++;
    if (slot == x->slot_cap && widen(x) < 0)
        return FAILED;
    x->slots[slot] = (Slot){.state = OPEN, .probable = {.head = NIL, .tail = NIL, .unused = NIL}};
    bit_set(x->open_bits, slot);
    return slot;
}

static void free_slot_tables(Slot *s) {
    PyMem_RawFree(s->names.at);
    PyMem_RawFree(s->side.at);
    PyMem_RawFree(s->probable.at);
    PyMem_RawFree(s->probable.table);
    *s = (Slot){.state = s->state, .probable = {.head = NIL, .tail = NIL, .unused = NIL}};
}

static void retire_slot(Index *x, u32 slot) {
    Slot *s = &x->slots[slot];
    x->entries -= (u64)s->held[GPU] + s->held[CPU] + s->held[DISK];
    x->probable -= s->held[PROBABLE];
    s->state = RETIRED;
    free_slot_tables(s);
    bit_clear(x->open_bits, slot);
    bit_set(x->queue_bits, slot);
    x->retired++;
}

/* A pass goes from the last block to the first, clearing slots that were retired before it began. */
static void begin_pass(Index *x) {
    memcpy(x->sweep_bits, x->queue_bits, x->words * sizeof(u64));
    memset(x->queue_bits, 0, x->words * sizeof(u64));
    x->cursor = x->top;
    x->sweeping = 1;
}

static void end_pass(Index *x) {
    for (u32 slot = 0; slot < x->slot_cap; slot++)
        if (x->sweep_bits[slot / 64] >> (slot % 64) & 1) {
            x->slots[slot].state = UNUSED;
            x->retired--;
        }
    memset(x->sweep_bits, 0, x->words * sizeof(u64));
    x->sweeping = 0;
}

/* Look at so many blocks. 1 while there is more to do, -1 without memory. */
static int sweep(Index *x, u64 budget) {
    u32 from = FAILED, to = 0;
    while (x->retired) {
        if (!x->sweeping) {
            begin_pass(x);
            from = FAILED; /* what is to be cleared is other than before */
        }
        if (x->cursor > x->top)
            x->cursor = x->top;
        if (!x->cursor) {
            end_pass(x);
            continue;
        }
        if (!budget--)
            return 1;
        u32 id = --x->cursor;
        if (is_free(x, id))
            continue;
        u32 set = x->word[id] & SET_MASK;
        if (set != from) {
            for (u32 i = 0; i < TIERS * x->words; i++)
                x->scratch[i] = set_words(x, set)[i] & ~x->sweep_bits[i % x->words];
            to = set_of(x, x->scratch);
            from = set;
        }
        if (to == FAILED || change_block(x, id, to) < 0) {
            x->cursor++;
            return -1;
        }
        if (!x->sets.cap || !x->sets.refs[set])
            from = FAILED; /* its number may come to mean another set */
    }
    return 0;
}

#endif
