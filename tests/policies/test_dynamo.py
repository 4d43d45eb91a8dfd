from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from kvroute.policies.dynamo import Dynamo
from kvroute.policies.registry import PolicyError, make_policy
from kvroute.types import Fleet, RequestView, Role

from .books import Book, books, chosen
from .fleets import fleet

BLOCK = 16
PROMPT = RequestView(prompt_tokens=10 * BLOCK)
KEYS = list(range(100, 110))


def _with_keys(crowd: Fleet, *active: list[int]) -> Fleet:
    """The same fleet, where each worker's running requests have these keys."""
    for load, keys in zip(crowd.loads, active, strict=True):
        load.active_keys.update({key: 1 for key in keys})
    return replace(crowd, keys=KEYS, block_tokens=BLOCK)


def _dynamo(**options: float) -> Dynamo:
    return Dynamo(Dynamo.Options(**options))  # type: ignore[arg-type]


def test_blocks_to_prefill_and_blocks_in_use_add_up() -> None:
    """a: (320 + 160)/16 - 5 = 25 to prefill, 20 in use of which 5 are the prompt's: 20 + 5 = 25; 50 in all.
    b: 160/16 = 10 to prefill, 30 in use and 10 new: 40; 50 in all, and one more block in use makes it 51.
    """
    crowd = books(Book(pending=320, cached=5 * BLOCK), Book())
    others = list(range(200, 215))
    tied = _with_keys(crowd, KEYS[:5] + others, list(range(300, 330)))
    picks = Counter(chosen(_dynamo(seed=seed).decide(PROMPT, tied))[0] for seed in range(50))
    assert set(picks) == {"a", "b"}
    crowd.loads[1].active_keys[330] = 1
    assert {chosen(_dynamo(seed=seed).decide(PROMPT, tied)) for seed in range(50)} == {("a", "cached")}


def test_the_scale_weighs_prefill_against_memory() -> None:
    """a holds 6 of 10 blocks: 4 to prefill, 20 in use with this; b: 10 to prefill, 12 in use with this.

    s = 1: 24 against 22. s = 2: 28 against 32.
    """
    crowd = _with_keys(
        books(Book(cached=6 * BLOCK), Book()), KEYS[:6] + list(range(200, 210)), list(range(300, 302))
    )
    assert chosen(_dynamo().decide(PROMPT, crowd)) == ("b", "moved")
    assert chosen(_dynamo(prefill_load_scale=2.0).decide(PROMPT, crowd)) == ("a", "cached")


def test_a_block_in_use_by_running_requests_is_counted_once() -> None:
    """No cache is known; b runs the same prompt: 10 blocks in use with this one, against 10 + 1 on a."""
    crowd = _with_keys(books(Book(), Book()), [1], KEYS)
    assert chosen(_dynamo(seed=0).decide(PROMPT, crowd))[0] == "b"
    crowd.loads[1].active_keys.update({2: 1, 3: 1})  # 12 now
    assert chosen(_dynamo(seed=0).decide(PROMPT, crowd))[0] == "a"


@pytest.mark.parametrize("shared", range(11))
def test_the_union_is_exact_wherever_prompts_part(shared: int) -> None:
    """a has 10 blocks in use, `shared` of them the prompt's: 20 - shared in all. b has so many less one, or
    one more, with the prompt's 10 among them.
    """
    active = KEYS[:shared] + list(range(500, 510 - shared))
    for more, winner in ((-1, "b"), (1, "a")):
        beside = 10 - shared + more
        if beside < 0:
            continue
        crowd = _with_keys(books(Book(), Book()), active, KEYS + list(range(900, 900 + beside)))
        assert chosen(_dynamo(seed=0).decide(PROMPT, crowd))[0] == winner


def test_prefill_counts_in_full_until_the_first_token() -> None:
    crowd = books(Book(pending=160), Book())
    charge = crowd.loads[1].charge(0.0, uncached_tokens=170, prompt_tokens=160)
    assert chosen(_dynamo(seed=0).decide(PROMPT, crowd))[0] == "a"
    charge.first_byte(0.0)
    assert chosen(_dynamo(seed=0).decide(PROMPT, crowd))[0] == "b"


def test_without_keys_the_union_is_estimated_from_tokens() -> None:
    """a: 10 - 4 to prefill, 128/16 + 10 - 4 = 14 in use: 20. b: 10 and 128/16 + 10 = 18: 28; idle c: 20."""
    crowd = books(Book(cached=64), Book(), Book())
    for load in crowd.loads[:2]:
        load.charge(0.0, prompt_tokens=128).first_byte(0.0)
    picks = {chosen(_dynamo(seed=seed).decide(PROMPT, crowd))[0] for seed in range(50)}
    assert picks == {"a", "c"}


def test_a_prompt_of_less_than_a_block_adds_none() -> None:
    crowd = Fleet(0.0, fleet(0, 0).workers, fleet(0, 0).loads, block_tokens=BLOCK)
    crowd.loads[0].active_keys[1] = 1
    short = RequestView(prompt_tokens=3)
    assert {chosen(_dynamo(seed=seed).decide(short, crowd)) for seed in range(20)} == {("b", "cold")}


def test_ties_are_drawn_evenly_and_by_the_seed() -> None:
    crowd = fleet(0, 0, 0, 0)
    draws = [[chosen(policy.decide(PROMPT, crowd))[0] for _ in range(4000)] for policy in _twins()]
    assert draws[0] == draws[1]
    counts = Counter(draws[0])
    assert all(850 < counts[name] < 1150 for name in "abcd"), counts


def _twins() -> list[Dynamo]:
    return [_dynamo(seed=7), _dynamo(seed=7)]


def test_a_match_longer_than_the_prompt_is_the_prompt() -> None:
    """An estimate of 1000 tokens must not make a backlog of 100 vanish: 100 against 160."""
    crowd = books(Book(pending=100, cached=1000), Book(pending=0))
    decision = _dynamo(prefill_load_scale=32).decide(PROMPT, crowd)
    assert (chosen(decision), decision.matched_tokens) == (("a", "cached"), 160)
    crowd = books(Book(pending=300, cached=1000), Book(pending=0))
    assert chosen(_dynamo(prefill_load_scale=32).decide(PROMPT, crowd)) == ("b", "moved")


def test_random_fleets_agree_with_the_formula_written_out() -> None:
    seed = 5
    print(f"seed {seed}")
    random = Random(seed)
    for _ in range(300):
        count, scale = random.randint(1, 9), random.choice([1.0, 8.0, 32.0])
        crowd = books(
            *(
                Book(pending=random.choice([0, 50, 700]), cached=BLOCK * random.randint(0, 10))
                for _ in range(count)
            ),
            names="abcdefghi",
        )
        active = [
            KEYS[: random.randint(0, 10)] + random.sample(range(500, 600), random.randint(0, 20))
            for _ in range(count)
        ]
        crowd = _with_keys(crowd, *active)
        costs = {
            worker.id: scale * max(0.0, (load.pending_prefill_tokens + 160) / 16 - match.tokens / 16)
            + len({*keys, *KEYS})
            for worker, load, match, keys in zip(
                crowd.workers, crowd.loads, crowd.matches, active, strict=True
            )
        }
        name, _ = chosen(_dynamo(prefill_load_scale=scale, seed=1).decide(PROMPT, crowd))
        assert costs[name] == pytest.approx(min(costs.values()))


@pytest.mark.parametrize("wrong", [{"prefill_load_scale": -1}, {"prefill_load_scale": "inf"}, {"seed": "x"}])
def test_wrong_options_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(PolicyError, match=f"'dynamo', option '{next(iter(wrong))}'"):
        make_policy("dynamo", wrong)


def _as(role: Role, crowd: Fleet) -> Fleet:
    return replace(crowd, workers=[dataclasses.replace(worker, role=role) for worker in crowd.workers])


def test_memory_does_not_count_where_workers_only_prefill() -> None:
    """The same fleet as above, where 20 blocks in use against 12 made b the cheaper."""
    crowd = _with_keys(
        books(Book(cached=6 * BLOCK), Book()), KEYS[:6] + list(range(200, 210)), list(range(300, 302))
    )
    assert chosen(_dynamo().decide(PROMPT, crowd)) == ("b", "moved")
    assert chosen(_dynamo().decide(PROMPT, _as(Role.PREFILL, crowd))) == ("a", "cached")


def test_who_decodes_has_the_fewest_prompt_tokens_decoding() -> None:
    """a: 900 tokens and an answer of 10 expected; b: 850 and one of 500. Ties are drawn."""
    crowd = _as(Role.DECODE, fleet(0, 0))
    for load, prompt, output in zip(crowd.loads, (900, 850), (10.0, 500.0), strict=True):
        load.charge(0.0, prompt_tokens=prompt, output_tokens=output).first_byte(0.0)
    assert _dynamo().choose_decode(PROMPT, crowd) == 1
    crowd.loads[1].charge(0.0, prompt_tokens=50).first_byte(0.0)
    assert {_dynamo(seed=seed).choose_decode(PROMPT, crowd) for seed in range(20)} == {0, 1}
