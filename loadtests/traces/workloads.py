"""Generated requests, for when there is no trace: who comes back, with how much of the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log
from random import Random
from typing import TypeAlias

from kvroute.loadtests.traces.rows import Rows, Trace

BLOCK_TOKENS = 64
MAX_PROMPT_TOKENS = 120_000

_Request: TypeAlias = tuple[float, int, int, list[int], str | None]
"""What `Rows.add_runs` takes."""


class _Fresh:
    """Numbers that nobody has yet."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int = 1) -> int:
        """The first of so many."""
        first = self._next
        self._next += count
        return first


class _Prompt:
    """A prompt that grows: its tokens, and the ids of the blocks they fill, in runs (`runs.py`)."""

    __slots__ = ("_fresh", "runs", "tokens")

    def __init__(self, fresh: _Fresh, start: _Prompt | None = None) -> None:
        self._fresh = fresh
        self.tokens: int = 0 if start is None else start.tokens
        self.runs: list[int] = [] if start is None else start.runs.copy()

    def grow(self, tokens: int) -> _Prompt:
        """So many tokens more that nobody else has, answers included."""
        runs = self.runs
        full, partial = divmod(self.tokens, BLOCK_TOKENS)
        if partial:  # what fills it goes on differently in every prompt that starts so
            runs[-1] -= 1
            if runs[-1] == runs[-2]:
                del runs[-2:]
        self.tokens += tokens
        more = -(-self.tokens // BLOCK_TOKENS) - full
        first = self._fresh.take(more)
        if runs and runs[-1] == first:
            runs[-1] += more
        elif more:
            runs += (first, first + more)
        return self

    def request(self, arrival_s: float, output_tokens: int, session: int | None = None) -> _Request:
        name = None if session is None else f"s{session}"
        return arrival_s, self.tokens, output_tokens, self.runs, name


_Session: TypeAlias = Callable[[Random, float, _Fresh, list[_Prompt]], Iterator[_Request]]


def _tokens(source: Random, median: float, spread: float, low: int, high: int) -> int:
    """Log-normal lengths, bounded."""
    return max(low, min(high, round(exp(source.gauss(log(median), spread)))))


def _popular(source: Random, shared: list[_Prompt]) -> _Prompt:
    """The i-th is taken with a weight of 1/i."""
    return source.choices(shared, [1 / (i + 1) for i in range(len(shared))])[0]


def _chat(source: Random, at_s: float, fresh: _Fresh, shared: list[_Prompt]) -> Iterator[_Request]:
    """A person who talks: a system prompt, then turns about a minute apart that repeat all before them."""
    prompt, session = _Prompt(fresh, _popular(source, shared)), fresh.take()
    while prompt.tokens < MAX_PROMPT_TOKENS:
        output = _tokens(source, 250, 0.8, 5, 2000)
        yield prompt.grow(_tokens(source, 150, 1.2, 5, 16_000)).request(at_s, output, session)
        prompt.grow(output)
        at_s += output * 0.02 + source.expovariate(1 / 45)
        if source.random() < 0.2:
            return


def _agent(source: Random, at_s: float, fresh: _Fresh, shared: list[_Prompt]) -> Iterator[_Request]:
    """A program that calls tools: long instructions, many short answers, seconds apart."""
    prompt, session = _Prompt(fresh, _popular(source, shared)), fresh.take()
    prompt.grow(_tokens(source, 400, 0.8, 20, 8000))
    for _ in range(source.randrange(3, 20)):
        output = _tokens(source, 90, 0.7, 5, 800)
        yield prompt.request(at_s, output, session)
        prompt.grow(output + _tokens(source, 700, 1.1, 20, 12_000))
        at_s += output * 0.02 + source.expovariate(1 / 4)
        if prompt.tokens > MAX_PROMPT_TOKENS:
            return


def _documents(source: Random, at_s: float, fresh: _Fresh, shared: list[_Prompt]) -> Iterator[_Request]:
    """Questions about one long document, each on its own."""
    document = _Prompt(fresh, shared[0]).grow(_tokens(source, 18_000, 0.7, 4000, 100_000))
    for _ in range(source.randrange(1, 9)):
        question = _Prompt(fresh, document).grow(_tokens(source, 60, 0.8, 5, 800))
        yield question.request(at_s, _tokens(source, 200, 0.7, 10, 1500))
        at_s += source.expovariate(1 / 40)


def _one_off(source: Random, at_s: float, fresh: _Fresh, shared: list[_Prompt]) -> Iterator[_Request]:
    """A long prompt that never returns."""
    prompt = _Prompt(fresh).grow(_tokens(source, 9000, 0.9, 500, 100_000))
    yield prompt.request(at_s, _tokens(source, 250, 0.8, 5, 2000))


def _single(source: Random, at_s: float, fresh: _Fresh, shared: list[_Prompt]) -> Iterator[_Request]:
    """One question under a system prompt that many others have: an application without a memory."""
    prompt = _Prompt(fresh, _popular(source, shared)).grow(_tokens(source, 300, 1.0, 10, 8000))
    yield prompt.request(at_s, _tokens(source, 200, 0.8, 5, 2000))


def _burst(source: Random, at_s: float, fresh: _Fresh, shared: list[_Prompt]) -> Iterator[_Request]:
    """A program that sends dozens at once: all the same prompt, or each its own question about it."""
    prompt = _Prompt(fresh, _popular(source, shared)).grow(_tokens(source, 6000, 0.8, 500, 60_000))
    related = source.random() < 0.5
    for _ in range(source.randrange(16, 65)):
        asked = _Prompt(fresh, prompt).grow(_tokens(source, 60, 0.8, 5, 800)) if related else prompt
        yield asked.request(at_s, _tokens(source, 120, 0.7, 5, 1500))
        at_s += source.expovariate(20)


_KINDS: dict[str, tuple[tuple[_Session, float], ...]] = {
    "chat": ((_chat, 1.0),),
    "shared": ((_single, 1.0),),
    "agents": ((_agent, 1.0),),
    "documents": ((_documents, 0.8), (_one_off, 0.2)),
    "scans": ((_one_off, 1.0),),
    "bursts": ((_single, 0.975), (_burst, 0.025)),
    "mixed": ((_chat, 0.45), (_agent, 0.15), (_documents, 0.15), (_one_off, 0.25)),
}
WORKLOADS = tuple(_KINDS)
_SHARED = {
    _chat: (12, 1200, 0.6),
    _agent: (4, 6000, 0.4),
    _documents: (1, 300, 0.1),
    _one_off: (1, 1, 0.1),
    _single: (8, 2500, 0.6),
    _burst: (4, 1500, 0.6),
}
"""Per kind of session: how many shared beginnings, their median tokens and spread."""
_ALWAYS = (_chat, _agent, _documents, _one_off)
"""Their beginnings are drawn for every workload: a seed's requests stay the same when kinds are added."""


def generate(kind: str, requests: int = 4000, per_s: float = 4.0, seed: int = 0) -> Trace:
    """So many requests, about `per_s` of them a second; sessions begin at random. Same rows for a seed.

    ValueError for an unknown kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"--workload: unknown {kind!r}; known: {', '.join(WORKLOADS)}")
    if requests < 1 or not 0 < per_s < float("inf"):
        raise ValueError(f"a workload needs requests and a rate above 0, got {requests} and {per_s}")
    source, fresh = Random(seed), _Fresh()
    sessions, shares = zip(*_KINDS[kind], strict=True)
    shared = {
        session: [_Prompt(fresh).grow(_tokens(source, median, spread, 16, 20_000)) for _ in range(number)]
        for session, (number, median, spread) in _SHARED.items()
        if session in _ALWAYS or session in sessions
    }
    rows = Rows()
    span_s = requests / per_s
    while len(rows) < requests:
        session = source.choices(sessions, shares)[0]
        for request in session(source, source.uniform(0, span_s), fresh, shared[session]):
            rows.add_runs(*request)
    rows.sort(keep=requests)
    return Trace(kind, BLOCK_TOKENS, rows)
