"""The block least likely to be asked for soon goes first, by what the reuse of others like it has taught.

Blocks are sorted into cells by how often they were used, the turn of their conversation and the new tokens of
the request that used them last. For each cell c and bin b of ages (seconds since the last use, width w_b) the
table learns how often a block of that age is asked for:

    h_cb = (reuses_cb + S hpool_b w_b) / (exposure_cb + S w_b)      hpool: the same of all cells together
    p_j  = 1 - exp(-h_cj w_j);  s_j = probability to get from b to j unasked
    I(c, b) = max over H of  sum_{j=b..H} s_j p_j / sum_{j=b..H} s_j w_j (1 - p_j/2)

the highest rate of reuse per second of room that keeping it for some time can bring (a Gittins index). The
value of a block is I times the seconds that computing it anew would take.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvroute.conductor.tiers.base import BlockInfo, at_least, count_at_least
from kvroute.conductor.tiers.eviction import LRU

BINS = 12
"""Of ages: below 2 s, below 4 s, ... below 4096 s; what is older belongs to the last."""
_LOW_S = np.array([0.0, *(2.0**i for i in range(1, BINS))])
WIDTHS_S = np.diff(_LOW_S, append=2.0**BINS)
_USES = (1, 2, 3, 5, 8)
"""Most uses of each class; more are the last class. The same for turns, and for new tokens their ends."""
_TURNS = (1, 2)
_NEW_TOKENS = (1024, 4096, 16_384)
CELLS = (len(_USES) + 1) * (len(_TURNS) + 1) * (len(_NEW_TOKENS) + 1)


def age_bin(age_s: float) -> int:
    """0 to `BINS` - 1."""
    return min(max(int(age_s).bit_length() - 1, 0), BINS - 1)


def cell_of(uses: int, turn: int, new_tokens: int) -> int:
    """0 to `CELLS` - 1."""
    use = sum(uses > most for most in _USES)
    later = sum(turn > most for most in _TURNS)
    size = sum(new_tokens >= end for end in _NEW_TOKENS)
    return (use * (len(_TURNS) + 1) + later) * (len(_NEW_TOKENS) + 1) + size


class HazardTable:
    """What was learned of reuse, of the last `ghost_entries` keys used, held or not."""

    def __init__(
        self, ghost_entries: int = 65_536, prior_blocks: float = 200.0, refit_s: float = 60.0
    ) -> None:
        """`prior_blocks` is S: as how many blocks' lives the pool of all cells counts in each cell."""
        count_at_least("ghost_entries", ghost_entries, 1)
        at_least("prior_blocks", prior_blocks, 0.0)
        at_least("refit_s", refit_s, 0.0)
        self._ghost_entries = ghost_entries
        self._prior_blocks = prior_blocks
        self._refit_s = refit_s
        self._ghosts: OrderedDict[int, tuple[int, float, int]] = OrderedDict()
        """Key -> (cell, time of the last use, uses); the one not used the longest first."""
        shape = (CELLS, BINS)
        self._reuses = np.zeros(shape)
        self._ended = np.zeros(shape)
        """Lives that ended at this age, reused or forgotten; the next is how long they were in that bin."""
        self._last_bin_s = np.zeros(shape)
        self._fitted_s = -np.inf
        self._index: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._ghosts)

    def use(self, block: BlockInfo) -> None:
        """The block was computed or read at its `last_access_s`."""
        now_s, uses = block.last_access_s, 1
        ghost = self._ghosts.pop(block.key, None)
        if ghost is not None:
            cell, since_s, uses = ghost
            uses += 1
            self._reuses[cell, self._end(cell, now_s - since_s)] += 1
        self._ghosts[block.key] = cell_of(uses, block.turn, block.new_tokens), now_s, uses
        if len(self._ghosts) > self._ghost_entries:
            _, (cell, since_s, _) = self._ghosts.popitem(last=False)
            self._end(cell, now_s - since_s)

    def cell(self, block: BlockInfo) -> int:
        """Where the block belongs; one that is not remembered, by its own reads."""
        ghost = self._ghosts.get(block.key)
        return cell_of(block.reads + 1, block.turn, block.new_tokens) if ghost is None else ghost[0]

    def index(self, now_s: float) -> list[list[float]]:
        """I by cell and bin, in reuses per second, fitted anew every `refit_s`."""
        if now_s - self._fitted_s >= self._refit_s or not self._index:
            self._fitted_s = now_s
            self._index = _index(self._hazard(now_s)).tolist()
        return self._index

    def _end(self, cell: int, age_s: float) -> int:
        """A life is over; its bin."""
        at = age_bin(age_s)
        self._ended[cell, at] += 1
        self._last_bin_s[cell, at] += max(0.0, age_s) - _LOW_S[at]
        return at

    def _hazard(self, now_s: float) -> NDArray[np.float64]:
        """h by cell and bin; the lives that go on count too, as far as they have come."""
        ended, last_bin_s = self._ended.copy(), self._last_bin_s.copy()
        lives = np.array([(cell, since_s) for cell, since_s, _ in self._ghosts.values()]).reshape(-1, 2)
        cells, ages_s = lives[:, 0].astype(int), np.maximum(0.0, now_s - lives[:, 1])
        bins = np.searchsorted(_LOW_S, ages_s, side="right") - 1
        np.add.at(ended, (cells, bins), 1.0)
        np.add.at(last_bin_s, (cells, bins), ages_s - _LOW_S[bins])
        older = ended[:, ::-1].cumsum(axis=1)[:, ::-1] - ended
        exposure_s = older * WIDTHS_S + last_bin_s
        everywhere_s = exposure_s.sum(axis=0)
        pool = np.divide(self._reuses.sum(axis=0), everywhere_s, out=np.zeros(BINS), where=everywhere_s > 0)
        prior_s = self._prior_blocks * WIDTHS_S
        total_s = exposure_s + prior_s
        hazard: NDArray[np.float64] = np.zeros_like(total_s)
        np.divide(self._reuses + prior_s * pool, total_s, out=hazard, where=total_s > 0)
        return hazard


def _index(hazard: NDArray[np.float64]) -> NDArray[np.float64]:
    """I of h, for every cell and bin."""
    asked = -np.expm1(-hazard * WIDTHS_S)
    index = np.zeros_like(hazard)
    for start in range(BINS):
        alive = np.ones(len(hazard))
        gain, room_s = np.zeros(len(hazard)), np.zeros(len(hazard))
        for at in range(start, BINS):
            gain += alive * asked[:, at]
            room_s += alive * WIDTHS_S[at] * (1 - asked[:, at] / 2)
            index[:, start] = np.maximum(index[:, start], gain / room_s)
            alive = alive * (1 - asked[:, at])
    return index


class Hazard:
    """The least I times seconds to compute anew; of each cell only the oldest is looked at.

    `table` may be shared by the caches of a fleet, which then learn from each other. Knows most where blocks
    come with their turn and new tokens. Until reuse has been seen it is LRU. The options are the table's.
    """

    def __init__(
        self, ghost_entries: int = 65_536, prior_blocks: float = 200.0, refit_s: float = 60.0
    ) -> None:
        self.table = HazardTable(ghost_entries, prior_blocks, refit_s)
        self._oldest: dict[int, LRU] = {}
        """By cell; at most `CELLS`."""
        self._cells: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._cells)

    def record(self, block: BlockInfo) -> None:
        """Learn from the use."""
        self.table.use(block)

    def offer(self, block: BlockInfo) -> None:
        cell = self.table.cell(block)
        if self._cells.get(block.key, cell) != cell:
            self.withdraw(block.key)
        self._cells[block.key] = cell
        ranked = self._oldest.get(cell)
        if ranked is None:
            ranked = self._oldest[cell] = LRU()
        ranked.offer(block)

    def withdraw(self, key: int) -> None:
        cell = self._cells.pop(key, None)
        if cell is not None:
            self._oldest[cell].withdraw(key)

    def refuses(self, newcomer: BlockInfo, now_s: float) -> bool:
        return False

    def victim(self, newcomer: BlockInfo | None, now_s: float) -> int | None:
        index = self.table.index(now_s)
        least: tuple[float, float, int] | None = None
        victim = None
        for cell, ranked in self._oldest.items():
            block = ranked.lowest()
            if block is None:
                continue
            value = index[cell][age_bin(now_s - block.last_access_s)] * block.recompute_s
            rank = (value, block.last_access_s, -block.depth)
            if least is None or rank < least:
                least, victim = rank, block.key
        if victim is not None:
            self.withdraw(victim)
        return victim
