"""Choose and charge, in one synchronous step: every route, every attempt goes through here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import overload

import structlog
from msgspec import Struct
from msgspec.structs import replace

from kvroute.clock import Clock
from kvroute.conductor.index import PrefixIndex
from kvroute.policies.base import Orders, Policy, Prices
from kvroute.policies.costs.lengths import OutputLengths
from kvroute.policies.costs.links import Link, PdLinks
from kvroute.policies.costs.rates import Rate
from kvroute.policies.pairing import cheapest_decode, payload_bytes, prefillers, roomiest
from kvroute.policies.predicting import Expected, expect
from kvroute.policies.ties import least_loaded_index
from kvroute.policies.ttft import Ttft
from kvroute.router.answers import Patience, compare, index_of, is_sound, is_sound_hold, retry_after_s
from kvroute.router.decision_log import DecisionLog
from kvroute.router.eligible import Eligible
from kvroute.router.errors import Failure, GatewayError, shorten
from kvroute.router.knowledge import NO_PROMPT, Knowledge, Prompt
from kvroute.router.metrics import Metrics
from kvroute.router.parsed_request import ParsedRequest
from kvroute.router.workers import Lease, Member, Registry
from kvroute.types import (
    NO_MATCH,
    Candidate,
    Decision,
    Fleet,
    Hold,
    Prediction,
    PrefixMatch,
    Priced,
    PromptKeys,
    Rejection,
    Role,
)

log = structlog.get_logger(__name__)

FALLBACK = "fallback"
MAX_REASONS = 32
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
    prefill: PrefillHalf | None = None
    """Where another worker prefills: `member` then only decodes, and what it holds is not looked at."""
    could_split: bool = False
    """Whether there were two workers for it."""

    def release(self) -> None:
        """Nobody will act on it."""
        self.lease.release()
        if self.prefill is not None:
            self.prefill.lease.release()


class PrefillHalf(Struct, frozen=True):
    """The prefill worker's part of a split request; `lease` must be released."""

    member: Member
    lease: Lease
    match: PrefixMatch
    prediction: Prediction | None
    handoff_s: float
    """Expected: from the prefill's answer to the decode worker's first token."""
    wire_s: float
    """Of that, the KV's way on a link that is free."""
    payload_bytes: int
    """KV that has to travel, as far as is known."""


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
        pd_links: PdLinks | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._registry = registry
        self._knowledge = knowledge
        self._metrics = metrics
        self._policy = policy
        self._shadow = shadow
        self._patience = Patience(policy.name, budget_s, metrics)
        self._shadow_pairs = shadow is not None and bool(getattr(shadow.policy, "chooses_pairs", False))
        self._shadow_patience = None if shadow is None else Patience(shadow.name, budget_s, metrics)
        self._clock = clock
        self._log = decision_log
        self._peer_link = peer_link
        self.pd_links = PdLinks() if pd_links is None else pd_links
        """May be replaced by what is measured."""
        self._timer = timer
        self._decision_time = metrics.decision_time.of()
        self._turn = 0
        asked = [each.policy for each in (policy, shadow) if each is not None]
        self._needs_active_keys = any(getattr(each, "needs_active_keys", False) for each in asked)
        self._needs_seconds = any(getattr(each, "needs_seconds", False) for each in asked)
        chooser: object = policy.policy
        self._chooses_pairs = bool(getattr(chooser, "chooses_pairs", False))
        self._prices_alike = type(chooser) is Ttft
        """Its costs are by the time model that the books are kept by: others' may be of any kind."""
        self._arrivals = Rate()
        self.lengths = OutputLengths()
        self._reasons: set[str] = set()
        self.orders = isinstance(policy.policy, Orders)
        """Whether the policy orders those that come together."""
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
        eligible = self._registry.eligible(request.view.model, self._clock(), (), request.task)
        return await self._knowledge.ask(prompt, eligible)

    def arrived(self) -> None:
        """A new request is to be decided on, now or later; retries are none."""
        self._arrivals.add(self._clock())

    def snapshot(self, request: ParsedRequest, prompt: Prompt) -> Fleet:
        """What a policy would be shown of one request now; raises GatewayError when nobody may take it."""
        now_s = self._clock()
        eligible = self._registry.eligible(request.view.model, now_s, (), request.task)
        return self._fleet(request, prompt, eligible, now_s)

    def order(self, request: ParsedRequest, prompt: Prompt) -> tuple[int, ...]:
        """Among those that come together, by a policy that orders them: the lowest first."""
        policy = self._policy.policy
        assert isinstance(policy, Orders)
        try:
            order: object = policy.order(request.view, self.snapshot(request, prompt))
            if not isinstance(order, tuple) or not all(isinstance(one, int | float) for one in order):
                raise TypeError(f"order is {order!r}, a tuple of numbers is expected")
            return order
        except GatewayError:  # nobody may take it: told when it is decided on
            return ()
        except Exception:
            log.exception("policy failed to order", policy=self._policy.name)
            self._metrics.fallbacks.add(self._policy.name, "order_error")
            return ()

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
        eligible = self._registry.eligible(request.view.model, now_s, tried, request.task)
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
            raise GatewayError(Failure.REJECTED, message, retry_after_s=retry_after_s(decision))
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

    def choose_decode(self, request: ParsedRequest, choice: Choice, tried: Collection[Member]) -> Choice:
        """As `choice`, with another decode worker for KV that lies finished at its prefill worker.

        GatewayError when there is none.
        """
        assert choice.prefill is not None
        prefill = choice.prefill.member
        now_s = self._clock()
        eligible = self._registry.eligible(request.view.model, now_s, tried, request.task)
        fleet = self._fleet(request, NO_PROMPT, eligible, now_s)
        at = cheapest_decode(request.view, replace(fleet, pd_links=self.pd_links), prefill.worker)
        if at is None:
            raise GatewayError(Failure.NO_WORKER, "every decode worker has failed this request")
        member = eligible.members[at]
        decision = replace(choice.decision, candidate=Candidate(prefill.worker, member.worker))
        lease = self._charge_decode(member, request, fleet)
        return replace(choice, member=member, decision=decision, lease=lease)

    def _charge(
        self, request: ParsedRequest, prompt: Prompt, eligible: Eligible, fleet: Fleet, decision: Decision
    ) -> Choice:
        """Add what the request will cost its workers, by the same time model whatever the policy."""
        # A worker may be known to the policy by an older description than the registry's.
        at = index_of(decision.candidate.prefill, fleet)
        decode_at = index_of(decision.candidate.decode, fleet)
        is_split = at != decode_at
        member, now_s = eligible.members[at], fleet.now_s
        match = fleet.matches[at] if fleet.matches else NO_MATCH
        prompt_tokens = request.view.prompt_tokens
        raw_s, prediction = 0.0, None
        expected: Expected | None = None
        if self._needs_seconds:
            expected = expect(
                request.view, fleet, decision, at, priced_alike=self._prices_alike, decode_at=decode_at
            )
            raw_s, cached, prediction = expected.prefill_s, expected.cached_tokens, expected.prediction
        else:
            cached = min(match.tokens, prompt_tokens)
        lease = self._registry.charge(
            member,
            now_s,
            prefill_s=raw_s,
            prompt_tokens=prompt_tokens,
            uncached_tokens=prompt_tokens - cached,
            output_tokens=1.0 if is_split else fleet.output_tokens,
            keys=fleet.keys,
        )
        if prompt.sets:
            self._knowledge.routed(member, prompt)
        if not is_split:
            could_split = fleet.pd_links is not None
            return Choice(member, decision, lease, match, prediction, now_s, None, could_split)
        decode = eligible.members[decode_at]
        decode_match = fleet.matches[decode_at] if fleet.matches else NO_MATCH
        bytes_ = payload_bytes(prompt_tokens, decode.worker, decode_match, decode.pace)
        wire_s = self.pd_links.between(member.worker, decode.worker).transfer_s(bytes_)
        half = PrefillHalf(
            member,
            lease,
            match,
            None if expected is None else expected.prefill,
            wire_s if expected is None else max(wire_s, expected.handoff_s),
            wire_s,
            bytes_,
        )
        decode_lease = self._charge_decode(decode, request, fleet)
        return Choice(decode, decision, decode_lease, NO_MATCH, prediction, now_s, half, True)

    def _charge_decode(self, member: Member, request: ParsedRequest, fleet: Fleet) -> Lease:
        """It has nothing to prefill: for prices it decodes from now on."""
        lease = self._registry.charge(
            member,
            fleet.now_s,
            prompt_tokens=request.view.prompt_tokens,
            output_tokens=fleet.output_tokens,
            keys=fleet.keys,
        )
        lease.charge.await_kv(fleet.now_s)
        return lease

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
            self._arrivals.per_s(now_s) / eligible.prefilling,
            [promised_s.get(id_, 0.0) for id_ in eligible.ids] if promised_s else (),
            promised_s is not None,
            self.pd_links if eligible.can_split else None,
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
            decision = self._policy.policy.decide(request.view, self._shown(fleet, self._chooses_pairs))
        except (Exception, asyncio.CancelledError):  # nothing can cancel synchronous code but itself
            log.exception("policy failed", policy=name)
            return self._fall_back(fleet, "error")
        patience.took(self._timer() - started)
        if isinstance(decision, Rejection) or is_sound_hold(decision, fleet):
            return decision
        if not is_sound(decision, fleet):
            log.error("policy chose no eligible worker", policy=name, decision=type(decision).__name__)
            return self._fall_back(fleet, "bad_choice")
        if fleet.pd_links is not None and decision.candidate.decode.role is Role.PREFILL:
            decision = self._pair(fleet, decision)
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
        if fleet.pd_links is None:
            return Decision.whole(fleet.workers[least_loaded_index(fleet, self._turn)], FALLBACK)
        shown = prefillers(fleet)
        decision = Decision.whole(shown.workers[least_loaded_index(shown, self._turn)], FALLBACK)
        return self._pair(fleet, decision) if decision.candidate.decode.role is Role.PREFILL else decision

    @staticmethod
    def _shown(fleet: Fleet, chooses_pairs: bool) -> Fleet:
        """What a policy is shown that chooses no pairs: those that may prefill, as if they did it all."""
        return fleet if chooses_pairs or fleet.pd_links is None else prefillers(fleet)

    def _pair(self, fleet: Fleet, decision: Decision) -> Decision:
        """A decode worker for the choice of a policy that names only who prefills."""
        among = [i for i, worker in enumerate(fleet.workers) if worker.role is not Role.PREFILL]
        self._turn += 1
        decode = fleet.workers[roomiest(fleet.loads, among, self._turn)]
        return replace(decision, candidate=Candidate(decision.candidate.prefill, decode))

    def _ask_shadow(
        self,
        shadow: NamedPolicy,
        patience: Patience,
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
            other = shadow.policy.decide(request.view, self._shown(fleet, self._shadow_pairs))
        except (Exception, asyncio.CancelledError):
            log.exception("shadow policy failed", policy=shadow.name)
            agreement = "error"
        else:
            patience.took(self._timer() - started)
            agreement = compare(decision, other)
        self._metrics.shadow.add(shadow.name, agreement)


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
