#ifndef KVROUTE_LOOKUP_H
#define KVROUTE_LOOKUP_H

#include "slots.h"

/* Lookup. Lanes are gpu, cpu, disk, gpu or cpu, any confirmed tier, any tier. */

typedef struct {
    u64 *alive;   /* lane by words: slots that had all blocks so far */
    u32 *depth;   /* lane by slot: where it ended */
} Lanes;

static inline u64 lane_word(const Index *x, const u64 *words, u32 lane, u32 at) {
    u32 w = x->words;
    switch (lane) {
    case 3: return words[at] | words[w + at];
    case 4: return words[at] | words[w + at] | words[2 * w + at];
    case 5: return words[at] | words[w + at] | words[2 * w + at] | words[3 * w + at];
    default: return words[lane * w + at];
    }
}

/* Keep alive what is in `set`, note the depth of the rest; true while any slot is alive. NIL is no set. */
static int narrow(const Index *x, Lanes *lanes, u32 set, u32 depth) {
    const u64 *words = set == NIL ? NULL : set_words(x, set);
    u64 any = 0;
    for (u32 lane = 0; lane < LANES; lane++)
        for (u32 at = 0; at < x->words; at++) {
            u64 *alive = &lanes->alive[lane * x->words + at];
            u64 lost = words ? *alive & ~lane_word(x, words, lane, at) : *alive;
            *alive &= ~lost;
            any |= *alive;
            for (; lost; lost &= lost - 1)
                lanes->depth[lane * x->slot_cap + at * 64 + lowest_bit(lost)] = depth;
        }
    return any != 0;
}

/* Start to load what the lookups of keys[depth + AHEAD ...] will need. */
static inline void look_ahead(const Index *x, const char *keys, size_t depth, size_t count) {
    if (depth + 2 * AHEAD < count) {
        const u32 *home = shard_home(x, mixed(x, load(keys, depth + 2 * AHEAD)));
        if (home)
            PREFETCH(home);
    }
    if (depth + AHEAD < count) {
        const u32 *home = shard_home(x, mixed(x, load(keys, depth + AHEAD)));
        if (home && *home) {
            PREFETCH(&x->key[(*home & NIL) - 1]);
            PREFETCH(&x->word[(*home & NIL) - 1]);
        }
    }
}

static void follow(const Index *x, Lanes *lanes, const char *keys, size_t count, u32 id) {
    u32 set = FAILED;
    size_t depth = 0;
    while (id != NIL) {
        u32 now = x->word[id] & SET_MASK;
        if (now != set && !narrow(x, lanes, now, (u32)depth))
            return;
        set = now;
        if (++depth == count)
            break;
        u64 key = load(keys, depth);
        if (++id < x->top && x->key[id] == key && !is_free(x, id))
            continue;
        look_ahead(x, keys, depth, count);
        id = find_block(x, key);
    }
    narrow(x, lanes, NIL, (u32)depth);
}

static PyObject *rows_of(const Index *x, const Lanes *lanes, const u64 *rows) {
    Py_ssize_t count = 0, row = 0;
    for (u32 at = 0; at < x->words; at++)
        for (u64 bits = rows[at]; bits; bits &= bits - 1)
            count++;
    u32 slots = x->slot_cap, words = x->words; /* what follows may run other code */
    PyObject *list = PyList_New(count);
    if (!list)
        return NULL;
    for (u32 at = 0; at < words; at++)
        for (u64 bits = rows[at]; bits; bits &= bits - 1) {
            u32 slot = at * 64 + lowest_bit(bits);
            PyObject *tuple = PyTuple_New(1 + LANES);
            if (!tuple) {
                Py_DECREF(list);
                return NULL;
            }
            PyList_SET_ITEM(list, row++, tuple);
            for (u32 item = 0; item <= LANES; item++) {
                PyObject *number = PyLong_FromUnsignedLong(item ? lanes->depth[(item - 1) * slots + slot] : slot);
                if (!number) {
                    Py_DECREF(list);
                    return NULL;
                }
                PyTuple_SET_ITEM(tuple, item, number);
            }
        }
    return list;
}

static PyObject *match(const Index *x, const char *keys, size_t count) {
    u32 id = count ? find_block(x, load(keys, 0)) : NIL;
    if (id == NIL)
        return PyList_New(0);
    u64 few_bits[(LANES + 1) * 4];
    u32 few_depths[LANES * 256];
    int many = x->words > 4;
    u64 *bits = many ? PyMem_RawMalloc((LANES + 1) * (size_t)x->words * sizeof(u64)) : few_bits;
    u32 *depths = many ? PyMem_RawMalloc(LANES * (size_t)x->slot_cap * sizeof(u32)) : few_depths;
    PyObject *list = NULL;
    if (bits && depths) {
        Lanes lanes = {bits, depths};
        u64 *rows = bits + LANES * x->words;
        const u64 *first = set_words(x, x->word[id] & SET_MASK);
        for (u32 at = 0; at < x->words; at++) {
            rows[at] = lane_word(x, first, LANES - 1, at) & x->open_bits[at];
            for (u32 lane = 0; lane < LANES; lane++)
                lanes.alive[lane * x->words + at] = rows[at];
        }
        follow(x, &lanes, keys, count, id);
        list = rows_of(x, &lanes, rows);
    } else {
        PyErr_NoMemory();
    }
    if (many) {
        PyMem_RawFree(bits);
        PyMem_RawFree(depths);
    }
    return list;
}

#endif
