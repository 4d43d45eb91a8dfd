"""Columns give the prices of `price_sides`, whatever a fleet looks like and whatever has happened to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.load import Charge, WorkerLoad
from kvroute.policies.costs.links import Link, PdLinks
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.pricing import Offers, Sides, Weights, price_sides
from kvroute.policies.pricing_columns import MAX_FLEETS, MIN_WORKERS, ColumnPricing
from kvroute.policies.ttft import Ttft
from kvroute.types import (
    NO_MATCH,
    Decision,
    Fleet,
    FoundMatches,
    Hold,
    PrefixMatch,
    Priced,
    Rejection,
    RequestView,
    Role,
    Worker,
)

WEIGHTS = Weights(2.0, 0.05, 0.4, 0.2)
NOW_S = 5000.0
SEEDS = st.integers(0, 2**32 - 1)


def columns_of(request: RequestView, fleet: Fleet, pricing: ColumnPricing | None = None) -> Offers:
    pricing = pricing or ColumnPricing()
    pricing.price(request, fleet, WEIGHTS)
    columns = pricing.price(request, fleet, WEIGHTS)
    assert columns is not None
    return columns


def totals(sides: Sides) -> list[float]:
    return [side.start_s + side.stay_s for side in sides]


def assert_same(columns: Any, sides: Sides) -> None:
    assert columns.total_s.tolist() == pytest.approx(totals(sides), rel=1e-9)
    assert [columns[at] for at in range(len(sides))] == sides
    assert columns.longest_cached == sides.longest_cached
    assert columns.shortest_queue_s == pytest.approx(sides.shortest_queue_s, rel=1e-9)
    assert columns.shortest_prefill_s == pytest.approx(sides.shortest_prefill_s, rel=1e-9)


def assert_same_choice(at: int, other: int, sides: Sides, fleet: Fleet) -> None:
    """The same worker, unless the last digits decide between two that are not alike."""
    assert totals(sides)[at] == pytest.approx(totals(sides)[other], rel=1e-9)
    assert at == other or state_of(at, fleet) != state_of(other, fleet)


def state_of(at: int, fleet: Fleet) -> tuple[str, str, PrefixMatch | None]:
    return repr(fleet.loads[at]), repr(fleet.paces[at]), fleet.matches[at] if fleet.matches else None


# --- random fleets -----------------------------------------------------------------------------


def random_load(source: Random) -> WorkerLoad:
    load = WorkerLoad(others_prefill_s=source.choice([0.0, 0.0, 0.3]))
    load.add_others(others := source.choice([0, 0, 3]), others * source.randrange(9000))
    for _ in range(source.choice([0, 0, 1, 5, 20])):
        tokens = source.choice([0, 100, source.randrange(20_000)])
        charge = load.charge(
            NOW_S - source.random() * 40,
            prefill_s=tokens * 2e-5,
            prompt_tokens=tokens,
            uncached_tokens=tokens,
            output_tokens=300.0,
        )
        for news in (charge.first_byte, charge.release):
            if source.random() < 0.6:
                news(NOW_S - source.random() * 20)
    if source.random() < 0.3:
        load.report_kv(source.random(), source.choice([9000, 100_000]))
    return load


def random_pace(source: Random) -> Pace:
    speed = PRESETS[source.choice(list(PRESETS))]
    return Pace(
        speed,
        source.choice([0.5, 1.0, 1.0, 2.7]),
        source.choice([0.5, 1.0, 1.0, 2.7]),
        kv_tokens=source.choice([2**40, speed.kv_tokens, 20_000, 1]),
        match_reliability=source.choice([1.0, 0.3]),
    )


def random_match(source: Random, prompt_tokens: int) -> PrefixMatch:
    gpu, cpu, confirmed, tokens = sorted(source.randrange(prompt_tokens + 100) for _ in range(4))
    predicted = source.randrange(tokens + 1)
    return source.choice(
        [
            NO_MATCH,
            PrefixMatch(gpu, gpu, gpu, gpu),
            PrefixMatch(confirmed, gpu, cpu, confirmed),
            PrefixMatch(tokens, gpu, cpu, confirmed, predicted),
            PrefixMatch(tokens, predicted_tokens=tokens),
        ]
    )


def random_case(source: Random) -> tuple[RequestView, Fleet]:
    """A request, and a fleet in which some workers are equal."""
    count = source.randrange(MIN_WORKERS, MIN_WORKERS + 8)
    prompt_tokens = source.choice([0, 1, 40, source.randrange(60_000)])
    matches = [random_match(source, prompt_tokens) for _ in range(count)]
    loads, paces = [random_load(source) for _ in matches], [random_pace(source) for _ in matches]
    for at in range(0, count, source.choice([1, 3, 100])):
        loads[at], paces[at], matches[at] = WorkerLoad(), Pace(kv_tokens=9000), matches[0]
    fleet = Fleet(
        NOW_S,
        [Worker(str(at), f"http://w{at}:8000", source.choice(list(Role))) for at in range(count)],
        tuple(loads),
        source.choice([matches, matches, ()]),
        paces=tuple(paces),
        output_tokens=source.choice([0.0, 1.0, 700.0]),
        arrivals_per_s=source.choice([0.0, 0.4]),
        promised_s=source.choice([(), [source.choice([0.0, 0.7]) for _ in matches]]),
        may_hold=source.random() < 0.5,
    )
    return RequestView(prompt_tokens=prompt_tokens), fleet


@given(SEEDS)
def test_prices_and_choices_are_those_of_price_sides(seed: int) -> None:
    print(f"seed {seed}")
    request, fleet = random_case(Random(seed))
    columns, sides = columns_of(request, fleet), price_sides(request, fleet, WEIGHTS, fleet.paces)
    assert_same(columns, sides)
    for start in range(len(sides)):
        (at, total_s), (other, other_s) = columns.cheapest(start), sides.cheapest(start)
        assert_same_choice(at, other, sides, fleet)
        assert total_s == pytest.approx(other_s, rel=1e-9)


@given(SEEDS)
def test_decisions_are_those_without_columns(seed: int) -> None:
    print(f"seed {seed}")
    source = Random(seed)
    request, fleet = random_case(source)
    request = msgspec.structs.replace(request, ttft_limit_s=source.choice([None, None, 0.05]))
    fleet = msgspec.structs.replace(
        fleet,
        pd_links=source.choice([None, None, PdLinks.uniform(Link(1e10, 1e-3))]),
        peer_link=source.choice([None, Link(1e10)]),
    )
    if fleet.pd_links is not None:
        fleet.workers[0:2] = [Worker("p", "http://p:8000", Role.PREFILL), Worker("d", "http://d:8000")]
    options = Ttft.Options(
        hold=source.random() < 0.5,
        max_queue_s=source.choice([None, 0.002]),
        admission=source.choice(["off", "slo"]),
    )
    by_columns, by_sides = Ttft(options), Ttft(options)
    plain = msgspec.structs.replace(fleet, loads=list(fleet.loads))
    sides = price_sides(request, fleet, WEIGHTS, fleet.paces)
    for _ in range(5):
        answer, other = by_columns.decide(request, fleet), by_sides.decide(request, plain)
        if fleet.pd_links is None or isinstance(answer, Rejection):
            assert_same_answer(answer, other, fleet, sides)
        else:
            assert_same_pair(answer, other, by_sides.price(request, plain))


def assert_same_pair(answer: Any, other: Any, priced: Sequence[Priced]) -> None:
    """The same pair, or one that is as dear: of many, two often are, but for the last digits."""
    assert type(answer) is type(other)
    if isinstance(answer, Hold):
        dear, its = (
            min(one.cost.total_s for one in priced if one.candidate.prefill.id == each.worker.id)
            for each in (answer, other)
        )
        assert dear == pytest.approx(its, rel=1e-9)
        assert answer.rank_s == pytest.approx(other.rank_s, rel=1e-9)
        return
    assert answer.cost.total_s == pytest.approx(other.cost.total_s, rel=1e-9)
    if answer.candidate == other.candidate:
        costs = map(msgspec.structs.astuple, (answer.cost, other.cost))
        assert next(costs) == pytest.approx(next(costs), rel=1e-9, abs=1e-12)
        assert answer == msgspec.structs.replace(other, cost=answer.cost)


def assert_same_answer(answer: Any, other: Any, fleet: Fleet, sides: Sides) -> None:
    assert type(answer) is type(other)
    if isinstance(answer, Rejection):
        assert answer.reason == other.reason
        assert answer.retry_after_s == pytest.approx(other.retry_after_s, rel=1e-9)
        return
    worker, its = (
        each.candidate.prefill if isinstance(each, Decision) else each.worker for each in (answer, other)
    )
    assert_same_choice(fleet.workers.index(worker), fleet.workers.index(its), sides, fleet)
    if worker is its:
        if isinstance(answer, Hold):
            answer = msgspec.structs.replace(answer, rank_s=pytest.approx(answer.rank_s, rel=1e-9))
        assert answer == other


# --- rows are never stale ----------------------------------------------------------------------


def large_fleet(*matches: PrefixMatch) -> Fleet:
    count = MIN_WORKERS
    return Fleet(
        NOW_S,
        [Worker(str(at), f"http://w{at}:8000") for at in range(count)],
        tuple(WorkerLoad() for _ in range(count)),
        [*matches, *[NO_MATCH] * (count - len(matches))] if matches else (),
        paces=tuple(Pace() for _ in range(count)),
        arrivals_per_s=0.4,
    )


def charge_first(fleet: Fleet, now_s: float = NOW_S - 1) -> Charge:
    tokens = {"prompt_tokens": 9000, "uncached_tokens": 9000, "output_tokens": 300.0}
    return fleet.loads[0].charge(now_s, prefill_s=2.0, **tokens)


def assigned(name: str, value: Any) -> Callable[[Fleet], None]:
    def assign(fleet: Fleet) -> None:
        setattr(fleet.paces[0], name, value)

    return assign


WRITERS: dict[str, Callable[[Fleet], Any]] = {
    "charged": charge_first,
    "first byte": lambda fleet: charge_first(fleet).first_byte(NOW_S),
    "released before its first byte": lambda fleet: fleet.loads[0].queued.release(NOW_S),
    "released": lambda fleet: fleet.loads[0].running.release(NOW_S),
    "others": lambda fleet: fleet.loads[0].add_others(2, 3000),
    "reported": lambda fleet: fleet.loads[0].report_kv(0.9, 20_000),
    "prefill_scale": assigned("prefill_scale", 2.0),
    "decode_scale": assigned("decode_scale", 2.0),
    "kv_tokens": assigned("kv_tokens", 10_000),
    "speed": assigned("speed", PRESETS["qwen3-32b-h100-tp2"]),
    "match_reliability": assigned("match_reliability", 0.1),
    "links": lambda fleet: fleet.paces[0].links.update(dict.fromkeys(fleet.paces[0].links, Link(1e6))),
}


class Burdened(WorkerLoad):
    """With the charges that it begins with."""

    queued: Charge
    running: Charge


@pytest.mark.parametrize("writer", WRITERS)
def test_whatever_changes_a_price_is_seen(writer: str) -> None:
    fleet = large_fleet(PrefixMatch(3000, 16, 1000, 2000, 100))
    load = Burdened()
    load.running = load.charge(0.0, prefill_s=1.0, prompt_tokens=6000, output_tokens=300.0)
    load.running.first_byte(NOW_S - 3)
    load.queued = load.charge(NOW_S, prefill_s=1.0, prompt_tokens=6000, uncached_tokens=6000)
    fleet = msgspec.structs.replace(fleet, loads=(load, *fleet.loads[1:]))
    fleet.paces[0].kv_tokens = 20_000  # 12,300 of them are in the books
    request, pricing = RequestView(prompt_tokens=3000), ColumnPricing()
    columns_of(request, fleet, pricing)
    before = price_sides(request, fleet, WEIGHTS, fleet.paces)
    WRITERS[writer](fleet)
    after = price_sides(request, fleet, WEIGHTS, fleet.paces)
    assert totals(after)[0] != pytest.approx(totals(before)[0], rel=1e-6), "the price was to change"
    assert_same(pricing.price(request, fleet, WEIGHTS), after)


def test_rows_are_the_same_for_all_weights() -> None:
    """The next request may be priced by others: nothing of the last ones is left."""
    request, fleet = random_case(Random(7))
    pricing = ColumnPricing()
    columns_of(request, fleet, pricing)
    for weights in (WEIGHTS, Weights(0.0, 0.0, 0.0, 0.0), Weights(1.0, 3.0, 5.0, 0.7), WEIGHTS):
        sides = price_sides(request, fleet, weights, fleet.paces)
        assert_same(pricing.price(request, fleet, weights), sides)


@given(SEEDS)
def test_matches_that_say_who_holds_something_are_priced_as_others(seed: int) -> None:
    print(f"seed {seed}")
    source = Random(seed)
    request, fleet = random_case(source)
    found = FoundMatches(len(fleet.loads))
    for at in source.choices(range(len(found)), k=source.choice([0, 1, 20])):
        found[at] = random_match(source, request.prompt_tokens)
        found.places.append(at)
    fleet = msgspec.structs.replace(fleet, matches=found)
    assert_same(columns_of(request, fleet), price_sides(request, fleet, WEIGHTS, fleet.paces))


def test_a_random_life_leaves_no_row_behind() -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    source = Random(seed)
    request, fleet = random_case(source)
    pricing, alive = ColumnPricing(), list[Charge]()
    for step in range(300):
        at, now_s = source.randrange(len(fleet.loads)), NOW_S + step * source.random()
        match source.randrange(5):
            case 0:
                alive.append(
                    fleet.loads[at].charge(now_s, prefill_s=1.0, prompt_tokens=500, uncached_tokens=500)
                )
            case 1 if alive:
                source.choice(alive).first_byte(now_s)
            case 2 if alive:
                alive.pop(source.randrange(len(alive))).release(now_s)
            case 3:
                fleet.loads[at].add_others(1, 300)
                fleet.loads[at].report_kv(source.random(), source.choice([None, 9000]))
            case _:
                name = source.choice(["prefill_scale", "decode_scale", "kv_tokens", "match_reliability"])
                setattr(fleet.paces[at], name, source.choice([0.3, 0.7, 1]))
        if source.random() < 0.5:
            fleet = msgspec.structs.replace(fleet, now_s=now_s)
            assert_same(
                columns_of(request, fleet, pricing), price_sides(request, fleet, WEIGHTS, fleet.paces)
            )


# --- which fleets ------------------------------------------------------------------------------


def test_columns_are_for_large_fleets_seen_before_that_cannot_change() -> None:
    fleet, request, pricing = large_fleet(), RequestView(prompt_tokens=10), ColumnPricing()
    assert pricing.price(request, fleet, WEIGHTS) is None, "seen for the first time"
    assert pricing.price(request, fleet, WEIGHTS) is not None
    assert copy.deepcopy(pricing).price(request, fleet, WEIGHTS) is None, "a copy starts without any"
    fewer = msgspec.structs.replace(fleet, loads=fleet.loads[1:], paces=fleet.paces[1:])
    lists = msgspec.structs.replace(fleet, loads=list(fleet.loads), paces=list(fleet.paces))
    for other in (fewer, lists, msgspec.structs.replace(fleet, paces=())):
        assert pricing.price(request, other, WEIGHTS) is None
        assert pricing.price(request, other, WEIGHTS) is None


def test_of_more_fleets_than_are_kept_the_last_asked_about_stay() -> None:
    fleets, request, pricing = (
        [large_fleet() for _ in range(MAX_FLEETS + 1)],
        RequestView(),
        ColumnPricing(),
    )
    for fleet in fleets[:-1]:
        pricing.price(request, fleet, WEIGHTS)
    assert pricing.price(request, fleets[0], WEIGHTS) is not None
    assert pricing.price(request, fleets[-1], WEIGHTS) is None
    assert pricing.price(request, fleets[0], WEIGHTS) is not None
    assert pricing.price(request, fleets[1], WEIGHTS) is None, "the one that was not asked about for longest"
