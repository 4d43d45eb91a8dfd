from __future__ import annotations

import random
from collections import deque

import pytest

from kvroute.conductor.events.actions import Action, Apply, AskReplay, Clear, Watermark
from kvroute.conductor.events.batches import Batch, Cleared, Undecodable
from kvroute.conductor.events.stream import ATTEMPTS, Stream

BYTES = 100


def one(seq: int, life: int = 0, *, cleared: bool = False) -> Batch:
    """A batch of one life of an engine."""
    events = (Cleared(),) if cleared else ()
    return Batch(seq, 1 + life * 1000 + seq, float(life), 0, events, BYTES)


def fresh(restored: Watermark | None = None, waiting_batches: int = 100) -> Stream:
    return Stream(waiting_batches, BYTES * 1000, restored)


def replayed(stream: Stream, *batches: Batch) -> list[Action]:
    return [action for batch in batches for action in stream.replayed(batch)] + stream.replay_ended()


def live_at(seq: int) -> Stream:
    """A complete stream that has applied 0..seq."""
    stream = fresh()
    stream.connected()
    replayed(stream, *map(one, range(seq + 1)))
    assert (stream.last_seq, stream.complete, stream.replaying) == (seq, True, False)
    return stream


def test_a_connection_begins_with_a_replay_and_an_idle_engine_is_complete() -> None:
    stream = fresh()
    assert stream.connected() == [AskReplay(0)]
    assert stream.replay_ended() == []
    assert (stream.complete, stream.replaying, stream.last_seq) == (True, False, -1)
    assert stream.live(one(0)) == [Apply(one(0))]
    assert stream.live(one(1)) == [Apply(one(1))]
    assert stream.watermark == Watermark(1, 2, True)


def test_a_late_subscriber_asks_for_the_beginning() -> None:
    stream = fresh()
    stream.connected()
    assert stream.live(one(7)) == []
    assert replayed(stream, *map(one, range(8))) == [Apply(one(seq)) for seq in range(8)]
    assert stream.complete
    assert not stream.waiting


def test_a_first_batch_that_is_not_0_is_a_gap() -> None:
    stream = fresh()
    stream.connected()
    stream.replay_ended()
    assert stream.live(one(7)) == [AskReplay(0)]
    assert replayed(stream, *map(one, range(8))) == [Apply(one(seq)) for seq in range(8)]


def test_live_batches_wait_for_a_replay_and_apply_in_order() -> None:
    stream = live_at(5)
    assert stream.live(one(8)) == [AskReplay(5)]
    assert stream.live(one(9)) == []
    assert stream.waiting == 2
    assert stream.replayed(one(5)) == []
    assert stream.replayed(one(6)) == [Apply(one(6))]
    assert stream.live(one(10)) == []
    assert stream.replayed(one(7)) == [Apply(one(7))]
    assert stream.replay_ended() == [Apply(one(8)), Apply(one(9)), Apply(one(10))]
    assert stream.counts["gaps"] == 1
    assert stream.complete


def test_what_came_late_is_a_duplicate_once_it_was_replayed() -> None:
    stream = live_at(5)
    stream.live(one(7))
    replayed(stream, one(5), one(6), one(7))
    assert stream.live(one(6)) == []
    assert stream.live(one(7)) == []
    assert stream.counts["restarts"] == 0
    assert stream.live(one(8)) == [Apply(one(8))]


def test_batches_that_swapped_places_apply_in_order() -> None:
    stream = live_at(5)
    stream.live(one(7))
    stream.live(one(6))
    assert replayed(stream, one(5)) == [Apply(one(6)), Apply(one(7))]


@pytest.mark.parametrize("seq", [0, 3, 5])
def test_going_back_is_a_restart(seq: int) -> None:
    stream = live_at(5)
    actions = stream.live(one(seq, life=1))
    assert actions[0] == Clear("restart")
    if seq == 0:
        assert actions[1:] == [Apply(one(0, life=1))]
        assert stream.complete
        assert stream.live(one(1, life=1)) == [Apply(one(1, life=1))]
    else:
        assert actions[1:] == [AskReplay(0)]
        again = [one(i, life=1) for i in range(seq + 1)]
        assert replayed(stream, *again) == [Apply(batch) for batch in again]
    assert stream.counts["restarts"] == 1


def test_a_restart_that_caught_up_is_found_by_its_digest() -> None:
    stream = live_at(5)
    assert stream.connected() == [AskReplay(5)]
    assert stream.replayed(one(5, life=1)) == [Clear("restart"), AskReplay(0)]
    again = [one(i, life=1) for i in range(7)]
    assert replayed(stream, *again) == [Apply(batch) for batch in again]


def test_a_gap_that_hides_a_restart() -> None:
    stream = live_at(5)
    assert stream.live(one(9, life=1)) == [AskReplay(5)]
    assert stream.replayed(one(5, life=1)) == [Clear("restart"), AskReplay(0)]
    again = [one(i, life=1) for i in range(10)]
    assert replayed(stream, *again) == [Apply(batch) for batch in again]
    assert stream.complete


def test_an_engine_with_fewer_batches_than_applied_has_restarted() -> None:
    stream = live_at(5)
    stream.connected()
    assert stream.replay_ended() == [Clear("restart"), AskReplay(0)]
    assert replayed(stream, one(0, life=1)) == [Apply(one(0, life=1))]


def test_a_live_batch_of_another_life_under_a_replayed_number() -> None:
    stream = live_at(5)
    stream.live(one(8, life=1))
    stream.replayed(one(5))
    stream.replayed(one(6))
    stream.replayed(one(7))
    assert stream.replayed(one(8)) == [Clear("restart"), AskReplay(0)]


def test_when_the_first_wanted_is_gone_it_is_rebuilt_from_what_there_is() -> None:
    stream = live_at(5)
    stream.live(one(20))
    assert stream.replayed(one(10)) == [Clear("missing"), Apply(one(10))]
    rest = [Apply(one(seq)) for seq in range(11, 21)]
    assert replayed(stream, *map(one, range(11, 21))) == rest
    assert not stream.complete
    assert stream.counts["missing"] == 1
    assert stream.live(one(21, cleared=True)) == [Apply(one(21, cleared=True))]
    assert stream.complete


def test_a_fresh_subscriber_of_a_short_buffer_is_not_complete() -> None:
    stream = fresh()
    stream.connected()
    assert replayed(stream, one(4), one(5)) == [Apply(one(4)), Apply(one(5))]
    assert not stream.complete


def test_a_replay_that_fails_is_asked_for_again_and_then_given_up() -> None:
    stream = live_at(5)
    stream.live(one(8))
    assert stream.replay_failed() == [AskReplay(5, 1)]
    stream.live(one(9))
    stream.live(one(11))
    stream.live(one(12))
    assert stream.replay_failed() == [AskReplay(5, 2)]
    assert stream.replay_failed() == [Clear("given_up"), Apply(one(11)), Apply(one(12))]
    assert (stream.complete, stream.replaying, stream.last_seq) == (False, False, 12)
    assert stream.counts["replay_failures"] == ATTEMPTS
    assert stream.live(one(13)) == [Apply(one(13))]


def test_without_anyone_to_ask_a_gap_forgets_at_once() -> None:
    stream = live_at(5)
    stream.live(one(8))
    assert stream.replay_failed(for_good=True) == [Clear("given_up"), Apply(one(8))]


def test_a_late_replay_does_not_resurrect_what_was_removed_since() -> None:
    stream = live_at(5)
    stream.live(one(7))
    for _ in range(ATTEMPTS):
        stream.replay_failed()
    assert stream.last_seq == 7
    assert stream.replayed(one(6)) == []


def test_a_check_that_finds_nobody_forgets_nothing() -> None:
    stream = live_at(5)
    assert stream.verify() == [AskReplay(5)]
    assert not stream.behind
    assert stream.verify() == []
    stream.live(one(6))
    assert stream.behind
    for _ in range(ATTEMPTS - 1):
        stream.replay_failed()
    assert stream.replay_failed() == [Apply(one(6))]
    assert (stream.checked, stream.complete) == (False, True)
    stream.verify()
    replayed(stream, one(6))
    assert stream.checked


def test_a_check_finds_what_was_missed_at_the_end() -> None:
    stream = live_at(5)
    stream.verify()
    assert replayed(stream, one(5), one(6)) == [Apply(one(6))]


def test_a_broken_answer_goes_on_from_where_it_came_to() -> None:
    stream = live_at(5)
    stream.live(one(20))
    stream.replayed(one(5))
    stream.replayed(one(6))
    assert stream.replayed(one(8)) == [AskReplay(6, 1)]
    stream.replayed(one(6))
    assert stream.replayed(one(7)) == [Apply(one(7))]
    assert stream.replay_failed() == [AskReplay(7, 1)]


def test_waiting_is_bounded_and_what_was_dropped_is_asked_for() -> None:
    stream = fresh(waiting_batches=3)
    stream.connected()
    for seq in range(5):
        stream.live(one(seq))
    assert stream.waiting <= 3
    assert stream.counts["overflows"] == 1
    assert replayed(stream, one(0), one(1))[-1] == AskReplay(1)
    assert replayed(stream, one(1), one(2), one(3), one(4))[-1] == Apply(one(4))
    assert (stream.complete, stream.replaying) == (True, False)


def test_waiting_is_bounded_in_bytes() -> None:
    stream = Stream(100, BYTES * 2)
    stream.connected()
    for seq in range(4):
        stream.live(one(seq))
    assert (stream.waiting, stream.counts["overflows"]) == (1, 1)


def test_two_processes_under_one_number_are_both_asked_for_again() -> None:
    stream = live_at(5)
    stream.live(one(8))
    stream.live(one(8))
    assert (stream.waiting, stream.counts["duplicates"]) == (1, 1)
    stream.live(one(8, life=1))
    assert (stream.waiting, stream.counts["overflows"]) == (0, 0)
    assert stream.live(one(9, life=1)) == []
    assert replayed(stream, one(5))[-1] == AskReplay(5)
    assert stream.replayed(one(5, life=1)) == [Clear("restart"), AskReplay(0)]
    again = [one(seq, life=1) for seq in range(10)]
    assert replayed(stream, *again) == [Apply(batch) for batch in again]
    assert stream.complete


def test_what_cannot_be_read_is_asked_for_and_if_that_cannot_either_all_is_rebuilt() -> None:
    stream = live_at(5)
    assert stream.undecodable(Undecodable("payload", 6)) == [AskReplay(5)]
    stream.live(one(7))
    assert replayed(stream, one(5), one(6), one(7)) == [Apply(one(6)), Apply(one(7))]
    assert stream.complete
    stream.undecodable(Undecodable("seq"))
    stream.replayed(one(7))
    assert stream.replayed_undecodable(Undecodable("payload", 8)) == [Clear("undecodable")]
    assert replayed(stream, one(9)) == [Apply(one(9))]
    assert not stream.complete
    assert stream.counts["undecodable"] == 3


def test_an_unreadable_message_during_a_replay_is_asked_for_after_it() -> None:
    stream = fresh()
    stream.connected()
    stream.undecodable(Undecodable("payload", 0))
    assert replayed(stream)[-1] == AskReplay(0)


def test_a_restored_stream_is_verified_by_the_digest_of_its_last_batch() -> None:
    stream = fresh(Watermark(5, one(5).digest, True))
    assert not stream.verified
    assert stream.connected() == [AskReplay(5)]
    assert replayed(stream, one(5), one(6)) == [Apply(one(6))]
    assert (stream.verified, stream.complete) == (True, True)


def test_a_restored_stream_of_an_engine_that_restarted_is_forgotten() -> None:
    stream = fresh(Watermark(5, one(5).digest, True))
    stream.connected()
    assert replayed(stream, one(5, life=1))[0] == Clear("restart")
    assert stream.verified


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_on_the_way_what_is_applied_is_a_run_of_the_engine(seed: int) -> None:
    """Since the last clear: consecutive batches of one life, from its beginning whenever complete."""
    dice = random.Random(seed)
    stream = fresh(waiting_batches=dice.choice((4, 100)))
    life, seq, applied = 0, 0, []
    buffer: deque[Batch] = deque(maxlen=dice.choice((3, 1000)))
    asked: AskReplay | None = None
    faults = 0.2

    def do(actions: list[Action]) -> None:
        nonlocal asked
        for action in actions:
            if isinstance(action, Clear):
                applied.clear()
            elif isinstance(action, Apply):
                applied.append(action.batch)
            else:
                asked = action

    def answer() -> None:
        nonlocal asked
        now, asked = asked, None
        if now is None:
            return
        if dice.random() < faults:
            do(stream.replay_failed())
            return
        for batch in [batch for batch in buffer if batch.seq >= now.first_seq]:
            if asked is not None:
                return
            lost = Undecodable("payload", batch.seq)
            do(stream.replayed_undecodable(lost) if dice.random() < faults / 4 else stream.replayed(batch))
        if asked is None:
            do(stream.replay_ended())

    def publish() -> None:
        nonlocal seq
        batch = one(seq, life, cleared=dice.random() < 0.02)
        seq += 1
        buffer.append(batch)
        if dice.random() >= faults:
            do(stream.live(batch))
        if dice.random() < faults:
            do(stream.live(dice.choice(buffer)))
        if dice.random() < faults / 4:
            do(stream.undecodable(Undecodable("payload")))

    do(stream.connected())
    for _ in range(300):
        publish()
        if dice.random() < 0.03:
            life, seq = life + 1, 0
            buffer.clear()
            for _ in range(dice.randrange(8)):  # nobody listens
                buffer.append(one(seq, life))
                seq += 1
            do(stream.connected())
        if dice.random() < 0.5:
            answer()
        lives = {int(batch.ts_s) for batch in applied}
        assert len(lives) <= 1
        numbers = [batch.seq for batch in applied]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        if stream.complete and numbers:
            assert numbers[0] == 0 or any(batch.events for batch in applied)
    faults = 0.0
    do(stream.verify())
    for _ in range(10):
        answer()
    assert applied, f"seed {seed}"
    assert (applied[-1].seq, int(applied[-1].ts_s)) == (seq - 1, life), f"seed {seed}"
