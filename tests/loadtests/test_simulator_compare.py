"""Comparisons: who is paired with whom, what a run is made of, what happens when one fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import pytest

from kvroute.loadtests.mock_engine.steps import StepTimes
from kvroute.loadtests.results.measured import Limits
from kvroute.loadtests.simulator.compare import Comparison, FleetOf, Run, Variant, make_rows
from kvroute.loadtests.simulator.knowing import KnownLengths, tell_lengths
from kvroute.loadtests.simulator.measuring import DecisionMeter, facts, prefill_s
from kvroute.loadtests.simulator.processes import RunFailed, compare
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.simulator.sources import GeneratedSource
from kvroute.loadtests.simulator.warming import requests_to_fill
from kvroute.loadtests.traces.arrivals import Arrival, arrivals
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.workloads import BLOCK_TOKENS, generate
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.registry import make_policy

SMALL = (FleetOf(2, Setting(workers=2)),)
CHAT = (GeneratedSource("chat", 40),)


def small(**fields: Any) -> Comparison:
    variants = [Variant("round_robin"), Variant("least_loaded"), Variant("ttft", {"hold": "false"})]
    return Comparison(**{"sources": CHAT, "variants": variants, "fleets": SMALL, **fields})


@dataclass(frozen=True, slots=True)
class Given:
    """The same few rows for every seed."""

    rows: tuple[Row, ...]
    name: str = "given"
    block_tokens: int = 512
    is_drawn: bool = False
    remarks: Sequence[str] = ()

    def __call__(self, seed: int) -> Trace:
        return Trace(self.name, self.block_tokens, self.rows)


def test_every_policy_gets_the_same_requests_and_is_paired_by_seed() -> None:
    comparison = small(seeds=2, speeds=(1.0, 4.0), limits=Limits(0.2, 0.013))
    results = compare(comparison)
    assert set(results) == set(comparison.runs)
    assert len(results) == 12
    rows = make_rows(comparison, results, {"preset": "p"})
    assert [(row.policy, row.speed) for row in rows[:4]] == [
        ("round_robin", 1.0),
        ("least_loaded", 1.0),
        ("ttft", 1.0),
        ("round_robin", 4.0),
    ]
    baseline, other = (
        [results[Run(0, 0, 4.0, seed, variant)].figures["goodput"] for seed in (1, 2)] for variant in (0, 2)
    )
    assert rows[5].goodput == pytest.approx(sum(other) / 2)
    assert rows[3].paired is None
    assert rows[5].paired is not None
    mean, low, high = rows[5].paired.figures["goodput"]
    assert mean == pytest.approx(sum(other) / 2 - sum(baseline) / 2)
    assert low is not None
    assert high is not None
    assert low <= mean <= high
    assert (rows[5].options, rows[5].trace, rows[5].workers, rows[5].seeds) == (
        {"hold": "false"},
        "chat",
        2,
        2,
    )
    assert rows[5].setting["preset"] == "p"
    assert (rows[5].setting["kv_tokens"], rows[5].setting["block_tokens"]) == (750_000, BLOCK_TOKENS)
    assert (rows[5].offered, rows[5].warm_up, rows[5].little_reason is None) == (
        36,
        0.1,
        rows[5].little is not None,
    )


def test_several_traces_and_fleets_are_each_compared() -> None:
    fleets = (FleetOf(1, Setting(workers=1)), FleetOf("1P1D", Setting(split=(1, 1))))
    sources = (GeneratedSource("chat", 20), GeneratedSource("agents", 20))
    comparison = Comparison(sources, [Variant("round_robin")], fleets)
    rows = make_rows(comparison, compare(comparison), {})
    assert [(row.trace, row.workers) for row in rows] == [
        ("chat", 1),
        ("chat", "1P1D"),
        ("agents", 1),
        ("agents", "1P1D"),
    ]
    assert [len(row.series.load.requests) for row in rows] == [1, 2, 1, 2]


def test_a_fleet_has_the_traces_blocks_unless_it_has_its_own() -> None:
    setting = Setting(workers=2)
    assert FleetOf(2, setting).setting_for(CHAT[0]).block_tokens == 64
    assert FleetOf(2, setting, 16).setting_for(CHAT[0]).block_tokens == 16


def test_only_the_first_seed_keeps_its_series() -> None:
    results = compare(small(seeds=2))
    assert {run.seed for run, result in results.items() if result.series is not None} == {1}


def test_chance_follows_the_seed() -> None:
    def figures(comparison: Comparison, seed: int) -> dict[str, float]:
        made = dict(comparison.simulate(Run(0, 0, 1.0, seed, 0)).figures)
        return {name: value for name, value in made.items() if name != "decision_us" and not isnan(value)}

    drawn = small(variants=[Variant("random")])
    assert figures(drawn, 1) == figures(drawn, 1) != figures(drawn, 2)
    rows = Given(tuple(generate("chat", 40).rows), block_tokens=BLOCK_TOKENS)
    fixed = small(sources=[rows], variants=[Variant("random", {"seed": 3})])
    assert figures(fixed, 1) == figures(fixed, 2)
    assert fixed.same_for_seeds
    assert not drawn.same_for_seeds
    assert not replace(fixed, jitter_s=1.0).same_for_seeds


def test_drawn_arrivals_are_others_than_the_traces() -> None:
    asis, drawn = (
        small(process=process).simulate(Run(0, 0, 1.0, 1, 0)).figures["offered_per_s"]
        for process in ("trace", "gamma")
    )
    assert asis != drawn


def test_more_processes_change_nothing() -> None:
    def figures(jobs: int, heard: list[Run]) -> list[tuple[Run, dict[str, float]]]:
        made = compare(small(), jobs, heard.append)
        return [
            (run, {name: value for name, value in result.figures.items() if name != "decision_us"})
            for run, result in made.items()
        ]

    heard: list[Run] = []
    assert repr(figures(2, heard)) == repr(figures(1, []))
    assert sorted(heard, key=repr) == sorted(small().runs, key=repr)


class Broken(Given):
    """Of which one seed cannot be had."""

    def __call__(self, seed: int) -> Trace:
        if seed == 2:
            raise KeyError("a defect")
        return super().__call__(seed)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_run_that_fails_is_named(jobs: int) -> None:
    comparison = small(sources=[Broken((Row(0.0, 600, 2, (1, 2)),))], variants=[Variant("random")], seeds=2)
    comparison = replace(comparison, warm_up=0.0)
    message = (
        r"random on given x1, 2 workers, seed 2: KeyError: 'a defect' \(at test_simulator_compare.py:\d+\)"
    )
    with pytest.raises(RunFailed, match=message):
        compare(comparison, jobs)


class Deadly(Given):
    """Whose reader is killed, as where memory is short."""

    def __call__(self, seed: int) -> Trace:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.mark.soak
def test_a_process_that_is_killed_is_told_and_nobody_waits_for_it() -> None:
    comparison = small(sources=[Deadly((Row(0.0, 600, 2, (1, 2)),))])
    with pytest.raises(
        RunFailed, match="a process ended before its run; perhaps there was not enough memory"
    ):
        compare(comparison, jobs=2)


def test_a_warm_up_may_last_until_the_caches_are_full() -> None:
    def one(keys: tuple[int, ...]) -> Arrival:
        (made,) = arrivals(Trace("t", 512, (Row(0.0, 512 * len(keys), 1, keys),)), 512)
        return made

    requests = [one((1, 2)), one((1, 2)), one((3,)), one((4, 5))]
    assert [requests_to_fill(requests, blocks) for blocks in (0, 1, 2, 3)] == [0, 1, 1, 3]
    with pytest.raises(
        ValueError, match="--warm-up fill: the requests have 5 different blocks, fewer than the 6"
    ):
        requests_to_fill(requests, 6)
    fleet = FleetOf(2, Setting(workers=2, kv_tokens=200 * BLOCK_TOKENS))
    filled = small(fleets=[fleet], warm_up=None).simulate(Run(0, 0, 1.0, 1, 0)).figures["offered"]
    assert 0 < filled < 40
    assert filled != 36


def test_a_router_may_be_told_how_long_answers_will_be() -> None:
    lengths = KnownLengths()
    lengths.observe(None, "", 7)
    assert (lengths.expect(None, "", 1234), lengths.expect(None) < 300) == (1234.0, True)
    requests = arrivals(generate("chat", 5), BLOCK_TOKENS)
    assert [one.view.max_output_tokens for one in tell_lengths(requests)] == [
        one.output_tokens for one in requests
    ]


def test_who_knows_that_two_long_answers_do_not_fit_leaves_the_cache_alone() -> None:
    """A prompt twice, of 2048 tokens, with answers of 3000: beside each other they take 10,096 of 9216. By
    the usual 300 the second goes to the cache, which saves all of its prefill but the last token's.
    """
    rows = tuple(Row(at_s, 2048, 3000, (1, 2, 3, 4)) for at_s in (0.0, 0.5))
    comparison = small(
        sources=[Given(rows)],
        variants=[Variant("ttft", {"hold": "false"})],
        fleets=[FleetOf(2, Setting(workers=2, kv_tokens=9216))],
        warm_up=0.0,
    )
    learned, known = (
        replace(comparison, outputs=outputs).simulate(Run(0, 0, 1.0, 1, 0)).figures["request_hit_rate"]
        for outputs in ("learned", "known")
    )
    assert (learned, known) == (0.5, 0.0)


def test_one_decision_of_sixteen_is_timed() -> None:
    setting = Setting(workers=2, block_tokens=BLOCK_TOKENS)
    simulation = Simulation(setting, make_policy("round_robin", {}))
    meter = DecisionMeter(simulation.router)
    assert meter.mean_us is None
    simulation.measure(arrivals(generate("chat", 40), BLOCK_TOKENS))
    assert meter.timed == 2
    assert facts(simulation, meter).decision_us == meter.mean_us
    assert meter.mean_us is not None
    assert meter.mean_us > 0


def test_seconds_saved_are_those_of_chunks_that_need_not_run() -> None:
    times: StepTimes = PRESETS["qwen3-32b-h200-tp2"]
    one = times.step_s(8192, 8192 * 4096, 0, 0.0)
    rest = times.step_s(1808, 1808 * (8192 + 904), 0, 0.0)
    assert prefill_s(times, 10_000, 0, 8192) == pytest.approx(one + rest)
    assert prefill_s(times, 10_000, 8192, 8192) == pytest.approx(rest)
    simulation = Simulation(Setting(workers=1), make_policy("round_robin", {}))
    saved_s = facts(simulation, DecisionMeter(simulation.router)).saved_s
    assert saved_s is not None
    assert saved_s(10_000, 8192) == pytest.approx(1.1 * one)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": 0}, "--seeds must be from 1 to 1000, got 0"),
        ({"speeds": (0.0,)}, "--speed must be above 0 and at most 1000, got 0"),
        ({"speeds": (2.0, 2.0)}, "--speed: .* is given more than once"),
        ({"speeds": ()}, "a trace, a policy, a fleet and a speed at least are needed"),
        ({"warm_up": 1.0}, "--warm-up must be from 0 to below 1, or fill, got 1.0"),
        ({"outputs": "guessed"}, "--outputs: unknown 'guessed'; known: learned, known"),
        ({"process": "flood"}, "--arrivals: unknown 'flood'; known: trace, poisson, gamma"),
        ({"seeds": 1000, "speeds": (1.0, 2.0, 3.0, 4.0)}, "12000 runs; at most 10000 are made"),
        ({"fleets": [FleetOf(2, Setting(), 48)]}, "--block-size: chat: block_tokens must divide .* got 48"),
    ],
)
def test_comparisons_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**fields)
