"""Third-party code's answers: whether they are any, and what is done about slow ones."""

from __future__ import annotations

from typing import TypeGuard

import structlog

from kvroute.router.metrics import Metrics
from kvroute.types import Candidate, Cost, Decision, Fleet, Hold, Pull, Rejection, Role, Worker

log = structlog.get_logger(__name__)

OVERRUNS_BEFORE_PAUSE = 5
PAUSE_DECISIONS = 1000
MAX_TOKENS = 2**40
MAX_RETRY_AFTER_S = 3600.0
MAX_HOLD_S = 1e6


def retry_after_s(rejection: Rejection) -> float:
    wanted: object = rejection.retry_after_s  # third-party code's
    return wanted if isinstance(wanted, int | float) and 0 <= wanted <= MAX_RETRY_AFTER_S else 1.0


def compare(decision: Decision | Hold | Rejection, other: Decision | Hold | Rejection) -> str:
    if isinstance(other, Hold | Rejection):
        answer = "held" if isinstance(other, Hold) else "rejected"
        return "same" if type(other) is type(decision) else answer
    if not isinstance(decision, Decision) or not isinstance(other, Decision):
        return "other"
    return "same" if other.candidate == decision.candidate else "other"


class Patience:
    """Sets a policy aside that is slow again and again: a running decision cannot be interrupted."""

    __slots__ = ("_budget_s", "_metrics", "_name", "_overruns", "paused_for")

    def __init__(self, name: str, budget_s: float, metrics: Metrics) -> None:
        self._name = name
        self._budget_s = budget_s
        self._metrics = metrics
        self._overruns = 0
        self.paused_for = 0
        """Decisions to make without the policy."""

    def took(self, spent_s: float) -> None:
        """A decision came after so long."""
        if spent_s <= self._budget_s:
            self._overruns = 0
            return
        self._metrics.overruns.add(self._name)
        self._overruns += 1
        if self._overruns >= OVERRUNS_BEFORE_PAUSE:
            log.error("policy is too slow", policy=self._name, budget_s=self._budget_s)
            self._overruns = 0
            self.paused_for = PAUSE_DECISIONS


def is_sound(decision: object, fleet: Fleet) -> TypeGuard[Decision]:
    """True for a decision of the right types for one of the workers offered: it is third-party code's."""
    return (
        isinstance(decision, Decision)
        and isinstance(decision.candidate, Candidate)
        and isinstance(decision.reason, str)
        and isinstance(decision.matched_tokens, int)
        and 0 <= decision.matched_tokens < MAX_TOKENS
        and _is_sound_pair(decision.candidate, fleet)
        and isinstance(decision.cost, Cost | None)
        and isinstance(decision.pull, Pull | None)
    )


def _is_sound_pair(candidate: Candidate, fleet: Fleet) -> bool:
    """Both are among those offered, and each does its half; a lone prefill worker is given a partner."""
    prefill, decode = candidate.prefill, candidate.decode
    if prefill is decode:
        return index_of(decode, fleet) >= 0 and (decode.takes_whole or decode.role is Role.PREFILL)
    return (
        fleet.pd_links is not None
        and min(index_of(prefill, fleet), index_of(decode, fleet)) >= 0
        and prefill.role is not Role.DECODE
        and decode.role is not Role.PREFILL
    )


def is_sound_hold(answer: object, fleet: Fleet) -> TypeGuard[Hold]:
    """True for a hold that was asked for, on one of the workers offered."""
    return (
        isinstance(answer, Hold)
        and fleet.may_hold
        and index_of(answer.worker, fleet) >= 0
        and all(
            isinstance(number, int | float) and 0 <= number < MAX_HOLD_S
            for number in (answer.prefill_s, answer.rank_s)
        )
    )


def index_of(worker: Worker, fleet: Fleet) -> int:
    """Its place among the workers offered, or -1."""
    for at, offered in enumerate(fleet.workers):
        if offered is worker:
            return at
    return -1
