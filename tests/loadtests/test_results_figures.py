"""Figures of a run, worked by hand on a few requests."""

from __future__ import annotations

import random
from math import inf, isnan
from typing import Any

import pytest

from kvroute.loadtests.results.figures import Facts, Ranked, figures, latencies
from kvroute.loadtests.results.little import NotClaimed, little
from kvroute.loadtests.results.measured import Limits, Measured
from kvroute.loadtests.results.series import GANTT_S, MAX_PREDICTED, MAX_SPANS, MOMENTS, series

TWO = Facts(groups=(("w0", "w1"),))


def served(arrival_s: float, ttft_s: float, tokens: int = 1, tpot_s: float = 0.0, **fields: Any) -> Measured:
    first_s = arrival_s + ttft_s
    given: dict[str, Any] = {"worker": "w0", "prefill_worker": "w0", "sent_s": arrival_s, **fields}
    end_s = first_s + tpot_s * (tokens - 1)
    return Measured(arrival_s, 1000, tokens, first_s=first_s, end_s=end_s, start_s=arrival_s, **given)


def refused(arrival_s: float, tokens: int = 3) -> Measured:
    return Measured(arrival_s, 1000, tokens, failure="full", rejected=True)


def told(counted: list[Measured], facts: Facts = TWO, limits: Limits = Limits()) -> dict[str, float]:  # noqa: B008
    return figures(counted, facts, limits, latencies(counted))


def test_latencies_of_failures_are_infinite_in_percentiles_and_not_in_the_mean() -> None:
    made = told([served(0, 0.1, 5, 0.01), served(1, 0.3, 5, 0.03), refused(2)])
    assert made["ttft_ms.mean"] == pytest.approx(200)
    assert made["ttft_ms.p50"] == pytest.approx(300)
    assert made["ttft_ms.p99"] == inf
    assert made["tpot_ms.mean"] == pytest.approx(20)
    assert made["tpot_ms.p99"] == inf
    assert made["e2e_ms.mean"] == pytest.approx((140 + 420) / 2)


def test_a_single_token_has_neither_tpot_nor_gaps_and_keeps_its_limit() -> None:
    made = told([served(0, 0.1)])
    assert isnan(made["tpot_ms.mean"])
    assert isnan(made["itl_ms.p50"])
    assert made["goodput"] == 1.0


def test_gaps_are_the_longest_as_measured_and_the_others_at_their_mean() -> None:
    # 4 gaps of 100 ms in all: 70 and three of 10; then two of 40, of which nobody knows the longest.
    made = told([served(0, 0.1, 5, 0.025, longest_gap_s=0.07), served(1, 0.1, 3, 0.04)])
    assert made["itl_ms.mean"] == pytest.approx(180 / 6)
    assert made["itl_ms.p50"] == pytest.approx(10)  # of 10 10 10 40 40 70, by nearest rank
    assert made["itl_ms.p99"] == pytest.approx(70)
    assert told([served(0, 0.1, 5, 0.025), refused(1, 3)])["itl_ms.p99"] == inf


def test_goodput_is_of_all_that_were_offered() -> None:
    counted = [
        served(0, 1.9, 3, 0.024),
        served(1, 2.1, 3, 0.024),
        served(2, 1.9, 3, 0.026),
        refused(3),
        Measured(4.0, 10, 3, "w0", "w0", 4.0, failure="timeout"),
    ]
    made = told(counted)
    assert made["goodput"] == 1 / 5
    assert made["goodput_by_limit.30 s / 100 ms"] == 3 / 5
    assert (made["rejected"], made["failed"]) == (1 / 5, 1 / 5)
    assert told(counted, limits=Limits(2.2, 0.03))["goodput"] == 3 / 5


def test_a_limit_may_grow_with_what_is_not_cached() -> None:
    limits = Limits(0.1, 1.0, ttft_s_per_token=0.001)
    cold, warm = served(0, 1.05), served(1, 1.05, gpu_tokens=100)
    assert told([cold], limits=limits)["goodput"] == 1.0
    assert told([warm], limits=limits)["goodput"] == 0.0


def test_hits_by_request_token_and_tier() -> None:
    facts = Facts(saved_s=lambda prompt, cached: prompt * cached / 1e6)
    counted = [
        served(0, 1, gpu_tokens=500, cpu_tokens=100, peer_tokens=50),
        served(1, 1, disk_tokens=150),
        served(2, 1),
        refused(3),
    ]
    made = told(counted, facts)
    assert made["token_hit_rate"] == pytest.approx(800 / 3000)
    assert made["request_hit_rate"] == pytest.approx(2 / 3)
    shares = [made[f"hit_by_tier.{tier}"] for tier in ("gpu", "cpu", "disk", "peer")]
    assert shares == pytest.approx([500 / 3000, 100 / 3000, 150 / 3000, 50 / 3000])
    assert made["prefix_loaded_tokens"] == pytest.approx(100)
    assert made["prefill_tokens_skipped"] == 800
    assert made["gpu_seconds_saved"] == pytest.approx(1000 * 650 / 1e6 + 1000 * 150 / 1e6)
    assert isnan(told(counted)["gpu_seconds_saved"])


def test_peak_to_mean_is_of_time_inside_and_knows_workers_that_had_nothing() -> None:
    counted = [served(0, 2.0), served(1, 1.0), served(2, 1.0, worker="w1", prefill_worker="w1")]
    assert told(counted)["peak_to_mean"] == pytest.approx(3 / 2)
    assert told(counted, Facts(groups=(("w0", "w1", "w2", "w3"),)))["peak_to_mean"] == pytest.approx(3)
    assert told(counted, Facts())["peak_to_mean"] == pytest.approx(3 / 2)
    assert isnan(told([refused(0)])["peak_to_mean"])


def test_workers_that_prefill_and_that_decode_are_compared_among_themselves() -> None:
    counted = [
        served(0, 1.0, 2, 9.0, prefill_worker="p0", worker="d0"),
        served(0, 3.0, 2, 9.0, prefill_worker="p1", worker="d1"),
    ]
    assert told(counted, Facts(groups=(("p0", "p1"), ("d0", "d1"))))["peak_to_mean"] == pytest.approx(1.5)


def test_littles_law_holds_where_the_fleet_keeps_up_and_is_not_claimed_elsewhere() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source, at_s, free_s, calm, busy, free_busy_s = random.Random(seed), 0.0, 0.0, [], [], 0.0
    for _ in range(4000):
        at_s += source.expovariate(1.0)
        free_s = max(free_s, at_s) + 0.7  # M/D/1 at 70 %
        free_busy_s = max(free_busy_s, at_s) + 1.3
        calm.append(served(at_s, free_s - at_s))
        busy.append(served(at_s, free_busy_s - at_s))
    # The last of twenty that stay 0.5 s each is inside when the count ends.
    assert little([served(i, 0.5) for i in range(20)]) == pytest.approx(19 / 20)
    assert little(calm) == pytest.approx(1.0, abs=0.02)
    answer = little(busy)
    assert isinstance(answer, NotClaimed)
    assert "the fleet did not keep up" in answer.reason
    assert isnan(told(busy)["little"])
    assert little([refused(0)]) == NotClaimed("nothing was served")
    assert little([served(0, 1), served(0, 1)]) == NotClaimed("all came at once")


def test_offered_rate_and_what_only_the_fleet_knows() -> None:
    made = told([served(2.0 * i, 0.1) for i in range(11)], Facts(preemptions=4, decision_us=7.5))
    assert (made["offered"], made["offered_per_s"]) == (11, 0.5)
    assert (made["preemptions"], made["decision_us"]) == (4, 7.5)
    assert isnan(told([served(0, 1)])["preemptions"])
    with pytest.raises(ValueError, match="no request counts"):
        told([])


def test_ranks_are_nearest_and_weights_count() -> None:
    assert Ranked.of([3, 1, 2]).at((0, 0.5, 1)) == [1, 2, 3]
    assert Ranked.of([5, 1], [1, 99]).at((0.5, 0.98, 1)) == [1, 1, 5]
    assert Ranked.of([5, 1], [1, 99]).mean == pytest.approx(1.04)
    assert (Ranked.of([inf]).mean, isnan(Ranked.of([]).mean)) == (inf, True)
    assert all(isnan(value) for value in Ranked.of([]).at((0.5, 0.9)))


def test_series_are_bounded_however_long_the_run() -> None:
    measured = [
        served(i / 100, 0.5, 20, 0.05, worker=f"w{i % 2}", prefill_worker=f"w{i % 2}", predicted_ttft_s=0.4)
        for i in range(20_000)
    ]
    made = series(measured, measured[2000:], TWO, latencies(measured[2000:]))
    assert len(made.ttft_ms) == len(made.itl_ms) == 101
    assert made.ttft_ms[0] == made.ttft_ms[100] == 500
    assert (len(made.load.at_s), len(made.load.requests)) == (MOMENTS, 2)
    assert len(made.gantt.spans) == MAX_SPANS
    assert {span[0] for span in made.gantt.spans} == {0}
    assert made.gantt.to_s - made.gantt.from_s == pytest.approx(GANTT_S)
    assert len(made.predicted_ms) == MAX_PREDICTED
    assert made.predicted_ms[0] == (400, 500)


def test_load_over_time_counts_who_is_inside_each_worker() -> None:
    measured = [served(0, 4.0), served(1, 1.0, worker="w1", prefill_worker="w1"), served(2, 2.0), refused(3)]
    made = series(measured, measured, TWO, latencies(measured)).load
    assert (made.workers, made.at_s[0], made.at_s[-1]) == (["w0", "w1"], 0, 4)
    at = {moment: (made.requests[0][i], made.requests[1][i]) for i, moment in enumerate(made.at_s)}
    assert at[min(at, key=lambda moment: abs(moment - 1.5))] == (1, 1)
    assert at[min(at, key=lambda moment: abs(moment - 3))] == (2, 0)


def test_a_stretch_shows_each_request_on_its_worker() -> None:
    made = series([served(1, 2.0, 3, 0.5, worker="w1")], [], TWO, latencies([served(1, 2.0)])).gantt
    assert list(made.spans) == [(1, 1.0, 1.0, 3.0, 4.0)]
