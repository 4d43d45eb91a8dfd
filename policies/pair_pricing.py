"""What it costs to split a request, for every pair of a prefill and a decode worker at once.

With S_i the price of the prefill at i and D_j that of the decode life at j (as in `pricing`), A_i the time
until the prefill is over, Q_j the wait at j for a step, and w the seconds on the wire of the KV that j does
not hold, on links that are busy for a share rho of their time:

    whole    S_i + D_i
    split    S_i + D_j
             + max(0, Q_j - A_i) + wait for the links + w + ITL_j    from the prefill's end to the first token
             + COPY cache_j                                          what the copy evicts, or duplicates, at j
             + w (BOTH_ENDS + rho / (2 (1 - rho)^2))                 room taken at both, transfers that wait

The prompt's last token is computed at j again, in a step there: the first token is that one. `cache_j` is
what j would charge for the same tokens computed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import inf
from typing import Any

import numpy as np

from kvroute.policies.costs.link_book import LinkBook
from kvroute.policies.costs.pace import Pace
from kvroute.policies.limits import BROKEN, Codes, Limits
from kvroute.policies.pairing import payload_bytes
from kvroute.policies.pairs import Choice, Pairs, Priced, Terms, Ways
from kvroute.policies.pricing import Floats, Halves
from kvroute.types import NO_MATCH, Fleet, RequestView, Worker

MAX_FLEETS = 8
"""Whose ways are kept: one for each model asked for in turn."""
BOTH_ENDS = 1.0
"""For the room that the KV takes at both ends meanwhile, per second on the wire. It is what keeps a slow link
for splits that pay well."""
COPY = 0.3
"""Of the cache's price for computed tokens, that for copied ones: what they duplicate is fresh elsewhere."""
REUSED = 0.1
"""Share of prompts found in caches, from which on a copy counts in full: where nothing returns, nothing is
lost."""
PLACED = 300
"""Requests over which that share is averaged."""
_NO_ROOM = BROKEN.index("room") + 1


class PairPricing:
    """Keeps what of a fleet does not change, by the identity of its tuple of workers; a book of the transfers
    decided on; and how much of the prompts is reused. A copy starts with the last two.
    """

    def __init__(self) -> None:
        self._fleets: dict[int, Ways] = {}
        self._book = LinkBook()
        self._placed = 0
        self._reused = REUSED

    def __deepcopy__(self, memo: dict[int, Any]) -> PairPricing:
        other = PairPricing()
        other._book = deepcopy(self._book, memo)
        other._placed, other._reused = self._placed, self._reused
        return other

    def price(
        self, request: RequestView, fleet: Fleet, paces: Sequence[Pace], halves: Halves, limits: Limits
    ) -> Pairs:
        """Of a fleet with links."""
        ways, output = self.ways(fleet.workers), fleet.output_tokens
        whole, prefill, decode = ways.whole, ways.prefill, ways.decode
        overhead_s = np.array([pace.overhead_s for pace in paces])
        terms = self._terms(request, fleet, paces, halves, ways)
        terms.handoff_s += halves.itl_s[decode] + overhead_s[decode]
        split_s = halves.start_s[prefill][:, None] + halves.stay_s[decode]
        split_s += terms.handoff_s + terms.copy_s + terms.delay_s
        split_s[ways.same] = inf
        ahead_s = fleet.held_s + overhead_s + halves.ahead_s
        ttft_s = ahead_s[prefill][:, None] + halves.room_s[decode] + terms.handoff_s
        broken = _without_room(limits.codes(ttft_s, halves.itl_s[decode], output), halves.room_s[decode])
        return Pairs(
            ways,
            Priced(
                halves.start_s[whole] + halves.stay_s[whole],
                limits.codes((ahead_s + halves.room_s)[whole], halves.itl_s[whole], output),
            ),
            Priced(split_s, None if broken is None else np.broadcast_to(broken, split_s.shape)),
            terms,
        )

    def decided(
        self, request: RequestView, fleet: Fleet, pace: Pace, choice: Choice, cached_tokens: int
    ) -> None:
        """It is to be: a split's transfer will keep the links of both busy. `pace` is the decode worker's."""
        if request.prompt_tokens:
            self._placed = min(self._placed + 1, PLACED)
            self._reused += (cached_tokens / request.prompt_tokens - self._reused) / self._placed
        if choice.prefill == choice.decode:
            return
        assert fleet.pd_links is not None
        prefill, decode = fleet.workers[choice.prefill], fleet.workers[choice.decode]
        match = fleet.matches[choice.decode] if fleet.matches else NO_MATCH
        link = fleet.pd_links.between(prefill, decode)
        wire_s = payload_bytes(request.prompt_tokens, decode, match, pace) / link.bytes_per_s
        self._book.add(prefill.id, decode.id, fleet.now_s + choice.begin_s, wire_s, fleet.now_s)

    def ways(self, workers: Sequence[Worker]) -> Ways:
        """Tuples cannot change; another sequence is looked at again."""
        if not isinstance(workers, tuple):
            return Ways(workers)
        ways = self._fleets.pop(id(workers), None)
        if ways is None:
            if len(self._fleets) == MAX_FLEETS:
                del self._fleets[next(iter(self._fleets))]
            ways = Ways(workers)
        self._fleets[id(workers)] = ways
        return ways

    def _terms(
        self, request: RequestView, fleet: Fleet, paces: Sequence[Pace], halves: Halves, ways: Ways
    ) -> Terms:
        """What a split adds, but for the step and the overhead at the decode worker."""
        assert fleet.pd_links is not None
        names = [ways.ids[i] for i in ways.prefill], [ways.ids[j] for j in ways.decode]
        ahead_s = halves.ahead_s[ways.prefill][:, None]
        begin_s = np.maximum(halves.queue_s[ways.decode], ahead_s)
        matches = fleet.matches or [NO_MATCH] * len(paces)
        workers, prompt = fleet.workers, request.prompt_tokens
        payload = np.array(
            [payload_bytes(prompt, workers[j], matches[j], paces[j]) for j in ways.decode], np.float64
        )
        latency_s, byte_s = ways.links(fleet.pd_links)
        wire_s = payload * byte_s
        handoff_s = begin_s - ahead_s + wire_s + latency_s * (payload > 0)
        wait_s = self._book.wait_s(*names, fleet.now_s + begin_s)
        if wait_s is not None:
            handoff_s += wait_s
        delays = self._book.delays(*names, fleet.now_s)
        copy_s = halves.cache_s[ways.decode] * (COPY * min(1.0, self._reused / REUSED))
        return Terms(
            begin_s, handoff_s, copy_s, wire_s * (BOTH_ENDS if delays is None else delays + BOTH_ENDS)
        )


def _without_room(broken: Codes | None, room_s: Floats) -> Codes | None:
    """A decode worker whose KV room has to be waited for: the prefill worker's copy would not wait."""
    if not room_s.any():
        return broken
    full = np.where(room_s > 0, np.int8(_NO_ROOM), np.int8(0))
    return full if broken is None else np.where(broken > 0, broken, full)
