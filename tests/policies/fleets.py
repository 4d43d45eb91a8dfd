"""Fleets for the policy tests."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.load import WorkerLoad
from kvroute.types import Fleet, PrefixMatch, Worker


def fleet(
    *requests: int,
    matched: Sequence[int] = (),
    held: Sequence[int] = (),
    names: str = "abcdefghijklmnop",
) -> Fleet:
    """Workers a, b, c... with these leases, matched tokens and held blocks."""
    workers = [Worker(id=name, url=f"http://{name}:8000") for name in names[: len(requests)]]
    loads = [WorkerLoad(requests=count) for count in requests]
    return Fleet(0.0, workers, loads, [PrefixMatch(tokens) for tokens in matched], held)
