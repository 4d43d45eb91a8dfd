"""What an engine should keep of a request, from predicted reuse and the client's own word.

Pure: no clock, no I/O. The rule is one bit per block: little is lost by letting go of a block that is seen
for the first time in a request that brings 4096 new tokens or more; such requests seldom come back, and what
they bring pushes much else out. What the client says of its session goes before it.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum

from msgspec import Struct

from kvroute.types import RequestView

ONE_OFF_TOKENS = 4096
"""New tokens of a request from which on they are thought used once. Simulated on two traces, 2k to 8k do
about the same; 16k is no better than no rule."""


class Keep(IntEnum):
    """How much the KV of a request is worth keeping, beside that of others."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


class Retention(Struct, frozen=True, gc=False):
    """What is to become of one request's KV once it has been served."""

    keep: Keep
    offload_limit_tokens: int | None
    """Of the prompt's beginning, what is worth writing to a lower tier; None is no limit."""
    ends: bool
    """The client says that its session is over with this request."""
    reason: str
    """One of `continues`, `ends`, `one_off`, `long_tail`, `short`, `elsewhere`, `unknown`."""


def retention(view: RequestView, *, first_use: bool | None, reused_tokens: int) -> Retention:
    """Judge one request on one worker.

    `first_use`: nobody is known to have used its first block before; None where the prompt has no keys.
    `reused_tokens`: what that worker is thought to hold of its beginning.
    """
    if view.continues is not None:
        if view.continues:
            return Retention(Keep.HIGH, None, False, "continues")
        return Retention(Keep.LOW, reused_tokens, True, "ends")
    if first_use is None or not view.prompt_tokens:
        return Retention(Keep.NORMAL, None, False, "unknown")
    if view.prompt_tokens - reused_tokens < ONE_OFF_TOKENS:
        return Retention(Keep.NORMAL, None, False, "short")
    return _of_many_new_tokens(first_use, reused_tokens)


def _of_many_new_tokens(first_use: bool, reused_tokens: int) -> Retention:
    if reused_tokens:
        return Retention(Keep.NORMAL, reused_tokens, False, "long_tail")
    if first_use:
        return Retention(Keep.LOW, 0, False, "one_off")
    # Its beginning was used before, on another worker: where the used part ends is not known here.
    return Retention(Keep.NORMAL, None, False, "elsewhere")


class FirstBlocks:
    """The first blocks of prompts seen of late; the one seen longest ago makes room."""

    def __init__(self, capacity: int = 32_768) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def is_first_use(self, key: int) -> bool:
        """True for a key that is not remembered; it is from then on."""
        seen = self._seen
        if key in seen:
            seen.move_to_end(key)
            return False
        seen[key] = None
        if len(seen) > self._capacity:
            seen.popitem(last=False)
        return True


class SessionBook:
    """Which workers hold KV in the name of which session, for as long as the session is thought alive.

    An engine prefers what a session holds until it is told that the session is over, so no session may be
    forgotten without telling: whoever leaves this book is returned to be closed.
    """

    MAX_WORKERS = 8
    """Of one session; with one more, the first is let go."""
    MAX_EXPIRED = 16
    """Idle sessions that leave with one call."""

    def __init__(self, idle_s: float, capacity: int = 16_384) -> None:
        self._idle_s = idle_s
        self._capacity = capacity
        self._sessions: OrderedDict[str, tuple[list[str], float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def used(self, session_id: str, worker_id: str, now_s: float) -> list[tuple[str, str]]:
        """Note a use; returns the (session, worker) pairs that are to be closed."""
        workers, _ = self._sessions.pop(session_id, ([], 0.0))
        over: list[tuple[str, str]] = []
        if worker_id not in workers:
            if len(workers) == self.MAX_WORKERS:
                over.append((session_id, workers.pop(0)))
            workers.append(worker_id)
        self._sessions[session_id] = workers, now_s
        for _ in range(self.MAX_EXPIRED):
            oldest = next(iter(self._sessions))
            idle = now_s - self._sessions[oldest][1] > self._idle_s
            if not idle and len(self._sessions) <= self._capacity:
                break
            over += [(oldest, each) for each in self.ended(oldest)]
        return over

    def ended(self, session_id: str) -> list[str]:
        """Forget a session; returns the workers that hold something of it."""
        return self._sessions.pop(session_id, ([], 0.0))[0]
