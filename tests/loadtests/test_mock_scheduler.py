"""The step scheduler of the mock engine, driven in virtual time."""

from __future__ import annotations

import random

import pytest

from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.scheduler import Outcome, Scheduler
from kvroute.loadtests.mock_engine.sequences import Phase, Sequence
from kvroute.policies.costs.speeds import PRESETS, Speed

SPEED = PRESETS["qwen3-32b-h100-tp2"]
BLOCK = 16


def make(blocks: int = 1000, **limits: int) -> Scheduler:
    return Scheduler(BlockCache(blocks), SPEED, BLOCK, **limits)


def prompt(name: int, tokens: int, output: int = 1, base: int = 0, shared: int = 0) -> Sequence:
    """A prompt whose first `shared` blocks are those of every prompt of the same `base`."""
    blocks = (tokens + output) // BLOCK
    keys = [hash((base, i)) if i < shared else hash((base, name, i)) for i in range(blocks)]
    return Sequence(str(name), tokens, output, keys)


def drain(scheduler: Scheduler) -> tuple[float, list[Outcome]]:
    """Run to the end; virtual seconds and what every step did."""
    now_s, outcomes = 0.0, []
    while (step := scheduler.step()) is not None:
        now_s += step.duration_s
        outcomes.append(scheduler.complete(step))
        scheduler.check_integrity()
    return now_s, outcomes


@pytest.mark.parametrize("name", PRESETS)
def test_a_lone_prefill_takes_what_the_table_says(name: str) -> None:
    speed = PRESETS[name]
    scheduler = Scheduler(BlockCache(10_000), speed, BLOCK)
    scheduler.add(prompt(1, 4000))
    step = scheduler.step()
    assert step is not None
    linear_ms = max(speed.floor_ms, speed.base_ms + speed.token_ms * 4000)
    expected_ms = max(linear_ms, speed.decode_base_ms) + speed.attention_ms * 4000 * 2000
    assert step.duration_s == pytest.approx(expected_ms / 1e3)


def test_decode_steps_and_calibration() -> None:
    plain = SPEED.step_s(0, 0.0, 8, 8000)
    assert plain == pytest.approx((13.61 + 0.0257 * 8 + 4.26e-5 * 8000) / 1e3)
    assert SPEED.calibrated(1.1, 2.0).step_s(0, 0.0, 8, 8000) == pytest.approx(1.1 * plain + 0.002)


def test_decodes_come_first_and_prefills_fill_the_budget() -> None:
    scheduler = make(max_batched_tokens=100)
    first, second = prompt(1, 20, 50), prompt(2, 250)
    scheduler.add(first)
    scheduler.complete(scheduler.step())  # type: ignore[arg-type]
    assert first.phase is Phase.DECODING
    scheduler.add(second)
    chunks = []
    while second.phase is not Phase.ENDED:
        step = scheduler.step()
        assert step is not None
        assert step.decodes == [first]
        chunks.append([n for _, n in step.prefills])
        scheduler.complete(step)
    assert chunks == [[99], [99], [52]]


def test_no_more_sequences_than_allowed_run() -> None:
    scheduler = make(max_sequences=3)
    for name in range(5):
        scheduler.add(prompt(name, 16, 4))
    step = scheduler.step()
    assert step is not None
    assert (scheduler.running, len(scheduler.waiting)) == (3, 2)
    scheduler.complete(step)
    drain(scheduler)
    assert scheduler.totals.generated_tokens == 20


def test_a_prefix_is_shared_once_its_prefill_is_complete() -> None:
    scheduler = make()
    one, two = prompt(1, 100, base=1, shared=6), prompt(2, 100, base=1, shared=6)
    scheduler.add(one)
    step = scheduler.step()
    assert step is not None
    assert scheduler.cache.resident_blocks == 0
    outcome = scheduler.complete(step)
    assert [(s.start, s.stop) for s in outcome.stored] == [(0, 6)]
    scheduler.add(two)
    drain(scheduler)
    assert (one.cached_tokens, two.cached_tokens) == (0, 96)
    assert scheduler.totals.prefill_tokens == 104


def test_the_last_prompt_token_is_always_computed() -> None:
    scheduler = make()
    one, two = prompt(1, 96, base=1, shared=6), prompt(2, 96, base=1, shared=6)
    for sequence in (one, two):
        scheduler.add(sequence)
        drain(scheduler)
    assert two.cached_tokens == 80


def test_blocks_filled_in_decode_are_cached_one_by_one() -> None:
    scheduler = make()
    scheduler.add(prompt(1, 20, 40))
    _, outcomes = drain(scheduler)
    runs = [(s.start, s.stop) for outcome in outcomes for s in outcome.stored]
    # The last token generated is never computed: 59 tokens fill three blocks.
    assert runs == [(0, 1), (1, 2), (2, 3)]


def test_the_latest_is_preempted_and_recomputed_when_blocks_run_out() -> None:
    scheduler = make(blocks=8)
    one, two = prompt(1, 48, 60), prompt(2, 48, 60)
    scheduler.add(one)
    scheduler.add(two)
    drain(scheduler)
    assert scheduler.totals.preemptions >= 1
    assert (one.generated_tokens, two.generated_tokens) == (60, 60)
    assert scheduler.totals.generated_tokens == 120
    assert scheduler.cache.used_ratio == 0


def test_evictions_make_room_and_are_reported_with_the_stores() -> None:
    scheduler = make(blocks=10)
    scheduler.add(prompt(1, 96))
    drain(scheduler)
    scheduler.add(prompt(2, 96))
    _, outcomes = drain(scheduler)
    keys = prompt(1, 96).keys
    assert outcomes[0].removed == [keys[5], keys[4]]
    assert [(s.start, s.stop) for s in outcomes[0].stored] == [(0, 6)]


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILLING, Phase.DECODING, Phase.ENDED])
def test_abort_frees_everything_at_once_in_any_phase(phase: Phase) -> None:
    scheduler = make(max_batched_tokens=64)
    sequence = prompt(1, 100, 5)
    scheduler.add(sequence)
    step = None
    while sequence.phase is not phase:
        step = scheduler.step()
        assert step is not None
        scheduler.complete(step)
    pending = scheduler.step()
    scheduler.abort(sequence)
    scheduler.abort(sequence)
    if pending is not None:
        assert scheduler.complete(pending).tokens == []
    scheduler.check_integrity()
    assert scheduler.cache.used_ratio == 0
    assert scheduler.step() is None


def test_what_can_never_fit_is_refused() -> None:
    scheduler = make(blocks=4)
    with pytest.raises(ValueError, match="do not fit"):
        scheduler.add(prompt(1, 60, 5))
    with pytest.raises(ValueError, match="at least"):
        scheduler.add(prompt(1, 60, 0))


def test_instant_admission_holds_blocks_until_finished() -> None:
    scheduler = make(blocks=8)
    one, two = prompt(1, 64, 40), prompt(2, 64, 40)
    scheduler.add(one)
    scheduler.add(two)
    outcome = scheduler.admit_instantly()
    assert outcome.tokens == [one]
    assert [(s.start, s.stop) for s in outcome.stored] == [(0, 4)]
    assert list(scheduler.waiting) == [two]
    ended = scheduler.finish_instantly(one, 40)
    assert [(s.start, s.stop) for s in ended.stored] == [(4, 6)]
    assert scheduler.admit_instantly().tokens == [two]
    scheduler.check_integrity()


def test_random_load_ends_and_keeps_the_books_straight() -> None:
    rng = random.Random(3)
    scheduler = Scheduler(BlockCache(60), Speed(1, 1, 1, 0, 1, 0, 0, 960, 1), BLOCK, 128, 8)
    live = []
    for name in range(300):
        base = rng.randrange(5)
        sequence = prompt(name, rng.randint(1, 300), rng.randint(1, 60), base, rng.randint(0, 12))
        scheduler.add(sequence)
        live.append(sequence)
        for _ in range(rng.randrange(12)):
            if rng.random() < 0.1:
                scheduler.abort(rng.choice(live))
            if (step := scheduler.step()) is not None:
                if rng.random() < 0.1:
                    scheduler.abort(rng.choice(live))
                scheduler.complete(step)
            scheduler.check_integrity()
    drain(scheduler)
    assert all(sequence.phase is Phase.ENDED for sequence in live)
    assert scheduler.totals.preemptions > 0
