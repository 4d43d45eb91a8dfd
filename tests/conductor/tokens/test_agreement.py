from __future__ import annotations

from kvroute.conductor.tokens.agreement import PROBE_AFTER_S, PROBE_EVERY, TRUST_AFTER, Agreement, Use


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def observe(agreement: Agreement, *right: bool) -> list[bool]:
    return [agreement.observe_prompt_tokens(10, 10 if good else 11) for good in right]


def test_three_mismatches_close_together_lose_trust() -> None:
    agreement = Agreement(Clock())
    assert observe(agreement, False, False) == [False, False]
    assert agreement.use() is Use.EXACT
    assert observe(agreement, False) == [True]
    assert agreement.use() is Use.NONE
    assert (agreement.matches, agreement.mismatches, agreement.losses) == (0, 3, 1)


def test_rare_mismatches_are_forgiven_and_frequent_ones_are_not() -> None:
    rare = Agreement(Clock())
    observe(rare, *([False] + [True] * 12) * 50)
    assert rare.trusted
    frequent = Agreement(Clock())
    observe(frequent, *([False] + [True] * 7) * 12)
    assert not frequent.trusted


def test_trust_returns_after_probes_that_match() -> None:
    clock = Clock()
    agreement = Agreement(clock)
    observe(agreement, False, False, False)
    clock.now_s += PROBE_AFTER_S - 0.1
    assert {agreement.use() for _ in range(100)} == {Use.NONE}
    clock.now_s += 0.1
    uses = [agreement.use() for _ in range(4 * PROBE_EVERY)]
    assert uses.count(Use.PROBE) == 4
    assert Use.EXACT not in uses
    assert observe(agreement, *[True] * TRUST_AFTER) == [False] * (TRUST_AFTER - 1) + [True]
    assert agreement.use() is Use.EXACT
    # What was held against it before is gone.
    assert observe(agreement, False, False) == [False, False]


def test_trust_that_returns_on_another_thread_does_not_disturb_use() -> None:
    """The last match that was needed may be observed between any two steps of `use`."""

    class Interrupted(Clock):
        def __call__(self) -> float:
            if self.now_s >= at_s:
                observe(agreement, *[True] * TRUST_AFTER)
            return self.now_s

    at_s = Clock.now_s + PROBE_AFTER_S
    clock = Interrupted()
    agreement = Agreement(clock)
    observe(agreement, False, False, False)
    clock.now_s = at_s
    assert agreement.use() is Use.NONE
    assert agreement.use() is Use.EXACT


def test_a_probe_that_fails_starts_the_wait_again() -> None:
    clock = Clock()
    agreement = Agreement(clock)
    observe(agreement, False, False, False)
    clock.now_s += PROBE_AFTER_S
    observe(agreement, *[True] * (TRUST_AFTER - 1), False)
    assert not agreement.trusted
    assert {agreement.use() for _ in range(100)} == {Use.NONE}
    clock.now_s += PROBE_AFTER_S
    observe(agreement, *[True] * (TRUST_AFTER - 1))
    assert not agreement.trusted
    assert repr(agreement) == "<Agreement distrusted 30=4!>"
