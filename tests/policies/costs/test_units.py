"""Quantities with units: exact values, and an error that says what was wrong."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs.units import (
    MAX_BYTES,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("40GiB", 40 * 2**30),
        ("40GB", 40 * 10**9),
        ("64KiB", 65536),
        ("64kB", 64000),
        ("64KB", 64000),
        ("1.5TB", 1_500_000_000_000),
        ("0.1GiB", 107_374_182),
        (" 40 GiB ", 40 * 2**30),
        ("1B", 1),
        ("42949672960", 42949672960),
        ("8192PiB", MAX_BYTES),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text, "x") == size_bytes


def test_a_wire_of_200_gigabits_is_25_gigabytes_is_23_28_gibibytes() -> None:
    assert parse_bandwidth("200Gbps", "x") == 25e9
    assert parse_bandwidth("200Gb/s", "x") == parse_bandwidth("200Gbit/s", "x") == 25e9
    assert parse_bandwidth("25GB/s", "x") == 25e9
    assert round(parse_bandwidth("200Gbps", "x") / 2**30, 2) == 23.28
    assert parse_bandwidth("20GiB/s", "x") == 20 * 2**30


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("50ms", 0.05), ("2s", 2.0), ("10us", 1e-5), ("10µs", 1e-5), ("1.5min", 90.0), ("1h", 3600.0)],
)
def test_times(text: str, time_s: float) -> None:
    assert parse_seconds(text, "x") == pytest.approx(time_s, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "nothing given"),
        ("  ", "nothing given"),
        ("0", "is zero"),
        ("0GiB", "is zero"),
        ("-1GiB", "is negative"),
        ("0.4B", "less than one byte"),
        ("nan", "not a number with a unit"),
        ("inf", "not a number with a unit"),
        ("1e9", "not a number with a unit"),
        ("1_000", "not a number with a unit"),
        ("0x10", "not a number with a unit"),
        ("٤٠GiB", "not a number with a unit"),
        ("GiB", "not a number with a unit"),
        ("40Gib", "case counts: GiB"),
        ("40gb", "case counts: GB"),
        ("40Gb", "case counts: GB"),
        ("40G", "'G' is not known"),
        ("40GB/s", "'GB/s' is not known"),
        ("9000PiB", "more than 8 EiB"),
        ("1" * 100, "longer than 40 characters"),
    ],
)
def test_a_wrong_size_is_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match="--kv-memory: ") as error:
        parse_bytes(text, "--kv-memory")
    assert problem in str(error.value)
    assert "40GiB" in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("200", "unit is missing"),
        ("200GB", "'GB' is not known"),
        ("0Gbps", "is zero"),
        ("-1GB/s", "negative"),
    ],
)
def test_a_wrong_bandwidth_is_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        parse_bandwidth(text, "--bandwidth")
    assert "such as 200Gbps, 25GB/s or 20GiB/s" in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"), [("5", "unit is missing"), ("0s", "is zero"), ("5S", "case counts")]
)
def test_a_wrong_time_is_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        parse_seconds(text, "--queue")
    assert "such as 50ms, 2s or 10us" in str(error.value)


def test_zero_only_where_it_means_something() -> None:
    assert parse_bytes("0", "x", zero_ok=True) == 0
    assert parse_seconds("0ms", "x", zero_ok=True) == 0
    assert parse_seconds("0", "x", zero_ok=True) == 0
    with pytest.raises(ValueError, match="unit is missing"):
        parse_seconds("5", "x", zero_ok=True)


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (131072, "128 KiB"),
        (2**30, "1 GiB"),
        (25e9, "23.28 GiB"),
        (100, "100 B"),
    ],
)
def test_bytes_are_shown_with_the_prefix_they_fill(size_bytes: float, shown: str) -> None:
    assert format_bytes(size_bytes) == shown


@pytest.mark.parametrize(
    ("time_s", "shown"), [(0.05, "50 ms"), (2, "2 s"), (0.0007, "700 us"), (0, "0 us"), (1.5, "1.5 s")]
)
def test_seconds_are_shown_in_the_unit_they_fill(time_s: float, shown: str) -> None:
    assert format_seconds(time_s) == shown


@given(st.integers(1, MAX_BYTES))
def test_a_size_shown_reads_back_within_its_two_decimals(size_bytes: int) -> None:
    # A size that is read is rounded down to a byte.
    assert parse_bytes(format_bytes(size_bytes), "x") == pytest.approx(size_bytes, abs=1 + size_bytes * 0.005)


@given(st.text(max_size=50))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 1 <= parse_bytes(text, "x") <= MAX_BYTES
