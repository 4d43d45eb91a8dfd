"""The approximate index: which worker was sent which prefix, for engines that publish no KV events."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.conductor.packing import pack_keys
from kvroute.conductor.radix import KEY_BYTES, ROOT, RadixTree, common_blocks, key_at

SWEEP_PER_INSERT = 32
"""Nodes freed of removed workers along with each insert, about 5 us while there are any."""
REMEMBERED_REMOVALS = 4096


class ApproximateIndex:
    """Bounded in bytes; the least recently routed prefixes go first, leaves before roots.

    Holders are one bit per worker in an integer per node of a `RadixTree`. What a worker holds is always
    contiguous from the first block, so a match never reaches beyond a hole.

    Recency belongs to the node and not to the holder: a prefix that one worker keeps warm stays listed for
    all that hold it, until it is evicted for all or a worker is removed. Worker ids are incarnations, so an
    engine that returns starts empty. Not thread safe: one thread owns it.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 2**16:
            raise ValueError(f"max_bytes must be at least {2**16}, not {max_bytes}")
        self.max_bytes = max_bytes
        self.evicted_blocks = 0
        """Counter: blocks dropped for room since the start; removals of workers do not count."""
        self._tree = RadixTree()
        self._bits: dict[str, int] = {}
        self._held: dict[int, int] = {}
        self._removed: dict[str, None] = {}
        self._next_bit = 1
        self._free_bits: list[int] = []
        self._sweeping = 0
        """Bits of removed workers that the pass under way clears from the nodes."""
        self._queued = 0
        """Bits of workers removed since it began; they need a pass of their own."""
        self._cursor = 1

    @property
    def entries(self) -> int:
        """Gauge: distinct blocks known."""
        return self._tree.blocks

    @property
    def estimated_bytes(self) -> int:
        """Gauge: memory of the entries; `radix.NODE_BYTES` says how it is estimated."""
        return self._tree.estimated_bytes

    def held_blocks(self, worker_id: str) -> int:
        """Blocks this worker is thought to hold; 0 for an unknown one."""
        return self._held.get(self._bits.get(worker_id, 0), 0)

    def match(self, keys: Sequence[int], worker_ids: Sequence[str]) -> list[int]:
        """Contiguous blocks from the first that each worker holds, parallel to the ids. Changes nothing."""
        steps = self._steps(keys)
        found = [0] * len(worker_ids)
        if steps:
            bits = [self._bits.get(worker_id, 0) for worker_id in worker_ids]
            for holders, depth in steps:
                found = [depth if holders & bit else known for bit, known in zip(bits, found, strict=True)]
        return found

    def _steps(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(holders, depth in blocks) down the path of `keys`; one per distinct set of holders."""
        tree = self._tree
        runs, holders, children = tree.runs, tree.holders, tree.children
        steps: list[tuple[int, int]] = []
        node, depth, count = ROOT, 0, len(keys)
        last_holders = 0
        while depth < count:
            below = children[node]
            child = None if below is None else below.get(keys[depth])
            if child is None:
                break
            run = runs[child]
            end = depth + (len(run) >> 3)
            whole = end <= count and key_at(run, len(run) - KEY_BYTES)[0] == keys[end - 1]
            depth = end if whole else depth + common_blocks(run, keys, depth)
            if steps and holders[child] == last_holders:
                steps[-1] = (last_holders, depth)
            else:
                last_holders = holders[child]
                steps.append((last_holders, depth))
            if not whole:
                break
            node = child
        return steps

    def insert(self, worker_id: str, keys: Sequence[int]) -> None:
        """Note that `worker_id` was sent the prompt of `keys` (from its first block), and refresh its path.

        A prompt too long for half of `max_bytes` is noted up to there.
        """
        limit = self.max_bytes // (2 * KEY_BYTES)
        if len(keys) > limit:
            keys = keys[:limit]
        if self._sweeping:
            self.sweep(SWEEP_PER_INSERT)
        bit = self._bits.get(worker_id) or self._new_bit(worker_id)
        if not bit or not keys:
            return
        self._tree.touch(self._descend(bit, keys))
        self.evict(self.max_bytes)

    def evict(self, bytes_limit: int) -> None:
        """Drop the least recently routed prefixes until `estimated_bytes` is at most this."""
        while self._tree.nodes and self._tree.estimated_bytes > bytes_limit:
            self._evict_leaf()

    def _descend(self, bit: int, keys: Sequence[int]) -> int:
        """Give the path of `keys` to the worker of `bit`, adding what is missing; returns the last node."""
        tree = self._tree
        runs, holders, children = tree.runs, tree.holders, tree.children
        node, depth, count = ROOT, 0, len(keys)
        while depth < count:
            below = children[node]
            child = None if below is None else below.get(keys[depth])
            if child is None:
                return self._grow(node, bit, keys[depth:])
            run = runs[child]
            end = depth + (len(run) >> 3)
            if end > count or key_at(run, len(run) - KEY_BYTES)[0] != keys[end - 1]:
                shared = common_blocks(run, keys, depth)
                end = depth + shared
                if end == count and holders[child] & bit:
                    return child  # a prefix of what this worker holds already
                child = tree.split(child, shared, holders[child] & ~(self._sweeping | self._queued))
            if not holders[child] & bit:
                holders[child] |= bit
                self._held[bit] += len(runs[child]) >> 3
                if tree.join_only_child(node):
                    child = node
            node, depth = child, end
        return node

    def _grow(self, node: int, bit: int, keys: Sequence[int]) -> int:
        """Add `keys` below `node`, or to it when it is this worker's alone and a leaf: a chat's last turn."""
        tree = self._tree
        self._held[bit] += len(keys)
        if node == ROOT or tree.children[node] is not None or tree.holders[node] != bit:
            return tree.add(node, pack_keys(keys), bit)
        tree.lengthen(node, pack_keys(keys))
        return node

    def _evict_leaf(self) -> None:
        leaf = next(iter(self._tree.recency))
        blocks = len(self._tree.runs[leaf]) >> 3
        self.evicted_blocks += blocks
        holders = self._tree.holders[leaf]
        while holders:
            bit = holders & -holders
            if bit in self._held:
                self._held[bit] -= blocks
            holders ^= bit
        self._tree.drop_leaf(leaf)

    def _new_bit(self, worker_id: str) -> int:
        """The bit of a worker not seen before; 0 for a removed one, whose late news must not count."""
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
        """Forget an incarnation for good: from now on it matches nothing, and inserts for it are ignored.

        Takes constant time. Its bit is retired at once and cleared from the nodes by `sweep`, after which
        another worker may have it.
        """
        self._removed[worker_id] = None
        if len(self._removed) > REMEMBERED_REMOVALS:
            del self._removed[next(iter(self._removed))]
        self.clear_worker(worker_id)

    def clear_worker(self, worker_id: str) -> None:
        """Forget what was routed to a worker that goes on. Constant time, see `remove_worker`."""
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

    def sweep(self, nodes: int = 1000) -> bool:
        """Clear removed workers from the next so many nodes; True while there is more to do.

        Inserts do a little of it as they go; call it when idle to be done sooner.
        """
        tree = self._tree
        alive = ~self._sweeping
        for row in range(self._cursor, self._cursor + nodes if self._sweeping else 0):
            if row >= len(tree.runs):
                self._end_pass()
                break
            holders = tree.holders[row]
            if holders & alive != holders:
                tree.holders[row] = holders & alive
                self._drop_unheld(row, alive)
                if row < len(tree.runs) and tree.runs[row]:
                    tree.join_only_child(row)
                    tree.join_only_child(tree.parent[row])
            self._cursor = row + 1
        return self._sweeping != 0

    def _drop_unheld(self, row: int, alive: int) -> None:
        tree = self._tree
        while row != ROOT and tree.children[row] is None and not tree.holders[row] & alive:
            above = tree.parent[row]
            tree.drop_leaf(row)
            row = above

    def _end_pass(self) -> None:
        while self._sweeping:
            bit = self._sweeping & -self._sweeping
            self._free_bits.append(bit)
            self._sweeping ^= bit
        self._sweeping, self._queued = self._queued, 0
        self._cursor = 1

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken. Looks at everything: for tests and idle time."""
        tree = self._tree
        tree.check_integrity(retired=self._sweeping | self._queued)
        held = {
            bit: sum(len(tree.runs[row]) >> 3 for row in tree.recency if tree.holders[row] & bit)
            for bit in self._held
        }
        assert held == self._held, f"held {held}, counted {self._held}"
        assert set(self._bits.values()) == set(self._held), "bits and counts differ"
        used = sum(self._held) | self._sweeping | self._queued
        assert not used & sum(self._free_bits), "a bit in use is free"
        assert self.estimated_bytes <= self.max_bytes, repr(self)

    def __repr__(self) -> str:
        return (
            f"<ApproximateIndex blocks={self.entries} nodes={self._tree.nodes} workers={len(self._bits)} "
            f"bytes={self.estimated_bytes}/{self.max_bytes} evicted={self.evicted_blocks}>"
        )
