"""What was decided of some requests, candidate by candidate, and how they ended: for people to compare."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import structlog
from msgspec import Struct
from prometheus_client.core import CounterMetricFamily

from kvroute.clock import Clock
from kvroute.router.errors import shorten
from kvroute.router.terms import show_cost, show_priced, to_ms
from kvroute.types import Decision, Outcome, Priced, Rejection

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = structlog.get_logger(__name__)

MAX_CANDIDATES = 64
"""Kept of one decision: the cheapest, and the chosen one."""
MAX_PENDING = 1024
MAX_PENDING_S = 3600.0


class _Pending(Struct, frozen=True):
    """A decision whose request is under way."""

    decided_s: float
    priced: Sequence[Priced]
    candidates: int
    decision: Decision


class DecisionLog:
    """Keeps a share of all decisions: the last ones in memory, all of them as lines of the log.

    A request that is tried again is decided on again: each attempt is one entry. Bounded: an entry whose end
    does not come within an hour, or before a thousand others, is dropped and counted.
    """

    def __init__(self, ratio: float, policy: str, clock: Clock, size: int = 256) -> None:
        if not 0 <= ratio <= 1:
            raise ValueError(f"decision_log.ratio is {ratio}; a number from 0 to 1 is accepted")
        if size < 1:
            raise ValueError(f"decision_log.size is {size}; at least 1 is accepted")
        self.ratio = ratio
        self.dropped = 0
        """Counter: entries whose end was not seen in time."""
        self._policy = policy
        self._clock = clock
        self._seen = 0
        self._pending: dict[str, _Pending] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=size)

    def wants(self) -> bool:
        """Whether the next decision is to be kept: every n-th, by the ratio. Ask once per decision."""
        if not self.ratio:
            return False
        before = int(self._seen * self.ratio)
        self._seen += 1
        return int(self._seen * self.ratio) > before

    def decided(self, request_id: str, priced: Sequence[Priced], decision: Decision | Rejection) -> None:
        """A decision, and every candidate's price: none where the policy does not price."""
        if isinstance(decision, Rejection):
            shown = [show_priced(each) for each in priced[:MAX_CANDIDATES]]
            retry_after_ms = to_ms(decision.retry_after_s)
            entry = self._entry(request_id, shown, len(priced), None, str(decision.reason))
            self._close({**entry, "ended": {"rejected": True, "retry_after_ms": retry_after_ms}})
            return
        kept = [
            each
            for rank, each in enumerate(priced)
            if rank < MAX_CANDIDATES or each.candidate == decision.candidate
        ]
        now_s = self._clock()
        if request_id in self._pending:  # a client's id twice at a time
            self._drop(request_id)
        self._pending[request_id] = _Pending(now_s, kept, len(priced), decision)
        while len(self._pending) > MAX_PENDING or self._oldest_s() < now_s - MAX_PENDING_S:
            self._drop(next(iter(self._pending)))

    def ended(self, request_id: str, outcome: Outcome) -> None:
        """How the attempt ended; nothing for one that is not kept."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        decision = pending.decision
        shown = [show_priced(each) for each in pending.priced]
        chosen = {
            "prefill": decision.candidate.prefill.url,
            "decode": decision.candidate.decode.url,
            "matched_tokens": decision.matched_tokens,
            "terms": None if decision.cost is None else show_cost(decision.cost),
        }
        entry = self._entry(request_id, shown, pending.candidates, chosen, decision.reason)
        self._close({**entry, "predicted": _predicted(decision, outcome), "ended": _show(outcome)})

    def recent(self, limit: int) -> dict[str, Any]:
        """The last entries, newest first."""
        kept = list(self._ended)[: -limit - 1 : -1]
        return {
            "ratio": self.ratio,
            "pending": len(self._pending),
            "dropped": self.dropped,
            "decisions": kept,
        }

    def gauges(self) -> Iterator[Metric]:
        dropped = CounterMetricFamily(
            "kvroute_decision_log_dropped", "Entries whose end was not seen in time.", labels=()
        )
        dropped.add_metric((), self.dropped)
        yield dropped

    def _entry(
        self,
        request_id: str,
        shown: list[dict[str, Any]],
        candidates: int,
        chosen: dict[str, Any] | None,
        reason: str,
    ) -> dict[str, Any]:
        return {
            "request_id": shorten(request_id),
            "policy": self._policy,
            "reason": shorten(reason),
            "chosen": chosen,
            "candidates": shown,
            "candidates_left_out": candidates - len(shown),
        }

    def _close(self, entry: dict[str, Any]) -> None:
        self._ended.append(entry)
        log.info("decision", **entry)

    def _oldest_s(self) -> float:
        return next(iter(self._pending.values())).decided_s

    def _drop(self, request_id: str) -> None:
        del self._pending[request_id]
        self.dropped += 1


def _predicted(decision: Decision, outcome: Outcome) -> dict[str, float | None] | None:
    """What calibration goes by where there is one, else the price's own terms."""
    if outcome.prediction is not None:
        return {
            "ttft_ms": to_ms(outcome.prediction.ttft_s),
            "itl_ms": to_ms(outcome.prediction.itl_s),
        }
    if decision.cost is None:
        return None
    return {"ttft_ms": to_ms(decision.cost.ttft_s), "itl_ms": to_ms(decision.cost.itl_s)}


def _show(outcome: Outcome) -> dict[str, Any]:
    return {
        "worker": outcome.worker.url,
        "status": outcome.status,
        "failure": outcome.failure,
        "ttft_ms": None if outcome.ttft_s is None else to_ms(outcome.ttft_s),
        "itl_ms": None if outcome.itl_s is None else to_ms(outcome.itl_s),
        "e2e_ms": to_ms(outcome.e2e_s),
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": outcome.completion_tokens,
    }
