"""The connection to Redis: bounded calls, why they fail, and whether it is there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from enum import StrEnum
from typing import Any, TypeVar

import redis.asyncio
import structlog
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvroute.conductor.shared.options import SharedOptions
from kvroute.conductor.shared.stats import Lost, SharedStats

log = structlog.get_logger(__name__)

CONNECTIONS = 3
"""One reads the streams, one writes, one moves snapshots."""
KEY_ERRORS = ("WRONGTYPE", "ID specified in XADD", "stream has exhausted")
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 2.0
T = TypeVar("T")


class Direction(StrEnum):
    READ = "read"
    WRITE = "write"


def connect(options: SharedOptions) -> redis.asyncio.Redis:
    """A client that retries nothing by itself: a repeated call could hold its caller for many timeouts."""
    given: dict[str, Any] = {} if options.password is None else {"password": options.password}
    return redis.asyncio.Redis.from_url(
        options.url,
        # Replies of one shape in every release of the library; nothing here needs version 3.
        protocol=2,
        socket_connect_timeout=options.timeout_s,
        socket_timeout=None,
        retry=Retry(NoBackoff(), 0),
        max_connections=CONNECTIONS,
        **given,
    )


def why_lost(error: Exception) -> Lost:
    """The class of a failed call."""
    if isinstance(error, TimeoutError | exceptions.TimeoutError):
        return Lost.TIMEOUT
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return Lost.AUTH
    if isinstance(error, exceptions.ResponseError | exceptions.BusyLoadingError | exceptions.ReadOnlyError):
        return Lost.ERROR_REPLY
    if isinstance(error, exceptions.ConnectionError | OSError):
        return Lost.UNREACHABLE
    return Lost.PROTOCOL


def is_of_the_key(error: Exception) -> bool:
    """An error reply that says something of one key and nothing of the server."""
    return isinstance(error, exceptions.ResponseError) and any(text in str(error) for text in KEY_ERRORS)


class Link:
    """Whether both directions work; says once, aloud, when that changes."""

    def __init__(self, options: SharedOptions, stats: SharedStats) -> None:
        self._options = options
        self._stats = stats
        self._working: set[Direction] = set()
        self._told: bool | None = None
        self.losses = 0
        """Counter: failed calls of either direction. After one, the server may have forgotten everything."""
        self.up = asyncio.Event()
        """Set while both directions work."""

    async def call(self, call: Awaitable[T], extra_s: float = 0.0) -> T:
        """Await one call within its time; a call that is cut off also loses its connection."""
        async with asyncio.timeout(self._options.timeout_s + extra_s):
            return await call

    def works(self, direction: Direction) -> None:
        self._working.add(direction)
        if len(self._working) == len(Direction) and not self._stats.connected:
            self._stats.connected = self._told = True
            self._stats.connects += 1
            self.up.set()
            log.info("shared state connected", url=self._options.shown_url)

    def fails(self, direction: Direction, error: Exception) -> None:
        reason = why_lost(error)
        self._stats.lost[reason] += 1
        self.losses += 1
        self._working.discard(direction)
        self._stats.disconnects += self._stats.connected
        self._stats.connected = False
        self.up.clear()
        if self._told is not False:
            self._told = False
            log.error(
                "shared state lost, on local knowledge now",
                url=self._options.shown_url,
                direction=direction.value,
                reason=reason.value,
                error=f"{type(error).__name__}: {error}"[:300],
            )

    def closed(self) -> None:
        """Not a loss: the gateway stops."""
        self._working.clear()
        self._stats.connected = False


class Backoff:
    """Pauses that double, with jitter, so that replicas do not return all at once."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def reset(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    async def pause(self) -> None:
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
