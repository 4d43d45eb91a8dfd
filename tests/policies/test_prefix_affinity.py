from __future__ import annotations

from random import Random

import pytest

from kvroute.conductor.approximate import ApproximateIndex
from kvroute.conductor.keys import Namespace, byte_keys
from kvroute.policies.prefix_affinity import PrefixAffinity
from kvroute.types import Decision, Fleet, PrefixMatch, RequestView

from .fleets import fleet

REQUEST = RequestView(prompt_tokens=100)


def _decide(crowd: Fleet, request: RequestView = REQUEST, **options: float) -> Decision:
    return PrefixAffinity(PrefixAffinity.Options(**options)).decide(request, crowd)


def _told(decision: Decision) -> tuple[str, str, int]:
    return decision.candidate.prefill.id, decision.reason, decision.matched_tokens


def test_the_longest_match_above_the_threshold_wins_over_a_lower_load() -> None:
    assert _told(_decide(fleet(2, 0, 1, matched=[80, 0, 60]))) == ("a", "match", 80)


def test_equal_matches_go_to_the_less_loaded() -> None:
    assert _told(_decide(fleet(3, 2, 0, matched=[80, 80, 0]))) == ("b", "match", 80)


@pytest.mark.parametrize(("matched", "reason"), [(50, "miss"), (51, "match")])
def test_a_match_must_cover_more_than_the_threshold(matched: int, reason: str) -> None:
    assert _decide(fleet(1, 0, matched=[matched, 0])).reason == reason


def test_a_miss_goes_by_load_and_not_to_the_smallest_tree() -> None:
    """An overloaded worker with a small tree would otherwise get all the unique prompts."""
    crowd = fleet(20, 0, matched=[0, 0], held=[1, 1000])
    assert _told(_decide(crowd)) == ("b", "miss", 0)


def test_a_miss_among_equal_loads_goes_to_the_fewest_held_blocks() -> None:
    assert _told(_decide(fleet(1, 1, 1, matched=[0, 0, 0], held=[9, 4, 7]))) == ("b", "miss", 0)


def test_misses_on_an_idle_fleet_rotate() -> None:
    policy = PrefixAffinity(PrefixAffinity.Options())
    chosen = [policy.decide(REQUEST, fleet(0, 0, 0)).candidate.prefill.id for _ in range(6)]
    assert chosen == list("abcabc")


def test_a_prompt_without_keys_goes_by_load() -> None:
    assert _told(_decide(fleet(2, 1, 3), RequestView())) == ("b", "miss", 0)


def test_out_of_balance_the_best_prefix_among_the_near_least_loaded_is_kept() -> None:
    """Affinity must narrow under load, not be dropped: hit rates would collapse just when they matter."""
    crowd = fleet(5, 5, 0, matched=[90, 0, 0])
    assert _told(_decide(crowd, balance_abs=2)) == ("c", "imbalance", 0)
    crowd = fleet(9, 2, 0, 2, matched=[90, 30, 0, 60])
    assert _told(_decide(crowd, balance_abs=2)) == ("d", "imbalance", 60)
    crowd = fleet(9, 3, 0, 1, matched=[90, 60, 0, 0])
    assert _told(_decide(crowd, balance_abs=2)) == ("c", "imbalance", 0)


def test_balance_needs_both_the_absolute_and_the_relative_gap() -> None:
    crowd = fleet(140, 100, matched=[90, 0])
    assert _decide(crowd, max_load_ratio=0).reason == "imbalance"
    assert _decide(crowd, max_load_ratio=0, balance_rel=1.5).reason == "match"
    assert _decide(crowd, max_load_ratio=0, balance_abs=40).reason == "match"


def test_a_matched_worker_far_above_the_mean_is_passed_over() -> None:
    crowd = fleet(12, 1, 1, 1, matched=[90, 0, 70, 0])
    assert _told(_decide(crowd)) == ("c", "overloaded", 70)
    crowd = fleet(12, 1, 0, 1, matched=[90, 0, 0, 0])
    assert _told(_decide(crowd)) == ("c", "overloaded", 0)
    assert _told(_decide(crowd, max_load_ratio=0)) == ("a", "match", 90)


def test_one_common_system_prompt_does_not_pin_everything_to_one_worker() -> None:
    """4 workers, a common prefix of 1k tokens, short unique tails, 40 at once: none gets over half."""
    seed = 3
    print(f"seed {seed}")
    random = Random(seed)
    policy, index = PrefixAffinity(PrefixAffinity.Options()), ApproximateIndex(2**20)
    crowd = fleet(0, 0, 0, 0)
    ids = [worker.id for worker in crowd.workers]
    for _ in range(40):
        prompt = b"s" * 4096 + random.randbytes(600)
        keys = byte_keys(prompt, Namespace(model="m").root("text"), 512)
        matches = [PrefixMatch(blocks * keys.block_tokens) for blocks in index.match(keys.keys, ids)]
        seen = Fleet(0.0, crowd.workers, crowd.loads, matches, [index.held_blocks(name) for name in ids])
        worker = policy.decide(RequestView(prompt_tokens=keys.prompt_tokens), seen).candidate.prefill
        crowd.loads[ids.index(worker.id)].requests += 1
        index.insert(worker.id, keys.keys)
    requests = [load.requests for load in crowd.loads]
    assert max(requests) <= 20, requests


def test_decisions_on_random_fleets_follow_the_rule() -> None:
    seed = 21
    print(f"seed {seed}")
    random = Random(seed)
    for _ in range(2000):
        count = random.randint(1, 9)
        requests = [random.choice([0, 1, 2, 8, 40, 90]) for _ in range(count)]
        matched = [random.choice([0, 0, 20, 50, 60, 100]) for _ in range(count)]
        crowd = fleet(*requests, matched=matched, held=[random.randint(0, 3) for _ in range(count)])
        decision = _decide(crowd)
        chosen = crowd.workers.index(decision.candidate.prefill)
        limit = 1.5 * sum(requests) / count + 2
        open_to = [i for i in range(count) if requests[i] <= limit]
        if max(requests) - min(requests) > 32 and max(requests) > 1.1 * min(requests):
            assert decision.reason == "imbalance"
            near = [i for i in range(count) if requests[i] <= max(min(requests) + 32, 1.1 * min(requests))]
            assert chosen in near
            best = max((matched[i] for i in near if i in open_to), default=0)
            assert decision.matched_tokens >= best
        elif any(matched[i] > 50 for i in open_to):
            best = max(matched[i] for i in open_to)
            assert matched[chosen] == best
            assert requests[chosen] == min(requests[i] for i in open_to if matched[i] == best)
            assert decision.reason == ("overloaded" if max(matched) > best else "match")
        else:
            assert requests[chosen] == min(requests)
            assert decision.reason == ("overloaded" if max(matched) > 50 else "miss")


def test_the_original_drops_affinity_out_of_balance() -> None:
    """40 against 3 is more than 32 apart and more than 1.1 times: the least loaded, whatever is cached."""
    crowd = fleet(40, 3, 4, matched=[90, 0, 90])
    assert _told(_decide(crowd, original=True)) == ("b", "imbalance", 0)
    assert _told(_decide(crowd)) == ("c", "imbalance", 90)


@pytest.mark.parametrize(("most", "reason"), [(32, "match"), (33, "imbalance")])
def test_the_original_needs_more_than_the_gap(most: int, reason: str) -> None:
    assert _decide(fleet(most, 0, matched=[90, 0]), original=True).reason == reason


def test_the_original_needs_more_than_the_ratio() -> None:
    assert _decide(fleet(440, 400, matched=[90, 0]), original=True).reason == "match"
    assert _decide(fleet(441, 400, matched=[90, 0]), original=True).reason == "imbalance"


def test_the_original_takes_the_longest_match_whatever_its_load() -> None:
    crowd = fleet(30, 1, 0, matched=[90, 0, 60])
    assert _told(_decide(crowd, original=True)) == ("a", "match", 90)
    assert _told(_decide(crowd)) == ("c", "overloaded", 60)
    assert _decide(fleet(0, 0, matched=[50, 0], held=[1, 2]), original=True).reason == "miss"


def test_the_original_sends_a_miss_to_the_smallest_tree_whatever_its_load() -> None:
    crowd = fleet(20, 0, matched=[0, 0], held=[1, 1000])
    assert _told(_decide(crowd, original=True)) == ("a", "miss", 0)


def test_the_original_has_no_trees_without_keys() -> None:
    assert _told(_decide(fleet(2, 1, 3), RequestView(), original=True)) == ("b", "miss", 0)


def test_ties_of_the_original_go_in_turn() -> None:
    policy = PrefixAffinity(PrefixAffinity.Options(original=True))
    crowd = fleet(0, 9, 0, matched=[90, 90, 90])
    assert [policy.decide(REQUEST, crowd).candidate.prefill.id for _ in range(6)] == list("abcabc")
    crowd = fleet(0, 9, 0, matched=[0, 0, 0], held=[5, 5, 5])
    assert [policy.decide(REQUEST, crowd).candidate.prefill.id for _ in range(3)] == list("abc")
