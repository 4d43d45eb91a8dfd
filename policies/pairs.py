"""All ways to serve one request where it can be split, and the cheapest of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvroute.policies.costs.links import Nearness, PdLinks, nearness
from kvroute.policies.limits import BROKEN, KEPT, Codes
from kvroute.policies.pricing import Floats
from kvroute.types import Role, Worker

NEAREST = tuple(Nearness)
ALIKE = 1 - 1e-9
"""Prices that differ by less differ by rounding."""


class Choice(Struct, gc=False):
    """Indexes of the workers, the price, and the limit it would break."""

    prefill: int
    decode: int
    total_s: float
    broken: str | None = None
    handoff_s: float = 0.0
    """From the prefill's end to the first token, where that is another worker's."""
    begin_s: float = 0.0
    """From now on, until the KV may travel."""
    copy_s: float = 0.0
    """To others: what the copy of the KV evicts or duplicates."""
    delay_s: float = 0.0
    """To others: transfers that wait for this one."""
    reason: str = ""
    """Why it is split or not; empty where there was no question."""


class Terms(Struct, gc=False):
    """What splits add to the prices of both halves, in seconds: of prefill (rows) by decode workers
    (columns), or of these alone.
    """

    begin_s: Floats
    """From now on, until the KV's way may begin. No part of the price."""
    handoff_s: Floats
    copy_s: Floats
    """Of each decode worker."""
    delay_s: Floats
    """To others: room and links that they wait for."""


class Ways:
    """Who of a fleet may do all of a request, who either half, and how near they are to each other."""

    __slots__ = (
        "_links",
        "_near",
        "_of_links",
        "can_split",
        "decode",
        "ids",
        "overlap",
        "prefill",
        "same",
        "whole",
        "workers",
    )

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        """Kept, so that nothing else can have its identity."""
        self.ids = [worker.id for worker in workers]
        self.whole = _places(one.takes_whole and one.role is not Role.PREFILL for one in workers)
        self.prefill = _places(one.role is not Role.DECODE for one in workers)
        self.decode = _places(one.role is not Role.PREFILL for one in workers)
        self.same = self.prefill[:, None] == self.decode
        self.can_split = not self.same.all()
        self.overlap = bool(self.same.any())
        """Whether one may do either half."""
        near = [NEAREST.index(nearness(workers[i], workers[j])) for i in self.prefill for j in self.decode]
        self._near = np.array(near, np.intp).reshape(self.same.shape)
        self._of_links: tuple[Floats, Floats] | None = None
        self._links: PdLinks | None = None

    def links(self, links: PdLinks) -> tuple[Floats, Floats]:
        """Latency, and seconds per byte, from each prefill worker (row) to each decode worker (column)."""
        if self._of_links is None or links is not self._links:
            each = [links.of(near) for near in NEAREST]
            latency_s = np.array([link.latency_s for link in each])
            byte_s = np.array([1 / link.bytes_per_s for link in each])
            self._of_links, self._links = (latency_s[self._near], byte_s[self._near]), links
        return self._of_links


class Priced(Struct, frozen=True, gc=False):
    """Prices in seconds and the limits they would break, of the same shape."""

    total_s: Floats
    broken: Codes | None
    """None where all keep them."""

    def kept_s(self) -> Floats:
        """Infinite for those that break a limit, unless all do."""
        if self.broken is None:
            return self.total_s
        kept_s = np.where(self.broken == KEPT, self.total_s, inf)
        return kept_s if kept_s.min() < inf else self.total_s

    def said(self, at: int | tuple[int, int]) -> str | None:
        """The limit that this one would break."""
        code = KEPT if self.broken is None else int(self.broken[at])
        return None if code == KEPT else BROKEN[code - 1]


class Pairs:
    """Prices of one request: of who does all of it, and of every prefill worker (row) with every decode
    worker (column), infinite for a worker with itself.
    """

    __slots__ = ("_split", "_terms", "_ways", "_whole")

    def __init__(self, ways: Ways, whole: Priced, split: Priced, terms: Terms) -> None:
        self._ways = ways
        self._whole = whole
        self._split = split
        self._terms = terms

    def cheapest(self, start: int) -> Choice:
        """Of those that keep the limits, or where none does, of all. Of equals whole before split, and the
        first at or after `start`, going round. ValueError where there is no candidate.
        """
        whole, split = self._cheapest_whole(start), self._cheapest_split(start)
        if whole is None or split is None:
            choice = whole or split
            if choice is None:
                raise ValueError("no worker does all of a request, and no two of them a half each")
            return choice
        if (whole.broken is not None, whole.total_s) > (split.broken is not None, split.total_s):
            return split
        whole.reason = self._why_whole(whole, split)
        return whole

    def in_order(self, limit: int) -> list[Choice]:
        """The first so many, those that keep the limits before others, then the cheapest."""
        wholes = [self._choose_whole(at) for at in range(len(self._whole.total_s))]
        splits = [self._choose_split(*at) for at in self._first_splits(limit)]
        return sorted([*wholes, *splits], key=lambda one: (one.broken is not None, one.total_s))[:limit]

    def _why_whole(self, whole: Choice, split: Choice) -> str:
        if split.broken is not None and whole.broken is None:
            return "limit"
        at_once_s = float((self._split.total_s - self._terms.handoff_s).min())
        return "handoff" if at_once_s < whole.total_s * ALIKE else "whole"

    def _cheapest_whole(self, start: int) -> Choice | None:
        if not len(self._ways.whole):
            return None
        prices = self._whole.kept_s()
        equal = np.flatnonzero(prices == prices.min())
        turns = (self._ways.whole[equal] - start) % len(self._ways.ids)
        return self._choose_whole(int(equal[turns.argmin()]))

    def _cheapest_split(self, start: int) -> Choice | None:
        ways = self._ways
        if not ways.can_split:
            return None
        prices, count = self._split.kept_s(), len(ways.ids)
        rows, columns = np.nonzero(prices == prices.min())
        turns = (ways.prefill[rows] - start) % count * count + (ways.decode[columns] - start) % count
        at = turns.argmin()
        return self._choose_split(int(rows[at]), int(columns[at]))

    def _first_splits(self, limit: int) -> list[tuple[int, int]]:
        prices = self._split.total_s.ravel()
        broken = np.zeros(len(prices)) if self._split.broken is None else self._split.broken.ravel() > KEPT
        width = len(self._ways.decode)
        order = np.lexsort((prices, broken))
        return [divmod(int(at), width) for at in order[prices[order] < inf][:limit]]

    def _choose_whole(self, at: int) -> Choice:
        worker = int(self._ways.whole[at])
        return Choice(worker, worker, float(self._whole.total_s[at]), self._whole.said(at))

    def _choose_split(self, row: int, column: int) -> Choice:
        at, terms = (row, column), self._terms
        return Choice(
            int(self._ways.prefill[row]),
            int(self._ways.decode[column]),
            float(self._split.total_s[at]),
            self._split.said(at),
            float(terms.handoff_s[at]),
            float(terms.begin_s[at]),
            float(terms.copy_s[column]),
            float(terms.delay_s[at]),
            "split",
        )


def _places(are: Iterable[bool]) -> NDArray[np.intp]:
    return np.flatnonzero(np.fromiter(are, np.bool_))
