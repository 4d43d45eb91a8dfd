"""The priced choice, on fleets small enough for paper: 0.1 ms a prefill token, 10 ms a decode step."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs.links import Link, PdLinks
from kvroute.policies.pricing import AHEAD, CHUNK_TOKENS, ROOM
from kvroute.policies.registry import PolicyError, make_policy
from kvroute.policies.ttft import FEW_TOKENS, LATE, LEAD_S, LONG, MANY_TOKENS, Ttft
from kvroute.policies.worth import EQUAL_RATIO, EXPONENT, FEW
from kvroute.types import Decision, Fleet, Hold, PrefixMatch, Rejection, RequestView, Role
from tests.policies.fleets import PLAIN, Node, in_gpu, priced_fleet

OWN_TIME = {"cache_weight": 0.0, "delay_weight": 0.0, "stall_weight": 0.0, "decode_weight": 0.0}
"""Only what the request itself waits for, and what it delays the first tokens of those before it."""
FEW_S = FEW_TOKENS * 1e-4
"""Prefill of so many tokens: a queue of as much counts as one that is there."""
LONG_TOKENS = int(LONG * 100)
"""From which on a prompt is a long one beside decodes: its prefill takes `LONG` steps of 10 ms."""


def policy(**options: Any) -> Ttft:
    return Ttft(Ttft.Options(**options))


def decide(
    fleet: Fleet, prompt_tokens: int = 3000, options: dict[str, Any] | None = None, **view: Any
) -> Any:
    return policy(**(options or {})).decide(RequestView(prompt_tokens=prompt_tokens, **view), fleet)


def chosen(fleet: Fleet, prompt_tokens: int = 3000, **options: Any) -> str:
    decision = decide(fleet, prompt_tokens, options)
    assert isinstance(decision, Decision)
    return decision.candidate.prefill.id


# --- the price ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, OWN_TIME])
def test_a_hot_cache_behind_800_ms_loses_to_a_cold_node_with_10_ms_and_300_ms_of_prefill(
    options: dict[str, Any],
) -> None:
    fleet = priced_fleet(Node(queue_s=0.8, cached=3000), Node(queue_s=0.01))
    decision = decide(fleet, 3000, options)
    assert decision.candidate.prefill.id == "b"
    assert decision.reason == "moved"
    hot, cold = sorted(policy(**OWN_TIME).price(RequestView(prompt_tokens=3000), fleet), key=_name)
    assert (hot.cost.queue_wait_s, hot.cost.prefill_s) == pytest.approx((0.8, 0.0001))
    assert (cold.cost.queue_wait_s, cold.cost.prefill_s) == pytest.approx((0.01, 0.3))
    assert cold.cost.total_s == pytest.approx(0.31 + AHEAD * 0.3), "the one that prefills there waits for it"


def test_the_hot_cache_wins_once_its_queue_is_short() -> None:
    fleet = priced_fleet(Node(queue_s=0.2, cached=3000), Node(queue_s=0.01))
    decision = decide(fleet, 3000, OWN_TIME)
    assert (decision.candidate.prefill.id, decision.reason, decision.matched_tokens) == ("a", "cached", 2999)


def test_every_term_by_hand() -> None:
    """2000 uncached tokens behind half a second of one other, two decoding, 0.4 arrivals a second."""
    growing = replace(PLAIN, decode_context_ms=0.001)
    node = Node(queue_s=0.5, decoding=2, cached=1000, kv_tokens=8000, speed=growing)
    fleet = priced_fleet(node, arrivals_per_s=0.4)
    fleet = msgspec.structs.replace(fleet, output_tokens=100.0)
    fleet.loads[0].prefilled_s = 30 * 0.025
    options = {"cache_weight": 4.0, "delay_weight": 3.0, "stall_weight": 0.25, "decode_weight": 0.5}
    (priced,) = policy(**options).price(RequestView(prompt_tokens=3000), fleet)
    cost = priced.cost
    in_step_s = 2 * 0.1e-3 + 8000 * 1e-6  # the running decodes add tokens and context to the one step ahead
    assert cost.queue_wait_s == pytest.approx(0.5 + in_step_s, rel=1e-3)
    assert cost.prefill_s == pytest.approx(0.2)
    assert cost.cache_s == pytest.approx(4 * 0.2 / 2), "half the share from which on it counts in full"
    assert cost.delay_s == pytest.approx(3 * 0.4 * cost.queue_wait_s * 0.2)
    assert cost.stall_s == pytest.approx(0.2 * (0.25 * 2 + AHEAD * 1)), "two decode, one prefills"
    # 8000 tokens decode; the 5000 queued and this one's 3000 will by then
    itl_s = (0.010 + (8000 + 5000 + 3000) * 1e-6) / (1 - 0.025)
    assert cost.itl_s == pytest.approx(itl_s, rel=2e-3)
    added_s = (3000 + 50) * 1e-6
    assert cost.decode_s == pytest.approx(0.5 * 100 * (cost.itl_s + added_s * 2 / 2))
    assert cost.total_s == pytest.approx(
        cost.queue_wait_s + 0.2 + cost.cache_s + cost.delay_s + cost.stall_s + cost.decode_s
    )
    assert cost.ttft_s == pytest.approx(cost.queue_wait_s + 0.2)


def test_prefills_around_a_decode_stretch_it() -> None:
    fleet = priced_fleet(Node(), Node())
    fleet.loads[0].charge(0.0, prefill_s=15.0).first_byte(0.0)
    busy, idle = sorted(policy().price(RequestView(prompt_tokens=1), fleet), key=_name)
    assert busy.cost.itl_s == pytest.approx(0.01 / (1 - 0.5))
    assert idle.cost.itl_s == pytest.approx(0.01)


def test_a_shared_first_block_is_no_affinity() -> None:
    """16 of 6000 tokens are worth 1.6 ms, and not the 5 ms longer queue."""
    assert chosen(priced_fleet(Node(queue_s=0.015, cached=16), Node(queue_s=0.01)), 6000, **OWN_TIME) == "b"
    assert chosen(priced_fleet(Node(queue_s=0.011, cached=16), Node(queue_s=0.01)), 6000, **OWN_TIME) == "a"


def test_those_prefilling_are_delayed_by_its_prefill_whatever_the_weights() -> None:
    """300 ms, of which each of three that wait for their first token loses its share; decodes lose none."""
    fleet = priced_fleet(Node(decoding=4))
    for _ in range(3):
        fleet.loads[0].charge(0.0, prefill_s=0.1, uncached_tokens=1000)
    (priced,) = policy(**OWN_TIME).price(RequestView(prompt_tokens=3000), fleet)
    assert priced.cost.stall_s == pytest.approx(0.3 * AHEAD * 3)
    (priced,) = policy(**OWN_TIME | {"stall_weight": 0.5}).price(RequestView(prompt_tokens=3000), fleet)
    assert priced.cost.stall_s == pytest.approx(0.3 * (AHEAD * 3 + 0.5 * 4))


def test_a_slower_worker_is_dearer() -> None:
    """0.9 s alone, or 0.3 s after the queue, by which the one in it is delayed as well."""
    alike_s = 0.9 - 0.3 - AHEAD * 0.3
    for queue_s, cheaper in ((alike_s - 0.01, "b"), (alike_s + 0.01, "a")):
        fleet = priced_fleet(Node(scale=3.0), Node(queue_s=queue_s))
        assert chosen(fleet, 3000, **OWN_TIME) == cheaper


def test_no_kv_room_is_a_wait() -> None:
    small = replace(PLAIN, kv_tokens=10_000)
    full = Node(decoding=2, kv_tokens=9_000, speed=small)
    assert chosen(priced_fleet(full, Node(decoding=3, speed=small)), 3000) == "b"
    priced = policy().price(RequestView(prompt_tokens=3000), priced_fleet(full, output_tokens=500.0))
    # 2500 of 9000 tokens have to go, and all of them would in the 5 s of a decode life
    assert priced[0].cost.queue_wait_s == pytest.approx(2500 / 9000 * 500 * 0.01 + 0.0102 / 2, rel=0.1)


# --- tiers -------------------------------------------------------------------------------------


def test_a_load_hides_behind_the_queue() -> None:
    """1000 tokens in CPU memory are 0.1 GB, 5 ms; what the queue takes is not added to it."""
    match = PrefixMatch(1000, 0, 1000, 1000)
    (alone,) = policy(**OWN_TIME).price(RequestView(prompt_tokens=3000), priced_fleet(Node(cached=match)))
    assert (alone.cost.load_s, alone.cost.prefill_s) == pytest.approx((0.005, 0.2), rel=1e-3)
    assert (alone.matched_tokens, alone.loaded_tokens) == (1000, 1000)
    queued = priced_fleet(Node(cached=match, queue_s=0.004))
    (behind,) = policy(**OWN_TIME).price(RequestView(prompt_tokens=3000), queued)
    assert behind.cost.load_s == pytest.approx(0.001, rel=1e-2)


def test_what_takes_longer_to_load_than_to_compute_is_computed() -> None:
    fleet = priced_fleet(Node(cached=PrefixMatch(1000, 0, 0, 1000)))
    fleet.paces[0].links = {tier: Link(5e8) for tier in fleet.paces[0].links}
    (priced,) = policy(**OWN_TIME).price(RequestView(prompt_tokens=3000), fleet)
    assert (priced.matched_tokens, priced.cost.load_s, priced.cost.prefill_s) == (0, 0.0, pytest.approx(0.3))
    assert decide(fleet, 3000).loads is False


def test_a_prediction_counts_by_how_far_such_have_held() -> None:
    predicted = PrefixMatch(2000, predicted_tokens=2000)
    fleet = priced_fleet(Node(cached=predicted))
    fleet.paces[0].match_reliability = 0.25
    assert decide(fleet, 3000).matched_tokens == 500
    fleet.paces[0].match_reliability = 1.0
    assert decide(fleet, 3000).matched_tokens == 2000


# --- prefill and decode apart ------------------------------------------------------------------

SPLIT = (
    Node(role=Role.PREFILL),
    Node(role=Role.DECODE, takes_whole=False),
    Node(role=Role.BOTH, decoding=20),
)


def test_a_split_is_taken_when_it_is_cheaper_and_only_with_a_link() -> None:
    fast, slow = PdLinks.uniform(Link(100e9)), PdLinks.uniform(Link(1e9))
    request = RequestView(prompt_tokens=3000)  # 0.3 GB: 3 ms or 300 ms
    decision = policy().decide(request, priced_fleet(*SPLIT, pd_links=fast))
    assert (decision.candidate.prefill.id, decision.candidate.decode.id) == ("a", "b")
    assert (decision.reason, decision.cost.handoff_s) == ("split", pytest.approx(0.003 + 0.010)), "and a step"
    idle = (*SPLIT[:2], Node(role=Role.BOTH))
    decision = policy().decide(request, priced_fleet(*idle, pd_links=slow))
    assert (decision.candidate.prefill.id, decision.candidate.decode.id) == ("c", "c")


def test_the_best_split_is_the_cheapest_of_all_pairs() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(200):
        nodes = [
            Node(
                source.choice([0.0, 0.1, source.random()]),
                source.randrange(5),
                source.choice([0, 1000, 2500]),
                role=source.choice(list(Role)),
                takes_whole=source.random() < 0.5,
            )
            for _ in range(5)
        ]
        if not any(node.role is Role.BOTH for node in nodes):
            continue
        fleet = priced_fleet(*nodes, pd_links=PdLinks.uniform(Link(source.choice([1e9, 50e9]))))
        limits = {"ttft_limit_s": source.choice([None, 0.2]), "itl_limit_s": source.choice([None, 0.011])}
        request = RequestView(prompt_tokens=3000, **limits)
        cheapest = policy().price(request, fleet)[0]
        decision = policy().decide(request, fleet)
        assert decision.cost.total_s == pytest.approx(cheapest.cost.total_s)


def test_a_prefill_worker_is_never_asked_to_decode() -> None:
    fleet = priced_fleet(*SPLIT, pd_links=PdLinks.uniform(Link(1e9)))
    decision = policy().decide(RequestView(prompt_tokens=3000), fleet)
    assert decision.candidate.decode.role is not Role.PREFILL
    assert decision.candidate.prefill.role is not Role.DECODE


# --- peers' caches -----------------------------------------------------------------------------


def test_a_pull_is_considered_after_the_choice_and_only_where_it_beats_recomputing() -> None:
    busy, idle = Node(queue_s=2.0, cached=2500), Node()
    decision = decide(priced_fleet(busy, idle, peer_link=Link(50e9, 0.002)), 3000, OWN_TIME)
    assert decision.candidate.prefill.id == "b"
    assert (decision.pull.source.id, decision.pull.tokens) == ("a", 2500)
    assert decision.pull.expected_s == pytest.approx(0.002 + 2500 * 1e5 / 50e9)
    assert decide(priced_fleet(busy, idle, peer_link=Link(0.5e9)), 3000, OWN_TIME).pull is None
    assert decide(priced_fleet(busy, idle), 3000, OWN_TIME).pull is None
    assert decide(priced_fleet(Node(cached=2500), idle, peer_link=Link(50e9)), 3000).pull is None


# --- limits and admission ----------------------------------------------------------------------


def test_a_limit_rules_the_cheaper_one_out() -> None:
    """a would be cheaper, and breaks the limit; b keeps it."""
    fleet = priced_fleet(Node(queue_s=0.25, cached=2500), Node(decoding=3))
    assert decide(fleet, 3000).candidate.prefill.id == "a"
    late = decide(fleet, 3000, ttft_limit_s=0.295)
    assert late.candidate.prefill.id == "a", "both break it: the cheaper"
    fleet = priced_fleet(Node(queue_s=0.25, cached=1000), Node(decoding=6, cached=500))
    assert decide(fleet, 3000).candidate.prefill.id == "a"
    assert decide(fleet, 3000, ttft_limit_s=0.4).candidate.prefill.id == "b"


@pytest.mark.parametrize(
    ("view", "reason", "retry_after_s"),
    [
        ({"ttft_limit_s": 0.5}, "ttft", 0.8 + 0.3 - 0.5),
        ({"itl_limit_s": 0.005}, "itl", 300 * 0.01 / 2),
        ({"e2e_limit_s": 2.0}, "e2e", 0.8 + 0.3 + 300 * 0.01 - 2.0),
    ],
)
def test_a_predicted_miss_is_rejected_only_where_asked_for(
    view: dict[str, float], reason: str, retry_after_s: float
) -> None:
    fleet = priced_fleet(Node(queue_s=0.8))
    assert isinstance(decide(fleet, 3000, **view), Decision)
    rejection = decide(fleet, 3000, {"admission": "slo"}, **view)
    assert isinstance(rejection, Rejection)
    assert (rejection.reason, rejection.retry_after_s) == (reason, pytest.approx(retry_after_s))


def test_what_it_has_waited_counts_against_its_limit() -> None:
    fleet = priced_fleet(Node())
    assert isinstance(decide(fleet, 3000, {"admission": "slo"}, ttft_limit_s=0.5), Decision)
    late = msgspec.structs.replace(fleet, held_s=0.3)
    rejection = decide(late, 3000, {"admission": "slo"}, ttft_limit_s=0.5)
    assert (rejection.reason, rejection.retry_after_s) == ("ttft", pytest.approx(0.1))


def test_the_request_s_own_limit_stands_before_the_policy_s() -> None:
    fleet = priced_fleet(Node(queue_s=0.8))
    options = {"admission": "slo", "ttft_limit_s": 0.5}
    assert isinstance(decide(fleet, 3000, options), Rejection)
    assert isinstance(decide(fleet, 3000, options, ttft_limit_s=2.0), Decision)


def test_itl_is_judged_by_the_load_when_decode_begins() -> None:
    """Whoever is in the queue now decodes by then."""
    slow = replace(PLAIN, decode_sequence_ms=1.0)
    fleet = priced_fleet(Node(queue_s=0.1, decoding=3, speed=slow))
    assert policy().price(RequestView(prompt_tokens=10), fleet)[0].cost.itl_s == pytest.approx(0.010 + 0.005)


def test_every_queue_too_long_is_rejected() -> None:
    options = {"max_queue_s": 0.5}
    assert isinstance(decide(priced_fleet(Node(0.8), Node(0.4)), 3000, options), Decision)
    rejection = decide(priced_fleet(Node(0.8), Node(0.6)), 3000, options)
    assert (rejection.reason, rejection.retry_after_s) == ("queue", pytest.approx(0.1))


# --- several that come together ----------------------------------------------------------------


def test_of_those_that_come_together_the_cached_go_first_then_the_longest_then_short_ones() -> None:
    requests = {
        "cached": (90_000, 85_000),
        "little left": (CHUNK_TOKENS + 10, CHUNK_TOKENS),
        "longest": (MANY_TOKENS + 5_000, 0),
        "long": (MANY_TOKENS + CHUNK_TOKENS - 1, CHUNK_TOKENS - 1),
        "not so long": (MANY_TOKENS - 1, 0),
        "short": (300, 100),
        "shortest": (100, 0),
    }
    order = {
        name: policy().order(RequestView(prompt_tokens=prompt), priced_fleet(Node(cached=cached), Node()))
        for name, (prompt, cached) in requests.items()
    }
    assert sorted(order, key=order.__getitem__) == [
        *("little left", "cached"),
        *("longest", "long"),
        *("shortest", "short", "not so long"),
    ]


def test_without_caches_the_order_is_by_length() -> None:
    assert policy().order(
        RequestView(prompt_tokens=900), msgspec.structs.replace(priced_fleet(Node()), matches=())
    ) == (2, 900)


# --- holding -----------------------------------------------------------------------------------


def test_it_waits_for_a_worker_with_more_than_a_little_prefill() -> None:
    enough, little = Node(queue_s=FEW_S + 0.001), Node(queue_s=FEW_S - 0.001)
    fleet = priced_fleet(enough, may_hold=True)
    held = decide(fleet, 3000, {"age_weight": 30.0})
    assert isinstance(held, Hold)
    assert (held.worker.id, held.prefill_s, held.rank_s) == ("a", pytest.approx(0.3), pytest.approx(30 * 0.3))
    assert isinstance(decide(priced_fleet(little, may_hold=True)), Decision)
    assert isinstance(decide(priced_fleet(enough)), Decision), "nobody asked"
    assert isinstance(decide(fleet, 3000, {"hold": False}), Decision)


def test_an_engine_that_is_late_is_not_kept_idle() -> None:
    """0.898 s of prefill are pending: after so many times that it is no reason any more."""
    fleet = priced_fleet(Node(queue_s=0.9), may_hold=True)
    assert isinstance(decide(fleet), Hold)
    assert isinstance(decide(msgspec.structs.replace(fleet, now_s=LATE * 0.898 - 0.005)), Hold)
    assert isinstance(decide(msgspec.structs.replace(fleet, now_s=LATE * 0.898 + 0.005)), Decision)


@pytest.mark.parametrize(
    ("from_the_end_s", "short", "long"),
    [
        (-LEAD_S - 0.001, Hold, Hold),
        (-LEAD_S + 0.001, Decision, Hold),
        (-0.001, Decision, Hold),
        (0.001, Hold, Hold),
        ((LATE - 1) * 0.498 - 0.001, Hold, Hold),
        ((LATE - 1) * 0.498 + 0.001, Decision, Decision),
    ],
)
def test_a_short_one_goes_just_before_the_prefill_ahead_should_be_over(
    from_the_end_s: float, short: type, long: type
) -> None:
    """498 ms of it began at 0, beside two that decode; one that is overdue may last, up to a limit."""
    fleet = priced_fleet(Node(queue_s=0.5, decoding=2), may_hold=True)
    fleet = msgspec.structs.replace(fleet, now_s=0.498 + from_the_end_s)
    assert isinstance(decide(fleet, LONG_TOKENS - 10), short)
    assert isinstance(decide(fleet, LONG_TOKENS + 10), long)


def test_on_a_slower_worker_the_prefill_ahead_is_over_later_and_its_steps_are_longer() -> None:
    """Half as fast: 0.499 s of the preset and 20 ms steps, so that the same prompts are short ones."""
    fleet = priced_fleet(Node(queue_s=0.5, decoding=2, scale=2.0), may_hold=True)
    for now_s, short in ((0.998 - LEAD_S - 0.001, Hold), (0.998 - LEAD_S + 0.001, Decision)):
        late = msgspec.structs.replace(fleet, now_s=now_s)
        assert isinstance(decide(late, LONG_TOKENS - 10), short)
        assert isinstance(decide(late, LONG_TOKENS + 10), Hold)


def test_what_is_cached_of_a_prompt_makes_it_no_long_one() -> None:
    fleet = priced_fleet(Node(queue_s=0.5, decoding=2, cached=LONG_TOKENS), may_hold=True)
    fleet = msgspec.structs.replace(fleet, now_s=0.498 - LEAD_S + 0.001)
    assert isinstance(decide(fleet, LONG_TOKENS + 1000), Decision)
    assert isinstance(decide(fleet, 2 * LONG_TOKENS + 10), Hold)


def test_all_that_is_ahead_must_be_nearly_over() -> None:
    """Two of 300 ms: at the end of the first a second one is to come."""
    fleet = priced_fleet(Node(decoding=2), may_hold=True)
    for _ in range(2):
        fleet.loads[0].charge(0.0, prefill_s=0.3, uncached_tokens=3000)
    for now_s, answer in (
        (0.3 - 0.001, Hold),
        (0.6 - LEAD_S - 0.001, Hold),
        (0.6 - LEAD_S + 0.001, Decision),
    ):
        assert isinstance(decide(msgspec.structs.replace(fleet, now_s=now_s), 100), answer)


def test_it_waits_where_somebody_held_goes_first_unless_another_is_cheaper() -> None:
    """Behind what is promised, or behind a little prefill, which 300 ms more would delay."""
    little_s = FEW_S - 0.001
    alike_s = little_s + AHEAD * 0.3
    busy = [Node(), Node(queue_s=little_s)]
    assert isinstance(decide(priced_fleet(*busy, promised_s=[alike_s - 0.01, 0.0], may_hold=True)), Hold)
    decision = decide(priced_fleet(*busy, promised_s=[alike_s + 0.01, 0.0], may_hold=True))
    assert decision.candidate.prefill.id == "b"


def test_it_waits_for_kv_room_but_never_on_an_idle_worker() -> None:
    small = replace(PLAIN, kv_tokens=10_000)
    full = priced_fleet(Node(decoding=2, kv_tokens=9_000, speed=small), may_hold=True)
    assert isinstance(decide(full, 3000), Hold)
    assert isinstance(decide(priced_fleet(Node(speed=small), may_hold=True), 30_000), Decision)


def test_room_is_what_the_engine_shows_in_use_less_a_margin() -> None:
    """2000 tokens and an answer of 300 are to come, and not all of 10,000 may be given away."""
    small = replace(PLAIN, kv_tokens=10_000)
    room = 10_000 * ROOM - 2300
    for in_books, reported, answer in (
        (room + 2, None, Hold),
        (room, None, Decision),
        (room + 1800, room, Decision),  # a prefix that they share lies there once
        (room + 1800, room + 2, Hold),
        (room - 2400, room, Decision),  # others have requests there as well
        (room - 2400, room + 2, Hold),
    ):
        fleet = priced_fleet(Node(decoding=2, kv_tokens=int(in_books), speed=small), may_hold=True)
        if reported is not None:
            fleet.loads[0].report_kv((reported - 0.5) / 10_000, 10_000)
        assert isinstance(decide(fleet, 2000), answer)


# --- what a second of decoding counts ------------------------------------------------------------


def test_decodes_count_less_once_prefills_are_seen_to_be_short_beside_them() -> None:
    """30 ms of prefill before 3 s of decoding: a hundredth, which is less than counts in full."""
    options = {"stall_weight": 0.5, "decode_weight": 0.2}
    fleet, request = priced_fleet(Node(decoding=2)), RequestView(prompt_tokens=300)
    turning = policy(**options)
    for placed in range(FEW + 1):
        (priced,) = turning.price(request, fleet)
        worth = (0.01 / EQUAL_RATIO) ** EXPONENT if placed >= FEW else 1.0
        assert priced.cost.decode_s == pytest.approx(worth * 0.2 * 300 * 0.01)
        assert priced.cost.stall_s == pytest.approx(worth * 0.5 * 0.03 * 2)
        assert turning.decide(request, fleet).cost == priced.cost


def test_who_is_held_has_not_been_placed() -> None:
    turning, request = policy(decode_weight=0.2), RequestView(prompt_tokens=300)
    busy, idle = priced_fleet(Node(queue_s=FEW_S + 0.1), may_hold=True), priced_fleet(Node())
    for _ in range(2 * FEW):
        assert isinstance(turning.decide(request, busy), Hold)
    assert turning.decide(request, idle).cost.decode_s == pytest.approx(0.2 * 300 * 0.01)


# --- properties --------------------------------------------------------------------------------

NODES = st.tuples(
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.integers(0, 6),
    st.sampled_from([0, 16, 1000, 2900]),
    st.just(PLAIN),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.just(Role.BOTH),
    st.integers(0, 40_000),
).map(lambda values: Node(*values))
REQUEST = RequestView(prompt_tokens=3000)


def prices(*nodes: Node) -> dict[str, float]:
    fleet = priced_fleet(*nodes, arrivals_per_s=0.5)
    return {each.candidate.prefill.id: each.cost.total_s for each in policy().price(REQUEST, fleet)}


@given(st.lists(NODES, min_size=1, max_size=6), st.data())
def test_more_load_never_makes_a_worker_more_attractive(nodes: list[Node], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(nodes) - 1))
    node = nodes[at]
    more = data.draw(
        st.sampled_from(
            [
                node._replace(queue_s=node.queue_s + 0.2),
                node._replace(decoding=node.decoding + 1, kv_tokens=node.kv_tokens + 100),
                node._replace(scale=node.scale * 2),
                node._replace(kv_tokens=node.kv_tokens + 5000) if node.decoding else node,
            ]
        )
    )
    name = "abcdef"[at]
    assert prices(*nodes[:at], more, *nodes[at + 1 :])[name] >= prices(*nodes)[name] - 1e-9


@given(NODES, st.integers(0, 3000), st.integers(0, 3000))
def test_more_cached_prefix_is_never_dearer(node: Node, one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert prices(node._replace(cached=more))["a"] <= prices(node._replace(cached=less))["a"] + 1e-9


@given(st.lists(NODES, min_size=2, max_size=6), st.randoms())
def test_the_order_of_workers_changes_no_price(nodes: list[Node], source: random.Random) -> None:
    order = list(range(len(nodes)))
    source.shuffle(order)
    there = prices(*nodes)
    shuffled = prices(*(nodes[i] for i in order))
    assert [shuffled["abcdef"[at]] for at in range(len(nodes))] == pytest.approx(
        [there["abcdef"[i]] for i in order]
    )


@given(st.lists(NODES, min_size=1, max_size=6))
def test_the_choice_is_the_cheapest_and_changes_nothing(nodes: list[Node]) -> None:
    fleet = priced_fleet(*nodes, arrivals_per_s=0.5)
    before = [repr(load) for load in fleet.loads]
    decision = policy().decide(REQUEST, fleet)
    assert decision.cost.total_s == pytest.approx(policy().price(REQUEST, fleet)[0].cost.total_s)
    assert [repr(load) for load in fleet.loads] == before


# --- the rest ----------------------------------------------------------------------------------


def test_a_crowd_is_left_to_itself_while_somebody_is_idle() -> None:
    """All hold it but d; a has by far the lowest price for one more, and b to d would prefill 300 ms."""
    hot = Node(decoding=8, cached=2999)
    request = RequestView(prompt_tokens=3000)
    crowded = priced_fleet(hot, Node(), Node(), Node(decoding=1))
    decision = policy(**OWN_TIME).decide(request, crowded)
    assert (decision.candidate.prefill.id, decision.reason) == ("b", "moved")
    nobody_idle = priced_fleet(hot, Node(decoding=1), Node(decoding=1), Node(decoding=1))
    assert policy(**OWN_TIME).decide(request, nobody_idle).candidate.prefill.id == "a"
    few = priced_fleet(hot._replace(decoding=7), Node(), Node(), Node(decoding=1))
    assert policy(**OWN_TIME).decide(request, few).candidate.prefill.id == "a"


def test_ties_go_round() -> None:
    fleet = priced_fleet(*[Node()] * 4)
    turning = policy()
    names = [turning.decide(REQUEST, fleet).candidate.prefill.id for _ in range(8)]
    assert names == list("abcdabcd")


def test_a_fleet_without_paces_or_matches_is_priced_by_the_default_preset() -> None:
    bare = msgspec.structs.replace(priced_fleet(Node(queue_s=0.5), Node()), paces=(), matches=())
    assert chosen(bare) == "b"
    assert chosen(bare, 0) == "b"


def test_a_match_longer_than_the_prompt_leaves_a_token_to_compute() -> None:
    fleet = priced_fleet(Node(cached=in_gpu(5000)))
    (priced,) = policy().price(REQUEST, fleet)
    assert (priced.matched_tokens, priced.cost.prefill_s) == (2999, pytest.approx(0.0001))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cache_weight": -1}, "cache_weight"),
        ({"ttft_limit_s": 0}, "ttft_limit_s"),
        ({"admission": "maybe"}, "admission"),
        ({"age_weight": float("inf")}, "age_weight"),
        ({"speed": 1}, "speed"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(PolicyError, match=field):
        make_policy("ttft", options)


def _name(priced: Any) -> str:
    return str(priced.candidate.prefill.id)
