"""The default: every candidate priced in seconds, the cheapest taken, prefill and decode worker together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvroute.load import WorkerLoad
from kvroute.policies.costs.pace import Pace
from kvroute.policies.limits import NO_LIMITS, Limits
from kvroute.policies.pair_pricing import PairPricing
from kvroute.policies.pairs import Choice
from kvroute.policies.pricing import (
    CHUNK_TOKENS,
    DECODE_WEIGHT,
    Offers,
    Side,
    Sides,
    Weights,
    cost_of,
    has_room,
    price_sides,
)
from kvroute.policies.pricing_columns import ColumnPricing
from kvroute.policies.worth import Worth
from kvroute.types import (
    Candidate,
    Decision,
    Fleet,
    Hold,
    Priced,
    Pull,
    Rejection,
    RequestView,
)

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
DEFAULT_PACE = Pace()
MAX_PRICED = 256
"""Candidates that `price` lists: a fleet of P prefill and D decode workers has P x D."""

FEW_TOKENS = 2048
"""Prefill ahead that is as good as none: a quarter of a step's."""
LEAD_S = 0.05
"""A request goes so long before the prefill ahead of it should be over: its own begins with the next step, in
place of the one after."""
LONG = 30.0
"""Times a decode step, from which on a prefill does not go before: who decodes there is given that step
between two prefills that stall all."""
MANY_TOKENS = 60_000
"""Of prefill, from which on a request goes before shorter ones that come together with it."""
PARKED_S = 2.0
"""So long may a prompt's KV be expected to wait at its prefill worker for room where it is to be decoded:
that costs less than room kept free while it is computed. Beyond, room is given to short ones first, until a
prompt has waited as long as it would there: else the room that long ones need is never free at once."""
APART = 1.6
"""Times as much a stall of decodes counts where prefills need not be done beside them."""
GATHERED = 2.0
"""Times as much those count who arrive later and wait, where a worker may do either half: prefills gather on
a part of those that may do them, and so do arrivals."""
LATE = 1.5
"""Times what prefill should take, from which on it does not explain that nothing is heard."""
CROWD, CROWDED, IDLE = 8, 1.5, 0.1
"""Requests from which on a worker may be crowded; times the mean at which it is; and at which one is idle."""


class Ttft:
    """Rule: argmin over workers of the price in `pricing`; where the fleet has links that carry KV between
    them (`pd_links`), over pairs of a prefill and a decode worker as well, by the price in `pair_pricing`.

    A limit of the request or of the options (TTFT, ITL, end to end) makes candidates that would break it
    infeasible: they are taken only when no other is left, the cheapest first, or, with `admission` "slo", not
    at all. ITL is judged by the load when decode will begin: whoever is queued now decodes by then.

    What others lose of their decode life counts by the weights where prefills take a share of it, and less
    where that is small (`worth`).

    With `hold`, a request whose cheapest worker has a prefill ahead, or no KV room (of a split, none for
    longer than `PARKED_S`, or than it has waited), waits in the gateway, short ones first and aged by
    `age_weight`; its prefill counts as promised for those behind it. When a worker frees it is priced again,
    and goes where it is then cheapest.

    Each request is priced alone, so that none of many equal ones would pay for a copy that the rest could
    use: a worker that is crowded while another is idle is left to those it has, and the cheapest of those
    below the mean taken.

    Of those that come together (`order`), the ones go first of whose prompts much is cached: each has one
    worker, and is soon through with it. Then the longest: they have no time to lose behind a short one, which
    finds another worker more easily. Then the others, short ones first.

    Ties go round. A pull from a peer's cache is considered after the choice, on the chosen worker: priced
    into the choice it would make copies of everything look cheap.

    Options: the weights of `pricing`, `hold`, `age_weight`, the limits in seconds, `admission` (off or slo),
    `max_queue_s` (reject when every queue is longer).

    Reasons: cached, cold, moved (a longer prefix was passed over). Where it could be split: split; handoff (a
    split would be cheaper, came the KV at no cost), limit (only splits would break one, or find no room) and
    whole (nothing to gain). Rejections: ttft, itl, e2e, queue.

    Trade-offs: needs a pace for every worker, preset or learned; a wrong one costs until it is corrected.
    """

    needs_prefix: ClassVar[bool] = True
    needs_seconds: ClassVar[bool] = True
    chooses_pairs: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        cache_weight: Weight = 2.5
        delay_weight: Weight = 1.0
        stall_weight: Weight = 0.4
        decode_weight: Weight = DECODE_WEIGHT
        hold: bool = True
        age_weight: Weight = 70.0
        ttft_limit_s: Limit = None
        itl_limit_s: Limit = None
        e2e_limit_s: Limit = None
        admission: Literal["off", "slo"] = "off"
        max_queue_s: Limit = None

    def __init__(self, options: Options) -> None:
        self._options = options
        self._worth = Worth()
        self._limits = Limits(options.ttft_limit_s, options.itl_limit_s, options.e2e_limit_s)
        self._columns = ColumnPricing()
        self._pairs = PairPricing()
        self._turn = -1

    def decide(self, request: RequestView, fleet: Fleet) -> Decision | Hold | Rejection:
        self._turn += 1
        paces = fleet.paces or [DEFAULT_PACE] * len(fleet.workers)
        limits = self._limits_of(request)
        weights = self._weights(fleet)
        sides: Offers | None = None
        if fleet.pd_links is not None or limits == NO_LIMITS:  # those look at every side
            sides = self._columns.price(request, fleet, weights)
        if sides is None:
            sides = price_sides(request, fleet, weights, paces)
        choice = self._cheapest(request, fleet, paces, sides, limits)
        rejection = self._rejection(fleet, paces, sides, limits, choice)
        if rejection is not None:
            return rejection
        side = sides[choice.prefill]
        if (
            fleet.may_hold
            and self._options.hold
            and self._must_wait(request, fleet, paces[choice.prefill], choice, side, sides[choice.decode])
        ):
            rank_s = self._options.age_weight * _of_prefillers(fleet, sides).shortest_prefill_s
            return Hold(fleet.workers[choice.prefill], side.raw_prefill_s, rank_s)
        return self._decision(request, fleet, paces, sides, choice)

    def price(self, request: RequestView, fleet: Fleet) -> Sequence[Priced]:
        """All candidates, those that keep the limits first, then cheapest first; at most `MAX_PRICED`."""
        paces = fleet.paces or [DEFAULT_PACE] * len(fleet.workers)
        sides = price_sides(request, fleet, self._weights(fleet), paces)
        limits = self._limits_of(request)
        priced = []
        if fleet.pd_links is None:
            choices = sorted(_wholes(fleet, paces, sides, limits), key=_in_order)[:MAX_PRICED]
        else:
            pairs = self._pairs.price(request, fleet, paces, sides.halves(), limits)
            choices = pairs.in_order(MAX_PRICED)
        for choice in choices:
            side = sides[choice.prefill]
            priced.append(
                Priced(
                    Candidate(fleet.workers[choice.prefill], fleet.workers[choice.decode]),
                    cost_of(side, sides[choice.decode], choice.handoff_s, choice.copy_s, choice.delay_s),
                    side.cached_tokens,
                    side.loaded_tokens,
                    choice.broken,
                )
            )
        return priced

    def order(self, request: RequestView, fleet: Fleet) -> tuple[int, int]:
        cached = max([match.tokens for match in fleet.matches], default=0)
        new = request.prompt_tokens - cached
        if cached >= CHUNK_TOKENS:
            return 0, new
        if new >= MANY_TOKENS:
            return 1, -new
        return 2, new

    # --- parts of a decision -------------------------------------------------------------------

    def _weights(self, fleet: Fleet) -> Weights:
        options, worth = self._options, self._worth.of_decoding
        stalls = delays = 1.0
        if fleet.pd_links is not None:
            stalls = APART
            if self._pairs.ways(fleet.workers).overlap:
                delays = GATHERED
        return Weights(
            options.cache_weight,
            options.delay_weight * delays,
            options.stall_weight * worth * stalls,
            options.decode_weight * worth,
        )

    def _limits_of(self, request: RequestView) -> Limits:
        ours = self._limits
        if request.ttft_limit_s is None and request.itl_limit_s is None and request.e2e_limit_s is None:
            return ours
        return Limits(
            request.ttft_limit_s if request.ttft_limit_s is not None else ours.ttft_s,
            request.itl_limit_s if request.itl_limit_s is not None else ours.itl_s,
            request.e2e_limit_s if request.e2e_limit_s is not None else ours.e2e_s,
        )

    def _cheapest(
        self,
        request: RequestView,
        fleet: Fleet,
        paces: Sequence[Pace],
        sides: Offers,
        limits: Limits,
    ) -> Choice:
        count = len(fleet.workers)
        start = self._turn % count
        if fleet.pd_links is None and limits == NO_LIMITS:  # the way of most requests
            at, total_s = sides.cheapest(start)
            if fleet.loads[at].requests >= CROWD:
                at, total_s = _beside_the_crowd(fleet, sides, at, start)
            return Choice(at, at, total_s)
        if fleet.pd_links is not None:
            return self._pairs.price(request, fleet, paces, sides.halves(), limits).cheapest(start)
        return min(
            _wholes(fleet, paces, sides, limits),
            key=lambda one: (*_in_order(one), (one.prefill - start) % count),
        )

    def _rejection(
        self, fleet: Fleet, paces: Sequence[Pace], sides: Offers, limits: Limits, choice: Choice
    ) -> Rejection | None:
        options = self._options
        if options.max_queue_s is not None:
            excess_s = _of_prefillers(fleet, sides).shortest_queue_s - options.max_queue_s
            if excess_s > 0:
                return Rejection("queue", excess_s)
        if choice.broken is None or choice.broken == "room" or options.admission == "off":
            return None
        prefill, decode = sides[choice.prefill], sides[choice.decode]
        ttft_s = _ttft_s(fleet, paces[choice.prefill], prefill, decode, choice.handoff_s)
        return Rejection(choice.broken, limits.wait_s(ttft_s, decode.itl_s, fleet.output_tokens))

    @staticmethod
    def _must_wait(
        request: RequestView, fleet: Fleet, pace: Pace, choice: Choice, side: Side, decode: Side
    ) -> bool:
        """Whether somebody held goes there first, or a prefill is under way there, or there is no KV room."""
        at = choice.prefill
        if fleet.promised_s and fleet.promised_s[at] > 0:
            return True
        load = fleet.loads[at]
        step_s = pace.decode_s(load.requests, load.context_tokens)  # of all, once that prefill is over
        lead_s = LEAD_S if side.prefill_s < LONG * step_s else 0.0
        if _tokens_ahead(load, pace, fleet.now_s, lead_s) >= FEW_TOKENS:
            return True
        if (
            choice.prefill != choice.decode
        ):  # room there is for whoever comes first, and prefill takes its time
            return decode.room_s > max(PARKED_S, fleet.held_s)
        return not has_room(load, pace, request.prompt_tokens, fleet.output_tokens)

    def _decision(
        self,
        request: RequestView,
        fleet: Fleet,
        paces: Sequence[Pace],
        sides: Offers,
        choice: Choice,
    ) -> Decision:
        side = sides[choice.prefill]
        self._worth.add(side.prefill_s, fleet.output_tokens * sides[choice.decode].itl_s)
        longest = sides.longest_cached
        if fleet.pd_links is not None:
            self._pairs.decided(request, fleet, paces[choice.decode], choice, side.cached_tokens)
        if choice.reason:
            reason = choice.reason
        elif side.cached_tokens < longest:
            reason = "moved"
        else:
            reason = "cached" if longest else "cold"
        pull = None
        if fleet.peer_link is not None:
            pull = _worthwhile_pull(request, fleet, paces, side, choice.prefill)
        return Decision(
            Candidate(fleet.workers[choice.prefill], fleet.workers[choice.decode]),
            reason,
            side.cached_tokens,
            cost_of(side, sides[choice.decode], choice.handoff_s, choice.copy_s, choice.delay_s),
            not fleet.matches or side.loaded_tokens > 0 or not _has_lower(fleet, choice.prefill),
            pull,
        )


def _beside_the_crowd(fleet: Fleet, sides: Offers, at: int, start: int) -> tuple[int, float]:
    """The worker, and its price, in place of one that is crowded while another is idle; else that one."""
    requests = [load.requests for load in fleet.loads]
    count, everyone = len(requests), sum(requests)
    somebody_is_idle = min(requests) * count <= IDLE * everyone
    if requests[at] <= CROWDED * everyone / count + 1 or not somebody_is_idle:
        return at, sides.total_s_of(at)
    few = [i for i in range(count) if requests[i] * count <= everyone]
    best = min(few, key=lambda i: (sides.total_s_of(i), (i - start) % count))
    return best, sides.total_s_of(best)


def _tokens_ahead(load: WorkerLoad, pace: Pace, now_s: float, lead_s: float) -> float:
    """Of the prefill pending there, none when it should be over within `lead_s`, and none when it should long
    have been over: an engine that is late for another reason than prefill is not kept idle for it.

    Otherwise all of it, whatever has passed of its time: who waits here is placed by what is known later.
    """
    expected_s = load.pending_prefill_s * pace.prefill_scale
    late_s = now_s - load.head_since_s - expected_s
    if expected_s and (-lead_s < late_s < 0 or late_s > (LATE - 1) * expected_s):
        return 0.0
    return load.pending_prefill_tokens


def _has_lower(fleet: Fleet, at: int) -> bool:
    """Whether more of the prompt lies below that worker's GPU than in it."""
    return fleet.matches[at].tokens > fleet.matches[at].gpu_tokens


def _of_prefillers(fleet: Fleet, sides: Offers) -> Offers:
    """Of those that may prefill."""
    if fleet.pd_links is None:
        return sides
    return Sides(sides[i] for i, worker in enumerate(fleet.workers) if worker.prefills)


def _ttft_s(fleet: Fleet, pace: Pace, prefill: Side, decode: Side, handoff_s: float) -> float:
    """From the request's arrival, what it has waited included."""
    wait_s = fleet.held_s + pace.overhead_s + prefill.queue_s + decode.room_s
    return wait_s + prefill.load_s + prefill.prefill_s + handoff_s


def _in_order(choice: Choice) -> tuple[bool, float]:
    """Those that keep the limits first, then the cheapest."""
    return choice.broken is not None, choice.total_s


def _wholes(fleet: Fleet, paces: Sequence[Pace], sides: Offers, limits: Limits) -> Iterator[Choice]:
    """Every worker, of a fleet in which each does all of a request."""
    for i in range(len(fleet.workers)):
        side = sides[i]
        ttft_s = _ttft_s(fleet, paces[i], side, side, 0.0)
        broken = limits.broken(ttft_s, side.itl_s, fleet.output_tokens)
        yield Choice(i, i, side.start_s + side.stay_s, broken)


def _worthwhile_pull(
    request: RequestView, fleet: Fleet, paces: Sequence[Pace], side: Side, at: int
) -> Pull | None:
    """What to fetch from the peer that holds most, if that and the prefill of the rest take less."""
    if not fleet.matches or fleet.peer_link is None:
        return None
    source = max(range(len(fleet.matches)), key=lambda i: fleet.matches[i].confirmed_tokens)
    upto = min(fleet.matches[source].confirmed_tokens, request.prompt_tokens - 1)
    missing = upto - side.cached_tokens
    if source == at or missing <= 0:
        return None
    pace = paces[at]
    pull_s = fleet.peer_link.transfer_s(missing * pace.speed.kv_bytes_per_token)
    rest_s = pace.speed.marginal_prefill_s(request.prompt_tokens - upto, upto) * pace.prefill_scale
    if max(side.queue_s, pull_s) + rest_s >= side.queue_s + side.load_s + side.prefill_s:
        return None
    return Pull(fleet.workers[source], missing, pull_s)
