from __future__ import annotations

from random import Random

import pytest

from kvroute.policies import preble
from kvroute.policies.preble import Preble
from kvroute.policies.registry import PolicyError, make_policy
from kvroute.types import Fleet, RequestView

from .books import Book, books, chosen
from .fleets import fleet

PROMPT = RequestView(prompt_tokens=1000)
"""0.1 s of prefill, and with 10 tokens of output another 0.1 s of decode."""
OUTPUT = 10.0


def _preble(window_s: float = 180.0) -> Preble:
    return Preble(Preble.Options(window_s))


def _at(now_s: float, *workers: Book, **fields: object) -> Fleet:
    return books(*workers, now_s=now_s, output_tokens=OUTPUT, **fields)


def test_most_of_the_prompt_cached_is_exploited_whatever_the_load() -> None:
    policy = _preble()
    assert chosen(policy.decide(PROMPT, _at(0, Book(pending=90_000, cached=501), Book()))) == ("a", "exploit")
    assert chosen(policy.decide(PROMPT, _at(0, Book(cached=500), Book()))) == ("b", "explore")


def test_of_those_that_hold_the_longest_the_one_with_the_least_sent_of_late() -> None:
    """a was sent 0.1 + 0.1 s; b nothing; c holds less."""
    policy = _preble()
    assert chosen(policy.decide(PROMPT, _at(0, Book(), Book(), Book())))[0] == "a"
    crowd = _at(1, Book(cached=900), Book(cached=900), Book(cached=800))
    assert [chosen(policy.decide(PROMPT, crowd))[0] for _ in range(3)] == ["b", "b", "a"]  # 0.11 each


def test_exploring_adds_recent_load_and_the_prefill_of_what_is_missing() -> None:
    """a was sent 0.1 + 0.1 = 0.2 s. Then a: 0.2 + 0.06 against b: 0.1; and in the end, b having been sent
    0.2 s as well, a: 0.2 + 0.06 against b: 0.2 + 0.1.
    """
    policy = _preble()
    assert chosen(policy.decide(PROMPT, _at(0, Book(), Book()))) == ("a", "explore")
    crowd = _at(1, Book(cached=400), Book())
    assert chosen(policy.decide(PROMPT, crowd)) == ("b", "explore")
    assert chosen(policy.decide(PROMPT, crowd)) == ("a", "explore")


def test_what_left_the_window_no_longer_counts() -> None:
    policy = _preble(window_s=60.0)
    policy.decide(PROMPT, _at(0, Book(), Book()))  # to a
    crowd = [Book(cached=400), Book()]
    assert chosen(policy.decide(PROMPT, _at(60, *crowd)))[0] == "b"
    assert chosen(policy.decide(PROMPT, _at(60.1, *crowd)))[0] == "a"


def _with_a_past() -> Preble:
    """Both were sent 0.01 + 0.1 s: a 1000 tokens of which 900 were cached, b 100 cold ones."""
    policy = _preble()
    assert chosen(policy.decide(PROMPT, _at(0, Book(cached=900), Book()))) == ("a", "exploit")
    assert chosen(policy.decide(RequestView(prompt_tokens=100), _at(0, Book(), Book()))) == ("b", "explore")
    return policy


@pytest.mark.parametrize(("room", "winner"), [(1000, "b"), (5000, "a")])
def test_eviction_costs_what_is_likely_to_be_used_again(room: int, winner: str) -> None:
    """Both hold 944 tokens. a lacks 600, which takes 0.06 s, and with room for 1000 evicts 544, of which 9 in
    10 are used again: 0.049 s more. b lacks 610, 0.061 s, and what it evicts nobody uses.
    """
    crowd = _at(1, Book(cached=400, kv_room=room), Book(cached=390, kv_room=room), held_blocks=[59, 59])
    assert chosen(_with_a_past().decide(PROMPT, crowd)) == (winner, "explore")


@pytest.mark.parametrize(("cached", "winner"), [(240, "a"), (230, "b")])
def test_no_more_is_evicted_than_there_is_to_put_in(cached: int, winner: str) -> None:
    """Both hold far more than they have room for. b lacks 500: 0.05 s. a lacks 260 and loses 9 in 10 of 260:
    0.0494 s; or 270: 0.0513 s.
    """
    crowd = _at(1, Book(cached=cached, kv_room=10), Book(kv_room=10), held_blocks=[10_000, 10_000])
    assert chosen(_with_a_past().decide(RequestView(prompt_tokens=500), crowd)) == (winner, "explore")


def test_running_requests_hold_tokens_of_which_the_index_may_not_know() -> None:
    """As above with room for 1000; the index knows of nothing, 944 tokens are charged."""
    for fields in ({"held_blocks": [1, 1]}, {}):
        crowd = _at(1, Book(cached=400, kv_room=1000), Book(cached=390, kv_room=1000), **fields)
        crowd.loads[0].charge(0.0, prompt_tokens=900, output_tokens=44)
        assert chosen(_with_a_past().decide(PROMPT, crowd)) == ("b", "explore")


def test_ties_go_in_turn() -> None:
    crowd = _at(0, *[Book(cached=900)] * 3)
    assert [chosen(policy.decide(PROMPT, crowd))[0] for policy in [_preble()] * 3] == list("abc")


def test_the_window_is_bounded_and_its_sums_are_those_of_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preble, "MAX_DECISIONS", 50)
    seed = 3
    print(f"seed {seed}")
    random, policy = Random(seed), _preble(window_s=30.0)
    now_s, fullest = 0.0, 0
    for _ in range(1000):
        now_s += random.choice([*[0.0, 0.1, 0.2] * 30, 20.0])
        crowd = _at(now_s, *(Book(cached=random.randint(0, 1000)) for _ in range(random.randint(1, 8))))
        policy.decide(PROMPT, crowd)
        sent, recent = policy._sent, policy._recent
        assert len(sent) <= 50
        fullest = max(fullest, len(sent))
        assert sent[0].at_s >= now_s - 30.0
        assert recent.keys() == {one.worker_id for one in sent}
        for name, sums in recent.items():
            own = [one for one in sent if one.worker_id == name]
            assert sums.decisions == len(own)
            assert sums.load_s == pytest.approx(sum(one.load_s for one in own))
            assert sums.cached_tokens == sum(one.cached_tokens for one in own)
            assert sums.prompt_tokens == sum(one.prompt_tokens for one in own)
    assert fullest == 50


def test_an_empty_prompt_and_a_fleet_of_which_nothing_is_known() -> None:
    policy = _preble()
    assert chosen(policy.decide(RequestView(), fleet(0))) == ("a", "explore")
    assert chosen(policy.decide(RequestView(), _at(0, Book(cached=5)))) == ("a", "explore")


def test_wrong_options_are_named() -> None:
    with pytest.raises(PolicyError, match=r"'preble', option 'window_s': .*greater than 0, got 0"):
        make_policy("preble", {"window_s": 0})
