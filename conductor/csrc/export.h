#ifndef KVROUTE_EXPORT_H
#define KVROUTE_EXPORT_H

#include "eviction.h"

/* Export: all rows are gathered at once, and made into tuples as they are asked for. */

typedef struct { u64 parent, hash, key, count; u32 tier, has_parent; } Row;
typedef struct { PyObject_HEAD Row *rows; size_t count, at; } Export;

/* Sort by the upper half, which is below 2^30; both arrays have `count` places. The result is in `at`. */
static void sort_by_block(u64 *at, u64 *spare, size_t count) {
    for (u32 shift = 32; shift < 64; shift += 8) {
        size_t starts[257] = {0};
        for (size_t i = 0; i < count; i++)
            starts[(at[i] >> shift & 255) + 1]++;
        for (u32 digit = 0; digit < 256; digit++)
            starts[digit + 1] += starts[digit];
        for (size_t i = 0; i < count; i++)
            spare[starts[at[i] >> shift & 255]++] = at[i];
        u64 *swapped = at;
        at = spare;
        spare = swapped;
    }
}

static size_t position_of(const u64 *sorted, size_t count, u32 id) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if ((u32)(sorted[middle] >> 32) < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && (u32)(sorted[low] >> 32) == id ? low : count;
}

static size_t add_rows(const Index *x, const Slot *s, const Name *name, Row *rows) {
    u32 id = name->value & NIL;
    Row row = {.hash = hash_of(name), .key = x->key[id]};
    row.has_parent = (u32)parent_of(x, id, &row.parent);
    size_t added = 0;
    for (u32 tier = 0; tier < PROBABLE; tier++)
        if (name->value & TIER_BIT(tier)) {
            const u64 *more = name->value & EXTRA ? map_find(x, &s->side, row.hash, COUNT_OF(tier)) : NULL;
            row.tier = tier;
            row.count = more ? *more + 1 : 1;
            rows[added++] = row;
        }
    return added;
}

/* Rows of a slot, parents before children: run after run of numbers, a run after that of its parent.
 * `sorted`: block and place of its name; `run`: index of the first of the run; `path`: room for a walk up. */
static size_t gather(const Index *x, const Slot *s, const u64 *sorted, u32 *run, u32 *path, size_t count, Row *rows) {
    const u32 done = FAILED;
    size_t added = 0;
    for (size_t i = 0; i < count; i++) {
        u32 id = (u32)(sorted[i] >> 32), before = i ? (u32)(sorted[i - 1] >> 32) : NIL;
        int joined = i && (id == before || (id == before + 1 && x->word[id] & CONT));
        run[i] = joined ? run[i - 1] : (u32)i;
    }
    for (size_t i = 0; i < count; i++) {
        size_t depth = 0;
        for (size_t at = i; at < count && run[at] != done;) {
            u32 head = run[at];
            if (run[head] == done)
                break;
            path[depth++] = head;
            run[head] = done;
            u32 parent = parent_block(x, (u32)(sorted[head] >> 32));
            at = parent == NIL ? count : position_of(sorted, count, parent);
        }
        while (depth) {
            u32 head = path[--depth];
            size_t at = head;
            do
                added += add_rows(x, s, &s->names.at[(u32)sorted[at]], rows + added);
            while (++at < count && run[at] == head);
        }
    }
    return added;
}

static Row *export_rows(const Index *x, const Slot *s, size_t *rows_count) {
    size_t count = s->names.count, rows_wanted = 1;
    u64 *sorted = zeroed(2 * (u64)count + 1, sizeof(u64));
    u32 *run = zeroed(2 * (u64)count + 1, sizeof(u32));
    size_t filled = 0;
    for (u32 at = 0; sorted && at < s->names.cap; at++) {
        u32 value = s->names.at[at].value;
        if (!value)
            continue;
        sorted[filled++] = (u64)(value & NIL) << 32 | at;
        for (u32 tier = 0; tier < PROBABLE; tier++)
            rows_wanted += (value & TIER_BIT(tier)) != 0;
    }
    Row *rows = zeroed(rows_wanted, sizeof(Row));
    if (sorted && run && rows) {
        sort_by_block(sorted, sorted + count, count);
        *rows_count = gather(x, s, sorted, run, run + count, count, rows);
    } else {
        PyMem_RawFree(rows);
        rows = NULL;
        PyErr_NoMemory();
    }
    PyMem_RawFree(sorted);
    PyMem_RawFree(run);
    return rows;
}

static PyObject *export_next(Export *e) {
    if (e->at == e->count)
        return NULL;
    const Row *row = &e->rows[e->at++];
    if (row->has_parent)
        return Py_BuildValue("(IKKKK)", row->tier, (unsigned long long)row->parent, (unsigned long long)row->hash,
                             (unsigned long long)row->key, (unsigned long long)row->count);
    return Py_BuildValue("(IOKKK)", row->tier, Py_None, (unsigned long long)row->hash,
                         (unsigned long long)row->key, (unsigned long long)row->count);
}

static void export_dealloc(Export *e) {
    PyTypeObject *type = Py_TYPE(e);
    PyMem_RawFree(e->rows);
    type->tp_free((PyObject *)e);
    Py_DECREF(type);
}

static PyType_Slot export_slots[] = {
    {Py_tp_dealloc, export_dealloc},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, export_next},
    {0, NULL},
};

static PyType_Spec export_spec = {
    .name = "kvroute.conductor._block_index._Export",
    .basicsize = sizeof(Export),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = export_slots,
};

#endif
