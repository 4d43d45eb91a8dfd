from __future__ import annotations

import random

import pytest

from kvroute.policies.costs.lengths import OutputLengths


def test_nothing_known_is_the_prior_and_no_more_than_the_limit() -> None:
    lengths = OutputLengths()
    assert lengths.expect("m", "t") == 300.0
    assert lengths.expect("m", "t", 16) == 16.0
    assert lengths.expect(None) == 300.0


def test_a_tenant_is_drawn_to_its_model_and_that_to_all() -> None:
    lengths = OutputLengths()
    lengths.observe("m", "t", 1000)
    overall = (1000 + 20 * 300) / 21
    model = (1000 + 20 * overall) / 21
    tenant = (1000 + 20 * model) / 21
    assert lengths.expect("other", "t") == pytest.approx(overall)
    assert lengths.expect("m", "other") == pytest.approx(model)
    assert lengths.expect("m", "t") == pytest.approx(tenant)


def test_it_converges_and_follows_a_change() -> None:
    lengths = OutputLengths()
    for _ in range(1000):
        lengths.observe("m", "short", 20)
        lengths.observe("m", "long", 2000)
    assert lengths.expect("m", "short") == pytest.approx(20, abs=60)
    assert lengths.expect("m", "long") == pytest.approx(2000, rel=0.05)
    for _ in range(2000):
        lengths.observe("m", "short", 500)
    assert lengths.expect("m", "short") == pytest.approx(500, rel=0.1)


def test_answers_cut_off_by_their_limit_do_not_shorten_the_expectation() -> None:
    seed = 7
    print(f"seed {seed}")
    rng, lengths = random.Random(seed), OutputLengths()
    for _ in range(3000):
        whole = int(rng.expovariate(1 / 400)) + 1
        lengths.observe("m", "t", min(whole, 100), 100)
    assert lengths.expect("m", "t") == pytest.approx(400, rel=0.2)
    for _ in range(5000):
        lengths.observe("cut", "t", 100_000, 100_000)
    assert lengths.expect("cut", "t") == 32_768.0


def test_keys_are_bounded_and_those_that_answered_last_stay() -> None:
    lengths = OutputLengths(max_keys=3)
    for model in ("a", "b", "c"):
        lengths.observe(model, "t", 1000)
    lengths.observe("a", "t", 1000)
    known = lengths.expect("a", "t")
    lengths.observe("d", "t", 1000)
    assert len(lengths) == 3
    assert lengths.expect("a", "t") == pytest.approx(known, rel=0.01)
    assert lengths.expect("b", "t") == lengths.expect("never", "t")
    assert lengths.expect("c", "t") != lengths.expect("never", "t")


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="max_keys must be at least 1, got 0"):
        OutputLengths(max_keys=0)
    with pytest.raises(ValueError, match="output_tokens must not be negative, got -1"):
        OutputLengths().observe("m", "t", -1)
