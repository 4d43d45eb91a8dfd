"""Which limit a prediction breaks, and when it may be kept again."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvroute.policies.limits import BROKEN, KEPT, NO_LIMITS, Limits


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


def test_codes_say_of_many_what_is_said_of_one() -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    source = Random(seed)
    ttfts_s = np.array([[source.uniform(0, 2) for _ in range(5)] for _ in range(4)])
    itls_s = np.array([source.uniform(0, 0.1) for _ in range(5)])
    for _ in range(50):
        limits = Limits(*(source.choice([None, most * source.random()]) for most in (2.0, 0.1, 20.0)))
        codes = limits.codes(ttfts_s, itls_s, 200.0)
        if codes is None:
            assert limits == NO_LIMITS
            continue
        for i in range(4):
            for j in range(5):
                code = int(codes[i, j])
                said = None if code == KEPT else BROKEN[code - 1]
                assert said == limits.broken(float(ttfts_s[i, j]), float(itls_s[j]), 200.0), limits
