"""Who prefills and who decodes: every pair against prices worked out one by one, and why."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from kvroute.policies.costs.links import Link, Nearness, PdLinks
from kvroute.policies.pair_pricing import BOTH_ENDS, COPY, REUSED, PairPricing
from kvroute.policies.pairing import cheapest_decode, handoff_s, payload_bytes
from kvroute.policies.predicting import expect
from kvroute.policies.pricing import REQUEST_S, price_sides
from kvroute.policies.pricing_columns import MIN_WORKERS
from kvroute.policies.ttft import APART, GATHERED, MAX_PRICED, PARKED_S, Ttft
from kvroute.types import Decision, Fleet, Hold, Place, Rejection, RequestView, Role
from tests.policies.fleets import PLAIN, Node, priced_fleet

REQUEST = RequestView(prompt_tokens=3000)  # 0.3 GB of KV, 0.3 s of prefill
FAST, SLOW = PdLinks.uniform(Link(100e9)), PdLinks.uniform(Link(1e9))
P, D = Node(role=Role.PREFILL), Node(role=Role.DECODE, takes_whole=False)
NEAR = PdLinks(Link(100e9), Link(30e9), Link(10e9), Link(1e9, 0.01))
BUSY_S = 30 * 0.06
"""Prefilled of late on a worker that is busy with prefills: above the share from which the cache counts."""


def decide(fleet: Fleet, request: RequestView = REQUEST, **options: Any) -> Any:
    return Ttft(Ttft.Options(**options)).decide(request, fleet)


def chosen(fleet: Fleet, **options: Any) -> str:
    candidate = decide(fleet, **options).candidate
    return f"{candidate.prefill.id}{candidate.decode.id}"


# --- against one pair at a time ----------------------------------------------------------------


def random_fleet(source: Random, count: int) -> Fleet:
    def label(name: str) -> str:
        return source.choice(["", f"{name}1", f"{name}2"])

    nodes = [
        Node(
            source.choice([0.0, 0.1, source.random()]),
            source.randrange(5),
            source.choice([0, 1000, 2500]),
            role=source.choice(list(Role)),
            takes_whole=source.random() < 0.5,
            place=Place(label("h"), label("r"), label("z")),
            kv_tokens=source.choice([0, 4000, 9000]),
        )
        for _ in range(count)
    ]
    names = [f"w{at}" for at in range(count)]
    fleet = priced_fleet(*nodes, names=names, pd_links=NEAR, arrivals_per_s=0.4)  # type: ignore[arg-type]
    for load, pace in zip(fleet.loads, fleet.paces, strict=True):
        pace.kv_tokens = source.choice([10_000, 1_000_000])
        pace.overhead_s = source.choice([0.0, 0.004])
        load.charge(-1.0, prefill_s=source.choice([0.5, 5.0])).release(-1.0)
    return msgspec.structs.replace(fleet, now_s=0.001)


def brute_force(fleet: Fleet, policy: Ttft, request: RequestView) -> list[tuple[bool, float, int, int]]:
    """(breaks a limit, price, prefill, decode) of every candidate. Nothing has been sent yet."""
    weights, paces, workers = policy._weights(fleet), fleet.paces, fleet.workers
    sides = price_sides(request, fleet, weights, paces)
    limits = policy._limits_of(request)
    made = []
    for i, prefill in enumerate(sides):
        before_s = fleet.held_s + paces[i].overhead_s + prefill.queue_s + prefill.load_s + prefill.prefill_s
        if workers[i].takes_whole and workers[i].role is not Role.PREFILL:
            broken = limits.broken(before_s + prefill.room_s, prefill.itl_s, fleet.output_tokens)
            made.append((broken is not None, prefill.start_s + prefill.stay_s, i, i))
        for j, decode in enumerate(sides):
            if i == j or workers[i].role is Role.DECODE or workers[j].role is Role.PREFILL:
                continue
            match = fleet.matches[j]
            args = request.prompt_tokens, workers[i], workers[j], match, paces[j]
            link = NEAR.between(workers[i], workers[j])
            wire_s = payload_bytes(request.prompt_tokens, workers[j], match, paces[j]) / link.bytes_per_s
            ahead_s = prefill.queue_s + prefill.load_s + prefill.prefill_s
            handed_s = max(0.0, decode.queue_s - ahead_s) + handoff_s(NEAR, *args)
            handed_s += decode.itl_s + paces[j].overhead_s
            broken = limits.broken(before_s + decode.room_s + handed_s, decode.itl_s, fleet.output_tokens)
            price_s = prefill.start_s + decode.stay_s + handed_s + COPY * decode.cache_s + BOTH_ENDS * wire_s
            made.append((broken is not None or decode.room_s > 0, price_s, i, j))
    return sorted(made)


@pytest.mark.parametrize("count", [5, MIN_WORKERS])
def test_the_choice_is_the_cheapest_of_all_worked_out_one_by_one(count: int) -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    source = Random(seed)
    splits = 0
    for _ in range(150 if count < MIN_WORKERS else 3):
        fleet = random_fleet(source, count)
        if count >= MIN_WORKERS:  # priced in columns when seen for the second time
            fields = {name: tuple(getattr(fleet, name)) for name in ("workers", "loads", "paces")}
            fleet = msgspec.structs.replace(fleet, **fields)
        limits = {"ttft_limit_s": source.choice([None, 0.4]), "itl_limit_s": source.choice([None, 0.0101])}
        request = RequestView(prompt_tokens=3000, e2e_limit_s=source.choice([None, 4.0]), **limits)
        policy = Ttft(Ttft.Options())
        ways = brute_force(fleet, policy, request)
        if not ways:
            continue
        listed = policy.price(request, fleet)
        assert [(each.infeasible is not None, each.cost.total_s) for each in listed] == [
            (broken, pytest.approx(price_s, rel=1e-9)) for broken, price_s, _, _ in ways[:MAX_PRICED]
        ]
        for _ in range(2):
            decision = policy.decide(request, fleet)
            assert decision.cost.total_s == pytest.approx(ways[0][1], rel=1e-9)
            policy._pairs = PairPricing()  # as if the last one had not been sent
        splits += decision.candidate.prefill is not decision.candidate.decode
    assert splits or count >= MIN_WORKERS


def test_a_fleet_in_which_nobody_can_decode_is_an_error() -> None:
    with pytest.raises(ValueError, match="no worker does all of a request, and no two of them a half each"):
        decide(priced_fleet(P, P, pd_links=FAST))


# --- what decides ------------------------------------------------------------------------------


def test_the_nearer_decode_worker_gets_it_unless_it_has_no_room() -> None:
    """0.3 GB take 3 ms within the host, and 310 ms to the far one."""
    here, there = D._replace(place=Place("h")), D._replace(place=Place("i"))
    prefill = P._replace(place=Place("h"))
    assert chosen(priced_fleet(prefill, there, here, pd_links=NEAR)) == "ac"
    full = here._replace(speed=replace(PLAIN, kv_tokens=4000), decoding=1, kv_tokens=2000)
    assert chosen(priced_fleet(prefill, there, full, pd_links=NEAR)) == "ab"
    (first, second) = Ttft(Ttft.Options()).price(REQUEST, priced_fleet(prefill, there, full, pd_links=NEAR))
    assert (first.infeasible, second.infeasible) == (None, "room")


def test_a_link_that_is_measured_anew_counts_at_once() -> None:
    """Also for a tuple of workers of which much is kept."""
    fleet, policy = priced_fleet(P, D, pd_links=FAST), Ttft(Ttft.Options())
    fleet = msgspec.structs.replace(fleet, workers=tuple(fleet.workers))
    slower = msgspec.structs.replace(fleet, pd_links=FAST.with_link(Nearness.FAR, Link(10e9)))
    costs = [policy.price(REQUEST, each)[0].cost for each in (fleet, slower, fleet)]
    assert [cost.handoff_s - cost.itl_s for cost in costs] == pytest.approx([0.003, 0.03, 0.003])


def test_what_the_decode_worker_holds_need_not_travel() -> None:
    """2990 of 3000 tokens are there: 1 MB over the slow link, not 300."""
    fleet = priced_fleet(P, D, D._replace(cached=2990), pd_links=SLOW)
    assert chosen(fleet) == "ac"
    assert decide(fleet).cost.handoff_s == pytest.approx(0.001 + 0.010), "and a step"


def test_a_decode_worker_that_breaks_a_limit_is_passed_over_and_refused_only_where_asked_for() -> None:
    """b has steps of 10 ms, c of 20; only c has the KV."""
    slow = D._replace(cached=2990, scale=2.0)
    request = RequestView(prompt_tokens=3000, itl_limit_s=0.015)
    assert decide(priced_fleet(P, D, slow, pd_links=FAST), request).candidate.decode.id == "b"
    assert decide(priced_fleet(P, slow, pd_links=FAST), request).candidate.decode.id == "b", "nobody else"
    rejection = decide(priced_fleet(P, slow, pd_links=FAST), request, admission="slo")
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "itl"
    late = RequestView(prompt_tokens=3000, ttft_limit_s=0.3 + 0.3 + 0.01 + 0.001)
    assert isinstance(decide(priced_fleet(P, D, pd_links=SLOW), late, admission="slo"), Decision)
    late = RequestView(prompt_tokens=3000, ttft_limit_s=0.3 + 0.3 + 0.01 - 0.001)
    assert decide(priced_fleet(P, D, pd_links=SLOW), late, admission="slo").reason == "ttft"


def test_want_of_room_is_a_wait_and_no_refusal() -> None:
    full = D._replace(speed=replace(PLAIN, kv_tokens=4000), decoding=1, kv_tokens=2000)
    assert isinstance(decide(priced_fleet(P, full, pd_links=FAST), admission="slo"), Decision)


@pytest.mark.parametrize(
    ("room_tokens", "held_s", "held"), [(4000, 0.0, False), (3900, 0.0, True), (3900, 2.2, False)]
)
def test_a_split_waits_in_the_gateway_only_for_room_that_is_long_in_coming(
    room_tokens: int, held_s: float, held: bool
) -> None:
    """3300 tokens are needed beside those promised; in the 3 s of a decode life all of these go. Nobody waits
    longer than that room should take.
    """
    speed = replace(PLAIN, kv_tokens=room_tokens)
    full = D._replace(speed=speed, decoding=1, kv_tokens=2000)
    fleet = priced_fleet(P, full, pd_links=FAST, may_hold=True, held_s=held_s)
    (priced,) = Ttft(Ttft.Options()).price(REQUEST, fleet)
    assert priced.cost.room_s == pytest.approx((2000 + 3300 - room_tokens) / 2000 * 3.0)
    assert (priced.cost.room_s > max(PARKED_S, held_s)) == held == isinstance(decide(fleet), Hold)


def test_what_is_expected_of_a_split_is_what_it_was_priced_at() -> None:
    """With the wait for a link that only the policy knows of; without its price, that is not known."""
    turning, fleet = Ttft(Ttft.Options()), priced_fleet(P, P, D, pd_links=SLOW)
    turning.decide(REQUEST, fleet)
    decision = turning.decide(REQUEST, fleet)
    at = fleet.workers.index(decision.candidate.prefill)
    for alike, handed_s in ((True, 0.610), (False, 0.310)):
        expected = expect(REQUEST, fleet, decision, at, priced_alike=alike, decode_at=2)
        assert expected.handoff_s == pytest.approx(handed_s)
        assert expected.prediction.ttft_s == pytest.approx(0.3 + handed_s)
        assert expected.prefill is not None
        assert expected.prefill.ttft_s == pytest.approx(0.3)


def test_the_wait_for_a_step_at_the_decode_worker_hides_behind_the_prefill() -> None:
    """0.3 s of prefill at a; b has a queue of 0.1 s, then one of 0.5."""
    for queue_s, wait_s in ((0.1, 0.0), (0.5, 0.2)):
        both = Node(queue_s, takes_whole=False)
        cost = decide(priced_fleet(P, both, pd_links=FAST)).cost
        assert cost.handoff_s == pytest.approx(wait_s + 0.003 + 0.010, abs=2 * REQUEST_S)
        assert cost.total_s == pytest.approx(cost.ttft_s + cost.externality_s)


def test_short_prompts_are_done_whole_by_decode_workers_that_may() -> None:
    fleet = priced_fleet(P._replace(queue_s=0.2), Node(role=Role.DECODE), pd_links=SLOW)
    short = decide(fleet, RequestView(prompt_tokens=100))
    assert (short.candidate.prefill.id, short.candidate.decode.id) == ("b", "b")
    assert chosen(priced_fleet(P._replace(queue_s=0.2), D, pd_links=SLOW)) == "ab", "one that may not"


@pytest.mark.parametrize(
    ("node", "links", "view", "said"),
    [
        (Node(decoding=4), FAST, {}, ("ab", "split")),
        (Node(decoding=3), SLOW, {}, ("cc", "handoff")),  # 0.3 s, and as much for the room at both ends
        (Node(cached=2990), FAST, {}, ("cc", "whole")),  # nothing to gain, were it free
        (Node(decoding=4), FAST, {"ttft_limit_s": 0.307}, ("cc", "limit")),
    ],
)
def test_why_it_is_split_or_not(node: Node, links: PdLinks, view: Any, said: tuple[str, str]) -> None:
    decision = decide(priced_fleet(P, D, node, pd_links=links), RequestView(prompt_tokens=3000, **view))
    candidate = decision.candidate
    assert (candidate.prefill.id + candidate.decode.id, decision.reason) == said


def test_ties_go_round_among_both_kinds() -> None:
    turning = Ttft(Ttft.Options())
    fleet = priced_fleet(P, P, D, D, pd_links=FAST)
    made = [turning.decide(RequestView(), fleet).candidate for _ in range(4)]
    assert [one.prefill.id + one.decode.id for one in made] == ["ac", "bc", "ac", "ad"]


def test_others_count_more_where_the_prefill_could_be_elsewhere() -> None:
    nodes = Node(queue_s=1.0, decoding=4), Node()
    fleets = priced_fleet(*nodes, arrivals_per_s=0.4), priced_fleet(*nodes, pd_links=FAST, arrivals_per_s=0.4)
    plain, linked = (
        next(
            each.cost
            for each in Ttft(Ttft.Options()).price(REQUEST, fleet)
            if (each.candidate.prefill.id, each.candidate.decode.id) == ("a", "a")
        )
        for fleet in fleets
    )
    after_s = 0.4 * plain.prefill_s  # AHEAD: who waits there counts the same in both
    stall_s = 0.4 * plain.prefill_s * 4
    assert plain.stall_s == pytest.approx(stall_s + after_s)
    assert linked.stall_s == pytest.approx(APART * stall_s + after_s)
    assert plain.delay_s == pytest.approx(0.4 * plain.queue_wait_s * plain.prefill_s)
    assert linked.delay_s == pytest.approx(GATHERED * plain.delay_s)


def test_arrivals_do_not_gather_where_prefill_has_its_own_workers() -> None:
    costs = []
    for arrivals_per_s in (0.0, 0.4):
        fleet = priced_fleet(P._replace(queue_s=1.0), D, pd_links=FAST, arrivals_per_s=arrivals_per_s)
        (one,) = Ttft(Ttft.Options()).price(REQUEST, fleet)
        costs.append(one.cost)
    links_s, delay_s = (cost.delay_s for cost in costs)
    assert delay_s - links_s == pytest.approx(0.4 * costs[1].queue_wait_s * costs[1].prefill_s)


# --- links and copies --------------------------------------------------------------------------


def test_a_link_that_will_be_busy_is_waited_for_and_then_free_again() -> None:
    """0.3 s on the wire each, into two decode workers: the third waits for one of them."""
    turning, fleet = Ttft(Ttft.Options()), priced_fleet(P, P, P, D, D, pd_links=SLOW)
    made = [turning.decide(REQUEST, fleet) for _ in range(3)]
    assert sorted(one.candidate.decode.id for one in made[:2]) == ["d", "e"]
    assert len({one.candidate.prefill.id for one in made}) == 3
    handoffs_s = [one.cost.handoff_s for one in made]
    assert handoffs_s == pytest.approx([0.310, 0.310, 0.610])
    assert made[2].cost.delay_s > made[0].cost.delay_s == pytest.approx(BOTH_ENDS * 0.3)
    (shown, *_) = turning.price(REQUEST, fleet)
    assert shown.cost.handoff_s == pytest.approx(0.610), "what is shown is priced by the same book"
    later = msgspec.structs.replace(fleet, now_s=5.0)
    assert turning.decide(REQUEST, later).cost.handoff_s == pytest.approx(0.310)


def test_a_copy_takes_cache_from_who_prefills_there_where_prompts_return() -> None:
    """b has prefilled of late, so that its cache is of use; c has not."""
    fleet = priced_fleet(P, D, D, pd_links=FAST)
    fleet.loads[1].charge(0.0, prefill_s=BUSY_S).release(0.0)
    fleet.loads[1].charge(0.0, prefill_s=BUSY_S).first_byte(0.0)
    for returning, copy_s in ((2990, COPY * 2.5 * 0.3), (0, 0.0)):
        turning = Ttft(Ttft.Options())
        hits = priced_fleet(P._replace(cached=returning), D, pd_links=FAST)
        for _ in range(30):
            turning.decide(REQUEST, hits)
        costs = {each.candidate.decode.id: each.cost for each in turning.price(REQUEST, fleet)}
        assert costs["b"].cache_s - costs["c"].cache_s == pytest.approx(copy_s), REUSED


# --- decode workers for KV that lies finished --------------------------------------------------


def test_the_best_decode_worker_for_finished_kv() -> None:
    """e is the nearest, but has no room; d breaks the limit; b is no decode worker, and a has the KV."""
    a = Node(place=Place("h"))
    e = D._replace(place=Place("h"), speed=replace(PLAIN, kv_tokens=4000), decoding=1, kv_tokens=2000)
    fleet = priced_fleet(a, P, D, D._replace(cached=2990, scale=1.2), e, pd_links=NEAR)
    assert cheapest_decode(RequestView(prompt_tokens=3000, itl_limit_s=0.011), fleet, fleet.workers[0]) == 2
    assert cheapest_decode(REQUEST, fleet, fleet.workers[0]) == 3, "nearly all of it is there already"
    gone = fleet.workers[0]
    for name in ("workers", "loads", "matches", "paces"):
        fleet = msgspec.structs.replace(fleet, **{name: getattr(fleet, name)[2:3]})
    assert cheapest_decode(REQUEST, fleet, gone) == 0, "its prefill worker need not be in the fleet"
    assert cheapest_decode(REQUEST, fleet, fleet.workers[0]) is None, "no KV goes to where it is"
    with pytest.raises(ValueError, match="pd_links: None; links are expected"):
        cheapest_decode(REQUEST, msgspec.structs.replace(fleet, pd_links=None), gone)
