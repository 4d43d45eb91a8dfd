"""Prefill and decode on different workers: what travels, when, and what it waits for."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from kvroute.conductor.index import Holder
from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.sequences import Phase, Sequence
from kvroute.loadtests.simulator.loop import EventLoop
from kvroute.loadtests.simulator.requests import Record
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.simulator.sources import fleets
from kvroute.loadtests.traces.arrivals import Arrival, arrivals
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.workloads import generate
from kvroute.policies.base import Policy
from kvroute.policies.costs.links import Link, PdLinks
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.registry import make_policy, policy_names
from kvroute.types import Candidate, Decision, Fleet, RequestView, Role

SPEED = PRESETS["qwen3-32b-h200-tp2"]
BLOCK_BYTES = 512 * 262_144
LINK = Link(bytes_per_s=1e10, latency_s=0.002)
BLOCK_S = BLOCK_BYTES / 1e10
"""13.4 ms"""
PAIR = Setting(split=(1, 1), scale=1.0, kv_tokens=100_000, handoff=LINK)


def requests(*rows: tuple[float, int, int, tuple[int, ...]]) -> list[Arrival]:
    return arrivals(Trace("test", 512, tuple(Row(*row) for row in rows)), 512)


def run(setting: Setting, policy: Policy, work: list[Arrival]) -> tuple[Simulation, list[Record]]:
    simulation = Simulation(setting, policy)
    records = simulation.run(work)
    simulation.check_integrity()
    return simulation, records


class Seen:
    """Takes the first that may prefill, and notes what it was shown."""

    needs_prefix: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        pass

    def __init__(self) -> None:
        self.fleets: list[Fleet] = []

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        self.fleets.append(fleet)
        return Decision.whole(fleet.workers[0], "first")


def prefill_ms(tokens: int, cached: int = 0) -> float:
    return 7.90 + 0.04536 * tokens + 1.72e-6 * tokens * (cached + tokens / 2)


def decode_ms(*contexts: int) -> float:
    return 10.80 + 0.0233 * len(contexts) + 3.01e-5 * sum(contexts)


def test_one_request_worked_by_hand() -> None:
    """1000 tokens are two blocks; the decode worker computes the last token again, over 999."""
    simulation, (one,) = run(PAIR, Seen(), requests((1.0, 1000, 3, (1, 2))))
    there_s = 1.0 + prefill_ms(1000) / 1e3 + 2 * BLOCK_S + 0.002
    first_s = there_s + decode_ms(999) / 1e3
    end_s = first_s + (decode_ms(1000) + decode_ms(1001)) / 1e3
    assert (one.start_s, one.first_s, one.end_s) == pytest.approx((1.0, first_s, end_s), abs=1e-9)
    assert one.longest_gap_s == pytest.approx(decode_ms(1001) / 1e3)
    assert (one.prefill, one.worker) == (0, 1)
    measured = one.measured(simulation.names)
    assert (measured.prefill_worker, measured.worker) == ("w0", "w1")
    assert simulation.fleet.handoffs.moved_bytes == [0, 2 * BLOCK_BYTES]


def test_what_the_decode_worker_holds_does_not_travel() -> None:
    """1100 tokens of which it has the first block: two of three travel, the last, partial one among them."""
    simulation, (_, two) = run(PAIR, Seen(), requests((0.0, 600, 2, (1, 2)), (5.0, 1100, 1, (1, 3, 4))))
    assert simulation.fleet.handoffs.moved_bytes == [0, (2 + 2) * BLOCK_BYTES]
    there_s = 5.0 + prefill_ms(588, 512) / 1e3 + 2 * BLOCK_S + 0.002
    assert two.first_s == pytest.approx(there_s + decode_ms(1099) / 1e3, abs=1e-9)
    assert two.gpu_tokens == 512


def test_transfers_queue_on_the_way_out_and_on_the_way_in() -> None:
    """Two prompts of one step leave together; the second's KV comes after the first's."""
    work = requests((0.0, 512, 1, (1,)), (0.0, 512, 1, (2,)))
    both_ms = 7.90 + 0.04536 * 1024 + 2 * 1.72e-6 * 512 * 256
    _, out = run(PAIR, Seen(), work)
    there_s = both_ms / 1e3 + BLOCK_S + 0.002
    step_s = decode_ms(511) / 1e3
    assert out[0].first_s == pytest.approx(there_s + step_s)
    # The second comes while the first's only step runs: 13.4 ms later, a step being 10.8.
    assert out[1].first_s == pytest.approx(there_s + BLOCK_S + step_s)
    one_by_two = Setting(split=(1, 2), scale=1.0, kv_tokens=100_000, handoff=LINK)
    _, apart = run(one_by_two, Seen(), work)
    assert [record.worker for record in apart] == [1, 2]
    assert [record.first_s for record in apart] == [record.first_s for record in out]
    two_by_one = Setting(split=(2, 1), scale=1.0, kv_tokens=100_000, handoff=LINK)
    _, into = run(two_by_one, make_policy("round_robin", {}), work)
    alone_s = prefill_ms(512) / 1e3 + BLOCK_S + 0.002
    assert into[0].first_s == pytest.approx(alone_s + step_s)
    assert into[1].first_s == pytest.approx(alone_s + BLOCK_S + step_s)


def test_kv_does_not_travel_before_there_is_room() -> None:
    """Four blocks: the first request takes three and a fourth, the second's three come when it has ended."""
    small = Setting(split=(1, 1), scale=1.0, kv_tokens=2048, handoff=LINK)
    _, (one, two) = run(small, Seen(), requests((0.0, 1500, 100, (1, 2)), (0.1, 1500, 2, (3, 4))))
    assert one.end_s is not None
    assert two.first_s == pytest.approx(one.end_s + 3 * BLOCK_S + 0.002 + decode_ms(1499) / 1e3, abs=1e-9)


def test_overhead_comes_before_each_engine() -> None:
    work = requests((0.0, 1000, 3, (1, 2)))
    slow = Setting(split=(1, 1), scale=1.0, kv_tokens=100_000, handoff=LINK, request_overhead_s=0.015)
    (plain,), (late,) = run(PAIR, Seen(), work)[1], run(slow, Seen(), work)[1]
    assert plain.first_s is not None
    assert late.first_s == pytest.approx(plain.first_s + 2 * 0.015)


def test_what_is_preempted_is_computed_where_it_decodes() -> None:
    """Two of 1000 tokens fit into five blocks until they have grown: the later one loses its KV."""
    tight = Setting(split=(1, 1), scale=1.0, kv_tokens=5 * 512, handoff=LINK)
    work = requests((0.0, 1000, 400, (1, 2)), (0.0, 1000, 400, (3, 4)))
    simulation, (one, two) = run(tight, Seen(), work)
    prefill, decode = (engine.scheduler.totals for engine in simulation.engines)
    assert (prefill.preemptions, decode.preemptions) == (0, 1)
    assert prefill.prefill_tokens == 2000
    assert decode.prefill_tokens > 0
    assert one.end_s is not None
    assert two.end_s is not None
    # Its longest gap is from its last token to the first after the other one has ended.
    assert one.longest_gap_s < 0.02
    assert two.longest_gap_s > one.end_s - 2.0
    assert simulation.fleet.handoffs.moved_bytes == [0, 4 * BLOCK_BYTES]


def test_a_policy_that_chooses_no_pairs_is_shown_the_prefill_workers() -> None:
    policy = Seen()
    setting = Setting(split=(2, 3), scale=1.0, kv_tokens=100_000, handoff=LINK)
    work = requests(*[(0.001 * i, 1000, 400, (2 * i, 2 * i + 1)) for i in range(6)])
    _, records = run(setting, policy, work)
    for fleet in policy.fleets:
        assert [worker.role for worker in fleet.workers] == [Role.PREFILL] * 2
        assert fleet.pd_links is None
        assert len(fleet.matches) == len(fleet.loads) == len(fleet.paces) == len(fleet.held_blocks) == 2
    # Equal prompts go round the decode workers, by the KV tokens promised.
    assert [record.worker for record in records] == [2, 3, 4, 2, 3, 4]


def test_books_of_both_workers() -> None:
    simulation = Simulation(PAIR, Seen())
    seen = []
    loads = simulation.router.loads

    def look(_: object) -> None:
        seen.append([(load.requests, load.prefilling, round(load.kv_tokens)) for load in loads])

    simulation.fleet.handoffs.send = lambda *_: look(None) or 9.0  # type: ignore[method-assign, func-returns-value]
    simulation._loop.at(0.01, look, None)
    simulation.run(requests((0.0, 1000, 3, (1, 2))))
    look(None)
    # While it is prefilled, when its KV begins to travel, and at the end.
    assert seen == [[(1, 1, 1001), (1, 0, 1300)], [(0, 0, 0), (1, 0, 1300)], [(0, 0, 0), (0, 0, 0)]]
    assert loads[0].prefilled_s > 0
    assert loads[1].prefilled_s == 0


def test_ttft_is_predicted_over_both_workers() -> None:
    _, (one,) = run(PAIR, make_policy("ttft", {}), requests((1.0, 1000, 3, (1, 2))))
    assert one.first_s is not None
    assert one.predicted_ttft_s == pytest.approx(one.first_s - 1.0, rel=0.05)


def test_pairs_are_chosen_by_what_is_cached_and_by_room() -> None:
    """The prefix lies with the second prefill worker; the first decode worker has no room left."""
    setting = Setting(split=(2, 2), scale=1.0, kv_tokens=20_000, handoff=LINK)
    policy = make_policy("ttft", {})
    simulation = Simulation(setting, policy)
    loads = simulation.router.loads
    loads[0].charge(0.0, prefill_s=0.5, prompt_tokens=9000, uncached_tokens=9000)
    simulation._loop.at(8.9, lambda: loads[2].charge(8.9, prompt_tokens=19_000).first_byte(8.9))
    one, two = simulation.run(requests((1.0, 2048, 3, (1, 2, 3, 4)), (9.0, 3000, 3, (1, 2, 3, 4, 5))))
    assert (one.prefill, two.prefill, two.gpu_tokens) == (1, 1, 2048)
    assert two.worker == 3


@pytest.mark.parametrize("name", policy_names())
def test_everything_ends_and_the_index_knows_both_kinds(name: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    setting = Setting(split=(2, 2), kv_tokens=60_000, block_tokens=64)
    work = arrivals(generate("mixed", 60, 4.0, seed), 64)
    simulation, records = run(setting, make_policy(name, {}), work)
    for record in records:
        if record.failure is None and record.rejected is None:
            assert record.prefill < 2 <= record.worker
            assert record.placed_s is not None
            assert record.start_s is not None
            assert record.first_s is not None
            assert record.end_s is not None
            assert record.placed_s <= record.start_s < record.first_s <= record.end_s
    for number, engine in enumerate(simulation.engines):
        slot = simulation.index.slot(Holder(f"w{number}"))
        told = {key for _, _, _, key, _ in simulation.index.blocks.export(slot)}
        assert told == set(engine.scheduler.cache.keys())
    for request, record in zip(work, records, strict=True):
        fits = request.view.prompt_tokens + request.output_tokens <= setting.kv_tokens
        assert record.failure == (None if fits else "too_long")


# --- any worker may do either half -------------------------------------------------------------


class Scripted(Seen):
    """Takes these pairs in turn."""

    chooses_pairs: ClassVar[bool] = True

    def __init__(self, *pairs: tuple[int, int]) -> None:
        super().__init__()
        self._pairs = list(pairs)

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        self.fleets.append(fleet)
        prefill, decode = self._pairs.pop(0)
        return Decision(Candidate(fleet.workers[prefill], fleet.workers[decode]), "scripted")


def test_one_engine_prefills_for_another_decodes_for_it_and_does_all_of_a_third() -> None:
    """Each of 1000 tokens, far apart in time: 0 to 1, 1 to 0, and all at 0, where the first's blocks lie."""
    simulation, (one, two, three) = run(
        replace(PAIR, split=None, workers=2, joint=True),
        policy := Scripted((0, 1), (1, 0), (0, 0)),
        requests((1.0, 1000, 3, (1, 2)), (5.0, 1000, 3, (3, 4)), (9.0, 1000, 1, (1, 2))),
    )
    there_s = prefill_ms(1000) / 1e3 + 2 * BLOCK_S + 0.002
    for at_s, record in ((1.0, one), (5.0, two)):
        first_s = at_s + there_s + decode_ms(999) / 1e3
        end_s = first_s + (decode_ms(1000) + decode_ms(1001)) / 1e3
        assert (record.first_s, record.end_s) == pytest.approx((first_s, end_s), abs=1e-9)
    assert [(one.prefill, one.worker), (two.prefill, two.worker)] == [(0, 1), (1, 0)]
    assert three.first_s == pytest.approx(9.0 + prefill_ms(1000 - 512, 512) / 1e3, abs=1e-9)
    assert simulation.fleet.handoffs.moved_bytes == [2 * BLOCK_BYTES, 2 * BLOCK_BYTES]
    for fleet in policy.fleets:
        assert [(worker.role, worker.takes_whole) for worker in fleet.workers] == [(Role.BOTH, True)] * 2
        assert fleet.pd_links == PdLinks.uniform(LINK)


def test_kv_comes_to_an_engine_between_its_own_prefill_steps() -> None:
    """0 is in its prefill of 9000 tokens, two steps, when it gets KV: it decodes beside the second."""
    simulation, (long, late) = run(
        replace(PAIR, split=None, workers=2, joint=True),
        Scripted((0, 0), (1, 0)),
        requests((0.0, 9000, 1, tuple(range(10, 27))), (0.2, 100, 1, ())),
    )
    first_step_s = prefill_ms(8192) / 1e3
    # 100 tokens are ready long before that step is over, and get their room then; KV comes in the second.
    there_s = first_step_s + BLOCK_S + 0.002
    assert long.first_s == pytest.approx(first_step_s + prefill_ms(808, 8192) / 1e3, abs=1e-9)
    assert late.first_s is not None
    assert late.first_s == pytest.approx(max(there_s, long.first_s) + decode_ms(99) / 1e3, abs=1e-9)
    assert simulation.fleet.handoffs.moved_bytes == [BLOCK_BYTES, 0]


def test_a_policy_that_chooses_no_pairs_does_all_at_one_worker_where_each_may() -> None:
    policy = Seen()
    setting = Setting(workers=3, joint=True, scale=1.0, kv_tokens=100_000, handoff=LINK)
    simulation, (one,) = run(setting, policy, requests((0.0, 1000, 3, (1, 2))))
    assert (one.prefill, one.worker, simulation.fleet.handoffs.moved_bytes) == (0, 0, [0, 0, 0])
    assert [(len(fleet.workers), fleet.pd_links) for fleet in policy.fleets] == [(3, None)]


@pytest.mark.soak
def test_where_each_may_long_prompts_are_split_once_others_decode() -> None:
    """No decodes: nothing to gain. Once some workers have come to prefill more than others, much is."""
    setting = Setting(workers=3, joint=True, kv_tokens=750_000, block_tokens=64)
    work = arrivals(generate("scans", 200, 2.0, 5), 64)
    simulation, records = run(setting, make_policy("ttft", {}), work)
    split = [record for record in records if record.prefill != record.worker]
    assert records[0] not in split
    assert len(split) > 40
    assert simulation.stays_s == pytest.approx(simulation.running_integral_s)
    reasons = {record.failure for record in records}
    assert reasons == {None}


def test_a_fleet_in_which_each_may_is_written_as_8pd() -> None:
    (few,) = fleets(["8PD"], "qwen3-32b-h200-tp2")
    assert (few.workers, few.setting.workers, few.setting.joint, few.setting.split) == ("8PD", 8, True, None)
    apart, plain = fleets(["6P2D", "8"], "qwen3-32b-h200-tp2")
    assert (apart.setting.split, apart.setting.joint, plain.setting.joint) == ((6, 2), False, False)
    with pytest.raises(ValueError, match=r"'8DP' is not understood; a number is expected, or 6P2D, or 8PD"):
        fleets(["8DP"], "qwen3-32b-h200-tp2")


def test_a_remote_sequence_may_be_broken_off_on_its_way() -> None:
    scheduler = Scheduler(BlockCache(10), SPEED, 16)
    sequence = Sequence("a", 40, 5, [1, 2], remote=True)
    scheduler.add(sequence)
    assert scheduler.step() is None
    assert list(scheduler.take_fetches()) == [sequence]
    assert (sequence.phase, scheduler.running, scheduler.cache.free_blocks) == (Phase.RECEIVING, 1, 7)
    scheduler.abort(sequence)
    assert (scheduler.running, scheduler.cache.free_blocks) == (0, 10)
    scheduler.check_integrity()


def test_a_prompt_keeps_its_room_at_the_prefill_worker_until_its_kv_has_left() -> None:
    """Four blocks: the first prompt holds three until it is let in after the one before it has ended, so that
    the third, of two, is computed only then.
    """
    small = Setting(split=(1, 1), scale=1.0, kv_tokens=2048, handoff=LINK)
    work = requests((0.0, 1500, 100, (1, 2)), (0.1, 1500, 2, (3, 4)), (0.2, 1000, 2, (5, 6)))
    _, (one, two, three) = run(small, Seen(), work)
    assert one.end_s is not None
    assert two.first_s is not None
    assert three.start_s is not None
    there_s = one.end_s + 3 * BLOCK_S + 0.002
    assert two.first_s == pytest.approx(there_s + decode_ms(1499) / 1e3)
    assert three.start_s == pytest.approx(there_s)


def test_ends_of_steps_of_one_moment_come_in_the_order_of_workers() -> None:
    loop, came = EventLoop(), list[str]()
    loop.at(1.0, came.append, "news")
    loop.turn_at(1.0, 2, came.append, "third")
    loop.turn_at(1.0, 0, came.append, "first")
    loop.turn_at(1.0, 1, came.append, "second")
    loop.first_at(1.0, came.append, "arrival")
    loop.run()
    assert came == ["arrival", "first", "second", "third", "news"]
