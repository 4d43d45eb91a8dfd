"""Real sockets in virtual time: a loop whose clock jumps to the next timer when no socket has anything.

Both ends must be on the loop. Other load on the machine changes nothing then, and no wait takes time.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
GRACE_S = 0.0002
"""Real seconds in which what one end has written reaches the other."""

GATEWAY = tuple(
    f"kvroute.router.{name}"
    for name in (
        "client",
        "control",
        "exchange",
        "explain",
        "gateway",
        "health",
        "pool",
        "probe",
        "request_parser",
        "server",
        "services",
        "sweeper",
        "token_source",
        "upstream",
    )
)
"""Modules that tell the time in a gateway."""


class _Selector(selectors.DefaultSelector):
    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        time.sleep(GRACE_S)  # epoll waits in whole milliseconds
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            return super().select(None)
        self.now_s += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now_s


def run_virtually(main: Coroutine[Any, Any, T], monkeypatch: pytest.MonkeyPatch, *modules: str) -> T:
    """Run on a loop of its own; `monotonic` of these modules is its clock."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        for module in modules:
            monkeypatch.setattr(f"{module}.monotonic", runner.get_loop().time)
        return runner.run(main)
