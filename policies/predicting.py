"""What to expect of a choice: what is charged for it, and held against its outcome."""

from __future__ import annotations

from msgspec import Struct

from kvroute.policies.pricing import FREE, price_one
from kvroute.types import Decision, Fleet, Prediction, RequestView


class Expected(Struct, frozen=True, gc=False):
    """Of one request on the worker chosen for it."""

    prefill_s: float
    """In seconds of the preset."""
    cached_tokens: int
    prediction: Prediction


def expect(
    request: RequestView, fleet: Fleet, decision: Decision, at: int, *, priced_alike: bool = False
) -> Expected:
    """By the time model, whatever the policy; `at` is the chosen worker's place in the fleet.

    With `priced_alike`, the decision's own cost is by that model too, and is taken as it is.
    """
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
