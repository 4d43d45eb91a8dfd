"""What holds for every policy there is, third-party ones included where they are installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from random import Random

import pytest
from msgspec.structs import replace

from kvroute.load import WorkerLoad
from kvroute.policies.costs.links import Link
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.registry import make_policy, policy_names
from kvroute.types import Decision, Fleet, PrefixMatch, RequestView, Worker

DRAWN = {"random", "power_of_two"}
"""Chance is their rule."""
ROTATED = {"round_robin"}
BLOCK = 16
SEED = 11
LONG = 8000
"""Tokens of a prompt with more blocks than there are workers, so that every worker may hold another part."""


@cache
def _fleets() -> list[tuple[int, Fleet]]:
    """Prompts' tokens, and fleets to decide on. Shared by all tests: no policy touches them."""
    random, sizes = Random(SEED), [1, 2, 3, 5, 8, 16, 64]
    return [
        (prompt, _fleet(random, count, prompt)) for prompt in [0, 1, 15, 500, *[LONG] * 4] for count in sizes
    ]


def _fleet(random: Random, count: int, prompt: int) -> Fleet:
    """All that may differ between workers differs, so that no two are equal in any rule's eyes."""
    blocks = prompt // BLOCK
    keys = [random.getrandbits(64) for _ in range(blocks)]
    cached = random.sample(range(max(blocks + 1, count)), count)
    return Fleet(
        random.uniform(0, 5),
        [Worker(f"w{number}", f"http://w{number}:8000", block_size_tokens=BLOCK) for number in range(count)],
        [_load(random, number, keys) for number in random.sample(range(1, 3 * count), count)],
        [_match(random, min(held, blocks) * BLOCK) for held in cached],
        random.sample(range(10_000), count),
        keys,
        BLOCK,
        [_pace(random) for _ in range(count)],
        output_tokens=random.uniform(1, 500),
        arrivals_per_s=random.uniform(0, 2),
        peer_link=random.choice([None, Link(40e9, 1e-3)]),
    )


def _load(random: Random, requests: int, keys: Sequence[int]) -> WorkerLoad:
    load = WorkerLoad(reported_waiting=requests // 2, kv_usage_ratio=random.random())
    for _ in range(requests):
        tokens = random.randint(1, 9000)
        charge = load.charge(
            0.0,
            prefill_s=tokens * random.uniform(1e-5, 1e-4),
            prompt_tokens=tokens,
            uncached_tokens=random.randint(0, tokens),
            output_tokens=random.uniform(1, 500),
            keys=[*keys[: random.randint(0, len(keys))], random.getrandbits(64)],
        )
        if random.random() < 0.7:
            charge.first_byte(1.0)
    return load


def _match(random: Random, tokens: int) -> PrefixMatch:
    gpu = random.randint(0, tokens)
    cpu = random.randint(gpu, tokens)
    return PrefixMatch(tokens, gpu, cpu, random.randint(cpu, tokens), random.randint(0, tokens))


def _pace(random: Random) -> Pace:
    speed = random.choice(list(PRESETS.values()))
    return Pace(
        speed, random.uniform(0.3, 3), random.uniform(0.3, 3), kv_tokens=random.randint(1000, 900_000)
    )


def _books(load: WorkerLoad) -> list[object]:
    """All of its books, as they are now."""
    plain = [getattr(load, field.name) for field in fields(load)]
    return [dict(value) if isinstance(value, dict) else value for value in plain]


@pytest.mark.parametrize("name", policy_names())
def test_one_of_the_offered_is_chosen_and_nothing_is_touched(name: str) -> None:
    print(f"seed {SEED}")
    policy = make_policy(name, {})
    for prompt, crowd in _fleets():
        before = [_books(load) for load in crowd.loads]
        decision = policy.decide(RequestView(prompt_tokens=prompt, session_id="s"), crowd)
        assert isinstance(decision, Decision)
        assert decision.candidate.prefill in crowd.workers
        assert decision.candidate.decode in crowd.workers
        assert decision.reason.isidentifier()
        assert 0 <= decision.matched_tokens <= prompt
        pull = decision.pull
        assert pull is None or (pull.source in crowd.workers and 0 < pull.tokens < prompt)
        assert [_books(load) for load in crowd.loads] == before
        for load in crowd.loads:
            load.check_integrity()


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("prompt_tokens", [0, 1, 700])
def test_a_fleet_of_which_nothing_is_known_is_enough(name: str, prompt_tokens: int) -> None:
    policy = make_policy(name, {})
    for count in (1, 3):
        crowd = Fleet(
            0.0,
            [Worker(f"w{number}", f"http://w{number}:8000") for number in range(count)],
            [WorkerLoad() for _ in range(count)],
        )
        decision = policy.decide(RequestView(prompt_tokens=prompt_tokens), crowd)
        assert isinstance(decision, Decision)
        assert decision.candidate.prefill in crowd.workers
        assert decision.matched_tokens == 0


@pytest.mark.parametrize("name", sorted({*policy_names()} - DRAWN - ROTATED))
def test_the_order_of_workers_does_not_matter(name: str) -> None:
    print(f"seed {SEED}")
    random = Random(SEED)
    for crowd in (crowd for prompt, crowd in _fleets() if prompt == LONG):
        order = random.sample(range(len(crowd.workers)), len(crowd.workers))
        columns = ("workers", "loads", "matches", "held_blocks", "paces")
        shuffled = replace(crowd, **{name: [getattr(crowd, name)[at] for at in order] for name in columns})
        request = RequestView(prompt_tokens=LONG, session_id="s")
        one, other = (make_policy(name, {}).decide(request, each) for each in (crowd, shuffled))
        assert isinstance(one, Decision)
        assert isinstance(other, Decision)
        assert one.candidate == other.candidate
        assert one.reason == other.reason


@pytest.mark.parametrize("name", policy_names())
def test_the_same_seed_makes_the_same_choices(name: str) -> None:
    options = {"seed": 1} if "seed" in make_policy(name, {}).Options.__dataclass_fields__ else {}
    twins = [make_policy(name, options) for _ in range(2)]
    workers = [Worker(f"w{number}", f"http://w{number}:8000") for number in range(8)]
    crowd = Fleet(0.0, workers, [WorkerLoad() for _ in workers])
    for _ in range(50):
        one, other = (policy.decide(RequestView(prompt_tokens=100), crowd) for policy in twins)
        assert one == other
