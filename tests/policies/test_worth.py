"""What a second of decoding counts, by hand."""

from __future__ import annotations

import pytest

from kvroute.policies.worth import EQUAL_RATIO, EXPONENT, FEW, PLACED, Worth


def worth_of(*placed: tuple[float, float]) -> Worth:
    """After requests with these seconds of prefill and of decoding."""
    worth = Worth()
    for prefill_s, decode_s in placed:
        worth.add(prefill_s, decode_s)
    return worth


def test_a_share_below_that_of_equal_worth_counts_less_by_the_exponent() -> None:
    """A hundredth: of all that is spent, decoding takes a hundred times as much."""
    assert worth_of(*[(0.02, 2.0)] * FEW).of_decoding == pytest.approx((0.01 / EQUAL_RATIO) ** EXPONENT)
    half = worth_of(*[(EQUAL_RATIO * 0.5, 1.0)] * FEW)
    assert half.of_decoding == pytest.approx(0.5**EXPONENT)


@pytest.mark.parametrize("times", [1.0, 1.01, 1000.0])
def test_it_never_counts_for_more_than_all(times: float) -> None:
    worth = worth_of(*[(EQUAL_RATIO * times, 1.0)] * FEW)
    assert worth.of_decoding == pytest.approx(1.0)
    assert worth.of_decoding <= 1.0


def test_until_a_few_were_placed_nothing_is_known() -> None:
    worth = Worth()
    for _ in range(FEW):
        assert worth.of_decoding == 1.0
        worth.add(0.001, 10.0)
    assert worth.of_decoding < 0.1


def test_where_nothing_is_decoded_it_counts_in_full() -> None:
    assert worth_of(*[(0.5, 0.0)] * FEW).of_decoding == 1.0
    assert worth_of(*[(0.0, 1.0)] * FEW).of_decoding == 0.0, "and not at all where all is cached"


def test_at_first_it_is_the_plain_mean() -> None:
    """Seconds are averaged, not ratios: prefills of 0.01 and 0.03 s over lives of 1 and 3 s, and so on."""
    placed = [(0.01 * (i % 4), 1.0 + i % 3) for i in range(PLACED)]
    mean_prefill_s, mean_decode_s = (sum(column) / PLACED for column in zip(*placed, strict=True))
    expected = (mean_prefill_s / mean_decode_s / EQUAL_RATIO) ** EXPONENT
    assert worth_of(*placed).of_decoding == pytest.approx(expected)


def test_later_ones_count_for_a_share_each_and_old_ones_fade() -> None:
    """After many alike, one with ten times their prefill moves the mean by 9 of it over the number."""
    many = [(0.01, 2.0)] * (3 * PLACED)
    moved = 0.01 * (1 + 9 / PLACED)
    expected = (moved / 2 / EQUAL_RATIO) ** EXPONENT
    assert worth_of(*many, (0.1, 2.0)).of_decoding == pytest.approx(expected)
    left = (1 - 1 / PLACED) ** PLACED  # of what was, when as many others have been placed
    expected = ((0.01 * left + 0.02 * (1 - left)) / 2 / EQUAL_RATIO) ** EXPONENT
    assert worth_of(*many, *[(0.02, 2.0)] * PLACED).of_decoding == pytest.approx(expected)
