"""Steps taken in a row are the steps taken one by one."""

from __future__ import annotations

import random

import pytest

from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.rows import row_s
from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.loadtests.mock_engine.steps import Step, StepTimes
from kvroute.loadtests.simulator.engine import Gaps, SimulatedEngine
from kvroute.loadtests.simulator.mini import MiniScheduler, MiniTimes
from kvroute.policies.costs.speeds import PRESETS

SPEED = PRESETS["qwen3-32b-h200-tp2"].calibrated(1.1, 0.5)
BLOCK = 16


@pytest.mark.parametrize("times", [SPEED, MiniTimes(100_000)])
@pytest.mark.parametrize("steps", [1, 2, 3, 257])
def test_a_row_takes_as_long_as_its_steps(times: StepTimes, steps: int) -> None:
    one_by_one = sum(times.step_s(0, 0.0, 7, 9000 + 7 * step) for step in range(steps))
    assert row_s(times, steps, 7, 9000) == pytest.approx(one_by_one, rel=1e-12)


class Log:
    """An engine driven through arrivals; what happened, and when."""

    def __init__(self, times: StepTimes, blocks: int, *, in_a_row: bool) -> None:
        self.cache = BlockCache(blocks)
        scheduler = Scheduler(self.cache, times, BLOCK, max_batched_tokens=256, max_sequences=12)
        self.engine = SimulatedEngine(scheduler, in_a_row)
        self.steps = 0
        self.firsts: dict[str, float] = {}
        self.ends: dict[str, float] = {}
        self.removed: list[tuple[float, int]] = []

    def run(self, arrivals: list[tuple[float, Sequence]]) -> Log:
        waiting = sorted(arrivals, key=lambda each: each[0])
        while waiting or self.engine.ends_s is not None:
            ends_s = self.engine.ends_s
            if waiting and (ends_s is None or waiting[0][0] < ends_s):
                at_s, sequence = waiting.pop(0)
                self.engine.submit(sequence, at_s)
                self.engine.wake(at_s)
                continue
            assert ends_s is not None
            step, outcome = self.engine.complete()
            self.engine.wake(ends_s)
            self.steps += 1
            for sequence, _ in step.prefills:
                if sequence.generated_tokens == 1:
                    self.firsts[sequence.id] = ends_s
            self.ends |= {sequence.id: ends_s for sequence in outcome.finished}
            self.removed += [(ends_s, key) for key in outcome.removed]
            self.engine.scheduler.check_integrity()
        return self


def random_arrivals(seed: int, share_output: bool) -> list[tuple[float, Sequence]]:
    source = random.Random(seed)
    arrivals = []
    for name in range(60):
        tokens, output = source.randrange(1, 600), source.randrange(1, 300)
        base, shared = source.randrange(4), source.randrange(30)
        blocks = (tokens + (output if share_output else 0)) // BLOCK
        keys = [hash((base, i)) if i < shared else hash((base, shared, name, i)) for i in range(blocks)]
        arrivals.append((source.uniform(0, 12), Sequence(str(name), tokens, output, keys)))
    return arrivals


@pytest.mark.parametrize("times", [SPEED, MiniTimes(1000 * BLOCK)])
@pytest.mark.parametrize("share_output", [False, True])
@pytest.mark.parametrize("blocks", [60, 100, 1000])
def test_rows_change_nothing_but_the_number_of_steps(
    times: StepTimes, share_output: bool, blocks: int
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    row = Log(times, blocks, in_a_row=True).run(random_arrivals(seed, share_output))
    step = Log(times, blocks, in_a_row=False).run(random_arrivals(seed, share_output))
    assert row.steps < step.steps
    assert len(row.ends) == 60
    assert row.firsts == pytest.approx(step.firsts, abs=1e-9)
    assert row.ends == pytest.approx(step.ends, abs=1e-9)
    assert [key for _, key in row.removed] == [key for _, key in step.removed]
    assert [at for at, _ in row.removed] == pytest.approx([at for at, _ in step.removed], abs=1e-9)
    assert row.engine.scheduler.totals == step.engine.scheduler.totals
    assert set(row.cache.keys()) == set(step.cache.keys())


def test_a_block_published_meanwhile_lets_nobody_in() -> None:
    """The second repeats what the first is about to say: as much as is shared, the first has grown."""

    def arrivals() -> list[tuple[float, Sequence]]:
        keys = [1000 + i for i in range(8)]
        return [(0.0, Sequence("a", 32, 96, keys)), (0.1, Sequence("b", 120, 1, keys))]

    row = Log(SPEED, 8, in_a_row=True).run(arrivals())
    step = Log(SPEED, 8, in_a_row=False).run(arrivals())
    assert row.firsts == pytest.approx(step.firsts, abs=1e-9)
    assert row.firsts["b"] > row.ends["a"]
    assert row.steps < 10


def test_the_mocker_counts_new_tokens_by_means_of_whole_tokens() -> None:
    scheduler = MiniScheduler(BlockCache(100), MiniTimes(), BLOCK)
    scheduler.add(Sequence("a", 48, 1, [1, 2, 3]))
    first = scheduler.step()
    assert first is not None
    assert first.duration_s == pytest.approx((4.209989e-7 * 48**2 + 1.518344e-2 * 48 + 16.50142) / 1e3)
    scheduler.complete(first)
    scheduler.add(Sequence("b", 48, 1, [1, 2, 3]))  # 32 of 48 are cached, as the last is always computed
    scheduler.add(Sequence("c", 7, 1, []))
    second = scheduler.step()
    assert second is not None
    tokens = 2 * ((48 + 7) // 2 - 32 // 2)  # 22 of 23
    assert second.duration_s == pytest.approx(
        (4.209989e-7 * tokens**2 + 1.518344e-2 * tokens + 16.50142) / 1e3
    )


def test_little_room_preempts_and_much_does_not() -> None:
    arrivals = random_arrivals(1, False)
    assert Log(SPEED, 60, in_a_row=True).run(arrivals).engine.scheduler.totals.preemptions > 0
    arrivals = random_arrivals(1, False)
    assert Log(SPEED, 1000, in_a_row=True).run(arrivals).engine.scheduler.totals.preemptions == 0


def test_a_cut_row_ends_with_the_step_in_progress() -> None:
    scheduler = Scheduler(BlockCache(100), SPEED, BLOCK)
    scheduler.add(Sequence("a", 16, 100, []))
    step = scheduler.step()
    assert step is not None
    scheduler.complete(step)
    row = scheduler.step(in_a_row=True)
    assert row is not None
    assert row.count == 99
    first_s, second_s = SPEED.decode_s(1, 16), SPEED.decode_s(1, 17)
    scheduler.cut(row, first_s + 1e-9)
    assert (row.count, row.duration_s) == (2, pytest.approx(first_s + second_s))
    scheduler.cut(row, 0.0)
    assert (row.count, row.duration_s) == (1, pytest.approx(first_s))


def test_the_longest_step_since_any_other() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source, gaps, steps = random.Random(seed), Gaps(), []
    for _ in range(300):
        steps.append(float(source.randrange(20)))
        gaps.add(steps[-1])
        since = source.randrange(len(steps) + 1)
        assert gaps.longest_s(since) == max(steps[since:], default=0.0)
    assert gaps.steps == 300


def test_a_step_that_ends_as_it_begins_is_a_turn_of_its_own() -> None:
    """Whoever drives the engine would wait for ever for its end, as after a pull that came while it ran."""

    class Instant(Scheduler):
        def step(self, in_a_row: bool = False) -> Step | None:
            return Step()

    engine = SimulatedEngine(Instant(BlockCache(10), SPEED, BLOCK))
    engine.wake(1.0)
    turn = engine.turn
    engine.complete()
    engine.wake(1.0)
    assert engine.ends_s == 1.0
    assert engine.turn != turn
