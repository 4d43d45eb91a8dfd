"""Fleets with books, for the rules that read tokens: worked out by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvroute.load import WorkerLoad
from kvroute.policies.costs.pace import Pace
from kvroute.types import Decision, Fleet, Hold, PrefixMatch, Rejection, Worker

from .fleets import PLAIN, in_gpu

TOKEN_S = PLAIN.token_ms / 1e3
"""0.1 ms: 10000 tokens are prefilled in a second, and a decode step takes 10 ms."""


class Book(NamedTuple):
    """One worker."""

    pending: int = 0
    """Uncached tokens of one request without a first token, which has made no progress."""
    decoding: int = 0
    cached: int | PrefixMatch = 0
    scale: float = 1.0
    """How much slower it is than the preset."""
    waiting: int | None = None
    """What the engine reports."""
    kv_usage: float | None = None
    kv_room: int = PLAIN.kv_tokens


def books(*workers: Book, names: str = "abcdefgh", **fields: Any) -> Fleet:
    """Workers a, b, c... at time 0."""
    loads = []
    for book in workers:
        load = WorkerLoad(reported_waiting=book.waiting, kv_usage_ratio=book.kv_usage)
        for _ in range(book.decoding):
            load.charge(0.0).first_byte(0.0)
        if book.pending:
            tokens = book.pending
            load.charge(0.0, prefill_s=tokens * TOKEN_S, uncached_tokens=tokens, prompt_tokens=tokens)
        loads.append(load)
    return Fleet(
        fields.pop("now_s", 0.0),
        [Worker(name, f"http://{name}:8000") for name, _ in zip(names, workers, strict=False)],
        loads,
        [in_gpu(book.cached) if isinstance(book.cached, int) else book.cached for book in workers],
        paces=[Pace(PLAIN, book.scale, kv_tokens=book.kv_room) for book in workers],
        **fields,
    )


def chosen(answer: Decision | Hold | Rejection) -> tuple[str, str]:
    """The worker's name and the reason."""
    assert isinstance(answer, Decision)
    return answer.candidate.decode.id, answer.reason
