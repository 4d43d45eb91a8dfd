"""Which limit a prediction breaks, and when it may be kept again."""

from __future__ import annotations

import pytest

from kvroute.policies.limits import NO_LIMITS, Limits


def test_the_first_limit_broken_is_named() -> None:
    limits = Limits(ttft_s=1.0, itl_s=0.05, e2e_s=5.0)
    assert limits.broken(1.0, 0.05, 80) is None
    assert limits.broken(1.1, 0.09, 500) == "ttft"
    assert limits.broken(1.0, 0.06, 500) == "itl"
    assert limits.broken(1.0, 0.05, 81) == "e2e"
    assert NO_LIMITS.broken(1e9, 1e9, 1e9) is None


def test_the_wait_is_what_is_missing() -> None:
    assert Limits(ttft_s=1.0).wait_s(1.75, 0.1, 100) == pytest.approx(0.75)
    assert Limits(itl_s=0.05).wait_s(1.75, 0.1, 100) == pytest.approx(5.0), "half of a decode life"
    assert Limits(e2e_s=10.0).wait_s(1.75, 0.1, 100) == pytest.approx(1.75)
    assert Limits(ttft_s=1.0, e2e_s=10.0).wait_s(1.75, 0.1, 100) == pytest.approx(1.75), "the longest"
    assert NO_LIMITS.wait_s(9.0, 9.0, 9.0) == 0.0
