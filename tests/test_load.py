"""The books of a worker: charge, first byte, release."""

from __future__ import annotations

import random

import pytest

from kvroute.load import Charge, WorkerLoad


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


def test_what_is_yet_to_be_added_is_half_of_the_answers_that_are_decoded_and_all_of_others() -> None:
    load = WorkerLoad()
    one, other = load.charge(0.0, prompt_tokens=1000, output_tokens=200), load.charge(0.0, output_tokens=60)
    assert load.growth_tokens == 260
    one.first_byte(1.0)
    assert load.growth_tokens == 160
    other.release(1.5)
    assert load.growth_tokens == 100, "it never decoded"
    one.release(2.0)
    assert load.growth_tokens == 0


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
    assert (load.kv_tokens, load.growth_tokens) == pytest.approx((0, 0), abs=1e-3)


# --- what the engine says of its KV ------------------------------------------------------------


def decoding(*prompt_tokens: int, output_tokens: float = 200.0) -> tuple[WorkerLoad, list[Charge]]:
    load = WorkerLoad()
    charges = [load.charge(0.0, prompt_tokens=each, output_tokens=output_tokens) for each in prompt_tokens]
    for charge in charges:
        charge.first_byte(0.0)
    return load, charges


def test_a_prefix_that_is_shared_lies_there_once() -> None:
    """Two decode, 4100 tokens each by their end; of 10,000 the engine shows 6000 in use, 200 are to come."""
    load, _ = decoding(3900, 3900)
    version = load.version
    load.report_kv(0.6, 10_000)
    assert load.kv_usage_ratio == 0.6
    assert load.kv_unbooked_tokens == pytest.approx(6000 + 2 * 100 - 8200)
    assert load.kv_used_tokens == pytest.approx(6200)
    assert load.version == version + 1, "prices are made of it"
    load.report_kv(0.6, 10_000)
    assert load.kv_used_tokens == pytest.approx(6200), "a report stands for itself"
    load.report_kv(0.7, 10_000)
    assert load.kv_used_tokens == pytest.approx(7200)


def test_what_is_charged_and_released_after_a_report_is_added_to_it() -> None:
    load, (first, _) = decoding(3900, 3900)
    load.report_kv(0.6, 10_000)
    third = load.charge(1.0, prompt_tokens=1000, uncached_tokens=1000, output_tokens=300.0)
    assert load.kv_used_tokens == pytest.approx(6200 + 1300)
    third.first_byte(2.0)
    assert load.kv_used_tokens == pytest.approx(6200 + 1300), "charged with the choice"
    first.release(3.0)
    assert load.kv_used_tokens == pytest.approx(6200 + 1300 - 4100)
    third.release(4.0)
    assert load.kv_used_tokens == pytest.approx(6200 - 4100)


def test_prompts_that_are_still_to_be_computed_are_added_to_a_report() -> None:
    """Of 5000 tokens 1000 are cached: the engine shows those at most, and 4000 will come."""
    load = WorkerLoad()
    load.charge(0.0, prompt_tokens=5000, uncached_tokens=4000)
    load.report_kv(0.1, 10_000)
    assert load.kv_used_tokens == pytest.approx(1000 + 4000)


def test_what_others_have_there_is_added() -> None:
    load, _ = decoding(900)
    load.add_others(4, 500)
    load.report_kv(0.9, 10_000)
    assert load.kv_unbooked_tokens == pytest.approx(9000 + 100 + 500 - 1100)
    assert load.kv_used_tokens == pytest.approx(9600)
    load.report_kv(0.1, 10_000)
    assert load.kv_used_tokens == pytest.approx(1600), "they have ended"


def test_an_idle_gateway_sees_what_others_have_there() -> None:
    load = WorkerLoad()
    load.report_kv(0.25, 10_000)
    assert (load.kv_tokens, load.kv_used_tokens) == (0, 2500)


def test_no_less_than_nothing_is_in_use() -> None:
    """The engine shows 1000 tokens, of two that will have 4200 each in the books; then both leave."""
    load, charges = decoding(4000, 4000)
    load.report_kv(0.1, 10_000)
    assert load.kv_unbooked_tokens == pytest.approx(1000 + 200 - 8400)
    assert load.kv_used_tokens == pytest.approx(1200)
    for charge in charges:
        charge.release(1.0)
    assert load.kv_used_tokens == 0.0
    load.report_kv(0.0, 10_000)
    assert load.kv_unbooked_tokens == 0.0


@pytest.mark.parametrize(("usage_ratio", "room_tokens"), [(None, 10_000), (0.6, None), (None, None)])
def test_what_is_not_said_corrects_nothing(usage_ratio: float | None, room_tokens: int | None) -> None:
    load, _ = decoding(3900, 3900)
    load.report_kv(0.3, 10_000)
    assert load.kv_used_tokens == pytest.approx(3200)
    version = load.version
    load.report_kv(usage_ratio, room_tokens)
    assert (load.kv_usage_ratio, load.kv_unbooked_tokens) == (usage_ratio, 0.0)
    assert load.kv_used_tokens == 8200
    assert load.version == version + 1


def test_kv_that_is_still_to_come_is_no_room_that_requests_share() -> None:
    """Of 1000 and 2000 tokens promised the first have come: 1000 of 10,000 are in use, and 2000 will be."""
    load = WorkerLoad()
    here, coming = (load.charge(0.0, prompt_tokens=tokens) for tokens in (1000, 2000))
    for charge in (here, coming):
        charge.await_kv(0.0)
    assert (load.prefilling, load.awaited_tokens, load.context_tokens) == (0, 3000, 3000)
    here.first_byte(1.0)
    load.report_kv(0.1, 10_000)
    assert (load.awaited_tokens, load.kv_unbooked_tokens, load.kv_used_tokens) == (2000, 0.0, 3000.0)
    coming.first_byte(2.0)
    coming.first_byte(2.0)
    load.report_kv(0.3, 10_000)
    assert (load.awaited_tokens, load.kv_used_tokens) == (0, 3000.0)
    lost = load.charge(3.0, prompt_tokens=500)
    lost.await_kv(3.0)
    for charge in (lost, here, coming, lost):
        charge.release(4.0)
    load.check_integrity()
    assert load.awaited_tokens == 0
