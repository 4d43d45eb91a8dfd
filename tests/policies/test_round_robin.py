from __future__ import annotations

from collections import Counter
from random import Random

from kvroute.load import WorkerLoad
from kvroute.policies.round_robin import REMEMBERED, RoundRobin
from kvroute.types import Fleet, RequestView, Worker

from .fleets import fleet

REQUEST = RequestView()


def test_a_fixed_fleet_takes_turns_in_order() -> None:
    policy = RoundRobin(RoundRobin.Options())
    chosen = [policy.decide(REQUEST, fleet(9, 0, 4)).candidate.prefill.id for _ in range(7)]
    assert chosen == list("abcabca")


def test_a_fleet_that_changes_between_calls_starves_nobody() -> None:
    """A plain counter modulo 2, then 3, then 2... would always give the wide fleet the same worker."""
    policy = RoundRobin(RoundRobin.Options())
    wide: Counter[str] = Counter()
    for _ in range(300):
        policy.decide(REQUEST, fleet(0, 0, names="xy"))
        wide[policy.decide(REQUEST, fleet(0, 0, 0)).candidate.prefill.id] += 1
    assert set(wide.values()) == {100}


def test_random_eligible_sets_are_served_within_one_turn_of_each_other() -> None:
    seed = 11
    print(f"seed {seed}")
    random = Random(seed)
    policy = RoundRobin(RoundRobin.Options())
    counts: Counter[str] = Counter()
    for _ in range(4000):
        names = "".join(random.sample("abcdefgh", random.randint(4, 8)))
        counts[policy.decide(REQUEST, fleet(*[0] * len(names), names=names)).candidate.prefill.id] += 1
    assert max(counts.values()) - min(counts.values()) < 0.02 * 4000


def test_departed_workers_are_forgotten() -> None:
    policy = RoundRobin(RoundRobin.Options())
    for number in range(3 * REMEMBERED):
        worker = Worker(id=f"w#{number}", url="http://w:1")
        policy.decide(REQUEST, Fleet(0.0, [worker], [WorkerLoad()]))
    assert len(policy._last_turn) <= 2 * REMEMBERED


def test_who_decodes_takes_turns_of_its_own() -> None:
    policy = RoundRobin(RoundRobin.Options())
    prefill, decode = fleet(0, 0, 0), fleet(0, 0, names="xy")
    taken = []
    for _ in range(4):
        policy.decide(REQUEST, prefill)
        taken.append(policy.choose_decode(REQUEST, decode))
    assert taken == [0, 1, 0, 1]
