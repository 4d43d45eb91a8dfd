"""Choose and charge, in one synchronous step: every route, every attempt goes through here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeGuard, overload

import structlog
from msgspec import Struct
from msgspec.structs import replace

from kvroute.clock import Clock
from kvroute.conductor.index import PrefixIndex
from kvroute.policies.base import Policy, Prices
from kvroute.policies.costs.lengths import OutputLengths
from kvroute.policies.costs.links import Link
from kvroute.policies.costs.rates import Rate
from kvroute.policies.predicting import expect
from kvroute.policies.ties import least_loaded_index
from kvroute.policies.ttft import Ttft
from kvroute.router.decision_log import DecisionLog
from kvroute.router.errors import Failure, GatewayError, shorten
from kvroute.router.knowledge import NO_PROMPT, Knowledge, Prompt
from kvroute.router.metrics import Metrics
from kvroute.router.parsed_request import ParsedRequest
from kvroute.router.workers import Eligible, Lease, Member, Registry
from kvroute.types import (
    NO_MATCH,
    Candidate,
    Cost,
    Decision,
    Fleet,
    Hold,
    Prediction,
    PrefixMatch,
    Priced,
    PromptKeys,
    Pull,
    Rejection,
    Worker,
)

log = structlog.get_logger(__name__)

OVERRUNS_BEFORE_PAUSE = 5
PAUSE_DECISIONS = 1000
FALLBACK = "fallback"
MAX_REASONS = 32
MAX_TOKENS = 2**40
MAX_RETRY_AFTER_S = 3600.0
MAX_HOLD_S = 1e6
OTHER_REASON = "other"


class NamedPolicy(Struct, frozen=True):
    """A policy with the name it is configured by, which is its metric label."""

    name: str
    policy: Policy


class Choice(Struct, frozen=True):
    """A decision that is already paid for: `lease` must be released."""

    member: Member
    decision: Decision
    lease: Lease
    match: PrefixMatch
    """What the chosen worker is thought to hold of the prompt, whatever the policy made of it."""
    prediction: Prediction | None
    """None where no policy prices."""
    chosen_s: float


class Dispatcher:
    """Prices nothing and relays nothing: it gathers the snapshot, asks the policy, charges the load."""

    def __init__(
        self,
        registry: Registry,
        knowledge: Knowledge,
        metrics: Metrics,
        policy: NamedPolicy,
        *,
        shadow: NamedPolicy | None = None,
        budget_s: float,
        clock: Clock,
        decision_log: DecisionLog,
        peer_link: Link | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._registry = registry
        self._knowledge = knowledge
        self._metrics = metrics
        self._policy = policy
        self._shadow = shadow
        self._patience = _Patience(policy.name, budget_s, metrics)
        self._shadow_patience = None if shadow is None else _Patience(shadow.name, budget_s, metrics)
        self._clock = clock
        self._log = decision_log
        self._peer_link = peer_link
        self._timer = timer
        self._decision_time = metrics.decision_time.of()
        self._turn = 0
        asked = [each.policy for each in (policy, shadow) if each is not None]
        self._needs_active_keys = any(getattr(each, "needs_active_keys", False) for each in asked)
        self._needs_seconds = any(getattr(each, "needs_seconds", False) for each in asked)
        chooser: object = policy.policy
        self._prices_alike = type(chooser) is Ttft
        """Its costs are by the time model that the books are kept by: others' may be of any kind."""
        self._arrivals = Rate()
        self.lengths = OutputLengths()
        self._reasons: set[str] = set()
        self.short_first = bool(getattr(policy.policy, "short_first", False))
        self.needs_prefix = policy.policy.needs_prefix or (shadow is not None and shadow.policy.needs_prefix)

    @property
    def policy_name(self) -> str:
        return self._policy.name

    @property
    def policy(self) -> Policy:
        return self._policy.policy

    async def prepare(self, request: ParsedRequest) -> Prompt:
        """The prompt to choose for: its keys, and what a remote conductor knows of them."""
        if not self.needs_prefix:
            return NO_PROMPT
        prompt = self._knowledge.keys(request)
        if self._knowledge.remote is None or not prompt.sets:
            return prompt
        eligible = self._registry.eligible(request.view.model, self._clock())
        return await self._knowledge.ask(prompt, eligible)

    def arrived(self) -> None:
        """A new request is to be decided on, now or later; retries are none."""
        self._arrivals.add(self._clock())

    def snapshot(self, request: ParsedRequest, prompt: Prompt) -> Fleet:
        """What a policy would be shown of one request now; raises GatewayError when nobody may take it."""
        now_s = self._clock()
        return self._fleet(request, prompt, self._registry.eligible(request.view.model, now_s), now_s)

    def choose(
        self,
        request: ParsedRequest,
        prompt: Prompt,
        tried: Collection[Member] = (),
        request_id: str = "",
        held_s: float = 0.0,
    ) -> Choice:
        """Pick a worker outside `tried` and charge it; raises GatewayError when there is none."""
        choice = self.consider(request, prompt, tried, request_id, None, held_s)
        assert isinstance(choice, Choice)
        return choice

    def consider(
        self,
        request: ParsedRequest,
        prompt: Prompt,
        tried: Collection[Member] = (),
        request_id: str = "",
        promised_s: Mapping[str, float] | None = None,
        held_s: float = 0.0,
    ) -> Choice | Hold:
        """The same, or `Hold`, which is accepted where `promised_s` is given: see `Fleet.promised_s`."""
        started = self._timer()
        now_s = self._clock()
        eligible = self._registry.eligible(request.view.model, now_s, tried)
        fleet = self._fleet(request, prompt, eligible, now_s, promised_s, held_s)
        decision = self._decide(request, fleet)
        if isinstance(decision, Hold):
            self._decision_time.observe(self._timer() - started)
            return decision
        if self._shadow is not None and self._shadow_patience is not None:
            self._ask_shadow(self._shadow, self._shadow_patience, request, fleet, decision)
        if self._log.wants():
            self._log.decided(request_id, self._prices(request, fleet), decision)
        if isinstance(decision, Rejection):
            self._metrics.decisions.add(self._policy.name, "rejected")
            message = f"rejected by policy {self._policy.name}: {shorten(str(decision.reason))}"
            raise GatewayError(Failure.REJECTED, message, retry_after_s=_retry_after_s(decision))
        choice = self._charge(request, prompt, eligible, fleet, decision)
        self._metrics.decisions.add(self._policy.name, decision.reason)
        self._decision_time.observe(self._timer() - started)
        return choice

    def _prices(self, request: ParsedRequest, fleet: Fleet) -> Sequence[Priced]:
        """Every candidate's price, for the log; none where the policy has none, or fails at it."""
        policy = self._policy.policy
        if not isinstance(policy, Prices):
            return ()
        try:
            return policy.price(request.view, fleet)
        except Exception:
            log.exception("policy failed to price", policy=self._policy.name)
            self._metrics.fallbacks.add(self._policy.name, "price_error")
            return ()

    def _charge(
        self, request: ParsedRequest, prompt: Prompt, eligible: Eligible, fleet: Fleet, decision: Decision
    ) -> Choice:
        """Add what the request will cost its worker, by the same time model whatever the policy."""
        # The worker may be known to the policy by an older description than the registry's.
        at = _index_of(decision.candidate.decode, fleet)
        member, now_s = eligible.members[at], fleet.now_s
        match = fleet.matches[at] if fleet.matches else NO_MATCH
        prompt_tokens = request.view.prompt_tokens
        raw_s, prediction = 0.0, None
        if self._needs_seconds:
            expected = expect(request.view, fleet, decision, at, priced_alike=self._prices_alike)
            raw_s, cached, prediction = expected.prefill_s, expected.cached_tokens, expected.prediction
        else:
            cached = min(match.tokens, prompt_tokens)
        lease = self._registry.charge(
            member,
            now_s,
            prefill_s=raw_s,
            prompt_tokens=prompt_tokens,
            uncached_tokens=prompt_tokens - cached,
            output_tokens=fleet.output_tokens,
            keys=fleet.keys,
        )
        if prompt.sets:
            self._knowledge.routed(member, prompt)
        return Choice(member, decision, lease, match, prediction, now_s)

    def _fleet(
        self,
        request: ParsedRequest,
        prompt: Prompt,
        eligible: Eligible,
        now_s: float,
        promised_s: Mapping[str, float] | None = None,
        held_s: float = 0.0,
    ) -> Fleet:
        view, workers = request.view, eligible.workers
        matches: Sequence[PrefixMatch] = ()
        held_blocks: Sequence[int] = ()
        keys: PromptKeys | None = None
        if prompt.sets:
            matches = self._knowledge.match(prompt, eligible)
            held_blocks = HeldBlocks(self._knowledge.index, eligible.ids)
            if self._needs_active_keys:
                keys = next(iter(prompt.sets[0].values()))
        return Fleet(
            now_s,
            workers,
            eligible.loads,
            matches,
            held_blocks,
            () if keys is None else keys.keys,
            0 if keys is None else keys.block_tokens,
            eligible.paces,
            self.lengths.expect(view.model, view.tenant, view.max_output_tokens),
            self._arrivals.per_s(now_s) / len(workers),
            [promised_s.get(id_, 0.0) for id_ in eligible.ids] if promised_s else (),
            promised_s is not None,
            None,
            self._peer_link,
            held_s,
        )

    # --- the policy, and what stands in for it -------------------------------------------------

    def _decide(self, request: ParsedRequest, fleet: Fleet) -> Decision | Hold | Rejection:
        name = self._policy.name
        patience = self._patience
        if patience.paused_for:
            patience.paused_for -= 1
            return self._fall_back(fleet, "paused")
        started = self._timer()
        try:
            decision = self._policy.policy.decide(request.view, fleet)
        except (Exception, asyncio.CancelledError):  # nothing can cancel synchronous code but itself
            log.exception("policy failed", policy=name)
            return self._fall_back(fleet, "error")
        patience.took(self._timer() - started)
        if isinstance(decision, Rejection) or _is_sound_hold(decision, fleet):
            return decision
        if not _is_sound(decision, fleet):
            log.error("policy chose no eligible worker", policy=name, decision=type(decision).__name__)
            return self._fall_back(fleet, "bad_choice")
        if decision.pull is not None and self._peer_link is None:
            self._metrics.fallbacks.add(name, "no_pull")
            decision = replace(decision, pull=None)
        return decision if decision.reason in self._reasons else self._with_known_reason(decision)

    def _with_known_reason(self, decision: Decision) -> Decision:
        """Reasons become labels and header text, and anybody may make them: few and plain, or `other`."""
        if len(self._reasons) < MAX_REASONS and decision.reason.isascii() and decision.reason.isidentifier():
            self._reasons.add(decision.reason)
            return decision
        return replace(decision, reason=OTHER_REASON)

    def _fall_back(self, fleet: Fleet, reason: str) -> Decision:
        self._metrics.fallbacks.add(self._policy.name, reason)
        self._turn += 1
        return Decision.whole(fleet.workers[least_loaded_index(fleet, self._turn)], FALLBACK)

    def _ask_shadow(
        self,
        shadow: NamedPolicy,
        patience: _Patience,
        request: ParsedRequest,
        fleet: Fleet,
        decision: Decision | Hold | Rejection,
    ) -> None:
        """Ask about the same snapshot, compare, count; the answer has no effect."""
        if patience.paused_for:
            patience.paused_for -= 1
            self._metrics.shadow.add(shadow.name, "paused")
            return
        started = self._timer()
        try:
            other = shadow.policy.decide(request.view, fleet)
        except (Exception, asyncio.CancelledError):
            log.exception("shadow policy failed", policy=shadow.name)
            agreement = "error"
        else:
            patience.took(self._timer() - started)
            agreement = _agreement(decision, other)
        self._metrics.shadow.add(shadow.name, agreement)


def _retry_after_s(rejection: Rejection) -> float:
    wanted: object = rejection.retry_after_s  # third-party code's
    return wanted if isinstance(wanted, int | float) and 0 <= wanted <= MAX_RETRY_AFTER_S else 1.0


def _agreement(decision: Decision | Hold | Rejection, other: Decision | Hold | Rejection) -> str:
    if isinstance(other, Hold | Rejection):
        answer = "held" if isinstance(other, Hold) else "rejected"
        return "same" if type(other) is type(decision) else answer
    if not isinstance(decision, Decision) or not isinstance(other, Decision):
        return "other"
    return "same" if other.candidate == decision.candidate else "other"


class _Patience:
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


def _is_sound(decision: object, fleet: Fleet) -> TypeGuard[Decision]:
    """True for a decision of the right types for one of the workers offered: it is third-party code's."""
    return (
        isinstance(decision, Decision)
        and isinstance(decision.candidate, Candidate)
        and isinstance(decision.reason, str)
        and isinstance(decision.matched_tokens, int)
        and 0 <= decision.matched_tokens < MAX_TOKENS
        and _index_of(decision.candidate.decode, fleet) >= 0
        and isinstance(decision.cost, Cost | None)
        and isinstance(decision.pull, Pull | None)
    )


def _is_sound_hold(answer: object, fleet: Fleet) -> TypeGuard[Hold]:
    """True for a hold that was asked for, on one of the workers offered."""
    return (
        isinstance(answer, Hold)
        and fleet.may_hold
        and _index_of(answer.worker, fleet) >= 0
        and all(
            isinstance(number, int | float) and 0 <= number < MAX_HOLD_S
            for number in (answer.prefill_s, answer.rank_s)
        )
    )


def _index_of(worker: Worker, fleet: Fleet) -> int:
    """Its place among the workers offered, or -1."""
    for at, offered in enumerate(fleet.workers):
        if offered is worker:
            return at
    return -1


class HeldBlocks(Sequence[int]):
    """`Fleet.held_blocks`, counted only for those that are looked at."""

    __slots__ = ("_ids", "_index")

    def __init__(self, index: PrefixIndex, ids: Sequence[str]) -> None:
        self._index = index
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [self._index.held_blocks(id_) for id_ in self._ids[at]]
        return self._index.held_blocks(self._ids[at])
