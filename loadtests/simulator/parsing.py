"""Values of options as people write them. ValueError names the option, what was wrong, what is accepted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isfinite

from kvroute.loadtests.simulator.setting import Failure
from kvroute.policies.costs.links import LINKS, Link
from kvroute.policies.costs.units import parse_seconds

_FAILURE = re.compile(r"([0-9]{1,6})@([^-]+)(?:-(.+))?", re.ASCII)


def listed(given: Sequence[str] | None) -> list[str]:
    """What was repeated, or written with commas."""
    return [part.strip() for text in given or () for part in text.split(",") if part.strip()]


def number(text: str, option: str) -> float:
    """A finite one."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ValueError(f"{option}: {text!r} is no number")
    return value


def link(name: str, option: str) -> Link:
    """By its name."""
    if name not in LINKS:
        raise ValueError(f"{option}: unknown {name!r}; known: {', '.join(LINKS)}")
    return LINKS[name]


def failure(text: str) -> Failure:
    """ "2@60s" or "2@60s-90s": the worker, counted from 0, when it dies and when it is back."""
    match = _FAILURE.fullmatch(text)
    if match is None:
        raise ValueError(f"--fail: {text!r} is not understood; worker@time or worker@time-time is expected")
    worker, at, back = match.groups()
    return Failure(
        int(worker),
        parse_seconds(at, "--fail", zero_ok=True),
        None if back is None else parse_seconds(back, "--fail"),
    )


def choice(text: str, option: str, known: Sequence[str]) -> str:
    """One of the known."""
    if text not in known:
        raise ValueError(f"{option}: unknown {text!r}; known: {', '.join(known)}")
    return text
