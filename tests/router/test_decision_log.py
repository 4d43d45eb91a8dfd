from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from kvroute.router.decision_log import MAX_CANDIDATES, MAX_PENDING, MAX_PENDING_S, DecisionLog
from kvroute.types import Candidate, Cost, Decision, Outcome, Prediction, Priced, Rejection, Worker

A, B = Worker("a~1", "http://a:1"), Worker("b~2", "http://b:1")
WORKERS = [Worker(f"w~{i}", f"http://w{i}:1") for i in range(100)]
OUTCOME = Outcome(B, 200, None, 0.33, 1.5, 6000, 16, 42, itl_s=0.011)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def made(clock: Clock, ratio: float = 1.0, size: int = 4) -> DecisionLog:
    return DecisionLog(ratio, "ttft", clock, size)


def priced(worker: Worker, total_s: float = 0.3, matched: int = 0) -> Priced:
    return Priced(Candidate(worker, worker), Cost(prefill_s=total_s, itl_s=0.01), matched)


def decision(worker: Worker = B) -> Decision:
    return Decision(Candidate(worker, worker), "cold", 16, Cost(prefill_s=0.3, itl_s=0.01))


def test_an_entry_says_what_was_foreseen_and_what_came(clock: Clock) -> None:
    kept = made(clock)
    with capture_logs() as lines:
        kept.decided("r1", [priced(B, matched=16), priced(A, 0.8, 4096)], decision())
        assert not lines
        kept.ended("r1", OUTCOME)
    (entry,) = kept.recent(9)["decisions"]
    assert [(c["prefill"], c["total_ms"], c["matched_tokens"]) for c in entry["candidates"]] == [
        ("http://b:1", 300.0, 16),
        ("http://a:1", 800.0, 4096),
    ]
    assert (entry["request_id"], entry["policy"], entry["reason"]) == ("r1", "ttft", "cold")
    assert (entry["chosen"]["decode"], entry["chosen"]["terms"]["prefill_ms"]) == ("http://b:1", 300.0)
    assert entry["predicted"] == {"ttft_ms": 300.0, "itl_ms": 10.0}
    assert entry["ended"] == {
        "worker": "http://b:1",
        "status": 200,
        "failure": None,
        "ttft_ms": 330.0,
        "itl_ms": 11.0,
        "e2e_ms": 1500.0,
        "prompt_tokens": 6000,
        "cached_tokens": 16,
        "completion_tokens": 42,
    }
    assert lines == [{"event": "decision", "log_level": "info", **entry}]
    json.dumps(entry)


def test_what_calibration_predicted_counts_before_the_price(clock: Clock) -> None:
    kept = made(clock)
    kept.decided("r1", [], decision())
    kept.ended("r1", Outcome(B, 200, prediction=Prediction(0.31, 0.012, 0.3, 0.01)))
    kept.decided("r2", [], Decision.whole(A, "turn"))
    kept.ended("r2", Outcome(A, None, "connect_refused"))
    second, first = kept.recent(2)["decisions"]
    assert first["predicted"] == {"ttft_ms": 310.0, "itl_ms": 12.0}
    assert (second["predicted"], second["chosen"]["terms"], second["candidates"]) == (None, None, [])
    assert (second["ended"]["status"], second["ended"]["failure"]) == (None, "connect_refused")


def test_a_rejection_is_an_end(clock: Clock) -> None:
    kept = made(clock)
    kept.decided("r1", [priced(A)], Rejection("queue", 2.5))
    (entry,) = kept.recent(1)["decisions"]
    assert (entry["reason"], entry["chosen"], len(entry["candidates"])) == ("queue", None, 1)
    assert entry["ended"] == {"rejected": True, "retry_after_ms": 2500.0}
    assert kept.recent(1)["pending"] == 0


@pytest.mark.parametrize(
    ("ratio", "wanted"),
    [(0.0, ()), (1.0, tuple(range(10))), (0.5, (1, 3, 5, 7, 9)), (0.3, (3, 6, 9)), (0.1, (9,))],
)
def test_samples_are_even_and_the_same_every_time(
    clock: Clock, ratio: float, wanted: tuple[int, ...]
) -> None:
    kept = made(clock, ratio)
    assert tuple(i for i in range(10) if kept.wants()) == wanted


def test_a_share_is_kept_to_the_request(clock: Clock) -> None:
    kept = made(clock, 0.037)
    assert sum(kept.wants() for _ in range(100_000)) == 3700


def test_the_last_ones_are_kept_newest_first(clock: Clock) -> None:
    kept = made(clock, size=3)
    for number in range(5):
        kept.decided(f"r{number}", [], decision())
        kept.ended(f"r{number}", OUTCOME)
    assert [entry["request_id"] for entry in kept.recent(9)["decisions"]] == ["r4", "r3", "r2"]
    assert [entry["request_id"] for entry in kept.recent(2)["decisions"]] == ["r4", "r3"]


def test_one_that_was_not_kept_ends_unnoticed(clock: Clock) -> None:
    kept = made(clock)
    kept.ended("r1", OUTCOME)
    kept.decided("r1", [], decision())
    kept.ended("r1", OUTCOME)
    kept.ended("r1", OUTCOME)
    found = kept.recent(9)
    assert (len(found["decisions"]), found["pending"], found["dropped"]) == (1, 0, 0)


def test_entries_without_an_end_are_dropped_by_number_and_by_age(clock: Clock) -> None:
    kept = made(clock)
    for number in range(MAX_PENDING + 3):
        kept.decided(f"r{number}", [], decision())
    assert (kept.recent(1)["pending"], kept.dropped) == (MAX_PENDING, 3)
    kept.ended("r2", OUTCOME)
    assert not kept.recent(1)["decisions"]
    clock.now_s += MAX_PENDING_S
    kept.decided("at the limit", [], decision())
    assert (kept.recent(1)["pending"], kept.dropped) == (MAX_PENDING, 4)
    clock.now_s += 1
    kept.decided("after it", [], decision())
    assert (kept.recent(1)["pending"], kept.dropped) == (2, MAX_PENDING + 3)
    (family,) = kept.gauges()
    assert family.samples[0].value == MAX_PENDING + 3


def test_an_id_given_twice_at_a_time_is_the_later_request_s(clock: Clock) -> None:
    kept = made(clock)
    kept.decided("same", [], decision(A))
    clock.now_s += MAX_PENDING_S
    kept.decided("same", [], decision(B))
    clock.now_s += 1
    kept.decided("other", [], decision(B))
    kept.ended("same", OUTCOME)
    assert kept.recent(1)["decisions"][0]["chosen"]["prefill"] == B.url
    assert kept.dropped == 1


def test_of_a_large_fleet_the_cheapest_and_the_chosen_are_shown(clock: Clock) -> None:
    kept = made(clock)
    listed = [priced(worker) for worker in WORKERS]
    kept.decided("r1", listed, decision(WORKERS[80]))
    kept.ended("r1", OUTCOME)
    kept.decided("r2", listed, Rejection("ttft"))
    refused, entry = kept.recent(2)["decisions"]
    urls = [candidate["prefill"] for candidate in entry["candidates"]]
    assert urls == [worker.url for worker in [*WORKERS[:MAX_CANDIDATES], WORKERS[80]]]
    assert entry["candidates_left_out"] == 100 - MAX_CANDIDATES - 1
    assert (len(refused["candidates"]), refused["candidates_left_out"]) == (MAX_CANDIDATES, 36)


def test_a_client_s_long_id_is_shortened(clock: Clock) -> None:
    kept = made(clock)
    kept.decided("x" * 200, [], Rejection("y" * 200))
    entry = kept.recent(1)["decisions"][0]
    assert entry["request_id"] == "x" * 100 + "... (200 characters)"
    assert entry["reason"] == "y" * 100 + "... (200 characters)"


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_is_a_share(clock: Clock, ratio: float) -> None:
    with pytest.raises(ValueError, match=r"decision_log.ratio is .*; a number from 0 to 1 is accepted"):
        made(clock, ratio)


def test_a_ring_has_room(clock: Clock) -> None:
    with pytest.raises(ValueError, match=r"decision_log.size is 0; at least 1 is accepted"):
        made(clock, size=0)
