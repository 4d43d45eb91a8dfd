/* Arguments of methods: bad ones are a ValueError that names them. */
#ifndef KVROUTE_ARGUMENTS_H
#define KVROUTE_ARGUMENTS_H

#include "integrity.h"

static int arguments(const char *function, PyObject *const *args, Py_ssize_t given, PyObject *keywords,
                     const char *const *names, int least, int most, PyObject **out) {
    if (given > most) {
        PyErr_Format(PyExc_TypeError, "%s takes %d arguments, not %zd", function, most, given);
        return -1;
    }
    for (int i = 0; i < most; i++)
        out[i] = i < given ? args[i] : NULL;
    for (Py_ssize_t i = 0; keywords && i < PyTuple_GET_SIZE(keywords); i++) {
        PyObject *keyword = PyTuple_GET_ITEM(keywords, i);
        int at = 0;
        while (at < most && PyUnicode_CompareWithASCIIString(keyword, names[at]))
            at++;
        if (at == most || out[at]) {
            PyErr_Format(PyExc_TypeError, "%s got %R, which it does not take or has already", function, keyword);
            return -1;
        }
        out[at] = args[given + i];
    }
    for (int i = 0; i < least; i++)
        if (!out[i]) {
            PyErr_Format(PyExc_TypeError, "%s needs %s", function, names[i]);
            return -1;
        }
    return 0;
}

#if ULONG_MAX == UINT64_MAX
#define AS_U64 PyLong_AsUnsignedLong /* several times faster than the other up to Python 3.12 */
#else
#define AS_U64 PyLong_AsUnsignedLongLong
#endif

static int u64_argument(PyObject *given, const char *name, u64 *value) {
    u64 number = PyLong_Check(given) ? AS_U64(given) : UINT64_MAX;
    if (!PyLong_Check(given) || (number == UINT64_MAX && PyErr_Occurred())) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s must be from 0 to 2**64 - 1, not %R", name, given);
        return -1;
    }
    *value = number;
    return 0;
}

static int slot_argument(const Index *x, PyObject *given, u32 *slot) {
    int overflow = 0;
    long number = PyLong_Check(given) ? PyLong_AsLongAndOverflow(given, &overflow) : -1;
    if (overflow || number < 0 || (u64)number >= x->slot_cap || x->slots[number].state != OPEN) {
        PyErr_Format(PyExc_ValueError, "slot must be an open one, not %R", given);
        return -1;
    }
    *slot = (u32)number;
    return 0;
}

static int tier_argument(PyObject *given, u32 *tier) {
    int overflow = 0;
    long number = PyLong_Check(given) ? PyLong_AsLongAndOverflow(given, &overflow) : -1;
    if (overflow || number < GPU || number > DISK) {
        PyErr_Format(PyExc_ValueError, "tier must be 0 (GPU), 1 (CPU) or 2 (disk), not %R", given);
        return -1;
    }
    *tier = (u32)number;
    return 0;
}

static int packed_argument(PyObject *given, const char *name, Py_buffer *packed) {
    if (PyObject_GetBuffer(given, packed, PyBUF_SIMPLE) < 0)
        return -1;
    if (packed->len % 8 == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s must be packed 64-bit integers, not %zd bytes", name, packed->len);
    PyBuffer_Release(packed);
    return -1;
}

#endif
