"""What is worth keeping of a request, and what sessions must be closed."""

from __future__ import annotations

import random

import pytest

from kvroute.policies.retention import FirstBlocks, Keep, Retention, SessionBook, retention
from kvroute.types import RequestView


def judged(
    prompt_tokens: int, first_use: bool | None, reused_tokens: int, continues: bool | None = None
) -> Retention:
    view = RequestView(prompt_tokens=prompt_tokens, continues=continues)
    return retention(view, first_use=first_use, reused_tokens=reused_tokens)


@pytest.mark.parametrize(
    ("prompt_tokens", "first_use", "reused_tokens", "expected"),
    [
        (4096, True, 0, Retention(Keep.LOW, 0, False, "one_off")),
        (4095, True, 0, Retention(Keep.NORMAL, None, False, "short")),
        (100_000, True, 100_000 - 4095, Retention(Keep.NORMAL, None, False, "short")),
        (100_000, False, 50_000, Retention(Keep.NORMAL, 50_000, False, "long_tail")),
        (100_000, True, 50_000, Retention(Keep.NORMAL, 50_000, False, "long_tail")),
        (100_000, False, 0, Retention(Keep.NORMAL, None, False, "elsewhere")),
        (100_000, None, 0, Retention(Keep.NORMAL, None, False, "unknown")),
        (0, True, 0, Retention(Keep.NORMAL, None, False, "unknown")),
    ],
)
def test_what_is_new_in_a_long_request_is_not_worth_keeping(
    prompt_tokens: int, first_use: bool | None, reused_tokens: int, expected: Retention
) -> None:
    assert judged(prompt_tokens, first_use, reused_tokens) == expected


@pytest.mark.parametrize("first_use", [True, False, None])
@pytest.mark.parametrize("prompt_tokens", [0, 100, 100_000])
def test_the_clients_own_word_goes_before_the_rule(prompt_tokens: int, first_use: bool | None) -> None:
    assert judged(prompt_tokens, first_use, 64, True) == Retention(Keep.HIGH, None, False, "continues")
    assert judged(prompt_tokens, first_use, 64, False) == Retention(Keep.LOW, 64, True, "ends")


def test_first_blocks_are_a_bounded_memory_of_those_used_last() -> None:
    seen = FirstBlocks(capacity=3)
    assert [seen.is_first_use(key) for key in (1, 2, 3, 1, 4)] == [True, True, True, False, True]
    assert len(seen) == 3
    assert not seen.is_first_use(1)  # used again, so 2 made room in its place
    assert seen.is_first_use(2)


def test_a_session_is_closed_wherever_it_was_and_only_once() -> None:
    book = SessionBook(idle_s=600)
    for worker in ("a", "b", "a"):
        assert book.used("s", worker, 0.0) == []
    assert book.ended("s") == ["a", "b"]
    assert book.ended("s") == []


def test_a_session_that_wanders_is_closed_where_it_was_first() -> None:
    book = SessionBook(idle_s=600)
    closed = [book.used("s", f"w{number}", 0.0) for number in range(SessionBook.MAX_WORKERS + 1)]
    assert closed == [[]] * SessionBook.MAX_WORKERS + [[("s", "w0")]]
    assert book.ended("s") == [f"w{number + 1}" for number in range(SessionBook.MAX_WORKERS)]


def test_an_idle_session_leaves_when_another_is_used() -> None:
    book = SessionBook(idle_s=10)
    book.used("old", "a", 0.0)
    book.used("old", "b", 1.0)
    book.used("kept", "a", 2.0)
    assert book.used("new", "c", 11.0) == []
    assert book.used("new", "c", 11.5) == [("old", "a"), ("old", "b")]
    assert book.used("kept", "a", 30.0) == [("new", "c")]
    assert len(book) == 1


def test_whoever_leaves_a_full_book_is_closed() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    book = SessionBook(idle_s=1e9, capacity=20)
    labelled: set[tuple[str, str]] = set()
    for now_s in range(2000):
        session, worker = f"s{dice.randrange(60)}", f"w{dice.randrange(12)}"
        labelled.add((session, worker))
        closed = book.used(session, worker, float(now_s))
        assert labelled.issuperset(closed)
        labelled.difference_update(closed)
        assert (session, worker) in labelled
        if dice.random() < 0.1:
            ended = f"s{dice.randrange(60)}"
            labelled.difference_update((ended, each) for each in book.ended(ended))
        assert len(book) <= 20
        assert len(labelled) <= 20 * SessionBook.MAX_WORKERS
    for number in range(60):
        labelled.difference_update((f"s{number}", each) for each in book.ended(f"s{number}"))
    assert not labelled  # nothing was forgotten without being told
