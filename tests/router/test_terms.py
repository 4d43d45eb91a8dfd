from __future__ import annotations

from typing import Any

import pytest

from kvroute.router.terms import TERMS, say_why, short_form, show_priced
from kvroute.types import Candidate, Cost, Decision, Hold, Priced, Rejection, Worker

A, B, C = (Worker(name, f"http://{name}:8000") for name in "abc")
COST = Cost(0.01, 0.002, 0.3, 0.004, 0.05, 0.006, 0.0123, 0.008, 0.009)


def priced(worker: Worker, matched: int = 0, infeasible: str | None = None, **terms: float) -> Priced:
    cost = Cost(**{f"{name}_s": seconds for name, seconds in terms.items()})
    return Priced(Candidate(worker, worker), cost, matched, infeasible=infeasible)


def test_every_term_of_a_price_is_shown_in_milliseconds() -> None:
    shown = show_priced(Priced(Candidate(A, B), COST, 4096, 1024, "ttft"))
    assert shown == {
        "prefill": "http://a:8000",
        "decode": "http://b:8000",
        "queue_wait_ms": 10.0,
        "load_ms": 2.0,
        "prefill_ms": 300.0,
        "handoff_ms": 4.0,
        "cache_ms": 50.0,
        "delay_ms": 6.0,
        "stall_ms": 12.3,
        "decode_ms": 8.0,
        "ttft_ms": 316.0,
        "itl_ms": 9.0,
        "externality_ms": 76.3,
        "total_ms": 392.3,
        "matched_tokens": 4096,
        "loaded_tokens": 1024,
        "infeasible": "ttft",
    }
    assert sum(shown[f"{name}_ms"] for name in TERMS) == pytest.approx(shown["total_ms"])


def test_what_is_no_number_is_shown_as_none() -> None:
    shown = show_priced(priced(A, queue_wait=float("inf"), itl=float("nan")))
    assert (shown["queue_wait_ms"], shown["total_ms"], shown["itl_ms"], shown["load_ms"]) == (
        None,
        None,
        None,
        0,
    )


def test_the_short_form_of_a_decision_with_a_price() -> None:
    assert short_form("ttft", Decision(Candidate(A, A), "cached", 4096, COST)) == (
        b"ttft; reason=cached; matched_tokens=4096; total_ms=392.3; queue_ms=10.0; load_ms=2.0;"
        b" prefill_ms=300.0; handoff_ms=4.0; cache_ms=50.0; delay_ms=6.0; stall_ms=12.3; decode_ms=8.0;"
        b" itl_ms=9.0"
    )


def test_the_short_form_leaves_out_what_is_next_to_nothing() -> None:
    cost = Cost(queue_wait_s=0.00004, prefill_s=0.00005, itl_s=0.007)
    assert short_form("ttft", Decision(Candidate(A, A), "cold", 0, cost)) == (
        b"ttft; reason=cold; matched_tokens=0; total_ms=0.1; prefill_ms=0.1; itl_ms=7.0"
    )


def test_the_short_form_without_a_price_and_in_ascii() -> None:
    decision = Decision.whole(A, "turn", 7)
    assert short_form("round_robin", decision) == b"round_robin; reason=turn; matched_tokens=7"
    assert short_form("caf\xe9", decision) == b"caf?; reason=turn; matched_tokens=7"


HOT = priced(A, 4096, queue_wait=0.8, prefill=0.003)
COLD = priced(B, queue_wait=0.01, prefill=0.3)


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        (
            [COLD, HOT],
            "b:8000: 310 ms against a:8000: 803 ms; a:8000 holds 4096 of 6000 tokens but has 800 ms of queue"
            " ahead",
        ),
        (
            [priced(A, 4096, prefill=0.1), priced(B, 96, prefill=0.3)],
            "a:8000: 100 ms against b:8000: 300 ms; a:8000 holds 4096 of 6000 tokens, b:8000 96;"
            " b:8000 has 300 ms to prefill",
        ),
        (
            [priced(A, prefill=0.3), priced(B, prefill=0.3, decode=0.0025)],
            "a:8000: 300 ms against b:8000: 302 ms; b:8000 would be slower to decode, at a price of 2.50 ms",
        ),
        (
            [priced(A, prefill=0.3), priced(B, prefill=0.1, infeasible="itl")],
            "a:8000: 300 ms against b:8000: 100 ms; b:8000 would break its itl limit",
        ),
        (
            [priced(A, prefill=0.3, infeasible="e2e"), priced(B, prefill=0.4, infeasible="e2e")],
            "a:8000: 300 ms and no candidate keeps its limits (e2e) against b:8000: 400 ms; b:8000 has 400"
            " ms to prefill",
        ),
        ([COLD], "b:8000: 310 ms and no other candidate"),
        ([COLD, priced(A, prefill=0.31)], "b:8000: 310 ms, like the 1 other; equals go in turn"),
        (
            [priced(w, prefill=0.31) for w in (B, A, C)],
            "b:8000: 310 ms, like the 2 others; equals go in turn",
        ),
        (
            [priced(B, load=0.1), priced(A, load=0.1), priced(C, load=0.25)],
            "b:8000: 100 ms against c:8000: 250 ms; c:8000 would load KV for 250 ms",
        ),
    ],
)
def test_one_sentence_says_why(listed: list[Priced], why: str) -> None:
    assert say_why(6000, listed, Decision(listed[0].candidate, "any")) == why


def test_a_split_names_both_workers() -> None:
    split = Priced(Candidate(A, B), Cost(prefill_s=0.1, handoff_s=0.02))
    whole = priced(C, prefill=0.3)
    said = say_why(9, [split, whole], Decision(split.candidate, "split"))
    assert said == "a:8000 then b:8000: 120 ms against c:8000: 300 ms; c:8000 has 300 ms to prefill"


@pytest.mark.parametrize(
    ("answer", "begins"),
    [
        (Hold(A, 0.1), "waits in the gateway, for a:8000 as things stand: b:8000: 310 ms against"),
        (Rejection("queue", 2.5), "rejected (queue), to come back in 2.5 s: b:8000: 310 ms against"),
        (Decision.whole(C, "whim"), "c:8000 (whim), which the policy did not price"),
    ],
)
def test_other_answers(answer: Any, begins: str) -> None:
    assert say_why(6000, [COLD, HOT], answer).startswith(begins)
