"""The books of a worker: charge, first byte, release."""

from __future__ import annotations

import random

import pytest

from kvroute.load import Charge, WorkerLoad
from kvroute.policies.costs.pace import UNKNOWN_KV_TOKENS


def test_a_queue_is_the_sum_of_its_prefills_less_what_the_head_has_done() -> None:
    load = WorkerLoad()
    first = load.charge(10.0, prefill_s=2.0)
    load.charge(10.5, prefill_s=3.0)
    assert load.ahead_s(10.0) == 5.0
    assert load.ahead_s(11.0) == 4.0
    assert load.ahead_s(13.0) == 3.0, "the head is overdue, and counts nothing more"
    first.first_byte(13.0)
    assert load.ahead_s(13.0) == 3.0
    assert load.ahead_s(14.0) == 2.0, "its turn began with the first byte of the one before"


def test_a_slower_worker_takes_longer_for_the_same_queue() -> None:
    load = WorkerLoad()
    load.charge(0.0, prefill_s=2.0)
    assert load.ahead_s(1.0, scale=4.0) == 7.0, "a second of eight has passed"


def test_a_head_that_leaves_gives_the_turn_to_the_next() -> None:
    load = WorkerLoad()
    head = load.charge(0.0, prefill_s=2.0)
    load.charge(0.0, prefill_s=1.0)
    head.release(0.5)
    assert load.ahead_s(0.5) == 1.0
    assert load.ahead_s(1.0) == 0.5


def test_one_that_overtakes_leaves_the_head_its_turn() -> None:
    load = WorkerLoad()
    load.charge(0.0, prefill_s=2.0)
    second = load.charge(0.0, prefill_s=0.25)
    second.first_byte(1.0)
    assert load.ahead_s(1.0) == 1.0


def test_other_replicas_queues_count() -> None:
    load = WorkerLoad(others_prefill_s=1.5)
    assert load.ahead_s(0.0, scale=2.0) == 3.0
    load.charge(0.0, prefill_s=1.0)
    assert load.ahead_s(0.0, scale=2.0) == 5.0


def test_context_begins_with_the_first_byte_and_kv_with_the_choice() -> None:
    load = WorkerLoad()
    charge = load.charge(0.0, prompt_tokens=1000, uncached_tokens=400, output_tokens=200)
    assert (load.kv_tokens, load.context_tokens, load.pending_prefill_tokens) == (1200, 0, 400)
    assert (load.prefilling, load.decoding) == (1, 0)
    charge.first_byte(1.0)
    assert (load.kv_tokens, load.context_tokens, load.pending_prefill_tokens) == (1200, 1100, 0)
    assert (load.prefilling, load.decoding) == (0, 1)
    charge.release(2.0)
    assert (load.kv_tokens, load.context_tokens, load.requests) == (0, 0, 0)


def test_the_share_of_time_spent_prefilling_fades() -> None:
    load = WorkerLoad()
    load.charge(0.0, prefill_s=15.0).first_byte(15.0)
    assert load.prefill_share(15.0) == pytest.approx(0.5)
    assert load.prefill_share(45.0) == pytest.approx(0.5 / 2.718281828)
    assert load.prefill_share(15.0, scale=2.0) == pytest.approx(1.0)


def test_blocks_of_running_requests_are_counted_by_reference() -> None:
    load = WorkerLoad()
    one, other = load.charge(0.0, keys=[1, 2]), load.charge(0.0, keys=[1, 3])
    assert load.active_keys == {1: 2, 2: 1, 3: 1}
    one.release(1.0)
    assert load.active_keys == {1: 1, 3: 1}
    other.release(1.0)
    assert load.active_keys == {}


def test_random_lives_leave_nothing_behind() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    load, now_s = WorkerLoad(), 0.0
    alive: list[Charge] = []
    for _ in range(3000):
        now_s += source.random()
        if alive and source.random() < 0.6:
            charge = source.choice(alive)
            if source.random() < 0.5:
                charge.first_byte(now_s)
            else:
                alive.remove(charge)
                charge.release(now_s)
                charge.release(now_s)
                charge.first_byte(now_s)
        else:
            alive.append(
                load.charge(
                    now_s,
                    prefill_s=source.random(),
                    prompt_tokens=source.randrange(9000),
                    uncached_tokens=source.randrange(9000),
                    output_tokens=source.random() * 500,
                    keys=source.sample(range(20), 3),
                )
            )
        load.check_integrity()
        assert load.ahead_s(now_s) >= -1e-9
    for charge in alive:
        charge.release(now_s)
    assert (load.requests, load.prefilling, load.pending_prefill_s, load.active_keys) == (0, 0, 0.0, {})
    assert load.kv_tokens == pytest.approx(0, abs=1e-3)


def test_reports_of_an_engine_tell_what_prefixes_are_shared() -> None:
    """Two requests decode over 4000 tokens each; the engine shows 6000 of its 10,000 in use."""
    load = WorkerLoad()
    for _ in range(2):
        load.charge(0.0, prompt_tokens=3900, output_tokens=200.0).first_byte(0.0)
    version = load.version
    load.report_kv(0.6, 10_000)
    assert load.kv_usage_ratio == 0.6
    assert load.kv_share == pytest.approx(1 - 0.3 * (1 - 0.75))
    assert load.version == version + 1
    for _ in range(50):
        load.report_kv(0.6, 10_000)
    assert load.kv_share == pytest.approx(0.75)
    assert load.kv_used_tokens == pytest.approx(0.75 * 8200)


def test_no_report_makes_more_than_all_of_it_or_less_than_half() -> None:
    load = WorkerLoad()
    load.charge(0.0, prompt_tokens=4000).first_byte(0.0)
    for _ in range(50):
        load.report_kv(0.99, 10_000)
    assert load.kv_share == 1.0
    for _ in range(50):
        load.report_kv(0.0, 10_000)
    assert load.kv_share == pytest.approx(0.5)


def test_a_report_of_an_engine_with_little_to_decode_tells_nothing() -> None:
    load = WorkerLoad()
    load.charge(0.0, prompt_tokens=1999).first_byte(0.0)
    load.charge(0.0, prompt_tokens=5000)
    load.report_kv(0.1, 10_000)
    assert (load.kv_share, load.kv_usage_ratio) == (1.0, 0.1)


@pytest.mark.parametrize("room_tokens", [0, UNKNOWN_KV_TOKENS])
def test_a_report_tells_nothing_of_an_idle_engine_or_of_room_that_is_not_known(room_tokens: int) -> None:
    load = WorkerLoad()
    load.report_kv(0.0, room_tokens)
    assert load.kv_share == 1.0
    if room_tokens:
        load.charge(0.0, prompt_tokens=1_000_000).first_byte(0.0)
        load.report_kv(0.1, room_tokens)
    assert load.kv_share == 1.0


def test_what_other_replicas_have_there_makes_the_share_no_smaller_and_no_more_than_all() -> None:
    load = WorkerLoad()
    load.charge(0.0, prompt_tokens=4000).first_byte(0.0)
    for _ in range(50):
        load.report_kv(0.2, 10_000)  # half of it is shared
    assert load.kv_share == pytest.approx(0.5)
    load.add_others(4, 0)
    for _ in range(50):
        load.report_kv(0.9, 10_000)
    assert load.kv_share == pytest.approx(1.0)
    assert load.kv_used_tokens == pytest.approx(4000)
