from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from msgspec.structs import replace

from kvroute.load import WorkerLoad
from kvroute.policies.costs.calibration import Calibration, Errors
from kvroute.policies.costs.estimators import Line, Ratio, RecentError
from kvroute.policies.costs.pace import Pace
from kvroute.types import Outcome, Prediction, PrefixMatch

from .fifo import WORKER, FifoWorker, Truth

LIGHT, HEAVY = 0.2, 0.9
SEEDS = (1, 2, 3)
SECONDS = itertools.count()
"""Answers that come by themselves."""


def worker_of(
    truth: Truth, seed: int, utilisation: float = 0.6, calibration: Calibration | None = None, key: str = "w"
) -> FifoWorker:
    print(f"seed {seed}")
    return FifoWorker(calibration or Calibration(), key, truth, random.Random(seed), utilisation)


def answered(**changes: Any) -> Outcome:
    """A success that took twice as long as predicted, overhead aside."""
    prediction = Prediction(0.5, 0.01, 0.5, 0.01)
    return replace(Outcome(WORKER, 200, ttft_s=1.0, itl_s=0.02, prediction=prediction), **changes)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("utilisation", [LIGHT, HEAVY])
@pytest.mark.parametrize(
    ("prefill", "decode"), [(0.3, 0.3), (1 / 0.3, 1 / 0.3), (3.0, 3.0), (0.3, 3.0), (3.0, 0.3), (1.0, 1.0)]
)
def test_a_wrong_preset_is_corrected_within_200_requests(
    seed: int, utilisation: float, prefill: float, decode: float
) -> None:
    worker = worker_of(Truth(prefill, decode, noise=0.15), seed, utilisation)
    worker.run(200)
    assert worker.pace.prefill_scale == pytest.approx(prefill, rel=0.15)
    assert worker.pace.decode_scale == pytest.approx(decode, rel=0.15)
    errors = worker.calibration.errors("w")
    assert errors is not None
    assert errors.ttft.absolute < 0.25
    assert errors.itl.absolute < 0.25
    assert abs(errors.ttft.bias) < 0.15


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("utilisation", [LIGHT, HEAVY])
@pytest.mark.parametrize("prefill", [0.3, 3.0])
def test_outliers_of_fifty_times_do_not_break_it(seed: int, utilisation: float, prefill: float) -> None:
    worker = worker_of(Truth(prefill, 1.0, noise=0.1, outliers=0.01), seed, utilisation)
    worker.run(200)
    assert worker.pace.prefill_scale == pytest.approx(prefill, rel=0.15)
    assert worker.pace.decode_scale == pytest.approx(1.0, rel=0.15)
    before = worker.pace.prefill_scale
    worker.truth = Truth(prefill, 1.0, noise=0.0, outliers=1.0)
    worker.run(1)
    assert worker.pace.prefill_scale == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_overhead_is_told_from_a_scale(seed: int) -> None:
    worker = worker_of(Truth(2.0, 1.0, overhead_s=0.04, noise=0.05), seed)
    worker.run(200)
    assert worker.pace.overhead_s == pytest.approx(0.04, rel=0.25)
    assert worker.pace.prefill_scale == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_oscillation_once_converged(seed: int) -> None:
    worker = worker_of(Truth(3.0, 1.0, noise=0.1), seed, HEAVY)
    worker.run(200)
    scales = []
    for _ in range(150):
        worker.run(1)
        scales.append(worker.pace.prefill_scale)
    assert max(scales) / min(scales) < 1.15
    assert len(set(scales)) < 15, "a price that moves with every answer"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_a_worker_that_changes_is_followed(seed: int, factor: float) -> None:
    worker = worker_of(Truth(1.0, 1.0, noise=0.1), seed)
    worker.run(300)
    worker.truth = Truth(factor, factor, noise=0.1)
    worker.gap_s *= factor
    worker.run(300)
    assert worker.pace.prefill_scale == pytest.approx(factor, rel=0.2)
    assert worker.pace.decode_scale == pytest.approx(factor, rel=0.2)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_second_worker_of_a_class_starts_right(seed: int) -> None:
    calibration = Calibration()
    waiting = Pace()
    calibration.start("waiting", waiting, "class")
    first = worker_of(Truth(3.0, 0.5, noise=0.1), seed, calibration=calibration)
    first.run(200)
    second, other = Pace(), Pace()
    calibration.start("second", second, "class")
    calibration.start("other", other, "another class")
    assert second.prefill_scale == pytest.approx(3.0, rel=0.15)
    assert second.decode_scale == pytest.approx(0.5, rel=0.15)
    assert (waiting.prefill_scale, waiting.overhead_s) == (second.prefill_scale, second.overhead_s)
    assert (other.prefill_scale, other.decode_scale, other.overhead_s) == (1.0, 1.0, 0.0)


def test_a_class_remembers_workers_that_left() -> None:
    calibration = Calibration()
    for _ in range(50):
        calibration.observe("gone", Pace(), answered(), "class", now_s=next(SECONDS))
    calibration.forget("gone")
    calibration.forget("gone")
    pace = Pace()
    calibration.start("new", pace, "class")
    assert pace.decode_scale == pytest.approx(2.0, rel=0.05)
    assert calibration.errors("gone") is None
    assert repr(calibration) == "<Calibration 1 workers in 1 classes>"


@pytest.mark.parametrize("seed", SEEDS)
def test_alike_workers_are_priced_exactly_alike_and_a_slow_one_by_itself(seed: int) -> None:
    calibration, rng = Calibration(), random.Random(seed)
    print(f"seed {seed}")
    usual, slow = Truth(noise=0.1), Truth(10.0, 10.0, noise=0.1)
    workers = [FifoWorker(calibration, str(i), slow if i == 2 else usual, rng, 0.5) for i in range(5)]
    for _ in range(20):
        for worker in workers:
            worker.run(5)
    assert workers[2].pace.prefill_scale == pytest.approx(10.0, rel=0.25)
    assert not calibration.follows_class("2")
    alike = [worker.pace for i, worker in enumerate(workers) if i != 2]
    assert len({(pace.prefill_scale, pace.overhead_s, pace.decode_scale) for pace in alike}) == 1
    assert alike[0].prefill_scale == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("prefill", "decode"), [(0.3, 0.3), (3.0, 3.0), (0.3, 3.0), (3.0, 0.3)])
def test_a_wrong_preset_is_corrected_within_200_requests_of_a_class(
    seed: int, prefill: float, decode: float
) -> None:
    calibration, rng = Calibration(), random.Random(seed)
    print(f"seed {seed}")
    truth = Truth(prefill, decode, noise=0.15)
    workers = [FifoWorker(calibration, str(i), truth, rng, 0.5) for i in range(4)]
    for _ in range(10):
        for worker in workers:
            worker.run(5)
    paces = [worker.pace for worker in workers]
    assert len({(pace.prefill_scale, pace.overhead_s, pace.decode_scale) for pace in paces}) == 1
    assert paces[0].prefill_scale == pytest.approx(prefill, rel=0.15)
    assert paces[0].decode_scale == pytest.approx(decode, rel=0.15)


def burst(
    calibration: Calibration, paces: list[Pace], rng: random.Random, start_s: float, contention_s: float
) -> None:
    """64 prompts of which only each worker's first has much to prefill, on machines that all are busy."""
    ends = []
    for i in range(64):
        at = rng.randrange(len(paces))
        ahead_s = 0.2 + 0.002 * i if i < 4 else 0.002 * i / len(paces)
        pace, step_s = paces[at], 0.01
        predicted_s = pace.overhead_s + pace.prefill_scale * ahead_s
        prediction = Prediction(predicted_s, pace.decode_scale * step_s, ahead_s, step_s)
        ttft_s = 0.0156 + ahead_s + contention_s * rng.uniform(0.3, 1.0)
        itl_s = step_s * (1 + 4 * contention_s * rng.random())
        outcome = answered(ttft_s=ttft_s, itl_s=itl_s, prediction=prediction)
        ends.append((start_s + ttft_s + 16 * itl_s, at, outcome))
    for now_s, at, outcome in sorted(ends, key=lambda end: end[0]):
        calibration.observe(str(at), paces[at], outcome, "class", now_s=now_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_bursts_set_no_worker_apart_and_make_none_look_free(seed: int) -> None:
    calibration, rng, paces = Calibration(), random.Random(seed), [Pace() for _ in range(4)]
    print(f"seed {seed}")
    for i in range(10):
        burst(calibration, paces, rng, 3.0 * i, contention_s=rng.choice([0.0, 0.2, 0.5]))
        assert len({(pace.prefill_scale, pace.overhead_s, pace.decode_scale) for pace in paces}) == 1
        assert 0.95 < paces[0].prefill_scale <= 20.0
        assert paces[0].overhead_s <= 0.05


@pytest.mark.parametrize("seed", SEEDS)
def test_a_burst_on_one_worker_does_not_set_it_apart(seed: int) -> None:
    calibration, rng, paces = Calibration(), random.Random(seed), [Pace() for _ in range(4)]
    print(f"seed {seed}")
    for i in range(5):
        burst(calibration, paces, rng, 3.0 * i, 0.0)
    for i in range(64):
        outcome = answered(ttft_s=rng.uniform(0.3, 1.0), prediction=Prediction(0.05, 0.01, 0.05, 0.01))
        calibration.observe("2", paces[2], outcome, "class", now_s=20.0 + i / 64)
    assert calibration.follows_class("2")


def test_short_prompts_never_make_a_worker_look_free() -> None:
    """A queue that was thought to be long says little: only a long prefill does."""
    for own_s, expected in ((0.01, 1.0), (0.2, 0.1)):
        calibration, pace, load = Calibration(), Pace(), WorkerLoad()
        charge = load.charge(0.0, prefill_s=own_s)
        for _ in range(100):
            outcome = answered(ttft_s=0.04, prediction=Prediction(0.4, 0.01, 0.4, 0.01))
            calibration.observe("w", pace, outcome, "class", now_s=next(SECONDS), charge=charge)
        assert pace.prefill_scale == pytest.approx(expected, rel=0.1)


def test_a_worker_apart_comes_back_when_it_is_like_the_others_or_has_another_chance() -> None:
    calibration, paces = Calibration(), [Pace(), Pace()]

    def ask(times: int, itl_s: float) -> None:
        for _ in range(times):
            for i, its_s in ((0, 0.01), (1, itl_s)):
                outcome = answered(itl_s=its_s)
                calibration.observe(str(i), paces[i], outcome, "class", now_s=next(SECONDS))

    ask(20, 0.01)
    assert calibration.follows_class("1")
    ask(60, 0.04)
    assert not calibration.follows_class("1")
    assert paces[1].decode_scale == pytest.approx(4 * paces[0].decode_scale, rel=0.2)
    ask(80, 0.01)
    assert calibration.follows_class("1")
    assert paces[1].decode_scale == paces[0].decode_scale
    ask(60, 0.04)
    assert not calibration.follows_class("1")
    calibration.retry("1")
    assert calibration.follows_class("1")
    assert paces[1].decode_scale == paces[0].decode_scale


def test_a_class_whose_workers_all_changed_is_priced_anew() -> None:
    calibration, paces = Calibration(), [Pace(), Pace(), Pace()]
    calibration.start("idle", paces[2], "class")
    for itl_s in (0.01, 0.05):
        for _ in range(200):
            for i in (0, 1):
                calibration.observe(str(i), paces[i], answered(itl_s=itl_s), "class", now_s=next(SECONDS))
    assert [pace.decode_scale for pace in paces] == pytest.approx([5.0] * 3, rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"failure": "upstream_died"},
        {"status": 400},
        {"status": 429},
        {"status": None},
        {"prediction": None},
        {"ttft_s": None, "itl_s": None},
    ],
)
def test_what_failed_or_was_refused_teaches_nothing(changes: dict[str, Any]) -> None:
    calibration, pace = Calibration(), Pace()
    match = PrefixMatch(tokens=100, predicted_tokens=100) if "failure" in changes else PrefixMatch()
    calibration.observe(
        "w", pace, answered(cached_tokens=0, **changes), "class", now_s=next(SECONDS), match=match
    )
    assert (pace.prefill_scale, pace.decode_scale, pace.overhead_s) == (1.0, 1.0, 0.0)
    assert pace.match_reliability == 1.0


def test_an_answer_that_is_not_streamed_says_nothing_of_ttft() -> None:
    calibration, pace = Calibration(), Pace()
    calibration.observe(
        "w", pace, answered(ttft_s=30.0, itl_s=None), "class", now_s=next(SECONDS), streamed=False
    )
    assert (pace.prefill_scale, pace.overhead_s) == (1.0, 0.0)


def test_a_prediction_of_nothing_informs_the_overhead_alone() -> None:
    calibration, pace = Calibration(), Pace()
    for _ in range(30):
        outcome = answered(ttft_s=0.03, prediction=Prediction(0.0, 0.0, 0.0005, 0.0))
        calibration.observe("w", pace, outcome, "class", now_s=next(SECONDS))
    assert pace.prefill_scale == 1.0
    assert pace.overhead_s == pytest.approx(0.03, rel=0.1)


def test_a_prefix_that_was_not_there_is_no_slowness() -> None:
    """Promised 7936 cached tokens of 8000 and found none: the whole prompt was prefilled, at preset speed."""
    calibration, pace = Calibration(), Pace()
    speed = pace.speed
    for _ in range(50):
        outcome = answered(
            ttft_s=speed.prefill_s(8000),
            prediction=Prediction(0, 0, speed.prefill_s(64, 7936), 0),
            prompt_tokens=8000,
            cached_tokens=0,
            matched_tokens=7936,
        )
        calibration.observe("w", pace, outcome, "class", now_s=next(SECONDS))
    assert pace.prefill_scale == pytest.approx(1.0, rel=0.1)


def test_what_was_charged_is_what_was_assumed() -> None:
    """The index promised a prefix, the choice did not believe it, the engine had none: nothing to correct."""
    calibration, pace, load = Calibration(), Pace(), WorkerLoad()
    speed = pace.speed
    charge = load.charge(0.0, prefill_s=speed.prefill_s(8000), prompt_tokens=8000, uncached_tokens=8000)
    for _ in range(50):
        outcome = answered(
            ttft_s=speed.prefill_s(8000),
            prediction=Prediction(0, 0, speed.prefill_s(8000), 0),
            prompt_tokens=8000,
            cached_tokens=0,
            matched_tokens=7936,
        )
        calibration.observe("w", pace, outcome, "class", now_s=next(SECONDS), charge=charge)
    assert pace.prefill_scale == pytest.approx(1.0, rel=0.02)


def test_reliability_is_what_came_of_the_unconfirmed_part() -> None:
    calibration, pace = Calibration(), Pace()
    for _ in range(200):  # of 600 tokens predicted beyond 400 confirmed, 300 were there
        match = PrefixMatch(tokens=1000, confirmed_tokens=400, predicted_tokens=1000)
        calibration.observe("w", pace, answered(cached_tokens=700), "class", now_s=next(SECONDS), match=match)
    assert pace.match_reliability == pytest.approx(0.5, abs=0.01)
    for silent in (answered(), answered(failure="upstream_died", cached_tokens=0)):
        calibration.observe("w", pace, silent, "class", now_s=next(SECONDS), match=match)
    confirmed = PrefixMatch(tokens=400, confirmed_tokens=400)
    calibration.observe("w", pace, answered(cached_tokens=0), "class", now_s=next(SECONDS), match=confirmed)
    assert pace.match_reliability == pytest.approx(0.5, abs=0.01)


def test_scales_and_overhead_stay_within_bounds() -> None:
    for ttft_s, scale in ((1e6, 20.0), (1e-9, 0.05)):
        calibration, pace = Calibration(), Pace()
        for _ in range(300):
            calibration.observe(
                "w", pace, answered(ttft_s=ttft_s, itl_s=ttft_s), "class", now_s=next(SECONDS)
            )
        assert (pace.prefill_scale, pace.decode_scale) == pytest.approx((scale, scale))
        assert 0.0 <= pace.overhead_s <= 0.05


def test_a_worker_of_another_class_starts_again() -> None:
    calibration, pace = Calibration(), Pace()
    for _ in range(20):
        calibration.observe("w", pace, answered(), "class", now_s=next(SECONDS))
    assert pace.decode_scale == pytest.approx(2.0, rel=0.05)
    calibration.start("w", pace, "another")
    assert pace.decode_scale == 1.0
    assert repr(calibration) == "<Calibration 1 workers in 2 classes>"


def test_classes_without_workers_are_bounded() -> None:
    calibration = Calibration(max_classes=4)
    for i in range(20):
        calibration.start(i, Pace(), ("class", i))
        calibration.forget(i)
    assert repr(calibration) == "<Calibration 0 workers in 4 classes>"


def test_a_line_of_equal_requests_is_mostly_scale() -> None:
    line = Line(0.0, 1.0, 0.1, 50.0)
    for _ in range(100):
        line.add(0.5, 1.5)
    assert line.scale == pytest.approx(3.0, rel=0.05)
    assert line.overhead_s < 0.05


def test_a_ratio_is_the_mean_of_logarithms() -> None:
    ratio = Ratio(1.0, 0.0, 50.0)
    for value in (2.0, 0.5, 2.0, 0.5):
        ratio.add(value)
    assert ratio.value == pytest.approx(1.0)


def test_recent_errors_have_size_and_sign() -> None:
    error = RecentError()
    error.add(1.5, 1.0)
    error.add(0.5, 1.0)
    assert (error.absolute, error.bias, error.count) == (0.5, 0.0, 2)
    error = RecentError()
    error.add(1e9, 1.0)
    assert error.bias == 10.0
    calibration = Calibration()
    calibration.observe("w", Pace(), answered(), "class", now_s=next(SECONDS))
    errors = calibration.errors("w")
    assert isinstance(errors, Errors)
    assert errors.ttft.bias == -0.5
    assert errors.itl.bias == -0.5
