from __future__ import annotations

from collections import Counter

from kvroute.policies.least_loaded import LeastLoaded
from kvroute.policies.ties import emptiest_index, least_loaded_index
from kvroute.types import RequestView

from .fleets import fleet


def test_the_fewest_leases_win() -> None:
    policy = LeastLoaded(LeastLoaded.Options())
    for _ in range(5):
        assert policy.decide(RequestView(), fleet(3, 1, 2)).candidate.prefill.id == "b"


def test_ties_rotate() -> None:
    """A fixed tie-break would send a whole idle period to the first worker."""
    policy = LeastLoaded(LeastLoaded.Options())
    chosen = [policy.decide(RequestView(), fleet(0, 5, 0, 0)).candidate.prefill.id for _ in range(8)]
    assert "b" not in chosen
    assert len(Counter(chosen)) == 3
    assert chosen[:4] == chosen[4:]


def test_a_burst_that_charges_as_it_goes_spreads_evenly() -> None:
    policy = LeastLoaded(LeastLoaded.Options())
    crowd = fleet(0, 0, 0, 0)
    for _ in range(64):
        worker = policy.decide(RequestView(), crowd).candidate.prefill
        crowd.loads[crowd.workers.index(worker)].requests += 1
    assert [load.requests for load in crowd.loads] == [16, 16, 16, 16]


def test_the_tie_helpers() -> None:
    assert [least_loaded_index(fleet(1, 1, 0, 0), turn) for turn in range(4)] == [2, 2, 2, 3]
    assert least_loaded_index(fleet(7), 12345) == 0
    assert emptiest_index(fleet(1, 1, 1, held=[5, 3, 9]), range(3), 0) == 1
    assert [emptiest_index(fleet(1, 1, 1, held=[3, 3, 9]), range(3), turn) for turn in range(3)] == [0, 1, 0]
    assert [emptiest_index(fleet(2, 1, 1), [0, 2], turn) for turn in range(3)] == [2, 2, 2]
