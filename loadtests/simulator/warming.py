"""How many requests it takes to fill the caches of a fleet."""

from __future__ import annotations

from collections.abc import Iterable

from kvroute.loadtests.traces.arrivals import Arrival


def requests_to_fill(requests: Iterable[Arrival], blocks: int) -> int:
    """The first so many requests have as many different blocks as fit into all caches together.

    A matter of the requests alone, so that the same ones count whatever the policy: one that keeps a block in
    two places has filled its caches before. ValueError when they never have as many.
    """
    seen: set[int] = set()
    for number, request in enumerate(requests):
        if len(seen) >= blocks:
            return number
        seen.update(request.keys.keys)
    raise ValueError(
        f"--warm-up fill: the requests have {len(seen)} different blocks, fewer than the {blocks} that the "
        "caches take; a share such as 0.1 is accepted"
    )
