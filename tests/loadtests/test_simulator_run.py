"""The event loop over engines, books and index, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import ClassVar

import pytest
from msgspec.structs import replace

from kvroute.conductor.index import Holder
from kvroute.loadtests.results.combine import result
from kvroute.loadtests.results.figures import Facts
from kvroute.loadtests.results.measured import Limits
from kvroute.loadtests.simulator.requests import Attempt
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Record, Simulation
from kvroute.loadtests.traces.arrivals import Arrival, arrivals
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.workloads import generate
from kvroute.policies.base import Policy
from kvroute.policies.costs.lengths import OutputLengths
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.registry import make_policy
from kvroute.types import Decision, Fleet, Hold, Rejection, RequestView

SPEED = PRESETS["qwen3-32b-h200-tp2"]
ONE = Setting(workers=1, scale=1.0, kv_tokens=100_000)


def requests(*rows: tuple[float, int, int, tuple[int, ...]], block_tokens: int = 512) -> list[Arrival]:
    return arrivals(Trace("test", 512, tuple(Row(*row) for row in rows)), block_tokens)


def run(setting: Setting, policy: Policy, work: list[Arrival]) -> tuple[Simulation, list[Record]]:
    simulation = Simulation(setting, policy)
    records = simulation.run(work)
    simulation.check_integrity()
    return simulation, records


def figures(
    simulation: Simulation,
    records: Sequence[Record],
    limits: Limits | None = None,
    warm_up: int = 0,
) -> Mapping[str, float]:
    overhead_s = simulation.setting.token_overhead_s
    measured = [record.measured(simulation.names, overhead_s) for record in records]
    return result(measured, Facts(), limits or Limits(), warm_up).figures


class Scripted:
    """Answers by the number of the request and of the question about it."""

    needs_prefix: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        pass

    def __init__(self, *answers: int | str) -> None:
        self.answers = list(answers)
        self.seen: list[Fleet] = []
        self.prompts: list[int] = []
        self.used_tokens: list[float] = []

    def decide(self, request: RequestView, fleet: Fleet) -> Decision | Hold | Rejection:
        self.seen.append(fleet)
        self.prompts.append(request.prompt_tokens)
        self.used_tokens.append(fleet.loads[0].kv_used_tokens)
        answer = self.answers.pop(0) if self.answers else 0
        if answer == "no":
            return Rejection("full")
        if answer == "hold":
            return Hold(fleet.workers[0], 0.1)
        assert isinstance(answer, int)
        return Decision.whole(fleet.workers[answer], "scripted")


class ShortFirst(Scripted):
    """Has those that come together decided on together."""

    def order(self, request: RequestView, fleet: Fleet) -> tuple[int, ...]:
        return (request.prompt_tokens,)


def test_two_requests_worked_by_hand() -> None:
    """1000 tokens alone; 200 ms later, while the first decodes, 1100 more of which a block is cached."""
    _, (first, second) = run(ONE, Scripted(), requests((0.0, 1000, 4, (1, 2)), (0.07, 1100, 2, (1, 3, 4))))
    prefill_ms = 7.90 + 0.04536 * 1000 + 1.72e-6 * 1000 * 500  # 54.12
    decode_ms = [10.80 + 0.0233 + 3.01e-5 * context for context in (1000, 1001, 1002)]
    # It comes in the second decode step (64.97 to 75.83) and runs with the third and last.
    both_ms = 7.90 + 0.04536 * (588 + 1) + 1.72e-6 * 588 * (512 + 294) + 3.01e-5 * 1002
    begins_ms = prefill_ms + decode_ms[0] + decode_ms[1]
    last_ms = 10.80 + 0.0233 + 3.01e-5 * 1100
    assert first.first_s == pytest.approx(prefill_ms / 1e3, abs=1e-7)
    assert first.end_s == pytest.approx((begins_ms + both_ms) / 1e3, abs=1e-7)
    assert second.first_s == first.end_s
    assert second.end_s == pytest.approx((begins_ms + both_ms + last_ms) / 1e3, abs=1e-7)
    assert (first.cached_tokens, second.cached_tokens) == (0, 512)
    assert (first.longest_gap_s, second.longest_gap_s) == pytest.approx((both_ms / 1e3, last_ms / 1e3))
    assert (first.start_s, second.start_s) == pytest.approx((0.0, begins_ms / 1e3))


def test_what_is_measured_is_kept_and_nothing_else() -> None:
    """Of requests that come one by one, as many are made as are inside."""
    work = requests(*[(float(i), 1000, 3, (i,)) for i in range(20)])
    made: list[int] = []
    setting = Setting(workers=2, kv_tokens=100_000, token_overhead_s=0.001)
    simulation = Simulation(setting, make_policy("round_robin", {}))

    def coming() -> Iterator[Arrival]:
        for number, arrival in enumerate(work):
            assert simulation.now_s == max(number - 1, 0)
            made.append(number)
            yield arrival

    measured = simulation.measure(coming())
    assert len(made) == 20
    _, records = run(setting, make_policy("round_robin", {}), work)
    assert measured == [record.measured(simulation.names, 0.001) for record in records]
    one, record = measured[3], records[3]
    assert record.end_s is not None
    assert record.first_s is not None
    assert (one.arrival_s, one.prompt_tokens, one.output_tokens) == (3.0, 1000, 3)
    assert (one.worker, one.prefill_worker, one.retries) == ("w1", "w1", 0)
    assert (one.sent_s, one.start_s, one.first_s) == (3.0, 3.0, record.first_s)
    assert one.end_s == record.end_s + 2 * 0.001
    assert one.longest_gap_s == record.longest_gap_s + 0.001
    assert one.predicted_ttft_s == pytest.approx(record.first_s - 3.0)


def test_a_request_that_never_ends_is_no_figure_and_no_endless_run() -> None:
    """An engine that forgets what it is given, and metrics that are read while anything is due."""
    simulation = Simulation(Setting(workers=1, metrics_s=2.0), make_policy("round_robin", {}))
    submit = simulation.fleet.submit

    def lose_the_second(attempt: Attempt) -> None:
        if attempt.record.number != 1:
            submit(attempt)

    simulation.fleet.submit = lose_the_second  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="1 of 3 requests never ended"):
        simulation.measure(requests(*[(float(i), 1000, 3, (i,)) for i in range(3)]))


@pytest.mark.parametrize("metrics_s", [0.5, None])
def test_the_router_reads_what_engines_show_in_use(metrics_s: float | None) -> None:
    """Four requests decode over the same 20,480 tokens, which lie there once: 40 of 195 blocks, and one for
    each answer, of which half is expected to be still to come.
    """
    blocks = tuple(range(40))
    work = requests(*[(float(i), 20_480, 400, blocks) for i in range(4)], (4.2, 512, 2, (99,)))
    setting = Setting(workers=1, kv_tokens=100_000, metrics_s=metrics_s)
    policy = Scripted()
    simulation, _ = run(setting, policy, work)
    (load,) = simulation.router.loads
    assert (load.kv_usage_ratio is not None) == (metrics_s is not None)
    in_books, shown = 4 * (20_480 + 300), 44 / 195 * 100_000 + 4 * 150
    assert policy.used_tokens[4] == pytest.approx(in_books if metrics_s is None else shown)


def test_who_comes_at_the_same_moment_runs_in_the_same_step() -> None:
    _, (first, second) = run(ONE, Scripted(), requests((1.0, 600, 1, (1, 2)), (1.0, 400, 1, (3,))))
    attention = 600 * 300 + 400 * 200
    expected_s = 1.0 + (7.90 + 0.04536 * 1000 + 1.72e-6 * attention) / 1e3
    assert first.first_s == second.first_s == pytest.approx(expected_s, abs=1e-9)


def test_overheads_come_before_the_engine_and_with_every_token() -> None:
    work = requests((0.0, 1000, 3, (1, 2)))
    _, (plain,) = run(ONE, Scripted(), work)
    slow = Setting(workers=1, scale=1.0, kv_tokens=100_000, request_overhead_s=0.0156, token_overhead_s=46e-6)
    simulation, (record,) = run(slow, Scripted(), work)
    assert plain.first_s is not None
    assert plain.end_s is not None
    assert record.first_s == pytest.approx(plain.first_s + 0.0156)
    made = figures(simulation, [record])
    assert made["tpot_ms.mean"] == pytest.approx((plain.end_s - plain.first_s) / 2 * 1e3 + 46e-3)
    assert made["e2e_ms.mean"] == pytest.approx(1e3 * (plain.end_s + 0.0156 + 2 * 46e-6))


@pytest.mark.parametrize("policy", ["round_robin", "prefix_affinity", "ttft"])
def test_everything_ends_the_same_every_time_and_the_books_balance(policy: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    setting = Setting(workers=3, kv_tokens=60_000, block_tokens=64)
    trace = generate("mixed", 150, 4.0, seed)
    results = []
    for _ in range(2):
        work = arrivals(trace, 64)
        simulation, records = run(setting, make_policy(policy, {}), work)
        assert all((record.end_s is None) == (record.failure == "too_long") for record in records)
        assert all(
            record.arrival.arrival_s <= record.placed_s < record.first_s <= record.end_s
            for record in records
            if record.placed_s is not None and record.first_s is not None and record.end_s is not None
        )
        for number, engine in enumerate(simulation.engines):
            slot = simulation.index.slot(Holder(f"w{number}"))
            told = {key for _, _, _, key, _ in simulation.index.blocks.export(slot)}
            assert told == set(engine.scheduler.cache.keys())
        assert simulation.stays_s == pytest.approx(simulation.running_integral_s)
        results.append(records)
    assert results[0] == results[1]


def test_what_is_refused_counts_as_bad() -> None:
    work = requests(*[(float(i), 100, 5, (i,)) for i in range(4)])
    simulation, records = run(ONE, Scripted(0, "no", 0, "no"), work)
    made = figures(simulation, records)
    assert [record.rejected for record in records] == [None, "full", None, "full"]
    assert (made["offered"], made["rejected"], made["goodput"]) == (4, 0.5, 0.5)
    assert made["ttft_ms.p99"] == float("inf") > made["ttft_ms.mean"]


def test_what_can_never_fit_is_refused_by_the_engine() -> None:
    blocks = tuple(range(200))
    simulation, (record,) = run(ONE, Scripted(), requests((0.0, 200 * 512, 5, blocks)))
    assert (record.failure, record.rejected) == ("too_long", None)
    made = figures(simulation, [record])
    assert (made["goodput"], made["failed"], made["rejected"]) == (0, 1, 0)


def test_the_warm_up_is_not_counted() -> None:
    work = requests(*[(float(i), 100, 5, (i,)) for i in range(10)])
    simulation, records = run(ONE, Scripted("no"), work)
    assert figures(simulation, records, warm_up=1)["goodput"] == 1.0
    assert figures(simulation, records)["goodput"] == 0.9


def test_limits_are_kept_or_not() -> None:
    simulation, records = run(ONE, Scripted(), requests((0.0, 1000, 3, (1, 2)), (9.0, 1000, 1, (3, 4))))
    for limits, good in (
        (Limits(), 1.0),
        (Limits(ttft_s=0.05), 0.0),
        (Limits(tpot_s=0.01), 0.5),  # one token has no TPOT
    ):
        assert figures(simulation, records, limits)["goodput"] == good


def test_the_index_hears_of_blocks_when_their_step_is_over_and_after_the_lag() -> None:
    work = requests((0.0, 1100, 1, (1, 2, 3)), (0.05, 1100, 1, (1, 2, 3)), (1.0, 1100, 1, (1, 2, 3)))
    for lag_s, predicts, expected in (
        (0.0, False, [0, 0, 1024]),
        (0.9, False, [0, 0, 1024]),
        (0.95, False, [0, 0, 0]),
        (0.95, True, [0, 1024, 1024]),
    ):
        policy = Scripted()
        setting = Setting(workers=1, scale=1.0, kv_tokens=100_000, event_lag_s=lag_s, predicts=predicts)
        run(setting, policy, work)
        assert [fleet.matches[0].tokens for fleet in policy.seen] == expected


def test_the_router_sees_its_books_its_own_output_lengths_and_its_paces() -> None:
    policy = Scripted()
    setting = Setting(workers=2, scale=1.1, kv_tokens=100_000, prefill_error=0.7)
    simulation, _ = run(setting, policy, requests((0.0, 1000, 7, (1, 2)), (5.0, 1000, 1, (3, 4))))
    before, after = policy.seen
    lengths = OutputLengths()
    lengths.observe(None, "", 7)
    assert before.output_tokens == 300
    assert after.output_tokens == lengths.expect(None) < 300
    pace = after.paces[0]
    assert pace.prefill_s(5000, 100) == pytest.approx(1.1 * 0.7 * SPEED.prefill_s(5000, 100))
    assert pace.decode_s(8, 9000) == pytest.approx(1.1 * SPEED.decode_s(8, 9000))
    assert pace.kv_tokens == 100_000
    load = simulation.router.loads[0]
    assert load.prefilled_s > 0
    assert (load.requests, load.context_tokens, load.pending_prefill_s) == (0, 0, 0)


@pytest.mark.parametrize("error", [1 / 3, 3.0])
def test_answers_correct_a_wrong_preset(error: float) -> None:
    """Within the first 200 answers, to within a tenth."""
    setting = Setting(workers=4, block_tokens=64, prefill_error=error, decode_error=error, learns=True)
    simulation = Simulation(setting, make_policy("ttft", {}))
    simulation.run(arrivals(generate("mixed", 200, 4.0, 1), 64))
    pace = simulation.router.paces[0]
    assert pace.prefill_s(6000) + pace.overhead_s == pytest.approx(1.1 * SPEED.prefill_s(6000), rel=0.1)
    assert pace.decode_s(4, 20_000) == pytest.approx(1.1 * SPEED.decode_s(4, 20_000), rel=0.1)


def test_a_held_request_is_asked_about_when_something_frees() -> None:
    policy = Scripted(0, "hold", "hold", "hold", 1)
    _, (first, second) = run(
        Setting(workers=2, sweep_s=None),
        policy,
        requests((0.0, 5000, 40, tuple(range(10))), (0.01, 100, 2, (99,))),
    )
    # Held on arrival, at once again, at the first byte; placed at the end of the first.
    assert second.placed_s == first.end_s
    assert second.worker == 1
    assert not policy.answers
    assert second.placed_s is not None
    assert [fleet.held_s for fleet in policy.seen[:2]] == [0.0, 0.0]
    assert policy.seen[-1].held_s == pytest.approx(second.placed_s - 0.01)


def test_held_requests_are_swept() -> None:
    policy = Scripted("hold", "hold", "hold", "hold", 0)
    _, (record,) = run(Setting(workers=1, sweep_s=0.05), policy, requests((1.0, 100, 2, (1,))))
    assert record.placed_s == pytest.approx(1.15)


def test_generated_blocks_take_room_only_where_they_stay() -> None:
    for keeps, resident in ((False, 1), (True, 3)):
        setting = Setting(workers=1, keeps_output=keeps)
        simulation, _ = run(setting, Scripted(), requests((0.0, 600, 1000, (1, 2))))
        assert simulation.engines[0].scheduler.cache.resident_blocks == resident


def test_a_request_is_held_no_longer_than_the_limit() -> None:
    policy = Scripted("hold", "hold")
    setting = Setting(workers=1, hold_limit_s=2.0, sweep_s=None)
    simulation, (record,) = run(setting, policy, requests((1.0, 100, 2, (1,))))
    assert record.placed_s == 3.0
    assert not policy.seen[-1].may_hold
    assert figures(simulation, [record])["sent_after_ms.mean"] == pytest.approx(2000)


TOGETHER = requests(
    (1.0, 600, 2, (1, 2)), (1.0, 100, 2, (3,)), (1.0, 400, 2, (4,)), (1.0, 100, 9, (5,)), (2.0, 50, 2, (6,))
)


@pytest.mark.parametrize(
    ("policy", "order"),
    [(ShortFirst(), [100, 100, 400, 600, 50]), (Scripted(), [600, 100, 400, 100, 50])],
)
def test_who_comes_at_the_same_moment_is_decided_on_short_first_where_the_policy_wants_it(
    policy: Scripted, order: list[int]
) -> None:
    _, records = run(ONE, policy, TOGETHER)
    assert policy.prompts == order
    assert [record.number for record in records] == [0, 1, 2, 3, 4], "they keep the order of arrival"
    assert [record.arrival for record in records] == TOGETHER
    assert [record.placed_s for record in records] == [1.0] * 4 + [2.0]


def test_what_is_measured_of_those_that_come_together_is_in_order_of_arrival() -> None:
    simulation = Simulation(ONE, ShortFirst())
    measured = simulation.measure(TOGETHER)
    assert [(one.prompt_tokens, one.output_tokens) for one in measured] == [
        (600, 2),
        (100, 2),
        (400, 2),
        (100, 9),
        (50, 2),
    ]


def test_the_most_urgent_of_those_that_come_together_goes_before_shorter_ones() -> None:
    urgent, *others = TOGETHER
    urgent = replace(urgent, view=replace(urgent.view, priority=-1))
    policy = ShortFirst()
    run(ONE, policy, [urgent, *others])
    assert policy.prompts == [600, 100, 100, 400, 50]


def test_those_that_come_together_find_the_worker_free_in_that_order() -> None:
    """The shortest is sent at once and the other waits for it, although it came last."""
    work = requests((1.0, 9000, 2, tuple(range(18))), (1.0, 5000, 2, tuple(range(20, 30))))
    _, (long, short) = run(ONE, make_policy("ttft", {}), work)
    assert short.placed_s == 1.0
    assert long.placed_s == short.first_s


def test_who_has_much_in_a_cache_goes_before_shorter_ones_that_would_keep_it_waiting() -> None:
    cached = tuple(range(20))
    work = requests((0.0, 10_240, 2, cached), (9.0, 5000, 2, tuple(range(50, 60))), (9.0, 10_240, 2, cached))
    _, (_, other, again) = run(ONE, make_policy("ttft", {}), work)
    assert again.cached_tokens == 19 * 512
    assert (again.placed_s, other.placed_s) == (9.0, 9.0)


@pytest.mark.parametrize("policy", [ShortFirst(), Scripted()])
def test_arrivals_out_of_order_are_named(policy: Scripted) -> None:
    late = requests((0.5, 100, 2, (9,)))
    message = "arrivals: number 4 comes at 0.5 s, after one at 1.0 s; an order of time is expected"
    with pytest.raises(ValueError, match=message):
        Simulation(ONE, policy).run([*TOGETHER[:4], *late])


def test_nothing_is_held_where_nothing_may_be() -> None:
    policy = Scripted()
    run(Setting(workers=1, hold_limit=0), policy, requests((1.0, 100, 2, (1,))))
    assert not policy.seen[0].may_hold


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"scale": 0.0}, "scale must be positive, got 0.0"),
        ({"scale": 1e300}, "scale and worker_scales must be 1000 at most, got 1e"),
        ({"event_lag_s": -1.0}, r"event_lag_s must be 0 or more, got -1.0"),
        ({"kv_tokens": 100}, "kv_tokens must hold a block of 512 tokens at least, got 100"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**fields)  # type: ignore[arg-type]


def test_arrivals_are_late_within_the_jitter_and_faster_by_the_speedup() -> None:
    trace = Trace("test", 512, tuple(Row(3.0 * i, 600, 0, (i, i + 1)) for i in range(50)))
    made = arrivals(trace, 512, speedup=2.0, jitter_s=3.0, seed=4)
    assert all(1.5 * i <= one.arrival_s < 1.5 * (i + 1) for i, one in enumerate(made))
    assert made == arrivals(trace, 512, speedup=2.0, jitter_s=3.0, seed=4)
    assert made != arrivals(trace, 512, speedup=2.0, jitter_s=3.0, seed=5)
    assert (made[3].keys.keys, made[3].output_tokens) == ((3,), 1)


@pytest.mark.parametrize(("process", "variation"), [("poisson", 1.0), ("gamma", 2.0)])
def test_drawn_arrivals_keep_the_rate_and_the_order(process: str, variation: float) -> None:
    trace = Trace("test", 512, tuple(Row(3.0 * (i // 4), 600, 1, (i, -1)) for i in range(4000)))
    made = arrivals(trace, 512, speedup=2.0, seed=1, process=process)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(made)]
    assert fmean(gaps) == pytest.approx(0.375, rel=0.1)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.1)
    assert [arrival.keys.keys for arrival in made] == [(i,) for i in range(4000)]
    with pytest.raises(ValueError, match="unknown arrivals 'flood'; known: trace, poisson, gamma"):
        arrivals(trace, 512, process="flood")


def test_smaller_blocks_than_the_traces_are_its_parts() -> None:
    (one,) = arrivals(Trace("test", 512, (Row(0.0, 700, 1, (5, 9)),)), 128)
    assert one.keys.keys == (20, 21, 22, 23, 36)
    with pytest.raises(
        ValueError, match="block_tokens must divide the trace's blocks of 512 tokens, got 100"
    ):
        arrivals(Trace("test", 512, (Row(0.0, 700, 1, (5, 9)),)), 100)
