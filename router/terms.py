"""Prices as people read them: milliseconds, term by term; and one sentence why A and not B."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from kvroute.types import Candidate, Cost, Decision, Hold, Priced, Rejection, Worker

TERMS = {
    "queue_wait": "has {} of queue ahead",
    "load": "would load KV for {}",
    "prefill": "has {} to prefill",
    "handoff": "needs {} to hand KV over",
    "cache": "would cost others {} of cached KV",
    "delay": "would delay later requests by {}",
    "stall": "would stall running requests by {}",
    "decode": "would be slower to decode, at a price of {}",
}
"""The terms of `Cost` that add up to its total, and how each speaks against a candidate."""


def to_ms(seconds: float) -> float | None:
    """Milliseconds to the microsecond; None for what is no finite number."""
    return round(seconds * 1e3, 3) if isfinite(seconds) else None


def show_cost(cost: Cost) -> dict[str, float | None]:
    """Every term and sum, in milliseconds."""
    shown = {f"{name}_ms": to_ms(getattr(cost, f"{name}_s")) for name in TERMS}
    shown["ttft_ms"], shown["itl_ms"] = to_ms(cost.ttft_s), to_ms(cost.itl_s)
    shown["externality_ms"], shown["total_ms"] = to_ms(cost.externality_s), to_ms(cost.total_s)
    return shown


def show_priced(priced: Priced) -> dict[str, Any]:
    """One candidate with its terms; `infeasible` names the limit that it would break."""
    return {
        "prefill": priced.candidate.prefill.url,
        "decode": priced.candidate.decode.url,
        **show_cost(priced.cost),
        "matched_tokens": priced.matched_tokens,
        "loaded_tokens": priced.loaded_tokens,
        "infeasible": priced.infeasible,
    }


LEAST_SHOWN_S = 0.05e-3


def short_form(policy: str, decision: Decision) -> bytes:
    """The value of x-kvroute-decision, ASCII: where the policy prices, its terms of 0.05 ms and more."""
    said = f"{policy}; reason={decision.reason}; matched_tokens={decision.matched_tokens}"
    cost = decision.cost
    if cost is not None:
        said += f"; total_ms={cost.total_s * 1e3:.1f}"
        for name, value_s in (
            ("queue", cost.queue_wait_s),
            ("load", cost.load_s),
            ("prefill", cost.prefill_s),
            ("handoff", cost.handoff_s),
            ("cache", cost.cache_s),
            ("delay", cost.delay_s),
            ("stall", cost.stall_s),
            ("decode", cost.decode_s),
            ("itl", cost.itl_s),
        ):
            if value_s >= LEAST_SHOWN_S:
                said += f"; {name}_ms={value_s * 1e3:.1f}"
    return said.encode("ascii", "replace")


def say_why(prompt_tokens: int, priced: Sequence[Priced], answer: Decision | Hold | Rejection) -> str:
    """Why this answer and no other: one sentence. `priced` is not empty, those within limits first."""
    if not isinstance(answer, Decision):
        cheapest = _say_chosen(prompt_tokens, priced, priced[0])
        if isinstance(answer, Hold):
            return f"waits in the gateway, for {_host(answer.worker)} as things stand: {cheapest}"
        return f"rejected ({answer.reason}), to come back in {answer.retry_after_s:.1f} s: {cheapest}"
    chosen = next((each for each in priced if each.candidate == answer.candidate), None)
    if chosen is None:
        return f"{_name(answer.candidate)} ({answer.reason}), which the policy did not price"
    return _say_chosen(prompt_tokens, priced, chosen)


def _say_chosen(prompt_tokens: int, priced: Sequence[Priced], chosen: Priced) -> str:
    name, price = _name(chosen.candidate), _ms(chosen.cost.total_s)
    broken = "" if chosen.infeasible is None else f" and no candidate keeps its limits ({chosen.infeasible})"
    others = [each for each in priced if each is not chosen]
    if not others:
        return f"{name}: {price}{broken or ' and no other candidate'}"
    equal = sum(_is_equal(each, chosen) for each in others)
    if equal == len(others):
        return f"{name}: {price}{broken}, like the {equal} other{'s' if equal > 1 else ''}; equals go in turn"
    holder = max(others, key=lambda each: each.matched_tokens)
    other = (
        holder
        if holder.matched_tokens > chosen.matched_tokens
        else next(each for each in others if not _is_equal(each, chosen))
    )
    return (
        f"{name}: {price}{broken} against {_name(other.candidate)}: {_ms(other.cost.total_s)}; "
        + _compare(prompt_tokens, chosen, other)
    )


def _compare(prompt_tokens: int, chosen: Priced, other: Priced) -> str:
    """What the other holds, and what speaks most against it."""
    name = _name(other.candidate)
    against = _strongest(chosen, other)
    if other.matched_tokens > chosen.matched_tokens:
        return f"{name} holds {other.matched_tokens} of {prompt_tokens} tokens but {against}"
    if chosen.matched_tokens > other.matched_tokens:
        held = f"{chosen.matched_tokens} of {prompt_tokens} tokens, {name} {other.matched_tokens}"
        return f"{_name(chosen.candidate)} holds {held}; {name} {against}"
    return f"{name} {against}"


def _strongest(chosen: Priced, other: Priced) -> str:
    if other.infeasible is not None and chosen.infeasible is None:
        return f"would break its {other.infeasible} limit"
    excess = {name: getattr(other.cost, f"{name}_s") - getattr(chosen.cost, f"{name}_s") for name in TERMS}
    name = max(excess, key=lambda term: excess[term])
    if excess[name] <= 0:
        return "costs no less"
    return TERMS[name].format(_ms(getattr(other.cost, f"{name}_s")))


def _is_equal(one: Priced, other: Priced) -> bool:
    same_limits = (one.infeasible is None) == (other.infeasible is None)
    return same_limits and abs(one.cost.total_s - other.cost.total_s) < 1e-9


def _host(worker: Worker) -> str:
    return worker.url.partition("://")[2] or worker.url


def _name(candidate: Candidate) -> str:
    if candidate.prefill == candidate.decode:
        return _host(candidate.prefill)
    return f"{_host(candidate.prefill)} then {_host(candidate.decode)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"
