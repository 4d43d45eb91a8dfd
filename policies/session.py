"""One session, one worker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from kvroute.policies.ties import least_loaded_index
from kvroute.types import Decision, Fleet, RequestView


@lru_cache(maxsize=4096)
def _url_seed(url: str) -> int:
    return xxh3_64_intdigest(url.encode())


class Session:
    """Rule: rendezvous (highest random weight) hashing of the session id over the worker URLs.

    Each worker's weight is xxh3(session id, seeded by its URL); the highest wins. Every gateway replica
    and every restart agrees without shared state, and a worker that joins N others takes about 1/(N+1) of
    the sessions and moves no other. A request without a session id goes to the least loaded worker.

    Options: `max_load_ratio`, 0 (off) or at least 1: a worker already carrying that many times its even
    share of the leases is passed over for the next weight, so that one hot session, or many that hash
    alike, cannot bury it.

    Trade-offs: keeps a conversation's cache warm without an index, but shares nothing between sessions
    with a common system prompt, and without the bound a long session stays where it is under any load.
    """

    needs_prefix: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Options:
        max_load_ratio: float = 0.0

        def __post_init__(self) -> None:
            if self.max_load_ratio != 0 and not 1 <= self.max_load_ratio < float("inf"):
                raise ValueError("max_load_ratio must be 0 (off) or at least 1")

    def __init__(self, options: Options) -> None:
        self._ratio = options.max_load_ratio
        self._turn = -1

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        session_id = request.session_id
        if session_id is None:
            self._turn += 1
            return Decision.whole(fleet.workers[least_loaded_index(fleet, self._turn)], "no_session")
        name = session_id.encode("utf-8", "surrogatepass")
        weights = [xxh3_64_intdigest(name, _url_seed(worker.url)) for worker in fleet.workers]
        home = weights.index(max(weights))
        if self._ratio:
            loads = fleet.loads
            share = (sum(load.requests for load in loads) + 1) / len(loads)
            # Rounded up, and with this request counted in: some worker is always below it.
            ceiling = ceil(self._ratio * share)
            if loads[home].requests >= ceiling:
                ranked = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
                home = next(index for index in ranked if loads[index].requests < ceiling)
                return Decision.whole(fleet.workers[home], "overloaded")
        return Decision.whole(fleet.workers[home], "session")
