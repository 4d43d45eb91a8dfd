from __future__ import annotations

import pytest

from kvroute.conductor.events.trust import LEAST, REASONS, WINDOW, Predictions, trust_of, usable_tokens
from kvroute.types import Trust


@pytest.mark.parametrize(
    ("matched", "prompt", "usable"),
    [(64, 100, 64), (64, 65, 64), (64, 64, 48), (64, 1, 0), (0, 50, 0), (16, 0, 0)],
)
def test_the_block_of_the_last_token_is_always_computed(matched: int, prompt: int, usable: int) -> None:
    assert usable_tokens(matched, 16, prompt) == usable


def test_a_full_match_that_loses_its_last_block_is_no_difference() -> None:
    predictions = Predictions()
    for _ in range(LEAST):
        predictions.observe(64, 48, 16, 64)
        predictions.observe(64, 63, 16, 80)
    assert (predictions.over, predictions.under, predictions.reasons) == (0, 0, ())


def test_promises_not_kept_cost_all_trust_until_later_ones_are() -> None:
    predictions = Predictions()
    for _ in range(LEAST - 1):
        predictions.observe(64, 0, 16, 100)
    assert predictions.reasons == ()
    predictions.observe(64, 0, 16, 100)
    assert predictions.reasons == ("overpredicted",)
    assert trust_of(predictions.reasons) is Trust.LOAD_ONLY
    for _ in range(WINDOW - LEAST + 1):
        predictions.observe(64, 64, 16, 100)
    assert predictions.reasons == ()
    assert predictions.over == LEAST


def test_hits_that_nobody_foresaw_make_it_approximate() -> None:
    predictions = Predictions()
    for _ in range(LEAST):
        predictions.observe(0, 64, 16, 100)
    assert predictions.reasons == ("underpredicted",)
    assert trust_of(predictions.reasons) is Trust.APPROXIMATE
    predictions.forget()
    assert predictions.reasons == ()


def test_a_window_without_a_difference_makes_good_for_what_was_missed() -> None:
    predictions = Predictions()
    for _ in range(WINDOW - 1):
        predictions.observe(64, 64, 16, 100)
    assert not predictions.agree
    predictions.observe(64, 64, 16, 100)
    assert predictions.agree
    predictions.observe(64, 80, 16, 100)
    assert not predictions.agree


def test_every_reason_lowers_trust() -> None:
    assert trust_of(()) is Trust.EXACT
    for reason in REASONS:
        expected = Trust.LOAD_ONLY if reason in ("restored", "overpredicted") else Trust.APPROXIMATE
        assert trust_of((reason,)) is expected
    assert trust_of(("incomplete", "restored")) is Trust.LOAD_ONLY
