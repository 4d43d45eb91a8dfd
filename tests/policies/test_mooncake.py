from __future__ import annotations

import pytest

from kvroute.policies.costs.links import Link
from kvroute.policies.mooncake import Mooncake
from kvroute.policies.registry import PolicyError, make_policy
from kvroute.types import Decision, PrefixMatch, Rejection, RequestView

from .books import Book, books, chosen
from .fleets import fleet

PROMPT = RequestView(prompt_tokens=10_000)
"""1 s of prefill; its KV is 1 GB."""
LINK = Link(1e9, 0.01)
"""8000 tokens, 0.8 GB, in 0.81 s."""
FAST = Link(10e9, 0.01)
"""8000 tokens in 0.09 s, 5000 in 0.06 s."""


def _mooncake(**options: float) -> Mooncake:
    return Mooncake(Mooncake.Options(**options))


def test_without_a_link_the_least_of_queue_and_prefill() -> None:
    """a: 1.0 + 0.2; b: 0 + 1.0; c: 0.5 + 0.4."""
    crowd = books(Book(pending=10_000, cached=8000), Book(), Book(pending=5000, cached=6000))
    assert chosen(_mooncake().decide(PROMPT, crowd)) == ("c", "moved")


def test_the_longest_prefix_is_brought_to_a_worker_that_is_free() -> None:
    """a: queue 0.5 + prefill 0.2 = 0.7; b: transfer 0.09 + 0.2 = 0.29, and 8000 tokens to pull."""
    crowd = books(Book(pending=5000, cached=8000), Book(), peer_link=FAST)
    decision = _mooncake().decide(PROMPT, crowd)
    assert chosen(decision) == ("b", "migrated")
    assert isinstance(decision, Decision)
    assert decision.pull is not None
    assert (decision.pull.source.id, decision.pull.tokens) == ("a", 8000)
    assert decision.pull.expected_s == pytest.approx(0.09)
    assert decision.matched_tokens == 0


def test_the_transfer_is_waited_for() -> None:
    """a: 0.85 + 0.2 = 1.05 against 0.81 + 0.2 = 1.01 on b; 0.8 + 0.2 = 1.00 against the same."""
    assert (
        chosen(_mooncake().decide(PROMPT, books(Book(8500, cached=8000), Book(), peer_link=LINK)))[0] == "b"
    )
    assert (
        chosen(_mooncake().decide(PROMPT, books(Book(8000, cached=8000), Book(), peer_link=LINK)))[0] == "a"
    )


@pytest.mark.parametrize(("own", "expected"), [(4000, ("b", "moved")), (3999, ("b", "migrated"))])
def test_a_prefix_above_the_threshold_s_share_is_used_as_it_is(own: int, expected: tuple[str, str]) -> None:
    """8000 is not above 2 x 4000, and is above 2 x 3999: only then does the difference travel."""
    crowd = books(Book(pending=20_000, cached=8000), Book(cached=own), peer_link=FAST)
    decision = _mooncake().decide(PROMPT, crowd)
    assert chosen(decision) == expected
    assert isinstance(decision, Decision)
    if own == 4000:
        assert decision.pull is None
    else:
        assert decision.pull is not None
        assert decision.pull.tokens == 4001
        assert decision.pull.expected_s == pytest.approx(0.01 + 0.04001)


def test_the_threshold_decides_and_not_the_clock() -> None:
    """To the letter: b could prefill all in 1.0 s, yet is priced with the transfer: 0.81 + 0.2 = 1.01. So a,
    with 0.805 + 0.2, gets it.
    """
    crowd = books(Book(pending=8050, cached=8000), Book(), peer_link=LINK)
    assert chosen(_mooncake().decide(PROMPT, crowd)) == ("a", "cached")
    assert chosen(_mooncake().decide(PROMPT, books(Book(pending=8050, cached=8000), Book()))) == (
        "b",
        "moved",
    )


def test_nobody_holds_anything() -> None:
    """len_i = best_len = 0: no division, no transfer; in turn."""
    policy, crowd = _mooncake(), books(Book(), Book(), peer_link=FAST)
    assert [chosen(policy.decide(PROMPT, crowd)) for _ in range(4)] == [("a", "cold"), ("b", "cold")] * 2


def test_a_threshold_of_one_brings_every_difference_and_nothing_to_the_holder_itself() -> None:
    crowd = books(Book(pending=20_000, cached=8000), Book(cached=7999), peer_link=FAST)
    decision = _mooncake(balancing_threshold=1).decide(PROMPT, crowd)
    assert isinstance(decision, Decision)
    assert decision.pull is not None
    assert decision.pull.tokens == 1
    crowd = books(Book(cached=8000), Book(pending=20_000), peer_link=FAST)
    assert chosen(_mooncake(balancing_threshold=1).decide(PROMPT, crowd)) == ("a", "cached")


def test_what_is_not_confirmed_is_not_pulled() -> None:
    guessed = PrefixMatch(tokens=8000, predicted_tokens=8000)
    crowd = books(Book(pending=20_000, cached=guessed), Book(), peer_link=FAST)
    assert chosen(_mooncake().decide(PROMPT, crowd)) == ("b", "moved")


def test_the_last_token_is_computed_even_when_all_is_held() -> None:
    crowd = books(Book(pending=20_000, cached=10_000), Book(), peer_link=FAST)
    decision = _mooncake().decide(PROMPT, crowd)
    assert isinstance(decision, Decision)
    assert decision.pull is not None
    assert decision.pull.tokens == 9999


def test_bandwidth_may_be_an_option_where_the_fleet_names_no_link() -> None:
    """b: 8000 tokens at 10 GB/s in 0.08 s + 0.2 s, against 0.5 + 0.2; at 1 GB/s, 0.8 + 0.2."""
    crowd = books(Book(pending=5000, cached=8000), Book())
    assert chosen(_mooncake(transfer_bytes_per_s=10e9).decide(PROMPT, crowd)) == ("b", "migrated")
    assert chosen(_mooncake(transfer_bytes_per_s=1e9).decide(PROMPT, crowd)) == ("a", "cached")
    crowd = books(Book(pending=5000, cached=8000), Book(), peer_link=LINK)
    assert chosen(_mooncake(transfer_bytes_per_s=10e9).decide(PROMPT, crowd)) == ("a", "cached")


def test_the_queue_is_in_the_worker_s_own_seconds_and_progress_counts() -> None:
    """a is three times slower: 0.4 s ahead take 1.2, its 0.2 s of prefill 0.6: 1.8 against b's 0.7 + 1.0.
    A second later a has 0.2 + 0.6 left, and b 1.0.
    """
    crowd = books(Book(pending=4000, cached=8000, scale=3.0), Book(pending=7000))
    assert chosen(_mooncake().decide(PROMPT, crowd))[0] == "b"
    crowd = books(Book(pending=4000, cached=8000, scale=3.0), Book(pending=7000), now_s=1.0)
    assert chosen(_mooncake().decide(PROMPT, crowd))[0] == "a"


def test_over_the_limit_it_is_rejected_until_the_queue_is_shorter() -> None:
    """The best of both is 0.5 + 1.0 s; the limit is 1.2 s: 0.3 s from now it can be kept."""
    crowd = books(Book(pending=5000), Book(pending=9000))
    answer = _mooncake(ttft_limit_s=1.2).decide(PROMPT, crowd)
    assert isinstance(answer, Rejection)
    assert answer.reason == "ttft"
    assert answer.retry_after_s == pytest.approx(0.3)
    assert chosen(_mooncake(ttft_limit_s=1.51).decide(PROMPT, crowd))[0] == "a"
    crowd.paces[0].overhead_s = 0.02
    assert isinstance(_mooncake(ttft_limit_s=1.51).decide(PROMPT, crowd), Rejection)
    patient = RequestView(prompt_tokens=10_000, ttft_limit_s=2.0)
    assert chosen(_mooncake(ttft_limit_s=1.2).decide(patient, crowd))[0] == "a"


def test_steps_above_the_limit_reject_too() -> None:
    """A step takes 10 ms whatever is in it."""
    answer = _mooncake(itl_limit_s=0.009).decide(PROMPT, books(Book(decoding=3)))
    assert isinstance(answer, Rejection)
    assert (answer.reason, answer.retry_after_s) == ("itl", pytest.approx(300 * 0.01 / 2))
    assert chosen(_mooncake(itl_limit_s=0.011).decide(PROMPT, books(Book(decoding=3))))[0] == "a"


def test_an_empty_prompt_and_a_fleet_of_which_nothing_is_known() -> None:
    assert chosen(_mooncake().decide(RequestView(), fleet(0))) == ("a", "cold")
    assert (
        chosen(_mooncake().decide(RequestView(), books(Book(cached=5), Book(), peer_link=FAST)))[1] == "cold"
    )


@pytest.mark.parametrize(
    "wrong", [{"balancing_threshold": 0.9}, {"transfer_bytes_per_s": 0}, {"ttft_limit_s": -1}]
)
def test_wrong_options_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(PolicyError, match=f"'mooncake', option '{next(iter(wrong))}'"):
        make_policy("mooncake", wrong)
