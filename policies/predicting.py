"""What to expect of a choice: what is charged for it, and held against its outcome."""

from __future__ import annotations

from msgspec import Struct

from kvroute.policies.pairing import handoff_s
from kvroute.policies.pricing import FREE, price_one
from kvroute.types import NO_MATCH, Decision, Fleet, Prediction, RequestView


class Expected(Struct, frozen=True, gc=False):
    """Of one request on the worker chosen for it."""

    prefill_s: float
    """In seconds of the preset."""
    cached_tokens: int
    prediction: Prediction
    prefill: Prediction | None = None
    """Of a split request, the prefill worker's part alone, which the pace of that one can be learned from."""
    handoff_s: float = 0.0
    """Of one, from there to the first token, but for a wait for KV room."""


def expect(
    request: RequestView,
    fleet: Fleet,
    decision: Decision,
    at: int,
    *,
    priced_alike: bool = False,
    decode_at: int | None = None,
) -> Expected:
    """By the time model, whatever the policy; `at` is the chosen worker's place in the fleet.

    With `priced_alike`, the decision's own cost is by that model too, and is taken as it is. `decode_at` is
    the decode worker's place where that is another one: `at` then prefills.
    """
    if decode_at is not None and decode_at != at:
        cost = decision.cost if priced_alike else None
        return _expect_split(request, fleet, at, decode_at, None if cost is None else cost.handoff_s)
    pace, cost, pull = fleet.paces[at], decision.cost, decision.pull
    prompt_tokens = request.prompt_tokens
    is_whole = pull is None and decision.candidate.prefill is decision.candidate.decode
    if cost is not None and is_whole and priced_alike:
        raw_s, cached = cost.prefill_s / pace.prefill_scale, decision.matched_tokens
        ttft_s, itl_s = cost.ttft_s, cost.itl_s
        is_plain = cost.load_s == 0 and cost.room_s == 0
    else:
        side = price_one(request, fleet, FREE, at)
        raw_s, cached, itl_s = side.raw_prefill_s, side.cached_tokens, side.itl_s
        is_plain = pull is None and side.load_s == 0 and side.room_s == 0
        if pull is not None:
            cached = min(cached + pull.tokens, prompt_tokens)
            raw_s = pace.speed.marginal_prefill_s(prompt_tokens - cached, cached)
        ttft_s = side.queue_s + side.load_s + side.room_s + raw_s * pace.prefill_scale
    prediction = Prediction(
        ttft_s + pace.overhead_s, itl_s, ttft_s / pace.prefill_scale, itl_s / pace.decode_scale, is_plain
    )
    return Expected(raw_s, cached, prediction)


def _expect_split(
    request: RequestView, fleet: Fleet, at: int, decode_at: int, known_handoff_s: float | None
) -> Expected:
    """Queue and prefill at one worker, handoff, room and the first token at the other.

    What of that is the pace of either cannot be told from the answer: it is not plain.
    """
    pace, decode_pace = fleet.paces[at], fleet.paces[decode_at]
    side, decode = price_one(request, fleet, FREE, at), price_one(request, fleet, FREE, decode_at)
    ahead_s = side.queue_s + side.load_s + side.prefill_s
    handed_s = known_handoff_s
    if handed_s is None:
        handed_s = max(0.0, decode.queue_s - ahead_s) + decode_pace.overhead_s + decode.itl_s
        if fleet.pd_links is not None:
            match = fleet.matches[decode_at] if fleet.matches else NO_MATCH
            pair = fleet.workers[at], fleet.workers[decode_at]
            handed_s += handoff_s(fleet.pd_links, request.prompt_tokens, *pair, match, decode_pace)
    prefill = Prediction(pace.overhead_s + ahead_s, 0.0, ahead_s / pace.prefill_scale, 0.0, side.load_s == 0)
    whole = Prediction(
        prefill.ttft_s + handed_s + decode.room_s,
        decode.itl_s,
        prefill.ahead_s,
        decode.itl_s / decode_pace.decode_scale,
        is_plain=False,
    )
    return Expected(side.raw_prefill_s, side.cached_tokens, whole, prefill, handed_s)
