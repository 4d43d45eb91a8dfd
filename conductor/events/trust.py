"""How far the index of one worker may be believed, and why. Pure: no sockets, no clock of its own."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from kvroute.types import Trust

WINDOW = 64
"""Answers of a worker over which prediction and report are compared."""
LEAST = 16
"""Answers before anything is concluded."""
WRONG = 0.25
"""Share of them that may report fewer cached tokens than were promised; beyond, by load alone."""
UNEXPECTED = 0.25
"""Share of them that may report more than was known; beyond, the index lacks something."""

REASONS = {
    "restored": "from a snapshot, and its publisher has not confirmed it yet",
    "connecting": "its publisher has not answered yet",
    "disconnected": "the connection to its publisher is lost",
    "replaying": "something was missed and is being asked for",
    "incomplete": "the beginning cannot be had: it lacks blocks that the engine has",
    "unchecked": "the publisher did not answer the last check",
    "bad_events": "some events could not be understood since the cache was last empty",
    "orphans": "blocks wait for a parent that is not known",
    "block_size": "events are refused for their block size",
    "overpredicted": "the engine reports fewer cached tokens than promised",
    "underpredicted": "the engine reports more cached tokens than known",
}
"""Everything that makes an index less than exact, by metric label."""
_LOAD_ONLY = frozenset(("restored", "overpredicted"))


class HolderHealth(Struct, frozen=True, kw_only=True):
    """What is known of one rank's events. Counters are since the follow; gauges are of now."""

    dp_rank: int
    trust: Trust
    reasons: tuple[str, ...] = ()
    """Why not exact, see `REASONS`; empty when exact."""
    last_seq: int = -1
    """Sequence number of the last batch applied; -1 before any."""
    lag_s: float | None = None
    """Age of the last batch when it was applied, by the engine's own clock; None before any."""
    waiting: int = 0
    """Gauge: batches that wait for a replay."""
    parked: int = 0
    """Gauge: blocks that wait for their parent."""
    held_blocks: int = 0
    """Gauge: blocks confirmed, summed over tiers."""
    counters: dict[str, int] = {}
    """By name: those of `stream.COUNTS` and `apply.COUNTS`, and connections, expired_orphans, slow_slices."""


class WorkerHealth(Struct, frozen=True, kw_only=True):
    """What is known of a worker's events: as trustworthy as its worst rank and its answers."""

    worker_id: str
    trust: Trust
    reasons: tuple[str, ...] = ()
    holders: tuple[HolderHealth, ...] = ()
    observed: int = 0
    """Counter: answers whose reported `cached_tokens` were compared with the prediction."""
    overpredicted: int = 0
    """Counter: those that reported at least a block less."""
    underpredicted: int = 0
    """Counter: those that reported at least a block more."""


class Predictions:
    """Promised against reported cached tokens of one worker, over its last answers."""

    def __init__(self) -> None:
        self.observed = 0
        self.over = 0
        self.under = 0
        self._last: deque[int] = deque(maxlen=WINDOW)
        """-1 fewer than promised, 0 as promised, 1 more."""

    def observe(
        self, predicted_tokens: int, reported_cached_tokens: int, block_tokens: int, prompt_tokens: int
    ) -> None:
        """One answered prompt. A difference below a block is none."""
        difference = reported_cached_tokens - usable_tokens(predicted_tokens, block_tokens, prompt_tokens)
        outcome = 0 if abs(difference) < block_tokens else 1 if difference > 0 else -1
        self._last.append(outcome)
        self.observed += 1
        self.over += outcome < 0
        self.under += outcome > 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """overpredicted, underpredicted or both; recovers as later answers agree."""
        count = len(self._last)
        if count < LEAST:
            return ()
        over = self._last.count(-1) > WRONG * count
        under = self._last.count(1) > UNEXPECTED * count
        return ("overpredicted",) * over + ("underpredicted",) * under

    @property
    def agree(self) -> bool:
        """A full window without a difference: whatever was missed once no longer matters."""
        return len(self._last) == WINDOW and not any(self._last)

    def forget(self) -> None:
        """The engine restarted: earlier answers say nothing."""
        self._last.clear()


def usable_tokens(matched_tokens: int, block_tokens: int, prompt_tokens: int) -> int:
    """Cached tokens that an engine can use: it always computes a prompt's last token, hence its block."""
    return min(matched_tokens, (prompt_tokens - 1) // block_tokens * block_tokens) if prompt_tokens > 0 else 0


def trust_of(reasons: tuple[str, ...]) -> Trust:
    """LOAD_ONLY where what is known may be wrong; APPROXIMATE where something may be missing; else EXACT."""
    if not reasons:
        return Trust.EXACT
    return Trust.LOAD_ONLY if _LOAD_ONLY.intersection(reasons) else Trust.APPROXIMATE
