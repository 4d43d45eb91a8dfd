"""Quantities as people write them ("40GiB", "200Gbps", "50ms") and back.

Decimal and binary prefixes differ (1 GB = 10^9 bytes, 1 GiB = 2^30), and so do bits and bytes: "200Gbps" is
25 GB/s is 23.28 GiB/s. Case is meant: "Gb" is bits, "GB" bytes, so "gb" says nothing and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES = {"": 1, "K": 10**3, **_DECIMAL, **_BINARY}

_SIZES: dict[str, Fraction] = {f"{prefix}B": Fraction(n) for prefix, n in _PREFIXES.items()}
_BANDWIDTHS: dict[str, Fraction] = {f"{unit}/s": n for unit, n in _SIZES.items()}
for _prefix, _n in _PREFIXES.items():
    _bits = {f"{_prefix}{bit}": Fraction(_n, 8) for bit in ("bps", "b/s", "bit/s")}
    _BANDWIDTHS.update(_bits)
_SECONDS: dict[str, Fraction] = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}

_QUANTITY = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) ?([A-Za-zµ/]*)", re.ASCII)
_MAX_CHARS = 40
MAX_BYTES = 2**63

_SIZES_WANTED = "a size above 0 with a unit is expected, such as 40GiB, 40GB or 64KiB (or a number of bytes)"
_BANDWIDTHS_WANTED = "a bandwidth above 0 with a unit is expected, such as 200Gbps, 25GB/s or 20GiB/s"
_SECONDS_WANTED = "a time with a unit is expected, such as 50ms, 2s or 10us"


def parse_bytes(text: str, field: str, *, zero_ok: bool = False) -> int:
    """Bytes, rounded down; a bare number is bytes. ValueError says `field`, what was wrong and expected."""
    size = int(_parse(text, field, {**_SIZES, "": Fraction(1)}, _SIZES_WANTED, zero_ok))
    if size < 1 and not zero_ok:
        raise ValueError(f"{field}: {text!r} is less than one byte; {_SIZES_WANTED}")
    if size > MAX_BYTES:
        raise ValueError(f"{field}: {text!r} is more than 8 EiB; {_SIZES_WANTED}")
    return size


def parse_bandwidth(text: str, field: str) -> float:
    """Bytes per second, above 0. A bare number is refused: it could be bits or bytes."""
    return float(_parse(text, field, _BANDWIDTHS, _BANDWIDTHS_WANTED, False))


def parse_seconds(text: str, field: str, *, zero_ok: bool = False) -> float:
    """Seconds. A bare number is refused (it could be milliseconds), except 0 where `zero_ok`."""
    units = {**_SECONDS, "": Fraction(0)} if zero_ok and text.strip() == "0" else _SECONDS
    return float(_parse(text, field, units, _SECONDS_WANTED, zero_ok))


def _parse(text: str, field: str, units: Mapping[str, Fraction], wanted: str, zero_ok: bool) -> Fraction:
    given = text.strip()
    if not given:
        raise ValueError(f"{field}: nothing given; {wanted}")
    if len(given) > _MAX_CHARS:
        raise ValueError(
            f"{field}: {given[:_MAX_CHARS]!r}... is longer than {_MAX_CHARS} characters; {wanted}"
        )
    match = _QUANTITY.fullmatch(given)
    if match is None:
        raise ValueError(f"{field}: {given!r} is not a number with a unit; {wanted}")
    number, unit = Fraction(match[1]), match[2]
    if unit not in units:
        raise ValueError(f"{field}: {given!r}: {_wrong_unit(unit, units)}; {wanted}")
    if number < 0:
        raise ValueError(f"{field}: {given!r} is negative; {wanted}")
    if number == 0 and not zero_ok:
        raise ValueError(f"{field}: {given!r} is zero; {wanted}")
    return number * units[unit]


def _wrong_unit(unit: str, units: Mapping[str, Fraction]) -> str:
    if not unit:
        return "the unit is missing"
    alike = [known for known in units if known.lower() == unit.lower()]
    if alike:
        return f"the unit {unit!r} is not known (case counts: {' or '.join(alike)})"
    return f"the unit {unit!r} is not known here"


def format_bytes(size_bytes: float) -> str:
    """With the largest binary prefix it fills: 131072 -> "128 KiB"; at most two decimals."""
    for prefix, unit_bytes in reversed(_BINARY.items()):
        if abs(size_bytes) >= unit_bytes:
            return f"{_short(size_bytes / unit_bytes)} {prefix}B"
    return f"{_short(size_bytes)} B"


def format_seconds(time_s: float) -> str:
    """In the largest of s, ms and us that it fills: 0.05 -> "50 ms"; at most two decimals."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(time_s) * factor >= 1:
            return f"{_short(time_s * factor)} {unit}"
    return f"{_short(time_s * 1e6)} us"


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
