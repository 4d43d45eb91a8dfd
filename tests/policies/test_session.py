from __future__ import annotations

from collections import Counter

from kvroute.policies.session import Session
from kvroute.types import Fleet, RequestView, Worker

from .fleets import fleet

SESSIONS = [f"session-{number}" for number in range(1000)]


def _home(policy: Session, session_id: str | None, crowd: Fleet) -> str:
    return policy.decide(RequestView(session_id=session_id), crowd).candidate.prefill.id


def test_a_session_stays_whatever_the_load_and_the_order_of_workers() -> None:
    policy = Session(Session.Options())
    home = _home(policy, "s", fleet(0, 0, 0, 0))
    assert _home(policy, "s", fleet(99, 99, 99, 99)) == home
    assert _home(Session(Session.Options()), "s", fleet(0, 0, 0, 0, names="dcba")) == home


def test_a_restarted_worker_at_the_same_url_keeps_its_sessions() -> None:
    policy = Session(Session.Options())
    before = fleet(0, 0, 0, 0)
    after = Fleet(0.0, [Worker(id=f"{w.id}#2", url=w.url) for w in before.workers], before.loads)
    assert all(_home(policy, s, before) + "#2" == _home(policy, s, after) for s in SESSIONS)


def test_the_choice_is_the_same_in_every_process_and_version() -> None:
    policy = Session(Session.Options())
    assert [_home(policy, f"s{n}", fleet(0, 0, 0, 0)) for n in range(8)] == list("ddadbdad")


def test_sessions_spread_evenly() -> None:
    policy = Session(Session.Options())
    counts = Counter(_home(policy, session, fleet(0, 0, 0, 0)) for session in SESSIONS)
    assert all(200 < counts[name] < 300 for name in "abcd"), counts


def test_a_fifth_worker_takes_less_than_a_quarter_and_moves_no_other_session() -> None:
    """Adding a target must not remap the sessions of the rest."""
    policy = Session(Session.Options())
    before = [_home(policy, session, fleet(0, 0, 0, 0)) for session in SESSIONS]
    after = [_home(policy, session, fleet(0, 0, 0, 0, 0)) for session in SESSIONS]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert 100 < len(moved) < 250
    assert set(moved) == {"e"}


def test_without_a_session_the_least_loaded_is_taken() -> None:
    policy = Session(Session.Options())
    decision = policy.decide(RequestView(), fleet(3, 1, 2))
    assert (decision.candidate.prefill.id, decision.reason) == ("b", "no_session")


def test_a_session_id_of_any_text_is_accepted() -> None:
    assert _home(Session(Session.Options()), "\ud800 \u4f60\u597d", fleet(0, 0)) in "ab"


def test_a_hot_home_is_passed_over_for_the_next_weight_only_while_it_is_hot() -> None:
    policy = Session(Session.Options(max_load_ratio=1.5))
    free = Session(Session.Options())
    for session in SESSIONS[:50]:
        home = _home(free, session, fleet(0, 0, 0, 0))
        assert _home(policy, session, fleet(0, 0, 0, 0)) == home
        hot = fleet(*(9 if name == home else 1 for name in "abcd"))
        others = [worker.id for worker in hot.workers if worker.id != home]
        second = _home(free, session, fleet(0, 0, 0, names="".join(others)))
        decision = policy.decide(RequestView(session_id=session), hot)
        assert (decision.candidate.prefill.id, decision.reason) == (second, "overloaded")


def test_with_the_bound_one_hot_session_cannot_bury_a_worker() -> None:
    policy = Session(Session.Options(max_load_ratio=1.25))
    crowd = fleet(0, 0, 0, 0)
    for _ in range(100):
        worker = policy.decide(RequestView(session_id="hot"), crowd).candidate.prefill
        crowd.loads[crowd.workers.index(worker)].requests += 1
    assert max(load.requests for load in crowd.loads) <= 32  # ceil(1.25 * 101 / 4)


def test_the_tightest_bound_always_finds_a_worker() -> None:
    policy = Session(Session.Options(max_load_ratio=1.0))
    for requests in ([0], [0, 0], [7], [3, 3, 3], [5, 0, 0]):
        crowd = fleet(*requests)
        assert policy.decide(RequestView(session_id="s"), crowd).candidate.prefill in crowd.workers
