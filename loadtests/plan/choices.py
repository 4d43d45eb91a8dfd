"""What several plans ask of their options: a preset, a link, lists of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from kvroute.policies.costs.links import LINKS, Link, Overlap
from kvroute.policies.costs.speeds import Speed
from kvroute.policies.costs.units import parse_bandwidth, parse_bytes, parse_seconds
from kvroute.preset_file import load_speed

MAX_TOKENS = 10_000_000
MAX_VALUES = 32
T = TypeVar("T")


def known(option: str, name: str, choices: Mapping[str, T]) -> T:
    """The choice of that name. ValueError lists the known ones."""
    if name not in choices:
        raise ValueError(f"{option}: {name[:80]!r} is unknown; one of {', '.join(choices)} is expected")
    return choices[name]


def speed_of(preset: str, bytes_per_token: str | None = None) -> Speed:
    """A preset by name or file, with another size of KV if `bytes_per_token` ("128KiB") says so."""
    try:
        speed = load_speed(preset)
    except ValueError as error:
        raise ValueError(f"--preset: {error}") from None
    if bytes_per_token is None:
        return speed
    return replace(speed, kv_bytes_per_token=parse_bytes(bytes_per_token, "--bytes-per-token"))


def link_of(name: str, bandwidth: str | None, latency: str | None) -> tuple[str, Link]:
    """A named link, with what of it is given instead; its name says so."""
    link = known("--link", name, LINKS)
    if bandwidth is not None:
        link, name = replace(link, bytes_per_s=parse_bandwidth(bandwidth, "--bandwidth")), bandwidth
    if latency is not None:
        link = replace(link, latency_s=parse_seconds(latency, "--latency", zero_ok=True))
    return name, link


def optional_bandwidth(option: str, text: str | None) -> float | None:
    """Bytes/s, or None if not given."""
    return None if text is None else parse_bandwidth(text, option)


def overlap_of(name: str) -> Overlap:
    return known("--overlap", name, {each.value: each for each in Overlap})


def whole_number(option: str, value: int, least: int = 1, most: int = MAX_TOKENS) -> int:
    if not least <= value <= most:
        raise ValueError(f"{option}: {value} is not usable; {least} to {most} is expected")
    return value


def rate_of(option: str, value: float) -> float:
    """A rate above 0, per second."""
    if not 0 < value <= 1e9:
        raise ValueError(f"{option}: {value:g} is not usable; a number above 0, per second, is expected")
    return value


def numbers(option: str, text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """A comma-separated list, each value once, in its order. ValueError if one of them is none."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_VALUES:
        raise ValueError(f"{option}: {len(parts)} values; at most {MAX_VALUES} are expected")
    try:
        return tuple(dict.fromkeys(read(part) for part in parts))
    except ValueError:
        raise ValueError(f"{option}: {text[:80]!r} is no list of numbers separated by commas") from None


def token_counts(option: str, text: str) -> tuple[int, ...]:
    """ "1024,8192", each from 1 to MAX_TOKENS."""
    return tuple(whole_number(option, value) for value in numbers(option, text, int))


def finite(value: float) -> float | None:
    """For JSON: None stands for "no such number"."""
    return value if math.isfinite(value) else None


def show_bandwidth(bytes_per_s: float) -> str:
    """In decimal gigabytes, as links are sold: "25 GB/s"."""
    return f"{bytes_per_s / 1e9:.4g} GB/s"
