"""When the links out of and into workers will be busy with transfers that have yet to begin."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from math import exp, inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

MOST = 8
"""Transfers kept of a link: of more, the one ready first is forgotten, but not that it is in the way."""
SHARE_TAU_S = 30.0
"""Time constant of the share of time that a link is busy."""
LEAST_SHARE = 1e-3
"""A link that was busy for less of its time is forgotten."""
MAX_SHARE = 0.9
"""What a link is taken to be busy at most: beyond it nothing would ever be sent there again."""


class _Transfer(Struct, order=True):
    ready_s: float
    wire_s: float
    free_s: float = 0.0
    """When the link has done it, and all that were ready before."""


class _Booked:
    """Of one link, first ready first served."""

    __slots__ = ("_at_s", "_wire_s", "free_s", "transfers")

    def __init__(self) -> None:
        self.free_s = 0.0
        """Of those that are kept no more."""
        self.transfers: list[_Transfer] = []
        self._wire_s = 0.0
        """Of all transfers, fading, as of `_at_s`."""
        self._at_s = 0.0

    def share(self, now_s: float) -> float:
        """Of its time of late, that it was busy or is to be."""
        return self._wire_s * exp((self._at_s - now_s) / SHARE_TAU_S) / SHARE_TAU_S

    def add(self, ready_s: float, wire_s: float, now_s: float) -> None:
        self._wire_s = self.share(now_s) * SHARE_TAU_S + wire_s
        self._at_s = now_s
        insort(self.transfers, _Transfer(ready_s, wire_s))
        free_s = self.free_s
        for transfer in self.transfers:
            free_s = transfer.free_s = max(free_s, transfer.ready_s) + transfer.wire_s
        if len(self.transfers) > MOST:
            self.free_s = self.transfers.pop(0).free_s

    def forget(self, now_s: float) -> bool:
        """What is over; True when nothing is left worth keeping."""
        while self.transfers and self.transfers[0].free_s <= now_s:
            self.transfers.pop(0)
        return not self.transfers and self.share(now_s) < LEAST_SHARE


class LinkBook:
    """Each worker has a link out and a link in; a transfer holds one of each. In the caller's time. Mutable;
    what is added is taken to end when it should, whatever becomes of it.
    """

    def __init__(self) -> None:
        self._out: dict[str, _Booked] = {}
        self._in: dict[str, _Booked] = {}

    def add(self, source: str, target: str, ready_s: float, wire_s: float, now_s: float) -> None:
        """One more, of `wire_s` seconds, that may begin at `ready_s`."""
        for links, worker in ((self._out, source), (self._in, target)):
            for idle in [name for name, booked in links.items() if booked.forget(now_s)]:
                del links[idle]
            links.setdefault(worker, _Booked()).add(ready_s, wire_s, now_s)

    def wait_s(
        self, sources: Sequence[str], targets: Sequence[str], ready_s: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """Of a transfer that may begin at `ready_s`, for each source (row) and target (column), until both
        links are free for it; None where nothing is booked.
        """
        if not self._out:
            return None
        wait_s = np.zeros_like(ready_s)
        for begins_s, free_s in _layers(self._out, sources):
            np.maximum(wait_s, (free_s[:, None] - ready_s) * (begins_s[:, None] <= ready_s), out=wait_s)
        for begins_s, free_s in _layers(self._in, targets):
            np.maximum(wait_s, (free_s - ready_s) * (begins_s <= ready_s), out=wait_s)
        return wait_s

    def delays(
        self, sources: Sequence[str], targets: Sequence[str], now_s: float
    ) -> NDArray[np.float64] | None:
        """How much longer all others wait for the busier of two links, per second that one more transfer
        takes, for each source (row) and target (column); None where nothing was sent of late.

            rho / (2 (1 - rho)^2)       the link being busy for a share rho of its time: rate x dW/d(rate),
                                        W as in `mg1_wait_s` for transfers of constant length
        """
        if not self._out:
            return None
        out_share, in_share = (
            np.array([links[name].share(now_s) if name in links else 0.0 for name in names])
            for links, names in ((self._out, sources), (self._in, targets))
        )
        share = np.minimum(np.maximum(out_share[:, None], in_share), MAX_SHARE)
        made: NDArray[np.float64] = share / (2 * (1 - share) ** 2)
        return made


def _layers(
    links: dict[str, _Booked], workers: Sequence[str]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """The first transfer of each worker's link, the second of each, and so on: when ready, when done."""
    booked = [links[worker].transfers if worker in links else [] for worker in workers]
    layers = []
    for at in range(max(map(len, booked), default=0)):
        ready_s = [each[at].ready_s if at < len(each) else inf for each in booked]
        free_s = [each[at].free_s if at < len(each) else 0.0 for each in booked]
        layers.append((np.array(ready_s), np.array(free_s)))
    return layers
