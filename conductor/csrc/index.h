/* What the index is made of, and how memory is had. */
#ifndef KVROUTE_INDEX_H
#define KVROUTE_INDEX_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

enum { GPU, CPU, DISK, PROBABLE, TIERS };
enum { BLOCK_BYTES = sizeof(u64) + sizeof(u32) + sizeof(u16) }; /* key, word and gen */
enum { LANES = 6, SHARDS = 256, BINS = 28, MAX_SLOTS = 1 << 16, AHEAD = 8 };

#define NIL 0x0FFFFFFFu      /* no block; ids are below it */
#define ID_BITS 28
#define FAILED 0xFFFFFFFFu   /* no memory */

/* The word of a block. A free one has FREE and, at the start of a free run, the run before it in its bin. */
#define CONT 0x80000000u     /* its parent is the block numbered one less */
#define ROOT 0x40000000u     /* it has no parent */
#define FREE 0x20000000u
#define SET_MASK 0x1FFFFFFFu

/* The value of a name: block, a bit per tier from 28 on, and whether a count above one is in the side map. */
#define EXTRA 0x80000000u
#define TIER_BIT(tier) (1u << (ID_BITS + (tier)))
#define TIER_MASK 0x70000000u

/* Kinds of entries in a slot's side map, beside the tier. */
#define COUNT_OF(tier) ((u32)(tier))       /* hash -> stored more often than removed, beyond once */
#define ALIAS_OF(tier) ((u32)(tier) | 4u)  /* key -> hashes that name it there, beyond one */

typedef struct { u64 a, value; u32 b, used; } Pair;
typedef struct { Pair *at; u32 cap, count; } Map;
typedef struct { u32 *at; u32 cap, count; } Shard;
typedef struct { u32 low, high, value; } Name;
typedef struct { Name *at; u32 cap, count; } Names;
typedef struct { u32 block, before, after; } Node;
typedef struct { Node *at; u32 *table; u32 cap, table_cap, count, head, tail, unused; } Queue;

typedef enum { UNUSED, OPEN, RETIRED } State;

typedef struct {
    State state;
    u32 held[TIERS];
    u32 silent;
    Names names;
    Map side;
    Queue probable;
} Slot;

typedef struct {
    u64 *words;              /* set s: TIERS x index->words at s * TIERS * index->words */
    u32 *refs, *hash;        /* of a free set: 0, the next free one */
    u32 *table;
    u32 cap, top, live, unused, table_cap;
} Sets;

typedef struct {
    PyObject_HEAD
    u64 seed;
    u64 *key;
    u32 *word;
    u16 *gen;
    u32 cap, top, blocks, free_blocks;
    u32 bins[BINS];          /* free runs by the logarithm of their length */
    u16 generation;
    u32 generation_stores;
    Shard shards[SHARDS];
    Map parents;             /* block -> key of its parent, where neither CONT nor ROOT says it */
    Sets sets;
    struct { u32 from, slot, clear, add, to; } last;
    Slot *slots;
    u32 slot_cap, words, retired;
    u64 *open_bits, *sweep_bits, *queue_bits, *scratch;
    u32 cursor;              /* blocks from here on are swept */
    int sweeping;
    u64 entries, probable;
} Index;

static void *zeroed(u64 count, size_t size) {
    return count > SIZE_MAX / size ? NULL : PyMem_RawCalloc((size_t)count, size);
}

static void *resized(void *old, u64 count, size_t size) {
    return count > SIZE_MAX / size ? NULL : PyMem_RawRealloc(old, (size_t)count * size);
}

static inline u64 mixed(const Index *x, u64 value) {
    value = (value ^ x->seed) * UINT64_C(0x9E3779B97F4A7C15);
    value = (value ^ (value >> 29)) * UINT64_C(0xBF58476D1CE4E5B9);
    return value ^ (value >> 32);
}

static inline u32 in_range(u64 hash, u32 cap) { return (u32)(((hash & 0xFFFFFFFFu) * cap) >> 32); }

static inline u64 load(const char *packed, size_t at) {
    u64 value;
    memcpy(&value, packed + at * 8, 8);
    return value;
}

/* True if what lies at `at` and belongs to `home` may move back to `hole`, in a circle of `cap`. */
static inline int may_fill(u32 hole, u32 at, u32 home, u32 cap) {
    u32 from_home = at >= home ? at - home : at + cap - home;
    u32 from_hole = at >= hole ? at - hole : at + cap - hole;
    return from_home >= from_hole;
}

static u32 lowest_bit(u64 bits) {
#if defined(__GNUC__) || defined(__clang__)
    return (u32)__builtin_ctzll(bits);
#else
    u32 at = 0;
    while (!(bits & 1)) {
        bits >>= 1;
        at++;
    }
    return at;
#endif
}

#endif
