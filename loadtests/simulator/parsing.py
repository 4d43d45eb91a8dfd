"""Values of options as people write them. ValueError names the option, what was wrong, what is accepted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

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


def link(name: str | None, option: str) -> Link | None:
    """By its name."""
    return None if name is None else LINKS[choice(name, option, list(LINKS))]


def scales(text: str | None) -> tuple[float, ...] | None:
    """One for each worker."""
    return None if text is None else tuple(number(part, "--worker-scales") for part in listed([text]))


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


def said(*given: Mapping[str, Any]) -> dict[str, Any]:
    """What was not left to its default, as JSON has it."""
    plain: dict[str, Any] = msgspec.to_builtins(
        {name: value for part in given for name, value in part.items() if value is not None}
    )
    return plain
