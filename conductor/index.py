"""The approximate index: which worker was sent which prefix.

A radix tree over chained block keys. A node is a run of blocks that the same workers hold and that no
known prompt leaves midway, so its cost is per branching point and not per block, and matching looks at
one key per node. Because keys are chained, equal keys at one place mean equal prefixes up to it, so a run
is compared by its last key, and a partial run by bisection.

Invariants (`check_integrity`): a node's holders are among its parent's, so what a worker holds is always
contiguous from the first block; a parent is more recent than its children, so the oldest node is a leaf
and eviction goes leaves first.

Nodes are rows in parallel lists, not objects: half a million tracked objects would make every full pass
of the garbage collector a pause of the event loop. Not thread safe; one thread owns it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from struct import Struct

KEY_BYTES = 8
NODE_BYTES = 400
"""A node beyond its keys: five list slots, the run's own object, the parent's child entry with its key,
the recency entry, the integers. Measured with tracemalloc at 330 to 400 as tables grow; the tests check."""
SWEEP_PER_INSERT = 32
JOIN_CHILDREN = 64
"""A node with more children is not worth moving them to undo a split."""
KEPT_ROWS = 1024
REMEMBERED_REMOVALS = 4096

_ROOT = 0
_key_at = Struct("=Q").unpack_from


class ApproximateIndex:
    """Bounded in bytes; the least recently routed prefixes go first, leaves before roots.

    Holders are one bit per worker in an integer per node. Recency belongs to the node and not to the
    holder: a prefix kept warm by one worker stays listed for all that hold it, until it is evicted for
    all of them or a worker is removed. Ids are incarnations, so a returning engine starts empty.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 2**16:
            raise ValueError(f"max_bytes must be at least {2**16}, not {max_bytes}")
        self.max_bytes = max_bytes
        self.evicted_blocks = 0
        """Counter: blocks dropped for room since the start (removals of workers do not count)."""
        self._blocks = 0
        self._nodes = 0
        self._bits: dict[str, int] = {}
        self._held: dict[int, int] = {}
        self._removed: dict[str, None] = {}
        self._next_bit = 1
        self._free_bits: list[int] = []
        self._sweeping = 0
        self._queued = 0
        self._cursor = 0
        self._reset_rows()

    def _reset_rows(self) -> None:
        self._parent: list[int] = [_ROOT]
        self._runs: list[bytes] = [b""]
        self._holders: list[int] = [0]
        self._children: list[dict[int, int] | None] = [{}]
        self._free_rows: list[int] = []
        self._recency: OrderedDict[int, None] = OrderedDict()

    # --- reading

    @property
    def entries(self) -> int:
        """Gauge: distinct blocks known."""
        return self._blocks

    @property
    def estimated_bytes(self) -> int:
        """Gauge: memory of the entries, see `NODE_BYTES`."""
        return self._nodes * NODE_BYTES + self._blocks * KEY_BYTES

    def held_blocks(self, worker_id: str) -> int:
        """Blocks this worker is thought to hold; 0 for an unknown one."""
        return self._held.get(self._bits.get(worker_id, 0), 0)

    def match(self, keys: Sequence[int], worker_ids: Sequence[str]) -> list[int]:
        """Contiguous blocks from the first that each worker holds, parallel to the ids. Changes nothing."""
        steps = self._steps(keys)
        if not steps:
            return [0] * len(worker_ids)
        steps.reverse()
        bits = self._bits
        found = []
        for worker_id in worker_ids:
            bit = bits.get(worker_id, 0)
            for holders, depth in steps:
                if holders & bit:
                    found.append(depth)
                    break
            else:
                found.append(0)
        return found

    def _steps(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(holders, depth in blocks) down the path of `keys`; one per distinct set of holders."""
        runs, holders, children = self._runs, self._holders, self._children
        steps: list[tuple[int, int]] = []
        node = depth = 0
        count = len(keys)
        last_holders = 0
        while depth < count:
            below = children[node]
            if below is None:
                break
            child = below.get(keys[depth])
            if child is None:
                break
            run = runs[child]
            size = len(run) >> 3
            end = depth + size
            whole = end <= count and _key_at(run, len(run) - KEY_BYTES)[0] == keys[end - 1]
            depth = end if whole else depth + _common(run, keys, depth)
            if holders[child] == last_holders:
                steps[-1] = (last_holders, depth)
            else:
                last_holders = holders[child]
                steps.append((last_holders, depth))
            if not whole:
                break
            node = child
        return steps

    # --- writing

    def insert(self, worker_id: str, keys: Sequence[int]) -> None:
        """Note that `worker_id` was sent the prompt of `keys` (from its first block), and refresh its path.

        A prompt too long for half of `max_bytes` is noted up to there.
        """
        limit = self.max_bytes // (2 * KEY_BYTES)
        if len(keys) > limit:
            keys = keys[:limit]
        if self._sweeping:
            self.sweep(SWEEP_PER_INSERT)
        if not keys:
            return
        bit = self._bits.get(worker_id) or self._new_bit(worker_id)
        if not bit:
            return
        node = self._descend(bit, keys)
        parent, touch = self._parent, self._recency.move_to_end
        while node != _ROOT:
            touch(node)
            node = parent[node]
        while self._nodes * NODE_BYTES + self._blocks * KEY_BYTES > self.max_bytes:
            self._evict()

    def _descend(self, bit: int, keys: Sequence[int]) -> int:
        """Give the path of `keys` to the worker of `bit`, adding what is missing; returns the last node."""
        runs, holders, children = self._runs, self._holders, self._children
        node = depth = 0
        count = len(keys)
        while depth < count:
            below = children[node]
            child = None if below is None else below.get(keys[depth])
            if child is None:
                return self._grow(node, bit, keys, depth)
            run = runs[child]
            end = depth + (len(run) >> 3)
            if end > count or _key_at(run, len(run) - KEY_BYTES)[0] != keys[end - 1]:
                shared = _common(run, keys, depth)
                if depth + shared == count and holders[child] & bit:
                    return child  # a prefix of what this worker holds already
                child = self._split(child, shared)
                end = depth + shared
            if not holders[child] & bit:
                holders[child] |= bit
                self._held[bit] += len(runs[child]) >> 3
            node, depth = child, end
        return node

    def _grow(self, node: int, bit: int, keys: Sequence[int], depth: int) -> int:
        """Add keys[depth:] below `node`; a leaf of this worker alone (a chat's last turn) is lengthened."""
        run = array("Q", keys[depth:]).tobytes()
        added = len(run) >> 3
        self._blocks += added
        self._held[bit] += added
        if node != _ROOT and self._children[node] is None and self._holders[node] == bit:
            self._runs[node] += run
            return node
        row = self._new_row(node, run, bit)
        below = self._children[node]
        if below is None:
            below = self._children[node] = {}
        below[keys[depth]] = row
        return row

    def _split(self, node: int, blocks: int) -> int:
        """Put the first `blocks` of a node's run into a new parent above it; returns that parent."""
        run, above = self._runs[node], self._parent[node]
        cut = blocks * KEY_BYTES
        row = self._new_row(above, run[:cut], self._holders[node] & ~(self._sweeping | self._queued))
        siblings = self._children[above]
        assert siblings is not None
        siblings[_key_at(run, 0)[0]] = row
        self._children[row] = {_key_at(run, cut)[0]: node}
        self._runs[node] = run[cut:]
        self._parent[node] = row
        return row

    def _new_row(self, parent: int, run: bytes, holders: int) -> int:
        self._nodes += 1
        if self._free_rows:
            row = self._free_rows.pop()
            self._parent[row] = parent
            self._runs[row] = run
            self._holders[row] = holders
        else:
            row = len(self._runs)
            self._parent.append(parent)
            self._runs.append(run)
            self._holders.append(holders)
            self._children.append(None)
        self._recency[row] = None
        return row

    def _evict(self) -> None:
        leaf = next(iter(self._recency))
        blocks = len(self._runs[leaf]) >> 3
        self.evicted_blocks += blocks
        holders = self._holders[leaf]
        while holders:
            bit = holders & -holders
            if bit in self._held:
                self._held[bit] -= blocks
            holders ^= bit
        self._drop_leaf(leaf)

    def _drop_leaf(self, leaf: int) -> None:
        """Forget a leaf; a parent left with one child of the same holders is joined with it."""
        run, above = self._runs[leaf], self._parent[leaf]
        siblings = self._children[above]
        assert siblings is not None
        del siblings[_key_at(run, 0)[0]]
        self._blocks -= len(run) >> 3
        self._free(leaf)
        if above == _ROOT:
            return
        if not siblings:
            self._children[above] = None
        elif len(siblings) == 1:
            self._join(above, next(iter(siblings.values())))

    def _join(self, node: int, child: int) -> None:
        """Undo a split: an only child's run goes to its parent, if the same workers hold both."""
        below = self._children[child]
        if self._holders[node] != self._holders[child] or (below is not None and len(below) > JOIN_CHILDREN):
            return
        self._runs[node] += self._runs[child]
        self._children[node] = below
        if below is not None:
            for grandchild in below.values():
                self._parent[grandchild] = node
        self._free(child)

    def _free(self, row: int) -> None:
        self._runs[row] = b""
        self._children[row] = None
        self._holders[row] = 0
        del self._recency[row]
        self._nodes -= 1
        if self._nodes == 0 and len(self._runs) > KEPT_ROWS:
            self._reset_rows()  # gives the grown tables back
        else:
            self._free_rows.append(row)

    # --- workers

    def _new_bit(self, worker_id: str) -> int:
        """The holder bit of a worker not seen before; 0 for a removed one, whose late news must not count."""
        if worker_id in self._removed:
            return 0
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = self._next_bit
            self._next_bit <<= 1
        self._bits[worker_id] = bit
        self._held[bit] = 0
        return bit

    def remove_worker(self, worker_id: str) -> None:
        """Forget an incarnation for good; from now on it matches nothing and what it is told is ignored.

        Takes constant time: its bit is retired at once, and cleared from the nodes by `sweep`, after which
        another worker may have it.
        """
        self._removed[worker_id] = None
        if len(self._removed) > REMEMBERED_REMOVALS:
            del self._removed[next(iter(self._removed))]
        bit = self._bits.pop(worker_id, 0)
        if not bit:
            return
        if not self._held.pop(bit):
            self._free_bits.append(bit)
        elif self._sweeping:
            self._queued |= bit
        else:
            self._sweeping = bit
            self._cursor = 1

    def sweep(self, rows: int = 1000) -> bool:
        """Look at up to so many nodes for traces of removed workers; True while there is more to do.

        Inserts do a little of it as they go; call it when idle to be done sooner (about 0.2 us a node).
        """
        if not self._sweeping:
            return False
        alive = ~self._sweeping
        for row in range(self._cursor, self._cursor + rows):
            if row >= len(self._runs):
                return self._end_sweep()
            holders = self._holders[row]
            if holders & alive != holders:
                self._holders[row] = holders & alive
                self._drop_unheld(row, alive)
        self._cursor += rows
        return True

    def _drop_unheld(self, row: int, alive: int) -> None:
        while row != _ROOT and self._children[row] is None and not self._holders[row] & alive:
            above = self._parent[row]
            self._drop_leaf(row)
            row = above

    def _end_sweep(self) -> bool:
        while self._sweeping:
            bit = self._sweeping & -self._sweeping
            self._free_bits.append(bit)
            self._sweeping ^= bit
        self._sweeping, self._queued = self._queued, 0
        self._cursor = 1
        return self._sweeping != 0

    # --- self-examination

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken. Looks at everything: for tests and idle time."""
        retired = self._sweeping | self._queued
        age = {row: position for position, row in enumerate(self._recency)}
        held = dict.fromkeys(self._held, 0)
        blocks = children = 0
        for row, position in age.items():
            run, above, below = self._runs[row], self._parent[row], self._children[row]
            assert run, f"row {row} is empty"
            assert len(run) % KEY_BYTES == 0, f"row {row} ends within a key"
            blocks += len(run) >> 3
            siblings = self._children[above]
            assert siblings is not None, f"row {row} is not below {above}"
            assert siblings[_key_at(run, 0)[0]] == row, f"row {row} is not below {above}"
            holders = self._holders[row] & ~retired
            assert holders or self._holders[row] & self._sweeping or self._queued, f"row {row} has no holder"
            if above != _ROOT:
                assert age[above] > position, f"row {row} is more recent than its parent"
                assert holders & ~self._holders[above] == 0, f"row {row} has holders that its parent has not"
            assert below is None or below, f"row {row} has an empty table of children"
            children += len(below or ())
            for bit in held:
                held[bit] += len(run) >> 3 if holders & bit else 0
        children += len(self._children[_ROOT] or ())
        assert children == len(age) == self._nodes, f"{children} children, {self._nodes} nodes"
        assert len(self._free_rows) + self._nodes + 1 == len(self._runs), "rows are lost"
        assert blocks == self._blocks, f"{blocks} blocks, counted {self._blocks}"
        assert held == self._held, f"held {held}, counted {self._held}"
        assert self.estimated_bytes <= self.max_bytes, repr(self)

    def __repr__(self) -> str:
        return (
            f"<ApproximateIndex blocks={self._blocks} nodes={self._nodes} workers={len(self._bits)} "
            f"bytes={self.estimated_bytes}/{self.max_bytes} evicted={self.evicted_blocks}>"
        )


def _common(run: bytes, keys: Sequence[int], depth: int) -> int:
    """How many keys of `run` equal keys[depth:], given that the first does; chains, so by bisection."""
    low, high = 1, min(len(run) >> 3, len(keys) - depth)
    while low < high:
        middle = (low + high + 1) >> 1
        if _key_at(run, (middle - 1) * KEY_BYTES)[0] == keys[depth + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
