"""Data-parallel ranks as vLLM takes them."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.router.pd.connector import Header

RANK_HEADER = b"X-data-parallel-rank"


def rank_headers(rank: int | None) -> Sequence[Header]:
    """The header that asks vLLM for one of its ranks; none where it does not matter."""
    return () if rank is None else ((RANK_HEADER, b"%d" % rank),)
