from __future__ import annotations

import pytest

from kvroute.policies.registry import PolicyError, make_policy
from kvroute.policies.weighted import Weighted
from kvroute.types import RequestView

from .books import Book, books, chosen
from .fleets import fleet

PROMPT = RequestView(prompt_tokens=1000)


def _weighted(**options: float) -> Weighted:
    return Weighted(Weighted.Options(**options))


def test_three_scores_weighted_and_added() -> None:
    """3 x prefix + 2 x queue + 2 x (1 - KV use), queues from 0 to 4:

    a: 3 x 0.6 + 2 x 0/4 + 2 x 0.5 = 2.8; b: 0 + 2 x 4/4 + 2 x 0.4 = 2.8, or 2.82 with KV use 0.59;
    c: 3 x 0.1 + 2 x 2/4 + 2 x 0.5 = 2.3.
    """
    a, c = Book(cached=600, waiting=4, kv_usage=0.5), Book(cached=100, waiting=2, kv_usage=0.5)
    crowd = books(a, Book(waiting=0, kv_usage=0.59), c)
    assert chosen(_weighted().decide(PROMPT, crowd)) == ("b", "moved")
    crowd = books(a, Book(waiting=0, kv_usage=0.61), c)
    assert chosen(_weighted().decide(PROMPT, crowd)) == ("a", "cached")


def test_queues_are_stretched_to_the_whole_range() -> None:
    """1 waiting against 0 weighs as much as 40 against 0: 2 points, more than half a prompt's 1.5."""
    for waiting in (1, 40):
        crowd = books(Book(cached=500, waiting=waiting, kv_usage=0.0), Book(waiting=0, kv_usage=0.0))
        assert chosen(_weighted().decide(PROMPT, crowd)) == ("b", "moved")
    crowd = books(*[Book(cached=500 * (i == 2), waiting=7, kv_usage=0.0) for i in range(4)])
    assert chosen(_weighted().decide(PROMPT, crowd)) == ("c", "cached")


def test_weights_are_options() -> None:
    crowd = books(Book(cached=500, waiting=1, kv_usage=0.9), Book(waiting=0, kv_usage=0.0))
    assert chosen(_weighted(queue_weight=0, kv_weight=0).decide(PROMPT, crowd))[0] == "a"
    assert chosen(_weighted(prefix_weight=0, queue_weight=0).decide(PROMPT, crowd))[0] == "b"


def test_where_one_queue_is_not_reported_all_are_counted_here() -> None:
    """b's report of 9 is not to be compared with a's one request without a first byte."""
    crowd = books(Book(pending=100, kv_usage=0.0), Book(waiting=9, kv_usage=0.0))
    assert chosen(_weighted().decide(PROMPT, crowd)) == ("b", "unreported")


def test_kv_use_that_is_not_reported_is_charged_tokens_by_room() -> None:
    """a: 300 of 1000 tokens charged; b reports 0.29, then 0.31."""
    for reported, winner in ((0.29, "b"), (0.31, "a")):
        crowd = books(Book(waiting=0, kv_room=1000), Book(waiting=0, kv_usage=reported))
        crowd.loads[0].charge(0.0, prompt_tokens=250, output_tokens=50)
        assert chosen(_weighted().decide(PROMPT, crowd)) == (winner, "unreported")


def test_more_charged_than_there_is_room_for_is_full() -> None:
    """Both are full: in turn."""
    crowd = books(Book(waiting=0, kv_usage=1.0), Book(waiting=0, kv_room=10))
    crowd.loads[1].charge(0.0, prompt_tokens=1000)
    policy = _weighted()
    assert [chosen(policy.decide(PROMPT, crowd))[0] for _ in range(4)] == list("abab")


def test_ties_go_in_turn_and_an_unknown_prompt_goes_by_load() -> None:
    policy = _weighted()
    assert [chosen(policy.decide(PROMPT, fleet(0, 0, 0)))[0] for _ in range(6)] == list("abcabc")
    crowd = books(Book(cached=900, waiting=1, kv_usage=0.0), Book(waiting=0, kv_usage=0.0))
    assert chosen(policy.decide(RequestView(), crowd)) == ("b", "cold")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prefix_weight": -1}, "option 'prefix_weight'"),
        ({"kv_weight": "nan"}, "option 'kv_weight'"),
        ({"prefix_weight": 0, "queue_weight": 0, "kv_weight": 0}, "are all 0; one above 0 is expected"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=f"'weighted'.*{message}"):
        make_policy("weighted", wrong)
