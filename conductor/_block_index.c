/* The index of confirmed blocks: the same class as in block_index.py, which says what every method means.
 *
 * Blocks are numbered. A chain that is stored at once gets consecutive numbers, so that a lookup walks two
 * arrays in step with the prompt and asks the hash table only where a chain forks or was stored in pieces.
 * Per block: its key (8 bytes), a word (4: its set of holders and how it hangs on its parent), the generation
 * in which it was last stored (2), and its place in the table (4, by load).
 *
 * Sets of (slot, tier) are interned and counted, so a block costs the same whoever holds it. PROBABLE is a
 * fourth tier in them. Per slot there is a table from the engine's hash to (block, tiers): 12 bytes, by load.
 * What is rare goes to side maps: counts above one, two hashes for one key, parents of blocks that do not
 * follow their parent's number.
 *
 * The GIL is the lock. No method calls into Python before it has let go of every pointer into the tables.
 * When memory runs out in the middle of a chain, the blocks before are stored and all is consistent.
 */
#include "csrc/arguments.h"

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    if (PyTuple_GET_SIZE(args) || (keywords && PyDict_GET_SIZE(keywords))) {
        PyErr_SetString(PyExc_TypeError, "BlockIndex takes no arguments");
        return NULL;
    }
    PyObject *word = PyUnicode_FromString("kvroute"); /* its hash is random per process: names are not ours */
    if (!word)
        return NULL;
    u64 seed = (u64)PyObject_Hash(word);
    Py_DECREF(word);
    Index *x = (Index *)type->tp_alloc(type, 0);
    if (!x)
        return NULL;
    x->seed = seed;
    x->sets.top = 1;
    x->last.to = FAILED;
    for (u32 bin = 0; bin < BINS; bin++)
        x->bins[bin] = NIL;
    return (PyObject *)x;
}

static void index_dealloc(Index *x) {
    PyTypeObject *type = Py_TYPE(x);
    for (u32 slot = 0; slot < x->slot_cap; slot++)
        free_slot_tables(&x->slots[slot]);
    for (u32 shard = 0; shard < SHARDS; shard++)
        PyMem_RawFree(x->shards[shard].at);
    sets_free(x);
    PyMem_RawFree(x->slots);
    PyMem_RawFree(x->open_bits);
    PyMem_RawFree(x->parents.at);
    PyMem_RawFree(x->key);
    PyMem_RawFree(x->word);
    PyMem_RawFree(x->gen);
    type->tp_free((PyObject *)x);
    Py_DECREF(type);
}

static PyObject *index_open(Index *x, PyObject *unused) {
    (void)unused;
    u32 slot = open_slot(x);
    return slot == FAILED ? PyErr_NoMemory() : PyLong_FromUnsignedLong(slot);
}

static PyObject *index_retire(Index *x, PyObject *given) {
    u32 slot;
    if (slot_argument(x, given, &slot) < 0)
        return NULL;
    retire_slot(x, slot);
    Py_RETURN_NONE;
}

static PyObject *index_sweep(Index *x, PyObject *const *args, Py_ssize_t given, PyObject *keywords) {
    static const char *const names[] = {"blocks"};
    PyObject *in[1];
    u64 blocks = 4096;
    if (arguments("sweep", args, given, keywords, names, 0, 1, in) < 0 ||
        (in[0] && u64_argument(in[0], "blocks", &blocks) < 0))
        return NULL;
    int more = sweep(x, blocks);
    return more < 0 ? PyErr_NoMemory() : PyBool_FromLong(more);
}

static PyObject *store_chain(Index *x, u32 slot, u32 tier, Place place, const Py_buffer *hashes, const char *keys) {
    size_t count = (size_t)hashes->len / 8;
    u64 new = 0;
    place.before = place.has_parent ? find_block(x, place.parent) : NIL;
    place.remaining = (u32)count;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            const Names *n = &x->slots[slot].names;
            if (n->cap)
                PREFETCH(&n->at[name_home(x, n, load(hashes->buf, i + AHEAD))]);
            const u32 *home = shard_home(x, mixed(x, load(keys, i + AHEAD)));
            if (home)
                PREFETCH(home);
        }
        int stored = store_block(x, slot, tier, load(hashes->buf, i), load(keys, i), &place);
        if (stored < 0)
            return PyErr_NoMemory();
        new += (u64)stored;
    }
    next_generation(x, count);
    return PyLong_FromUnsignedLongLong(new);
}

static PyObject *index_store(Index *x, PyObject *const *args, Py_ssize_t given, PyObject *keywords) {
    static const char *const names[] = {"slot", "tier", "parent_key", "hashes", "keys"};
    PyObject *in[5], *result = NULL;
    u32 slot, tier;
    Py_buffer hashes, keys;
    Place place = {0, 0, NIL, 0};
    if (arguments("store", args, given, keywords, names, 5, 5, in) < 0 || slot_argument(x, in[0], &slot) < 0 ||
        tier_argument(in[1], &tier) < 0)
        return NULL;
    if (in[2] != Py_None) {
        place.has_parent = 1;
        if (u64_argument(in[2], "parent_key", &place.parent) < 0)
            return NULL;
    }
    if (packed_argument(in[3], "hashes", &hashes) < 0)
        return NULL;
    if (packed_argument(in[4], "keys", &keys) == 0) {
        if (keys.len == hashes.len)
            result = store_chain(x, slot, tier, place, &hashes, keys.buf);
        else
            PyErr_Format(PyExc_ValueError, "keys must be as many as hashes (%zd), not %zd", hashes.len / 8,
                         keys.len / 8);
        PyBuffer_Release(&keys);
    }
    PyBuffer_Release(&hashes);
    return result;
}

static PyObject *index_remove(Index *x, PyObject *const *args, Py_ssize_t given, PyObject *keywords) {
    static const char *const names[] = {"slot", "tier", "hashes"};
    PyObject *in[3];
    u32 slot, tier;
    Py_buffer hashes;
    if (arguments("remove", args, given, keywords, names, 3, 3, in) < 0 || slot_argument(x, in[0], &slot) < 0 ||
        tier_argument(in[1], &tier) < 0 || packed_argument(in[2], "hashes", &hashes) < 0)
        return NULL;
    Slot *s = &x->slots[slot];
    u64 resolved = 0;
    int failed = 0;
    for (size_t i = 0; i < (size_t)hashes.len / 8 && !failed; i++) {
        Name *name = name_find(x, &s->names, load(hashes.buf, i));
        if (!name || !(name->value & TIER_BIT(tier)))
            continue;
        resolved++;
        if (take_count(x, s, tier, name, 0))
            continue;
        failed = take_name(x, slot, tier, name, 1) < 0;
        if (!(name->value & TIER_MASK))
            name_delete(x, &s->names, name);
    }
    PyBuffer_Release(&hashes);
    names_shrink(x, &s->names);
    map_shrink(x, &s->side);
    return failed ? PyErr_NoMemory() : PyLong_FromUnsignedLongLong(resolved);
}

static PyObject *index_key_of(Index *x, PyObject *const *args, Py_ssize_t given, PyObject *keywords) {
    static const char *const names[] = {"slot", "block_hash"};
    PyObject *in[2];
    u32 slot;
    u64 hash;
    if (arguments("key_of", args, given, keywords, names, 2, 2, in) < 0 || slot_argument(x, in[0], &slot) < 0 ||
        u64_argument(in[1], "block_hash", &hash) < 0)
        return NULL;
    const Name *name = name_find(x, &x->slots[slot].names, hash);
    if (!name)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(x->key[name->value & NIL]);
}

static PyObject *index_set_silent_tier(Index *x, PyObject *const *args, Py_ssize_t given, PyObject *keywords) {
    static const char *const names[] = {"slot", "capacity_blocks"};
    PyObject *in[2];
    u32 slot;
    u64 capacity;
    if (arguments("set_silent_tier", args, given, keywords, names, 2, 2, in) < 0 ||
        slot_argument(x, in[0], &slot) < 0 || u64_argument(in[1], "capacity_blocks", &capacity) < 0)
        return NULL;
    u32 silent = capacity < NIL ? (u32)capacity : NIL;
    if (trim_probable(x, slot, silent) < 0)
        return PyErr_NoMemory();
    x->slots[slot].silent = silent;
    Py_RETURN_NONE;
}

static PyObject *index_held(Index *x, PyObject *given) {
    u32 slot;
    if (slot_argument(x, given, &slot) < 0)
        return NULL;
    const u32 *held = x->slots[slot].held;
    return Py_BuildValue("(IIII)", held[GPU], held[CPU], held[DISK], held[PROBABLE]);
}

static PyObject *index_match(Index *x, PyObject *given) {
    Py_buffer keys;
    if (packed_argument(given, "keys", &keys) < 0)
        return NULL;
    PyObject *rows = match(x, keys.buf, (size_t)keys.len / 8);
    PyBuffer_Release(&keys);
    return rows;
}

static PyObject *index_export(Index *x, PyTypeObject *type, PyObject *const *args, Py_ssize_t given,
                              PyObject *keywords) {
    static const char *const names[] = {"slot"};
    PyObject *in[1];
    u32 slot;
    if (arguments("export", args, given, keywords, names, 1, 1, in) < 0 || slot_argument(x, in[0], &slot) < 0)
        return NULL;
    size_t count = 0;
    Row *rows = export_rows(x, &x->slots[slot], &count);
    if (!rows)
        return NULL;
    PyTypeObject *export_type = PyModule_GetState(PyType_GetModule(type)) ?
        *(PyTypeObject **)PyModule_GetState(PyType_GetModule(type)) : NULL;
    Export *e = export_type ? (Export *)export_type->tp_alloc(export_type, 0) : NULL;
    if (!e) {
        PyMem_RawFree(rows);
        return NULL;
    }
    e->rows = rows;
    e->count = count;
    return (PyObject *)e;
}

static PyObject *index_evict(Index *x, PyObject *const *args, Py_ssize_t given, PyObject *keywords) {
    static const char *const names[] = {"bytes_limit"};
    PyObject *in[1];
    u64 limit;
    if (arguments("evict", args, given, keywords, names, 1, 1, in) < 0 ||
        u64_argument(in[0], "bytes_limit", &limit) < 0)
        return NULL;
    u32 before = x->blocks;
    return evict(x, limit) < 0 ? PyErr_NoMemory() : PyLong_FromUnsignedLong(before - x->blocks);
}

static PyObject *index_check_integrity(Index *x, PyObject *unused) {
    (void)unused;
    u32 *refs = zeroed((u64)x->sets.top + 1, sizeof(u32));
    if (!refs)
        return PyErr_NoMemory();
    const char *wrong = check_all(x, refs);
    PyMem_RawFree(refs);
    if (wrong) {
        PyErr_SetString(PyExc_AssertionError, wrong);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *index_blocks(Index *x, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLong(x->blocks);
}

static PyObject *index_entries(Index *x, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(x->entries);
}

static PyObject *index_bytes_used(Index *x, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(memory(x, 0));
}

static PyObject *index_repr(Index *x) {
    return PyUnicode_FromFormat("<BlockIndex blocks=%lu entries=%llu bytes=%llu>", (unsigned long)x->blocks,
                                (unsigned long long)x->entries, (unsigned long long)memory(x, 0));
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef index_methods[] = {
    {"open", (PyCFunction)index_open, METH_NOARGS, NULL},
    {"retire", (PyCFunction)index_retire, METH_O, NULL},
    {"sweep", FAST(index_sweep), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"store", FAST(index_store), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"remove", FAST(index_remove), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"key_of", FAST(index_key_of), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"set_silent_tier", FAST(index_set_silent_tier), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"held", (PyCFunction)index_held, METH_O, NULL},
    {"match", (PyCFunction)index_match, METH_O, NULL},
    {"export", FAST(index_export), METH_METHOD | METH_FASTCALL | METH_KEYWORDS, NULL},
    {"evict", FAST(index_evict), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"check_integrity", (PyCFunction)index_check_integrity, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef index_properties[] = {
    {"blocks", (getter)index_blocks, NULL, NULL, NULL},
    {"entries", (getter)index_entries, NULL, NULL, NULL},
    {"bytes_used", (getter)index_bytes_used, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot index_slots[] = {
    {Py_tp_new, index_new},
    {Py_tp_dealloc, index_dealloc},
    {Py_tp_repr, index_repr},
    {Py_tp_methods, index_methods},
    {Py_tp_getset, index_properties},
    {Py_tp_doc, "Confirmed blocks: see kvroute.conductor.block_index.BlockIndex."},
    {0, NULL},
};

static PyType_Spec index_spec = {
    .name = "kvroute.conductor._block_index.BlockIndex",
    .basicsize = sizeof(Index),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = index_slots,
};

static PyObject *pack_keys(PyObject *module, PyObject *given) {
    (void)module;
    PyObject *keys = PySequence_Fast(given, "keys must be a sequence of integers");
    if (!keys)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * 8);
    for (Py_ssize_t i = 0; packed && i < count; i++) {
        u64 key;
        if (u64_argument(PySequence_Fast_GET_ITEM(keys, i), "a key", &key) < 0)
            Py_CLEAR(packed);
        else
            memcpy(PyBytes_AS_STRING(packed) + i * 8, &key, 8);
    }
    Py_DECREF(keys);
    return packed;
}

static PyMethodDef module_methods[] = {
    {"pack_keys", pack_keys, METH_O, "See kvroute.conductor.packing."},
    {NULL, NULL, 0, NULL},
};

/* The module's state is the type of exports. */

static int module_exec(PyObject *module) {
    PyObject **state = PyModule_GetState(module);
    *state = PyType_FromModuleAndSpec(module, &export_spec, NULL);
    PyObject *type = *state ? PyType_FromModuleAndSpec(module, &index_spec, NULL) : NULL;
    if (!type)
        return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    PyObject **state = PyModule_GetState(module);
    if (state)
        Py_VISIT(*state);
    return 0;
}

static int module_clear(PyObject *module) {
    PyObject **state = PyModule_GetState(module);
    if (state)
        Py_CLEAR(*state);
    return 0;
}

static void module_free(void *module) { (void)module_clear(module); }

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvroute.conductor._block_index",
    .m_doc = "The index of confirmed blocks in C.",
    .m_size = sizeof(PyObject *),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__block_index(void) { return PyModuleDef_Init(&module); }
