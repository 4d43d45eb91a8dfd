"""A radix tree of chained keys with a set of holders and a recency per node.

A node is a run of keys that the same holders have and that no known chain leaves midway, so cost goes with
branching points and not with keys. Because keys are chained, equal keys at one place mean equal prefixes up
to it: a run is compared by its last key, a partial run by bisection.

Nodes are rows in parallel lists, not objects: half a million tracked objects would make every full pass of
the garbage collector a pause of the event loop. Not thread safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from struct import Struct

ROOT = 0
KEY_BYTES = 8
NODE_BYTES = 400
"""A node beyond its keys: four list slots, the run's own object, the parent's child entry with its key, the
recency entry, the integers, and for an inner node its table of children. tracemalloc finds 230 to 310 for
a flat tree as the tables grow, up to 400 for one that branches in twos; the tests check."""
JOIN_CHILDREN = 64
"""A node with more children is not worth moving them to undo a split."""
KEPT_ROWS = 1024

key_at = Struct("=Q").unpack_from
"""key_at(run, offset_bytes)[0]"""


class RadixTree:
    """Rows 1.. are nodes, row 0 the root, which holds nothing.

    Kept by every method (`check_integrity`): holders of a node are among its parent's, and a parent is more
    recent than its children once the caller has called `touch` on the last node of the path it changed; so
    the least recent node is a leaf.
    """

    def __init__(self) -> None:
        self.nodes = 0
        self.blocks = 0
        self._reset()

    def _reset(self) -> None:
        self.parent: list[int] = [ROOT]
        self.runs: list[bytes] = [b""]
        self.holders: list[int] = [0]
        """One bit per holder."""
        self.children: list[dict[int, int] | None] = [{}]
        """First key of the child's run -> its row; None for a leaf."""
        self.recency: OrderedDict[int, None] = OrderedDict()
        """Least recent first."""
        self._free: list[int] = []

    @property
    def estimated_bytes(self) -> int:
        """Memory of the nodes, see `NODE_BYTES`; what emptied tables keep is not in it."""
        return self.nodes * NODE_BYTES + self.blocks * KEY_BYTES

    def touch(self, node: int) -> None:
        """Make a node and all above it the most recent, the top one last."""
        parent, to_end = self.parent, self.recency.move_to_end
        while node != ROOT:
            to_end(node)
            node = parent[node]

    def add(self, above: int, run: bytes, holders: int) -> int:
        """A new leaf below `above`."""
        self.blocks += len(run) >> 3
        row = self._new_row(above, run, holders)
        below = self.children[above]
        if below is None:
            below = self.children[above] = {}
        below[key_at(run, 0)[0]] = row
        return row

    def lengthen(self, leaf: int, run: bytes) -> None:
        """Add keys to a leaf's run."""
        self.blocks += len(run) >> 3
        self.runs[leaf] += run

    def split(self, node: int, blocks: int, holders: int) -> int:
        """Move the first `blocks` of a run to a new parent with these holders; returns that parent."""
        run, above = self.runs[node], self.parent[node]
        cut = blocks * KEY_BYTES
        row = self._new_row(above, run[:cut], holders)
        siblings = self.children[above]
        assert siblings is not None
        siblings[key_at(run, 0)[0]] = row
        self.children[row] = {key_at(run, cut)[0]: node}
        self.runs[node] = run[cut:]
        self.parent[node] = row
        return row

    def drop_leaf(self, leaf: int) -> None:
        """Forget a leaf; a parent left with one child of the same holders is joined with it."""
        run, above = self.runs[leaf], self.parent[leaf]
        siblings = self.children[above]
        assert siblings is not None
        del siblings[key_at(run, 0)[0]]
        self.blocks -= len(run) >> 3
        self._free_row(leaf)
        if above == ROOT:
            return
        if siblings:
            self.join_only_child(above)
        else:
            self.children[above] = None

    def join_only_child(self, node: int) -> bool:
        """Undo a split: an only child's run goes to its parent, if the same holders have both. True if done.

        To be tried wherever a node loses a child or the holders of either change.
        """
        siblings = self.children[node]
        if node == ROOT or siblings is None or len(siblings) != 1:
            return False
        child = next(iter(siblings.values()))
        below = self.children[child]
        if self.holders[node] != self.holders[child] or (below is not None and len(below) > JOIN_CHILDREN):
            return False
        self.runs[node] += self.runs[child]
        self.children[node] = below
        if below is not None:
            for grandchild in below.values():
                self.parent[grandchild] = node
        self._free_row(child)
        return True

    def _new_row(self, parent: int, run: bytes, holders: int) -> int:
        self.nodes += 1
        if self._free:
            row = self._free.pop()
            self.parent[row] = parent
            self.runs[row] = run
            self.holders[row] = holders
        else:
            row = len(self.runs)
            self.parent.append(parent)
            self.runs.append(run)
            self.holders.append(holders)
            self.children.append(None)
        self.recency[row] = None
        return row

    def _free_row(self, row: int) -> None:
        self.runs[row] = b""
        self.children[row] = None
        self.holders[row] = 0
        del self.recency[row]
        self.nodes -= 1
        if self.nodes == 0 and len(self.runs) > KEPT_ROWS:
            self._reset()  # gives the grown tables back
        else:
            self._free.append(row)

    def check_integrity(self, retired: int) -> None:
        """Raise `AssertionError` if an invariant is broken; bits in `retired` may linger in any node."""
        age = {row: position for position, row in enumerate(self.recency)}
        blocks = 0
        children = len(self.children[ROOT] or ())
        for row, position in age.items():
            run, above, below = self.runs[row], self.parent[row], self.children[row]
            assert run, f"node {row} is empty"
            assert len(run) % KEY_BYTES == 0, f"node {row} ends within a key"
            blocks += len(run) >> 3
            siblings = self.children[above]
            assert siblings is not None, f"node {above} is no leaf, {row} is below it"
            assert siblings[key_at(run, 0)[0]] == row, f"node {row} is not below {above}"
            holders = self.holders[row] & ~retired
            assert holders or retired, f"node {row} has no holder"
            if above != ROOT:
                assert age[above] > position, f"node {row} is more recent than its parent"
                assert not holders & ~self.holders[above], f"node {row} has holders that its parent has not"
            assert below is None or below, f"node {row} has an empty table of children"
            children += len(below or ())
        assert children == len(age) == self.nodes, f"{children} children, {self.nodes} nodes"
        assert len(self._free) + self.nodes + 1 == len(self.runs), "rows are lost"
        assert blocks == self.blocks, f"{blocks} blocks, counted {self.blocks}"


def common_blocks(run: bytes, keys: Sequence[int], depth: int) -> int:
    """How many keys of `run` equal keys[depth:], given that the first does; chains, so by bisection."""
    low, high = 1, min(len(run) >> 3, len(keys) - depth)
    while low < high:
        middle = (low + high + 1) >> 1
        if key_at(run, (middle - 1) * KEY_BYTES)[0] == keys[depth + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
