"""What the other replicas have in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvroute.clock import Clock
from kvroute.conductor.shared.host import OthersLoad
from kvroute.conductor.shared.messages import LoadReport, WorkerShare

MAX_REPLICAS = 256
NOTHING = OthersLoad()


@dataclass(slots=True)
class _Replica:
    shares: dict[str, OthersLoad]
    expires_s: float


class OthersLoads:
    """The last report of each replica counts until it is `ttl_s` old, so a dead one weighs no longer."""

    def __init__(self, ttl_s: float, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._totals: dict[str, OthersLoad] = {}

    @property
    def replicas(self) -> int:
        return len(self._replicas)

    def of(self, url: str) -> OthersLoad:
        return self._totals.get(url, NOTHING)

    def report(self, report: LoadReport, age_s: float = 0.0) -> list[str] | None:
        """Put a report in place of the replica's last; the URLs whose totals it changed.

        None when there are `MAX_REPLICAS` already: the report is not taken.
        """
        known = self._replicas.get(report.sender)
        if known is None and len(self._replicas) >= MAX_REPLICAS:
            return None
        if age_s >= self._ttl_s:
            return []
        shares = _by_url(report.shares)
        before = {} if known is None else known.shares
        self._replicas[report.sender] = _Replica(shares, self._clock() + self._ttl_s - max(0.0, age_s))
        return self._changed(before, shares)

    def expire(self) -> list[str]:
        """Forget replicas that have fallen silent; the URLs whose totals that changed."""
        now_s = self._clock()
        silent = [sender for sender, replica in self._replicas.items() if replica.expires_s <= now_s]
        return [url for sender in silent for url in self._changed(self._replicas.pop(sender).shares, {})]

    def _changed(self, before: dict[str, OthersLoad], after: dict[str, OthersLoad]) -> list[str]:
        urls = [
            url for url in before.keys() | after.keys() if before.get(url, NOTHING) != after.get(url, NOTHING)
        ]
        for url in urls:
            total, old, new = self.of(url), before.get(url, NOTHING), after.get(url, NOTHING)
            changed = OthersLoad(
                total.requests - old.requests + new.requests,
                total.pending_prefill_tokens - old.pending_prefill_tokens + new.pending_prefill_tokens,
            )
            if changed == NOTHING:
                del self._totals[url]
            else:
                self._totals[url] = changed
        return urls


def _by_url(shares: Iterable[WorkerShare]) -> dict[str, OthersLoad]:
    added: dict[str, OthersLoad] = {}
    for share in shares:
        one = added.get(share.url, NOTHING)
        added[share.url] = OthersLoad(
            one.requests + share.requests, one.pending_prefill_tokens + share.pending_prefill_tokens
        )
    return {url: load for url, load in added.items() if load != NOTHING}
