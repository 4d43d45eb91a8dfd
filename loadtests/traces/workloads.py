"""Generated requests, for when there is no trace: who comes back, with how much of the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import exp, log
from random import Random

from kvroute.loadtests.traces.rows import Row, Trace

BLOCK_TOKENS = 64
MAX_PROMPT_TOKENS = 120_000


@dataclass(frozen=True, slots=True)
class SessionRow(Row):
    """A request of a client that says which session it belongs to."""

    session_id: str


class _Prompt:
    """A prompt that grows: text and the ids of the blocks it fills."""

    __slots__ = ("_fresh", "ids", "tokens")

    def __init__(self, fresh: Iterator[int], start: _Prompt | None = None) -> None:
        self._fresh = fresh
        self.tokens: int = 0 if start is None else start.tokens
        # What fills a partial block goes on differently in every prompt that starts so.
        self.ids: list[int] = [] if start is None else start.ids[: start.tokens // BLOCK_TOKENS]

    def grow(self, tokens: int) -> _Prompt:
        """So many tokens more that nobody else has, answers included."""
        self.ids = self.ids[: self.tokens // BLOCK_TOKENS]
        self.tokens += tokens
        while len(self.ids) * BLOCK_TOKENS < self.tokens:
            self.ids.append(next(self._fresh))
        return self

    def row(self, arrival_s: float, output_tokens: int, session: int | None = None) -> Row:
        if session is None:
            return Row(arrival_s, self.tokens, output_tokens, tuple(self.ids))
        return SessionRow(arrival_s, self.tokens, output_tokens, tuple(self.ids), f"s{session}")


_Session = Callable[[Random, float, Iterator[int], list[_Prompt]], Iterator[Row]]


def _tokens(source: Random, median: float, spread: float, low: int, high: int) -> int:
    """Log-normal lengths, bounded."""
    return max(low, min(high, round(exp(source.gauss(log(median), spread)))))


def _popular(source: Random, shared: list[_Prompt]) -> _Prompt:
    """The i-th is taken with a weight of 1/i."""
    return source.choices(shared, [1 / (i + 1) for i in range(len(shared))])[0]


def _chat(source: Random, at_s: float, fresh: Iterator[int], shared: list[_Prompt]) -> Iterator[Row]:
    """A person who talks: a system prompt, then turns about a minute apart that repeat all before them."""
    prompt, session = _Prompt(fresh, _popular(source, shared)), next(fresh)
    while prompt.tokens < MAX_PROMPT_TOKENS:
        output = _tokens(source, 250, 0.8, 5, 2000)
        yield prompt.grow(_tokens(source, 150, 1.2, 5, 16_000)).row(at_s, output, session)
        prompt.grow(output)
        at_s += output * 0.02 + source.expovariate(1 / 45)
        if source.random() < 0.2:
            return


def _agent(source: Random, at_s: float, fresh: Iterator[int], shared: list[_Prompt]) -> Iterator[Row]:
    """A program that calls tools: long instructions, many short answers, seconds apart."""
    prompt, session = _Prompt(fresh, _popular(source, shared)), next(fresh)
    prompt.grow(_tokens(source, 400, 0.8, 20, 8000))
    for _ in range(source.randrange(3, 20)):
        output = _tokens(source, 90, 0.7, 5, 800)
        yield prompt.row(at_s, output, session)
        prompt.grow(output + _tokens(source, 700, 1.1, 20, 12_000))
        at_s += output * 0.02 + source.expovariate(1 / 4)
        if prompt.tokens > MAX_PROMPT_TOKENS:
            return


def _documents(source: Random, at_s: float, fresh: Iterator[int], shared: list[_Prompt]) -> Iterator[Row]:
    """Questions about one long document, each on its own."""
    document = _Prompt(fresh, shared[0]).grow(_tokens(source, 18_000, 0.7, 4000, 100_000))
    for _ in range(source.randrange(1, 9)):
        question = _Prompt(fresh, document).grow(_tokens(source, 60, 0.8, 5, 800))
        yield question.row(at_s, _tokens(source, 200, 0.7, 10, 1500))
        at_s += source.expovariate(1 / 40)


def _one_off(source: Random, at_s: float, fresh: Iterator[int], shared: list[_Prompt]) -> Iterator[Row]:
    """A long prompt that never returns."""
    prompt = _Prompt(fresh).grow(_tokens(source, 9000, 0.9, 500, 100_000))
    yield prompt.row(at_s, _tokens(source, 250, 0.8, 5, 2000))


_KINDS: dict[str, tuple[tuple[_Session, float], ...]] = {
    "chat": ((_chat, 1.0),),
    "agents": ((_agent, 1.0),),
    "documents": ((_documents, 0.8), (_one_off, 0.2)),
    "mixed": ((_chat, 0.45), (_agent, 0.15), (_documents, 0.15), (_one_off, 0.25)),
}
WORKLOADS = tuple(_KINDS)
_SHARED = {_chat: (12, 1200, 0.6), _agent: (4, 6000, 0.4), _documents: (1, 300, 0.1), _one_off: (1, 1, 0.1)}
"""Per kind of session: how many shared beginnings, their median tokens and spread."""


def generate(kind: str, requests: int = 4000, per_s: float = 4.0, seed: int = 0) -> Trace:
    """So many requests, about `per_s` of them a second; sessions begin at random. Same rows for a seed.

    ValueError for an unknown kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"--workload: unknown {kind!r}; known: {', '.join(WORKLOADS)}")
    if requests < 1 or not 0 < per_s < float("inf"):
        raise ValueError(f"a workload needs requests and a rate above 0, got {requests} and {per_s}")
    source, fresh = Random(seed), count()
    shared = {
        session: [_Prompt(fresh).grow(_tokens(source, median, spread, 16, 20_000)) for _ in range(number)]
        for session, (number, median, spread) in _SHARED.items()
    }
    sessions, shares = zip(*_KINDS[kind], strict=True)
    rows: list[Row] = []
    span_s = requests / per_s
    while len(rows) < requests:
        session = source.choices(sessions, shares)[0]
        rows += session(source, source.uniform(0, span_s), fresh, shared[session])
    rows.sort(key=lambda row: row.arrival_s)
    return Trace(kind, BLOCK_TOKENS, tuple(rows[:requests]))
