"""Workers that die and come back, events that are lost, and engines that are not alike."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kvroute.conductor.index import Holder
from kvroute.loadtests.simulator.requests import Record
from kvroute.loadtests.simulator.setting import Failure, Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.traces.arrivals import Arrival, arrivals
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.workloads import generate
from kvroute.policies.base import Policy
from kvroute.policies.costs.links import Link
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.registry import make_policy
from kvroute.types import Decision, Fleet, RequestView

SPEED = PRESETS["qwen3-32b-h200-tp2"]


def requests(*rows: tuple[float, int, int, tuple[int, ...]]) -> list[Arrival]:
    return arrivals(Trace("test", 512, tuple(Row(*row) for row in rows)), 512)


def fleet_of(workers: int, *failures: Failure, **fields: Any) -> Setting:
    return Setting(workers=workers, scale=1.0, kv_tokens=100_000, failures=failures, **fields)


def run(setting: Setting, policy: Policy, work: list[Arrival]) -> tuple[Simulation, list[Record]]:
    simulation = Simulation(setting, policy)
    records = simulation.run(work)
    simulation.check_integrity()
    return simulation, records


class First:
    """Takes the first it is shown."""

    needs_prefix: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        pass

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.matched: list[int] = []

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        self.seen.append([worker.id for worker in fleet.workers])
        self.matched.append(fleet.matches[0].tokens)
        return Decision.whole(fleet.workers[0], "first")


def prefill_s(tokens: int, cached: int = 0) -> float:
    return SPEED.prefill_s(tokens, cached)


def test_what_has_no_token_yet_is_retried_and_what_streams_is_lost() -> None:
    """At 1.0 the first decodes, the second is in its prefill, the third has not begun."""
    work = requests((0.0, 1000, 200, (1, 2)), (0.9, 20_000, 2, tuple(range(10, 50))), (0.95, 600, 2, (5, 6)))
    simulation, (one, two, three) = run(fleet_of(2, Failure(0, 1.0)), First(), work)
    assert one.first_s == pytest.approx(prefill_s(1000))
    assert (one.failure, one.end_s, one.retries) == ("worker_lost", None, 0)
    assert (two.failure, two.worker, two.retries, two.placed_s) == (None, 1, 1, 1.0)
    assert (three.worker, three.retries, three.placed_s) == (1, 1, 1.0)
    # Both in the steps of 8192 tokens that begin at 1.0; the long one is in front.
    chunks = [(8192, 0), (8192, 8192)]
    expected_s = 1.0 + sum(prefill_s(*chunk) for chunk in chunks)
    last = 7.90 + 0.04536 * (3616 + 600) + 1.72e-6 * (3616 * (16_384 + 1808) + 600 * 300)
    assert two.first_s == three.first_s == pytest.approx(expected_s + last / 1e3, abs=1e-9)
    assert two.start_s == 1.0
    assert simulation.retries_denied == 0
    measured = one.measured(simulation.names)
    assert (measured.failure, measured.rejected, measured.ttft_s) == ("worker_lost", False, float("inf"))


def test_until_it_is_noticed_requests_still_go_to_a_dead_worker_and_fail_fast() -> None:
    """Dead from 1.0 to 10.0; known to be so from 2.0 to 11.0."""
    policy = First()
    work = requests(*[(at_s, 600, 2, (1, 2)) for at_s in (0.0, 1.5, 2.5, 10.5, 11.5)])
    _, records = run(fleet_of(2, Failure(0, 1.0, 10.0)), policy, work)
    assert [(record.worker, record.retries) for record in records] == [(0, 0), (1, 1), (1, 0), (1, 0), (0, 0)]
    assert policy.seen == [["w0", "w1"], ["w0", "w1"], ["w1"], ["w1"], ["w1"], ["w0", "w1"]]
    # Its cache came back empty, and the index knows; w1 has had the block since 1.5.
    assert [record.gpu_tokens for record in records] == [0, 0, 512, 512, 0]
    assert policy.matched == [0, 512, 0, 512, 512, 0]


def test_a_worker_that_is_back_before_it_is_missed_is_empty_all_the_same() -> None:
    policy = First()
    work = requests(
        (0.0, 600, 2, (1, 2)), (1.4, 600, 2, (1, 2)), (1.6, 600, 2, (1, 2)), (5.0, 600, 2, (1, 2))
    )
    _, records = run(fleet_of(2, Failure(0, 1.0, 1.5)), policy, work)
    assert [(record.worker, record.gpu_tokens) for record in records] == [(0, 0), (1, 0), (0, 0), (0, 512)]
    assert policy.matched == [0, 512, 0, 0, 512]


def test_the_index_forgets_a_worker_that_is_gone() -> None:
    simulation, _ = run(fleet_of(2, Failure(0, 1.0)), First(), requests((0.0, 600, 2, (1, 2))))
    assert simulation.index.entries == 0


def test_events_sent_before_it_died_are_not_heard_after() -> None:
    setting = fleet_of(1, Failure(0, 1.0, 1.5), event_lag_s=2.0)
    simulation, _ = run(setting, First(), requests((0.5, 600, 2, (1, 2))))
    assert simulation.index.entries == 0


@pytest.mark.parametrize(("dead", "worker", "retries"), [(1, 1, 1), (2, 2, 2), (3, 2, 2)])
def test_there_are_two_retries_at_most(dead: int, worker: int, retries: int) -> None:
    failures = [Failure(number, 0.5) for number in range(dead)]
    simulation, (record,) = run(fleet_of(4, *failures), First(), requests((1.0, 600, 2, (1, 2))))
    assert (record.worker, record.retries) == (worker, retries)
    assert record.failure == ("worker_lost" if dead == 3 else None)
    assert simulation.retries_denied == (dead == 3)


def test_retries_are_a_share_of_the_requests() -> None:
    """Thirty wait where it dies: twenty are saved up, and each request adds nothing to what is full."""
    work = requests(*[(0.001 * i, 8000, 2, tuple(range(100 * i, 100 * i + 15))) for i in range(30)])
    simulation, records = run(fleet_of(2, Failure(0, 0.1)), First(), work)
    assert sum(record.retries for record in records) == 20
    assert simulation.retries_denied == 10
    assert sum(record.failure == "worker_lost" for record in records) == 10


def test_with_nobody_left_requests_fail() -> None:
    simulation, (one, two) = run(
        fleet_of(1, Failure(0, 0.5)), First(), requests((1.0, 600, 2, (1, 2)), (9.0, 600, 2, (1, 2)))
    )
    assert (one.failure, two.failure) == ("no_worker", "no_worker")
    assert (one.retries, two.worker) == (1, -1)
    assert two.measured(simulation.names).worker == ""


LINK = Link(bytes_per_s=1e9, latency_s=0.0)
"""A block takes 134 ms: KV of 1000 tokens travels from 0.054 to 0.323."""


@pytest.mark.parametrize(("dies", "at_s"), [(0, 0.03), (0, 0.2), (2, 0.2), (2, 0.03)])
def test_either_half_of_a_split_request_may_be_lost(dies: int, at_s: float) -> None:
    """In its prefill, or while its KV travels: it is prefilled anew, by others where it was lost."""
    setting = Setting(
        split=(2, 2), scale=1.0, kv_tokens=100_000, handoff=LINK, failures=(Failure(dies, at_s),)
    )
    _, (record,) = run(setting, First(), requests((0.0, 1000, 3, (1, 2))))
    assert (record.failure, record.retries) == (None, 1)
    assert record.prefill == (1 if dies == 0 else 0)
    assert record.worker == 3
    assert record.placed_s is not None
    assert record.start_s == record.placed_s
    # A decode worker that dies is missed when the prefill is over.
    assert record.placed_s == pytest.approx(prefill_s(1000) if (dies, at_s) == (2, 0.03) else at_s)
    fresh = record.prefill == 1 or record.placed_s < prefill_s(1000)
    alone_s = prefill_s(1000) if fresh else prefill_s(488, 512)
    travel_s = 2 * 512 * 262_144 / 1e9
    # What was on its way out keeps the link until it is through.
    sent_s = prefill_s(1000) if record.prefill == 0 and at_s == 0.2 else 0.0
    there_s = max(record.placed_s + alone_s, sent_s + travel_s if sent_s else 0.0) + travel_s
    assert record.first_s == pytest.approx(there_s + SPEED.decode_s(1, 999))


def test_kv_that_waits_for_room_is_lost_with_its_prefill_worker() -> None:
    """The second request's three blocks have no room beside the first's four until that has ended."""
    setting = Setting(split=(2, 1), scale=1.0, kv_tokens=2048, handoff=LINK, failures=(Failure(0, 1.0),))
    _, (one, two) = run(setting, First(), requests((0.0, 1500, 100, (1, 2)), (0.1, 1500, 2, (3, 4))))
    assert one.end_s is not None
    assert (two.prefill, two.retries, two.placed_s, two.failure) == (1, 1, one.end_s, None)


@pytest.mark.parametrize("policy", ["ttft", "round_robin", "dynamo", "preble"])
@pytest.mark.parametrize("apart", [{}, {"split": (2, 2)}, {"joint": True}])
def test_every_request_ends_once_whatever_dies(policy: str, apart: dict[str, Any]) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    failures = []
    for worker in range(4):
        at_s = source.uniform(0, 20)
        failures.append(Failure(worker, at_s, at_s + source.choice([0.2, 3.0])))
        failures.append(Failure(worker, at_s + 10, source.choice([None, at_s + 15])))
    setting = Setting(
        workers=4,
        **apart,
        kv_tokens=60_000,
        block_tokens=64,
        failures=tuple(failures),
        event_lag_s=source.choice([0.0, 0.3]),
        event_loss=source.choice([0.0, 0.1]),
        request_overhead_s=0.01,
    )
    simulation, records = run(
        setting, make_policy(policy, {}), arrivals(generate("mixed", 100, 5.0, seed), 64)
    )
    for record in records:
        assert record.retries <= 2
        assert (record.end_s is None) == (record.failure is not None)
        assert record.rejected is None
    assert simulation.stays_s == pytest.approx(simulation.running_integral_s)
    reasons = {record.failure for record in records} - {None}
    assert reasons <= {"worker_lost", "no_worker", "too_long"}
    assert reasons


# --- lost events -------------------------------------------------------------------------------


def lossy(loss: float, seed: int) -> tuple[int, list[tuple[int, float | None]]]:
    setting = Setting(workers=3, kv_tokens=60_000, block_tokens=64, event_loss=loss)
    simulation = Simulation(setting, make_policy("prefix_affinity", {}), seed)
    records = simulation.run(arrivals(generate("chat", 150, 4.0, 3), 64))
    simulation.check_integrity()
    wrong = 0
    for number, engine in enumerate(simulation.engines):
        slot = simulation.index.slot(Holder(f"w{number}"))
        told = {key for _, _, _, key, _ in simulation.index.blocks.export(slot)}
        wrong += len(told ^ set(engine.scheduler.cache.keys()))
    assert (simulation.fleet.feed.lost_batches > 0) == (loss > 0)
    return wrong, [(record.worker, record.end_s) for record in records]


def test_lost_events_leave_the_index_wrong_by_the_seed_of_the_run() -> None:
    exact, some, again, other, all_of_them = (
        lossy(loss, seed) for loss, seed in ((0.0, 1), (0.2, 1), (0.2, 1), (0.2, 2), (1.0, 1))
    )
    assert exact[0] == 0
    assert 0 < some[0] < all_of_them[0]
    assert some == again
    assert some != other


# --- engines of different speed ----------------------------------------------------------------


def test_a_slower_engine_takes_so_many_times_as_long_and_the_router_knows() -> None:
    setting = Setting(workers=2, worker_scales=(1.0, 2.5), scale=1.0)
    work = requests((0.0, 1000, 2, (1, 2)), (5.0, 1000, 2, (3, 4)))
    simulation, (one, two) = run(setting, make_policy("round_robin", {}), work)
    assert one.first_s == pytest.approx(prefill_s(1000))
    assert two.first_s == pytest.approx(5.0 + 2.5 * prefill_s(1000))
    assert two.predicted_ttft_s == pytest.approx(2.5 * prefill_s(1000))
    assert [pace.prefill_scale for pace in simulation.router.paces] == [1.0, 2.5]


def test_the_slower_ones_get_less_by_price_and_are_found_out_when_they_are_not_known() -> None:
    scales = (1.0, 1.0, 1.0, 3.0)
    for learns in (False, True):
        setting = Setting(workers=4, worker_scales=scales, block_tokens=64, learns=learns)
        simulation = Simulation(setting, make_policy("ttft", {}))
        records = simulation.run(arrivals(generate("mixed", 300, 5.0, 1), 64))
        slow = sum(record.worker == 3 for record in records)
        assert slow < 45, "an even share is 75"
        paces = simulation.router.paces
        assert paces[3].prefill_scale > 2 * paces[0].prefill_scale


def test_engines_of_two_presets() -> None:
    small = PRESETS["llama-3.1-8b-h100-tp1"]
    setting = Setting(workers=2, worker_speeds=(SPEED, small), scale=1.0)
    _, (one, two) = run(
        setting, make_policy("round_robin", {}), requests((0.0, 1000, 2, (1, 2)), (5.0, 1000, 2, (3, 4)))
    )
    assert one.first_s == pytest.approx(prefill_s(1000))
    assert two.first_s == pytest.approx(5.0 + small.prefill_s(1000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": (1, 0)}, r"split must be a prefill and a decode worker at least, got \(1, 0\)"),
        ({"split": (1, 1), "joint": True}, r"joint: none of the workers of a split \(\(1, 1\)\) does both"),
        ({"worker_scales": (1.0,)}, "worker_scales must be one for each of 8 workers, got 1"),
        ({"worker_scales": (1.0,) * 7 + (0.0,)}, "worker_scales must be positive"),
        ({"event_loss": 1.5}, "event_loss must be a share of 0 to 1, got 1.5"),
        ({"detect_s": -1.0}, "detect_s must be 0 or more, got -1.0"),
        ({"failures": (Failure(8, 1.0),)}, "failures: no worker 8 among 8"),
        ({"failures": (Failure(1, 2.0, 1.0),)}, "failures: back_s must be after at_s"),
        (
            {"failures": (Failure(1, 1.0), Failure(1, 9.0))},
            "failures: at_s must come when the worker is there",
        ),
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**fields)


def test_arrivals_out_of_order_are_named() -> None:
    early, late = requests((1.0, 100, 2, (1,)), (2.0, 100, 2, (2,)))
    with pytest.raises(ValueError, match=r"arrivals: number 1 comes at 1\.0 s, after one at 2\.0 s"):
        Simulation(Setting(), make_policy("round_robin", {})).run([late, early])
