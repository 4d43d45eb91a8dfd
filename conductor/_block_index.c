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

/* Memory */

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

/* What is probable in one slot: a queue, the oldest first, that finds a block and moves it to the end. */

static inline u32 queue_home(const Index *x, const Queue *q, u32 block) {
    return in_range(mixed(x, block), q->table_cap);
}

static u32 queue_find(const Index *x, const Queue *q, u32 block) {
    if (!q->count)
        return NIL;
    for (u32 at = queue_home(x, q, block); q->table[at]; at = at + 1 == q->table_cap ? 0 : at + 1)
        if (q->at[q->table[at] - 1].block == block)
            return q->table[at] - 1;
    return NIL;
}

static void queue_index(const Index *x, Queue *q, u32 node) {
    u32 at = queue_home(x, q, q->at[node].block);
    while (q->table[at])
        at = at + 1 == q->table_cap ? 0 : at + 1;
    q->table[at] = node + 1;
}

static void queue_link_last(Queue *q, u32 node) {
    q->at[node].before = q->tail;
    q->at[node].after = NIL;
    if (q->tail == NIL)
        q->head = node;
    else
        q->at[q->tail].after = node;
    q->tail = node;
}

static void queue_unlink(Queue *q, u32 node) {
    Node *n = &q->at[node];
    if (n->before == NIL)
        q->head = n->after;
    else
        q->at[n->before].after = n->after;
    if (n->after == NIL)
        q->tail = n->before;
    else
        q->at[n->after].before = n->before;
}

static int queue_resize(Index *x, Queue *q, u32 cap) {
    Queue fresh = {NULL, NULL, cap, cap + cap / 2, 0, NIL, NIL, NIL};
    if (cap) {
        fresh.at = zeroed(cap, sizeof(Node));
        fresh.table = zeroed(fresh.table_cap, sizeof(u32));
        if (!fresh.at || !fresh.table) {
            PyMem_RawFree(fresh.at);
            PyMem_RawFree(fresh.table);
            return -1;
        }
        for (u32 node = q->count ? q->head : NIL; node != NIL; node = q->at[node].after) {
            fresh.at[fresh.count].block = q->at[node].block;
            queue_link_last(&fresh, fresh.count);
            queue_index(x, &fresh, fresh.count++);
        }
        for (u32 node = cap; node-- > fresh.count;) {
            fresh.at[node].after = fresh.unused;
            fresh.unused = node;
        }
    }
    PyMem_RawFree(q->at);
    PyMem_RawFree(q->table);
    *q = fresh;
    return 0;
}

static int queue_reserve(Index *x, Queue *q) {
    return q->count < q->cap ? 0 : queue_resize(x, q, q->cap + q->cap / 2 + 8);
}

/* Room must have been reserved. */
static void queue_push(Index *x, Queue *q, u32 block) {
    u32 node = q->unused;
    q->unused = q->at[node].after;
    q->at[node].block = block;
    queue_link_last(q, node);
    queue_index(x, q, node);
    q->count++;
}

static void queue_delete(Index *x, Queue *q, u32 node) {
    u32 hole = queue_home(x, q, q->at[node].block);
    while (q->table[hole] != node + 1)
        hole = hole + 1 == q->table_cap ? 0 : hole + 1;
    for (u32 at = hole;;) {
        at = at + 1 == q->table_cap ? 0 : at + 1;
        if (!q->table[at])
            break;
        if (may_fill(hole, at, queue_home(x, q, q->at[q->table[at] - 1].block), q->table_cap)) {
            q->table[hole] = q->table[at];
            hole = at;
        }
    }
    q->table[hole] = 0;
    queue_unlink(q, node);
    q->at[node].after = q->unused;
    q->unused = node;
    q->count--;
}

static void queue_shrink(Index *x, Queue *q) {
    if (q->cap && (!q->count || (q->cap > 64 && q->count < q->cap / 5)))
        (void)queue_resize(x, q, q->count ? q->count * 2 + 8 : 0);
}

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

/* Blocks. Free ones form maximal runs, in bins. The first of a run keeps START, its length and the next run in
 * the bin as its key; the last (of two or more) the number of the first. */

#define START ((u64)1 << 63)

static inline int is_free(const Index *x, u32 id) { return (x->word[id] & FREE) != 0; }

static inline u32 run_length(const Index *x, u32 start) { return (u32)(x->key[start] >> ID_BITS) & NIL; }

static u32 bin_of(u32 length) {
    u32 bin = 0;
    while (length >>= 1)
        bin++;
    return bin;
}

static void run_link(Index *x, u32 start, u32 length) {
    u32 *bin = &x->bins[bin_of(length)];
    if (length > 1)
        x->key[start + length - 1] = start;
    x->key[start] = START | (u64)length << ID_BITS | *bin;
    x->word[start] = FREE | NIL;
    if (*bin != NIL)
        x->word[*bin] = FREE | start;
    *bin = start;
}

static void run_unlink(Index *x, u32 start) {
    u32 next = (u32)x->key[start] & NIL, before = x->word[start] & NIL;
    if (before == NIL)
        x->bins[bin_of(run_length(x, start))] = next;
    else
        x->key[before] = (x->key[before] & ~(u64)NIL) | next;
    if (next != NIL)
        x->word[next] = FREE | before;
}

static int blocks_resize(Index *x, u32 cap) {
    u64 *key = resized(x->key, cap + 1, sizeof(u64));
    if (key)
        x->key = key;
    u32 *word = resized(x->word, cap + 1, sizeof(u32));
    if (word)
        x->word = word;
    u16 *gen = resized(x->gen, cap + 1, sizeof(u16));
    if (gen)
        x->gen = gen;
    if (cap > x->cap && !(key && word && gen))
        return -1; /* what has grown already does no harm, and neither does what did not shrink */
    x->cap = cap;
    return 0;
}

static int blocks_reserve(Index *x) {
    if (x->top < x->cap || x->free_blocks > x->blocks / 4)
        return 0;
    u32 cap = x->cap + x->cap / 8 + 64;
    if (cap < NIL && blocks_resize(x, cap) == 0)
        return 0;
    return x->free_blocks ? 0 : -1;
}

static u32 take_front(Index *x, u32 start) {
    u32 length = run_length(x, start);
    run_unlink(x, start);
    if (length > 1)
        run_link(x, start + 1, length - 1);
    x->free_blocks--;
    return start;
}

/* A number for a block: the one after `before` if it can be, else where `wanted` follow it. Room reserved. */
static u32 take_id(Index *x, u32 before, u32 wanted) {
    if (before != NIL && before + 1 < x->top && is_free(x, before + 1))
        return take_front(x, before + 1);
    if (before == NIL || before + 1 != x->top || x->top == x->cap) {
        u32 bin = bin_of(wanted) + (wanted & (wanted - 1) ? 1 : 0);
        for (; bin < BINS; bin++)
            if (x->bins[bin] != NIL)
                return take_front(x, x->bins[bin]);
        if (x->top == x->cap || x->free_blocks > x->blocks / 4)
            for (bin = BINS; bin-- > 0;)
                if (x->bins[bin] != NIL)
                    return take_front(x, x->bins[bin]);
    }
    return x->top++;
}

static void give_id(Index *x, u32 id) {
    u32 start = id, end = id + 1;
    if (id && is_free(x, id - 1)) {
        start = x->key[id - 1] & START ? id - 1 : (u32)x->key[id - 1];
        run_unlink(x, start);
    }
    if (end < x->top && is_free(x, end)) {
        u32 next = end;
        end += run_length(x, next);
        run_unlink(x, next);
    }
    x->word[id] = FREE;
    x->free_blocks++;
    if (end < x->top) {
        run_link(x, start, end - start);
        return;
    }
    x->free_blocks -= end - start;
    x->top = start;
    if (x->cap > 256 && x->top < x->cap / 3)
        (void)blocks_resize(x, x->top + x->top / 2);
}

static int parent_of(const Index *x, u32 id, u64 *key) {
    if (x->word[id] & ROOT)
        return 0;
    *key = x->word[id] & CONT ? x->key[id - 1] : *map_find(x, &x->parents, id, 0);
    return 1;
}

static inline void set_block(Index *x, u32 id, u32 set) {
    u32 old = x->word[id] & SET_MASK;
    x->sets.refs[set]++;
    x->word[id] = (x->word[id] & ~SET_MASK) | set;
    x->sets.refs[old]--;
    set_release(x, old);
}

/* Forget a block that nobody holds. -1 without memory, and then nothing has changed. */
static int drop_block(Index *x, u32 id) {
    u32 next = id + 1;
    if (next < x->top && !is_free(x, next) && x->word[next] & CONT) {
        if (map_reserve(x, &x->parents) < 0)
            return -1;
        map_put(x, &x->parents, next, 0, x->key[id]);
        x->word[next] &= ~CONT;
    }
    if (!(x->word[id] & (CONT | ROOT))) {
        map_delete(x, &x->parents, id, 0);
        map_shrink(x, &x->parents);
    }
    u32 set = x->word[id] & SET_MASK;
    x->sets.refs[set]--;
    set_release(x, set);
    table_delete(x, id);
    x->blocks--;
    give_id(x, id);
    if (!x->blocks)
        sets_free(x);
    return 0;
}

/* Give a block another set; without holders it is forgotten. -1 without memory. */
static int change_block(Index *x, u32 id, u32 set) {
    if (set == FAILED)
        return -1;
    if (!set)
        return drop_block(x, id);
    if (set != (x->word[id] & SET_MASK))
        set_block(x, id, set);
    return 0;
}

/* What events do */

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

/* Slots */

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

/* Eviction */

/* Entries that a table for `count` has when it is tight: full enough, and not so full that it soon grows. */
static u32 tight(u32 count, u32 percent) { return count ? (u32)((u64)count * 100 / percent) + 8 : 0; }

static u32 tight_blocks(u32 blocks) { return blocks ? blocks + blocks / 32 + 16 : 0; }

enum { NAMES_LOAD = 64, TABLE_LOAD = 52, MAP_LOAD = 60, QUEUE_LOAD = 90 };

static inline u64 capacity(u32 cap, u32 least, int if_tight) { return if_tight ? least : cap; }

/* What is allocated, or is at most once all tables have been made tight. */
static u64 memory(const Index *x, int if_tight) {
    const Sets *s = &x->sets;
    u64 bytes = sizeof(Index) + capacity(x->cap, tight_blocks(x->blocks), if_tight) * BLOCK_BYTES +
                capacity(x->parents.cap, tight(x->parents.count, MAP_LOAD), if_tight) * sizeof(Pair) +
                (u64)s->cap * (TIERS * x->words * sizeof(u64) + 2 * sizeof(u32)) +
                (u64)s->table_cap * sizeof(u32) + (u64)x->slot_cap * sizeof(Slot) +
                (3 + TIERS) * (u64)x->words * sizeof(u64);
    for (const Shard *t = x->shards; t < x->shards + SHARDS; t++)
        bytes += capacity(t->cap, tight(t->count, TABLE_LOAD), if_tight) * sizeof(u32);
    for (const Slot *at = x->slots; at < x->slots + x->slot_cap; at++) {
        u64 queued = capacity(at->probable.cap, tight(at->probable.count, QUEUE_LOAD), if_tight);
        bytes += capacity(at->names.cap, tight(at->names.count, NAMES_LOAD), if_tight) * sizeof(Name) +
                 capacity(at->side.cap, tight(at->side.count, MAP_LOAD), if_tight) * sizeof(Pair) +
                 queued * sizeof(Node) + queued * 3 / 2 * sizeof(u32);
    }
    return bytes;
}

typedef struct { u32 *mark, *order, *starts; Map parents; } Room;

#define DROPPED FAILED

/* Everything that eviction needs, before it begins: it cannot fail half way. */
static int room_for_eviction(Index *x, Room *room) {
    room->mark = zeroed((u64)x->top + 1, sizeof(u32));
    room->order = zeroed((u64)x->blocks + 1, sizeof(u32));
    room->starts = zeroed(UINT16_MAX + 2, sizeof(u32));
    room->parents = (Map){zeroed((u64)x->parents.cap + 8, sizeof(Pair)), x->parents.cap + 8, 0};
    return room->mark && room->order && room->starts && room->parents.at ? 0 : -1;
}

static void order_by_generation(const Index *x, u32 *order, u32 *starts) {
    for (u32 id = 0; id < x->top; id++)
        if (!is_free(x, id))
            starts[x->gen[id] + 1]++;
    for (u32 gen = 0; gen <= UINT16_MAX; gen++)
        starts[gen + 1] += starts[gen];
    for (u32 id = 0; id < x->top; id++)
        if (!is_free(x, id))
            order[starts[x->gen[id]]++] = id;
}

static u32 parent_block(const Index *x, u32 id) {
    u64 key;
    if (x->word[id] & CONT)
        return id - 1;
    return parent_of(x, id, &key) ? find_block(x, key) : NIL;
}

#define PASSED 0x80000000u

/* Mark the least recently stored, leaves before what they hang on. mark: children left, and PASSED. */
static u32 choose(const Index *x, u32 *mark, const u32 *order, u32 wanted) {
    u32 dropped = 0;
    for (u32 id = 0; id < x->top; id++)
        if (!is_free(x, id)) {
            u32 parent = parent_block(x, id);
            if (parent != NIL)
                mark[parent]++;
        }
    for (u32 i = 0; i < x->blocks && dropped < wanted; i++) {
        u32 id = order[i];
        mark[id] |= PASSED;
        while (id != NIL && mark[id] == PASSED && dropped < wanted) {
            mark[id] = DROPPED;
            dropped++;
            id = parent_block(x, id);
            if (id != NIL)
                mark[id]--;
        }
    }
    if (!dropped && wanted && x->blocks) { /* chains that bite their own tail */
        mark[order[0]] = DROPPED;
        dropped = 1;
    }
    return dropped;
}

/* Take dropped blocks out of the slots' books; names first, while blocks are where they were. */
static void forget_names(Index *x, const u32 *mark) {
    for (u32 slot = 0; slot < x->slot_cap; slot++) {
        Slot *s = &x->slots[slot];
        for (u32 at = 0; at < s->names.cap;) {
            Name *name = &s->names.at[at];
            if (!name->value || mark[name->value & NIL] != DROPPED) {
                at++;
                continue;
            }
            for (u32 tier = 0; tier < PROBABLE; tier++) {
                map_delete(x, &s->side, hash_of(name), COUNT_OF(tier));
                map_delete(x, &s->side, x->key[name->value & NIL], ALIAS_OF(tier));
            }
            name_delete(x, &s->names, name);
        }
        for (u32 node = s->probable.count ? s->probable.head : NIL, next; node != NIL; node = next) {
            next = s->probable.at[node].after;
            if (mark[s->probable.at[node].block] == DROPPED)
                queue_delete(x, &s->probable, node);
        }
    }
}

/* Of the rest of the books. Its key stays in place until blocks are renumbered. */
static void uncount(Index *x, u32 id) {
    u32 set = x->word[id] & SET_MASK;
    for (u32 tier = 0; tier < TIERS; tier++)
        for (u32 at = 0; at < x->words; at++) {
            u64 bits = set_words(x, set)[tier * x->words + at] & x->open_bits[at];
            for (; bits; bits &= bits - 1) {
                x->slots[at * 64 + lowest_bit(bits)].held[tier]--;
                *(tier == PROBABLE ? &x->probable : &x->entries) -= 1;
            }
        }
    x->sets.refs[set]--;
    set_release(x, set);
    table_delete(x, id);
    x->blocks--;
}

/* Number what is left without gaps; mark becomes old number -> new. */
static void renumber(Index *x, u32 *mark, Map *parents) {
    u32 top = 0, left = NIL; /* the new number of the block that was one before, if it is left */
    for (u32 id = 0; id < x->top; id++) {
        if (is_free(x, id) || mark[id] == DROPPED) {
            left = NIL;
            continue;
        }
        u64 key;
        u32 bits = x->word[id] & ROOT;
        if (!bits) {
            if (x->word[id] & CONT && left != NIL) {
                bits = CONT;
            } else {
                /* x->key[id - 1] is untouched where it matters: a dropped or free block is never written over
                 * before those behind it have been read, but by one that moved down to it. */
                (void)parent_of(x, id, &key);
                if (top && x->key[top - 1] == key)
                    bits = CONT;
                else
                    map_put(x, parents, top, 0, key);
            }
        }
        mark[id] = top;
        x->key[top] = x->key[id];
        x->gen[top] = x->gen[id];
        x->word[top] = (x->word[id] & SET_MASK) | bits;
        left = top++;
    }
    x->top = top;
}

/* After blocks were renumbered: tables that name blocks. */
static void rename_blocks(Index *x, const u32 *now) {
    for (const Shard *s = x->shards; s < x->shards + SHARDS; s++)
        for (u32 at = 0; at < s->cap; at++)
            if (s->at[at])
                s->at[at] = (s->at[at] & ~NIL) | (now[(s->at[at] & NIL) - 1] + 1);
    for (u32 slot = 0; slot < x->slot_cap; slot++) {
        Names *n = &x->slots[slot].names;
        for (u32 at = 0; at < n->cap; at++)
            if (n->at[at].value)
                n->at[at].value = (n->at[at].value & ~NIL) | now[n->at[at].value & NIL];
        Queue *q = &x->slots[slot].probable;
        if (q->table_cap)
            memset(q->table, 0, q->table_cap * sizeof(u32));
        for (u32 node = q->count ? q->head : NIL; node != NIL; node = q->at[node].after) {
            q->at[node].block = now[q->at[node].block];
            queue_index(x, q, node);
        }
    }
}

/* Give back what tables have too much. Where that needs memory that is not there, they stay. */
static void tighten(Index *x) {
    for (Shard *s = x->shards; s < x->shards + SHARDS; s++)
        if (tight(s->count, TABLE_LOAD) < s->cap)
            (void)shard_resize(x, s, tight(s->count, TABLE_LOAD));
    for (Slot *s = x->slots; s < x->slots + x->slot_cap; s++) {
        if (tight(s->names.count, NAMES_LOAD) < s->names.cap)
            (void)names_resize(x, &s->names, tight(s->names.count, NAMES_LOAD));
        if (tight(s->side.count, MAP_LOAD) < s->side.cap)
            (void)map_resize(x, &s->side, tight(s->side.count, MAP_LOAD));
        if (tight(s->probable.count, QUEUE_LOAD) < s->probable.cap)
            (void)queue_resize(x, &s->probable, tight(s->probable.count, QUEUE_LOAD));
    }
    if (tight(x->parents.count, MAP_LOAD) < x->parents.cap)
        (void)map_resize(x, &x->parents, tight(x->parents.count, MAP_LOAD));
    if (tight_blocks(x->blocks) < x->cap)
        (void)blocks_resize(x, tight_blocks(x->blocks));
    if (!x->blocks)
        sets_free(x);
}

/* Drop so many blocks and close all gaps; -1 without memory, and then nothing has changed. */
static int compact(Index *x, u32 wanted) {
    Room room;
    int failed = room_for_eviction(x, &room);
    if (!failed) {
        if (wanted) {
            order_by_generation(x, room.order, room.starts);
            (void)choose(x, room.mark, room.order, wanted);
            forget_names(x, room.mark);
            for (u32 id = 0; id < x->top; id++)
                if (!is_free(x, id) && room.mark[id] == DROPPED)
                    uncount(x, id);
        }
        renumber(x, room.mark, &room.parents);
        Map old = x->parents;
        x->parents = room.parents;
        room.parents = old;
        for (u32 bin = 0; bin < BINS; bin++)
            x->bins[bin] = NIL;
        x->free_blocks = 0;
        x->cursor = x->top; /* a sweep under way begins again */
        rename_blocks(x, room.mark);
        tighten(x);
    }
    PyMem_RawFree(room.mark);
    PyMem_RawFree(room.order);
    PyMem_RawFree(room.starts);
    PyMem_RawFree(room.parents.at);
    return failed;
}

/* How many of `count` to drop: a little more than their share, since a second time costs as much again. */
static u32 share(const Index *x, u64 count, u64 limit) {
    u64 least = memory(x, 1);
    if (least <= limit)
        return 0;
    u64 wanted = (u64)((double)count * ((double)(least - limit) / (double)least)) + count / 64 + 1;
    return (u32)(wanted < count ? wanted : count);
}

static int drop_oldest_probable(Index *x, u64 wanted) {
    while (wanted && x->probable)
        for (u32 slot = 0; slot < x->slot_cap && wanted; slot++)
            if (x->slots[slot].probable.count) {
                if (drop_probable(x, slot, x->slots[slot].probable.head) < 0)
                    return -1;
                wanted--;
            }
    return 0;
}

/* The first time dropping nothing may do: closing gaps is enough. */
static int evict(Index *x, u64 limit) {
    u32 least = 0, wanted;
    for (; memory(x, 0) > limit && x->probable; least = 1) {
        wanted = share(x, x->probable, limit);
        if (drop_oldest_probable(x, wanted > least ? wanted : least) < 0 || compact(x, 0) < 0)
            return -1;
    }
    for (; memory(x, 0) > limit && x->blocks; least = 1) {
        wanted = share(x, x->blocks, limit);
        if (compact(x, wanted > least ? wanted : least) < 0)
            return -1;
    }
    return 0;
}

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

/* The type */

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
