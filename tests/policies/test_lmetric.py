from __future__ import annotations

from kvroute.policies.lmetric import LMetric
from kvroute.types import RequestView

from .books import Book, books, chosen
from .fleets import fleet

PROMPT = RequestView(prompt_tokens=1000)


def _lmetric() -> LMetric:
    return LMetric(LMetric.Options())


def test_tokens_to_prefill_times_requests() -> None:
    """a: (0 + 200) x (5 + 1) = 1200; b: (100 + 1000) x (1 + 1) = 2200; c: (0 + 1000) x (0 + 1) = 1000."""
    crowd = books(Book(decoding=5, cached=800), Book(pending=100), Book())
    assert chosen(_lmetric().decide(PROMPT, crowd)) == ("c", "moved")
    crowd = books(Book(decoding=3, cached=800), Book(pending=100), Book())  # a: 800
    assert chosen(_lmetric().decide(PROMPT, crowd)) == ("a", "cached")


def test_pending_tokens_count_beside_the_prompt_s_own() -> None:
    """One request each. a: (900 + 100) x 2 = 2000; b: (50 + 1000) x 2 = 2100; with 901 pending on a, 2002."""
    assert chosen(_lmetric().decide(PROMPT, books(Book(900, cached=900), Book(50))))[0] == "a"
    assert chosen(_lmetric().decide(PROMPT, books(Book(960, cached=900), Book(50)))) == ("b", "moved")


def test_nothing_to_prefill_anywhere_goes_by_requests() -> None:
    """All products are 0: the paper's one failure."""
    crowd = books(Book(decoding=3, cached=1000), Book(decoding=1, cached=1000), Book(decoding=2, cached=1000))
    assert chosen(_lmetric().decide(PROMPT, crowd)) == ("b", "cached")
    crowd = books(Book(decoding=3), Book(decoding=2))
    assert chosen(_lmetric().decide(RequestView(), crowd)) == ("b", "cold")


def test_ties_go_in_turn() -> None:
    policy = _lmetric()
    assert [chosen(policy.decide(PROMPT, fleet(0, 0, 0)))[0] for _ in range(6)] == list("abcabc")
